"""T080: the deadline of a prefetch, and a sidecar that is still under way when it passes."""

from __future__ import annotations

import pytest

from hicache_ray.records import Move
from hicache_ray.resume import Limit
from hicache_ray.settings import PrefetchPolicy, Settings
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full, state
from tests.core.drive import at_rest, prompt


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 2.0), (8192, 2.8), (131_072, 14.8), (1_048_576, 30.0)])
def test_t080_the_formula(tokens: int, seconds: float) -> None:
    assert Settings(prefetch_base_s=2.0, prefetch_per_1k_s=0.1, prefetch_cap_s=30.0).read_deadline(tokens) == pytest.approx(seconds)
    for policy in (PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.BEST_EFFORT):
        assert Settings(prefetch_policy=policy).read_deadline(tokens) == 30.0


def test_t080_all_three_are_settable() -> None:
    assert Settings(prefetch_base_s=1.0, prefetch_per_1k_s=0.5, prefetch_cap_s=4.0).read_deadline(4096) == 3.0
    assert Settings(prefetch_base_s=1.0, prefetch_per_1k_s=0.5, prefetch_cap_s=2.5).read_deadline(4096) == 2.5


@pytest.mark.parametrize(("policy", "seconds", "hung", "whole"), [("timeout", 2.05, 4, 256), ("wait_complete", 30.0, 3, 0)])
def test_t080_a_sidecar_that_is_still_pending_at_the_deadline(policy: str, seconds: float, hung: int, whole: int) -> None:
    """All of the KV is there and the last snapshot is not. The prefetch ends at the deadline, with what is whole: where the deadline may
    cut, the snapshot half-way had come before."""
    tokens = prompt(1, 16 * 32 + 1)
    stack = Stack(page=16, pools={"full": full(), "state": state(16)}, prefetch_policy=policy)
    stack.put(tokens)
    stack.settle()
    stack.flush()
    assert stack.store is not None
    stack.store.fault("get", "hang", hung)  # of each record, first the KV and then the snapshot
    stack.prefetch("r", tokens)
    stack.settle()
    assert stack.clock() == pytest.approx(seconds)
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (whole, Limit.DEADLINE.value)
    pool = stack.res.pools[(Tier.HOST, "full")]
    assert (pool.cached, pool.held) == (whole // 16, 0)
    assert stack.load("r") == whole
    assert sum(isinstance(e.record, Move) and e.record.source is Tier.STORAGE for e in stack.executed[0]) == 2
    stack.settle()
    at_rest(stack)
