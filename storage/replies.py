"""The answers that carry a place per object, as columns: what a batch of copies is computed from without an object per page.

Offsets and lengths come from another process and become addresses: they are checked against the mapping here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.storage import wire
from hicache_ray.storage.addresses import Ints
from hicache_ray.storage.copying import Summed
from hicache_ray.storage.descriptors import Outcome
from hicache_ray.storage.movers import Words
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.slabs import BLOCK, SHARES_WORD
from hicache_ray.storage.wire import Reader, WireError

Flags = npt.NDArray[np.bool_]
GRANTED, EXISTS = int(Outcome.GRANTED), int(Outcome.EXISTS)  # comparing an array with the enum costs more than the comparison


class Granted(NamedTuple):
    """``exists``: bool [n], of the objects asked for. ``granted``: int64 [m], which of them are to be written, at ``offsets``: int64 [m],
    bytes from the start of the data."""

    id: int
    seconds: float
    exists: Flags
    granted: Ints
    offsets: Ints


class Leased(NamedTuple):
    """``hits``: int64 [m], which of the ids asked for. The columns speak of these: int64 and uint64 [m]."""

    id: int
    seconds: float
    hits: Ints
    offsets: Ints
    lengths: Ints
    checksums: Words
    generations: Words


def unpack_granted(reader: Reader, sizes: Ints, memory: Segment) -> Granted:
    """``sizes``: bytes of each object asked for. Raises WireError."""
    count, id, seconds = len(sizes), reader.number("Q"), reader.real()
    outcomes = np.frombuffer(reader.take(count), np.uint8)
    granted = np.flatnonzero(outcomes == GRANTED)
    offsets = _words(reader, count)[granted]
    _require_inside(offsets, sizes[granted].view(np.uint64), memory)
    return Granted(id, seconds, outcomes == EXISTS, granted, offsets.view(np.int64))


def pack_sealed(reservation: int, summed: Summed) -> bytes:
    done = np.packbits(summed.done, bitorder="little").tobytes()
    return wire.number(reservation, "Q") + wire.number(len(summed.done)) + done + summed.checksums.astype("<u8").tobytes()


def unpack_leased(reader: Reader, count: int, memory: Segment) -> Leased:
    """``count``: of the ids asked for. Raises WireError."""
    id, seconds = reader.number("Q"), reader.real()
    hits = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take((count + 7) // 8), np.uint8), count=count, bitorder="little"))
    columns = _words(reader, 4 * len(hits)).reshape(-1, 4).T.copy()
    _require_inside(columns[0], columns[1], memory)
    offsets, lengths = columns[:2].view(np.int64)
    return Leased(id, seconds, hits, offsets, lengths, columns[2], columns[3])


def unchanged(leased: Leased, memory: Segment) -> Flags:
    """Has the memory of each loan not been given away since? bool [m]; see :meth:`Segment.unchanged`."""
    words = np.frombuffer(memory.generations, np.uint64)
    return (leased.lengths <= SHARES_WORD) | (words[leased.offsets // BLOCK] == leased.generations)


def bits_of(flags: Flags) -> int:
    """The int whose bit ``i`` is ``flags[i]``."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def flags_of(bits: int, count: int) -> Flags:
    """The inverse of :func:`bits_of`."""
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)


def _words(reader: Reader, count: int) -> Words:
    return np.frombuffer(reader.take(8 * count), "<u8")


def _require_inside(offsets: Words, lengths: Words, memory: Segment) -> None:
    """Raises WireError: what is outside of the mapping is not copied to or from, whoever says so."""
    size = memory.data_bytes
    if not ((lengths <= size) & (offsets <= size - lengths)).all():  # where the difference wraps, the first half is False
        raise WireError(f"the service names memory outside of its segment of {size} bytes")
