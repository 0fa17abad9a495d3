"""Least frequently used first, with dynamic ageing (LFU-DA: Arlitt et al. 2000): what was popular once does not stay for ever.

The key of a page is the number of its uses while it was cached, plus the key that the last victim had when the page was used last. A page
that nobody uses any more keeps its key while that of newcomers grows.
"""

from __future__ import annotations

import numpy as np

from hicache_ray.policy import Lru
from hicache_ray.policy_order import Bytes, Cost, Entries, Going, Longs, Worth


class Lfu(Lru):
    """See the module. Ties: least recently used first."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._uses = np.zeros(0, dtype=np.int64)
        self._age = 0

    def _more(self) -> tuple[str, ...]:
        return ("_uses",)

    def _keys(self, entries: Entries, worth: Worth, used: bool) -> tuple[Longs, Longs, Bytes]:
        uses = np.where(self.knows(entries), self._uses[entries] + used, 1)
        before = np.where(self.knows(entries), self._key[entries], 0)
        if self.chained:  # who is used with another is used at least as often
            uses = np.maximum.accumulate(uses)
        self._uses[entries] = uses
        keys = np.maximum(before, self._age + uses)
        return (np.maximum.accumulate(keys) if self.chained else keys), self._now(entries), np.zeros(len(entries), dtype=np.int8)

    def learn(self, going: Going) -> None:
        of_use = going.entries[self._cost[going.entries] > Cost.EXPIRED]
        self._age = max(self._age, int(self._key[of_use].max(initial=0)))
