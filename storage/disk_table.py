"""Where an object lies, by its id. Ids themselves lie in the records of the segments, so the table keeps a 64-bit hash of each.

Its user compares the id at the place found. Two ids of one hash are as likely as a broken checksum; the second is then a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.storage.ids import Ids
from hicache_ray.storage.table import IdTable, Words, hashes_of

Places = npt.NDArray[np.int64]
_WIDTH = 8


class PlaceTable:
    """Place (an int >= 0) by id. Grows as needed. Not thread-safe."""

    def __init__(self) -> None:
        self._table = IdTable(_WIDTH, {"place": "int64"})

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def find(self, ids: Ids) -> Places:
        """The place of each, -1 where there is none. It may be that of another id."""
        rows = self._table.find(_named(hashes_of(ids)))
        return np.where(rows >= 0, self._table["place"][rows], -1)

    def insert(self, ids: Ids, places: Places) -> npt.NDArray[np.bool_]:
        """Flags: which of them are there now. Not one whose hash another id has, be it of this call."""
        names = _named(hashes_of(ids))
        new = (self._table.find(names) < 0) & ~self._table.repeated(names)
        rows = self._table.add(names[new])
        self._table["place"][rows] = places[new]
        entered: npt.NDArray[np.bool_] = new
        return entered

    def move(self, id: bytes, old: int, new: int) -> bool:
        """False where it does not lie at ``old``."""
        rows = self._table.find(_named(hashes_of([id])))
        if rows[0] < 0 or self._table["place"][rows[0]] != old:
            return False
        self._table["place"][rows] = new
        return True

    def remove(self, id: bytes, place: int) -> None:
        """Raises Inconsistent where it is not there."""
        rows = self._table.find(_named(hashes_of([id])))
        if rows[0] < 0:
            raise Inconsistent(f"place {place} is not in the table")
        if self._table["place"][rows[0]] == place:
            self._table.remove(rows)


def _named(hashes: Words) -> npt.NDArray[np.uint8]:
    return hashes.view(np.uint8).reshape(-1, _WIDTH)


def latest(ids: npt.NDArray[np.uint8], sequences: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.bool_]:
    """Flags, by row of ``ids``: of several rows with one id, the one with the greatest sequence."""
    hashes = hashes_of(ids)
    order = np.lexsort((np.concatenate(sequences), hashes))
    out = np.ones(len(ids), np.bool_)
    out[order[:-1]] = hashes[order[:-1]] != hashes[order[1:]]
    return out
