"""The directory of a disk store: its lock, its segment files, and what they take of the cap.

    hicache.lock            locked while a store lives; also where direct I/O is tried
    hicache-00000001.seg    segments, allocated whole when they are made
    hicache.json            the readable records of namespaces and tags
    hicache.forgotten       what was dropped, where somebody keeps it: see disk_log; with hicache.heard beside it

Other files are left alone, and count. Space is counted before it is asked for, and is given back when the file is gone.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

from hicache_ray.errors import ConfigError
from hicache_ray.storage import disk_segment
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.disk_format import Geometry, geometry
from hicache_ray.storage.disk_io import BLOCK, DiskOs, read_upto, up, write_all
from hicache_ray.storage.disk_log import LOG, LOG_TEMPORARY, log_room
from hicache_ray.storage.disk_segment import Segment, SegmentFile

LOCK, RECORDS, TEMPORARY = "hicache.lock", "hicache.json", "hicache.json.new"
_SEGMENT = re.compile(r"hicache-(\d{8})\.seg")
_SCRATCH = 16 * BLOCK


class DiskFiles:
    """Opened and locked by construction. ``used``: bytes that count against the cap."""

    def __init__(self, config: DiskConfig, port: DiskOs, log_bytes: int = 0) -> None:
        """``log_bytes``: most that is written to the log. Raises ConfigError and leaves nothing open."""
        self.config, self.port = config, port
        self.directory = config.directory
        self.used = 0
        self.scratch = memoryview(mmap.mmap(-1, _SCRATCH))
        self._books, self._making = threading.Lock(), threading.Lock()  # of the numbers here; of who makes or removes files
        self._given_up: list[Segment] = []  # their files are to be removed
        self._strays: dict[str, int] = {}  # files that could not be removed
        self._removing = 0  # who is at it now
        self._unsynced = False  # is something removed that a loss of power could bring back?
        self._next = 1
        self._records_bytes = 0
        self.written_at = 0.0  # when a segment that is there was last written, of time.time()
        self._lock: int | None = None
        self._open: dict[int, Segment] = {}
        path = Path(config.directory)
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise ConfigError(f"storage.disk.directory {path} {what}; create it or choose another")
        try:
            self._lock = self._take_lock()
            self.direct = self._try_direct()
            self._count(log_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(self._sentence(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def room(self) -> int:
        """Bytes left under the cap."""
        return self.config.size_bytes - self.used

    @property
    def capacity(self) -> int:
        """Object bytes that fit at best."""
        whole = Geometry(self.config.segment, 1)
        room = self.config.size_bytes - self._others
        count, rest = divmod(room, whole.disk_bytes)
        part = geometry(BLOCK, self.config.segment, rest)
        return count * self.config.segment + (part.slots * BLOCK if part else 0)

    def load(self) -> list[Segment]:
        """Open what an earlier store left; files that are no whole segments go. Raises ConfigError."""
        try:
            for name, size in sorted(self.port.files(self.directory)):
                match = _SEGMENT.fullmatch(name)
                if match:
                    self._load(int(match[1]), os.path.join(self.directory, name), size)
        except OSError as error:
            raise ConfigError(self._sentence(error)) from error
        return list(self._open.values())

    def claim(self, shape: Geometry) -> None:
        """Take room for a segment; ``make`` makes it, or gives the room back."""
        with self._books:
            self.used += shape.disk_bytes

    def give_up(self, segment: Segment) -> None:
        """Its room may be claimed at once: what is given up is removed before anything is made."""
        with self._books:
            self.used -= segment.file.shape.disk_bytes
            self._given_up.append(segment)

    def make(self, shape: Geometry, scratch: memoryview) -> Segment:
        """A new segment, in room that was claimed. Raises OSError; the room is given back then, or what could not be removed counts."""
        with self._making:  # bounded as the calls in it are; the caller has a deadline
            if not self.tidy():
                self._return(shape.disk_bytes)
                raise OSError(errno.EIO, f"a file in {self.directory} cannot be removed")
            number, self._next = self._next, self._next + 1
            path = os.path.join(self.directory, f"hicache-{number:08d}.seg")
            descriptor = -1
            try:
                descriptor = self._open_file(path, os.O_CREAT | os.O_EXCL)
                file = SegmentFile(number, path, descriptor, secrets.randbits(64), shape)
                segment = disk_segment.create(self.port, file, scratch)
                if self.config.fsync != "never":
                    self.port.fdatasync(descriptor)
                    self._sync_directory()
            except OSError:
                if descriptor >= 0:
                    self._close_file(descriptor)
                self._unlink(path, shape.disk_bytes)
                raise
            with self._books:
                self._open[number] = segment
            return segment

    def tidy(self) -> bool:
        """Remove what was given up; False where something could not be removed. That counts, and is tried again the next time."""
        with self._books:
            given_up, self._given_up = self._given_up, []
            for segment in given_up:
                self.used += segment.file.shape.disk_bytes
                del self._open[segment.number]
            strays, self._strays = self._strays, {}
            self._removing += 1
        for segment in given_up:
            self._close_file(segment.file.descriptor)
            self._unlink(segment.file.path, segment.file.shape.disk_bytes)
        for path, size in strays.items():
            self._unlink(path, size)
        with self._books:
            self._removing -= 1
            return not self._strays

    def untidy(self) -> bool:
        """Is there a file to remove, or one being removed, or one that a loss of power could bring back?"""
        with self._books:
            return bool(self._given_up or self._strays or self._removing or self._unsynced)

    def sweep(self) -> None:
        """Remove what was given up, for good: as far as the disk itself, where syncs are wanted. Raises OSError."""
        with self._making:  # so whoever was at it is done
            if not self.tidy():
                raise OSError(errno.EIO, f"a file in {self.directory} cannot be removed")
            if self.config.fsync != "never":
                self._sync_directory()

    def descriptions(self) -> dict[bytes, dict[str, str]]:
        """What was kept of them; nothing where the file is missing or damaged. Raises OSError."""
        try:
            descriptor = self.port.open(os.path.join(self.directory, RECORDS), os.O_RDONLY)
        except FileNotFoundError:
            return {}
        try:
            data = memoryview(bytearray(self.port.size(descriptor)))
            found = json.loads(bytes(data[: read_upto(self.port, descriptor, data, 0)]))
            return {bytes.fromhex(digest): {str(k): str(v) for k, v in record.items()} for digest, record in found.items()}
        except (ValueError, AttributeError, RecursionError):
            return {}
        finally:
            self._close_file(descriptor)

    def claim_descriptions(self, records: Mapping[bytes, Mapping[str, str]]) -> bytes | None:
        """What :meth:`keep_descriptions` must be given next, in room that is taken now; None where the cap has no room for it."""
        data = json.dumps({digest.hex(): dict(record) for digest, record in records.items()}).encode()
        with self._books:
            if up(len(data)) > self.room - sum(segment.file.shape.disk_bytes for segment in self._given_up):  # their files are there still
                return None
            self.used += up(len(data))
        return data

    def keep_descriptions(self, data: bytes) -> None:
        """Replace the file, one at a time. Raises OSError."""
        path, temporary = (os.path.join(self.directory, name) for name in (RECORDS, TEMPORARY))
        size = up(len(data))
        try:
            descriptor = self.port.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                write_all(self.port, descriptor, memoryview(data), 0)
                if self.config.fsync != "never":
                    self.port.fdatasync(descriptor)
            finally:
                self._close_file(descriptor)
            self.port.rename(temporary, path)
        except OSError:
            self._unlink(temporary, size)
            raise
        self._return(self._records_bytes)
        self._records_bytes = size

    def disk_bytes(self) -> int:
        """What the files take now, as the file system counts them. Raises OSError."""
        return sum(size for _, size in self.port.files(self.directory))

    def close(self) -> None:
        """Idempotent."""
        for segment in self._open.values():
            self._close_file(segment.file.descriptor)
        self._open.clear()
        if self._lock is not None:
            self._close_file(self._lock)
            self._lock = None

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _take_lock(self) -> int:
        lock = self.port.open(os.path.join(self.directory, LOCK), os.O_RDWR | os.O_CREAT)
        try:
            self.port.lock(lock)
        except BlockingIOError as error:
            self._close_file(lock)
            raise ConfigError(f"{self.directory} belongs to a store that is running; stop it or choose another") from error
        except BaseException:
            self._close_file(lock)
            raise
        return lock

    def _try_direct(self) -> bool:
        """Whether a block can be written past the page cache. Also shows a file system that cannot be written at all."""
        assert self._lock is not None
        self.port.fallocate(self._lock, BLOCK)  # else a write through the cache reserves a block that a direct one takes again
        write_all(self.port, self._lock, self.scratch[:BLOCK], 0)
        if self.config.direct == "off":
            return False
        try:
            descriptor = self.port.open(os.path.join(self.directory, LOCK), os.O_RDWR | os.O_DIRECT)
            try:
                write_all(self.port, descriptor, self.scratch[:BLOCK], 0)
            finally:
                self._close_file(descriptor)
            return True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        if self.config.direct == "on":
            raise ConfigError(
                f"the file system of {self.directory} has no direct I/O; set storage.disk.direct to auto or off "
                "(reads and writes go through the page cache then), or choose a directory on another"
            )
        return False

    def _count(self, log_bytes: int) -> None:
        """What is there already, and whether the rest of the cap can be had."""
        files = dict(self.port.files(self.directory))
        for temporary in {TEMPORARY, LOG_TEMPORARY} & files.keys():
            self.port.unlink(os.path.join(self.directory, temporary))
            del files[temporary]
        there = up(files.get(LOG, 0))
        files[LOG] = log_room(log_bytes, files) or there
        self.used = sum(up(size) for size in files.values())
        self._records_bytes = up(files.get(RECORDS, 0))
        self._next = max([int(match[1]) for name in files if (match := _SEGMENT.fullmatch(name))], default=0) + 1
        self._others = sum(up(size) for name, size in files.items() if not _SEGMENT.fullmatch(name))
        least = Geometry(self.config.segment, 1).disk_bytes
        if self.config.size_bytes - self._others < least:
            raise ConfigError(
                f"storage.disk.size_bytes {self.config.size_bytes} leaves no room for a segment of {least} bytes beside the {self._others} "
                f"bytes of other files in {self.directory}; make it larger, or storage.disk.segment_bytes smaller, or remove them"
            )
        free, wanted = self.port.room(self.directory).free, self.room + files[LOG] - there
        if free < wanted:
            raise ConfigError(
                f"{self.directory} has room for {free / 2**20:,.1f} MiB, but the store may take {wanted / 2**20:,.1f} MiB more; "
                "make storage.disk.size_bytes smaller, or free space, or choose another storage.disk.directory"
            )

    def _load(self, number: int, path: str, size: int) -> None:
        self.written_at = max(self.written_at, self.port.written_at(path))
        descriptor = self._open_file(path, 0)
        try:
            segment = disk_segment.load(self.port, number, path, descriptor, self.scratch)
        except BaseException:
            self._close_file(descriptor)
            raise
        if segment is not None:
            self._open[number] = segment
            self.used += segment.file.shape.disk_bytes - up(size)
            return
        self._close_file(descriptor)
        self.port.unlink(path)
        self.used -= up(size)

    def _open_file(self, path: str, more: int) -> int:
        return self.port.open(path, os.O_RDWR | more | (os.O_DIRECT if self.direct else 0))

    def _close_file(self, descriptor: int) -> None:
        """A descriptor is gone whatever close says."""
        try:
            self.port.close(descriptor)
        except OSError:
            return

    def _unlink(self, path: str, size: int) -> None:
        try:
            self.port.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:
            with self._books:
                self._strays[path] = size
            return
        with self._books:
            self._unsynced = self.config.fsync != "never"
        self._return(size)

    def _return(self, size: int) -> None:
        with self._books:
            self.used -= size

    def _sync_directory(self) -> None:
        with self._books:
            before, self._unsynced = self._unsynced, False  # what is removed from now on needs another one
        try:
            descriptor = self.port.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.port.fsync(descriptor)
            finally:
                self._close_file(descriptor)
        except OSError:
            with self._books:
                self._unsynced |= before
            raise

    def _sentence(self, error: OSError) -> str:
        """What a refusal of the system at start means."""
        what = {
            errno.ENOSPC: "is full; free space, or choose another storage.disk.directory",
            errno.EDQUOT: "is over its quota; free space, or choose another storage.disk.directory",
            errno.EROFS: "is on a read-only file system; mount it writable, or choose another storage.disk.directory",
            errno.EACCES: "may not be written by this user; change its owner, or choose another storage.disk.directory",
            errno.EPERM: "may not be written by this user; change its owner, or choose another storage.disk.directory",
        }.get(error.errno or 0, f"cannot be used ({error.strerror}); check the disk, or choose another storage.disk.directory")
        return f"{self.directory} {what}"
