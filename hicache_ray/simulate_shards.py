"""An L3 of many nodes in virtual time, with the product's own logic: who is alive, which node is home to what, who tells whom, what a put
stores where, which reads are tried. Only the bytes, the links and the threads are not real.

A call's moments are those between which others may act: a put has read its homes' epochs, has stored, has announced; a clear has fenced,
has emptied, has fenced again. Every node has its own view of the others, from pings over the same links.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hicache_ray.errors import StoreError
from hicache_ray.simulate_content import EMPTY, Violation
from hicache_ray.simulate_node import Between, InlinePeers, Node, Reached
from hicache_ray.simulate_store import Clearing, Later, Reading, Right, StorageFailed, Writing
from hicache_ray.storage import sharded_reads, sharded_whole
from hicache_ray.storage.announcer import Announcer, AnnouncerConfig
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.members import Member, Members, MembersConfig, View
from hicache_ray.storage.peers import NodeHandle, ShardConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.sharded_writes import Writing as Put

#: Seconds between two pings of each other, and steps of the announcers.
BEAT = 0.25


class Client(ShardedStore):
    """The store as processes of one node open it, without threads, moment by moment."""

    def __init__(self, here: str, view: Callable[[], View], connect: Callable[[Member], NodeHandle], config: ShardConfig,
                 clock: Callable[[], float]) -> None:  # fmt: skip
        super().__init__(here, view, connect, config, clock)
        self._peers = InlinePeers(view, connect, config, clock)

    def write(self, ids: Sequence[bytes], sources: Sequence[tuple[int, bool]], timeout_s: float) -> Writing:
        """As :meth:`put` does it."""
        asked = self._asked(timeout_s)
        put = Put(asked, ids, sources, self.config)
        try:
            yield from put.steps()
            return put.visible()
        finally:
            self._say_late(asked)
            self._keep_late(put.late)

    def read(self, ids: Sequence[bytes], timeout_s: float) -> list[int | None]:
        targets = [[EMPTY] for _ in ids]
        got = sharded_reads.get(self._asked(timeout_s), ids, targets, self._guess())
        return [targets[i][0] if got >> i & 1 else None for i in range(len(ids))]

    def clearing(self, prefix: bytes, timeout_s: float) -> Clearing:
        asked = self._asked(timeout_s)
        return (yield from sharded_whole.clearing(asked, lambda: self._again(asked), prefix))


class Shards:
    """The simulator's L3 (:class:`~hicache_ray.simulate_store.Storage`). ``capacity``: objects per node."""

    def __init__(
        self, nodes: int, capacity: int, right: Right, clock: Callable[[], float], rng: random.Random, config: ShardConfig
    ) -> None:
        self.nodes = nodes
        self.verify = True
        self.counts = dict.fromkeys(("put", "get", "miss", "bad", "evicted", "late", "crashed"), 0)
        self._rng = rng
        self._clock = clock
        self.between = Between(rng)
        self.all = [Node(f"n{i}", f"rack{i // 2}", capacity, right, self.counts, clock, lambda: self.verify) for i in range(nodes)]
        self._named = {node.name: node for node in self.all}
        self._thorough: set[bytes] = set()
        for node in self.all:
            self._introduce(node)
        self.announcers = [self._announcer(node) for node in self.all]
        self.clients = [Client(n.name, lambda n=n: n.members.alive(), self._connect(n.name), config, clock) for n in self.all]  # type: ignore[misc]

    def _introduce(self, node: Node) -> None:
        for other in self.all:
            node.members.join(other.member)

    def _connect(self, here: str) -> Callable[[Member], NodeHandle]:
        def connect(member: Member) -> NodeHandle:
            node, at = self._named[member.node], member.incarnation
            store, index = (Reached(node, at, here, self.between, which) for which in (False, True))
            return NodeHandle(node.name, at, node.label, cast(Any, store), cast(Directory, index))

        return connect

    def _announcer(self, node: Node) -> Announcer:
        connect = self._connect(node.name)
        store, config = cast(Any, node), AnnouncerConfig()
        told = Announcer(
            lambda: node.member, store, node.members.alive, lambda m: connect(m).directory, config, self._clock, node.index
        )  # fmt: skip
        node.evicted = told.evicted
        return told

    # -- time -------------------------------------------------------------------------------------------------------------------------

    def start(self, later: Later) -> None:
        self.between.later = later

        def beat() -> None:
            self.beat()
            later(BEAT * (0.8 + 0.4 * self._rng.random()), beat)

        later(BEAT, beat)

    def beat(self) -> None:
        """All nodes that are up ping each other, and tell the homes what there is to tell."""
        for node, announcer in zip(self.all, self.announcers, strict=True):
            if not node.up:
                continue
            for other in self.all:
                if other is node:
                    continue
                if other.up and (node.name, other.name) not in self.between.cut and not self.between.late(node.name, other.name):
                    node.members.heard(other.name, str(other.incarnation))
                else:
                    node.members.missed(other.name)
            announcer.step()

    def agree(self) -> bool:
        """Whether every node is up and knows that all are."""
        everyone = tuple(node.member for node in sorted(self.all, key=lambda node: node.name))
        return all(node.up and node.members.alive().alive == everyone for node in self.all)

    # -- calls ------------------------------------------------------------------------------------------------------------------------

    def lookup(self, node: int, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, int]:
        return {tag: answer.hit for tag, answer in self.clients[node].lookup(keys, tags, timeout_s).items()}

    def write(self, node: int, ids: Sequence[bytes], contents: Sequence[int], whole: Sequence[bool], timeout_s: float) -> Writing:
        try:
            return (yield from self.clients[node].write(ids, list(zip(contents, whole, strict=True)), timeout_s))
        except StoreError as error:
            raise StorageFailed(f"injected, as it came to the caller: {error}") from error

    def read(self, node: int, ids: Sequence[bytes], timeout_s: float) -> Reading:
        yield
        try:
            got = self.clients[node].read(ids, timeout_s)
        except StoreError as error:
            raise StorageFailed(f"injected, as it came to the caller: {error}") from error
        missed = sum(content is None for content in got)
        self.counts["miss"] += missed
        self.counts["get"] += len(got) - missed
        return got

    def clear(self, node: int, prefix: bytes, timeout_s: float) -> Clearing:
        before = self.agree()
        self._thorough.discard(prefix)
        try:
            count = yield from self.clients[node].clearing(prefix, timeout_s)
        except StoreError as error:
            raise StorageFailed(f"injected, as it came to the caller: {error}") from error
        if before and self.agree():
            self._thorough.add(prefix)
        return count

    def whole(self, id: bytes) -> bool:
        return any(node.up and id in node.objects and node.objects[id].whole for node in self.all)

    def starting(self, prefix: bytes) -> int:
        return sum(id.startswith(prefix) for node in self.all for id in node.objects)

    def forgets(self, prefix: bytes) -> bool:
        return prefix in self._thorough

    # -- faults -----------------------------------------------------------------------------------------------------------------------

    def flip(self, rng: random.Random, count: int) -> None:
        for node, id in self._some(rng, count):
            node.objects[id].whole = False

    def lose(self, rng: random.Random, count: int) -> None:
        for node, id in self._some(rng, count):
            del node.objects[id]

    def _some(self, rng: random.Random, count: int) -> list[tuple[Node, bytes]]:
        everything = [(node, id) for node in self.all for id in node.objects]
        return rng.sample(everything, min(count, len(everything)))

    def crash(self, node: int) -> None:
        """It comes back as another incarnation after a while, now and then with the bytes that it had on its disk."""
        lost = self.all[node]
        self.take_down(lost, keep=self._rng.random() < 0.3)
        if self.between.later is not None:
            self.between.later(self._rng.choice([0.0, 0.5, 3.0]) * self._rng.random(), lambda: self.bring_up(lost))

    def take_down(self, node: Node, keep: bool) -> None:
        self.counts["crashed"] += node.up
        node.up = False
        if not keep:
            node.objects.clear()

    def bring_up(self, node: Node) -> None:
        if node.up:
            return
        node.incarnation += 1
        node.up, node.index, node.members = True, HomeIndex(clock=self._clock), Members(self._clock, MembersConfig())
        self._introduce(node)
        self.announcers[self.all.index(node)] = self._announcer(node)

    def split(self, one: int, other: int, apart: bool) -> None:
        pair = {(f"n{one}", f"n{other}"), (f"n{other}", f"n{one}")}
        if not apart:
            self.between.cut -= pair
            for way in pair:
                self.between.slow.pop(way, None)
        elif self._rng.random() < 0.5:
            self.between.cut |= pair
        else:
            self.between.slow |= dict.fromkeys(pair, self._rng.choice([0.1, 0.5]))

    def mend(self) -> None:
        self.between.cut.clear()
        self.between.slow.clear()
        for node in self.all:
            self.bring_up(node)

    # -- what holds -------------------------------------------------------------------------------------------------------------------

    def look(self, right: Right) -> None:
        for node in self.all:
            node.index.check()
            node.members.check()
            if len(node.objects) > node.capacity:
                raise Violation(f"node {node.name} holds {len(node.objects)} objects and may hold {node.capacity}")
            for id, stored in node.objects.items():
                if stored.whole:
                    right(id, stored.content)

    def found_everywhere(self) -> None:
        """When all is well again and everybody has had the time to say what there is: every object is found from every node."""
        if not self.agree():
            raise Violation("all nodes are up and reach each other, and not all of them know it")
        for node in self.all:
            ids = list(node.objects)
            for reader in self.all:
                there = sharded_reads.visible(cast(Any, self.clients[self.all.index(reader)]), ids, 1.0)
                if missing := len(ids) - there.bit_count():
                    raise Violation(f"{missing} of {len(ids)} objects of {node.name} are not found from {reader.name}")
