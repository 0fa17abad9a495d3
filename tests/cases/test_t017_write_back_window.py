"""T017: write_back keeps the window of a branch point, whatever the order of evictions."""

from __future__ import annotations

import random

import pytest

from hicache_ray.testing import Stack, full, window


@pytest.mark.parametrize("seed", range(20))
def test_t017_write_back_keeps_the_window(seed: int) -> None:
    rng = random.Random(seed)
    stack = Stack(page=64, pools={"full": full(), "swa": window(64)}, l1=40, write_policy="write_back")
    shared = list(range(1, 257))
    for child in (1000, 2000):
        stack.put(shared + list(range(child, child + 256)))
    stack.settle()
    new = shared + list(range(3000, 3100))
    assert stack.have("l1", "swa", new) == {0, 1, 2, 3}
    assert (stack.probe(new).reusable, stack.probe(new).l2) == (256, 0)

    pieces = [(pool, n) for pool in ("full", "swa") for n in (*rng.sample(range(29, 40), 4), 40)]
    rng.shuffle(pieces)
    for pool, free in pieces:
        stack.evict("l1", {pool: free})
        assert stack.probe(new).reusable == 256
    found = stack.probe(new)
    assert (found.l1, found.l2, found.reusable) == (0, 256, 256)
    served = stack.put(new)
    assert (served.l2, served.computed) == (256, 100)
    for pool in ("full", "swa"):
        assert stack.read(new, pool) == stack.made(new, pool)
    stack.settle()
    stack.audit()
