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
from hicache_ray.storage.index import ArenaIndex
from hicache_ray.storage.wire import Frame, Kind, Reader, Splitter, WireError
from hicache_ray.store import StoreStats

log = logging.getLogger("hicache_ray.storage")
_RECV = 256 << 10
_JOIN_S = 5.0


class ArenaService:
    """``start`` makes everything, ``close`` removes everything. Both may be called once; close is idempotent."""

    def __init__(self, config: ArenaConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._arena: Arena | None = None
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the index, the records and the table of connections
        self._handlers: dict[int, _Handler] = {}
        self._threads: list[threading.Thread] = []  # of handlers; one lives a moment longer than its entry in the table
        self._records: dict[bytes, dict[str, str]] = {}
        self._closing = False

    def start(self) -> ArenaService:
        """Raises ConfigError, and leaves nothing behind then."""
        self._arena = Arena(self.config, self._clock)
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
    def arena(self) -> Arena:
        if self._arena is None:
            raise StoreError("the arena's service is not running; call start() first")
        return self._arena

    @property
    def address(self) -> ArenaAddress:
        return self.arena.address

    def stats(self) -> StoreStats:
        with self._lock:
            return self.arena.index.stats()

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            self.arena.index.check()

    def close(self) -> None:
        """Hang up on everybody, stop all threads, remove socket and segment."""
        with self._lock:
            self._closing = True
            handlers, threads = list(self._handlers.values()), [*self._threads]
        if self._listener is not None:
            _hang_up(self._listener)
        for handler in handlers:
            _hang_up(handler.sock)
        for thread in [self._acceptor, *threads]:
            if thread is not None and thread.is_alive():
                thread.join(_JOIN_S)
        if self._listener is not None:
            self._listener.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def __enter__(self) -> ArenaService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections -------------------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while not self._closing:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("the arena cannot accept a connection: %s", error)
                    time.sleep(0.1)  # out of descriptors, say: do not spin
                continue
            number += 1
            refusal = self._admit(sock, number)
            if refusal is not None:
                log.warning("connection refused: %s", refusal)
                _answer_and_close(sock, refusal)

    def _admit(self, sock: socket.socket, number: int) -> str | None:
        """Start a handler; or say why not."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            return f"the peer is user {uid}, the arena belongs to {os.geteuid()}"
        handler = _Handler(self, sock, number)
        with self._lock:
            if self._closing:
                return "the arena is closing"
            if len(self._handlers) >= self.config.max_connections:
                return f"all {self.config.max_connections} connections are taken; see storage.max_connections"
            self._handlers[number] = handler
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(handler.thread)
            handler.thread.start()
        return None

    def forget(self, number: int) -> None:
        """The connection is closed: its reservations are void."""
        with self._lock:
            self._handlers.pop(number, None)
            if self._arena is not None:
                self._arena.index.disconnect(number)

    # -- messages; the lock is held ----------------------------------------------------------------------------------------------

    def answer(self, kind: int, reader: Reader, handler: _Handler) -> bytes:
        """Body of the reply. Raises WireError for a bad body, StoreError for a refusal."""
        with self._lock:
            return self._answer(kind, reader, handler, self.arena.index)

    def _answer(self, kind: int, reader: Reader, handler: _Handler, index: ArenaIndex) -> bytes:
        if kind == Kind.LOOKUP:
            keys, tags = messages.unpack_lookup(reader)
            reader.end()
            return messages.pack_answers([index.lookup(keys, tag) for tag in tags], len(keys))
        if kind == Kind.RESERVE:
            ids, lengths, seconds = messages.unpack_reserve(reader)
            reader.end()
            return messages.pack_reservation(index.reserve(ids, lengths, handler.number, seconds))
        if kind == Kind.SEAL:
            reservation, checksums = messages.unpack_seal(reader)
            reader.end()
            return wire.bitset(index.seal(reservation, checksums, handler.number), len(checksums))
        if kind == Kind.LEASE:
            ids, seconds = reader.ids(), messages.seconds(reader)
            reader.end()
            return messages.pack_lease(index.lease(ids, handler.number, seconds))
        if kind == Kind.RELEASE:
            lease, count = reader.number("Q"), reader.count()
            index.release(lease, reader.bits(count))
            return b""
        if kind == Kind.DROP:
            ids = reader.ids()
            reader.end()
            return wire.bitset(index.drop(ids), len(ids))
        return self._administer(kind, reader, handler, index)

    def _administer(self, kind: int, reader: Reader, handler: _Handler, index: ArenaIndex) -> bytes:
        if kind == Kind.CLEAR:
            return wire.number(index.clear(reader.take(reader.number("H"))), "Q")
        if kind == Kind.SCAN:
            return handler.scan(reader, index)
        if kind == Kind.DESCRIBE:
            self._describe(*messages.unpack_record(reader))
            return b""
        if kind == Kind.DESCRIBED:
            return json.dumps({digest.hex(): record for digest, record in self._records.items()}).encode()
        if kind == Kind.STATS:
            return json.dumps(asdict(index.stats())).encode()
        if kind == Kind.PING:
            return reader.rest()
        raise WireError(f"{Kind(kind).name} is not a request")

    def _describe(self, digest: bytes, record: dict[str, str]) -> None:
        records = {**self._records, digest: record}
        size = sum(2 * len(key) + 8 + len(json.dumps(value)) for key, value in records.items())
        if size > wire.MAX_RECORDS:
            raise StoreError(f"the descriptions would take {size} bytes; the store keeps {wire.MAX_RECORDS}")
        self._records = records


class _Handler:
    """One connection and its thread."""

    def __init__(self, service: ArenaService, sock: socket.socket, number: int) -> None:
        self.sock, self.number = sock, number
        self.thread = threading.Thread(target=self._run, name=f"hicache-arena-{number}", daemon=True)
        self._service = service
        self._splitter = Splitter(0)
        self._scanned: list[bytes] = []  # ids of the scan in progress: as of its first page

    def scan(self, reader: Reader, index: ArenaIndex) -> bytes:
        start, prefix = reader.number(), reader.take(reader.number("H"))
        if start == 0:
            self._scanned = index.ids(prefix)
        page = self._scanned[start : start + wire.MAX_IDS]
        end = start + len(page)
        if end >= len(self._scanned):
            self._scanned, end = [], 0
        return wire.number(end) + wire.ids(page)

    def _run(self) -> None:
        try:
            self._greet()
            while (frame := self._receive(greeted=True)) is not None:
                self._serve(frame)
        except WireError as error:
            log.warning("connection %d is closed: %s", self.number, error)
        except OSError as error:
            log.info("connection %d is lost: %s", self.number, error)
        finally:
            self._service.forget(self.number)
            self.sock.close()

    def _greet(self) -> None:
        self.sock.settimeout(self._service.config.io_timeout_s)
        frame = self._receive(greeted=False)
        if frame is None:
            return
        if frame.kind != Kind.HELLO:
            raise WireError("the first frame is not a hello")
        arena = self._service.arena
        segment = arena.segment
        self._reply(frame, messages.pack_hello(messages.Hello(arena.incarnation, [(str(segment.path), segment.data_bytes)])))

    def _serve(self, frame: Frame) -> None:
        reader = Reader(frame.body)
        try:
            body = self._service.answer(frame.kind, reader, self)
        except WireError:
            raise
        except StoreError as error:
            self.sock.sendall(wire.encode(Kind.ERROR | wire.REPLY, frame.request, str(error).encode()))
            return
        if frame.kind != Kind.RELEASE:
            self._reply(frame, body)

    def _reply(self, frame: Frame, body: bytes) -> None:
        self.sock.sendall(wire.encode(frame.kind | wire.REPLY, frame.request, body))

    def _receive(self, greeted: bool) -> Frame | None:
        """The next frame; None at the end of the stream. A peer may be silent between frames, not within one."""
        while (frame := self._splitter.next()) is None:
            try:
                data = self.sock.recv(_RECV)
            except TimeoutError:
                if self._splitter or not greeted:
                    raise WireError("half a frame, or no hello, and then silence") from None
                continue
            if not data:
                return None
            self._splitter.feed(data)
        return frame


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on the socket."""
    with contextlib.suppress(OSError):  # already gone
        sock.shutdown(socket.SHUT_RDWR)


def _answer_and_close(sock: socket.socket, refusal: str) -> None:
    with contextlib.suppress(OSError):  # the peer did not wait for the answer
        sock.settimeout(0.1)
        sock.sendall(wire.encode(Kind.ERROR | wire.REPLY, 0, refusal.encode()))
    sock.close()
