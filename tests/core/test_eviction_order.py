"""The order of eviction over the whole core: copies first, branch points and last lengths last, hints, under every policy."""

from __future__ import annotations

import pytest

from hicache_ray.policy_order import Cost
from hicache_ray.settings import Eviction
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import prompt

EVERY = pytest.mark.parametrize("eviction", list(Eviction))
PAGE = 64


def stack_of(eviction: Eviction, write_policy: str = "write_back", storage: bool = False, **pools: object) -> Stack:
    more = {"storage": storage, "eviction": eviction}
    return Stack(pools={"full": full(), **pools}, write_policy=write_policy, settings=more)  # type: ignore[arg-type]


@EVERY
def test_copies_of_what_the_host_has_leave_the_device_first(eviction: Eviction) -> None:
    stack = stack_of(eviction)
    old, new = prompt(1, PAGE * 5 + 1), prompt(2, PAGE * 5 + 1)
    stack.put(new)
    stack.settle()
    stack.evict_l1(64)  # to the host
    stack.put(old)
    stack.settle()
    stack.put(new)  # back on the device, a copy, and used last
    stack.settle()
    stack.evict("l1", {"full": 64 - 10 + 5})
    assert (len(stack.have("l1", "full", old)), len(stack.have("l1", "full", new))) == (5, 0)
    stack.audit()


@EVERY
def test_copies_of_what_storage_has_leave_the_host_first(eviction: Eviction) -> None:
    stack = stack_of(eviction, "write_through", storage=True)
    durable, alone = prompt(1, PAGE * 5 + 1), prompt(2, PAGE * 5 + 1)
    assert stack.store is not None
    stack.store.fault("put", "error", 1)
    stack.put(alone)
    stack.settle()
    stack.put(durable)
    stack.settle()
    assert stack.probe(alone).l3 == 0
    stack.evict("l2", {"full": 64 - 10 + 5})
    assert (len(stack.have("l2", "full", alone)), len(stack.have("l2", "full", durable))) == (5, 0)
    stack.audit()


def test_among_copies_it_is_the_older_prompt_that_goes() -> None:
    """Under write-through the host has all of it: the last state of an old prompt does not outlive the inner ones of new ones for ever."""
    stack = stack_of(Eviction.LRU, "write_through", state=state(PAGE))
    old, new = prompt(1, PAGE * 8 + 1), prompt(2, PAGE * 8 + 1)
    for tokens in (old, new):
        stack.put(tokens)
        stack.settle()
    pool = stack.res.pools[(Tier.DEVICE, "state")]
    stack.evict("l1", {"state": pool.free + 8})
    assert (stack.have("l1", "state", old), len(stack.have("l1", "state", new))) == (set(), 8)
    stack.audit()


@EVERY
def test_branch_points_and_last_lengths_outlive_inner_snapshots(eviction: Eviction) -> None:
    stack = stack_of(eviction, state=state(PAGE), swa=window(PAGE * 2))
    trunk = prompt(1, PAGE * 8)
    paths = [trunk + prompt(n, PAGE * 4 + 1) for n in (2, 3)]
    for path in paths:
        stack.put(path)
        stack.settle()
    cached = {n for path in paths for n in stack.have("l1", "state", path)}
    assert max(cached) == PAGE * 12
    free = stack.res.pools[(Tier.DEVICE, "state")].free
    held = stack.res.pools[(Tier.DEVICE, "state")].cached
    stack.evict("l1", {"state": free + held - 3})
    for path in paths:
        assert stack.have("l1", "state", path) == {PAGE * 8, PAGE * 12}
    pool = stack.res.pools[(Tier.DEVICE, "swa")]
    stack.evict("l1", {"swa": pool.free + pool.cached - 6})
    for path in paths:
        assert stack.have("l1", "swa", path) == {6, 7, 10, 11}
    stack.audit()


def test_a_talk_that_goes_on_has_one_end() -> None:
    """What was the last length is an inner one once the prompt has grown; it is no branch point."""
    stack = stack_of(Eviction.LRU, state=state(PAGE))
    talk = prompt(1, PAGE * 12 + 1)
    for turn in (4, 8, 12):
        stack.put(talk[: PAGE * turn + 1])
        stack.settle()
    entries = stack.res.index.in_place((Tier.DEVICE, "state"))
    costs = stack.res.policies[(Tier.DEVICE, "state")].costs(entries).tolist()
    assert costs.count(Cost.END) == 1
    assert costs.count(Cost.INNER) == 11


@EVERY
def test_after_its_time_a_prompt_goes_first(eviction: Eviction) -> None:
    stack = stack_of(eviction)
    short, long = prompt(1, PAGE * 5 + 1), prompt(2, PAGE * 5 + 1)
    stack.put(long)
    stack.put(short, ttl_s=10.0)
    stack.settle()
    stack.clock.advance(11.0)
    stack.evict("l1", {"full": 64 - 10 + 5})
    assert (len(stack.have("l1", "full", short)), len(stack.have("l1", "full", long))) == (0, 5)
    stack.audit()


def test_a_request_without_a_time_keeps_what_it_shares() -> None:
    stack = stack_of(Eviction.LRU)
    shared = prompt(1, PAGE * 3)
    stack.put(shared + prompt(2, PAGE * 2 + 1), ttl_s=5.0)
    stack.put(shared + prompt(3, PAGE * 2 + 1))
    stack.settle()
    stack.clock.advance(6.0)
    stack.evict("l1", {"full": 64 - 7 + 2})
    assert len(stack.have("l1", "full", shared + prompt(3, PAGE * 2 + 1))) == 5


def test_a_higher_priority_stays_longer() -> None:
    stack = stack_of(Eviction.PRIORITY)
    high, low = prompt(1, PAGE * 5 + 1), prompt(2, PAGE * 5 + 1)
    stack.put(high, priority=3)
    stack.put(low)
    stack.settle()
    stack.evict("l1", {"full": 64 - 10 + 5})
    assert (len(stack.have("l1", "full", high)), len(stack.have("l1", "full", low))) == (5, 0)
    stack.audit()
