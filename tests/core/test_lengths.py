"""The one rule against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray import lengths, plan
from hicache_ray.resume import Match
from hicache_ray.spec import CacheSpec, Component, Kind, Tier
from tests.core import rule_twin
from tests.core.rule_twin import component

PAGED = (Kind.FULL, Kind.WINDOW, Kind.CHUNKED)
steady = settings(deadline=None, derandomize=True)


def members(bits: int) -> set[int]:
    return set(lengths.members(bits))


@st.composite
def components(draw: st.DrawFn, name: str = "c", spans: tuple[int, ...] = (1, 1, 2, 3)) -> Component:
    kind = draw(st.sampled_from(Kind))
    reach = draw(st.integers(1, 40)) if kind in (Kind.WINDOW, Kind.CHUNKED) else 0
    return component(kind, reach, 1 if kind is Kind.STATE else draw(st.sampled_from(spans)), name)


def bitsets(pages: int) -> st.SearchStrategy[int]:
    """Mostly there: long runs with few holes are where the rule is interesting."""
    holes = st.lists(st.integers(0, max(pages - 1, 0)), max_size=4).map(lambda at: lengths.ones(pages) & ~sum({1 << i for i in at}))
    return st.one_of(holes, st.integers(0, lengths.ones(pages)))


def test_every_component_and_every_availability_of_five_pages() -> None:
    pages, cases = 5, 0
    for page, kind, span in itertools.product((1, 2, 3, 5), PAGED, (1, 2, 3)):
        for reach in (0,) if kind is Kind.FULL else range(1, 12):
            c = component(kind, reach, span)
            for present in range(1 << pages):
                assert members(lengths.lengths_of(c, present, pages, page)) == rule_twin.lengths_of(c, present, pages, page)
                cases += 1
    assert cases == 4 * 3 * (1 + 11 + 11) * 32
    for present in range(1 << pages):
        c = component(Kind.STATE)
        assert members(lengths.lengths_of(c, present, pages, 4)) == rule_twin.lengths_of(c, present, pages, 4)


@settings(steady, max_examples=1500)
@given(st.data(), components(), st.integers(0, 40), st.integers(1, 9))
def test_one_component_against_its_definition(data: st.DataObject, c: Component, pages: int, page: int) -> None:
    present = data.draw(bitsets(pages))
    noise = data.draw(st.integers(0, 7)) << pages  # what lies beyond the prompt does not matter
    assert members(lengths.lengths_of(c, present | noise, pages, page)) == rule_twin.lengths_of(c, present, pages, page)


@settings(steady, max_examples=700)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(0, 100), st.integers(1, 4))
def test_a_whole_prompt_on_several_ranks(data: st.DataObject, parts: int, ranks: int, page: int, tokens: int, grid_pages: int) -> None:
    """Different holes on every rank, the cap, the caller's limit, the grid; AND first, evaluate once."""
    spec = CacheSpec("any", page, tuple(data.draw(components(f"c{i}")) for i in range(parts)), ranks)
    grid = page * grid_pages
    limit = data.draw(st.none() | st.integers(0, tokens + 5))
    pages = tokens // page
    held = [{c.name: data.draw(bitsets(pages)) for c in spec.components} for _ in range(ranks)]

    allowed = lengths.within(tokens, page, spec.step(grid), limit)
    together = {c.name: lengths.on_all(rank[c.name] for rank in held) for c in spec.components}
    legal = lengths.legal(spec.components, together, allowed, page)

    assert lengths.longest(legal) == rule_twin.resume(spec.components, held, tokens, page, grid, limit)
    each = allowed
    for rank in held:
        each &= lengths.legal(spec.components, rank, allowed, page)
    assert legal == each  # intersecting the ranks' sets is the same as evaluating what all have
    assert legal & 1
    assert not legal & ~allowed


@settings(steady, max_examples=1000)
@given(components(), st.integers(0, 30), st.integers(1, 9))
def test_needed_is_what_makes_a_length_legal_and_nothing_else(c: Component, k: int, page: int) -> None:
    k = k // c.page_span * c.page_span
    needs = lengths.needed(c, k, page)
    bits = sum(1 << i for i in needs)
    assert len(needs) == bits.bit_count()
    assert lengths.lengths_of(c, bits, k, page) >> k & 1
    for i in needs:
        assert not lengths.lengths_of(c, bits ^ (1 << i), k, page) >> k & 1


@settings(steady, max_examples=250)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 24))
def test_a_plan_takes_each_needed_page_once_from_the_nearest_tier(data: st.DataObject, parts: int, page: int, pages: int) -> None:
    spec = CacheSpec("any", page, tuple(data.draw(components(f"c{i}", spans=(1, 2))) for i in range(parts)))
    held = {tier: {c.name: data.draw(bitsets(pages)) for c in spec.components} for tier in Tier}
    allowed = lengths.within(pages * page + 1, page, spec.step(None))
    found = Match(spec, (b"",) * pages, allowed, held)
    k = found.longest(*Tier)
    chosen = plan.at(found, k)
    for c in spec.components:
        taken = [(part.tier, i) for part in chosen.parts if part.component == c.name for i in part.pages.tolist()]
        assert sorted(i for _, i in taken) == list(lengths.needed(c, k, page))
        for tier, i in taken:
            assert tier is next(t for t in (Tier.DEVICE, Tier.HOST, Tier.STORAGE) if held[t][c.name] >> i & 1)
    assert sum(plan.sources(chosen).values()) == k


def test_the_minimum_over_ranks_is_wrong() -> None:
    """Rank A may resume at 5 or 7, rank B at 5 or 8: the smaller of 7 and 8 is legal on A alone, the answer is 5."""
    for kind, reach in ((Kind.STATE, 0), (Kind.WINDOW, 4)):
        parts = (component(Kind.FULL, name="full"), component(kind, reach, name="other"))
        a = {"full": lengths.ones(8), "other": 1 << 4 | 1 << 6}
        b = {"full": lengths.ones(8), "other": 1 << 4 | 1 << 7}
        allowed = lengths.within(33, 4, 4)
        assert members(lengths.legal(parts, a, allowed, 4)) == {0, 5, 7}
        assert members(lengths.legal(parts, b, allowed, 4)) == {0, 5, 8}
        both = {name: lengths.on_all((a[name], b[name])) for name in a}
        assert lengths.longest(lengths.legal(parts, both, allowed, 4)) == 5


def test_the_minimum_over_components_is_wrong_too() -> None:
    """The state offers 4 and 9, the full pages reach 7: nothing was snapshotted at 7, so the answer is 4."""
    parts = (component(Kind.FULL, name="full"), component(Kind.STATE, name="state"))
    held = {"full": lengths.ones(7), "state": 1 << 3 | 1 << 8}
    assert lengths.longest(lengths.legal(parts, held, lengths.within(1000, 64, 64), 64)) == 4


def test_a_draft_component_does_not_limit_a_target() -> None:
    parts = (component(Kind.FULL, name="full"), component(Kind.FULL, name="draft", role="draft"))
    allowed = lengths.within(100, 10, 10)
    assert lengths.longest(lengths.legal(parts, {"full": lengths.ones(9), "draft": 0}, allowed, 10)) == 9
    assert lengths.longest(lengths.legal(parts, {"full": 0, "draft": lengths.ones(9)}, allowed, 10)) == 0


def test_what_nobody_says_anything_of_is_absent() -> None:
    assert lengths.longest(lengths.legal((component(Kind.FULL),), {}, lengths.ones(9), 4)) == 0
    assert lengths.on_all([]) == 0


def test_a_rank_without_a_share_reports_everything_present() -> None:
    assert lengths.on_all([-1, 0b1011, -1]) == 0b1011


@settings(steady, max_examples=500)
@given(st.integers(0, 700), st.integers(1, 9), st.integers(1, 6), st.none() | st.integers(0, 800))
def test_the_cap_leaves_a_token_to_compute(tokens: int, page: int, times: int, limit: int | None) -> None:
    step = page * times
    most = max(0, tokens - 1 if limit is None else min(tokens - 1, limit))
    expected = {n // page for n in range(0, most + 1, step)}
    assert members(lengths.within(tokens, page, step, limit)) == expected


@settings(steady, max_examples=300)
@given(st.sets(st.integers(0, 200), max_size=40))
def test_members_come_largest_first(chosen: set[int]) -> None:
    bits = sum(1 << k for k in chosen)
    assert list(lengths.members(bits)) == sorted(chosen, reverse=True)
    assert lengths.longest(bits | 1) == max(chosen | {0})


def test_a_long_prompt_at_random_places() -> None:
    """2,048 pages: the shifts of a window and the runs of a chunk do not tire."""
    random = np.random.default_rng(7)
    pages, page = 2048, 16
    for c in (component(Kind.WINDOW, 4095), component(Kind.CHUNKED, 8192 + 24), component(Kind.WINDOW, 511, 2), component(Kind.FULL)):
        flags = random.random(pages) > 0.002
        present = int("".join("1" if f else "0" for f in flags[::-1]), 2)
        got = lengths.lengths_of(c, present, pages, page)
        for k in random.integers(0, pages + 1, 60).tolist():
            assert got >> k & 1 == rule_twin.may_resume(c, present, k, page)


def test_the_step_of_a_spec_is_common_to_page_grid_spans_and_ratios() -> None:
    wide = Component("wide", Kind.FULL, rule_twin.KV, page_span=4, ratio=128)
    spec = CacheSpec("any", 96, (component(Kind.FULL), wide), 1)
    assert spec.step(None) == math.lcm(96, 384, 128) == 384
    assert spec.step(960) == math.lcm(384, 960) == 1920
