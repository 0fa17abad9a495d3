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

from collections.abc import Mapping, Sequence

from hicache_ray.errors import Busy, Cancelled, GroupLost, HiCacheError
from hicache_ray.flights import STORE, Envelope, Tale, merge
from hicache_ray.records import Clear, Merged, Outcome
from hicache_ray.spec import Tier
from hicache_ray.story import Event, Job, Request, Wait
from hicache_ray.tales import Tales

__all__ = ["STORE", "Envelope", "Group", "merge"]


class Group(Tales):
    """See the module. ``clock`` gives seconds, monotonic."""

    # -- what callers ask ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Job:
        """Begin a request. Raises :class:`Busy` when too many are under way, :class:`CapacityError` when it can never fit."""
        return self._begin(request, "request")

    def prefetch(self, request: Request) -> Job:
        """Bring a prompt near and hold it there until :meth:`proceed` or :meth:`cancel`, for ``hold_deadline_s`` at most."""
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

    def flush(self, tiers: Sequence[Tier], timeout_s: float | None = None, preserve: bool = False) -> str:
        """Begin to empty tiers; an :class:`Ended` event with the returned name says when it is complete.

        Raises :class:`Busy` when requests are under way and there is no ``timeout_s`` to wait for them, or when another flush is under
        way. Prefetches that nobody waits for yet are revoked. New requests begin after the flush. ``preserve``: what only L1 and L2 have
        is written to L3 first; where the time is over before that is done, or L3 is not attached, nothing is emptied.
        """
        running = [t.name for t in self._tales.values() if t.kind == "request"]
        if self._flushing is not None:
            raise Busy("a flush is under way; try again when it is complete")
        if running and timeout_s is None:
            raise Busy(f"{len(running)} requests are under way; give timeout_s to wait for them")
        for tale in [t for t in self._tales.values() if t.kind == "prefetch"]:
            self.cancel(tale.name)
        tale = Tale(self._own_name("flush"), "flush", self.cache.flush(tiers, preserve))
        tale.deadline = self._clock() + (timeout_s if timeout_s is not None else self.cache.settings.room_deadline_s)
        self._flushing = tale
        self._start(tale)
        return tale.name

    def drop_space(self, space: bytes, timeout_s: float = 30.0, hold: bool = False) -> str:
        """Begin to drop everything of a namespace's space (:func:`hicache_ray.keys.space_of`); a :class:`~hicache_ray.story.Dropped` event
        with the returned name says when it is gone, an :class:`Ended` one when that is over.

        Requests under way end as usual and publish nothing of the space; prefetches of it are revoked; new requests of it begin
        afterwards. ``hold``: L3 is the caller's to clear, who calls :meth:`lift` when that is done; should that not come within
        ``timeout_s`` seconds, it ends by itself. Raises :class:`Busy` when the space is being dropped.
        """
        if space in self._dropping:
            raise Busy("this namespace is being dropped; try again when that is complete")
        for tale in [t for t in self._tales.values() if t.kind == "prefetch" and t.job and t.job.space == space]:
            if tale not in self._held_back:
                self.cancel(tale.name)
        name = self._own_name("drop")
        tale = Tale(name, "drop", self.cache.drop(name, space, hold), deadline=self._clock() + timeout_s)
        self._dropping[space] = tale
        self._start(tale)
        return name

    def lift(self, name: str) -> None:
        """A drop that is held ends. Raises where it is over, or not complete: what was to be dropped may have come back."""
        tale = self._tales.get(name)
        if tale is None or tale.waits is not Wait.HOLD or tale.kind != "drop":
            raise HiCacheError("the drop took too long and has ended by itself; drop again")
        self._advance(tale)
        self._changed()

    def detach(self) -> None:
        """L3 is taken away: nothing is asked of it, read from it or written to it until :meth:`attach`.

        Whoever waits for it goes on without it now. The slots of what is in flight stay leased until the ranks have reported.
        """
        self.cache.res.storage = False
        self.cache.res.clear_durable()
        self._cut_short([f for f in self._flights.values() if f.awaited and f.of_storage], "storage was detached")
        self._changed()

    def attach(self) -> None:
        """L3 is there (again), with whatever it holds."""
        self.cache.res.clear_durable()
        self.cache.res.storage = True

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

    def next_deadline(self, held: bool = True) -> float | None:
        """When :meth:`tick` should be called at the latest. ``held``: also for what only its caller is waited for."""
        times = [f.deadline for f in self._flights.values() if f.deadline is not None and f.awaited]
        times += [t.deadline for t in self._tales.values() if t.deadline is not None and (held or t.waits is not Wait.HOLD)]
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
        cost = self.cache.restore.cost
        merged = merge(flight.record, [flight.outcomes[r] for r in flight.ranks]) if flight.awaited or cost is not None else None
        if merged is not None and cost is not None:
            cost.learn(flight.record, merged, self._clock() - flight.begun)
        if merged is not None and flight.tale is not None:
            self._resume(flight.tale, merged)
        elif merged is not None and flight.landed is not None:
            flight.landed(merged)
            self._adopt_spawned()
        elif isinstance(flight.record, Clear):
            self.cache.res.clear_durable()  # it has happened after all, perhaps to what was stored since
        self._changed()

    def tick(self) -> None:
        """Act on deadlines that have passed: a read or a lookup counts as failed where it has not been reported; waits end."""
        now = self._clock()
        over = [f for f in self._flights.values() if f.awaited and f.deadline is not None and f.deadline <= now]
        self._cut_short(over, "the deadline passed")
        for tale in [t for t in self._tales.values() if t.deadline is not None and t.deadline <= now]:
            if tale.waits in (Wait.ROOM, Wait.ARRIVAL):
                self._advance(tale, Merged(late=True))
            else:
                self._give_up(tale)
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

    def check(self) -> None:
        """Raise unless every structure is consistent, and at rest nothing is leased."""
        self.cache.res.check()
        if self.idle and self.cache.res.leases.open():
            raise HiCacheError(f"nothing is under way and leases are open: {self.cache.res.leases.open()}")
