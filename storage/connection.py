"""Client's side of the socket: deadlines, connections, and a bounded pool of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import messages, wire
from hicache_ray.storage.frames import FrameSocket, now
from hicache_ray.storage.messages import Hello
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.wire import Kind, Reader, WireError

_MOST_S = 1e6
_ATTEMPTS, _ATTEMPT_S = 500, 0.002


class Refused(StoreError):
    """The service answered, with a no. It is well, and so is the connection."""


class Overloaded(StoreTimeout):
    """All connections of this client were in use until the deadline: says nothing about the service."""


class Expired(StoreTimeout):
    """The deadline had passed before the service was asked: says nothing about the service."""


class Deadline(NamedTuple):
    """A point on ``clock``, in seconds."""

    clock: Callable[[], float]
    at: float

    @classmethod
    def after(cls, clock: Callable[[], float], seconds: float) -> Deadline:
        """``seconds`` beyond some days are cut to that: no timer takes them."""
        return cls(clock, clock() + (seconds if seconds < _MOST_S else _MOST_S))

    def passed(self) -> bool:
        return self.clock() >= self.at

    def left(self) -> float:
        """Seconds left; raises Expired when there are none."""
        return self.left_at(self.clock())

    def left_at(self, time: float) -> float:
        """:meth:`left`, for who has just asked the clock."""
        left = self.at - time
        if left <= 0:
            raise Expired("the deadline of this call has passed")
        return left


class Spare(NamedTuple):
    """Memory of the arena that is ours to write to until ``until``, a point on the caller's clock, and a margin beyond it for the slice
    that is being written then: ``size`` bytes at ``offset``."""

    number: int
    until: float
    offset: int
    size: int


class Connection:
    """One request at a time. ``clean``: no exchange is half way, and it is not closed; only then may it serve another call: a late answer
    must not meet a later question."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        """Connects and greets. Raises StoreError."""
        self._path, self._request, self.clean = path, 0, True
        self.segment: Segment | None = None  # set by the pool once the hello is known
        self.spare: Spare | None = None
        self.puts_one = 0  # puts of one object so far
        try:
            self._frames = FrameSocket(_connected(path, deadline), wire.REPLY)
        except OSError as error:
            raise self._translated(error) from error
        try:
            self.hello: Hello = messages.unpack_hello(self.call(Kind.HELLO, b"", deadline))
        except BaseException:
            self.close()
            raise

    @property
    def mapped(self) -> Segment:
        if self.segment is None:
            raise StoreClosed("the connection has no mapping")
        return self.segment

    def call(self, kind: Kind, body: bytes, deadline: Deadline, watch_s: float = 0.0) -> Reader:
        """Ask and wait for the answer. Raises StoreTimeout, StoreClosed, WireError, Refused. ``watch_s``: as of :meth:`exchange`."""
        return Reader(self.exchange(kind, body, now() + deadline.left(), watch_s))

    def exchange(self, kind: int, body: bytes, until: float, watch_s: float = 0.0) -> bytes:
        """:meth:`call`, until a point on :func:`~hicache_ray.storage.frames.now`; the body of the answer. ``watch_s``: how long to look for
        it before sleeping; at the core's expense, so only where much depends on it."""
        try:
            frames, asked = self._frames, (self._request + 1) & 0xFFFFFFFF
            question = wire.encode(kind, asked, body)
            self.clean, self._request = False, asked
            try:  # noqa: SIM105 (the other way costs more than the message)
                frames.send(question, until)
            except BrokenPipeError:  # the service has hung up; perhaps it has said why
                pass
            if watch_s:
                frames.watch(watch_s)
            frame = frames.receive(until)
        except OSError as error:
            raise self._translated(error) from error
        if frame is None:
            raise StoreClosed(f"the arena's service at {self._path} hung up")
        found, request, answer = frame
        if found != kind or request != asked:
            if found != Kind.ERROR:
                raise WireError("the answer belongs to another question")
            self.clean = request == asked
            raise Refused(f"the arena's service refused: {messages.text(answer)}")
        self.clean = True
        return answer

    def tell(self, kind: Kind, body: bytes, deadline: Deadline) -> None:
        """Send what has no answer."""
        until = now() + deadline.left()
        try:
            question = wire.encode(kind, (self._request + 1) & 0xFFFFFFFF, body)
            self.clean, self._request = False, (self._request + 1) & 0xFFFFFFFF
            self._frames.send(question, until)
        except OSError as error:
            raise self._translated(error) from error
        self.clean = True

    def alive(self) -> bool:
        """False once the service has hung up, or this was closed."""
        return self.clean and self._frames.alive()

    def close(self) -> None:
        """Idempotent."""
        self.clean = False
        self._frames.close()
        self.segment = None

    def _translated(self, error: OSError) -> StoreError:
        if isinstance(error, TimeoutError):
            return StoreTimeout(f"the arena's service at {self._path} did not answer within the deadline")
        return StoreClosed(f"the arena's service at {self._path} cannot be reached: {error.strerror or error}")


def _connected(path: str, deadline: Deadline) -> socket.socket:
    """A Unix socket with a timeout does not wait while the listener's queue is full, so we do, for a second at most."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            sock.settimeout(deadline.left())
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(_ATTEMPT_S)
        raise TimeoutError
    except BaseException:
        sock.close()
        raise


class Pool:
    """At most ``limit`` connections, lent to one caller each. The last one given back is lent first: its caches are warm."""

    def __init__(self, open_one: Callable[[Deadline], Connection], limit: int) -> None:
        self._open_one, self._limit = open_one, limit
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._waiting = 0
        self._idle: list[Connection] = []
        self._out = 0
        self._closed = False

    def take(self, deadline: Deadline) -> Connection:
        """A connection, which must be given back. Raises StoreError."""
        connection = self._take(deadline)
        if connection is None:
            try:
                connection = self._open_one(deadline)
            except BaseException:
                self.give_back(None, broken=True)
                raise
        return connection

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._turn.notify_all()
        for connection in idle:
            connection.close()

    def _take(self, deadline: Deadline) -> Connection | None:
        """An idle connection, or leave (None) to open one."""
        in_time = True
        with self._lock:
            while True:
                if self._closed:
                    raise StoreClosed("this handle of the store is closed")
                while self._idle:
                    connection = self._idle.pop()
                    if connection.alive():
                        self._out += 1
                        return connection
                    connection.close()
                if self._out < self._limit:
                    self._out += 1
                    return None
                if not in_time or deadline.passed():
                    raise Overloaded(f"all {self._limit} connections to the store were in use until the deadline")
                in_time = self._wait(deadline.left())  # else it looks once more: it may have been told, and nobody else was

    def _wait(self, seconds: float) -> bool:
        """For who has the lock: was a connection given back meanwhile?"""
        self._waiting += 1
        try:
            return self._turn.wait(seconds)
        finally:
            self._waiting -= 1

    def give_back(self, connection: Connection | None, broken: bool) -> None:
        """It is kept where it is clean and not ``broken``. None: one that could not be opened."""
        with self._lock:
            self._out -= 1
            keep = connection is not None and connection.clean and not broken and not self._closed
            if keep and connection is not None:
                self._idle.append(connection)
            if self._waiting:
                self._turn.notify()
        if connection is not None and not keep:
            connection.close()
