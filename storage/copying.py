"""Copies between callers' buffers and the mapping, with the checksum taken while the bytes are in cache.

Own threads, because a framework's pool belongs to the model; what moves the bytes releases the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise

import numpy as np
import xxhash

from hicache_ray.errors import StoreError
from hicache_ray.storage.addresses import Ints
from hicache_ray.storage.descriptors import Sums
from hicache_ray.storage.movers import Batch, Mover, Movers, Piece, PlainMover, Single
from hicache_ray.storage.segment import Array
from hicache_ray.store import Bytes

SLICE = 4 << 20  # bytes between two looks at the deadline: a millisecond
_LEAST = 256 << 10  # bytes of a slice below which switching threads costs more than the other thread saves
# Bytes of a batch up to which one thread copies it. With the compiled loop one alone is faster than memcpy; two are up to twice as fast on
# an idle machine, but on a busy one the caller waits for the time slices of others before its helper has finished: 5 ms, to save 0.5.
_ALONE = 16 << 20
_PIECE = 64  # bytes whose copy takes as long as all else that a piece costs


class Copier:
    """``threads`` copy at once; the caller's is one of them."""

    def __init__(self, threads: int, slice_bytes: int = SLICE, kernel: str = "auto") -> None:
        self._threads, self._slice = threads, slice_bytes
        self._movers = Movers(kernel)
        self._own = threading.local()  # of each thread: its mover, and the columns of its batches of one
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="hicache-copy")

    def warm_up(self, timeout_s: float) -> bool:
        """Load the compiled loop; True once it is used."""
        return self._movers.warm_up(timeout_s)

    def run(self, batch: Batch, stop: Callable[[], bool]) -> Sums:
        """Make the copies; returns the xxh3-64 of each, not done where it was given up because ``stop()`` became true.

        When it has returned or raised, no thread of ours writes any more. Bounded: ``stop`` is asked before every slice.
        """
        count, total = len(batch.sizes), int(batch.sizes.sum())
        sums = Sums(np.zeros(count, np.bool_), np.zeros(count, np.uint64))
        alone = self._threads == 1 or total <= _ALONE
        limit = self._slice if alone else min(self._slice, max(total // (4 * self._threads), _LEAST))
        slices = _slices(batch.sizes, total, limit)
        todo = iter(slices)  # shared: a thread that is held up leaves the rest to the other
        futures: list[Future[None]] = []
        broken = False

        def work() -> None:
            self._work(batch, sums, todo, limit, lambda: broken or stop())

        if alone:
            work()
            return sums
        try:
            with suppress(RuntimeError):  # closed by another thread meanwhile: then the caller's thread does it all
                futures.extend(self._pool.submit(work) for _ in range(min(self._threads, len(slices)) - 1))
            work()
            _wait(futures)
        except BaseException:
            broken = True
            _wait(futures)
            raise
        return sums

    def run_one(self, piece: Piece, of_source: bool, stop: Callable[[], bool]) -> int | None:
        """:meth:`run` of one piece, in this thread: its xxh3-64, None where it was given up."""
        single: Single | None = getattr(self._own, "single", None)
        if single is None:
            single = self._own.single = Single()
        batch, mover = single.of(piece, of_source), self._mover()
        while not single.done:
            if stop():
                return None
            mover.move(batch, single.sums, single.at, 1, self._slice)
        return single.sum

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._movers.close()

    def _work(self, batch: Batch, sums: Sums, todo: Iterator[tuple[int, int]], limit: int, stop: Callable[[], bool]) -> None:
        mover, at = self._mover(), np.zeros(2, np.int64)
        for begin, end in todo:
            at[:] = begin, 0
            while at[0] < end:
                if stop():
                    return
                mover.move(batch, sums.values, at, end, limit)
                sums.done[begin : at[0]] = True

    def _mover(self) -> Mover:
        mover: Mover | None = getattr(self._own, "mover", None)
        if mover is None or isinstance(mover, PlainMover):  # is there a better one by now?
            mover = self._own.mover = self._movers.mover()
        return mover


def _wait(futures: Sequence[Future[None]]) -> None:
    """Call off what has not begun, wait for the rest; raises what went wrong there."""
    running = [future for future in futures if not future.cancel()]
    wait(running)
    for future in running:
        future.result()


def _slices(sizes: Ints, total: int, limit: int) -> list[tuple[int, int]]:
    """Half-open ranges of pieces, each of about ``limit`` bytes, or of one larger piece. ``total``: of the sizes."""
    if total + _PIECE * len(sizes) <= limit or len(sizes) == 1:
        return [(0, len(sizes))]
    ends = np.cumsum(sizes + _PIECE)
    cuts = np.searchsorted(ends, np.arange(limit, ends[-1], limit)) + 1
    edges = np.unique(np.concatenate(([0], cuts, [len(ends)]))).tolist()
    return list(pairwise(edges))


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
