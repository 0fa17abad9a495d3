"""Bitsets are ints: bit ``i`` speaks of item ``i``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


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
