"""Bitsets are ints: bit ``i`` speaks of item ``i``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


def pack(flags: Iterable[bool]) -> int:
    """The int whose bit ``i`` is ``flags[i]``. Linear: one parse of a binary literal instead of ``n`` shifts of a growing int."""
    text = "".join(["1" if flag else "0" for flag in flags])
    return int(text[::-1], 2) if text else 0


def each(bits: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def packed(flags: npt.NDArray[np.bool_]) -> int:
    """:func:`pack` of an array."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def unpacked(value: int, count: int) -> npt.NDArray[np.bool_]:
    """The first ``count`` bits as an array of flags."""
    raw = np.frombuffer((value & ((1 << count) - 1)).to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)


def spread(bitset: int, positions: Sequence[int]) -> int:
    """Bit ``i`` of ``bitset`` becomes bit ``positions[i]``; ascending positions."""
    if positions and positions[-1] - positions[0] + 1 == len(positions):
        return bitset << positions[0]
    out = bytearray(b"0" * (positions[-1] + 1 if positions else 0))
    for i in each(bitset):
        out[positions[i]] = 49
    return int(out[::-1], 2) if out else 0


def only(count: int, positions: Sequence[int]) -> int:
    """The bitset of ``positions``."""
    return spread((1 << len(positions)) - 1, positions) & ((1 << count) - 1)
