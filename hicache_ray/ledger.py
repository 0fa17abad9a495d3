"""What has left a tier, when, and for whom: a bounded memory, from which a miss is explained and regret is measured.

*Regret*: pages that had to go and were then missed within ``window_s`` seconds. The share of them tells whether a tier is too small, or
its policy wrong. Times are given by whoever adds and asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_ray.errors import Inconsistent
from hicache_ray.lease import Place
from hicache_ray.spec import Tier
from hicache_ray.store import DIGEST_BYTES, KEY_BYTES

#: Bytes of a page's digest by which it is known here.
_PREFIX = slice(KEY_BYTES - DIGEST_BYTES, KEY_BYTES - DIGEST_BYTES + 8)
#: Why something is not in a tier (any more).
ROOM, FLUSH, DROP, THINNED = "room", "flush", "drop", "cache.state_snapshots"
#: Why L3 has never had it: it has no room for it; it failed, was too slow or was taken away while it was written.
REFUSED, FAILED, LATE, DETACHED = "refused", "write_failed", "write_late", "write_detached"
UNWRITTEN = (REFUSED, FAILED, LATE, DETACHED)


@dataclass(frozen=True)
class Gone:
    """Pages (by their names) that have left a place together, or that it has refused."""

    place: Place
    names: tuple[bytes, ...]
    why: str


@dataclass(frozen=True)
class Eviction:
    """Of one page: from which tier, when (seconds, on the clock of who added it), for which story, and why."""

    tier: Tier
    component: str
    when: float
    cause: str
    why: str


class Ledger:
    """The last ``size`` of them. ``places``: all that there are."""

    def __init__(self, places: Sequence[Place], size: int = 1 << 16, window_s: float = 300.0) -> None:
        self._columns = {place: i for i, place in enumerate(places)}
        self._places = tuple(places)
        self._size = size
        self.window_s = window_s
        self._id = np.zeros(size, dtype=np.uint64)
        self._column = np.zeros(size, dtype=np.int16)
        self._when = np.zeros(size, dtype=np.float64)
        self._missed = np.zeros(size, dtype=bool)
        self._told: list[tuple[str, str]] = [("", "")] * size  # cause and why; one object for all pages that went together
        self._at: dict[tuple[int, int], int] = {}
        self._count = 0
        self.evicted = dict.fromkeys(places, 0)
        self.regretted = dict.fromkeys(places, 0)

    def __len__(self) -> int:
        return min(self._count, self._size)

    def add(self, gone: Gone, now: float, cause: str) -> None:
        """Remember; the oldest are forgotten."""
        column, told = self._columns[gone.place], (cause, gone.why)
        if gone.why == ROOM:
            self.evicted[gone.place] += len(gone.names)
        for name in gone.names[-self._size :]:
            at = self._count % self._size
            old = (int(self._id[at]), int(self._column[at]))
            if self._count >= self._size and self._at.get(old) == at:
                del self._at[old]
            word = int.from_bytes(name[_PREFIX], "little")
            self._id[at], self._column[at], self._when[at], self._missed[at] = word, column, now, False
            self._told[at] = told
            self._at[word, column] = at
            self._count += 1

    def last(self, component: str, name: bytes) -> Eviction | None:
        """How a component's page went from wherever it was last; None where that is not known (any more)."""
        found = self._find(component, name)
        if found is None:
            return None
        place = self._places[int(self._column[found])]
        return Eviction(place[0], component, float(self._when[found]), *self._told[found])

    def miss(self, component: str, name: bytes, now: float) -> bool:
        """Somebody would have used a page that no tier has. Whether it is known to have gone; counted once, where it had to make room."""
        found = self._find(component, name)
        if found is None:
            return False
        if self._told[found][1] == ROOM and not self._missed[found] and now - self._when[found] <= self.window_s:
            self._missed[found] = True
            self.regretted[self._places[int(self._column[found])]] += 1
        return True

    def _find(self, component: str, name: bytes) -> int | None:
        if not self._at:
            return None
        word = int.from_bytes(name[_PREFIX], "little")
        there = [at for tier in Tier if (at := self._at.get((word, self._columns.get((tier, component), -1)))) is not None]
        # The later of two positions of the ring is the one that was written later.
        return max(there, key=lambda at: (at - self._count) % self._size, default=None)

    def regret(self) -> Mapping[Place, float]:
        """Of what had to make room in each place, the share that was missed within the window."""
        return {place: self.regretted[place] / n if n else 0.0 for place, n in self.evicted.items()}

    def check(self) -> None:
        """Raise :class:`Inconsistent` unless everything known is where it is said to be."""
        for key, at in self._at.items():
            if (int(self._id[at]), int(self._column[at])) != key:
                raise Inconsistent("the ledger of evictions knows a page at a position that is another's")
        if len(self._at) > len(self):
            raise Inconsistent(f"the ledger of evictions knows {len(self._at)} pages and has room for {len(self)}")
