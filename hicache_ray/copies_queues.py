"""The order of an engine and the copies of its pages on a device with queues of its own.

A device has two queues, the engine's and that of copies. Work enters a queue in order and is done in this order, later; between the queues
there is none, except where one waits for an event of the other. :class:`Order` places those waits, by slot: it knows for each slot the last
work of either queue that wrote it and that read it.

* a backup begins when the last writer of the pages that it reads is done;
* a load begins when the last reader and the last writer of the slots that it fills are done; it goes layer by layer, one event each;
* a forward writes to a slot when the last copy from it and to it is done, and reads layer i when layer i of what it reads has arrived.

Nobody waits but the queues: a record has been executed when its work is enqueued. A thread waits only where it touches host bytes itself
(:meth:`Order.join`), for exactly the copies of exactly those slots. Leases see to it that no two records at work at once touch one slot;
where they did all the same, the later waits here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Lock
from typing import Any, Protocol

import numpy as np

from hicache_ray.copies_jobs import Ints, Pages
from hicache_ray.errors import HiCacheError
from hicache_ray.lease import Place
from hicache_ray.records import Slots
from hicache_ray.spec import Component, Tier

#: More events of one queue than this are not kept: whoever enqueues more waits for the oldest.
EVENTS = 8192


class Queue(Enum):
    """The two queues of a device."""

    COMPUTE = "compute"
    COPY = "copy"


class Device(Protocol):
    """What :class:`Order` needs of a device. Events are opaque. Nothing here waits, except :meth:`join`."""

    def mark(self, queue: Queue) -> Any:
        """An event that is done when all is done that is in the queue now."""

    def wait(self, queue: Queue, event: Any) -> None:
        """What enters the queue from now on begins after the event."""

    def done(self, event: Any) -> bool: ...

    def join(self, event: Any, timeout_s: float) -> bool:
        """The calling thread waits for this one event; False when it is not done in time."""

    def copy(self, pages: Pages, label: str) -> None:
        """Enqueue a copy between device and host in the queue of copies."""

    def accept(self, address: int) -> None:
        """Raise :class:`~hicache_ray.errors.ConfigError` unless a host pool that begins there can be copied to and from."""

    def close(self) -> None: ...


class Timeline:
    """The events of one queue, numbered from 1 in the order in which they are done. A number may be known before its event exists."""

    def __init__(self, device: Device, queue: Queue, timeout_s: float) -> None:
        self.queue = queue
        self._device = device
        self._timeout_s = timeout_s
        self._reserved = self._recorded = self._done = 0
        self._events: deque[Any] = deque()  # of the numbers (done, recorded]
        self._changed = Condition()

    def reserve(self, count: int = 1) -> int:
        """The first of ``count`` numbers. Only who has the queue for itself may call this, and must :meth:`record` them all."""
        with self._changed:
            self._reserved += count
            return self._reserved - count + 1

    def record(self) -> None:
        """What is in the queue now is all that the next reserved number stands for."""
        event = self._device.mark(self.queue)
        with self._changed:
            self._recorded += 1
            self._events.append(event)
            self._forget()
            oldest = self._events[0] if len(self._events) > EVENTS else None
            self._changed.notify_all()
        if oldest is not None and not self._device.join(oldest, self._timeout_s):
            raise HiCacheError(f"{EVENTS} copies are under way on the device and the first did not end within {self._timeout_s} s")

    def event(self, number: int) -> Any | None:
        """The event, or None where it is done. Waits for its being enqueued; raises :class:`HiCacheError` when that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._recorded >= number, self._timeout_s):
                raise HiCacheError(f"work of the {self.queue.value} queue was not enqueued within {self._timeout_s} s")
            self._forget()
            return self._events[number - self._done - 1] if number > self._done else None

    def last(self) -> int:
        """The number of what was enqueued last."""
        with self._changed:
            return self._recorded

    def finished(self) -> int:
        """Up to this number all is done; a little more may be."""
        with self._changed:
            self._forget()
            return self._done

    def _forget(self) -> None:
        while self._events and self._device.done(self._events[0]):
            self._events.popleft()
            self._done += 1


class Fence:
    """Of each slot of one pool: the number of the last work of each queue that wrote it (copies: by layer) and that read it; 0: none."""

    def __init__(self, slots: int, layers: int) -> None:
        self.wrote = np.zeros(slots, dtype=np.int64)
        self.read = np.zeros(slots, dtype=np.int64)
        self.copied_to = np.zeros((slots, layers), dtype=np.int64)
        self.copied_from = np.zeros(slots, dtype=np.int64)


class Crossing(Protocol):
    """How one component moves between device and host: a :class:`hicache_ray.copies.Copier`."""

    def pages(self, of: Ints, to: Ints, layer: int | None = None) -> Pages: ...

    def checked(self, source_slots: Slots, target_slots: Slots) -> tuple[Ints, Ints]: ...


@dataclass(frozen=True)
class Leg:
    """One component of a copy."""

    component: Component
    crossing: Crossing
    of: Ints
    to: Ints


@dataclass(frozen=True)
class Step:
    """What one event stands for: these layers (None: all) of these legs. ``label``: for those who look at what a device has done."""

    parts: tuple[tuple[Leg, int | None], ...]
    label: str


class Order:
    """See the module. ``timeout_s``: longest wait of one thread for another to enqueue what it depends on.

    Safe to use from several threads: one at a time copies, one at a time computes.
    """

    def __init__(self, device: Device, timeout_s: float = 60.0) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._compute = Timeline(device, Queue.COMPUTE, timeout_s)
        self._copy = Timeline(device, Queue.COPY, timeout_s)
        self._fences: dict[Place, Fence] = {}
        self._lock = Lock()  # of the fences' numbers
        self._copying, self._computing = Lock(), Lock()  # who fills the queue
        self._layered = False
        self._arriving: dict[tuple[str, int], int] = {}

    def attach(self, place: Place, slots: int, layers: int) -> None:
        """A pool that copies and the engine touch. Its numbers stay where it is known already; nothing may be under way where it grows."""
        known = self._fences.get(place)
        if known is None or known.copied_to.shape != (slots, layers):
            self._fences[place] = Fence(slots, layers)

    # -- copies -------------------------------------------------------------------------------------------------------------------

    def copy(self, source: Tier, target: Tier, legs: Sequence[Leg]) -> None:
        """Enqueue a copy between device and host: a load layer by layer, what the engine needs first first."""
        legs = [leg for leg in legs if len(leg.of)]
        if not legs:
            return
        steps = layer_steps(legs) if target is Tier.DEVICE else [Step(tuple((leg, None) for leg in legs), "backup")]
        with self._copying:
            first = self._copy.reserve(len(steps))
            recorded = 0
            try:
                with self._lock:
                    number = max(self._blocking(source, target, leg) for leg in legs)
                    self._mark(source, target, steps, first)
                self._hold(self._compute, number, Queue.COPY)
                for step in steps:
                    for leg, layer in step.parts:
                        name = f"{step.label} {leg.component.name}" + (f" {layer}" if layer is not None else "")
                        self.device.copy(leg.crossing.pages(leg.of, leg.to, layer), name)
                    recorded += 1
                    self._copy.record()
            finally:
                for _ in range(len(steps) - recorded):  # after a failure nobody waits for what will not come
                    self._copy.record()

    def _blocking(self, source: Tier, target: Tier, leg: Leg) -> int:
        """The last work of the engine that must be done before this copy begins. Copies wait for each other anyway: one queue."""
        of, to = self._fences[(source, leg.component.name)], self._fences[(target, leg.component.name)]
        return int(max(of.wrote[leg.of].max(), to.wrote[leg.to].max(), to.read[leg.to].max()))

    def _mark(self, source: Tier, target: Tier, steps: Sequence[Step], first: int) -> None:
        for number, step in enumerate(steps, first):
            for leg, layer in step.parts:
                layers = slice(None) if layer is None else layer
                self._fences[(target, leg.component.name)].copied_to[leg.to, layers] = number
                self._fences[(source, leg.component.name)].copied_from[leg.of] = number

    def _hold(self, timeline: Timeline, number: int, queue: Queue) -> None:
        """``queue`` waits for that event of the other one."""
        if number and (event := timeline.event(number)) is not None:
            self.device.wait(queue, event)

    # -- the engine ---------------------------------------------------------------------------------------------------------------

    def by_layer(self) -> None:
        """From now on the engine calls :meth:`wait_layer` before it reads; without this, its records wait for loads as a whole."""
        self._layered = True

    @contextmanager
    def computing(self, reads: Mapping[str, Slots], writes: Mapping[str, Slots]) -> Iterator[None]:
        """Around all that the engine enqueues for one record. ``reads``, ``writes``: device slots of each component."""
        with self._computing:
            number = self._compute.reserve()
            try:
                with self._lock:
                    before = self._begin(reads, writes, number)
                self._hold(self._copy, before, Queue.COMPUTE)
                yield
            finally:
                self._arriving = {}
                self._compute.record()

    def _begin(self, reads: Mapping[str, Slots], writes: Mapping[str, Slots], number: int) -> int:
        """Marks the slots; the copy that must be done before the first of the record's work."""
        for name, slots in (*reads.items(), *writes.items()):
            if len(slots) and slots.max() >= len(self._fences[(Tier.DEVICE, name)].wrote):
                raise HiCacheError(f"a record names slot {slots.max()} of component {name!r}, which its device pool does not have")
        before, arriving = self._copy.finished(), {}
        for name, slots in writes.items():
            fence = self._fences[(Tier.DEVICE, name)]
            if len(slots):
                before = max(before, int(fence.copied_from[slots].max()), int(fence.copied_to[slots].max()))
                fence.wrote[slots] = number
        for name, slots in reads.items():
            fence = self._fences[(Tier.DEVICE, name)]
            if len(slots):
                last = fence.copied_to[slots].max(axis=0)
                arriving.update({(name, layer): n for layer, n in enumerate(last.tolist()) if n > before})
                fence.read[slots] = number
        if self._layered:
            self._arriving = arriving
            return before
        return max([before, *arriving.values()])

    def wait_layer(self, component: str, layer: int) -> None:
        """What the engine enqueues from now on finds the component's ``layer``-th layer of all that the record reads in its slots."""
        if self._arriving and (number := self._arriving.pop((component, layer), 0)):
            self._hold(self._copy, number, Queue.COMPUTE)

    # -- threads that touch bytes themselves ----------------------------------------------------------------------------------------

    def join(self, place: Place, slots: Slots, write: bool = False, timeout_s: float | None = None) -> None:
        """The calling thread waits until nobody writes to these slots any more (``write``: nor reads them).

        Raises :class:`HiCacheError` when that takes longer than ``timeout_s``.
        """
        if not len(slots):
            return
        fence = self._fences[place]
        with self._lock:
            copy, compute = int(fence.copied_to[slots].max()), int(fence.wrote[slots].max())
            if write:
                copy, compute = max(copy, int(fence.copied_from[slots].max())), max(compute, int(fence.read[slots].max()))
        self._join({self._copy: copy, self._compute: compute}, timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """The calling thread waits for all that has been enqueued until now."""
        self._join({timeline: timeline.last() for timeline in (self._copy, self._compute)}, timeout_s)

    def _join(self, numbers: Mapping[Timeline, int], timeout_s: float | None) -> None:
        limit = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit
        for timeline, number in numbers.items():
            event = timeline.event(number) if number else None
            if event is not None and not self.device.join(event, max(0.0, until - time.monotonic())):
                raise HiCacheError(f"work of the {timeline.queue.value} queue did not end within {limit:g} s")

    def close(self) -> None:
        self.device.close()


def layer_steps(legs: Sequence[Leg]) -> list[Step]:
    """A load in the order in which a forward needs it: states, which an engine reads before it begins, then the model's layers."""
    states = tuple((leg, None) for leg in legs if leg.component.is_state)
    paged = [leg for leg in legs if not leg.component.is_state]
    steps = [Step(states, "load states")] if states else []
    for model_layer in sorted({n for leg in paged for n in leg.component.layers}):
        parts = tuple((leg, leg.component.layers.index(model_layer)) for leg in paged if model_layer in leg.component.layers)
        steps.append(Step(parts, "load"))
    return steps
