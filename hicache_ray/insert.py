"""Stage 6, insert: what the engine has made becomes visible in L1. Two requests that made the same page: the first insert wins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ray import lengths
from hicache_ray.keys import other
from hicache_ray.lease import Lease
from hicache_ray.ledger import THINNED
from hicache_ray.residency import Residency
from hicache_ray.settings import StateSnapshots
from hicache_ray.spec import Tier


def publish(res: Residency, component: str, keys: Sequence[bytes], pages: Sequence[int], lease: Lease) -> None:
    """Cache leased device slots under ``keys``, which name the objects at these base pages (as many of each as the lease has slots)."""
    res.publish((Tier.DEVICE, component), keys, np.asarray(pages, dtype=np.int32), lease)


def count_uses(res: Residency, component: str, keys: Sequence[bytes]) -> None:
    """The pages of a path were used or made: one use more of each."""
    res.index.use((Tier.HOST, component), res.index.find(keys))


def follow(res: Residency, keys: Sequence[bytes], fork: int) -> None:
    """``keys`` are a path that is cached, both kinds of bytes alike; ``fork``: pages of it after which it leaves another one (0: none)."""
    for names in (list(keys), [other(k) for k in keys]):
        entries = res.index.find(names)
        res.index.follow(entries)
        if fork:
            res.index.mark_fork(entries[fork - 1 : fork])


def thin(res: Residency, keys: Sequence[bytes], prompt: int, how: StateSnapshots) -> None:
    """Snapshots of a path that are not to be kept leave L1 and L2, but for those that somebody uses and those where paths part."""
    for c in (c for c in res.spec.components if c.is_state):
        both = [res.index.find(names) for names in (list(keys), [other(k) for k in keys])]
        places = [((tier, c.name), entries) for tier in (Tier.DEVICE, Tier.HOST) for entries in both]
        there = np.zeros(len(keys), dtype=bool)
        for place, entries in places:
            there |= res.index.slots(place, entries) >= 0
        page = res.spec.page_size
        kept = lengths.kept_snapshots([(int(i) + 1) * page for i in np.flatnonzero(there)], prompt, how)
        gone = there & ~np.isin((np.arange(len(keys)) + 1) * page, np.fromiter(kept, dtype=np.int64, count=len(kept)))
        for place, entries in places:
            leaving = entries[gone & res.idle(place, entries) & ~res.index.forks(entries)]
            res.left(place, leaving, THINNED)
            res.withdraw(place, leaving)
