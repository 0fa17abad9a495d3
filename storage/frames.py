"""Whole frames over one connected Unix socket, as both ends use it: one system call to send one, one to receive one.

The socket blocks, with the system's own timeouts: a timeout of Python's costs a poll before every call. What is sent or received as a
whole has one deadline, a point on ``time.monotonic``; bytes that drip in, one now and then, do not move it.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable

from hicache_ray.storage.wire import Frame, Splitter

_RECV = 128 << 10
_SEND = 64 << 10  # bytes of one call: the system's timeout is one of each part that it queues, not of the call
_RECEIVING, _SENDING, _NO_SIGNAL = int(socket.SO_RCVTIMEO), int(socket.SO_SNDTIMEO), int(socket.MSG_NOSIGNAL)
_AT_ONCE = _NO_SIGNAL | int(socket.MSG_DONTWAIT)
_TIMEVAL = struct.Struct("ll")
_ROUND, _SLACK = 0.9, 4.0

now: Callable[[], float] = time.monotonic


class FrameSocket:
    """Not for several threads at once, but for :func:`hang_up`. Errors are OSErrors (TimeoutError at the deadline) and WireErrors."""

    def __init__(self, sock: socket.socket, flag: int) -> None:
        """Takes the socket. ``flag``: as of :class:`~hicache_ray.storage.wire.Splitter`."""
        self._sock, self._splitter = sock, Splitter(flag)
        self._buffer = bytearray(_RECV)
        self._view = memoryview(self._buffer)
        self._waits = {_RECEIVING: 0.0, _SENDING: 0.0}  # as the system knows them; 0: for ever
        sock.settimeout(None)
        self._closed = False
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, frame: bytes, until: float) -> None:
        rest: bytes | memoryview = frame
        if len(frame) <= _SEND:
            try:
                count = self._sock.send(frame, _AT_ONCE)  # nearly always there is room for it, and no need to bound a wait
            except BlockingIOError:
                count = 0
            if count == len(frame):
                return
            rest = memoryview(frame)[count:]
        while True:
            self._allow(_SENDING, until)
            part = rest if len(rest) <= _SEND else memoryview(rest)[:_SEND]
            try:
                count = self._sock.send(part, _NO_SIGNAL)
            except BlockingIOError:
                continue  # perhaps before the deadline, which is looked at next
            if count == len(rest):
                return
            rest = memoryview(rest)[count:]

    def receive(self, until: float) -> Frame | None:
        """The next frame; None at the end of the stream."""
        splitter = self._splitter
        if not splitter:
            count = self._read(until)
            if not count or (frame := splitter.taken(self._view, count)) is not None:
                return frame if count else None
        while (frame := splitter.next()) is None:
            count = self._read(until)
            if not count:
                return None
            splitter.feed(bytes(self._view[:count]))
        return frame

    def receive_some_time(self, seconds: float) -> Frame | None:
        """The same where nobody waits for a frame, but one that has begun must be whole within ``seconds``."""
        splitter = self._splitter
        while not splitter:
            try:
                count = self._read(now() + seconds)
            except TimeoutError:
                continue
            if not count or (frame := splitter.taken(self._view, count)) is not None:
                return frame if count else None
        return self.receive(now() + seconds)

    def watch(self, seconds: float) -> bool:
        """Wait for something to read without going to sleep, no longer than that: is there something? An idle core takes longer to wake up
        than a short question takes to be answered."""
        end = now() + seconds
        while not self._readable.poll(0):
            if now() >= end:
                return False
        return True

    def alive(self) -> bool:
        """False once either end has hung up: an idle connection has nothing to read."""
        return not self._closed and not self._readable.poll(0)  # a poll raises nothing, which would cost more than the call

    def close(self) -> None:
        """Idempotent. Its descriptor may be another file's afterwards."""
        self._closed = True
        self._sock.close()

    def _read(self, until: float) -> int:
        """Receive something: how many bytes of the buffer it is; 0 at the end of the stream."""
        while True:
            self._allow(_RECEIVING, until)
            try:
                return self._sock.recv_into(self._buffer)
            except BlockingIOError:
                continue

    def _allow(self, option: int, until: float) -> None:
        """Let the system wait no longer than that. It may wake us earlier: the timeout of the last call is left where it does no harm.
        Raises TimeoutError where no time is left."""
        seconds = until - now()
        if seconds <= 0:
            raise TimeoutError
        known = self._waits[option]
        if known <= seconds <= _SLACK * known:
            return
        micros = max(math.ceil(seconds * _ROUND * 1e6), 1)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000))
        self._waits[option] = micros / 1e6


def hang_up(sock: socket.socket) -> None:
    """Wake whoever waits on the socket."""
    with contextlib.suppress(OSError):  # already gone
        sock.shutdown(socket.SHUT_RDWR)
