"""T077: an index that holds no bytes over pools of other page ratios."""

from __future__ import annotations

import pytest

from hicache_ray.errors import ConfigError
from hicache_ray.testing import Served, Stack, full, state
from tests.queues import WHERE, Queue, devices

PARTS = {"c4": full(ratio=4), "c128": full(page_span=2, ratio=128), "kv": full(), "tail": state(128)}


@WHERE
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_t077_pools_of_ratio_1_4_and_128(policy: str, layout: str, queue: Queue | None) -> None:
    """They register, store and restore; the lengths to resume from are multiples of what all members can."""
    stack = Stack(page=64, pools=PARTS, ranks=2, write_policy=policy, layout=layout, devices=devices(queue, 2))
    assert stack.spec.step(None) == 128
    sizes = {name: stack.spec[name].entries(64) for name in PARTS}
    assert sizes == {"c4": 16, "c128": 1, "kv": 64, "tail": 1}
    prompt = list(range(1, 707))
    stack.put(prompt)
    stack.settle()
    stack.evict_l1(64)
    assert stack.have("l2", "c128", prompt) == {1, 3, 5, 7, 9}
    found = stack.probe(prompt)
    assert (found.l2, found.l3) == (640, 640)
    assert stack.put(prompt) == Served(0, 640, 0, 66)
    for rank in range(2):
        assert all(stack.read(prompt, name, rank) == stack.made(prompt, name, rank) for name in PARTS)
    stack.settle()
    stack.flush()
    assert stack.put(prompt) == Served(0, 0, 640, 66)
    for rank in range(2):
        assert all(stack.read(prompt, name, rank) == stack.made(prompt, name, rank) for name in PARTS)
    stack.settle()
    stack.audit()


def test_t077_decided_at_the_start() -> None:
    with pytest.raises(ConfigError, match="a page of 64 x 1 tokens does not hold whole entries of 128 tokens"):
        Stack(page=64, pools={"c128": full(ratio=128)})
