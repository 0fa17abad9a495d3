"""By which field what L3 holds of a prompt differs from what this group would read: asked of the readable records in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hicache_ray.errors import StoreTimeout
from hicache_ray.keys import ANY, CANONICAL, Namespace, chain, differing, object_record, tag_of
from hicache_ray.records import Tokens
from hicache_ray.spec import CacheSpec
from hicache_ray.store import KEY_BYTES, Store


@dataclass(frozen=True)
class Kept:
    """A record, and what is needed to ask L3 more."""

    told: Mapping[str, Any]
    namespace: Namespace
    first: Tokens


class _Asked:
    """A store, and the time that all questions to it have together."""

    def __init__(self, store: Store, timeout_s: float, clock: Callable[[], float]) -> None:
        self._store, self._clock, self._until, self._timeout_s = store, clock, clock() + timeout_s, timeout_s

    def _left(self) -> float:
        left_s = self._until - self._clock()
        if left_s <= 0:
            raise StoreTimeout(f"storage did not say within {self._timeout_s:g} s by what its objects differ")
        return left_s

    def described(self) -> Mapping[bytes, Mapping[str, str]]:
        return self._store.described(self._left())

    def scan(self, key: bytes) -> Iterator[bytes]:
        return self._store.scan(key, self._left())


def differing_fields(
    store: Store, namespace: Namespace, tokens: Tokens, spec: CacheSpec, recipe: Mapping[str, str], timeout_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:  # fmt: skip
    """Fields by which the first page of ``tokens`` in L3 differs from what this group would read; empty where nothing comes near.

    Namespaces and objects are compared by the readable records that writers left beside the digests. ``timeout_s``: for all questions
    together; raises :class:`StoreTimeout` when it is over.
    """
    asked = _Asked(store, timeout_s, clock)
    records = asked.described()
    first = tokens[: spec.page_size]
    wanted = [object_record(spec, c, r, CANONICAL | dict(recipe)) for c in spec.components for r in range(spec.ranks)]
    for key in chain(namespace.digest(), spec.page_size, (), first):
        tags = {i[KEY_BYTES:] for i in asked.scan(key)}
        for record in wanted:
            if tag_of(record) in tags:
                continue
            near = [r for r in map(records.get, sorted(tags)) if r is not None and r.get("component") == record["component"]]
            if near:
                return min((differing(record, stored) for stored in near), key=len)
    return _elsewhere(asked, namespace, tokens, records)


def foreign_fields(
    store: Store, kept: Kept, spec: CacheSpec, recipe: Mapping[str, str], exact: bool, timeout_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:  # fmt: skip
    """The same for a request that is over. What it has stored itself since does not hide what others had stored of its first page."""
    asked = _Asked(store, timeout_s, clock)
    records = asked.described()
    kinds = (CANONICAL | dict(recipe),) if exact else (CANONICAL | dict(recipe), ANY)
    ours = [object_record(spec, c, r, kind) for c in spec.components for r in range(spec.ranks) for kind in kinds]
    for key in chain(kept.namespace.digest(), spec.page_size, (), kept.first):
        tags = {i[KEY_BYTES:] for i in asked.scan(key)} - {tag_of(r) for r in ours}
        near = [
            differing(r, stored)
            for stored in map(records.get, sorted(tags))
            if stored
            for r in ours
            if r["component"] == stored.get("component")
        ]
        if near:
            return min(near, key=len)
    return _elsewhere(asked, kept.namespace, kept.first, records)


def _elsewhere(asked: _Asked, namespace: Namespace, tokens: Tokens, records: Mapping[bytes, Mapping[str, str]]) -> tuple[str, ...]:
    """Fields of another namespace that has the first page."""
    for digest, stored in sorted(records.items()):
        if "page_size" not in stored or digest == namespace.digest():
            continue
        size = int(stored["page_size"])
        for key in chain(digest, size, (), tokens[:size]):
            if next(iter(asked.scan(key)), None) is not None:
                return namespace.differing(digest, stored)
    return ()
