"""Stage 6, insert: what the engine has made becomes visible in L1. Two requests that made the same page: the first insert wins."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray.lease import Lease
from hicache_ray.residency import Residency
from hicache_ray.spec import Tier


def publish(res: Residency, component: str, keys: Sequence[bytes], lease: Lease) -> None:
    """Cache leased device slots under ``keys`` (same length as the lease's slots)."""
    res.publish((Tier.DEVICE, component), keys, lease)
