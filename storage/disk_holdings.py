"""The objects of a disk store and their places: what is visible, what is reserved, how one comes and goes.

No reads and writes. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hicache_ray.storage.disk_files import DiskFiles
from hicache_ray.storage.disk_plan import Found, Placed
from hicache_ray.storage.disk_segment import DEAD, RESERVED, SEALED, Segment, require
from hicache_ray.storage.disk_slots import SlotMap, place
from hicache_ray.storage.disk_table import PlaceTable, latest
from hicache_ray.storage.disk_tenants import DiskTenants
from hicache_ray.storage.holdings import Counters


class DiskHoldings:
    """What :class:`~hicache_ray.storage.disk_index.DiskIndex` is made on; it says who may do what, here it is done.

    Over the segments that ``files`` has. Beside the segments, ``table`` is the only thing in it that grows with every object.
    """

    def __init__(self, files: DiskFiles, segments: Sequence[Segment], tenants: DiskTenants) -> None:
        self.files, self.tenants = files, tenants
        self.counters = Counters()
        self.slots = SlotMap()
        self.table = PlaceTable()
        self.reserved: dict[bytes, Placed] = {}
        for segment in segments:
            self.slots.add(segment)
        self._adopt()

    def ids(self, prefix: bytes = b"") -> list[bytes]:
        return [segment.id(slot) for segment, slot in self.slots.visible(prefix)]

    def segments(self) -> list[Segment]:
        return list(self.slots.segments.values())

    def has(self, segment: Segment) -> bool:
        """False once it was given up: its file goes, or is gone, and its descriptor may be another file's."""
        return self.slots.segments.get(segment.number) is segment

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of objects."""
        return self.table.nbytes + sum(segment.nbytes for segment in self.segments())

    def place(self, placed: Placed) -> Placed:
        """A free slot that was taken is reserved from now on."""
        self.slots.used_bytes += placed.length
        self.tenants.count(placed.id, placed.length, 1)
        placed.segment.state[placed.slot] = RESERVED
        placed.segment.busy += 1
        self.reserved[placed.id] = placed
        return placed

    def give_up(self, places: Sequence[Placed]) -> None:
        """Slots that were reserved are free; nobody writes to them."""
        for placed in places:
            if self.reserved.get(placed.id) is placed:
                self._revoke(placed.id)
            placed.segment.busy -= 1
            self.slots.free(placed.segment, placed.slot, placed.length)

    def release(self, found: Sequence[Found | None]) -> None:
        for item in found:
            if item is not None:
                self.slots.unpin(item.segment, item.slot)

    def bad(self, found: Found) -> None:
        """Its bytes do not fit its checksum; it is pinned still."""
        if found.segment.state[found.slot] == SEALED and int(found.segment.records["sequence"][found.slot]) == found.sequence:
            self._remove(found.segment, found.slot)

    def dissolve(self, segment: Segment) -> None:
        """A segment that nobody uses goes, and its file with it."""
        for slot in np.flatnonzero(segment.state == SEALED).tolist():
            self._remove(segment, slot)
        self.slots.remove(segment)
        self.files.give_up(segment)

    def check(self) -> None:
        """Everything agrees with everything. Raises Inconsistent."""
        self.slots.check()
        states: Counter[int] = Counter()
        lengths = 0
        for segment in self.segments():
            states.update(segment.state.tolist())
            lengths += int(segment.records["length"][segment.state == SEALED].sum())
        require(sorted(self._find(self.ids())) == sorted(place(*at) for at in self.slots.visible()), "the table misses visible objects")
        require(len(self.table) == states[SEALED], "the table has another number of objects")
        require(all(p.segment.state[p.slot] == RESERVED for p in self.reserved.values()), "a reservation has no slot")
        require(states[RESERVED] == len(self.reserved), "a slot is reserved by nobody")
        dead = self.slots.dead
        idle = not self.reserved and states[DEAD] == len(dead)  # else a put is under way, whose lengths only it knows
        require(not idle or self.slots.used_bytes == lengths + sum(dead.values()), "used bytes are wrong")
        self.tenants.check(self.slots, self.reserved.values())
        require(self.files.used <= self.files.config.size_bytes, "the cap is exceeded")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Name what the segments hold; of two objects of one id the later written stays."""
        parts = [(segment, np.flatnonzero(segment.state == SEALED)) for segment in self.segments()]
        if not parts:
            return
        ids = np.concatenate([segment.records["id"][slots] for segment, slots in parts])
        places = np.concatenate([place(segment, 0) + slots for segment, slots in parts])
        stays = latest(ids, [segment.records["sequence"][slots] for segment, slots in parts])
        self.table.insert(ids[stays], places[stays])
        for at in places[~stays].tolist():
            self.slots.hide(*self.slots.at(at))
        for segment, slot in self.slots.visible() if self.tenants.counting else ():
            self.tenants.count(segment.id(slot), segment.length(slot), 1)

    def _find(self, ids: Sequence[bytes]) -> list[int]:
        """The place of each, -1 where it is not visible."""
        if not ids:
            return []
        found: list[int] = self.table.find(ids).tolist()
        out = []
        for id, at in zip(ids, found, strict=True):
            segment, slot = self.slots.at(at) if at >= 0 else (None, 0)
            out.append(at if segment is not None and segment.id(slot) == id else -1)
        return out

    def _remove(self, segment: Segment, slot: int) -> None:
        self.table.remove(segment.id(slot), place(segment, slot))
        self.tenants.count(segment.id(slot), segment.length(slot), -1)
        self.slots.hide(segment, slot)

    def _revoke(self, id: bytes) -> None:
        """A writer's reservation: its slot is free when the writer ends."""
        placed = self.reserved.pop(id, None)
        if placed is not None:
            self.tenants.count(id, placed.length, -1)
            placed.segment.state[placed.slot] = DEAD
            if placed.segment.records["magic"][placed.slot]:
                placed.segment.write_record(placed.slot, b"")
