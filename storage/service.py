"""The arena's service: owns the arena of a node and answers its clients over a Unix socket, one thread per connection.

Knows nothing of Ray. The socket lies in a directory of mode 0700 and the peer's uid is checked. Whatever a peer sends, the worst that
happens is that its own connection is closed with a line in the log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import messages, wire
from hicache_ray.storage.arena import Arena, ArenaAddress, ArenaConfig
from hicache_ray.storage.frames import hang_up
from hicache_ray.storage.membership import ALONE
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.service_single import ONES
from hicache_ray.storage.serving import Handler, Log
from hicache_ray.storage.threads import begin, join_all
from hicache_ray.storage.wire import Kind, Reader, WireError
from hicache_ray.store import StoreStats

log = logging.getLogger("hicache_ray.storage")
_JOIN_S = 5.0
_CLEAR_S = 30.0  # for a clear or a scan to reach what lies behind


class ArenaService:
    """``start`` makes everything, ``close`` removes everything. Both may be called once; close is idempotent.

    ``make_node``: makes what answers, of the arena: ``lambda arena: NodeStore(arena, back, behind)``, say. ``members``: what it says of the
    nodes of its cluster; set it before anybody is listened to.
    """

    def __init__(
        self, config: ArenaConfig, clock: Callable[[], float] = time.monotonic, make_node: Callable[[Arena], NodeStore] = NodeStore
    ) -> None:
        self.config = config
        self._clock, self._make_node = clock, make_node
        self.members: Callable[[], bytes] = lambda: ALONE
        self._node: NodeStore | None = None
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the table of connections
        self._handlers: dict[int, Handler] = {}
        self._threads: list[threading.Thread] = []  # of handlers; one lives a moment longer than its entry in the table
        self._closing = False
        self._log = Log(clock)

    def start(self) -> ArenaService:
        """Raises ConfigError, and leaves nothing behind then."""
        return self.open().listen()

    def open(self) -> ArenaService:
        """The first half of it: the arena is there, and nobody is listened to. Raises ConfigError, and leaves nothing behind then."""
        arena = Arena(self.config, self._clock)
        try:
            self._node = self._make_node(arena)
        except BaseException:
            arena.close()
            raise
        return self

    def listen(self) -> ArenaService:
        """The second half. Raises ConfigError, and closes everything then."""
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self.config.socket_path))
            self._listener.listen(self.config.max_connections)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on {self.config.socket_path}: {error.strerror}; set storage.socket_dir") from error
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="hicache-arena-accept", daemon=True)
        self._acceptor.start()
        return self

    @property
    def node(self) -> NodeStore:
        if self._node is None:
            raise StoreError("the arena's service is not running; call start() first")
        return self._node

    @property
    def arena(self) -> Arena:
        return self.node.arena

    @property
    def address(self) -> ArenaAddress:
        return self.arena.address

    def stats(self) -> StoreStats:
        return self.node.stats()

    def check(self) -> None:
        """Raises Inconsistent."""
        self.node.check()

    def close(self) -> None:
        """Hang up on everybody, stop all threads, remove socket and segment."""
        self.hang_up()
        if self._node is not None:
            self._node.close()
            self._node = None

    def hang_up(self) -> None:
        """Nobody is listened to any more, and all threads are stopped; the node is still open. Idempotent."""
        with self._lock:
            self._closing = True
            handlers, threads = list(self._handlers.values()), [*self._threads]
        if self._listener is not None:
            hang_up(self._listener)
        for handler in handlers:
            hang_up(handler.sock)
        if self._acceptor is not None:
            threads.append(self._acceptor)
        if not join_all(threads, _JOIN_S):
            log.warning("a thread of the arena's service has not ended within %g s", _JOIN_S)
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> ArenaService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections -------------------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._closing:
                    self.warn("the arena cannot accept a connection: %s", error)
                    time.sleep(0.1)  # out of descriptors, say: do not spin
                continue
            try:
                refusal = self._admit(sock)
            except OSError as error:  # gone already
                refusal = f"it is lost: {error}"
            if refusal is not None:
                self.warn("connection refused: %s", refusal)
                _answer_and_close(sock, refusal)

    def _admit(self, sock: socket.socket) -> str | None:
        """Start a handler; or say why not."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            return f"the peer is user {uid}, the arena belongs to {os.geteuid()}"
        with self._lock:
            if self._closing or self._node is None:
                return "the arena is closing"
            if len(self._handlers) >= self.config.max_connections:
                return f"all {self.config.max_connections} connections are taken; see storage.max_connections"
            handler = Handler(self, sock, self._node.owner())
            self._handlers[handler.number] = handler
            if not begin(handler.thread):
                del self._handlers[handler.number]
                return "no thread can be had for it now"
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(handler.thread)
        return None

    def forget(self, number: int) -> None:
        """The connection is closed: its reservations are void."""
        with self._lock:
            self._handlers.pop(number, None)
            node = self._node
        if node is not None:
            node.disconnect(number)

    def warn(self, text: str, *values: object) -> None:
        """A line in the log; of a flood of them, a few and a count."""
        with self._lock:
            unsaid = self._log.admit()
        if unsaid is not None:
            log.warning(text + (f" (and {unsaid} such lines are left out)" if unsaid else ""), *values)

    # -- messages ----------------------------------------------------------------------------------------------------------------

    def answer(self, kind: int, reader: Reader, handler: Handler) -> bytes:
        """Body of the reply. Raises WireError for a bad body, StoreError for a refusal."""
        node = self._node or self.node  # which raises, where there is none
        one = ONES.get(kind)
        if one is not None and (body := one(reader, node, handler.number, self.config.back_s)) is not None:
            return body
        if kind == Kind.LOOKUP:
            keys, tags = messages.unpack_lookup(reader)
            reader.end()
            return messages.pack_answers(node.lookup(keys, tags, self.config.back_s), len(keys))
        if kind == Kind.RESERVE:
            ids, lengths, seconds = messages.unpack_reserve(reader)
            reader.end()
            return messages.pack_reservation(node.reserve(ids, lengths, handler.number, seconds))
        if kind == Kind.SEAL:
            reservation, sums = messages.unpack_seal(reader)
            return wire.bitset(node.seal(reservation, sums, handler.number), len(sums))
        if kind == Kind.LEASE:
            ids, seconds = reader.few_ids(), messages.seconds(reader)
            reader.end()
            return messages.pack_lease(node.lease(ids, handler.number, seconds, min(self.config.back_s, seconds / 2)))
        if kind == Kind.RELEASE:
            lease, count = reader.number("Q"), reader.count()
            node.release(lease, reader.all_bits(count))
            return b""
        if kind == Kind.DROP:
            ids = reader.packed_ids()
            reader.end()
            return wire.bitset(node.drop(ids, self.config.back_s), len(ids))
        return self._administer(kind, reader, handler, node)

    def _administer(self, kind: int, reader: Reader, handler: Handler, node: NodeStore) -> bytes:
        if kind == Kind.CLEAR:
            prefix = reader.take(reader.number("H"))
            reader.end()
            return wire.number(node.clear(prefix, _CLEAR_S), "Q")
        if kind == Kind.SCAN:
            return handler.scan(reader, node)
        if kind == Kind.DESCRIBE:
            node.describe(*messages.unpack_record(reader), self.config.back_s)
            return b""
        if kind == Kind.DESCRIBED:
            reader.end()
            return json.dumps({digest.hex(): record for digest, record in node.described().items()}).encode()
        if kind == Kind.STATS:
            reader.end()
            return json.dumps(asdict(node.stats())).encode()
        if kind == Kind.PING:
            return reader.rest()
        if kind == Kind.MEMBERS:
            reader.end()
            return self.members()
        raise WireError(f"{Kind(kind).name} is not a request")


def _answer_and_close(sock: socket.socket, refusal: str) -> None:
    with contextlib.suppress(OSError):  # the peer did not wait for the answer
        sock.settimeout(0.1)
        sock.sendall(wire.encode(Kind.ERROR | wire.REPLY, 0, refusal.encode()))
    sock.close()
