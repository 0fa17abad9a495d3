"""What a node has towards the others: its tcp server, its part of the directory, who else is alive, and what it tells the homes.

Without a token there are no others: only the list of members is there, with this node alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage.announcer import Announcer
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.forgotten import ForgottenLog
from hicache_ray.storage.local import LocalStore
from hicache_ray.storage.members import Member, Members, View
from hicache_ray.storage.membership import MOST_MEMBERS, Membership, pack_membership, require_member, require_reachable
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.node_config import NodeConfig
from hicache_ray.storage.peers import NodeHandle
from hicache_ray.storage.prober import Prober
from hicache_ray.storage.repair import Repairer, read_from
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.tcp import TcpClientConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Store

# One link each, and hardly any back-off: the rounds of the prober and the steps of the announcer are the back-off.
_LINK = TcpClientConfig(streams=1, connections=1, backoff_s=0.001, backoff_most_s=0.1)
_BULK = TcpClientConfig(streams=1, connections=2)
_FORGET_S = 4.0


class Dialer:
    """One handle per incarnation of the other nodes. Those of incarnations that nobody names any more are closed."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._stores: dict[Member, TcpStore] = {}
        self._closed = False

    def to(self, member: Member) -> TcpStore:
        """Raises StoreError."""
        require_reachable(member)
        with self._lock:
            if self._closed:
                raise StoreClosed("this node is closing")
            found = self._stores.get(member)
            if found is None:
                found = self._stores[member] = TcpStore(member.address, self._token, _LINK, incarnation=member.incarnation)
            return found

    def keep(self, members: Sequence[Member]) -> None:
        with self._lock:
            gone = [self._stores.pop(member) for member in set(self._stores) - set(members)]
        for store in gone:
            store.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.keep([])


class _Own(StoreWrapper):
    """This node's store as one of many: whoever closes the handle does not close it."""

    def close(self) -> None:
        pass


class Plane:
    """``start`` and ``close`` may be called once each; close is idempotent. ``background`` False: no threads but the server's; whoever made
    it calls ``prober.step()``, ``announcer.step()`` and ``repairer.step()``. ``away_s``: as the announcer's; ``log``: as the index's;
    ``disk``: what is behind the store."""

    def __init__(
        self,
        config: NodeConfig,
        node: NodeStore,
        store: LocalStore,
        clock: Callable[[], float],
        background: bool = True,
        away_s: float = 0.0,
        log: ForgottenLog | None = None,
        disk: Store | None = None,
    ) -> None:
        incarnation = node.arena.incarnation
        self.config, self._background = config, background
        self.home = HomeIndex(config.home_entries, clock, log)
        self.members = Members(clock, config.members)
        self.me = Member(config.node, incarnation, "", config.label)
        self._pings, self._homes = Dialer(config.token), Dialer(config.token)
        self.server = TcpServer(store, config.tcp, self.home, incarnation) if config.token else None
        self.prober = Prober(config.node, self.members, self._ping)
        self.announcer = Announcer(lambda: self.me, store, self.members.alive, self._home_of, config.announcer, clock, self.home, away_s)
        if log is not None:
            self.announcer.heard = log.heard
        shards = ShardedStore(config.node, self.members.alive, self._handle_of, replace(config.shard, workers=1))
        self.repairer = Repairer(
            shards, store, read_from(store, disk), self.members.alive, self.announcer.announced, self._told, self.announcer.caught,
            self.announcer.heard_at, config.repair, clock,
        )  # fmt: skip
        self._store = store
        self._said: tuple[View | None, bytes] = (None, b"")
        self._closing = ExitStack()
        node.watch(self.announcer.evicted, self._forget)

    def start(self) -> Plane:
        """Raises ConfigError; then, too, close it."""
        self._closing.callback(self._homes.close)
        self._closing.callback(self._pings.close)
        if self.server is None:
            self.members.join(self.me)
            return self
        self._closing.callback(self.server.close)
        self.server.start()
        self.me = Member(self.me.node, self.me.incarnation, str(self.server.address), self.me.label)
        self.members.join(self.me)
        self._closing.callback(self.prober.close)
        self._closing.callback(self.announcer.close)
        self._closing.callback(self.repairer.close)
        if self._background:
            self.prober.start()
            self.announcer.start()
            self.repairer.start()
        return self

    def set_members(self, members: Sequence[Member]) -> None:
        """All nodes of the cluster; of this one its own word counts. Idempotent. Raises ConfigError, and changes nothing then."""
        others = {member.node: member for member in members if member.node != self.me.node}
        if len(others) >= MOST_MEMBERS:
            raise ConfigError(f"a cluster of {len(others) + 1} nodes is over the limit of {MOST_MEMBERS}")
        for member in others.values():
            require_member(member)
        if self.server is None:
            return
        known = {member.node for member in self.members.everyone()}
        for member in others.values():
            self.members.join(member)
        for node in known - set(others) - {self.me.node}:
            self.members.forget(node)
        everyone = self.members.everyone()
        self._pings.keep(everyone)
        self._homes.keep(everyone)

    def membership(self) -> bytes:
        """For the clients of this node."""
        view = self.members.alive()
        known, said = self._said
        if view is not known:
            told = Membership(self.config.node, view, self.config.token, self.config.shard, self.config.streams)
            said = pack_membership(told)
            self._said = (view, said)
        return said

    def stats(self) -> Mapping[str, Any]:
        alive = self.members.alive()
        living = {member.node for member in alive.alive}
        table = {
            member.node: {"incarnation": member.incarnation, "tcp": member.address, "label": member.label, "alive": member.node in living}
            for member in self.members.everyone()
        }
        server = None
        if self.server is not None:
            server = {
                "connections": self.server.connections,
                "turned_away": self.server.turned_away,
                "inflight_bytes": self.server.inflight_bytes,
            }
        return {
            "version": alive.version,
            "members": table,
            "home": asdict(self.home.stats()),
            "announcer": asdict(self.announcer.stats),
            "repair": {**asdict(self.repairer.stats), "waiting": self.repairer.waiting},
            "tcp": server,
        }

    def check(self) -> None:
        """Raises Inconsistent."""
        self.members.check()
        self.home.check()

    def close(self) -> None:
        self._closing.close()
        self.home.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _ping(self, member: Member, timeout_s: float) -> str:
        return self._pings.to(member).ping(timeout_s)

    def _home_of(self, member: Member) -> Directory:
        return self.home if member.node == self.me.node else self._homes.to(member)

    def _handle_of(self, member: Member) -> NodeHandle:
        """For the repairs. Raises StoreError."""
        if member.node == self.me.node:
            return NodeHandle(member.node, member.incarnation, member.label, _Own(self._store), self.home)
        require_reachable(member)
        remote = TcpStore(member.address, self.config.token, _BULK, incarnation=member.incarnation)
        return NodeHandle(member.node, member.incarnation, member.label, remote, remote)

    def _told(self, ids: Sequence[bytes], seconds: float) -> int:
        """Where more was forgotten than can be named, it may have been any of them."""
        return (1 << len(ids)) - 1 if self.home.knows([b""], seconds) else self.home.knows(ids, seconds)

    def _forget(self, prefix: bytes) -> None:
        with suppress(StoreError):  # closed meanwhile
            self.home.forget(prefix, _FORGET_S)
