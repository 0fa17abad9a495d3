"""Pages on their way down: room is made, what only the device holds is rescued to the host, the host's pages go to L3.

These are parts of stories (see :mod:`hicache_ray.story`): they yield records like the story that runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np

from hicache_ray import backup, evict, insert, lengths, transfer
from hicache_ray.index import ABSENT
from hicache_ray.lease import Lease, Place
from hicache_ray.match import match
from hicache_ray.persist import Persist
from hicache_ray.policy_order import Entries
from hicache_ray.records import Move
from hicache_ray.residency import Residency
from hicache_ray.resume import Match, Part, Path
from hicache_ray.settings import Settings, StateSnapshots, WritePolicy
from hicache_ray.spec import Tier
from hicache_ray.story import Pause, Story, Wait

#: Pages of one component that go down in the background at once: requests' own copies come between.
WRITE_DOWN_PAGES = 64


class Descent(Persist):
    """Over one :class:`Residency`. ``next_id`` numbers records; ``spawn`` takes a story that nobody waits for.

    ``waits``: how often somebody who needed room on the device had to wait for copies to the host.
    """

    def __init__(self, res: Residency, settings: Settings, next_id: Callable[[], int], spawn: Callable[[str, Story], None]) -> None:
        super().__init__(res, settings, next_id)
        self.spawn = spawn
        self.waits = 0
        self._writing_down = False
        self._copying = 0

    def backup(self, path: Path, prompt: int) -> Story:
        """Under write-through: what the path has in L1 goes to L2; under the selective one, what of it has been used often enough. Under
        every policy: what L2 has of it goes to L3. ``prompt``: tokens of the prompt that the path began as."""
        if self.settings.state_snapshots is not StateSnapshots.ALL:
            insert.thin(self.res, path.keys, prompt, self.settings.state_snapshots)
        if self.settings.write_policy is not WritePolicy.WRITE_BACK:
            yield from self._pass_through(self._all(path).path)
            everything = self._all(path)
            path = everything.path
            own = {c.name: self._cached((Tier.HOST, c.name), path) for c in self.spec.components}
            yield from self._copy_down(backup.wanted(self.res, everything, self._uses), path, own)
            # What has just arrived is the deep end of a path whose beginning was here before: together they keep their order.
            for c in self.spec.components:
                self.res.touch((Tier.HOST, c.name), self._cached((Tier.HOST, c.name), path))
        yield from self.persist(self._all(path).path)
        if self.settings.write_policy is not WritePolicy.WRITE_THROUGH:
            yield from self._write_down()

    @property
    def _uses(self) -> int:
        """How often a page must have been used to be backed up before it leaves the device."""
        return self.settings.selective_threshold if self.settings.write_policy is WritePolicy.SELECTIVE else 0

    def _write_down(self) -> Story:
        """A share of the device is kept free, or in the hands of pages that the host has as well: so that who needs room need not wait for
        a copy. Those that would go next are copied, few at a time, as far as the host has room that costs nobody anything."""
        if self._writing_down or not self.settings.device_reserve:
            return
        self._writing_down = True
        tried: set[tuple[str, bytes]] = set()
        try:
            while some := self._dirty(tried):
                names = {(c, self.res.index.key(e)) for c, entries in some.items() for e in entries.tolist()}
                yield from self._rescue(some, tried)
                tried |= names
        finally:
            self._writing_down = False

    def _dirty(self, tried: Set[tuple[str, bytes]]) -> Mapping[str, Entries]:
        """The next pages of the reserve that only the device has, as many as the host can take for nothing."""
        out = {}
        for c in self.spec.components:
            place = (Tier.DEVICE, c.name)
            reserve = min(int(self.res.capacity[place] * self.settings.device_reserve), self.res.room(place))
            victims = evict.entries_of(evict.choose(self.res, Tier.DEVICE, {c.name: reserve}))
            some = evict.only_here(self.res, victims, tried).get(c.name)
            if some is not None:
                some = some[: self._spare(c.name, min(len(some), WRITE_DOWN_PAGES))]
                if len(some):
                    out[c.name] = some
        return out

    def _spare(self, component: str, count: int) -> int:
        """Up to ``count`` slots of the host that can be had without losing what is nowhere else."""
        place = (Tier.HOST, component)
        free = self.res.pools[place].free
        victims = evict.entries_of(evict.choose(self.res, Tier.HOST, {component: count})).get(component) if count > free else None
        if victims is None:
            return min(count, free)
        safe = self.res.index.durable(place, victims) | (self.res.index.slots((Tier.DEVICE, component), victims) != ABSENT)
        return free + (int(np.argmin(safe)) if not np.all(safe) else len(victims))

    def write_all(self) -> Story:
        """What L1 and L2 alone have goes to L3, as far as that takes it. Nothing else is under way."""
        tried: set[tuple[str, bytes]] = set()
        while self.res.storage:
            alone: dict[str, Entries] = {}
            for c in self.spec.components:
                entries = self.res.index.in_place((Tier.DEVICE, c.name))
                entries = entries[~self.res.index.durable((Tier.HOST, c.name), entries)]
                alone |= evict.only_here(self.res, {c.name: entries}, tried)
            if not alone:
                break
            yield from self._rescue(alone, tried)
        for c in self.spec.components:
            here = self.res.index.in_place((Tier.HOST, c.name))
            names = tuple(self.res.index.key(e) for e in here.tolist())
            yield from self.persist(Path(names), (c.name,), must=True)

    def _all(self, path: Path) -> Match:
        """What of a path is where. Every length inside it is of interest here, not only those below the cap of one request."""
        return match(self.res, path, lengths.ones(len(path.keys) + 1), not self.settings.exact)

    def _pass_through(self, path: Path) -> Story:
        """Of a path longer than the host, all goes through it to L3 first, as much at a time as it can take; without L3 it is refused.

        What the host then keeps is chosen as if the path had come anew.
        """
        left = backup.stranded(self.res, path, self._uses)
        own = self._own(path)
        if all(len(p.pages) <= backup.room(self.res, p.component, own[p.component]) for p in left):
            return
        while left and self.res.storage:
            own = self._own(path)
            some = [Part(p.component, p.tier, p.pages[: backup.room(self.res, p.component, own[p.component])]) for p in left]
            yield from self._copy_down(some, path, own)
            yield from self.persist(path, must=True)
            before, left = left, backup.stranded(self.res, path, self._uses)
            if sum(len(p.pages) for p in left) >= sum(len(p.pages) for p in before):
                break
        for part in left:
            self.res.counters[(Tier.HOST, part.component)].refused += len(part.pages)
        if self.res.storage:
            evict.leave(self.res, Tier.HOST, {c.name: self._passed(c.name, path) for c in self.spec.components})

    def _passed(self, component: str, path: Path) -> Entries:
        """Host pages of a path that L3 has and nobody leases."""
        place = (Tier.HOST, component)
        there = self._cached(place, path)
        return there[self.res.index.durable(place, there) & self.res.idle(place, there)]

    def room(self, tier: Tier, need: Mapping[str, int], until: float | None = None) -> Story:
        """Free slots in a tier by eviction. What only the device holds is copied to the host first, while that has room.

        Where the host is too small for it L3 takes what it can ``until`` then, on the group's clock (in ``prefetch_base_s`` from now);
        nobody waits longer for that, the rest is lost.
        """
        tried: set[tuple[str, bytes]] = set()
        until = self.res.now() + self.settings.prefetch_base_s if until is None else until
        while True:
            victims = evict.choose(self.res, tier, need)
            if victims is None:
                yield Wait.CHANGE
                continue
            alone = evict.only_here(self.res, evict.entries_of(victims), tried) if tier is Tier.DEVICE else {}
            if not alone:
                evict.drop(self.res, tier, victims)
                return
            self.waits += tier is Tier.DEVICE
            # Others may lease the victims while they are copied, so the choice is made anew afterwards.
            yield from self._rescue(alone, tried, until)

    def _rescue(self, victims: Mapping[str, Entries], tried: set[tuple[str, bytes]], until: float = math.inf) -> Story:
        """Device pages on their way out go to the host, as many as it has room for, and from there to L3.

        ``tried`` gains what need not be rescued any more. Where the host is too small for all at once and L3 takes what it is given, the
        rest is left for another round, and all of it where what is on its way down already holds the host; ``until``: how long L3 may
        take for that, on the group's clock.
        """
        names = {c: [self.res.index.key(e) for e in entries.tolist()] for c, entries in victims.items()}  # first to go first
        keys = tuple(dict.fromkeys(k for some in names.values() for k in reversed(some)))  # what is written first is of use alone
        path = Path(keys)  # of many prompts, and of names as they are in the index
        where = {k: i for i, k in enumerate(keys)}
        own = {c.name: self._not_sealed(c.name, keys) for c in self.spec.components}
        taken, left = [], set()
        for component, some in names.items():
            room = backup.room(self.res, component, own[component])
            take, rest = some[::-1][:room], some[::-1][room:]
            taken.append(Part(component, Tier.DEVICE, np.asarray([where[k] for k in take], dtype=np.int32)))
            left |= {(component, self.res.index.key(e)) for e in self._not_sealed(component, rest).tolist()}
            tried |= {(component, k) for k in some} - left
        under_way = self.persisting or self._copying
        if left and not any(len(p.pages) for p in taken) and under_way and until < math.inf and self._left(until) > 0:
            yield Pause(Wait.ROOM, until)
            return
        yield from self._copy_down(taken, path, own)
        for component, some in names.items():  # they arrive in the order in which they have left
            self.res.touch_in_order((Tier.HOST, component), self._cached((Tier.HOST, component), Path(tuple(some))))
        if in_time := self._left(until) > 0 and bool(left):
            yield from self.persist(path, must=True, until=until)
        else:
            self.spawn("persist", self.persist(path))
        if not in_time or not any(len(p.pages) for p in taken) or not self.res.storage or self._unsealed(taken, path):
            tried |= left
            for component, _ in left:
                self.res.counters[(Tier.HOST, component)].refused += 1

    def _unsealed(self, parts: Sequence[Part], path: Path) -> bool:
        """Whether L3 is not known to have a page of these that the host has."""
        places = (((Tier.HOST, p.component), self.res.index.find(path.names(p.component, p.pages.tolist()))) for p in parts)
        return any(np.any((self.res.index.slots(at, some) != ABSENT) & ~self.res.index.durable(at, some)) for at, some in places)

    def _copy_down(self, parts: Sequence[Part], path: Path, own: Mapping[str, Entries]) -> Story:
        """L1 to L2. The host pages ``own`` (component -> entries) are held meanwhile, so that making room does not take them."""
        parts = [p for p in parts if len(p.pages)]
        held = [self._lease((Tier.HOST, c), entries[self._in_host(c, entries)]) for c, entries in own.items()]
        moved = None
        try:
            victims = evict.choose(self.res, Tier.HOST, {p.component: len(p.pages) for p in parts})
            if not parts or victims is None:
                for p in parts:
                    self.res.counters[(Tier.HOST, p.component)].refused += len(p.pages)
                return
            evict.drop(self.res, Tier.HOST, victims)
            moved = transfer.begin(self.res, "backup", Tier.HOST, parts, path)
            self._copying += 1
            got = yield Move(self._next_id(), "backup", Tier.DEVICE, Tier.HOST, moved.spans(), self.settings.copy_deadline_s)
            transfer.arrive(self.res, moved, got.bits)
            self._count(moved, got, Tier.HOST)
        finally:
            if moved is not None:
                transfer.close(self.res, moved)
                self._copying -= 1
            self.res.leases.release_all(held)

    def _cached(self, place: Place, path: Path) -> Entries:
        entries = self.res.index.find(path.names(place[1]))
        return entries[self.res.index.slots(place, entries) >= 0]

    def _own(self, path: Path) -> Mapping[str, Entries]:
        """Entries of a path, per component, that L3 is not known to have."""
        out = {}
        for c in self.spec.components:
            entries = self.res.index.find(path.names(c.name))
            known = entries[entries != ABSENT]
            out[c.name] = known[~self.res.index.durable((Tier.HOST, c.name), known)]
        return out

    def _in_host(self, component: str, entries: Entries) -> np.ndarray:
        return self.res.index.slots((Tier.HOST, component), entries) >= 0

    def _not_sealed(self, component: str, keys: Sequence[bytes]) -> Entries:
        """Entries of the keys, which all exist, whose object L3 is not known to have."""
        entries = self.res.index.find(keys)
        return entries[~self.res.index.durable((Tier.HOST, component), entries)]

    def _lease(self, place: Place, entries: Entries) -> Lease:
        return self.res.leases.take("backup", place, self.res.slots(place, entries))
