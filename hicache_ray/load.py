"""Stage 4, load: L2 to L1. A failed load is not a load: what did not arrive is not there, its host copy stays."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray import transfer
from hicache_ray.residency import Residency
from hicache_ray.spec import Tier
from hicache_ray.transfer import Transfer


def commit(res: Residency, moved: Transfer, bits: Sequence[int]) -> None:
    """Publish what has arrived, count what has not."""
    transfer.arrive(res, moved, bits)
    for leg, leg_bits in zip(moved.legs, bits, strict=True):
        res.counters[(Tier.DEVICE, leg.component)].failures += len(leg.keys) - leg_bits.bit_count()
