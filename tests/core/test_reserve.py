"""What leaves the device when waiting requests have leased the host: it passes through what they leave free, and L3 has it."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ray.records import Compute, Move
from hicache_ray.resume import Limit
from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full
from tests.core.drive import Steps, all_bytes_are_right, at_rest, is_move, prompt

PAGES = 10
A, D, E, F = (prompt(seed, 64 * PAGES + 1) for seed in (1, 2, 3, 4))


def crowded(policy: str = "write_back", **more: Any) -> Stack:
    """With a device for one prompt: A is in L3, a held prefetch leases it on the host; E is on the device, under write-back there alone."""
    stack = Stack(pools={"full": full()}, write_policy=policy, l1=PAGES + 2, l2=PAGES, **more)
    for tokens in (A, D, E):
        stack.put(tokens)
        stack.settle()
    stack.prefetch("waits", A)
    stack.settle()
    return stack


def test_a_waiting_request_leaves_room_on_the_host() -> None:
    stack = crowded()
    pool = stack.res.pools[(Tier.HOST, "full")]
    place = (Tier.HOST, "full")
    assert stack.res.reserve(place) == 1
    leased = [slot for lease in stack.res.leases.open("waits") if lease.place == place for slot in lease.slots.tolist()]
    assert len(set(leased)) == PAGES - 1
    assert pool.free + pool.idle == 1


@pytest.mark.parametrize("capacity", [0, 1, 2, 64, 1000])
def test_the_reserve_never_takes_all(capacity: int) -> None:
    res = Stack(pools={"full": full()}, l2=max(capacity, 1)).res
    assert 0 <= res.reserve((Tier.HOST, "full")) <= max(capacity, 1) // 2
    assert res.reserve((Tier.DEVICE, "full")) == 0


@pytest.mark.parametrize(
    ("policy", "others", "computed"), [("write_back", [F], 1), ("write_through_selective", [F], 1), ("write_through", [F, D, F], 65)]
)
def test_no_page_leaves_all_tiers_while_storage_has_room(policy: str, others: list[list[int]], computed: int) -> None:
    """What is made while the host is leased passes through the page that is left, as does what has to leave for it."""
    stack = crowded(policy)
    for tokens in others:  # each takes the device from the one before, the first from E
        stack.put(tokens)
        stack.settle()
    for tokens in (A, D, E, *others):
        assert set().union(*(stack.have(tier, "full", tokens) for tier in ("l1", "l2", "l3"))) == set(range(PAGES))
    assert stack.res.counters[(Tier.HOST, "full")].refused == 0
    stack.abort("waits")
    stack.settle()
    stack.put(E, "again")
    stack.settle()
    assert stack.served["again"].computed == computed  # all that L3 brings at once leaves a page of the host free
    at_rest(stack)


@pytest.mark.parametrize("hangs_at", [1, 4])
def test_a_request_that_needs_room_waits_for_storage_as_long_as_for_host_memory_and_no_longer(hangs_at: int) -> None:
    """Page by page E goes through the host to L3, until that hangs; then the request has the device, and what was left of E is lost."""
    stack = crowded(settings={"prefetch_base_s": 1.5})
    assert stack.store is not None
    stack.store.fault("put", "hang", hangs_at)
    began = stack.clock()
    stack.put(F, "r")
    assert stack.clock() - began == pytest.approx(1.5)
    assert stack.served["r"].computed == len(F)
    stack.settle()
    stack.abort("waits")
    stack.settle()
    at_rest(stack)
    assert len(stack.have("l3", "full", E)) == hangs_at - 1


def test_all_rounds_of_a_request_that_needs_room_share_that_time() -> None:
    stack = crowded(settings={"prefetch_base_s": 1.5})
    stack.begin(F, "r")
    steps, allowed = Steps(stack), []
    for _ in range(3):
        write = steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE))
        assert isinstance(write.record, Move)
        allowed.append(write.record.timeout_s)
        stack.clock.advance(0.5)
        stack.run(write)
    assert allowed == [1.5, 1.0, 0.5]
    steps.run()
    assert stack.served["r"].computed == len(F)
    stack.abort("waits")
    steps.settle()
    at_rest(stack)
    assert len(stack.have("l3", "full", E)) == 3 + 1  # the last one is on the host when the time is over, and is written after that


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_a_request_that_loads_all_of_the_host_loses_no_page_that_leaves_the_device_for_it(policy: str) -> None:
    """A is all that the host has and D all that the device has, alone. D leaves through the page of A that L3 has as well."""
    stack = Stack(pools={"full": full()}, write_policy=policy, l1=PAGES + 1, l2=PAGES)
    for tokens in (A, D):
        stack.put(tokens)
        stack.settle()
    assert stack.have("l2", "full", A) == stack.have("l3", "full", A) == set(range(PAGES))
    assert stack.have("l2", "full", D) | stack.have("l3", "full", D) == set()
    stack.put(A, "r")
    assert stack.served["r"] == Served(0, 64 * (PAGES - 1), 0, 65)
    assert stack._jobs["r"].limit is Limit.HOST_ROOM
    stack.settle()
    for tokens in (A, D):
        assert set().union(*(stack.have(tier, "full", tokens) for tier in ("l1", "l2", "l3"))) == set(range(PAGES))
    assert stack.res.counters[(Tier.HOST, "full")].refused == 0
    at_rest(stack)
    all_bytes_are_right(stack, [A, D])


def test_without_storage_a_request_loads_all_of_the_host() -> None:
    """What leaves the device for it has nowhere to go, and the host gives up nothing for that."""
    stack = Stack(pools={"full": full()}, write_policy="write_back", l1=PAGES + 1, l2=PAGES, settings={"storage": False})
    for tokens in (A, D):
        stack.put(tokens)
        stack.settle()
    stack.put(A, "r")
    assert stack.served["r"] == Served(0, 64 * PAGES, 0, 1)
    stack.settle()
    assert stack.have("l1", "full", A) == stack.have("l2", "full", A) == set(range(PAGES))
    at_rest(stack)


def test_a_running_request_leases_nothing_on_the_host() -> None:
    """What it resumes from is on the device, and stays there: the host's copies are others' to replace."""
    stack = Stack(pools={"full": full()}, l1=2 * PAGES + 2, l2=PAGES)
    stack.put(A)
    stack.settle()
    stack.flush(l1=True, l2=False)
    stack.begin(A, "r")
    steps = Steps(stack)
    run = steps.until(lambda e: isinstance(e.record, Compute))
    held = {lease.place[0]: len(lease.slots) for lease in stack.res.leases.open("r")}
    assert set(held) == {Tier.DEVICE}
    assert stack.res.pools[(Tier.HOST, "full")].idle == PAGES
    stack.run(run)
    steps.settle()
    assert stack.served["r"] == Served(0, 64 * PAGES, 0, 1)
    at_rest(stack)


@pytest.mark.parametrize("answers", [True, False])
def test_what_leaves_the_device_waits_for_the_pages_that_storage_is_being_given(answers: bool) -> None:
    """A fills the host and is on its way to L3 when D has to leave as well: D is kept until there is room, but not for ever."""
    stack = Stack(pools={"full": full()}, write_policy="write_back", l1=PAGES + 1, l2=PAGES, settings={"prefetch_base_s": 1.5})
    stack.put(A)
    stack.settle()
    stack.begin(D, "d")
    steps = Steps(stack)
    write = steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE))
    steps.run()
    assert stack.served["d"].computed == len(D)
    began = stack.clock()
    stack.begin(E, "e")
    steps.run()
    assert stack.res.pools[(Tier.HOST, "full")].idle == 0
    assert stack.group.next_deadline() == began + 1.5
    if answers:
        stack.run(write)
    else:
        stack.step(1.5)
    steps.run()
    assert stack.served["e"].computed == len(E)
    if not answers:
        stack.run(write)
    steps.settle()
    kept = stack.have("l2", "full", D) | stack.have("l3", "full", D)
    assert (len(kept), stack.res.counters[(Tier.HOST, "full")].refused) == ((PAGES, 0) if answers else (0, PAGES))
    assert stack.have("l3", "full", A) == set(range(PAGES))
    at_rest(stack)


def test_what_leaves_the_device_waits_for_pages_that_are_on_their_way_to_the_host() -> None:
    """The backup of A, which has been used twice, holds the host when D has to leave, which has been used once."""
    settings = {"device_reserve": 0}
    stack = Stack(pools={"full": full()}, write_policy="write_through_selective", l1=2 * PAGES + 1, l2=PAGES, settings=settings)
    for tokens in (D, A):
        stack.put(tokens)
        stack.settle()
    stack.begin(A, "again")
    steps = Steps(stack)
    copy = steps.until(lambda e: is_move(e, Tier.DEVICE, Tier.HOST))
    steps.run()
    stack.begin(E, "e")
    steps.run()
    assert "e" not in stack.served
    stack.run(copy)
    steps.settle()
    assert stack.served["e"].computed == len(E)
    for tokens in (A, D):
        assert set().union(*(stack.have(tier, "full", tokens) for tier in ("l1", "l2", "l3"))) == set(range(PAGES))
    assert stack.res.counters[(Tier.HOST, "full")].refused == 0
    at_rest(stack)
