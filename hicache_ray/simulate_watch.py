"""What the simulator looks at: the structures of a cache group with a naive twin of each beside it, compared as they change.

The production classes run; the watched ones only look at what goes in and comes out. So every call is checked at the price of the slots
that it touches, and :meth:`WatchedResidency.glance` compares the counts after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hicache_ray.index import ABSENT, Index
from hicache_ray.lease import Lease, Leases, Place
from hicache_ray.policy_order import Entries
from hicache_ray.records import Slots
from hicache_ray.residency import Residency
from hicache_ray.simulate_content import Violation
from hicache_ray.slots import SlotPool
from hicache_ray.spec import CacheSpec, Tier

#: Raises unless every rank has, in this slot of a place, the bytes that the name stands for.
Right = Callable[[Place, Sequence[bytes], Sequence[int]], None]


def _called(place: Place) -> str:
    return f"the {place[0].value} pool {place[1]!r}"


class WatchedPool(SlotPool):
    """Knows of each slot by itself how often it is pinned and whether it is cached."""

    def __init__(self, capacity: int, place: Place) -> None:
        super().__init__(capacity)
        self.place = place
        self.pinned_by = [0] * capacity
        self.owned = [False] * capacity
        self.taken = 0  # not free
        self.owners = 0
        self.total_pins = 0

    def alloc(self, count: int) -> Slots:
        out = super().alloc(count)
        for s in out.tolist():
            if self.pinned_by[s] or self.owned[s]:
                raise Violation(f"slot {s} of {_called(self.place)} was given out while it is {'cached' if self.owned[s] else 'held'}")
            self.pinned_by[s] = 1
        self.taken += count
        self.total_pins += count
        return out

    def pin(self, slots: Slots) -> None:
        super().pin(slots)
        for s in slots.tolist():
            if not self.pinned_by[s] and not self.owned[s]:
                raise Violation(f"slot {s} of {_called(self.place)} was leased while it is free")
            self.pinned_by[s] += 1
        self.total_pins += len(slots)

    def release(self, slots: Slots) -> None:
        super().release(slots)
        for s in slots.tolist():
            self.pinned_by[s] -= 1
            if self.pinned_by[s] < 0:
                raise Violation(f"slot {s} of {_called(self.place)} was given back once more than it was leased")
            self.taken -= not self.pinned_by[s] and not self.owned[s]
        self.total_pins -= len(slots)

    def publish(self, slots: Slots, entries: Entries) -> None:
        super().publish(slots, entries)
        for s in slots.tolist():
            if self.owned[s] or not self.pinned_by[s]:
                raise Violation(f"slot {s} of {_called(self.place)} was published while it is {'cached' if self.owned[s] else 'free'}")
            self.owned[s] = True
        self.owners += len(slots)

    def withdraw(self, slots: Slots) -> None:
        super().withdraw(slots)
        for s in slots.tolist():
            if not self.owned[s]:
                raise Violation(f"slot {s} of {_called(self.place)} was withdrawn while it is not cached")
            self.owned[s] = False
            self.taken -= not self.pinned_by[s]
        self.owners -= len(slots)

    def glance(self) -> None:
        """Free + held + cached = capacity, by two ways of counting."""
        if self.free != self.capacity - self.taken or self.cached != self.owners:
            raise Violation(
                f"{_called(self.place)} counts {self.free} free and {self.cached} cached of {self.capacity} slots; "
                f"there are {self.capacity - self.taken} and {self.owners}"
            )


class WatchedLeases(Leases):
    """Counts the slots of open leases by itself."""

    def __init__(self, pools: Mapping[Place, WatchedPool]) -> None:
        super().__init__(pools)
        self.given = dict.fromkeys(pools, 0)

    def _record(self, holder: str, place: Place, slots: Slots) -> Lease:
        self.given[place] += len(slots)
        return super()._record(holder, place, slots)

    def release(self, lease: Lease) -> None:
        super().release(lease)
        self.given[lease.place] -= len(lease.slots)


class WatchedIndex(Index):
    """Keeps a dict of what is visible, and looks at the bytes of every page in the moment in which it becomes that."""

    def __init__(self, places: Iterable[Place], right: Right) -> None:
        places = list(places)
        super().__init__(places)
        self.ever: set[tuple[str, bytes]] = set()  # (component, name) that the device has had
        self.visible: dict[Place, dict[bytes, int]] = {place: {} for place in places}
        self._right = right

    def put(self, place: Place, keys: Sequence[bytes], slots: Slots) -> Entries:
        out = super().put(place, keys, slots)
        listed = slots.tolist()
        self._right(place, keys, listed)
        self.visible[place].update(zip(keys, listed, strict=True))
        if place[0] is Tier.DEVICE:
            self.ever.update((place[1], key) for key in keys)
        return out

    def remove(self, place: Place, entries: Entries) -> Slots:
        names = [self.key(e) for e in entries.tolist()]
        out = super().remove(place, entries)
        if [self.visible[place].pop(name, None) for name in names] != out.tolist():
            raise Violation(f"the index takes other slots out of {_called(place)} than it has put there")
        return out


class WatchedResidency(Residency):
    """One group's L1 and L2. ``right``: see :data:`Right`."""

    def __init__(self, spec: CacheSpec, capacity: Mapping[Place, int], right: Right) -> None:
        super().__init__(spec, capacity)
        self.watched = {place: WatchedPool(n, place) for place, n in capacity.items()}
        self.given = WatchedLeases(self.watched)
        self.seen = WatchedIndex(self.watched, right)
        self.right = right
        self.pools = dict(self.watched)
        self.leases = self.given
        self.index = self.seen

    def glance(self) -> None:
        """What holds after every event, in a few comparisons per pool."""
        visible = self.seen.visible
        for place, pool in self.watched.items():
            pool.glance()
            if pool.total_pins != self.given.given[place]:
                raise Violation(f"{_called(place)} has {pool.total_pins} pins and {self.given.given[place]} slots are leased")
            if len(visible[place]) != pool.owners:
                raise Violation(f"{_called(place)} caches {pool.owners} pages and {len(visible[place])} are visible")

    def pinned(self, place: Place, slots: Sequence[int]) -> None:
        """Raise unless somebody leases every one of the slots."""
        pins = self.watched[place].pinned_by
        for s in slots:
            if not pins[s]:
                raise Violation(f"slot {s} of {_called(place)} is in use by a record and leased by nobody")

    def look(self) -> None:
        """Twins against structures slot by slot, every cached byte of every rank. The product's own checks are its own."""
        for place, pool in self.watched.items():
            names = self.seen.visible[place]
            keys, slots = list(names), list(names.values())
            if self.seen.slots(place, self.seen.find(keys)).tolist() != slots:
                raise Violation(f"the index and its twin disagree about {_called(place)}")
            owned = [s for s, flag in enumerate(pool.owned) if flag]
            if sorted(slots) != owned or owned != np.flatnonzero(pool._owner != ABSENT).tolist():
                raise Violation(f"what is visible and what is cached in {_called(place)} are not the same slots")
            if pool.pinned_by != pool._pins.tolist():
                raise Violation(f"the pins of {_called(place)} are not those of its leases")
            self.right(place, keys, slots)
