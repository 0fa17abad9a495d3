"""L3 on a disk: a store over segment files that survives its process.

One lock guards the index and is never held while an object is read or written. The order of a put is what makes a crash harmless:

    1. records of the slots that it takes over are zeroed      on the disk, before
    2. the objects' bytes                                       before
    3. their records                                            before
    4. they are visible

Whatever is cut off leaves slots without a record. What a loss of power may reorder is found by the checksum of every read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hicache_ray.errors import ConfigError, StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import disk_footer
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.disk_files import DiskFiles
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.disk_lease import DiskLent, Leases
from hicache_ray.storage.disk_moves import Mover
from hicache_ray.storage.disk_notes import Notes
from hicache_ray.storage.disk_plan import Found, Plan
from hicache_ray.storage.disk_read import Reader
from hicache_ray.storage.disk_room import RoomMaker
from hicache_ray.storage.disk_tenants import DiskTenants
from hicache_ray.storage.disk_transfer import Read, Write
from hicache_ray.storage.disk_work import Workers
from hicache_ray.storage.disk_write import Writer
from hicache_ray.storage.ids import require_ids, require_keys
from hicache_ray.store import Answer, Bytes, StoreStats

_CLOSE_S = 30.0


class DiskStore:
    """A :class:`~hicache_ray.store.Store` in one directory. Its calls may come from several threads."""

    def __init__(
        self,
        config: DiskConfig,
        clock: Callable[[], float] = time.monotonic,
        os_port: DiskOs | None = None,
        tenant_bytes: Mapping[str, int] | None = None,
        records: Mapping[bytes, Mapping[str, str]] | None = None,
        log_bytes: int = 0,
    ) -> None:
        """Locks the directory and takes over what is in it, cut to the cap. Raises ConfigError and leaves nothing open.

        ``clock``: of leases and of the time for which writes stay off. Timeouts of calls are real time. ``tenant_bytes``: most bytes of a
        tenant, by its name; ``records``: what says whose a space is, beside what was described before.
        ``log_bytes``: of the cap, twice, for :meth:`keep_log`.
        """
        self.config, self.clock = config, clock
        self._port = os_port or DiskOs()
        self._files = DiskFiles(config, self._port, log_bytes)
        try:
            self._notes = Notes(self._port, self._files, config.directory, config.fsync != "never", bool(log_bytes))
            segments, self._descriptions = self._files.load(), self._files.descriptions()
            tenants = DiskTenants(tenant_bytes or {}, {**self._descriptions, **(records or {})})
            self._index = DiskIndex(self._files, segments, tenants)
            self._away_s = self._notes.begin(len(self._index))
            self._index.shrink()
            self._index.keep_caps()
            if not self._files.tidy():
                raise ConfigError(f"files in {config.directory} cannot be removed, and they exceed the cap; check the disk")
        except OSError as error:
            self._files.close()
            raise ConfigError(f"{config.directory} cannot be used ({error}); check the disk, or choose another directory") from error
        except BaseException:
            self._files.close()
            raise
        self._lock = threading.Condition(threading.Lock())
        self._workers = Workers(config.io_threads, config.staging_bytes)
        self._writer = Writer(self._port, self._workers, self._lock, self._index, config.fsync)
        self._reader = Reader(self._port, self._workers, self._writer, self._lock, self._index)
        mover = Mover(self._port, self._workers, self._writer, self._lock, self._index)
        self._room = RoomMaker(self._files, self._workers, mover, self._lock, self._index)
        self._leases = Leases(self._index, clock, config.lease_s, config.lease_bytes)
        self._calls = 0
        self._off: tuple[str, float] | None = None  # why writes are off, and until when
        self._closed = False

    # -- the protocol ------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        with self._call(timeout_s) as until, self._locked(until):
            return {tag: self._index.lookup(keys, tag) for tag in tags}

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(source) for _, source in zip(ids, sources, strict=True)]
        with self._call(timeout_s) as until:
            with self._locked(until):
                plan = self._index.reserve(ids, [array.nbytes for array in arrays], self._writable())
            while plan.todo:
                self._room.make(plan, until)
            self._write(plan, [Write(placed, arrays[placed.number]) for placed in plan.placed], until)
            with suppress(StoreError):  # what was given up for nothing; what cannot be removed counts, and is tried again
                self._writer.tidy(until)
            return sum(1 << i for i, id in enumerate(ids) if id in plan.visible)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(target, writable=True) for _, target in zip(ids, targets, strict=True)]
        with self._call(timeout_s) as until:
            with self._locked(until):
                found = self._index.take(ids)
            fitting = [a is not None and a.length == b.nbytes for a, b in zip(found, arrays, strict=True)]
            reads = [Read(item, array) if fit else None for item, array, fit in zip(found, arrays, fitting, strict=True)]  # type: ignore[arg-type]
            self._reader.read([read for read in reads if read is not None], found, until)
            with self._locked():
                self._index.release(found)
            return sum(1 << i for i, read in enumerate(reads) if read is not None and read.fits)

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> DiskLent:
        """The objects are read into memory; those that exceed what leases may take of it are misses."""
        require_ids(ids)
        with self._call(timeout_s) as until:
            with self._locked(until):
                found, size = self._leases.admit(self._index.take(ids))
            try:
                memory = self._reader.memory(found)
                reads = [None if item is None else Read(item, memory[i]) for i, item in enumerate(found)]
                self._reader.read([read for read in reads if read is not None], found, until)
            except BaseException:
                with self._locked():
                    self._leases.forgo(size)
                raise
            return self._lend(found, reads, size)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        with self._call(timeout_s) as until:
            with self._locked(until):
                existed = self._index.drop(ids)
            self._writer.forget(until)
            return existed

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        with self._call(timeout_s) as until:
            with self._locked(until):
                count = self._index.clear(prefix)
            self._writer.forget(until)
            return count

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        with self._call(timeout_s) as until, self._locked(until):
            return iter(self._index.ids(prefix))

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        """Kept on the disk where there is room and it can be written, else in memory only."""

        def claim() -> bytes | None:
            with self._lock:
                return self._files.claim_descriptions(self._descriptions)

        with self._call(timeout_s) as until:
            with self._locked(until):
                if self._descriptions.get(digest) == dict(record):
                    return
                if (named := self._index.tenants.named(digest, record)) is not None:
                    self._index.assign(*named)
                self._descriptions[digest] = dict(record)
                if not self._writable():
                    return
            (error,) = self._workers.run([self._notes.descriptions(claim)], until)
            if error is not None:
                with self._locked():
                    self._turn_off(error)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        with self._call(timeout_s) as until, self._locked(until):
            return {digest: dict(record) for digest, record in self._descriptions.items()}

    def stats(self, timeout_s: float) -> StoreStats:
        with self._call(timeout_s) as until, self._locked(until):
            counted = self._index.counters
            return StoreStats(
                capacity_bytes=max(self._files.capacity, self._index.slots.used_bytes), used_bytes=self._index.slots.used_bytes,
                objects=len(self._index), puts=counted.puts, put_refused=counted.put_refused, gets=counted.gets,
                get_misses=counted.get_misses, checksum_failures=counted.checksum_failures, evictions=counted.evictions,
                leases=len(self._leases), writes_off=self._off[0] if self._off else "", tenants=self._index.tenants.report(),
            )  # fmt: skip

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Waits for calls under way, then leaves footers behind for a fast start. Idempotent.

        After ``timeout_s`` a disk that hangs is left alone. Its files stay open, and the directory locked, as long as this process lives:
        a call that wakes up must not meet another file under its descriptor.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._lock.wait_for(lambda: not self._calls, timeout_s)
        try:
            if idle:
                self._writer.leave(self._index.segments(), until)
        except (StoreError, OSError):
            pass  # the next start reads the records instead
        finally:
            if self._workers.close(max(until - time.monotonic(), 0.0)):
                self._files.close()

    # -- beyond it ---------------------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._files.direct

    @property
    def log(self) -> tuple[bytes, float] | None:
        """What an earlier store kept with :meth:`keep_log`, and when; None where it kept nothing."""
        return self._notes.log

    @property
    def away_s(self) -> float:
        """Seconds until this store started from when an earlier one said last that it had heard of everything, or else from when it wrote
        last; 0 where it left nothing. From the beginning of time where that is in the future: then nobody knows."""
        return self._away_s

    def hear(self, at: float, timeout_s: float) -> None:
        """``at``, of time.time(): up to then all was heard of that was to be forgotten. Where it stays unsaid, the next store asks for
        more than it must. Raises StoreError."""
        with self._call(timeout_s) as until:
            (error,) = self._workers.run([self._notes.heard(at)], until)
        if error is not None:
            raise StoreError(f"the disk refuses it: {error}") from error

    def keep_log(self, data: bytes, timeout_s: float) -> None:
        """Keep this beside the objects, in place of what was kept before. Raises StoreError; then either of the two is there."""
        with self._call(timeout_s) as until:
            with self._locked(until):
                if not self._writable() and self._off is not None:
                    raise StoreError(self._off[0])
            (error,) = self._workers.run([self._notes.forgotten(data)], until)
            if error is not None:
                with self._locked():
                    self._turn_off(error)
                raise StoreError(f"the disk refuses it: {error}") from error

    @property
    def index_bytes(self) -> int:
        """Memory that grows with the number of objects."""
        with self._locked():
            return self._index.nbytes

    def export(self, path: str | Path) -> int:
        """Write what is visible as one Arrow IPC file; returns the number of rows. Raises StoreError.

        Columns: space, group, digest, tag (bytes), length, checksum, sequence, used, segment, slot, offset (of the object in its file).
        """
        with self._call(self.config.lease_s) as until, self._locked(until):
            listings = [segment.listing() for segment in self._index.segments()]
        return disk_footer.export(path, listings)

    def disk_bytes(self) -> int:
        """What all files in the directory take."""
        with self._locked():
            return self._files.disk_bytes()

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object, or it is empty."""
        with self._call(self.config.lease_s) as until:
            with self._locked(until):
                (found,) = self._index.take([id])
                self._index.counters.gets -= 1
                self._index.counters.get_misses -= found is None
            if found is None:
                return False
            try:
                return bool(found.length) and self._writer.flip(found, until)
            finally:
                with self._locked():
                    self._index.release([found])

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            self._index.check()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, timeout_s: float) -> Iterator[float]:
        """Until when a call may take, of time.monotonic. Refuses when closed; close waits for it. Leases that have run out end."""
        until = time.monotonic() + timeout_s
        with self._locked(until):
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            self._calls += 1
            self._leases.expire()
        try:
            yield until
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    @contextmanager
    def _locked(self, until: float | None = None) -> Iterator[None]:
        """Nothing waits for the disk under the lock. Raises StoreTimeout."""
        if not self._lock.acquire(timeout=-1 if until is None else max(until - time.monotonic(), 0.0)):
            raise StoreTimeout("the store is busy")
        try:
            yield
        finally:
            self._lock.release()

    def _write(self, plan: Plan, writes: Sequence[Write], until: float) -> None:
        """Steps 1 to 4. Raises StoreTimeout; the slots are free then as soon as the disk lets go of them."""

        def abandoned() -> None:
            with self._lock:
                self._index.abandon(plan)

        done, failed = self._writer.store(writes, until, abandoned) if writes else ([], None)
        with self._lock:
            self._index.seal(plan, [write.placed for write in done])
            error = plan.error or failed
            if error is not None:
                self._turn_off(error)
            elif done:
                self._off = None

    def _lend(self, found: Sequence[Found | None], reads: Sequence[Read | None], size: int) -> DiskLent:
        views = [read.target.data.toreadonly() if read is not None and read.fits else None for read in reads]
        with self._lock:
            self._index.release([item for item, view in zip(found, views, strict=True) if view is None])
            lease, until = self._leases.open([item for item, view in zip(found, views, strict=True) if view is not None], size)

        def end() -> None:
            with self._lock:
                self._leases.end(lease)

        return DiskLent(views, until, self.clock, end)

    def _writable(self) -> bool:
        return self._off is None or self.clock() >= self._off[1]

    def _turn_off(self, error: Exception) -> None:
        reason = f"the disk refuses writes ({error}); reads go on, and writes are tried again after {self.config.retry_s:g} s"
        self._off = (reason, self.clock() + self.config.retry_s)
