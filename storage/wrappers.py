"""Stores around stores. Each is a :class:`~hicache_ray.store.Store` itself, so they compose in any order.

The idea is zarr's: faults, counting, latency are layers, not options of a store.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.store import Answer, Bytes, Lent, Store, StoreStats

OPS = ("put", "get", "lookup")
KINDS = ("error", "hang", "delay", "torn", "flip", "gone")


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


@dataclass(eq=False)
class Fault:
    """``nth``: counts down to the call that it hits. ``only``: positions of the ids in that call; all unless given."""

    op: str
    kind: str
    nth: int
    seconds: float
    only: Collection[int] | None
    freed: threading.Event = field(default_factory=threading.Event)

    def pick(self, ids: Sequence[bytes]) -> list[bytes]:
        return [id for i, id in enumerate(ids) if self.only is None or i in self.only]


class FaultyStore(StoreWrapper):
    """Does to chosen calls what a bad day does to a store.

    ========  ==================================================================================================
    error     raises StoreError; the inner store is not asked
    hang      waits for ``release_hung()`` or the call's ``timeout_s``, then raises StoreTimeout; not asked either
    delay     waits ``seconds``, then goes on
    torn      put: stores the first half of each object and reports success; get: as flip
    flip      put: flips one stored bit of each object afterwards; get: before
    gone      put: drops the objects afterwards; get, lookup: before
    ========  ==================================================================================================

    ``wait(seconds)``: how time passes (a fake clock's advance, say). Without it a hang waits on an event that ``release_hung`` sets.
    """

    def __init__(self, inner: Store, wait: Callable[[float], None] | None = None) -> None:
        super().__init__(inner)
        self._wait = wait
        self._lock = threading.Lock()
        self._planned: list[Fault] = []
        self._hanging: list[Fault] = []

    def fault(self, op: str, kind: str, nth: int = 1, seconds: float = 1.0, only: Collection[int] | None = None) -> None:
        """Hit the ``nth`` call of ``op`` from now. Raises ConfigError."""
        if op not in OPS or kind not in KINDS or nth < 1 or (op == "lookup" and kind in ("torn", "flip")):
            legal = f"operations: {', '.join(OPS)}; kinds: {', '.join(KINDS)} (torn and flip not of lookup)"
            raise ConfigError(f"no fault {kind!r} of {op!r} number {nth}; {legal}")
        with self._lock:
            self._planned.append(Fault(op, kind, nth, seconds, only))

    def heal(self) -> None:
        """Forget the faults that have not struck, and free the calls that hang."""
        with self._lock:
            self._planned.clear()
        self.release_hung()

    def release_hung(self) -> None:
        """Every call that hangs now raises StoreTimeout at once."""
        with self._lock:
            for fault in self._hanging:
                fault.freed.set()

    def hung(self) -> int:
        """How many calls hang now."""
        with self._lock:
            return len(self._hanging)

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        for fault in self._strike("lookup", timeout_s):
            if fault.kind == "gone":
                self.inner.drop([key + tag for key in fault.pick(keys) for tag in tags], timeout_s)
        return super().lookup(keys, tags, timeout_s)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        faults = self._strike("put", timeout_s)
        for fault in faults:
            if fault.kind == "torn":
                hit = set(fault.pick(ids))
                sources = [_half(source) if id in hit else source for id, source in zip(ids, sources, strict=True)]
        visible = super().put(ids, sources, timeout_s)
        stored = {ids[i] for i in bits.each(visible)}
        for fault in faults:
            self._harm(fault, [id for id in fault.pick(ids) if id in stored], timeout_s)
        return visible

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        for fault in self._strike("get", timeout_s):
            self._harm(fault, fault.pick(ids), timeout_s, torn_is_flip=True)
        return super().get(ids, targets, timeout_s)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _strike(self, op: str, timeout_s: float) -> list[Fault]:
        """Faults that hit this call; those that concern time have had their effect, the others are the caller's to do."""
        with self._lock:
            due = []
            for fault in [fault for fault in self._planned if fault.op == op]:
                fault.nth -= 1
                if not fault.nth:
                    self._planned.remove(fault)
                    due.append(fault)
        for fault in due:
            if fault.kind == "error":
                raise StoreError(f"injected: this {op} fails")
            if fault.kind == "hang":
                self._hang(fault, timeout_s)
            if fault.kind == "delay":
                self._pass(fault, fault.seconds)
        return due

    def _hang(self, fault: Fault, timeout_s: float) -> None:
        with self._lock:
            self._hanging.append(fault)
        try:
            self._pass(fault, timeout_s)
        finally:
            with self._lock:
                self._hanging.remove(fault)
        raise StoreTimeout(f"injected: this {fault.op} hung")

    def _pass(self, fault: Fault, seconds: float) -> None:
        if self._wait is not None:
            self._wait(seconds)
        else:
            fault.freed.wait(seconds)

    def _harm(self, fault: Fault, ids: Sequence[bytes], timeout_s: float, torn_is_flip: bool = False) -> None:
        if fault.kind == "gone":
            self.inner.drop(ids, timeout_s)
        elif fault.kind == "flip" or (fault.kind == "torn" and torn_is_flip):
            for id in ids:
                self.damage(id)


def _half(source: Bytes) -> Bytes:
    view = memoryview(source).cast("B")
    return view[: len(view) // 2]
