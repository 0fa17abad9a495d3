"""A put or a get of one object: what :class:`~hicache_ray.storage.client.ArenaClient` does to many, with plain numbers.

Here the arrays of a batch would cost more than the copy of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hicache_ray.errors import StoreError
from hicache_ray.storage import messages
from hicache_ray.storage.addresses import Place
from hicache_ray.storage.connection import Connection, Deadline
from hicache_ray.storage.copying import Copier
from hicache_ray.storage.descriptors import EXISTS, GRANTED, Loan
from hicache_ray.storage.lent import release_body
from hicache_ray.storage.movers import Piece
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.wire import Kind, WireError

MARGIN_S = 1.0  # asked for beyond the call's deadline, so that the deadline, not the service, ends a slow copy
RELEASE_S = 0.1  # for a release at the very deadline; if it fails the lease runs out by itself


class Call(NamedTuple):
    """What a call goes through."""

    connection: Connection
    deadline: Deadline
    copier: Copier
    clock: Callable[[], float]


def put_one(call: Call, id: bytes, source: Place) -> bool:
    """Reserve, copy, seal: is the object visible then?"""
    memory, asked = call.connection.mapped, call.clock()
    ask = messages.ASK_RESERVE_ONE.pack(1, id, source.size, call.deadline.left() + MARGIN_S)
    reply = call.connection.call(Kind.RESERVE, ask, call.deadline)
    reservation, seconds, outcome, offset = reply.only(messages.RESERVATION_ONE)
    if outcome != GRANTED:
        return bool(outcome == EXISTS)
    held = Deadline(call.clock, asked + seconds)
    with sealing(call.connection):
        piece = Piece(source.address, _inside(memory, offset, source.size), source.size)
        # Summed at the source: should somebody else write here after our time, readers will see that it is not this object.
        checksum = call.copier.run_one(piece, True, lambda: call.deadline.passed() or held.passed())
        body = messages.SEAL_ONE.pack(reservation, 1, checksum is not None, checksum or 0)
        return call.connection.call(Kind.SEAL, body, call.deadline).all_bits(1) == 1


def get_one(call: Call, id: bytes, target: Place) -> bool:
    """Lease, copy, verify, release. Raises as the get of many does."""
    memory, asked = call.connection.mapped, call.clock()
    reply = call.connection.call(Kind.LEASE, messages.ASK_LEASE_ONE.pack(1, id, call.deadline.left() + MARGIN_S), call.deadline)
    if reply.size == messages.MISS_ONE.size:
        return False
    lease, seconds, _, *numbers = reply.only(messages.LEASE_ONE)
    held, loan, good, bad = Deadline(call.clock, asked + seconds), Loan(*numbers), False, False
    at = _inside(memory, loan.offset, loan.length)
    try:
        if loan.length == target.size:
            piece = Piece(at, target.address, loan.length)
            found = call.copier.run_one(piece, False, lambda: call.deadline.passed() or held.passed())
            read = found is not None and memory.unchanged(loan)
            good, bad = read and found == loan.checksum, read and found != loan.checksum
        if held.passed():
            return False  # whatever was read, the service may have given the memory to others meanwhile
    except BaseException:
        release(call.connection, release_body(lease, 0, 0), call.clock)
        raise
    release(call.connection, release_body(lease, int(bad), 1), call.clock)
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
        connection.tell(Kind.RELEASE, body, Deadline.after(clock, RELEASE_S))
    except StoreError:
        connection.close()


def _inside(memory: Segment, offset: int, size: int) -> int:
    """The address. Raises WireError, as :func:`~hicache_ray.storage.places.require_inside`."""
    if offset + size > memory.data_bytes:
        raise WireError(f"the service names memory outside of its segment of {memory.data_bytes} bytes")
    return memory.address + offset
