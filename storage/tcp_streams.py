"""One connected socket, as both ends use it: whole frames, and objects straight from and into callers' memory.

The socket blocks, with the system's own timeouts: only so does one call wait for all of its bytes (``MSG_WAITALL``), and a call that
moves a megabyte lets go of the interpreter once. Every timeout is what is left of a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from hicache_ray.errors import StoreClosed, StoreTimeout
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import checksum
from hicache_ray.storage.segment import Array
from hicache_ray.storage.tcp_frames import decode_header, encode
from hicache_ray.storage.tcp_mark import LowWater
from hicache_ray.storage.wire import HEADER, Frame

CHUNK = 256 << 10  # bytes of one system call; they are hashed while they are in the cache
_UNHASHED = 4 << 20  # bytes of one system call where nothing is to be hashed
_LARGE = 32 << 10  # bytes of an object that is worth a system call of its own
_PARTS = 256  # buffers of one system call; the system's own limit is 1024
_KEEPALIVE_S, _KEEPALIVE_PROBES = 10, 3


class Stream:
    """Not for several threads at once, but for :meth:`hang_up`, which ends the others' waits."""

    def __init__(self, sock: socket.socket, peer: str, buffer_bytes: int) -> None:
        self._sock, self.peer = sock, peer
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", _KEEPALIVE_S), ("TCP_KEEPCNT", _KEEPALIVE_PROBES)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._low = LowWater(sock)
        self._room = np.empty(0, np.uint8)

    # -- frames ------------------------------------------------------------------------------------------------------------------

    def send_frame(self, kind: int, request: int, body: bytes, deadline: Deadline) -> None:
        """Raises StoreError."""
        self.send([memoryview(encode(kind, request, body))], deadline)

    def wait(self) -> bytes:
        """The first bytes of the next frame, however long that takes; empty at the end of the stream."""
        with self._translated():
            self._set_timeout(socket.SO_RCVTIMEO, 0.0)
            return self._sock.recv(HEADER.size)

    def receive_frame(self, flag: int, limit: int, deadline: Deadline, begun: bytes = b"") -> Frame:
        """The next frame, whose first bytes are ``begun``. Raises StoreError, and WireError for what is none."""
        head = bytearray(HEADER.size)
        head[: len(begun)] = begun
        self.receive([memoryview(head)[len(begun) :]], deadline)
        kind, request, length = decode_header(bytes(head), flag, limit)
        body = bytearray(length)
        self.receive([memoryview(body)], deadline)
        return Frame(kind, request, bytes(body))

    # -- bytes -------------------------------------------------------------------------------------------------------------------

    def receive(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all buffers. Raises StoreError; nobody writes to them then either."""
        self._receive(buffers, 0, deadline)

    def _receive(self, buffers: Sequence[memoryview], left: int, deadline: Deadline) -> None:
        """``left``: these bytes, and those that are sure to follow them."""
        buffers = [buffer for buffer in buffers if buffer.nbytes]
        while buffers:
            want = sum(buffer.nbytes for buffer in buffers)
            with self._translated():
                self._low.floor(left, want)
                seconds = deadline.left()
                patience = self._low.patience(seconds)
                self._set_timeout(socket.SO_RCVTIMEO, patience)
                try:
                    count, _, _, _ = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    if patience == seconds:
                        raise
                    self._low.lower()
                    continue
                if not count:
                    raise StoreClosed(f"{self.peer} hung up")
                if count < want:
                    self._low.lower()
            buffers, left = _rest(buffers, count), left - count

    def send(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Send all buffers. Raises StoreError."""
        buffers = [buffer for buffer in buffers if buffer.nbytes]
        while buffers:
            with self._translated():
                self._set_timeout(socket.SO_SNDTIMEO, deadline.left())
                buffers = _rest(buffers, self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL))

    def receive_objects(
        self, targets: Sequence[Array], sums: MutableSequence[int | None] | None, deadline: Deadline, loops: Any = None
    ) -> None:
        """Fill ``targets`` one after the other; ``sums[i]``, where given, becomes the xxh3-64 of the ``i``-th once it is whole.

        ``loops``: :mod:`~hicache_ray.storage.kernel_tcp`, where that is loaded. Raises StoreError.
        """
        left = sum(target.nbytes for target in targets)
        if loops is not None and sums is not None and _large(targets):
            with self._raised(left, loops.ROOM):
                return self._loop(loops, loops.receive, socket.SO_RCVTIMEO, _Columns(targets, sums, self._room_at(loops.ROOM)), deadline)
        hashing = None if sums is None else _Hashing(sums)
        chunk = _UNHASHED if sums is None else CHUNK
        with self._raised(left, chunk):
            for batch in _batches(targets, chunk):
                self._receive([part.data for _, part, _ in batch], left, deadline)
                left -= sum(part.nbytes for _, part, _ in batch)
                if hashing is not None:
                    hashing.add(batch)

    def send_objects(
        self, sources: Sequence[Array], sums: MutableSequence[int | None] | None, deadline: Deadline, loops: Any = None
    ) -> None:
        """Send ``sources`` one after the other, and hash them on the way where ``sums`` is given. Raises StoreError."""
        if loops is not None and sums is not None and _large(sources):
            return self._loop(loops, loops.send, socket.SO_SNDTIMEO, _Columns(sources, sums), deadline)
        hashing = None if sums is None else _Hashing(sums)
        for batch in _batches(sources, _UNHASHED if sums is None else CHUNK):
            if hashing is not None:
                hashing.add(batch)
            self.send([part.data for _, part, _ in batch], deadline)

    def _loop(self, loops: Any, step: Callable[..., int], option: int, columns: _Columns, deadline: Deadline) -> None:
        """Step until all is done. A step comes back within two milliseconds, but for one wait of the socket's own timeout."""
        descriptor = self._sock.fileno()
        try:
            while columns.left:
                with self._translated():
                    columns.come_back_at(self._low.floor(columns.bytes_left, loops.ROOM))
                    seconds = deadline.left()
                    patience = self._low.patience(seconds)
                    self._set_timeout(option, patience)
                    result = step(descriptor, *columns.arguments)
                    if result == loops.END:
                        raise StoreClosed(f"{self.peer} hung up")
                    if result == loops.SHORT_READ or (result == -errno.EAGAIN and patience < seconds):
                        self._low.lower()
                    elif result not in (0, -errno.EINTR):
                        raise OSError(-result, os.strerror(-result))
        finally:
            columns.tell()

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """False once the peer has hung up: an idle connection has nothing to read."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def hang_up(self) -> None:
        """Wake whoever waits on the socket; it is of no more use."""
        with contextlib.suppress(OSError):  # already gone
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _room_at(self, size: int) -> int:
        """Address of ``size`` bytes of our own, at the begin of a page; it stays so that it is in the cache."""
        if not self._room.nbytes:
            self._room = np.empty(size + mmap.PAGESIZE, np.uint8)
        address: int = self._room.ctypes.data
        return address + -address % mmap.PAGESIZE

    def _set_timeout(self, option: int, seconds: float) -> None:
        """0 waits for ever."""
        micros = math.ceil(seconds * 1e6)
        self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", micros // 1_000_000, micros % 1_000_000))

    @contextmanager
    def _raised(self, total: int, want: int) -> Iterator[None]:
        with self._translated(), self._low.raised(total, want):
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, TimeoutError) as error:
            raise StoreTimeout(f"{self.peer} did not answer within the deadline") from error
        except OSError as error:
            raise StoreClosed(f"the connection to {self.peer} is lost: {error.strerror or error}") from error


def _large(objects: Sequence[Array]) -> bool:
    """Is a system call for each worth it?"""
    return bool(objects) and min(data.nbytes for data in objects) >= _LARGE


class _Columns:
    """What a compiled loop works on. ``sums`` are set by :meth:`tell`."""

    def __init__(self, objects: Sequence[Array], sums: MutableSequence[int | None], *more: int) -> None:
        self._sums, self._at = sums, np.zeros(5, np.int64)
        self._found, self._state = np.zeros(len(objects), np.uint64), np.zeros(16, np.uint64)  # 64 bytes of sums, 64 of scratch
        addresses = np.array([data.__array_interface__["data"][0] for data in objects], np.int64)
        sizes, state = np.array([data.nbytes for data in objects], np.int64), self._state.ctypes.data
        self._at[3] = sizes.sum()
        self.arguments = (addresses, sizes, self._found, state, self._at, state + 64, *more)

    @property
    def left(self) -> bool:
        return self._at.item(0) < len(self._found)

    @property
    def bytes_left(self) -> int:
        return self._at.item(3)

    def come_back_at(self, floor: int) -> None:
        """The loop ends when no more bytes than this are left."""
        self._at[4] = floor

    def tell(self) -> None:
        done = self._at.item(0)
        self._sums[:done] = self._found[:done].tolist()


_Part = tuple[int, Array, bool]  # index of the object, some of its bytes, whether these are its last


class _Hashing:
    """Sums of objects whose parts come in order."""

    def __init__(self, sums: MutableSequence[int | None]) -> None:
        self._sums, self._digest = sums, xxhash.xxh3_64()
        self._begun = False

    def add(self, batch: Sequence[_Part]) -> None:
        for i, part, last in batch:
            if last and not self._begun:
                self._sums[i] = checksum(part)
                continue
            self._digest.update(part.data)
            self._begun = not last
            if last:
                self._sums[i] = self._digest.intdigest()
                self._digest.reset()


def _batches(objects: Sequence[Array], chunk: int) -> Iterator[list[_Part]]:
    """Parts of at most ``chunk`` bytes, gathered to at most ``chunk`` bytes and _PARTS parts."""
    batch: list[_Part] = []
    size = 0
    for i, whole in enumerate(objects):
        for start in range(0, max(whole.nbytes, 1), chunk):
            part = whole[start : start + chunk]
            if batch and (size + part.nbytes > chunk or len(batch) == _PARTS):
                yield batch
                batch, size = [], 0
            batch.append((i, part, start + chunk >= whole.nbytes))
            size += part.nbytes
    if batch:
        yield batch


def _rest(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of ``buffers`` is left when their first ``count`` bytes are done."""
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []
