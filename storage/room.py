"""Placing the objects of one reservation: caps first, then slots, then evictions.

What cannot be placed is refused; nothing waits. Objects are placed class by class, in the order in which the classes appear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.descriptors import EXISTS, GRANTED, PENDING, REFUSED
from hicache_ray.storage.holdings import SEALED, Holdings, New
from hicache_ray.storage.slabs import slots_bytes
from hicache_ray.storage.table import Rows
from hicache_ray.storage.tenants import grouped


@dataclass(eq=False)
class Batch:
    """One call of reserve. ``rows``: of what it found visible and of what it placed, -1 elsewhere. What was used at tick ``start`` or
    later is not evicted for it."""

    outcomes: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint64]
    rows: Rows
    start: int


def place(held: Holdings, ids: npt.NDArray[np.uint8], lengths: Rows, pending: int | None) -> Batch:
    """``pending``: bytes that may be reserved now; None: no bound."""
    held.tick += 1
    hashes = held.table.hashes(ids)
    rows = held.table.find(ids, hashes)
    fresh = rows < 0
    batch = Batch(np.full(len(ids), REFUSED, np.uint8), np.zeros(len(ids), np.uint64), rows, held.tick)
    if not fresh.all():
        seen = ~fresh & (held.table["state"][rows] == SEALED)
        batch.outcomes[~fresh] = PENDING
        batch.outcomes[seen] = EXISTS
        rows[~seen] = -1
        held.use(rows[seen])  # before anything is evicted
    if len(ids) > 1:
        again = fresh & held.table.repeated(ids, hashes)
        batch.outcomes[again] = PENDING
        fresh &= ~again
    todo = fresh.nonzero()[0]
    held.counters.put_refused += len(todo)
    todo = _within_pending(held, todo, lengths, pending)
    todo = _within_caps(held, ids, lengths, todo, batch.start)
    for size, part in grouped(slots_bytes(lengths[todo])):
        mine = todo[part]
        offsets = _slots(held, size, len(mine), batch.start)
        mine = mine[: len(offsets)]
        new = New(ids[mine], hashes[mine], lengths[mine], offsets, size, batch.start)
        batch.outcomes[mine] = GRANTED
        batch.offsets[mine] = offsets
        rows[mine] = held.start(new)
        held.counters.put_refused -= len(mine)
    return batch


def _within_pending(held: Holdings, todo: Rows, lengths: Rows, pending: int | None) -> Rows:
    if pending is None or not len(todo):
        return todo
    fits = np.cumsum(lengths[todo]) <= pending
    held.counters.dropped += len(todo) - int(fits.sum())
    return todo[fits]


def _within_caps(held: Holdings, ids: npt.NDArray[np.uint8], lengths: Rows, todo: Rows, start: int) -> Rows:
    """Evict the oldest of a tenant that would come over its cap; what still does not fit is left out, from the first such object on."""
    if not held.tenants.caps or not len(todo):
        return todo
    keep = np.ones(len(todo), np.bool_)
    for number, part in grouped(held.tenants.of(ids[todo])):
        usage, sums = held.tenants.usage[number], np.cumsum(lengths[todo[part]])
        if not usage.cap:
            continue
        wanted = int(sums[sums <= usage.cap].max(initial=0))
        held.shrink(number, wanted, start)
        fits = sums <= usage.cap - usage.bytes
        usage.refused += len(fits) - int(fits.sum())
        keep[part] = fits
    return todo[keep]


def _slots(held: Holdings, size: int, count: int, start: int) -> Rows:
    """At most ``count`` slots of a class, evicting its oldest objects, or runs of other classes that are colder than those.

    Runs are compared once per call and class, and again when the class has nothing left to evict.
    """
    parts = [held.slabs.take(size, count, start)]
    missing, compared = count - len(parts[0]), False
    if not missing:
        return parts[0]
    while missing:
        own = held.oldest("kind", held.kind(size), missing, start)
        ask = not len(own) or (not compared and held.slabs.colder(int(held.table["tick"][own[0]])))
        window = held.slabs.coldest(size, start) if ask else None
        compared = True
        if window is not None and (not len(own) or window.mean_tick < held.table["tick"][own[0]]):
            held.evict(held.between(window.low, window.high))
        elif len(own):
            held.evict(own)
        else:
            break
        parts.append(held.slabs.take(size, missing, start))
        missing -= len(parts[-1])
    return np.concatenate(parts)
