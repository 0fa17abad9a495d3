"""The memory that the disk store reads and writes through: huge pages where there are some, never shared with a child."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage import DiskConfig, disk_memory, disk_work
from hicache_ray.storage.disk_memory import staging_memory
from hicache_ray.storage.disk_work import Workers
from hicache_ray.storage.segment import HUGE
from tests.storage.disks import BLOCK, CountingOs, OpenDisk
from tests.storage.objects import TIMEOUT_S, name, page

_UNKNOWN_ADVICE = 999
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
needs_huge_pages = pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"), reason="this kernel has no transparent huge pages"
)


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def flags(at: int) -> list[str]:
    """What the kernel says of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _RANGE.match(line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("there is no such mapping")


def in_a_child(memory: memoryview) -> int:
    """The first byte, as a child that is forked now sees it."""
    child = os.fork()
    if not child:
        os._exit(memory[0])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_huge_pages
@pytest.mark.parametrize("size", [HUGE, 2 * HUGE, HUGE + BLOCK])
def test_whole_huge_pages_are_asked_for_and_a_child_gets_none_of_them(size: int) -> None:
    memory = staging_memory(size)
    assert len(memory) == size
    assert address(memory) % HUGE == 0
    for at in (0, size // HUGE * HUGE - 1):
        assert {"hg", "wf"} <= set(flags(address(memory) + at)), "huge pages, wiped on fork"
    if size % HUGE:
        assert "hg" not in flags(address(memory) + size - 1), "a huge page for one block would waste the rest of it"
    assert bytes(memory) == bytes(size)
    memory[:] = b"\x07" * size
    assert in_a_child(memory) == 0
    assert bytes(memory) == b"\x07" * size


def test_less_than_a_huge_page_is_shared_with_a_child() -> None:
    memory = staging_memory(HUGE - BLOCK)
    assert len(memory) == HUGE - BLOCK
    assert address(memory) % mmap.PAGESIZE == 0
    assert "sh" in flags(address(memory))
    memory[0] = 7
    assert in_a_child(memory) == 7


def test_a_kernel_that_cannot_keep_it_from_a_child_gives_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_memory, "MADV_WIPEONFORK", _UNKNOWN_ADVICE)
    memory = staging_memory(HUGE)
    assert len(memory) == HUGE
    assert "sh" in flags(address(memory)), "private memory of which a child has a copy loses what is read while it forks"
    memory[0] = 7
    assert in_a_child(memory) == 7


@pytest.mark.parametrize("advice", ["known", "unknown"])
def test_reads_are_one_mebibyte_long_at_most_and_right_from_either_memory(
    tmp_path: Path, disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, advice: str
) -> None:
    if advice == "unknown":
        monkeypatch.setattr(disk_memory, "MADV_WIPEONFORK", _UNKNOWN_ADVICE)
    reads: list[int] = []

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pread" and arguments[2]:
            reads.append(len(arguments[1]))

    store = disk(DiskConfig(str(tmp_path), 64 << 20, segment_bytes=8 << 20, io_threads=3), os_port=CountingOs(strike))
    for sizes, wanted in (
        ([1 << 20] * 5, [1 << 20] * 5),
        ([64 << 10] * 40, [512 << 10, 1 << 20, 1 << 20]),  # 16 neighbours in one go
        ([1_400_000], [1_400_832]),  # fits into staging, so it is read whole
        ([5 << 20], [1 << 20, 2 << 20, 2 << 20]),  # longer than staging
    ):
        numbers = [len(sizes) * 100 + i for i in range(len(sizes))]
        pages = [page(n, size) for n, size in zip(numbers, sizes, strict=True)]
        ids = [name(n) for n in numbers]
        assert store.put(ids, pages, TIMEOUT_S) == (1 << len(ids)) - 1
        targets = [np.zeros(size, np.uint8) for size in sizes]
        reads.clear()
        assert store.get(ids, targets, TIMEOUT_S) == (1 << len(ids)) - 1
        assert sorted(reads) == wanted
        assert all((a == b).all() for a, b in zip(pages, targets, strict=True))
        store.damage(ids[-1])
        assert store.get(ids, targets, TIMEOUT_S) == (1 << (len(ids) - 1)) - 1
        assert store.drop(ids, TIMEOUT_S) == (1 << (len(ids) - 1)) - 1
    assert store.stats(TIMEOUT_S).checksum_failures == 4
    store.close()


def test_threads_without_memory_let_a_batch_go_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    workers, gone = Workers(2, BLOCK), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(disk_work, "staging_memory", none)
        with pytest.raises(StoreTimeout, match="no memory"):
            workers.run([lambda staging, batch: None] * 3, time.monotonic() + TIMEOUT_S, gone.set)
        assert gone.is_set()
    assert workers.run([lambda staging, batch: None] * 3, time.monotonic() + TIMEOUT_S) == [None] * 3
    assert workers.close(TIMEOUT_S)
