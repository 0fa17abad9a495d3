"""T102: one failed batch of a backup leaves an honest durable length, and the next touch makes up for it."""

from __future__ import annotations

import pytest

from hicache_ray.keys import other
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.core.drive import at_rest, prompt


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_t102_one_failed_batch(policy: str) -> None:
    stack = Stack(page=64, pools={"full": full()}, batch=4, write_policy=policy)
    tokens = prompt(1, 641)
    assert stack.store is not None
    stack.store.fault("put", "error", 2)
    stack.put(tokens)
    stack.settle()
    stack.evict_l1(64)
    place = (Tier.HOST, "full")

    def durable() -> int:
        keys = stack._path(stack._prompts["request 1"]).keys
        entries = stack.res.index.find([other(key) for key in keys])
        flags = stack.res.index.durable(place, entries).tolist()
        assert flags == sorted(flags, reverse=True)
        return sum(flags)

    assert stack.probe(tokens).l3 == 64 * durable()
    assert stack.have("l3", "full", tokens) == set(range(durable()))
    assert durable() == 4
    stack.put(tokens)
    stack.settle()
    assert durable() == 10
    assert stack.probe(tokens).l3 == 640
    at_rest(stack)
