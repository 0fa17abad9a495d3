"""Stage 3, prefetch: L3 to L2. Takes host memory only for what the lookup has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hicache_ray import lengths, transfer
from hicache_ray.index import from_bits, to_bits
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
        entries = res.index.find([match.keys[i] for pages in used for i in pages.tolist()])
        if count > res.room(place) - int(np.count_nonzero(res.idle(place, entries))):
            return False
    return True


def commit(res: Residency, match: Match, moved: Transfer, bits: Sequence[int]) -> Match:
    """Publish what of a prefetch is worth something, by the one rule; returns the match as it is now, storage left out.

    Pages beyond the longest resume that L1, L2 and the arrivals allow together are not kept.
    """
    arrived = {leg.component: _pages(leg.pages, leg_bits) for leg, leg_bits in zip(moved.legs, bits, strict=True)}
    host = match.present[Tier.HOST]
    host = {name: present | arrived.get(name, 0) for name, present in host.items()}
    now = replace(match, present={Tier.DEVICE: match.present[Tier.DEVICE], Tier.HOST: host})
    k = now.longest(*ORDER)
    keep = []
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        wanted = lengths.needed(res.spec[leg.component], k, res.spec.page_size)
        keep.append(sum(1 << i for i in wanted))
        res.counters[(Tier.STORAGE, leg.component)].failures += len(leg.keys) - leg_bits.bit_count()
    transfer.arrive(res, moved, bits, keep)
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        # What could not be read is not there, whatever was believed: once it has been recomputed it is written again.
        res.index.set_durable((Tier.HOST, leg.component), res.index.find(leg.keys), from_bits(leg_bits, len(leg.keys)))
    return now


def note(res: Residency, found: Match) -> None:
    """A lookup has said what L3 holds of a path: objects that it has lost since are written again by the next backup."""
    entries = res.index.find(found.keys)
    for component, bits in found.present[Tier.STORAGE].items():
        res.index.set_durable((Tier.HOST, component), entries, from_bits(bits, len(entries)))


def _pages(pages: np.ndarray, bits: int) -> int:
    """Bits over the legs' items as bits over base pages."""
    flags = np.zeros(int(pages[-1]) + 1 if len(pages) else 0, dtype=bool)
    flags[pages[from_bits(bits, len(pages))]] = True
    return to_bits(flags)
