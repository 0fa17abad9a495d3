"""L3 in virtual time: what is stored where, how long calls take, and what goes wrong.

A port for the simulator, as :class:`hicache_ray.store.Store` is one for the product. A call takes time, so reads, writes and clears are
generators: what they do before their first ``yield`` happens when the call begins, what follows happens later. :class:`Shelf` is an L3 of
one mind; :class:`hicache_ray.simulate_shards.Shards` is one of many nodes, with the product's own logic. How long a call takes, and whether
it fails on its way there, is :class:`Link`'s.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hicache_ray.simulate_content import GARBAGE, Violation

#: What a write says: which of its objects are visible, bit by bit; what a read says: contents, None for a miss.
Writing: TypeAlias = Generator[None, None, int]
Reading: TypeAlias = Generator[None, None, list[int | None]]
#: What a clear says: how many objects there were.
Clearing: TypeAlias = Generator[None, None, int]
Later: TypeAlias = Callable[[float, Callable[[], object]], None]
#: Raises unless a content that is written is that of the object's id.
Right: TypeAlias = Callable[[bytes, int], None]


class StorageFailed(Exception):
    """A call to L3 has failed."""


@dataclass
class Stored:
    """One object: its content, and whether its checksum still fits (a torn write, a flipped bit)."""

    content: int
    node: int
    whole: bool = True


class Storage(Protocol):
    """What a world asks of its L3. ``node``: where the caller is. Calls raise :class:`StorageFailed`."""

    nodes: int
    counts: dict[str, int]
    verify: bool

    def start(self, later: Later) -> None:
        """The world (again) has a queue of events."""

    def lookup(self, node: int, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, int]:
        """Tag -> which of ``keys`` have an object with it. A hint: it may be broken, or out of reach."""

    def write(self, node: int, ids: Sequence[bytes], contents: Sequence[int], whole: Sequence[bool], timeout_s: float) -> Writing:
        """Store objects. One that is there stays as it is."""

    def read(self, node: int, ids: Sequence[bytes], timeout_s: float) -> Reading:
        """Read and verify objects."""

    def clear(self, node: int, prefix: bytes, timeout_s: float) -> Clearing:
        """Everything under a prefix goes, also what is being written when it begins."""

    def whole(self, id: bytes) -> bool:
        """Whether an object is there, its checksum fits, and it is found."""

    def starting(self, prefix: bytes) -> int:
        """How many objects there are under a prefix."""

    def forgets(self, prefix: bytes) -> bool:
        """Whether the last clear of a prefix has been everywhere: what was stored before it never comes back."""

    def flip(self, rng: random.Random, count: int) -> None:
        """Bits of some objects flip."""

    def lose(self, rng: random.Random, count: int) -> None:
        """Some objects are gone."""

    def crash(self, node: int) -> None:
        """A node loses what it has."""

    def split(self, one: int, other: int, apart: bool) -> None:
        """Two nodes do not reach each other, or do again."""

    def mend(self) -> None:
        """All links are well."""

    def look(self, right: Right) -> None:
        """The full check of all that is stored."""


@dataclass
class Shelf:
    """Objects of all nodes. Bytes stay with the node that wrote them; every node knows what all have. ``capacity``: objects per node."""

    nodes: int
    capacity: int
    right: Right = field(default=lambda id, content: None)
    verify: bool = True
    objects: OrderedDict[bytes, Stored] = field(default_factory=OrderedDict)
    used: list[int] = field(init=False)
    cleared: list[bytes] = field(default_factory=list)
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("put", "get", "miss", "bad", "evicted", "late"), 0))

    def __post_init__(self) -> None:
        self.used = [0] * self.nodes

    def start(self, later: Later) -> None:
        pass

    def lookup(self, node: int, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, int]:
        objects = self.objects
        return {tag: sum(1 << i for i, key in enumerate(keys) if key + tag in objects) for tag in tags}

    def write(self, node: int, ids: Sequence[bytes], contents: Sequence[int], whole: Sequence[bool], timeout_s: float) -> Writing:
        epoch = len(self.cleared)
        yield
        return sum(
            self._put(node, id, content, epoch, good) << i for i, (id, content, good) in enumerate(zip(ids, contents, whole, strict=True))
        )

    def read(self, node: int, ids: Sequence[bytes], timeout_s: float) -> Reading:
        yield
        return [self._get(node, id) for id in ids]

    def clear(self, node: int, prefix: bytes, timeout_s: float) -> Clearing:
        yield
        ids = [id for id in self.objects if id.startswith(prefix)]
        for id in ids:
            self._remove(id)
        self.cleared.append(prefix)
        return len(ids)

    def _put(self, node: int, id: bytes, content: int, epoch: int, whole: bool) -> bool:
        if any(id.startswith(prefix) for prefix in self.cleared[epoch:]):
            self.counts["late"] += 1
            return False
        if id in self.objects:
            return True
        while self.used[node] >= self.capacity:
            self._remove(next(i for i, o in self.objects.items() if o.node == node))
            self.counts["evicted"] += 1
        self.right(id, content)
        self.objects[id] = Stored(content, node, whole)
        self.used[node] += 1
        self.counts["put"] += 1
        return True

    def _get(self, node: int, id: bytes) -> int | None:
        """A broken object is found out and removed."""
        found = self.objects.get(id)
        if found is None or (node, found.node) in self.unreachable:
            self.counts["miss"] += 1
            return None
        if not found.whole:
            self.counts["bad"] += 1
            self._remove(id)
            return None if self.verify else GARBAGE
        self.objects.move_to_end(id)
        self.counts["get"] += 1
        return found.content

    def whole(self, id: bytes) -> bool:
        found = self.objects.get(id)
        return found is not None and found.whole

    def starting(self, prefix: bytes) -> int:
        return sum(id.startswith(prefix) for id in self.objects)

    def forgets(self, prefix: bytes) -> bool:
        return True

    def flip(self, rng: random.Random, count: int) -> None:
        for id in self._some(rng, count):
            self.objects[id].whole = False

    def lose(self, rng: random.Random, count: int) -> None:
        for id in self._some(rng, count):
            self._remove(id)

    def _some(self, rng: random.Random, count: int) -> list[bytes]:
        ids = list(self.objects)
        return rng.sample(ids, min(count, len(ids)))

    def crash(self, node: int) -> None:
        for id in [i for i, o in self.objects.items() if o.node == node]:
            self._remove(id)

    def split(self, one: int, other: int, apart: bool) -> None:
        pair = {(one, other), (other, one)}
        self.unreachable = self.unreachable | pair if apart else self.unreachable - pair

    def mend(self) -> None:
        self.unreachable.clear()

    def _remove(self, id: bytes) -> None:
        self.used[self.objects.pop(id).node] -= 1

    def look(self, right: Right) -> None:
        used = [0] * self.nodes
        for id, stored in self.objects.items():
            used[stored.node] += 1
            if stored.whole:
                right(id, stored.content)
        if used != self.used or max(used) > self.capacity:
            raise Violation(f"nodes hold {used} objects, count {self.used}, and may hold {self.capacity}")


@dataclass
class Link:
    """How one rank (or coordinator) reaches L3 now. ``slow``: a factor. ``cut``: nothing comes back. ``throws``: every call fails.

    ``hung``: share of calls that come back after their deadline.
    """

    slow: float = 1.0
    cut_until: float = 0.0
    throws_until: float = 0.0
    hung: float = 0.0
    torn: float = 0.0


@dataclass(frozen=True)
class Fate:
    """What becomes of one call: it ends after ``seconds``; items beyond ``done`` (a share) are not tried where it fails with ``error``."""

    seconds: float
    done: float = 1.0
    error: str = ""


def fate(link: Link, rng: random.Random, now: float, items: int, timeout_s: float) -> Fate:
    """Of a call over a link. No call fails before its time and none is silent for ever; some come back too late."""
    if link.throws_until > now:
        return Fate(0.001, rng.random(), "injected: the store raised")
    if link.cut_until > now:
        return Fate(timeout_s * (1.0 + rng.random()), 0.0, "injected: the link is cut")
    if link.hung and rng.random() < link.hung:
        return Fate(timeout_s * (1.0 + rng.random()), rng.choice([0.0, 1.0, 1.0]))
    seconds = (0.001 + 0.0004 * items) * (0.5 + rng.random()) * link.slow
    if seconds > timeout_s:
        return Fate(timeout_s * (0.98 + 0.1 * rng.random()), timeout_s / seconds, "injected: too slow")
    return Fate(seconds)
