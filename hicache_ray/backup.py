"""Stage 7, backup: L1 to L2, and L2 to L3. It closes under the rule: what is copied can be resumed from without the tier above."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths
from hicache_ray.index import ABSENT, from_bits
from hicache_ray.policy_order import Entries
from hicache_ray.residency import Residency
from hicache_ray.resume import Match, Part, Path
from hicache_ray.spec import Kind, Tier


def wanted(res: Residency, match: Match, uses: int = 0) -> tuple[Part, ...]:
    """Device pages of a path that the host should have, as many as it has room for.

    First, for the longest resume that the host can be given, exactly the pages that make it legal from the host alone; then, in what room
    is left, the path's other windows and snapshots, the latest first. ``match.keys`` is the path. ``uses``: of which a page must have had
    as many.
    """
    missing = {}
    for c in res.spec.components:
        bits = match.present[Tier.DEVICE][c.name] & ~match.present[Tier.HOST][c.name]
        missing[c.name] = from_bits(bits, len(match.keys))
        if uses:
            entries = res.index.find(match.path.names(c.name))
            missing[c.name][: len(entries)] &= res.index.uses((Tier.HOST, c.name), entries) >= uses
    rooms = {c.name: room(res, c.name, res.index.find(match.path.names(c.name))) for c in res.spec.components}
    chosen = {name: np.zeros(len(match.keys), dtype=bool) for name in missing}
    for k in lengths.members(match.lengths(Tier.DEVICE, Tier.HOST)):
        closure = {c.name: _closure(missing[c.name], lengths.needed(c, k, res.spec.page_size)) for c in res.spec.components}
        if all(int(flags.sum()) <= rooms[name] for name, flags in closure.items()):
            chosen = closure
            break
    for name, flags in missing.items():
        rest = np.flatnonzero(flags & ~chosen[name])
        left = rooms[name] - int(chosen[name].sum())
        # Deep full pages without their prefix are worth nothing: fill those from the root, everything else from the end.
        pick = rest[:left] if res.spec[name].kind is Kind.FULL else rest[::-1][:left]
        chosen[name][pick] = True
    return _parts(Tier.DEVICE, chosen)


def room(res: Residency, component: str, own: Entries) -> int:
    """Slots the host can give without losing one of its pages ``own``."""
    place = (Tier.HOST, component)
    return res.room(place) - int(np.count_nonzero(res.idle(place, own)))


def _closure(missing: npt.NDArray[np.bool_], pages: range) -> npt.NDArray[np.bool_]:
    out = np.zeros(len(missing), dtype=bool)
    out[list(pages)] = True
    return out & missing


def stranded(res: Residency, path: Path, uses: int = 0) -> tuple[Part, ...]:
    """Device pages of a path that neither the host has nor L3 is known to have; ``uses``: with as many uses at least."""
    flags = {}
    for c in res.spec.components:
        entries = res.index.find(path.names(c.name))
        alone = (res.index.slots((Tier.DEVICE, c.name), entries) != ABSENT) & (res.index.slots((Tier.HOST, c.name), entries) == ABSENT)
        alone[alone] = ~res.index.durable((Tier.HOST, c.name), entries[alone])
        flags[c.name] = alone & (res.index.uses((Tier.HOST, c.name), entries) >= uses)
    return _parts(Tier.DEVICE, flags)


def not_durable(res: Residency, path: Path) -> tuple[Part, ...]:
    """Host pages of a path that L3 has not sealed."""
    flags = {}
    for c in res.spec.components:
        place = (Tier.HOST, c.name)
        entries = res.index.find(path.names(c.name))
        here = res.index.slots(place, entries) != ABSENT
        here[here] = ~res.index.durable(place, entries[here])
        flags[c.name] = here
    return _parts(Tier.HOST, flags)


def _parts(tier: Tier, flags: dict[str, npt.NDArray[np.bool_]]) -> tuple[Part, ...]:
    return tuple(Part(name, tier, np.flatnonzero(f).astype(np.int32)) for name, f in flags.items() if f.any())
