"""Lowest priority first, least recently used first among those of equal priority. The priority comes with the requests."""

from __future__ import annotations

import numpy as np

from hicache_ray.policy import Lru
from hicache_ray.policy_order import Bytes, Entries, Longs, Worth


class Priority(Lru):
    """A page has the highest priority that a request has used it with; a prefix at least that of what it is a prefix of."""

    def _keys(self, entries: Entries, worth: Worth, used: bool) -> tuple[Longs, Longs, Bytes]:
        before = np.where(self.knows(entries), self._key[entries], worth.priority)
        keys = np.maximum(before, worth.priority)
        return (np.maximum.accumulate(keys) if self.chained else keys), self._now(entries), np.zeros(len(entries), dtype=np.int8)
