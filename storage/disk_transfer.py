"""The reads and writes of objects as jobs: neighbouring slots in one go, long objects in pieces, all through aligned staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash

from hicache_ray.storage.disk_io import BLOCK, DiskOs, TornFile, read_all, up, write_all
from hicache_ray.storage.disk_plan import Found, Placed
from hicache_ray.storage.disk_segment import Segment
from hicache_ray.storage.disk_work import Batch, Job
from hicache_ray.storage.segment import Array

_READ = 1 << 20  # bytes of neighbours read in one go: reads of 2 MiB were measured 15 % slower, on as many threads


@dataclass
class Write:
    """One object on its way to its slot. ``checksum``: of the bytes that were written; None until they are."""

    placed: Placed
    source: Array
    checksum: int | None = None

    @property
    def segment(self) -> Segment:
        return self.placed.segment

    @property
    def slot(self) -> int:
        return self.placed.slot

    @property
    def length(self) -> int:
        return self.placed.length


@dataclass
class Read:
    """One object on its way to ``target``. ``fits``: None until it was read, then whether checksum and length were right."""

    found: Found
    target: Array
    fits: bool | None = None

    @property
    def segment(self) -> Segment:
        return self.found.segment

    @property
    def slot(self) -> int:
        return self.found.slot

    @property
    def length(self) -> int:
        return self.found.length


Item = TypeVar("Item", Write, Read)


def write_jobs(port: DiskOs, writes: Sequence[Write], staging: int) -> list[Job]:
    return [_writing(port, run) for run in _runs(writes, staging)]


def read_jobs(port: DiskOs, reads: Sequence[Read], staging: int) -> list[Job]:
    return [_reading(port, run) for run in _runs(reads, min(staging, _READ))]


def sync_jobs(port: DiskOs, segments: Sequence[Segment]) -> list[Job]:
    """One fdatasync per file."""

    def job(descriptor: int) -> Job:
        return lambda staging, batch: port.fdatasync(descriptor)

    return [job(segment.file.descriptor) for segment in segments]


def _runs(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Objects in adjacent slots, as many as fit into ``most`` bytes; an object that is longer is alone."""
    runs: list[list[Item]] = []
    filled = 0
    for item in sorted(items, key=lambda item: (item.segment.number, item.slot)):
        size = item.segment.file.shape.slot_bytes
        last = runs[-1][-1] if runs else None
        if last is not None and last.segment is item.segment and last.slot + 1 == item.slot and filled + size <= most:
            runs[-1].append(item)
            filled += size
        else:
            runs.append([item])
            filled = size
    return runs


def _writing(port: DiskOs, run: Sequence[Write]) -> Job:
    def job(staging: memoryview, batch: Batch) -> None:
        shape, descriptor = run[0].segment.file.shape, run[0].segment.file.descriptor
        if shape.slot_bytes > len(staging):
            _write_long(port, run[0], staging, batch)
            return
        sums = []
        for i, item in enumerate(run):
            part = staging[i * shape.slot_bytes : (i + 1) * shape.slot_bytes]
            if item.length:
                with batch.touching():
                    _copy(part, item.source)
            part[item.length :] = bytes(len(part) - item.length)
            sums.append(xxhash.xxh3_64_intdigest(part[: item.length]))
        end = (len(run) - 1) * shape.slot_bytes + up(run[-1].length)
        write_all(port, descriptor, staging[:end], shape.at(run[0].slot))
        for item, checksum in zip(run, sums, strict=True):
            item.checksum = checksum

    return job


def _write_long(port: DiskOs, item: Write, staging: memoryview, batch: Batch) -> None:
    digest = xxhash.xxh3_64()
    for start, part in _pieces(item.length, staging):
        with batch.touching():
            _copy(part, item.source[start : start + len(part)])
        digest.update(part)
        padded = staging[: up(len(part))]
        padded[len(part) :] = bytes(len(padded) - len(part))
        write_all(port, item.segment.file.descriptor, padded, item.segment.file.shape.at(item.slot) + start)
    item.checksum = digest.intdigest()


def _reading(port: DiskOs, reads: Sequence[Read]) -> Job:
    def job(staging: memoryview, batch: Batch) -> None:
        shape, descriptor = reads[0].segment.file.shape, reads[0].segment.file.descriptor
        if shape.slot_bytes > len(staging):
            _tearing(reads[:1], lambda: _read_long(port, reads[0], staging, batch))
            return
        end = (len(reads) - 1) * shape.slot_bytes + up(reads[-1].length)
        alone = reads if len(reads) == 1 else []
        if not _tearing(alone, lambda: read_all(port, descriptor, staging[:end], shape.at(reads[0].slot))):
            for item in reads if not alone else []:  # the file ends within the run: what is before the end is good
                _reading(port, [item])(staging, batch)
            return
        for i, item in enumerate(reads):
            part = staging[i * shape.slot_bytes :][: item.length]
            fits = xxhash.xxh3_64_intdigest(part) == item.found.checksum
            if fits and item.length:
                with batch.touching():
                    item.target[:] = np.frombuffer(part, np.uint8)
            item.fits = fits

    return job


def _read_long(port: DiskOs, item: Read, staging: memoryview, batch: Batch) -> None:
    digest = xxhash.xxh3_64()
    for start, part in _pieces(item.length, staging):
        read_all(port, item.segment.file.descriptor, staging[: up(len(part))], item.segment.file.shape.at(item.slot) + start)
        digest.update(part)
        with batch.touching():
            item.target[start : start + len(part)] = np.frombuffer(part, np.uint8)
    item.fits = digest.intdigest() == item.found.checksum


def _tearing(reads: Sequence[Read], work: Callable[[], None]) -> bool:
    """True where the work was done; where the file ends too early, the reads do not fit."""
    try:
        work()
    except TornFile:
        for item in reads:
            item.fits = False
        return False
    return True


def _pieces(length: int, staging: memoryview) -> list[tuple[int, memoryview]]:
    step = len(staging) // BLOCK * BLOCK
    return [(start, staging[: min(step, length - start)]) for start in range(0, length, step)]


def _copy(target: memoryview, source: Array) -> None:
    np.frombuffer(target, np.uint8)[: source.nbytes] = source  # numpy lets other threads run meanwhile, a memoryview does not
