"""S3-FIFO (Yang et al., SOSP 2023), made safe for prefixes: what is used once goes soon, what comes back stays.

New pages enter a small queue. Its first page goes, or, if it was used again meanwhile, moves on to the main queue. The first page of the
main queue goes, or, while it has uses left to its credit (at most 3), is put behind with one less. A ghost remembers the names of what has
left lately: such pages enter the main queue at once.

A page whose successors are still here is not of an age with them, however the queues stand: at its turn it is put behind. So what stays is
reachable from the root.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from hicache_ray.policy import Group, Lru
from hicache_ray.policy_order import Bytes, Cost, Entries, Going, Longs, Spared, Usable, Worth

#: Share of the pool that the small queue has when others want room as well.
SMALL = 0.1
#: Names that the ghost remembers, as a multiple of the pool.
GHOST = 4
#: Uses that count at most.
CREDIT = 3

_SMALL, _MAIN = 0, 1


class Ghost:
    """Names of the last ``size`` pages that have left. Each has one place that it may stand in: some are forgotten earlier."""

    def __init__(self, size: int) -> None:
        self.size = size
        places = 1 << max(6, (2 * size - 1).bit_length())
        self._name = np.zeros(places, dtype=np.int64)
        self._when = np.full(places, -1, dtype=np.int64)
        self._count = 0

    def add(self, names: Longs) -> None:
        """Names that leave, in this order."""
        where = names & (len(self._name) - 1)
        self._name[where], self._when[where] = names, np.arange(self._count, self._count + len(names))
        self._count += len(names)

    def has(self, names: Longs) -> npt.NDArray[np.bool_]:
        where = names & (len(self._name) - 1)
        when = self._when[where]
        return (self._name[where] == names) & (when >= 0) & (when >= self._count - self.size)


class S3Fifo(Lru):
    """See the module. Lane 0 is the small queue, lane 1 the main one; an entry's stamp is when it was queued."""

    lanes = 2

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._credit = np.zeros(0, dtype=np.int8)
        self._ghost = Ghost(GHOST * self.capacity)
        self._small = 0
        # Of each page the one before it, as it was when they were linked (ids are used again), and how many follow it here.
        self._parent = np.zeros(0, dtype=np.int64)
        self._link = np.zeros(0, dtype=np.int64)
        self._born = np.zeros(0, dtype=np.int64)
        self._kids = np.zeros(0, dtype=np.int64)

    def _more(self) -> tuple[str, ...]:
        return ("_credit", "_parent", "_link", "_born", "_kids")

    # -- what happens to pages ----------------------------------------------------------------------------------------------------

    def _moves(self, entries: Entries) -> npt.NDArray[np.bool_]:
        return ~self.knows(entries) | (self._cost[entries] == Cost.USELESS)

    def _keys(self, entries: Entries, worth: Worth, used: bool) -> tuple[Longs, Longs, Bytes]:
        known = self.knows(entries)
        lanes = np.where(known, self._lane[entries], self._ghost.has(self.marks(entries))).astype(np.int8)
        stays = known & (self._cost[entries] > Cost.USELESS)
        stamps = np.where(stays, self._stamp[entries], self._clock)
        self._credit[entries] = np.where(known, np.minimum(self._credit[entries] + used, CREDIT), 0)
        fresh = entries[~known]
        self._born[fresh], self._link[fresh], self._kids[fresh] = self._clock, 0, 0
        if self.chained:
            self._join(entries[:-1], entries[1:])
        return np.zeros(len(entries), dtype=np.int64), stamps, lanes

    def _join(self, pages: Entries, parents: Entries) -> None:
        """Each page follows its parent."""
        new = (self._parent[pages] != parents) | (self._link[pages] != self._born[parents])
        pages, parents = pages[new], parents[new]
        self._part(pages)
        self._parent[pages], self._link[pages] = parents, self._born[parents]
        np.add.at(self._kids, parents, 1)

    def _part(self, pages: Entries) -> None:
        """They follow nobody any more."""
        linked = pages[self._link[pages] != 0]
        parents = self._parent[linked]
        there = self._born[parents] == self._link[linked]
        np.subtract.at(self._kids, parents[there], 1)
        self._link[linked] = 0

    def forget(self, entries: Entries) -> None:
        known = entries[self.knows(entries)]
        self._small -= int(np.count_nonzero(self._lane[known] == _SMALL))
        self._ghost.add(self.marks(known))
        self._part(known)
        self._born[known] = 0
        super().forget(entries)

    def _push(self, cost: Cost, key: int, stamp: int, entries: Entries, lane: int) -> None:
        was_small = np.count_nonzero((self._serial[entries] != 0) & (self._lane[entries] == _SMALL))
        self._small += (len(entries) if lane == _SMALL else 0) - int(was_small)
        super()._push(cost, key, stamp, entries, lane)

    # -- who goes -----------------------------------------------------------------------------------------------------------------

    def _take(self, cost: Cost, count: int, usable: Usable, spared: list[Spared]) -> list[Entries]:
        """The first of one cost, up to ``count``. Who gets a second chance is spared."""
        if cost <= Cost.EXPIRED:
            return self._all_of(cost, count, usable)
        sweep = _Sweep(self, cost, usable)
        chosen = sweep.run(count, self._small - sum(s.small for s in spared), int(SMALL * self.capacity))
        spared.append(sweep.close())
        return [np.asarray(chosen, dtype=np.int32)] if chosen else []

    def learn(self, going: Going) -> None:
        """The second chances were given: to the end of the main queue, in this order."""
        for some in going.spared:
            if len(some.entries):
                self._clock += 1
                self._credit[some.entries] = some.credits
                self._renumber(some.entries)
                self._push(some.cost, 0, self._clock, some.entries, _MAIN)

    def _all_of(self, cost: Cost, count: int, usable: Usable) -> list[Entries]:
        """What is of no use to anybody goes without a second chance, in the order of the queues."""
        out: list[Entries] = []
        for lane in (_SMALL, _MAIN):
            left = count - sum(map(len, out))
            if left <= 0:
                break
            heap = self._heaps[cost * 2 + lane]
            groups = []
            while left > 0 and (group := self._head(heap)) is not None:
                groups.append(heapq.heappop(heap))
                here = group[usable(group)][:left]
                out += [here] if len(here) else []
                left -= len(here)
            for one in groups:
                heapq.heappush(heap, one)
        return out


class _Line:
    """The pages of one queue that may go, the first first. Groups that were taken out go back at the end."""

    def __init__(self, policy: S3Fifo, lane: int, usable: Usable) -> None:
        self.policy, self.heap, self.usable = policy, policy._heaps[lane], usable
        self.out: list[Group] = []
        self.ahead: list[int] = []  # of the last group, the next one last

    def peek(self) -> int | None:
        while not self.ahead:
            group = self.policy._head(self.heap)
            if group is None:
                return None
            self.out.append(heapq.heappop(self.heap))
            self.ahead = group[self.usable(group)][::-1].tolist()
        return self.ahead[-1]

    def close(self) -> None:
        for group in self.out:
            heapq.heappush(self.heap, group)


class _Sweep:
    """One walk over both queues of one cost, as it would go. It changes nothing: what it would is in what :meth:`close` returns."""

    def __init__(self, policy: S3Fifo, cost: Cost, usable: Usable) -> None:
        self.policy, self.cost = policy, cost
        self.lines = tuple(_Line(policy, cost * 2 + lane, usable) for lane in (_SMALL, _MAIN))
        self.behind: dict[int, None] = {}  # put behind in this walk, and not chosen after all
        self.waited: set[int] = set()  # put behind for nothing but their successors
        self.credits: dict[int, int] = {}  # of those who were put behind
        self.left_small = 0  # of those who were put behind, how many from the small queue
        self.kids: dict[int, int] = {}  # of those whose successors were chosen

    def run(self, count: int, small: int, limit: int) -> list[int]:
        """Pages to go; ``small``: in the small queue, of all costs; ``limit``: those that may be."""
        chosen: list[int] = []
        stuck = False  # all that the main queue has is kept by successors
        while len(chosen) < count:
            first, main = self.lines[_SMALL].peek(), self._main()
            page = first if first is not None and (small > limit or main is None or stuck) else main
            if page is None:
                break
            if page == first:
                self.lines[_SMALL].ahead.pop()
                small -= 1
                stuck = False
            elif page in self.waited and first is not None and self._followed(page):
                stuck = True
                continue
            elif page in self.behind:
                del self.behind[page]
            else:
                self.lines[_MAIN].ahead.pop()
            if self._again(page, page == first):
                self.behind[page] = None
                self.left_small += page == first
                continue
            chosen.append(page)
        return chosen

    def _main(self) -> int | None:
        page = self.lines[_MAIN].peek()
        return next(iter(self.behind), None) if page is None else page

    def _followed(self, page: int) -> bool:
        return self.kids.get(page, int(self.policy._kids[page])) > 0

    def _again(self, page: int, small: bool) -> bool:
        """Whether a page whose turn it is gets a second chance. If not it goes, and whoever it follows has one successor less."""
        credit, followed = self.credits.get(page, int(self.policy._credit[page])), self._followed(page)
        if credit or (followed and page not in self.waited):
            if not credit:
                self.waited.add(page)
            self.credits[page] = 0 if small else max(credit - 1, 0)
            return True
        parent = int(self.policy._parent[page])
        if self.policy._link[page] and self.policy._link[page] == self.policy._born[parent]:
            self.kids[parent] = self.kids.get(parent, int(self.policy._kids[parent])) - 1
        return False

    def close(self) -> Spared:
        """Those who were put behind and not chosen after all."""
        for line in self.lines:
            line.close()
        left = list(self.behind)
        credits = np.asarray([self.credits[page] for page in left], dtype=np.int8)
        return Spared(self.cost, np.asarray(left, dtype=np.int32), credits, self.left_small)
