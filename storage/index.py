"""What the arena holds: entries, LRU order, reservations, leases. No I/O, no threads, no clock of its own.

Life of an object: ``reserve`` (invisible) -> ``seal`` (visible) -> evicted, dropped or cleared. Bytes in use by a lease or by a writer are
never given to another object: such an entry becomes DEAD and its slot is free when the last user ends or runs out of time.
Eviction is LRU within a size class; a class also takes the runs whose objects are older, on average, than its own oldest object. Within
one call the first id counts as the most recently used: callers pass pages from the root down, and what stays must be root-reachable.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache_ray.storage import bits
from hicache_ray.storage.descriptors import Grant, Lease, Loan, Outcome, Reservation
from hicache_ray.storage.slabs import BLOCK, Entry, SlabMap, State, require, slot_bytes
from hicache_ray.store import Answer, StoreStats


class Words(Protocol):
    """A list, or 64-bit words of shared memory."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, value: int, /) -> None: ...


@dataclass
class _Claim:
    """An open lease, or the open reservation of connection ``owner``. ``order``: all visible or reserved entries of that call."""

    deadline: float
    owner: int
    entries: list[Entry]
    order: list[Entry] = field(default_factory=list)


@dataclass
class _Batch:
    """One call of reserve. What was used at tick ``start`` or later is not evicted for it."""

    start: int
    placed: list[Entry] = field(default_factory=list)
    order: list[Entry] = field(default_factory=list)  # those placed and those found, in the order of the call
    compared: set[int] = field(default_factory=set)  # classes whose oldest object was compared with the coldest runs
    starved: set[int] = field(default_factory=set)  # classes for which nothing more can be evicted


@dataclass
class Counters:
    puts: int = 0
    put_refused: int = 0
    gets: int = 0
    get_misses: int = 0
    checksum_failures: int = 0
    evictions: int = 0


@dataclass
class ArenaIndex:
    """``generations``: one word per BLOCK bytes of data (in shared memory when in use); it grows when a slot that starts in the block is
    given out. ``first_id``: lease and reservation ids count from here; incarnations start apart, so that an old id names nothing.
    ``lease_s``, ``hold_s``: caps in seconds on how long a reader and a writer may take. Not thread-safe: its owner locks.
    """

    slabs: SlabMap
    generations: Words
    clock: Callable[[], float]
    lease_s: float = 10.0
    hold_s: float = 30.0
    first_id: int = 1
    counters: Counters = field(default_factory=Counters)
    used_bytes: int = 0  # lengths of everything that occupies a slot
    sealed: dict[bytes, Entry] = field(default_factory=dict)
    reserved: dict[bytes, Entry] = field(default_factory=dict)
    _lru: dict[int, OrderedDict[bytes, Entry]] = field(default_factory=dict)  # class -> sealed entries, oldest first
    _holds: dict[int, _Claim] = field(default_factory=dict)
    _leases: dict[int, _Claim] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)  # heap over holds and leases; closed ones are left to pass
    _tick: int = 0
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.first_id

    # -- questions ---------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tag: bytes) -> Answer:
        self.expire()
        ids = [key + tag for key in keys]
        hit = bits.pack(map(self.sealed.__contains__, ids))
        return Answer(hit=hit, pending=bits.pack(map(self.reserved.__contains__, ids)) if self.reserved else 0)

    def ids(self, prefix: bytes = b"") -> list[bytes]:
        return [id for id in self.sealed if id.startswith(prefix)]

    def stats(self) -> StoreStats:
        self.expire()
        counted = self.counters
        return StoreStats(
            capacity_bytes=self.slabs.capacity_bytes, used_bytes=self.used_bytes, objects=len(self.sealed), puts=counted.puts,
            put_refused=counted.put_refused, gets=counted.gets, get_misses=counted.get_misses,
            checksum_failures=counted.checksum_failures, evictions=counted.evictions, leases=len(self._leases),
        )  # fmt: skip

    # -- writing -----------------------------------------------------------------------------------------------------------------

    def reserve(self, ids: Sequence[bytes], lengths: Sequence[int], owner: int, seconds: float) -> Reservation:
        """Slots for new objects, evicting older ones; never evicts what this same call found or placed."""
        self.expire()
        self._tick += 1
        batch = _Batch(self._tick)
        self._use([self.sealed[id] for id in ids if id in self.sealed])  # before anything is evicted
        sizes = {length: slot_bytes(length) for length in set(lengths)}
        grants = [self._reserve_one(id, length, sizes[length], batch) for id, length in zip(ids, lengths, strict=True)]
        seconds = min(seconds, self.hold_s)
        id = self._open_claim(self._holds, seconds, owner, batch.placed)
        if id:
            self._holds[id].order = batch.order
        return Reservation(id, seconds, grants)

    def seal(self, reservation: int, checksums: Sequence[int | None], owner: int) -> int:
        """Make the granted objects visible, in the order of the grants; None gives that object up. Returns the bitset of those sealed.

        A reservation that ran out, was cleared, or belongs to another connection seals nothing.
        """
        self.expire()
        hold = self._holds.get(reservation)
        if hold is None or hold.owner != owner or len(hold.entries) != len(checksums):
            return 0
        del self._holds[reservation]
        done = [self._seal_one(entry, checksum) for entry, checksum in zip(hold.entries, checksums, strict=True)]
        self.counters.puts += sum(done)
        self._use([entry for entry in hold.order if entry.state is State.SEALED])
        return bits.pack(done)

    def disconnect(self, owner: int) -> None:
        """The connection is closed: nobody will seal its reservations. Leases stay until their deadline: a reader may still copy."""
        for id in [id for id, hold in self._holds.items() if hold.owner == owner]:
            self._close_claim(self._holds.pop(id))

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def lease(self, ids: Sequence[bytes], owner: int, seconds: float) -> Lease:
        """Protect what is visible of ``ids`` for at most ``seconds``. Counts as use."""
        self.expire()
        entries = [self.sealed.get(id) for id in ids]
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            self.slabs.pin(entry)
        self._use(held)
        self.counters.gets += len(ids)
        self.counters.get_misses += len(ids) - len(held)
        seconds = min(seconds, self.lease_s)
        lease = self._open_claim(self._leases, seconds, owner, held)
        return Lease(lease, seconds, [None if e is None else Loan(e.offset, e.length, e.checksum, e.generation) for e in entries])

    def release(self, lease: int, bad: int) -> None:
        """End a lease. ``bad``: bitset over its *loans* (misses not counted) whose bytes did not fit the checksum; they are dropped."""
        self.expire()
        claim = self._leases.pop(lease, None)
        if claim is None:
            return
        for i in bits.each(bad & ((1 << len(claim.entries)) - 1)):
            self.counters.checksum_failures += 1
            self.counters.get_misses += 1
            if claim.entries[i].state is State.SEALED:
                self._remove(claim.entries[i])
        self._close_claim(claim)

    # -- removing ----------------------------------------------------------------------------------------------------------------

    def drop(self, ids: Sequence[bytes]) -> int:
        """Remove objects; a reservation of one is revoked (its seal will say no). Returns the bitset of those that were visible."""
        self.expire()
        existed = []
        for id in ids:
            entry = self.sealed.get(id) or self.reserved.get(id)
            existed.append(entry is not None and entry.state is State.SEALED)
            if entry is not None:
                self._remove(entry)
        return bits.pack(existed)

    def clear(self, prefix: bytes = b"") -> int:
        """Remove what begins with ``prefix`` and revoke the reservations of it. Returns how many objects were visible."""
        self.expire()
        found = [entry for entry in [*self.sealed.values(), *self.reserved.values()] if entry.id.startswith(prefix)]
        count = sum(entry.state is State.SEALED for entry in found)
        for entry in found:
            self._remove(entry)
        return count

    def expire(self) -> None:
        """End every claim whose deadline has passed."""
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            claim = self._leases.pop(id, None) or self._holds.pop(id, None)
            if claim is not None:
                self._close_claim(claim)

    def check(self) -> None:
        """Everything agrees with everything. Raises Inconsistent."""
        self.slabs.check()
        entries = self.slabs.entries()
        pins = Counter(id(e) for claim in [*self._holds.values(), *self._leases.values()] for e in claim.entries)
        by_state = {state: {e.id: e for e in entries if e.state is state} for state in State}
        require(all(e.pins == pins[id(e)] for e in entries), "pins do not add up to the open leases and reservations")
        require(len(pins.keys() - {id(e) for e in entries}) == 0, "a lease or reservation names an object that has no slot")
        require(by_state[State.SEALED] == self.sealed and by_state[State.RESERVED] == self.reserved, "the dicts do not match the slots")
        require(not self.sealed.keys() & self.reserved.keys(), "an object is both visible and reserved")
        require(all(e.pins for e in entries if e.state is not State.SEALED), "a slot is held by nobody")
        require(self.used_bytes == sum(e.length for e in entries), "used bytes are wrong")
        ordered = {size: list(lru.values()) for size, lru in self._lru.items()}
        require(sum(map(len, ordered.values())) == len(self.sealed), "LRU lists and visible objects differ")
        for size, line in ordered.items():
            require(all(e.run.slot_bytes == size and self.sealed.get(e.id) is e for e in line), "an LRU list holds a stranger")
            require(all(a.tick < b.tick for a, b in itertools.pairwise(line)), "an LRU list is out of order")
        waiting = {id for _, id in self._deadlines}
        require(waiting >= self._holds.keys() | self._leases.keys(), "a lease or reservation has no deadline")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _reserve_one(self, id: bytes, length: int, size: int, batch: _Batch) -> Grant:
        existing = self.sealed.get(id)
        if existing is not None:
            batch.order.append(existing)
            return Grant(Outcome.EXISTS, 0)
        if id in self.reserved:
            return Grant(Outcome.PENDING, 0)
        entry = self.slabs.allocate(id, length, size, self._tick)
        if entry is None and self._make_room(size, batch):
            entry = self.slabs.allocate(id, length, size, self._tick)
        if entry is None:
            self.counters.put_refused += 1
            return Grant(Outcome.REFUSED, 0)
        offset = entry.offset
        entry.generation = self.generations[offset // BLOCK] + 1
        self.generations[offset // BLOCK] = entry.generation
        self.reserved[id] = entry
        self.used_bytes += length
        batch.placed.append(entry)
        batch.order.append(entry)
        return Grant(Outcome.GRANTED, offset)

    def _make_room(self, size: int, batch: _Batch) -> bool:
        """Evict the oldest object of the class, or runs of other classes that are colder than it. Nothing that this batch used.

        Runs are compared once per batch and class: a scan of all slabs per object would cost more than the copy of a small page.
        """
        if size in batch.starved:
            return False
        own = next((e for e in self._lru.get(size, {}).values() if not e.pins), None)
        if own is not None and own.tick >= batch.start:
            own = None
        window = self.slabs.coldest(size, batch.start) if own is None or size not in batch.compared else None
        batch.compared.add(size)
        if window is not None and (own is None or window.mean_tick < own.tick):
            victims = [entry for run in window.runs for entry in run.entries if entry is not None]
        elif own is not None:
            victims = [own]
        else:
            batch.starved.add(size)
            return False
        for entry in victims:
            self._remove(entry)
        self.counters.evictions += len(victims)
        return True

    def _seal_one(self, entry: Entry, checksum: int | None) -> bool:
        if checksum is None or entry.state is not State.RESERVED:
            self._let_go(entry)
            return False
        del self.reserved[entry.id]
        self.slabs.unpin(entry)
        entry.state, entry.checksum = State.SEALED, checksum
        self.sealed[entry.id] = entry
        self._lru.setdefault(entry.run.slot_bytes, OrderedDict())[entry.id] = entry
        return True

    def _use(self, entries: Sequence[Entry]) -> None:
        """These visible objects are the most recently used, the first most of all."""
        for entry in reversed(entries):
            self._tick += 1
            self.slabs.touch(entry, self._tick)
            self._lru[entry.run.slot_bytes].move_to_end(entry.id)

    def _remove(self, entry: Entry) -> None:
        """Make it invisible; its slot is free now, or when the last lease or writer lets go."""
        if entry.state is State.SEALED:
            del self.sealed[entry.id]
            line = self._lru[entry.run.slot_bytes]
            del line[entry.id]
            if not line:
                del self._lru[entry.run.slot_bytes]
        elif entry.state is State.RESERVED:
            del self.reserved[entry.id]
        entry.state = State.DEAD
        if not entry.pins:
            self.used_bytes -= entry.length
            self.slabs.free(entry)

    def _let_go(self, entry: Entry) -> None:
        """One lease or writer less. What was never sealed, or was removed meanwhile, is freed with the last one."""
        self.slabs.unpin(entry)
        if entry.state is not State.SEALED and not entry.pins:
            self._remove(entry)

    def _open_claim(self, claims: dict[int, _Claim], seconds: float, owner: int, entries: list[Entry]) -> int:
        if not entries:
            return 0
        id, self._next = self._next, self._next + 1
        claims[id] = _Claim(self.clock() + seconds, owner, entries)
        if len(self._deadlines) > 1024 + 2 * (len(self._holds) + len(self._leases)):
            self._deadlines = [item for item in self._deadlines if item[1] in self._holds or item[1] in self._leases]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (claims[id].deadline, id))
        return id

    def _close_claim(self, claim: _Claim) -> None:
        for entry in claim.entries:
            self._let_go(entry)
