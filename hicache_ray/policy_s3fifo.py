"""S3-FIFO (Yang et al., SOSP 2023), made safe for prefixes: what is used once goes soon, what comes back stays.

New pages enter a small queue. Its first page goes, or, if it was used again meanwhile, moves on to the main queue. The first page of the
main queue goes, or, while it has uses left to its credit (at most 3), is put behind with one less. A ghost remembers the names of what has
left lately: such pages enter the main queue at once.

A prefix is used whenever what it is a prefix of is used. So that it never goes first, a use puts it where its last successor stands in the
queues (right behind it), with at least as much credit. From then on queues move both alike.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from hicache_ray.policy import Bytes, Cost, Entries, Group, Longs, Lru, Usable, Worth

#: Share of the pool that the small queue has when others want room as well.
SMALL = 0.25
#: Names that the ghost remembers, as a multiple of the pool.
GHOST = 4
#: Uses that count at most.
CREDIT = 3

_SMALL, _MAIN = 0, 1
_QUEUE = 60  # a queue and a stamp in one number: bits of the stamp


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

    def _more(self) -> tuple[str, ...]:
        return ("_credit",)

    # -- what happens to pages ----------------------------------------------------------------------------------------------------

    def _keys(self, entries: Entries, worth: Worth, used: bool) -> tuple[Longs, Longs, Bytes]:
        known = self.knows(entries)
        lanes = np.where(known, self._lane[entries], self._ghost.has(self.marks(entries))).astype(np.int8)
        stays = known & (self._cost[entries] > Cost.USELESS)
        stamps = np.where(stays, self._stamp[entries], self._clock)
        credit = np.where(known, np.minimum(self._credit[entries] + used, CREDIT), 0)
        if self.chained:
            where = np.maximum.accumulate((lanes.astype(np.int64) << _QUEUE) + stamps)
            lanes, stamps = (where >> _QUEUE).astype(np.int8), where & ((1 << _QUEUE) - 1)
            credit = np.maximum.accumulate(credit)
        self._credit[entries] = credit
        return np.zeros(len(entries), dtype=np.int64), stamps, lanes

    def forget(self, entries: Entries) -> None:
        known = entries[self.knows(entries)]
        self._small -= int(np.count_nonzero(self._lane[known] == _SMALL))
        self._ghost.add(self.marks(known))
        super().forget(entries)

    def _push(self, cost: Cost, key: int, stamp: int, entries: Entries, lane: int) -> None:
        was_small = np.count_nonzero((self._serial[entries] != 0) & (self._lane[entries] == _SMALL))
        self._small += (len(entries) if lane == _SMALL else 0) - int(was_small)
        super()._push(cost, key, stamp, entries, lane)

    # -- who goes -----------------------------------------------------------------------------------------------------------------

    def _take(self, cost: Cost, count: int, usable: Usable) -> list[Entries]:
        """The first of one cost, up to ``count``, which stay where they are until they have gone. Who has a second chance is put behind."""
        if cost <= Cost.EXPIRED:
            return self._all_of(cost, count, usable)
        queues = [self._heaps[cost * 2 + lane] for lane in (_SMALL, _MAIN)]
        out: list[Entries] = []
        back: tuple[list[Group], list[Group]] = ([], [])
        small = self._small
        while count > 0:
            heads = [self._head(queue) for queue in queues]
            spare = small - int(SMALL * self.capacity)
            lane = _SMALL if heads[_SMALL] is not None and (spare > 0 or heads[_MAIN] is None) else _MAIN
            group = heads[lane]
            if group is None:
                break
            key, stamp, _, serial, _ = heapq.heappop(queues[lane])
            free = np.flatnonzero(usable(group))
            again = self._credit[group[free]] > 0
            stop = min(self._turn(lane, spare, again), int(np.searchsorted(np.cumsum(~again), count)) + 1)
            seen = int(free[stop - 1]) + 1 if stop <= len(free) and stop else len(group)
            free, again = free[:stop], again[:stop]
            goes, behind = group[free[~again]], group[free[again]]
            aside = np.setdiff1d(np.arange(seen), free[again], assume_unique=True)
            for part, where in ((group[seen:], queues[lane]), (group[aside], back[lane])):
                if len(part):
                    heapq.heappush(where, (key, stamp, int(self._at[part[0]]), serial, part))
            out += [goes] if len(goes) else []
            count -= len(goes)
            small -= len(free) if lane == _SMALL else 0
            self._kept -= len(behind)
            self._requeue(cost, behind, lane)
        for lane in (_SMALL, _MAIN):
            for held in back[lane]:
                heapq.heappush(queues[lane], held)
        return out

    def _turn(self, lane: int, spare: int, again: npt.NDArray[np.bool_]) -> int:
        """How many of a queue's first pages are looked at before the other queue may have its turn."""
        if lane == _MAIN:
            return len(again)
        if spare > 0:
            return spare
        return int(np.argmax(again)) + 1 if np.any(again) else len(again)  # until the main queue has one

    def _requeue(self, cost: Cost, entries: Entries, lane: int) -> None:
        """To the end of the main queue: from the small one without credit, from the main one with one less."""
        if len(entries):
            self._clock += 1
            self._credit[entries] = 0 if lane == _SMALL else self._credit[entries] - 1
            self._renumber(entries)
            self._push(cost, 0, self._clock, entries, _MAIN)

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
