"""The story of one request: the order of the stages, and only that. What a story is: :mod:`hicache_ray.story`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from hicache_ray import compute, evict, insert, lengths, load, plan, prefetch, transfer
from hicache_ray.descent import Descent
from hicache_ray.errors import CapacityError, EngineError, RequestRefused
from hicache_ray.keys import extend_keys, look_ahead, other, page_keys, tagged
from hicache_ray.lease import Lease, Place
from hicache_ray.match import match
from hicache_ray.policy import Entries
from hicache_ray.records import Clear, Compute, Digest, Lookup, Merged, Move, Record, Slots, Tokens
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Limit, Match, Part, Path, Plan
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier
from hicache_ray.story import Ended, Event, Job, PageDigests, Phase, Report, Request, Sampled, Story, Wait


class Cache:
    """The stages over one :class:`Residency`, as stories. ``events`` are drained by the driver."""

    def __init__(self, res: Residency, settings: Settings) -> None:
        settings.check(res.spec)
        self.res = res
        self.spec = res.spec
        self.settings = settings
        self.events: list[Event] = []
        self.tokens = dict.fromkeys(("device", "host", "storage", "computed"), 0)
        self.requests = 0
        self.engine_owner: str | None = None
        self.spawned: list[tuple[str, Story]] = []
        self._record = 0
        self.descent = Descent(res, settings, self._id, self.spawn)

    # -- what a request is ------------------------------------------------------------------------------------------------------

    def job(self, request: Request) -> Job:
        """Check a request against the pools and hash its pages. Raises :class:`CapacityError` when it can never fit."""
        count = len(request.tokens)
        if count < 1:
            raise CapacityError("a request needs at least one token; input_ids is empty")
        shape = compute.Shape.cold(count, request.new_tokens)
        for name, slots in compute.need(self.spec, self.settings, shape).items():
            capacity = self.res.capacity[(Tier.DEVICE, name)]
            # A resumed request also holds the snapshot that it resumes from.
            most = slots + (1 if self.spec[name].is_state and lengths.longest(self.allowed(count)) else 0)
            if most > capacity:
                raise CapacityError(
                    f"a request of {count} tokens with {request.new_tokens} new ones needs {most} slots of the device pool {name!r}, which "
                    f"has {capacity}; raise cache.device_tokens (or cache.device_snapshots), or send fewer tokens"
                )
        return Job(request, self.path(page_keys(request.namespace, request.tokens), request.tokens), self.allowed(count, request.limit))

    def path(self, keys: tuple[bytes, ...], tokens: Tokens) -> Path:
        """The names of a prompt's pages: components that look ahead have keys of their own."""
        ahead = {c.name: look_ahead(keys, tokens, self.spec.page_size, c.lookahead) for c in self.spec.components if c.lookahead}
        return Path(keys, ahead=ahead)

    def allowed(self, count: int, limit: int | None = None) -> int:
        """The set of lengths that a prompt of ``count`` tokens may resume from at all."""
        return lengths.within(count, self.spec.page_size, self.settings.step(self.spec), limit)

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

    # -- stories ----------------------------------------------------------------------------------------------------------------

    def request(self, job: Job) -> Story:
        """match, plan, prefetch, load, compute, insert; then a backup as a story of its own."""
        try:
            yield from self._fetch(job)
            yield Wait.ENGINE
            resumed = yield from self._load(job)
            yield from self._compute(job, resumed)
            digests = yield from self._digests(job)
            report = self._report(job, resumed, digests)
        finally:
            self._release(job)
        self.events.append(Ended(job.request.rid, report))
        self.spawn(f"backup of {job.request.rid}", self.descent.backup(job.path))

    def prefetch(self, job: Job) -> Story:
        """Bring a prompt's pages near before its request runs; hold them until the caller goes on with the load, or gives up."""
        try:
            yield from self._fetch(job)
            yield Wait.HOLD
            yield Wait.ENGINE
            resumed = yield from self._load(job)
            job.promised = resumed.length * self.spec.page_size
        finally:
            self._release(job)
        job.phase = Phase.DONE
        self.events.append(Ended(job.request.rid))

    def evict(self, tier: Tier, need: Mapping[str, int]) -> Story:
        """Make room in a tier, as a request would."""
        yield from self.descent.room(tier, need)

    def flush(self, tiers: Sequence[Tier]) -> Story:
        """Empty tiers, once nothing is in flight. Complete when it ends."""
        yield Wait.QUIET
        for tier in LOCAL:
            if tier in tiers:
                self.res.clear(tier)
        if Tier.STORAGE in tiers and self.settings.storage:
            done = yield Clear(self._id(), "flush")
            self.res.index.clear_durable()  # where it has failed, a part may be gone all the same
            if done.error:
                raise EngineError(f"storage could not be flushed: {done.error}")

    # -- parts of a story ---------------------------------------------------------------------------------------------------------

    def _fetch(self, job: Job) -> Story:
        """Match in all tiers and bring in from L3 what is worth it. Afterwards the plan's L2 pages are leased.

        Those in L1 are not: whoever waits for the device must not keep it from the one who has it. What leaves it meanwhile is in L2, and
        how far to resume is decided anew when the request's turn has come.
        """
        found = self.match(job)
        if self.settings.storage and found.longest(*LOCAL) < found.ceiling:
            job.phase = Phase.LOOKUP
            told: dict[str, tuple[int, ...]] = {}
            for keys, names in self.questions(found):
                answer = yield Lookup(self._id(), job.request.rid, keys, names, self.settings.lookup_deadline_s)
                told |= answer.found
                if answer.late or answer.error:
                    job.limit = Limit.LOOKUP
                    break
            found = self.match(job).with_storage(told)
            if job.limit is not Limit.LOOKUP:
                prefetch.note(self.res, found)
        threshold = -(-self.settings.prefetch_threshold // self.spec.page_size)
        chosen = plan.choose(found, threshold, lambda p: prefetch.fits(self.res, found, p))
        job.limit = chosen.limit if job.limit is Limit.NONE else job.limit
        self._hold(job, found, chosen, (Tier.HOST,))
        incoming = chosen.of(Tier.STORAGE)
        if incoming:
            job.phase = Phase.FETCHING
            found = yield from self._read(job, found, chosen, incoming)
            self._hold(job, found, plan.at(found, found.longest(*LOCAL)), (Tier.HOST,))
        job.promised = found.longest(*LOCAL) * self.spec.page_size
        job.phase = Phase.DECLINED if job.limit in (Limit.THRESHOLD, Limit.HOST_ROOM) and not incoming else Phase.READY

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
            got = yield Move(self._id(), job.request.rid, Tier.STORAGE, Tier.HOST, moved.spans(), deadline)
            # Others have come and gone meanwhile, and room was made: what is local is asked anew.
            prefetch.commit(self.res, self.match(job), moved, got.bits)
            found = self.match(job)
        finally:
            transfer.close(self.res, moved)
        for leg, bits in zip(moved.legs, got.bits, strict=True):
            job.storage_pages |= {(leg.component, page) for i, page in enumerate(leg.pages.tolist()) if bits >> i & 1}
        return found

    def _load(self, job: Job) -> Generator[Record | Wait, Merged, Plan]:
        """L2 to L1 for the longest resume that L1 and L2 allow now; make room for the rest of the request as well."""
        found = self.match(job)
        resumed = plan.at(found, found.longest(*LOCAL))
        job.phase = Phase.LOADING
        self._hold(job, found, resumed)
        need = dict(self._need(job, resumed))
        up = resumed.of(Tier.HOST)
        for part in up:
            need[part.component] += len(part.pages)
        yield from self.descent.room(Tier.DEVICE, need)
        if not up:
            return resumed
        moved = transfer.begin(self.res, job.request.rid, Tier.DEVICE, up, found.path)
        try:
            got = yield Move(self._id(), job.request.rid, Tier.HOST, Tier.DEVICE, moved.spans(), self.settings.copy_deadline_s)
            load.commit(self.res, moved, got.bits)
        finally:
            transfer.close(self.res, moved)
        device = self.match(job).only(Tier.DEVICE)
        if device.longest(Tier.DEVICE) < resumed.length or plan.at(device, resumed.length).drafts != resumed.drafts:
            return (yield from self._load_again(job, resumed, device))
        self._hold(job, device, plan.at(device, resumed.length))
        return resumed

    def _need(self, job: Job, resumed: Plan) -> Mapping[str, int]:
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
        self._hold(job, device, plan.at(device, shorter))
        self.res.leases.release_all(before)
        yield from self.descent.room(Tier.DEVICE, self._need(job, resumed))
        return resumed

    def _compute(self, job: Job, resumed: Plan) -> Story:
        """Prefill and decode; then publish what was made."""
        request, page = job.request, self.spec.page_size
        job.phase = Phase.RUNNING
        shape = compute.Shape.of(resumed, page, len(request.tokens), request.new_tokens)
        path = self.match(job).only(Tier.DEVICE).path
        run = compute.begin(self.res, self.settings, request.rid, path, shape)
        job.leases.extend(run.own.values())
        tokens, sampled = request.tokens, 0
        resume, chunk = run.resume, compute.chunk(self.spec, self.settings)
        start, steps = shape.start, 1
        while True:
            end = len(tokens) + steps - 1
            record = Compute(
                self._id(), request.rid, start, tokens[start:], steps, chunk, run.tables, run.live, resume,
                run.snapshots_in(start, end), self.settings.compute_deadline_s, shape.drafts if start == shape.start else {},
            )  # fmt: skip
            got = yield record
            if got.error:
                raise (RequestRefused if got.refused else EngineError)(f"request {request.rid}: {got.error}")
            if len(got.output) != steps:
                raise EngineError(f"request {request.rid}: the engine sampled {len(got.output)} tokens where {steps} were asked for")
            self.events.append(Sampled(request.rid, got.output, got.logprobs))
            tokens = np.concatenate([tokens, np.asarray(got.output, dtype=np.int32)])
            sampled += len(got.output)
            start, resume = end, dict.fromkeys(run.live, -1)
            if sampled >= request.new_tokens:
                break
            steps = compute.decode_steps(shape.prompt, sampled, request.new_tokens, page)
        job.path = self.path(extend_keys(request.namespace, job.path.keys, tokens[:end]), tokens)
        self._insert(job, run, path, end)

    def _insert(self, job: Job, run: compute.Run, path: Path, end: int) -> None:
        """Publish what the run made, and mark the whole path as just used. ``path``: what it resumed from."""
        for made in compute.made(self.spec, self.settings, run, end):
            lease = run.own[made.component]
            # A component that looks ahead has no name yet for a page whose next tokens are not known.
            pages = [page for page in made.pages if page < len(job.path.ahead.get(made.component, job.path.keys))]
            named = job.path.names(made.component, pages)
            part = Lease(lease.id, lease.holder, lease.place, lease.slots[list(made.positions[: len(pages)])])
            names = [name if i < made.canonical else other(name) for i, name in enumerate(named)]
            insert.publish(self.res, made.component, names, part)
            component = self.spec[made.component]
            used = lengths.needed(component, run.shape.begin(component) // self.spec.page_size, self.spec.page_size)
            insert.touch_path(self.res, made.component, [*path.names(made.component, used), *names])

    # -- small things -----------------------------------------------------------------------------------------------------------

    def spawn(self, name: str, story: Story) -> None:
        """A story that nobody waits for; the driver takes it up."""
        self.spawned.append((name, story))

    def _id(self) -> int:
        self._record += 1
        return self._record

    def _lease(self, holder: str, place: Place, entries: Entries) -> Lease:
        return self.res.leases.take(holder, place, self.res.slots(place, entries))

    def _hold(self, job: Job, found: Match, chosen: Plan, tiers: Sequence[Tier] = LOCAL) -> None:
        """Lease a plan's pages in these tiers, so that they stay. They count as used together."""
        for part in chosen.parts:
            if part.tier in tiers:
                entries = self.res.index.find(found.path.names(part.component, part.pages.tolist()))
                self.res.touch((part.tier, part.component), entries)
                job.leases.append(self._lease(job.request.rid, (part.tier, part.component), entries))

    def _release(self, job: Job) -> None:
        """Give back everything a request holds. Runs exactly once, however its story ends."""
        self.res.leases.release_all(job.leases)
        job.leases.clear()
        if self.engine_owner == job.request.rid:
            self.engine_owner = None

    def _digests(self, job: Job) -> Generator[Record | Wait, Merged, PageDigests]:
        """Digests of the path's cached device pages and snapshots; of all of them, not only of those a resume needs.

        Empty where they are not wanted, or where a rank has failed to give them: a request does not fail for that.
        """
        if not job.request.digests or not job.path.keys:
            return {}
        pages: dict[str, list[int]] = {}
        slots: dict[str, Slots] = {}
        everything = lengths.ones(len(job.path.keys) + 1)
        path = match(self.res, job.path, everything, not self.settings.exact).only(Tier.DEVICE).path
        for c in self.spec.components:
            entries = self.res.index.find(path.names(c.name))
            at = self.res.index.slots((Tier.DEVICE, c.name), entries)
            pages[c.name] = np.flatnonzero(at >= 0).tolist()
            slots[c.name] = at[at >= 0]
        got = yield Digest(self._id(), job.request.rid, slots)
        if got.error:
            return {}
        return {c: dict(zip(pages[c], got.digests.get(c, ()), strict=True)) for c in pages}

    def _report(self, job: Job, resumed: Plan, digests: PageDigests) -> Report:
        page = self.spec.page_size
        pages = plan.sources(plan.with_sources(resumed, dict.fromkeys(job.storage_pages, Tier.STORAGE)))
        by_tier = {tier.value: n * page for tier, n in pages.items()}
        computed = len(job.request.tokens) - resumed.length * page
        self.requests += 1
        for name, n in (*by_tier.items(), ("computed", computed)):
            self.tokens[name] += n
        job.phase = Phase.DONE
        return Report(by_tier["device"], by_tier["host"], by_tier["storage"], computed, job.limit, digests)
