"""Views of objects of a disk store: copies in memory, and a lease on the slots that they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ray.storage import bits
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_plan import Found
from hicache_ray.storage.lending import Released


@dataclass
class _Claim:
    until: float
    found: Sequence[Found | None]
    size: int  # bytes of memory


class Leases:
    """The open ones. ``seconds``: how long one may last. ``limit``: bytes of memory of all. Whoever locks the index locks this."""

    def __init__(self, index: DiskIndex, clock: Callable[[], float], seconds: float, limit: int) -> None:
        self._index, self._clock, self._seconds, self._limit = index, clock, seconds, limit
        self._claims: dict[int, _Claim] = {}
        self._next = 1
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._claims)

    def admit(self, found: Sequence[Found | None]) -> tuple[list[Found | None], int]:
        """What of it still fits into the memory of leases, and how much it takes, counted from now on; the rest is let go, as a miss."""
        kept: list[Found | None] = []
        size = 0
        for item in found:
            if item is not None and self._bytes + size + item.length > self._limit:
                self._index.release([item])
                self._index.counters.get_misses += 1
                item = None
            size += item.length if item is not None else 0
            kept.append(item)
        self._bytes += size
        return kept, size

    def forgo(self, size: int) -> None:
        """What was admitted is not leased."""
        self._bytes -= size

    def open(self, held: Sequence[Found | None], size: int) -> tuple[int, float]:
        """(lease, until); 0 where nothing is held."""
        until = self._clock() + self._seconds
        if not held:
            self.forgo(size)
            return 0, until
        lease, self._next = self._next, self._next + 1
        self._claims[lease] = _Claim(until, held, size)
        return lease, until

    def end(self, lease: int) -> None:
        claim = self._claims.pop(lease, None)
        if claim is not None:
            self._index.release(claim.found)
            self._bytes -= claim.size

    def expire(self) -> None:
        now = self._clock()
        for lease in [lease for lease, claim in self._claims.items() if claim.until <= now]:
            self.end(lease)


class DiskLent(Released):
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
