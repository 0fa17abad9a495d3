"""Stores around stores. Each is a :class:`~hicache_ray.store.Store` itself, so they compose in any order.

The idea is zarr's: faults, counting, latency are layers, not options of a store. Here are the base and the one that counts; the others:

=================  ============================================================  ==========================
CountingStore      counts calls and items                                        here
FaultyStore        does to chosen calls what a bad day does to a store           :mod:`.faults`
ChecksumStore      keeps a checksum with every object, and verifies every read   :mod:`.checked`
LatencyStore       takes time, per call and per byte                             :mod:`.restricted`
ReadOnlyStore      refuses whatever would change the store                       :mod:`.restricted`
=================  ============================================================  ==========================
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from hicache_ray.errors import ConfigError
from hicache_ray.store import Answer, Bytes, Lent, Store, StoreStats


class StoreWrapper:
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        return self.inner.lookup(keys, tags, timeout_s)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        return self.inner.put(ids, sources, timeout_s)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        return self.inner.get(ids, targets, timeout_s)

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        return self.inner.lease(ids, timeout_s)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        return self.inner.drop(ids, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return self.inner.clear(timeout_s, prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        return self.inner.scan(prefix, timeout_s)

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        self.inner.describe(digest, record, timeout_s)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        return self.inner.described(timeout_s)

    def stats(self, timeout_s: float) -> StoreStats:
        return self.inner.stats(timeout_s)

    def close(self) -> None:
        self.inner.close()

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object."""
        damage: Callable[[bytes], bool] | None = getattr(self.inner, "damage", None)
        if damage is None:
            raise ConfigError(f"a {type(self.inner).__name__} has no damage(id); flip bits in a MemoryStore or an ArenaClient")
        return damage(id)

    def check(self) -> None:
        """For tests: the inner store's own check, where it has one. Raises Inconsistent."""
        check: Callable[[], None] | None = getattr(self.inner, "check", None)
        if check is not None:
            check()


class CountingStore(StoreWrapper):
    """Counts calls, and the ids (for lookup: the keys) in them, per method."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.items: Counter[str] = Counter()

    def total(self) -> int:
        """Calls of any kind."""
        with self._lock:
            return self.calls.total()

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        self._count("lookup", len(keys))
        return super().lookup(keys, tags, timeout_s)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        self._count("put", len(ids))
        return super().put(ids, sources, timeout_s)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        self._count("get", len(ids))
        return super().get(ids, targets, timeout_s)

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        self._count("lease", len(ids))
        return super().lease(ids, timeout_s)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        self._count("drop", len(ids))
        return super().drop(ids, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        self._count("clear", 0)
        return super().clear(timeout_s, prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        self._count("scan", 0)
        return super().scan(prefix, timeout_s)

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        self._count("describe", 1)
        super().describe(digest, record, timeout_s)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        self._count("described", 0)
        return super().described(timeout_s)

    def stats(self, timeout_s: float) -> StoreStats:
        self._count("stats", 0)
        return super().stats(timeout_s)

    def _count(self, call: str, items: int) -> None:
        with self._lock:
            self.calls[call] += 1
            self.items[call] += items
