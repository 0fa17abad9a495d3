"""Stage 1, match: what of a prompt is where. Asks, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray import lengths
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Match


def match(res: Residency, keys: Sequence[bytes], allowed: int) -> Match:
    """Look the prompt up in L1 and L2."""
    known = tuple(keys[: lengths.longest(allowed)])
    entries = res.index.find(known)
    present = {
        tier: {c.name: res.index.present((tier, c.name), entries) for c in res.spec.components} for tier in LOCAL
    }
    return Match(res.spec, known, allowed, present)
