"""The store of a node inside the process that owns it: no socket, one copy, and places to receive bytes into."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_ray.errors import StoreClosed, StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.storage.copying import Copier, as_array, checksum
from hicache_ray.storage.descriptors import EXISTS, PENDING, Lease, Reservation, Sums
from hicache_ray.storage.ids import require_ids, require_keys
from hicache_ray.storage.movers import Batch
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.segment import Array
from hicache_ray.store import Answer, Bytes, StoreStats

_MARGIN_S = 1.0  # held beyond the call's deadline, so that the deadline ends a slow copy, not the arena


class LocalStore:
    """A :class:`~hicache_ray.store.Store` over a :class:`~hicache_ray.storage.node.NodeStore`, which stays open when this is closed."""

    def __init__(self, node: NodeStore, copy_threads: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        self._node: NodeStore | None = node  # None: closed
        self._clock = clock
        self._copier = Copier(copy_threads)
        self._owner = node.owner()

    # -- objects -----------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        return dict(zip(tags, self._open.lookup(keys, tags, timeout_s), strict=True))

    def lookup_packed(self, keys: npt.NDArray[np.uint8], tags: Sequence[bytes], timeout_s: float) -> list[Answer]:
        """:meth:`lookup` of (n, KEY_BYTES) keys; one answer per tag."""
        return self._open.lookup(keys, tags, timeout_s)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(source) for _, source in zip(ids, sources, strict=True)]
        fresh = dict(zip(reversed(ids), reversed(arrays), strict=True))  # of equal ids the first counts
        names = list(dict.fromkeys(ids))
        place = self.reserve(names, [fresh[name].nbytes for name in names], timeout_s)
        with place:
            granted = [(fresh[name], target) for name, target in zip(names, place.targets, strict=True) if target is not None]
            batch = Batch.of([source for source, _ in granted], [target for _, target in granted], of_source=True)
            sums = self._copier.run(batch, place.over)
            visible = place.seal_with(sums)
        stored = {names[i] for i in bits.each(visible)}
        return bits.pack(id in stored for id in ids)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(target, writable=True) for _, target in zip(ids, targets, strict=True)]
        until = self._clock() + timeout_s
        with self.lease(ids, timeout_s) as lent:
            fit = [i for i, data in enumerate(lent.arrays) if data is not None and data.nbytes == arrays[i].nbytes]
            batch = Batch.of([lent.arrays[i] for i in fit], [arrays[i] for i in fit])
            sums = self._copier.run(batch, lambda: self._clock() >= min(until, lent.until))
            return lent.verify(fit, sums.listed())

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> LocalLent:
        """As the protocol says; the views are read-only pyarrow.Buffers over the segment."""
        require_ids(ids)
        asked = self._clock()
        node = self._open
        lease = node.lease(ids, self._owner, timeout_s + _MARGIN_S if timeout_s > 0 else _MARGIN_S, timeout_s)
        return LocalLent(node, lease, asked + lease.seconds, self._clock)

    def reserve(self, ids: Sequence[bytes], lengths: Sequence[int], timeout_s: float) -> Receiving:
        """Memory of the arena to receive new objects into, at most ``timeout_s`` long. Ids differ from each other. End it exactly once."""
        require_ids(ids)
        if timeout_s <= 0:
            raise StoreTimeout("the deadline of this call has passed")
        asked = self._clock()
        node = self._open
        reservation = node.reserve(ids, lengths, self._owner, timeout_s + _MARGIN_S)
        until = asked + min(reservation.seconds, timeout_s)
        return Receiving(node, self._owner, reservation, list(lengths), lambda: self._clock() >= until)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        return self._open.drop(ids, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return self._open.clear(prefix, timeout_s)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        found = self._open.scan(prefix, timeout_s)
        return (id.tobytes() for id in found)

    # -- administration ----------------------------------------------------------------------------------------------------------

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        self._open.describe(digest, record, timeout_s)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        return self._open.described()

    def stats(self, timeout_s: float) -> StoreStats:
        return self._open.stats()

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object, or it is empty."""
        with self.lease([id], 5.0) as lent:
            data = lent.arrays[0]
            if data is None or not data.nbytes:
                return False
            data[0] ^= 1
            return True

    def close(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.disconnect(self._owner)
            self._copier.close()

    @property
    def _open(self) -> NodeStore:
        node = self._node
        if node is None:
            raise StoreClosed("this handle of the store is closed")
        return node


class LocalLent:
    """A :class:`~hicache_ray.store.Lent`. ``checksums[i]``: xxh3-64 that view ``i`` must have, None where it is a miss."""

    def __init__(self, node: NodeStore, lease: Lease, until: float, clock: Callable[[], float]) -> None:
        self.until = until
        self._node, self._lease, self._clock = node, lease, clock
        self._released = False
        memory = node.arena.segment
        loans = lease.loans
        self.views: Sequence[pa.Buffer | None] = [None if n is None else memory.arrow.slice(n.offset, n.length) for n in loans]
        self.arrays: Sequence[Array | None] = [None if n is None else memory.data[n.offset : n.offset + n.length] for n in loans]
        self.checksums: Sequence[int | None] = [None if n is None else n.checksum for n in loans]

    def valid(self) -> int:
        if self._released or self._clock() >= self.until:
            return 0
        unchanged = self._node.arena.segment.unchanged
        return bits.pack(loan is not None and unchanged(loan) for loan in self._lease.loans)

    def verify(self, which: Sequence[int], sums: Sequence[int | None]) -> int:
        """Bitset of the views ``which`` whose bytes were read with these checksums, while the lease holds. Ends it, and drops those that
        did not fit."""
        valid = self.valid()
        read = {i: found for i, found in zip(which, sums, strict=True) if found is not None and valid >> i & 1}
        bad = {i for i, found in read.items() if found != self.checksums[i]}
        self._end(bits.pack(i in bad for i in self._lease.which.tolist()))
        return bits.pack(i in read and i not in bad for i in range(len(self.views)))

    def release(self) -> None:
        """Idempotent."""
        self._end(0)

    def _end(self, bad: int) -> None:
        released, self._released = self._released, True
        if released or not self._lease.id:
            return
        with suppress(StoreClosed):  # the arena is gone, and the lease with it
            self._node.release(self._lease.id, bad)

    def __enter__(self) -> LocalLent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Receiving:
    """Memory for objects that arrive. ``views[i]``: writable bytes of object ``i``; None where it is there already, or was refused.

    Nobody may write to a view once :meth:`seal` or :meth:`abort` was called, or :meth:`over` is true.
    """

    def __init__(self, node: NodeStore, owner: int, held: Reservation, lengths: Sequence[int], over: Callable[[], bool]) -> None:
        self.over = over
        self._node, self._owner, self._held, self._ended = node, owner, held, False
        self._granted = held.granted.tolist()
        data = node.arena.segment.data
        offsets = held.offsets.tolist()
        self.targets: list[Array | None] = [None] * len(lengths)
        for i in self._granted:
            self.targets[i] = data[offsets[i] : offsets[i] + lengths[i]]
        #: Objects that were visible before.
        self.present = bits.packed(held.outcomes == EXISTS)
        #: Objects that another writer is about to store.
        self.pending = bits.packed(held.outcomes == PENDING)

    @property
    def views(self) -> list[memoryview | None]:
        return [None if target is None else target.data for target in self.targets]

    def seal(self, done: int) -> int:
        """Make the objects of the bitset ``done`` visible, with the checksums of what is in memory now; give the others up.

        Returns the bitset of all that are visible, those that were there before too.
        """
        wanted = [(done >> i & 1) and self.targets[i] for i in self._granted]
        return self.seal_with([checksum(target) if isinstance(target, np.ndarray) else None for target in wanted])

    def seal_with(self, sums: Sequence[int | None] | Sums) -> int:
        """The same with checksums that the caller took, one per view that is not None; None gives that object up."""
        if self._ended or not self._held.id:
            self._ended = True
            return self.present
        self._ended = True
        if self.over():
            sums = [None] * len(self._granted)
        sealed = self._node.seal(self._held.id, sums, self._owner)
        return self.present | sum(1 << self._granted[i] for i in bits.each(sealed))

    def abort(self) -> None:
        """Give everything up. Idempotent, and of no effect after a seal."""
        if not self._ended:
            with suppress(StoreClosed):
                self.seal_with([None] * len(self._granted))

    def __enter__(self) -> Receiving:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
