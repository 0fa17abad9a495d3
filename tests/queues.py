"""Devices in virtual time for tests, and one rank's executor over one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from hicache_ray.copies_fake import Delay, FakeDevice
from hicache_ray.copies_queues import Order, Queue
from hicache_ray.executor import Executor, Rank
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Move, Outcome, Span, slots_array
from hicache_ray.spec import CacheSpec, Component, Tier
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.testing import full
from hicache_ray.testing_queues import fake_mover

PAGE = 4
SLOTS = 6
TAG = b"t" * 16


def slow(queue: Queue) -> Delay:
    """50 ms of virtual time for a piece of work of this queue, 1 ms for one of the other."""
    return lambda of, _: 0.05 if of is queue else 0.001


#: Where a case runs: on plain memory (None), or on devices with queues of which one is slow; each host layout once.
WHERE = pytest.mark.parametrize(
    ("layout", "queue"),
    [("page_first_direct", None), ("layer_first", Queue.COPY), ("page_first", Queue.COMPUTE), ("page_head", Queue.COPY)],
    ids=["plain memory", "slow copies", "slow engine", "slow copies, head first"],
)


def devices(queue: Queue | None, ranks: int = 1) -> tuple[FakeDevice, ...]:
    """One for each rank of a :class:`hicache_ray.testing.Stack`; none: its copies are done when they return."""
    return tuple(FakeDevice(slow(queue)) for _ in range(ranks)) if queue is not None else ()


def without_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """No queue waits for the other any more."""
    monkeypatch.setattr(Order, "_hold", lambda *_: None)


@dataclass
class Rig:
    """One rank with one component of ``layers`` layers; ``engine`` enqueues what a compute record does."""

    delay: Delay
    layers: int = 4
    layouts: tuple[str, str] = ("layer_first", "page_first")
    engine: Callable[[Compute], Outcome] = lambda _: Outcome()
    component: Component = field(init=False)

    def __post_init__(self) -> None:
        spec = CacheSpec("test", PAGE, (full(layers=self.layers),))
        self.component = spec.components[0]
        self.name = self.component.name
        self.device = FakeDevice(self.delay)
        self.mover = fake_mover(self.device)
        tiers = zip((Tier.DEVICE, Tier.HOST), self.layouts, strict=True)
        self.pools = {tier: Pool(self.component, PAGE, SLOTS, layout) for tier, layout in tiers}
        self.store = MemoryStore(1 << 20)
        rank = Rank(0, spec, {t: {self.name: pool} for t, pool in self.pools.items()}, {self.name: TAG})
        self.executor = Executor(rank, self.mover, self.store, lambda record: self.engine(record), lambda: 0.0)

    def compute(self, *slots: int, start: int = 0) -> None:
        """A record that reads and (from page ``start // PAGE`` on) writes these slots."""
        record = Compute(0, "r", start, np.zeros(len(slots) * PAGE - start, dtype=np.int32), 1, 0, {self.name: slots_array(slots)})
        assert self.executor.execute(record) == Outcome()

    def move(self, source: Tier, target: Tier, of: list[int], to: list[int], keys: tuple[bytes, ...] = ()) -> Outcome:
        return self.executor.execute(Move(0, "r", source, target, (Span(self.name, slots_array(of), slots_array(to), keys),)))

    def backup(self, of: int, to: int) -> None:
        assert self.move(Tier.DEVICE, Tier.HOST, [of], [to]).bits == (1,)

    def load(self, of: int, to: int) -> None:
        assert self.move(Tier.HOST, Tier.DEVICE, [of], [to]).bits == (1,)

    def rows(self, tier: Tier, slot: int) -> dict[str, np.ndarray]:
        """Views of a page's bytes, whatever the layout: field -> [layers, tokens, heads, row bytes]."""
        return {f.name: self.pools[tier].rows(f.name)[slot].numpy() for f in self.component.fields}

    def fill(self, tier: Tier, slot: int, pattern: int) -> None:
        """Now, past all queues."""
        for name, rows in self.rows(tier, slot).items():
            rows[...] = self.pattern(pattern, name)

    def enqueue_fill(self, slot: int, pattern: int) -> None:
        self.device.enqueue(Queue.COMPUTE, partial(self.fill, Tier.DEVICE, slot, pattern), "write")

    def is_filled(self, tier: Tier, slot: int, pattern: int, layer: int | None = None) -> bool:
        cut = slice(None) if layer is None else slice(layer, layer + 1)
        return all(np.array_equal(rows[cut], self.pattern(pattern, name)[cut]) for name, rows in self.rows(tier, slot).items())

    def pattern(self, seed: int, field_name: str) -> np.ndarray:
        shape = tuple(self.pools[Tier.HOST].rows(field_name)[0].shape)
        return np.random.default_rng((seed, ord(field_name[0]))).integers(0, 256, shape, dtype=np.uint8)

    def stored(self, pattern: int) -> bytes:
        return b"".join(self.pattern(pattern, f.name).tobytes() for f in self.component.fields)

    def labels(self) -> list[str]:
        return [done.label for done in self.device.log]

