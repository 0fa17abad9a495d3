"""A rank whose copies are wrong does not join. The shell itself, in this process; the way is that of any rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.actors.rank import RankSetup, RankShell
from hicache_ray.actors.setup import capacities
from hicache_ray.config import Config
from hicache_ray.copies import Backend, Mover, move_with_numpy
from hicache_ray.errors import LayoutBroken
from hicache_ray.families import spec_from_config
from hicache_ray.integrations.transformers import leave, make_weights, read_config
from hicache_ray.layout import ORDERS

pytestmark = pytest.mark.model


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[RankSetup]:
    config = Config.model_validate({"model": {"size": "tiny"}, "cache": {"device_tokens": 1024}, "engine": {"max_prompt_tokens": 512}})
    folder = make_weights("qwen3_5", tmp_path)
    capacity = capacities(config, spec_from_config(read_config(folder), config.cache.page_size))
    yield RankSetup(config, 0, str(folder), capacity, "")
    leave()


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_sound_rank_joins(setup: RankSetup, caplog: pytest.LogCaptureFixture) -> None:
    shell = RankShell(setup)
    shell.load()
    joined = shell.join(port(), 1, {})
    assert joined.pid == os.getpid()
    assert not joined.attached
    assert "rank 0: the self-test left storage out: it is not attached" in caplog.text


def test_a_rank_with_a_broken_io_backend_is_refused(setup: RankSetup) -> None:
    def broken(source: Any, target: Any, size: Any, loops: Any, stream: bool, begin: int, end: int) -> None:
        """Every page goes where another belongs."""
        move_with_numpy(np.roll(source, 1), target, size, loops, stream, begin, end)

    def load() -> tuple[Any, str]:
        return broken, ""

    shell = RankShell(setup)
    shell.load()
    shell.mover.close()
    shell.mover = Mover(Backend("direct", "cpu", tuple(ORDERS), load))
    with pytest.raises(LayoutBroken, match="do not survive the way from the device to the host: the axis page is wrong"):
        shell.join(port(), 1, {})
    assert shell.incarnation == 0
