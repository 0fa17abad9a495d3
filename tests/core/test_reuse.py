"""How much of a prompt is reused from L3 alone: exactly ``floor((N-1)/S)*S`` tokens, whatever the model's caches are.

S is the least common multiple of the grid and the largest page span or ratio. Every snapshot is kept (``state_snapshots: all``).
"""

from __future__ import annotations

import math

import pytest

from hicache_ray.resume import Limit
from hicache_ray.spec import Component
from hicache_ray.testing import Served, Stack, chunked, full, state, window
from tests.core.drive import at_rest, prompt

#: Components, and the tokens of the largest span or ratio in pages and tokens.
SPECS = {
    "full": {"full": full(layers=1)},
    "window": {"full": full(layers=1), "swa": window(37, layers=1)},
    "window alone": {"swa": window(37, layers=1)},
    "chunked": {"full": full(layers=1), "chunk": chunked(48, layers=1)},
    "state": {"full": full(layers=1), "state": state(layers=1)},
    "state alone": {"state": state(layers=1)},
    "wide": {"full": full(layers=1), "wide": full(page_span=2, layers=1)},
    "compressed": {"full": full(layers=1), "compressed": full(page_span=4, ratio=16, layers=1)},
    "latent": {"latent": full(shard="replicated", layers=1), "index": full(shard="replicated", layers=1)},
    "all": {"full": full(layers=1), "swa": window(20, layers=1), "state": state(layers=1), "wide": full(page_span=2, layers=1)},
    "draft": {"full": full(layers=1), "draft": full(role="draft", lookahead=1, layers=1)},
}


def step(parts: dict[str, Component], page: int, grid: int) -> int:
    spans = [page * c.page_span for c in parts.values() if c.role == "target"]
    return math.lcm(page, grid or page, *spans, *(c.ratio for c in parts.values()))


GRIDS = [(4, 0, False), (4, 8, True), (4, 24, True), (8, 8, True), (8, 48, True), (16, 32, True)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("page", "grid", "exact"), GRIDS)
def test_what_is_reused_after_a_flush(name: str, page: int, grid: int, exact: bool) -> None:
    parts = SPECS[name]
    s = step(parts, page, grid if exact else 0)
    for policy, lengths in (("wait_complete", (s - 1, s, s + 1, 2 * s)), ("timeout", (3 * s + 1, 3 * s + page))):
        stack = Stack(page=page, pools=parts, grid=grid, exact=exact, l1=128, l2=128, ranks=2, prefetch_policy=policy)
        for seed, n in enumerate(lengths):
            if n < 1:
                continue
            tokens = prompt(seed, n)
            stack.put(tokens)
            stack.settle()
            stack.flush()
            reused = (n - 1) // s * s
            assert stack.put(tokens, "r") == Served(0, 0, reused, n - reused)
            assert stack._jobs["r"].limit is Limit.NONE
            stack.settle()
        at_rest(stack)


def test_the_callers_limit_and_the_match_are_one_range() -> None:
    stack = Stack(page=4, pools=SPECS["all"], grid=8, exact=True, ranks=2)
    tokens = prompt(1, 100)
    stack.put(tokens)
    stack.settle()
    stack.flush()
    for limit, reused in ((None, 96), (99, 96), (98, 96), (95, 88), (40, 40), (7, 0), (0, 0)):
        assert stack.probe(tokens, limit=limit).l3 == reused
        assert stack.put(tokens, "r", limit=limit) == Served(0, 0, reused, 100 - reused)
        assert stack._jobs["r"].limit is (Limit.NONE if limit in (None, 99) else Limit.CALLER)
        stack.settle()
        stack.flush()
