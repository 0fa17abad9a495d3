"""The search of an :class:`~hicache_ray.storage.table.IdTable`, compiled with numba: a batch of ids in one call instead of thirty passes.

Importing this module imports numba and compiles (once per machine, where the result can be kept on disk); the table works without it, and
is its oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hicache_ray.storage.kernel import compiled
from hicache_ray.storage.table import BUCKET, EMPTY, MIX

_ZERO, _ONE, _HALF, _MIX_WORD, _MARK = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(MIX), np.uint32(2)
_EMPTY = np.uint32(EMPTY)


def _find(keys: Any, tail: Any, factors: Any, marks: Any, places: Any, ids: Any, rows: Any) -> None:
    """``rows[i]`` (int64) becomes the row of the id ``keys[i] + tail``, -1 where it is absent. ``marks`` are uint32, ``places`` int32, the
    others uint64 words; see :mod:`~hicache_ray.storage.table`."""
    heads, tails, mask = keys.shape[1], tail.shape[0], np.uint64(marks.shape[0] - 1)
    base = _ZERO
    for j in range(tails):
        base += tail[j] * factors[heads + j]
    for i in range(keys.shape[0]):
        value = base
        for j in range(heads):
            value += keys[i, j] * factors[j]
        value ^= value >> _HALF
        value *= _MIX_WORD
        value ^= value >> _HALF
        mark, bucket, step, row, last = np.uint32(value >> _HALF) | _MARK, value & mask, _ZERO, -1, False
        while not last:
            for k in range(BUCKET):
                found = marks[bucket, k]
                if found == _EMPTY:
                    last = True
                elif found == mark:
                    other = places[bucket, k]
                    same = True
                    for j in range(heads):
                        same &= ids[other, j] == keys[i, j]
                    for j in range(tails):
                        same &= ids[other, heads + j] == tail[j]
                    if same:
                        row, last = other, True
                        break
            step += _ONE
            bucket = (bucket + step) & mask
        rows[i] = row


def _read_only(kind: Any, dimensions: int) -> Any:
    return types.Array(kind, dimensions, "C", readonly=True, aligned=False)


_WORDS, _IDS = _read_only(types.uint64, 1), _read_only(types.uint64, 2)
_FIND = types.void(
    _IDS, _WORDS, _WORDS, _read_only(types.uint32, 2), _read_only(types.int32, 2), _IDS, types.Array(types.int64, 1, "C")
)
find = compiled(_find, _FIND)
