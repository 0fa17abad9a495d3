"""T057: two big reads, one small pool. Whoever comes second holds nothing while it waits, and waits for a bounded time."""

from __future__ import annotations

import pytest

from hicache_ray.records import Move
from hicache_ray.resume import Limit
from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack
from tests.core.drive import at_rest, prompt

#: 4 pages of 64 tokens and one token more.
A, B, C = (prompt(seed, 257) for seed in (1, 2, 3))


def stored(**more: object) -> Stack:
    """All three prompts are in L3 and nowhere else; L2 has 6 pages, and one more that requests which wait never lease."""
    stack = Stack(**{"page": 64, "l2": 7, **more})  # type: ignore[arg-type]
    for tokens in (A, B, C):
        stack.put(tokens)
        stack.settle()
    stack.flush()
    return stack


def reads(stack: Stack) -> list[str]:
    return [e.record.rid for e in stack.executed[0] if isinstance(e.record, Move) and e.record.source is Tier.STORAGE]


def room(stack: Stack) -> int:
    return stack.res.room((Tier.HOST, "full"))


@pytest.mark.parametrize("l2", [6, 7])
def test_t057_the_second_waits_and_both_finish(l2: int) -> None:
    stack = stored(l2=l2)
    stack.prefetch("a", A)
    stack.prefetch("b", B)
    for _ in range(10):
        stack.step()
    assert stack.poll("a").tokens == 256
    assert (stack.poll("b").state, stack.poll("b").tokens) == ("lookup", 0)
    assert reads(stack) == ["a"]
    assert room(stack) == l2 - 4  # the four pages of the first are leased, the second holds none
    assert stack.load("a") == 256
    for _ in range(10):
        stack.step()
    assert reads(stack) == ["a", "b"]
    assert stack.poll("b").tokens == 256
    assert stack.load("b") == 256
    stack.settle()
    at_rest(stack)
    assert stack.read(A, "full") == stack.made(A, "full") != b""
    assert stack.read(B, "full") == stack.made(B, "full") != b""


@pytest.mark.parametrize("l2", [6, 7])
def test_t057_two_requests(l2: int) -> None:
    """Whoever is at the device gives its host pages back when it ends."""
    stack = stored(l2=l2)
    stack.begin(A, "a")
    stack.begin(B, "b")
    stack.settle()
    assert stack.served == {**stack.served, "a": Served(0, 0, 256, 1), "b": Served(0, 0, 256, 1)}
    assert stack.clock.now == 0.0  # nobody has waited for a deadline
    at_rest(stack)


def test_t057_the_wait_has_a_bound() -> None:
    """Nobody gives anything back: after the deadline the second takes what fits."""
    stack = stored()
    stack.prefetch("a", A)
    for _ in range(10):
        stack.step()
    stack.prefetch("b", B)
    for _ in range(10):
        stack.step()
    assert stack.poll("b").state == "lookup"
    assert stack.group.next_deadline() == stack.clock() + stack.cache.settings.prefetch_base_s
    stack.step(stack.cache.settings.prefetch_base_s)
    for _ in range(10):
        stack.step()
    assert stack.poll("b").tokens == 128
    assert stack.poll("b").limit == Limit.HOST_ROOM.value
    for rid in ("a", "b"):
        stack.abort(rid)
    stack.settle()
    at_rest(stack)


@pytest.mark.parametrize("who", ["a", "b"])
def test_t057_either_may_give_up(who: str) -> None:
    stack = stored()
    stack.prefetch("a", A)
    stack.prefetch("b", B)
    for _ in range(10):
        stack.step()
    stack.abort(who)
    for _ in range(10):
        stack.step()
    other = "b" if who == "a" else "a"
    assert stack.poll(who).state == "cancelled"
    assert stack.poll(other).tokens == 256
    stack.abort(other)
    stack.settle()
    at_rest(stack)


def test_t057_those_who_wait_go_on_in_the_order_in_which_they_came() -> None:
    stack = stored()
    for rid, tokens in (("a", A), ("b", B), ("c", C)):
        stack.prefetch(rid, tokens)
        for _ in range(4):
            stack.step()
    assert stack.load("a") == 256
    for _ in range(10):
        stack.step()
    assert reads(stack) == ["a", "b"]
    stack.abort("b")
    for _ in range(10):
        stack.step()
    assert reads(stack) == ["a", "b", "c"]
    assert stack.load("c") == 256
    stack.settle()
    at_rest(stack)


def test_t057_what_can_never_fit_is_not_waited_for() -> None:
    """A prompt larger than the pool takes what the pool can hold at once, but for the page that is kept for what leaves the device."""
    long = prompt(4, 64 * 9 + 1)
    stack = Stack(page=64, l2=7)
    stack.put(long)
    stack.settle()
    stack.flush()
    stack.prefetch("long", long)
    for _ in range(10):
        stack.step()
    assert stack.poll("long").tokens == 384
    assert stack.clock.now == 0.0
    assert stack.load("long") == 384
    stack.settle()
    at_rest(stack)
