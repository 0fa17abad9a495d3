"""Copies between callers' buffers and the mapping, with the checksum taken while the bytes are in cache.

Own threads, because a framework's pool belongs to the model; numpy slices and xxh3 release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

from hicache_ray.errors import StoreError
from hicache_ray.storage.segment import Array
from hicache_ray.store import Bytes

CHUNK = 512 << 10  # bytes; measured: 256 KiB switches threads too often, 1 MiB leaves the cache before it is hashed
_ALONE = 1 << 20  # bytes below which handing work to a second thread costs more than it saves


class Copy(NamedTuple):
    """Equally long, not overlapping. ``of_source``: the checksum is that of the source, whatever happens to the target meanwhile."""

    source: Array
    target: Array
    of_source: bool = False


class Copier:
    """``threads`` copy at once; the caller's is one of them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="hicache-copy")

    def run(self, copies: Sequence[Copy], stop: Callable[[], bool]) -> list[int | None]:
        """Make the copies; returns the xxh3-64 of each target (or source), None for those given up because ``stop()`` became true.

        When it has returned or raised, no thread of ours writes any more. Bounded: ``stop`` is asked before every chunk.
        """
        sums: list[int | None] = [None] * len(copies)
        todo = iter(range(len(copies)))  # shared: a thread that is held up leaves the rest to the other
        helpers = min(self._threads, len(copies)) - 1 if sum(copy.target.nbytes for copy in copies) >= _ALONE else 0
        futures: list[Future[None]] = []
        broken = False

        def work() -> None:
            _work(copies, todo, sums, lambda: broken or stop())

        try:
            with suppress(RuntimeError):  # closed by another thread meanwhile: then the caller's thread does it all
                futures.extend(self._pool.submit(work) for _ in range(helpers))
            work()
            _wait(futures)
        except BaseException:
            broken = True
            _wait(futures)
            raise
        return sums

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _wait(futures: Sequence[Future[None]]) -> None:
    """Call off what has not begun, wait for the rest; raises what went wrong there."""
    running = [future for future in futures if not future.cancel()]
    wait(running)
    for future in running:
        future.result()


def _work(copies: Sequence[Copy], todo: Iterator[int], sums: list[int | None], stop: Callable[[], bool]) -> None:
    for i in todo:
        if stop():
            return
        sums[i] = _copy(copies[i], stop)


def _copy(copy: Copy, stop: Callable[[], bool]) -> int | None:
    source, target, of_source = copy
    summed = source if of_source else target
    if target.nbytes <= CHUNK:
        target[:] = source
        return checksum(summed)
    digest = xxhash.xxh3_64()
    for start in range(0, target.nbytes, CHUNK):
        if stop():
            return None
        part = slice(start, start + CHUNK)
        target[part] = source[part]
        digest.update(summed[part].data)
    return digest.intdigest()


def checksum(data: Array) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def as_array(data: Bytes, writable: bool = False) -> Array:
    """The bytes of any contiguous buffer, without a copy. Raises StoreError."""
    try:
        array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise StoreError(f"a {type(data).__name__} is not one contiguous buffer of bytes: {error}") from error
    if writable and not array.flags.writeable and array.nbytes:
        raise StoreError("a target is read-only")
    return array
