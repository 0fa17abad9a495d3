"""The store of a node as its ranks see it: descriptors over the socket, bytes by memory copies to and from the mapped arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits, messages, wire
from hicache_ray.storage.addresses import Views, place_of, views_of
from hicache_ray.storage.arena import ArenaAddress
from hicache_ray.storage.client_single import MARGIN_S, get_one, put_one, release, sealing
from hicache_ray.storage.connection import Connection, Deadline
from hicache_ray.storage.copying import Copier
from hicache_ray.storage.descriptors import EXISTS
from hicache_ray.storage.ids import ID_BYTES, require_ids, require_keys
from hicache_ray.storage.lent import ArenaLent, release_body
from hicache_ray.storage.movers import Batch
from hicache_ray.storage.places import require_inside, unchanged
from hicache_ray.storage.session import ClientConfig, Session
from hicache_ray.storage.wire import MAX_IDS, Kind
from hicache_ray.store import Answer, Bytes, StoreStats

WATCH_S = 100e-6  # a request waits for its lookup; there is one of them, and there are many puts


class ArenaClient:
    """A :class:`~hicache_ray.store.Store`. Connects when first used, and again when the service was restarted.

    Not usable in a forked child (open another there); close() is safe there.
    """

    def __init__(
        self, address: ArenaAddress | str, config: ClientConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``address``: of the service, or the path of its socket."""
        config = config or ClientConfig()
        self._clock = clock
        self._session = Session(address if isinstance(address, str) else address.socket, config, clock)
        self._copier = Copier(config.copy_threads, config.slice_bytes, config.kernel)

    def warm_up(self, timeout_s: float) -> bool:
        """Load the compiled loop of the copies, which the first of them begins to do anyway; True once they use it."""
        return self._copier.warm_up(timeout_s)

    # -- objects -----------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        if len(keys) <= MAX_IDS and 0 < len(keys) * len(tags) <= wire.MAX_ASKED:  # nearly always
            with self._session.asking(timeout_s) as (connection, deadline):
                reply = connection.call(Kind.LOOKUP, messages.pack_lookup(keys, tags), deadline, WATCH_S)
                return messages.unpack_answers(reply, tags, len(keys))
        found = {tag: Answer() for tag in tags}
        with self._session.asking(timeout_s) as (connection, deadline):
            for at, some in _parts(keys, MAX_IDS):
                for _, asked in _parts(tags, max(wire.MAX_ASKED // len(some), 1)):
                    reply = connection.call(Kind.LOOKUP, messages.pack_lookup(some, asked), deadline)
                    for tag, answer in messages.unpack_answers(reply, asked, len(some)).items():
                        found[tag] = messages.joined(found[tag], answer, at)
        return found

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        _require_as_many(ids, sources)
        if len(ids) == 1:
            source = place_of(sources[0])
            with self._session.asking(timeout_s) as (connection, deadline):
                return int(put_one(connection, deadline, self._copier, ids[0], source))
        first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))  # of equal ids the first counts
        unique = list(dict.fromkeys(ids))
        views = views_of(sources if len(unique) == len(ids) else [sources[first[id]] for id in unique])
        visible = 0
        with self._session.asking(timeout_s) as (connection, deadline):
            for at, some in _parts(unique, MAX_IDS):
                visible |= self._put(connection, some, _part(views, at, len(some)), deadline) << at
        if len(unique) == len(ids):
            return visible
        place = {id: i for i, id in enumerate(unique)}
        return bits.pack(bool(visible >> place[id] & 1) for id in ids)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        _require_as_many(ids, targets)
        if len(ids) == 1:
            target = place_of(targets[0], writable=True)
            with self._session.asking(timeout_s) as (connection, deadline):
                return int(get_one(connection, deadline, self._copier, ids[0], target))
        views = views_of(targets, writable=True)
        verified = 0
        with self._session.asking(timeout_s) as (connection, deadline):
            for at, some in _parts(ids, MAX_IDS):
                verified |= self._get(connection, some, _part(views, at, len(some)), deadline) << at
        return verified

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> ArenaLent:
        """As the protocol says; the views are read-only pyarrow.Buffers. At most MAX_IDS ids."""
        require_ids(ids)
        if len(ids) > MAX_IDS:
            raise StoreError(f"one lease covers at most {MAX_IDS} objects, not {len(ids)}")
        with self._session.asking(timeout_s) as (connection, deadline):
            asked = self._clock()
            reply = connection.call(Kind.LEASE, wire.ids(ids) + wire.real(1e9), deadline)
            lease = messages.unpack_lease(reply, len(ids))
            require_inside(lease.offsets, lease.lengths, connection.mapped)
            return ArenaLent(self._session, connection.mapped, lease, Deadline(self._clock, asked + lease.seconds))

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        existed = 0
        with self._session.asking(timeout_s) as (connection, deadline):
            for at, some in _parts(ids, MAX_IDS):
                existed |= connection.call(Kind.DROP, wire.ids(some), deadline).all_bits(len(some)) << at
        return existed

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        if len(prefix) > ID_BYTES:
            return 0
        with self._session.asking(timeout_s) as (connection, deadline):
            return connection.call(Kind.CLEAR, wire.number(len(prefix), "H") + prefix, deadline).last_number("Q")

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        if len(prefix) > ID_BYTES:
            return iter(())
        found: list[bytes] = []
        with self._session.asking(timeout_s) as (connection, deadline):
            at = 0
            while True:
                ask = wire.number(at) + wire.number(len(prefix), "H") + prefix
                reply = connection.call(Kind.SCAN, ask, deadline)
                at = reply.number()
                found += reply.ids()
                reply.end()
                if at == 0:
                    return iter(found)

    # -- administration ----------------------------------------------------------------------------------------------------------

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        with self._session.asking(timeout_s) as (connection, deadline):
            connection.call(Kind.DESCRIBE, messages.pack_record(digest, record), deadline).end()

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        with self._session.asking(timeout_s) as (connection, deadline):
            return messages.unpack_records(connection.call(Kind.DESCRIBED, b"", deadline))

    def stats(self, timeout_s: float) -> StoreStats:
        with self._session.asking(timeout_s) as (connection, deadline):
            return messages.unpack_stats(connection.call(Kind.STATS, b"", deadline))

    def ping(self, timeout_s: float) -> str:
        """Incarnation of the service that answers."""
        with self._session.asking(timeout_s) as (connection, deadline):
            connection.call(Kind.PING, b"", deadline).end()
            return connection.hello.incarnation

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of an object, leaving its checksum. False where there is no such object."""
        with self.lease([id], 5.0) as lent:
            return lent.flip(0)

    def close(self) -> None:
        self._session.close()
        if self._session.ours:  # in a forked child there are no threads to stop
            self._copier.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _put(self, connection: Connection, ids: Sequence[bytes], sources: Views, deadline: Deadline) -> int:
        """Reserve, copy, seal; returns the bitset of the ids that are visible then."""
        memory, asked = connection.mapped, self._clock()
        ask = messages.pack_reserve(ids, sources.sizes.view(np.uint64), deadline.left() + MARGIN_S)
        reservation = messages.unpack_reservation(connection.call(Kind.RESERVE, ask, deadline), len(ids))
        visible, granted = reservation.outcomes == EXISTS, reservation.granted
        if len(granted):
            held = Deadline(self._clock, asked + reservation.seconds)
            offsets, sizes = reservation.offsets[granted], sources.sizes[granted]
            with sealing(connection):
                require_inside(offsets, sizes.view(np.uint64), memory)
                targets = memory.address + offsets.view(np.int64)
                # Summed at the source: should somebody else write here after our time, readers will see that it is not this object.
                batch = Batch(sources.addresses[granted], targets, sizes, of_source=True, stream=True)
                sums = self._copier.run(batch, lambda: deadline.passed() or held.passed())
                sealed = connection.call(Kind.SEAL, messages.pack_seal(reservation.id, sums), deadline)
                visible[granted] = bits.unpacked(sealed.all_bits(len(granted)), len(granted))
        return bits.packed(visible)

    def _get(self, connection: Connection, ids: Sequence[bytes], targets: Views, deadline: Deadline) -> int:
        """Lease, copy, verify, release. What the deadline cut off is a miss; so is everything once the lease has run out."""
        memory, asked = connection.mapped, self._clock()
        ask = wire.ids(ids) + wire.real(deadline.left() + MARGIN_S)
        lease = messages.unpack_lease(connection.call(Kind.LEASE, ask, deadline), len(ids))
        held = Deadline(self._clock, asked + lease.seconds)
        require_inside(lease.offsets, lease.lengths, memory)
        which, lengths = lease.which, lease.lengths.astype(np.int64)
        fit = np.flatnonzero(lengths == targets.sizes[which])
        sources = memory.address + lease.offsets[fit].view(np.int64)
        batch = Batch(sources, targets.addresses[which[fit]], lengths[fit], stream=True)
        try:
            sums = self._copier.run(batch, lambda: deadline.passed() or held.passed())
        except BaseException:
            release(connection, release_body(lease.id, 0, 0), self._clock)
            raise
        read = sums.done & unchanged(lease, memory)[fit]
        right = sums.values == lease.checksums[fit]
        if held.passed():
            return 0  # whatever was read, the service may have given the memory to others meanwhile
        if len(which):
            bad = np.zeros(len(which), np.bool_)
            bad[fit] = read & ~right
            release(connection, release_body(lease.id, bits.packed(bad), len(bad)), self._clock)
        verified = np.zeros(len(ids), np.bool_)
        verified[which[fit]] = read & right
        return bits.packed(verified)


def _parts(items: Sequence[bytes], size: int) -> Iterator[tuple[int, Sequence[bytes]]]:
    """(index of the first, at most ``size`` items) over all items."""
    for at in range(0, len(items), size):
        yield at, items[at : at + size]


def _part(views: Views, at: int, count: int) -> Views:
    """Of all views those ``[at, at + count)``; the owners stay with the whole."""
    return Views(views.addresses[at : at + count], views.sizes[at : at + count], views.owners)


def _require_as_many(ids: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
    if len(ids) != len(buffers):
        raise ValueError(f"{len(ids)} ids need as many buffers, not {len(buffers)}")
