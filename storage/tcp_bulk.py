"""The server's side of gets and puts: what it lends, what it receives, and how much of that at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage import bits
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import as_array, checksum
from hicache_ray.storage.segment import Array
from hicache_ray.storage.wire import WireError
from hicache_ray.store import Answer, Bytes, Lent, Store


class Receiving(Protocol):
    """Memory that a store has reserved for objects on their way. ``views[i]`` is None where no bytes are wanted: the object exists, or it
    was refused. Both methods are called only when nobody writes to a view any more; ``abort`` also after a ``seal_with`` that raised."""

    @property
    def views(self) -> Sequence[Bytes | None]: ...

    def seal_with(self, sums: Sequence[int | None]) -> int:
        """Publish the objects. ``sums``: one per view that is not None, the xxh3-64 of what it holds, None where it holds no whole object.

        Returns the bitset of those of the call that are visible now.
        """
        ...

    def abort(self) -> None: ...


@runtime_checkable
class Reserving(Protocol):
    """A store that lets objects be received straight into its memory."""

    def reserve(self, ids: Sequence[bytes], lengths: Sequence[int], timeout_s: float) -> Receiving: ...


@runtime_checkable
class Asked(Protocol):
    """A store that is asked for keys as they came, without an object for each."""

    def lookup_packed(self, keys: npt.NDArray[np.uint8], tags: Sequence[bytes], timeout_s: float) -> list[Answer]:
        """As ``lookup`` of (n, KEY_BYTES) keys; one answer per tag."""
        ...


class Budget:
    """Bytes in flight. What does not fit is refused at once: a queue of puts would be memory too."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.refused = limit, 0, 0
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> int:
        """Bitset of the sizes that fit, the first ones first; those count as used until :meth:`give`."""
        with self._lock:
            granted = []
            for size in sizes:
                granted.append(self.used + size <= self.limit)
                self.used += size if granted[-1] else 0
            self.refused += granted.count(False)
            return bits.pack(granted)

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


class Lending:
    """Objects lent to a client of another node."""

    def __init__(self, ids: Sequence[bytes], lent: Lent) -> None:
        self.ids, self._lent = ids, lent
        arrays: Sequence[Array | None] | None = getattr(lent, "arrays", None)  # of a store that has them, they need not be made
        self.views = list(arrays) if arrays is not None else [None if view is None else as_array(view) for view in lent.views]
        known: Sequence[int | None] | None = getattr(lent, "checksums", None)
        # A store that keeps no checksums is taken at its word: then they protect the way, not the storage.
        self.checksums = list(known) if known is not None else [None if view is None else checksum(view) for view in self.views]

    @property
    def lengths(self) -> list[int | None]:
        return [None if view is None else view.nbytes for view in self.views]

    def end(self) -> None:
        self.views = []
        self._lent.release()


class Fence:
    """Puts into a store that cannot reserve, against the clears that come while their bytes are on the way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[Staging, list[bytes]] = {}  # puts on their way -> prefixes cleared since they began

    def begin(self, staging: Staging, deadline: Deadline) -> None:
        with self._held(deadline):
            self._open[staging] = []

    def end(self, staging: Staging) -> None:
        self._open.pop(staging, None)

    def put(self, staging: Staging, at: Sequence[int], deadline: Deadline) -> int:
        """Store the objects ``at`` that were not cleared meanwhile; returns the bitset, over all, of those visible."""
        with self._held(deadline):
            void = tuple(self._open.pop(staging, ()))
            keep = [i for i in at if not staging.ids[i].startswith(void)]
            views = [staging.views[i] for i in keep]
            visible = self._store.put([staging.ids[i] for i in keep], views, deadline.left())
        return sum(1 << i for n, i in enumerate(keep) if visible >> n & 1)

    def clear(self, prefix: bytes, deadline: Deadline) -> int:
        with self._held(deadline):
            for void in list(self._open.values()):  # end() takes no lock
                void.append(prefix)
            return self._store.clear(deadline.left(), prefix)

    @contextmanager
    def _held(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.left()):
            raise StoreTimeout("the store was busy with another put or clear until the deadline")
        try:
            yield
        finally:
            self._lock.release()


class Staging:
    """A :class:`Receiving` for stores without :class:`Reserving`: memory of our own, and one put at the end."""

    def __init__(self, ids: Sequence[bytes], lengths: Sequence[int], fence: Fence, deadline: Deadline) -> None:
        self.ids, self._fence, self._deadline = ids, fence, deadline
        self.views: list[Array] = [np.empty(length, np.uint8) for length in lengths]
        fence.begin(self, deadline)

    def seal_with(self, sums: Sequence[int | None]) -> int:
        return self._fence.put(self, [i for i, found in enumerate(sums) if found is not None], self._deadline)

    def abort(self) -> None:
        self._fence.end(self)


class Filling:
    """One put on its way: several streams fill it, one of them seals it."""

    def __init__(self, receiving: Receiving, granted: Sequence[int], size: int, deadline: Deadline) -> None:
        """``granted``: of the call's objects, those that ``receiving`` is about. ``size``: bytes of the budget it holds."""
        self.size, self.deadline = size, deadline
        self.verifies = isinstance(receiving, Staging)  # a plain put makes a checksum of its own, of whatever has arrived
        self._receiving, self._granted = receiving, granted
        self._views: dict[int, Array] = {
            i: as_array(view, writable=True) for i, view in zip(granted, receiving.views, strict=True) if view is not None
        }
        self._turn = threading.Condition()
        self._claimed: set[int] = set()
        self._sums: dict[int, int] = {}  # of what is whole
        self._filling = 0
        self._over = False  # nobody begins to fill any more
        self._settled = False  # sealed or aborted

    @property
    def wanted(self) -> int:
        return sum(1 << i for i in self._views)

    @contextmanager
    def claim(self, indices: Sequence[int]) -> Iterator[list[Array]]:
        """The memory of the objects, for as long as the block lasts. Raises WireError: each object is filled once."""
        with self._turn:
            if self._over or len(set(indices)) != len(indices) or not self._claimed.isdisjoint(indices):
                raise WireError("bytes of a put that is over, or bytes that came before")
            if not self._views.keys() >= set(indices):
                raise WireError("bytes that nobody wanted")
            self._claimed.update(indices)
            self._filling += 1
            views = [self._views[i] for i in indices]
        try:
            yield views
        finally:
            with self._turn:
                self._filling -= 1
                self._turn.notify_all()
                self._abort_if_over()

    def arrived(self, sums: Mapping[int, int]) -> None:
        """These are whole, and their checksums fit."""
        with self._turn:
            self._sums.update(sums)

    def seal(self) -> int:
        """Wait for the other streams, then publish what is whole; returns the bitset, over the call, of what is visible."""
        with self._turn:
            self._over = True
            while self._filling:
                if not self._turn.wait(self.deadline.left()):
                    raise StoreTimeout("another stream of this put did not end before the deadline")
            if self._settled:
                return 0
            self._settled = True
        try:
            visible = self._receiving.seal_with([self._sums.get(i) for i in self._views])  # in the order of the views
        except BaseException:
            self._receiving.abort()
            raise
        return sum(1 << i for n, i in enumerate(self._granted) if visible >> n & 1)

    def end(self) -> None:
        """Whatever was not sealed is given up: now, or when the last stream has let go of the memory. Idempotent."""
        with self._turn:
            self._over = True
            self._abort_if_over()

    def _abort_if_over(self) -> None:
        if self._over and not self._filling and not self._settled:
            self._settled = True
            self._receiving.abort()
