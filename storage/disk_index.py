"""What a disk store holds, and what goes when room is short. No reads and writes: DiskFiles keeps the books of room and makes the files.

Life of an object: ``reserve`` (invisible) -> ``record`` (its bytes are written) -> ``seal`` (visible) -> evicted, dropped or cleared. A
slot in use by a reader or a writer is never given to another object: it is DEAD until the last user ends. Eviction is LRU within a size
class; a class also takes the segment whose objects are older, on average, than its own oldest object. Before anything is evicted, a segment
of another class that is thin is emptied (see :mod:`hicache_ray.storage.disk_moves`). Within one call the first id counts
as the most recently used: callers pass pages from the root down, and what stays must be root-reachable. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ray.storage import bits
from hicache_ray.storage.disk_format import Geometry, geometry, pack_record, slot_size
from hicache_ray.storage.disk_holdings import DiskHoldings
from hicache_ray.storage.disk_plan import Found, Placed, Plan
from hicache_ray.storage.disk_segment import RESERVED, SEALED, Segment
from hicache_ray.storage.disk_slots import mean_use, place
from hicache_ray.store import Answer


class DiskIndex(DiskHoldings):
    """What the store asks of its holdings."""

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tag: bytes) -> Answer:
        ids = [key + tag for key in keys]
        hit = bits.pack(at >= 0 for at in self._find(ids))
        pending = bits.pack(map(self.reserved.__contains__, ids)) if self.reserved else 0
        return Answer(hit=hit, pending=pending & ~hit)  # what moves is both

    # -- writing -----------------------------------------------------------------------------------------------------------------

    def reserve(self, ids: Sequence[bytes], lengths: Sequence[int], writable: bool) -> Plan:
        """Slots for new objects, evicting older ones; of equal ids the first counts. See ``proceed``."""
        first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))
        places = dict(zip(ids, self._find(ids), strict=True))
        self.slots.tick += 1
        todo = [(i, id, length) for i, (id, length) in enumerate(zip(ids, lengths, strict=True)) if first[id] == i]
        plan = Plan(self.slots.tick, todo[::-1])
        self.slots.use([at for at in places.values() if at >= 0])  # before anything is evicted
        plan.visible = {id for id, at in places.items() if at >= 0}
        if not writable:
            plan.refused = sum(id not in plan.visible and id not in self.reserved for _, id, _ in todo)
            plan.order = [id for _, id, _ in todo if id in plan.visible]
            plan.todo.clear()
        self.proceed(plan)
        return plan

    def proceed(self, plan: Plan) -> None:
        """Place what has no slot yet, until a segment must be made or emptied; whoever did it calls ``grown``, then this again."""
        while plan.todo and plan.wanted is None and plan.leaving is None:
            number, id, length = plan.todo.pop()
            if id in plan.visible:
                plan.order.append(id)
            elif id not in self.reserved:
                at = self._allocate(length, plan) if self._within_cap(id, length, plan) else None
                if at is None:
                    plan.refused += 1
                elif isinstance(at, Geometry):
                    plan.todo.append((number, id, length))
                    plan.wanted = at
                elif isinstance(at, Segment):
                    plan.todo.append((number, id, length))
                    plan.leaving = at
                else:
                    self.slots.tick += 1
                    plan.placed.append(self.place(Placed(number, id, length, *at, self.slots.tick)))
                    plan.order.append(id)

    def grown(self, plan: Plan, made: Segment | None, error: Exception | None) -> None:
        """The segment that the plan waited for is there, or gone, or why not: then nothing more is placed.

        What others have stored since the plan was made is not stored again.
        """
        plan.wanted, plan.leaving, plan.error = None, None, error
        if made is not None:
            self.slots.add(made)
        ids = [id for _, id, _ in plan.todo]
        plan.visible |= {id for id, at in zip(ids, self._find(ids), strict=True) if at >= 0}

    def record(self, placed: Placed, checksum: int) -> bool:
        """Its bytes are on the disk: write its record, in memory. False where it was dropped meanwhile."""
        segment, slot = placed.segment, placed.slot
        if segment.state[slot] != RESERVED:
            return False
        segment.write_record(slot, pack_record(placed.id, placed.length, checksum, placed.sequence, segment.file.uid, slot))
        return True

    def seal(self, plan: Plan, done: Sequence[Placed]) -> None:
        """Make visible those whose records are on the disk and that were not dropped meanwhile; give the others up."""
        good = [placed for placed in done if placed.segment.state[placed.slot] == RESERVED]
        if good:
            places = np.array([place(placed.segment, placed.slot) for placed in good], np.int64)
            entered = self.table.insert([placed.id for placed in good], places).tolist()
            good = [placed for placed, there in zip(good, entered, strict=True) if there]
        for placed in good:
            del self.reserved[placed.id]
            placed.segment.state[placed.slot] = SEALED
            placed.segment.sealed += 1
            placed.segment.busy -= 1
            plan.visible.add(placed.id)
        sealed = {placed.id for placed in good}
        self.give_up([placed for placed in plan.placed if placed.id not in sealed])
        found = zip(plan.order, self._find(plan.order), strict=True)
        self.slots.use([at for id, at in found if at >= 0 and id in plan.visible])
        self.counters.puts += len(good)
        self.counters.put_refused += plan.refused + len(plan.placed) - len(good)

    def abandon(self, plan: Plan) -> None:
        """Nobody waits for this put any more, and nobody writes for it."""
        self.give_up(plan.placed)

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def take(self, ids: Sequence[bytes]) -> list[Found | None]:
        """Pin what is visible. Counts as use."""
        found: list[Found | None] = []
        places = self._find(ids)
        for id, at in zip(ids, places, strict=True):
            if at < 0:
                found.append(None)
                continue
            segment, slot = self.slots.at(at)
            self.slots.pin(segment, slot)
            row = segment.records[slot]
            found.append(Found(id, segment, slot, int(row["length"]), int(row["checksum"]), int(row["sequence"])))
        self.slots.use([at for at in places if at >= 0])
        self.counters.gets += len(ids)
        self.counters.get_misses += found.count(None)
        return found

    # -- removing ----------------------------------------------------------------------------------------------------------------

    def drop(self, ids: Sequence[bytes]) -> int:
        """Remove objects, revoke reservations of them. Returns the bitset of those that were visible."""
        places = dict(zip(ids, self._find(ids), strict=True))
        existed = []
        for id in ids:
            at = places.pop(id, -1)  # of equal ids the first counts
            existed.append(at >= 0)
            if at >= 0:
                self._remove(*self.slots.at(at))
            self._revoke(id)
        return bits.pack(existed)

    def clear(self, prefix: bytes) -> int:
        """Remove what begins with ``prefix`` and revoke the reservations of it. Returns how many objects were visible."""
        found = list(self.slots.visible(prefix))
        for segment, slot in found:
            self._remove(segment, slot)
        for id in [id for id in self.reserved if id.startswith(prefix)]:
            self._revoke(id)
        return len(found)

    def shrink(self) -> None:
        """Give up the coldest segments until the files fit under the cap."""
        for segment in sorted(self.segments(), key=mean_use):
            if self.files.room >= 0:
                return
            self.dissolve(segment)

    def assign(self, space: bytes, tenant: str) -> None:
        """Ids that begin with ``space`` belong to ``tenant`` from now on; its oldest go if that is over its cap. Raises StoreError."""
        lengths = [segment.length(slot) for segment, slot in self.slots.visible(space)]
        lengths += [placed.length for id, placed in self.reserved.items() if id.startswith(space)]
        self.tenants.assign(space, tenant, lengths)
        self.keep_caps()

    def keep_caps(self) -> None:
        """Evict the oldest of who has too much."""
        for number, size in list(self.tenants.too_much()):
            self._evict_of(number, size, self.slots.tick + 1)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _allocate(self, length: int, plan: Plan) -> tuple[Segment, int] | Geometry | Segment | None:
        """A free slot, making room where there is none; or the segment to make, whose room is taken, or to empty, which takes nothing new;
        None where there is none to be had."""
        size, most = slot_size(length), self.files.config.segment
        while plan.error is None and length <= most:
            at = self.slots.take_free(size)
            if at is not None:
                return at
            shape = geometry(size, most, self.files.room)
            if shape is not None:
                self.files.claim(shape)
                return shape
            if size not in plan.compared and (thin := self.slots.thin(size)) is not None:
                plan.compared.add(size)
                self.slots.close(thin)
                return thin
            if not self._make_room(size, plan):
                return None
        return None

    def _make_room(self, size: int, plan: Plan) -> bool:
        """Evict the oldest object of the class, or a segment of another class that is colder. Nothing that this call used."""
        if size in plan.starved:
            return False
        own = self.slots.oldest(size, plan.start)
        coldest = self.slots.coldest(size, plan.start) if own is None or size not in plan.weighed else None
        plan.weighed.add(size)
        if coldest is not None and (own is None or mean_use(coldest) < own[0]):
            self.counters.evictions += coldest.sealed
            self.dissolve(coldest)
            return True
        if own is None:
            plan.starved.add(size)
            return False
        self.counters.evictions += 1
        self._remove(*self.slots.at(own[1]))
        return True

    def _within_cap(self, id: bytes, length: int, plan: Plan) -> bool:
        """Where the object would bring its tenant over its cap, the oldest of that go. False where there is no room for it all the same."""
        if length > self.files.config.segment:
            return True  # there is no slot for it anyway
        number, size = self.tenants.excess(id, length, plan)
        if size:
            self._evict_of(number, size, plan.start)
        return self.tenants.admits(number, length)

    def _evict_of(self, tenant: int, size: int, before: int) -> None:
        for at in self.tenants.oldest(self.slots, tenant, size, before):
            self.counters.evictions += 1
            self._remove(*self.slots.at(at))
