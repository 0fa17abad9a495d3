"""What lies behind the arena of a node: looked up there, and brought into the arena before it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.copying import Copier, as_array
from hicache_ray.storage.descriptors import Reservation
from hicache_ray.storage.ids import Ids, packed, unpacked
from hicache_ray.storage.movers import Batch
from hicache_ray.storage.table import IdTable
from hicache_ray.store import Answer, Lent, Store

log = logging.getLogger("hicache_ray.storage")
_STEP = 256  # objects fetched at once
_PART = 1 << 14  # ids compared at once


class Host(Protocol):
    """What it needs of a :class:`~hicache_ray.storage.node.NodeStore`."""

    arena: Arena

    def missing(self, ids: npt.NDArray[np.uint8]) -> tuple[list[bytes], int]: ...

    def reserve(self, ids: Ids, lengths: Sequence[int], owner: int, seconds: float) -> Reservation: ...

    def seal_promoted(self, reservation: int, sums: Sequence[int | None], owner: int, fence: int) -> None: ...


class Promotion:
    """Thread-safe. It does not keep the host: whoever is closed is free at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: of deadlines."""
        self._clock = clock
        self._copier = Copier(1, kernel="off")  # they wait for the store behind, not for the copy

    def bring(self, host: Host, back: Store, ids: npt.NDArray[np.uint8], owner: int, timeout_s: float) -> None:
        """Bring what is only behind into the arena, as far as that is done within ``timeout_s``. Whatever fails is a miss."""
        until = self._clock() + timeout_s
        names, fence = host.missing(ids)
        for start in range(0, len(names), _STEP):
            left = until - self._clock()
            if left <= 0:
                return
            some = names[start : start + _STEP]
            try:
                with back.lease(some, left) as lent:
                    damaged = self._copy(host, some, lent, owner, fence, until)
                if damaged:
                    self._tell_damaged(back, damaged, until)
            except StoreError:
                return

    def close(self) -> None:
        self._copier.close()

    def _copy(self, host: Host, names: Sequence[bytes], lent: Lent, owner: int, fence: int, until: float) -> dict[bytes, int]:
        """Published is only what was whole by ``until``, still lent after the copy, and has the checksum that the lender says, if it says
        one. Returns what has not, with the lengths."""
        found = [(i, as_array(view)) for i, view in enumerate(lent.views) if view is not None]
        if not found:
            return {}
        asked = self._clock()
        place = host.reserve([names[i] for i, _ in found], [data.nbytes for _, data in found], owner, host.arena.config.hold_s)
        until = min(until, asked + place.seconds)  # later the memory may be another's
        copied = [found[n] for n in place.granted.tolist()]
        sums: list[int | None] = [None] * len(copied)
        damaged: dict[bytes, int] = {}
        try:
            memory, offsets = host.arena.segment.data, place.offsets[place.granted].tolist()
            targets = [memory[at : at + data.nbytes] for at, (_, data) in zip(offsets, copied, strict=True)]
            batch = Batch.of([data for _, data in copied], targets, of_source=True)
            read = self._copier.run(batch, lambda: self._clock() >= until).listed()
            known: Sequence[int | None] = getattr(lent, "checksums", None) or [None] * len(names)
            valid = lent.valid()
            for n, ((i, data), value) in enumerate(zip(copied, read, strict=True)):
                if value is None or not valid >> i & 1:
                    continue
                if known[i] in (None, value):
                    sums[n] = value
                else:
                    damaged[names[i]] = data.nbytes
        finally:
            host.seal_promoted(place.id, sums, owner, fence)
        return damaged

    def _tell_damaged(self, back: Store, damaged: Mapping[bytes, int], until: float) -> None:
        """A read of its own shows the store behind what it holds: it drops what does not fit, and counts it."""
        log.warning("%d objects behind the arena do not fit their checksums; they are misses", len(damaged))
        back.get(list(damaged), [np.empty(size, np.uint8) for size in damaged.values()], until - self._clock())


def look_behind(back: Store, keys: Ids, tags: Sequence[bytes], answers: list[Answer], timeout_s: float) -> list[Answer]:
    """``answers``: of the arena, one per tag. Asked is only for what is not there: for the keys that some tag misses, under those tags."""
    everything = (1 << len(keys)) - 1
    missed = [everything & ~answer.hit for answer in answers]
    which = list(bits.each(reduce(or_, missed, 0)))
    if not which:
        return answers
    names = unpacked(keys) if isinstance(keys, np.ndarray) else keys
    try:
        found = back.lookup([names[i] for i in which], [tag for tag, miss in zip(tags, missed, strict=True) if miss], timeout_s)
    except StoreError:  # nobody can say now what is behind; what is here is here
        return [replace(answer, retry=miss & ~answer.pending) for answer, miss in zip(answers, missed, strict=True)]
    return [_union(answer, _spread(found[tag], which)) if tag in found else answer for answer, tag in zip(answers, tags, strict=True)]


def united(here: npt.NDArray[np.uint8], behind: Iterator[bytes], compiled: Any) -> npt.NDArray[np.uint8]:
    """(n, 64) ids that are here or behind, each once. Of millions, a set of them would keep everybody else from working for seconds.

    ``compiled``: as of :attr:`IdTable.compiled`.
    """
    table = IdTable()
    table.compiled = compiled
    table.add(here)
    parts = [here]
    while some := list(islice(behind, _PART)):
        ids = packed(some)
        parts.append(ids[table.find(ids) < 0])
    return np.concatenate(parts)


def _spread(answer: Answer, which: Sequence[int]) -> Answer:
    """Bit ``n`` speaks of key ``which[n]``."""
    if which[-1] == len(which) - 1:
        return answer
    return Answer(*(sum(1 << which[n] for n in bits.each(part)) for part in (answer.hit, answer.pending, answer.retry)))


def _union(here: Answer, behind: Answer) -> Answer:
    hit = here.hit | behind.hit
    pending = (here.pending | behind.pending) & ~hit
    return Answer(hit=hit, pending=pending, retry=behind.retry & ~hit & ~pending)
