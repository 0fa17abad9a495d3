"""Which cached pages go first: what holds under every policy, and its plainest form, least recently used.

First goes what costs least (:class:`~hicache_ray.policy_order.Cost`). Among equals by the policy: a key, then how recent the use was, then
the order within the use. A request uses its whole path at once, so a use is kept as one group, in the order in which its pages should go
(:func:`~hicache_ray.policy_order.order`), and costs one entry of a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.policy_order import Bytes, Cost, Entries, Going, Longs, Spared, Usable, Worth, grown

#: A group in a heap: key, stamp, place of its first member (unlike in all groups), serial, members. Those in another group are stale.
Group: TypeAlias = tuple[int, int, int, int, Entries]

#: Stale members that may be kept beside as many as there are live ones. Whoever looks for victims walks over them.
SLACK = 64


class Lru:
    """Least recently used first, for the pages of one (tier, component). Entries are ids of the index.

    Also the base of the other policies: they differ in the key that :meth:`_keys` gives to what was used, smallest first to go.
    ``chained``: a page is of use only with those that go after it in the same use, so its key is never above theirs. ``capacity``: of the
    pool. ``marks``: names that outlast an entry, for policies that remember what has left.
    """

    #: Heaps for each cost.
    lanes = 1

    def __init__(self, capacity: int = 0, chained: bool = True, marks: Callable[[Entries], Longs] | None = None) -> None:
        self.capacity, self.chained = capacity, chained
        self.marks = marks or (lambda entries: entries.astype(np.int64))
        self._serial = np.zeros(0, dtype=np.int64)  # by entry: the group it is in; 0: not known here
        self._key = np.zeros(0, dtype=np.int64)
        self._stamp = np.zeros(0, dtype=np.int64)
        self._at = np.zeros(0, dtype=np.int64)  # its place among those of the same key and stamp
        self._cost = np.zeros(0, dtype=np.int8)
        self._lane = np.zeros(0, dtype=np.int8)
        self._expires = np.zeros(0, dtype=np.float64)
        self._heaps: list[list[Group]] = [[] for _ in range(len(Cost) * self.lanes)]
        self._soon: list[tuple[float, int, Entries]] = []
        self._clock = 0  # uses
        self._groups = 0
        self._places = 0
        self._kept = 0
        self._live = 0

    # -- what happens to pages ----------------------------------------------------------------------------------------------------

    def touch(self, entries: Entries, worth: Worth | None = None, used: bool = True) -> None:
        """``entries`` (first to go first, each once) were used together just now, or are new.

        ``used``: it counts as a use; otherwise they were only held, or moved, for one that is counted itself.
        """
        if not len(entries):
            return
        worth = worth or Worth.plain(len(entries))
        self._clock += 1
        self._make_room(int(entries.max()))
        self._renumber(entries[self._moves(entries)])
        keys, stamps, lanes = self._keys(entries, worth, used)
        self._expires[entries] = worth.expires
        self._sort_in(entries, keys, stamps, worth.costs, lanes)
        self._watch(entries, worth.expires)

    def demote(self, entries: Entries) -> None:
        """``entries`` go before all others: nobody can use them any more."""
        if len(entries):
            self._clock += 1
            self._make_room(int(entries.max()))
            self._renumber(entries)
            self._push(Cost.USELESS, 0, -self._clock, entries, 0)

    def recost(self, entries: Entries, costs: Bytes) -> None:
        """What losing some entries costs has changed; otherwise they keep their place. Those of no use, expired or unknown stay so."""
        known = self.knows(entries)
        entries, costs = entries[known], costs[known]
        moved = (self._cost[entries] != costs) & (self._cost[entries] > Cost.EXPIRED)
        self._move(entries[moved], costs[moved])

    def _move(self, entries: Entries, costs: Bytes) -> None:
        if len(entries):
            self._sort_in(entries, self._key[entries], self._stamp[entries], costs, self._lane[entries])

    def forget(self, entries: Entries) -> None:
        """``entries`` have left the pool."""
        known = entries[self.knows(entries)]
        self._live -= len(known)
        self._serial[known] = 0

    # -- who goes -----------------------------------------------------------------------------------------------------------------

    def victims(self, count: int, usable: Usable, now: float = 0.0) -> Going:
        """Up to ``count`` entries to evict; ``usable`` says which of some entries may go. A question: who asks twice hears the same, and
        nobody's place is another one for it."""
        self._expire(now)
        out: list[Entries] = []
        spared: list[Spared] = []
        for cost in Cost:
            if count <= 0:
                break
            for taken in self._take(cost, count, usable, spared):
                out.append(taken)
                count -= len(taken)
        return Going(np.concatenate(out) if out else np.empty(0, dtype=np.int32), tuple(spared))

    def learn(self, going: Going) -> None:
        """They do leave, just now: tell it before :meth:`forget`, and before anything else happens to a page."""

    def _take(self, cost: Cost, count: int, usable: Usable, spared: list[Spared]) -> list[Entries]:
        """The first of one cost, up to ``count``; nothing moves. ``spared`` gains those who were passed over."""
        heap, out, back = self._heaps[cost * self.lanes], [], []
        while heap and count > 0:
            group = self._head(heap)
            if group is None:
                break
            back.append(heapq.heappop(heap))
            here = group[usable(group)][:count]
            if len(here):
                out.append(here)
                count -= len(here)
        for group_back in back:
            heapq.heappush(heap, group_back)
        return out

    def _head(self, heap: list[Group]) -> Entries | None:
        """The live members of the first key and stamp that have any; the heap's first is then that one group. None: there is none."""
        first: Group | None = None
        while heap and (first is None or heap[0][:2] == first[:2]):
            key, stamp, _, serial, entries = heapq.heappop(heap)
            live = entries[self._serial[entries] == serial]
            self._kept -= len(entries) - len(live)
            if len(live) and first is not None:  # moved away and back again: between each other as they were
                live = np.concatenate([first[4], live])
                live = live[np.argsort(self._at[live])]
                self._groups += 1
                serial = self._serial[live] = self._groups
            first = (key, stamp, int(self._at[live[0]]), serial, live) if len(live) else first
        if first is None:
            return None
        heapq.heappush(heap, first)
        return first[4]

    def _expire(self, now: float) -> None:
        while self._soon and self._soon[0][0] <= now:
            entries = heapq.heappop(self._soon)[2]
            entries = entries[self.knows(entries)]
            over = entries[(self._expires[entries] <= now) & (self._cost[entries] > Cost.EXPIRED)]
            self._move(over, np.full(len(over), Cost.EXPIRED, dtype=np.int8))

    # -- what policies decide -----------------------------------------------------------------------------------------------------

    def _keys(self, entries: Entries, worth: Worth, used: bool) -> tuple[Longs, Longs, Bytes]:
        """Key, stamp and lane of each entry that was touched."""
        return np.zeros(len(entries), dtype=np.int64), self._now(entries), np.zeros(len(entries), dtype=np.int8)

    def _moves(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of those that are touched get a new place."""
        return np.ones(len(entries), dtype=bool)

    def _now(self, entries: Entries) -> Longs:
        return np.full(len(entries), self._clock)

    # -- groups -------------------------------------------------------------------------------------------------------------------

    def _make_room(self, top: int) -> None:
        if top >= len(self._serial):
            for name in ("_serial", "_key", "_stamp", "_at", "_cost", "_lane", "_expires", *self._more()):
                setattr(self, name, grown(getattr(self, name), top))

    def _more(self) -> tuple[str, ...]:
        """Names of a policy's own arrays by entry."""
        return ()

    def _renumber(self, entries: Entries) -> None:
        """They stand behind whoever has the same key and stamp, in this order."""
        self._at[entries] = np.arange(self._places, self._places + len(entries))
        self._places += len(entries)

    def _sort_in(self, entries: Entries, keys: Longs, stamps: Longs, costs: Bytes, lanes: Bytes) -> None:
        """Put entries in groups of equal cost, lane, key and stamp; in the order of their places."""
        said, at = (stamps, keys, lanes, costs), self._at[entries]
        line, cut = np.arange(len(entries)), np.zeros(len(entries), dtype=bool)
        if np.any(at[1:] < at[:-1]) or any(np.any(a != a[0]) for a in said):
            line = np.lexsort((at, *said))
            for a in said:
                cut[1:] |= a[line][1:] != a[line][:-1]
        for part in np.split(line, np.flatnonzero(cut)):
            i = part[0]
            self._push(Cost(int(costs[i])), int(keys[i]), int(stamps[i]), entries[part], int(lanes[i]))

    def _push(self, cost: Cost, key: int, stamp: int, entries: Entries, lane: int) -> None:
        self._groups += 1
        self._live += int(np.count_nonzero(self._serial[entries] == 0))
        self._serial[entries], self._key[entries], self._stamp[entries] = self._groups, key, stamp
        self._cost[entries], self._lane[entries] = cost, lane
        heapq.heappush(self._heaps[cost * self.lanes + lane], (key, stamp, int(self._at[entries[0]]), self._groups, entries))
        self._kept += len(entries)
        if self._kept > 2 * self._live + SLACK:
            self._compact()

    def _watch(self, entries: Entries, expires: npt.NDArray[np.float64]) -> None:
        """Remember when entries expire. Groups of the same time are one."""
        for when in np.unique(expires[np.isfinite(expires)]).tolist():
            heapq.heappush(self._soon, (when, self._groups, entries[expires == when]))
        if len(self._soon) > 2 * self._live + SLACK:
            still = ((w, s, e[self.knows(e) & (self._expires[e] == w)]) for w, s, e in self._soon)
            self._soon = [(w, s, e) for w, s, e in still if len(e)]
            heapq.heapify(self._soon)

    def _compact(self) -> None:
        """Forget stale members; amortised over the uses that made them."""
        for heap in self._heaps:
            live = ((group, group[4][self._serial[group[4]] == group[3]]) for group in heap)
            heap[:] = [(g[0], g[1], int(self._at[e[0]]), g[3], e) for g, e in live if len(e)]
            heapq.heapify(heap)
        self._kept = sum(len(group[4]) for heap in self._heaps for group in heap)

    # -- questions ----------------------------------------------------------------------------------------------------------------

    def knows(self, entries: Entries) -> npt.NDArray[np.bool_]:
        safe = np.minimum(entries, max(len(self._serial) - 1, 0))
        return (entries < len(self._serial)) & (self._serial[safe] != 0) if len(self._serial) else np.zeros(len(entries), dtype=bool)

    def costs(self, entries: Entries) -> Bytes:
        """What losing some known entries costs."""
        return self._cost[entries]

    def check(self) -> None:
        members = [e[self._serial[e] == s] for heap in self._heaps for _, _, _, s, e in heap]
        every = np.concatenate(members) if members else np.empty(0, dtype=np.int32)
        if len(np.unique(every)) != len(every):
            raise Inconsistent("an entry is twice in the order of eviction")
        if len(every) != self._live or self._live != int(np.count_nonzero(self._serial)):
            raise Inconsistent(f"the order of eviction counts {self._live} entries and holds {len(every)}")
        if sum(len(group[4]) for heap in self._heaps for group in heap) != self._kept:
            raise Inconsistent("the order of eviction miscounts what it keeps")
