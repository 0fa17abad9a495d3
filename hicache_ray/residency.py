"""What one cache group holds in L1 and L2: index, slots, leases and policies, kept in step.

The stages ask and change it; it takes no decision. A *place* is a (tier, component) pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.errors import Inconsistent
from hicache_ray.index import ABSENT, Index
from hicache_ray.keys import is_other, space_of
from hicache_ray.lease import Lease, Leases, Place
from hicache_ray.policy import Entries, Lru, order
from hicache_ray.records import Slots
from hicache_ray.slots import SlotPool
from hicache_ray.spec import CacheSpec, Tier

LOCAL = (Tier.DEVICE, Tier.HOST)


@dataclass
class Counters:
    """What happened in one place since the start, in pages (snapshots). ``inserted_other``: those of them whose bytes are not canonical."""

    inserted: int = 0
    inserted_other: int = 0
    adopted: int = 0
    evictions: int = 0
    backups: int = 0
    refused: int = 0
    failures: int = 0
    dropped: int = 0


@dataclass
class Residency:
    """One per cache group. ``capacity``: slots per place. ``storage``: whether L3 is attached now. ``era``: how many drops there were."""

    spec: CacheSpec
    capacity: Mapping[Place, int]
    pools: dict[Place, SlotPool] = field(init=False)
    policies: dict[Place, Lru] = field(init=False)
    counters: dict[Place, Counters] = field(init=False)
    index: Index = field(init=False)
    leases: Leases = field(init=False)
    storage: bool = True
    era: int = 0
    _dropped: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = {place: SlotPool(n) for place, n in self.capacity.items()}
        self.policies = {place: Lru() for place in self.pools}
        self.counters = {place: Counters() for place in self.pools}
        self.counters |= {(Tier.STORAGE, c.name): Counters() for c in self.spec.components}
        self.index = Index(self.pools)
        self.leases = Leases(self.pools)

    def room(self, place: Place) -> int:
        """Slots that are free or could be, by eviction alone."""
        return self.pools[place].free + self.pools[place].idle

    def reserve(self, place: Place) -> int:
        """Host slots that requests which wait for the device do not lease: what leaves the device passes through them on its way to L3."""
        capacity = self.capacity[place]
        return min(capacity // 2, max(1, capacity // 32)) if place[0] is Tier.HOST else 0

    def touch(self, place: Place, entries: Entries) -> None:
        """The pages of one path (root first) were used together."""
        kind = self.spec[place[1]].kind
        self.policies[place].touch(entries[order(kind, len(entries))])

    def touch_in_order(self, place: Place, entries: Entries) -> None:
        """The entries were used together, and should go in the order in which they are given."""
        self.policies[place].touch(entries)

    def publish(self, place: Place, keys: Sequence[bytes], lease: Lease) -> Entries:
        """The bytes in the leased slots are complete: cache them under ``keys``.

        A page that is cached already stays as it is (the first insert wins) and the leased slot of the newcomer is free once the lease is
        given back. Returns the entries of all keys.
        """
        old = self.index.slots(place, self.index.find(keys)) != ABSENT
        fresh = [k for k, there in zip(keys, old, strict=True) if not there]
        slots = lease.slots[~old]
        entries = self.index.put(place, fresh, slots)
        self.pools[place].publish(slots, entries)
        self.counters[place].inserted += len(fresh)
        self.counters[place].inserted_other += sum(map(is_other, fresh))
        self.counters[place].adopted += len(keys) - len(fresh)
        return self.index.find(keys)

    def withdraw(self, place: Place, entries: Entries) -> None:
        """Pages leave a place. Slots that somebody still leases become free when the last lease is given back."""
        self.policies[place].forget(entries)
        slots = self.index.remove(place, entries)
        self.pools[place].withdraw(slots)

    def others(self, place: Place) -> int:
        """How many of the cached pages have bytes that are not canonical."""
        return sum(is_other(self.index.key(entry)) for entry in self.index.in_place(place).tolist())

    def idle(self, place: Place, entries: Entries) -> np.ndarray:
        """Which entries are cached in the place and leased by nobody."""
        slots = self.index.slots(place, entries)
        there = slots != ABSENT
        out = there.copy()
        out[there] = ~self.pools[place].pinned(slots[there])
        return out

    def slots(self, place: Place, entries: Entries) -> Slots:
        """Slots of entries that must be there."""
        slots = self.index.slots(place, entries)
        if (slots == ABSENT).any():
            raise Inconsistent(f"a planned page is not in the {place[0].value} pool {place[1]!r} although it was leased")
        return slots

    def clear(self, tier: Tier) -> None:
        """Withdraw everything from a tier."""
        for place in self.pools:
            if place[0] is tier:
                self.withdraw(place, self.index.in_place(place))

    def drop(self, space: bytes) -> Mapping[Tier, int]:
        """Everything of a namespace's space leaves both tiers, leased or not; whoever uses it still has its slots, and nothing else.

        Returns how many pages and snapshots there were. What began before this is stale: see :meth:`stale`.
        """
        self.era += 1
        self._dropped[space] = self.era
        removed = dict.fromkeys(LOCAL, 0)
        for place in self.pools:
            entries = self.index.in_place(place)
            mine = entries[np.fromiter((space_of(self.index.key(e)) == space for e in entries.tolist()), dtype=bool, count=len(entries))]
            removed[place[0]] += len(mine)
            self.withdraw(place, mine)
        return removed

    def stale(self, name: bytes, era: int) -> bool:
        """Whether what a name (of an object, or of a space) belongs to was dropped after ``era``: bytes from before are not published."""
        return self._dropped.get(space_of(name), 0) > era

    def check(self) -> None:
        """Raise :class:`Inconsistent` unless counts, leases and links agree: free + held + cached = capacity, leased is resident."""
        self.index.check()
        self.leases.check()
        for place, pool in self.pools.items():
            pool.check()
            self.policies[place].check()
            entries = self.index.in_place(place)
            if len(entries) != pool.cached:
                raise Inconsistent(f"the {place[0].value} pool {place[1]!r} caches {pool.cached} pages and the index knows {len(entries)}")
            if not bool(np.all(self.policies[place].knows(entries))):
                raise Inconsistent(f"a page in the {place[0].value} pool {place[1]!r} is not in its order of eviction")
