"""The structures of a cache group against naive twins, with ``check()`` after every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_ray.errors import Inconsistent
from hicache_ray.lease import Lease, Leases, Place
from hicache_ray.policy import Lru
from hicache_ray.policy_order import Entries, order
from hicache_ray.records import slots_array
from hicache_ray.slots import SlotPool
from hicache_ray.spec import Kind, Tier

steady = settings(deadline=None, derandomize=True, max_examples=50, stateful_step_count=40)
DEVICE: Place = (Tier.DEVICE, "full")
HOST: Place = (Tier.HOST, "full")


def some(data: st.DataObject, of: set[int] | list[int], least: int = 1) -> list[int]:
    return data.draw(st.lists(st.sampled_from(sorted(of)), min_size=least, max_size=4, unique=True))


# -- slots --------------------------------------------------------------------------------------------------------------------------------


class SlotMachine(RuleBasedStateMachine):
    """Twin: pins and owner of every slot in two dicts."""

    @initialize(capacity=st.integers(0, 9))
    def begin(self, capacity: int) -> None:
        self.pool = SlotPool(capacity)
        self.pins = dict.fromkeys(range(capacity), 0)
        self.owner: dict[int, int] = {}
        self.next_owner = 0

    def free(self) -> set[int]:
        return {s for s, n in self.pins.items() if not n and s not in self.owner}

    def pinned(self) -> set[int]:
        return {s for s, n in self.pins.items() if n}

    def refused(self, act: Callable[[], object], why: str) -> None:
        with pytest.raises(Inconsistent, match=why):
            act()

    @rule(count=st.integers(0, 5))
    def alloc(self, count: int) -> None:
        if count > len(self.free()):
            self.refused(lambda: self.pool.alloc(count), "make room first")
            return
        taken = self.pool.alloc(count).tolist()
        assert len(set(taken)) == count
        assert set(taken) <= self.free()
        for slot in taken:
            self.pins[slot] = 1

    @precondition(lambda self: self.pinned() | set(self.owner))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slots = some(data, self.pinned() | set(self.owner))
        self.pool.pin(slots_array(slots))
        for slot in slots:
            self.pins[slot] += 1

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = some(data, self.pinned())
        self.pool.release(slots_array(slots))
        for slot in slots:
            self.pins[slot] -= 1

    @precondition(lambda self: self.pinned() - set(self.owner))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slots = some(data, self.pinned() - set(self.owner))
        names = range(self.next_owner, self.next_owner + len(slots))
        self.next_owner += len(slots)
        self.pool.publish(slots_array(slots), np.asarray(names, dtype=np.int32))
        self.owner.update(zip(slots, names, strict=True))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        slots = some(data, set(self.owner))
        self.pool.withdraw(slots_array(slots))
        for slot in slots:
            del self.owner[slot]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Each wrong thing that can be done to a slot in its state is refused, and changes nothing: the invariants still hold."""
        slot = data.draw(st.sampled_from(sorted(self.pins)))
        one = slots_array([slot])
        if slot in self.free():
            self.refused(lambda: self.pool.pin(one), "a free slot was pinned")
        if not self.pins[slot]:
            self.refused(lambda: self.pool.release(one), "not pinned")
            self.refused(lambda: self.pool.publish(one, one), "only a held slot")
        if slot in self.owner:
            self.refused(lambda: self.pool.publish(one, one), "only a held slot")
        else:
            self.refused(lambda: self.pool.withdraw(one), "not cached")

    @precondition(lambda self: self.free() and self.pinned())
    @rule()
    def misuse_of_one_among_good_ones(self) -> None:
        both = slots_array([min(self.pinned()), min(self.free())])
        self.refused(lambda: self.pool.pin(both), "a free slot was pinned")
        self.refused(lambda: self.pool.release(both), "not pinned")

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.free == len(self.free())
        assert self.pool.cached == len(self.owner)
        assert self.pool.idle == len([s for s in self.owner if not self.pins[s]])
        assert self.pool.held == len(self.pinned() - set(self.owner))
        assert self.pool.free + self.pool.held + self.pool.cached == self.pool.capacity
        assert self.pool.pins() == sum(self.pins.values())
        every = slots_array(sorted(self.pins))
        assert self.pool.pinned(every).tolist() == [self.pins[s] > 0 for s in every.tolist()]


TestSlotPool = SlotMachine.TestCase
TestSlotPool.settings = steady


def test_a_fresh_pool_gives_adjoining_slots_from_the_bottom() -> None:
    pool = SlotPool(8)
    assert pool.alloc(3).tolist() == [0, 1, 2]
    assert pool.alloc(2).tolist() == [3, 4]


def test_a_slot_withdrawn_while_pinned_is_free_only_after_the_last_pin() -> None:
    pool = SlotPool(2)
    slots = pool.alloc(1)
    pool.publish(slots, np.array([7], dtype=np.int32))
    pool.pin(slots)
    pool.withdraw(slots)
    assert (pool.free, pool.held, pool.cached) == (1, 1, 0)
    pool.release(slots)
    assert pool.free == 1
    pool.release(slots)
    assert pool.free == 2
    pool.check()


# -- leases -------------------------------------------------------------------------------------------------------------------------------


class LeaseMachine(RuleBasedStateMachine):
    """Twin: the list of open receipts."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = {DEVICE: SlotPool(6), HOST: SlotPool(4)}
        self.leases = Leases(self.pools)
        self.open: list[Lease] = []
        self.given_back: list[Lease] = []

    @rule(place=st.sampled_from([DEVICE, HOST]), count=st.integers(0, 4), holder=st.sampled_from("ab"))
    def alloc(self, place: Place, count: int, holder: str) -> None:
        if count > self.pools[place].free:
            with pytest.raises(Inconsistent):
                self.leases.alloc(holder, place, count)
            return
        lease = self.leases.alloc(holder, place, count)
        assert (lease.holder, lease.place, len(lease.slots)) == (holder, place, count)
        self.open.append(lease)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), holder=st.sampled_from("ab"))
    def take(self, data: st.DataObject, holder: str) -> None:
        other = data.draw(st.sampled_from(self.open))
        self.open.append(self.leases.take(holder, other.place, other.slots))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.open))
        self.open.remove(lease)
        self.leases.release(lease)
        self.given_back.append(lease)

    @precondition(lambda self: self.given_back)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        with pytest.raises(Inconsistent, match="released twice"):
            self.leases.release(data.draw(st.sampled_from(self.given_back)))

    @rule()
    def release_all_of_one(self) -> None:
        self.leases.release_all(x for x in self.open if x.holder == "a")
        self.given_back += [x for x in self.open if x.holder == "a"]
        self.open = [x for x in self.open if x.holder == "b"]

    @invariant()
    def agrees(self) -> None:
        self.leases.check()
        assert self.leases.open() == tuple(self.open)
        assert self.leases.open("a") == tuple(x for x in self.open if x.holder == "a")
        for place, pool in self.pools.items():
            pool.check()
            assert pool.pins() == sum(len(x.slots) for x in self.open if x.place == place)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = steady


def test_a_pin_without_a_receipt_is_found() -> None:
    pools = {DEVICE: SlotPool(2)}
    leases = Leases(pools)
    lease = leases.alloc("a", DEVICE, 1)
    pools[DEVICE].pin(lease.slots)
    with pytest.raises(Inconsistent, match="2 pins and leases for 1"):
        leases.check()


# -- order of eviction --------------------------------------------------------------------------------------------------------------------


def entries(values: list[int]) -> Entries:
    return np.asarray(values, dtype=np.int32)


class LruMachine(RuleBasedStateMachine):
    """Twin: one list, first to go first."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = Lru()
        self.line: list[int] = []

    def without(self, chosen: list[int]) -> list[int]:
        return [x for x in self.line if x not in chosen]

    @rule(chosen=st.lists(st.integers(0, 20), max_size=6, unique=True))
    def touch(self, chosen: list[int]) -> None:
        self.lru.touch(entries(chosen))
        self.line = self.without(chosen) + chosen

    @rule(chosen=st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), times=st.sampled_from([70, 300]))
    def touch_often(self, chosen: list[int], times: int) -> None:
        """More than enough stale members to be compacted."""
        for _ in range(times):
            self.lru.touch(entries(chosen))
        self.line = self.without(chosen) + chosen

    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        """Of entries that are cached; what nobody knows cannot go before others."""
        chosen = some(data, self.line, 0) if self.line else []
        self.lru.demote(entries(chosen))
        self.line = chosen + self.without(chosen)

    @rule(chosen=st.lists(st.integers(0, 30), max_size=6, unique=True))
    def forget(self, chosen: list[int]) -> None:
        self.lru.forget(entries(chosen))
        self.line = self.without(chosen)

    @rule(count=st.integers(-1, 12), kept=st.sets(st.integers(0, 20)))
    def victims(self, count: int, kept: set[int]) -> None:
        usable = [x for x in self.line if x not in kept]
        got = self.lru.victims(count, lambda some: ~np.isin(some, sorted(kept)))
        assert got.entries.tolist() == usable[: max(count, 0)]

    @invariant()
    def agrees(self) -> None:
        self.lru.check()
        assert self.lru.victims(100, lambda some: np.ones(len(some), dtype=bool)).entries.tolist() == self.line
        assert self.lru.knows(entries(list(range(40)))).tolist() == [i in self.line for i in range(40)]
        assert self.lru._kept <= 2 * len(self.line) + 1024 + 6


TestLru = LruMachine.TestCase
TestLru.settings = steady


def test_demoted_entries_go_first_and_the_last_demoted_before_them() -> None:
    lru = Lru()
    for i in range(5):
        lru.touch(entries([i]))
    lru.demote(entries([3, 1]))
    lru.demote(entries([4]))
    assert lru.victims(9, lambda some: np.ones(len(some), dtype=bool)).entries.tolist() == [4, 3, 1, 0, 2]
    lru.touch(entries([3]))
    assert lru.victims(9, lambda some: np.ones(len(some), dtype=bool)).entries.tolist() == [4, 1, 0, 2, 3]


def test_an_id_that_is_used_again_does_not_stand_where_the_old_one_stood() -> None:
    lru = Lru()
    lru.touch(entries([0, 1]))
    lru.touch(entries([2]))
    lru.forget(entries([0]))
    lru.touch(entries([0]))
    assert lru.victims(9, lambda some: np.ones(len(some), dtype=bool)).entries.tolist() == [1, 2, 0]


def test_touching_for_ever_keeps_no_more_than_it_must() -> None:
    lru = Lru()
    for i in range(5000):
        lru.touch(entries([i % 7, 7 + i % 5]))
    lru.check()
    assert lru._kept <= 2 * 12 + 1024 + 2
    assert sum(map(len, lru._heaps)) <= lru._kept
    last = {i % 7: i for i in range(5000)} | {7 + i % 5: i + 0.5 for i in range(5000)}
    assert lru.victims(99, lambda some: np.ones(len(some), dtype=bool)).entries.tolist() == sorted(last, key=lambda e: last[e])


def test_looking_for_victims_walks_over_few_groups_that_have_none() -> None:
    lru, pages = Lru(), entries(range(8))
    asked: list[int] = []

    def usable(some: Entries) -> np.ndarray:
        asked.append(len(some))
        return np.ones(len(some), dtype=bool)

    for _ in range(500):  # every page alone, again and again
        for page in range(8):
            lru.touch(pages[page : page + 1])
    assert sum(map(len, lru._heaps)) <= 2 * 8 + 64
    assert lru.victims(3, usable).entries.tolist() == [0, 1, 2]
    assert asked == [1, 1, 1]  # nobody is asked about groups whose pages have all moved on


def test_full_pages_go_from_the_deep_end_and_windows_whole() -> None:
    assert order(Kind.FULL, 5).tolist() == [4, 3, 2, 1, 0]
    assert order(Kind.WINDOW, 5, 5).tolist() == order(Kind.CHUNKED, 5, 5).tolist() == [0, 1, 2, 3, 4]
    # Three windows of two pages and a half one: inner ones go whole, every other one first.
    assert order(Kind.WINDOW, 7, 2).tolist() == [0, 3, 4, 1, 2, 5, 6]


def test_snapshots_are_thinned() -> None:
    """Distances from the end are 8..0: odd ones first, then 6 and 2, then 4, then 8; the last snapshot goes last."""
    assert order(Kind.STATE, 9).tolist() == [1, 3, 5, 7, 2, 6, 4, 0, 8]


@pytest.mark.parametrize("kind", list(Kind))
def test_orders_of_nothing_and_of_one(kind: Kind) -> None:
    assert order(kind, 0).tolist() == []
    assert order(kind, 1).tolist() == [0]


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 31, 32, 33, 100])
def test_gaps_between_snapshots_grow_with_the_distance_from_the_end(count: int) -> None:
    going = order(Kind.STATE, count).tolist()
    assert sorted(going) == list(range(count))
    assert going[-1] == count - 1
    for gone in range(count):
        left = sorted(count - 1 - i for i in going[gone:])
        gaps = np.diff(left)
        assert left[0] == 0
        assert np.all(np.diff(gaps) >= 0), f"after {gone} of {count}: distances {left}"
