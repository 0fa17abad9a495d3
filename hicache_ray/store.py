"""The store protocol: the port through which the core and the ranks reach L3.

An *object* is the bytes of one page (or one snapshot) of one component of one shard. Its id is ``page key + tag``: ``KEY_BYTES`` that
name the prefix and ``TAG_BYTES`` that name component, geometry, shard and recipe (see :mod:`hicache_ray.keys`)::

    id     key (48) | tag (16)
    key    space (8): of the namespace | group (8): of the path, for placement | digest (32)

To a store an id is opaque, but for two things: what belongs to one namespace begins with the same ``SPACE_BYTES``, so that it can be
counted and cleared together, and keys with the same group belong together, so that their entries live on the same node. Calls are batched
and bounded: a store that cannot answer within ``timeout_s`` seconds raises :class:`~hicache_ray.errors.StoreTimeout`. Callers treat every
:class:`~hicache_ray.errors.StoreError` as a miss.

Bitsets are Python ints: bit ``i`` speaks of the ``i``-th id (or key) of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from typing_extensions import Self

SPACE_BYTES = 8
GROUP_BYTES = 8
DIGEST_BYTES = 32
KEY_BYTES = SPACE_BYTES + GROUP_BYTES + DIGEST_BYTES
TAG_BYTES = 16

#: Anything with a contiguous byte buffer (memoryview, pyarrow.Buffer, numpy array). The length is checked, the type is not.
Bytes: TypeAlias = Any


@dataclass(frozen=True)
class Answer:
    """What a lookup found for one tag. ``hit``: visible now. ``pending``: reserved by a writer, not sealed. The rest is a miss.

    ``retry``: the store could not say for these keys now (a shard is moving or down); asking again later may give another answer.
    The four bitsets (miss is the complement) are disjoint.
    """

    hit: int = 0
    pending: int = 0
    retry: int = 0


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store started (monotonic), and what it holds now. Sizes in bytes."""

    capacity_bytes: int
    used_bytes: int
    objects: int
    puts: int = 0
    put_refused: int = 0
    gets: int = 0
    get_misses: int = 0
    checksum_failures: int = 0
    evictions: int = 0
    leases: int = 0
    #: By tenant: bytes, objects, refused (over its cap), evictions, cap (0: none). "" is what belongs to no described namespace.
    tenants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Bytes under open reservations, and objects refused because those were too many.
    pending_bytes: int = 0
    dropped: int = 0
    #: Bytes of slots that are kept ready for the next put of a connection.
    spare_bytes: int = 0
    #: Bytes that are backed by huge pages, as far as the system says.
    huge_bytes: int = 0
    #: Why nothing new is stored now; empty where it is.
    writes_off: str = ""


class Lent(Protocol):
    """Views lent by a zero-copy store. ``views[i]`` is None where the object is a miss. Release exactly once (or use ``with``)."""

    views: Sequence[Bytes | None]

    def valid(self) -> int:
        """Bitset of the views whose lease and generation still hold; check *after* reading, use nothing else."""
        ...

    def release(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None: ...


@runtime_checkable
class Store(Protocol):
    """L3 as its users see it. All methods may be called from several threads at once."""

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        """For every tag, which of ``keys`` have an object ``key + tag``. A hint: only a verified read counts. Touches nothing."""
        ...

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        """Store ``sources[i]`` under ``ids[i]``; returns the bitset of objects that are visible when the call returns.

        An object that already exists is kept as it is and counts as visible. An object that does not fit is refused (bit 0). Nothing
        is visible before its bytes are complete.
        """
        ...

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        """Copy objects into writable ``targets``; returns the bitset of reads verified (length, generation, checksum) after the copy.

        Where the bit is 0 the target holds garbage. When the call has returned or raised, nobody writes to a target any more.
        """
        ...

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        """Lend read-only views of the stored bytes, protected from reuse until released or until the lease runs out."""
        ...

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        """Remove objects; returns the bitset of those that existed."""
        ...

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        """Remove every object whose id starts with ``prefix``; returns how many there were.

        Complete when it returns, and fenced: a put of such an object that began before it makes nothing visible afterwards.
        """
        ...

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        """Ids of visible objects that start with ``prefix``, in no order, as of the call."""
        ...

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        """Keep a readable record (of a namespace or a tag) beside its digest, so that a miss can name the field that differs."""
        ...

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        """All records given to :meth:`describe`."""
        ...

    def stats(self, timeout_s: float) -> StoreStats: ...

    def close(self) -> None:
        """Release what this handle holds (sockets, mappings, threads). Idempotent."""
        ...
