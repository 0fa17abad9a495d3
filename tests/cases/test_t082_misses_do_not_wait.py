"""T082: misses do not wait, under no policy."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
@pytest.mark.parametrize(("kind", "seconds", "waited"), [("delay", 0.02, 0.02), ("hang", 1.0, 2.0)])
def test_t082_a_request_waits_for_the_answer_and_never_for_data(kind: str, seconds: float, waited: float, policy: str) -> None:
    """Bounded by the lookup deadline of 2 s."""
    stack = Stack(page=64, pools={"full": full()}, prefetch_policy=policy)
    assert stack.store is not None
    stack.store.fault("lookup", kind, seconds=seconds)
    prompt = list(range(1, 514))
    stack.prefetch("r", prompt)
    stack.settle()
    assert stack.clock() == pytest.approx(waited)
    assert stack.poll("r").tokens == 0
    assert stack.res.pools[(Tier.HOST, "full")].free == 64
    assert stack.res.leases.open() == ()
    assert stack.load("r") == 0
    assert stack.put(prompt) == Served(0, 0, 0, 513)
    assert stack.clock() == pytest.approx(waited)
