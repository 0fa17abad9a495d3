"""Disk stores for tests: small ones, ports that fail, and what must hold of any of them at any time."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ray.storage import DiskConfig, DiskStore, bits
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.store import KEY_BYTES
from tests.storage.objects import TIMEOUT_S, name, page

BLOCK = 4096
SECTOR = 512
CALLS = (
    *("open", "close", "lock", "pread", "pwrite", "fallocate", "fdatasync", "fsync"),
    *("size", "unlink", "rename", "files", "room", "written_at", "date"),
)  # fmt: skip
OpenDisk = Callable[..., DiskStore]
READS = ("pread", "size", "files", "room", "written_at")


def small(directory: Path, **more: Any) -> DiskConfig:
    """Segments of 8 blocks, six of them or so, and one thread, so that the n-th call is the same call in every run."""
    settings: dict[str, Any] = {
        "size_bytes": 6 * 15 * BLOCK,
        "segment_bytes": 8 * BLOCK,
        "io_threads": 1,
        "fsync": "never",
        "retry_s": 0.001,
    }
    return DiskConfig(str(directory), **(settings | more))


def size_of(number: int) -> int:
    """Objects of three size classes, most of them not whole blocks."""
    return (1 + number % 3) * BLOCK - number % 5


def put(store: DiskStore, numbers: list[int]) -> set[int]:
    visible = store.put([name(n) for n in numbers], [page(n, size_of(n)) for n in numbers], TIMEOUT_S)
    return {numbers[i] for i in bits.each(visible)}


def get(store: DiskStore, numbers: list[int]) -> set[int]:
    """Read, and compare what was verified with what was put."""
    targets = [np.zeros(size_of(n), np.uint8) for n in numbers]
    hit = store.get([name(n) for n in numbers], targets, TIMEOUT_S)
    for i in bits.each(hit):
        assert (targets[i] == page(numbers[i], size_of(numbers[i]))).all(), f"object {numbers[i]} is another"
    return {numbers[i] for i in bits.each(hit)}


def visible(store: DiskStore) -> list[int]:
    return sorted(int.from_bytes(id[:KEY_BYTES], "big") for id in store.scan())


def sound(store: DiskStore) -> None:
    """Everything visible reads equal to its source, counts are exact, the cap is kept."""
    store.check()
    numbers = visible(store)
    assert get(store, numbers) == set(numbers), "something torn is visible"
    stats = store.stats(TIMEOUT_S)
    assert stats.objects == len(numbers)
    assert stats.used_bytes == sum(map(size_of, numbers))
    assert store.disk_bytes() <= store.config.size_bytes
    assert store.disk_bytes() <= store._files.used
    store.check()


def no_memory(*_: object) -> None:
    """Instead of ``np.empty``."""
    raise MemoryError


class CountingOs(DiskOs):
    """Counts calls by name, and asks ``strike`` before each: it may raise, or do worse."""

    def __init__(self, strike: Callable[[int, str, tuple[Any, ...]], None] = lambda number, call, arguments: None) -> None:
        self.calls: Counter[str] = Counter()
        self._strike = strike
        self._lock = threading.Lock()

    def __getattribute__(self, call: str) -> Any:
        found = super().__getattribute__(call)
        if call not in CALLS:
            return found

        def counted(*arguments: Any) -> Any:
            with self._lock:
                self.calls[call] += 1
                number = self.calls.total()
            self._strike(number, call, arguments)
            return found(*arguments)

        return counted


class FailingOs(CountingOs):
    """The ``nth`` call fails with ``code``; a write has written half by then. 0: none fails. ``struck``: the call that did."""

    def __init__(self, nth: int, code: int = errno.EIO) -> None:
        super().__init__(self._fail)
        self._nth, self._code = nth, code
        self.struck = ""

    def fail(self, nth: int) -> None:
        """That one, counted from the first call of all."""
        self._nth = nth

    def _fail(self, number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if number != self._nth:
            return
        self.struck = call
        if call == "close":
            os.close(arguments[0])  # as the system does: the descriptor is gone, whatever it says
        if call == "pwrite":
            half(arguments)
        raise OSError(self._code, os.strerror(self._code))


def half(arguments: tuple[Any, ...]) -> None:
    """Write the first half of a pwrite, in whole sectors."""
    descriptor, buffer, offset = arguments
    part = len(buffer) // 2 // 512 * 512
    if part:
        os.pwrite(descriptor, bytes(buffer[:part]), offset)


class PowerOs(DiskOs):
    """Remembers what sectors held before the writes that no sync has covered yet. After ``off`` nothing is written any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._before: dict[tuple[str, int], bytes] = {}  # (path, sector) -> bytes

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        descriptor = super().open(path, flags & ~os.O_DIRECT, mode)
        self._paths[descriptor] = path
        return descriptor

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            path = self._paths[descriptor]
            if path.endswith(".seg"):
                for at in range(offset, offset + len(buffer), SECTOR):
                    self._before.setdefault((path, at), os.pread(descriptor, SECTOR, at))
            return super().pwrite(descriptor, buffer, offset)

    def fdatasync(self, descriptor: int) -> None:
        with self._lock:
            path = self._paths[descriptor]
            self._before = {key: data for key, data in self._before.items() if key[0] != path}

    def unlink(self, path: str) -> None:
        with self._lock:
            self._before = {key: data for key, data in self._before.items() if key[0] != path}
        super().unlink(path)

    def lose(self, directory: Path, into: Path, chance: random.Random) -> None:
        """Copy the files as a loss of power at this moment may leave them."""
        with self._lock:
            for path in directory.iterdir():
                data = bytearray(path.read_bytes())
                for (name, at), before in self._before.items():
                    if name == str(path) and chance.random() < 0.5:
                        data[at : at + SECTOR] = before
                (into / path.name).write_bytes(data)


class Killer(CountingOs):
    """The process is killed at the ``nth`` call; where that is a write, in the middle of it."""

    def __init__(self, nth: int) -> None:
        super().__init__(self._kill)
        self._nth = nth

    def _kill(self, number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if number == self._nth:
            if call == "pwrite":
                half(arguments)
            os.kill(os.getpid(), 9)


def write_on(directory: Path, size_bytes: int, first: int, nth: int, acknowledge: Callable[[], object]) -> None:
    """Puts from number ``first`` on, some reads and drops between them, until the ``nth`` call of the system, which is the last."""
    store = DiskStore(small(directory, size_bytes=size_bytes, io_threads=3, direct="off"), os_port=Killer(nth))
    for i in range(first, first + nth):
        put(store, batch(i))
        acknowledge()
        if i % 16 == 7:
            store.drop([name(batch(i - 3)[0])], TIMEOUT_S)
        if i % 16 == 11:
            get(store, batch(i - 5))


def batch(number: int) -> list[int]:
    """What put ``number`` stores: one to three objects, some for a second time."""
    first = number * 2 % 170
    return list(range(first, first + 1 + number % 3))


def main() -> None:
    """For every line ``directory size_bytes first nth``: fork a writer that dies at its ``nth`` call. Prints its status, and how many puts
    ended."""
    for line in sys.stdin:
        directory, size_bytes, first, nth = line.split()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_on(Path(directory), int(size_bytes), int(first), int(nth), partial(os.write, writing, b"1"))
            finally:
                os._exit(1)  # not reached where the writer was killed
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(child, 0)
        print(f"{status} {len(told)}", flush=True)


if __name__ == "__main__":
    main()
