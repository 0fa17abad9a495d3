"""A node's store for the other nodes: one acceptor, one thread per connection, everything bounded.

Knows nothing of Ray. Whatever a peer sends or leaves unsent, the worst that happens is that its own connection is closed with a line in
the log. Nothing is answered to a peer that has not proved that it knows the token, but why it was turned away for want of room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory
from hicache_ray.storage.tcp import INCARNATION_BYTES, TcpAddress, TcpConfig
from hicache_ray.storage.tcp_bulk import Budget, Fence
from hicache_ray.storage.tcp_frames import TcpKind, encode, pack_error
from hicache_ray.storage.tcp_serving import Handler, Shared
from hicache_ray.storage.tcp_streams import Stream
from hicache_ray.storage.threads import begin, join_all
from hicache_ray.storage.wire import REPLY
from hicache_ray.store import Store

log = logging.getLogger("hicache_ray.storage")
_BACKLOG = 128
_JOIN_S = 5.0


class TcpServer:
    """Serves ``store`` (and ``directory``, where this node keeps one); closes neither. ``start`` and ``close`` may be called once each;
    close is idempotent. ``incarnation``: 8 bytes in hex; a random one unless given."""

    def __init__(
        self,
        store: Store,
        config: TcpConfig,
        directory: Directory | None = None,
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.incarnation = incarnation or os.urandom(INCARNATION_BYTES).hex()
        self._shared = Shared(store, config, directory, self.incarnation, clock, Budget(config.inflight_bytes), Fence(store))
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._handlers: dict[int, Handler] = {}
        self._threads: list[threading.Thread] = []  # of handlers; one lives a moment longer than its entry in the table
        self._closing = False
        self.turned_away = 0  # connections, for want of room

    def start(self) -> TcpServer:
        """Raises ConfigError, and leaves nothing behind then."""
        host, port = self.config.host, self.config.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {TcpAddress(host, port)}: {error.strerror or error}; set another host or port") from error
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="hicache-tcp-accept", daemon=True)
        self._acceptor.start()
        return self

    @property
    def address(self) -> TcpAddress:
        """Where it listens, with the port that the system picked."""
        if self._listener is None:
            raise StoreError("the tcp server is not running; call start() first")
        return TcpAddress(self.config.host, self._listener.getsockname()[1])

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the puts under way."""
        return self._shared.budget.used

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._handlers)

    def close(self) -> None:
        """Hang up on everybody and stop all threads."""
        with self._lock:
            self._closing = True
            handlers = list(self._handlers.values())
            threads = [*self._threads]
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        for handler in handlers:
            handler.stream.hang_up()
        if self._acceptor is not None:
            threads.append(self._acceptor)
        if not join_all(threads, _JOIN_S):
            log.warning("a thread of the tcp server has not ended within %g s", _JOIN_S)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def __enter__(self) -> TcpServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections -------------------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while not self._closing:
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("the tcp server cannot accept a connection: %s", error)
                    time.sleep(0.1)  # out of descriptors, say: do not spin
                continue
            number += 1
            try:
                stream = Stream(sock, f"{peer[0]}:{peer[1]}", self.config.buffer_bytes)
            except OSError:  # gone already
                sock.close()
                continue
            self._admit(stream, number)

    def _admit(self, stream: Stream, number: int) -> None:
        """Start a handler; where all places are taken, one that has not proved itself makes room, or the newcomer is turned away."""
        if self._full() and not self._make_room():
            self.turned_away += 1
            if self.turned_away & (self.turned_away - 1) == 0:  # 1, 2, 4, 8 ...: a flood must not fill the log too
                log.warning("connections turned away: %d; all %d are taken", self.turned_away, self.config.max_connections)
            self._turn_away(stream, f"all {self.config.max_connections} connections are taken; see storage.max_connections")
            return
        handler = Handler(self._shared, stream, number, self._forget)
        with self._lock:
            if self._closing:
                stream.close()
                return
            self._handlers[number] = handler
            if begin(handler.thread):
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                self._threads.append(handler.thread)
                return
            del self._handlers[number]
        self._turn_away(stream, "no thread can be had for this connection now")

    def _full(self) -> bool:
        with self._lock:
            return len(self._handlers) >= self.config.max_connections

    def _make_room(self) -> bool:
        """Whoever has waited longest without proving itself goes: silent peers must not keep those out that know the token."""
        with self._lock:
            victim = next((handler for handler in self._handlers.values() if not handler.greeted), None)
        if victim is None:
            return False
        victim.stream.hang_up()
        victim.thread.join(_JOIN_S)
        return not self._full()

    def _turn_away(self, stream: Stream, why: str) -> None:
        error = StoreError(why)
        with contextlib.suppress(StoreError):  # the peer did not wait for the answer
            deadline = Deadline.after(self._shared.clock, 0.1)
            stream.send([memoryview(encode(TcpKind.ERROR | REPLY, 0, pack_error(error)))], deadline)
        stream.hang_up()
        stream.close()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._handlers.pop(number, None)
