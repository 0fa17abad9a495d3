"""What a disk store holds, and what goes when room is short. No reads and writes of objects; files are made and removed through DiskFiles.

Life of an object: ``reserve`` (invisible) -> ``record`` (its bytes are written) -> ``seal`` (visible) -> evicted, dropped or cleared. A
slot in use by a reader or a writer is never given to another object: it is DEAD until the last user ends. Eviction is LRU within a size
class; a class also takes the segment whose objects are older, on average, than its own oldest object. Within one call the first id counts
as the most recently used: callers pass pages from the root down, and what stays must be root-reachable. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hicache_ray.errors import Inconsistent
from hicache_ray.storage import bits
from hicache_ray.storage.disk_files import DiskFiles
from hicache_ray.storage.disk_format import geometry, pack_record, slot_size
from hicache_ray.storage.disk_segment import DEAD, FREE, RESERVED, SEALED, Segment
from hicache_ray.storage.disk_table import PlaceTable, hashes, hashes_of
from hicache_ray.storage.index import Counters
from hicache_ray.store import Answer

_SLOT_BITS = 24
_VICTIMS = 256  # looked up at once: a pass over all slots of a class per victim would cost more than its write


class Found(NamedTuple):
    """A visible object, pinned."""

    id: bytes
    segment: Segment
    slot: int
    length: int
    checksum: int
    sequence: int


class Placed(NamedTuple):
    """A slot reserved for object ``number`` of the call."""

    number: int
    id: bytes
    length: int
    segment: Segment
    slot: int
    sequence: int


@dataclass
class Plan:
    """One put. What was used at ``start`` or later is not evicted for it. ``error``: why the disk gave no more room."""

    start: int
    placed: list[Placed] = field(default_factory=list)
    order: list[bytes] = field(default_factory=list)  # found and placed, in the order of the call
    visible: set[bytes] = field(default_factory=set)
    refused: int = 0
    error: OSError | None = None
    compared: set[int] = field(default_factory=set)
    starved: set[int] = field(default_factory=set)


class DiskIndex:
    """Over the segments that ``files`` has. ``table`` is the only thing in it that grows with every object beside the segments."""

    def __init__(self, files: DiskFiles, segments: Sequence[Segment]) -> None:
        self.files = files
        self.counters = Counters()
        self.used_bytes = 0
        self.segments = {segment.number: segment for segment in segments}
        self.table = PlaceTable()
        self.reserved: dict[bytes, Placed] = {}
        self._pins: dict[int, int] = {}
        self._dead: dict[int, int] = {}  # place -> length, of what was visible once and is pinned still
        self._classes: dict[int, dict[int, Segment]] = {}  # slot size -> number -> segment
        self._open: dict[int, dict[int, Segment]] = {}  # the same, those with free slots
        self._victims: dict[int, list[tuple[int, int]]] = {}  # slot size -> (use, place), the oldest last
        self._tick = 0
        self._adopt()

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tag: bytes) -> Answer:
        ids = [key + tag for key in keys]
        hit = bits.pack(place >= 0 for place in self._find(ids))
        return Answer(hit=hit, pending=bits.pack(map(self.reserved.__contains__, ids)) if self.reserved else 0)

    def ids(self, prefix: bytes = b"") -> list[bytes]:
        return [segment.id(slot) for segment, slot in self._visible(prefix)]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of objects."""
        return self.table.nbytes + sum(segment.nbytes for segment in self.segments.values())

    # -- writing -----------------------------------------------------------------------------------------------------------------

    def reserve(self, ids: Sequence[bytes], lengths: Sequence[int], writable: bool) -> Plan:
        """Slots for new objects, evicting older ones; of equal ids the first counts."""
        self._tick += 1
        plan = Plan(self._tick)
        places = dict(zip(ids, self._find(ids), strict=True))
        self._use([place for place in places.values() if place >= 0])  # before anything is evicted
        seen: set[bytes] = set()
        for number, (id, length) in enumerate(zip(ids, lengths, strict=True)):
            if id in seen:
                continue
            seen.add(id)
            if places[id] >= 0:
                plan.visible.add(id)
                plan.order.append(id)
            elif id not in self.reserved:
                self._reserve_one(number, id, length, plan, writable)
        return plan

    def record(self, placed: Placed, checksum: int) -> bool:
        """Its bytes are on the disk: write its record, in memory. False where it was dropped meanwhile."""
        segment, slot = placed.segment, placed.slot
        if segment.state[slot] != RESERVED:
            return False
        segment.write_record(slot, pack_record(placed.id, placed.length, checksum, placed.sequence, segment.file.uid, slot))
        return True

    def seal(self, plan: Plan, done: Sequence[Placed]) -> None:
        """Make visible those whose records are on the disk and that were not dropped meanwhile; give the others up."""
        good = [placed for placed in done if placed.segment.state[placed.slot] == RESERVED]
        for placed in good:
            del self.reserved[placed.id]
            placed.segment.state[placed.slot] = SEALED
            placed.segment.sealed += 1
            placed.segment.busy -= 1
            plan.visible.add(placed.id)
        if good:
            places = np.array([_place(placed.segment, placed.slot) for placed in good], np.int64)
            self.table.insert(hashes([placed.id for placed in good]), places)
        self.counters.puts += len(good)
        sealed = {placed.id for placed in good}
        self._give_up([placed for placed in plan.placed if placed.id not in sealed])
        found = zip(plan.order, self._find(plan.order), strict=True)
        self._use([place for id, place in found if place >= 0 and id in plan.visible])
        self.counters.put_refused += plan.refused + len(plan.placed) - len(good)

    def abandon(self, plan: Plan) -> None:
        """Nobody waits for this put any more, and nobody writes for it."""
        self._give_up(plan.placed)

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def take(self, ids: Sequence[bytes]) -> list[Found | None]:
        """Pin what is visible. Counts as use."""
        found: list[Found | None] = []
        places = self._find(ids)
        for id, place in zip(ids, places, strict=True):
            if place < 0:
                found.append(None)
                continue
            segment, slot = self._at(place)
            self._pins[place] = self._pins.get(place, 0) + 1
            segment.busy += 1
            row = segment.records[slot]
            found.append(Found(id, segment, slot, int(row["length"]), int(row["checksum"]), int(row["sequence"])))
        self._use([place for place in places if place >= 0])
        self.counters.gets += len(ids)
        self.counters.get_misses += found.count(None)
        return found

    def release(self, found: Sequence[Found | None]) -> None:
        for item in found:
            if item is None:
                continue
            segment, slot = item.segment, item.slot
            place = _place(segment, slot)
            segment.busy -= 1
            self._pins[place] -= 1
            if self._pins[place]:
                continue
            del self._pins[place]
            if segment.state[slot] == DEAD:
                self._free(segment, slot, self._dead.pop(place))
            elif (line := self._victims.get(segment.file.shape.slot_bytes)) and segment.used[slot] <= line[0][0]:
                del self._victims[segment.file.shape.slot_bytes]  # it was passed over while it was pinned

    def bad(self, found: Found) -> None:
        """Its bytes do not fit its checksum; it is pinned still."""
        if found.segment.state[found.slot] == SEALED and int(found.segment.records["sequence"][found.slot]) == found.sequence:
            self._remove(found.segment, found.slot)

    # -- removing ----------------------------------------------------------------------------------------------------------------

    def drop(self, ids: Sequence[bytes]) -> int:
        """Remove objects, revoke reservations of them. Returns the bitset of those that were visible."""
        existed = []
        for id, place in zip(ids, self._find(ids), strict=True):
            there = place >= 0 and self._at(place)[0].state[place & (1 << _SLOT_BITS) - 1] == SEALED  # not dropped by this very call
            existed.append(bool(there))
            if there:
                self._remove(*self._at(place))
            self._revoke(id)
        return bits.pack(existed)

    def clear(self, prefix: bytes) -> int:
        """Remove what begins with ``prefix`` and revoke the reservations of it. Returns how many objects were visible."""
        found = list(self._visible(prefix))
        for segment, slot in found:
            self._remove(segment, slot)
        for id in [id for id in self.reserved if id.startswith(prefix)]:
            self._revoke(id)
        return len(found)

    def shrink(self) -> None:
        """Remove the coldest segments until the files fit under the cap. Raises OSError."""
        for segment in sorted(self.segments.values(), key=_mean_use):
            if self.files.room >= 0:
                return
            self._dissolve(segment)

    def check(self) -> None:
        """Everything agrees with everything. Raises Inconsistent."""
        states: Counter[int] = Counter()
        lengths = 0
        for segment in self.segments.values():
            segment.check()
            states.update(segment.state.tolist())
            lengths += int(segment.records["length"][segment.state == SEALED].sum())
            is_open = segment.number in self._open.get(segment.file.shape.slot_bytes, {})
            _require(is_open == bool(segment.free), f"segment {segment.number}: the open list is wrong")
        places = self._find(self.ids())
        _require(sorted(places) == sorted(_place(*at) for at in self._visible(b"")), "the table does not name the visible objects")
        _require(len(self.table) == states[SEALED], "the table has another number of objects")
        _require(all(p.segment.state[p.slot] == RESERVED for p in self.reserved.values()), "a reservation has no slot")
        _require(states[RESERVED] == len(self.reserved), "a slot is reserved by nobody")
        _require(states[DEAD] >= len(self._dead), "a dead object has no slot")
        pinned = sum(self._pins.values())
        _require(sum(segment.busy for segment in self.segments.values()) >= pinned, "pins do not add up")
        idle = not self.reserved and states[DEAD] == len(self._dead)  # else a put is under way, whose lengths only it knows
        _require(not idle or self.used_bytes == lengths + sum(self._dead.values()), "used bytes are wrong")
        _require(self.files.used <= self.files.config.size_bytes, "the cap is exceeded")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over what the segments hold; of two objects of one id the later written stays."""
        parts = [(segment, np.flatnonzero(segment.state == SEALED)) for segment in self.segments.values()]
        for segment, slots in parts:
            keys = segment.records[slots]
            self._tick = max(self._tick, segment.newest, int(keys["sequence"].max(initial=0)))
            self._classes.setdefault(segment.file.shape.slot_bytes, {})[segment.number] = segment
            if segment.free:
                self._open.setdefault(segment.file.shape.slot_bytes, {})[segment.number] = segment
            self.used_bytes += int(keys["length"].sum())
        if not parts:
            return
        found = np.concatenate([hashes_of(segment.records["id"][slots]) for segment, slots in parts])
        places = np.concatenate([_place(segment, 0) + slots for segment, slots in parts])
        order = np.lexsort((np.concatenate([segment.records["sequence"][slots] for segment, slots in parts]), found))
        found, places = found[order], places[order]
        older = np.zeros(len(found), bool)
        older[:-1] = found[:-1] == found[1:]
        self.table.insert(found, places)
        for hash, place in zip(found[older].tolist(), places[older].tolist(), strict=True):
            self._remove(*self._at(place), hash)

    def _find(self, ids: Sequence[bytes]) -> list[int]:
        """The place of each, -1 where it is not visible."""
        if not ids:
            return []
        places: list[int] = self.table.find(hashes(ids)).tolist()
        mask = (1 << _SLOT_BITS) - 1
        return [
            place if place >= 0 and self.segments[place >> _SLOT_BITS].id(place & mask) == id else -1
            for id, place in zip(ids, places, strict=True)
        ]

    def _at(self, place: int) -> tuple[Segment, int]:
        return self.segments[place >> _SLOT_BITS], place & (1 << _SLOT_BITS) - 1

    def _visible(self, prefix: bytes) -> Iterator[tuple[Segment, int]]:
        start = np.frombuffer(prefix, np.uint8)
        if len(start) > 64:
            return
        for segment in self.segments.values():
            fits = segment.state == SEALED
            if len(start):
                fits = fits & (segment.records["id"][:, : len(start)] == start).all(axis=1)
            for slot in np.flatnonzero(fits).tolist():
                yield segment, slot

    def _reserve_one(self, number: int, id: bytes, length: int, plan: Plan, writable: bool) -> None:
        at = None
        if writable and plan.error is None and length <= self.files.config.segment:
            try:
                at = self._allocate(slot_size(length), plan)
            except OSError as error:
                plan.error = error
        if at is None:
            plan.refused += 1
            return
        segment, slot = at
        self._tick += 1
        placed = Placed(number, id, length, segment, slot, self._tick)
        segment.state[slot] = RESERVED
        segment.busy += 1
        self.used_bytes += length
        self.reserved[id] = placed
        plan.placed.append(placed)
        plan.order.append(id)

    def _allocate(self, size: int, plan: Plan) -> tuple[Segment, int] | None:
        """A free slot of a class, making room where there is none. Raises OSError."""
        while True:
            line = self._open.get(size)
            if line:
                segment = next(iter(line.values()))
                slot = segment.free.pop()
                if not segment.free:
                    del line[segment.number]
                return segment, slot
            shape = geometry(size, self.files.config.segment, self.files.room)
            if shape is not None:
                segment = self.files.create(shape)
                for lines in (self._classes, self._open):
                    lines.setdefault(size, {})[segment.number] = segment
                self.segments[segment.number] = segment
            elif not self._make_room(size, plan):
                return None

    def _make_room(self, size: int, plan: Plan) -> bool:
        """Evict the oldest object of the class, or a segment of another class that is colder. Nothing that this call used."""
        if size in plan.starved:
            return False
        own = self._oldest(size, plan.start)
        coldest = self._coldest(size, plan.start) if own is None or size not in plan.compared else None
        plan.compared.add(size)
        if coldest is not None and (own is None or _mean_use(coldest) < own[0]):
            self.counters.evictions += coldest.sealed
            self._dissolve(coldest)
            return True
        if own is None:
            plan.starved.add(size)
            return False
        self.counters.evictions += 1
        self._remove(*self._at(own[1]))
        return True

    def _oldest(self, size: int, before: int) -> tuple[int, int] | None:
        """(use, place) of the least recently used object of a class that nobody uses; None where there is none from ``before``."""
        for _ in range(2):
            line = self._victims.get(size, [])
            while line:
                use, place = line[-1]
                segment, slot = self.segments.get(place >> _SLOT_BITS), place & (1 << _SLOT_BITS) - 1
                if segment and segment.state[slot] == SEALED and segment.used[slot] == use and place not in self._pins:
                    return line[-1] if use < before else None
                line.pop()
            self._victims[size] = self._list_victims(size)
        return None

    def _list_victims(self, size: int) -> list[tuple[int, int]]:
        parts = [(segment, np.flatnonzero(segment.state == SEALED)) for segment in self._classes.get(size, {}).values()]
        if not parts:
            return []
        uses = np.concatenate([segment.used[slots] for segment, slots in parts])
        places = np.concatenate([_place(segment, 0) + slots for segment, slots in parts])
        if self._pins:
            loose = ~np.isin(places, np.fromiter(self._pins, np.int64, len(self._pins)))
            uses, places = uses[loose], places[loose]
        if len(uses) > _VICTIMS:
            least = np.argpartition(uses, _VICTIMS)[:_VICTIMS]
            uses, places = uses[least], places[least]
        order = np.argsort(-uses)
        return list(zip(uses[order].tolist(), places[order].tolist(), strict=True))

    def _coldest(self, size: int, before: int) -> Segment | None:
        """The coldest segment of another class that nobody uses now, nor since ``before``."""
        if len(self._classes) == 1 and size in self._classes:
            return None
        others = (s for s in self.segments.values() if s.file.shape.slot_bytes != size and not s.busy and s.newest < before)
        return min(others, key=_mean_use, default=None)

    def _dissolve(self, segment: Segment) -> None:
        """A segment that nobody uses goes, and its file with it. Raises OSError, and it is gone from the index then too."""
        for slot in np.flatnonzero(segment.state == SEALED).tolist():
            self._remove(segment, slot)
        size = segment.file.shape.slot_bytes
        for lines in (self._classes, self._open):
            line = lines[size]
            line.pop(segment.number, None)
            if not line:
                del lines[size]
        self._victims.pop(size, None)
        del self.segments[segment.number]
        self.files.remove(segment)

    def _use(self, places: Sequence[int]) -> None:
        """These visible objects are the most recently used, the first most of all."""
        for place in reversed(places):
            segment, slot = self._at(place)
            self._tick += 1
            segment.used_sum += self._tick - int(segment.used[slot])
            segment.used[slot] = segment.newest = self._tick

    def _remove(self, segment: Segment, slot: int, hash: int | None = None) -> None:
        """Make a visible object invisible; its slot is free now, or when the last reader lets go."""
        place, length = _place(segment, slot), segment.length(slot)
        self.table.remove(int(hashes([segment.id(slot)])[0]) if hash is None else hash, place)
        segment.sealed -= 1
        segment.used_sum -= int(segment.used[slot])
        segment.used[slot] = 0
        segment.write_record(slot, b"")
        if place in self._pins:
            segment.state[slot] = DEAD
            self._dead[place] = length
        else:
            self._free(segment, slot, length)

    def _revoke(self, id: bytes) -> None:
        """A writer's reservation: its slot is free when the writer ends."""
        placed = self.reserved.pop(id, None)
        if placed is not None:
            placed.segment.state[placed.slot] = DEAD
            if placed.segment.records["magic"][placed.slot]:
                placed.segment.write_record(placed.slot, b"")

    def _give_up(self, plan: Sequence[Placed]) -> None:
        for placed in plan:
            self._revoke(placed.id) if self.reserved.get(placed.id) is placed else None
            placed.segment.busy -= 1
            self._free(placed.segment, placed.slot, placed.length)

    def _free(self, segment: Segment, slot: int, length: int) -> None:
        self.used_bytes -= length
        segment.state[slot] = FREE
        segment.free.append(slot)
        self._open.setdefault(segment.file.shape.slot_bytes, {})[segment.number] = segment


def _place(segment: Segment, slot: int) -> int:
    return segment.number << _SLOT_BITS | slot


def _mean_use(segment: Segment) -> float:
    """How recently its objects were used; an empty segment goes first."""
    return segment.used_sum / segment.sealed if segment.sealed else -1.0


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Inconsistent(what)
