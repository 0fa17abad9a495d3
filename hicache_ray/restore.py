"""How a request gets what is cached of it: match, plan, prefetch from L3, load to L1.

These are parts of stories (see :mod:`hicache_ray.story`): they yield records like the story that runs them. What is dropped while a part
waits (:meth:`hicache_ray.residency.Residency.drop`) is gone for it as well: it looks again, or does without.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from hicache_ray import compute, evict, load, plan, prefetch, transfer
from hicache_ray.descent import Descent
from hicache_ray.keys import tagged
from hicache_ray.match import match
from hicache_ray.records import Lookup, Merged, Move, Record
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Limit, Match, Part, Plan
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier
from hicache_ray.story import Job, Phase, Story, Wait


class Restore:
    """Over one :class:`Residency`. ``next_id`` numbers records; ``descent`` makes room."""

    def __init__(self, res: Residency, settings: Settings, next_id: Callable[[], int], descent: Descent) -> None:
        self.res = res
        self.spec = res.spec
        self.settings = settings
        self._next_id = next_id
        self.descent = descent

    def match(self, job: Job) -> Match:
        """What is where now, L1 and L2."""
        return match(self.res, job.path, job.allowed, not self.settings.exact)

    def questions(self, found: Match) -> list[tuple[tuple[bytes, ...], tuple[str, ...]]]:
        """What to ask L3 of a prompt: keys, and the components under them, of each the kinds of bytes that count."""
        kinds = (False,) if self.settings.exact else (False, True)
        named: dict[tuple[bytes, ...], list[str]] = {}
        for c in self.spec.components:
            named.setdefault(found.keys_of(c.name), []).extend(tagged(c.name, kind) for kind in kinds)
        return [(keys, tuple(names)) for keys, names in named.items() if keys]

    # -- L3 to L2 -----------------------------------------------------------------------------------------------------------------

    def fetch(self, job: Job) -> Story:
        """Match in all tiers and bring in from L3 what is worth it. Afterwards the plan's L2 pages are leased.

        Those in L1 are not: whoever waits for the device must not keep it from the one who has it. What leaves it meanwhile is in L2, and
        how far to resume is decided anew when the request's turn has come.
        """
        found = self.match(job)
        if self.res.storage and found.longest(*LOCAL) < found.ceiling:
            job.phase = Phase.LOOKUP
            found = yield from self._ask(job, found)
            found = yield from self._wait_for_room(job, found)
        chosen = plan.choose(found, self._threshold, lambda p: prefetch.fits(self.res, found, p))
        job.limit = chosen.limit if job.limit is Limit.NONE else job.limit
        self.hold(job, found, chosen, (Tier.HOST,))
        incoming = chosen.of(Tier.STORAGE)
        if incoming:
            job.phase = Phase.FETCHING
            found = yield from self._read(job, found, chosen, incoming)
            self.hold(job, found, plan.at(found, found.longest(*LOCAL)), (Tier.HOST,))
        job.promised = found.longest(*LOCAL) * self.spec.page_size
        job.phase = Phase.DECLINED if job.limit in (Limit.THRESHOLD, Limit.HOST_ROOM) and not incoming else Phase.READY

    def _ask(self, job: Job, found: Match) -> Generator[Record | Wait, Merged, Match]:
        """What L3 says that it has. An answer from before a drop is none."""
        told: dict[str, tuple[int, ...]] = {}
        for keys, names in self.questions(found):
            answer = yield Lookup(self._next_id(), job.request.rid, keys, names, self.settings.lookup_deadline_s)
            told |= answer.found
            if answer.late or answer.error:
                job.limit = Limit.LOOKUP
                break
        if self.stale(job):
            return self.match(job)
        found = self.match(job).with_storage(told)
        if job.limit is not Limit.LOOKUP:
            prefetch.note(self.res, found)
        return found

    def _wait_for_room(self, job: Job, found: Match) -> Generator[Record | Wait, Merged, Match]:
        """Where others have leased the host memory that the best plan needs, wait for them, holding nothing. The wait has a bound; after
        that the request takes what fits."""
        while True:
            best = plan.choose(found, self._threshold, lambda p: prefetch.could_fit(self.res, p))
            if prefetch.fits(self.res, found, best):
                return found
            told = found.found[Tier.STORAGE]
            answer = yield Wait.ROOM
            now = self.match(job)
            if self.stale(job) or not self.res.storage:
                return now
            found = now.with_found(Tier.STORAGE, told)
            if answer.late:
                return found

    @property
    def _threshold(self) -> int:
        """Pages that storage must add at least."""
        return -(-self.settings.prefetch_threshold // self.spec.page_size)

    def _read(self, job: Job, found: Match, chosen: Plan, incoming: Sequence[Part]) -> Generator[Record | Wait, Merged, Match]:
        """L3 to L2, committed under the one rule."""
        victims = evict.choose(self.res, Tier.HOST, prefetch.need(chosen))
        if victims is None:
            job.limit = Limit.HOST_ROOM
            return found.only(*LOCAL)
        evict.drop(self.res, Tier.HOST, victims)
        moved = transfer.begin(self.res, job.request.rid, Tier.HOST, incoming, found.path)
        try:
            deadline = self.settings.read_deadline(chosen.length * self.spec.page_size)
            got = yield Move(self._next_id(), job.request.rid, Tier.STORAGE, Tier.HOST, moved.spans(), deadline)
            # Others have come and gone meanwhile, and room was made: what is local is asked anew.
            prefetch.commit(self.res, self.match(job), moved, got.bits)
            found = self.match(job)
        finally:
            transfer.close(self.res, moved)
        for leg, bits in zip(moved.legs, got.bits, strict=True):
            job.storage_pages |= {(leg.component, page) for i, page in enumerate(leg.pages.tolist()) if bits >> i & 1}
        return found

    # -- L2 to L1 -----------------------------------------------------------------------------------------------------------------

    def load(self, job: Job) -> Generator[Record | Wait, Merged, Plan]:
        """L2 to L1 for the longest resume that L1 and L2 allow now; make room for the rest of the request as well.

        What the plan uses is on the device and leased when it returns; where something was dropped in between, all is done anew.
        """
        while True:
            era = self.res.era
            resumed = yield from self._load(job)
            if era == self.res.era:
                return resumed
            self.res.leases.release_all(job.leases)
            job.leases.clear()

    def _load(self, job: Job) -> Generator[Record | Wait, Merged, Plan]:
        era, found = self.res.era, self.match(job)
        resumed = plan.at(found, found.longest(*LOCAL))
        job.phase = Phase.LOADING
        self.hold(job, found, resumed)
        need = dict(self.need(job, resumed))
        up = resumed.of(Tier.HOST)
        for part in up:
            need[part.component] += len(part.pages)
        yield from self.descent.room(Tier.DEVICE, need)
        if not up or era != self.res.era:
            return resumed
        moved = transfer.begin(self.res, job.request.rid, Tier.DEVICE, up, found.path)
        try:
            got = yield Move(self._next_id(), job.request.rid, Tier.HOST, Tier.DEVICE, moved.spans(), self.settings.copy_deadline_s)
            load.commit(self.res, moved, got.bits)
        finally:
            transfer.close(self.res, moved)
        if era != self.res.era:
            return resumed
        device = self.match(job).only(Tier.DEVICE)
        if device.longest(Tier.DEVICE) < resumed.length or plan.at(device, resumed.length).drafts != resumed.drafts:
            return (yield from self._load_again(job, resumed, device))
        self.hold(job, device, plan.at(device, resumed.length))
        return resumed

    def need(self, job: Job, resumed: Plan) -> Mapping[str, int]:
        """Device slots that the rest of a request takes."""
        shape = compute.Shape.of(resumed, self.spec.page_size, len(job.request.tokens), job.request.new_tokens)
        return compute.need(self.spec, self.settings, shape)

    def _load_again(self, job: Job, wanted: Plan, device: Match) -> Generator[Record | Wait, Merged, Plan]:
        """A copy has failed: go on with what the device alone offers, and make room for what must be computed instead."""
        shorter = min(device.longest(Tier.DEVICE), wanted.length)
        kept = {(p.component, page): p.tier for p in wanted.parts for page in p.pages.tolist()}
        resumed = plan.with_sources(plan.at(device, shorter, Limit.LOAD_FAILED), kept)
        job.limit = Limit.LOAD_FAILED if shorter < wanted.length else job.limit
        # What the longer resume alone needed makes room for what must be computed in its place.
        before, job.leases = job.leases, []
        self.hold(job, device, plan.at(device, shorter))
        self.res.leases.release_all(before)
        yield from self.descent.room(Tier.DEVICE, self.need(job, resumed))
        return resumed

    # -- small things -----------------------------------------------------------------------------------------------------------

    def stale(self, job: Job) -> bool:
        """Whether what the request is of was dropped after it began: it publishes nothing any more."""
        return self.res.stale(job.space, job.era)

    def hold(self, job: Job, found: Match, chosen: Plan, tiers: Sequence[Tier] = LOCAL) -> None:
        """Lease a plan's pages in these tiers, so that they stay. They count as used together."""
        for part in chosen.parts:
            if part.tier in tiers:
                entries = self.res.index.find(found.path.names(part.component, part.pages.tolist()))
                place = (part.tier, part.component)
                self.res.touch(place, entries)
                if tiers is not LOCAL:  # the request only waits: what passes through the host needs room there
                    fresh = np.cumsum(self.res.idle(place, entries))
                    entries = entries[fresh <= max(0, self.res.room(place) - self.res.reserve(place))]
                job.leases.append(self.res.leases.take(job.request.rid, place, self.res.slots(place, entries)))
