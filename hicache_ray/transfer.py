"""Pages on their way from one tier to another: which, from which slots, into which leased slots, and what arrived.

Prefetch, load and backup are the same motion between other tiers. Nothing becomes visible before its completion; a failed completion clears
exactly its own bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ray.index import from_bits
from hicache_ray.lease import Lease
from hicache_ray.records import Slots, Span, slots_array
from hicache_ray.residency import Residency
from hicache_ray.resume import Part, Path
from hicache_ray.spec import Tier

#: Base pages of one record from L3: what has arrived is known, and can be used, record by record.
LEAST_PAGES, MOST_PAGES, RECORDS = 16, 128, 8


def piece(total: int) -> int:
    """Base pages of one of the records in which ``total`` pages come from L3."""
    return min(MOST_PAGES, max(LEAST_PAGES, -(-total // RECORDS)))


@dataclass(frozen=True)
class Leg:
    """One component of a transfer. ``keys`` name the objects; source and target slots are leased (storage has none). ``pages``: where they
    are in the path of the transfer; ``depth``: in their prompts, which a path of many prompts does not say."""

    component: str
    pages: npt.NDArray[np.int32]
    keys: tuple[bytes, ...]
    source: Lease | None
    target: Lease | None
    depth: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def span(self) -> Span:
        none = slots_array()
        source: Slots = self.source.slots if self.source else none
        target: Slots = self.target.slots if self.target else none
        keys = self.keys if self.source is None or self.target is None else ()
        return Span(self.component, source, target, keys, self.depth)


@dataclass(frozen=True)
class Transfer:
    """What moves between two tiers for one holder. Give its leases back with :func:`close` whatever happens.

    ``era``: when it began; what was dropped since does not become visible.
    """

    source: Tier
    target: Tier
    legs: tuple[Leg, ...]
    era: int = 0

    def spans(self) -> tuple[Span, ...]:
        return tuple(leg.span() for leg in self.legs)

    def __bool__(self) -> bool:
        return any(len(leg.keys) for leg in self.legs)


def begin(res: Residency, holder: str, target: Tier, parts: Sequence[Part], path: Path) -> Transfer:
    """Lease the source pages and as many free slots in ``target`` (the caller has made room). All parts come from one tier."""
    legs = []
    source = parts[0].tier if parts else target
    for part in parts:
        names = tuple(path.names(part.component, part.pages.tolist()))
        give = take = None
        if source is not Tier.STORAGE:
            place = (source, part.component)
            give = res.leases.take(holder, place, res.slots(place, res.index.find(names)))
        if target is not Tier.STORAGE:
            take = res.leases.alloc(holder, (target, part.component), len(names))
        depth = part.pages if source is Tier.STORAGE else res.index.depth(res.index.find(names))
        legs.append(Leg(part.component, part.pages, names, give, take, depth))
    return Transfer(source, target, tuple(legs), res.era)


def arrive(res: Residency, transfer: Transfer, bits: Sequence[int]) -> None:
    """Publish what has arrived: items of leg ``i`` in ``bits[i]``."""
    for i, leg in enumerate(transfer.legs):
        if leg.target is None:
            continue
        flags = from_bits(bits[i], len(leg.keys)) & fresh(res, transfer, leg)
        place = (transfer.target, leg.component)
        part = Lease(leg.target.id, leg.target.holder, place, leg.target.slots[flags])
        entries = res.publish(place, [k for k, f in zip(leg.keys, flags, strict=True) if f], leg.depth[flags], part)
        res.touch(place, entries)


def fresh(res: Residency, transfer: Transfer, leg: Leg) -> npt.NDArray[np.bool_]:
    """Which items of a leg are not of what was dropped since the transfer began."""
    if res.era == transfer.era:
        return np.ones(len(leg.keys), dtype=bool)
    return np.array([not res.stale(key, transfer.era) for key in leg.keys], dtype=bool)


def close(res: Residency, transfer: Transfer) -> None:
    """Give all leases back; slots that did not become visible are free."""
    for leg in transfer.legs:
        for lease in (leg.source, leg.target):
            if lease is not None:
                res.leases.release(lease)
