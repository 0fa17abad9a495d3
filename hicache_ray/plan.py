"""Stage 2, plan: how far to resume, and from which tier each page comes. The rule run backwards; changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import numpy as np

from hicache_ray import lengths
from hicache_ray.index import from_bits
from hicache_ray.resume import ORDER, Limit, Match, Part, Plan
from hicache_ray.spec import Tier


def at(match: Match, k: int, limit: Limit = Limit.NONE, draft_tiers: Collection[Tier] = ORDER) -> Plan:
    """The plan for a resume at ``k`` pages, which must be in the legal set of the tiers that ``match`` knows. ``draft_tiers``: those that
    draft components have their pages from."""
    parts, drafts = [], {}
    for component, length, needed in match.needs(k, draft_tiers):
        if component.role == "draft":
            drafts[component.name] = length
        for tier, bits in needed.items():
            if bits:
                parts.append(Part(component.name, tier, np.flatnonzero(from_bits(bits, k)).astype(np.int32)))
    return Plan(k, tuple(parts), limit, drafts)


def choose(match: Match, threshold: int, bounds: Sequence[tuple[Limit, int]] = ()) -> Plan:
    """The longest legal resume that is worth it and that nothing keeps from coming.

    ``threshold``: pages that storage must add at least. ``bounds``: sets of lengths that can come from storage now, each with why others
    cannot. The limit of the plan is why the next longer length is not it, where several keep it from that the first of them.
    """
    local, legal = match.longest(Tier.DEVICE, Tier.HOST), match.lengths(*ORDER)
    worth = legal & ~lengths.ones(local + max(threshold, 1))
    k = max(local, lengths.longest(reduce(and_, (able for _, able in bounds), worth)))
    if k == match.ceiling:
        return at(match, k)
    limit = Limit.ABSENT
    if longer := worth >> (k + 1):
        lost = k + 1 + lengths.shortest(longer)
        limit = next(why for why, able in bounds if not able >> lost & 1)
    elif k == local < lengths.longest(legal):
        limit = Limit.THRESHOLD
    return at(match, k, limit)


def fallback(match: Match, plan: Plan) -> Plan:
    """The same plan with what an earlier length needs as well, about half of the way there: so that a part of it is worth something where
    a deadline cuts the rest off. Of full pages alone nothing has to be added."""
    local = match.longest(Tier.DEVICE, Tier.HOST)
    half = local + (plan.length - local) // 2
    earlier = lengths.longest(match.lengths(*ORDER) & lengths.ones(half + 1))
    return plan if earlier <= local else both(plan, at(match, earlier))


def both(plan: Plan, more: Plan) -> Plan:
    """``plan`` with the pages of another one as well, and its length as a milestone."""
    pages: dict[tuple[str, Tier], set[int]] = {}
    for part in (*plan.parts, *more.parts):
        pages.setdefault((part.component, part.tier), set()).update(part.pages.tolist())
    parts = tuple(Part(name, tier, np.asarray(sorted(some), dtype=np.int32)) for (name, tier), some in pages.items())
    return replace(plan, parts=parts, milestones=tuple(sorted({*plan.milestones, more.length})))


def with_sources(plan: Plan, origin: Mapping[tuple[str, int], Tier]) -> Plan:
    """The same plan where the pages in ``origin`` (component, page) are said to come from another tier than the nearest."""
    parts = []
    for part in plan.parts:
        tiers = [origin.get((part.component, page), part.tier) for page in part.pages.tolist()]
        for tier in ORDER:
            here = [page for page, at in zip(part.pages.tolist(), tiers, strict=True) if at is tier]
            if here:
                parts.append(Part(part.component, tier, np.asarray(here, dtype=np.int32)))
    return replace(plan, parts=tuple(parts))


def sources(plan: Plan) -> Mapping[Tier, int]:
    """How many base pages of the resumed length each tier gives; a page whose components come from several counts for the farthest."""
    farthest = np.full(plan.length, -1, dtype=np.int8)
    for part in plan.parts:
        if part.component in plan.drafts:
            continue
        np.maximum.at(farthest, part.pages, ORDER.index(part.tier))
    # Pages that no component needs any more (behind a window, before a snapshot) came with the page that stands for them.
    # A resume at the end of a chunk may need nothing at all (chunked layers alone); then nothing had to come from farther than the device.
    last = max(int(farthest[-1]), 0) if plan.length else 0
    farthest[farthest == -1] = last
    return {tier: int(np.count_nonzero(farthest == i)) for i, tier in enumerate(ORDER)}
