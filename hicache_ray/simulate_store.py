"""L3 in virtual time: what is stored where, how long calls take, and what goes wrong.

A port for the simulator, as :class:`hicache_ray.store.Store` is one for the product: :class:`Shelf` says what lookup, put, get, drop and
clear do to the objects at the moment when they happen; how long a call takes, and whether it fails, is :class:`Link`'s. A model of
sharding and copies replaces :class:`Shelf` and nothing else.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache_ray.simulate_content import GARBAGE


@dataclass
class Stored:
    """One object: its content, and whether its checksum still fits (a torn write, a flipped bit)."""

    content: int
    node: int
    whole: bool = True


@dataclass
class Shelf:
    """Objects of all nodes. Bytes stay with the node that wrote them; every node knows what all have. ``capacity``: objects per node.

    ``right`` raises unless a content that is written is that of the object's id.
    """

    nodes: int
    capacity: int
    right: Callable[[bytes, int], None] = field(default=lambda id, content: None)
    verify: bool = True
    epoch: int = 0
    objects: OrderedDict[bytes, Stored] = field(default_factory=OrderedDict)
    used: list[int] = field(init=False)
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("put", "get", "miss", "bad", "evicted"), 0))

    def __post_init__(self) -> None:
        self.used = [0] * self.nodes

    def lookup(self, node: int, keys: Sequence[bytes], tag: bytes) -> int:
        """Which of ``keys`` have an object with this tag. A hint: it may be broken, or out of reach."""
        objects = self.objects
        return sum(1 << i for i, key in enumerate(keys) if key + tag in objects)

    def put(self, node: int, id: bytes, content: int, epoch: int, whole: bool = True) -> bool:
        """Store an object of a call that began in ``epoch``; True when it is visible. One that is there stays as it is."""
        if epoch != self.epoch:
            return False  # the store was cleared meanwhile
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

    def get(self, node: int, id: bytes) -> int | None:
        """The content as it was read and verified; None for a miss. A broken object is found out and removed."""
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

    def drop(self, id: bytes) -> bool:
        """Remove an object; whether it was there."""
        if id not in self.objects:
            return False
        self._remove(id)
        return True

    def clear(self) -> None:
        """Everything goes, also what is being written now."""
        self.objects.clear()
        self.used = [0] * self.nodes
        self.epoch += 1

    def crash(self, node: int) -> None:
        """A node loses what it has."""
        for id in [i for i, o in self.objects.items() if o.node == node]:
            self._remove(id)

    def _remove(self, id: bytes) -> None:
        self.used[self.objects.pop(id).node] -= 1

    def some(self, rng: random.Random, count: int) -> list[bytes]:
        """Up to ``count`` objects by chance."""
        ids = list(self.objects)
        return rng.sample(ids, min(count, len(ids)))


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
