"""L3: stores that keep pages by content. Import from here; the modules below are details.

``MemoryStore`` (a dict, the oracle), ``ArenaService`` + ``ArenaClient`` (shared memory of one node), and wrappers that compose
(:mod:`.wrappers` lists them). Whoever writes another store tries it with :mod:`.conformance`.
"""

from hicache_ray.storage.arena import ArenaAddress, ArenaConfig
from hicache_ray.storage.checked import ChecksumStore
from hicache_ray.storage.client import ArenaClient
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.storage.owned import sweep
from hicache_ray.storage.restricted import LatencyStore, ReadOnlyStore
from hicache_ray.storage.service import ArenaService
from hicache_ray.storage.session import ClientConfig
from hicache_ray.storage.wrappers import CountingStore, StoreWrapper

__all__ = [
    "ArenaAddress", "ArenaClient", "ArenaConfig", "ArenaService", "ChecksumStore", "ClientConfig", "CountingStore", "FaultyStore",
    "LatencyStore", "MemoryStore", "ReadOnlyStore", "StoreWrapper", "sweep",
]  # fmt: skip
