"""Io backends: how the bytes of pages move between two pools of one component, in any two layouts.

The entry to the ``copies`` modules, which alone touch CUDA (lazily). Three parts:

* :data:`BACKENDS`, the one table of which io backend takes which layout on which device, and :func:`choose`, which reads it;
* :class:`Mover`, an open backend, closed by whoever opened it. On a CPU it has threads of its own (torch's intra-op pool is several times
  slower at this, and would be taken away from the model) and a copy is done when it returns. On a device with queues it also has an
  :class:`~hicache_ray.copies_queues.Order`, and a copy between device and host is enqueued there;
* :class:`Copier`, the plan of one pair of pools. The plan comes from :func:`hicache_ray.layout.copy_plan`; no layout is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache_ray import copies_cuda
from hicache_ray.copies_jobs import PIECE_BYTES, Ints, Job, Pages, move_with_numpy
from hicache_ray.copies_queues import Device, Order
from hicache_ray.errors import ConfigError, GroupLost, HiCacheError
from hicache_ray.host_memory import touched
from hicache_ray.layout import ORDERS, Strided, copy_plan, layer_plan, order_of
from hicache_ray.pool import Pool
from hicache_ray.records import Slots
from hicache_ray.spec import Tier

__all__ = ["BACKENDS", "Backend", "Copier", "Job", "Mover", "choose", "move_with_numpy"]

#: (source addresses, target addresses, run bytes, loops [3, 3], stream, first unit, end unit); see :func:`hicache_ray.copies_cpu.move`.
Move: TypeAlias = Callable[[Ints, Ints, Ints, Ints, bool, int, int], None]

#: What the configuration may say. ``kernel`` is SGLang's name for copies by a CUDA kernel.
SETTINGS = ("auto", "direct", "kernel")
#: A copy is done in parts of at least this much (waking a thread costs as much as copying some 200 KiB), and in so many per thread at most.
PART_BYTES = 1 << 18
PARTS = 8
#: Copies of at least this much go past the caches, which would not hold them anyway.
STREAM_BYTES = 1 << 22


def _load_cpu() -> tuple[Move, str]:
    """The compiled loop, or numpy's where numba cannot run."""
    try:
        from hicache_ray.copies_cpu import move
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba found no folder to keep the compiled code in
        return move_with_numpy, f"copies run in numpy, at a fraction of their speed, because numba does not work here: {error}"
    return move, ""


@dataclass(frozen=True)
class Backend:
    """A row of the table: ``name`` moves pages of pools on ``device`` whose host side is in one of ``layouts``.

    ``load`` gives what moves bytes between host pools and a note for the operator (empty: nothing to say); it may take seconds, so it runs
    at start. ``open`` opens the device's queues, given "cuda:0"; None: the device is the host. ``missing`` says what this machine lacks for
    it (empty: nothing). ``note``: what :func:`choose` has to say about the choice.
    """

    name: str
    device: str
    layouts: tuple[str, ...]
    load: Callable[[], tuple[Move, str]] = _load_cpu
    open: Callable[[str], Device] | None = None
    missing: Callable[[], str] = str
    note: str = ""


#: Which io backend takes which layout on which device. The first row that fits and that the machine can run is what ``auto`` picks: a
#: kernel where the runs of a host layout are short, copy engines where they are long.
BACKENDS: tuple[Backend, ...] = (
    Backend("direct", "cpu", tuple(ORDERS)),
    Backend("direct", "cuda", ("layer_first", "page_first_direct"), open=copies_cuda.open_direct, missing=copies_cuda.no_direct),
    Backend("kernel", "cuda", tuple(ORDERS), open=copies_cuda.open_kernel, missing=copies_cuda.no_kernel),
    Backend("direct", "cuda", tuple(ORDERS), open=copies_cuda.open_direct, missing=copies_cuda.no_direct),
)


def choose(
    backend: str, device: str, layout: str, setting: str = "cache.io_backend", table: Sequence[Backend] = BACKENDS
) -> Backend:
    """The row for a configured ``backend``, or a :class:`ConfigError` that names what this machine can run.

    ``device``: where L1 is ("cpu", "cuda:0"); ``layout``: that of the host pools. Where ``auto`` cannot have what it would pick first, the
    row's ``note`` says so.
    """
    order_of(layout)
    kind = device.split(":")[0]
    rows = [row for row in table if row.device == kind and layout in row.layouts]
    lacks = {row.name: row.missing() for row in rows}
    able = [row for row in rows if not lacks[row.name]]
    legal = ", ".join(("auto", *dict.fromkeys(row.name for row in able)))
    why = "; ".join(f'"{name}" cannot run: {reason}' for name, reason in lacks.items() if reason)
    if not rows:
        devices = ", ".join(sorted({row.device for row in table if layout in row.layouts}))
        raise ConfigError(f'no io backend moves pages in layout "{layout}" on device "{kind}"; choose one of these devices: {devices}')
    if backend not in SETTINGS:
        raise ConfigError(f'{setting} is "{backend}"; choose one of {legal}')
    if not able:
        raise ConfigError(f'no io backend can move pages on device "{kind}" here: {why}; add what is missing, or choose another device')
    for row in able:
        if backend in ("auto", row.name):
            fell_back = backend == "auto" and row is not rows[0]
            return replace(row, note=f'{setting} is "auto" and "{row.name}" was chosen: {why}') if fell_back else row
    reason = lacks.get(backend, "")
    wrong = f'{setting} is "{backend}", which cannot run with layout "{layout}" on device "{kind}"{f" here ({reason})" if reason else ""}'
    raise ConfigError(f"{wrong}; choose one of {legal}")


class Mover:
    """An open backend: the loaded code and ``threads`` threads (the caller's is one of them). Safe to use from several threads.

    ``note``: what an operator should know, or empty. ``timeout_s``: longest wait for the other threads of one copy. ``order``: of copies
    and engine on a device with queues; None where a copy is done when it returns. ``device``: which one, where there are several.
    """

    def __init__(self, backend: Backend, threads: int = 2, timeout_s: float = 60.0, device: str = "") -> None:
        if threads < 1:
            raise ConfigError(f"copies need at least 1 thread; {threads} were asked for")
        self.backend = backend
        self.threads = threads
        self.timeout_s = timeout_s
        self._move, note = backend.load()
        self.note = "; ".join(n for n in (backend.note, note) if n)
        self.order = Order(backend.open(device or backend.device), timeout_s) if backend.open is not None else None
        self._closed = False
        self._lock = Lock()  # no job is handed out after close
        # A copy enqueues less than one job per thread and waits for all of them, so the queue is bounded by the number of callers.
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="hicache-copy") if threads > 1 else None

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running copies and end the threads. Further copies are refused; closing twice is fine."""
        with self._lock:
            closed, self._closed = self._closed, True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self.order is not None and not closed:
            self.order.close()

    def buffer(self, tier: Tier, size: int) -> torch.Tensor | None:
        """Memory for a pool of ``size`` bytes that this backend is good at; None: whatever the pool makes for itself."""
        if self.order is None:
            return torch.from_numpy(touched(size)) if tier is Tier.HOST and size else None
        return copies_cuda.buffer(tier, size, self.order.device)

    def by_layer(self) -> Callable[[str, int], None] | None:
        """What an engine promises to call with (component, its layer) before it reads that layer's pages; None: it need not.

        Until somebody has asked for this, a record's work begins when all that it reads has arrived.
        """
        if self.order is None:
            return None
        self.order.by_layer()
        return self.order.wait_layer

    def move(self, jobs: Sequence[Job]) -> None:
        """Copy the units of all ``jobs``. Raises :class:`GroupLost` when other threads take longer than ``timeout_s``.

        Threads take the next part when they have done one, so that one that gets no core takes none.
        """
        size = sum(job.bytes for job in jobs)
        stream = size >= STREAM_BYTES
        parts = max(1, min(self.threads * PARTS, size // PART_BYTES))
        cuts = [job.cuts(parts) for job in jobs]
        tickets = iter(range(parts))

        def work() -> None:
            for k in tickets:
                for job, cut in zip(jobs, cuts, strict=True):
                    self._move(job.source, job.target, job.size, job.loops, stream, cut[k], cut[k + 1])

        with self._lock:
            if self._closed:
                raise HiCacheError("the mover is closed; open a new one before copying")
            others = [self._pool.submit(work) for _ in range(min(self.threads, parts) - 1)] if self._pool is not None else []
        try:
            work()
        finally:
            # A job that has not begun finds nothing to do.
            begun = [other for other in others if not other.cancel()]
            _, late = wait(begun, self.timeout_s)
        if late:
            # Its thread may still write: nobody can tell when the slots are safe again.
            raise GroupLost(f"a copy did not finish within {self.timeout_s} s; its slots cannot be used before the mover is closed")
        for other in begun:
            other.result(0)


class Copier:
    """Copies pages from ``source`` to ``target``: two pools of one geometry, in any layouts, or one pool twice.

    Raises :class:`ConfigError` on a pair that does not fit, or that is on another device than the mover's.
    """

    def __init__(self, source: Pool, target: Pool, mover: Mover) -> None:
        if source.geometry != target.geometry:
            raise ConfigError(
                f"pages of component {source.component.name!r} ({source.geometry}) do not fit into those of {target.component.name!r} "
                f"({target.geometry}); both pools need the same layers, tokens, heads and fields"
            )
        for pool in (source, target):
            if pool.buffer.device.type not in ("cpu", mover.backend.device):
                raise ConfigError(
                    f'io backend "{mover.backend.name}" moves pages on device "{mover.backend.device}"; '
                    f'the pool of component {pool.component.name!r} is on "{pool.buffer.device.type}"'
                )
        self.source = source
        self.target = target
        self.mover = mover
        self._plan = copy_plan(source.views, target.views, source.geometry)
        self._layers: list[tuple[Strided, ...]] = []

    def copy(self, source_slots: Slots, target_slots: Slots) -> None:
        """Page ``source_slots[i]`` to ``target_slots[i]``, between pools in the host's memory, done when it returns.

        Raises :class:`HiCacheError` before a byte has moved: lengths differ, a slot out of range, a target named twice, or (within one
        pool) a slot that is both source and target, because then the outcome would depend on the order.
        """
        of, to = self.checked(source_slots, target_slots)
        for pool in (self.source, self.target):
            if pool.buffer.device.type != "cpu":
                raise HiCacheError(f"pages of component {pool.component.name!r} are on a device; copy through its queues (Mover.order)")
        if len(of):
            self.mover.move(self.pages(of, to).jobs(PIECE_BYTES))

    def pages(self, of: Ints, to: Ints, layer: int | None = None) -> Pages:
        """The same as data, of one layer of the component or of all; slots that :meth:`checked` has returned."""
        steps = self._plan if layer is None else self._layer(layer)
        return Pages(steps, of, to, self.source.buffer.data_ptr(), self.target.buffer.data_ptr())

    def _layer(self, layer: int) -> tuple[Strided, ...]:
        if not self._layers:
            source, target, geometry = self.source.views, self.target.views, self.source.geometry
            self._layers = [layer_plan(source, target, geometry, i) for i in range(geometry.layers)]
        return self._layers[layer]

    def checked(self, source_slots: Slots, target_slots: Slots) -> tuple[Ints, Ints]:
        """The slots of a copy that may be made; raises as :meth:`copy` does."""
        of, to = _slots(source_slots, self.source, "source"), _slots(target_slots, self.target, "target")
        if len(of) != len(to):
            raise HiCacheError(f"a copy needs as many target slots as source slots; it has {len(to)} and {len(of)}")
        if len(to) > 1 and not (np.diff(to) > 0).all() and len(np.unique(to)) < len(to):
            raise HiCacheError(f"a copy names a target slot twice: {_first(to, np.bincount(to)[to] > 1)}; each page needs its own")
        if self.source is self.target and np.isin(of, to).any():
            raise HiCacheError(f"slot {_first(of, np.isin(of, to))} is both source and target of one copy; copy in two steps")
        return of, to


def _first(slots: Ints, where: npt.NDArray[np.bool_]) -> int:
    return int(slots[where][0])


def _slots(slots: Slots, pool: Pool, side: str) -> Ints:
    array = np.asarray(slots)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise HiCacheError(f"the {side} slots of a copy are one axis of integers; they are {array.dtype} of shape {array.shape}")
    out = array.astype(np.int64)
    if out.size and (out.min() < 0 or out.max() >= pool.slots):
        wrong = _first(out, (out < 0) | (out >= pool.slots))
        raise HiCacheError(f"{side} slot {wrong} is outside of the {pool.slots} slots of component {pool.component.name!r}")
    return out
