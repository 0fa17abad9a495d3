"""Ids to row numbers in arrays: what an index keeps per object takes bytes, not Python objects, and a batch takes one pass.

    slots   uint64 words, a power of two of them: fingerprint u32 | row + 1 u32; 0 is empty, GONE marks a removed one
    ids     (rows, width) uint8
    columns one array per name, as long as ids: whatever the owner keeps beside an id

An id is looked for at its hash, then 1, 3, 6, 10, ... slots further. The fingerprint settles nearly every comparison; the bytes of the
id settle it for good. A row keeps its number until it is freed. Whoever keeps a column must fetch it anew after :meth:`IdTable.add`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.storage.ids import ID_BYTES

Rows: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
#: Ids of one width: bytes of each, or an (n, width) array of uint8.
Ids: TypeAlias = Sequence[bytes] | npt.NDArray[np.uint8]

GONE = 0xFFFFFFFF
_ROW = 0xFFFFFFFF
_ALL = (1 << 64) - 1
_FEW = 6  # ids up to which a loop is faster than arrays
_LEAST = 64  # rows
_FILL, _FILL_AFTER = 5 / 8, 3 / 8  # of the slots: rebuilt when more are taken or GONE; at most so many taken afterwards
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)  # the finaliser of murmur3
#: Odd factors, one per word of an id: the golden ratio's multiples, mixed.
_FACTORS = tuple((0x9E3779B97F4A7C15 * (2 * i + 1) ^ (0xD6E8FEB86659FD93 >> i)) & _ALL | 1 for i in range(16))


def packed(ids: Ids, width: int = ID_BYTES) -> npt.NDArray[np.uint8]:
    """(n, width) uint8. Bytes are copied once, arrays not at all."""
    if isinstance(ids, np.ndarray):
        return np.ascontiguousarray(ids).reshape(-1, width)
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, width)


def unpacked(ids: npt.NDArray[np.uint8]) -> list[bytes]:
    """The ids of an (n, width) array as bytes."""
    raw, width = ids.tobytes(), ids.shape[1]
    return [raw[i : i + width] for i in range(0, len(raw), width)]


class IdTable:
    """Not thread-safe: its owner locks. ``columns``: name -> numpy dtype of an array that grows with the rows."""

    def __init__(self, width: int = ID_BYTES, columns: Mapping[str, str] | None = None) -> None:
        """``width``: bytes of an id, a multiple of 8."""
        self.width = width
        self._layout = struct.Struct(f"<{width // 8}Q")
        self._factors = np.array(_FACTORS[: width // 8], np.uint64)
        self._ids = np.zeros((_LEAST, width), np.uint8)
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.zeros(_LEAST, dtype) for name, dtype in (columns or {}).items()}
        self._free = np.zeros(_LEAST, np.int32)  # a stack of rows given back
        self._free_count = 0
        self._fresh = 0  # rows from here on were never used
        self._live = 0
        self._gone = 0
        self._slots: Words = np.zeros(2 * _LEAST, np.uint64)
        self._peek = self._slots.data

    def __len__(self) -> int:
        """Ids that are found."""
        return self._live

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """The column, indexed by row. A view: it is stale after the next :meth:`add`."""
        return self._columns[column]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays: list[npt.NDArray[Any]] = [self._ids, self._free, self._slots, *self._columns.values()]
        return sum(array.nbytes for array in arrays)

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def find(self, ids: Ids) -> Rows:
        """(n,) int64: the row of each id, -1 where it is absent."""
        if len(ids) <= _FEW:
            return np.array([self.find_one(bytes(id)) for id in ids], np.int64)
        words = packed(ids, self.width).view(np.uint64)
        return self._find(words, _finished(words @ self._factors))

    def find_pairs(self, keys: Ids, tag: bytes) -> Rows:
        """The same for the ids ``key + tag`` of all ``keys``, which are ``width - len(tag)`` bytes long."""
        if not len(keys):
            return np.zeros(0, np.int64)
        split = (self.width - len(tag)) // 8
        ids = np.empty((len(keys), self.width // 8), np.uint64)
        ids[:, :split] = packed(keys, 8 * split).view(np.uint64)
        ids[:, split:] = np.frombuffer(tag, np.uint64)
        return self.find(ids.view(np.uint8))

    def find_one(self, id: bytes) -> int:
        """The row of one id, -1 where it is absent."""
        mask, mark = len(self._peek) - 1, self._hash_one(id)
        at, step, mark = mark & mask, 0, mark >> 32 | 1
        while (slot := self._peek[at]) != 0:
            if slot >> 32 == mark and self._ids[(slot & _ROW) - 1].tobytes() == id:
                return int((slot & _ROW) - 1)
            step += 1
            at = (at + step) & mask
        return -1

    def __contains__(self, id: bytes) -> bool:
        return self.find_one(id) >= 0

    def ids(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """(n, width) uint8, a copy."""
        return self._ids[rows]

    def rows(self, prefix: bytes = b"") -> Rows:
        """Rows, ascending, of the ids that start with ``prefix``."""
        taken = self._slots[self._slots > GONE]
        rows = np.sort((taken & np.uint64(_ROW)).astype(np.int64) - 1)
        if prefix:
            if len(prefix) > self.width:
                return rows[:0]
            rows = rows[(self._ids[rows, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1)]
        return rows

    # -- changes -----------------------------------------------------------------------------------------------------------------

    def add(self, ids: Ids) -> Rows:
        """Rows for ids that are absent and differ from each other. Columns of a row keep what was in them: the owner sets them."""
        ids = packed(ids, self.width)
        count = len(ids)
        self._make_slots(count)
        rows = self._take_rows(count)
        self._ids[rows] = ids
        self._insert(rows)
        self._live += count
        return rows

    def hide(self, rows: Rows) -> None:
        """Their ids are absent from now on; the rows, and their columns, stay until they are freed."""
        if not len(rows):
            return
        places = self._place(rows)
        self._slots[places] = GONE
        self._live -= len(rows)
        self._gone += len(rows)

    def free(self, rows: Rows) -> None:
        """Rows that were hidden may be given out again."""
        end = self._free_count + len(rows)
        self._free[self._free_count : end] = rows
        self._free_count = end

    def remove(self, rows: Rows) -> None:
        """Hide and free."""
        self.hide(rows)
        self.free(rows)

    def check(self) -> None:
        """Raises Inconsistent."""
        rows = self.rows()
        free = self._free[: self._free_count]
        for holds, what in (
            (len(rows) == self._live, "the count of ids is wrong"),
            (int((self._slots == GONE).sum()) == self._gone, "the count of removed slots is wrong"),
            (len(np.unique(rows)) == len(rows), "two slots name the same row"),
            (len(np.unique(free)) == len(free), "a row was freed twice"),
            (not np.isin(free, rows).any(), "a free row is still found"),
            (bool((self.find(self._ids[rows]) == rows).all()), "an id is not found at its row"),
            (bool((self._slots == 0).any()), "no slot is empty"),
        ):
            if not holds:
                raise Inconsistent(what)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _hash_one(self, id: bytes) -> int:
        value = sum([word * factor for word, factor in zip(self._layout.unpack(id), _FACTORS, strict=False)]) & _ALL
        for factor in _MIX:
            value = ((value ^ value >> 33) * factor) & _ALL
        return value ^ value >> 33

    def _hash(self, rows: Rows) -> Words:
        return _finished(self._ids[rows].view(np.uint64) @ self._factors)

    def _find(self, words: Words, hashes: Words) -> Rows:
        """(n, width / 8) words of ids -> rows."""
        mask, out = np.uint64(len(self._slots) - 1), np.full(len(hashes), -1, np.int64)
        todo, at, marks, step = np.arange(len(hashes)), hashes & mask, hashes >> np.uint64(32) | np.uint64(1), 0
        while len(todo):
            slots = self._slots[at]
            same = slots >> np.uint64(32) == marks
            out[todo[same]] = (slots[same] & np.uint64(_ROW)).astype(np.int64) - 1
            on = np.flatnonzero(~same & (slots != 0))
            step += 1
            todo, at, marks = todo[on], (at[on] + np.uint64(step)) & mask, marks[on]
        hits = np.flatnonzero(out >= 0)
        differ = self._ids.view(np.uint64)[out[hits]] != words[hits]
        if differ.any():  # equal fingerprints of different ids: one in two thousand millions
            for i in hits[differ.any(axis=1)].tolist():
                out[i] = self.find_one(words[i].tobytes())
        return out

    def _place(self, rows: Rows) -> Rows:
        """Slots in which rows that are found stand."""
        hashes = self._hash(rows)
        mask, out = np.uint64(len(self._slots) - 1), np.zeros(len(rows), np.int64)
        wanted, todo, at, step = _words(hashes, rows), np.arange(len(rows)), hashes & mask, 0
        while len(todo):
            same = self._slots[at] == wanted[todo]
            out[todo[same]] = at[same].astype(np.int64)
            on = np.flatnonzero(~same)
            step += 1
            if step > len(self._slots):
                raise Inconsistent("a row is removed whose id is absent")
            todo, at = todo[on], (at[on] + np.uint64(step)) & mask
        return out

    def _insert(self, rows: Rows) -> None:
        """Write the slots of rows whose ids are absent. Of two that want the same slot one wins, the other goes on."""
        hashes = self._hash(rows)
        mask, words, at, step = np.uint64(len(self._slots) - 1), _words(hashes, rows), hashes & np.uint64(len(self._slots) - 1), 0
        while len(words):
            before = self._slots[at]
            vacant = np.flatnonzero(before <= GONE)
            self._slots[at[vacant]] = words[vacant]
            done = self._slots[at] == words
            self._gone -= int((before[done] == GONE).sum())
            on = np.flatnonzero(~done)
            step += 1
            words, at = words[on], (at[on] + np.uint64(step)) & mask

    def _make_slots(self, more: int) -> None:
        if self._live + self._gone + more <= _FILL * len(self._slots):
            return
        rows = self.rows()
        size = 2 * _LEAST
        while self._live + more > _FILL_AFTER * size:
            size *= 2
        self._slots, self._gone = np.zeros(size, np.uint64), 0
        self._peek = self._slots.data
        for start in range(0, len(rows), 1 << 16):  # in parts: the hashes of a million ids need not exist at once
            self._insert(rows[start : start + (1 << 16)])

    def _take_rows(self, count: int) -> Rows:
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

    def _grow(self, wanted: int) -> None:
        """A quarter more at least: what is grown and not used yet counts as well."""
        size = max(wanted, len(self._ids) + len(self._ids) // 4)
        self._ids = _longer(self._ids, size)
        self._free = _longer(self._free, size)
        self._columns = {name: _longer(column, size) for name, column in self._columns.items()}


def _finished(hashes: Words) -> Words:
    for factor in _MIX:
        hashes = (hashes ^ hashes >> np.uint64(33)) * np.uint64(factor)
    return hashes ^ hashes >> np.uint64(33)


def _words(hashes: Words, rows: Rows) -> Words:
    """What stands in the slots of these rows."""
    return (hashes >> np.uint64(32) | np.uint64(1)) << np.uint64(32) | (rows + 1).astype(np.uint64)


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


