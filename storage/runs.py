"""Adjacent slabs cut into slots of one size, and which of the slots are free."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(eq=False)
class Run:
    """Adjacent slabs cut into ``count`` slots of one class. Slots from ``fresh`` on were never given out; ``back`` are free again."""

    start: int
    slabs: int
    slot_bytes: int
    offset: int
    count: int
    fresh: int = 0
    back: array[int] = field(default_factory=lambda: array("i"))

    @property
    def vacant(self) -> int:
        return self.count - self.fresh + len(self.back)

    def take(self, count: int) -> Numbers:
        """Offsets, ascending, of at most ``count`` slots: neighbours can be copied as one."""
        old = min(count, len(self.back))
        fresh = min(count - old, self.count - self.fresh)
        numbers = np.arange(self.fresh, self.fresh + fresh)
        if old:
            numbers = np.concatenate([np.sort(np.array(self.back[len(self.back) - old :], np.int64)), numbers])
            del self.back[len(self.back) - old :]
        self.fresh += fresh
        return self.offset + numbers * self.slot_bytes

    def take_one(self) -> int:
        """:meth:`take` of one slot, where one is vacant."""
        if self.back:
            return self.offset + self.back.pop() * self.slot_bytes
        self.fresh += 1
        return self.offset + (self.fresh - 1) * self.slot_bytes
