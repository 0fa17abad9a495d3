"""What a home was told to forget: prefixes that were cleared, ids that were dropped, each with when, as epochs and as times.

A dropped id is a prefix of full length. Ids are kept apart from prefixes, as they are many and are looked up, not compared one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hicache_ray.storage import bits
from hicache_ray.storage.ids import ID_BYTES

#: Prefixes and ids that are kept, at most.
PREFIXES, IDS = 256, 16384


class Fences:
    """The last ``forget`` of each prefix, and of each id. Bounded: where there are too many, the oldest counts for every prefix."""

    def __init__(self) -> None:
        self.epoch = 0
        self._floor = 0  # announcements from before this epoch are refused whatever their prefix
        self._floor_at = -math.inf
        self._loaded = 0  # up to this epoch: told in an earlier life
        self._prefixes: dict[bytes, tuple[int, float]] = {}  # -> (epoch, time), oldest first
        self._ids: dict[bytes, tuple[int, float]] = {}

    def add(self, prefixes: Sequence[bytes], now: float) -> None:
        """All in one epoch."""
        self._add(self._prefixes, prefixes, now, PREFIXES)

    def add_ids(self, ids: Sequence[bytes], now: float) -> None:
        """All in one epoch."""
        self._add(self._ids, ids, now, IDS)

    def load(self, entries: Sequence[tuple[bytes, float]], floor_at: float) -> None:
        """What was told in an earlier life, oldest first. It is said to who asks, and fences nothing that begins now."""
        for prefix, at in entries:
            (self.add_ids if len(prefix) == ID_BYTES else self.add)([prefix], at)
        self._floor, self._floor_at, self._loaded = self.epoch, max(self._floor_at, floor_at), self.epoch

    def everything(self) -> tuple[list[tuple[bytes, float]], float]:
        """(all that is known, as :meth:`since` says it; when that was of which it is not known any more what it was)."""
        return [(prefix, at) for told in (self._prefixes, self._ids) for prefix, (_, at) in told.items()], self._floor_at

    def since(self, moment: float) -> list[tuple[bytes, float]]:
        """(prefix, when) of the fences of that moment and later; everything, where one that is not known any more is of then."""
        known = [(prefix, at) for told in (self._prefixes, self._ids) for prefix, (_, at) in told.items() if at >= moment]
        return known if self._floor_at < moment else [(b"", self._floor_at), *known]

    def passed(self, ids: Sequence[bytes], since: int) -> int:
        """Bitset of the ids that no fence later than ``since`` stands before."""
        everything = (1 << len(ids)) - 1
        if since >= self.epoch:
            return everything
        if since < self._floor:
            return 0
        return everything & ~self._standing(ids, lambda told: told[0] > since)

    def known(self, prefixes: Sequence[bytes], moment: float) -> int:
        """Bitset of the prefixes for which this life was told of a fence of that moment or later, their own or a shorter one.

        That everything was forgotten may mean that there were too many fences to name; that says nothing of a prefix.
        """

        def counts(told: tuple[int, float]) -> bool:
            return told[0] > self._loaded and told[1] >= moment

        named = self._standing(prefixes, counts, least=1)
        everything = counts((self._floor, self._floor_at)) or counts(self._prefixes.get(b"", (0, -math.inf)))
        return named | (bits.pack([not prefix for prefix in prefixes]) if everything else 0)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _add(self, told: dict[bytes, tuple[int, float]], what: Sequence[bytes], now: float, most: int) -> None:
        self.epoch += 1
        entry = (self.epoch, now)
        for prefix in what:
            told.pop(prefix, None)
            told[prefix] = entry
        while len(told) > most:
            epoch, at = told.pop(next(iter(told)))
            self._floor, self._floor_at = max(self._floor, epoch), max(self._floor_at, at)

    def _standing(self, names: Sequence[bytes], counts: Callable[[tuple[int, float]], bool], least: int = 0) -> int:
        """Bitset of the names before which a fence stands that ``counts``, of a prefix of ``least`` bytes or more."""
        fences = tuple(prefix for prefix, told in self._prefixes.items() if len(prefix) >= least and counts(told))
        out = [name.startswith(fences) for name in names]
        if self._ids:
            for i, name in enumerate(names):
                if not out[i] and len(name) == ID_BYTES and (told := self._ids.get(name)) is not None:
                    out[i] = counts(told)
        return bits.pack(out)
