"""Ids and pages for the tests of stores: those of the conformance suite, and one call of every operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache_ray.storage.conformance_kit import PAGE, TAG, TIMEOUT_S, Page, get, key, name, page, present, put
from hicache_ray.store import Store

__all__ = ["CALLS", "PAGE", "TAG", "TIMEOUT_S", "Page", "get", "key", "name", "page", "present", "put"]

#: One call of every operation.
CALLS: Mapping[str, Callable[[Store], object]] = {
    "put": lambda s: put(s, [1]),
    "get": lambda s: get(s, [1]),
    "lease": lambda s: s.lease([name(1)], TIMEOUT_S).release(),
    "lookup": lambda s: present(s, [1]),
    "drop": lambda s: s.drop([name(1)], TIMEOUT_S),
    "clear": lambda s: s.clear(TIMEOUT_S),
    "scan": lambda s: list(s.scan(timeout_s=TIMEOUT_S)),
    "describe": lambda s: s.describe(b"1", {}, TIMEOUT_S),
    "described": lambda s: s.described(TIMEOUT_S),
    "stats": lambda s: s.stats(TIMEOUT_S),
}
