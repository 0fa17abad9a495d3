"""The oldest objects of a class or of a tenant, without a list that every use would have to move them in.

A line is the oldest part of the objects, sorted once; whoever was used, pinned or removed since has another tick and is passed over. So a
use costs nothing here and an eviction a share of one pass over all objects. Exact: what falls back into the oldest part spoils the line.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hicache_ray.storage.table import Rows

_PART = 8  # a line is made of one in so many objects
_LEAST = 512

Candidates: TypeAlias = Callable[[], Rows]


@dataclass(eq=False)
class _Line:
    """``rows`` and their ``ticks`` when the line was made, oldest first; those before ``at`` are gone."""

    rows: Rows
    ticks: Rows
    at: int = 0


class OldestFirst:
    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._horizon = -1  # the latest tick in any line

    def oldest(self, name: Hashable, count: int, ticks: Rows, candidates: Candidates) -> Rows:
        """At most ``count`` rows, oldest first, of those that ``candidates()`` names: evictable now, ``ticks`` by row.

        Fewer only where there are no more. The rows stay in the line until their ticks change.
        """
        line = self._lines.get(name)
        found = _valid(line, count, ticks) if line is not None else np.zeros(0, np.int64)
        if len(found) < count:
            line = self._made(candidates(), count, ticks)
            self._lines[name] = line
            self._horizon = max(self._horizon, int(line.ticks[-1]) if len(line.ticks) else -1)
            found = line.rows[:count]
        return found

    def oldest_one(self, name: Hashable, ticks: memoryview) -> int:
        """The first row that :meth:`oldest` would find without making its line anew; -1 where it would have to."""
        line = self._lines.get(name)
        if line is not None:
            for at in range(line.at, len(line.rows)):
                row = line.rows.item(at)
                if ticks[row] == line.ticks.item(at):
                    line.at = at
                    return row
            line.at = len(line.rows)
        return -1

    def back(self, tick: int) -> None:
        """Objects of this tick or later ones may be evicted again, without having been used."""
        if tick <= self._horizon:
            self._lines.clear()
            self._horizon = -1

    @staticmethod
    def _made(rows: Rows, count: int, ticks: Rows) -> _Line:
        own = ticks[rows]
        share = max(_LEAST, count, len(rows) // _PART)
        if share < len(rows):
            oldest = np.argpartition(own, share)[:share]
            rows, own = rows[oldest], own[oldest]
        order = np.argsort(own)
        return _Line(rows[order], own[order])


def _valid(line: _Line, count: int, ticks: Rows) -> Rows:
    """The first ``count`` of the line that are as old as they were; the head of the line that is not is cut off."""
    part = slice(line.at, line.at + 2 * count + 64)
    good = np.flatnonzero(ticks[line.rows[part]] == line.ticks[part])
    if len(good) < count and part.stop < len(line.rows):
        part = slice(line.at, len(line.rows))
        good = np.flatnonzero(ticks[line.rows[part]] == line.ticks[part])
    found = line.rows[part][good[:count]]
    line.at += int(good[0]) if len(good) else len(line.rows[part])
    return found
