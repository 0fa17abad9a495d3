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
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.descriptors import Loan
from hicache_ray.storage.slabs import BLOCK, SHARES_WORD

Array = npt.NDArray[np.uint8]
_MADV_POPULATE_WRITE = 23  # linux 5.14: faults pages in without changing them
_STEP = 16 << 20  # bytes prefaulted between two looks at the stop flag


def data_offset(data_bytes: int) -> int:
    """Bytes of generation words (0.2 % of the data), rounded up to whole pages."""
    return -(-(-(-data_bytes // BLOCK) * 8) // mmap.PAGESIZE) * mmap.PAGESIZE


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

    def __init__(self, path: Path, data_bytes: int, descriptor: int) -> None:
        self.path = path
        self.data_bytes = data_bytes
        start = data_offset(data_bytes)
        mapped = mmap.mmap(descriptor, start + data_bytes)
        self.generations = memoryview(mapped)[:start].cast("Q")
        self.data: Array = np.frombuffer(mapped, np.uint8, data_bytes, start)
        self.arrow: pa.Buffer = pa.py_buffer(memoryview(mapped).toreadonly()[start:])
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def create(cls, path: Path, data_bytes: int) -> Segment:
        """Make the file with all its blocks allocated: a full file system must show here, not as SIGBUS in a copy. Raises ConfigError."""
        total = data_offset(data_bytes) + data_bytes
        require_room(path.parent, total)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            return cls(path, data_bytes, descriptor)
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
        except OSError as error:
            raise StoreError(f"the arena's segment {path} cannot be opened: {error.strerror}; is its service gone?") from error
        try:
            if os.fstat(descriptor).st_size < data_offset(data_bytes) + data_bytes:
                raise StoreError(f"the arena's segment {path} is shorter than its service says")
            return cls(path, data_bytes, descriptor)
        finally:
            os.close(descriptor)

    def unchanged(self, loan: Loan) -> bool:
        """Has the memory of a loan not been given away since? Where slots share a word, only the lease's clock and the checksum can say."""
        return loan.length <= SHARES_WORD or self.generations[loan.offset // BLOCK] == loan.generation

    def prefault(self, threads: int) -> None:
        """Fault all pages in, in the background: the first touch of fresh shared memory costs ten copies."""
        parts = [range(i * _STEP, self.data_bytes, threads * _STEP) for i in range(threads)]
        populate = _populator(self.data)
        for part in parts:
            thread = threading.Thread(target=_prefault, args=(part, self.data, populate, self._stop), name="hicache-prefault", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait_prefaulted(self) -> None:
        for thread in self._threads:
            thread.join()  # bounded: a fixed amount of work

    def close(self) -> None:
        """Stop prefaulting. The memory goes with the last view of it."""
        self._stop.set()
        self.wait_prefaulted()


def _prefault(starts: range, data: Array, populate: Callable[[int, int], bool], stop: threading.Event) -> None:
    for start in starts:
        if stop.is_set():
            return
        part = data[start : start + _STEP]
        if not populate(part.ctypes.data, part.nbytes):
            part[:: mmap.PAGESIZE].max(initial=0)  # older kernels: reading faults pages in too, one by one


def _populator(data: Array) -> Callable[[int, int], bool]:
    """``populate(address, bytes)`` by madvise. Through ctypes, because mmap.madvise keeps the interpreter lock."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def populate(address: int, count: int) -> bool:
        aligned = address // mmap.PAGESIZE * mmap.PAGESIZE
        return bool(madvise(aligned, count + address - aligned, _MADV_POPULATE_WRITE) == 0)

    return populate
