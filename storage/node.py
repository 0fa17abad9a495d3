"""What the storage process of a node holds and answers: the arena, the records, and what lies behind them. No sockets.

    back     a slower store of the same objects (a disk), or None: what the arena lacks is fetched from it
    behind   told of what became visible, and of what must go: it writes to ``back`` in its own time

Calls are in descriptors: places in memory, not bytes. Who reserves and leases has an ``owner`` number, from :meth:`NodeStore.owner`.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreClosed, StoreError
from hicache_ray.storage import bits, wire
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.copying import Copier, as_array
from hicache_ray.storage.descriptors import Lease, Reservation, Sums
from hicache_ray.storage.ids import Ids, packed, unpacked
from hicache_ray.storage.index import ArenaIndex
from hicache_ray.storage.loading import Loader
from hicache_ray.storage.movers import Batch
from hicache_ray.storage.table import FEW
from hicache_ray.store import SPACE_BYTES, Answer, Lent, Store, StoreStats

log = logging.getLogger("hicache_ray.storage")
TENANT = "tenant"  # the field of a namespace's record that says whose it is
_STATS_S = 0.5
_PROMOTED = 256  # objects fetched from behind the arena in one step: between two steps the deadline is looked at

Lost: TypeAlias = "list[npt.NDArray[np.uint8]] | None"  # ids that went, by (n, 64) arrays


class Behind(Protocol):
    """Writes what became visible to the store behind. It never calls the node while it is called.

    Its own thread reads through ``node.lease(ids, owner, seconds, timeout_s=0)``: with no time given, nothing is fetched from behind.
    """

    def on_sealed(self, ids: Sequence[bytes], lengths: Sequence[int]) -> None:
        """These objects became visible. Their bytes are there for as long as a lease finds them. Returns at once, and raises nothing."""
        ...

    def on_removed(self, ids: Sequence[bytes], timeout_s: float) -> None:
        """These must not be written any more, should they be waiting; what is being written is undone when it returns. Raises
        StoreTimeout."""
        ...

    def on_cleared(self, prefix: bytes, timeout_s: float) -> None:
        """The same for all that begin with this."""
        ...


class NodeStore:
    """Thread-safe. One lock, held for the arithmetic of a call and never while bytes move or ``back`` is asked."""

    def __init__(
        self,
        arena: Arena,
        back: Store | None = None,
        behind: Behind | None = None,
        clock: Callable[[], float] = time.monotonic,
        records: Mapping[bytes, Mapping[str, str]] | None = None,
    ) -> None:
        """Takes the arena, and closes it; ``back`` and ``behind`` stay the caller's. ``behind`` may be set later, before the first call.
        ``clock``: of the calls' deadlines. ``records``: kept from the start, so that the caps of the tenants they name hold before anybody
        describes them. Raises StoreError."""
        self.arena, self.back = arena, back
        self.behind = behind
        self._clock = clock
        self._copier = Copier(1, kernel="off")  # of promotions: they wait for the store behind, not for the copy
        self._loops = Loader("hicache_ray.storage.kernel_table", "find", "lookups take the slower way", off=False)
        self._lock = threading.Lock()  # guards the index and the records
        self._records: dict[bytes, dict[str, str]] = {}
        self._record_bytes = 0
        self._owners = itertools.count(1)
        self._fence = 0  # grows when a removal begins and when it ends: a promotion in which it grew is void
        self._removals = 0  # under way
        self._closed = False
        self._on_lost: Callable[[Sequence[bytes]], None] | None = None
        self._on_cleared: Callable[[bytes], object] | None = None
        behind_arena = back.described(10.0) if back is not None else {}
        for digest, record in {**behind_arena, **(records or {})}.items():
            self._keep(digest, dict(record))

    def watch(self, on_lost: Callable[[Sequence[bytes]], None], on_cleared: Callable[[bytes], object]) -> None:
        """Have ``on_lost(ids)`` called with what was evicted, dropped or found damaged, and ``on_cleared(prefix)`` after every clear: on
        the thread of the call that did it, without the lock. They return at once and raise nothing."""
        with self._lock:
            self._on_lost, self._on_cleared = on_lost, on_cleared
            self.arena.index.lost = []

    def owner(self) -> int:
        """A number for one connection, or one caller in this process. End it with :meth:`disconnect`."""
        return next(self._owners)

    def disconnect(self, owner: int) -> None:
        """Its open reservations are void. Its leases run out."""
        with self._lock:
            if not self._closed:
                self.arena.index.disconnect(owner)

    # -- objects -----------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Ids, tags: Sequence[bytes], timeout_s: float) -> list[Answer]:
        """One answer per tag. A hit is here or behind. Raises StoreError."""
        with self._lock:
            index = self._open()
            if index.table.compiled is None and len(keys) > FEW:
                index.table.compiled = self._loops.get()
            answers = index.lookup_tags(keys, tags)
        return answers if self.back is None else self._look_behind(self.back, keys, tags, answers, timeout_s)

    def reserve(self, ids: Ids, lengths: Sequence[int] | npt.NDArray[np.uint64], owner: int, seconds: float) -> Reservation:
        """As :meth:`ArenaIndex.reserve`."""
        with self._lock:
            index = self._open()
            made = index.reserve(ids, lengths, owner, seconds)
            lost = self._take_lost(index)
        if lost:
            self._tell_lost(lost)
        return made

    def seal(self, reservation: int, checksums: Sequence[int | None] | Sums, owner: int) -> int:
        """As :meth:`ArenaIndex.seal`; what became visible is told to ``behind``."""
        return self._seal(reservation, checksums, owner, tell=True)

    def lease(self, ids: Ids, owner: int, seconds: float, timeout_s: float) -> Lease:
        """As :meth:`ArenaIndex.lease`; what is not here is fetched from behind first, as far as that is done within ``timeout_s``."""
        if self.back is not None:
            self._promote(packed(ids), owner, timeout_s)
        with self._lock:
            return self._open().lease(ids, owner, seconds)

    def release(self, lease: int, bad: int) -> None:
        """As :meth:`ArenaIndex.release`."""
        with self._lock:
            index = self._open()
            index.release(lease, bad)
            lost = self._take_lost(index)
        if lost:
            self._tell_lost(lost)

    # -- removing ----------------------------------------------------------------------------------------------------------------

    def drop(self, ids: Ids, timeout_s: float) -> int:
        """Bitset of those that existed, here or behind. Raises StoreError where it is not complete behind."""
        names = unpacked(ids) if isinstance(ids, np.ndarray) else list(ids)
        until = self._clock() + timeout_s
        with self._removal():
            with self._index() as index:
                existed = index.drop(ids)
            if self.behind is not None:
                self.behind.on_removed(names, timeout_s)
            return existed if self.back is None else existed | self.back.drop(names, until - self._clock())

    def clear(self, prefix: bytes, timeout_s: float) -> int:
        """Remove what begins with ``prefix``, here and behind; how many objects there were. Fenced against late writers of both, and
        against what is on its way between them. Raises StoreError where it is not complete behind."""
        until = self._clock() + timeout_s
        seen = set[bytes]() if self.back is None else set(self.back.scan(prefix, timeout_s))
        with self._removal():
            with self._index() as index:
                seen.update(index.ids(prefix) if self.back is not None else ())
                count = index.clear(prefix)
            if self.behind is not None:
                self.behind.on_cleared(prefix, until - self._clock())
            if self.back is not None:
                self.back.clear(until - self._clock(), prefix)
        if self._on_cleared is not None:
            self._on_cleared(prefix)
        return count if self.back is None else len(seen)

    def scan(self, prefix: bytes, timeout_s: float) -> npt.NDArray[np.uint8]:
        """(n, 64) ids of the visible objects, here and behind, as of the call."""
        with self._index() as index:
            here = index.packed_ids(prefix)
        if self.back is None:
            return here
        return packed(sorted({*unpacked(here), *self.back.scan(prefix, timeout_s)}))

    # -- administration ----------------------------------------------------------------------------------------------------------

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        """Keep a record; that of a namespace says whose its space is. Raises StoreError where the records would be too many."""
        with self._index():
            self._keep(digest, dict(record))
        if self.back is not None:
            self.back.describe(digest, record, timeout_s)

    def described(self) -> dict[bytes, dict[str, str]]:
        with self._index():
            return dict(self._records)

    def stats(self) -> StoreStats:
        with self._index() as index:
            stats = index.stats()
        return replace(stats, huge_bytes=self.arena.segment.huge_bytes(), writes_off=self._writes_off())

    def _writes_off(self) -> str:
        """Why nothing is written behind the arena; "" where something is."""
        try:
            return "" if self.back is None else self.back.stats(_STATS_S).writes_off
        except StoreError as error:
            return str(error)

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._index() as index:
            index.check()

    def close(self) -> None:
        """Idempotent. Removes the arena's files."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.behind = None  # it knows this node: without it the memory is free as soon as nobody reads it
            self._copier.close()
            self._loops.close()
            self.arena.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _index(self) -> Iterator[ArenaIndex]:
        with self._lock:
            index = self._open()
            yield index
            lost = self._take_lost(index)
        if lost:
            self._tell_lost(lost)

    @contextmanager
    def _removal(self) -> Iterator[None]:
        """What is read from behind meanwhile may be what is removed there: it does not come back into the arena."""
        with self._lock:
            self._fence += 1
            self._removals += 1
        try:
            yield
        finally:
            with self._lock:
                self._fence += 1
                self._removals -= 1

    def _open(self) -> ArenaIndex:
        """For who has the lock. On the way of every call: a generator more would cost as much as the rest of it."""
        if self._closed:
            raise StoreClosed("the store of this node is closed")
        return self.arena.index

    @staticmethod
    def _take_lost(index: ArenaIndex) -> Lost:
        """For who has the lock."""
        lost = index.lost
        if lost:
            index.lost = []
        return lost

    def _tell_lost(self, lost: Lost) -> None:
        if lost and self._on_lost is not None:
            self._on_lost([id for part in lost for id in unpacked(part)])

    def _keep(self, digest: bytes, record: dict[str, str]) -> None:
        size = _record_bytes(digest, record) - (_record_bytes(digest, self._records[digest]) if digest in self._records else 0)
        if self._record_bytes + size > wire.MAX_RECORDS:
            raise StoreError(f"the descriptions would take {self._record_bytes + size} bytes; the store keeps {wire.MAX_RECORDS}")
        if TENANT in record and len(digest) >= SPACE_BYTES:
            self.arena.index.assign(digest[:SPACE_BYTES], record[TENANT])
        self._records[digest] = record
        self._record_bytes += size

    @staticmethod
    def _look_behind(back: Store, keys: Ids, tags: Sequence[bytes], answers: list[Answer], timeout_s: float) -> list[Answer]:
        """Asked is only for what is not here: for the keys that some tag misses, under those tags."""
        everything = (1 << len(keys)) - 1
        missed = [everything & ~answer.hit for answer in answers]
        which = list(bits.each(reduce(or_, missed, 0)))
        if not which:
            return answers
        names = unpacked(keys) if isinstance(keys, np.ndarray) else keys
        try:
            found = back.lookup([names[i] for i in which], [tag for tag, miss in zip(tags, missed, strict=True) if miss], timeout_s)
        except StoreError:  # nobody can say now what is behind; what is here is here
            return [replace(answer, retry=miss & ~answer.pending) for answer, miss in zip(answers, missed, strict=True)]
        return [_union(answer, _spread(found[tag], which)) if tag in found else answer for answer, tag in zip(answers, tags, strict=True)]

    def _seal(self, reservation: int, checksums: Sequence[int | None] | Sums, owner: int, tell: bool) -> int:
        with self._lock:
            index = self._open()
            names, lengths = index.reserved(reservation) if tell and self.behind is not None else ([], [])
            sealed = index.seal(reservation, checksums, owner)
        if names and sealed and self.behind is not None:
            seen = list(bits.each(sealed))
            self.behind.on_sealed([names[i] for i in seen], [lengths[i] for i in seen])
        return sealed

    def _promote(self, ids: npt.NDArray[np.uint8], owner: int, timeout_s: float) -> None:
        """Bring what is only behind into the arena, without the lock and within the deadline. Whatever fails is a miss."""
        assert self.back is not None
        with self._index() as index:
            names = list(dict.fromkeys(unpacked(ids[~index.known(ids)])))
            fence = self._fence
        until = self._clock() + timeout_s
        for start in range(0, len(names), _PROMOTED):
            left = until - self._clock()
            if left <= 0:
                return
            some = names[start : start + _PROMOTED]
            try:
                with self.back.lease(some, left) as lent:
                    damaged = self._bring(some, lent, owner, fence, until)
                if damaged:
                    self._tell_damaged(damaged, until)
            except StoreError:
                return

    def _bring(self, names: Sequence[bytes], lent: Lent, owner: int, fence: int, until: float) -> dict[bytes, int]:
        """Copy what is lent, as far as that is done by ``until``. Published is only what was whole, still lent after the copy, and has the
        checksum that the lender says, where it says one. Returns what has not, with the lengths."""
        found = [(i, as_array(view)) for i, view in enumerate(lent.views) if view is not None]
        if not found:
            return {}
        asked = self._clock()
        place = self.reserve([names[i] for i, _ in found], [data.nbytes for _, data in found], owner, self.arena.config.hold_s)
        until = min(until, asked + place.seconds)  # later the memory may be another's
        copied = [found[n] for n in place.granted.tolist()]
        sums: list[int | None] = [None] * len(copied)
        damaged: dict[bytes, int] = {}
        try:
            memory, offsets = self.arena.segment.data, place.offsets[place.granted].tolist()
            targets = [memory[at : at + data.nbytes] for at, (_, data) in zip(offsets, copied, strict=True)]
            batch = Batch.of([data for _, data in copied], targets, of_source=True)
            read = self._copier.run(batch, lambda: self._clock() >= until).listed()
            known: Sequence[int | None] = getattr(lent, "checksums", None) or [None] * len(names)
            valid = lent.valid()
            for n, ((i, data), value) in enumerate(zip(copied, read, strict=True)):
                if value is None or not valid >> i & 1:
                    continue
                if known[i] in (None, value):
                    sums[n] = value
                else:
                    damaged[names[i]] = data.nbytes
        finally:
            with self._index() as index:
                index.seal(place.id, sums if fence == self._fence and not self._removals else [None] * len(sums), owner)
        return damaged

    def _tell_damaged(self, damaged: Mapping[bytes, int], until: float) -> None:
        """A read of its own shows the store behind what it holds: it drops what does not fit, and counts it."""
        log.warning("%d objects behind the arena do not fit their checksums; they are misses", len(damaged))
        assert self.back is not None
        self.back.get(list(damaged), [np.empty(size, np.uint8) for size in damaged.values()], until - self._clock())


def _spread(answer: Answer, which: Sequence[int]) -> Answer:
    """Bit ``n`` speaks of key ``which[n]``."""
    if which[-1] == len(which) - 1:
        return answer
    return Answer(*(sum(1 << which[n] for n in bits.each(part)) for part in (answer.hit, answer.pending, answer.retry)))


def _union(here: Answer, behind: Answer) -> Answer:
    hit = here.hit | behind.hit
    pending = (here.pending | behind.pending) & ~hit
    return Answer(hit=hit, pending=pending, retry=behind.retry & ~hit & ~pending)


def _record_bytes(digest: bytes, record: Mapping[str, str]) -> int:
    """Of one record in the JSON that travels."""
    return 2 * len(digest) + 8 + len(json.dumps(dict(record)))
