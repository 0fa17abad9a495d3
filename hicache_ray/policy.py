"""Which cached pages go first. LRU over touches, not over pages.

A request touches its whole path at once: all those pages get the same stamp and are kept as one group, in the order in which they
should go. So a touch costs one list, and among equally recent pages the order is a choice:

* ``full``: the deepest first, so that what stays is reachable from the root;
* windows: the shallowest first, the window of the last length goes last;
* snapshots: inner ones first, thinned so that the gaps grow with the distance from the end; the last one goes last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.spec import Kind

Entries = npt.NDArray[np.int32]

#: Stale members that may be kept beside as many as there are live ones. Whoever looks for victims walks over them.
SLACK = 64


def order(kind: Kind, count: int) -> npt.NDArray[np.intp]:
    """The order in which ``count`` equally recent pages of one path (root first) should go: indices, first to go first."""
    if kind is Kind.FULL:
        return np.arange(count)[::-1]
    if kind is not Kind.STATE:
        return np.arange(count)
    from_end = np.arange(count)[::-1]  # 0 is the last snapshot
    # Distance d from the end survives 2**trailing_zeros(d) thinnings: odd distances go first, the last one (0) never.
    zeros = np.where(from_end == 0, 63, np.log2(np.maximum(from_end & -from_end, 1)).astype(np.int64))
    return np.lexsort((np.arange(count), zeros))


class Lru:
    """Least recently touched first, for the pages of one (tier, component). Entries are ids of the index."""

    def __init__(self) -> None:
        self._stamp = np.zeros(0, dtype=np.int64)  # by entry; 0: not known here
        self._groups: OrderedDict[int, Entries] = OrderedDict()
        self._clock = 0
        self._kept = 0
        self._live = 0

    def touch(self, entries: Entries) -> None:
        """``entries`` (first to go first) are now the most recent ones."""
        if len(entries):
            self._clock += 1
            self._put(self._clock, entries)

    def demote(self, entries: Entries) -> None:
        """``entries`` go before all others: nobody can use them any more."""
        if len(entries):
            first = next(iter(self._groups), self._clock + 1)
            self._put(min(first, 0) - 1, entries)
            self._groups.move_to_end(min(first, 0) - 1, last=False)

    def _put(self, stamp: int, entries: Entries) -> None:
        top = int(entries.max())
        if top >= len(self._stamp):
            self._stamp = np.concatenate([self._stamp, np.zeros(max(top + 1 - len(self._stamp), len(self._stamp)), dtype=np.int64)])
        self._live += int(np.count_nonzero(self._stamp[entries] == 0))
        self._stamp[entries] = stamp
        self._groups[stamp] = entries
        self._kept += len(entries)
        if self._kept > 2 * self._live + SLACK:
            self._compact()

    def _compact(self) -> None:
        """Forget stale members; amortised over the touches that made them."""
        groups = ((s, g[self._stamp[g] == s]) for s, g in self._groups.items())
        self._groups = OrderedDict((s, g) for s, g in groups if len(g))
        self._kept = sum(map(len, self._groups.values()))

    def forget(self, entries: Entries) -> None:
        """``entries`` have left the pool."""
        known = entries[entries < len(self._stamp)]
        self._live -= int(np.count_nonzero(self._stamp[known] != 0))
        self._stamp[known] = 0

    def victims(self, count: int, usable: Callable[[Entries], npt.NDArray[np.bool_]]) -> Entries:
        """Up to ``count`` entries to evict, first to go first; ``usable`` says which of some entries may go. Changes nothing."""
        out: list[Entries] = []
        for stamp, group in self._groups.items():
            if count <= 0:
                break
            here = group[self._stamp[group] == stamp]
            if not len(here):
                continue
            here = here[usable(here)][:count]
            if len(here):
                out.append(here)
                count -= len(here)
        return np.concatenate(out) if out else np.empty(0, dtype=np.int32)

    def knows(self, entries: Entries) -> npt.NDArray[np.bool_]:
        safe = np.minimum(entries, max(len(self._stamp) - 1, 0))
        return (entries < len(self._stamp)) & (self._stamp[safe] != 0) if len(self._stamp) else np.zeros(len(entries), dtype=bool)

    def check(self) -> None:
        live = [g[self._stamp[g] == s] for s, g in self._groups.items()]
        members = np.concatenate(live) if live else np.empty(0, dtype=np.int32)
        if len(np.unique(members)) != len(members):
            raise Inconsistent("an entry is twice in the order of eviction")
        if len(members) != self._live or self._live != int(np.count_nonzero(self._stamp)):
            raise Inconsistent(f"the order of eviction counts {self._live} entries and holds {len(members)}")
