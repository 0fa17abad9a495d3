"""How objects and their records get to the disk, in the order that makes a crash harmless (see :mod:`hicache_ray.storage.disk`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from hicache_ray.errors import StoreError
from hicache_ray.storage import disk_segment
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_io import BLOCK, DiskOs, read_all, write_all
from hicache_ray.storage.disk_plan import Found
from hicache_ray.storage.disk_segment import Segment
from hicache_ray.storage.disk_transfer import Write, sync_jobs, write_jobs
from hicache_ray.storage.disk_work import Batch, Job, Workers


class Writer:
    """``lock`` guards the index and the segments' memory; it is taken here, never held by the caller. ``fsync`` as in DiskConfig."""

    def __init__(self, port: DiskOs, workers: Workers, lock: threading.Condition, index: DiskIndex, fsync: str) -> None:
        self._port, self._workers, self._lock, self._index = port, workers, lock, index
        self._between, self._after = fsync == "always", fsync != "never"

    def store(
        self, writes: Sequence[Write], until: float, abandoned: Callable[[], None], replacing: bool = False
    ) -> tuple[list[Write], Exception | None]:
        """Write objects into the slots reserved for them; returns those whose records are on the disk, and what went wrong, if anything.

        ``replacing``: there are older records of these objects, so whoever finds a new one must find the bytes.
        Raises StoreTimeout or StoreClosed; ``abandoned()`` is called then, as soon as nobody writes any more.
        """
        between = self._between or (replacing and self._after)
        refused = self.flush({write.segment for write in writes}, until, between, abandoned)
        writes = [write for write in writes if write.segment not in refused]
        segments = {write.segment for write in writes}
        errors = self._workers.run(write_jobs(self._port, writes, self._workers.staging_bytes), until, abandoned)
        if between:
            errors += self._workers.run(sync_jobs(self._port, list(segments)), until, abandoned)
            if any(errors):
                return [], next(filter(None, errors))
        with self._lock:
            writes = [write for write in writes if write.checksum is not None and self._index.record(write.placed, write.checksum)]
        late = self.flush(segments, until, self._after, abandoned)
        failures = [*refused.values(), *filter(None, errors), *late.values()]
        return [write for write in writes if write.segment not in late], next(iter(failures), None)

    def flush(
        self, segments: Iterable[Segment], until: float, sync: bool, abandoned: Callable[[], None] = lambda: None
    ) -> dict[Segment, Exception]:
        """Write the records that changed in memory; also waits for those that another thread is writing. Returns the failures.

        What failed stays dirty. Segments that were given up have nothing to write. ``sync``: as far as the disk itself.
        """
        with self._lock:
            segments = [segment for segment in segments if (segment.dirty or segment.flushing) and self._index.has(segment)]
            for segment in segments:
                segment.busy += 1
        if not segments:
            return {}

        def leave() -> None:
            with self._lock:
                for segment in segments:
                    segment.busy -= 1

        def give_up() -> None:
            leave()
            abandoned()

        errors = self._workers.run([self._flushing(segment, sync) for segment in segments], until, give_up)
        leave()
        return {segment: error for segment, error in zip(segments, errors, strict=True) if error is not None}

    def leave(self, segments: Sequence[Segment], until: float) -> None:
        """At the end: records, then a footer for every segment without a fresh one. Raises StoreError; the records tell the rest."""
        refused = self.flush(segments, until, True)
        stale = [segment for segment in segments if segment not in refused and not segment.footer_fresh]

        def footer(segment: Segment) -> Job:
            return lambda staging, batch: disk_segment.write_footer(self._port, segment, staging)

        self._workers.run([footer(segment) for segment in stale], until)

    def forget(self, until: float) -> None:
        """What was dropped must not come back: writes all that changed, as an older copy of an object may wait to be overwritten elsewhere,
        and removes the files that were given up. Raises StoreError."""
        with self._lock:
            segments = self._index.segments()
        refused = list(self.flush(segments, until, self._after).values()) + self.tidy(until)
        if refused:
            raise StoreError(f"the objects are gone from memory, but the disk refused ({refused[0]}): some may come back at the next start")

    def tidy(self, until: float) -> list[Exception]:
        """Remove the files that were given up, and wait for who is removing some; returns what went wrong. Raises StoreError."""
        files = self._index.files
        if not files.untidy():
            return []
        return [error for error in self._workers.run([lambda staging, batch: files.sweep()], until) if error is not None]

    def flip(self, found: Found, until: float) -> bool:
        """For tests: flip one stored bit. False where the disk refused."""

        def job(staging: memoryview, batch: Batch) -> None:
            descriptor, at = found.segment.file.descriptor, found.segment.file.shape.at(found.slot)
            read_all(self._port, descriptor, staging[:BLOCK], at)
            staging[0] ^= 1
            write_all(self._port, descriptor, staging[:BLOCK], at)

        return self._workers.run([job], until) == [None]

    def _flushing(self, segment: Segment, sync: bool) -> Job:
        def job(staging: memoryview, batch: Batch) -> None:
            with segment.writing:  # bounded as a write is; the caller has a deadline
                with self._lock:
                    dirty = sorted(segment.dirty)
                    blocks = [(number, segment.memory[number * BLOCK : (number + 1) * BLOCK]) for number in dirty]
                    segment.dirty.clear()
                    segment.flushing = True
                try:
                    if blocks:
                        disk_segment.write_records(self._port, segment, blocks, staging)
                    if sync:
                        self._port.fdatasync(segment.file.descriptor)
                except BaseException:
                    with self._lock:
                        segment.dirty.update(dirty)
                    raise
                finally:
                    with self._lock:
                        segment.flushing = False

        return job
