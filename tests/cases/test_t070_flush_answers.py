"""T070: flush answers."""

from __future__ import annotations

import pytest

from hicache_ray.errors import Busy
from hicache_ray.testing import Stack, full, state

PROMPT = list(range(1, 514))


def busy(ranks: int = 2) -> Stack:
    stack = Stack(page=64, pools={"full": full(), "state": state(128)}, ranks=ranks)
    stack.put(PROMPT)
    stack.settle()
    stack.begin(PROMPT + list(range(600, 900)), "r")
    return stack


def test_t070_busy_without_a_timeout_is_refused() -> None:
    stack = busy()
    with pytest.raises(Busy, match="1 requests are under way; give timeout_s to wait for them"):
        stack.flush()
    assert stack.probe(PROMPT).l1 == 512
    stack.settle()
    assert stack.served["r"].l1 == 512
    stack.flush()
    assert (stack.probe(PROMPT).l1, stack.probe(PROMPT).l2) == (0, 0)


def test_t070_with_a_timeout_it_waits_and_succeeds() -> None:
    stack = busy()
    stack.flush(timeout=5.0)
    assert stack.served["r"].l1 == 512
    assert stack.clock() < 5.0
    found = stack.probe(PROMPT)
    assert (found.l1, found.l2, found.l3) == (0, 0, 512)  # L3 is kept unless asked
    stack.audit()


def test_t070_with_l3_nothing_is_left_on_any_rank() -> None:
    stack = busy()
    stack.flush(l1=True, l2=True, l3=True, timeout=5.0)
    found = stack.probe(PROMPT)
    assert (found.l1, found.l2, found.l3, found.reusable) == (0, 0, 0, 0)
    for rank in range(2):
        assert all(stack.have(tier, pool, PROMPT, rank) == set() for tier in ("l1", "l2", "l3") for pool in ("full", "state"))
    assert stack.store is not None
    assert list(stack.store.scan()) == []
    stack.put(PROMPT)
    stack.settle()
    assert stack.probe(PROMPT).l3 == 512
    stack.audit()


def test_t070_a_timeout_that_is_too_short() -> None:
    stack = busy()
    held = stack.pending()  # the ranks do not answer
    with pytest.raises(Busy, match="all requests and backups to end did not happen within the timeout"):
        stack.flush(timeout=1.0)
    assert stack.probe(PROMPT).l1 == 512
    for envelope in held:
        stack.run(envelope)
    stack.settle()
    assert "r" in stack.served
