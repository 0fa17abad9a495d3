"""What moves the bytes of a batch and sums them: the compiled loop, or C's memmove and the xxhash library.

The compiled loop is loaded in the background from the first copy on; until it is there, and where it cannot be had, the other one works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from hicache_ray.storage.addresses import Ints, views_of
from hicache_ray.storage.descriptors import U64
from hicache_ray.storage.loading import Loader
from hicache_ray.store import Bytes

_MODULE = "hicache_ray.storage.kernel"
_CHUNK = 512 << 10  # bytes; measured: 256 KiB switches threads too often, 1 MiB leaves the cache before it is hashed
_LEAST = 1024  # bytes that a call moves at least


class Batch(NamedTuple):
    """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]``; nothing overlaps. The caller keeps the memory alive.

    ``of_source``: the checksums are those of the sources, whatever happens to the targets meanwhile; else of what was written.
    ``stream``: write past the caches.
    """

    sources: Ints
    targets: Ints
    sizes: Ints
    of_source: bool = False
    stream: bool = False

    @classmethod
    def of(cls, sources: Sequence[Bytes], targets: Sequence[Bytes], of_source: bool = False) -> Batch:
        """Between buffers, which the caller holds on to. Raises StoreError."""
        of, to = views_of(sources), views_of(targets, writable=True)
        return cls(of.addresses, to.addresses, to.sizes, of_source, stream=True)


class Piece(NamedTuple):
    """Copy ``size`` bytes from address ``source`` to ``target``."""

    source: int
    target: int
    size: int


class Single:
    """A batch of one piece, whose columns are used again and again: a fresh array costs as much as the copy of a kilobyte."""

    def __init__(self) -> None:
        self._columns = np.zeros((3, 1), np.int64)
        self.sums: U64 = np.zeros(1, np.uint64)
        self.at: Ints = np.zeros(2, np.int64)
        sources, targets, sizes = self._columns
        self._batches = {flag: Batch(sources, targets, sizes, flag, stream=True) for flag in (False, True)}
        self._cells = memoryview(self._columns.reshape(-1))  # type: ignore[arg-type]
        self._at, self._sum = memoryview(self.at), memoryview(self.sums)  # type: ignore[arg-type]

    def of(self, piece: Piece, of_source: bool) -> Batch:
        """The batch of this piece, not begun."""
        self._cells[0], self._cells[1], self._cells[2] = piece
        self._at[0] = self._at[1] = 0
        return self._batches[of_source]

    @property
    def done(self) -> bool:
        return self._at[0] == 1

    @property
    def sum(self) -> int:
        return self._sum[0]


class Mover(Protocol):
    """Belongs to one thread, which finishes a piece before it begins another."""

    def move(self, batch: Batch, checksums: U64, at: Ints, end: int, budget: int) -> None:
        """Go on from ``at`` = [piece, byte of it] up to piece ``end``, or until about ``budget`` bytes are done.

        Afterwards ``at`` says how far it came, and ``checksums`` has the xxh3-64 of every piece before that.
        """
        ...


class PlainMover:
    """The oracle of the other."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def move(self, batch: Batch, checksums: U64, at: Ints, end: int, budget: int) -> None:
        piece, done = at.tolist()
        while piece < end and budget > 0:
            of, to, size = int(batch.sources[piece]), int(batch.targets[piece]), int(batch.sizes[piece])
            if done == 0:
                self._digest.reset()
            part = min(size - done, _CHUNK, max(budget, _LEAST))
            ctypes.memmove(to + done, of + done, part)
            self._digest.update(_bytes_at((of if batch.of_source else to) + done, part))
            budget, done = budget - max(part, 1), done + part
            if done == size:
                checksums[piece] = self._digest.intdigest()
                piece, done = piece + 1, 0
        at[:] = piece, done


class KernelMover:
    """The compiled loop of :mod:`hicache_ray.storage.kernel`."""

    def __init__(self, module: Any) -> None:
        self._function, self._short = module.move, module.SHORT
        self._sums = np.empty(8, np.uint64)
        self._address = self._sums.ctypes.data

    def move(self, batch: Batch, checksums: U64, at: Ints, end: int, budget: int) -> None:
        begin = at.item(0)
        self._function(batch.sources, batch.targets, batch.sizes, checksums, self._address, at, end, budget, batch.stream)
        if len(batch.sizes) == 1 and batch.sizes.item(0) > self._short:
            return
        sizes = batch.sizes[begin : at.item(0)]
        if not len(sizes) or sizes.min() > self._short:
            return
        for i in begin + np.flatnonzero(sizes <= self._short):
            address = (batch.sources if batch.of_source else batch.targets)[i]
            checksums[i] = xxhash.xxh3_64_intdigest(_bytes_at(int(address), int(batch.sizes[i])))


class Movers:
    """Gives every thread its mover. ``kernel``: ``auto | off``."""

    def __init__(self, kernel: str) -> None:
        without = "the arena copies with memmove, at about half the speed"
        self._loader = Loader(_MODULE, "move", without, off=kernel == "off")

    def mover(self) -> Mover:
        """The best there is now; never waits."""
        module = self._loader.get()
        return PlainMover() if module is None else KernelMover(module)

    def warm_up(self, timeout_s: float) -> bool:
        """Load the compiled loop; True once it is used."""
        return self._loader.warm_up(timeout_s)

    def close(self) -> None:
        """No thread of ours is left."""
        self._loader.close()


def _bytes_at(address: int, size: int) -> Any:
    kind: Callable[..., Any] = ctypes.c_char * size
    return kind.from_address(address)  # type: ignore[attr-defined]
