"""Naive twins of the eviction policies: one record per page, everything looked for by sorting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from hicache_ray.policy_order import Cost
from hicache_ray.policy_s3fifo import CREDIT, GHOST, SMALL


@dataclass
class Page:
    cost: int
    key: int
    stamp: int
    at: int
    expires: float
    uses: int = 1
    credit: int = 0
    main: bool = False
    life: int = 0
    parent: tuple[int, int] | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.key, self.stamp, self.at)


def running_max(values: Sequence[int]) -> list[int]:
    return [max(values[: i + 1]) for i in range(len(values))]


@dataclass
class Twin:
    """LRU; the others change the key."""

    capacity: int
    chained: bool
    pages: dict[int, Page] = field(default_factory=dict)
    clock: int = 0
    places: int = 0
    ghost: dict[int, int] = field(default_factory=dict)

    def touch(self, entries: Sequence[int], costs: Sequence[int], priority: int, expires: float, used: bool) -> None:
        if not entries:
            return
        self.clock += 1
        old = [self.pages.get(e) for e in entries]
        new = [Page(c, 0, self.clock, 0, expires) for c in costs]
        for before, page in zip(old, new, strict=True):
            if self.moves(before):
                page.at, self.places = self.places, self.places + 1
            elif before:
                page.at = before.at
        self.rank(entries, old, new, priority, used)
        self.pages.update(zip(entries, new, strict=True))

    def moves(self, before: Page | None) -> bool:
        return True

    def rank(self, entries: Sequence[int], old: Sequence[Page | None], new: Sequence[Page], priority: int, used: bool) -> None:
        pass

    def demote(self, entries: Sequence[int]) -> None:
        if entries:
            self.clock += 1
            for entry in entries:
                page = self.pages[entry]
                page.cost, page.key, page.stamp, page.at, page.main = Cost.USELESS, 0, -self.clock, self.places, False
                self.places += 1

    def recost(self, entries: Sequence[int], cost: int) -> None:
        for entry in entries:
            if entry in self.pages and self.pages[entry].cost > Cost.EXPIRED:
                self.pages[entry].cost = cost

    def forget(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self.pages.pop(entry, None)

    def expire(self, now: float) -> None:
        for page in self.pages.values():
            if page.expires <= now and page.cost > Cost.EXPIRED:
                page.cost = Cost.EXPIRED

    def victims(self, count: int, kept: Iterable[int], now: float) -> list[int]:
        """Who would go: what goes in a copy of this."""
        self.expire(now)
        return deepcopy(self).evict(count, kept, now)

    def evict(self, count: int, kept: Iterable[int], now: float) -> list[int]:
        """Who goes, with all that it has for those who stay."""
        self.expire(now)
        free = [e for e in self.pages if e not in kept]
        out = sorted(free, key=lambda e: (self.pages[e].cost, self.pages[e].place))[: max(count, 0)]
        self.leaving(out)
        return out

    def leaving(self, chosen: Sequence[int]) -> None:
        pass


class LfuTwin(Twin):
    age = 0

    def rank(self, entries: Sequence[int], old: Sequence[Page | None], new: Sequence[Page], priority: int, used: bool) -> None:
        uses = [page.uses + used if page else 1 for page in old]
        uses = running_max(uses) if self.chained else uses
        keys = [max(page.key if page else 0, self.age + n) for page, n in zip(old, uses, strict=True)]
        for page, key, n in zip(new, running_max(keys) if self.chained else keys, uses, strict=True):
            page.key, page.uses = key, n

    def leaving(self, chosen: Sequence[int]) -> None:
        by_cost = {self.pages[e].cost: self.pages[e].key for e in chosen}  # the last of each
        self.age = max([self.age, *(key for cost, key in by_cost.items() if cost > Cost.EXPIRED)])


class PriorityTwin(Twin):
    def rank(self, entries: Sequence[int], old: Sequence[Page | None], new: Sequence[Page], priority: int, used: bool) -> None:
        keys = [max(page.key, priority) if page else priority for page in old]
        for page, key in zip(new, running_max(keys) if self.chained else keys, strict=True):
            page.key = key


class S3FifoTwin(Twin):
    gone = 0

    def moves(self, before: Page | None) -> bool:
        return before is None or before.cost == Cost.USELESS

    def rank(self, entries: Sequence[int], old: Sequence[Page | None], new: Sequence[Page], priority: int, used: bool) -> None:
        for entry, before, page in zip(entries, old, new, strict=True):
            if before is None:
                page.main = self.gone - self.ghost.get(entry, -(10**9)) <= GHOST * self.capacity
                page.life = self.clock
                continue
            page.main, page.credit = before.main, min(before.credit + used, CREDIT)
            page.stamp = before.stamp if before.cost > Cost.USELESS else self.clock
            page.life, page.parent = before.life, before.parent
        if self.chained:
            for page, entry, parent in zip(new, entries[1:], new[1:], strict=False):
                page.parent = (entry, parent.life)

    def forget(self, entries: Sequence[int]) -> None:
        for entry in entries:
            if entry in self.pages:
                self.ghost[entry], self.gone = self.gone, self.gone + 1
        super().forget(entries)

    def evict(self, count: int, kept: Iterable[int], now: float) -> list[int]:
        self.expire(now)
        out: list[int] = []
        for cost in Cost:
            free = [e for e, page in self.pages.items() if page.cost == cost and e not in kept]
            if cost <= Cost.EXPIRED:
                out += sorted(free, key=lambda e: (self.pages[e].main, self.pages[e].place))[: max(count - len(out), 0)]
            else:
                self.turn(free, out, count)
        return out

    def followed(self, entry: int, chosen: Sequence[int]) -> bool:
        me = (entry, self.pages[entry].life)
        return any(page.parent == me for e, page in self.pages.items() if e not in chosen)

    def turn(self, free: list[int], out: list[int], count: int) -> None:
        """The queues of one cost, one page at a time."""
        small = sum(not page.main for page in self.pages.values())
        before, waited, stuck = list(out), set(), False
        while free and len(out) < count:
            queues = {
                main: sorted((e for e in free if self.pages[e].main is main), key=lambda e: self.pages[e].place) for main in (False, True)
            }
            main = not (queues[False] and (small > int(SMALL * self.capacity) or not queues[True] or stuck))
            entry = queues[main][0]
            page, followed = self.pages[entry], self.followed(entry, [e for e in out if e not in before])
            if main and entry in waited and followed and queues[False]:
                stuck = True
                continue
            small -= not main
            stuck = stuck and main
            if not page.credit and (not followed or entry in waited):
                free.remove(entry)
                out.append(entry)
                continue
            if not page.credit:
                waited.add(entry)
            self.clock += 1
            page.credit = max(page.credit - 1, 0) if main else 0
            page.main, page.key, page.stamp, page.at, self.places = True, 0, self.clock, self.places, self.places + 1


TWINS = {"lru": Twin, "lfu": LfuTwin, "priority": PriorityTwin, "s3fifo": S3FifoTwin}
