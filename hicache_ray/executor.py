"""Performs what the core decides, for one rank: moves pages between its pools and L3, digests them, hands compute records to the engine.

The same code runs in a rank actor and in the test kit. It raises only when the group is lost; whatever else failed is in the outcome, and
a bit that is not set says that the page has not arrived. On a device with queues of its own a page "has arrived" when the copy is enqueued:
whatever uses it afterwards, on the device or here, is held back until it is there (:mod:`hicache_ray.copies_queues`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from hicache_ray.copies import Copier, Mover
from hicache_ray.copies_queues import Leg
from hicache_ray.digest import digest_pages
from hicache_ray.errors import GroupLost, HiCacheError, StoreError, StoreTimeout
from hicache_ray.keys import is_other, page_of, tagged, writer
from hicache_ray.layout import CANONICAL
from hicache_ray.pool import Pool, Pools
from hicache_ray.records import Compute, Digest, Move, Outcome, Record, Slots, Span, slots_array
from hicache_ray.spec import CacheSpec, Shard, Tier
from hicache_ray.store import Store

#: Bytes that a staging pool may hold where the host layout is not that of a stored object.
STAGING_BYTES = 32 << 20


@dataclass(frozen=True)
class Rank:
    """What one rank is: its place in the group, its pools, its tags (component -> tag). ``batch``: most objects of one call of
    the store."""

    rank: int
    spec: CacheSpec
    pools: Pools
    tags: Mapping[str, bytes]
    batch: int = 128


class Executor:
    """Executes records for one rank. ``engine``: runs compute records. ``store``: None where L3 is not attached. ``clock``: seconds.

    Raises :class:`~hicache_ray.errors.ConfigError` where a device pool and its host pool do not fit each other, or the io backend.
    """

    def __init__(
        self, rank: Rank, mover: Mover, store: Store | None, engine: Callable[[Compute], Outcome], clock: Callable[[], float]
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._mover = mover
        self._engine = engine
        self.store = store
        ways = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
        # Made now, so that pools that do not fit each other are refused at start and not at the first copy.
        self._copiers = {(of, to, c.name): self._copier(of, to, c.name) for of, to in ways for c in rank.spec.components}
        self._staging: dict[str, tuple[Pool, Copier, Copier]] = {}
        for component in rank.spec.components:
            host = rank.pools[Tier.HOST][component.name]
            if not host.contiguous_pages:
                self._staging[component.name] = self._stage(host)
        self._staging_locks = {name: Lock() for name in self._staging}
        if mover.order is not None:
            self._attach()

    def _attach(self) -> None:
        """Pools of a device with queues: what cannot be copied is refused now, and what an earlier executor has enqueued is done."""
        order = self._mover.order
        assert order is not None
        for tier in (Tier.DEVICE, Tier.HOST):
            for name, pool in self._rank.pools[tier].items():
                order.attach((tier, name), pool.slots, pool.geometry.layers)
                if tier is Tier.HOST:
                    order.device.accept(pool.buffer.data_ptr())
        order.drain()

    def _stage(self, host: Pool) -> tuple[Pool, Copier, Copier]:
        slots = max(1, min(host.slots, STAGING_BYTES // host.page_bytes))
        pool = Pool(host.component, self._rank.spec.page_size, slots, CANONICAL)
        return pool, Copier(host, pool, self._mover), Copier(pool, host, self._mover)

    def execute(self, record: Record) -> Outcome:
        """Do what the record says; partial success is in the bits, trouble in ``error``."""
        try:
            if isinstance(record, Compute):
                with self._computing(record):
                    return self._engine(record)
            if isinstance(record, Digest):
                device = self._rank.pools[Tier.DEVICE]
                for component, slots in record.slots.items():
                    self.settle(Tier.DEVICE, component, slots)
                return Outcome(digests={c: digest_pages(device[c], slots.tolist()) for c, slots in record.slots.items()})
            if isinstance(record, Move):
                return self._move(record)
        except GroupLost:
            raise
        except HiCacheError as error:
            return Outcome(error=f"rank {self._rank.rank}: {error}")
        return Outcome(error=f"a rank does not execute {type(record).__name__} records")

    def _move(self, record: Move) -> Outcome:
        if Tier.STORAGE not in (record.source, record.target):
            self._cross(replace(record, spans=tuple(self._part(span) for span in record.spans)))
            return Outcome(bits=tuple((1 << len(s)) - 1 for s in record.spans))
        store = self.store  # it may be taken away meanwhile; then it is closed, and says so
        if store is None:
            return Outcome(error="storage is not attached")
        act = self._read if record.source is Tier.STORAGE else self._write
        until = self._clock() + record.timeout_s
        bits, error = [], ""
        for span in record.spans:
            mine = self._own(span)
            if record.target is Tier.STORAGE:
                mine = [i for i in mine if self._writes(span.component, span.keys[i], record.turn)]
            done = sorted(set(range(len(span))) - set(mine))  # for others to do
            try:
                if not error and mine:
                    act(store, span, mine, until, done)
            except StoreError as failure:
                error = str(failure)  # what moved before it has moved; the rest is not tried, the deadline is one for all
            bits.append(sum(1 << i for i in done))
        return Outcome(bits=tuple(bits), error=error)

    def _own(self, span: Span) -> list[int]:
        """Which items of a span are this rank's."""
        spec, me = self._rank.spec, self._rank.rank
        component = spec[span.component]
        if component.shard is not Shard.CONTEXT:
            return list(range(len(span))) if me in spec.owners(component) else []
        return [i for i, page in enumerate(span.pages.tolist()) if spec.owns(component, me, page)]

    def _part(self, span: Span) -> Span:
        """What of a span between device and host is this rank's."""
        mine = self._own(span)
        if len(mine) == len(span):
            return span
        return replace(span, source=span.source[mine], target=span.target[mine], pages=span.pages[mine])

    def _cross(self, record: Move) -> None:
        """Between device and host."""
        pairs = [(self._copiers[(record.source, record.target, span.component)], span) for span in record.spans]
        if self._mover.order is None:
            for copier, span in pairs:
                copier.copy(span.source, span.target)
            return
        legs = [Leg(copier.source.component, copier, *copier.checked(span.source, span.target)) for copier, span in pairs]
        self._mover.order.copy(record.source, record.target, legs)

    def _computing(self, record: Compute) -> AbstractContextManager[None]:
        """Around the engine's work: copies and forwards that touch the same device slots keep their order."""
        if self._mover.order is None:
            return nullcontext()
        reads, writes = touched_slots(self._rank.spec, record)
        return self._mover.order.computing(reads, writes)

    def settle(self, tier: Tier, component: str, slots: Slots, write: bool = False, timeout_s: float | None = None) -> None:
        """Before this thread reads (writes) slots itself: what is enqueued for them is done."""
        if self._mover.order is not None:
            self._mover.order.join((tier, component), slots, write, timeout_s)

    def _left(self, until: float) -> float:
        return max(0.0, until - self._clock())

    def _copier(self, source: Tier, target: Tier, component: str) -> Copier:
        return Copier(self._rank.pools[source][component], self._rank.pools[target][component], self._mover)

    def _write(self, store: Store, span: Span, mine: list[int], until: float, done: list[int]) -> None:
        """L2 to L3 of the items ``mine``; ``done`` gains those that L3 has."""
        self.settle(Tier.HOST, span.component, span.source[mine], timeout_s=self._left(until))
        with self._alone(span.component, until):
            for batch, views in self._views(span.component, mine, span.source, fill=True):
                put = store.put(self._ids(span, batch), views, self._left(until))
                done += [i for j, i in enumerate(batch) if put >> j & 1]

    def _read(self, store: Store, span: Span, mine: list[int], until: float, done: list[int]) -> None:
        """L3 to L2 of the items ``mine``; ``done`` gains those that have arrived."""
        self.settle(Tier.HOST, span.component, span.target[mine], write=True, timeout_s=self._left(until))
        staged = self._staging.get(span.component)
        with self._alone(span.component, until):
            for batch, views in self._views(span.component, mine, span.target, fill=False):
                got = store.get(self._ids(span, batch), views, self._left(until))
                good = [j for j in range(len(batch)) if got >> j & 1]
                if staged is not None and good:
                    staged[2].copy(np.asarray(good, dtype=np.int32), span.target[[batch[j] for j in good]])
                done += [batch[j] for j in good]

    @contextmanager
    def _alone(self, component: str, until: float) -> Iterator[None]:
        """Records of storage run side by side; a component's staging pool is for one of them at a time."""
        lock = self._staging_locks.get(component)
        if lock is None:
            yield
            return
        if not lock.acquire(timeout=self._left(until)):
            raise StoreTimeout(f"the staging pool of component {component!r} was in use by another transfer until the deadline")
        try:
            yield
        finally:
            lock.release()

    def _views(self, component: str, items: list[int], slots: Slots, fill: bool) -> Iterator[tuple[list[int], list[memoryview]]]:
        """Batches of items with a view of each one's object: in place where the host layout allows it, else in a staging pool."""
        staged = self._staging.get(component)
        if staged is None:
            host = self._rank.pools[Tier.HOST][component]
            for batch in _batches(items, self._rank.batch):
                yield batch, [host.page(int(slots[i])) for i in batch]
            return
        pool, down, _ = staged
        for batch in _batches(items, min(pool.slots, self._rank.batch)):
            if fill:
                down.copy(slots[batch], np.arange(len(batch), dtype=np.int32))
            yield batch, [pool.page(j) for j in range(len(batch))]

    def _writes(self, component: str, key: bytes, turn: int) -> bool:
        """A replicated page is written by one rank."""
        spec, me = self._rank.spec, self._rank.rank
        return spec[component].shard is not Shard.REPLICATED or writer(spec, spec[component], key, turn) == me

    def _ids(self, span: Span, items: Sequence[int]) -> list[bytes]:
        names = [span.keys[i] for i in items]
        return [page_of(name) + self._rank.tags[tagged(span.component, is_other(name))] for name in names]


def _batches(items: list[int], most: int) -> Iterator[list[int]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def touched_slots(spec: CacheSpec, record: Compute) -> tuple[dict[str, Slots], dict[str, Slots]]:
    """Device slots that a record reads, and that it writes, of each component."""
    reads, writes = {}, {}
    for c in spec.components:
        if c.is_state:
            live = [record.live[c.name]] if c.name in record.live else []
            resumed = record.resume.get(c.name, -1)
            reads[c.name] = slots_array([*live, *([resumed] if resumed >= 0 else [])])
            writes[c.name] = slots_array([*live, *(slot for _, slot in record.snapshots.get(c.name, ()))])
        else:
            table = record.tables.get(c.name, slots_array())
            own = table[record.valid.get(c.name, record.start) // (spec.page_size * c.page_span) :]
            reads[c.name], writes[c.name] = table[table >= 0], own[own >= 0]
    return reads, writes
