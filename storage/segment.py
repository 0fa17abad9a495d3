"""Shared memory of an arena: one file, mapped by the service and by every client.

    [0, data_offset)        generation words, one unsigned 64-bit int per BLOCK bytes of data
    [data_offset, end)      the data; offsets of objects count from data_offset

The words let a reader see, without a call, that memory it was lent has been given to another object.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.descriptors import Loan
from hicache_ray.storage.slabs import BLOCK, SHARES_WORD
from hicache_ray.storage.threads import begin

Array = npt.NDArray[np.uint8]
HUGE = 2 << 20  # bytes of a huge page
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # linux 6.1: makes huge pages of what is there already
_MADV_POPULATE_WRITE = 23  # linux 5.14: faults pages in without changing them
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_STEP = 16 << 20  # bytes prefaulted between two looks at the stop flag


def data_offset(data_bytes: int) -> int:
    """Bytes of generation words (0.2 % of the data), rounded up to whole pages: huge ones, where the data fills one."""
    page = HUGE if data_bytes >= HUGE else mmap.PAGESIZE
    return -(-(-(-data_bytes // BLOCK) * 8) // page) * page


def huge_pages_allowed() -> bool:
    """Does the system give shared memory huge pages to those who ask?"""
    try:
        return re.search(r"\[(always|within_size|advise|force)\]", _SHMEM.read_text(encoding="ascii")) is not None
    except OSError:
        return False


def require_room(directory: Path, wanted: int) -> None:
    """Refuse before anything is created, where the file system has less room than asked. Raises ConfigError."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"storage.directory {directory} cannot be used: {error.strerror}") from error
    room = found.f_bavail * found.f_frsize
    if room < wanted:
        raise ConfigError(
            f"{directory} has room for {room / 2**20:,.1f} MiB, but the arena needs {wanted / 2**20:,.1f} MiB; "
            f"make storage.size smaller, or point storage.directory to a directory on a disk (slower, but not bound by shared memory)"
        )


class Segment:
    """A mapping. Views of it keep it alive: it is unmapped when the last one is gone, so a late reader never faults."""

    def __init__(self, path: Path, data_bytes: int, descriptor: int, huge: bool = False) -> None:
        """``huge``: ask for huge pages; without effect where there are none."""
        self.path = path
        self.data_bytes = data_bytes
        start = data_offset(data_bytes)
        mapped = mmap.mmap(descriptor, start + data_bytes)
        self.generations = memoryview(mapped)[:start].cast("Q")
        self.data: Array = np.frombuffer(mapped, np.uint8, data_bytes, start)
        self.arrow: pa.Buffer = pa.py_buffer(memoryview(mapped).toreadonly()[start:])
        self.address: int = self.arrow.address
        self._advise = _adviser(self.data)
        self.huge = huge and self._advise(0, data_bytes, _MADV_HUGEPAGE)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def create(cls, path: Path, data_bytes: int, huge: bool = False) -> Segment:
        """Make the file with all its blocks allocated: a full file system must show here, not as SIGBUS in a copy. Raises ConfigError."""
        total = data_offset(data_bytes) + data_bytes
        require_room(path.parent, total)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            return cls(path, data_bytes, descriptor, huge)
        except OSError as error:
            path.unlink()
            if error.errno == errno.ENOSPC:
                require_room(path.parent, total)
            raise ConfigError(f"cannot allocate {total} bytes in {path.parent}: {error.strerror}; see storage.size") from error
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, data_bytes: int) -> Segment:
        """Map what a service made. Raises StoreError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise StoreError(f"the arena's segment {path} cannot be opened: {error}; is its service gone?") from error
        try:
            if os.fstat(descriptor).st_size < data_offset(data_bytes) + data_bytes:
                raise StoreError(f"the arena's segment {path} is shorter than its service says")
            return cls(path, data_bytes, descriptor, huge_pages_allowed())
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise StoreError(f"the arena's segment {path} of {data_bytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def unchanged(self, loan: Loan) -> bool:
        """Has the memory of a loan not been given away since? Where slots share a word, only the lease's clock and the checksum can say."""
        return loan.length <= SHARES_WORD or self.generations[loan.offset // BLOCK] == loan.generation

    def prefault(self, threads: int) -> None:
        """Fault all pages in, in the background: the first touch of fresh shared memory costs ten copies. What no thread can be had for
        is faulted in when it is touched."""
        parts = [range(i * _STEP, self.data_bytes, threads * _STEP) for i in range(threads)]
        for part in parts:
            thread = threading.Thread(target=self._prefault, args=(part,), name="hicache-prefault", daemon=True)
            if not begin(thread):
                return
            self._threads.append(thread)

    def wait_prefaulted(self) -> None:
        for thread in self._threads:
            thread.join()  # bounded: a fixed amount of work

    def huge_bytes(self) -> int:
        """Bytes of this mapping that huge pages back, as far as the system says; 0 where none were asked for: looking takes a while."""
        if not self.huge:
            return 0
        start = self.data.ctypes.data
        try:
            with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
                return _huge_in(lines, start)
        except OSError:
            return 0

    def close(self) -> None:
        """Stop prefaulting. The memory goes with the last view of it."""
        self._stop.set()
        self.wait_prefaulted()

    def _prefault(self, starts: range) -> None:
        for start in starts:
            if self._stop.is_set():
                return
            count = min(_STEP, self.data_bytes - start)
            if self.huge:
                self._advise(start, count, _MADV_COLLAPSE)
            if not self._advise(start, count, _MADV_POPULATE_WRITE):
                self.data[start : start + count : mmap.PAGESIZE].max(initial=0)  # older kernels: reading faults pages in too, one by one


def _huge_in(lines: Iterable[str], address: int) -> int:
    """Huge bytes of the mapping that contains ``address``, in the format of /proc/PID/smaps."""
    inside, total = False, 0
    for line in lines:
        found = _RANGE.match(line)
        if found is not None:
            if inside:
                break
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            total += int(line.split()[1]) << 10
    return total


def _adviser(data: Array) -> Callable[[int, int, int], bool]:
    """``advise(start, bytes, advice)`` by madvise: did it work? Through ctypes, because mmap.madvise keeps the interpreter lock."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    base = data.ctypes.data

    def advise(start: int, count: int, advice: int) -> bool:
        aligned = (base + start) // mmap.PAGESIZE * mmap.PAGESIZE
        return bool(madvise(aligned, count + base + start - aligned, advice) == 0)

    return advise
