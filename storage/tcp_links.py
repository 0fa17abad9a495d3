"""Client's side of the tcp plane: one authenticated connection, and a bounded set of them behind a circuit breaker."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import wire
from hicache_ray.storage.connection import Deadline, Expired, Overloaded, Refused
from hicache_ray.storage.session import Breaker
from hicache_ray.storage.tcp import INCARNATION_BYTES, MAC_BYTES, NONCE_BYTES, TcpAddress, TcpClientConfig, proof, proves
from hicache_ray.storage.tcp_frames import MAX_GREETING, TcpKind, encode, unpack_error
from hicache_ray.storage.tcp_streams import Stream
from hicache_ray.storage.wire import MAX_BODY, REPLY, Reader, WireError


class Link:
    """One request at a time. ``clean``: no exchange is half way; only then may the link serve another."""

    def __init__(
        self,
        address: TcpAddress,
        token: str,
        buffer_bytes: int,
        deadline: Deadline,
        connected: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        """Connects, and both ends prove that they know the token; ``connected`` is called between the two. Raises StoreError."""
        self._peer, self._request = str(address), 0
        self.clean, self.incarnation = False, ""
        try:
            sock = socket.create_connection((address.host, address.port), timeout=deadline.left())
        except TimeoutError as error:
            raise StoreTimeout(f"the store at {address} did not take the connection within the deadline") from error
        except OSError as error:
            raise StoreClosed(f"the store at {address} cannot be reached: {error.strerror or error}") from error
        try:
            self.stream = Stream(sock, f"the store at {address}", buffer_bytes)
            connected(self.stream)
            self._greet(token, deadline)
        except OSError as error:
            sock.close()
            raise StoreClosed(f"the store at {address} cannot be reached: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise

    def ask(self, kind: TcpKind, body: bytes, deadline: Deadline) -> None:
        """Send a request; its answer, or its bytes, are still to come."""
        frame = encode(kind, (self._request + 1) & 0xFFFFFFFF, wire.real(deadline.left()) + body)
        self.clean = False
        self._request = (self._request + 1) & 0xFFFFFFFF
        self.stream.send([memoryview(frame)], deadline)

    def answer(self, kind: TcpKind, deadline: Deadline, more: bool = False) -> Reader:
        """The answer to what was asked last; ``more``: raw bytes follow. Raises Refused, StoreError."""
        frame = self.stream.receive_frame(REPLY, MAX_BODY, deadline)
        if frame.request == self._request and frame.kind == TcpKind.ERROR:
            self.clean = True
            raise unpack_error(frame.body, self._peer)
        if frame.kind != kind or frame.request != self._request:
            raise WireError("the answer belongs to another question")
        self.clean = not more
        return Reader(frame.body)

    def call(self, kind: TcpKind, body: bytes, deadline: Deadline) -> Reader:
        self.ask(kind, body, deadline)
        return self.answer(kind, deadline)

    def tell(self, kind: TcpKind, body: bytes, deadline: Deadline) -> None:
        """Send what has no answer."""
        self.ask(kind, body, deadline)
        self.clean = True

    def _greet(self, token: str, deadline: Deadline) -> None:
        frame = self.stream.receive_frame(REPLY, MAX_GREETING + 1024, deadline)
        if frame.kind == TcpKind.ERROR:
            raise unpack_error(frame.body, self._peer)
        if frame.kind != TcpKind.CHALLENGE or len(frame.body) != NONCE_BYTES:
            raise WireError(f"{self._peer} does not speak the protocol of this version")
        challenge, nonce = frame.body, os.urandom(NONCE_BYTES)
        self.stream.send_frame(TcpKind.PROOF, 0, nonce + proof(token, "client", challenge, nonce), deadline)
        try:
            frame = self.stream.receive_frame(REPLY, MAX_GREETING, deadline)
        except StoreClosed as error:
            raise StoreClosed(f"the store at {self._peer} hung up: probably its token is another one; set the same on all nodes") from error
        body = frame.body
        known = frame.kind == TcpKind.WELCOME and len(body) == MAC_BYTES + INCARNATION_BYTES
        if not known or not proves(token, "server", challenge, nonce, body[:MAC_BYTES]):
            raise WireError(f"who answers at {self._peer} does not know the token; it is not asked anything")
        self.incarnation, self.clean = body[MAC_BYTES:].hex(), True


class Borrowed:
    """The links of one call. ``first`` is there from the start."""

    def __init__(self, links: Links, first: Link, deadline: Deadline) -> None:
        self._links, self.all, self.deadline = links, [first], deadline

    @property
    def first(self) -> Link:
        return self.all[0]

    def spread(self, count: int) -> list[Link]:
        """Up to ``count`` links: what other calls leave free, without waiting for them; at least one."""
        while len(self.all) < count:
            try:
                link = self._links.take(self.deadline, wait=False)
            except StoreError:
                break
            if link is None:
                break
            self.all.append(link)
        return self.all[:count]


class Links:
    """At most ``config.connections`` links; the one given back last is lent first. Usable by several threads of its process."""

    def __init__(self, address: TcpAddress, token: str, config: TcpClientConfig, clock: Callable[[], float], incarnation: str = "") -> None:
        self.address, self._token, self._config, self._clock = address, token, config, clock
        self._incarnation = incarnation
        self._pid = os.getpid()
        self._turn = threading.Condition()
        self._breaker = Breaker(clock, config.backoff_s, config.backoff_most_s)
        self._idle: list[Link] = []
        self._count = 0  # of those lent, and of those being opened
        self._used: set[Stream] = set()  # theirs, as far as they are connected
        self._closed = False

    @property
    def ours(self) -> bool:
        """Is this the process that made it?"""
        return os.getpid() == self._pid

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def borrow(self, timeout_s: float) -> Iterator[Borrowed]:
        """Links for one call. Raises StoreError; the breaker learns how it went."""
        if not self.ours:
            raise StoreClosed("this handle of the store was opened before a fork; open another one in the child")
        if self._closed:
            raise StoreClosed("this handle of the store is closed")
        deadline = Deadline.after(self._clock, timeout_s)
        tried = self._breaker.admit()
        well: bool | None = None
        borrowed: Borrowed | None = None
        try:
            link = self.take(deadline, wait=True)
            assert link is not None  # it waits, or raises
            borrowed = Borrowed(self, link, deadline)
            yield borrowed
            well = all(link.clean for link in borrowed.all)
        except (Refused, Overloaded, Expired):
            raise
        except StoreError:
            well = False
            raise
        finally:
            self._breaker.report(well, tried)
            for link in reversed(borrowed.all if borrowed else []):  # the first one last: the next call asks it first
                self._give_back(link)

    def take(self, deadline: Deadline, wait: bool) -> Link | None:
        """An idle link or a new one; None where all are lent and the caller does not wait. Raises StoreError."""
        with self._turn:
            while True:
                if self._closed:
                    raise StoreClosed("this handle of the store is closed")
                while self._idle:
                    link = self._idle.pop()
                    if link.stream.alive():
                        self._count += 1
                        self._used.add(link.stream)
                        return link
                    link.stream.close()
                if self._count < self._config.connections:
                    self._count += 1
                    break
                if not wait:
                    return None
                if deadline.passed() or not self._turn.wait(deadline.left()):
                    raise Overloaded(f"all {self._config.connections} connections to the store were in use until the deadline")
        try:
            return self._open(deadline)
        except BaseException:
            with self._turn:
                self._count -= 1
                self._turn.notify()
            raise

    def close(self) -> None:
        """Idempotent. Calls under way end with StoreClosed: whoever they wait for may hang."""
        with self._turn:
            self._closed = True
            idle, self._idle = self._idle, []
            self._turn.notify_all()
            for stream in self._used if self.ours else ():  # a forked child would hang up for its parent
                stream.hang_up()
        for link in idle:
            link.stream.close()

    def _open(self, deadline: Deadline) -> Link:
        opened: list[Stream] = []

        def connected(stream: Stream) -> None:
            opened.append(stream)
            with self._turn:
                self._used.add(stream)
            if self._closed:
                raise StoreClosed("this handle of the store is closed")

        try:
            link = Link(self.address, self._token, self._config.buffer_bytes, deadline, connected)
        except BaseException:
            with self._turn:
                self._used.difference_update(opened)
            raise
        if self._incarnation and link.incarnation != self._incarnation:
            with self._turn:
                self._used.discard(link.stream)
            link.stream.close()
            raise StoreClosed(f"at {self.address} answers incarnation {link.incarnation}, no longer {self._incarnation}")
        return link

    def _give_back(self, link: Link) -> None:
        with self._turn:
            self._count -= 1
            self._used.discard(link.stream)
            keep = link.clean and not self._closed
            if keep:
                self._idle.append(link)
            self._turn.notify()
        if not keep:
            link.stream.hang_up()
            link.stream.close()
