"""T061: the index survives: 10 pages on disk, kill -9, a new process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.storage import DiskConfig, DiskStore, FaultyStore
from hicache_ray.store import TAG_BYTES
from hicache_ray.testing import Served, Stack, full

PAGE = 16 << 10
TAG = b"t" * TAG_BYTES
WRITER = """
import os, signal, sys
from hicache_ray.storage import DiskStore
from tests.cases.test_t061_the_index_survives import config, ids, page
store = DiskStore(config(sys.argv[1], sys.argv[2]))
assert store.put(ids(10), [page(n) for n in range(10)], 10.0) == 0x3FF
os.kill(os.getpid(), signal.SIGKILL)
"""


def config(directory: str, fsync: str) -> DiskConfig:
    return DiskConfig(directory, 4 << 20, fsync=fsync)


def keys(count: int) -> list[bytes]:
    return [bytes([1] * 16) + number.to_bytes(32, "big") for number in range(count)]


def ids(count: int) -> list[bytes]:
    return [key + TAG for key in keys(count)]


def page(number: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)


@pytest.mark.parametrize("fsync", ["never", "batch"])
def test_t061_the_index_survives(tmp_path: Path, fsync: str) -> None:
    writer = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), fsync], capture_output=True, text=True, check=False)
    assert writer.returncode == -signal.SIGKILL, writer.stderr
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")}
    assert before

    store = DiskStore(config(str(tmp_path), fsync))
    assert store.lookup(keys(11), [TAG], 10.0)[TAG].hit == 0x3FF
    targets = [np.zeros(PAGE, np.uint8) for _ in range(11)]
    assert store.get(ids(11), targets, 10.0) == 0x3FF
    assert all((target == page(number)).all() for number, target in enumerate(targets[:10]))
    assert (store.stats(10.0).objects, store.stats(10.0).used_bytes) == (10, 10 * PAGE)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")} == before
    store.check()
    store.close()


PROMPT = list(range(1, 11 * 64 + 2))  # of 11 pages
#: A cache group that has stored the first ten of them.
GROUP = """
import os, signal, sys
from tests.cases.test_t061_the_index_survives import PROMPT, stack
group, _ = stack(sys.argv[1])
group.put(PROMPT[: 10 * 64])
group.settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


def stack(directory: str) -> tuple[Stack, DiskStore]:
    disk = DiskStore(config(directory, "never"))
    return Stack(page=64, pools={"full": full()}, store=FaultyStore(disk)), disk


def test_t061_a_prompt_of_11_pages_finds_ten(tmp_path: Path) -> None:
    writer = subprocess.run([sys.executable, "-c", GROUP, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert writer.returncode == -signal.SIGKILL, writer.stderr
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")}
    assert before

    reader, disk = stack(str(tmp_path))
    assert (reader.probe(PROMPT).l3, reader.have("l3", "full", PROMPT)) == (640, set(range(10)))
    reader.prefetch("r", PROMPT)
    assert reader.load("r") == 640
    assert reader.read(PROMPT[:641], "full") == reader.made(PROMPT[:641], "full") != b""
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")} == before
    assert reader.put(PROMPT) == Served(640, 0, 0, 65)
    reader.settle()
    assert reader.have("l3", "full", PROMPT) == set(range(11))
    reader.audit()
    disk.check()
    disk.close()
