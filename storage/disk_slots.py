"""The slots of all segments: which are free, which are pinned, which object goes next. Knows places, not ids; no reads and no writes.

A place is an int: the number of the segment, then the slot in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hicache_ray.storage.disk_segment import DEAD, FREE, SEALED, Segment, require

_SLOT_BITS = 24
_MASK = (1 << _SLOT_BITS) - 1
_VICTIMS = 256  # looked up at once: a pass over all slots of a class per victim would cost more than its write


class SlotMap:
    """``tick``: counts uses. ``used_bytes``: lengths of everything that occupies a slot."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.tick = self.used_bytes = 0
        self.pins: dict[int, int] = {}
        self.dead: dict[int, int] = {}  # place -> length, of what was visible once and is pinned still
        self._classes: dict[int, dict[int, Segment]] = {}  # slot size -> number -> segment
        self._open: dict[int, dict[int, Segment]] = {}  # the same, those with free slots
        self._victims: dict[int, list[tuple[int, int]]] = {}  # slot size -> (use, place), the oldest last

    def add(self, segment: Segment) -> None:
        size = segment.file.shape.slot_bytes
        self.segments[segment.number] = segment
        self._classes.setdefault(size, {})[segment.number] = segment
        if segment.free:
            self._open.setdefault(size, {})[segment.number] = segment
        self._victims.pop(size, None)
        slots = segment.state == SEALED
        self.used_bytes += int(segment.records["length"][slots].sum())
        self.tick = max(self.tick, segment.newest, int(segment.records["sequence"][slots].max(initial=0)))

    def remove(self, segment: Segment) -> None:
        """A segment in which nothing is visible and that nobody uses."""
        size = segment.file.shape.slot_bytes
        for lines in (self._classes, self._open):
            line = lines.get(size, {})
            line.pop(segment.number, None)
            if not line:
                lines.pop(size, None)
        self._victims.pop(size, None)
        del self.segments[segment.number]

    def at(self, place: int) -> tuple[Segment, int]:
        return self.segments[place >> _SLOT_BITS], place & _MASK

    def take_free(self, size: int) -> tuple[Segment, int] | None:
        """A free slot of a class; it is free no more."""
        line = self._open.get(size)
        if not line:
            return None
        segment = next(iter(line.values()))
        slot = segment.free.pop()
        if not segment.free:
            del line[segment.number]
        return segment, slot

    def free(self, segment: Segment, slot: int, length: int) -> None:
        self.used_bytes -= length
        segment.state[slot] = FREE
        segment.free.append(slot)
        if not segment.leaving:
            self._open.setdefault(segment.file.shape.slot_bytes, {})[segment.number] = segment

    def thin(self, size: int) -> Segment | None:
        """A segment of another class, at most half full and used by nobody, whose objects fit into free slots of others of its class: the
        one with the fewest."""
        found = None
        for other, line in self._open.items():
            free = sum(len(segment.free) for segment in line.values()) if other != size else 0
            for segment in line.values() if free else ():
                fits = segment.sealed <= free - len(segment.free) and 2 * segment.sealed <= segment.file.shape.slots
                if fits and not segment.busy and (found is None or segment.sealed < found.sealed):
                    found = segment
        return found

    def close(self, segment: Segment) -> None:
        """It takes nothing new."""
        segment.leaving = True
        del self._open[segment.file.shape.slot_bytes][segment.number]

    def reopen(self, segment: Segment) -> None:
        """The same that takes objects again; what moved is as old as it was, elsewhere."""
        size = segment.file.shape.slot_bytes
        segment.leaving = False
        if segment.free:
            self._open.setdefault(size, {})[segment.number] = segment
        self._victims.pop(size, None)

    def hide(self, segment: Segment, slot: int) -> None:
        """A visible object is visible no more; its slot is free now, or when the last reader lets go."""
        at, length = place(segment, slot), segment.length(slot)
        segment.sealed -= 1
        segment.used_sum -= int(segment.used[slot])
        segment.used[slot] = 0
        segment.write_record(slot, b"")
        if at in self.pins:
            segment.state[slot] = DEAD
            self.dead[at] = length
        else:
            self.free(segment, slot, length)

    def use(self, places: Sequence[int]) -> None:
        """These visible objects are the most recently used, the first most of all."""
        for segment, slot in map(self.at, reversed(places)):
            self.tick += 1
            segment.used_sum += self.tick - int(segment.used[slot])
            segment.used[slot] = segment.newest = self.tick

    def pin(self, segment: Segment, slot: int) -> None:
        at = place(segment, slot)
        self.pins[at] = self.pins.get(at, 0) + 1
        segment.busy += 1

    def unpin(self, segment: Segment, slot: int) -> None:
        at = place(segment, slot)
        segment.busy -= 1
        self.pins[at] -= 1
        if self.pins[at]:
            return
        del self.pins[at]
        if segment.state[slot] == DEAD:
            self.free(segment, slot, self.dead.pop(at))
        elif (line := self._victims.get(segment.file.shape.slot_bytes)) and segment.used[slot] <= line[0][0]:
            del self._victims[segment.file.shape.slot_bytes]  # it was passed over while it was pinned

    def visible(self, prefix: bytes = b"") -> Iterator[tuple[Segment, int]]:
        """Of the objects whose ids start with ``prefix``."""
        start = np.frombuffer(prefix, np.uint8)
        if len(start) > 64:
            return
        for segment in self.segments.values():
            fits = segment.state == SEALED
            if len(start):
                fits = fits & (segment.records["id"][:, : len(start)] == start).all(axis=1)
            for slot in np.flatnonzero(fits).tolist():
                yield segment, slot

    def oldest(self, size: int, before: int) -> tuple[int, int] | None:
        """(use, place) of the least recently used object of a class that nobody uses; None where there is none from ``before``."""
        for _ in range(2):
            line = self._victims.get(size, [])
            while line:
                if self.idle(*line[-1]):
                    return line[-1] if line[-1][0] < before else None
                line.pop()
            self._victims[size] = self._list_victims(size)
        return None

    def idle(self, use: int, at: int) -> bool:
        """Is there an object still that was last used then, and that nobody uses?"""
        segment, slot = self.segments.get(at >> _SLOT_BITS), at & _MASK
        return segment is not None and bool(segment.state[slot] == SEALED and segment.used[slot] == use) and at not in self.pins

    def coldest(self, size: int, before: int) -> Segment | None:
        """The coldest segment of another class that nobody uses now, nor since ``before``."""
        if len(self._classes) == 1 and size in self._classes:
            return None
        others = (s for s in self.segments.values() if s.file.shape.slot_bytes != size and not (s.busy or s.leaving) and s.newest < before)
        return min(others, key=mean_use, default=None)

    def check(self) -> None:
        """Raises Inconsistent."""
        for segment in self.segments.values():
            segment.check()
            is_open = segment.number in self._open.get(segment.file.shape.slot_bytes, {})
            require(is_open == (bool(segment.free) and not segment.leaving), f"segment {segment.number}: the open list is wrong")
        require(sum(segment.busy for segment in self.segments.values()) >= sum(self.pins.values()), "pins do not add up")
        require(all(self.at(at)[0].state[at & _MASK] == DEAD for at in self.dead), "a dead object has no slot")
        require(self.dead.keys() <= self.pins.keys(), "a dead object is pinned by nobody")

    def _list_victims(self, size: int) -> list[tuple[int, int]]:
        parts = [(segment, np.flatnonzero(segment.state == SEALED)) for segment in self._classes.get(size, {}).values()]
        if not parts:
            return []
        uses = np.concatenate([segment.used[slots] for segment, slots in parts])
        places = np.concatenate([place(segment, 0) + slots for segment, slots in parts])
        if self.pins:
            loose = ~np.isin(places, np.fromiter(self.pins, np.int64, len(self.pins)))
            uses, places = uses[loose], places[loose]
        if len(uses) > _VICTIMS:
            least = np.argpartition(uses, _VICTIMS)[:_VICTIMS]
            uses, places = uses[least], places[least]
        order = np.argsort(-uses)
        return list(zip(uses[order].tolist(), places[order].tolist(), strict=True))


def place(segment: Segment, slot: int) -> int:
    return segment.number << _SLOT_BITS | slot


def mean_use(segment: Segment) -> float:
    """How recently its objects were used; an empty segment goes first."""
    return segment.used_sum / segment.sealed if segment.sealed else -1.0
