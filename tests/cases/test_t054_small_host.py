"""T054: L2 smaller than L1."""

from __future__ import annotations

import pytest

from hicache_ray.testing import Stack, full


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_t054_l2_smaller_than_l1(policy: str) -> None:
    earlier = Stack(page=64, pools={"full": full()})
    other = list(range(9000, 9129))
    earlier.put(other)
    earlier.settle()
    assert earlier.store is not None
    assert len(list(earlier.store.scan())) == 2

    stack = Stack(page=64, pools={"full": full()}, l1=8, l2=4, write_policy=policy, store=earlier.store)
    prompts = [list(range(1000 * i, 1000 * i + 65)) for i in range(8)]
    for prompt in prompts:
        stack.put(prompt[:64])
        stack.settle()
    assert all(stack.have("l1", "full", prompt) == {0} for prompt in prompts)
    written = 8 if policy == "write_through" else 0
    assert len(list(stack.store.scan())) == 2 + written  # type: ignore[union-attr]
    if policy == "write_through":
        assert all(stack.have("l3", "full", prompt) == {0} for prompt in prompts)
    stack.prefetch("r", other)
    stack.settle()
    assert stack.poll("r").tokens == 128
    assert stack.have("l2", "full", other) == {0, 1}
    assert stack.load("r") == 128
    assert stack.read(other, "full") == stack.made(other, "full")
    stack.settle()
    stack.audit()
