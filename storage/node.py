"""What the storage process of a node holds and answers: the arena, the records, and what lies behind them. No sockets.

    back     a slower store of the same objects (a disk), or None: what the arena lacks is fetched from it
    behind   told of what became visible, and of what must go: it writes to ``back`` in its own time

Calls are in descriptors: places in memory, not bytes. Who reserves and leases has an ``owner`` number, from :meth:`NodeStore.owner`.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreClosed, StoreError
from hicache_ray.storage import bits, wire
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.descriptors import GRANTED, Held, Lease, Lending, Ready, Reservation, Sums
from hicache_ray.storage.ids import Ids, packed, unpacked
from hicache_ray.storage.index import ArenaIndex
from hicache_ray.storage.loading import Loader
from hicache_ray.storage.promotion import Promotion, look_behind, united
from hicache_ray.storage.table import FEW
from hicache_ray.storage.tenants import TENANT
from hicache_ray.store import SPACE_BYTES, Answer, Store, StoreStats

_STATS_S = 0.5

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
        self._promotion = Promotion(clock)
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
        the thread of the call that did it, without the lock. They raise nothing; the first returns at once, and the second may wait for
        the disk, for 2 s at most."""
        with self._lock:
            self._on_lost, self._on_cleared = on_lost, on_cleared
            self.arena.index.lost = []

    def warm_up(self, timeout_s: float) -> bool:
        """Load the compiled loop that finds ids, which the first lookup of many begins to do anyway; True once it is used."""
        loaded = self._loops.warm_up(timeout_s)
        with self._lock:
            self._open().table.compiled = self._loops.get()
        return loaded

    def owner(self) -> int:
        """A number for one connection, or one caller in this process. End it with :meth:`disconnect`."""
        return next(self._owners)

    def disconnect(self, owner: int) -> None:
        """Its open reservations and its spare slot are void. Its leases run out."""
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
        return answers if self.back is None else look_behind(self.back, keys, tags, answers, timeout_s)

    def reserve(self, ids: Ids, lengths: Sequence[int] | npt.NDArray[np.uint64], owner: int, seconds: float) -> Reservation:
        """As :meth:`ArenaIndex.reserve`."""
        with self._lock:
            index = self._open()
            made = index.reserve(ids, lengths, owner, seconds)
            lost = self._take_lost(index)
        if lost:
            self._tell_lost(lost)
        return made

    def reserve_one(self, id: bytes, length: int, owner: int, seconds: float) -> Held:
        """:meth:`reserve` of one."""
        with self._lock:
            index = self._open()
            made = index.reserve_one(id, length, owner, seconds)
            lost = self._take_lost(index)
        if lost:
            self._tell_lost(lost)
        return made

    def seal(self, reservation: int, checksums: Sequence[int | None] | Sums, owner: int) -> int:
        """As :meth:`ArenaIndex.seal`; what became visible is told to ``behind``."""
        with self._lock:
            index = self._open()
            names, lengths = index.reserved(reservation) if self.behind is not None else ([], [])
            sealed = index.seal(reservation, checksums, owner)
        if names and sealed and self.behind is not None:
            seen = list(bits.each(sealed))
            self.behind.on_sealed([names[i] for i in seen], [lengths[i] for i in seen])
        return sealed

    def seal_one(self, reservation: int, checksum: int, owner: int) -> int:
        """:meth:`seal` of one that is not given up."""
        if self.behind is not None:
            return self.seal(reservation, [checksum], owner)
        with self._lock:
            return self._open().seal_one(reservation, checksum, owner)

    def spare(self, length: int, owner: int) -> Ready | None:
        """As :meth:`ArenaIndex.spare`."""
        with self._index() as index:
            return index.spare(length, owner)

    def write_one(self, spare: int, id: bytes, length: int, checksum: int, word: int, owner: int) -> tuple[int, Ready | None]:
        """As :meth:`ArenaIndex.write_one`, told to ``behind`` where it became visible; and the spare for the next one like it."""
        with self._lock:
            index = self._open()
            outcome = index.write_one(spare, id, length, checksum, word, owner)
            ready = index.spare(length, owner)
            lost = self._take_lost(index)
        if self.behind is not None and outcome == GRANTED:
            self.behind.on_sealed([id], [length])
        if lost:
            self._tell_lost(lost)
        return outcome, ready

    def missing(self, ids: npt.NDArray[np.uint8]) -> tuple[list[bytes], int]:
        """For promotions: which of ``ids`` are neither visible nor reserved, each once; and the fence for :meth:`seal_promoted`. The others
        are not the ones to go for them: they are read next, and count as used."""
        with self._index() as index:
            known = index.known(ids)
            if not known.all():
                index.touch(ids[known])
            return list(dict.fromkeys(unpacked(ids[~known]))), self._fence

    def seal_promoted(self, reservation: int, sums: Sequence[int | None], owner: int, fence: int) -> None:
        """:meth:`seal` what came from behind, so that ``behind`` need not know; nothing, if anything was removed since ``fence``."""
        with self._index() as index:
            index.seal(reservation, sums if fence == self._fence and not self._removals else [None] * len(sums), owner)

    def lease(self, ids: Ids, owner: int, seconds: float, timeout_s: float) -> Lease:
        """As :meth:`ArenaIndex.lease`; what is not here is fetched from behind first, as far as that is done within ``timeout_s``."""
        if self.back is not None:
            self._promotion.bring(self, self.back, packed(ids), owner, timeout_s)
        with self._lock:
            return self._open().lease(ids, owner, seconds)

    def lease_one(self, id: bytes, owner: int, seconds: float, timeout_s: float) -> Lending:
        """:meth:`lease` of one."""
        if self.back is not None:
            self._promotion.bring(self, self.back, packed([id]), owner, timeout_s)
        with self._lock:
            return self._open().lease_one(id, owner, seconds)

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
        seen = [] if self.back is None else list(self.back.scan(prefix, timeout_s))
        with self._removal():
            with self._index() as index:
                here = index.packed_ids(prefix)
                count = index.clear(prefix)
            if self.behind is not None:
                self.behind.on_cleared(prefix, until - self._clock())
            if self.back is not None:
                self.back.clear(until - self._clock(), prefix)
        if self._on_cleared is not None:
            self._on_cleared(prefix)
        return count if self.back is None else len(united(here, iter(seen), self._loops.get()))

    def scan(self, prefix: bytes, timeout_s: float) -> npt.NDArray[np.uint8]:
        """(n, 64) ids of the visible objects, here and behind, as of the call."""
        with self._index() as index:
            here = index.packed_ids(prefix)
        if self.back is None:
            return here
        return united(here, iter(self.back.scan(prefix, timeout_s)), self._loops.get())

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
            self._promotion.close()
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


def _record_bytes(digest: bytes, record: Mapping[str, str]) -> int:
    """Of one record in the JSON that travels."""
    return 2 * len(digest) + 8 + len(json.dumps(dict(record)))
