"""What the arena of a node writes to its disk, and when: what became visible, later, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage.behind import BehindStats, WriteBehind
from hicache_ray.storage.local import LocalLent
from hicache_ray.storage.node import NodeStore
from hicache_ray.store import Store


class ArenaBehind:
    """A :class:`~hicache_ray.storage.node.Behind`: a write-behind between the arena of ``node`` and ``back``. Closes neither."""

    def __init__(self, node: NodeStore, back: Store, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = WriteBehind(_Front(node, clock), back, limit_bytes)

    def on_sealed(self, ids: Sequence[bytes], lengths: Sequence[int]) -> None:
        self._queue.add(ids, lengths)

    def on_removed(self, ids: Sequence[bytes], timeout_s: float) -> None:
        if not self._queue.drop(ids, max(timeout_s, 0.0)):
            raise StoreTimeout("an object is being written to the disk, and the disk does not answer within the deadline; try again")

    def on_cleared(self, prefix: bytes, timeout_s: float) -> None:
        if not self._queue.clear(max(timeout_s, 0.0), prefix):
            raise StoreTimeout("objects are being written to the disk, and the disk does not answer within the deadline; try again")

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written, or given up. False where that took longer."""
        return self._queue.flush(timeout_s)

    def stats(self) -> BehindStats:
        return self._queue.stats()

    def check(self) -> None:
        """Raises Inconsistent."""
        self._queue.check()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``; the rest is dropped, and counted. Idempotent."""
        self._queue.close(timeout_s)


class _Front:
    """Leases of what is in the arena; nothing is fetched from behind for them."""

    def __init__(self, node: NodeStore, clock: Callable[[], float]) -> None:
        self._node, self._clock, self._owner = node, clock, node.owner()

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> LocalLent:
        asked = self._clock()
        lease = self._node.lease(ids, self._owner, timeout_s, 0.0)
        return LocalLent(self._node, lease, asked + lease.seconds, self._clock)
