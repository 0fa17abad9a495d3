"""Stage 1, match: what of a prompt is where. Asks, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray import lengths
from hicache_ray.keys import other, tagged
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Match
from hicache_ray.spec import Tier


def match(res: Residency, keys: Sequence[bytes], allowed: int, others: bool) -> Match:
    """Look the prompt up in L1 and L2. ``others``: bytes that are not canonical count as well."""
    known = tuple(keys[: lengths.longest(allowed)])
    found: dict[Tier, dict[str, int]] = {tier: {} for tier in LOCAL}
    for kind in (False, True) if others else (False,):
        entries = res.index.find([other(k) for k in known] if kind else known)
        for tier in LOCAL:
            found[tier] |= {tagged(c.name, kind): res.index.present((tier, c.name), entries) for c in res.spec.components}
    return Match(res.spec, known, allowed, found)
