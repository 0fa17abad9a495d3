"""End-to-end checksums around any store: what its writer did not put, its reader does not get."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.ids import require_ids
from hicache_ray.storage.lending import Released
from hicache_ray.storage.segment import Array
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Bytes, Lent, Store, StoreStats

TRAILER_BYTES = 8


class ChecksumStore(StoreWrapper):
    """Stores every object with a trailer: the xxh3-64 (8 bytes, little endian) of its id and its bytes. Every read verifies it.

    So a store without checksums of its own becomes safe: a flipped bit, a torn write, another object's bytes are a miss, and the object is
    dropped. What it costs: ``TRAILER_BYTES`` per object (``stats`` are those of the inner store, trailers included), one copy more in
    each direction, and for the time of a call as much memory as it moves. Objects that were put without this wrapper are misses, and
    all who share the inner store need it.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._failures = 0

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(source) for _, source in zip(ids, sources, strict=True)]
        sealed = scratch([array.nbytes + TRAILER_BYTES for array in arrays])
        for id, array, whole in zip(ids, arrays, sealed, strict=True):
            whole[:-TRAILER_BYTES] = array
            whole[-TRAILER_BYTES:] = _trailer(id, whole[:-TRAILER_BYTES])
        return self.inner.put(ids, sealed, timeout_s)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(target, writable=True) for _, target in zip(ids, targets, strict=True)]
        read = scratch([array.nbytes + TRAILER_BYTES for array in arrays])
        verified, bad = 0, list[bytes]()
        for i in bits.each(self.inner.get(ids, read, timeout_s)):
            if _fits(ids[i], read[i]):
                arrays[i][:] = read[i][:-TRAILER_BYTES]
                verified |= 1 << i
            else:
                bad.append(ids[i])
        if bad:
            self._count(len(bad))
            self.inner.drop(bad, timeout_s)
        return verified

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> CheckedLent:
        return CheckedLent(ids, self.inner.lease(ids, timeout_s))

    def stats(self, timeout_s: float) -> StoreStats:
        found = self.inner.stats(timeout_s)
        with self._lock:
            failures = self._failures
        return replace(found, checksum_failures=found.checksum_failures + failures, get_misses=found.get_misses + failures)

    def _count(self, failures: int) -> None:
        with self._lock:
            self._failures += failures


class CheckedLent(Released):
    """The inner store's views without their trailers. What is shorter than one is a miss."""

    def __init__(self, ids: Sequence[bytes], inner: Lent) -> None:
        self._ids, self._inner = ids, inner
        self._whole = [None if view is None or len(view) < TRAILER_BYTES else view for view in inner.views]
        self.views: Sequence[Bytes | None] = [None if view is None else view[: len(view) - TRAILER_BYTES] for view in self._whole]

    def valid(self) -> int:
        """As the protocol says; hashes every view that the inner store calls valid."""
        fits = 0
        for i in bits.each(self._inner.valid()):
            whole = self._whole[i]
            if whole is not None and _fits(self._ids[i], as_array(whole)):
                fits |= 1 << i
        return fits & self._inner.valid()  # hashing takes time, in which a lease may run out

    def release(self) -> None:
        self._inner.release()


def scratch(sizes: Sequence[int]) -> list[Array]:
    """Memory for the time of a call, before anything is leased or reserved. Raises StoreError where there is none."""
    try:
        return [np.empty(size, np.uint8) for size in sizes]
    except MemoryError as error:
        raise StoreError(f"no memory for the {sum(sizes)} bytes that this call moves; make its batch smaller") from error


def _trailer(id: bytes, data: Array) -> Array:
    """The id is part of it: right bytes under a wrong name are wrong."""
    digest = xxhash.xxh3_64(id)
    digest.update(data.data)
    return np.frombuffer(digest.intdigest().to_bytes(TRAILER_BYTES, "little"), np.uint8)


def _fits(id: bytes, whole: Array) -> bool:
    return bool((_trailer(id, whole[:-TRAILER_BYTES]) == whole[-TRAILER_BYTES:]).all())
