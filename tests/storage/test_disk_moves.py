"""Room that lies thinly in one size class goes to another: what is in it moves together, and nothing of it is lost at any moment."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage import DiskStore
from tests.storage.disks import BLOCK, CountingOs, FailingOs, OpenDisk, PowerOs, get, half, no_memory, put, size_of, small, sound, visible
from tests.storage.objects import TIMEOUT_S, name, page

KEPT = [0, 24, 48, 72, 96, 120]  # the first object of each segment, each of one block
NEW = [1, 4, 7, 10]  # a segment of objects of two blocks
ROOM = (6 * 15 + 1) * BLOCK  # the lock takes a block


def thin(store: DiskStore) -> None:
    """Six segments that are all there is room for, one object in each."""
    for first in range(0, 144, 24):
        put(store, list(range(first, first + 24, 3)))
    assert len(store._index.segments()) == 6
    store.drop([name(n) for n in range(0, 144, 3) if n not in KEPT], TIMEOUT_S)
    assert visible(store) == KEPT


def test_a_thin_segment_is_emptied_for_another_class(tmp_path: Path, disk: OpenDisk) -> None:
    """Segment by segment, until all of the first class lies in one; then, and only then, something is evicted."""
    port = CountingOs()
    store = disk(small(tmp_path, size_bytes=ROOM), os_port=port)
    thin(store)
    for i in range(5):
        before, calls = store.stats(TIMEOUT_S), port.calls.copy()
        numbers = [n + 12 * i for n in NEW]
        assert put(store, numbers) == set(numbers)
        assert port.calls["unlink"] - calls["unlink"] == 1
        assert port.calls["pread"] - calls["pread"] == 1  # one object moved, no more
        after = store.stats(TIMEOUT_S)
        assert (after.puts - before.puts, after.gets - before.gets, after.evictions, after.leases) == (4, 0, 0, 0)
        sound(store)
    assert visible(store) == sorted(KEPT + [n + 12 * i for n in NEW for i in range(5)])
    assert put(store, [61]) == {61}
    assert store.stats(TIMEOUT_S).evictions == 1
    there = visible(store)
    store.close()
    store = disk(small(tmp_path, size_bytes=ROOM))
    assert visible(store) == there
    sound(store)


def test_what_moves_is_as_old_as_it_was(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path, size_bytes=ROOM))
    thin(store)
    for n in (120, 0, 24, 48, 72, 96):  # from the oldest to the newest
        get(store, [n])
    for i in range(5):
        put(store, [n + 12 * i for n in NEW])
    put(store, [3, 6])  # in the two slots that are free in the segment of six
    for i, oldest in enumerate((120, 0, 24)):
        get(store, [n + 12 * k for n in NEW for k in range(5)])  # so that the other class is not older
        put(store, [9 + 3 * i])
        assert oldest not in visible(store)
    sound(store)


@pytest.mark.parametrize("fsync", ["never", "batch"])
def test_a_loss_at_any_moment_of_a_move_loses_nothing(memory: Path, disk: OpenDisk, fsync: str) -> None:
    """Of the process (never), in the middle of any write too, or of the power (batch)."""
    live, chance, moments = memory / "live", random.Random(4), []
    live.mkdir()
    armed = threading.Event()

    class Moments(PowerOs):
        def __getattribute__(self, call: str) -> Any:
            found = super().__getattribute__(call)
            if call not in ("pwrite", "pread", "unlink", "fallocate", "fdatasync") or not armed.is_set():
                return found

            def copied(*arguments: Any) -> Any:
                armed.clear()  # what a copy asks of the disk is none of the store's calls
                self._copy()
                if call == "pwrite" and fsync == "never":
                    half(arguments)
                    self._copy()
                armed.set()
                return found(*arguments)

            return copied

        def _copy(self) -> None:
            into = memory / str(len(moments))
            into.mkdir()
            if fsync == "never":
                shutil.copytree(live, into, dirs_exist_ok=True)
            else:
                self.lose(live, into, chance)
            moments.append(into)

    store = disk(small(live, size_bytes=ROOM, fsync=fsync, direct="off"), os_port=Moments())
    thin(store)
    armed.set()
    assert put(store, NEW) == set(NEW)
    armed.clear()
    assert len(moments) >= 6
    for at in moments:
        lost = disk(small(at, size_bytes=ROOM, fsync=fsync))
        assert set(visible(lost)) >= set(KEPT)
        if fsync == "never":
            sound(lost)
        assert get(lost, KEPT) == set(KEPT)
        lost.check()
        lost.close()
        shutil.rmtree(at)


@pytest.mark.parametrize("ask", ["drop", "clear"])
def test_what_is_dropped_while_it_moves_stays_away(tmp_path: Path, disk: OpenDisk, ask: str) -> None:
    asked = threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pread" and armed.is_set() and not asked.is_set():
            asked.set()
            key, tag = name(KEPT[0])[:48], name(KEPT[0])[48:]
            answer = store.lookup([key], [tag], TIMEOUT_S)[tag]
            assert (answer.hit, answer.pending) == (1, 0)
            if ask == "drop":
                assert store.drop([name(n) for n in KEPT], TIMEOUT_S) == 0b111111
            else:
                assert store.clear(TIMEOUT_S) == 6

    armed = threading.Event()
    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    thin(store)
    armed.set()
    assert put(store, NEW) == set(NEW)
    assert asked.is_set()
    assert visible(store) == NEW
    sound(store)
    copy = tmp_path.with_name(f"{tmp_path.name}-lost")
    shutil.copytree(tmp_path, copy)
    assert visible(disk(small(copy, size_bytes=ROOM))) == NEW


def test_what_cannot_be_read_does_not_move_and_does_not_stop_a_put(tmp_path: Path, disk: OpenDisk) -> None:
    armed = threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pread" and armed.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = disk(small(tmp_path, size_bytes=ROOM), os_port=CountingOs(strike))
    thin(store)
    armed.set()
    assert put(store, NEW) == set(NEW)  # at the price of an eviction
    assert store.stats(TIMEOUT_S).writes_off == ""
    armed.clear()
    assert set(visible(store)) == {*KEPT, *NEW} - {0}
    sound(store)
    assert store.damage(name(KEPT[1]))
    put(store, [n + 12 for n in NEW])
    assert set(visible(store)) == {*KEPT, *NEW, *(n + 12 for n in NEW)} - set(KEPT[:2])
    assert store.stats(TIMEOUT_S).checksum_failures == 1
    sound(store)


def test_a_move_for_which_there_is_no_memory_leaves_all_as_it_was(
    tmp_path: Path, disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk(small(tmp_path, size_bytes=ROOM))
    thin(store)
    wide = page(1, size_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", no_memory)
        with pytest.raises(StoreError, match="no memory"):
            store.put([name(1)], [wide], TIMEOUT_S)
    assert visible(store) == KEPT
    sound(store)
    assert put(store, NEW) == set(NEW)
    assert visible(store) == sorted(KEPT + NEW)
    sound(store)


def test_every_call_of_a_move_fails_once(memory: Path, disk: OpenDisk) -> None:
    struck, nth = set(), 0
    while True:
        nth += 1
        port = FailingOs(0)
        directory = memory / str(nth)
        directory.mkdir()
        store = disk(small(directory, size_bytes=ROOM), os_port=port)
        thin(store)
        port.fail(port.calls.total() + nth)
        seen = put(store, NEW)
        port.fail(0)
        assert seen == set(NEW) or port.struck
        assert set(visible(store)) == {*KEPT, *seen} or port.struck == "pread"
        sound(store)
        store.close()
        store = disk(small(directory, size_bytes=ROOM))
        assert set(visible(store)) >= {*KEPT, *seen} or port.struck == "pread"
        sound(store)
        store.close()
        if not port.struck:
            break
        struck.add(port.struck)
        shutil.rmtree(directory)
    assert struck >= {"pread", "pwrite", "unlink", "close", "open", "fallocate"}


def test_a_move_that_outlasts_its_put_ends_well(tmp_path: Path, disk: OpenDisk) -> None:
    hang, free = threading.Event(), threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pwrite" and hang.is_set() and arguments[2] >= 3 * BLOCK:
            assert free.wait(30.0)

    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    thin(store)
    hang.set()
    with pytest.raises(StoreTimeout):
        store.put([name(1)], [page(1, size_of(1))], 0.05)
    assert visible(store) == KEPT
    store.check()
    hang.clear()
    free.set()
    assert put(store, NEW[1:]) == set(NEW[1:])
    assert set(visible(store)) >= {*KEPT, *NEW[1:]}
    store.close()
    store.check()
    assert store._index.reserved == {}
    assert store._index.slots.pins == {}
    store = disk(small(tmp_path, size_bytes=ROOM))
    assert set(visible(store)) >= {*KEPT, *NEW[1:]}
    sound(store)
