"""Slots that are kept ready, one for a connection, for the next object that is put alone over it.

A put reserves, copies and seals. For one page each of the two exchanges takes about as long as the copy; who has a spare slot copies first
and says what it was in the only exchange. Until then the bytes are nobody's object: they are not found, not leased and not counted as used.
A spare ends at its deadline, with its connection, or when one of another size is asked for.

What is removed must not come back by who was writing it at the time. A reservation of it would be revoked; of a spare nobody knows yet what
it will be. So every removal raises the generation word of all spares and is remembered with each; the writer reads the word before it
copies, and names it.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from hicache_ray.storage.claims import Claims, Removal, Spare
from hicache_ray.storage.descriptors import EXISTS, GRANTED, PENDING, REFUSED, VOID, Ready
from hicache_ray.storage.holdings import SEALED, Holdings
from hicache_ray.storage.ids import Ids
from hicache_ray.storage.singles import evict_one, show_one, start_one, use_one
from hicache_ray.storage.slabs import BLOCK, SHARES_WORD, require, slot_bytes

SHARE = 128  # all spares together take at most this part of the arena
KEEP_S = 10.0
_REMOVALS = 64  # remembered with a spare; whoever began to write before those is refused
_FEW = 64  # ids of a removal that are remembered one by one


class Spares:
    """Of an index, which expires the claims before it calls, and names itself as ``held`` (kept here, it would keep its memory mapped: who
    knows each other is freed late). ``keep_s``: how long one is lent at most."""

    def __init__(self, claims: Claims, keep_s: float) -> None:
        self._claims, self._keep_s = claims, min(keep_s, KEEP_S)
        self.share = SHARE
        self._by_owner: dict[int, int] = {}
        self.bytes = 0  # of their slots

    @property
    def open(self) -> list[Spare]:
        return list(self._claims.spares.values())

    def lend(self, held: Holdings, length: int, owner: int) -> Ready | None:
        """A slot for an object of ``length`` bytes, for the next put of connection ``owner``; its last one, where that fits and is unused.

        None where tenants have caps (nobody knows whose the object will be), where several slots share a generation word, where spares
        take their share of the arena, or where room would have to be taken from objects of other sizes.
        """
        size, claims = slot_bytes(length), self._claims
        number = self._by_owner.pop(owner, 0)
        spare = claims.spares.pop(number, None)
        if spare is not None and spare.size != size:
            self.give_back(held, spare)
            spare = None
        if spare is None:
            spare = self._taken(held, size, owner, length)
            if spare is None:
                return None
        else:
            held.tick += 1
            held.slabs.touch_one(spare.offset, spare.tick, held.tick)  # else its run would seem to be the coldest one day
            spare = spare._replace(deadline=claims.clock() + self._keep_s, tick=held.tick)
        number = self._by_owner[owner] = claims.open_one(claims.spares, spare)
        return Ready(number, self._keep_s, spare.offset, size)

    def write(self, held: Holdings, number: int, id: bytes, length: int, checksum: int, word: int, owner: int) -> int:
        """The bytes in a spare are object ``id``, visible from now on: GRANTED; otherwise as a reservation would have answered, and the
        spare is still lent. REFUSED: removed meanwhile. VOID: there is no such spare any more. ``word``: of its slot, from before the
        copy."""
        spare = self._claims.spares.get(number)
        if spare is None or spare.owner != owner or spare.size != slot_bytes(length) or held.tenants.caps:
            return VOID
        if self._removed(held, spare, id, word):
            return REFUSED
        value = held.table.hash_one(id)
        row = held.table.find_one(id, value)
        held.tick += 1
        if row >= 0:
            if held.table.cells["state"][row] != SEALED:
                return PENDING
            use_one(held, row)
            return EXISTS
        row = start_one(held, id, value, length, spare.offset, spare.size)  # first: the table may find no memory to grow
        del self._claims.spares[number], self._by_owner[owner]
        self.bytes -= spare.size
        held.slabs.touch_one(spare.offset, spare.tick, held.tick)
        show_one(held, row, checksum)
        use_one(held, row)
        return GRANTED

    def give_back(self, held: Holdings, spare: Spare) -> None:
        """Of one that is open no more: its slot is free."""
        self._by_owner.pop(spare.owner, None)
        self.bytes -= spare.size
        held.slabs.pin_one(spare.offset, -1)
        held.slabs.give_one(spare.offset, spare.tick)

    def removed(self, held: Holdings, what: bytes | Ids) -> None:
        """What begins with this prefix, or has one of these ids, is removed: what is being written to a spare must not become it."""
        if not self._claims.spares:
            return
        removal: Removal = what if isinstance(what, bytes) else frozenset(map(bytes, what)) if len(what) <= _FEW else b""
        for spare in self._claims.spares.values():
            spare.removals.append(removal)
            held.words[spare.offset // BLOCK] += 1

    def check(self) -> None:
        """Raises Inconsistent."""
        spares = self._claims.spares
        require(self.bytes == sum(spare.size for spare in spares.values()), "bytes of the spares are wrong")
        require(self._by_owner == {spare.owner: number for number, spare in spares.items()}, "a spare is not its owner's")

    def _taken(self, held: Holdings, size: int, owner: int, length: int) -> Spare | None:
        slabs = held.slabs
        if held.tenants.caps or length <= SHARES_WORD or self.bytes + size > slabs.capacity_bytes // self.share:
            return None
        offset = slabs.take_one(size, held.tick + 1)
        if offset < 0:
            if not evict_one(held, size):
                return None
            offset = slabs.take_one(size, held.tick + 1)
        held.tick += 1
        self.bytes += size
        held.words[offset // BLOCK] += 1  # who still reads what was here must see that it is not his any more
        return Spare(self._claims.clock() + self._keep_s, owner, offset, size, held.tick, deque(maxlen=_REMOVALS))

    def _removed(self, held: Holdings, spare: Spare, id: bytes, word: int) -> bool:
        """Was ``id`` removed after the word of the slot was ``word``?"""
        since = held.words[spare.offset // BLOCK] - word
        if not 0 <= since <= len(spare.removals):
            return True  # too long ago, or never
        latest = islice(reversed(spare.removals), since)
        return any(id.startswith(what) if isinstance(what, bytes) else id in what for what in latest)
