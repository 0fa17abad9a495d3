"""The arena's index: reservations, leases, generations, deadlines, and which objects go."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from hicache_ray.storage.descriptors import Loan, Outcome, Sums
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.slabs import BLOCK, SlabMap
from tests.storage.conftest import FakeClock
from tests.storage.objects import TAG, key, name

ME, OTHER = 1, 2


@pytest.fixture
def index(clock: FakeClock) -> ArenaIndex:
    """Room for eight objects of BLOCK bytes."""
    return ArenaIndex(SlabMap(8 * BLOCK, BLOCK), [0] * 8, clock, Limits(10.0, 30.0))


def fill(index: ArenaIndex, *numbers: int, size: int = BLOCK) -> int:
    """Reserve and seal, one call each; the bitset of those visible."""
    reservation = index.reserve([name(n) for n in numbers], [size] * len(numbers), ME, 5.0)
    granted = [grant.outcome for grant in reservation.grants].count(Outcome.GRANTED)
    sealed = index.seal(reservation.id, list(range(granted)), ME)
    index.check()
    return sealed


def visible(index: ArenaIndex) -> set[int]:
    return {int.from_bytes(id[: -len(TAG)], "big") for id in index.ids()}


def loan(index: ArenaIndex, number: int) -> tuple[int, Loan]:
    lease = index.lease([name(number)], ME, 5.0)
    assert lease.loans[0] is not None
    return lease.id, lease.loans[0]


def test_invisible_until_sealed(index: ArenaIndex) -> None:
    reservation = index.reserve([name(1), name(2)], [BLOCK, BLOCK], ME, 5.0)
    answer = index.lookup([key(1), key(2), key(3)], TAG)
    assert (answer.hit, answer.pending, answer.retry) == (0, 0b011, 0)
    assert index.lease([name(1)], ME, 5.0).loans == [None]
    assert index.seal(reservation.id, [7, None], ME) == 0b01
    answer = index.lookup([key(1), key(2), key(3)], TAG)
    assert (answer.hit, answer.pending) == (0b001, 0)
    assert loan(index, 1)[1].checksum == 7
    index.check()


def test_what_another_writer_holds_is_pending(index: ArenaIndex) -> None:
    index.reserve([name(1)], [BLOCK], OTHER, 5.0)
    assert index.reserve([name(1), name(2)], [BLOCK] * 2, ME, 5.0).grants[0].outcome is Outcome.PENDING


def test_only_the_owner_seals_and_only_once(index: ArenaIndex) -> None:
    reservation = index.reserve([name(1)], [BLOCK], ME, 5.0)
    assert index.seal(reservation.id, [0], OTHER) == 0
    assert index.seal(reservation.id, [0, 0], ME) == 0
    assert index.seal(reservation.id + 1, [0], ME) == 0
    assert index.seal(reservation.id, [0], ME) == 1
    assert index.seal(reservation.id, [0], ME) == 0
    index.check()


def test_a_dead_writers_reservation_is_reclaimed_with_its_connection(index: ArenaIndex) -> None:
    reservation = index.reserve([name(n) for n in range(8)], [BLOCK] * 8, ME, 5.0)
    index.disconnect(ME)
    assert index.used_bytes == 0
    assert fill(index, *range(8)) == 0xFF
    assert index.seal(reservation.id, [0] * 8, ME) == 0
    index.check()


def test_a_slow_writers_reservation_is_reclaimed_at_its_deadline(index: ArenaIndex, clock: FakeClock) -> None:
    reservation = index.reserve([name(1)], [BLOCK], ME, 5.0)
    clock.advance(4.9)
    assert index.lookup([key(1)], TAG).pending == 1
    clock.advance(0.1)
    assert index.lookup([key(1)], TAG).pending == 0
    assert index.seal(reservation.id, [0], ME) == 0
    assert index.stats().used_bytes == 0
    index.check()


def test_nobody_holds_longer_than_the_caps(index: ArenaIndex) -> None:
    fill(index, 1)
    assert index.reserve([name(2)], [BLOCK], ME, 1e9).seconds == 30.0
    assert index.lease([name(1)], ME, 1e9).seconds == 10.0


def test_a_leased_slot_is_never_reused(index: ArenaIndex) -> None:
    fill(index, *range(8))
    lease, lent = loan(index, 0)
    for n in range(100, 120):
        assert fill(index, n) == 1
    assert 0 in visible(index)
    index.drop([name(0)])
    assert 0 not in visible(index)
    for n in range(200, 220):
        fill(index, n)
    assert index.generations[lent.offset // BLOCK] == lent.generation
    index.release(lease, 0)
    fill(index, 300)
    assert index.generations[lent.offset // BLOCK] == lent.generation + 2  # its slab was cut anew, and the slot given out
    assert loan(index, 300)[1].offset == lent.offset


@pytest.mark.parametrize("singly", [True, False])
def test_a_reader_that_is_late_sees_that_a_larger_object_lies_over_what_it_reads(clock: FakeClock, singly: bool) -> None:
    """One that begins before it, at another word."""
    index = ArenaIndex(SlabMap(8 * BLOCK, 4 * BLOCK), [0] * 8, clock, Limits(10.0, 30.0))
    index.singly = singly
    fill(index, *range(8))
    loans = [loan(index, n)[1] for n in range(8)]
    clock.advance(5.0)
    assert fill(index, 100, 101, size=4 * BLOCK) == 0b11
    assert [index.generations[lent.offset // BLOCK] == lent.generation for lent in loans] == [False] * 8


def test_a_dead_reader_cannot_pin_for_ever(index: ArenaIndex, clock: FakeClock) -> None:
    fill(index, *range(8))
    index.lease([name(n) for n in range(8)], ME, 5.0)
    index.disconnect(ME)  # a reader that lost its connection may still copy
    assert fill(index, 100) == 0
    clock.advance(5.0)
    assert fill(index, 100) == 1
    assert index.stats().leases == 0


def test_two_leases_on_one_object(index: ArenaIndex) -> None:
    fill(index, *range(8))
    first, _ = loan(index, 0)
    second, _ = loan(index, 0)
    index.release(first, 0)
    index.release(first, 0)
    index.drop([name(0)])
    index.check()
    assert index.used_bytes == 8 * BLOCK
    index.release(second, 0)
    index.check()
    assert index.used_bytes == 7 * BLOCK


def test_clear_fences_late_writers(index: ArenaIndex) -> None:
    fill(index, 1)
    reservation = index.reserve([name(2)], [BLOCK], ME, 5.0)
    assert index.clear() == 1
    assert index.used_bytes == BLOCK  # the writer may still write there
    assert index.lookup([key(2)], TAG).pending == 0
    assert fill(index, 2) == 1  # another writer may store it anew at once
    assert index.seal(reservation.id, [0], ME) == 0
    assert index.used_bytes == BLOCK
    index.check()


def test_a_bad_object_is_dropped_unless_it_was_replaced(index: ArenaIndex) -> None:
    fill(index, 1, 2)
    lease = index.lease([name(9), name(1), name(2)], ME, 5.0).id
    index.release(lease, 0b10)  # the second loan
    assert visible(index) == {1}
    lease, _ = loan(index, 1)
    index.drop([name(1)])
    fill(index, 1)
    index.release(lease, 0b1)
    assert visible(index) == {1}
    assert index.stats().checksum_failures == 2


def test_a_starved_class_takes_colder_slabs(index: ArenaIndex) -> None:
    """Eight old small objects, then only large ones: the slabs move, oldest objects first."""
    fill(index, *range(8))
    assert fill(index, 100, size=4 * BLOCK) == 1
    assert visible(index) == {0, 1, 2, 3, 100}  # the first ids of a call are the more recent ones
    assert fill(index, 101, size=4 * BLOCK) == 1
    assert visible(index) == {100, 101}
    assert fill(index, 102, size=4 * BLOCK) == 1
    assert visible(index) == {101, 102}
    assert index.stats().evictions == 9


def test_a_young_class_takes_the_coldest_slabs_and_leaves_those_in_use(index: ArenaIndex) -> None:
    for n in range(6):
        fill(index, n)
    fill(index, 100, size=2 * BLOCK)
    lease, _ = loan(index, 0)
    index.release(lease, 0)  # 0 is in use; 1 and 2 are the oldest now
    assert fill(index, 101, size=2 * BLOCK) == 1
    assert visible(index) == {0, 3, 4, 5, 100, 101}


def test_old_claims_do_not_pile_up(index: ArenaIndex) -> None:
    fill(index, 1)
    for _ in range(10_000):
        index.release(index.lease([name(1)], ME, 5.0).id, 0)
    assert len(index.claims) < 2000
    index.check()


@pytest.mark.parametrize("count", [20_000, 70_000, 100_000])
def test_an_entry_weighs_less_than_250_bytes(count: int, clock: FakeClock) -> None:
    """Arrays, not objects: everything that the index holds on to, and what of it is arrays."""
    ids = np.random.default_rng(0).integers(0, 256, (count, 64), np.uint8)
    capacity = 102_400 * BLOCK
    words = np.zeros(102_400, np.uint64)
    tracemalloc.start()
    try:
        index = ArenaIndex(SlabMap(capacity, 64 * BLOCK), words, clock)
        for start in range(0, count, 1000):
            part = ids[start : start + 1000]
            reservation = index.reserve(part, np.full(len(part), BLOCK, np.uint64), ME, 5.0)
            index.seal(reservation.id, Sums(np.ones(len(part), np.bool_), np.zeros(len(part), np.uint64)), ME)
        del reservation, part
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        assert index.objects == count
        index.drop(ids[: count // 2])  # what is free again weighs no more
        index.reserve(ids[: count // 2], np.full(count // 2, BLOCK, np.uint64), ME, 5.0)
    finally:
        tracemalloc.stop()
    assert held < 250 * count
    assert index.nbytes < 250 * count
