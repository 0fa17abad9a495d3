"""T032: ranks agree on the intersection of what has arrived."""

from __future__ import annotations

from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full


def test_t032_ranks_agree_on_the_intersection() -> None:
    stack = Stack(page=64, pools={"full": full()}, ranks=4)
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    assert stack.probe(prompt).l3 == 512
    assert stack.store is not None
    stack.store.fault("get", "gone", 3, only=(6, 7))  # the third rank reads six pages, the others eight
    stack.prefetch("r", prompt)
    stack.settle()
    assert stack.poll("r").tokens == 384
    assert stack.have("l2", "full", prompt) == {0, 1, 2, 3, 4, 5}
    pool = stack.res.pools[(Tier.HOST, "full")]
    assert (pool.free, pool.cached, pool.held) == (58, 6, 0)
    stack.audit()  # no slot is free twice

    assert stack.load("r") == 384
    for rank in range(4):
        assert stack.read(prompt, "full", rank) == stack.made(prompt, "full", rank)
    # The same later evictions follow on all ranks: slots are of the one index, so the ranks' records name the same ones.
    stack.put(list(range(1000, 1400)))
    stack.evict_l1(62)
    stack.settle()
    served = stack.put(prompt)
    assert served.l1 + served.l2 + served.l3 == 384
    for rank in range(4):
        assert stack.read(prompt, "full", rank) == stack.made(prompt, "full", rank)
    stack.settle()
    stack.audit()
    assert len({tuple(e.record.id for e in executed) for executed in stack.executed}) == 1
