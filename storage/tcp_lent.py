"""Objects lent by a store of another node: a verified copy here, protected there until it is released."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits, tcp_frames, wire
from hicache_ray.storage.checked import scratch
from hicache_ray.storage.tcp_frames import TcpKind
from hicache_ray.storage.tcp_links import Borrowed, Links
from hicache_ray.storage.tcp_moving import Item, Mover, fetch

RELEASE_S = 1.0


class TcpLent:
    """A :class:`~hicache_ray.store.Lent`. The views are a copy of its own, so they stay what they are; ``checksums[i]`` is the xxh3-64."""

    def __init__(self, links: Links, lease: int, items: Sequence[Item], count: int) -> None:
        self._links, self._lease, self._released = links, lease, False
        found = {item.index: item for item in items if item.good}
        self.views: Sequence[memoryview | None] = [found[i].data.data.toreadonly() if i in found else None for i in range(count)]
        self.checksums: Sequence[int | None] = [found[i].checksum if i in found else None for i in range(count)]

    def valid(self) -> int:
        return 0 if self._released else bits.pack(view is not None for view in self.views)

    def release(self) -> None:
        """Idempotent. Errors are of no interest: a lease that nobody ends runs out."""
        released, self._released = self._released, True
        if released or not self._lease or self._links.closed or not self._links.ours:
            return
        try:
            with self._links.borrow(RELEASE_S) as borrowed:
                borrowed.first.tell(TcpKind.RELEASE, pack_release(self._lease, 0, 0), borrowed.deadline)
        except StoreError:
            pass

    def __enter__(self) -> TcpLent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def fetch_lease(links: Links, mover: Mover, borrowed: Borrowed, ids: Sequence[bytes], most_bytes: int) -> TcpLent:
    """Lease and copy. Raises StoreError, also where the objects are more than ``most_bytes``."""
    if not ids:
        return TcpLent(links, 0, [], 0)
    first, deadline = borrowed.first, borrowed.deadline
    lease, loans = tcp_frames.unpack_loans(first.call(TcpKind.LEASE, wire.ids(ids), deadline), len(ids))
    size = sum(length for _, length, _ in loans)
    if size > most_bytes:
        first.tell(TcpKind.RELEASE, pack_release(lease, 0, 0), deadline)
        raise StoreError(f"a lease of {size} bytes from another node; at most {most_bytes} are copied at once (lease_bytes)")
    try:
        memory = scratch([length for _, length, _ in loans])
    except StoreError:
        first.tell(TcpKind.RELEASE, pack_release(lease, 0, 0), deadline)
        raise
    items = [Item(i, data, checksum) for (i, _, checksum), data in zip(loans, memory, strict=True)]
    error = mover.run(borrowed, items, fetch(lease, deadline, mover.loops))
    if error is not None:
        raise error
    bad = sum(1 << item.index for item in items if item.bad)
    if bad:
        first.call(TcpKind.RELEASE, pack_release(lease, bad, len(ids)), deadline)
        lease = 0
    return TcpLent(links, lease, items, len(ids))


def pack_release(lease: int, bad: int, count: int) -> bytes:
    """``bad``: bitset over the ``count`` objects of the lease whose bytes did not fit their checksum."""
    return wire.number(lease, "Q") + wire.number(count) + wire.bitset(bad, count)
