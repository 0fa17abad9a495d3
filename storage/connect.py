"""The store as a rank or a coordinator opens it: by the socket of its own node's service, and through that all nodes of the cluster.

The service says who is in the cluster (:mod:`.membership`); the answer is used for ``VIEW_S``, then the next call asks again. There is no
thread for that. While the node is alone, calls go straight to the :class:`~hicache_ray.storage.client.ArenaClient`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage.client import ArenaClient
from hicache_ray.storage.connection import Connection, Deadline, Expired, Pool
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.membership import Membership, require_reachable, unpack_membership
from hicache_ray.storage.peers import NodeHandle
from hicache_ray.storage.session import Breaker, ClientConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.tcp import TcpClientConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.wire import Kind
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Answer, Bytes, Lent, StoreStats

VIEW_S = 0.25


@dataclass(frozen=True)
class OpenConfig:
    """``client``: of the node's own service; ``tcp``: of each other node, as the service says unless set. ``view_s``: how long an answer
    about the members is used."""

    client: ClientConfig = field(default_factory=ClientConfig)
    tcp: TcpClientConfig | None = None
    view_s: float = VIEW_S


def open_store(socket: str, config: OpenConfig | None = None, clock: Callable[[], float] = time.monotonic) -> ClusterClient:
    """The store of all nodes, for a process on the node whose service listens at ``socket``. Connects when first used."""
    return ClusterClient(socket, config or OpenConfig(), clock)


class ClusterClient:
    """A :class:`~hicache_ray.store.Store`. Fails as an ArenaClient does while the node's own service is gone, and is well when it is back.

    Not usable in a forked child (open another there); close() is safe there.
    """

    def __init__(self, socket: str, config: OpenConfig, clock: Callable[[], float]) -> None:
        self._here = ArenaClient(socket, config.client, clock)
        self._config, self._clock, self._pid = config, clock, os.getpid()
        self._breaker = Breaker(clock, config.client.backoff_s, config.client.backoff_most_s)  # as long as nothing is known
        self._questions = Pool(lambda deadline: Connection(socket, deadline), 1)
        self._lock = threading.Lock()  # of who asks for the members
        self._said = b""
        self._known: Membership | None = None
        self._version = 0
        self._sharded: ShardedStore | None = None
        self._target: ArenaClient | ShardedStore | None = None  # None: nothing is known yet
        self._fresh_until = 0.0
        self._closed = False

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        store, left = self._store(timeout_s)
        return store.lookup(keys, tags, left)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        store, left = self._store(timeout_s)
        return store.put(ids, sources, left)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        store, left = self._store(timeout_s)
        return store.get(ids, targets, left)

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        store, left = self._store(timeout_s)
        return store.lease(ids, left)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        store, left = self._store(timeout_s)
        if store is self._here and self._remembers and self._sharded is not None:
            store = self._sharded  # the arena alone would not remember it for the nodes that are away
        return store.drop(ids, left)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        store, left = self._store(timeout_s)
        return store.clear(left, prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        store, left = self._store(timeout_s)
        return store.scan(prefix, left)

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        store, left = self._store(timeout_s)
        store.describe(digest, record, left)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        store, left = self._store(timeout_s)
        return store.described(left)

    def stats(self, timeout_s: float) -> StoreStats:
        """Of all nodes together."""
        store, left = self._store(timeout_s)
        return store.stats(left)

    def ping(self, timeout_s: float) -> str:
        """Incarnation of the node's own service."""
        return self._here.ping(timeout_s)

    def view(self, timeout_s: float) -> View | None:
        """The members as the service sees them; None where it knows of no cluster. Raises StoreError."""
        self._store(timeout_s)
        return None if self._known is None else self._known.view

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object."""
        return self._store(5.0)[0].damage(id)

    def close(self) -> None:
        self._closed = True
        self._here.close()  # first: the memory of this node is what others wait for, and the other nodes may take their time
        self._questions.close()
        self._close_sharded()
        self._here.close()

    def _close_sharded(self) -> None:
        if self._sharded is not None and os.getpid() == self._pid:  # in a forked child its threads and locks are not
            self._sharded.close()

    @property
    def _remembers(self) -> bool:
        """Is there a directory, of this node alone for now?"""
        known = None if self._closed or os.getpid() != self._pid else self._known
        return known is not None and all(member.address for member in known.view.alive)

    # -- whom to ask -------------------------------------------------------------------------------------------------------------

    def _store(self, timeout_s: float) -> tuple[ArenaClient | ShardedStore, float]:
        """The store for one call, and the seconds left for it. Raises StoreError."""
        if self._closed or os.getpid() != self._pid:
            return self._here, timeout_s  # it says why not
        if self._target is not None and self._clock() < self._fresh_until:
            return self._target, timeout_s
        deadline = Deadline.after(self._clock, timeout_s)
        deadline.left()
        first = self._target is None
        if self._lock.acquire(blocking=first, timeout=max(timeout_s, 0.0) if first else -1):
            try:
                self._look(deadline)
            finally:
                self._lock.release()
        if self._target is None:
            raise Expired("the members of the cluster were not known before the deadline of this call")
        return self._target, deadline.left()

    def _look(self, deadline: Deadline) -> None:
        """Ask for the members, unless somebody has just done so. A service that is slow to answer is believed to see what it saw before;
        the call itself will find out what is wrong with it."""
        now = self._clock()
        if self._target is not None and now < self._fresh_until:
            return
        if self._target is None:
            said = self._ask_first(deadline)
        else:
            try:
                said = self._ask(Deadline(self._clock, now + deadline.left() / 2))
            except StoreTimeout:
                self._fresh_until = self._clock() + self._config.client.backoff_s
                return
        if said != self._said or self._target is None:
            self._adopt(unpack_membership(said, self._version + 1))
            self._said = said
        self._fresh_until = now + self._config.view_s

    def _ask(self, deadline: Deadline) -> bytes:
        connection, well = self._questions.take(deadline), False
        try:
            said = connection.call(Kind.MEMBERS, b"", deadline).rest()
            well = True
            return said
        finally:
            self._questions.give_back(connection, broken=not well)

    def _ask_first(self, deadline: Deadline) -> bytes:
        """A service that is frozen, or not there, costs one caller a deadline now and then, not every caller a full one."""
        tried = self._breaker.admit()
        well: bool | None = None
        try:
            said = self._ask(deadline)
            well = True
            return said
        except Expired:
            raise
        except StoreError:
            well = False
            raise
        finally:
            self._breaker.report(well, tried)

    def _adopt(self, known: Membership | None) -> None:
        before, self._known = self._known, known
        self._version += 1
        if known is not None and before is not None and self._sharded is not None:
            if (known.here, known.token, known.shard) != (before.here, before.token, before.shard):
                self._sharded.close()
                self._sharded = None
            else:
                self._sharded.let_go()
        if known is None:
            self._target = self._here
            return
        if self._sharded is None:
            self._sharded = ShardedStore(known.here, self._view, self._connect, known.shard, self._clock)
        self._target = self._here if known.alone else self._sharded
        if self._closed:  # meanwhile, by a thread that did not see it
            self._close_sharded()

    def _view(self) -> View:
        known = self._known
        return View(0, ()) if known is None else known.view

    def _connect(self, member: Member) -> NodeHandle:
        """Raises StoreError. No call goes out yet."""
        known = self._known
        require_reachable(member)
        if known is None:
            raise StoreError("the service of this node knows of no cluster any more")
        tcp = self._config.tcp or TcpClientConfig(streams=known.streams, connections=max(8, known.streams))
        remote = TcpStore(member.address, known.token, tcp, self._clock, member.incarnation)
        store = OwnNode(self._here, remote) if member.node == known.here else remote
        return NodeHandle(member.node, member.incarnation, member.label, store, remote)


class OwnNode(StoreWrapper):
    """The store of this node by its arena; its part of the directory is asked over ``remote``, which is all that is closed."""

    def __init__(self, inner: ArenaClient, remote: TcpStore) -> None:
        super().__init__(inner)
        self._remote = remote

    def close(self) -> None:
        self._remote.close()
