"""The other nodes as one client sees them: a handle, a lane of threads and a breaker for each incarnation that is alive."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from hicache_ray.errors import ConfigError, StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage.connection import Deadline, Expired, Overloaded, Refused
from hicache_ray.storage.directory import Directory
from hicache_ray.storage.lanes import Lane
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.session import Breaker
from hicache_ray.store import Store

T = TypeVar("T")

PLACEMENTS = ("writer", "home")
_CLOSE_S = 2.0
_RECHECK_S = 1.0


@dataclass(frozen=True)
class ShardConfig:
    """``placement``: bytes stay with the ``writer``'s node or go to the ``home`` of their group. ``replicas``: copies of each, 1 or 2; the
    second lies in another failure domain if there is one.

    ``workers``: threads of this client that wait on one node at most. ``backoff_s``, ``backoff_most_s``: how long a node that failed is
    left alone. ``late_ids``: announcements kept for a home that did not take them.
    """

    placement: str = "writer"
    replicas: int = 1
    workers: int = 4
    backoff_s: float = 0.5
    backoff_most_s: float = 2.0
    late_ids: int = 1 << 16

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, not {self.placement!r}")
        if self.replicas not in (1, 2):
            raise ConfigError(f"replicas must be 1 or 2, not {self.replicas}")
        if self.workers < 1 or self.late_ids < 0:
            raise ConfigError("workers must be at least 1, and late_ids at least 0")


@dataclass(frozen=True, eq=False)
class NodeHandle:
    """How to talk to one incarnation of a node. Whoever asked for the handle closes ``store``, and with it the way to ``directory``."""

    id: str
    incarnation: str
    label: str
    store: Store
    directory: Directory


class Sent(Generic[T]):
    """A call on its way to a node, or one that could not be sent."""

    def __init__(self, peer: Peer, tried: bool = False, error: StoreError | None = None) -> None:
        self.member = peer.member
        self.future: Future[T] | None = None
        self._peer, self._tried, self._error = peer, tried, error
        self._lock = threading.Lock()
        self._reported = error is not None

    def result(self) -> T:
        """What it returned; to be asked for after :func:`settle` or :func:`finish`. Raises StoreError; gives up what has not ended."""
        if self._error is not None or self.future is None:
            raise self._error or StoreError(f"node {self.member.node} was not asked")
        if self.future.done() and not self.future.cancelled():
            return self.future.result()
        if self.future.cancel():
            self.report(None)
            raise Overloaded(f"all threads that wait on node {self.member.node} were busy until the deadline")
        self.report(False)
        raise StoreTimeout(f"node {self.member.node} did not answer before the deadline")

    def done(self) -> bool:
        """Is there a result, of whatever kind, without waiting?"""
        return self.future is None or self.future.done()

    def report(self, well: bool | None) -> None:
        """To the breaker, once: whoever comes first, the thread that asked or the one that waited for it."""
        with self._lock:
            reported, self._reported = self._reported, True
        if not reported:
            self._peer.breaker.report(well, self._tried)


class Peer:
    """One incarnation of one node. The first call connects, on a thread of the lane."""

    def __init__(self, member: Member, connect: Callable[[Member], NodeHandle], config: ShardConfig, clock: Callable[[], float]) -> None:
        self.member = member
        self.breaker = Breaker(clock, config.backoff_s, config.backoff_most_s)
        self._connect = connect
        self.lane = Lane(f"node-{member.node}", config.workers)
        self._lock = threading.Lock()
        self._handle: NodeHandle | None = None
        self._closed = False

    def handle(self) -> NodeHandle:
        """Raises StoreError."""
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            if self._handle is None:
                self._handle = self._connect(self.member)
            return self._handle

    def send(self, call: Callable[[NodeHandle, float], T], deadline: Deadline) -> Sent[T]:
        """Have ``call(handle, seconds left)`` run on the lane. Never raises: what went wrong is in what it returns."""
        try:
            tried = self.breaker.admit()
        except StoreError as error:
            return Sent(self, error=error)
        sent: Sent[T] = Sent(self, tried)
        try:
            sent.future = self.lane.submit(lambda: self._run(sent, call, deadline))
        except StoreError as error:
            self.breaker.report(None, tried)
            return Sent(self, error=error)
        return sent

    def close(self) -> None:
        """Idempotent. Calls under way may go on for a moment in ``lane``."""
        self.lane.close(0.0)
        with self._lock:
            self._closed = True
            handle, self._handle = self._handle, None
        if handle is not None:
            handle.store.close()

    def busy(self) -> bool:
        return self.lane.busy()

    def _run(self, sent: Sent[T], call: Callable[[NodeHandle, float], T], deadline: Deadline) -> T:
        well: bool | None = None
        try:
            left = deadline.left()
            result = call(self.handle(), left)
            well = True
            return result
        except (Refused, Overloaded, Expired):
            raise
        except (OSError, struct.error, ValueError) as error:  # whoever asks is promised a StoreError
            well = False
            raise StoreError(f"node {self.member.node} failed: {type(error).__name__}: {error}") from error
        except StoreError:
            well = False
            raise
        finally:
            sent.report(well)


def settle(sent: Iterable[Sent[T]], deadline: Deadline) -> None:
    """Wait until all have ended, or the deadline has passed."""
    futures = [one.future for one in sent if one.future is not None]
    if futures:
        wait(futures, max(0.0, deadline.at - deadline.clock()))


def half(deadline: Deadline) -> Deadline:
    """Of what is left: there must be time to do without who has not answered by then."""
    now = deadline.clock()
    return Deadline(deadline.clock, now + max(deadline.at - now, 0.0) / 2)


def finish(sent: Iterable[Sent[T]], deadline: Deadline) -> None:
    """Wait until nobody works for these calls any more: they use the caller's memory.

    At the deadline those that have not begun are called off. The others were told the same deadline, and a store keeps to it.
    """
    calls = list(sent)
    settle(calls, deadline)
    running = {one.future for one in calls if one.future is not None and not one.future.cancel() and not one.future.done()}
    while running:
        running = set(wait(running, _RECHECK_S).not_done)


class Peers:
    """The peers of the members that are alive. An incarnation that a newer one replaced is closed when the view says so."""

    def __init__(
        self, view: Callable[[], View], connect: Callable[[Member], NodeHandle], config: ShardConfig, clock: Callable[[], float]
    ) -> None:
        self._source, self._connect, self._config, self._clock = view, connect, config, clock
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # by the name of the holder
        self._retired: list[Peer] = []  # closed, with a call that has not ended
        self._version = -1
        self._closed = False

    def view(self) -> View:
        """The members of now. Raises StoreClosed."""
        view = self._source()
        gone: list[Peer] = []
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            if view.version > self._version:
                self._version = view.version
                gone = [self._peers.pop(holder) for holder in set(self._peers) - set(view.known)]
                self._retired = [peer for peer in self._retired if peer.busy()] + gone
        for peer in gone:
            peer.close()
        return view

    def of(self, member: Member) -> Peer:
        """Raises StoreClosed."""
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            peer = self._peers.get(member.holder)
            if peer is None:
                peer = self._peers[member.holder] = Peer(member, self._connect, self._config, self._clock)
            return peer

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            peers, self._peers = [*self._peers.values(), *self._retired], {}
            self._retired = []
        for peer in peers:
            peer.close()
        Lane.close_all([peer.lane for peer in peers], _CLOSE_S)
