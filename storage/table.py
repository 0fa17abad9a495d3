"""Ids to row numbers in arrays: what an index keeps per object takes bytes, not Python objects, and a batch takes one pass.

    marks   uint32 (buckets, BUCKET): EMPTY, GONE (removed), or the high half of an id's hash
    places  int32 (buckets, BUCKET): the row
    ids     uint8 (rows, width)
    columns one array per name, as long as ids: whatever the owner keeps beside an id

An id stands anywhere in the bucket of its hash, or, where that was full, in the one that is 1, 3, 6, 10, ... further; a bucket with an
EMPTY mark ends the search. The mark settles nearly every comparison, the bytes of the id settle it for good. A row keeps its number until
it is freed. Whoever keeps a column must fetch it anew after :meth:`IdTable.add`.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.storage.ids import ID_BYTES, Ids, packed, unpacked
from hicache_ray.storage.rows import Rows, RowStore

Words: TypeAlias = npt.NDArray[np.uint64]
Marks: TypeAlias = npt.NDArray[np.uint32]

BUCKET = 8  # slots
EMPTY, GONE = 0, 1
_ALL = (1 << 64) - 1
FEW = 6  # ids up to which a loop is faster than arrays
_STEPS = 3  # buckets looked into as arrays; for what is left a loop is faster
_FILL, _FILL_AFTER = 1 / 2, 1 / 3  # of the slots: rebuilt when more are taken or GONE; at most so many taken afterwards
MIX = 0xC4CEB9FE1A85EC53
_MIX_WORD, _HALF, _MARK = np.uint64(MIX), np.uint64(32), np.uint32(2)
_HIGH = 1 if sys.byteorder == "little" else 0  # which half of a word is its high one
#: Odd factors, one per word of an id: the golden ratio's multiples, mixed.
_FACTORS = tuple((0x9E3779B97F4A7C15 * (2 * i + 1) ^ (0xD6E8FEB86659FD93 >> i)) & _ALL | 1 for i in range(16))
_WORD_FACTORS = np.array(_FACTORS, np.uint64)
_NO_TAIL = np.zeros(0, np.uint64)


def hashes_of(ids: Ids, width: int = ID_BYTES) -> Words:
    """(n,): a 64-bit hash of each id of ``width`` bytes."""
    return hashes_of_words(packed(ids, width).view(np.uint64))


def hashes_of_words(words: Words) -> Words:
    """The same of (n, width / 8) words."""
    return _mixed(words @ _WORD_FACTORS[: words.shape[1]])


class IdTable(RowStore):
    """Not thread-safe: its owner locks. ``columns``: name -> numpy dtype of an array that grows with the rows."""

    LEAST = 4096  # slots
    #: :mod:`~hicache_ray.storage.kernel_table`, once somebody has loaded it: only how fast ids are found depends on it.
    compiled: Any = None

    def __init__(self, width: int = ID_BYTES, columns: Mapping[str, str] | None = None) -> None:
        """``width``: bytes of an id, a multiple of 8."""
        super().__init__(width, columns)
        self._layout = struct.Struct(f"<{width // 8}Q")
        self._live = 0
        self._make_buckets(self.LEAST // BUCKET)

    def __len__(self) -> int:
        """Ids that are found."""
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return super().nbytes + self._marks.nbytes + self._places.nbytes

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def hashes(self, ids: Ids) -> Words:
        """(n,): for a caller that passes the same ids to several of these methods."""
        return hashes_of(ids, self.width)

    def hash_one(self, id: bytes | memoryview) -> int:
        """:meth:`hashes` of one."""
        value = sum(map(mul, self._layout.unpack(id), _FACTORS)) & _ALL
        value = ((value ^ value >> 32) * MIX) & _ALL
        return value ^ value >> 32

    def find(self, ids: Ids, hashes: Words | None = None) -> Rows:
        """(n,) int64: the row of each id, -1 where it is absent."""
        if len(ids) <= FEW:
            return np.array([self.find_one(bytes(id)) for id in ids], np.int64)
        words = packed(ids, self.width).view(np.uint64)
        if self.compiled is not None:
            return self._search(words, _NO_TAIL)
        return self._find(words, hashes_of_words(words) if hashes is None else hashes)

    def find_pairs(self, keys: Ids, tag: bytes) -> Rows:
        """The same for the ids ``key + tag`` of all ``keys``, which are ``width - len(tag)`` bytes long."""
        return self.find_tagged(keys, [tag])[0]

    def find_tagged(self, keys: Ids, tags: Sequence[bytes]) -> list[Rows]:
        """:meth:`find_pairs` for each of several tags of one length. The part of the keys in the hashes is made once."""
        if not len(keys) or not tags:
            return [np.zeros(0, np.int64) for _ in tags]
        split = (self.width - len(tags[0])) // 8
        heads = packed(keys, 8 * split).view(np.uint64)
        if self.compiled is not None:
            return [self._search(heads, np.frombuffer(tag, np.uint64)) for tag in tags]
        sums = heads @ _WORD_FACTORS[:split]
        words = np.empty((len(heads), self.width // 8), np.uint64)
        words[:, :split] = heads
        out = []
        for tag in tags:
            tail = np.frombuffer(tag, np.uint64)
            words[:, split:] = tail
            out.append(self._find(words, _mixed(sums + (tail * _WORD_FACTORS[split : self.width // 8]).sum())))
        return out

    def find_one(self, id: bytes, value: int | None = None) -> int:
        """The row of one id, -1 where it is absent. ``value``: its :meth:`hash_one`."""
        value = self.hash_one(id) if value is None else value
        mask, bucket, mark, step = len(self._marks) - 1, value, value >> 32 | 2, 0
        while True:
            bucket &= mask
            marks = self._mark_cells[BUCKET * bucket : BUCKET * (bucket + 1)].tolist()
            if mark in marks:
                for i in range(BUCKET):
                    if marks[i] == mark:
                        row = self._place_cells[BUCKET * bucket + i]
                        if self._id_cells[self.width * row : self.width * (row + 1)] == id:
                            return row
            if EMPTY in marks:
                return -1
            step += 1
            bucket += step

    def __contains__(self, id: bytes) -> bool:
        return self.find_one(id) >= 0

    def rows(self, prefix: bytes = b"") -> Rows:
        """Rows, ascending, of the ids that start with ``prefix``."""
        rows = np.sort(self._places[self._marks > GONE]).astype(np.int64)
        return rows[self.starting(prefix)[rows]] if prefix else rows

    def repeated(self, ids: Ids, hashes: Words | None = None) -> npt.NDArray[np.bool_]:
        """(n,) flags of the ids that are equal to an earlier one of the same call."""
        ids = packed(ids, self.width)
        out = np.zeros(len(ids), np.bool_)
        if len(ids) < 2:
            return out
        sums = np.sort(self.hashes(ids) if hashes is None else hashes)
        if not (sums[1:] == sums[:-1]).any():
            return out
        known = set[bytes]()
        for i, id in enumerate(unpacked(ids)):
            out[i] = id in known
            known.add(id)
        return out

    # -- changes -----------------------------------------------------------------------------------------------------------------

    def add(self, ids: Ids, hashes: Words | None = None) -> Rows:
        """Rows for ids that are absent and differ from each other. Columns of a row keep what was in them: the owner sets them."""
        ids = packed(ids, self.width)
        count = len(ids)
        self._make_slots(count)
        rows = self.take(count)
        self._ids[rows] = ids
        self._insert(rows, self.hashes(ids) if hashes is None else hashes)
        self._live += count
        return rows

    def add_one(self, id: bytes, value: int) -> int:
        """:meth:`add` of one id, whose :meth:`hash_one` is ``value``."""
        self._make_slots(1)
        row = self.take_one()
        self._id_cells[self.width * row : self.width * (row + 1)] = id
        self._insert_one(row, value)
        self._live += 1
        return row

    def hide(self, rows: Rows) -> None:
        """Their ids are absent from now on; the rows, and their columns, stay until they are freed."""
        if not len(rows):
            return
        at = self._place(rows)
        ends = _any(self._marks.take(at // BUCKET, 0) == EMPTY)  # every search ends there anyway
        self._marks.reshape(-1)[at] = np.where(ends, EMPTY, GONE)
        self._live -= len(rows)
        self._gone += len(rows) - int(ends.sum())

    def hide_one(self, row: int) -> None:
        """:meth:`hide` of one."""
        bucket, step = self.hash_one(self._id_cells[self.width * row : self.width * (row + 1)]), 0
        while True:
            bucket &= len(self._marks) - 1
            here = slice(BUCKET * bucket, BUCKET * (bucket + 1))
            marks = self._mark_cells[here].tolist()
            for i, place in enumerate(self._place_cells[here].tolist()):
                if place == row and marks[i] > GONE:
                    ends = EMPTY in marks  # as in :meth:`hide`
                    self._mark_cells[here.start + i] = EMPTY if ends else GONE
                    self._live -= 1
                    self._gone += not ends
                    return
            step += 1
            if step > len(self._marks):
                raise Inconsistent("a row is removed whose id is absent")
            bucket += step

    def remove(self, rows: Rows) -> None:
        """Hide and free."""
        self.hide(rows)
        self.free(rows)

    def check(self) -> None:
        """Raises Inconsistent."""
        rows = self.rows()
        free = self.vacant
        for holds, what in (
            (len(rows) == self._live, "the count of ids is wrong"),
            (int((self._marks == GONE).sum()) == self._gone, "the count of removed slots is wrong"),
            (len(np.unique(rows)) == len(rows), "two places name the same row"),
            (len(np.unique(free)) == len(free), "a row was freed twice"),
            (not np.isin(free, rows).any(), "a free row is still found"),
            (bool((self.find(self._ids[rows]) == rows).all()), "an id is not found at its row"),
            (bool((self._marks == EMPTY).any()), "no slot is empty"),
        ):
            if not holds:
                raise Inconsistent(what)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _search(self, heads: Words, tail: Words) -> Rows:
        """The compiled loop of :mod:`~hicache_ray.storage.kernel_table`."""
        rows = np.empty(len(heads), np.int64)
        self.compiled.find(heads, tail, _WORD_FACTORS, self._marks, self._places, self._ids.view(np.uint64), rows)
        return rows

    def _find(self, words: Words, hashes: Words) -> Rows:
        """(n, width / 8) words of ids -> rows."""
        buckets, marks = self._split(hashes)
        out, lost = self._look(words, buckets, marks)
        places, step = np.arange(len(out)), 0
        while len(lost) > FEW and step < _STEPS:
            step += 1
            words, marks, hashes = words[lost], marks[lost], hashes[lost]
            buckets = (buckets[lost] + step) & (len(self._marks) - 1)
            places = places[lost]
            out[places], lost = self._look(words, buckets, marks)
        for i in lost.tolist():
            out[places[i]] = self.find_one(words[i].tobytes())
        return out

    def _look(self, words: Words, buckets: Rows, marks: Marks) -> tuple[Rows, Rows]:
        """(row in this bucket or -1, positions of the ids that may be in another one)."""
        found = self._marks.take(buckets, 0)
        same = found == marks[:, None]
        at = same.argmax(axis=1)
        at += buckets * BUCKET
        rows = self._places.reshape(-1).take(at)
        good = _any(same)
        differ = self._ids.view(np.uint64).take(rows, 0) != words
        wrong = _any(differ) if differ.shape[1] == BUCKET else differ.any(axis=1)
        other = (good & wrong).nonzero()[0]  # another id with an equal mark: hardly ever
        if good.all() and not len(other):
            return rows.astype(np.int64), other
        out = np.where(good, rows, -1).astype(np.int64)
        for i in other.tolist():
            out[i] = self.find_one(words[i].tobytes())
        missed = (~good).nonzero()[0]
        return out, missed[~_any(found[missed] == EMPTY)]

    def _place(self, rows: Rows) -> Rows:
        """Indices into the flat marks and places of rows that are found."""
        buckets, _ = self._split(self.hashes(self._ids.take(rows, 0)))
        out, todo, step = np.zeros(len(rows), np.int64), np.arange(len(rows)), 0
        while len(todo):
            same = (self._places.take(buckets, 0) == rows[todo, None]) & (self._marks.take(buckets, 0) > GONE)
            at = same.argmax(axis=1)
            known = same[np.arange(len(todo)), at]
            out[todo[known]] = (buckets * BUCKET + at)[known]
            step += 1
            if step > len(self._marks):
                raise Inconsistent("a row is removed whose id is absent")
            todo, buckets = todo[~known], (buckets[~known] + step) & (len(self._marks) - 1)
        return out

    def _insert(self, rows: Rows, hashes: Words) -> None:
        """Write places and marks of rows whose ids are absent. Of two that want the same place one wins, the other looks again."""
        buckets, marks = self._split(hashes)
        flat_marks, flat_places = self._marks.reshape(-1), self._places.reshape(-1)
        steps = np.zeros(len(rows), np.int64)
        while len(rows) > FEW:
            at = buckets * BUCKET + (self._marks.take(buckets, 0) <= GONE).argmax(axis=1)
            before = flat_marks.take(at)
            vacant = before <= GONE
            flat_places[at[vacant]] = rows[vacant]
            won = vacant & (flat_places.take(at) == rows)
            flat_marks[at[won]] = marks[won]
            self._gone -= int((before[won] == GONE).sum())
            on = ~won
            steps += ~vacant
            buckets = np.where(vacant, buckets, buckets + steps)[on] & (len(self._marks) - 1)
            rows, marks, steps, hashes = rows[on], marks[on], steps[on], hashes[on]
        for row, value in zip(rows.tolist(), hashes.tolist(), strict=True):
            self._insert_one(row, value)

    def _insert_one(self, row: int, value: int) -> None:
        bucket, step = value & (len(self._marks) - 1), 0
        while (least := min(marks := self._mark_cells[BUCKET * bucket : BUCKET * (bucket + 1)].tolist())) > GONE:
            step += 1
            bucket = (bucket + step) & (len(self._marks) - 1)
        at = marks.index(least)
        self._gone -= least == GONE
        self._mark_cells[BUCKET * bucket + at] = value >> 32 | 2
        self._place_cells[BUCKET * bucket + at] = row

    def _split(self, hashes: Words) -> tuple[Rows, Marks]:
        """(bucket, mark) of each. ``hashes``: not a part of another array."""
        return (hashes & self._mask).view(np.int64), hashes.view(np.uint32)[_HIGH::2] | _MARK

    def _make_slots(self, more: int) -> None:
        if self._live + self._gone + more <= _FILL * self._marks.size:
            return
        rows = self.rows()
        buckets = self.LEAST // BUCKET
        while self._live + more > _FILL_AFTER * BUCKET * buckets:
            buckets *= 2
        self._make_buckets(buckets)
        for start in range(0, len(rows), 1 << 16):  # in parts: the hashes of a million ids need not exist at once
            part = rows[start : start + (1 << 16)]
            self._insert(part, self.hashes(self._ids[part]))

    def _make_buckets(self, count: int) -> None:
        self._gone = 0
        self._mask = np.uint64(count - 1)
        self._marks = np.zeros((count, BUCKET), np.uint32)
        self._places = np.zeros((count, BUCKET), np.int32)
        # The same, for one number at a time: see :attr:`RowStore.cells`.
        self._mark_cells, self._place_cells = memoryview(self._marks.reshape(-1)), memoryview(self._places.reshape(-1))  # type: ignore[arg-type]


def _mixed(hashes: Words) -> Words:
    """Works in place: the array is the caller's own no more."""
    hashes ^= hashes >> _HALF
    hashes *= _MIX_WORD
    hashes ^= hashes >> _HALF
    return hashes


def _any(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Per bucket. Eight flags are one word: much faster than a reduction along an axis of eight."""
    return flags.view(np.uint64)[:, 0] != 0
