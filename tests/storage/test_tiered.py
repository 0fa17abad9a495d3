"""A small store in front of a large one: what is written behind, what is promoted, and that a drop overtakes both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage import DiskStore, FaultyStore, MemoryStore, StoreWrapper, TieredStore, WriteBehind
from hicache_ray.store import Bytes
from tests.storage.disks import small
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, present, put

FRONT, BACK = 4, 64
PATIENCE_S = 10.0


class Gate(StoreWrapper):
    """Holds calls of one kind, after the inner store has done them, until told to go on."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.held = ""
        self.inside, self.go = threading.Event(), threading.Event()

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        return self._through("put", lambda: super(Gate, self).put(ids, sources, timeout_s))

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        return self._through("get", lambda: super(Gate, self).get(ids, targets, timeout_s))

    def _through(self, call: str, work: Callable[[], int]) -> int:
        done = work()
        if self.held == call:
            self.inside.set()
            assert self.go.wait(PATIENCE_S)
        return done


@pytest.fixture
def tiers() -> Iterator[tuple[MemoryStore, Gate, TieredStore]]:
    front, back = MemoryStore(FRONT * PAGE), Gate(MemoryStore(BACK * PAGE))
    tiered = TieredStore(front, back, WriteBehind(front, back, FRONT * PAGE))
    yield front, back, tiered
    back.go.set()
    tiered.check()
    tiered.close()


Tiers = tuple[MemoryStore, Gate, TieredStore]


def test_what_is_put_is_written_behind(tiers: Tiers) -> None:
    front, back, tiered = tiers
    for first in range(0, 12, 2):
        assert put(tiered, [first, first + 1]) == 0b11
        assert tiered.behind.flush(PATIENCE_S)
    assert present(front, range(12)) == {8, 9, 10, 11}
    assert present(back, range(12)) == set(range(12))
    assert present(tiered, range(13)) == set(range(12))
    assert sorted(tiered.scan()) == [name(n) for n in range(12)]
    assert tiered.behind.stats().written == 12
    stats = tiered.stats(TIMEOUT_S)
    assert (stats.capacity_bytes, stats.objects, stats.used_bytes) == (BACK * PAGE, 12, 12 * PAGE)


def test_what_is_read_from_the_back_is_promoted(tiers: Tiers) -> None:
    front, _, tiered = tiers
    put(tiered, [1, 2])
    assert tiered.behind.flush(PATIENCE_S)
    front.clear(TIMEOUT_S)
    assert get(tiered, [1, 2, 3]) == {1, 2}
    assert present(front, [1, 2, 3]) == {1, 2}
    stats = tiered.stats(TIMEOUT_S)
    assert (stats.gets, stats.get_misses) == (3, 1)


def test_what_the_front_has_no_room_for_goes_to_the_back(tiers: Tiers) -> None:
    front, back, tiered = tiers
    assert put(tiered, range(10)) == 0x3FF
    assert tiered.behind.flush(PATIENCE_S)
    assert present(front, range(10)) == {0, 1, 2, 3}
    assert present(back, range(10)) == set(range(10))
    with tiered.lease([name(n) for n in (0, 9, 50, 5)], TIMEOUT_S) as lent:
        assert [None if view is None else bytes(view) for view in lent.views] == [
            page(0).tobytes(), page(9).tobytes(), None, page(5).tobytes()
        ]  # fmt: skip
        assert lent.valid() == 0b1011
    assert lent.valid() == 0


def test_a_damaged_copy_is_healed_from_the_other(tiers: Tiers) -> None:
    front, _, tiered = tiers
    put(tiered, [1])
    assert tiered.behind.flush(PATIENCE_S)
    assert front.damage(name(1))
    assert get(tiered, [1]) == {1}
    assert get(front, [1]) == {1}
    assert tiered.stats(TIMEOUT_S).checksum_failures == 1


def test_a_full_queue_drops_and_counts(tiers: Tiers) -> None:
    front, back, tiered = tiers
    with tiered.behind.paused():
        put(tiered, range(FRONT))
        put(tiered, [10, 11])
        assert tiered.behind.pending([name(n) for n in (0, 3, 10)]) == 0b011
        assert (tiered.behind.stats().queued_bytes, tiered.behind.stats().dropped) == (FRONT * PAGE, 2)
    assert tiered.behind.flush(PATIENCE_S)
    stats = tiered.behind.stats()
    assert (stats.written, stats.lost) == (2, 2)  # two were evicted from the front before their turn
    assert present(back, [*range(FRONT), 10, 11]) == {0, 1}
    assert present(front, [10, 11]) == {10, 11}


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_a_drop_overtakes_the_queue_and_the_write_in_flight(tiers: Tiers, how: str) -> None:
    _, back, tiered = tiers
    back.held = "put"
    put(tiered, [1])
    assert back.inside.wait(PATIENCE_S)  # 1 is in the back, and its writer has not come back
    put(tiered, [2])
    release = threading.Timer(0.05, back.go.set)
    release.start()
    if how == "drop":
        assert tiered.drop([name(1), name(2)], TIMEOUT_S) == 0b11
    else:
        assert tiered.clear(TIMEOUT_S, name(1)[:8]) == 2
    assert present(tiered, [1, 2]) == set()
    assert tiered.behind.flush(PATIENCE_S)
    assert present(tiered, [1, 2]) == set()
    release.join()


def test_a_drop_does_not_wait_for_ever(tiers: Tiers) -> None:
    _, back, tiered = tiers
    back.held = "put"
    put(tiered, [1])
    assert back.inside.wait(PATIENCE_S)
    with pytest.raises(StoreTimeout):
        tiered.drop([name(1)], 0.05)
    back.go.set()
    assert tiered.behind.flush(PATIENCE_S)
    assert present(tiered, [1]) == set()


def test_a_clear_overtakes_a_promotion(tiers: Tiers) -> None:
    """A read that has its bytes from the back already must not bring them into the front after the clear."""
    front, back, tiered = tiers
    put(tiered, [1])
    assert tiered.behind.flush(PATIENCE_S)
    front.clear(TIMEOUT_S)
    back.held = "get"
    reader = threading.Thread(target=get, args=(tiered, [1]))
    reader.start()
    assert back.inside.wait(PATIENCE_S)
    release = threading.Timer(0.05, back.go.set)
    release.start()
    assert tiered.clear(TIMEOUT_S) == 1
    assert present(tiered, [1]) == set()
    reader.join()
    release.join()
    assert present(tiered, [1]) == set()


class Full(StoreWrapper):
    """A front whose put takes nothing, and only comes back when a clear has passed."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.inside, self.go = threading.Event(), threading.Event()

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        self.inside.set()
        assert self.go.wait(PATIENCE_S)
        return 0

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        gone = super().clear(timeout_s, prefix)
        self.go.set()
        return gone


def test_a_put_that_a_clear_overtakes_does_not_end_in_the_back() -> None:
    front, back = Full(MemoryStore(FRONT * PAGE)), MemoryStore(BACK * PAGE)
    with closing(TieredStore(front, back, WriteBehind(front, back, FRONT * PAGE))) as tiered:
        writer = threading.Thread(target=put, args=(tiered, [1]))
        writer.start()
        assert front.inside.wait(PATIENCE_S)
        tiered.clear(TIMEOUT_S)
        assert present(tiered, [1]) == set()
        writer.join(PATIENCE_S)
        assert present(back, [1]) == set()
        assert put(tiered, [1]) == 1


def test_a_drop_that_cannot_undo_a_promotion_says_so() -> None:
    """The front does not answer the drop that comes after the read; the read itself has what it wants."""
    front, back = FaultyStore(MemoryStore(FRONT * PAGE)), Gate(MemoryStore(BACK * PAGE))
    with closing(TieredStore(front, back, WriteBehind(front, back, FRONT * PAGE))) as tiered:
        put(back, [1])
        back.held = "get"
        with ThreadPoolExecutor(1) as reader:
            read = reader.submit(get, tiered, [1])
            assert back.inside.wait(PATIENCE_S)
            front.fault("drop", "error", 2)
            release = threading.Timer(0.05, back.go.set)
            release.start()
            with pytest.raises(StoreError):
                tiered.drop([name(1)], TIMEOUT_S)
            assert read.result(PATIENCE_S) == {1}
            release.join()
        assert tiered.drop([name(1)], TIMEOUT_S) == 1
        assert present(tiered, [1]) == set()


def test_a_back_that_fails_is_counted_and_the_thread_lives() -> None:
    front, back = MemoryStore(BACK * PAGE), FaultyStore(MemoryStore(BACK * PAGE))
    behind = WriteBehind(front, back, BACK * PAGE)
    back.fault("put", "error")
    put(front, [1, 2])
    assert behind.add([name(1)], [PAGE]) == 1
    assert behind.flush(PATIENCE_S)
    assert behind.stats().failures == 1
    assert behind.add([name(2), name(3)], [PAGE, PAGE]) == 0b11
    behind.close()
    behind.close()
    assert present(back, [1, 2, 3]) == {2}
    assert (behind.stats().written, behind.stats().lost) == (1, 1)
    assert behind.add([name(1)], [PAGE]) == 0
    behind.check()


def test_memory_over_a_disk_starts_warm(tmp_path: Path) -> None:
    config = small(tmp_path, size_bytes=64 * PAGE, segment_bytes=16 * PAGE)
    for start in range(2):
        front, back = MemoryStore(FRONT * PAGE), DiskStore(config)
        tiered = TieredStore(front, back, WriteBehind(front, back, 64 * PAGE))
        if not start:
            assert put(tiered, range(10)) == 0x3FF
        else:
            assert get(tiered, range(10)) == set(range(10))
        tiered.close()
