"""One store in front of another: a fast and small one, and a slow and large one that is written behind.

The front is where objects arrive; what it has no room for goes to the back at once. What is read from the back is promoted into the front.
A drop or clear is fenced in both, and against what is on its way between them: first the front forgets, so that nothing new sets out, then
what is being written behind is waited for and undone, then the back forgets. If a promotion of it was under way, both forget once more when
that has ended. A put that was under way goes no further than the tier in which it is, which has a fence of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.storage.behind import WriteBehind
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.ids import require_ids
from hicache_ray.storage.lending import Released
from hicache_ray.store import Answer, Bytes, Lent, Store, StoreStats


class TieredStore:
    """A :class:`~hicache_ray.store.Store` over two; it closes both, and ``behind``, which must lie between them."""

    def __init__(self, front: Store, back: Store, behind: WriteBehind) -> None:
        self.front, self.back, self.behind = front, back, behind
        self._under_way = _UnderWay()
        self._lock = threading.Lock()
        self._gets = self._misses = self._refused = 0
        self._closed = False

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        left = self._begin(timeout_s)
        front = self.front.lookup(keys, tags, left())
        if all(answer.hit.bit_count() == len(keys) for answer in front.values()):
            return front
        back = self.back.lookup(keys, tags, left())
        return {tag: _either(front[tag], back[tag]) for tag in tags}

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        left = self._begin(timeout_s)
        lengths = [as_array(source).nbytes for _, source in zip(ids, sources, strict=True)]
        with self._under_way.moving(ids, awaited=False) as moving:
            visible = self.front.put(ids, sources, left())
            there = list(bits.each(visible))
            self.behind.add([ids[i] for i in there], [lengths[i] for i in there])
            taken = {ids[i] for i in there}
            free = moving.wanted - taken - self._under_way.revoked(moving)  # what was overtaken looks as if there were no room
            rest = [i for i, id in enumerate(ids) if id in free]
            if rest:
                visible |= bits.spread(self.back.put([ids[i] for i in rest], [sources[i] for i in rest], left()), rest)
                if late := [i for i in rest if ids[i] in self._under_way.revoked(moving)]:
                    self.back.drop([ids[i] for i in late], left())
                    visible &= ~sum(1 << i for i in late)
        with self._lock:
            self._refused += len({id for i, id in enumerate(ids) if not visible >> i & 1} - taken)
        return visible

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        left = self._begin(timeout_s)
        hit = self.front.get(ids, targets, left())
        rest = [i for i in range(len(ids)) if not hit >> i & 1]
        if rest:
            with self._under_way.moving([ids[i] for i in rest], awaited=True) as moving:
                hit |= (found := bits.spread(self.back.get([ids[i] for i in rest], [targets[i] for i in rest], left()), rest))
                self._promote([i for i in bits.each(found) if ids[i] in moving.wanted], ids, targets, left)
        with self._lock:
            self._gets += len(ids)
            self._misses += len(ids) - hit.bit_count()
        return hit

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        left = self._begin(timeout_s)
        require_ids(ids)
        front = self.front.lease(ids, left())
        rest = [i for i, view in enumerate(front.views) if view is None]
        if not rest:
            return front
        try:
            back = self.back.lease([ids[i] for i in rest], left())
        except BaseException:
            front.release()
            raise
        return TieredLent(front, back, rest)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        left = self._begin(timeout_s)
        with self._under_way.fenced(set(ids).__contains__) as wait:
            existed = self._drop(ids, left)
            return existed | self._drop(ids, left) if wait(left()) else existed

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        left = self._begin(timeout_s)
        with self._under_way.fenced(lambda id: id.startswith(prefix)) as wait:
            found = self._clear(prefix, left)
            return len(found | self._clear(prefix, left) if wait(left()) else found)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        left = self._begin(timeout_s)
        return iter({*self.front.scan(prefix, left()), *self.back.scan(prefix, left())})

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        left = self._begin(timeout_s)
        self.front.describe(digest, record, left())
        self.back.describe(digest, record, left())

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        left = self._begin(timeout_s)
        return {**self.back.described(left()), **self.front.described(left())}

    def stats(self, timeout_s: float) -> StoreStats:
        """Of the two as one. What the front holds is a copy of what the back holds or will hold, so of both numbers the larger counts."""
        left = self._begin(timeout_s)
        front, back = self.front.stats(left()), self.back.stats(left())
        with self._lock:
            return StoreStats(
                **{name: max(getattr(front, name), getattr(back, name)) for name in _LARGER},
                gets=self._gets, get_misses=self._misses, put_refused=self._refused,
                checksum_failures=front.checksum_failures + back.checksum_failures, writes_off=back.writes_off or front.writes_off,
            )  # fmt: skip

    def close(self) -> None:
        """Writes what is queued, then closes both. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.behind.close()
            self.front.close()
            self.back.close()

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit in each tier that has the object."""
        damaged = [store.damage(id) for store in (self.front, self.back)]  # type: ignore[attr-defined]
        return any(damaged)

    def check(self) -> None:
        """Raises Inconsistent."""
        self.behind.check()
        for store in (self.front, self.back):
            if hasattr(store, "check"):
                store.check()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _begin(self, timeout_s: float) -> Callable[[], float]:
        """Seconds left of a call. Raises StoreClosed, StoreTimeout."""
        if self._closed:
            raise StoreClosed("this handle of the store is closed")
        until = time.monotonic() + timeout_s

        def left() -> float:
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise StoreTimeout("the tiers did not answer within the deadline")
            return seconds

        return left

    def _promote(self, which: Sequence[int], ids: Sequence[bytes], sources: Sequence[Bytes], left: Callable[[], float]) -> None:
        """The caller has what it asked for already: what goes wrong here is no fault of its call."""
        if which:
            try:
                self.front.put([ids[i] for i in which], [sources[i] for i in which], left())
            except StoreError:
                return

    def _drop(self, ids: Sequence[bytes], left: Callable[[], float]) -> int:
        existed = self.front.drop(ids, left())
        self._require(self.behind.drop(ids, left()))
        return existed | self.back.drop(ids, left())

    def _clear(self, prefix: bytes, left: Callable[[], float]) -> set[bytes]:
        """What there was."""
        found = {*self.front.scan(prefix, left()), *self.back.scan(prefix, left())}
        self.front.clear(left(), prefix)
        self._require(self.behind.clear(left(), prefix))
        self.back.clear(left(), prefix)
        return found

    def _require(self, done: bool) -> None:
        if not done:
            raise StoreTimeout("a write to the back did not end within the deadline")


class TieredLent(Released):
    """Views of both tiers. ``rest``: which of the call the back was asked for."""

    def __init__(self, front: Lent, back: Lent, rest: Sequence[int]) -> None:
        self._front, self._back, self._rest = front, back, rest
        views = list(front.views)
        for i, view in zip(rest, back.views, strict=True):
            views[i] = view
        self.views: Sequence[Bytes | None] = views

    def valid(self) -> int:
        return self._front.valid() | bits.spread(self._back.valid(), self._rest)

    def release(self) -> None:
        self._front.release()
        self._back.release()


@dataclass(eq=False)
class _Moving:
    """Some ids on their way: ``wanted``, and of those what a drop has named since (``revoked``)."""

    wanted: set[bytes]
    awaited: bool
    revoked: set[bytes] = field(default_factory=set)


class _UnderWay:
    """Ids on their way into a tier, and the drops that must not be overtaken by them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moving: set[_Moving] = set()
        self._fences: dict[object, Callable[[bytes], bool]] = {}

    @contextmanager
    def moving(self, ids: Sequence[bytes], awaited: bool) -> Iterator[_Moving]:
        """Of ``ids``, those that nobody is dropping now. ``awaited``: a drop that begins meanwhile waits for the end."""
        with self._changed:
            mine = _Moving({id for id in ids if not any(fence(id) for fence in self._fences.values())}, awaited)
            self._moving.add(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._moving.remove(mine)
                self._changed.notify_all()

    def revoked(self, moving: _Moving) -> set[bytes]:
        """By now."""
        with self._changed:
            return set(moving.revoked)

    @contextmanager
    def fenced(self, hit: Callable[[bytes], bool]) -> Iterator[Callable[[float], bool]]:
        """Nothing that ``hit`` names sets out meanwhile. Gives ``wait(seconds)`` for what had set out and is awaited: whether there was
        any, and it has ended. Raises StoreTimeout."""
        fence = object()
        with self._changed:
            self._fences[fence] = hit
            waited = set()
            for moving in self._moving:
                found = {id for id in moving.wanted if hit(id)}
                moving.revoked |= found
                if found and moving.awaited:
                    waited.add(moving)

        def wait(seconds: float) -> bool:
            with self._changed:
                if not self._changed.wait_for(lambda: waited.isdisjoint(self._moving), seconds):
                    raise StoreTimeout("a read that promotes what is dropped did not end within the deadline")
            return bool(waited)

        try:
            yield wait
        finally:
            with self._changed:
                del self._fences[fence]


_LARGER = ("capacity_bytes", "used_bytes", "objects", "puts", "evictions", "leases")


def _either(front: Answer, back: Answer) -> Answer:
    """A hit anywhere is a hit."""
    hit = front.hit | back.hit
    pending = (front.pending | back.pending) & ~hit
    return replace(front, hit=hit, pending=pending, retry=(front.retry | back.retry) & ~hit & ~pending)
