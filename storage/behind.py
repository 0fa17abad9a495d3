"""Writes from one store into a slower one, later: a bounded queue and one thread.

The queue holds ids, not bytes: these are leased from the front when their turn comes, and what the front has lost by then is not written.
Written is a copy that is known to be whole: the back would give damaged bytes a checksum that they fit.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hicache_ray.errors import ConfigError, Inconsistent
from hicache_ray.storage import bits
from hicache_ray.storage.checked import scratch
from hicache_ray.storage.copying import as_array, checksum
from hicache_ray.storage.segment import Array
from hicache_ray.store import Lent, Store

_BATCH_IDS = 128
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class BehindStats:
    """``queued`` now; the others since the start, in objects. ``dropped``: no room in the queue. ``lost``: gone from the front by their
    turn. ``refused``: the back did not take them. ``failures``: calls that raised."""

    queued: int
    queued_bytes: int
    written: int
    dropped: int
    lost: int
    refused: int
    failures: int


class Lender(Protocol):
    """What is needed of the store in front."""

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent: ...


class WriteBehind:
    """``limit_bytes``: of the objects in the queue. ``timeout_s``: of each call of either store."""

    def __init__(self, front: Lender, back: Store, limit_bytes: int, timeout_s: float = 10.0) -> None:
        if limit_bytes <= 0 or timeout_s <= 0:
            raise ConfigError(f"a write-behind needs a positive limit and timeout, got {limit_bytes} bytes and {timeout_s} s")
        self._front, self._back, self._limit, self._timeout_s = front, back, limit_bytes, timeout_s
        self._changed = threading.Condition()
        self._queue: OrderedDict[bytes, int] = OrderedDict()  # id -> bytes, the next first
        self._bytes = 0
        self._writing: set[bytes] = set()
        self._undone: set[bytes] = set()  # ids in flight that were dropped meanwhile
        self._written = self._dropped = self._lost = self._refused = self._failures = 0
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._work, name="hicache-behind", daemon=True)
        self._thread.start()

    def add(self, ids: Sequence[bytes], lengths: Sequence[int]) -> int:
        """Queue objects that are in the front; returns the bitset of those that are queued now. The others are dropped, and counted."""
        taken = []
        with self._changed:
            for id, length in zip(ids, lengths, strict=True):
                known = id in self._queue
                fits = not self._closed and self._bytes + length <= self._limit
                if not known and fits:
                    self._queue[id] = length
                    self._bytes += length
                taken.append(known or fits)
                self._dropped += not taken[-1]
            self._changed.notify_all()
        return bits.pack(taken)

    def pending(self, ids: Sequence[bytes]) -> int:
        """Bitset of those that are queued or being written."""
        with self._changed:
            return bits.pack(id in self._queue or id in self._writing for id in ids)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> bool:
        """Forget them; one that is being written is dropped from the back afterwards. False where that took longer than ``timeout_s``."""
        with self._changed:
            for id in ids:
                self._bytes -= self._queue.pop(id, 0)
            mine = self._writing & set(ids)
            self._undone |= mine
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not mine & self._undone, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> bool:
        """The same for all ids that start with ``prefix``."""
        with self._changed:
            found = [id for id in [*self._queue, *self._writing] if id.startswith(prefix)]
        return self.drop(found, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written, or given up. False where that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing new is taken from the queue meanwhile."""
        with self._changed:
            self._paused = True
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def stats(self) -> BehindStats:
        with self._changed:
            return BehindStats(
                len(self._queue), self._bytes, self._written, self._dropped, self._lost, self._refused, self._failures
            )  # fmt: skip

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._changed:
            if self._bytes != sum(self._queue.values()) or self._bytes > self._limit:
                raise Inconsistent("the bytes of the queue are wrong")
            if not self._undone <= self._writing:
                raise Inconsistent("an object that nobody writes is to be undone")

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued, for at most ``timeout_s``; the rest is dropped, and counted. Idempotent. Neither store is closed."""
        self.flush(0.0 if self._closed else timeout_s)
        with self._changed:
            self._closed = True
            self._dropped += len(self._queue)
            self._queue.clear()
            self._bytes = 0
            self._changed.notify_all()
        self._thread.join(2 * self._timeout_s + timeout_s)  # a call under way has its own deadline

    # -- the thread --------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._paused or not self._queue):
                    self._changed.wait(1.0)
                if self._closed and not self._queue:
                    return
                batch = self._take()
            written = self._write(batch)
            self._finish(batch, written)

    def _take(self) -> list[bytes]:
        """The next ids; they count as being written. The lock is held."""
        batch: list[bytes] = []
        size = 0
        while self._queue and len(batch) < _BATCH_IDS:
            id, length = next(iter(self._queue.items()))
            if batch and size + length > _BATCH_BYTES:
                break
            del self._queue[id]
            self._bytes -= length
            size += length
            batch.append(id)
        self._writing = set(batch)
        return batch

    def _write(self, batch: Sequence[bytes]) -> list[bytes]:
        """Returns what is in the back now."""
        try:
            with self._front.lease(batch, self._timeout_s) as lent:
                found = _whole(lent)
            self._lost += len(batch) - len(found)
            if not found:
                return []
            ids = [batch[i] for i in found]
            visible = self._back.put(ids, list(found.values()), self._timeout_s)
            kept = [ids[n] for n in bits.each(visible)]
            self._refused += len(ids) - len(kept)
            self._written += len(kept)
            return kept
        except Exception:  # whatever is wrong with a store, the thread lives on
            self._failures += 1
            return list(batch)  # some of it may be there

    def _finish(self, batch: Sequence[bytes], written: Sequence[bytes]) -> None:
        """Undo what was dropped meanwhile, until nothing more was."""
        until = time.monotonic() + self._timeout_s
        done: set[bytes] = set()
        while True:
            with self._changed:
                undo = [id for id in written if id in self._undone and id not in done]
                if not undo or time.monotonic() >= until:
                    self._writing = set()
                    self._undone.clear()
                    self._changed.notify_all()
                    return
            try:
                self._back.drop(undo, self._timeout_s)
            except Exception:  # who drops it asks the back as well, and hears of it
                self._failures += 1
            done.update(undo)


def _whole(lent: Lent) -> dict[int, Array]:
    """Copies of the views, by their positions, that were lent still when they had been made, and have the checksums that the lender says,
    if it says one. Raises StoreError."""
    views = {i: as_array(view) for i, view in enumerate(lent.views) if view is not None}
    copies = dict(zip(views, scratch([view.nbytes for view in views.values()]), strict=True))
    for i, copy in copies.items():
        copy[:] = views[i]
    known: Sequence[int | None] = getattr(lent, "checksums", None) or [None] * len(lent.views)
    valid = lent.valid()
    return {i: copy for i, copy in copies.items() if valid >> i & 1 and known[i] in (None, checksum(copy))}
