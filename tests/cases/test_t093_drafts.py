"""T093: a draft component rides with its target, or is told how much of it holds; it never limits the target."""

from __future__ import annotations

import pytest

from hicache_ray.testing import Stack, full, window
from tests.core.drive import at_rest, prompt

PROMPT = prompt(7, 641)
POOLS = {"full": full(), "draft": full(role="draft", lookahead=1)}


def stored(**more: object) -> Stack:
    """The prompt is in L3 and nowhere else."""
    stack = Stack(pools=POOLS, **more)  # type: ignore[arg-type]
    stack.put(PROMPT)
    stack.settle()
    stack.flush()
    return stack


@pytest.mark.parametrize("ranks", [1, 2])
def test_t093_the_draft_comes_back_with_its_target(ranks: int) -> None:
    stack = stored(ranks=ranks)
    assert stack.put(PROMPT, rid="again").l3 == 640
    assert stack.draft("again", "draft") == 640
    for rank in range(ranks):
        assert stack.read(PROMPT, "draft", rank) == stack.made(PROMPT, "draft", rank)
    stack.settle()
    at_rest(stack)


@pytest.mark.parametrize(("missing", "valid"), [({0}, 0), ({4}, 256), ({9}, 576), (set(range(10)), 0)])
def test_t093_where_draft_pages_are_missing_the_target_hits_and_the_draft_is_told(missing: set[int], valid: int) -> None:
    stack = stored()
    stack.drop("l3", "draft", PROMPT, missing)
    assert stack.probe(PROMPT).reusable == 640
    served = stack.put(PROMPT, rid="again")
    assert (served.l3, served.computed) == (640, 1)
    assert stack.draft("again", "draft") == valid
    stack.settle()
    # The draft has made up for the rest, in slots of its own, and the whole is there for the next one.
    assert stack.have("l1", "draft", PROMPT) == set(range(10))
    assert stack.read(PROMPT, "draft") == stack.made(PROMPT, "draft")
    stack.flush(l2=True)
    stack.put(PROMPT, rid="third")
    assert stack.draft("third", "draft") == 640
    stack.settle()
    at_rest(stack)


def test_t093_a_tail_of_another_continuation_is_not_ours() -> None:
    """The last draft entry of a page depends on the token after it: a prompt that goes on otherwise cannot use that page."""
    stack = stored()
    shared = [*PROMPT[:320], *prompt(8, 100)]
    assert shared[320] != PROMPT[320]
    served = stack.put(shared, rid="other")
    assert served.l3 == 320
    assert stack.draft("other", "draft") == 256
    assert stack.read(shared, "draft") == stack.made(shared, "draft")
    stack.settle()
    same = stack.put(PROMPT, rid="first")
    assert same.l1 + same.l2 + same.l3 == 640
    assert stack.draft("first", "draft") == 640
    stack.settle()
    at_rest(stack)


def test_t093_a_draft_whose_copy_fails_is_told_and_the_target_goes_on() -> None:
    stack = Stack(pools=POOLS)
    stack.put(PROMPT)
    stack.settle()
    stack.flush(l1=True, l2=False)
    stack.fail_copy("l2", "l1", "draft", 3)
    served = stack.put(PROMPT, rid="again")
    assert (served.l2, served.computed) == (640, 1)
    assert stack.draft("again", "draft") == 192
    assert stack.read(PROMPT, "draft") == stack.made(PROMPT, "draft")
    stack.settle()
    at_rest(stack)


def test_t093_exact_targets_and_window_drafts() -> None:
    stack = Stack(pools={"full": full(), "draft": window(100, role="draft", lookahead=2)}, exact=True, grid=256)
    stack.put(PROMPT, rid="cold")
    assert stack.draft("cold", "draft") == 0
    stack.settle()
    stack.flush()
    assert stack.put(PROMPT, rid="again").l3 == 512
    assert stack.draft("again", "draft") == 512
    assert stack.have("l1", "draft", PROMPT[:513]) >= {6}
    assert stack.read(PROMPT, "draft") == stack.made(PROMPT, "draft") != b""
    stack.settle()
    at_rest(stack)
