"""Stores that take time, and stores that only answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.storage.ids import require_ids
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import KEY_BYTES, Answer, Bytes, Lent, Store, StoreStats


class LatencyStore(StoreWrapper):
    """Takes ``call_s`` seconds per call and ``byte_s`` per byte of a put or a get, as a store far away does.

    A call that would take longer than its timeout takes its timeout and raises StoreTimeout; the inner store is not asked then.
    ``wait(seconds)``: how time passes. Calls that carry no bytes and name no object (describe, described) take ``call_s`` too.
    """

    def __init__(self, inner: Store, call_s: float, byte_s: float = 0.0, wait: Callable[[float], None] = time.sleep) -> None:
        """Raises ConfigError."""
        super().__init__(inner)
        if call_s < 0 or byte_s < 0:
            raise ConfigError(f"latencies are not negative; got {call_s} s per call and {byte_s} s per byte")
        self._call_s, self._byte_s, self._wait = call_s, byte_s, wait

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        return super().lookup(keys, tags, self._left(timeout_s))

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        return super().put(ids, sources, self._left(timeout_s, sources))

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        return super().get(ids, targets, self._left(timeout_s, targets))

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        return super().lease(ids, self._left(timeout_s))

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        return super().drop(ids, self._left(timeout_s))

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return super().clear(self._left(timeout_s), prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        return super().scan(prefix, self._left(timeout_s))

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        super().describe(digest, record, self._left(timeout_s))

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        return super().described(self._left(timeout_s))

    def stats(self, timeout_s: float) -> StoreStats:
        return super().stats(self._left(timeout_s))

    def _left(self, timeout_s: float, moved: Sequence[Bytes] = ()) -> float:
        """Let the time of a call pass; returns what is left of its timeout."""
        takes = self._call_s + (self._byte_s * sum(memoryview(data).nbytes for data in moved) if self._byte_s else 0.0)
        if takes >= timeout_s:
            self._wait(timeout_s)
            raise StoreTimeout(f"this call takes {takes:g} s, its timeout is {timeout_s:g} s")
        self._wait(takes)
        return timeout_s - takes


class ReadOnlyStore(StoreWrapper):
    """Reads pass; whatever would change the store is refused.

    A put stores nothing: its bits are those of the objects that exist already, the others are counted as refused. A drop and a clear raise
    StoreError, as there is no other honest answer. Records are not kept, without an error: they only help to explain a miss, and a
    group must be able to start on such a store. (A read still counts as a use, and a damaged object is still dropped by the inner store.)
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._refused = 0

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        if len(ids) != len(sources):
            raise StoreError(f"{len(ids)} ids need as many sources, not {len(sources)}")
        keys = list(dict.fromkeys(id[:KEY_BYTES] for id in ids))
        tags = list(dict.fromkeys(id[KEY_BYTES:] for id in ids))
        answers = self.inner.lookup(keys, tags, timeout_s) if ids else {}
        there = {keys[i] + tag for tag, answer in answers.items() for i in bits.each(answer.hit)}
        with self._lock:
            self._refused += len(set(ids) - there)
        return bits.pack(id in there for id in ids)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        raise StoreError("this store is read-only; drop objects where they are written")

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        raise StoreError("this store is read-only; clear it where it is written")

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        """Does nothing."""

    def stats(self, timeout_s: float) -> StoreStats:
        found = self.inner.stats(timeout_s)
        with self._lock:
            return replace(found, put_refused=found.put_refused + self._refused)
