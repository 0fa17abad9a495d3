"""Stage 4, load: L2 to L1. A failed load is not a load: what did not arrive is not there, its host copy stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hicache_ray import transfer
from hicache_ray.index import from_bits, to_bits
from hicache_ray.residency import Residency
from hicache_ray.resume import Match
from hicache_ray.spec import Tier
from hicache_ray.transfer import Transfer


def commit(res: Residency, match: Match, moved: Transfer, bits: Sequence[int]) -> Match:
    """Publish what has arrived; returns what the device alone offers now."""
    transfer.arrive(res, moved, bits)
    device = dict(match.present[Tier.DEVICE])
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        res.counters[(Tier.DEVICE, leg.component)].failures += len(leg.keys) - leg_bits.bit_count()
        flags = np.zeros(len(match.keys), dtype=bool)
        flags[leg.pages[from_bits(leg_bits, len(leg.keys))]] = True
        device[leg.component] |= to_bits(flags)
    return replace(match, present={Tier.DEVICE: device})
