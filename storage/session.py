"""What stands between a client and the socket: a circuit breaker, the pool, the mapping of the service's current incarnation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage.connection import Connection, Deadline, Expired, Overloaded, Pool, Refused
from hicache_ray.storage.copying import SLICE
from hicache_ray.storage.loading import KERNELS
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.wire import WireError


@dataclass(frozen=True)
class ClientConfig:
    """``copy_threads``: the caller's included. ``slice_bytes``: copied between two looks at the deadline. ``kernel``: ``auto | off``,
    whether the copies use the compiled loop. ``connections``: most calls that are on the socket at once. ``prefault``:
    ``background | start | off``, the client's own page tables. ``backoff_s``, ``backoff_most_s``: how long a failed store is left alone.
    """

    copy_threads: int = 2
    slice_bytes: int = SLICE
    kernel: str = "auto"
    connections: int = 8
    prefault: str = "background"
    backoff_s: float = 0.5
    backoff_most_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.kernel not in KERNELS:
            raise ConfigError(f"kernel is {self.kernel!r}; choose from {', '.join(KERNELS)}")
        if self.copy_threads < 1 or self.slice_bytes < 1:
            raise ConfigError(f"copy_threads and slice_bytes must be at least 1, not {self.copy_threads} and {self.slice_bytes}")


class Breaker:
    """After a failure, calls fail at once for a back-off that doubles from ``first_s`` to ``most_s``; then one call is let through to try.

    So a frozen service costs one caller one deadline now and then, not every caller a full one.
    """

    def __init__(self, clock: Callable[[], float], first_s: float, most_s: float) -> None:
        self._clock, self._first, self._most = clock, first_s, most_s
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._trying = False

    def admit(self) -> bool:
        """May a call go out? True where it is the one that tries; its outcome must be reported. Raises StoreError."""
        if not self._failures:  # without the lock: whoever fails at this moment may as well have failed a moment later
            return False
        with self._lock:
            if not self._failures:
                return False
            wait = self._until - self._clock()
            if wait > 0:
                raise StoreError(f"the store failed just now; it is not asked again for {wait:.2f} s")
            if self._trying:
                raise StoreError("the store failed just now; another call is trying whether it is back")
            self._trying = True
            return True

    def report(self, well: bool | None, tried: bool) -> None:
        """``well`` None: the call says nothing about the service. ``tried``: what :meth:`admit` returned."""
        if well is not False and not tried and not self._failures:
            return
        with self._lock:
            if tried:
                self._trying = False
            if well is True:
                self._failures = 0
            elif well is False:
                self._failures += 1
                self._until = self._clock() + min(self._first * 2.0 ** (self._failures - 1), self._most)


class Asking:
    """A connection for one call: ``with session.asking(timeout_s) as (connection, deadline)``. Raises StoreError."""

    __slots__ = ("_connection", "_session", "_timeout_s", "_tried")

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s

    def __enter__(self) -> tuple[Connection, Deadline]:
        self._connection, deadline, self._tried = self._session.begin(self._timeout_s)
        return self._connection, deadline

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._session.end(self._connection, self._tried, error)


def _says(error: BaseException | None) -> bool | None:
    """Is the service well, to judge by how a call ended? None: that says nothing."""
    if error is None:
        return True
    return False if isinstance(error, StoreError) and not isinstance(error, (Refused, Overloaded, Expired)) else None


class Session:
    """Usable by several threads, in the process that made it. A forked child may only close it."""

    def __init__(self, path: str, config: ClientConfig, clock: Callable[[], float]) -> None:
        self._path, self._config, self._clock = path, config, clock
        self._pid = os.getpid()
        self._pool = Pool(self._open_connection, config.connections)
        self._breaker = Breaker(clock, config.backoff_s, config.backoff_most_s)
        self._lock = threading.Lock()
        self._incarnation = ""
        self._segment: Segment | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed and self.ours

    @property
    def ours(self) -> bool:
        """Is this the process that opened the session?"""
        return os.getpid() == self._pid

    def asking(self, timeout_s: float) -> Asking:
        """A connection for one call."""
        return Asking(self, timeout_s)

    def begin(self, timeout_s: float) -> tuple[Connection, Deadline, bool]:
        """(connection, deadline, what :meth:`Breaker.admit` said); must be ended. Raises StoreError."""
        if not self.ours:
            raise StoreClosed("this handle of the store was opened before a fork; open another one in the child")
        if self._closed:
            raise StoreClosed("this handle of the store is closed")
        deadline = Deadline.after(self._clock, timeout_s)
        tried = self._breaker.admit()
        try:
            return self._pool.take(deadline), deadline, tried
        except BaseException as error:
            self._breaker.report(_says(error), tried)
            raise

    def end(self, connection: Connection, tried: bool, error: BaseException | None) -> None:
        """After :meth:`begin`; the breaker learns how it went."""
        self._pool.give_back(connection, broken=isinstance(error, WireError))
        self._breaker.report(_says(error), tried)

    def close(self) -> None:
        """Idempotent. Views that are still lent keep their memory."""
        self._closed = True
        self._pool.close()
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None and self.ours:
            segment.close()

    def _open_connection(self, deadline: Deadline) -> Connection:
        connection = Connection(self._path, deadline)
        try:
            connection.segment = self._map(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _map(self, connection: Connection) -> Segment:
        """The memory of the incarnation that answers; mapped once. An older one goes with its last view."""
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            if self._segment is None or self._incarnation != connection.hello.incarnation:
                path, size = connection.hello.segments[0]
                fresh = Segment.open(Path(path), size)
                if self._segment is not None:
                    self._segment.close()
                self._incarnation, self._segment = connection.hello.incarnation, fresh
                if self._config.prefault != "off":
                    fresh.prefault(1)
                if self._config.prefault == "start":
                    fresh.wait_prefaulted()
            return self._segment
