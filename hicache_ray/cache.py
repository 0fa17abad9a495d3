"""The story of one request: the order of the stages, and only that. What a story is: :mod:`hicache_ray.story`."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from hicache_ray import compute, insert, lengths, plan
from hicache_ray.descent import Descent
from hicache_ray.errors import CapacityError, EngineError, RequestRefused, StorageDetached
from hicache_ray.keys import extend_keys, look_ahead, other, page_keys
from hicache_ray.lease import Lease
from hicache_ray.match import match
from hicache_ray.records import Clear, Compute, Digest, Embedded, Merged, Record, Slots, Tokens
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.restore import Restore
from hicache_ray.resume import Match, Path, Plan
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier
from hicache_ray.standing import Hint
from hicache_ray.story import Dropped, Ended, Event, Job, PageDigests, Phase, Report, Request, Sampled, Story, Wait

#: Fewer bytes than this tell too little of a content.
DIGEST_LEAST = 16


class Cache:
    """The stages over one :class:`Residency`, as stories. ``events`` are drained by the driver."""

    def __init__(self, res: Residency, settings: Settings) -> None:
        settings.check(res.spec)
        self.res = res
        self.spec = res.spec
        self.settings = settings
        self.events: list[Event] = []
        self.tokens = dict.fromkeys(("device", "host", "storage", "computed"), 0)
        self.tenants: dict[str, dict[str, int]] = {}  # the same of each tenant
        self.requests = 0
        self.engine_owner: str | None = None
        self.spawned: list[tuple[str, Story]] = []
        self._record = 0
        res.storage = settings.storage
        res.choose(settings.eviction, settings.step(res.spec) // res.spec.page_size)
        self.descent = Descent(res, settings, self._id, self.spawn)
        self.restore = Restore(res, settings, self._id, self.descent)

    # -- what a request is ------------------------------------------------------------------------------------------------------

    def job(self, request: Request) -> Job:
        """Check a request against the pools and hash its pages. Raises :class:`CapacityError` when it can never fit,
        :class:`RequestRefused` where its spans make no sense."""
        count = len(request.tokens)
        if count < 1:
            raise CapacityError("a request needs at least one token; input_ids is empty")
        _check_spans(request)
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
        path = self.path(page_keys(request.namespace, request.tokens, request.spans), request.tokens, request.spans)
        return Job(request, path, self.allowed(count, request.limit), self.res.era)

    def path(self, keys: tuple[bytes, ...], tokens: Tokens, spans: Sequence[Embedded] = ()) -> Path:
        """The names of a prompt's pages: components that look ahead have keys of their own."""
        page = self.spec.page_size
        ahead = {c.name: look_ahead(keys, tokens, page, c.lookahead, spans) for c in self.spec.components if c.lookahead}
        return Path(keys, ahead=ahead)

    def allowed(self, count: int, limit: int | None = None) -> int:
        """The set of lengths that a prompt of ``count`` tokens may resume from at all."""
        return lengths.within(count, self.spec.page_size, self.settings.step(self.spec), limit)

    def match(self, job: Job) -> Match:
        """What is where now, L1 and L2."""
        return self.restore.match(job)

    def questions(self, found: Match) -> list[tuple[tuple[bytes, ...], tuple[str, ...]]]:
        """What to ask L3 of a prompt: keys, and the components under them, of each the kinds of bytes that count."""
        return self.restore.questions(found)

    # -- stories ----------------------------------------------------------------------------------------------------------------

    def request(self, job: Job) -> Story:
        """match, plan, prefetch, load, compute, insert; then a backup as a story of its own."""
        try:
            yield from self.restore.fetch(job)
            yield Wait.ENGINE
            self.restore.turn(job)
            resumed = yield from self.restore.load(job)
            job.resumed = plan.with_sources(resumed, dict.fromkeys(job.storage_pages, Tier.STORAGE))
            yield from self._compute(job, resumed)
            digests = yield from self._digests(job)
            report = self._report(job, resumed, digests)
        finally:
            self._release(job)
        self.events.append(Ended(job.request.rid, report, job=job))
        self.spawn(f"backup of {job.request.rid}", self.descent.backup(job.path, len(job.request.tokens)))

    def prefetch(self, job: Job) -> Story:
        """Bring a prompt's pages near before its request runs; hold them until the caller goes on with the load, or gives up."""
        try:
            yield from self.restore.fetch(job)
            yield Wait.HOLD
            yield Wait.ENGINE
            self.restore.turn(job)
            resumed = yield from self.restore.load(job)
            job.promised = resumed.length * self.spec.page_size
        finally:
            self._release(job)
        job.phase = Phase.DONE
        self.events.append(Ended(job.request.rid))

    def evict(self, tier: Tier, need: Mapping[str, int]) -> Story:
        """Make room in a tier, as a request would."""
        yield from self.descent.room(tier, need)

    def flush(self, tiers: Sequence[Tier], preserve: bool = False) -> Story:
        """Empty tiers, once nothing is in flight. Complete when it ends. ``preserve``: what L1 and L2 alone have goes to L3 first; without
        L3 nothing is emptied."""
        yield Wait.QUIET
        if preserve:
            yield from self.descent.write_all()
            if not self.res.storage:
                raise StorageDetached("storage is not attached, so it cannot keep what device and host have; nothing was emptied")
        for tier in LOCAL:
            if tier in tiers:
                self.res.clear(tier)
        if Tier.STORAGE in tiers and self.res.storage:
            done = yield Clear(self._id(), "flush")
            self.res.clear_durable()  # where it has failed, a part may be gone all the same
            if done.error:
                raise EngineError(f"storage could not be flushed: {done.error}")

    def drop(self, name: str, space: bytes, hold: bool) -> Story:
        """Everything of a space leaves L1 and L2 at once, and then L3; what was begun before publishes nothing of it any more.

        ``hold``: for a caller that has other groups to wait for, and L3 to clear, until it says that it has done so.
        """
        gone = self.res.drop(space)
        yield Wait.WRITES  # one that ends after the clearing would be there again
        count = None
        if self.res.storage and not hold:
            done = yield Clear(self._id(), name, prefix=space)
            if done.error:
                raise EngineError(f"storage could not be cleared of what was to be dropped: {done.error}")
            count = done.count
        self.events.append(Dropped(name, gone[Tier.DEVICE], gone[Tier.HOST], count))
        if hold:
            yield Wait.HOLD

    # -- parts of a story ---------------------------------------------------------------------------------------------------------

    def _compute(self, job: Job, resumed: Plan) -> Story:
        """Prefill and decode; then publish what was made."""
        request, page = job.request, self.spec.page_size
        job.phase = Phase.RUNNING
        shape = compute.Shape.of(resumed, page, len(request.tokens), request.new_tokens, job.fork)
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
        keys = extend_keys(request.namespace, job.path.keys, tokens[:end], request.spans)
        job.path = self.path(keys, tokens, request.spans)
        self._insert(job, run, path, end)

    def _insert(self, job: Job, run: compute.Run, path: Path, end: int) -> None:
        """Publish what the run made, and mark the whole path as just used. ``path``: what it resumed from."""
        if self.restore.stale(job):
            return  # it was dropped while it was made
        for made in compute.made(self.spec, self.settings, run, end):
            lease = run.own[made.component]
            # A component that looks ahead has no name yet for a page whose next tokens are not known.
            pages = [page for page in made.pages if page < len(job.path.ahead.get(made.component, job.path.keys))]
            named = job.path.names(made.component, pages)
            part = Lease(lease.id, lease.holder, lease.place, lease.slots[list(made.positions[: len(pages)])])
            names = [name if i < made.canonical else other(name) for i, name in enumerate(named)]
            insert.publish(self.res, made.component, names, pages, part)
            component = self.spec[made.component]
            used = lengths.needed(component, run.shape.begin(component) // self.spec.page_size, self.spec.page_size)
            both = [*path.names(made.component, used), *names]
            insert.count_uses(self.res, made.component, both)
            self.res.use(made.component, both, [*used, *pages], job.path.keys, self._hint(job))
        insert.follow(self.res, job.path.keys, job.fork // self.spec.page_size)

    # -- small things -----------------------------------------------------------------------------------------------------------

    def _hint(self, job: Job) -> Hint:
        ttl = job.request.ttl_s
        return Hint(job.request.priority, math.inf if ttl is None else self.res.now() + ttl)

    def spawn(self, name: str, story: Story) -> None:
        """A story that nobody waits for; the driver takes it up."""
        self.spawned.append((name, story))

    def _id(self) -> int:
        self._record += 1
        return self._record

    def _release(self, job: Job) -> None:
        """Give back everything a request holds. Runs exactly once, however its story ends."""
        self.restore.fetches.leave(job)
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
        told = {c: dict(zip(pages[c], got.digests.get(c, ()), strict=True)) for c in pages}
        return {c: {page: self._of_holders(c, page, each) for page, each in of.items()} for c, of in told.items()}

    def _of_holders(self, component: str, page: int, digests: Sequence[str]) -> tuple[str, ...]:
        """A rank that does not hold a page has nothing of it to digest."""
        c = self.spec[component]
        return tuple(digest if self.spec.owns(c, rank, page) else "" for rank, digest in enumerate(digests))

    def _report(self, job: Job, resumed: Plan, digests: PageDigests) -> Report:
        page = self.spec.page_size
        pages = plan.sources(job.resumed or resumed)
        by_tier = {tier.value: n * page for tier, n in pages.items()}
        computed = len(job.request.tokens) - resumed.length * page
        self.requests += 1
        tallies = [self.tokens]
        if tenant := job.request.namespace.tenant:
            tallies.append(self.tenants.setdefault(tenant, dict.fromkeys(self.tokens, 0)))
        for tally in tallies:
            for name, n in (*by_tier.items(), ("computed", computed)):
                tally[name] += n
        job.phase = Phase.DONE
        return Report(by_tier["device"], by_tier["host"], by_tier["storage"], computed, job.limit, digests)


def _check_spans(request: Request) -> None:
    for span in request.spans:
        if span.start < 0 or span.count < 1 or span.start + span.count > len(request.tokens):
            raise RequestRefused(
                f"a span covers {span.count} tokens from {span.start} on, and the prompt has {len(request.tokens)}; give spans inside of it"
            )
        if len(span.digest) < DIGEST_LEAST:
            raise RequestRefused(
                f"the digest of the span at {span.start} has {len(span.digest)} bytes; give one of the whole content, such as its sha256, "
                f"of at least {DIGEST_LEAST}"
            )
