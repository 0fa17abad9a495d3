"""T003: a declined prefetch promises nothing. (Of the three causes, a rate limit does not exist yet.)"""

from __future__ import annotations

from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full

PROMPT = list(range(1, 400))


def stored(pages: int, **more: int) -> Stack:
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
