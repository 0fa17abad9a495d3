"""A put or a get of one object: what :class:`~hicache_ray.storage.client.ArenaClient` does to many, with plain numbers.

Here the arrays of a batch would cost more than the copy of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_ray.errors import StoreError
from hicache_ray.storage import messages, wire
from hicache_ray.storage.addresses import Place
from hicache_ray.storage.connection import Connection, Deadline, Spare
from hicache_ray.storage.copying import Copier
from hicache_ray.storage.descriptors import EXISTS, GRANTED, VOID, Loan
from hicache_ray.storage.frames import now
from hicache_ray.storage.lent import release_body
from hicache_ray.storage.movers import Piece
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.slabs import BLOCK, slot_bytes
from hicache_ray.storage.wire import Kind, Reader, WireError, only

MARGIN_S = 1.0  # asked for beyond the call's deadline, so that the deadline, not the service, ends a slow copy
SPARE_S = 0.25  # a spare slot that is ours for less is left alone
_RESERVE, _SEAL, _LEASE, _WRITE = int(Kind.RESERVE), int(Kind.SEAL), int(Kind.LEASE), int(Kind.WRITE)
_YES = b"\1"  # the answer to a seal of one
RELEASE_S = 0.1  # for a release at the very deadline; if it fails the lease runs out by itself


def put_one(connection: Connection, deadline: Deadline, copier: Copier, id: bytes, source: Place) -> bool:
    """Copy into the connection's spare slot and say so; without one reserve, copy, seal. Is the object visible then?"""
    began = deadline.clock()
    deadline.left_at(began)  # raises before anything is begun
    spare, connection.spare = connection.spare, None  # whatever goes wrong, the service ends it in time
    connection.puts_one += 1
    if spare is not None and spare.size == slot_bytes(source.size) and spare.until - began > SPARE_S:
        return _write(connection, deadline, copier, spare, id, source)
    return _reserve_and_seal(connection, deadline, copier, id, source)


def _write(connection: Connection, deadline: Deadline, copier: Copier, spare: Spare, id: bytes, source: Place) -> bool:
    """False also where the time of the spare was over before the copy: a removal of ``id`` meanwhile is remembered no longer than that, so
    it is given up, as a reservation that ran out is."""
    memory, clock = connection.mapped, deadline.clock
    at, until = _inside(memory, spare.offset, spare.size), min(deadline.at, spare.until)
    word = memory.generations[spare.offset // BLOCK]  # what is removed from now on changes it
    try:
        checksum = copier.run_one(Piece(source.address, at, source.size), True, lambda: clock() >= until)
        left = deadline.left()
        if checksum is None:
            return False
        asked = clock()
        reply = connection.exchange(_WRITE, messages.WRITE.pack(spare.number, id, source.size, checksum, word), now() + left)
        outcome = reply[0] if reply else VOID + 1
        if outcome > VOID:
            raise WireError("unknown outcome of a write")
        connection.spare = _spare(reply[1:], asked)
        return outcome in (GRANTED, EXISTS)
    except BaseException:  # as :func:`sealing`
        connection.close()
        raise


def _reserve_and_seal(connection: Connection, deadline: Deadline, copier: Copier, id: bytes, source: Place) -> bool:
    memory, size, clock = connection.mapped, source.size, deadline.clock
    asked = clock()
    left = deadline.left_at(asked)
    ask = messages.ASK_RESERVE_ONE.pack(1, id, size, left + MARGIN_S)
    reply = connection.exchange(_RESERVE, ask, now() + left)
    reservation, seconds, outcome, offset = only(reply, messages.RESERVATION_ONE)
    if outcome != GRANTED:
        return bool(outcome == EXISTS)
    until = min(deadline.at, asked + seconds)
    try:
        piece = Piece(source.address, _inside(memory, offset, size), size)
        # Summed at the source: should somebody else write here after our time, readers will see that it is not this object.
        checksum = copier.run_one(piece, True, lambda: clock() >= until)
        asked = clock()
        more = connection.puts_one > 1 and connection.spare is None and checksum is not None
        body = messages.SEAL_ONE.pack(reservation, 1, checksum is not None, checksum or 0)
        sealed = connection.exchange(_SEAL, body + wire.number(size, "Q") if more else body, now() + deadline.left_at(asked))
        if more:
            connection.spare = _spare(sealed[1:], asked)
        return sealed[:1] == _YES or Reader(sealed[:1]).all_bits(1) == 1
    except BaseException:  # as :func:`sealing`
        connection.close()
        raise


def _spare(reply: bytes, asked: float) -> Spare | None:
    if not reply:
        return None
    number, seconds, offset, size = only(reply, messages.READY)
    return Spare(number, asked + seconds - MARGIN_S, offset, size)  # who is held up within a slice must not write to another's slot


def get_one(connection: Connection, deadline: Deadline, copier: Copier, id: bytes, target: Place) -> bool:
    """Lease, copy, verify, release. Raises as the get of many does."""
    memory, clock = connection.mapped, deadline.clock
    asked = clock()
    left = deadline.left_at(asked)
    reply = connection.exchange(_LEASE, messages.ASK_LEASE_ONE.pack(1, id, left + MARGIN_S), now() + left)
    if len(reply) == messages.MISS_ONE.size:
        return False
    lease, seconds, _, *numbers = only(reply, messages.LEASE_ONE)
    held, loan, good, bad = asked + seconds, Loan(*numbers), False, False
    at, until = _inside(memory, loan.offset, loan.length), min(deadline.at, held)
    try:
        if loan.length == target.size:
            found = copier.run_one(Piece(at, target.address, loan.length), False, lambda: clock() >= until)
            read = found is not None and memory.unchanged(loan)
            good, bad = read and found == loan.checksum, read and found != loan.checksum
        if clock() >= held:
            return False  # whatever was read, the service may have given the memory to others meanwhile
    except BaseException:
        release(connection, release_body(lease, 0, 0), clock)
        raise
    release(connection, messages.RELEASE_ONE.pack(lease, 1, bad), clock)
    return good


@contextmanager
def sealing(connection: Connection) -> Iterator[None]:
    """What is reserved is void at once, if it is not sealed: the connection is of no more use then."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def release(connection: Connection, body: bytes, clock: Callable[[], float]) -> None:
    """What was read counts also where the service cannot be told: the lease runs out, and a connection that holds half a message is not
    used again."""
    try:
        connection.tell(Kind.RELEASE, body, Deadline(clock, clock() + RELEASE_S))
    except StoreError:
        connection.close()


def _inside(memory: Segment, offset: int, size: int) -> int:
    """The address. Raises WireError, as :func:`~hicache_ray.storage.places.require_inside`."""
    if offset + size > memory.data_bytes:
        raise WireError(f"the service names memory outside of its segment of {memory.data_bytes} bytes")
    return memory.address + offset
