"""The story of one request: the order of the stages, and only that.

A story is a generator. It yields a record (or a :class:`Wait`) and is resumed with what all ranks reported (:class:`Merged`); whoever
drives it (:class:`hicache_ray.group.Group`) performs nothing itself either. A story can be cancelled wherever it waits: it sees
:class:`~hicache_ray.errors.Cancelled` at that point, after the record in flight has completed, and gives back what it holds.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np

from hicache_ray import backup, compute, evict, insert, lengths, load, plan, prefetch, transfer
from hicache_ray.errors import CapacityError, EngineError
from hicache_ray.keys import Namespace, extend_keys, page_keys
from hicache_ray.lease import Lease
from hicache_ray.match import match
from hicache_ray.policy import Entries
from hicache_ray.records import Clear, Compute, Digest, Lookup, Merged, Move, Record, Slots, Tokens
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Limit, Match, Part, Plan
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier


class Wait(Enum):
    """What a story may wait for beside a record."""

    ENGINE = "its turn on the device"
    CHANGE = "something in flight to complete"
    QUIET = "all requests and backups to end"
    HOLD = "its caller"


Story: TypeAlias = Generator["Record | Wait", Merged, None]
#: component -> base page index that the page or snapshot ends with -> digest on each rank
PageDigests: TypeAlias = Mapping[str, Mapping[int, tuple[str, ...]]]


@dataclass(frozen=True)
class Request:
    """One prompt. ``limit``: the caller's own cap on the resumed length, in tokens. ``digests``: report those of all it uses and makes."""

    rid: str
    tokens: Tokens
    namespace: Namespace
    new_tokens: int = 1
    limit: int | None = None
    digests: bool = False


@dataclass(frozen=True)
class Sampled:
    """Event: tokens that a running request has produced."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """How a request was served. ``device + host + storage + computed`` is the length of the prompt, in tokens.

    ``digests``, where asked for: of all pages and snapshots of the path that are on the device when the request ends. What it resumed from
    is among them, held since it was restored; they are taken after the last token, so that they delay none.
    """

    device: int
    host: int
    storage: int
    computed: int
    limit: Limit
    digests: PageDigests = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """Event: a story is over, well (``report`` of a request) or not."""

    rid: str
    report: Report | None = None
    error: Exception | None = None


Event: TypeAlias = Sampled | Ended


class Phase(str, Enum):
    """Where a request is, for those who ask."""

    QUEUED = "queued"
    LOOKUP = "lookup"
    FETCHING = "fetching"
    DECLINED = "declined"
    READY = "ready"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass
class Job:
    """A request under way: what the stages have found out, and what it holds."""

    request: Request
    keys: tuple[bytes, ...]
    allowed: int
    phase: Phase = Phase.QUEUED
    promised: int = 0
    limit: Limit = Limit.NONE
    leases: list[Lease] = field(default_factory=list)
    storage_pages: set[tuple[str, int]] = field(default_factory=set)


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

    # -- what a request is ------------------------------------------------------------------------------------------------------

    def job(self, request: Request) -> Job:
        """Check a request against the pools and hash its pages. Raises :class:`CapacityError` when it can never fit."""
        count = len(request.tokens)
        if count < 1:
            raise CapacityError("a request needs at least one token; input_ids is empty")
        shape = compute.Shape.of(0, count, request.new_tokens)
        for name, slots in compute.need(self.spec, self.settings, shape).items():
            capacity = self.res.capacity[(Tier.DEVICE, name)]
            # A resumed request also holds the snapshot that it resumes from.
            most = slots + (1 if self.spec[name].is_state and lengths.longest(self.allowed(count)) else 0)
            if most > capacity:
                raise CapacityError(
                    f"a request of {count} tokens with {request.new_tokens} new ones needs {most} slots of the device pool {name!r}, which "
                    f"has {capacity}; raise cache.device_tokens (or cache.device_snapshots), or send fewer tokens"
                )
        return Job(request, page_keys(request.namespace, request.tokens), self.allowed(count, request.limit))

    def allowed(self, count: int, limit: int | None = None) -> int:
        """The set of lengths that a prompt of ``count`` tokens may resume from at all."""
        return lengths.within(count, self.spec.page_size, self.settings.step(self.spec), limit)

    def match(self, job: Job) -> Match:
        """What is where now, L1 and L2."""
        return match(self.res, job.keys, job.allowed)

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
        self.spawn(f"backup of {job.request.rid}", self.backup(job.keys))

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

    def backup(self, keys: tuple[bytes, ...]) -> Story:
        """Under write-through: what the path has in L1 goes to L2. Under every policy: what L2 has of it goes to L3."""
        if self.settings.write_policy.value == "write_through":
            # Every length inside the path is of interest here, not only those below the cap of one request.
            everything = match(self.res, keys, lengths.ones(len(keys) + 1))
            own = {c.name: self._cached((Tier.HOST, c.name), keys) for c in self.spec.components}
            yield from self._copy_down(backup.wanted(self.res, everything), keys, own)
            # What has just arrived is the deep end of a path whose beginning was here before: together they keep their order.
            for c in self.spec.components:
                self.res.touch((Tier.HOST, c.name), self._cached((Tier.HOST, c.name), keys))
        yield from self._persist(keys)

    def evict(self, tier: Tier, need: Mapping[str, int]) -> Story:
        """Make room in a tier, as a request would."""
        yield from self._room(tier, need, "evict")

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
            names = tuple(c.name for c in self.spec.components)
            answer = yield Lookup(self._id(), job.request.rid, found.keys, names, self.settings.lookup_deadline_s)
            found = self.match(job).with_storage(answer.found)
            if answer.late or answer.error:
                job.limit = Limit.LOOKUP
            else:
                prefetch.note(self.res, found)
        threshold = -(-self.settings.prefetch_threshold // self.spec.page_size)
        chosen = plan.choose(found, threshold, lambda p: prefetch.fits(self.res, found, p))
        job.limit = chosen.limit if job.limit is Limit.NONE else job.limit
        self._hold(job, chosen, (Tier.HOST,))
        incoming = chosen.of(Tier.STORAGE)
        if incoming:
            job.phase = Phase.FETCHING
            found = yield from self._read(job, found, chosen, incoming)
            self._hold(job, plan.at(found, found.longest(*LOCAL)), (Tier.HOST,))
        job.promised = found.longest(*LOCAL) * self.spec.page_size
        job.phase = Phase.DECLINED if job.limit in (Limit.THRESHOLD, Limit.HOST_ROOM) and not incoming else Phase.READY

    def _read(self, job: Job, found: Match, chosen: Plan, incoming: Sequence[Part]) -> Generator[Record | Wait, Merged, Match]:
        """L3 to L2, committed under the one rule."""
        victims = evict.choose(self.res, Tier.HOST, prefetch.need(chosen))
        if victims is None:
            job.limit = Limit.HOST_ROOM
            return found.without_storage()
        evict.drop(self.res, Tier.HOST, victims)
        moved = transfer.begin(self.res, job.request.rid, Tier.HOST, incoming, found.keys)
        try:
            deadline = self.settings.read_deadline(chosen.length * self.spec.page_size)
            got = yield Move(self._id(), job.request.rid, Tier.STORAGE, Tier.HOST, moved.spans(), deadline)
            # Others have come and gone meanwhile, and room was made: what is local is asked anew.
            found = prefetch.commit(self.res, self.match(job), moved, got.bits)
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
        self._hold(job, resumed)
        count, new = len(job.request.tokens), job.request.new_tokens
        shape = compute.Shape.of(resumed.length * self.spec.page_size, count, new)
        need = dict(compute.need(self.spec, self.settings, shape))
        up = resumed.of(Tier.HOST)
        for part in up:
            need[part.component] += len(part.pages)
        yield from self._room(Tier.DEVICE, need, job.request.rid)
        if not up:
            return resumed
        moved = transfer.begin(self.res, job.request.rid, Tier.DEVICE, up, found.keys)
        try:
            got = yield Move(self._id(), job.request.rid, Tier.HOST, Tier.DEVICE, moved.spans(), self.settings.copy_deadline_s)
            found = load.commit(self.res, found, moved, got.bits)
        finally:
            transfer.close(self.res, moved)
        if found.longest(Tier.DEVICE) < resumed.length:
            return (yield from self._load_again(job, resumed, found))
        self._hold(job, plan.at(found, resumed.length))
        return resumed

    def _load_again(self, job: Job, wanted: Plan, device: Match) -> Generator[Record | Wait, Merged, Plan]:
        """A copy has failed: go on with what the device alone offers, and make room for what must be computed instead."""
        shorter = device.longest(Tier.DEVICE)
        kept = {(p.component, page): p.tier for p in wanted.parts for page in p.pages.tolist()}
        resumed = plan.with_sources(plan.at(device, shorter, Limit.LOAD_FAILED), kept)
        job.limit = Limit.LOAD_FAILED
        self._hold(job, plan.at(device, shorter))
        shape = compute.Shape.of(shorter * self.spec.page_size, len(job.request.tokens), job.request.new_tokens)
        yield from self._room(Tier.DEVICE, compute.need(self.spec, self.settings, shape), job.request.rid)
        return resumed

    def _compute(self, job: Job, resumed: Plan) -> Story:
        """Prefill and decode; then publish what was made."""
        request, page = job.request, self.spec.page_size
        job.phase = Phase.RUNNING
        shape = compute.Shape.of(resumed.length * page, len(request.tokens), request.new_tokens)
        run = compute.begin(self.res, self.settings, request.rid, job.keys, shape)
        job.leases.extend(run.own.values())
        tokens, sampled = request.tokens, 0
        resume, chunk = run.resume, compute.chunk(self.spec, self.settings)
        start, steps = shape.start, 1
        while True:
            end = len(tokens) + steps - 1
            record = Compute(
                self._id(), request.rid, start, tokens[start:], steps, chunk, run.tables, run.live, resume,
                run.snapshots_in(start, end), self.settings.compute_deadline_s,
            )  # fmt: skip
            got = yield record
            if got.error:
                raise EngineError(f"request {request.rid}: {got.error}")
            if len(got.output) != steps:
                raise EngineError(f"request {request.rid}: the engine sampled {len(got.output)} tokens where {steps} were asked for")
            self.events.append(Sampled(request.rid, got.output, got.logprobs))
            tokens = np.concatenate([tokens, np.asarray(got.output, dtype=np.int32)])
            sampled += len(got.output)
            start, resume = end, dict.fromkeys(run.live, -1)
            if sampled >= request.new_tokens:
                break
            steps = compute.decode_steps(shape.prompt, sampled, request.new_tokens, page)
        job.keys = extend_keys(request.namespace, job.keys, tokens[:end])
        self._insert(job, run, end)

    def _insert(self, job: Job, run: compute.Run, end: int) -> None:
        """Publish what the run made, and mark the whole path as just used."""
        for made in compute.made(self.spec, self.settings, run, end):
            lease = run.own[made.component]
            part = Lease(lease.id, lease.holder, lease.place, lease.slots[list(made.positions)])
            insert.publish(self.res, made.component, [job.keys[i] for i in made.pages], part)
            used = lengths.needed(self.spec[made.component], run.shape.start // self.spec.page_size, self.spec.page_size)
            insert.touch_path(self.res, made.component, [job.keys[i] for i in sorted({*used, *made.pages})])

    # -- room -------------------------------------------------------------------------------------------------------------------

    def _room(self, tier: Tier, need: Mapping[str, int], holder: str) -> Story:
        """Free slots in a tier by eviction. What only the device holds is copied to the host first, while that has room."""
        tried: set[tuple[str, bytes]] = set()
        while True:
            victims = evict.choose(self.res, tier, need)
            if victims is None:
                yield Wait.CHANGE
                continue
            alone = evict.only_here(self.res, victims, tried) if tier is Tier.DEVICE else {}
            if not alone:
                evict.drop(self.res, tier, victims)
                return
            # Others may lease the victims while they are copied, so the choice is made anew afterwards.
            yield from self._rescue(alone, tried)

    def _rescue(self, victims: Mapping[str, Entries], tried: set[tuple[str, bytes]]) -> Story:
        """Device pages on their way out go to the host, as many as it has room for, and from there to L3.

        ``tried`` gains what need not be rescued any more. Where the host is too small for all at once and L3 takes what it is given, the
        rest is left for another round.
        """
        names = {c: [self.res.index.key(e) for e in entries.tolist()] for c, entries in victims.items()}  # first to go first
        keys = tuple(dict.fromkeys(k for path in names.values() for k in path))
        where = {k: i for i, k in enumerate(keys)}
        own = {c.name: self._not_sealed(c.name, keys) for c in self.spec.components}
        taken, left = [], set()
        for component, path in names.items():
            room = backup.room(self.res, component, own[component])
            take, rest = path[::-1][:room], path[::-1][room:]
            taken.append(Part(component, Tier.DEVICE, np.asarray([where[k] for k in take], dtype=np.int32)))
            left |= {(component, self.res.index.key(e)) for e in self._not_sealed(component, rest).tolist()}
            tried |= {(component, k) for k in path} - left
        yield from self._copy_down(taken, keys, own)
        for component, path in names.items():  # they arrive in the order in which they have left
            self.res.touch_in_order((Tier.HOST, component), self._cached((Tier.HOST, component), path))
        if not left:
            self.spawn("persist", self._persist(keys))
            return
        yield from self._persist(keys)
        if not any(len(p.pages) for p in taken) or not self.settings.storage or backup.not_durable(self.res, keys):
            tried |= left
            for component, _ in left:
                self.res.counters[(Tier.HOST, component)].refused += 1

    def _copy_down(self, parts: Sequence[Part], keys: tuple[bytes, ...], own: Mapping[str, Entries]) -> Story:
        """L1 to L2. The host pages ``own`` (component -> entries) are held meanwhile, so that making room does not take them."""
        parts = [p for p in parts if len(p.pages)]
        held = [self._lease("backup", (Tier.HOST, c), entries[self._in_host(c, entries)]) for c, entries in own.items()]
        moved = None
        try:
            victims = evict.choose(self.res, Tier.HOST, {p.component: len(p.pages) for p in parts})
            if not parts or victims is None:
                for p in parts:
                    self.res.counters[(Tier.HOST, p.component)].refused += len(p.pages)
                return
            evict.drop(self.res, Tier.HOST, victims)
            moved = transfer.begin(self.res, "backup", Tier.HOST, parts, keys)
            got = yield Move(self._id(), "backup", Tier.DEVICE, Tier.HOST, moved.spans(), self.settings.copy_deadline_s)
            transfer.arrive(self.res, moved, got.bits)
            self._count(moved, got, Tier.HOST)
        finally:
            if moved is not None:
                transfer.close(self.res, moved)
            self.res.leases.release_all(held)

    def _persist(self, keys: tuple[bytes, ...]) -> Story:
        """L2 to L3. The pages are leased now, also where the story that writes them begins later."""
        parts = backup.not_durable(self.res, keys) if self.settings.storage else ()
        return self._write(transfer.begin(self.res, "persist", Tier.STORAGE, parts, keys))

    def _write(self, moved: transfer.Transfer) -> Story:
        if not moved:
            return
        try:
            deadline = self.settings.prefetch_cap_s
            got = yield Move(self._id(), "persist", Tier.HOST, Tier.STORAGE, moved.spans(), deadline)
            self._count(moved, got, Tier.STORAGE)
            for leg, bits in zip(moved.legs, got.bits, strict=True):
                sealed = [k for i, k in enumerate(leg.keys) if bits >> i & 1]
                entries = self.res.index.find(sealed)
                self.res.index.set_durable((Tier.HOST, leg.component), entries)
        finally:
            transfer.close(self.res, moved)

    def _count(self, moved: transfer.Transfer, got: Merged, tier: Tier) -> None:
        for leg, bits in zip(moved.legs, got.bits, strict=True):
            counters = self.res.counters[(tier, leg.component)]
            counters.backups += bits.bit_count()
            counters.failures += len(leg.keys) - bits.bit_count()

    # -- small things -----------------------------------------------------------------------------------------------------------

    def spawn(self, name: str, story: Story) -> None:
        """A story that nobody waits for; the driver takes it up."""
        self.spawned.append((name, story))

    def _id(self) -> int:
        self._record += 1
        return self._record

    def _cached(self, place: tuple[Tier, str], keys: Sequence[bytes]) -> Entries:
        entries = self.res.index.find(keys)
        return entries[self.res.index.slots(place, entries) >= 0]

    def _in_host(self, component: str, entries: Entries) -> np.ndarray:
        return self.res.index.slots((Tier.HOST, component), entries) >= 0

    def _not_sealed(self, component: str, keys: Sequence[bytes]) -> Entries:
        """Entries of the keys, which all exist, whose object L3 is not known to have."""
        entries = self.res.index.find(keys)
        return entries[~self.res.index.durable((Tier.HOST, component), entries)]

    def _lease(self, holder: str, place: tuple[Tier, str], entries: Entries) -> Lease:
        return self.res.leases.take(holder, place, self.res.slots(place, entries))

    def _hold(self, job: Job, chosen: Plan, tiers: Sequence[Tier] = LOCAL) -> None:
        """Lease a plan's pages in these tiers, so that they stay. They count as used together."""
        for part in chosen.parts:
            if part.tier in tiers:
                entries = self.res.index.find([job.keys[i] for i in part.pages.tolist()])
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
        if not job.request.digests or not job.keys:
            return {}
        pages: dict[str, list[int]] = {}
        slots: dict[str, Slots] = {}
        entries = self.res.index.find(job.keys)
        for c in self.spec.components:
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
