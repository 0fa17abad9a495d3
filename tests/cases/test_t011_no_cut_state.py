"""T011: a state cannot be cut to a shorter key: it is of the length at which it was made, or it is nothing."""

from __future__ import annotations

from hicache_ray.testing import Stack, full, state
from tests.core.drive import at_rest, prompt

SHARED = prompt(1, 96)
FIRST = [*SHARED, *prompt(2, 32)]
SECOND = [*SHARED, *prompt(3, 96)]


def test_t011_a_state_is_stored_under_its_own_length_only() -> None:
    stack = Stack(page=1, l1=512, l2=512, pools={"full": full(), "state": state(every=64)})
    stack.put(FIRST)
    stack.settle()
    assert stack.have("l1", "state", FIRST) == {64, 128}
    served = stack.put(SECOND)
    stack.settle()
    assert served.l1 == 64
    assert stack.have("l1", "state", SECOND) == {64, 128, 192}
    assert stack.probe([*SHARED, *prompt(4, 50)]).reusable == 64
    assert stack.read(SECOND, "state") == stack.made(SECOND, "state")
    # Another component ends at 96: nothing turns the state of 192 into one of 96.
    for tier in ("l1", "l2", "l3"):
        stack.drop(tier, "full", SECOND, range(96, 192))
    found = stack.probe(SECOND)
    assert (found.l1, found.l2, found.l3, found.reusable) == (64, 64, 64, 64)
    assert stack.have("l1", "state", SECOND) == {64, 128, 192}
    assert stack.put(SECOND).l1 == 64
    stack.settle()
    at_rest(stack)
