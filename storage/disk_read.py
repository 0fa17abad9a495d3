"""How objects get from the disk to their readers: read, compared with their checksums, and gone where they do not fit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from hicache_ray.errors import StoreError
from hicache_ray.storage.checked import scratch
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.disk_plan import Found
from hicache_ray.storage.disk_transfer import Read, read_jobs
from hicache_ray.storage.disk_work import Workers
from hicache_ray.storage.disk_write import Writer
from hicache_ray.storage.segment import Array


class Reader:
    """``lock`` guards the index; it is taken here, never held by the caller."""

    def __init__(self, port: DiskOs, workers: Workers, writer: Writer, lock: threading.Condition, index: DiskIndex) -> None:
        self._port, self._workers, self._writer, self._lock, self._index = port, workers, writer, lock, index

    def memory(self, found: Sequence[Found | None]) -> list[Array]:
        """One buffer for each. Raises StoreError; they are released then."""
        try:
            return scratch([0 if item is None else item.length for item in found])
        except StoreError:
            self._release(found)
            raise

    def read(self, reads: Sequence[Read], found: Sequence[Found | None], until: float) -> None:
        """Fill the targets; what does not fit is gone then. ``found`` stays pinned, or is released where this raises."""
        jobs = read_jobs(self._port, reads, self._workers.staging_bytes)
        if jobs:
            self._workers.run(jobs, until, lambda: self._release(found))
        bad = {read.found.id: read.found for read in reads if read.fits is False}
        missing = sum(read.fits is None for read in reads)
        if not bad and not missing:
            return
        with self._lock:
            for item in bad.values():
                self._index.bad(item)
            self._index.counters.checksum_failures += len(bad)
            self._index.counters.get_misses += len(bad) + missing
        with suppress(StoreError):  # their records are dirty and go with the next write
            self._writer.flush({item.segment for item in bad.values()}, until, False)

    def _release(self, found: Sequence[Found | None]) -> None:
        with self._lock:
            self._index.release(found)
