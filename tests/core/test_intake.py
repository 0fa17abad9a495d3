"""How far a request resumes where the host cannot take all: found by sets of lengths, against a naive twin that tries every length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray import lengths, plan
from hicache_ray.prefetch import Intake, Taking
from hicache_ray.records import Lookup
from hicache_ray.resume import ORDER, Limit, Match, Plan
from hicache_ray.spec import CacheSpec, Component, Kind, Tier
from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import Steps, at_rest, prompt
from tests.core.rule_twin import component

PAGE, PAGES = 4, 24
SHAPES = (
    component(Kind.FULL),
    component(Kind.FULL, span=2),
    component(Kind.WINDOW, 10),
    component(Kind.WINDOW, 11, span=2),
    component(Kind.CHUNKED, 14),
    component(Kind.STATE),
    component(Kind.FULL, role="draft"),
    component(Kind.WINDOW, 9, role="draft"),
    component(Kind.STATE, role="draft"),
)
BITS = st.integers(0, lengths.ones(PAGES))
MOSTLY = st.lists(st.integers(0, PAGES - 1), max_size=3).map(lambda holes: lengths.ones(PAGES) & ~sum(1 << i for i in set(holes)))


def refusal(match: Match, of: Plan, taking: Mapping[str, Taking], drafts: bool = False) -> Limit:
    """Page by page."""
    out = set()
    for name, takes in taking.items():
        if match.spec[name].role == "draft" and not drafts:
            continue
        pages = {tier: [i for part in of.of(tier) if part.component == name for i in part.pages.tolist()] for tier in ORDER}
        come = sum(takes.come >> i & 1 for i in pages[Tier.STORAGE])
        hold = sum(takes.hold >> i & 1 for i in pages[Tier.HOST])
        if come > takes.flight:
            out.add(Limit.IN_FLIGHT)
        if come and come + hold > takes.room:
            out.add(Limit.HOST_ROOM)
    return next((why for why in (Limit.IN_FLIGHT, Limit.HOST_ROOM) if why in out), Limit.NONE)


def naive(match: Match, threshold: int, taking: Mapping[str, Taking]) -> Plan:
    """Every legal length from the top, until one can come."""
    local = match.longest(Tier.DEVICE, Tier.HOST)
    limit = Limit.NONE if local == match.ceiling else Limit.ABSENT
    for k in lengths.members(match.lengths(*ORDER)):
        if k <= local:
            break
        if k - local < threshold:
            limit = Limit.THRESHOLD if limit is Limit.ABSENT else limit
            break
        best = plan.at(match, k, Limit.NONE if k == match.ceiling else limit)
        if (why := refusal(match, best, taking)) is Limit.NONE:
            return best
        limit = why
    return plan.at(match, local, limit)


def shown(chosen: Plan) -> object:
    parts = [(part.component, part.tier, part.pages.tolist()) for part in chosen.parts]
    return chosen.length, chosen.limit, parts, chosen.drafts


@st.composite
def cases(draw: st.DrawFn) -> tuple[Match, dict[str, Taking], int]:
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    if all(c.role == "draft" for c in shapes):
        shapes.append(SHAPES[0])
    named = [Component(f"c{i}", c.kind, c.fields, c.layers, c.reach, c.page_span, role=c.role) for i, c in enumerate(shapes)]
    spec = CacheSpec("test", PAGE, tuple(named))
    step = spec.step(None) // PAGE
    allowed = lengths.multiples(step, draw(st.integers(0, PAGES)))
    found = {}
    for tier, some in ((Tier.DEVICE, st.sampled_from([0, 0b111, 0b111111])), (Tier.HOST, BITS), (Tier.STORAGE, MOSTLY)):
        found[tier] = {c.name: draw(some) & _ends(c) for c in named}
    match = Match(spec, tuple(bytes([i]) * 48 for i in range(PAGES)), allowed, found)
    taking = {}
    for c in named:
        there = match.present
        far = there[Tier.STORAGE][c.name] & ~there[Tier.DEVICE][c.name] & ~there[Tier.HOST][c.name]
        near = there[Tier.HOST][c.name] & ~there[Tier.DEVICE][c.name]
        room, flight = draw(st.integers(-1, PAGES)), draw(st.integers(0, PAGES))
        taking[c.name] = Taking(far & draw(MOSTLY), near & draw(BITS), room, flight)
    return match, taking, draw(st.integers(0, 8))


def _ends(c: Component) -> int:
    return lengths.multiples(c.page_span, PAGES) << (c.page_span - 1) & lengths.ones(PAGES)


@settings(derandomize=True, deadline=None, max_examples=600)
@given(cases())
def test_the_same_plan_and_the_same_reason_as_trying_every_length(case: tuple[Match, dict[str, Taking], int]) -> None:
    match, taking, threshold = case
    intake = Intake(match, taking)
    chosen = plan.choose(match, threshold, intake.bounds())
    assert shown(chosen) == shown(naive(match, threshold, taking))
    local = match.longest(Tier.DEVICE, Tier.HOST)
    for k in lengths.members(match.lengths(*ORDER)):
        tried = plan.at(match, k)
        for drafts in (False, True):
            assert intake.refusal(tried, drafts) is refusal(match, tried, taking, drafts)
        fits = all(able >> k & 1 for _, able in intake.bounds())
        assert fits is (refusal(match, tried, taking) is Limit.NONE) or k <= local


def test_the_threshold_is_not_named_where_something_stronger_keeps_the_longer_lengths_away() -> None:
    """A resume at 8 pages does not find room, one at 3 is not worth it: the reason is the room."""
    spec = CacheSpec("test", PAGE, (component(Kind.STATE),))
    found = {Tier.DEVICE: {"c": 0}, Tier.HOST: {"c": 0}, Tier.STORAGE: {"c": 0b10000100}}
    match = Match(spec, tuple(bytes([i]) * 48 for i in range(9)), 0b100001001, found)
    for room, flight, threshold, want in (
        (0, 9, 4, (0, Limit.HOST_ROOM)),
        (0, 0, 4, (0, Limit.IN_FLIGHT)),
        (0, 9, 9, (0, Limit.THRESHOLD)),
        (1, 1, 4, (8, Limit.NONE)),
    ):
        chosen = plan.choose(match, threshold, Intake(match, {"c": Taking(0b10000100, 0, room, flight)}).bounds())
        assert (chosen.length, chosen.limit) == want


@pytest.mark.parametrize("alone", [False, True])
def test_what_others_hold_is_not_room(alone: bool) -> None:
    """24 pages, of which the host has four; two of those somebody has leased, as he has eight pages of another one."""
    tokens = prompt(1, 24 * 8 + 1)
    stack = Stack(page=8, l1=64, l2=40, pools={"full": full(layers=1), "swa": window(30, layers=1), "state": state(16, layers=1)})
    stack.put(tokens)
    stack.settle()
    stack.flush()
    stack.put(prompt(2, 8 * 8 + 1))
    stack.put(tokens[:33])
    stack.settle()
    stack.flush(l1=True, l2=False)
    place = (Tier.HOST, "full")
    keys = stack._path(np.asarray(tokens, dtype=np.int32)).names("full")
    mine = stack.res.index.find([key + b"~" for key in keys[:2]])
    others = np.setdiff1d(stack.res.index.in_place(place), stack.res.index.find([key + b"~" for key in keys]))
    leases = [stack.res.leases.take("somebody", place, stack.res.slots(place, some)) for some in (mine, others)]
    steps = Steps(stack)
    stack.begin(tokens, "r")
    question = steps.until(lambda e: isinstance(e.record, Lookup))
    found = stack.cache.match(stack._jobs["r"]).with_storage(stack.execute(question).found)
    intake = stack.cache.restore._intake(found, alone)
    takes = intake.taking["full"]
    reserve = stack.res.reserve(place)
    assert takes.come == lengths.ones(24) & ~0b1111
    assert takes.hold == (0b1111 if alone else 0b1100)
    assert takes.room == (40 if alone else 40 - 2 - len(others)) - reserve
    assert len(others) == 8
    stack.report(question, stack.execute(question))
    steps.run()
    stack.res.leases.release_all(leases)
    steps.settle()
    at_rest(stack)
