"""Slots of one pool: which are free, which are held, which are cached. Slots follow the one index, so all ranks agree on them.

Every slot is in exactly one state::

    free --alloc--> held --publish--> cached --withdraw--> free
                      |                  |  ^
                      +--release--> free +--+ pin / release

*Held*: pinned and not published (somebody fills or uses it alone). *Cached*: published under an entry of the index; it may be pinned
too. A slot becomes free when it has no pin and no owner, whichever goes last. So ``free + held + cached == capacity`` at any time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.records import Slots

NOBODY = -1


class SlotPool:
    """The slots ``[0, capacity)`` of one (tier, component)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))  # a stack; low slots first, so that fresh allocations adjoin
        self._pins = np.zeros(capacity, dtype=np.int32)
        self._owner = np.full(capacity, NOBODY, dtype=np.int32)
        self.cached = 0
        self.idle = 0  # cached and not pinned: what eviction can give

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.capacity - self.free - self.cached

    def alloc(self, count: int) -> Slots:
        """``count`` free slots, pinned once. The caller has made sure that there are as many (:attr:`free`)."""
        if count > len(self._free):
            raise Inconsistent(f"{count} slots were asked for and {len(self._free)} of {self.capacity} are free; make room first")
        if count == 0:
            return np.empty(0, dtype=np.int32)
        taken = np.asarray(self._free[-count:][::-1], dtype=np.int32)
        del self._free[-count:]
        self._pins[taken] = 1
        return taken

    def pin(self, slots: Slots) -> None:
        """Protect slots that are held or cached."""
        before = self._pins[slots]
        if ((before == 0) & (self._owner[slots] == NOBODY)).any():
            raise Inconsistent("a free slot was pinned")
        self.idle -= int(np.count_nonzero(before == 0))
        np.add.at(self._pins, slots, 1)

    def release(self, slots: Slots) -> None:
        """Take one pin back. Slots nobody owns and nobody pins become free."""
        if (self._pins[slots] <= 0).any():
            raise Inconsistent("a slot was released that is not pinned")
        np.subtract.at(self._pins, slots, 1)
        bare = slots[self._pins[slots] == 0]
        owned = self._owner[bare] != NOBODY
        self.idle += int(np.count_nonzero(owned))
        self._free.extend(bare[~owned][::-1].tolist())

    def publish(self, slots: Slots, entries: npt.NDArray[np.int32]) -> None:
        """Held slots become the cached pages of ``entries``."""
        if (self._pins[slots] <= 0).any() or (self._owner[slots] != NOBODY).any():
            raise Inconsistent("only a held slot can be published, and only once")
        self._owner[slots] = entries
        self.cached += len(slots)

    def withdraw(self, slots: Slots) -> None:
        """Cached slots lose their owner: free at once, or held until the last pin goes."""
        if (self._owner[slots] == NOBODY).any():
            raise Inconsistent("a slot was withdrawn that is not cached")
        self._owner[slots] = NOBODY
        self.cached -= len(slots)
        bare = slots[self._pins[slots] == 0]
        self.idle -= len(bare)
        self._free.extend(bare[::-1].tolist())

    def pinned(self, slots: Slots) -> npt.NDArray[np.bool_]:
        return self._pins[slots] > 0

    def pins(self) -> int:
        """Sum of all pins."""
        return int(self._pins.sum())

    def check(self) -> None:
        """Raise :class:`Inconsistent` unless every count is right."""
        free = np.asarray(self._free, dtype=np.int32)
        problems = {
            "a slot is free twice": len(set(self._free)) != len(self._free),
            "a free slot is pinned or owned": bool(np.any(self._pins[free] != 0) or np.any(self._owner[free] != NOBODY)),
            "a slot is neither free, held nor cached": int(np.count_nonzero((self._pins == 0) & (self._owner == NOBODY))) != len(free),
            "the cached count is wrong": int(np.count_nonzero(self._owner != NOBODY)) != self.cached,
            "the idle count is wrong": int(np.count_nonzero((self._owner != NOBODY) & (self._pins == 0))) != self.idle,
        }
        for problem, there in problems.items():
            if there:
                raise Inconsistent(problem)
