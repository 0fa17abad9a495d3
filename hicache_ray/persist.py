"""Pages on their way from L2 to L3: what is left to write, how much at once, who writes what all ranks have alike.

These are parts of stories (see :mod:`hicache_ray.story`): they yield records like the story that runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np

from hicache_ray import backup, transfer
from hicache_ray.index import from_bits, to_bits
from hicache_ray.ledger import DETACHED, FAILED, LATE, REFUSED, Gone
from hicache_ray.records import Merged, Move, Record
from hicache_ray.residency import Residency
from hicache_ray.resume import Path
from hicache_ray.settings import Settings
from hicache_ray.spec import Shard, Tier
from hicache_ray.story import Story, Wait


class Persist:
    """Over one :class:`Residency`. ``next_id`` numbers records. ``persisting``: bytes of a rank on their way to L3."""

    def __init__(self, res: Residency, settings: Settings, next_id: Callable[[], int]) -> None:
        self.res = res
        self.spec = res.spec
        self.settings = settings
        self._next_id = next_id
        self.persisting = 0
        self._turn = 0

    def persist(self, path: Path, components: Sequence[str] = (), must: bool = False, until: float = math.inf) -> Story:
        """L2 to L3, of these components, of all without. The pages are leased now, also where the story that writes them begins later.

        Where too much is on its way already it is left, and counted as dropped, unless it ``must``: somebody waits for it, so that
        there is not much of that. What was dropped is written at the next use. ``until``: nobody waits longer for it, on the group's clock.
        """
        parts = backup.not_durable(self.res, path) if self.res.storage else ()
        parts = tuple(p for p in parts if not components or p.component in components)
        size = sum(len(p.pages) * self.spec[p.component].page_bytes(self.spec.page_size) for p in parts)
        if not must and self.persisting and self.persisting + size > self.settings.backup_bytes:
            for p in parts:
                self.res.counters[(Tier.STORAGE, p.component)].dropped += len(p.pages)
            parts, size = (), 0
        self.persisting += size
        return self._write(transfer.begin(self.res, "persist", Tier.STORAGE, parts, path), size, until)

    def _write(self, moved: transfer.Transfer, size: int, until: float) -> Story:
        try:
            if not moved:
                return
            left_s = self._left(until)
            got = yield Move(self._next_id(), "persist", Tier.HOST, Tier.STORAGE, moved.spans(), left_s, self._turn)
            got = yield from self._other_writer(moved, got, until)
            self._count(moved, got, Tier.STORAGE)
            for leg, bits in zip(moved.legs, got.bits, strict=True):
                known = transfer.fresh(self.res, moved, leg)
                sealed = [k for i, k in enumerate(leg.keys) if bits >> i & 1 and known[i]]
                entries = self.res.index.find(sealed)
                self.res.set_durable(leg.component, entries)
                left = tuple(k for i, k in enumerate(leg.keys) if known[i] and not bits >> i & 1)
                if left:
                    self.res.gone.append(Gone((Tier.STORAGE, leg.component), left, self._why(got)))
        finally:
            self.persisting -= size
            transfer.close(self.res, moved)

    def _why(self, got: Merged) -> str:
        """Why L3 does not have what was written."""
        if not self.res.storage:
            return DETACHED
        return LATE if got.late else FAILED if got.error else REFUSED

    def _left(self, until: float) -> float:
        """Seconds that a record may take which nobody waits for longer than ``until``."""
        return min(self.settings.prefetch_cap_s, until - self.res.now())

    def _other_writer(self, moved: transfer.Transfer, got: Merged, until: float) -> Generator[Record | Wait, Merged, Merged]:
        """What all ranks have alike and its writer could not store, another one does. Returns what has been stored in the end."""
        shared = (i for i, leg in enumerate(moved.legs) if self._spare_writer(leg.component))
        left = [(i, flags) for i in shared if np.any(flags := ~from_bits(got.bits[i], len(moved.legs[i].keys)))]
        if not left or got.late or not self.res.storage or (left_s := self._left(until)) <= 0:
            return got
        self._turn += 1
        spans = moved.spans()
        some = tuple(
            replace(s, source=s.source[f], keys=tuple(k for k, x in zip(s.keys, f, strict=True) if x), pages=s.pages[f])
            for s, f in ((spans[i], flags) for i, flags in left)
        )
        more = yield Move(self._next_id(), "persist", Tier.HOST, Tier.STORAGE, some, left_s, self._turn)
        bits = list(got.bits)
        for (i, flags), done in zip(left, more.bits, strict=True):
            flags[flags] = from_bits(done, int(np.count_nonzero(flags)))
            bits[i] |= to_bits(flags)
        return replace(got, bits=tuple(bits), error=got.error or more.error, late=more.late)

    def _spare_writer(self, component: str) -> bool:
        c = self.spec[component]
        return c.shard is Shard.REPLICATED and len(self.spec.owners(c)) > 1

    def _count(self, moved: transfer.Transfer, got: Merged, tier: Tier) -> None:
        for leg, bits in zip(moved.legs, got.bits, strict=True):
            counters = self.res.counters[(tier, leg.component)]
            counters.backups += bits.bit_count()
            counters.failures += len(leg.keys) - bits.bit_count()
