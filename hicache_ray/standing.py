"""What is known of a component's pages whatever tier they are in: which ends they serve, and what requests have said of them.

An *end* is a page that the last legal length of a path needs, or a length where paths part: those go last. All other windows and snapshots
are *inner*. A page learns what it is whenever a path is used; what is known of it stays when it moves between tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths
from hicache_ray.errors import Inconsistent
from hicache_ray.keys import mark_of
from hicache_ray.policy_order import Entries, Longs, grown
from hicache_ray.spec import Component, Kind


@dataclass(frozen=True)
class Hint:
    """What a request says of its pages. Soft: ``expires`` (seconds on the group's clock) puts them first, ``priority`` later."""

    priority: int = 0
    expires: float = np.inf


NO_HINT = Hint()
#: Said of no page: whatever a request says first replaces it.
_UNSAID = -np.inf


class Standing:
    """Of one component. ``step``: base pages between legal lengths."""

    def __init__(self, component: Component, page_size: int, step: int = 1) -> None:
        self.component, self.page_size = component, page_size
        self.step = max(step, component.reach // page_size if component.is_state else 1)
        self._end = np.zeros(0, dtype=bool)
        self._parting = np.zeros(0, dtype=bool)
        self._next = np.zeros(0, dtype=np.int64)  # mark of the page one step on; 0: none seen
        self._priority = np.zeros(0, dtype=np.int64)
        self._expires = np.zeros(0, dtype=np.float64)

    def begin(self, entries: Entries) -> None:
        """Entries are new: whoever had their ids is forgotten."""
        if not len(entries):
            return
        top = int(entries.max())
        for name in ("_end", "_parting", "_next", "_priority", "_expires"):
            setattr(self, name, grown(getattr(self, name), top))
        # What is fetched alone is what a resume needs.
        self._end[entries], self._parting[entries], self._next[entries] = True, False, 0
        self._priority[entries], self._expires[entries] = 0, _UNSAID

    def say(self, entries: Entries, hint: Hint) -> None:
        """A request uses the entries. Of what several say, the highest priority and the latest time hold."""
        first = self._expires[entries] == _UNSAID
        self._priority[entries] = np.where(first, hint.priority, np.maximum(self._priority[entries], hint.priority))
        self._expires[entries] = np.maximum(self._expires[entries], hint.expires)

    def path(self, entries: Entries, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """A path was used: ``entries`` are its objects at the base ``pages`` (ascending); ``keys`` all its page keys."""
        if self.component.kind is Kind.FULL or not len(entries):
            return
        last = pages[-1] + 1
        ends = {last // self.step * self.step or last}
        for entry, page in zip(entries.tolist(), pages, strict=True):
            if (page + 1) % self.step == 0 and self._parts(entry, page, keys):
                ends.add(page + 1)
        needed: set[int] = set()
        for length in ends:
            needed.update(lengths.needed(self.component, length, self.page_size))
        self._end[entries] = [page in needed for page in pages]

    def _parts(self, entry: int, page: int, keys: Sequence[bytes]) -> bool:
        """Whether paths are known to part between a page and the next legal length."""
        if page + self.step < len(keys):
            mark = mark_of(keys[page + self.step])
            self._parting[entry] |= self._next[entry] not in (0, mark)
            self._next[entry] = mark
        return bool(self._parting[entry])

    def ends(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which entries are part of an end. All of a component that every length needs from the root on."""
        return np.ones(len(entries), dtype=bool) if self.component.kind is Kind.FULL else self._end[entries]

    def priority(self, entries: Entries) -> Longs:
        return self._priority[entries]

    def expires(self, entries: Entries) -> npt.NDArray[np.float64]:
        said = self._expires[entries]
        return np.where(said == _UNSAID, np.inf, said)

    def check(self) -> None:
        if np.any(self._parting & (self._next == 0)):
            raise Inconsistent(f"paths part at a page of {self.component.name!r} that nothing has followed")
