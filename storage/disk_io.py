"""Everything the disk store asks of the operating system, in one small port, so that tests can make any call of it fail."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from typing import NamedTuple

from hicache_ray.errors import HiCacheError

BLOCK = 4096  # bytes: offsets, lengths and memory of direct I/O are multiples of it


class TornFile(HiCacheError):
    """A file ends before the bytes that were asked for."""


class Room(NamedTuple):
    """Bytes of a file system."""

    free: int


class DiskOs:
    """The calls themselves; every one raises OSError as the system says it. No state: a test's port may wrap another."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Exclusively, for as long as the descriptor is open; raises BlockingIOError where another process has it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, buffer, offset)

    def fallocate(self, descriptor: int, size: int) -> None:
        os.posix_fallocate(descriptor, 0, size)

    def fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def written_at(self, path: str) -> float:
        """Seconds, of time.time()."""
        return os.stat(path).st_mtime

    def date(self, path: str, at: float) -> None:
        """Say that it was last written then."""
        os.utime(path, (at, at))

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def files(self, directory: str) -> Sequence[tuple[str, int]]:
        """(name, bytes) of the regular files in a directory. A file counts as its length, or its blocks if they are more."""
        with os.scandir(directory) as found:
            entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in found if entry.is_file(follow_symlinks=False)]
        return [(name, max(stat.st_size, stat.st_blocks * 512)) for name, stat in entries]

    def room(self, directory: str) -> Room:
        found = os.statvfs(directory)
        return Room(found.f_bavail * found.f_frsize)


def write_all(port: DiskOs, descriptor: int, data: memoryview, offset: int) -> None:
    """``data`` whole. Raises OSError."""
    done = 0
    while done < len(data):
        written = port.pwrite(descriptor, data[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += written


def read_upto(port: DiskOs, descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer``; returns how many bytes there were before the file ended. Raises OSError."""
    done = 0
    while done < len(buffer):
        read = port.pread(descriptor, buffer[done:], offset + done)
        done += read
        if read <= 0 or read % BLOCK:  # direct I/O cannot go on from there, and only the end of a file is not aligned
            break
    return done


def read_all(port: DiskOs, descriptor: int, buffer: memoryview, offset: int) -> None:
    """Raises OSError, TornFile."""
    if read_upto(port, descriptor, buffer, offset) < len(buffer):
        raise TornFile(f"a file ends before byte {offset + len(buffer)}")


def up(size: int) -> int:
    """Rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
