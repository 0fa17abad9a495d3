"""Compaction: where objects of one size class lie thinly, they move together, so that their segment can go to a class that needs room.

One segment at most per put and class, and only one that is at most half full and whose objects fit into free slots of its class: so what
is written for it is never more than the room that it gives. Nothing is evicted for it.

The order of a put is the order of a move: an object's bytes, its record in the new place, then it is visible there, and only then the
old place is given up. Cut off anywhere, an object is in the old place, in the new one or, the same bytes with the same sequence, in both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.errors import StoreError
from hicache_ray.storage.checked import scratch
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.disk_plan import Found, Placed
from hicache_ray.storage.disk_segment import RESERVED, SEALED, Segment
from hicache_ray.storage.disk_slots import place
from hicache_ray.storage.disk_transfer import Read, Write, read_jobs
from hicache_ray.storage.disk_work import Workers
from hicache_ray.storage.disk_write import Writer

_PART = 16 << 20  # bytes of objects in memory at once


@dataclass
class Part:
    """Some objects of the segment, pinned, and a reserved slot for each."""

    found: list[Found] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)


class Mover:
    """``lock`` guards the index; it is taken here, never held by the caller."""

    def __init__(self, port: DiskOs, workers: Workers, writer: Writer, lock: threading.Condition, index: DiskIndex) -> None:
        self._port, self._workers, self._writer, self._lock, self._index = port, workers, writer, lock, index

    def empty(self, segment: Segment, until: float, abandoned: Callable[[], None]) -> Exception | None:
        """Move what is visible in a segment that takes nothing new (``SlotMap.close``). Where that leaves it empty and unused it is given
        up, else it takes objects again. Returns what the disk refused to write.

        Raises StoreError; ``abandoned()`` is called then, as soon as nobody reads or writes any more.
        """

        def undo(part: Part) -> Callable[[], None]:
            def then() -> None:
                with self._lock:
                    self._end(part, [])
                    self._leave(segment)
                abandoned()

            return then

        failed: Exception | None = None
        whole = True
        while whole and failed is None:
            with self._lock:
                part = self._begin(segment)
            if not part.found:
                break
            whole, failed = self._move(part, until, undo(part))
        with self._lock:
            self._leave(segment)
        return failed

    def _move(self, part: Part, until: float, undo: Callable[[], None]) -> tuple[bool, Exception | None]:
        """Whether all of it is gone from its old place, and what the disk refused to write; what it refuses to read stays where it is."""
        try:
            memory = scratch([found.length for found in part.found])
        except StoreError:
            undo()
            raise
        reads = [Read(found, data) for found, data in zip(part.found, memory, strict=True)]
        self._workers.run(read_jobs(self._port, reads, self._workers.staging_bytes), until, undo)
        writes = [Write(placed, read.target) for placed, read in zip(part.placed, reads, strict=True) if read.fits]
        done, failed = self._writer.store(writes, until, undo, replacing=True) if writes else ([], None)
        with self._lock:
            for read in reads:
                if read.fits is False:
                    self._index.bad(read.found)
                    self._index.counters.checksum_failures += 1
            self._end(part, [write.placed for write in done])
            return not any(found.segment.state[found.slot] == SEALED for found in part.found), failed

    # -- the index; the lock is held ---------------------------------------------------------------------------------------------

    def _begin(self, segment: Segment) -> Part:
        """As many of its objects as may be in memory at once, and for which there is a slot still."""
        index, part, size = self._index, Part(), 0
        for slot in np.flatnonzero(segment.state == SEALED).tolist():
            row = segment.records[slot]
            found = Found(segment.id(slot), segment, slot, int(row["length"]), int(row["checksum"]), int(row["sequence"]))
            if (part.found and size + found.length > _PART) or found.id in index.reserved:
                break
            at = index.slots.take_free(segment.file.shape.slot_bytes)
            if at is None:
                break
            index.slots.pin(segment, slot)
            part.found.append(found)
            part.placed.append(index.place(Placed(len(part.placed), found.id, found.length, *at, found.sequence)))
            size += found.length
        return part

    def _end(self, part: Part, done: Sequence[Placed]) -> None:
        """What was written is visible in its new place only, unless it was removed meanwhile; it is as old as it was."""
        index, moved = self._index, {placed.id for placed in done}
        for found, placed in zip(part.found, part.placed, strict=True):
            old, new = found.segment, placed.segment
            there = old.state[found.slot] == SEALED and new.state[placed.slot] == RESERVED
            if there and found.id in moved and index.table.move(found.id, place(old, found.slot), place(new, placed.slot)):
                del index.reserved[found.id]
                new.state[placed.slot] = SEALED
                new.busy -= 1
                new.sealed += 1
                new.used[placed.slot] = old.used[found.slot]
                new.used_sum += int(old.used[found.slot])
                new.newest = max(new.newest, int(old.used[found.slot]))
                index.slots.hide(old, found.slot)
                index.tenants.count(found.id, found.length, -1)  # it was counted in both places
            else:
                index.give_up([placed])
        index.release(part.found)

    def _leave(self, segment: Segment) -> None:
        self._index.slots.reopen(segment)
        if not segment.sealed and not segment.busy:
            self._index.dissolve(segment)
