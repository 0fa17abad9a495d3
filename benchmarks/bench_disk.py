"""The disk store against the disk: durable writes, cold reads, warm start.

Baselines are measured in the same repetition, in the same file system: for writes, raw direct I/O of the same buffers from as many threads
into a preallocated file, one pwrite per page and one fdatasync at the end; for reads, a file per page, read one by one through the page
cache, from which they were put out before. Beside the bare reads of the same file it shows how much more the disk could give. Where the
file system has no direct I/O both sides use the cache, and the row says so.

    python -m benchmarks.bench_disk [directory]           prints a table
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import Row
from benchmarks.measure import at_most, beside, expect, timed
from hicache_ray.storage import DiskConfig, DiskStore
from hicache_ray.storage.disk_memory import staging_memory
from hicache_ray.storage.segment import Array
from hicache_ray.store import KEY_BYTES, TAG_BYTES

REPETITIONS = 5
THREADS = 8
TIMEOUT_S = 60.0
START_OBJECTS = 100_000
WRITE_GOAL, READ_GOAL, START_GOAL_S = 0.9, 1.8, 2.0


@dataclass(frozen=True)
class Case:
    name: str
    page_bytes: int
    pages: int


CASES = (Case("1 MiB", 1 << 20, 128), Case("64 KiB", 64 << 10, 1024))


def run(directory: str | None = None) -> list[Row]:
    """Rows for writes, reads and the start. ``directory``: on the disk to measure; where this runs unless given."""
    rows = []
    for case in CASES:
        with _folder(directory) as folder:
            rows += _transfers(case, folder)
    with _folder(directory) as folder:
        rows.append(_start(folder))
    return rows


def _transfers(case: Case, folder: Path) -> list[Row]:
    total = case.pages * case.page_bytes
    sources, targets = _pages(case, 1), _pages(case, 0)
    (folder / "store").mkdir()
    (folder / "files").mkdir()
    seconds: dict[str, list[float]] = {}
    store = DiskStore(DiskConfig(str(folder / "store"), 2 * total + (64 << 20), fsync="batch", io_threads=THREADS))
    for i, source in enumerate(sources):
        (folder / "files" / str(i)).write_bytes(source)
    try:
        for repetition in range(REPETITIONS + 1):
            store.clear(TIMEOUT_S)
            ids = [os.urandom(KEY_BYTES + TAG_BYTES) for _ in sources]
            times = _raw(folder / "raw", sources, targets, store.direct)
            times["put"] = timed(lambda ids=ids: expect(store.put(ids, sources, TIMEOUT_S), (1 << case.pages) - 1))  # type: ignore[misc]
            _forget(folder)
            times["files"] = timed(lambda: _read_files(folder / "files", targets))
            for target in targets:
                target[:8] = 0
            times["get"] = timed(lambda ids=ids: expect(store.get(ids, targets, TIMEOUT_S), (1 << case.pages) - 1))  # type: ignore[misc]
            expect(all((a == b).all() for a, b in zip(sources, targets, strict=True)), True)
            for name, value in times.items() if repetition else ():
                seconds.setdefault(name, []).append(value)
    finally:
        store.close()
    how = "" if store.direct else " (no direct I/O here)"
    what = f"{case.pages} x {case.name}{how}"
    return [
        beside(f"disk durable put, {what}", total, seconds["put"], seconds["raw put"], WRITE_GOAL),
        beside(f"disk cold get, {what}", total, seconds["get"], seconds["files"], READ_GOAL),
        beside(f"disk cold get, {what}, than raw reads", total, seconds["get"], seconds["raw get"], None),
    ]


def _start(folder: Path) -> Row:
    """Objects of one block, closed cleanly; the time from nothing to the first answer."""
    config = DiskConfig(str(folder), 512 << 20, fsync="never", io_threads=THREADS)
    store = DiskStore(config)
    ids = [os.urandom(KEY_BYTES + TAG_BYTES) for _ in range(START_OBJECTS)]
    page = np.zeros(4096, np.uint8)
    for first in range(0, START_OBJECTS, 2000):
        part = ids[first : first + 2000]
        expect(store.put(part, [page] * len(part), TIMEOUT_S), (1 << len(part)) - 1)
    store.close()
    times = {}
    for kind in ("footers", "records"):
        _forget(folder)
        begin = time.perf_counter()
        store = DiskStore(config)
        expect(store.stats(TIMEOUT_S).objects, START_OBJECTS)
        times[kind] = time.perf_counter() - begin
        store.close()
        if kind == "footers":
            _take_footers_back(folder)
    value = max(times.values())
    name = f"disk start, {START_OBJECTS} objects (footers {times['footers']:.2f} s, by records {times['records']:.2f} s)"
    return at_most(name, value, "s", START_GOAL_S)


def _take_footers_back(folder: Path) -> None:
    """As a start after a crash finds it: the second block, which points to the footer, is empty."""
    for path in folder.glob("*.seg"):
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(bytes(4096))


def _raw(path: Path, sources: Sequence[Array], targets: Sequence[Array], direct: bool) -> dict[str, float]:
    """Seconds of bare writes with the sync, and of bare reads: the most that the disk gives. The file is there already, with all its
    blocks, and is removed afterwards."""
    size, count = sources[0].nbytes, len(sources)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    try:
        os.posix_fallocate(descriptor, 0, size * count)
        with ThreadPoolExecutor(THREADS) as pool:

            def put() -> None:
                list(pool.map(lambda i: os.pwrite(descriptor, sources[i].data, i * size), range(count)))
                os.fdatasync(descriptor)

            def get() -> None:
                list(pool.map(lambda i: os.preadv(descriptor, [targets[i].data], i * size), range(count)))

            times = {"raw put": timed(put)}
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return times | {"raw get": timed(get)}
    finally:
        os.close(descriptor)
        path.unlink()


def _read_files(folder: Path, targets: Sequence[Array]) -> None:
    for i, target in enumerate(targets):
        with open(folder / str(i), "rb", buffering=0) as file:
            expect(file.readinto(target.data), target.nbytes)


def _forget(folder: Path) -> None:
    """Put all files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _pages(case: Case, seed: int) -> list[Array]:
    """Aligned pages, every byte of them written; in huge pages where there are some, as direct I/O is fastest with those."""
    memory = np.frombuffer(staging_memory(case.pages * case.page_bytes), np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.nbytes, np.uint8)
    return list(memory.reshape(case.pages, case.page_bytes))


@contextmanager
def _folder(directory: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=directory or Path.cwd(), prefix=".bench-disk-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    from rich.console import Console

    from benchmarks.__main__ import table

    Console(width=132).print(table(run(sys.argv[1] if len(sys.argv) > 1 else None)))
