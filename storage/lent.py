"""Views of stored bytes, lent by the arena."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import pyarrow as pa

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.descriptors import Lease
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.session import Session
from hicache_ray.storage.wire import Kind

_RELEASE_S = 1.0


class ArenaLent:
    """A :class:`~hicache_ray.store.Lent` whose views are read-only pyarrow.Buffers over the mapping.

    A view stays readable for as long as somebody holds it, but after the lease its bytes may be those of another object.
    """

    def __init__(self, session: Session, memory: Segment, lease: Lease, until: Deadline) -> None:
        self._session, self._memory, self._lease, self._until = session, memory, lease, until
        self._released = False
        self.views: Sequence[pa.Buffer | None] = [
            None if loan is None else memory.arrow.slice(loan.offset, loan.length) for loan in lease.loans
        ]
        self.checksums: Sequence[int | None] = [None if loan is None else loan.checksum for loan in lease.loans]

    def valid(self) -> int:
        if self._released or self._until.passed():
            return 0
        loans = self._lease.loans
        return bits.pack(loan is not None and self._memory.unchanged(loan) for loan in loans)

    def release(self) -> None:
        """Idempotent. Errors are of no interest: a lease that nobody ends runs out."""
        released, self._released = self._released, True
        if released or not self._lease.id or not self._session.usable:
            return
        try:
            with self._session.asking(_RELEASE_S) as (connection, deadline):
                if connection.mapped is self._memory:  # else the service that lent it is gone
                    connection.tell(Kind.RELEASE, release_body(self._lease.id, 0, 0), deadline)
        except StoreError:
            pass

    def flip(self, i: int) -> bool:
        """For tests: flip the lowest bit of the first byte of object ``i``. False where it is a miss or empty."""
        loan = self._lease.loans[i]
        if loan is None or not loan.length:
            return False
        self._memory.data[loan.offset] ^= 1
        return True

    def __enter__(self) -> ArenaLent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def release_body(lease: int, bad: int, count: int) -> bytes:
    """``bad``: bitset over the ``count`` loans of the lease whose bytes did not fit the checksum; 0 and 0 where nothing was checked."""
    return wire.number(lease, "Q") + wire.number(count) + wire.bitset(bad, count)
