"""One connection of the arena's service, and how much it may say in the log."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hicache_ray.errors import StoreError
from hicache_ray.storage import messages, wire
from hicache_ray.storage.arena import Arena, ArenaConfig
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.wire import Frame, Kind, Reader, Splitter, WireError

log = logging.getLogger("hicache_ray.storage")
_RECV = 256 << 10


class Front(Protocol):
    """What a connection needs of its service."""

    config: ArenaConfig

    @property
    def arena(self) -> Arena: ...

    def answer(self, kind: int, reader: Reader, handler: Handler) -> bytes: ...

    def forget(self, number: int) -> None: ...

    def warn(self, text: str, *values: object) -> None: ...


class Log:
    """Lets ``most`` lines through per ``seconds``."""

    def __init__(self, clock: Callable[[], float], most: int = 20, seconds: float = 10.0) -> None:
        self._clock, self._most, self._seconds = clock, most, seconds
        self._since, self._said, self._unsaid = clock(), 0, 0

    def admit(self) -> int | None:
        """How many lines were left out since the last one that was not; None where this one is left out too."""
        if self._clock() - self._since >= self._seconds:
            self._since, self._said = self._clock(), 0
        if self._said >= self._most:
            self._unsaid += 1
            return None
        self._said += 1
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid


class Handler:
    """One connection and its thread."""

    def __init__(self, service: Front, sock: socket.socket, number: int) -> None:
        self.sock, self.number = sock, number
        self.thread = threading.Thread(target=self._run, name=f"hicache-arena-{number}", daemon=True)
        self._service = service
        self._splitter = Splitter(0)
        self._scanned = np.zeros((0, ID_BYTES), np.uint8)  # ids of the scan in progress: as of its first page

    def scan(self, reader: Reader, node: NodeStore) -> bytes:
        start, prefix = reader.number(), reader.take(reader.number("H"))
        if start == 0:
            self._scanned = node.scan(prefix, self._service.config.io_timeout_s)
        page = self._scanned[start : start + wire.MAX_IDS]
        end = start + len(page)
        if end >= len(self._scanned):
            self._scanned, end = self._scanned[:0].copy(), 0
        return wire.number(end) + wire.packed_ids(page)

    def _run(self) -> None:
        try:
            self._greet()
            while (frame := self._receive(greeted=True)) is not None:
                self._serve(frame)
        except WireError as error:
            self._service.warn("connection %d is closed: %s", self.number, error)
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


def hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on the socket."""
    with contextlib.suppress(OSError):  # already gone
        sock.shutdown(socket.SHUT_RDWR)
