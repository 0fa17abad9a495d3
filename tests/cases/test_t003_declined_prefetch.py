"""T003: a declined prefetch promises nothing, whichever of the three causes it has."""

from __future__ import annotations

import pytest

from hicache_ray.records import Move
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.core.drive import at_rest

PROMPT = list(range(1, 400))


def stored(pages: int, **more: object) -> Stack:
    """L3 holds the first pages of the prompt."""
    stack = Stack(page=64, pools={"full": full()}, **more)  # type: ignore[arg-type]
    stack.put(PROMPT[: pages * 64])
    stack.settle()
    stack.flush()
    return stack


def test_t003_below_the_threshold() -> None:
    stack = stored(1, prefetch_threshold=256)
    stack.prefetch("r", PROMPT)
    stack.settle()
    poll = stack.poll("r")
    assert (poll.state, poll.tokens) == ("declined", 0)
    assert "prefetch_threshold" in poll.limit
    assert stack.res.pools[(Tier.HOST, "full")].free == 64
    assert stack.res.leases.open() == ()


def test_t003_at_the_threshold_it_is_fetched() -> None:
    stack = stored(4, prefetch_threshold=256)
    stack.prefetch("r", PROMPT)
    stack.settle()
    assert (stack.poll("r").state, stack.poll("r").tokens) == ("ready", 256)


def test_t003_no_host_memory() -> None:
    stack = stored(4, l2=4)
    other = list(range(1000, 1257))
    stack.put(other)
    stack.settle()
    stack.flush(l1=True, l2=False)
    stack.prefetch("holds all of it", other)
    stack.settle()
    assert stack.poll("holds all of it").tokens == 256
    before = [len(x.slots) for x in stack.res.leases.open()]
    stack.prefetch("r", PROMPT)
    stack.settle()
    poll = stack.poll("r")
    assert (poll.state, poll.tokens) == ("declined", 0)
    assert "no host memory" in poll.limit
    assert [len(x.slots) for x in stack.res.leases.open()] == before
    stack.audit()


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_t003_too_many_tokens_on_their_way(policy: str) -> None:
    """What is under way already is as much as may be: the next one waits for a bounded time, under best_effort not at all, and holds
    nothing."""
    stack = stored(4, prefetch_policy=policy, settings={"prefetch_tokens_in_flight": 256})
    other = list(range(1000, 1257))
    stack.put(other)
    stack.settle()
    stack.flush()
    stack.prefetch("first", other)
    stack.step()
    read = [e for e in stack.pending() if isinstance(e.record, Move)]
    assert stack.cache.restore.fetches.tokens == 256
    stack.prefetch("r", PROMPT)
    stack.step()
    if policy != "best_effort":
        assert stack.poll("r").state == "lookup"
        stack.step(stack.cache.settings.prefetch_base_s)
    poll = stack.poll("r")
    assert (poll.state, poll.tokens) == ("declined", 0)
    assert "prefetch_tokens_in_flight" in poll.limit
    assert stack.res.leases.open("r") == ()
    stack.abort("first")
    for envelope in read:
        stack.run(envelope)
    stack.settle()
    assert stack.cache.restore.fetches.tokens == 0
    stack.abort("r")
    stack.settle()
    at_rest(stack)
