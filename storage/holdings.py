"""The objects of an arena and their slots: columns by row, order of use, and how an object comes and goes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.claims import Spare
from hicache_ray.storage.lru import OldestFirst
from hicache_ray.storage.slabs import BLOCK, SlabMap, require, slot_bytes
from hicache_ray.storage.table import IdTable, Rows, Words
from hicache_ray.storage.tenants import Tenants, grouped


class State(enum.IntEnum):
    FREE = 0  # no object
    RESERVED = 1  # a writer fills it; invisible
    SEALED = 2  # visible
    DEAD = 3  # dropped while a lease or a writer still uses the bytes; the slot is free when that ends


#: What is kept per object. ``pins``: open leases, plus one while a writer holds it; ``tick``: when it was last used; ``serial``: grows
#: with every object that has the row. It comes round after 2**32 of them, which none lives through that remembers it: reservations are open
#: for seconds.
COLUMNS = {
    **{"length": "i8", "offset": "i8", "checksum": "u8", "tick": "i8", "pins": "i4", "serial": "i4"},
    **{"kind": "i2", "tenant": "i2", "state": "u1"},
}
_ONE = np.uint64(1)
FREE, RESERVED, SEALED, DEAD = (int(state) for state in State)


@dataclass
class Counters:
    puts: int = 0
    put_refused: int = 0
    gets: int = 0
    get_misses: int = 0
    checksum_failures: int = 0
    evictions: int = 0
    dropped: int = 0


@dataclass(frozen=True, eq=False)
class New:
    """Objects of one class in slots that were taken at ``tick``. ``hashes``: of the ids."""

    ids: npt.NDArray[np.uint8]
    hashes: Words
    lengths: Rows
    offsets: Rows
    size: int
    tick: int


class Holdings:
    """What :class:`~hicache_ray.storage.index.ArenaIndex` is made on; it says who may do what, here it is done."""

    def __init__(self, slabs: SlabMap, generations: Any, caps: Mapping[str, int] | None) -> None:
        self.slabs = slabs
        self.generations: npt.NDArray[np.uint64] = np.asarray(generations, np.uint64)
        self.words = memoryview(self.generations)  # type: ignore[arg-type]  # the same, for one at a time
        slabs.on_carved = partial(_carved, self.generations)
        self.table = IdTable(columns=COLUMNS)
        self.tenants = Tenants(caps)
        self.counters = Counters()
        self.used_bytes = 0  # lengths of everything that occupies a slot, but for spare ones
        self.objects = 0  # visible ones
        self.tick = 0
        self.lost: list[npt.NDArray[np.uint8]] | None = None  # ids that went before anybody asked for it; set it to know
        self.order = OldestFirst()
        self.kinds: dict[int, int] = {}  # size class -> its number

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, and of the lists of free slots."""
        return self.table.nbytes + self.slabs.nbytes

    def start(self, new: New) -> Rows:
        """Rows of new objects, invisible and held by one writer."""
        table, rows = self.table, self.table.add(new.ids, new.hashes)
        tenants, kind = self.tenants.of(new.ids), self.kinds.setdefault(new.size, len(self.kinds))
        for name, value in {
            **{"length": new.lengths, "offset": new.offsets, "checksum": 0, "tick": new.tick, "pins": 1},
            **{"kind": kind, "tenant": tenants, "state": RESERVED},
        }.items():
            table[name][rows] = value
        table["serial"][rows] += 1
        self.generations[new.offsets // BLOCK] += np.uint64(1)
        self.used_bytes += int(new.lengths.sum())
        self.tenants.count(tenants, new.lengths, 1)
        return rows

    def show(self, rows: Rows, checksums: npt.NDArray[np.uint64]) -> None:
        """Reserved objects are visible from now on, and nobody's. The caller uses them."""
        table = self.table
        table["pins"][rows] = 0
        table["state"][rows] = SEALED
        table["checksum"][rows] = checksums
        self.slabs.unpin(table["offset"][rows])
        self.objects += len(rows)
        self.tenants.count_objects(table["tenant"][rows], 1)
        self.counters.puts += len(rows)

    def use(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """These objects are the most recently used, the first most of all. Returns flags: is it the first place of its row?"""
        count, ticks = len(rows), self.table["tick"]
        now = np.arange(self.tick + count, self.tick, -1)
        self.tick += count
        before = ticks[rows]
        ticks[rows[::-1]] = now[::-1]  # of equal rows the first is written last
        first = ticks[rows] == now
        own = rows[first]
        self.slabs.touch(self.table["offset"][own], before[first], now[first])
        return first

    def pin(self, rows: Rows, first: npt.NDArray[np.bool_]) -> None:
        """One user more of each; ``first``: as :meth:`use` returned it."""
        pins = self.table["pins"]
        self.slabs.pin(self.table["offset"][rows[first & (pins[rows] == 0)]])
        np.add.at(pins, rows, 1)

    def let_go(self, rows: Rows) -> None:
        """One user less of each. What was never sealed, or was removed meanwhile, is freed with the last one."""
        table = self.table
        np.subtract.at(table["pins"], rows, 1)
        rows = rows[table["pins"][rows] == 0]
        if len(rows) > 1:
            rows = np.unique(rows)
        self.slabs.unpin(table["offset"][rows])
        seen = table["state"][rows] == SEALED
        if seen.any():
            self.order.back(int(table["tick"][rows[seen]].min()))
        if seen.all():
            return
        rows = rows[~seen]
        self.table.hide(rows[table["state"][rows] == RESERVED])
        self._free(rows)

    def remove(self, rows: Rows) -> None:
        """Make visible and reserved objects, each named once, invisible; a slot is free now, or when the last user lets go."""
        table = self.table
        seen = rows[table["state"][rows] == SEALED]
        self.objects -= len(seen)
        self.tenants.count_objects(table["tenant"][seen], -1)
        table["state"][rows] = DEAD
        table.hide(rows)
        self._free(rows[table["pins"][rows] == 0])

    def lose(self, rows: Rows) -> None:
        """Remove visible objects, and remember which they were if somebody wants to know."""
        if self.lost is not None and len(rows):
            self.lost.append(self.table.ids(rows))
        self.remove(rows)

    def oldest(self, column: str, value: int, count: int, before: int) -> Rows:
        """At most ``count`` evictable objects of one class or tenant, oldest first, not used at tick ``before`` or later."""
        table = self.table

        def candidates() -> Rows:
            return np.flatnonzero((table["state"] == SEALED) & (table["pins"] == 0) & (table[column] == value))

        rows = self.order.oldest((column, value), count, table["tick"], candidates)
        return rows[table["tick"][rows] < before]

    def oldest_one(self, column: str, value: int) -> int:
        """:meth:`oldest` of one, used at whatever tick; -1 where there is none."""
        row = self.order.oldest_one((column, value), self.table.cells["tick"])
        if row < 0:
            rows = self.oldest(column, value, 1, self.tick + 1)
            row = rows.item(0) if len(rows) else -1
        return row

    def evict(self, rows: Rows) -> None:
        for number, part in grouped(self.table["tenant"][rows]):
            self.tenants.usage[number].evictions += len(rows[part])
        self.lose(rows)
        self.counters.evictions += len(rows)

    def kind(self, size: int) -> int:
        """Number of a size class; -1 where no object of it was ever placed."""
        return self.kinds.get(size, -1)

    def between(self, low: int, high: int) -> Rows:
        """Objects whose slots begin in these bytes."""
        offsets, states = self.table["offset"], self.table["state"]
        return np.flatnonzero((offsets >= low) & (offsets < high) & (states != FREE))

    def assign(self, space: bytes, tenant: str) -> None:
        """Ids that begin with ``space`` belong to ``tenant`` from now on; what they hold moves to it, and its oldest go if that is over its
        cap. Raises StoreError."""
        before, number = self.tenants.assign(space, tenant)
        if before == number:
            return
        state = self.table["state"]
        rows = np.flatnonzero(self.table.starting(space) & (state != FREE))  # dead ones too
        for sign in (-1, 1):
            self.tenants.count(self.table["tenant"][rows], self.table["length"][rows], sign)
            self.tenants.count_objects(self.table["tenant"][rows[state[rows] == SEALED]], sign)
            self.table["tenant"][rows] = number
        self.order.back(-1)  # the lines of both were made before
        self.tenants.forget(before)
        self.shrink(number, 0, self.tick + 1)

    def shrink(self, tenant: int, wanted: int, before: int) -> None:
        """Evict the oldest of a tenant, as far as they may go and were not used at tick ``before`` or later, until ``wanted`` bytes more
        fit under its cap."""
        usage = self.tenants.usage[tenant]
        while usage.cap and (over := usage.bytes + wanted - usage.cap) > 0:
            rows = self.oldest("tenant", tenant, 1 + over // max(usage.bytes // max(usage.objects, 1), 1), before)
            if not len(rows):
                return
            younger = np.cumsum(self.table["length"][rows]) - self.table["length"][rows]
            self.evict(rows[younger < over])

    def check(self) -> None:
        """Raises Inconsistent."""
        self.check_with([])

    def check_with(self, spares: Sequence[Spare]) -> None:
        """``spares``: slots in use that no object has. Raises Inconsistent."""
        table, states = self.table, self.table["state"]
        table.check()
        rows = np.flatnonzero(states != FREE)
        offsets, lengths, pins = (table[name][rows] for name in ("offset", "length", "pins"))
        slots = np.append(offsets, np.array([spare.offset for spare in spares], np.int64))
        ticks = np.append(table["tick"][rows], np.array([spare.tick for spare in spares], np.int64))
        self.slabs.check(slots, np.append(pins > 0, [True] * len(spares)), ticks)
        sizes = {number: size for size, number in self.kinds.items()}
        found = table.rows()
        require(bool(np.isin(states[found], (RESERVED, SEALED)).all()), "an object is found that is not there")
        require(len(found) == int(np.isin(states, (RESERVED, SEALED)).sum()), "an object is not found")
        require(self.objects == int((states == SEALED).sum()), "the count of objects is wrong")
        require(bool((pins > 0)[states[rows] != SEALED].all()), "a slot is held by nobody")
        require(self.used_bytes == int(lengths.sum()), "used bytes are wrong")
        classes = [sizes[kind] for kind in table["kind"][rows].tolist()]
        require(classes == list(map(slot_bytes, lengths.tolist())), "an object has the wrong class")
        require(len(np.unique(slots)) == len(slots), "two objects share a slot")
        seen = table["tick"][states == SEALED]
        require(len(np.unique(seen)) == len(seen), "two objects were used at the same tick")
        for number, usage in enumerate(self.tenants.usage):
            mine = rows[table["tenant"][rows] == number]
            require(usage.bytes == int(table["length"][mine].sum()), f"bytes of tenant {number} are wrong")
            require(usage.objects == int((states[mine] == SEALED).sum()), f"objects of tenant {number} are wrong")

    def _free(self, rows: Rows) -> None:
        """Rows that are hidden, and their slots, belong to nobody."""
        if not len(rows):
            return
        table, lengths = self.table, self.table["length"][rows]
        self.used_bytes -= int(lengths.sum())
        self.tenants.count(table["tenant"][rows], lengths, -1)
        self.slabs.give(table["offset"][rows], table["tick"][rows])
        table["state"][rows] = FREE
        table["pins"][rows] = 0
        table["tick"][rows] = -1
        table.free(rows)


def _carved(generations: npt.NDArray[np.uint64], low: int, high: int) -> None:
    """An object that lay here began at another block, perhaps, than what comes in its place: whoever still reads it must see that. (Not a
    method: slabs that knew their owner would keep the memory mapped.)"""
    words = generations[low // BLOCK : high // BLOCK]
    words += _ONE
