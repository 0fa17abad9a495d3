"""Stage 3, prefetch: L3 to L2. Takes host memory only for what the lookup has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hicache_ray import lengths, transfer
from hicache_ray.index import from_bits, to_bits
from hicache_ray.keys import is_other, other, tagged
from hicache_ray.residency import Residency
from hicache_ray.resume import ORDER, Match, Plan
from hicache_ray.spec import Tier
from hicache_ray.transfer import Transfer


def need(plan: Plan) -> Mapping[str, int]:
    """Host slots that the plan's pages from storage take, per component."""
    return {part.component: len(part.pages) for part in plan.of(Tier.STORAGE)}


def fits(res: Residency, match: Match, plan: Plan) -> bool:
    """Whether the host pools can take the pages from storage beside the host pages that the plan uses itself."""
    for component, count in need(plan).items():
        place = (Tier.HOST, component)
        used = [p.pages for p in plan.of(Tier.HOST) if p.component == component]
        entries = res.index.find(match.path.names(component, [i for pages in used for i in pages.tolist()]))
        if count > res.room(place) - res.reserve(place) - int(np.count_nonzero(res.idle(place, entries))):
            return False
    return True


def could_fit(res: Residency, plan: Plan) -> bool:
    """Whether the host pools could take them if nobody else leased anything there."""
    used = {part.component: len(part.pages) for part in plan.of(Tier.HOST)}
    return all(count + used.get(c, 0) <= res.capacity[(Tier.HOST, c)] - res.reserve((Tier.HOST, c)) for c, count in need(plan).items())


def commit(res: Residency, match: Match, moved: Transfer, bits: Sequence[int]) -> None:
    """Publish what of a prefetch is worth something, by the one rule. ``match``: what L1 and L2 have now.

    Pages beyond the longest resume that L1, L2 and the arrivals allow together are not kept.
    """
    host = dict(match.found[Tier.HOST])
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        for kind in (False, True):
            mine = np.array([is_other(name) is kind for name in leg.keys], dtype=bool)
            at = tagged(leg.component, kind)
            host[at] = host.get(at, 0) | _pages(leg.pages, leg_bits & to_bits(mine))
    after = replace(match, found={**match.found, Tier.HOST: host})
    k = after.longest(*ORDER)
    keep = []
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        component, length = res.spec[leg.component], k
        if component.role == "draft":
            local = after.present[Tier.DEVICE][component.name] | after.present[Tier.HOST][component.name]
            length = lengths.drafted(component, local, k, res.spec.page_size)
        wanted = lengths.needed(component, length, res.spec.page_size)
        keep.append(sum(1 << i for i in wanted))
        res.counters[(Tier.STORAGE, leg.component)].failures += len(leg.keys) - leg_bits.bit_count()
    transfer.arrive(res, moved, bits, keep)
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        # What could not be read is not there, whatever was believed: once it has been recomputed it is written again.
        now = transfer.fresh(res, moved, leg)
        names = [key for key, known in zip(leg.keys, now, strict=True) if known]
        res.index.set_durable((Tier.HOST, leg.component), res.index.find(names), from_bits(leg_bits, len(leg.keys))[now])


def note(res: Residency, found: Match) -> None:
    """A lookup has said what L3 holds of a path: objects that it has lost since are written again by the next backup."""
    told = found.found[Tier.STORAGE]
    for c in res.spec.components:
        keys = found.keys_of(c.name)
        for kind in (False, True):
            if tagged(c.name, kind) in told:
                entries = res.index.find([other(k) for k in keys] if kind else keys)
                res.index.set_durable((Tier.HOST, c.name), entries, from_bits(told[tagged(c.name, kind)], len(entries)))


def _pages(pages: np.ndarray, bits: int) -> int:
    """Bits over the legs' items as bits over base pages."""
    flags = np.zeros(int(pages[-1]) + 1 if len(pages) else 0, dtype=bool)
    flags[pages[from_bits(bits, len(pages))]] = True
    return to_bits(flags)
