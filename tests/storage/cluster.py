"""Nodes in this process: each a store and a home index, with a clock, members and faults that a test decides about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.errors import StoreError
from hicache_ray.storage import FaultyStore, MemoryStore
from hicache_ray.storage.announcer import Announcer, AnnouncerConfig
from hicache_ray.storage.conformance import Clock, Gate
from hicache_ray.storage.directory import ALWAYS, Directory, HomeIndex
from hicache_ray.storage.members import Member, Members, MembersConfig
from hicache_ray.storage.peers import NodeHandle, ShardConfig
from hicache_ray.storage.repair import RepairConfig, Repairer
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Store, StoreStats

CAPACITY = 1 << 22
#: Real seconds for calls that must not time out on a busy machine.
LONG_S = 20.0


@dataclass
class Node:
    """``up`` False: every call fails at once. ``hung``: calls wait there, and fail. ``gates``: a call of that name stops there first."""

    name: str
    label: str
    inner: MemoryStore
    incarnation: str = "1"
    up: bool = True
    index: HomeIndex = field(default_factory=HomeIndex)
    hung: threading.Event | None = None
    calls: int = 0
    waiting: int = 0
    most_waiting: int = 0
    gates: dict[str, Gate] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    fail: Callable[[str], bool] = lambda call: False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_for: list[Callable[[], None]] = []
        self.store = FaultyStore(self.inner, wait=self.waits.append)

    @property
    def member(self) -> Member:
        return Member(self.name, self.incarnation, f"mem:{self.name}", self.label)

    def answer(self, call: str) -> None:
        """What every call meets first."""
        if self.fail(call):
            raise StoreError(f"injected: {call} of {self.name} fails")
        with self._lock:
            self.calls += 1
            hung, gate = self.hung, self.gates.pop(call, None)
            self._waiting_for += [event.set for event in [hung] if event] + [gate.open for gate in [gate] if gate]
        if gate is not None:
            gate.stop()
        if hung is not None:
            self._count(1)
            hung.wait(LONG_S)
            self._count(-1)
        if not self.up or hung is not None:
            raise StoreError(f"{self.name} is down")

    def free(self) -> None:
        """Whatever still waits here goes on: a test that failed must not be the next one's fault."""
        with self._lock:
            for go_on in self._waiting_for:
                go_on()

    def _count(self, more: int) -> None:
        with self._lock:
            self.waiting += more
            self.most_waiting = max(self.most_waiting, self.waiting)


class Reached(StoreWrapper):
    """The store of a node as another process reaches it: closing it closes nothing. It ends with the incarnation."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.store)
        self.node, self.incarnation = node, node.incarnation

    def __getattribute__(self, name: str) -> object:
        if name in ("lookup", "put", "get", "lease", "drop", "scan", "clear", "describe", "described", "stats"):
            node: Node = object.__getattribute__(self, "node")
            if object.__getattribute__(self, "incarnation") != node.incarnation:
                raise StoreError(f"{node.name} was restarted")
            node.answer(name)
        return object.__getattribute__(self, name)

    def close(self) -> None:
        pass


class ReachedIndex:
    """The same for its home index."""

    def __init__(self, node: Node) -> None:
        self.node, self.incarnation = node, node.incarnation

    def epoch(self, timeout_s: float) -> int:
        return self._index("epoch").epoch(timeout_s)

    def announce(self, holder: str, ids: Sequence[bytes], timeout_s: float, since: int = ALWAYS) -> int:
        return self._index("announce").announce(holder, ids, timeout_s, since)

    def withdraw(self, holder: str, ids: Sequence[bytes], timeout_s: float) -> None:
        self._index("withdraw").withdraw(holder, ids, timeout_s)

    def where(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Mapping[str, int]]:
        return self._index("where").where(keys, tags, timeout_s)

    def holders(self, ids: Sequence[bytes], timeout_s: float) -> Sequence[tuple[str, ...]]:
        return self._index("holders").holders(ids, timeout_s)

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        return self._index("forget").forget(prefix, timeout_s)

    def forget_ids(self, ids: Sequence[bytes], timeout_s: float) -> int:
        return self._index("forget_ids").forget_ids(ids, timeout_s)

    def forgotten(self, seconds: float, timeout_s: float) -> Sequence[tuple[bytes, float]]:
        return self._index("forgotten").forgotten(seconds, timeout_s)

    def _index(self, call: str) -> HomeIndex:
        self.node.answer(call)
        if self.incarnation != self.node.incarnation:
            raise StoreError(f"{self.node.name} was restarted")
        return self.node.index


class Cluster:
    """``capacities``: bytes of each node, named n0, n1, ... All see the same members."""

    def __init__(
        self, capacities: Sequence[int], labels: Sequence[str] = (), clock: Clock | None = None, kind: type[MemoryStore] = MemoryStore
    ) -> None:
        self.clock = clock or Clock()
        self.members = Members(self.clock, MembersConfig())
        self.nodes: dict[str, Node] = {}
        for i, capacity in enumerate(capacities):
            inner, index = kind(capacity, 10.0, self.clock), HomeIndex(clock=self.clock)
            self.nodes[f"n{i}"] = Node(f"n{i}", labels[i] if labels else "", inner, index=index)
        for node in self.nodes.values():
            self.members.join(node.member)
        self.clock.advance(self.members.config.settle_s)
        self.clients: list[ShardedStore] = []
        self.announcers = {name: self._announcer(node) for name, node in self.nodes.items()}

    def client(self, here: str, config: ShardConfig | None = None, clock: Callable[[], float] | None = None) -> ShardedStore:
        opened = ShardedStore(here, self.members.alive, self.connect, config, clock or time.monotonic)
        self.clients.append(opened)
        return opened

    def repairer(self, here: str, config: RepairConfig | None = None, shard: ShardConfig | None = None) -> Repairer:
        """As the node runs it, for a test to step."""
        node, announcer = self.nodes[here], self.announcers[here]

        def read(id: bytes, timeout_s: float) -> bytes | None:
            with node.store.lease([id], timeout_s) as lent:
                return None if lent.views[0] is None else bytes(lent.views[0])

        client = self.client(here, shard or ShardConfig(replicas=2))
        told, config = node.index.knows, config or RepairConfig()
        ready, caught, heard_at = announcer.announced, announcer.caught, announcer.heard_at
        return Repairer(client, node.store, read, self.members.alive, ready, told, caught, heard_at, config, self.clock)

    def connect(self, member: Member) -> NodeHandle:
        node = self.nodes[member.node]
        if not node.up or node.incarnation != member.incarnation:
            raise StoreError(f"no {member.holder} is there")
        return NodeHandle(node.name, node.incarnation, node.label, Reached(node), ReachedIndex(node))

    def lose(self, name: str) -> None:
        """The node is down, and everybody has noticed."""
        self.nodes[name].up = False
        while self.members.alive().member(name):
            self.members.missed(name)

    def heal(self, name: str) -> None:
        """It was cut off, and is back as it was."""
        self.nodes[name].up = True
        self.members.heard(name, self.nodes[name].incarnation)

    def restart(self, name: str, keep_bytes: bool = True, away_s: float = 0.0) -> None:
        """A new incarnation with an empty home index, which was not there for ``away_s``."""
        node = self.nodes[name]
        node.incarnation = str(int(node.incarnation) + 1)
        node.index, node.up = HomeIndex(clock=self.clock), True
        if not keep_bytes:
            node.inner.clear(1.0)
        self.announcers[name] = self._announcer(node, away_s)
        self.members.join(node.member)

    def announce(self) -> None:
        """Every living holder says all that it has to say."""
        for name, announcer in self.announcers.items():
            if self.nodes[name].up:
                announcer.step()
                assert announcer.idle()

    def settle(self) -> None:
        """Time passes, until nothing is moving."""
        self.clock.advance(self.members.config.settle_s)

    def home(self, name: bytes) -> str:
        member = self.members.alive().home(name[8:16])
        assert member is not None
        return member.node

    def check(self) -> None:
        self.members.check()
        for node in self.nodes.values():
            node.index.check()
            node.inner.check()

    def close(self) -> None:
        for node in self.nodes.values():
            node.free()
        for client in self.clients:
            client.close()

    def total(self) -> StoreStats:
        return self.clients[0].stats(LONG_S)

    def _announcer(self, node: Node, away_s: float = 0.0) -> Announcer:
        def directory(member: Member) -> Directory:
            return self.connect(member).directory

        store: Store = node.store
        return Announcer(lambda: node.member, store, self.members.alive, directory, AnnouncerConfig(), self.clock, node.index, away_s)
