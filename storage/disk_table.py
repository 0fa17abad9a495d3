"""Where an object lies, by its id: an open-addressing table of 16 bytes per place. Ids themselves lie in the records of the segments.

It finds by a 64-bit hash; its user compares the id at the place found (two ids of one hash are as likely as a broken checksum; the second
is then a miss for as long as the first is there).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.storage.ids import ID_BYTES

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
_FREE, _GONE = -1, -2
_LEAST = 64
_ODD = np.array(
    [
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93,
        0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
    ], np.uint64,
)  # fmt: skip


def hashes(ids: Sequence[bytes]) -> Hashes:
    """One 64-bit number per id."""
    return hashes_of(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES))


def hashes_of(rows: npt.NDArray[np.uint8]) -> Hashes:
    """The same, for ids that are the rows of a matrix."""
    words = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, ID_BYTES // 8)
    words = words ^ (words >> np.uint64(32))
    mixed: Hashes = (words * _ODD).sum(axis=1, dtype=np.uint64)
    for shift, odd in ((32, _ODD[0]), (29, _ODD[1])):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * odd
    return mixed ^ (mixed >> np.uint64(32))


class PlaceTable:
    """Hash -> place (an int >= 0). Grows as needed. Not thread-safe."""

    def __init__(self) -> None:
        self._reset(_LEAST)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._hashes.nbytes + self._places.nbytes

    def find(self, wanted: Hashes) -> Places:
        """The place of each hash, -1 where there is none."""
        found = np.full(len(wanted), -1, np.int64)
        rest = np.arange(len(wanted))
        at = (wanted & self._mask).astype(np.int64)
        while rest.size:
            places = self._places[at]
            hit = (places >= 0) & (self._hashes[at] == wanted[rest])
            found[rest[hit]] = places[hit]
            going = ~hit & (places != _FREE)
            rest, at = rest[going], (at[going] + 1) & int(self._mask)
        return found

    def insert(self, new: Hashes, places: Places) -> None:
        """The hashes must not be there yet (a twin of one that is there stays in its shadow)."""
        if (self._filled + len(new)) * 3 > len(self._places) * 2:
            self._grow(len(new))
        rest = np.arange(len(new))
        at = (new & self._mask).astype(np.int64)
        while rest.size:
            free = self._places[at] == _FREE
            self._places[at[free]] = places[rest[free]]  # of several that want one cell, the last gets it
            mine = free & (self._places[at] == places[rest])
            self._hashes[at[mine]] = new[rest[mine]]
            rest, at = rest[~mine], (at[~mine] + 1) & int(self._mask)
        self._live += len(new)
        self._filled += len(new)

    def remove(self, hash: int, place: int) -> None:
        """Raises Inconsistent where it is not there."""
        mask, at = int(self._mask), hash & int(self._mask)
        while (found := int(self._places[at])) != place:
            if found == _FREE:
                raise Inconsistent(f"place {place} is not in the table")
            at = (at + 1) & mask
        self._places[at] = _GONE
        self._live -= 1

    def _reset(self, cells: int) -> None:
        self._hashes: Hashes = np.zeros(cells, np.uint64)
        self._places: Places = np.full(cells, _FREE, np.int64)
        self._mask = np.uint64(cells - 1)
        self._live = self._filled = 0

    def _grow(self, more: int) -> None:
        held = self._places >= 0
        hashes, places = self._hashes[held], self._places[held]
        self._reset(max(_LEAST, 1 << (2 * (len(places) + more)).bit_length()))
        self.insert(hashes, places)
