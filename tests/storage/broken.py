"""Stores with one fault each, on purpose. The conformance suite must see every one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hicache_ray.storage import MemoryStore
from hicache_ray.storage.conformance import PAGE
from hicache_ray.storage.memory import MemoryLent
from hicache_ray.store import Answer, Bytes
from tests.storage.stores import Staged


class EvictsLeased(MemoryStore):
    """Gives room that a reader still reads from."""

    def _make_room(self, wanted: int, keep: set[bytes]) -> bool:
        held = list(self._objects.values())
        leases = [item.leases for item in held]
        for item in held:
            item.leases = 0
        try:
            return super()._make_room(wanted, keep)
        finally:
            for item, count in zip(held, leases, strict=True):
                item.leases = count


class OneTooMany(MemoryStore):
    """Says one capacity and uses a page more."""

    def stats(self, timeout_s: float) -> Any:
        found = super().stats(timeout_s)
        return replace(found, capacity_bytes=found.capacity_bytes - PAGE)


class NoFence(Staged):
    """A put that a clear came across is visible afterwards."""

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return MemoryStore.clear(self, timeout_s, prefix)


class ClearsTooMuch(Staged):
    """Fences everything, whatever the prefix."""

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        self.reserved.clear()
        return MemoryStore.clear(self, timeout_s, prefix)


class TooSoon(Staged):
    """Visible first, complete later."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        if self.gate is None:
            return super().put(ids, sources, timeout_s)
        done = MemoryStore.put(self, ids, sources, timeout_s)
        self.gate.stop()
        return done


class LookupTouches(MemoryStore):
    """A question counts as a use."""

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        with self._locked():
            self._use([key + tag for key in keys for tag in tags if key + tag in self._objects])
        return super().lookup(keys, tags, timeout_s)


class LastWins(MemoryStore):
    """Of equal ids in a call, the last counts."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        last = dict(zip(ids, sources, strict=True))
        return super().put(ids, [last[id] for id in ids], timeout_s)


class Overwrites(MemoryStore):
    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        self.drop(ids, timeout_s)
        return super().put(ids, sources, timeout_s)


class Truncates(MemoryStore):
    """A target that is too short gets the beginning."""

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        whole = [bytearray(len(self._objects[id].data) if id in self._objects else 0) for id in ids]
        hit = super().get(ids, whole, timeout_s)
        for target, data in zip(targets, whole, strict=True):
            array = np.frombuffer(target, np.uint8) if len(target) else np.empty(0, np.uint8)
            if array.nbytes <= len(data):
                array[:] = np.frombuffer(data, np.uint8, array.nbytes)
        return hit


class Borrows(MemoryStore):
    """Keeps the caller's buffer instead of a copy."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        visible = super().put(ids, sources, timeout_s)
        for id, source in zip(ids, sources, strict=True):
            if id in self._objects and len(source) == len(self._objects[id].data):
                self._objects[id].data = source
        return visible


class ForEver(MemoryStore):
    """Leases never end by themselves."""

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> MemoryLent:
        lent = super().lease(ids, timeout_s)
        lent.until = float("inf")
        return lent


class Forgets(MemoryStore):
    """A lease is not counted, so nothing protects what it lends."""

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> MemoryLent:
        lent = super().lease(ids, timeout_s)
        self.end(lent)
        return lent


class NewestGoes(MemoryStore):
    def _use(self, ids: Sequence[bytes]) -> None:
        for id in ids:
            self._objects.move_to_end(id)


class EvictsFirst(MemoryStore):
    """Makes room for what can never fit."""

    def _make_room(self, wanted: int, keep: set[bytes]) -> bool:
        if wanted > self._stats.capacity_bytes:
            for id in [id for id in self._objects if id not in keep]:
                self._remove(id)
        return super()._make_room(wanted, keep)


class NeverPending(Staged):
    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        return MemoryStore.lookup(self, keys, tags, timeout_s)


class StaysOpen(MemoryStore):
    def close(self) -> None:
        pass


class Boasts(MemoryStore):
    """Its drop says that everything was there."""

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        super().drop(ids, timeout_s)
        return (1 << len(ids)) - 1


class Overtaken(Staged):
    """A second put does not see the first one that is under way."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        if any(id in self.reserved for id in ids):
            return MemoryStore.put(self, ids, sources, timeout_s)
        return super().put(ids, sources, timeout_s)


class DropsVisibleOnly(Staged):
    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        return MemoryStore.drop(self, ids, timeout_s)
