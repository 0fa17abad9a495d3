"""The stores that the conformance suite is run on: one entry in ``STORES`` each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from hicache_ray.storage import (
    ArenaClient,
    ArenaConfig,
    ArenaService,
    ChecksumStore,
    ClientConfig,
    CountingStore,
    DiskConfig,
    DiskStore,
    FaultyStore,
    LatencyStore,
    LocalStore,
    MemoryStore,
    NodeConfig,
    NodeStore,
    StorageNode,
    TieredStore,
    WriteBehind,
    open_store,
)  # fmt: skip
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.checked import TRAILER_BYTES
from hicache_ray.storage.conformance import PAGE, Abilities, Clock, Eviction, Gate
from hicache_ray.storage.copying import as_array, checksum
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.movers import Batch, Piece
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.spares import SHARE
from hicache_ray.storage.tcp import TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.store import Answer, Bytes, Store
from tests.storage.cluster import Cluster
from tests.storage.services import Process

LEASE_S = 10.0


@dataclass(frozen=True)
class Subject:
    """``make(capacity_bytes)`` gives a store that holds nothing. ``close``: after the last one."""

    make: Callable[[int], AbstractContextManager[Store]]
    abilities: Abilities
    close: Callable[[], None] = lambda: None


def memory() -> Subject:
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        yield MemoryStore(capacity_bytes, LEASE_S, clock)

    return Subject(make, Abilities(clock=clock))


def wrapped() -> Subject:
    """The wrappers that change nothing, around a memory store."""
    inner = memory()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        with inner.make(capacity_bytes) as store:
            yield LatencyStore(FaultyStore(CountingStore(store)), 1e-3, 1e-12, wait=lambda _: None)

    return Subject(make, inner.abilities)


class Unverified(MemoryStore):
    """Has no checksums: serves what is there."""

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        with self._locked():
            for item in self._objects.values():
                item.checksum = checksum(as_array(memoryview(item.data)))
        return super().get(ids, targets, timeout_s)


def checked() -> Subject:
    """Checksums around a store that has none."""
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        yield ChecksumStore(Unverified(capacity_bytes, LEASE_S, clock))

    return Subject(make, Abilities(clock=clock, overhead_bytes=TRAILER_BYTES))


class Staged(MemoryStore):
    """A memory store whose puts take time: reserve, then (at ``gate``) the copy, then seal."""

    gate: Gate | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reserved: dict[bytes, int] = {}
        self._stage = threading.RLock()

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        with self._stage:
            found = super().lookup(keys, tags, timeout_s)
            waits = {tag: sum(1 << i for i, key in enumerate(keys) if key + tag in self.reserved) for tag in tags}
            return {tag: replace(answer, pending=waits[tag] & ~answer.hit) for tag, answer in found.items()}

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        if self.gate is None:
            return super().put(ids, sources, timeout_s)
        with self._stage:
            mine = {id: len(source) for id, source in zip(ids, sources, strict=True) if id not in self.reserved}
            self.reserved.update(mine)
        self.gate.stop()
        with self._stage:
            kept = [i for i, id in enumerate(ids) if id in mine and id in self.reserved]
            for id in mine:
                self.reserved.pop(id, None)
            done = super().put([ids[i] for i in kept], [sources[i] for i in kept], timeout_s)
            return sum(1 << i for n, i in enumerate(kept) if done >> n & 1)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        with self._stage:
            for id in ids:
                self.reserved.pop(id, None)
            return super().drop(ids, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        with self._stage:
            for id in [id for id in self.reserved if id.startswith(prefix)]:
                del self.reserved[id]
            return super().clear(timeout_s, prefix)

    def stats(self, timeout_s: float) -> Any:
        with self._stage:
            found = super().stats(timeout_s)
            return replace(found, used_bytes=found.used_bytes + sum(self.reserved.values()))


@contextmanager
def hold_staged(store: Any, gate: Gate) -> Iterator[None]:
    store.gate = gate
    yield
    store.gate = None


def staged(kind: type[Staged] = Staged) -> Subject:
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        yield kind(capacity_bytes, LEASE_S, clock)

    return Subject(make, Abilities(clock=clock, hold=hold_staged))


@contextmanager
def hold_client(store: Any, gate: Gate) -> Iterator[None]:
    """A put of an ArenaClient stops between its reservation and its copies."""
    copier = store._copier
    run, run_one = copier.run, copier.run_one

    def held(batch: Batch, *args: Any) -> Any:
        if batch.of_source:
            gate.stop()
        return run(batch, *args)

    def one_held(piece: Piece, of_source: bool, stop: Callable[[], bool]) -> Any:
        if of_source:
            gate.stop()
        return run_one(piece, of_source, stop)

    copier.run, copier.run_one = held, one_held
    yield
    del copier.run, copier.run_one


def arena(capacity_bytes: int, name: str = "conf") -> ArenaConfig:
    return ArenaConfig(f"{name}-{os.getpid()}", capacity_bytes, slab_bytes=PAGE, io_timeout_s=1.0, lease_s=LEASE_S)


def in_thread(share: int = SHARE) -> Subject:
    """The service in a thread of this process, on one clock with its client. ``share``: of the arena that spare slots may take."""
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        with ArenaService(arena(capacity_bytes), clock) as service:
            service.arena.index.spares.share = share
            # Small slices: the clock, and so the end of a lease, is looked at between any two pages.
            client = ArenaClient(service.address, ClientConfig(slice_bytes=PAGE, kernel="off"), clock=clock)
            try:
                yield client
                service.check()
            finally:
                client.close()

    return Subject(make, Abilities(clock=clock, gets_by_lease=True, hold=hold_client))


def with_spares() -> Subject:
    """Puts of one object go to spare slots, as in large arenas: of one that is full, the oldest object goes a put earlier."""
    inner = in_thread(share=4)
    return Subject(inner.make, replace(inner.abilities, eviction=Eviction.APPROXIMATE, exact_room=False))


def checked_arena() -> Subject:
    """Checksums around an arena: a page and its trailer need a slot of the next size, so its room is not exact."""
    inner = in_thread()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        with inner.make(2 * capacity_bytes) as store:
            yield ChecksumStore(store)

    def hold(store: Any, gate: Gate) -> AbstractContextManager[None]:
        return hold_client(store.inner, gate)

    return Subject(make, replace(inner.abilities, overhead_bytes=TRAILER_BYTES, exact_room=False, hold=hold))


def in_process() -> Subject:
    """The service in another process, started once: every rule gets an emptied store."""
    started: list[Process] = []

    def close() -> None:
        while started:
            started.pop().close()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        if not started:
            started.append(Process(arena(capacity_bytes, "conf-process")))
        client = ArenaClient(started[0].address)
        try:
            yield client
        finally:
            client.close()
        with closing(ArenaClient(started[0].address)) as last:
            last.clear(10.0)
            if last.stats(10.0).used_bytes:  # lent to a handle that was closed: that takes lease_s to run out
                close()

    return Subject(make, Abilities(hold=hold_client), close)


def sharded(config: ShardConfig, capacities: Sequence[float], here: str = "n0") -> Subject:
    """A client of a cluster in this process. ``capacities``: of each node, in shares of what is asked for.

    Leases run out on the nodes' clock; the client's own deadlines are real.
    """
    clock = Clock()
    first: list[MemoryStore] = []

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        cluster = Cluster([int(capacity_bytes * share) for share in capacities], clock=clock, kind=Staged)
        first[:] = [cluster.nodes["n0"].inner]
        try:
            yield cluster.client(here, config)
            cluster.check()
        finally:
            cluster.close()

    def hold(store: Any, gate: Gate) -> AbstractContextManager[None]:
        return hold_staged(first[0], gate)

    if here == "n0":
        return Subject(make, Abilities(clock=clock, hold=hold))
    # Through a directory: what was evicted is found until somebody tells it or asks in vain, what was reserved is not found, and a miss
    # is no node's miss.
    return Subject(make, Abilities(clock=clock, eviction=Eviction.APPROXIMATE, counts=False))


@contextmanager
def local_store(capacity_bytes: int, clock: Clock) -> Iterator[LocalStore]:
    node = NodeStore(Arena(arena(capacity_bytes, "conf-local"), clock))
    try:
        with closing(LocalStore(node, clock=clock)) as store:
            yield store
            node.check()
    finally:
        node.close()


def local() -> Subject:
    """The arena of this process, without a socket."""
    clock = Clock()
    return Subject(lambda capacity_bytes: local_store(capacity_bytes, clock), Abilities(clock=clock))


class Remote(TcpStore):
    """Over tcp, but for the damage of tests, which is done where the bytes are."""

    def __init__(self, server: TcpServer, store: MemoryStore | LocalStore) -> None:
        super().__init__(server.address, server.config.token)
        self.damage = store.damage


def tcp_memory() -> Subject:
    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        memory = MemoryStore(capacity_bytes, LEASE_S)
        with TcpServer(memory, TcpConfig("secret")) as server, closing(Remote(server, memory)) as remote:
            yield remote
        memory.check()

    return Subject(make, Abilities(lends=False))


def tcp_arena() -> Subject:
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        with (
            local_store(capacity_bytes, clock) as store,
            TcpServer(store, TcpConfig("secret")) as server,
            closing(Remote(server, store)) as remote,
        ):
            yield remote

    return Subject(make, Abilities(lends=False))


def over_nodes(placement: str) -> Subject:
    """Three storage nodes in this process, by sockets as a rank opens them; bytes stay with the first one, or lie on all.

    Leases run out on the nodes' clock; on the tcp plane time is real.
    """
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        rest = PAGE if placement == "writer" else capacity_bytes
        with small_nodes([capacity_bytes, rest, rest], ShardConfig(placement), clock) as nodes:
            with closing(open_store(nodes[0].address.socket, clock=clock)) as store:
                yield store
            for node in nodes:
                node.check()

    writer = placement == "writer"
    abilities = Abilities(clock=clock if writer else None, exact_room=False, eviction=Eviction.APPROXIMATE, counts=writer, lends=writer)
    return Subject(make, replace(abilities, hold=hold_here if writer else None))


def hold_here(store: Any, gate: Gate) -> AbstractContextManager[None]:
    return hold_client(store._here, gate)


@contextmanager
def small_nodes(capacities: Sequence[int], shard: ShardConfig, clock: Clock) -> Iterator[list[StorageNode]]:
    """They know each other, and nothing is moving."""
    with ExitStack() as closing_all:
        nodes = []
        for i, capacity in enumerate(capacities):
            config = NodeConfig(f"n{i}", arena(capacity, f"conf-node{i}"), token="secret", shard=shard)
            nodes.append(closing_all.enter_context(StorageNode(config, clock, background=False)))
        for node in nodes:
            node.set_members([other.address.member for other in nodes])
        clock.advance(nodes[0].config.members.settle_s)
        yield nodes


def disk() -> Subject:
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        with TemporaryDirectory(prefix="hicache-conf-") as folder:
            room = capacity_bytes + (64 << 10)  # the cap counts the store's own records too
            config = DiskConfig(folder, room, segment_bytes=capacity_bytes, lease_s=LEASE_S)
            with closing(DiskStore(config, clock, StagedOs())) as store:
                yield store
                store.check()

    return Subject(make, Abilities(clock=clock, lends=False, hold=lambda store, gate: hold_staged(store._port, gate)))


class StagedOs(DiskOs):
    """Writes of objects stop at ``gate``: their slots are reserved, and they have no record yet."""

    gate: Gate | None = None

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if self.gate is not None and len(buffer) >= PAGE:
            self.gate.stop()
        return super().pwrite(descriptor, buffer, offset)


def tiered(in_front: bool) -> Subject:
    """All room on one side: the other refuses everything. Nothing is written behind, which would count as a use."""
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        front, back = (Staged(room, LEASE_S, clock) for room in ((capacity_bytes, 1) if in_front else (1, capacity_bytes)))
        with closing(TieredStore(front, back, WriteBehind(front, back, 1))) as store:
            yield store
            store.check()

    def hold(store: Any, gate: Gate) -> AbstractContextManager[None]:
        return hold_staged(store.front if in_front else store.back, gate)

    return Subject(make, Abilities(clock=clock, lends=in_front, hold=hold))


#: A store that is added here is held to every rule.
STORES: Mapping[str, Callable[[], Subject]] = {
    "memory": memory,
    "wrapped": wrapped,
    "staged": staged,
    "checksums": checked,
    "checksums around an arena": checked_arena,
    "arena in a thread": in_thread,
    "arena with spare slots": with_spares,
    "arena in a process": in_process,
    "arena without a socket": local,
    "disk": disk,
    "tiered, in front": lambda: tiered(True),
    "tiered, behind": lambda: tiered(False),
    "tcp over memory": tcp_memory,
    "tcp over an arena": tcp_arena,
    "sharded": lambda: sharded(ShardConfig(), [1, 0, 0]),
    "three nodes": lambda: over_nodes("writer"),
    "three nodes, bytes on all": lambda: over_nodes("home"),
    "sharded, all of it elsewhere": lambda: sharded(ShardConfig(placement="home"), [1], here="a client without a store"),
}


@contextmanager
def slow_gets(store: Any, pause: Callable[[], None]) -> Iterator[None]:
    """The copies of every get of an ArenaClient are followed by ``pause()`` before they are looked at."""
    copier = store._copier
    run, run_one = copier.run, copier.run_one

    def slow(batch: Batch, *args: Any) -> Any:
        sums = run(batch, *args)
        if not batch.of_source:
            pause()
        return sums

    def one_slow(piece: Piece, of_source: bool, stop: Callable[[], bool]) -> Any:
        found = run_one(piece, of_source, stop)
        if not of_source:
            pause()
        return found

    copier.run, copier.run_one = slow, one_slow
    yield
    del copier.run, copier.run_one
