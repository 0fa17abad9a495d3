"""Where objects lie in an arena: slabs, runs, slots. Pure arithmetic; no memory is touched.

    arena   [0, capacity)           cut into slabs of equal size
    run     slabs [start, start+n)  all cut into slots of one size class
    slot    one object, or free

A size class is a size rounded up by less than 1.6 %. A run takes as many adjacent slabs as are needed to waste at most 1/24 of them
(fewer when so many adjacent slabs cannot be had). A run without objects dissolves at once, so free slabs serve any class.
Which objects go when room is short is not decided here: :meth:`SlabMap.coldest` only says what a move of whole slabs would cost.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache_ray.errors import ConfigError, Inconsistent

ALIGN = 64  # bytes: no two objects share a cache line
CLASSES_PER_OCTAVE = 64
MAX_WASTE = 24  # a run may leave 1/24 of itself uncut; with the rounding of sizes that is less than 6 %
BLOCK = 4096  # bytes: slabs are multiples of it; there is one generation word per block
SHARES_WORD = BLOCK - ALIGN  # bytes: objects up to this long have slots shorter than a block, of which several share a word


class State(enum.Enum):
    RESERVED = "reserved"  # a writer fills it; invisible
    SEALED = "sealed"  # visible
    DEAD = "dead"  # dropped while a lease or a writer still uses the bytes; the slot is free when that ends


@dataclass(eq=False)
class Entry:
    """One object in its slot. ``pins``: open leases on it, plus one while a writer holds it. ``tick``: when it was last used."""

    __slots__ = ("id", "length", "run", "number", "state", "pins", "tick", "checksum", "generation")
    id: bytes
    length: int
    run: Run
    number: int
    state: State
    pins: int
    tick: int
    checksum: int
    generation: int

    @property
    def offset(self) -> int:
        """Bytes from the start of the arena's data."""
        return self.run.offset + self.number * self.run.slot_bytes


@dataclass(eq=False)
class Run:
    """Adjacent slabs cut into slots of one class. ``tick_sum`` and ``newest`` speak of the entries in it."""

    start: int
    slabs: int
    slot_bytes: int
    offset: int
    entries: list[Entry | None]
    free: list[int]
    pinned: int = 0
    tick_sum: int = 0
    newest: int = 0

    @property
    def used(self) -> int:
        return len(self.entries) - len(self.free)

    @property
    def mean_tick(self) -> float:
        return self.tick_sum / self.used


class Window(NamedTuple):
    """Runs whose eviction frees enough adjacent slabs for a class. ``mean_tick``: how recently their objects were used, on average."""

    mean_tick: float
    runs: list[Run]


def slot_bytes(length: int) -> int:
    """Size class of an object of ``length`` bytes, in bytes."""
    grain = max(ALIGN, (1 << max(length - 1, 0).bit_length()) // (2 * CLASSES_PER_OCTAVE))
    return max(-(-length // grain) * grain, ALIGN)


def default_slab_bytes(capacity_bytes: int) -> int:
    """About 128 slabs: few enough to scan, small enough that moving one between classes evicts under 1 % of the arena."""
    return min(max(capacity_bytes // 128 // BLOCK * BLOCK, BLOCK), 1 << 30)


@dataclass
class SlabMap:
    """Slots of several sizes in one range of bytes. Not thread-safe: its owner locks."""

    capacity_bytes: int
    slab_bytes: int
    free_slabs: int = 0
    _owner: list[Run | None] = field(default_factory=list)  # per slab
    _open: dict[int, dict[int, Run]] = field(default_factory=dict)  # class -> start -> run with a free slot

    def __post_init__(self) -> None:
        if self.slab_bytes < BLOCK or self.slab_bytes % BLOCK:
            raise ConfigError(f"slab size {self.slab_bytes} must be a multiple of {BLOCK} bytes")
        if self.capacity_bytes < self.slab_bytes:
            raise ConfigError(f"storage.size {self.capacity_bytes} is less than one slab of {self.slab_bytes} bytes")
        self.free_slabs = self.capacity_bytes // self.slab_bytes
        self._owner = [None] * self.free_slabs
        self.capacity_bytes = self.free_slabs * self.slab_bytes

    def allocate(self, id: bytes, length: int, size: int, tick: int) -> Entry | None:
        """Place a reserved entry (one pin) in a free slot of class ``size``; None when there is none and no free slabs are adjacent."""
        runs = self._open.get(size)
        run = next(iter(runs.values())) if runs else self._carve(size)
        if run is None:
            return None
        number = run.free.pop()
        if not run.free:
            del self._open[size][run.start]
        entry = Entry(id, length, run, number, State.RESERVED, 1, tick, 0, 0)
        run.entries[number] = entry
        run.pinned += 1
        run.tick_sum += tick
        run.newest = tick
        return entry

    def free(self, entry: Entry) -> None:
        """Give the slot back. The entry must have no pins."""
        run = entry.run
        if entry.pins or run.entries[entry.number] is not entry:
            raise Inconsistent(f"slot {entry.number} of the run at slab {run.start} is freed while pinned or by a stranger")
        run.entries[entry.number] = None
        run.tick_sum -= entry.tick
        run.free.append(entry.number)
        self._open.setdefault(run.slot_bytes, {})[run.start] = run
        if not run.used:
            self._dissolve(run)

    def touch(self, entry: Entry, tick: int) -> None:
        """``tick`` grows with every use."""
        entry.run.tick_sum += tick - entry.tick
        entry.run.newest = entry.tick = tick

    def pin(self, entry: Entry) -> None:
        entry.run.pinned += entry.pins == 0
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        entry.run.pinned -= entry.pins == 0

    def coldest(self, size: int, before: int) -> Window | None:
        """The cheapest runs to empty so that class ``size`` gets a run: no pins in them, no use at tick ``before`` or later."""
        preferred, least = self._run_slabs(size)
        return self._coldest(preferred, before) or (self._coldest(least, before) if least < preferred else None)

    def entries(self) -> list[Entry]:
        """Every entry, dead ones too."""
        return [entry for run in self._runs() for entry in run.entries if entry is not None]

    def check(self) -> None:
        """Runs tile the slabs they claim; free lists and counters agree with the entries. Raises Inconsistent."""
        for run in self._runs():
            held = [entry for entry in run.entries if entry is not None]
            where = f"run at slab {run.start}"
            require(self._owner[run.start : run.start + run.slabs] == [run] * run.slabs, f"{where} does not own its slabs")
            require(len(run.entries) * run.slot_bytes <= run.slabs * self.slab_bytes, f"{where} is overfull")
            require(bool(held), f"{where} is empty but not dissolved")
            require(sorted(run.free) == [i for i, e in enumerate(run.entries) if e is None], f"{where}: free list is wrong")
            require(all(e.run is run and run.entries[e.number] is e for e in held), f"{where}: an entry points elsewhere")
            require(all(e.length <= run.slot_bytes for e in held), f"{where}: an object is longer than its slot")
            require(run.pinned == sum(e.pins > 0 for e in held), f"{where}: pinned count is wrong")
            require(run.tick_sum == sum(e.tick for e in held), f"{where}: tick sum is wrong")
            require(run.newest >= max(e.tick for e in held), f"{where}: newest is wrong")
            require((run.start in self._open.get(run.slot_bytes, {})) == bool(run.free), f"{where}: open list is wrong")
        require(self.free_slabs == self._owner.count(None), "free slab count is wrong")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _runs(self) -> list[Run]:
        return [run for slab, run in enumerate(self._owner) if run is not None and run.start == slab]

    def _run_slabs(self, size: int) -> tuple[int, int]:
        """(slabs of a run that wastes little, slabs of the smallest run) for slots of ``size`` bytes."""
        least = -(-size // self.slab_bytes)
        for slabs in range(least, min(least + MAX_WASTE + 1, len(self._owner)) + 1):
            total = slabs * self.slab_bytes
            if total % size * MAX_WASTE <= total:
                return slabs, least
        return least, least

    def _carve(self, size: int) -> Run | None:
        preferred, least = self._run_slabs(size)
        for slabs in (preferred, least):
            start = self._gap(slabs)
            if start is not None:
                count = slabs * self.slab_bytes // size
                run = Run(start, slabs, size, start * self.slab_bytes, [None] * count, list(range(count - 1, -1, -1)))
                self._owner[start : start + slabs] = [run] * slabs
                self.free_slabs -= slabs
                self._open.setdefault(size, {})[start] = run
                return run
        return None

    def _gap(self, slabs: int) -> int | None:
        """First of ``slabs`` adjacent free slabs."""
        if self.free_slabs < slabs:
            return None
        length = 0
        for slab, run in enumerate(self._owner):
            length = length + 1 if run is None else 0
            if length == slabs:
                return slab - slabs + 1
        return None

    def _dissolve(self, run: Run) -> None:
        self._owner[run.start : run.start + run.slabs] = [None] * run.slabs
        self.free_slabs += run.slabs
        del self._open[run.slot_bytes][run.start]
        if not self._open[run.slot_bytes]:
            del self._open[run.slot_bytes]

    def _coldest(self, slabs: int, before: int) -> Window | None:
        best: Window | None = None
        for start in range(len(self._owner) - slabs + 1):
            run = self._owner[start]
            if run is not None and start > run.start:
                continue  # a window that starts inside a run costs as much as one that starts with it
            window = self._window(start, slabs, before)
            if window is not None and (best is None or window.mean_tick < best.mean_tick):
                best = window
        return best

    def _window(self, start: int, slabs: int, before: int) -> Window | None:
        runs: list[Run] = []
        slab = start
        while slab < start + slabs:
            run = self._owner[slab]
            if run is None:
                slab += 1
                continue
            if run.pinned or run.newest >= before:
                return None
            runs.append(run)
            slab = run.start + run.slabs
        used = sum(run.used for run in runs)
        return Window(sum(run.tick_sum for run in runs) / used if used else -1.0, runs)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Inconsistent(what)
