"""Numbered rows of an id and columns, in arrays that grow together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.int64]
_LEAST, _MORE = 64, 1024  # rows at first, and at least by how many more


class RowStore:
    """Which rows are in use is the owner's knowledge; here they are given out and taken back."""

    def __init__(self, width: int, columns: Mapping[str, str] | None) -> None:
        self.width = width
        self._ids = np.zeros((_LEAST, width), np.uint8)
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.zeros(_LEAST, dtype) for name, dtype in (columns or {}).items()}
        self._free = np.zeros(_LEAST, np.int32)  # a stack of rows given back
        self._make_cells()
        self._free_count = 0
        self._fresh = 0  # rows from here on were never used

    def _make_cells(self) -> None:
        #: The columns once more, for one value at a time: a memoryview gives and takes plain numbers, ten times as fast as an array.
        self.cells: dict[str, memoryview] = {name: memoryview(column) for name, column in self._columns.items()}  # type: ignore[arg-type]
        self._id_cells = memoryview(self._ids.reshape(-1))  # type: ignore[arg-type]

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """The column, indexed by row. A view: it is stale after the next :meth:`add`."""
        return self._columns[column]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._ids.nbytes + self._free.nbytes + sum(column.nbytes for column in self._columns.values())

    @property
    def vacant(self) -> npt.NDArray[np.int32]:
        """Rows that were given back."""
        return self._free[: self._free_count]

    def ids(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """(n, width) uint8, a copy."""
        return self._ids[rows]

    def starting(self, prefix: bytes) -> npt.NDArray[np.bool_]:
        """By row, those without an id too: flags of the ids that start with ``prefix``."""
        if len(prefix) > self.width:
            return np.zeros(len(self._ids), np.bool_)
        return np.asarray((self._ids[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1))

    def take(self, count: int) -> Rows:
        """Rows that nobody has."""
        old = min(count, self._free_count)
        self._free_count -= old
        fresh = count - old
        if self._fresh + fresh > len(self._ids):
            self._grow(self._fresh + fresh)
        rows = np.empty(count, np.int64)
        rows[:old] = self._free[self._free_count : self._free_count + old]
        rows[old:] = np.arange(self._fresh, self._fresh + fresh)
        self._fresh += fresh
        return rows

    def take_one(self) -> int:
        """:meth:`take` of one."""
        if self._free_count:
            self._free_count -= 1
            return self._free.item(self._free_count)
        if self._fresh == len(self._ids):
            self._grow(self._fresh + 1)
        self._fresh += 1
        return self._fresh - 1

    def free(self, rows: Rows) -> None:
        """Rows that nobody needs any more may be given out again."""
        end = self._free_count + len(rows)
        self._free[self._free_count : end] = rows
        self._free_count = end

    def free_one(self, row: int) -> None:
        """:meth:`free` of one."""
        self._free[self._free_count] = row
        self._free_count += 1

    def _grow(self, wanted: int) -> None:
        """A quarter more at least: what is grown and not used yet counts as well."""
        size = max(wanted, len(self._ids) + max(len(self._ids) // 4, _MORE))
        self._ids = _longer(self._ids, size)
        self._free = _longer(self._free, size)
        self._columns = {name: _longer(column, size) for name, column in self._columns.items()}
        self._make_cells()


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
