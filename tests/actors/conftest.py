"""One small tier for all tests of this folder; and the proof that nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from hicache_ray.actors import cluster
from hicache_ray.config_sources import load
from tests.actors.rig import Tier, ray_folders, shared_memory, small, tenants


@pytest.fixture(scope="session")
def tier() -> Iterator[Tier]:
    config = load(flags=small() | tenants()).config
    others = set(psutil.Process().children())  # of other tests in this run, such as a tracker that multiprocessing keeps
    running = cluster.start(config)
    mine = [child for child in psutil.Process().children() if child not in others]
    try:
        yield Tier(running)
    finally:
        processes = [p for top in mine if top.is_running() for p in (top, *top.children(recursive=True))]
        folders = ray_folders(processes)
        running.stop()
    assert folders
    assert [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert [f for f in folders if f.exists()] == []
    assert shared_memory(config.storage.name) == []
