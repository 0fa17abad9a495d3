"""What leaves the device when waiting requests have leased the host: it passes through what they leave free, and L3 has it."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.core.drive import at_rest, prompt

PAGES = 10
A, D, E, F = (prompt(seed, 64 * PAGES + 1) for seed in (1, 2, 3, 4))


def crowded() -> Stack:
    """Under write-back, with a device for one prompt: A is in L3, a held prefetch leases it on the host; E is on the device alone."""
    stack = Stack(pools={"full": full()}, write_policy="write_back", l1=PAGES + 2, l2=PAGES)
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


def test_no_page_leaves_all_tiers_while_storage_has_room() -> None:
    stack = crowded()
    stack.put(F)  # takes the device from E
    stack.settle()
    stack.abort("waits")
    stack.settle()
    stack.put(E, "again")
    stack.settle()
    assert stack.served["again"].computed == 1
    at_rest(stack)
