"""One connection of the arena's service, and how much it may say in the log."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hicache_ray.errors import StoreError
from hicache_ray.storage import messages, wire
from hicache_ray.storage.arena import Arena, ArenaConfig
from hicache_ray.storage.frames import FrameSocket, now
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.wire import REPLY, Frame, Kind, Reader, WireError, encode

_RELEASE = int(Kind.RELEASE)  # looking into the enum costs more than the comparison
log = logging.getLogger("hicache_ray.storage")


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
        self._frames, self._patience_s = FrameSocket(sock, 0), service.config.io_timeout_s
        self.thread = threading.Thread(target=self._run, name=f"hicache-arena-{number}", daemon=True)
        self._service = service
        self._scanned = np.zeros((0, ID_BYTES), np.uint8)  # ids of the scan in progress: as of its first page

    def scan(self, reader: Reader, node: NodeStore) -> bytes:
        start, prefix = reader.number(), reader.take(reader.number("H"))
        reader.end()
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
            while (frame := self._frames.receive_some_time(self._patience_s)) is not None:
                self._serve(frame)
        except WireError as error:
            self._service.warn("connection %d is closed: %s", self.number, error)
        except TimeoutError:
            self._service.warn("connection %d is closed: half a frame, or no hello, and then silence, or it reads too slowly", self.number)
        except OSError as error:
            log.info("connection %d is lost: %s", self.number, error)
        except Exception:
            log.exception("connection %d is closed: its request failed", self.number)
        finally:
            self._service.forget(self.number)
            self._frames.close()

    def _greet(self) -> None:
        frame = self._frames.receive(now() + self._patience_s)
        if frame is None:
            return
        if frame.kind != Kind.HELLO:
            raise WireError("the first frame is not a hello")
        arena = self._service.arena
        segment = arena.segment
        hello = messages.Hello(arena.incarnation, [(str(segment.path), segment.data_bytes)])
        self._reply(frame.kind, frame.request, messages.pack_hello(hello))

    def _serve(self, frame: Frame) -> None:
        try:
            body = self._service.answer(frame.kind, Reader(frame.body), self)
        except WireError:
            raise
        except StoreError as error:
            self._reply(Kind.ERROR, frame.request, str(error).encode())
            return
        if frame.kind != _RELEASE:
            self._reply(frame.kind, frame.request, body)

    def _reply(self, kind: int, request: int, body: bytes) -> None:
        self._frames.send(encode(kind | REPLY, request, body), now() + self._patience_s)
