"""Where objects lie in an arena: slabs, runs, slots. Pure arithmetic; no memory is touched.

    arena   [0, capacity)           cut into slabs of equal size
    run     slabs [start, start+n)  all cut into slots of one size class
    slot    one object, or free

A size class is a size rounded up by less than 1.6 %. A run takes as many adjacent slabs as are needed to waste at most 1/24 of them
(fewer when so many adjacent slabs cannot be had). A run without objects dissolves at once, so free slabs serve any class.
Which objects go when room is short is not decided here: :meth:`SlabMap.coldest` only says what a move of whole slabs would cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import ConfigError, Inconsistent
from hicache_ray.storage.runs import Numbers, Run

ALIGN = 64  # bytes: no two objects share a cache line
CLASSES_PER_OCTAVE = 64
MAX_WASTE = 24  # a run may leave 1/24 of itself uncut; with the rounding of sizes that is less than 6 %
BLOCK = 4096  # bytes: slabs are multiples of it; there is one generation word per block
SHARES_WORD = BLOCK - ALIGN  # bytes: objects up to this long have slots shorter than a block, of which several share a word


class Cells(NamedTuple):
    """What a map keeps per slab, for one number at a time. ``run``: of any slab; the rest: of a slab that begins a run."""

    run: memoryview
    used: memoryview
    pinned: memoryview
    ticks: memoryview
    newest: memoryview


class Window(NamedTuple):
    """Bytes ``[low, high)``, whole runs, whose eviction frees enough adjacent slabs for a class. ``mean_tick``: how recently their
    objects were used, on average; -1 where there are none."""

    mean_tick: float
    low: int
    high: int


def slot_bytes(length: int) -> int:
    """Size class of an object of ``length`` bytes, in bytes."""
    grain = max(ALIGN, (1 << max(length - 1, 0).bit_length()) // (2 * CLASSES_PER_OCTAVE))
    return max(-(-length // grain) * grain, ALIGN)


def slots_bytes(lengths: Numbers) -> Numbers:
    """:func:`slot_bytes` of each."""
    if len(lengths) == 1:
        return np.array([slot_bytes(int(lengths[0]))])
    octave = np.frexp(np.maximum(lengths - 1, 0).astype(np.float64))[1].astype(np.int64)  # the bit length: exact below 2**53
    grain = np.maximum(ALIGN, np.left_shift(1, octave) // (2 * CLASSES_PER_OCTAVE))
    return np.maximum(-(-lengths // grain) * grain, ALIGN)


def default_slab_bytes(capacity_bytes: int) -> int:
    """About 128 slabs: few enough to scan, small enough that moving one between classes evicts under 1 % of the arena."""
    return min(max(capacity_bytes // 128 // BLOCK * BLOCK, BLOCK), 1 << 30)


class SlabMap:
    """Slots of several sizes in one range of bytes. Not thread-safe: its owner locks.

    Says nothing of which object is in a slot; of a run it counts slots in use, those pinned, and the ticks of their last uses.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        if slab_bytes < BLOCK or slab_bytes % BLOCK:
            raise ConfigError(f"slab size {slab_bytes} must be a multiple of {BLOCK} bytes")
        if capacity_bytes < slab_bytes:
            raise ConfigError(f"storage.size {capacity_bytes} is less than one slab of {slab_bytes} bytes")
        self.slab_bytes = slab_bytes
        self.free_slabs = capacity_bytes // slab_bytes
        self.capacity_bytes = self.free_slabs * slab_bytes
        self.runs: dict[int, Run] = {}  # by first slab
        self._run = np.full(self.free_slabs, -1, np.int64)  # per slab: first slab of its run; -1: free
        # Per slab, of the run that starts there.
        self._used, self._pinned, self._ticks, self._newest = own = np.zeros((4, self.free_slabs), np.int64)
        self.cells = Cells(*map(memoryview, (self._run, *own)))  # type: ignore[arg-type]
        self._open: dict[int, dict[int, Run]] = {}  # class -> start -> run with a free slot
        #: Told of every range of bytes ``[low, high)`` that is cut into slots, anew perhaps: what lay there overlaps several of them.
        self.on_carved: Callable[[int, int], None] = lambda low, high: None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept per slab and per free slot."""
        own = (self._run, self._used, self._pinned, self._ticks, self._newest)
        return sum(part.nbytes for part in own) + sum(4 * len(run.back) for run in self.runs.values())

    def take(self, size: int, count: int, tick: int) -> Numbers:
        """Offsets of at most ``count`` free slots of class ``size``, in use and pinned from now on; fewer where room is short."""
        parts = []
        while count:
            runs = self._open.get(size)
            run = next(iter(runs.values())) if runs else self._carve(size)
            if run is None:
                break
            part = run.take(count)
            if not run.vacant:
                self._shut(run)
            got = len(part)
            self._used[run.start] += got
            self._pinned[run.start] += got
            self._ticks[run.start] += got * tick
            self._newest[run.start] = max(int(self._newest[run.start]), tick)
            parts.append(part)
            count -= got
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def take_one(self, size: int, tick: int) -> int:
        """:meth:`take` of one slot; -1 where room is short."""
        runs = self._open.get(size)
        run = next(iter(runs.values())) if runs else self._carve(size)
        if run is None:
            return -1
        offset = run.take_one()
        if not run.vacant:
            self._shut(run)
        cells, start = self.cells, run.start
        cells.used[start] += 1
        cells.pinned[start] += 1
        cells.ticks[start] += tick
        cells.newest[start] = max(cells.newest[start], tick)
        return offset

    def give(self, offsets: Numbers, ticks: Numbers) -> None:
        """Slots that are not pinned are free again. ``ticks``: of their last uses."""
        runs = self._runs_of(offsets)
        np.subtract.at(self._ticks, runs, ticks)
        starts = dict.fromkeys(runs.tolist())
        for start in starts:
            run = self.runs[start]
            mine = offsets if len(starts) == 1 else offsets[runs == start]
            run.back.frombytes(((mine - run.offset) // run.slot_bytes).astype(np.int32).tobytes())
            self._open.setdefault(run.slot_bytes, {})[start] = run
            self._used[start] -= len(mine)
            if self._used[start] < self._pinned[start]:
                raise Inconsistent(f"a slot of the run at slab {start} is freed while pinned")
            if not self._used[start]:
                self._dissolve(run)

    def give_one(self, offset: int, tick: int) -> None:
        """:meth:`give` of one slot."""
        cells, start = self.cells, self.cells.run[offset // self.slab_bytes]
        run = self.runs[start]
        run.back.append((offset - run.offset) // run.slot_bytes)
        self._open.setdefault(run.slot_bytes, {})[start] = run
        cells.ticks[start] -= tick
        cells.used[start] -= 1
        if cells.used[start] < cells.pinned[start]:
            raise Inconsistent(f"a slot of the run at slab {start} is freed while pinned")
        if not cells.used[start]:
            self._dissolve(run)

    def touch(self, offsets: Numbers, before: Numbers, now: Numbers) -> None:
        """Each slot, once, was used at tick ``now``, and at ``before`` until then. Ticks grow with every use."""
        runs = self._runs_of(offsets)
        np.add.at(self._ticks, runs, now - before)
        self._newest[runs] = now.max(initial=0)  # of the call, not of each run: nobody asks for ticks within a call

    def touch_one(self, offset: int, before: int, now: int) -> None:
        """:meth:`touch` of one slot."""
        cells, start = self.cells, self.cells.run[offset // self.slab_bytes]
        cells.ticks[start] += now - before
        cells.newest[start] = now

    def pin_one(self, offset: int, change: int) -> None:
        """:meth:`pin` (+1) or :meth:`unpin` (-1) of one slot."""
        self.cells.pinned[self.cells.run[offset // self.slab_bytes]] += change

    def pin(self, offsets: Numbers) -> None:
        """Slots that nobody had pinned."""
        np.add.at(self._pinned, self._runs_of(offsets), 1)

    def unpin(self, offsets: Numbers) -> None:
        """Slots that nobody has pinned any more."""
        np.subtract.at(self._pinned, self._runs_of(offsets), 1)

    def colder(self, tick: int) -> bool:
        """Is there a run whose objects were used before ``tick``, on average? If not, :meth:`coldest` finds nothing colder either."""
        return bool((self._ticks < tick * self._used).any())

    def coldest(self, size: int, before: int) -> Window | None:
        """The cheapest runs to empty so that class ``size`` gets a run: no pins in them, no use at tick ``before`` or later."""
        preferred, least = self._run_slabs(size)
        return self._coldest(preferred, before) or (self._coldest(least, before) if least < preferred else None)

    def check(self, offsets: Numbers, pinned: npt.NDArray[np.bool_], ticks: Numbers) -> None:
        """Runs tile the slabs they claim; counters and free slots agree with the slots in use, which the caller names (``pinned`` as
        flags). Raises Inconsistent."""
        owner = self._runs_of(offsets)
        require(bool((owner >= 0).all()), "an object lies in a free slab")
        for run in self.runs.values():
            mine, where = owner == run.start, f"run at slab {run.start}"
            numbers = (offsets[mine] - run.offset) // run.slot_bytes
            require(bool((self._run[run.start : run.start + run.slabs] == run.start).all()), f"{where} does not own its slabs")
            require(run.count * run.slot_bytes <= run.slabs * self.slab_bytes, f"{where} is overfull")
            require(len(numbers) > 0, f"{where} is empty but not dissolved")
            require(bool((run.offset + numbers * run.slot_bytes == offsets[mine]).all()), f"{where}: an object is not at a slot")
            require(sorted([*numbers.tolist(), *run.back]) == list(range(run.fresh)), f"{where}: free slots are wrong")
            require(self._used[run.start] == len(numbers), f"{where}: used count is wrong")
            require(self._pinned[run.start] == pinned[mine].sum(), f"{where}: pinned count is wrong")
            require(self._ticks[run.start] == ticks[mine].sum(), f"{where}: tick sum is wrong")
            require(self._newest[run.start] >= ticks[mine].max(), f"{where}: newest is wrong")
            require((run.start in self._open.get(run.slot_bytes, {})) == bool(run.vacant), f"{where}: open list is wrong")
        require(set(np.unique(self._run).tolist()) - {-1} == self.runs.keys(), "a slab belongs to no run")
        require(self.free_slabs == int((self._run < 0).sum()), "free slab count is wrong")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _runs_of(self, offsets: Numbers) -> Numbers:
        return self._run[offsets // self.slab_bytes]

    def _run_slabs(self, size: int) -> tuple[int, int]:
        """(slabs of a run that wastes little, slabs of the smallest run) for slots of ``size`` bytes."""
        least = -(-size // self.slab_bytes)
        for slabs in range(least, min(least + MAX_WASTE + 1, len(self._run)) + 1):
            total = slabs * self.slab_bytes
            if total % size * MAX_WASTE <= total:
                return slabs, least
        return least, least

    def _carve(self, size: int) -> Run | None:
        preferred, least = self._run_slabs(size)
        for slabs in (preferred, least):
            start = self._gap(slabs)
            if start is not None:
                run = Run(start, slabs, size, start * self.slab_bytes, slabs * self.slab_bytes // size)
                self._run[start : start + slabs] = start
                self.runs[start] = run
                self.free_slabs -= slabs
                self._open.setdefault(size, {})[start] = run
                self.on_carved(run.offset, run.offset + slabs * self.slab_bytes)
                return run
        return None

    def _gap(self, slabs: int) -> int | None:
        """First of ``slabs`` adjacent free slabs."""
        if self.free_slabs < slabs:
            return None
        if slabs == 1:
            return int(self._run.argmin())  # -1 is the least
        taken = np.concatenate([[0], np.cumsum(self._run >= 0)])
        fits = taken[slabs:] == taken[:-slabs]
        first = int(fits.argmax())
        return first if fits[first] else None

    def _dissolve(self, run: Run) -> None:
        self._run[run.start : run.start + run.slabs] = -1
        self._newest[run.start] = 0
        self.free_slabs += run.slabs
        del self.runs[run.start]
        self._shut(run)

    def _shut(self, run: Run) -> None:
        """The run has no slot to give."""
        del self._open[run.slot_bytes][run.start]
        if not self._open[run.slot_bytes]:
            del self._open[run.slot_bytes]

    def _coldest(self, slabs: int, before: int) -> Window | None:
        """Windows start with a run or a free slab: one that starts inside a run costs as much. They end with the run they cut into."""
        everywhere = np.arange(len(self._run))
        first = (self._run < 0) | (self._run == everywhere)
        part = np.cumsum(first) - 1  # per slab: which run or free slab, in order
        starts = everywhere[first]
        barred = (self._pinned[starts] > 0) | (self._newest[starts] >= before)
        sums = np.concatenate([np.zeros((3, 1), np.int64), np.cumsum([barred, self._ticks[starts], self._used[starts]], axis=1)], axis=1)
        left = np.flatnonzero(starts + slabs <= len(self._run))
        right = part[starts[left] + slabs - 1] + 1
        stops, ticks, used = sums[:, right] - sums[:, left]
        left, right, ticks, used = (values[stops == 0] for values in (left, right, ticks, used))
        if not len(left):
            return None
        means = np.where(used > 0, ticks / np.maximum(used, 1), -1.0)
        best = int(means.argmin())
        ends = np.append(starts, len(self._run))
        return Window(float(means[best]), int(starts[left[best]]) * self.slab_bytes, int(ends[right[best]]) * self.slab_bytes)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Inconsistent(what)
