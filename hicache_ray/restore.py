"""How a request gets what is cached of it: match, plan, prefetch from L3, load to L1.

These are parts of stories (see :mod:`hicache_ray.story`): they yield records like the story that runs them. What is dropped while a part
waits (:meth:`hicache_ray.residency.Residency.drop`) is gone for it as well: it looks again, or does without.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from hicache_ray import compute, lengths, load, plan, prefetch, transfer
from hicache_ray.asking import Asking
from hicache_ray.descent import Descent
from hicache_ray.fetches import Fetches
from hicache_ray.index import ABSENT
from hicache_ray.records import Merged, Move, Record
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Limit, Match, Part, Plan
from hicache_ray.settings import PrefetchPolicy, Settings
from hicache_ray.spec import Kind, Tier
from hicache_ray.story import Job, Pause, Phase, Story, Wait
from hicache_ray.why import Evidence


class Restore(Asking):
    """Over one :class:`Residency`. ``next_id`` numbers records; ``descent`` makes room."""

    def __init__(self, res: Residency, settings: Settings, next_id: Callable[[], int], descent: Descent) -> None:
        super().__init__(res, settings, next_id)
        self.descent = descent
        self.fetches = Fetches(res, next_id, lambda: self.clock(), self._told)

    # -- L3 to L2 -----------------------------------------------------------------------------------------------------------------

    def fetch(self, job: Job) -> Story:
        """Match in all tiers and bring in from L3 what is worth it. Afterwards the plan's L2 pages are leased.

        Those in L1 are not: whoever waits for the device must not keep it from the one who has it. What leaves it meanwhile is in L2, and
        how far to resume is decided anew when the request's turn has come. Under ``best_effort`` this ends with pages still on their way:
        see :meth:`turn`.
        """
        found, waits = self.match(job), self.settings.prefetch_policy is not PrefetchPolicy.BEST_EFFORT
        if self.res.storage and found.longest(*LOCAL) < found.ceiling:
            found = yield from self._ask(job, found, self.settings.lookup_deadline_s)
            found = (yield from self._wait_for_room(job, found)) if waits and self.cost is None else found
        self._choose(job, found)
        if waits:
            yield from self._await(job)
        if not self.fetches.of(job):
            self._ready(job)

    def _await(self, job: Job) -> Story:
        """Until all that it has asked for is there, or will not come. Pages that were not where they had been are looked for once more, in
        the same time; what has arrived stays as it is meanwhile."""
        late = False
        while self.fetches.waiting(job) and not late:
            late = (yield Wait.ARRIVAL).late
        if not late and self.fetches.unread(job) and self.res.storage and not self.stale(job):
            yield from self._ask_again(job)
        while self.fetches.waiting(job) and not late:
            late = (yield Wait.ARRIVAL).late
        self.turn(job)

    def turn(self, job: Job) -> None:
        """Its turn on the device has come, or its deadline: what has arrived by now is of use, the rest is not waited for."""
        if self.fetches.of(job):
            self._settle(job)

    def _choose(self, job: Job, found: Match) -> None:
        """Plan a resume, hold what of it is in L2, and have the rest brought from L3."""
        intake = self._intake(found)
        chosen = plan.choose(found, self._threshold, intake.bounds())
        chosen, decision = self._weigh(job, found, chosen, intake)
        if intake.refusal(chosen, drafts=True) is not Limit.NONE:  # what is left to refuse is a draft's, and no target waits for that
            chosen = plan.at(found, chosen.length, chosen.limit, LOCAL)
        # What was weighed is what is read: where the wait is bounded by its cost, nothing is added to it.
        if self.settings.prefetch_policy is not PrefetchPolicy.WAIT_COMPLETE and chosen.of(Tier.STORAGE) and self.cost is None:
            more = plan.fallback(found, chosen)
            chosen = more if intake.refusal(more, drafts=True) is Limit.NONE else chosen
        job.limit = self._reason(job, chosen.limit) if job.limit is Limit.NONE else job.limit
        job.evidence = Evidence(found, chosen, job.told, decision)
        self.hold(job, found, chosen, waits=True)
        job.wanted = chosen.length
        if not chosen.of(Tier.STORAGE):
            return
        job.phase = Phase.FETCHING
        if job.deadline is None:
            tokens = (chosen.length - found.longest(*LOCAL)) * self.spec.page_size
            job.deadline = self.clock() + min(job.patience_s, self.settings.read_deadline(tokens))
        self.fetches.begin(job, found, chosen)

    def _told(self, job: Job) -> None:
        """All that a request has asked for has come. Those that wait for it do the rest themselves; it is done for those in the queue."""
        if self.settings.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            self._settle(job)

    def _settle(self, job: Job) -> None:
        """What it waited for is there, or is not waited for any longer: commit it, and hold it."""
        why = self.fetches.commit(job, self.match(job))
        found = self.match(job)
        got = found.longest(*LOCAL)
        if got < job.wanted:
            job.limit = Limit.DROPPED if self.stale(job) else why
        self.hold(job, found, plan.at(found, got), waits=True)
        self._ready(job)

    def _ready(self, job: Job) -> None:
        found = self.match(job)
        declined = job.limit in (Limit.THRESHOLD, Limit.HOST_ROOM, Limit.IN_FLIGHT) and job.deadline is None
        job.promised = found.longest(*LOCAL) * self.spec.page_size
        job.phase = Phase.DECLINED if declined else Phase.READY

    def _ask_again(self, job: Job) -> Story:
        """Pages were not where they had been: look where they are now, or what can be had without them."""
        assert job.deadline is not None
        left_s = max(0.0, job.deadline - self.clock())
        job.limit = Limit.NONE
        found = yield from self._ask(job, self.match(job), min(left_s, self.settings.lookup_deadline_s))
        if self.res.storage and not self.stale(job):
            self._choose(job, self.fetches.with_arrived(job, found))

    def _wait_for_room(self, job: Job, found: Match) -> Generator[Record | Wait, Merged, Match]:
        """Where others have leased the host memory that the best plan needs, or bring as much as may be on its way, wait for them, holding
        nothing. The wait has a bound; after that the request takes what fits."""
        while True:
            best = plan.choose(found, self._threshold, self._intake(found, alone=True).bounds())
            if self._intake(found).refusal(best) is Limit.NONE:
                return found
            told = found.found[Tier.STORAGE]
            answer = yield Wait.ROOM
            now = self.match(job)
            if self.stale(job) or not self.res.storage:
                return now
            found = now.with_found(Tier.STORAGE, told)
            if answer.late:
                return found

    def _intake(self, found: Match, alone: bool = False) -> prefetch.Intake:
        """What of it can come from L3 now; ``alone``: if nobody else wanted anything."""
        tokens = self.settings.prefetch_tokens_in_flight - (0 if alone else self.fetches.tokens)
        return prefetch.intake(self.res, found, self.fetches.apart(found), tokens, alone)

    def _weigh(self, job: Job, found: Match, chosen: Plan, intake: prefetch.Intake) -> tuple[Plan, Mapping[str, float | str]]:
        """The plan by which the first token is there soonest, and the numbers behind it."""
        if self.cost is None:
            return chosen, {}
        choice = self.cost.choose(found, len(job.request.tokens), chosen.length)
        job.patience_s = choice.patience_s
        if choice.length < chosen.length:
            chosen = plan.at(found, choice.length, Limit.COST)
            if intake.refusal(chosen) is not Limit.NONE:
                chosen = plan.at(found, self.cost.local(found, len(job.request.tokens)), Limit.COST)
        return chosen, choice.numbers

    def _reason(self, job: Job, limit: Limit) -> Limit:
        """The end of what the prompt allows may be the caller's own."""
        asked = job.request.limit
        return Limit.CALLER if limit is Limit.NONE and asked is not None and asked < len(job.request.tokens) - 1 else limit

    @property
    def _threshold(self) -> int:
        """Pages that storage must add at least."""
        return -(-self.settings.prefetch_threshold // self.spec.page_size)

    # -- L2 to L1 -----------------------------------------------------------------------------------------------------------------

    def load(self, job: Job) -> Generator[Record | Wait | Pause, Merged, Plan]:
        """L2 to L1 for the longest resume that L1 and L2 allow now; make room for the rest of the request as well.

        What the plan uses is on the device and leased when it returns, and nothing on the host. Where something was dropped in between, or
        has left the host for what passes through it, all is done anew; the rounds share the time that storage may take.
        """
        until = self.res.now() + self.settings.prefetch_base_s
        while True:
            era = self.res.era
            resumed = yield from self._load(job, until)
            if resumed is not None and era == self.res.era:
                break
            job.phase = Phase.READY
            self.res.leases.release_all(job.leases)
            job.leases.clear()
        host = [lease for lease in job.leases if lease.place[0] is Tier.HOST]
        self.res.leases.release_all(host)
        job.leases[:] = [lease for lease in job.leases if lease.place[0] is not Tier.HOST]
        return resumed

    def _load(self, job: Job, until: float) -> Generator[Record | Wait | Pause, Merged, Plan | None]:
        """One round; None where what it has planned with is gone."""
        era, found = self.res.era, self.match(job)
        k = found.longest(*LOCAL) if self.cost is None else self.cost.local(found, len(job.request.tokens))
        resumed = plan.at(found, k)
        job.phase = Phase.LOADING
        self._find_fork(job, found)
        self.hold(job, found, resumed)
        need = dict(self.need(job, resumed))
        up = resumed.of(Tier.HOST)
        for part in up:
            need[part.component] += len(part.pages)
        yield from self.descent.room(Tier.DEVICE, need, until)
        if era != self.res.era:
            return None
        if not self._on_host(found, up):
            job.limit = Limit.HOST_ROOM
            return None
        if not up:
            return resumed
        moved = transfer.begin(self.res, job.request.rid, Tier.DEVICE, up, found.path)
        try:
            got = yield Move(self._next_id(), job.request.rid, Tier.HOST, Tier.DEVICE, moved.spans(), self.settings.copy_deadline_s)
            load.commit(self.res, moved, got.bits)
        finally:
            transfer.close(self.res, moved)
        if era != self.res.era:
            return None
        device = self.match(job).only(Tier.DEVICE)
        if device.longest(Tier.DEVICE) < resumed.length or plan.at(device, resumed.length).drafts != resumed.drafts:
            return (yield from self._load_again(job, resumed, device))
        self.hold(job, device, plan.at(device, resumed.length))
        return resumed

    def _on_host(self, found: Match, parts: Sequence[Part]) -> bool:
        """Whether all of these pages are there, still."""
        entries = {part.component: self.res.index.find(found.path.names(part.component, part.pages.tolist())) for part in parts}
        return not any(np.any(self.res.index.slots((Tier.HOST, c), some) == ABSENT) for c, some in entries.items())

    def need(self, job: Job, resumed: Plan) -> Mapping[str, int]:
        """Device slots that the rest of a request takes."""
        shape = compute.Shape.of(resumed, self.spec.page_size, len(job.request.tokens), job.request.new_tokens, job.fork)
        return compute.need(self.spec, self.settings, shape)

    def _load_again(self, job: Job, wanted: Plan, device: Match) -> Generator[Record | Wait | Pause, Merged, Plan]:
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

    def _find_fork(self, job: Job, found: Match) -> None:
        """Where the prompt leaves a path that is cached and goes on: whoever leaves it there next will want a state, too."""
        job.fork = 0  # of an earlier load, whose path may be gone
        full = next((c for c in self.spec.components if c.kind is Kind.FULL and c.role == "target" and c.page_span == 1), None)
        if full is None:
            return
        here = found.present[Tier.DEVICE][full.name] | found.present[Tier.HOST][full.name]
        shared = lengths.longest(lengths.lengths_of(full, here, len(found.keys), self.spec.page_size))
        if not 0 < shared < len(found.keys):
            return
        (last,) = self.res.index.find(found.path.names(full.name, [shared - 1])).tolist()
        if not self.res.index.goes_on(last):
            return
        job.fork = compute.fork_at(self.spec, self.settings, shared * self.spec.page_size)
        cold = compute.Shape(0, len(job.request.tokens), len(job.request.tokens) + job.request.new_tokens - 1, fork=job.fork)
        most = compute.need(self.spec, self.settings, cold)
        if any(c.is_state and most[c.name] + 1 > self.res.capacity[(Tier.DEVICE, c.name)] for c in self.spec.components):
            job.fork = 0  # no request may need more than the pools hold

    # -- small things -----------------------------------------------------------------------------------------------------------

    def hold(self, job: Job, found: Match, chosen: Plan, waits: bool = False) -> None:
        """Lease a plan's local pages, so that they stay. They count as used together. ``waits``: the request waits for the device, and must
        not keep that from the one who has it: those on the host alone. Of these a reserve is left, for what passes through the host
        meanwhile; of what a request is about to load only pages that L3 has are left for that.
        """
        for part in chosen.parts:
            if part.tier in ((Tier.HOST,) if waits else LOCAL):
                entries = self.res.index.find(found.path.names(part.component, part.pages.tolist()))
                place = (part.tier, part.component)
                self.res.touch(place, entries)
                if part.tier is Tier.HOST:
                    idle = self.res.idle(place, entries)
                    held = np.cumsum(idle) <= max(0, self.res.room(place) - self.res.reserve(place))
                    if not waits:
                        held |= ~(idle & self.res.index.durable(place, entries))
                    entries = entries[held]
                job.leases.append(self.res.leases.take(job.request.rid, place, self.res.slots(place, entries)))
