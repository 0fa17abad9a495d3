"""What the arena holds: objects, order of use, reservations, leases. No I/O, no threads, no clock of its own.

Life of an object: ``reserve`` (invisible) -> ``seal`` (visible) -> evicted, dropped or cleared; one that is written to a spare slot
(:mod:`~hicache_ray.storage.spares`) begins visible. Bytes in use by a lease or by a writer are
never given to another object: such an object becomes DEAD and its slot is free when the last user ends or runs out of time.
Eviction is LRU within a size class; a class also takes the runs whose objects are older, on average, than its own oldest object. Within
one call the first id counts as the most recently used: callers pass pages from the root down, and what stays must be root-reachable.

An object is a row of an :class:`~hicache_ray.storage.table.IdTable`; every call is a few passes over arrays, whatever it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ray.storage import bits
from hicache_ray.storage.claims import AnyClaim, Claim, Claims, OneClaim, Spare
from hicache_ray.storage.descriptors import GRANTED, Held, Lease, Lending, Loan, Ready, Reservation, Sums
from hicache_ray.storage.holdings import FREE, RESERVED, SEALED, Holdings
from hicache_ray.storage.ids import Ids, packed, unpacked
from hicache_ray.storage.room import place
from hicache_ray.storage.singles import let_go_one, pin_one, place_one, show_one, use_one
from hicache_ray.storage.slabs import BLOCK, SlabMap, require
from hicache_ray.storage.spares import Spares
from hicache_ray.storage.table import FEW
from hicache_ray.store import Answer, StoreStats


@dataclass(frozen=True)
class Limits:
    """``lease_s``, ``hold_s``: how long a reader and a writer may take. ``pending_bytes``: most bytes under open reservations of all
    clients (one reservation alone is always let in); None: no bound. ``tenant_bytes``: caps by tenant."""

    lease_s: float = 10.0
    hold_s: float = 30.0
    pending_bytes: int | None = None
    tenant_bytes: Mapping[str, int] | None = None


class ArenaIndex(Holdings):
    """``generations``: one 64-bit word per BLOCK bytes of data (in shared memory when in use); it grows when a slot that starts in the
    block is given out, when something is removed while that slot is a spare one, and when the slab around it is cut anew; it never comes
    round.

    ``first_id``: lease and reservation ids count from here; incarnations start apart, so that an old id names nothing.
    Not thread-safe: its owner locks.
    """

    singly = True  # a batch of one takes the short way; without, everything comes out the same

    def __init__(
        self, slabs: SlabMap, generations: Any, clock: Callable[[], float], limits: Limits | None = None, first_id: int = 1
    ) -> None:
        self.limits = limits or Limits()
        super().__init__(slabs, generations, self.limits.tenant_bytes)
        self.claims = Claims(clock, first_id)
        self.spares = Spares(self.claims, self.limits.hold_s)
        self.pending_bytes = 0  # lengths under open reservations

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Ids, tag: bytes) -> Answer:
        return self.lookup_tags(keys, [tag])[0]

    def lookup_tags(self, keys: Ids, tags: Sequence[bytes]) -> list[Answer]:
        """One answer per tag."""
        self.expire()
        if len(keys) <= FEW and self.singly:
            return [self._look(keys, tag) for tag in tags]
        found = self.table.find_tagged(keys, tags)
        if not self.claims.holds:  # nothing is reserved: whatever is found is visible
            return [Answer(bits.packed(rows >= 0)) for rows in found]
        states = [np.where(rows >= 0, self.table["state"][rows], FREE) for rows in found]
        return [Answer(bits.packed(state == SEALED), bits.packed(state == RESERVED)) for state in states]

    def ids(self, prefix: bytes = b"") -> list[bytes]:
        return unpacked(self.packed_ids(prefix))

    def packed_ids(self, prefix: bytes = b"") -> npt.NDArray[np.uint8]:
        """(n, width) uint8 of the visible ids that start with ``prefix``."""
        rows = self.table.rows(prefix)
        return self.table.ids(rows[self.table["state"][rows] == SEALED])

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """(n,) flags of the ids that are visible or reserved."""
        self.expire()
        return self.table.find(ids) >= 0

    def touch(self, ids: Ids) -> None:
        """What is visible of them is used."""
        rows = self.table.find(ids)
        self.use(rows[(rows >= 0) & (self.table["state"][rows] == SEALED)])

    def reserved(self, reservation: int) -> tuple[list[bytes], list[int]]:
        """Ids and lengths of the objects that a reservation placed, in the order of the grants; none where it is not open."""
        hold = self.claims.holds.get(reservation)
        return ([], []) if hold is None else (unpacked(self.table.ids(hold.rows)), self.table["length"][hold.rows].tolist())

    def __contains__(self, id: bytes) -> bool:
        """Is it visible?"""
        row = self.table.find_one(id)
        return row >= 0 and bool(self.table["state"][row] == SEALED)

    def stats(self) -> StoreStats:
        self.expire()
        counted = self.counters
        return StoreStats(
            capacity_bytes=self.slabs.capacity_bytes, used_bytes=self.used_bytes, objects=self.objects, puts=counted.puts,
            put_refused=counted.put_refused, gets=counted.gets, get_misses=counted.get_misses,
            checksum_failures=counted.checksum_failures, evictions=counted.evictions, leases=len(self.claims.leases),
            tenants=self.tenants.report(), pending_bytes=self.pending_bytes, dropped=counted.dropped,
            spare_bytes=self.spares.bytes,
        )  # fmt: skip

    # -- writing -----------------------------------------------------------------------------------------------------------------

    def reserve(self, ids: Ids, lengths: Sequence[int] | npt.NDArray[np.uint64], owner: int, seconds: float) -> Reservation:
        """Slots for new objects, evicting older ones; never evicts what this same call found or placed."""
        self.expire()
        if len(ids) == 1 and self.singly:
            one = self._reserve_one(bytes(ids[0]), int(lengths[0]), owner, seconds)
            if one is not None:
                return Reservation(one.id, one.seconds, np.array([one.outcome], np.uint8), np.array([one.offset], np.uint64))
        return self._reserve(packed(ids), np.asarray(lengths, np.uint64), owner, seconds)

    def reserve_one(self, id: bytes, length: int, owner: int, seconds: float) -> Held:
        """:meth:`reserve` of one."""
        self.expire()
        one = self._reserve_one(id, length, owner, seconds) if self.singly else None
        if one is None:
            made = self._reserve(packed([id]), np.array([length], np.uint64), owner, seconds)
            one = Held(made.id, made.seconds, made.outcomes.item(0), made.offsets.item(0))
        return one

    def _reserve(self, ids: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint64], owner: int, seconds: float) -> Reservation:
        seconds = min(seconds, self.limits.hold_s)
        batch = place(self, ids, np.minimum(lengths, self.slabs.capacity_bytes + 1).astype(np.int64), self._room())
        placed = batch.rows[batch.outcomes == GRANTED]
        order = batch.rows[batch.rows >= 0]
        size = int(self.table["length"][placed].sum())
        self.pending_bytes += size
        claim = Claim(self.claims.clock() + seconds, owner, placed, order, self.table["serial"][order], size)
        return Reservation(self.claims.open(self.claims.holds, claim), seconds, batch.outcomes, batch.offsets)

    def seal(self, reservation: int, checksums: Sequence[int | None] | Sums, owner: int) -> int:
        """Make the granted objects visible, in the order of the grants; None gives that object up. Returns the bitset of those sealed.

        A reservation that ran out, was cleared, or belongs to another connection seals nothing.
        """
        self.expire()
        sums = checksums if isinstance(checksums, Sums) else Sums.of(checksums)
        hold = self.claims.holds.get(reservation)
        if hold is None or hold.owner != owner or len(hold.rows) != len(sums):
            return 0
        if self.singly and sums.done[0] and (sealed := self._seal_one(reservation, hold, sums.values.item(0))) is not None:
            return sealed
        del self.claims.holds[reservation]
        self.pending_bytes -= hold.size
        good = sums.done & (self.table["state"][hold.rows] == RESERVED)
        if not good.all():
            self.let_go(hold.rows[~good])
        self.show(hold.rows[good], sums.values[good])
        same = (self.table["serial"][hold.order] == hold.serials) & (self.table["state"][hold.order] == SEALED)
        self.use(hold.order[same])
        return bits.packed(good)

    def seal_one(self, reservation: int, checksum: int, owner: int) -> int:
        """:meth:`seal` of one that is not given up."""
        self.expire()
        hold = self.claims.holds.get(reservation)
        if hold is not None and hold.owner == owner and self.singly:
            sealed = self._seal_one(reservation, hold, checksum)
            if sealed is not None:
                return sealed
        return self.seal(reservation, [checksum], owner)

    def spare(self, length: int, owner: int) -> Ready | None:
        """As :meth:`Spares.lend`."""
        self.expire()
        return self.spares.lend(self, length, owner) if self.singly else None

    def write_one(self, spare: int, id: bytes, length: int, checksum: int, word: int, owner: int) -> int:
        """As :meth:`Spares.write`."""
        self.expire()
        return self.spares.write(self, spare, id, length, checksum, word, owner)

    def disconnect(self, owner: int) -> None:
        """The connection is closed: nobody will seal its reservations, or write to its spare slot. Leases stay until their deadline: a
        reader may still copy."""
        for hold in self.claims.of(owner):
            self._close(hold)

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def lease(self, ids: Ids, owner: int, seconds: float) -> Lease:
        """Protect what is visible of ``ids`` for at most ``seconds``. Counts as use."""
        self.expire()
        seconds = min(seconds, self.limits.lease_s)
        if len(ids) == 1 and self.singly:
            one = self._lease_one(bytes(ids[0]), owner, seconds)
            loans = np.array([one.loan], np.uint64) if one.loan is not None else np.zeros((0, 4), np.uint64)
            return Lease(one.id, seconds, np.full(1, one.loan is not None), loans)
        table, rows = self.table, self.table.find(ids)
        hit = (rows >= 0) & (table["state"][rows] == SEALED)
        held = rows[hit]
        self.pin(held, self.use(held))
        self.counters.gets += len(rows)
        self.counters.get_misses += len(rows) - len(held)
        id = self.claims.open(self.claims.leases, Claim(self.claims.clock() + seconds, owner, held))
        loans = np.empty((len(held), 4), np.uint64)
        loans[:, 0] = offsets = table["offset"][held]
        loans[:, 1] = table["length"][held]
        loans[:, 2] = table["checksum"][held]
        loans[:, 3] = self.generations[offsets // BLOCK]
        return Lease(id, seconds, hit, loans)

    def lease_one(self, id: bytes, owner: int, seconds: float) -> Lending:
        """:meth:`lease` of one."""
        if not self.singly:
            made = self.lease([id], owner, seconds)
            return Lending(made.id, made.seconds, made.loans[0])
        self.expire()
        return self._lease_one(id, owner, min(seconds, self.limits.lease_s))

    def release(self, lease: int, bad: int) -> None:
        """End a lease. ``bad``: bitset over its *loans* (misses not counted) whose bytes did not fit the checksum; they are dropped."""
        self.expire()
        claim = self.claims.leases.pop(lease, None)
        if claim is None:
            return
        if bad:
            rows = claim.rows[bits.unpacked(bad, len(claim.rows))]
            self.counters.checksum_failures += len(rows)
            self.counters.get_misses += len(rows)
            rows = np.unique(rows)
            self.lose(rows[self.table["state"][rows] == SEALED])
        self._close(claim)

    # -- removing ----------------------------------------------------------------------------------------------------------------

    def drop(self, ids: Ids) -> int:
        """Remove objects; a reservation of one is revoked (its seal will say no). Returns the bitset of those that were visible."""
        self.expire()
        self.spares.removed(self, ids)
        rows = self.table.find(ids)
        where, first = np.unique(rows, return_index=True)
        first = first[where >= 0]
        existed = np.zeros(len(rows), np.bool_)
        existed[first] = self.table["state"][rows[first]] == SEALED
        self.lose(rows[existed])
        self.remove(rows[first[~existed[first]]])
        return bits.packed(existed)

    def clear(self, prefix: bytes = b"") -> int:
        """Remove what begins with ``prefix`` and revoke the reservations of it. Returns how many objects were visible."""
        self.expire()
        self.spares.removed(self, prefix)
        rows = self.table.rows(prefix)
        count = int((self.table["state"][rows] == SEALED).sum())
        self.remove(rows)
        return count

    def expire(self) -> None:
        """End every claim whose deadline has passed."""
        if self.claims.due():
            for claim in self.claims.expired():
                self._close(claim)

    def check(self) -> None:
        """Everything agrees with everything. Raises Inconsistent."""
        self.check_with(self.spares.open)
        self.spares.check()
        claims = [*self.claims.holds.values(), *self.claims.leases.values()]
        pins = np.zeros(len(self.table["pins"]), np.int64)
        for claim in claims:
            np.add.at(pins, claim.rows, 1)
        require(bool((pins == self.table["pins"]).all()), "pins do not add up to the open leases and reservations")
        sizes = sum(hold.size for hold in self.claims.holds.values())
        require(self.pending_bytes == sizes, "pending bytes are wrong")
        open_ids = self.claims.holds.keys() | self.claims.leases.keys() | self.claims.spares.keys()
        require(self.claims.waiting() >= open_ids, "a lease or reservation has no deadline")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _close(self, claim: AnyClaim | Spare) -> None:
        if isinstance(claim, Spare):
            return self.spares.give_back(self, claim)
        self.pending_bytes -= claim.size
        if not self.singly or (row := claim.row) < 0 or not let_go_one(self, row):
            self.let_go(claim.rows)

    def _look(self, keys: Ids, tag: bytes) -> Answer:
        """:meth:`lookup` of a few."""
        hit = pending = 0
        for i, key in enumerate(keys):
            row = self.table.find_one(bytes(key) + tag)
            if row >= 0:
                sealed = self.table.cells["state"][row] == SEALED
                hit |= sealed << i
                pending |= (not sealed) << i
        return Answer(hit=hit, pending=pending)

    def _room(self) -> int | None:
        """Bytes that may be reserved now; None: as many as there are."""
        return None if self.limits.pending_bytes is None or not self.pending_bytes else self.limits.pending_bytes - self.pending_bytes

    def _reserve_one(self, id: bytes, length: int, owner: int, seconds: float) -> Held | None:
        """None, and nothing done, where it takes the long way."""
        length, seconds, number = min(length, self.slabs.capacity_bytes + 1), min(seconds, self.limits.hold_s), 0
        one = place_one(self, id, length, self._room())
        if one is None:
            return None
        if one.outcome == GRANTED:
            self.pending_bytes += length
            claims, serial = self.claims, self.table.cells["serial"][one.row]
            number = claims.open_one(claims.holds, OneClaim(claims.clock() + seconds, owner, one.row, serial, length))
        return Held(number, seconds, one.outcome, one.offset)

    def _seal_one(self, reservation: int, hold: AnyClaim, checksum: int) -> int | None:
        """None, and nothing done, where it takes the long way."""
        if not isinstance(hold, OneClaim):
            return None
        del self.claims.holds[reservation]
        self.pending_bytes -= hold.size
        row, cells = hold.row, self.table.cells
        if cells["state"][row] != RESERVED:  # dropped meanwhile
            self.let_go(hold.rows)
            return 0
        show_one(self, row, checksum)
        use_one(self, row)
        return 1

    def _lease_one(self, id: bytes, owner: int, seconds: float) -> Lending:
        cells, row = self.table.cells, self.table.find_one(id)
        self.counters.gets += 1
        if row < 0 or cells["state"][row] != SEALED:
            self.counters.get_misses += 1
            return Lending(0, seconds, None)
        use_one(self, row)
        pin_one(self, row)
        claims = self.claims
        number = claims.open_one(claims.leases, OneClaim(claims.clock() + seconds, owner, row))
        offset = cells["offset"][row]
        return Lending(number, seconds, Loan(offset, cells["length"][row], cells["checksum"][row], self.generations.item(offset // BLOCK)))
