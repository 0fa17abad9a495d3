"""Io backends: how the bytes of pages move between two pools of one component, in any two layouts.

The only module that will ever touch CUDA; this version copies on CPUs. Three parts:

* :data:`BACKENDS`, the one table of which io backend takes which layout on which device, and :func:`choose`, which reads it;
* :class:`Mover`, an open backend with its own threads, closed by whoever opened it (torch's intra-op pool is several times slower at
  this, and would be taken away from the model);
* :class:`Copier`, the plan of one pair of pools. The plan comes from :func:`hicache_ray.layout.copy_plan`; no layout is known by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.layout import ORDERS, Strided, copy_plan, order_of
from hicache_ray.pool import Pool
from hicache_ray.records import Slots

Ints: TypeAlias = npt.NDArray[np.int64]
#: (source addresses, target addresses, run bytes, loops [3, 3], stream, first unit, end unit); see :func:`hicache_ray.copies_cpu.move`.
Move: TypeAlias = Callable[[Ints, Ints, Ints, Ints, bool, int, int], None]

#: What the configuration may say. ``kernel`` is SGLang's name for copies by a CUDA kernel.
SETTINGS = ("auto", "direct", "kernel")
#: Longer runs are cut, so that parts are equal.
PIECE_BYTES = 1 << 20
#: A copy is done in parts of at least this much (waking a thread costs as much as copying some 200 KiB), and in so many per thread at most.
PART_BYTES = 1 << 18
PARTS = 8
#: Copies of at least this much go past the caches, which would not hold them anyway.
STREAM_BYTES = 1 << 22


@dataclass(frozen=True)
class Backend:
    """A row of the table: ``name`` moves pages of pools on ``device`` whose host side is in one of ``layouts``.

    ``load`` gives what moves the bytes and a note for the operator (empty: nothing to say); it may take seconds, so it runs at start.
    """

    name: str
    device: str
    layouts: tuple[str, ...]
    load: Callable[[], tuple[Move, str]]


def _load_cpu() -> tuple[Move, str]:
    """The compiled loop, or numpy's where numba cannot run."""
    try:
        from hicache_ray.copies_cpu import move
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba found no folder to keep the compiled code in
        return move_with_numpy, f"copies run in numpy, at a fraction of their speed, because numba does not work here: {error}"
    return move, ""


#: Which io backend takes which layout on which device. The first row that fits is what ``auto`` picks.
BACKENDS: tuple[Backend, ...] = (Backend("direct", "cpu", tuple(ORDERS), _load_cpu),)


def choose(backend: str, device: str, layout: str, setting: str = "cache.io_backend") -> Backend:
    """The row for a configured ``backend``, or a :class:`ConfigError` that names what this machine can run.

    ``device``: where L1 is ("cpu", "cuda:0"); ``layout``: that of the host pools.
    """
    order_of(layout)
    kind = device.split(":")[0]
    rows = [row for row in BACKENDS if row.device == kind and layout in row.layouts]
    legal = ", ".join(("auto", *(row.name for row in rows)))
    if not rows:
        devices = ", ".join(sorted({row.device for row in BACKENDS if layout in row.layouts}))
        raise ConfigError(f'no io backend moves pages in layout "{layout}" on device "{kind}"; choose one of these devices: {devices}')
    if backend not in SETTINGS:
        raise ConfigError(f'{setting} is "{backend}"; choose one of {legal}')
    for row in rows:
        if backend in ("auto", row.name):
            return row
    raise ConfigError(f'{setting} is "{backend}", which cannot run with layout "{layout}" on device "{kind}"; choose one of {legal}')


class Mover:
    """An open backend: the loaded code and ``threads`` threads (the caller's is one of them). Safe to use from several threads.

    ``note``: what an operator should know, or empty. ``timeout_s``: longest wait for the other threads of one copy.
    """

    def __init__(self, backend: Backend, threads: int = 2, timeout_s: float = 60.0) -> None:
        if threads < 1:
            raise ConfigError(f"copies need at least 1 thread; {threads} were asked for")
        self.backend = backend
        self.threads = threads
        self.timeout_s = timeout_s
        self._move, self.note = backend.load()
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
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def move(self, jobs: Sequence[Job]) -> None:
        """Copy the units of all ``jobs``. Raises :class:`HiCacheError` when other threads take longer than ``timeout_s``.

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
            raise HiCacheError(f"a copy did not finish within {self.timeout_s} s; do not use its slots again before the mover is closed")
        for other in begun:
            other.result(0)


@dataclass(frozen=True)
class Job:
    """Runs to copy: piece ``i`` has ``size[i]`` bytes and is repeated along ``loops`` (int64 [3, 3]). Addresses, not offsets."""

    source: Ints
    target: Ints
    size: Ints
    loops: Ints

    @property
    def bytes(self) -> int:
        return int(self.size.sum()) * int(self.loops[:, 0].prod())

    def cuts(self, parts: int) -> list[int]:
        """Units at which ``parts`` equal parts (in bytes) begin, and the end."""
        outer = int(self.loops[0, 0])
        ends = np.cumsum(self.size) * outer
        out = [0]
        for k in range(1, parts):
            at = int(ends[-1]) * k // parts
            piece = int(np.searchsorted(ends, at, side="right"))
            run = int(self.size[piece])
            out.append(piece * outer + (at - int(ends[piece]) + run * outer) // run)
        return [*out, len(self.size) * outer]


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
            if pool.buffer.device.type != mover.backend.device:
                raise ConfigError(
                    f'io backend "{mover.backend.name}" moves pages on device "{mover.backend.device}"; '
                    f'the pool of component {pool.component.name!r} is on "{pool.buffer.device.type}"'
                )
        self.source = source
        self.target = target
        self.mover = mover
        self._plan = tuple((step, _loops(step)) for step in copy_plan(source.views, target.views, source.geometry))

    def copy(self, source_slots: Slots, target_slots: Slots) -> None:
        """Page ``source_slots[i]`` to ``target_slots[i]``, done when it returns.

        Raises :class:`HiCacheError` before a byte has moved: lengths differ, a slot out of range, a target named twice, or (within one
        pool) a slot that is both source and target, because then the outcome would depend on the order.
        """
        of, to = _slots(source_slots, self.source, "source"), _slots(target_slots, self.target, "target")
        if len(of) != len(to):
            raise HiCacheError(f"a copy needs as many target slots as source slots; it has {len(to)} and {len(of)}")
        if len(of) == 0:
            return
        if len(to) > 1 and not (np.diff(to) > 0).all() and len(np.unique(to)) < len(to):
            raise HiCacheError(f"a copy names a target slot twice: {_first(to, np.bincount(to)[to] > 1)}; each page needs its own")
        if self.source is self.target and np.isin(of, to).any():
            raise HiCacheError(f"slot {_first(of, np.isin(of, to))} is both source and target of one copy; copy in two steps")
        bases = self.source.buffer.data_ptr(), self.target.buffer.data_ptr()
        self.mover.move([_job(step, loops, (of, to), bases) for step, loops in self._plan])


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


def _loops(step: Strided) -> Ints:
    """The loops of a plan as the inner loop takes them: [3, 3], outermost first, filled up with loops of one."""
    rows = [(loop.count, loop.source, loop.target) for loop in step.loops]
    return np.array(rows + [(1, 0, 0)] * (3 - len(rows)), dtype=np.int64)


def _job(step: Strided, loops: Ints, slots: tuple[Ints, Ints], bases: tuple[int, int]) -> Job:
    """The pieces of one step: one run per page, joined where pages adjoin on both sides, cut where longer than a piece."""
    of, to = slots
    count = np.ones(len(of), dtype=np.int64)
    if len(of) > 1 and step.run == step.source_page == step.target_page:
        first = np.flatnonzero(np.concatenate(([True], (np.diff(of) != 1) | (np.diff(to) != 1))))
        count = np.diff(first, append=len(of))
        of, to = of[first], to[first]
    source, target = bases[0] + step.source + of * step.source_page, bases[1] + step.target + to * step.target_page
    size = count * step.run
    if size.max() > PIECE_BYTES:
        parts = -(-size // PIECE_BYTES)
        index = np.repeat(np.arange(len(size)), parts)
        at = (np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)) * PIECE_BYTES
        source, target, size = source[index] + at, target[index] + at, np.minimum(PIECE_BYTES, size[index] - at)
    return Job(source, target, size, loops)


def move_with_numpy(source: Ints, target: Ints, size: Ints, loops: Ints, stream: bool, begin: int, end: int) -> None:
    """What :func:`hicache_ray.copies_cpu.move` does, one strided numpy copy per piece. numpy releases the GIL as well; it never streams."""
    outer, middle, inner = (int(count) for count in loops[:, 0])

    def array(address: int, shape: tuple[int, int, int, int], side: int) -> npt.NDArray[np.uint8]:
        strides = (*(int(stride) for stride in loops[:, side]), 1)
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return np.ndarray(shape, np.uint8, memoryview((ctypes.c_uint8 * span).from_address(address)), 0, strides)

    for piece in range(begin // outer, -(-end // outer)):
        first, last = max(begin - piece * outer, 0), min(end - piece * outer, outer)
        shape = (last - first, middle, inner, int(size[piece]))
        of = array(int(source[piece] + first * loops[0, 1]), shape, 1)
        np.copyto(array(int(target[piece] + first * loops[0, 2]), shape, 2), of)
