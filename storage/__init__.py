"""L3: stores that keep pages by content. Import from here; the modules below are details.

``StorageNode`` (all of one node, as its process runs it) and ``open_store`` (the store as its users open it) are made of the others:
``MemoryStore`` (a dict, the oracle), ``ArenaService`` + ``ArenaClient`` (shared memory of one node), ``DiskStore`` (a directory),
``TieredStore`` (one in front of another), ``ShardedStore`` (many nodes, with ``Members`` that a ``Prober`` drives, a ``HomeIndex`` and an
``Announcer`` on each; between nodes: :mod:`.tcp_server`, :mod:`.tcp_client`), and wrappers that compose (:mod:`.wrappers`).
Whoever writes another store tries it with :mod:`.conformance`.
"""

from hicache_ray.storage.announcer import Announcer, AnnouncerConfig
from hicache_ray.storage.arena import ArenaAddress, ArenaConfig
from hicache_ray.storage.behind import WriteBehind
from hicache_ray.storage.checked import ChecksumStore
from hicache_ray.storage.client import ArenaClient
from hicache_ray.storage.connect import ClusterClient, OpenConfig, open_store
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.disk import DiskStore
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.local import LocalStore
from hicache_ray.storage.members import Member, Members, MembersConfig, View
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.node_config import NodeAddress, NodeConfig
from hicache_ray.storage.owned import sweep
from hicache_ray.storage.peers import NodeHandle, ShardConfig
from hicache_ray.storage.prober import Prober
from hicache_ray.storage.restricted import LatencyStore, ReadOnlyStore
from hicache_ray.storage.runtime import StorageNode
from hicache_ray.storage.service import ArenaService
from hicache_ray.storage.session import ClientConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.tiered import TieredStore
from hicache_ray.storage.wrappers import CountingStore, StoreWrapper

__all__ = [
    "Announcer", "AnnouncerConfig", "ArenaAddress", "ArenaClient", "ArenaConfig", "ArenaService", "ChecksumStore", "ClientConfig",
    "ClusterClient", "CountingStore", "Directory", "DiskConfig", "DiskStore", "FaultyStore", "HomeIndex", "LatencyStore", "LocalStore",
    "Member", "Members", "MembersConfig", "MemoryStore", "NodeAddress", "NodeConfig", "NodeHandle", "NodeStore", "OpenConfig", "Prober",
    "ReadOnlyStore", "ShardConfig", "ShardedStore", "StorageNode", "StoreWrapper", "TieredStore", "View", "WriteBehind", "open_store",
    "sweep",
]  # fmt: skip
