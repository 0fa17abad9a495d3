"""Pages on their way between two pools, as data that every io backend reads: slots, addresses, and how one page lies on both sides.

Nothing here knows a layout by name or a device; :class:`Pages` is what a backend is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.layout import Strided

Ints: TypeAlias = npt.NDArray[np.int64]
#: (source addresses, target addresses, bytes) of contiguous runs.
Runs: TypeAlias = tuple[Ints, Ints, Ints]

#: A CPU's longer runs are cut, so that parts are equal.
PIECE_BYTES = 1 << 20


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

    def runs(self) -> Runs:
        """Every run by itself, in the order of the loops."""
        shape = (len(self.size), *self.loops[:, 0].tolist())

        def spread(start: Ints, side: int) -> Ints:
            out = start.reshape(-1, 1, 1, 1)
            for axis in range(3):
                steps = np.arange(shape[axis + 1], dtype=np.int64) * self.loops[axis, side]
                out = out + steps.reshape([-1 if i == axis + 1 else 1 for i in range(4)])
            return np.ascontiguousarray(out.reshape(-1))

        return spread(self.source, 1), spread(self.target, 2), np.repeat(self.size, int(np.prod(shape[1:])))

    def planes(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """The same runs as two-dimensional copies: (source, target, width, height, source pitch, target pitch)."""
        outer = self.loops.copy()
        inner = max((i for i in range(3) if outer[i, 0] > 1), default=0)
        height, source_pitch, target_pitch = (int(n) for n in outer[inner])
        outer[inner] = (1, 0, 0)
        for source, target, width in zip(*Job(self.source, self.target, self.size, outer).runs(), strict=True):
            yield int(source), int(target), int(width), height, source_pitch or int(width), target_pitch or int(width)


@dataclass(frozen=True)
class Pages:
    """Page ``of[i]`` of the pool at address ``source`` goes to page ``to[i]`` of the pool at ``target``, each of ``steps`` by itself."""

    steps: tuple[Strided, ...]
    of: Ints
    to: Ints
    source: int
    target: int

    @property
    def bytes(self) -> int:
        return len(self.of) * sum(step.run * int(loops_of(step)[:, 0].prod()) for step in self.steps)

    def jobs(self, longest: int = 0) -> list[Job]:
        """The runs of all steps; pages that adjoin on both sides are one run. ``longest`` (bytes): longer ones are cut (0: none are)."""
        return [self._job(step, longest) for step in self.steps]

    def _job(self, step: Strided, longest: int) -> Job:
        of, to = self.of, self.to
        count = np.ones(len(of), dtype=np.int64)
        if len(of) > 1 and step.run == step.source_page == step.target_page:
            first = np.flatnonzero(np.concatenate(([True], (np.diff(of) != 1) | (np.diff(to) != 1))))
            count = np.diff(first, append=len(of))
            of, to = of[first], to[first]
        source, target = self.source + step.source + of * step.source_page, self.target + step.target + to * step.target_page
        size = count * step.run
        if longest and size.max() > longest:
            parts = -(-size // longest)
            index = np.repeat(np.arange(len(size)), parts)
            at = (np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)) * longest
            source, target, size = source[index] + at, target[index] + at, np.minimum(longest, size[index] - at)
        return Job(source, target, size, loops_of(step))


def loops_of(step: Strided) -> Ints:
    """The loops of a plan: [3, 3] of (count, source stride, target stride), outermost first, filled up with loops of one."""
    rows = [(loop.count, loop.source, loop.target) for loop in step.loops]
    return np.array(rows + [(1, 0, 0)] * (3 - len(rows)), dtype=np.int64)


def move_with_numpy(source: Ints, target: Ints, size: Ints, loops: Ints, stream: bool, begin: int, end: int) -> None:
    """What :func:`hicache_ray.copies_cpu.move` does, one strided numpy copy per piece. numpy releases the GIL as well; it never streams."""
    if begin >= end:
        return
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
