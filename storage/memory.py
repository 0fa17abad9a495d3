"""A store in a dict: the oracle that other stores are compared with, and the L3 of tests. One lock, one copy per object."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

from hicache_ray.errors import Inconsistent, StoreClosed
from hicache_ray.storage import bits
from hicache_ray.storage.copying import as_array, checksum
from hicache_ray.storage.ids import require_ids, require_keys
from hicache_ray.store import Answer, Bytes, StoreStats


@dataclass(eq=False)
class _Object:
    data: bytearray
    checksum: int
    leases: int = 0
    stored: bool = True  # still found under its id

    def fits(self) -> bool:
        return checksum(as_array(memoryview(self.data))) == self.checksum


class MemoryStore:
    """A :class:`~hicache_ray.store.Store` of at most ``capacity_bytes``, evicting the least recently used.

    Like the arena it never evicts what the same call stored or found, nor what is leased; leased bytes count until the lease ends.
    Timeouts are accepted and never needed: no call waits.
    """

    def __init__(self, capacity_bytes: int, lease_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self.clock = lease_s, clock
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, _Object] = OrderedDict()  # least recently used first
        self._leases: dict[int, MemoryLent] = {}
        self._records: dict[bytes, dict[str, str]] = {}
        self._stats = StoreStats(capacity_bytes=capacity_bytes, used_bytes=0, objects=0)
        self._closed = False

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        with self._locked():
            return {tag: Answer(hit=bits.pack(key + tag in self._objects for key in keys)) for tag in tags}

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(source) for _, source in zip(ids, sources, strict=True)]
        with self._locked():
            mine = {id for id in ids if id in self._objects}
            first = dict(zip(reversed(ids), reversed(arrays), strict=True))  # of equal ids the first counts
            first = {id: first[id] for id in ids}
            stored = refused = 0
            for id, array in first.items():
                if id in mine:
                    continue
                if self._make_room(array.nbytes, mine):
                    self._objects[id] = _Object(bytearray(array), checksum(array))
                    self._count(used_bytes=array.nbytes)
                    mine.add(id)
                    stored += 1
                else:
                    refused += 1
            self._use([id for id in ids if id in mine])
            self._count(puts=stored, put_refused=refused)
            return bits.pack(id in mine for id in ids)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(target, writable=True) for _, target in zip(ids, targets, strict=True)]
        with self._locked():
            found = [self._objects.get(id) for id in ids]
            bad = {id for id, item in zip(ids, found, strict=True) if item is not None and not item.fits()}
            for id in bad:
                self._remove(id)
            verified = 0
            for i, (item, array) in enumerate(zip(found, arrays, strict=True)):
                if item is not None and ids[i] not in bad and len(item.data) == array.nbytes:
                    array[:] = as_array(memoryview(item.data))
                    verified |= 1 << i
            self._use([id for id in ids if id in self._objects])
            missed = sum(item is None for item in found) + len(bad)
            self._count(gets=len(ids), get_misses=missed, checksum_failures=len(bad))
            return verified

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> MemoryLent:
        require_ids(ids)
        with self._locked():
            held = [self._objects.get(id) for id in ids]
            self._use([id for id in ids if id in self._objects])
            lent = MemoryLent(self, held, self.clock() + self._lease_s)
            if any(item is not None for item in held):
                self._leases[id(lent)] = lent
            self._count(gets=len(ids), get_misses=held.count(None))
            return lent

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        with self._locked():
            return bits.pack([self._remove(id) for id in ids])

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        with self._locked():
            return sum([self._remove(id) for id in list(self._objects) if id.startswith(prefix)])

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        with self._locked():
            return iter([id for id in self._objects if id.startswith(prefix)])

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        with self._locked():
            self._records[digest] = dict(record)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        with self._locked():
            return {digest: dict(record) for digest, record in self._records.items()}

    def stats(self, timeout_s: float) -> StoreStats:
        with self._locked():
            return replace(self._stats, objects=len(self._objects), leases=len(self._leases))

    def close(self) -> None:
        self._closed = True

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object, or it is empty."""
        with self._locked():
            item = self._objects.get(id)
            if item is None or not item.data:
                return False
            item.data[0] ^= 1
            return True

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            held = {id(item): item for lent in self._leases.values() for item in lent.held if item is not None}
            held.update((id(item), item) for item in self._objects.values())
            if self._stats.used_bytes != sum(len(item.data) for item in held.values()):
                raise Inconsistent("used bytes are wrong")
            if self._stats.used_bytes > self._stats.capacity_bytes:
                raise Inconsistent("the cap is exceeded")

    # -- inside; the lock is held ------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            now = self.clock()
            for lent in [lent for lent in self._leases.values() if lent.until <= now]:
                self._end(lent)
            yield

    def _make_room(self, wanted: int, keep: set[bytes]) -> bool:
        """Evict what is needed, or nothing where all that may go is not enough."""
        missing = self._stats.used_bytes + wanted - self._stats.capacity_bytes
        if wanted > self._stats.capacity_bytes:
            return False
        victims: list[bytes] = []
        for id, item in self._objects.items():
            if missing <= 0:
                break
            if id not in keep and not item.leases:
                victims.append(id)
                missing -= len(item.data)
        if missing > 0:
            return False
        for id in victims:
            self._remove(id)
        self._count(evictions=len(victims))
        return True

    def _remove(self, id: bytes) -> bool:
        item = self._objects.pop(id, None)
        if item is None:
            return False
        item.stored = False
        if not item.leases:
            self._count(used_bytes=-len(item.data))
        return True

    def _use(self, ids: Sequence[bytes]) -> None:
        for id in reversed(ids):
            self._objects.move_to_end(id)

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + count for name, count in more.items()})

    def _end(self, lent: MemoryLent) -> None:
        if self._leases.pop(id(lent), None) is None:
            return
        for item in lent.held:
            if item is not None:
                item.leases -= 1
                if not item.leases and not item.stored:
                    self._count(used_bytes=-len(item.data))

    def end(self, lent: MemoryLent) -> None:
        with self._lock:
            self._end(lent)


class MemoryLent:
    """Read-only memoryviews of the stored bytes."""

    def __init__(self, store: MemoryStore, held: list[_Object | None], until: float) -> None:
        self.held, self.until = held, until
        self._store = store
        self._released = False
        for item in held:
            if item is not None:
                item.leases += 1
        self.views: Sequence[memoryview | None] = [None if item is None else memoryview(item.data).toreadonly() for item in held]
        self.checksums: Sequence[int | None] = [None if item is None else item.checksum for item in held]

    def valid(self) -> int:
        if self._released or self._store.clock() >= self.until:
            return 0
        return bits.pack(item is not None for item in self.held)

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            self._store.end(self)

    def __enter__(self) -> MemoryLent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
