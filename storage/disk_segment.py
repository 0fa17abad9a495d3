"""One segment: a file, and what is known of its slots. The index decides what happens to them; this module knows the file.

The records in memory are the records on disk, but for blocks in ``dirty``: those are still to be written.
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hicache_ray.errors import Inconsistent
from hicache_ray.storage import disk_format as form
from hicache_ray.storage.disk_footer import Listing, pack_footer, unpack_footer
from hicache_ray.storage.disk_format import RECORD, RECORD_BYTES, Geometry, Ints
from hicache_ray.storage.disk_io import BLOCK, DiskOs, read_upto, up, write_all
from hicache_ray.storage.segment import Array

FREE, RESERVED, SEALED, DEAD = 0, 1, 2, 3
_PER_BLOCK = BLOCK // RECORD_BYTES


@dataclass(frozen=True)
class SegmentFile:
    """An open file. ``uid`` is in every record, so that a record of another file is none of this one's."""

    number: int
    path: str
    descriptor: int
    uid: int
    shape: Geometry


@dataclass(eq=False)
class Segment:
    """``state``, ``used`` (when last used, on the store's count of uses) and ``records`` are per slot. ``busy``: users of the open file."""

    file: SegmentFile
    memory: mmap.mmap = field(init=False)
    dirty: set[int] = field(default_factory=set)
    has_footer: bool = False
    footed: int = -1  # ``newest`` as the footer has it
    flushing: bool = False  # somebody is writing what was dirty
    leaving: bool = False  # it takes nothing new: its objects move elsewhere
    busy: int = 0
    sealed: int = 0
    used_sum: int = 0
    newest: int = 0
    writing: threading.Lock = field(default_factory=threading.Lock)  # one writer of records at a time, so that the last one is the newest

    def __post_init__(self) -> None:
        slots = self.file.shape.slots
        self.memory = mmap.mmap(-1, up(slots * RECORD_BYTES))
        self.records = np.frombuffer(self.memory, RECORD, slots)
        self.used: Ints = np.zeros(slots, np.int64)
        self.state: Array = np.zeros(slots, np.uint8)
        self.free = array("I", range(slots - 1, -1, -1))

    @property
    def number(self) -> int:
        return self.file.number

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return self.file.shape.slots - len(self.free)

    @property
    def nbytes(self) -> int:
        """Memory of what is known of it."""
        return len(self.memory) + self.used.nbytes + self.state.nbytes + self.free.itemsize * len(self.free)

    @property
    def footer_fresh(self) -> bool:
        """Whether the footer says all that there is to say."""
        return self.has_footer and self.footed == self.newest

    def id(self, slot: int) -> bytes:
        start = slot * RECORD_BYTES + 48
        return self.memory[start : start + 64]

    def length(self, slot: int) -> int:
        return int(self.records["length"][slot])

    def write_record(self, slot: int, record: bytes) -> None:
        """In memory; zeros where it is empty."""
        self.memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record or bytes(RECORD_BYTES)
        self.dirty.add(slot // _PER_BLOCK)

    def adopt(self, slots: Ints) -> None:
        """What the records say is in these slots is visible; the others are free."""
        self.state[:], self.state[slots] = FREE, SEALED
        self.used[self.state == FREE] = 0
        self.free = array("I", np.flatnonzero(self.state == FREE)[::-1].tolist())
        self.sealed, self.used_sum = len(slots), int(self.used[slots].sum())
        self.newest = int(self.used[slots].max(initial=0))

    def listing(self) -> Listing:
        """The visible objects."""
        slots = np.flatnonzero(self.state == SEALED)
        shape = self.file.shape
        return Listing(self.number, shape.data + slots * shape.slot_bytes, slots, self.used[slots], self.records[slots])

    def check(self) -> None:
        where, state = f"segment {self.number}", self.state
        require(sorted(self.free) == np.flatnonzero(state == FREE).tolist(), f"{where}: the free list is wrong")
        require(self.sealed == int((state == SEALED).sum()), f"{where}: the count of visible objects is wrong")
        require(self.used_sum == int(self.used[state == SEALED].sum()), f"{where}: the sum of uses is wrong")
        require(self.newest >= int(self.used[state == SEALED].max(initial=0)), f"{where}: newest is wrong")
        whole = form.whole_records(self.records, self.file.uid, self.file.shape.slot_bytes)
        require(bool(whole[state == SEALED].all()), f"{where}: a visible object has no record")
        require(not whole[state == FREE].any(), f"{where}: a free slot has a record")


def require(holds: bool, what: str) -> None:
    """Raises Inconsistent."""
    if not holds:
        raise Inconsistent(what)


# -- the file; ``scratch``: aligned memory of at least two blocks ------------------------------------------------------------------------


def create(port: DiskOs, file: SegmentFile, scratch: memoryview) -> Segment:
    """Allocate the file, whose descriptor is open, and write its superblock. Raises OSError."""
    port.fallocate(file.descriptor, file.shape.file_bytes)
    scratch[:BLOCK] = form.pack_super(file.uid, file.shape)
    write_all(port, file.descriptor, scratch[:BLOCK], 0)
    return Segment(file)


def load(port: DiskOs, number: int, path: str, descriptor: int, scratch: memoryview) -> Segment | None:
    """What an earlier store left. None where it is no whole segment: nothing in it is to be trusted. Raises OSError.

    A file that is too short is cut where it ends; one that is too long is not what was written.
    """
    size = port.size(descriptor)
    scratch[: 2 * BLOCK] = bytes(2 * BLOCK)
    if read_upto(port, descriptor, scratch[: 2 * BLOCK], 0) < 2 * BLOCK:
        return None
    found = form.unpack_super(scratch[:BLOCK])
    if found is None or size > found[1].file_bytes:
        return None
    segment = Segment(SegmentFile(number, path, descriptor, *found))
    slots = _from_footer(port, segment, scratch[BLOCK : 2 * BLOCK])
    from_footer = slots is not None
    if slots is None:
        slots = _from_records(port, segment)
    if size < segment.file.shape.file_bytes:
        slots = _cut(port, segment, slots, size)
    segment.adopt(slots)
    segment.footed = segment.newest if from_footer else -1
    return segment


def _from_footer(port: DiskOs, segment: Segment, block: memoryview) -> Ints | None:
    shape = segment.file.shape
    pointer = form.unpack_pointer(block, segment.file.uid)
    segment.has_footer = pointer is not None
    if pointer is None or pointer[0] > shape.footer_room:
        return None
    length, checksum = pointer
    buffer = memoryview(mmap.mmap(-1, up(length)))
    if read_upto(port, segment.file.descriptor, buffer, shape.footer) < length:
        return None
    data = buffer[:length]
    if xxhash.xxh3_64_intdigest(data) != checksum:
        return None
    return unpack_footer(data, segment.records, segment.used, segment.file.uid)


def _from_records(port: DiskOs, segment: Segment) -> Ints:
    read_upto(port, segment.file.descriptor, memoryview(segment.memory), form.RECORDS_OFFSET)
    whole = form.whole_records(segment.records, segment.file.uid, segment.file.shape.slot_bytes)
    segment.records[~whole] = np.zeros((), RECORD)
    segment.used[:] = segment.records["sequence"]
    return np.flatnonzero(whole)


def _cut(port: DiskOs, segment: Segment, slots: Ints, size: int) -> Ints:
    """Forget what the file is too short for, and give it its length again."""
    shape = segment.file.shape
    port.fallocate(segment.file.descriptor, shape.file_bytes)
    whole = shape.data + slots * shape.slot_bytes + segment.records["length"][slots].astype(np.int64) <= size
    for slot in slots[~whole].tolist():
        segment.write_record(slot, b"")
    return slots[whole]


def write_records(port: DiskOs, segment: Segment, blocks: Iterable[tuple[int, bytes]], scratch: memoryview) -> None:
    """Blocks of records (number, bytes), ascending. A footer that no longer says the truth is taken back first. Raises OSError."""
    descriptor = segment.file.descriptor
    if segment.has_footer:
        scratch[:BLOCK] = bytes(BLOCK)
        write_all(port, descriptor, scratch[:BLOCK], form.POINTER_OFFSET)
        port.fdatasync(descriptor)
        segment.has_footer = False
    start = filled = 0
    for number, data in blocks:
        if filled and (number != start + filled // BLOCK or filled + BLOCK > len(scratch)):
            write_all(port, descriptor, scratch[:filled], form.RECORDS_OFFSET + start * BLOCK)
            filled = 0
        start = start if filled else number
        scratch[filled : filled + BLOCK] = data
        filled += BLOCK
    if filled:
        write_all(port, descriptor, scratch[:filled], form.RECORDS_OFFSET + start * BLOCK)


def write_footer(port: DiskOs, segment: Segment, scratch: memoryview) -> None:
    """For a segment that nobody writes to any more and that is not dirty. Raises OSError.

    First the footer, then the pointer to it; a loss of power may reorder them, and then the checksum in the pointer says so.
    """
    data = memoryview(pack_footer(segment.listing())).cast("B")
    shape, descriptor = segment.file.shape, segment.file.descriptor
    if len(data) > shape.footer_room:
        return
    for start in range(0, len(data), len(scratch)):
        part = data[start : start + len(scratch)]
        scratch[: len(part)] = part
        write_all(port, descriptor, scratch[: up(len(part))], shape.footer + start)
    scratch[:BLOCK] = form.pack_pointer(segment.file.uid, len(data), xxhash.xxh3_64_intdigest(data))
    write_all(port, descriptor, scratch[:BLOCK], form.POINTER_OFFSET)
    segment.has_footer, segment.footed = True, segment.newest
