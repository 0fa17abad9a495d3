"""Components whose pages are wider than a base page, through random lives of a small group: every hit is legal and every byte right."""

from __future__ import annotations

import random

import pytest

from hicache_ray.spec import Component
from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import prompt

PAGE, WIDE = 16, 64


def parts() -> dict[str, Component]:
    """Like DeepSeek-V4's: a window, entries that fit a page, entries that need four pages, and a tail."""
    return {
        "window": window(40),
        "narrow": full(ratio=4),
        "wide": full(ratio=WIDE, page_span=4),
        "tail": state(),
    }


def stack(**more: object) -> Stack:
    return Stack(PAGE, parts(), **{"l1": 40, "l2": 60, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [True, False])
def test_a_resume_ends_at_a_whole_wide_page(exact: bool) -> None:
    s, tokens = stack(exact=exact, grid=32), prompt(1, 230)
    assert s.put(tokens).computed == 230
    s.settle()
    probe = s.probe(tokens)
    assert (probe.l1, probe.l2, probe.l3) == (192, 192, 192)
    assert s.have("l1", "wide", tokens) == {3, 7, 11}
    assert s.have("l1", "tail", tokens) == {64, 128, 192}
    s.flush()
    assert s.put(tokens).l3 == 192
    for pool in parts():
        assert s.read(tokens, pool) == s.made(tokens, pool)
    s.audit()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_random_lives(policy: str, seed: int) -> None:
    dice = random.Random(seed)
    s = stack(write_policy=policy, grid=32, exact=bool(seed % 2), l2=24 if seed % 3 else 60)
    trunk = prompt(seed, 500)
    seen: list[list[int]] = []
    hits = 0
    for turn in range(25):
        tokens = trunk[: dice.randrange(1, 450)] + prompt(1000 + turn, dice.randrange(0, 60))
        if seen and dice.random() < 0.4:
            tokens = dice.choice(seen) + prompt(2000 + turn, dice.randrange(1, 50))
            tokens = tokens[:520]
        before = s.probe(tokens)
        served = s.put(tokens, decoded=0)
        resumed = len(tokens) - served.computed
        assert resumed % WIDE == 0
        assert resumed >= max(before.l1, before.l2)
        hits += resumed > 0
        seen.append(tokens)
        if dice.random() < 0.7:
            s.settle()
            for pool in parts():
                assert s.read(tokens, pool) == s.made(tokens, pool)
        if dice.random() < 0.2:
            s.evict_l1(dice.randrange(1, 30))
        if dice.random() < 0.1:
            s.flush(l1=True, l2=dice.random() < 0.5, timeout=5.0)
        s.audit()
    s.settle()
    s.audit()
    assert hits > 5
