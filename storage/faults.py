"""Faults on demand: a store that fails at the n-th call, for tests of whatever is around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Answer, Bytes, Lent, Store, StoreStats

ANY = "any"
_TIME = ("error", "hang", "delay", "lost")
_ALL = (*_TIME, "torn", "flip", "gone")
#: Operation -> what can happen to it. ``any``: whichever operation is called.
FAULTS: Mapping[str, tuple[str, ...]] = {
    "put": _ALL, "get": _ALL, "lease": (*_TIME, "flip", "gone"), "lookup": (*_TIME, "gone"), "drop": _TIME, "clear": _TIME,
    "scan": _TIME, "describe": _TIME, "described": _TIME, "stats": _TIME, ANY: _TIME,
}  # fmt: skip


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
    lost      the inner store does it, but the answer is lost: StoreTimeout
    torn      put: stores the first half of each object and reports success; get: as flip
    flip      put: flips one stored bit of each object afterwards; get, lease: before
    gone      put: drops the objects afterwards; get, lease, lookup: before
    ========  ==================================================================================================

    The first four happen to every operation, and to ``any`` of them. ``wait(seconds)``: how time passes (a fake clock's advance, say).
    Without it a hang waits on an event that ``release_hung`` sets; so does ``close``.
    """

    def __init__(self, inner: Store, wait: Callable[[float], None] | None = None) -> None:
        super().__init__(inner)
        self._wait = wait
        self._lock = threading.Lock()
        self._planned: list[Fault] = []
        self._hanging: list[Fault] = []

    def fault(self, op: str, kind: str, nth: int = 1, seconds: float = 1.0, only: Collection[int] | None = None) -> None:
        """Hit the ``nth`` call of ``op`` from now. Raises ConfigError."""
        if kind not in FAULTS.get(op, ()) or nth < 1:
            legal = "; ".join(f"{op}: {', '.join(kinds)}" for op, kinds in FAULTS.items())
            raise ConfigError(f"no fault {kind!r} of {op!r} number {nth}; count from 1, and choose of {legal}")
        with self._lock:
            self._planned.append(Fault(op, kind, nth, seconds, only))

    def planned(self) -> int:
        """How many faults have not struck yet."""
        with self._lock:
            return len(self._planned)

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

    # -- the store -----------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        with self._struck("lookup", timeout_s) as faults:
            for fault in faults:
                self._harm(fault, [key + tag for key in fault.pick(keys) for tag in tags], timeout_s)
            return super().lookup(keys, tags, timeout_s)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        with self._struck("put", timeout_s) as faults:
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
        with self._struck("get", timeout_s) as faults:
            for fault in faults:
                self._harm(fault, fault.pick(ids), timeout_s, torn_is_flip=True)
            return super().get(ids, targets, timeout_s)

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        with self._struck("lease", timeout_s) as faults:
            for fault in faults:
                self._harm(fault, fault.pick(ids), timeout_s)
            lent = super().lease(ids, timeout_s)
            if any(fault.kind == "lost" for fault in faults):
                lent.release()  # nobody else can; a lease whose holder is gone for good runs out
            return lent

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        with self._struck("drop", timeout_s):
            return super().drop(ids, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        with self._struck("clear", timeout_s):
            return super().clear(timeout_s, prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        with self._struck("scan", timeout_s):
            return super().scan(prefix, timeout_s)

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        with self._struck("describe", timeout_s):
            super().describe(digest, record, timeout_s)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        with self._struck("described", timeout_s):
            return super().described(timeout_s)

    def stats(self, timeout_s: float) -> StoreStats:
        with self._struck("stats", timeout_s):
            return super().stats(timeout_s)

    def close(self) -> None:
        self.release_hung()
        super().close()

    # -- inside --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _struck(self, op: str, timeout_s: float) -> Iterator[list[Fault]]:
        """Around a call: faults that hit it. Those that concern time or the answer are done here, the others are the caller's to do."""
        with self._lock:
            due = []
            for fault in [fault for fault in self._planned if fault.op in (op, ANY)]:
                fault.nth -= 1
                if not fault.nth:
                    self._planned.remove(fault)
                    due.append(fault)
        for fault in due:
            if fault.kind == "error":
                raise StoreError(f"injected: this {op} fails")
            if fault.kind == "hang":
                self._hang(fault, op, timeout_s)
            if fault.kind == "delay":
                self._pass(fault, fault.seconds)
        yield due
        if any(fault.kind == "lost" for fault in due):
            raise StoreTimeout(f"injected: the answer to this {op} is lost")

    def _hang(self, fault: Fault, op: str, timeout_s: float) -> None:
        with self._lock:
            self._hanging.append(fault)
        try:
            self._pass(fault, timeout_s)
        finally:
            with self._lock:
                self._hanging.remove(fault)
        raise StoreTimeout(f"injected: this {op} hung")

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
