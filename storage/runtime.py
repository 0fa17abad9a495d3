"""The storage of one node: the arena and the disk behind it, the service for the processes of the machine, the plane to the other nodes.

Knows nothing of Ray.
Started from the inside out, so that whoever is answered is answered by all of it; closed from the outside in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from hicache_ray.errors import StoreError
from hicache_ray.storage.behind_arena import ArenaBehind
from hicache_ray.storage.disk import DiskStore
from hicache_ray.storage.flight import FlightEndpoint
from hicache_ray.storage.forgotten import ForgottenLog, log_bytes
from hicache_ray.storage.local import LocalStore
from hicache_ray.storage.members import Member
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.node_config import NodeAddress, NodeConfig
from hicache_ray.storage.plane import Plane
from hicache_ray.storage.service import ArenaService

_FLUSH_S = 5.0
_STATS_S = 1.0


class StorageNode:
    """``start`` and ``close`` may be called once each; close is idempotent. ``clock``: of leases, members and announcements; what waits on
    sockets takes real time. ``background``: see :class:`~hicache_ray.storage.plane.Plane`."""

    def __init__(self, config: NodeConfig, clock: Callable[[], float] = time.monotonic, background: bool = True) -> None:
        self.config, self._clock, self._background = config, clock, background
        self.disk: DiskStore | None = None
        self.behind: ArenaBehind | None = None
        self.service = ArenaService(config.arena, clock, lambda arena: NodeStore(arena, self.disk, records=config.records))
        self.flight: FlightEndpoint | None = None
        self._plane: Plane | None = None
        self._closing = ExitStack()

    def start(self) -> StorageNode:
        """Raises ConfigError, and leaves nothing behind then."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        config = self.config
        if config.disk is not None:
            kept = log_bytes(config.disk.size_bytes) if config.token else 0
            self.disk = DiskStore(config.disk, self._clock, None, config.arena.tenant_bytes, config.records, kept)
            self._closing.callback(self.disk.close)
        self._closing.callback(self.service.close)
        node = self.service.open().node
        if self.disk is not None:
            self.behind = node.behind = ArenaBehind(node, self.disk, config.write_behind_bytes, self._clock)
            self._closing.callback(self.behind.close, _FLUSH_S)
        store = LocalStore(node, clock=self._clock)
        self._closing.callback(store.close)
        away_s = 0.0 if self.disk is None else self.disk.away_s
        log = ForgottenLog(self.disk, log_bytes(self.disk.config.size_bytes)) if self.disk is not None and config.token else None
        self._plane = Plane(config, node, store, self._clock, self._background, away_s, log, self.disk)
        self._closing.callback(self._plane.close)
        self._plane.start()
        if config.flight_port is not None:
            self.flight = FlightEndpoint(store, config.host, config.flight_port, config.token)
            self._closing.callback(self.flight.close)
        self.service.members = self._plane.membership
        self._closing.callback(self.service.hang_up)
        self.service.listen()

    @property
    def node(self) -> NodeStore:
        return self.service.node

    @property
    def plane(self) -> Plane:
        if self._plane is None:
            raise StoreError("the storage of this node is not running; call start() first")
        return self._plane

    @property
    def address(self) -> NodeAddress:
        me = self.plane.me
        return NodeAddress(self.service.address.socket, me.incarnation, me.node, me.address, me.label)

    def set_members(self, members: Sequence[Member]) -> None:
        """All nodes of the cluster as the directory knows them, this one included or not. Idempotent. Raises ConfigError."""
        self.plane.set_members(members)

    def stats(self) -> Mapping[str, Any]:
        """``address``; ``arena``: counters of the store; ``members`` (who is alive), ``home``, ``announcer``, ``repair``, ``tcp``,
        ``flight``, ``disk`` and ``behind`` (what waits to be written there). For JSON."""
        return {
            "address": self.address.to_dict(),
            "arena": asdict(self.node.stats()),
            **self.plane.stats(),
            "flight": None if self.flight is None else self.flight.location,
            "disk": None if self.disk is None else _told(self.disk),
            "behind": None if self.behind is None else asdict(self.behind.stats()),
        }

    def check(self) -> None:
        """Raises Inconsistent."""
        self.node.check()
        self.plane.check()
        if self.disk is not None and self.behind is not None:
            self.behind.check()
            self.disk.check()

    def close(self) -> None:
        """Hang up on everybody, write to the disk what waits for it (some seconds at most), stop all threads, remove socket and memory."""
        self._closing.close()
        self.disk = self.behind = None

    def __enter__(self) -> StorageNode:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(disk: DiskStore) -> Mapping[str, Any]:
    try:
        return asdict(disk.stats(_STATS_S))
    except StoreError as error:
        return {"error": str(error)}
