"""The test kit: the production core in one process, with real CPU pools, real copies, a real store and a fake clock.

A user reproduces a fault with it. :class:`Stack` is not a second model of the tier: it drives :class:`hicache_ray.group.Group` and one
:class:`hicache_ray.executor.Executor` per rank, as the actors do; only the engine is a stand-in whose page content is a function of
(component, rank, the tokens before and in the page), so that a wrong byte shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hicache_ray.ask import ask, describe, tags_of
from hicache_ray.cache import Cache
from hicache_ray.copies import Mover, choose
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.errors import HiCacheError
from hicache_ray.executor import Executor, Rank
from hicache_ray.explain import Explainer
from hicache_ray.group import STORE, Envelope, Group
from hicache_ray.keys import ANY, as_tokens, space_of
from hicache_ray.pool import Pool
from hicache_ray.records import Clear, Embedded, Lookup, Move, Outcome, Tokens
from hicache_ray.residency import Residency
from hicache_ray.settings import PrefetchPolicy, Settings, WritePolicy
from hicache_ray.spec import CacheSpec, Component, Tier
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.story import Dropped, Ended, Event, Job, Phase, Request, Sampled
from hicache_ray.testing_parts import ContentEngine, FakeClock, Poll, Probe, Served, chunked, full, state, window
from hicache_ray.testing_questions import TIERS, Questions
from hicache_ray.testing_queues import QueuedEngine, fake_mover

__all__ = ["FakeClock", "Poll", "Probe", "Served", "Stack", "chunked", "full", "state", "window"]


@dataclass
class Stack(Questions):
    """One cache group. Capacities in pages per component (snapshots: a page's worth each), ``l2`` also by component; see ``cases.md``
    for the words.

    ``devices``: one for each rank, whose queues then run its copies and its engine; without them a copy is done when it returns.
    """

    page: int = 64
    pools: Mapping[str, Component] = field(default_factory=lambda: {"full": full()})
    l1: int = 64
    l2: int | Mapping[str, int] = 64
    l3: int = 1024
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    ranks: int = 1
    exact: bool = False
    grid: int | None = None
    prefetch_threshold: int = 0
    namespace: Mapping[str, str] = field(default_factory=dict)
    store: FaultyStore | None = None
    clock: FakeClock = field(default_factory=FakeClock)
    recipe: Mapping[str, str] = field(default_factory=lambda: ANY)
    layout: str = "page_first_direct"
    max_requests: int = 1024
    batch: int = 128
    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[FakeDevice] = ()
    events: list[Event] = field(default_factory=list, init=False)
    served: dict[str, Served] = field(default_factory=dict, init=False)
    errors: dict[str, Exception] = field(default_factory=dict, init=False)
    outputs: dict[str, list[int]] = field(default_factory=dict, init=False)
    executed: list[list[Envelope]] = field(default_factory=list, init=False)
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.spec = CacheSpec("test", self.page, tuple(replace(c, name=name) for name, c in self.pools.items()), self.ranks)
        self.ns = self._namespace({})
        of = [(Tier.DEVICE, self.l1), (Tier.HOST, self.l2)]
        capacity = {(t, c.name): n if isinstance(n, int) else n[c.name] for t, n in of for c in self.spec.components}
        policy = WritePolicy(self.write_policy)
        core = Settings(
            grid=self.grid or 0, exact=self.exact, write_policy=policy, track_interval=self.page,
            prefetch_policy=PrefetchPolicy(self.prefetch_policy), prefetch_threshold=self.prefetch_threshold, **self.settings,
        )  # fmt: skip
        self.res = Residency(self.spec, capacity)
        self.cache = Cache(self.res, core)
        self.group = Group(self.cache, self.clock, max_requests=self.max_requests)
        page_bytes = sum(c.page_bytes(self.page) for c in self.spec.components) * self.ranks
        if self.store is None:
            self.store = FaultyStore(MemoryStore(self.l3 * page_bytes), wait=self.clock.advance)
        self.explainer = Explainer(core)
        self.tags = tags_of(self.spec, self.recipe)
        describe(self.store, self.spec, self.recipe, 1.0)
        self._prompts: dict[str, Tokens] = {}
        self._jobs: dict[str, Job] = {}
        self._next = 0
        self._inbox: list[Envelope] = []
        self._faults: list[tuple[Tier, Tier, str, int]] = []
        self.executed = [[] for _ in range(self.ranks)]
        self._engines, self._executors = [], []
        for rank in range(self.ranks):
            at = {
                tier: {c.name: Pool(c, self.page, capacity[(tier, c.name)], layout) for c in self.spec.components}
                for tier, layout in ((Tier.DEVICE, "layer_first"), (Tier.HOST, self.layout))
            }
            mover, engine = self._parts(rank, at[Tier.DEVICE])
            me = Rank(rank, self.spec, at, {name: of[rank] for name, of in self.tags.items()}, self.batch)
            self._engines.append(engine)
            self._executors.append(Executor(me, mover, self.store, engine.run, self.clock))

    def _parts(self, rank: int, pools: Mapping[str, Pool]) -> tuple[Mover, ContentEngine]:
        if not self.devices:
            return Mover(choose("auto", "cpu", self.layout), threads=1), ContentEngine(rank, self.spec, pools, self._prompts)
        mover = fake_mover(self.devices[rank])
        wait_layer = mover.by_layer()
        assert wait_layer is not None
        return mover, QueuedEngine(rank, self.spec, pools, self._prompts, self.devices[rank], wait_layer)

    # -- requests -----------------------------------------------------------------------------------------------------------------

    def put(self, tokens: Iterable[int], rid: str | None = None, decoded: int = 0, **more: Any) -> Served:
        """A request over these tokens runs to its end, the last ``decoded`` of them made by decode. ``namespace``: fields to change;
        ``spans``: what is embedded; ``priority``, ``ttl_s``: hints.

        Its backup is under way when this returns; :meth:`settle` lets it complete.
        """
        rid = self.begin(tokens, rid, decoded, **more)
        while rid not in self.served and rid not in self.errors:
            if not self._round():
                raise HiCacheError(f"request {rid} waits for something that nothing under way will bring")
        if rid in self.errors:
            raise self.errors[rid]
        return self.served[rid]

    def begin(self, tokens: Iterable[int], rid: str | None = None, decoded: int = 0, **more: Any) -> str:
        """The same, only begun; it moves with :meth:`step` and :meth:`settle`."""
        request = self._request(tokens, rid, decoded, more.get("namespace", {}), more.get("limit"), more.get("spans", ()))
        request = replace(request, priority=more.get("priority", 0), ttl_s=more.get("ttl_s"))
        self._jobs[request.rid] = self.group.submit(request)
        self._collect()
        return request.rid

    def prefetch(self, rid: str, tokens: Iterable[int], **more: Any) -> Poll:
        """L3 to L2, begun."""
        request = self._request(tokens, rid, 0, more.get("namespace", {}), more.get("limit"))
        self._jobs[rid] = self.group.prefetch(request)
        self._collect()
        return self.poll(rid)

    def load(self, rid: str) -> int:
        """L2 to L1 of a prefetched prompt; returns the length it can resume from."""
        while self._jobs[rid].phase in (Phase.QUEUED, Phase.LOOKUP, Phase.FETCHING) and self._round():
            pass
        self.group.proceed(rid)
        self._collect()
        while self._jobs[rid].phase is not Phase.DONE and rid not in self.errors and self._round():
            pass
        if rid in self.errors:
            raise self.errors[rid]
        return self._jobs[rid].promised

    def abort(self, rid: str) -> None:
        self.group.cancel(rid)
        self._collect()

    # -- time -----------------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything pending complete."""
        while self._round():
            pass

    def step(self, seconds: float = 0.0) -> None:
        """Let the clock advance, and every rank execute what it has been given so far."""
        self.clock.advance(seconds)
        self.group.tick()
        self._collect()
        pending, self._inbox = self._inbox, []
        for envelope in pending:
            self.run(envelope)

    def pending(self) -> list[Envelope]:
        """Envelopes that no rank has executed yet: a test may run them in an order of its own, each once, with :meth:`run`."""
        return [self._inbox.pop(0) for _ in range(len(self._inbox))]

    def run(self, envelope: Envelope) -> None:
        """One rank executes one record and reports it."""
        self.report(envelope, self.execute(envelope))

    def execute(self, envelope: Envelope) -> Outcome:
        """What the rank does; the report is left to the caller (:meth:`report`)."""
        record = envelope.record
        self.calls += 1
        assert self.store is not None
        if envelope.rank == STORE:
            assert isinstance(record, Lookup | Clear)
            return ask(self.store, self.tags, record)
        self.executed[envelope.rank].append(envelope)
        outcome = self._executors[envelope.rank].execute(record)
        return self._spoil(record, outcome) if isinstance(record, Move) else outcome

    def report(self, envelope: Envelope, outcome: Outcome) -> None:
        self.group.report(envelope.rank, envelope.record.id, envelope.incarnation, outcome)
        self._collect()

    def fail_copy(self, source: str, target: str, pool: str, item: int) -> None:
        """The next copy between these tiers fails for its ``item``-th page of ``pool``, on every rank."""
        self._faults.append((TIERS[source], TIERS[target], pool, item))

    def _spoil(self, record: Move, outcome: Outcome) -> Outcome:
        bits = list(outcome.bits)
        for fault in list(self._faults):
            source, target, pool, item = fault
            for i, span in enumerate(record.spans):
                if (record.source, record.target, span.component) == (source, target, pool):
                    bits[i] &= ~(1 << item)
                    self._faults.remove(fault)
        return replace(outcome, bits=tuple(bits))

    def _round(self) -> bool:
        """One step, or where only a deadline is left, the way to it. False when nothing is under way but what is held for its caller."""
        self._collect()
        if not self._inbox:
            deadline = self.group.next_deadline(held=False)
            if deadline is None:
                return False
            self.clock.advance(max(0.0, deadline - self.clock()))
        self.step()
        return True

    def _collect(self) -> None:
        self._inbox += self.group.take()
        for event in self.group.events():
            self.events.append(event)
            self.explainer.hear(event)
            if isinstance(event, Sampled):
                self.outputs.setdefault(event.rid, []).extend(event.tokens)
            elif isinstance(event, Ended) and event.error is not None:
                self.errors[event.rid] = event.error
            elif isinstance(event, Ended) and event.report is not None:
                r = event.report
                self.served[event.rid] = Served(r.device, r.host, r.storage, r.computed)

    # -- force ----------------------------------------------------------------------------------------------------------------------

    def evict_l1(self, pages: int) -> None:
        """Free at least that many slots of every device pool by policy (as many as it has)."""
        self.evict("l1", dict.fromkeys(self.pools, pages))

    def evict_l2(self, pages: int) -> None:
        self.evict("l2", dict.fromkeys(self.pools, pages))

    def evict(self, tier: str, need: Mapping[str, int]) -> None:
        """Afterwards ``need`` slots per pool are free in a tier, or all that can be."""
        self.group.evict(TIERS[tier], {name: min(n, self.res.room((TIERS[tier], name))) for name, n in need.items()})
        self._collect()
        self.settle()

    def flush(self, l1: bool = True, l2: bool = True, l3: bool = False, timeout: float | None = None, preserve: bool = False) -> None:
        """Empty tiers. Raises :class:`~hicache_ray.errors.Busy` while requests run and there is no ``timeout``."""
        name = self.group.flush([TIERS[t] for t, wanted in (("l1", l1), ("l2", l2), ("l3", l3)) if wanted], timeout, preserve)
        self._collect()
        self._until_ended(name, "the flush")

    def drop_space(self, **namespace: str) -> Dropped:
        """Drop everything of a namespace (fields to change) from all tiers, with whatever is under way. Raises what kept it from that."""
        name = self.group.drop_space(space_of(self._namespace(namespace).digest()))
        self._collect()
        self._until_ended(name, "the drop")
        return next(e for e in self.events if isinstance(e, Dropped) and e.rid == name)

    def _until_ended(self, name: str, what: str) -> None:
        while not any(isinstance(e, Ended) and e.rid == name for e in self.events):
            if not self._round():
                raise HiCacheError(f"{what} waits for something that nothing under way will bring")
        if name in self.errors:
            raise self.errors[name]

    def detach(self) -> None:
        """L3 is taken away; the ranks' handles stay."""
        self.group.detach()
        self._collect()

    def attach(self) -> None:
        self.group.attach()

    # -- small things ---------------------------------------------------------------------------------------------------------------

    def _request(
        self, tokens: Iterable[int], rid: str | None, decoded: int, namespace: Mapping[str, str], limit: int | None,
        spans: Sequence[Embedded] = (),
    ) -> Request:  # fmt: skip
        tokens = as_tokens(list(tokens))
        self._next += 1
        name = rid or f"request {self._next}"
        for outcome in (self.served, self.errors, self.outputs):
            outcome.pop(name, None)
        self._prompts[name] = tokens
        ns = self._namespace(namespace)
        assert self.store is not None
        self.store.describe(ns.digest(), ns.record(), 1.0)
        return Request(name, tokens[: len(tokens) - decoded], ns, decoded + 1, limit, spans=tuple(spans))
