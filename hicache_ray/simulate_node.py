"""One node of a simulated L3: a store of contents, a home index, a view of who is alive, and links to it that may be slow or cut."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.simulate_content import GARBAGE
from hicache_ray.simulate_store import Later, Right, Stored
from hicache_ray.storage import bits
from hicache_ray.storage.directory import HomeIndex
from hicache_ray.storage.members import Member, Members, MembersConfig
from hicache_ray.storage.peers import Peer, Peers
from hicache_ray.store import Answer

T = TypeVar("T")


class InlineLane:
    """In place of threads that wait on a node: the call is made at once, by whoever asks."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call())
        except StoreError as error:
            future.set_exception(error)
        return future

    def close(self, timeout_s: float) -> None:
        pass

    def busy(self) -> bool:
        return False


class InlinePeers(Peers):
    """Peers without threads."""

    def of(self, member: Member) -> Peer:
        peer = super().of(member)
        if not isinstance(peer.lane, InlineLane):
            peer.lane = InlineLane()  # type: ignore[assignment]
        return peer


@dataclass
class Node:
    """``objects``: least recently used first. ``evicted`` is told what goes. ``members``: the cluster as this node sees it."""

    name: str
    label: str
    capacity: int
    right: Right
    counts: dict[str, int]
    clock: Callable[[], float]
    verify: Callable[[], bool]
    incarnation: int = 1
    up: bool = True
    objects: OrderedDict[bytes, Stored] = field(default_factory=OrderedDict)
    index: HomeIndex = field(init=False)
    evicted: Callable[[Sequence[bytes]], None] = lambda ids: None
    members: Members = field(init=False)

    def __post_init__(self) -> None:
        self.members, self.index = Members(self.clock, MembersConfig()), HomeIndex(clock=self.clock)

    @property
    def member(self) -> Member:
        return Member(self.name, str(self.incarnation), self.name, self.label)

    # -- what a store does; sources are (content, whole), targets lists of one -------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        return {tag: Answer(hit=sum(1 << i for i, key in enumerate(keys) if key + tag in self.objects)) for tag in tags}

    def put(self, ids: Sequence[bytes], sources: Sequence[tuple[int, bool]], timeout_s: float) -> int:
        mine = set(ids)
        for id, (content, whole) in zip(ids, sources, strict=True):
            if id in self.objects:
                continue
            victim = next((i for i in self.objects if i not in mine), None) if len(self.objects) >= self.capacity else None
            if victim is not None:
                del self.objects[victim]
                self.evicted([victim])
                self.counts["evicted"] += 1
            if len(self.objects) < self.capacity:
                self.right(id, content)
                self.objects[id] = Stored(content, 0, whole)
                self.counts["put"] += 1
        return bits.pack([id in self.objects for id in ids])

    def get(self, ids: Sequence[bytes], targets: Sequence[list[int]], timeout_s: float) -> int:
        out = 0
        for i, (id, target) in enumerate(zip(ids, targets, strict=True)):
            found = self.objects.get(id)
            if found is not None and not found.whole:
                self.counts["bad"] += 1
                if self.verify():
                    del self.objects[id]
                    continue
            if found is not None:
                self.objects.move_to_end(id)
                target[0] = found.content if found.whole else GARBAGE
                out |= 1 << i
        return out

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        return bits.pack([self.objects.pop(id, None) is not None for id in ids])

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        gone = [id for id in self.objects if id.startswith(prefix)]
        for id in gone:
            del self.objects[id]
        return len(gone)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        return iter([id for id in self.objects if id.startswith(prefix)])

    def close(self) -> None:
        pass


class Between:
    """The links between nodes. ``cut``: nothing comes back. ``slow``: share of calls whose answer comes too late, of those that only tell a
    home something sometimes the call as well."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cut: set[tuple[str, str]] = set()
        self.slow: dict[tuple[str, str], float] = {}
        self.later: Later | None = None

    def late(self, one: str, other: str) -> bool:
        share = self.slow.get((one, other), 0.0)
        return bool(share) and self.rng.random() < share


#: What a call may do long after its caller has given it up.
TELLING = ("announce", "withdraw")


class Reached:
    """A node's store, or its home index, as an incarnation of it is reached from another node (or from its own)."""

    def __init__(self, node: Node, incarnation: str, here: str, between: Between, index: bool) -> None:
        self._node, self._incarnation, self._here, self._between, self._index = node, incarnation, here, between, index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            node, between = self._node, self._between
            if node.name != self._here and (self._here, node.name) in between.cut:
                raise StoreTimeout(f"injected: {node.name} is cut off from {self._here}")
            self._there()
            if not between.late(self._here, node.name):
                return self._do(name, args)
            if name not in TELLING or between.later is None or between.rng.random() < 0.5:
                self._do(name, args)
            else:
                between.later(between.rng.random(), lambda: self._do_late(name, args))
            raise StoreTimeout(f"injected: {node.name} answers {self._here} too late")

        return call

    def _there(self) -> None:
        if not self._node.up or str(self._node.incarnation) != self._incarnation:
            raise StoreError(f"injected: there is no {self._node.name} of incarnation {self._incarnation}")

    def _do(self, name: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._node.index if self._index else self._node, name)(*args)

    def _do_late(self, name: str, args: tuple[Any, ...]) -> None:
        if self._node.up and str(self._node.incarnation) == self._incarnation:
            self._do(name, args)

    def close(self) -> None:
        pass
