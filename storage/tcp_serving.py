"""One connection of a tcp server, and its thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import bits, messages, tcp_frames, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory
from hicache_ray.storage.ids import require_ids
from hicache_ray.storage.tcp import MAC_BYTES, NONCE_BYTES, TcpConfig, proof, proves
from hicache_ray.storage.tcp_bulk import Budget, Fence, Filling, Lending, Receiving, Reserving, Staging
from hicache_ray.storage.tcp_frames import MAX_GREETING, TcpKind
from hicache_ray.storage.tcp_ops import Operations
from hicache_ray.storage.tcp_streams import Stream
from hicache_ray.storage.wire import MAX_BODY, REPLY, Frame, Reader, WireError
from hicache_ray.store import Store

log = logging.getLogger("hicache_ray.storage")
_MOST_OPEN = 64  # leases and puts begun on one connection and not ended
_MARGIN_S = 1.0  # reserved beyond the request's deadline, so that the deadline, not the store, ends a slow put


@dataclass(frozen=True)
class Shared:
    """What all connections of a server share. ``lendings``, ``fillings``: by a random number that only their client knows, because its
    streams are connections of their own."""

    store: Store
    config: TcpConfig
    directory: Directory | None
    incarnation: str
    clock: Callable[[], float]
    budget: Budget
    fence: Fence
    lendings: dict[int, Lending] = field(default_factory=dict)
    fillings: dict[int, Filling] = field(default_factory=dict)


class Handler:
    """``greeted``: the peer has proved that it knows the token. ``over``: called with ``number`` at the end."""

    def __init__(self, shared: Shared, stream: Stream, number: int, over: Callable[[int], None]) -> None:
        self.stream, self.greeted = stream, False
        self.thread = threading.Thread(target=self._run, name=f"hicache-tcp-{number}", daemon=True)
        self._shared, self._number, self._over = shared, number, over
        self._operations = Operations(shared.store, shared.fence, shared.budget, shared.directory)
        self._mine: list[int] = []  # numbers of what was begun here and is not ended, the oldest first

    def _run(self) -> None:
        peer = self.stream.peer
        try:
            self._greet()
            while begun := self.stream.wait():
                frame = self.stream.receive_frame(0, MAX_BODY, self._after(self._shared.config.io_timeout_s), begun)
                self._serve(TcpKind(frame.kind), frame)
        except StoreClosed as error:
            log.info("%s", error)
        except StoreTimeout:
            log.warning("the connection to %s is closed: half a message, and then silence, or it reads too slowly", peer)
        except StoreError as error:
            log.warning("the connection to %s is closed: %s", peer, error)
        except Exception:
            log.exception("the connection to %s is closed: its request failed", peer)
        finally:
            self._end_all()
            self._over(self._number)
            self.stream.hang_up()
            self.stream.close()

    def _after(self, seconds: float) -> Deadline:
        return Deadline.after(self._shared.clock, seconds)

    def _greet(self) -> None:
        """See :mod:`~hicache_ray.storage.tcp`. Raises WireError."""
        token, deadline = self._shared.config.token, self._after(self._shared.config.io_timeout_s)
        challenge = os.urandom(NONCE_BYTES)
        self.stream.send_frame(TcpKind.CHALLENGE | REPLY, 0, challenge, deadline)
        frame = self.stream.receive_frame(0, MAX_GREETING, deadline)
        if frame.kind != TcpKind.PROOF or len(frame.body) != NONCE_BYTES + MAC_BYTES:
            raise WireError("the first frame is not a proof that the peer knows the token")
        nonce, mac = frame.body[:NONCE_BYTES], frame.body[NONCE_BYTES:]
        if not proves(token, "client", challenge, nonce, mac):
            raise WireError("the peer does not know the token; set the same one on every node")
        self.greeted = True
        welcome = proof(token, "server", challenge, nonce) + bytes.fromhex(self._shared.incarnation)
        self.stream.send_frame(TcpKind.WELCOME | REPLY, frame.request, welcome, deadline)

    def _serve(self, kind: TcpKind, frame: Frame) -> None:
        reader = Reader(frame.body)
        deadline = self._after(min(messages.seconds(reader), self._shared.config.request_s))
        if kind is TcpKind.FETCH:
            return self._fetch(frame, reader, deadline)
        if kind is TcpKind.FILL:
            return self._fill(frame, reader, deadline)
        try:
            body = self._answer(kind, reader, deadline)
            answer = None if body is None else tcp_frames.encode(kind | REPLY, frame.request, body)
        except WireError:
            raise
        except StoreError as error:  # of the store, as nothing here has touched the connection
            answer = tcp_frames.encode(TcpKind.ERROR | REPLY, frame.request, tcp_frames.pack_error(error))
        if answer is not None:
            self.stream.send([memoryview(answer)], self._after(self._shared.config.io_timeout_s))

    def _answer(self, kind: TcpKind, reader: Reader, deadline: Deadline) -> bytes | None:
        """Body of the reply; None where none is due."""
        if kind is TcpKind.LEASE:
            return self._lease(reader, deadline)
        if kind is TcpKind.RELEASE:
            return self._release(reader, deadline)
        if kind is TcpKind.RESERVE:
            return self._reserve(reader, deadline)
        if kind is TcpKind.SEAL:
            return self._seal(reader)
        return self._operations.answer(kind, reader, deadline)

    # -- get ---------------------------------------------------------------------------------------------------------------------

    def _lease(self, reader: Reader, deadline: Deadline) -> bytes:
        ids = reader.ids()
        reader.end()
        lending = Lending(ids, self._shared.store.lease(ids, deadline.left()))
        lengths, number = lending.lengths, 0
        if any(length is not None for length in lengths):
            number = self._begin()
            self._shared.lendings[number] = lending
        else:
            lending.end()
        return tcp_frames.pack_loans(number, lengths, lending.checksums)

    def _fetch(self, frame: Frame, reader: Reader, deadline: Deadline) -> None:
        """What the lease no longer lends is not sent. Bytes that were given to another object meanwhile do not fit their checksum."""
        lease, indices = tcp_frames.unpack_indices(reader)
        lending = self._shared.lendings.get(lease)
        views = [] if lending is None else lending.views
        found = [views[i] if i < len(views) else None for i in indices]
        present = wire.bitset(bits.pack(view is not None for view in found), len(found))
        self.stream.send_frame(frame.kind | REPLY, frame.request, present, deadline)
        self.stream.send_objects([view for view in found if view is not None], None, deadline)

    def _release(self, reader: Reader, deadline: Deadline) -> bytes | None:
        lease, count = reader.number("Q"), reader.count()
        bad = reader.bits(count)
        reader.end()
        lending = self._shared.lendings.pop(lease, None)
        if lending is not None:
            lengths = lending.lengths
            lending.end()
            for i in bits.each(bad):
                if i < len(lengths):
                    self._verify(lending.ids[i], lengths[i] or 0, deadline)
        return b"" if bad else None

    def _verify(self, id: bytes, length: int, deadline: Deadline) -> None:
        """A client found that bytes do not fit. The store's own read tells damage there, which it removes, from damage on the way."""
        log.warning("an object of %d bytes arrived damaged at %s; looking at it here", length, self.stream.peer)
        if self._shared.budget.take([length]):
            try:
                self._shared.store.get([id], [np.empty(length, np.uint8)], deadline.left())
            finally:
                self._shared.budget.give(length)

    # -- put ---------------------------------------------------------------------------------------------------------------------

    def _reserve(self, reader: Reader, deadline: Deadline) -> bytes:
        ids, lengths = tcp_frames.unpack_lengths(reader)
        require_ids(ids)
        self._end_late()
        granted = list(bits.each(self._shared.budget.take(lengths)))
        size = sum(lengths[i] for i in granted)
        try:
            receiving = self._receiving([ids[i] for i in granted], [lengths[i] for i in granted], deadline)
            filling = Filling(receiving, granted, size, deadline)
            number = self._begin()
        except BaseException:
            self._shared.budget.give(size)
            raise
        self._shared.fillings[number] = filling
        return wire.number(number, "Q") + wire.bitset(filling.wanted, len(ids))

    def _receiving(self, ids: list[bytes], lengths: list[int], deadline: Deadline) -> Receiving:
        store = self._shared.store
        if isinstance(store, Reserving):
            return store.reserve(ids, lengths, deadline.left() + _MARGIN_S)
        return Staging(ids, lengths, self._shared.fence, deadline)

    def _fill(self, frame: Frame, reader: Reader, deadline: Deadline) -> None:
        transfer, indices = tcp_frames.unpack_indices(reader)
        filling = self._shared.fillings.get(transfer)
        if filling is None:
            raise WireError("bytes of a put that nobody began, or that is over")
        deadline = min(deadline, filling.deadline, key=lambda one: one.at)
        with filling.claim(indices) as views:
            sums: list[int | None] | None = [None] * len(indices) if filling.verifies else None
            self.stream.receive_objects(views, sums, deadline)
            told = bytearray(8 * len(indices))
            self.stream.receive([memoryview(told)], deadline)
            said = Reader(bytes(told)).numbers("Q", len(indices))
            # Kept with the object, the writer's own checksum shows every reader what the way, or the memory, has done to it.
            good = [found == wanted for found, wanted in zip(said if sums is None else sums, said, strict=True)]
            filling.arrived({i: found for i, found, fits in zip(indices, said, good, strict=True) if fits})
        self.stream.send_frame(frame.kind | REPLY, frame.request, wire.bitset(bits.pack(good), len(good)), deadline)

    def _seal(self, reader: Reader) -> bytes:
        number, count = reader.number("Q"), reader.count()
        reader.end()
        filling = self._shared.fillings.pop(number, None)
        if filling is None:
            return wire.bitset(0, count)
        try:
            return wire.bitset(filling.seal(), count)
        finally:
            self._give_up(filling)

    # -- what is begun and not ended ---------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """A fresh number. The oldest goes where a client begins and begins and ends nothing."""
        lendings, fillings = self._shared.lendings, self._shared.fillings
        self._mine = [number for number in self._mine if number in lendings or number in fillings]
        for number in self._mine[: len(self._mine) - _MOST_OPEN + 1]:
            self._end(number)
        number = int.from_bytes(os.urandom(8), "little") or 1
        self._mine.append(number)
        return number

    def _end_late(self) -> None:
        """Puts whose time is over: nobody waits for them any more, and their bytes count as in flight."""
        for number, filling in list(self._shared.fillings.items()):
            if filling.deadline.passed():
                self._end(number)

    def _end_all(self) -> None:
        for number in self._mine:
            self._end(number)

    def _end(self, number: int) -> None:
        lending = self._shared.lendings.pop(number, None)
        if lending is not None:
            lending.end()
        filling = self._shared.fillings.pop(number, None)
        if filling is not None:
            self._give_up(filling)

    def _give_up(self, filling: Filling) -> None:
        filling.end()
        self._shared.budget.give(filling.size)
