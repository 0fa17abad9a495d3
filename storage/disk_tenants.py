"""What each tenant has on a disk, and what of it goes when that is over its cap. Nothing is counted where nobody has a cap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hicache_ray.storage.disk_plan import Placed, Plan
from hicache_ray.storage.disk_segment import SEALED, require
from hicache_ray.storage.disk_slots import SlotMap, place
from hicache_ray.storage.tenants import TENANT, Tenants
from hicache_ray.store import SPACE_BYTES

_VICTIMS = 1024  # looked up at once: a pass over all slots per put would cost more than its write


class DiskTenants:
    """Counts the lengths of what is visible or reserved. ``caps``: most bytes of each tenant; ``records``: what says whose a space is."""

    def __init__(self, caps: Mapping[str, int], records: Mapping[bytes, Mapping[str, str]]) -> None:
        """Raises StoreError."""
        self._tenants = Tenants(caps)
        self._lines: dict[int, list[tuple[int, int]]] = {}  # tenant -> (use, place) of its oldest, the very oldest last
        for digest, record in records.items():
            if (named := self.named(digest, record)) is not None:
                self._tenants.assign(*named)

    @property
    def counting(self) -> bool:
        return bool(self._tenants.caps)

    def named(self, digest: bytes, record: Mapping[str, str]) -> tuple[bytes, str] | None:
        """(space, tenant) where the record says so and it matters."""
        if not self._tenants.caps or TENANT not in record or len(digest) < SPACE_BYTES:
            return None
        return digest[:SPACE_BYTES], record[TENANT]

    def count(self, id: bytes, length: int, sign: int) -> None:
        """An object came (+1) or went (-1)."""
        if self._tenants.caps:
            usage = self._tenants.usage[self._tenants.of_one(id)]
            usage.bytes += sign * length
            usage.objects += sign

    def assign(self, space: bytes, tenant: str, lengths: Sequence[int]) -> None:
        """The space, which has objects of these ``lengths``, belongs to ``tenant`` from now on. Raises StoreError."""
        before, number = self._tenants.assign(space, tenant)
        if before != number:
            for usage, sign in ((self._tenants.usage[before], -1), (self._tenants.usage[number], 1)):
                usage.bytes += sign * sum(lengths)
                usage.objects += sign * len(lengths)
            self._tenants.forget(before)

    def excess(self, id: bytes, length: int, plan: Plan) -> tuple[int, int]:
        """(tenant, bytes of it that must go), so that this object, and what else the plan has of its tenant, come under the cap: told once
        per plan and tenant, 0 bytes afterwards."""
        number = self._tenants.of_one(id) if self._tenants.caps else 0
        cap = self._tenants.usage[number].cap
        if not cap or length > cap or number in plan.capped or self._over(number, length) <= 0:
            return number, 0
        plan.capped.add(number)
        rest = sum(more for _, other, more in plan.todo if other not in plan.visible and self._tenants.of_one(other) == number)
        return number, self._over(number, min(length + rest, cap))

    def admits(self, number: int, length: int) -> bool:
        """Is there room for an object under the cap of its tenant? A no is counted."""
        if self._over(number, length) <= 0:
            return True
        self._tenants.usage[number].refused += 1
        return False

    def too_much(self) -> Iterator[tuple[int, int]]:
        """(tenant, bytes of it over its cap) of each that is."""
        for number in range(len(self._tenants.usage)):
            if (over := self._over(number)) > 0:
                yield number, over

    def oldest(self, slots: SlotMap, number: int, size: int, before: int) -> Iterator[int]:
        """Places of the least recently used objects of a tenant, ``size`` bytes of them or all, that nobody has used since ``before``. Who
        asks evicts each before the next."""
        line = self._lines.setdefault(number, [])
        while size > 0:
            if not line:
                line[:] = self._list_oldest(slots, number, before)
                if not line:
                    return
            use, at = line.pop()
            if use < before and slots.idle(use, at):
                segment, slot = slots.at(at)
                if self._tenants.of_one(segment.id(slot)) == number:
                    size -= segment.length(slot)
                    self._tenants.usage[number].evictions += 1
                    yield at

    def report(self) -> dict[str, dict[str, int]]:
        """As of the arena; of objects that are reserved too."""
        return self._tenants.report() if self._tenants.caps else {}

    def check(self, slots: SlotMap, reserved: Iterable[Placed]) -> None:
        """Raises Inconsistent."""
        if not self._tenants.caps:
            return
        there = [(segment.id(slot), segment.length(slot)) for segment, slot in slots.visible()]
        there += [(placed.id, placed.length) for placed in reserved]
        for number, usage in enumerate(self._tenants.usage):
            mine = [length for id, length in there if self._tenants.of_one(id) == number]
            require((usage.bytes, usage.objects) == (sum(mine), len(mine)), f"what tenant {number} has on the disk is wrong")

    def _list_oldest(self, slots: SlotMap, number: int, before: int) -> list[tuple[int, int]]:
        """(use, place), the oldest last."""
        found: list[tuple[int, int]] = []
        for segment in slots.segments.values():
            old = np.flatnonzero((segment.state == SEALED) & (segment.used < before))
            mine = old[self._tenants.of(segment.records["id"][old]) == number]
            found += zip(segment.used[mine].tolist(), (place(segment, 0) + mine).tolist(), strict=True)
        return sorted(one for one in found if one[1] not in slots.pins)[:_VICTIMS][::-1]

    def _over(self, number: int, more: int = 0) -> int:
        """Bytes over the cap, with ``more``."""
        usage = self._tenants.usage[number]
        return usage.bytes + more - usage.cap if usage.cap else 0
