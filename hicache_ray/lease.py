"""Leases: receipts that protect slots. Taken with a reason, released exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache_ray.errors import Inconsistent
from hicache_ray.records import Slots
from hicache_ray.slots import SlotPool
from hicache_ray.spec import Tier

Place = tuple[Tier, str]


@dataclass(frozen=True)
class Lease:
    """The receipt. ``slots`` of ``place`` = (tier, component) are pinned until it is given back."""

    id: int
    holder: str
    place: Place
    slots: Slots


class Leases:
    """All leases over the pools of one cache group."""

    def __init__(self, pools: Mapping[Place, SlotPool]) -> None:
        self._pools = pools
        self._open: dict[int, Lease] = {}
        self._next = 0

    def alloc(self, holder: str, place: Place, count: int) -> Lease:
        """Lease ``count`` free slots (there must be as many)."""
        return self._record(holder, place, self._pools[place].alloc(count))

    def take(self, holder: str, place: Place, slots: Slots) -> Lease:
        """Lease slots that are held or cached now."""
        self._pools[place].pin(slots)
        return self._record(holder, place, slots)

    def _record(self, holder: str, place: Place, slots: Slots) -> Lease:
        lease = Lease(self._next, holder, place, slots)
        self._next += 1
        self._open[lease.id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back. A second time is a bug of the caller and raises :class:`Inconsistent`."""
        if self._open.pop(lease.id, None) is None:
            raise Inconsistent(f"the lease {lease.id} of {lease.holder} was released twice")
        self._pools[lease.place].release(lease.slots)

    def release_all(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.release(lease)

    def open(self, holder: str | None = None) -> tuple[Lease, ...]:
        """Leases not yet given back, of one holder or of all."""
        return tuple(x for x in self._open.values() if holder is None or x.holder == holder)

    def check(self) -> None:
        """Raise unless the pins of every pool are exactly those of the open leases."""
        pins: dict[Place, int] = {}
        for lease in self._open.values():
            pins[lease.place] = pins.get(lease.place, 0) + len(lease.slots)
        for place, pool in self._pools.items():
            if pool.pins() != pins.get(place, 0):
                raise Inconsistent(f"{place[0].value} pool {place[1]!r} has {pool.pins()} pins and leases for {pins.get(place, 0)}")
