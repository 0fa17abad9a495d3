"""T051: flush with releases pending."""

from __future__ import annotations

import pytest

from hicache_ray.errors import Cancelled
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.core.drive import Steps, is_move


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("l3", [False, True])
def test_t051_flush_with_releases_pending(ranks: int, l3: bool) -> None:
    stack = Stack(page=64, pools={"full": full()}, ranks=ranks)
    prompt = list(range(1, 322))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    stack.prefetch("r", prompt)
    steps = Steps(stack)
    reads = [steps.until(lambda e: is_move(e, Tier.STORAGE, Tier.HOST))] + [steps.queue.pop(0) for _ in range(ranks - 1)]
    pool = stack.res.pools[(Tier.HOST, "full")]
    assert (pool.free, pool.held) == (59, 5)
    assert stack.cache.restore.fetches.tokens == 320  # on their way

    stack.flush(l1=True, l2=True, l3=l3)
    assert (pool.free, pool.held, pool.cached) == (59, 5, 0)  # the ranks may still write there
    for envelope in reads:
        stack.run(envelope)
        stack.run(envelope)  # a release that comes twice
    stack.settle()
    assert (pool.free, pool.held, pool.cached) == (64, 0, 0)
    assert sorted(pool._free) == list(range(64))
    assert stack.res.leases.open() == ()
    assert stack.cache.restore.fetches.tokens == 0
    assert isinstance(stack.errors["r"], Cancelled)
    stack.audit()

    stack.put(prompt)
    stack.settle()
    stack.flush()
    stack.prefetch("again", prompt)
    stack.settle()
    assert stack.poll("again").tokens == 320
    assert stack.load("again") == 320
    assert stack.read(prompt, "full") == stack.made(prompt, "full")
    stack.audit()
