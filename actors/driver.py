"""Drives a :class:`hicache_ray.group.Group` on an event loop: envelopes go out to the ranks, reports come back, deadlines are kept.

Plain asyncio; the coordinator actor is a shell around it. Every wait here has a deadline; a rank that does not answer in time is a lost
group (its slots cannot be trusted any more), storage that does not answer is a miss. Whatever else goes wrong in the group's own logic is
a lost group as well: its state may be half changed, and a new incarnation starts from a clean one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Protocol

from hicache_ray.ask import ask
from hicache_ray.cache import Cache
from hicache_ray.errors import Busy, Cancelled, GroupLost, HiCacheError, Inconsistent
from hicache_ray.explain import Explainer
from hicache_ray.group import STORE, Envelope, Group
from hicache_ray.records import Clear, Lookup, Outcome, Record, lane_of
from hicache_ray.spec import Tier
from hicache_ray.store import Store
from hicache_ray.story import Dropped, Ended, Event, Request

log = logging.getLogger("hicache_ray.actors")

#: How much longer than the deadlines of a record and of those before it its report may take before the group counts as lost.
GRACE_S = 10.0
#: Threads that may wait for storage at once.
STORE_THREADS = 4
#: Events of one request that may wait for a slow reader. A request has at most one per decoded page, and one at its end.
EVENT_QUEUE = 4096


class Ranks(Protocol):
    """The ranks of a group as the driver reaches them."""

    def execute(self, rank: int, record: Record, incarnation: int) -> Awaitable[Outcome]:
        """Send a record; records of one kind to one rank are executed in the order of these calls. Raises what the rank raises."""
        ...


class Driver:
    """One per incarnation of a cache group. ``calls``: how many records went to ranks and how many questions to storage."""

    def __init__(
        self, cache: Cache, ranks: Ranks, store: Store | None, tags: Mapping[str, tuple[bytes, ...]], group: Group,
        explainer: Explainer | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.group = cache, group
        self._ranks = ranks
        self.store = store
        self._tags = tags
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="hicache-ask")
        self._timer: asyncio.Task[None] | None = None
        self._context = Context()
        self._ahead: dict[tuple[int, str], float] = {}
        self.lost: str = ""
        self.explainer = Explainer(cache.settings) if explainer is None else explainer
        self.calls = {"rank": 0, "store": 0}

    # -- what the coordinator calls ---------------------------------------------------------------------------------------------------

    async def serve(self, request: Request) -> AsyncIterator[Event]:
        """Events of a request as they happen, to its end. Abandoning the iterator cancels the request. Raises what ended it."""
        self._alive()
        queue: asyncio.Queue[Event] = asyncio.Queue(EVENT_QUEUE)
        with self._losing():
            self.group.submit(request)
        self._queues[request.rid] = queue
        ended = False
        try:
            self._pump()
            while not ended:
                event = await queue.get()
                ended = isinstance(event, Ended)
                if isinstance(event, Ended) and event.error is not None:
                    raise event.error
                yield event
        finally:
            self._queues.pop(request.rid, None)
            if not ended:
                self.cancel(request.rid)

    def cancel(self, rid: str) -> None:
        with self._losing():
            self.group.cancel(rid)
        self._pump()

    async def flush(self, tiers: Sequence[Tier], timeout_s: float | None, preserve: bool = False) -> None:
        """Complete when it returns; ``preserve``: what only L1 and L2 have is written to L3 first.

        Raises :class:`~hicache_ray.errors.Busy`.
        """
        self._alive()
        queue: asyncio.Queue[Event] = asyncio.Queue(EVENT_QUEUE)
        with self._losing():
            name = self.group.flush(tiers, timeout_s, preserve)
        self._queues[name] = queue
        try:
            self._pump()
            event = await queue.get()
        finally:
            self._queues.pop(name, None)
        if isinstance(event, Ended) and event.error is not None:
            raise event.error

    async def drop(self, space: bytes, timeout_s: float) -> Dropped:
        """Everything of a space has left L1 and L2 when it returns, and nothing of it is under way to L3; new requests of it wait for
        :meth:`lift`, at most ``timeout_s`` seconds from now. Raises :class:`~hicache_ray.errors.Busy`."""
        self._alive()
        queue: asyncio.Queue[Event] = asyncio.Queue(EVENT_QUEUE)
        with self._losing():
            name = self.group.drop_space(space, timeout_s, hold=True)
        self._queues[name] = queue
        try:
            self._pump()
            event = await queue.get()
        finally:
            self._queues.pop(name, None)
        if isinstance(event, Dropped):
            return event
        assert isinstance(event, Ended)
        raise event.error or GroupLost(self.lost)

    def lift(self, name: str) -> None:
        """L3 has been cleared of what was dropped. Raises where the drop has ended by itself."""
        self._alive()
        with self._losing():
            self.group.lift(name)
        self._pump()

    def detach(self) -> None:
        """L3 is taken away; see :meth:`Group.detach`."""
        self.store = None
        with self._losing():
            self.group.detach()
        self._pump()

    def attach(self, store: Store) -> None:
        self.store = store
        self.group.attach()

    def lose(self, why: str) -> None:
        """The ranks cannot be used any more: every request ends with :class:`GroupLost`. Further calls are refused with the reason."""
        if self.lost:
            return
        self.lost = why
        try:
            self.group.lose(why)
        except Exception as error:  # a story that cannot even end: those who wait must learn of the loss all the same
            self.lost += f"; and it could not be wound up: {type(error).__name__}: {error}"
        self._hand_out()
        for name, queue in self._queues.items():
            _force(queue, Ended(name, error=GroupLost(self.lost)))  # whoever has been told of an end already reads no further

    async def close(self) -> None:
        """End everything that is under way."""
        self.lose("the cache group is closing")
        for task in [*self._tasks, *([self._timer] if self._timer else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- how it moves -------------------------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self.lost:
            raise GroupLost(self.lost)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """A refusal is the caller's; any other error inside the group leaves it in no state to go on."""
        try:
            yield
        except Exception as error:
            if isinstance(error, HiCacheError) and not isinstance(error, Inconsistent):
                raise
            self.lose(f"the coordinator failed: {type(error).__name__}: {error}")
            raise GroupLost(self.lost) from error

    def _pump(self) -> None:
        """Send what the group wants sent, hand out its events, and set the timer."""
        for envelope in [] if self.lost else self.group.take():
            task = asyncio.get_running_loop().create_task(self._deliver(envelope, self._send(envelope)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._hand_out()
        if self._timer is None and not self.lost and self.group.next_deadline() is not None:
            self._timer = asyncio.get_running_loop().create_task(self._tick())

    def _send(self, envelope: Envelope) -> Awaitable[Outcome]:
        """Begin the call now, so that calls begin in the order of the envelopes."""
        record = envelope.record
        if envelope.rank != STORE:
            self.calls["rank"] += 1
            # A record is of the whole group, whoever's request happened to set it going. In that request's own context Ray would count it
            # as a child of the request, and cancel it together with it.
            return self._context.run(self._ranks.execute, envelope.rank, record, envelope.incarnation)
        self.calls["store"] += 1
        assert isinstance(record, Lookup | Clear)
        if self.store is None:
            return _now(Outcome(error="storage is not attached"))
        return asyncio.get_running_loop().run_in_executor(self._threads, ask, self.store, self._tags, record)

    async def _deliver(self, envelope: Envelope, call: Awaitable[Outcome]) -> None:
        record = envelope.record
        with self._patience(envelope) as patience_s:
            try:
                outcome = await asyncio.wait_for(asyncio.ensure_future(call), patience_s)
            except asyncio.CancelledError:
                raise
            except asyncio.TimeoutError:
                outcome = self._failed(envelope, f"did not report within {patience_s:g} s; it is frozen or its node is gone")
            except Exception as error:  # whatever a remote call may raise: a dead actor, a lost process group
                outcome = self._failed(envelope, f"failed: {type(error).__name__}: {error}")
        if self.lost:
            return
        try:
            with self._losing():
                self.group.report(envelope.rank, record.id, envelope.incarnation, outcome)
        except HiCacheError as error:
            self.lose(str(error))
            return
        self._pump()

    @contextlib.contextmanager
    def _patience(self, envelope: Envelope) -> Iterator[float]:
        """How long to wait for a report, in seconds. A rank executes the records of one kind in turn, and those before this one may take
        all of their own time."""
        lane, seconds = (envelope.rank, lane_of(envelope.record)), envelope.record.timeout_s
        self._ahead[lane] = self._ahead.get(lane, 0.0) + seconds
        try:
            yield self._ahead[lane] + GRACE_S
        finally:
            self._ahead[lane] -= seconds

    def _failed(self, envelope: Envelope, how: str) -> Outcome:
        """Storage that fails is a miss; a rank that fails takes the group along."""
        if envelope.rank == STORE:
            return Outcome(error=f"storage {how}")
        self.lose(f"rank {envelope.rank} {how}")
        return Outcome(error=self.lost)

    def _hand_out(self) -> None:
        for event in self.group.events():
            self.explainer.hear(event)
            queue = self._queues.get(event.rid)
            if queue is None:
                if isinstance(event, Ended) and event.error is not None and not isinstance(event.error, Cancelled | GroupLost):
                    log.warning("%s ended with an error: %s", event.rid, event.error)
                continue
            if queue.full():
                # The reader is far behind. It learns of that in the place of its oldest event, and gets no more.
                del self._queues[event.rid]
                self.group.cancel(event.rid)
                event = Ended(event.rid, error=Busy(f"{EVENT_QUEUE} events of request {event.rid} wait for a reader that is too slow"))
            _force(queue, event)

    async def _tick(self) -> None:
        """Sleeps from deadline to deadline while there are any; an idle cache has no timer."""
        try:
            while not self.lost:
                deadline = self.group.next_deadline()
                if deadline is None:
                    return
                await asyncio.sleep(min(max(0.0, deadline - time.monotonic()) + 0.001, 0.25))
                if deadline <= time.monotonic():
                    with self._losing():
                        self.group.tick()
                    self._pump()
        except HiCacheError as error:
            self.lose(str(error))
        finally:
            self._timer = None


def _force(queue: asyncio.Queue[Event], event: Event) -> None:
    """Put, in the place of the oldest event where the queue is full."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


async def _now(outcome: Outcome) -> Outcome:
    return outcome
