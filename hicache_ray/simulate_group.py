"""One cache group in the simulator: the production core, its virtual ranks, and what is checked between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hicache_ray.errors import Busy, CapacityError, GroupLost, HiCacheError, Inconsistent
from hicache_ray.group import STORE, Envelope, Group
from hicache_ray.records import Clear, Compute, Lane, Lookup, Outcome, lane_of
from hicache_ray.simulate_cases import Case
from hicache_ray.simulate_checks import Asked, Checks, WatchedCache
from hicache_ray.simulate_content import EMPTY, Prompt, Violation, guarded, violation_of
from hicache_ray.simulate_engine import Engine
from hicache_ray.simulate_rank import Around, Op, VirtualRank
from hicache_ray.simulate_store import Clearing, Fate, Link, StorageFailed, fate
from hicache_ray.simulate_watch import WatchedResidency
from hicache_ray.spec import Tier
from hicache_ray.story import Dropped, Report, Request, Sampled

#: Transfers that a rank has under way with L3 at once; copies and forwards are one at a time.
WIDTH = {Lane.STORAGE: 4, Lane.ASK: 4, Lane.COPY: 1, Lane.COMPUTE: 1}
#: Seconds for which ranks of a lost group may go on with what they do.
DRAIN_S = 1.0


class Member:
    """One cache group of a world. ``schedule(delay, call)`` has the world call back later."""

    def __init__(
        self, around: Around, case: Case, clock: Callable[[], float],
        schedule: Callable[[float, Callable[[], None]], None], ended: Callable[[Asked, Report | None], None],
    ) -> None:  # fmt: skip
        self.around = around
        self.max_requests = case.max_requests
        self.clock = clock
        self.schedule = schedule
        self.ended = ended
        self.prompts: dict[str, Prompt] = around.prompts
        self.asked: dict[str, Asked] = {}
        self.link = Link()  # of the coordinator's own questions
        engines: list[Engine] = []
        self.ranks = [VirtualRank(rank, around, lambda: self.res, engines) for rank in range(around.spec.ranks)]
        self.incarnation = 0
        self.late: dict[str, float] = {}  # how long reports take, beyond the usual; faults change it
        self.doubled = 0.0  # share of reports that arrive twice
        self.stale: dict[tuple[int, int], Callable[[], None]] = {}  # reports of old incarnations, by rank and record
        self._tick_at: float | None = None
        self.attached = True
        self.down = False  # the group was lost, and its ranks drain
        self.dropped: Callable[[Dropped], None] = lambda event: None
        self.drop_over: Callable[[str], None] = lambda name: None
        self.checks = Checks(around, self.ranks, case.keeps, case.replicas == 1)
        self._begin_incarnation()

    @property
    def res(self) -> WatchedResidency:
        return self.checks.res

    @property
    def cache(self) -> WatchedCache:
        return self.checks.cache

    def _begin_incarnation(self) -> None:
        self.incarnation += 1
        self.group = Group(self.cache, self.clock, self.incarnation, self.max_requests)
        self.waiting: dict[tuple[int, Lane], deque[Envelope]] = {}
        self.busy: Counter[tuple[int, Lane]] = Counter()
        self.ops: dict[int, tuple[int, Op]] = {}
        self.sent: set[tuple[int, int]] = set()
        self.open: set[int] = set()
        self.done: set[int] = set()
        self._tick_at = None
        self.attached = True

    def restart(self, why: str) -> None:
        """The ranks or the coordinator are lost. What ranks do ends before the next incarnation begins, by itself or because they are gone;
        its reports come when they come. Meanwhile nobody is heard."""
        if self.down:
            return
        guarded(lambda: self.group.lose(why))
        self._collect(self.group)
        if self.asked:
            raise Violation(f"the group was lost and {sorted(self.asked)} have not ended")
        self.down = True
        self.waiting.clear()
        self.schedule(self.around.rng.random() ** 2 * DRAIN_S, partial(self._come_back, self.incarnation))
        self._drained()

    def _drained(self) -> None:
        """Nothing that the lost incarnation has begun is under way any more: why wait."""
        if self.down and not self.ops:
            self.schedule(0.001 * self.around.rng.random(), partial(self._come_back, self.incarnation))

    def _drain(self, number: int, op: Op) -> None:
        """A record of a group that is gone has ended."""
        stale, rng = self.incarnation, self.around.rng
        report = partial(self._late_report, number, op.record.id, stale, self.ranks[number].end(op, drained=True))
        if rng.random() < 0.5:
            self.schedule(rng.random() ** 3 * 3, report)
        else:
            self.stale[(number, op.record.id)] = report

    def _come_back(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        for number, op in self.ops.values():
            self._drain(number, op)
        for rank in self.ranks:
            rank.engine.runs.clear()
            for pool in rank.pools.values():
                pool[:] = [EMPTY] * len(pool)
        self.checks.start()
        self.down = False
        self._begin_incarnation()

    def _late_report(self, rank: int, record: int, incarnation: int, outcome: Outcome) -> None:
        before = len(self.group._flights)
        guarded(lambda: self.group.report(rank, record, incarnation, outcome))
        if incarnation != self.incarnation and len(self.group._flights) != before:
            raise Violation(f"a report of incarnation {incarnation} has ended record {record} of incarnation {self.incarnation}")
        self.after()

    # -- what is asked of the group ---------------------------------------------------------------------------------------------------

    def begin(self, kind: str, rid: str, prompt: Prompt, request: Request) -> bool:
        """Submit or prefetch; False where it was refused."""
        if rid in self.asked or self.down:
            return False  # it was preempted, and is not over yet; or nobody is there
        self.prompts[rid], self.around.born[rid] = prompt, self.around.contents.generations.get(prompt.space, 0)
        asked = self.asked[rid] = Asked(rid, kind, prompt, len(request.tokens))
        full = len(self.group.active()) >= self.max_requests
        try:
            asked.job = self.group.submit(request) if kind == "request" else self.group.prefetch(request)
        except (Busy, CapacityError) as refusal:
            if isinstance(refusal, Busy) and not full:
                raise Violation(f"request {rid} was refused and there is room for it: {refusal}") from refusal
            del self.asked[rid]
            return False
        except Inconsistent as error:
            raise violation_of(error) from error
        if len(self.group.active()) > self.max_requests:
            raise Violation(f"{len(self.group.active())} requests are under way where {self.max_requests} may be")
        self.after()
        return True

    def flush(self, tiers: Sequence[Tier], timeout_s: float | None) -> None:
        if self.down:
            return
        try:
            name = self.group.flush(tiers, timeout_s)
        except Busy:
            return
        except Inconsistent as error:
            raise violation_of(error) from error
        # Of what is taken away nothing can be emptied.
        tiers = [tier for tier in tiers if self.attached or tier is not Tier.STORAGE]
        self.asked[name] = Asked(name, "flush", None, 0, flushed=tiers)
        self.after()

    def drop(self, space: bytes, timeout_s: float, hold: bool) -> str:
        """Begin to drop a space; the drop's name. The caller goes on with :meth:`after`."""
        try:
            name = self.group.drop_space(space, timeout_s, hold)
        except (Busy, Inconsistent) as error:  # nobody else drops
            raise violation_of(error) from error
        self.asked[name] = Asked(name, "drop", None, 0)
        return name

    def attach(self, there: bool) -> None:
        """L3 is taken away, or there again. While it is away the group asks nothing of it."""
        if there is self.attached or self.down:
            return
        self.attached = there
        for asked in self.asked.values():
            asked.flushed = [tier for tier in asked.flushed if tier is not Tier.STORAGE]
        self.act(self.group.attach if there else self.group.detach)

    def act(self, call: Callable[[], None]) -> None:
        """Any other call of the group."""
        if not self.down:
            guarded(call)
            self.after()

    # -- how records run --------------------------------------------------------------------------------------------------------------

    def after(self) -> None:
        """The core has moved: send what it wants sent, hand out its events, compare counts, set the timer."""
        for envelope in self.group.take():
            self._send(envelope)
        self._collect(self.group)
        self.res.glance()
        if (coming := self.cache.restore.fetches.tokens) > self.around.settings.prefetch_tokens_in_flight:
            raise Violation(f"{coming} tokens are on their way from storage where {self.around.settings.prefetch_tokens_in_flight} may be")
        self._time()

    def _send(self, envelope: Envelope) -> None:
        record, token = envelope.record, (envelope.rank, envelope.record.id)
        if token in self.sent:
            raise Violation(f"record {record.id} was given to rank {envelope.rank} twice")
        self.sent.add(token)
        self.open.add(record.id)
        if not self.attached and lane_of(record) in (Lane.ASK, Lane.STORAGE):
            raise Violation(f"record {record.id} of {getattr(record, 'rid', '')} goes to storage, which was detached")
        rid = getattr(record, "rid", "")
        if rid in self.cache.knew and lane_of(record) is Lane.COMPUTE and self.asked[rid].resumed is None:
            asked = self.asked[rid]
            assert asked.job is not None
            assert isinstance(record, Compute)
            overtaken = self.cache.overtaken(asked.job)  # then it is of before the drop
            self.around.least[rid] = self.around.floors.get(self.prompts[rid].space, 0) - overtaken
            self.checks.resume(asked, record.start)
        self.schedule(0.0002 * (0.5 + self.around.rng.random()), lambda: self._deliver(envelope))
        if token in self.stale:  # the worst moment for it
            self.schedule(0.002 * self.around.rng.random(), self.stale.pop(token))

    def _deliver(self, envelope: Envelope) -> None:
        if envelope.incarnation != self.incarnation or self.down:
            return
        lane = (envelope.rank, lane_of(envelope.record))
        self.waiting.setdefault(lane, deque()).append(envelope)
        self._next(lane)

    def _next(self, lane: tuple[int, Lane]) -> None:
        queue = self.waiting.get(lane)
        while queue and self.busy[lane] < WIDTH[lane[1]]:
            envelope = queue.popleft()
            self.busy[lane] += 1
            if lane[0] == STORE:
                self._ask(lane, envelope)
                continue
            op = self.ranks[lane[0]].begin(envelope, self.clock())
            self.ops[id(op)] = (lane[0], op)
            for _ in range(min(op.batches, 2)):
                self.schedule(op.fate.seconds * self.around.rng.random(), partial(self._go_on, lane, op))
            self.schedule(op.fate.seconds, partial(self._end, lane, op))

    def _go_on(self, lane: tuple[int, Lane], op: Op) -> None:
        if op.envelope.incarnation == self.incarnation:
            self.ranks[lane[0]].go_on(op)

    def _end(self, lane: tuple[int, Lane], op: Op) -> None:
        if op.envelope.incarnation != self.incarnation:
            return  # it has ended when the next incarnation began
        del self.ops[id(op)]
        if self.down:
            self._drain(lane[0], op)
            self._drained()
            return
        self.busy[lane] -= 1
        self._report(op.envelope, self.ranks[lane[0]].end(op))
        self._next(lane)

    def _ask(self, lane: tuple[int, Lane], envelope: Envelope) -> None:
        """Questions to L3 as a whole. What a lookup says was true when it began; a clear happens when it ends."""
        record, rng = envelope.record, self.around.rng
        what = fate(self.link, rng, self.clock(), 4, record.timeout_s)
        told: Mapping[str, tuple[int, ...]] = {}
        clearing: Clearing | None = None
        if isinstance(record, Clear):
            clearing = self.around.shelf.clear(self.around.node, record.prefix, record.timeout_s)
            self.clear(clearing, what.seconds, lambda count, error: self._answer(lane, envelope, what, Outcome(error=error, count=count)))
            return
        if not what.error and isinstance(record, Lookup):
            told = self.around.look_up(record)
        self.schedule(what.seconds, lambda: self._answer(lane, envelope, what, Outcome(found=told)))

    def clear(self, clearing: Clearing, seconds: float, then: Callable[[int, str], None]) -> None:
        """A clear takes its time, and goes on where it is called off. ``then(count, error)`` when it ends."""

        def go_on() -> None:
            try:
                next(clearing)
            except StopIteration as end:
                then(end.value, "")
            except StorageFailed as failure:
                then(0, str(failure))
            else:
                self.schedule(seconds * (0.2 + 0.6 * self.around.rng.random()), go_on)

        go_on()

    def _answer(self, lane: tuple[int, Lane], envelope: Envelope, what: Fate, outcome: Outcome) -> None:
        if envelope.incarnation != self.incarnation or self.down:
            return
        self.busy[lane] -= 1
        error = what.error or outcome.error
        self._report(envelope, replace(outcome, found={} if error else outcome.found, error=error))
        self._next(lane)

    def _report(self, envelope: Envelope, outcome: Outcome) -> None:
        """The report is on its way; some arrive twice."""
        rng, late = self.around.rng, self.late.get("reports", 0.0)
        for _ in range(2 if self.doubled and rng.random() < self.doubled else 1):
            self.schedule(0.0002 * (0.5 + rng.random()) + late * rng.random(), lambda: self._arrive(envelope, outcome))

    def _arrive(self, envelope: Envelope, outcome: Outcome) -> None:
        if envelope.incarnation != self.incarnation:
            self._late_report(envelope.rank, envelope.record.id, envelope.incarnation, outcome)
            return
        record = envelope.record.id
        before = record in self.group._flights
        asked = self._told(envelope.record, outcome) if isinstance(envelope.record, Lookup) else None
        try:
            guarded(lambda: self.group.report(envelope.rank, record, envelope.incarnation, outcome))
        except GroupLost as error:
            raise Violation(f"the ranks agree in everything and the group says: {error}") from error
        if before and record not in self.group._flights:
            self._complete(record)
        self.after()
        if asked is not None and self.asked.get(asked.rid) is asked:
            self.checks.fetch(asked)

    def _told(self, record: Lookup, outcome: Outcome) -> Asked | None:
        """Whom a lookup answers, if somebody still waits for it."""
        asked, flight = self.asked.get(record.rid), self.group._flights.get(record.id)
        if asked is None or flight is None or flight.tale is None or outcome.error:
            return None
        self.checks.note(asked, record, outcome)
        return asked

    def _complete(self, record: int) -> None:
        if record in self.done:
            raise Violation(f"record {record} has completed twice")
        self.done.add(record)
        self.open.discard(record)

    # -- time -------------------------------------------------------------------------------------------------------------------------

    def _time(self) -> None:
        deadline = self.group.next_deadline()
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline + 0.01 and self._tick_at > self.clock()):
            return
        self._tick_at = max(deadline, self.clock()) + 0.005 * self.around.rng.random()
        at, group = self._tick_at, self.group
        self.schedule(at - self.clock(), lambda: self._tick(at, group))

    def _tick(self, at: float, group: Group) -> None:
        if group is not self.group or at != self._tick_at:
            return
        self._tick_at = None
        guarded(group.tick)
        left = group.next_deadline()
        if left is not None and left <= self.clock():
            raise Violation("a deadline has passed and a tick has not ended what waits for it")
        self.after()

    # -- what comes out ---------------------------------------------------------------------------------------------------------------

    def _collect(self, group: Group) -> None:
        for event in group.events():
            if isinstance(event, Sampled):
                continue
            if isinstance(event, Dropped):
                self.dropped(event)
                continue
            asked = self.asked.pop(event.rid, None)
            if asked is None:
                if event.rid.startswith(("r", "p")) and not isinstance(event.error, GroupLost | CapacityError):
                    raise Violation(f"{event.rid} has ended and was not under way (any more): {event.error}")
                continue
            self.checks.end(asked, event)
            self.cache.knew.pop(event.rid, None)
            self.prompts.pop(event.rid, None)
            self.around.born.pop(event.rid, None)
            self.around.least.pop(event.rid, None)
            for rank in self.ranks:
                rank.engine.runs.pop(event.rid, None)
            if asked.kind == "drop":
                self.drop_over(event.rid)
            self.ended(asked, event.report)

    # -- at rest ----------------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """The full check."""
        try:
            guarded(self.group.check)
        except HiCacheError as error:
            raise error if isinstance(error, Violation) else Violation(str(error)) from error
        guarded(self.res.look)

    @property
    def resting(self) -> bool:
        return self.group.idle and not self.down and not self.ops and not self.open

    def look_at_rest(self) -> None:
        """Nothing is under way: nothing is leased, every record has completed, every story has ended."""
        self.look()
        if self.res.leases.open() or any(pool.held for pool in self.res.pools.values()):
            raise Violation(f"at rest {len(self.res.leases.open())} leases are open")
        if self.asked:
            raise Violation(f"at rest {sorted(self.asked)} have not ended")
        missing = {record for _, record in self.sent} - self.done
        if missing:
            raise Violation(f"at rest the records {sorted(missing)} have not completed")
