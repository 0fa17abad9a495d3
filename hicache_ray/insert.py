"""Stage 6, insert: what the engine has made becomes visible in L1. Two requests that made the same page: the first insert wins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ray.lease import Lease
from hicache_ray.residency import Residency
from hicache_ray.spec import Tier


def publish(res: Residency, component: str, keys: Sequence[bytes], lease: Lease) -> None:
    """Cache leased device slots under ``keys`` (same length as the lease's slots)."""
    res.publish((Tier.DEVICE, component), keys, lease)


def touch_path(res: Residency, component: str, keys: Sequence[bytes]) -> None:
    """The pages of a path (root first) were used or made together: most recent in every local tier that has them."""
    entries = res.index.find(keys)
    for tier in (Tier.DEVICE, Tier.HOST):
        here = res.index.slots((tier, component), entries) >= 0
        if np.any(here):
            res.touch((tier, component), entries[here])
