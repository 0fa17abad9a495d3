"""What :class:`~hicache_ray.storage.holdings.Holdings` does to many objects, for one of them.

A pass over an array costs a microsecond however short the array is, and a call makes a hundred of them: more than it takes to copy the
page that the call is about. So a batch of one goes through plain numbers, which live in the same memory (:attr:`RowStore.cells`). Every
function here leaves behind exactly what its elder sister would.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hicache_ray.storage.descriptors import EXISTS, GRANTED, PENDING
from hicache_ray.storage.holdings import FREE, RESERVED, SEALED, Holdings
from hicache_ray.storage.slabs import BLOCK, slot_bytes

_HALF = 1 << 31


class Placed(NamedTuple):
    """``row``: of what was found visible or was placed, else -1. ``offset``: 0 unless placed."""

    outcome: int
    offset: int = 0
    row: int = -1


def place_one(held: Holdings, id: bytes, length: int, pending: int | None) -> Placed | None:
    """:func:`~hicache_ray.storage.room.place`; None, and nothing done, where it is refused, perhaps, or takes more than its own class has
    to give."""
    value = held.table.hash_one(id)
    row = held.table.find_one(id, value)
    if row >= 0:
        held.tick += 1
        if held.table.cells["state"][row] != SEALED:
            return Placed(PENDING)
        use_one(held, row)
        return Placed(EXISTS, row=row)
    if held.tenants.caps or (pending is not None and length > pending):
        return None
    size = slot_bytes(length)
    offset = held.slabs.take_one(size, held.tick + 1)
    if offset < 0:
        if not evict_one(held, size):
            return None
        offset = held.slabs.take_one(size, held.tick + 1)
    held.tick += 1
    return Placed(GRANTED, offset, start_one(held, id, value, length, offset, size))


def evict_one(held: Holdings, size: int) -> bool:
    """:meth:`Holdings.evict` of the oldest object of a class, as a reservation of one more does: so its slot is free. False, and nothing
    done, where there is none, or the runs of other classes have to be compared with it."""
    table, slabs = held.table, held.slabs
    row = held.oldest_one("kind", held.kind(size))
    if row < 0 or slabs.colder(table.cells["tick"][row]):
        return False
    cells = table.cells
    length, usage = cells["length"][row], held.tenants.usage[cells["tenant"][row]]
    if held.lost is not None:
        held.lost.append(table.ids(np.array([row])))
    usage.evictions += 1
    usage.objects -= 1
    usage.bytes -= length
    held.objects -= 1
    held.used_bytes -= length
    held.counters.evictions += 1
    table.hide_one(row)
    slabs.give_one(cells["offset"][row], cells["tick"][row])
    cells["state"][row], cells["pins"][row], cells["tick"][row] = FREE, 0, -1
    table.free_one(row)
    return True


def show_one(held: Holdings, row: int, checksum: int) -> None:
    """:meth:`Holdings.show`."""
    cells = held.table.cells
    cells["pins"][row] = 0
    cells["state"][row] = SEALED
    cells["checksum"][row] = checksum
    held.slabs.pin_one(cells["offset"][row], -1)
    held.objects += 1
    held.tenants.usage[cells["tenant"][row]].objects += 1
    held.counters.puts += 1


def use_one(held: Holdings, row: int) -> None:
    """:meth:`Holdings.use`."""
    cells = held.table.cells
    held.tick += 1
    before, cells["tick"][row] = cells["tick"][row], held.tick
    held.slabs.touch_one(cells["offset"][row], before, held.tick)


def pin_one(held: Holdings, row: int) -> None:
    """:meth:`Holdings.pin`."""
    cells = held.table.cells
    if not cells["pins"][row]:
        held.slabs.pin_one(cells["offset"][row], 1)
    cells["pins"][row] += 1


def let_go_one(held: Holdings, row: int) -> bool:
    """:meth:`Holdings.let_go`; False, and nothing done, where the object would have to be freed."""
    cells = held.table.cells
    pins = cells["pins"][row]
    if pins == 1:
        if cells["state"][row] != SEALED:
            return False
        held.slabs.pin_one(cells["offset"][row], -1)
        held.order.back(cells["tick"][row])
    cells["pins"][row] = pins - 1
    return True


def start_one(held: Holdings, id: bytes, value: int, length: int, offset: int, size: int) -> int:
    """:meth:`Holdings.start`."""
    row = held.table.add_one(id, value)
    cells, tenant = held.table.cells, held.tenants.of_one(id)
    cells["length"][row], cells["offset"][row], cells["checksum"][row] = length, offset, 0
    cells["tick"][row], cells["pins"][row], cells["state"][row] = held.tick, 1, RESERVED
    cells["kind"][row], cells["tenant"][row] = held.kinds.setdefault(size, len(held.kinds)), tenant
    cells["serial"][row] = (cells["serial"][row] + 1 + _HALF) % (2 * _HALF) - _HALF  # as 32 bits do
    held.words[offset // BLOCK] += 1
    held.used_bytes += length
    held.tenants.usage[tenant].bytes += length
    return row
