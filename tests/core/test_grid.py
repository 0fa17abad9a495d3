"""The grid, and what is canonical: under ``exact`` a resume lies on a chunk boundary and reads only what whole chunks have made."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Component
from hicache_ray.testing import Served, Stack, full, state
from tests.core.drive import all_bytes_are_right, at_rest, prompt
from tests.core.test_rules import ALL_KINDS, right_bytes

C = 256


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 255, 256, 257, 320, 511, 512, 513, 640, 768, 1000])
@pytest.mark.parametrize("parts", [{"full": full()}, ALL_KINDS], ids=["full", "all kinds"])
def test_exact_resumes_on_the_grid_from_every_tier(tokens: int, parts: dict[str, Component]) -> None:
    stack = Stack(pools=parts, exact=True, grid=C, ranks=2)
    path = prompt(5, tokens)
    whole, longer = (tokens - 1) // C * C, path + prompt(6, 30)
    stack.put(path)
    stack.settle()
    found = stack.probe(path)
    assert (found.l1, found.l2, found.l3, found.reusable) == (whole, whole, whole, whole)
    assert stack.probe(longer).reusable == tokens // C * C
    assert stack.put(path) == Served(whole, 0, 0, tokens - whole)
    stack.settle()
    stack.flush(l1=True, l2=False)
    assert stack.put(path) == Served(0, whole, 0, tokens - whole)
    right_bytes(stack, path)
    stack.settle()
    stack.flush()
    assert stack.put(path) == Served(0, 0, whole, tokens - whole)
    right_bytes(stack, path)
    stack.settle()
    k = tokens // C * C
    served = stack.put(longer)
    assert (served.l1 + served.l2 + served.l3, served.computed) == (k, len(longer) - k)
    right_bytes(stack, longer)
    stack.settle()
    all_bytes_are_right(stack, [longer])
    at_rest(stack)


@pytest.mark.parametrize(("given", "decoded"), [(255, 300), (256, 300), (300, 700), (511, 1), (512, 0), (513, 0)])
def test_under_exact_nothing_that_a_partial_chunk_or_decode_made_is_published(given: int, decoded: int) -> None:
    stack = Stack(pools=ALL_KINDS, exact=True, grid=C)
    tokens = prompt(8, given + decoded)
    stack.put(tokens, decoded=decoded)
    stack.settle()
    top = given // C * C
    for tier in ("l1", "l2", "l3"):
        assert stack.have(tier, "full", tokens) == stack.have(tier, "swa", tokens) == set(range(top // 64))
        assert stack.have(tier, "wide", tokens) == set(range(1, top // 64, 2))
        assert stack.have(tier, "state", tokens) == set(range(256, top + 1, 256))
    all_bytes_are_right(stack, [tokens])
    assert stack.probe([*tokens, 1]).reusable == top


def test_without_exact_what_decode_made_is_published_too() -> None:
    stack = Stack(pools={"full": full(), "state": state(128)})
    tokens = prompt(8, 700)
    stack.put(tokens, decoded=400)
    assert stack.have("l1", "full", tokens) == set(range(10))
    assert stack.have("l1", "state", tokens) == {128, 256, 384, 512, 640}
    assert stack.probe([*tokens, 1]).l1 == 640


@pytest.mark.parametrize("shared", [1, 63, 64, 255, 256, 257, 400, 511, 512, 600, 767])
def test_prompts_that_part_inside_a_chunk_share_up_to_the_boundary_before(shared: int) -> None:
    """Already the second request reuses it: no request has to come twice for that."""
    stack = Stack(pools=ALL_KINDS, exact=True, grid=C)
    head = prompt(1, shared)
    one, two = head + prompt(2, 768 - shared), head + prompt(3, 768 - shared)
    stack.put(one)
    assert stack.put(two) == Served(shared // C * C, 0, 0, 768 - shared // C * C)
    right_bytes(stack, two)
    right_bytes(stack, one)
    stack.settle()
    all_bytes_are_right(stack, [one, two])


def test_the_caller_may_resume_shorter() -> None:
    stack = Stack(pools=ALL_KINDS, exact=True, grid=C)
    tokens = prompt(1, 1000)
    stack.put(tokens)
    stack.settle()
    for limit, k in ((0, 0), (255, 0), (256, 256), (700, 512), (5000, 768)):
        assert stack.probe(tokens, limit=limit).reusable == k
        assert stack.put(tokens, limit=limit).computed == 1000 - k
        right_bytes(stack, tokens)
    stack.settle()
    at_rest(stack)
