"""How the stories of a group move: from record to record, from wait to wait, to their end; who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hicache_ray.cache import Cache
from hicache_ray.errors import Busy, Cancelled, CapacityError, HiCacheError, Inconsistent
from hicache_ray.flights import STORE, Envelope, Flight, Tale
from hicache_ray.ledger import Ledger
from hicache_ray.records import Clear, Lookup, Merged, Move, Record
from hicache_ray.spec import Tier
from hicache_ray.story import Ended, Event, Pause, Wait
from hicache_ray.why import judge


class Tales:
    """The part of a :class:`hicache_ray.group.Group` that nobody calls from outside. ``clock`` gives seconds, monotonic."""

    def __init__(self, cache: Cache, clock: Callable[[], float], incarnation: int = 1, max_requests: int = 1024) -> None:
        self.cache = cache
        self.incarnation = incarnation
        self.max_requests = max_requests
        self._ranks = tuple(range(cache.spec.ranks))
        self._clock = cache.res.now = clock
        self._tales: dict[str, Tale] = {}
        self._flights: dict[int, Flight] = {}
        self._outbox: deque[Envelope] = deque()
        self._engine: deque[Tale] = deque()
        self._events: list[Event] = []
        self._background = 0
        self.ledger = Ledger([*cache.res.pools, *((Tier.STORAGE, c.name) for c in cache.spec.components)])
        self._flushing: Tale | None = None
        self._dropping: dict[bytes, Tale] = {}
        cache.restore.clock = clock
        self._held_back: deque[Tale] = deque()

    def _cut_short(self, flights: Sequence[Flight], why: str) -> None:
        """The stories of these go on without those who have not reported."""
        for flight in flights:
            tale, landed = flight.tale, flight.landed
            flight.tale = flight.landed = None
            if tale is not None:
                self._resume(tale, flight.cut_short(why))
            elif landed is not None:
                landed(flight.cut_short(why))
                self._adopt_spawned()

    def _own_name(self, what: str) -> str:
        """For a story of the group's own. Callers choose their ids freely, so a name may be taken."""
        while True:
            self._background += 1
            name = f"{what} {self._background}"
            if name not in self._tales:
                return name

    def _start(self, tale: Tale) -> None:
        self._tales[tale.name] = tale
        if self._must_wait(tale):
            tale.waits = Wait.QUIET
            self._held_back.append(tale)
        else:
            self._advance(tale)
        self._changed()

    def _must_wait(self, tale: Tale) -> bool:
        """For a flush, or for the drop of what it is of.

        What callers evict meanwhile leaves after a flush: it goes to a lower tier, which may have been emptied already.
        """
        if tale.job is None:
            return tale.kind == "evict" and self._flushing is not None
        return self._flushing is not None or bool(self._dropping and tale.job.space in self._dropping)

    def _resume(self, tale: Tale, merged: Merged) -> None:
        if tale.cancelled:
            self._advance(tale, error=Cancelled(f"request {tale.name} was cancelled"))
        else:
            self._advance(tale, merged)

    def _advance(self, tale: Tale, value: Merged | None = None, error: Exception | None = None) -> None:
        """Run a story to where it waits next, or to its end."""
        started, tale.started, tale.waits = tale.started, True, None
        if tale.kind not in ("flush", "drop"):
            tale.deadline = None
        waits: Wait | Pause | Record | None = None
        failure: HiCacheError | None = None
        try:
            if error is not None:
                waits = tale.story.throw(error)
            else:
                waits = tale.story.send(value if started else None)  # type: ignore[arg-type]
        except StopIteration:
            pass
        except Inconsistent:
            raise  # nobody can go on from here
        except HiCacheError as why:
            failure = why
        self._note(tale)  # before anybody else moves: what they make go is theirs
        if waits is None:
            self._end(tale, failure)
        else:
            self._wait(tale, waits)
        self._adopt_spawned()

    def _note(self, tale: Tale) -> None:
        """What its last step has decided and what it has made go. In this order: what goes for a request is not what it lacked."""
        res, now, job = self.cache.res, self._clock(), tale.job
        if job is not None and job.evidence is not None and not job.evidence.judged:
            judge(job.evidence, res, self.ledger, now)
        while res.gone:
            self.ledger.add(res.gone.popleft(), now, tale.name)

    def _end(self, tale: Tale, error: Exception | None) -> None:
        del self._tales[tale.name]
        if tale.kind in ("flush", "drop"):
            self._flushing = None if self._flushing is tale else self._flushing
            self._dropping = {space: t for space, t in self._dropping.items() if t is not tale}
            self._let_go()
        self._events += self.cache.events
        self.cache.events.clear()
        if error is not None or tale.kind in ("flush", "drop"):
            self._events.append(Ended(tale.name, error=error, job=tale.job))

    def _let_go(self) -> None:
        """Those that were held back begin, unless something else holds them."""
        waiting, self._held_back = self._held_back, deque()
        for tale in waiting:
            if self._must_wait(tale):
                self._held_back.append(tale)
            else:
                self._advance(tale)

    def _wait(self, tale: Tale, waits: Wait | Pause | Record) -> None:
        until = None
        if isinstance(waits, Pause):
            until, waits = waits.until, waits.wait
        tale.waits = waits
        self._events += self.cache.events
        self.cache.events.clear()
        if isinstance(waits, Wait):
            if waits is Wait.ENGINE:
                self._engine.append(tale)
            elif waits is Wait.CHANGE:
                tale.deadline = self._clock() + self.cache.settings.room_deadline_s
            elif waits is Wait.HOLD and tale.kind == "prefetch":
                tale.deadline = self._clock() + self.cache.settings.hold_deadline_s
            elif waits is Wait.ARRIVAL:
                tale.deadline = tale.job.deadline if tale.job is not None else None
            elif waits is Wait.ROOM:
                tale.deadline, tale.seen = self._clock() + self.cache.settings.prefetch_base_s, self._host_room()
            tale.deadline = tale.deadline if until is None else until
            return
        self._launch(tale, waits)

    def _launch(self, tale: Tale | None, record: Record, landed: Callable[[Merged], None] | None = None) -> None:
        if tale is not None and (tale.kind not in ("flush", "drop") or isinstance(record, Clear)):
            tale.deadline = None  # a record has its own; a clear that has begun is not given up for the time that came before it
        to_store = isinstance(record, Lookup | Clear)
        flight = Flight(record, tale, (STORE,) if to_store else self._ranks, landed=landed, begun=self._clock())
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

    def _revoke(self, record_id: int) -> None:
        """Nobody wants it any more. What no rank has been given yet is not given out; else its slots stay leased until it is reported."""
        flight = self._flights.get(record_id)
        if flight is None:
            return
        flight.tale = flight.landed = None
        waiting = [envelope for envelope in self._outbox if envelope.record is flight.record]
        if len(waiting) == len(flight.ranks):
            self._outbox = deque(envelope for envelope in self._outbox if envelope.record is not flight.record)
            del self._flights[record_id]
            self.cache.res.leases.release_all(flight.leases)

    def _adopt_spawned(self) -> None:
        fetches = self.cache.restore.fetches
        for record, landed in fetches.take_launched():
            self._launch(None, record, landed)
        for record_id in fetches.take_revoked():
            self._revoke(record_id)
        while self.cache.spawned:
            name, story = self.cache.spawned.pop(0)
            tale = Tale(self._own_name(name), "backup", story)
            self._tales[tale.name] = tale
            self._advance(tale)

    def _give_up(self, tale: Tale) -> None:
        """Its time is over: it ends, whatever it waits for. What it has in flight keeps its slots until it is reported."""
        what = tale.waits.value if isinstance(tale.waits, Wait) else f"all that the {tale.kind} does"
        why: Exception = Busy(f"{what} did not happen within the timeout")
        if tale.waits is Wait.CHANGE:
            why = CapacityError("no room on the device: everything is in use by others; raise cache.device_tokens")
        elif tale.waits is Wait.HOLD and tale.kind == "prefetch":
            held_s = self.cache.settings.hold_deadline_s
            why = Cancelled(f"nobody went on with the prefetch {tale.name} within {held_s:g} s, so it is held no longer; prefetch it again")
        self._stop_waiting(tale)
        for flight in [f for f in self._flights.values() if f.tale is tale]:
            flight.tale = None
        self._advance(tale, error=why)

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
            for tale in [t for t in self._tales.values() if t.waits is Wait.ARRIVAL and not self._awaits(t)]:
                self._advance(tale, Merged())
                moved = True
            moved |= self._more_room()
            for tale in [t for space, t in self._dropping.items() if t.waits is Wait.WRITES and not self._storing(space)]:
                self._advance(tale)
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

    def _awaits(self, tale: Tale) -> bool:
        return tale.job is not None and self.cache.restore.fetches.waiting(tale.job)

    def _more_room(self) -> bool:
        """Where there is other room on the host than when they began to wait, those who wait for some look again, in the order in which
        they came. Whether one of them goes on."""
        moved = False
        for tale in [t for t in self._tales.values() if t.waits is Wait.ROOM]:
            deadline = tale.deadline
            if tale.seen == self._host_room():
                continue
            self._advance(tale, Merged())
            if tale.waits is Wait.ROOM:
                tale.deadline = deadline
            else:
                moved = True
        return moved

    def _host_room(self) -> tuple[int, ...]:
        res = self.cache.res
        return (*(res.room(place) for place in res.pools if place[0] is Tier.HOST), self.cache.restore.fetches.tokens)

    def _storing(self, space: bytes = b"") -> list[str]:
        """What writes to L3 at this moment, of a space or at all; also what its story has given up: it may still land."""
        return [f.record.rid for f in self._flights.values() if f.writes(space)]

    def _disturbing(self) -> list[str]:
        """What a flush waits for: everything but itself, revoked prefetches whose read is still in flight, and those who wait for it."""
        waiting = [self._flushing, *self._held_back]
        tales = [t.name for t in self._tales.values() if t not in waiting and not (t.kind == "prefetch" and t.cancelled)]
        return tales + self._storing()
