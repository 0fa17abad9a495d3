"""L3: stores that keep pages by content. Import from here; the modules below are details.

``MemoryStore`` (a dict, the oracle), ``ArenaService`` + ``ArenaClient`` (shared memory of one node), ``DiskStore`` (a directory),
``TieredStore`` (one in front of another), and wrappers that compose.
"""

from hicache_ray.storage.arena import ArenaAddress, ArenaConfig
from hicache_ray.storage.behind import WriteBehind
from hicache_ray.storage.client import ArenaClient
from hicache_ray.storage.disk import DiskStore
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.storage.owned import sweep
from hicache_ray.storage.service import ArenaService
from hicache_ray.storage.session import ClientConfig
from hicache_ray.storage.tiered import TieredStore
from hicache_ray.storage.wrappers import CountingStore, FaultyStore, StoreWrapper

__all__ = [
    "ArenaAddress", "ArenaClient", "ArenaConfig", "ArenaService", "ClientConfig", "CountingStore", "DiskConfig", "DiskStore",
    "FaultyStore", "MemoryStore",
    "StoreWrapper", "TieredStore", "WriteBehind", "sweep",
]  # fmt: skip
