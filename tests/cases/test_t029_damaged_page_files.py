"""T029: damaged page files: 5 pages on disk, each in a file of its own; the one of page 2 is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ray.storage import DiskConfig, DiskStore, FaultyStore
from hicache_ray.storage.disk_format import Geometry, slot_size
from hicache_ray.testing import FakeClock, Stack, full

PROMPT = list(range(1, 322))


def empty(path: Path, shape: Geometry) -> None:
    os.truncate(path, 0)


def cut(path: Path, shape: Geometry) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_page(path: Path, shape: Geometry) -> None:
    os.truncate(path, shape.at(0) + shape.slot_bytes // 2)


def longer(path: Path, shape: Geometry) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def flipped(path: Path, shape: Geometry) -> None:
    with open(path, "r+b") as file:
        file.seek(shape.at(0) + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("damage", [empty, cut, cut_page, longer, flipped])
def test_t029_damaged_page_files(tmp_path: Path, damage: Callable[[Path, Geometry], None], restart: bool) -> None:
    """Without a restart a byte behind the end of a file changes nothing: the object is read where it lies, and fits."""
    clock = FakeClock()
    slot = slot_size(full().page_bytes(64))
    config = DiskConfig(str(tmp_path), 1 << 20, segment_bytes=slot, fsync="never", io_threads=2)
    disk = DiskStore(config, clock)
    store = FaultyStore(disk, wait=clock.advance)
    stack = Stack(page=64, pools={"full": full()}, store=store, clock=clock)
    stack.put(PROMPT)
    stack.settle()
    stack.flush()
    files = sorted(tmp_path.glob("*.seg"))
    assert len(files) == 5
    if restart:
        disk.close()
    damage(files[2], Geometry(slot, 1))
    if restart:
        disk = DiskStore(config, clock)
        store.inner = disk
    whole = damage is longer and not restart

    stack.prefetch("r", PROMPT)
    stack.settle()
    assert stack.poll("r").tokens == (320 if whole else 128)
    assert stack.errors == {}
    stack.load("r")
    assert stack.have("l3", "full", PROMPT) == ({0, 1, 2, 3, 4} if whole else {0, 1, 3, 4})
    assert stack.read(PROMPT[:128], "full") == stack.made(PROMPT[:128], "full")
    stack.audit()
    disk.check()
    disk.close()
