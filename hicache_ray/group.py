"""A coordinator's logic: one cache over R ranks. Turns stories into envelopes for the ranks and their reports into progress.

It knows nothing of Ray, performs nothing, and has no clock of its own. A driver

* takes :meth:`Group.take` and has every rank (or, for L3's questions, the store) execute its envelopes in that order,
* hands every :class:`Outcome` to :meth:`Group.report` when it is known,
* calls :meth:`Group.tick` when :meth:`Group.next_deadline` has passed,
* reads :meth:`Group.events`.

Ranks see one order of records. A record's slots stay leased until *every* rank has reported it, also when its story went on without it
at the deadline: a slot is never given out while somebody may still write to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.cache import Cache
from hicache_ray.errors import Busy, Cancelled, CapacityError, GroupLost, HiCacheError, Inconsistent
from hicache_ray.lease import Lease
from hicache_ray.records import Clear, Lookup, Merged, Move, Outcome, Record
from hicache_ray.spec import Tier
from hicache_ray.story import Ended, Event, Job, Request, Story, Wait

#: The "rank" that answers questions about L3 as a whole.
STORE = -1


@dataclass(frozen=True)
class Envelope:
    """One record for one rank (or :data:`STORE`), of one incarnation of the group."""

    rank: int
    record: Record
    incarnation: int


@dataclass
class Tale:
    """A story under way. ``kind``: request, prefetch, evict, backup or flush."""

    name: str
    kind: str
    story: Story
    job: Job | None = None
    waits: Wait | Record | None = None
    started: bool = False
    cancelled: bool = False
    deadline: float | None = None


@dataclass
class Flight:
    """A record that the ranks are executing. ``tale`` is None once its story went on without it."""

    record: Record
    tale: Tale | None
    ranks: tuple[int, ...]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deadline: float | None = None
    leases: list[Lease] = field(default_factory=list)


class Group:
    """See the module. ``clock`` gives seconds, monotonic."""

    def __init__(self, cache: Cache, clock: Callable[[], float], incarnation: int = 1, max_requests: int = 1024) -> None:
        self.cache = cache
        self.incarnation = incarnation
        self.max_requests = max_requests
        self._ranks = tuple(range(cache.spec.ranks))
        self._clock = clock
        self._tales: dict[str, Tale] = {}
        self._flights: dict[int, Flight] = {}
        self._outbox: deque[Envelope] = deque()
        self._engine: deque[Tale] = deque()
        self._events: list[Event] = []
        self._background = 0
        self._flushing: Tale | None = None
        self._held_back: deque[Tale] = deque()

    # -- what callers ask ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Job:
        """Begin a request. Raises :class:`Busy` when too many are under way, :class:`CapacityError` when it can never fit."""
        return self._begin(request, "request")

    def prefetch(self, request: Request) -> Job:
        """Bring a prompt near and hold it there until :meth:`proceed` or :meth:`cancel`."""
        return self._begin(request, "prefetch")

    def _begin(self, request: Request, kind: str) -> Job:
        if request.rid in self._tales:
            raise Busy(f'a request with the id "{request.rid}" is under way; choose another request_id')
        if len(self.active()) >= self.max_requests:
            raise Busy(f"{self.max_requests} requests are under way (engine.max_queue); try again later")
        job = self.cache.job(request)
        story = self.cache.request(job) if kind == "request" else self.cache.prefetch(job)
        self._start(Tale(request.rid, kind, story, job))
        return job

    def proceed(self, rid: str) -> None:
        """A held prefetch goes on with its load."""
        tale = self._tales.get(rid)
        if tale is None or tale.waits is not Wait.HOLD:
            raise HiCacheError(f'nothing is held under the id "{rid}"; prefetch it first and wait until it is ready')
        self._advance(tale)
        self._changed()

    def cancel(self, rid: str) -> None:
        """Give a request up at any point. Takes effect at once, or when the record in flight has completed."""
        tale = self._tales.get(rid)
        if tale is None or tale.job is None:
            return  # stories of the group's own are not for callers to end
        tale.cancelled = True
        if isinstance(tale.waits, Wait):
            self._stop_waiting(tale)
            self._advance(tale, error=Cancelled(f"request {rid} was cancelled"))
            self._changed()

    def active(self) -> tuple[str, ...]:
        """Requests and prefetches under way."""
        return tuple(t.name for t in self._tales.values() if t.kind in ("request", "prefetch"))

    def flush(self, tiers: Sequence[Tier], timeout_s: float | None = None) -> str:
        """Begin to empty tiers; an :class:`Ended` event with the returned name says when it is complete.

        Raises :class:`Busy` when requests are under way and there is no ``timeout_s`` to wait for them, or when another flush is under
        way. Prefetches that nobody waits for yet are revoked. New requests begin after the flush.
        """
        running = [t.name for t in self._tales.values() if t.kind == "request"]
        if self._flushing is not None:
            raise Busy("a flush is under way; try again when it is complete")
        if running and timeout_s is None:
            raise Busy(f"{len(running)} requests are under way; give timeout_s to wait for them")
        for tale in [t for t in self._tales.values() if t.kind == "prefetch"]:
            self.cancel(tale.name)
        tale = Tale(self._own_name("flush"), "flush", self.cache.flush(tiers))
        tale.deadline = self._clock() + (timeout_s if timeout_s is not None else self.cache.settings.room_deadline_s)
        self._flushing = tale
        self._start(tale)
        return tale.name

    def evict(self, tier: Tier, need: Mapping[str, int]) -> None:
        """Make room in a tier: afterwards ``need`` slots per component are free."""
        self._start(Tale(self._own_name("evict"), "evict", self.cache.evict(tier, need)))

    # -- what drivers ask ---------------------------------------------------------------------------------------------------------

    def take(self) -> list[Envelope]:
        """Envelopes to execute, in order; each is handed out once."""
        out = list(self._outbox)
        self._outbox.clear()
        return out

    def events(self) -> list[Event]:
        """What happened since the last call."""
        out, self._events = self._events, []
        return out

    def next_deadline(self) -> float | None:
        """When :meth:`tick` should be called at the latest."""
        times = [f.deadline for f in self._flights.values() if f.deadline is not None and f.tale is not None]
        times += [t.deadline for t in self._tales.values() if t.deadline is not None]
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing in flight."""
        return not self._tales and not self._flights

    def report(self, rank: int, record_id: int, incarnation: int, outcome: Outcome) -> None:
        """One rank has executed one record. Reports of other incarnations are ignored."""
        flight = self._flights.get(record_id)
        if incarnation != self.incarnation or flight is None or rank not in flight.ranks or rank in flight.outcomes:
            return
        flight.outcomes[rank] = outcome
        if len(flight.outcomes) < len(flight.ranks):
            return
        del self._flights[record_id]
        self.cache.res.leases.release_all(flight.leases)
        tale, merged = flight.tale, None
        if tale is not None:
            merged = merge(flight.record, [flight.outcomes[r] for r in flight.ranks])
            self._resume(tale, merged)
        elif isinstance(flight.record, Clear):
            self.cache.res.index.clear_durable()  # it has happened after all, perhaps to what was stored since
        self._changed()

    def tick(self) -> None:
        """Act on deadlines that have passed: a read or a lookup counts as failed where it has not been reported; waits end."""
        now = self._clock()
        for flight in [f for f in self._flights.values() if f.tale is not None and f.deadline is not None and f.deadline <= now]:
            tale, flight.tale = flight.tale, None
            none = Outcome(bits=(0,) * _spans(flight.record), error="the deadline passed")
            merged = merge(flight.record, [flight.outcomes.get(r, none) for r in flight.ranks])
            assert tale is not None
            self._resume(tale, Merged(**{**merged.__dict__, "late": True}))
        for tale in [t for t in self._tales.values() if t.deadline is not None and t.deadline <= now]:
            waits = tale.waits
            if isinstance(waits, Wait):
                self._stop_waiting(tale)
                error: Exception = Busy(f"{waits.value} did not happen within the timeout")
                if waits is Wait.CHANGE:
                    error = CapacityError("no room on the device: everything is in use by others; raise cache.device_tokens")
                self._advance(tale, error=error)
        self._changed()

    def lose(self, why: str) -> None:
        """The ranks are gone: every story ends with :class:`GroupLost`, whatever it waits for. The group is of no use afterwards."""
        for flight in self._flights.values():
            self.cache.res.leases.release_all(flight.leases)
        self._flights.clear()
        self._outbox.clear()
        for tale in list(self._tales.values()):
            tale.waits = None
            self._held_back.clear()
            self._engine.clear()
            self._advance(tale, error=GroupLost(why))

    # -- how stories move -----------------------------------------------------------------------------------------------------------

    def _own_name(self, what: str) -> str:
        """For a story of the group's own. Callers choose their ids freely, so a name may be taken."""
        while True:
            self._background += 1
            name = f"{what} {self._background}"
            if name not in self._tales:
                return name

    def _start(self, tale: Tale) -> None:
        self._tales[tale.name] = tale
        # What callers begin meanwhile begins after a flush: what leaves a tier goes to a lower one, which may have been emptied already.
        if self._flushing is not None and tale.kind in ("request", "prefetch", "evict"):
            tale.waits = Wait.QUIET
            self._held_back.append(tale)
        else:
            self._advance(tale)
        self._changed()

    def _resume(self, tale: Tale, merged: Merged) -> None:
        if tale.cancelled:
            self._advance(tale, error=Cancelled(f"request {tale.name} was cancelled"))
        else:
            self._advance(tale, merged)

    def _advance(self, tale: Tale, value: Merged | None = None, error: Exception | None = None) -> None:
        """Run a story to where it waits next, or to its end."""
        started, tale.started, tale.waits = tale.started, True, None
        if tale.kind != "flush":
            tale.deadline = None
        try:
            if error is not None:
                waits = tale.story.throw(error)
            else:
                waits = tale.story.send(value if started else None)  # type: ignore[arg-type]
        except StopIteration:
            self._end(tale, None)
        except Inconsistent:
            raise  # nobody can go on from here
        except HiCacheError as failure:
            self._end(tale, failure)
        else:
            self._wait(tale, waits)
        self._adopt_spawned()

    def _end(self, tale: Tale, error: Exception | None) -> None:
        del self._tales[tale.name]
        if self._flushing is tale:
            self._flushing = None
            waiting, self._held_back = self._held_back, deque()
            for other in waiting:
                self._advance(other)
        self._events += self.cache.events
        self.cache.events.clear()
        if error is not None or tale.kind == "flush":
            self._events.append(Ended(tale.name, error=error))

    def _wait(self, tale: Tale, waits: Wait | Record) -> None:
        tale.waits = waits
        self._events += self.cache.events
        self.cache.events.clear()
        if isinstance(waits, Wait):
            if waits is Wait.ENGINE:
                self._engine.append(tale)
            elif waits is Wait.CHANGE:
                tale.deadline = self._clock() + self.cache.settings.room_deadline_s
            return
        self._launch(tale, waits)

    def _launch(self, tale: Tale, record: Record) -> None:
        tale.deadline = None  # a record has its own
        to_store = isinstance(record, Lookup | Clear)
        flight = Flight(record, tale, (STORE,) if to_store else self._ranks)
        # Copies between host and device have no deadline here: a rank that does not end one in time is lost, and its driver says so.
        if to_store or (isinstance(record, Move) and Tier.STORAGE in (record.source, record.target)):
            flight.deadline = self._clock() + record.timeout_s
        if isinstance(record, Move):
            for span in record.spans:
                for tier, slots in ((record.source, span.source), (record.target, span.target)):
                    if tier is not Tier.STORAGE:
                        flight.leases.append(self.cache.res.leases.take(f"record {record.id}", (tier, span.component), slots))
        self._flights[record.id] = flight
        self._outbox += [Envelope(rank, record, self.incarnation) for rank in flight.ranks]

    def _adopt_spawned(self) -> None:
        while self.cache.spawned:
            name, story = self.cache.spawned.pop(0)
            tale = Tale(self._own_name(name), "backup", story)
            self._tales[tale.name] = tale
            self._advance(tale)

    def _stop_waiting(self, tale: Tale) -> None:
        for queue in (self._engine, self._held_back):
            if tale in queue:
                queue.remove(tale)

    def _changed(self) -> None:
        """Something completed: those who wait for that may go on, and those who wait for them."""
        moved = True
        while moved:
            moved = False
            for tale in [t for t in self._tales.values() if t.waits is Wait.CHANGE]:
                deadline = tale.deadline
                self._advance(tale)
                if tale.waits is Wait.CHANGE:
                    tale.deadline = deadline
                else:
                    moved = True
            while self.cache.engine_owner is None and self._engine:
                tale = self._engine.popleft()
                self.cache.engine_owner = tale.name
                self._advance(tale)
                moved = True
            flush = self._flushing
            if flush is not None and flush.waits is Wait.QUIET and not self._disturbing():
                self._advance(flush)
                moved = True

    def _disturbing(self) -> list[str]:
        """What a flush waits for: everything but itself, revoked prefetches whose read is still in flight, and those who wait for it."""
        waiting = [self._flushing, *self._held_back]
        tales = [t.name for t in self._tales.values() if t not in waiting and not (t.kind == "prefetch" and t.cancelled)]
        # A write to L3 that its story has given up may still land.
        late = [f.record.rid for f in self._flights.values() if isinstance(f.record, Move) and f.record.target is Tier.STORAGE]
        return tales + late

    def check(self) -> None:
        """Raise unless every structure is consistent, and at rest nothing is leased."""
        self.cache.res.check()
        if self.idle and self.cache.res.leases.open():
            raise HiCacheError(f"nothing is under way and leases are open: {self.cache.res.leases.open()}")


def _spans(record: Record) -> int:
    return len(record.spans) if isinstance(record, Move) else 0


def merge(record: Record, outcomes: Sequence[Outcome]) -> Merged:
    """One outcome for all ranks: bits intersected; what must agree is compared. Raises :class:`GroupLost` where ranks differ."""
    error = next((o.error for o in outcomes if o.error), "")
    spans = _spans(record)
    bits = []
    for i in range(spans):
        both = -1
        for outcome in outcomes:
            both &= outcome.bits[i] if i < len(outcome.bits) else 0
        bits.append(both)
    first = outcomes[0]
    if not error and any(o.output != first.output for o in outcomes):
        raise GroupLost(f"the ranks sampled different tokens: {[o.output for o in outcomes]}")
    # Digests are told for all ranks or not at all: a rank that failed has none to set beside the others'.
    names = () if error else first.digests
    digests = {c: tuple(zip(*(o.digests.get(c, ()) for o in outcomes), strict=True)) for c in names}
    return Merged(tuple(bits), first.found, first.output, first.logprobs, digests, error, any(o.refused for o in outcomes))
