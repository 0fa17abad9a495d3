"""Eviction policies against naive twins, and what they promise of prefixes, popularity, priority and time."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ray.policies import make
from hicache_ray.policy import Lru
from hicache_ray.policy_order import Cost, Entries, Worth
from hicache_ray.policy_s3fifo import Ghost
from hicache_ray.settings import Eviction
from tests.core.policy_twins import TWINS

steady = settings(deadline=None, derandomize=True, max_examples=25, stateful_step_count=30)
CHOSEN = st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True)
COSTS = st.sampled_from([Cost.COPY, Cost.INNER, Cost.END])
ALL: Callable[[Entries], np.ndarray] = lambda some: np.ones(len(some), dtype=bool)  # noqa: E731


def entries(values: list[int]) -> Entries:
    return np.asarray(values, dtype=np.int32)


def worth(costs: list[int], priority: int = 0, expires: float = np.inf) -> Worth:
    count = len(costs)
    return Worth(np.asarray(costs, dtype=np.int8), np.full(count, priority, dtype=np.int64), np.full(count, expires))


def leave(policy: Lru, count: int) -> list[int]:
    """So many of all leave."""
    going = policy.victims(count, ALL)
    policy.learn(going)
    policy.forget(going.entries)
    return going.entries.tolist()


class Machine(RuleBasedStateMachine):
    """Both are told the same; both must choose the same."""

    name = "lru"

    @initialize(capacity=st.integers(4, 12), chained=st.booleans())
    def begin(self, capacity: int, chained: bool) -> None:
        self.policy = make(Eviction(self.name), capacity, chained)
        self.twin = TWINS[self.name](capacity, chained)
        self.now = 0.0

    @rule(chosen=CHOSEN, cost=COSTS, priority=st.integers(-2, 2), ttl=st.sampled_from([np.inf, np.inf, 1.0, 3.0]), used=st.booleans())
    def touch(self, chosen: list[int], cost: Cost, priority: int, ttl: float, used: bool) -> None:
        costs = [cost] * len(chosen)
        self.policy.touch(entries(chosen), worth(costs, priority, self.now + ttl), used)
        self.twin.touch(chosen, costs, priority, self.now + ttl, used)

    @rule(chosen=CHOSEN, data=st.data())
    def touch_of_unlike_costs(self, chosen: list[int], data: st.DataObject) -> None:
        costs = data.draw(st.lists(COSTS, min_size=len(chosen), max_size=len(chosen)))
        self.policy.touch(entries(chosen), worth(costs))
        self.twin.touch(chosen, costs, 0, np.inf, True)

    @rule(chosen=CHOSEN, cost=COSTS)
    def recost(self, chosen: list[int], cost: Cost) -> None:
        self.policy.recost(entries(chosen), np.full(len(chosen), cost, dtype=np.int8))
        self.twin.recost(chosen, cost)

    @rule(chosen=CHOSEN)
    def demote(self, chosen: list[int]) -> None:
        chosen = [e for e in chosen if e in self.twin.pages]
        self.policy.demote(entries(chosen))
        self.twin.demote(chosen)

    @rule(chosen=CHOSEN)
    def forget(self, chosen: list[int]) -> None:
        self.policy.forget(entries(chosen))
        self.twin.forget(chosen)

    @rule(count=st.integers(-1, 12), kept=st.sets(st.integers(0, 20), max_size=6), seconds=st.sampled_from([0.0, 1.0]), go=st.booleans())
    def victims(self, count: int, kept: set[int], seconds: float, go: bool) -> None:
        self.now += seconds
        got = self.policy.victims(count, lambda some: ~np.isin(some, sorted(kept)), self.now)
        again = self.policy.victims(count, lambda some: ~np.isin(some, sorted(kept)), self.now)
        assert got.entries.tolist() == again.entries.tolist() == self.twin.victims(count, kept, self.now)
        if go:
            self.policy.learn(got)
            self.policy.forget(got.entries)
            self.twin.forget(self.twin.evict(count, kept, self.now))

    @invariant()
    def agrees(self) -> None:
        self.policy.check()
        assert self.policy.knows(entries(list(range(30)))).tolist() == [i in self.twin.pages for i in range(30)]
        there = sorted(self.twin.pages)
        assert self.policy.costs(entries(there)).tolist() == [self.twin.pages[e].cost for e in there]
        assert self.policy._kept <= 2 * len(there) + 64 + 12


def machine(policy: str) -> type:
    case = type(policy, (Machine,), {"name": policy}).TestCase
    case.settings = steady
    return case


TestLruTwin = machine("lru")
TestLfuTwin = machine("lfu")
TestPriorityTwin = machine("priority")
TestS3FifoTwin = machine("s3fifo")


@pytest.mark.parametrize("name", list(Eviction))
@pytest.mark.parametrize("seed", range(6))
def test_what_stays_can_be_reached_from_the_root(name: Eviction, seed: int) -> None:
    """Random paths of a tree, used whole; no policy ever takes a page before those that are of use only with it."""
    rng = random.Random(seed)
    parent = {i: rng.randrange(i) if i % 7 else None for i in range(60)}
    capacity = 24
    policy = make(name, capacity, True)
    cached: set[int] = set()
    for _ in range(400):
        node: int | None = rng.randrange(60)
        path = []
        while node is not None:
            path.append(node)  # deepest first
            node = parent[node]
        held = [e for e in path if e in cached]
        room = len(cached) + len(path) - len(held) - capacity
        chosen = policy.victims(room, lambda some, held=held: ~np.isin(some, held))
        policy.learn(chosen)
        gone = chosen.entries.tolist()
        assert len(gone) == max(room, 0)
        for e in gone:
            cached.discard(e)
            policy.forget(entries([e]))
            assert not [c for c in cached if parent[c] == e], f"{e} went before its successors"
        policy.touch(entries(path), worth([Cost.END] * len(path), rng.randrange(3)))
        cached.update(path)
    policy.check()


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    lfu = make(Eviction.LFU, 8, False)
    for _ in range(3):
        lfu.touch(entries([1]))
    lfu.touch(entries([2]))
    assert lfu.victims(2, ALL).entries.tolist() == [2, 1]


def test_what_was_popular_once_does_not_stay_for_ever() -> None:
    lfu = make(Eviction.LFU, 2, False)
    for _ in range(5):
        lfu.touch(entries([0]))
    for new in range(1, 20):
        lfu.touch(entries([new]))
        gone = leave(lfu, 1)
        if gone == [0]:
            break
    assert 3 <= new < 19


@pytest.mark.parametrize("name", [Eviction.LFU, Eviction.S3FIFO])
def test_a_question_makes_no_difference(name: Eviction) -> None:
    """Of two policies that are told the same one is asked again and again who would go, with all sorts of pages held: both then let the
    same pages go, and hold what comes later for equally old."""
    rng = random.Random(5)
    asked, unasked = make(name, 16, True), make(name, 16, True)
    for step in range(300):
        path = [rng.randrange(40) for _ in range(rng.randint(1, 4))]
        path = list(dict.fromkeys(path))
        for _ in range(rng.randrange(4)):
            held = [rng.randrange(40) for _ in range(5)]
            asked.victims(rng.randrange(20), lambda some, held=held: ~np.isin(some, held))
        for policy in (asked, unasked):
            policy.touch(entries(path), worth([Cost.END] * len(path)))
        over = int(asked.knows(entries(list(range(40)))).sum()) - 16
        if step % 2:
            assert leave(asked, over) == leave(unasked, over)
    everything = leave(asked, 99)
    assert len(everything) > 8
    assert everything == leave(unasked, 99)


def test_holding_and_moving_are_no_uses() -> None:
    s3 = make(Eviction.S3FIFO, 8, False)
    for e in range(8):
        s3.touch(entries([e]))
    for _ in range(3):
        s3.touch(entries([0]), used=False)
    assert s3.victims(1, ALL).entries.tolist() == [0]
    s3.touch(entries([0]))
    assert s3.victims(1, ALL).entries.tolist() == [1]


def test_a_scan_does_not_wash_out_what_is_used_again() -> None:
    kept = {}
    for name in (Eviction.LRU, Eviction.S3FIFO):
        policy = make(name, 20, False)
        count = 0
        for e in [*range(5), *range(5), *range(100, 140)]:
            if not policy.knows(entries([e]))[0]:
                if count == 20:
                    leave(policy, 1)
                else:
                    count += 1
            policy.touch(entries([e]))
        kept[name] = int(policy.knows(entries(list(range(5)))).sum())
    assert kept == {Eviction.LRU: 0, Eviction.S3FIFO: 5}


def test_the_ghost_remembers_the_last_ones() -> None:
    ghost = Ghost(3)
    ghost.add(np.array([10, 11]))
    ghost.add(np.array([12, 13]))
    assert ghost.has(np.array([10, 11, 12, 13, 14])).tolist() == [False, True, True, True, False]


def test_what_has_expired_goes_first_whatever_the_policy() -> None:
    for name in Eviction:
        policy = make(name, 8, True)
        policy.touch(entries([1]), worth([Cost.COPY]))
        policy.touch(entries([3, 2]), worth([Cost.END] * 2, 5, expires=10.0))
        assert policy.victims(1, ALL, 9.0).entries.tolist() == [1]
        assert policy.victims(3, ALL, 10.0).entries.tolist() == [3, 2, 1]
        policy.touch(entries([2]), worth([Cost.END], 5, expires=20.0))
        assert policy.victims(3, ALL, 11.0).entries.tolist() == [3, 1, 2]


def test_expiry_keeps_no_more_than_it_must() -> None:
    lru = Lru()
    for i in range(3000):
        lru.touch(entries([i % 5]), worth([Cost.END], expires=1e6 + i))
    assert len(lru._soon) <= 2 * 5 + 64 + 1
    assert lru.victims(9, ALL, 2e6).entries.tolist() == [0, 1, 2, 3, 4]
