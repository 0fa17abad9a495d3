"""Views of objects of a disk store: copies in memory, and a lease on the slots that they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from hicache_ray.storage import bits
from hicache_ray.storage.disk_index import Found


@dataclass
class Claim:
    """An open lease. ``size``: bytes of memory."""

    until: float
    found: Sequence[Found | None]
    size: int


class DiskLent:
    """A :class:`~hicache_ray.store.Lent` of read-only memoryviews."""

    def __init__(self, views: Sequence[memoryview | None], until: float, clock: Callable[[], float], end: Callable[[], None]) -> None:
        self.views = views
        self._until, self._clock, self._end = until, clock, end
        self._released = False

    def valid(self) -> int:
        if self._released or self._clock() >= self._until:
            return 0
        return bits.pack(view is not None for view in self.views)

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            self._end()

    def __enter__(self) -> DiskLent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
