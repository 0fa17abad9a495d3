"""The eviction policies by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache_ray.policy import Lru
from hicache_ray.policy_lfu import Lfu
from hicache_ray.policy_order import Entries, Longs
from hicache_ray.policy_priority import Priority
from hicache_ray.policy_s3fifo import S3Fifo
from hicache_ray.settings import Eviction

POLICIES: Mapping[Eviction, type[Lru]] = {
    Eviction.LRU: Lru,
    Eviction.LFU: Lfu,
    Eviction.S3FIFO: S3Fifo,
    Eviction.PRIORITY: Priority,
}


def make(name: Eviction, capacity: int, chained: bool, marks: Callable[[Entries], Longs] | None = None) -> Lru:
    """A policy for a pool of ``capacity`` slots; see :class:`hicache_ray.policy.Lru`."""
    return POLICIES[name](capacity, chained, marks)
