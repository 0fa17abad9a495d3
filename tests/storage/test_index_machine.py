"""The index against a naive twin: any order of calls, sizes and times, everything checked after every step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_ray.storage import bits
from hicache_ray.storage.descriptors import VOID, Outcome
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.slabs import BLOCK, SlabMap, slot_bytes
from tests.storage.conftest import FakeClock
from tests.storage.objects import TAG, key, name

SLABS = 12
SIZES = (BLOCK // 2, BLOCK, 3 * BLOCK)
NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)


@dataclass
class Place:
    """Bytes that belong to somebody until ``until``."""

    number: int
    offset: int
    length: int
    until: float = float("inf")
    revoked: bool = False


@dataclass
class Spare:
    """A slot that ``owner`` fills; ``began``: what was removed since it last began to; None: it has not."""

    number: int
    offset: int
    size: int
    until: float
    began: set[int] | None = None
    word: int = 0


@dataclass
class Twin:
    """What must be true, kept in the plainest way. It does not predict which objects are evicted; it judges those that were."""

    visible: dict[int, Place] = field(default_factory=dict)
    writers: dict[int, list[Place]] = field(default_factory=dict)  # reservation -> places, in order of the grants
    readers: dict[int, list[Place]] = field(default_factory=dict)  # lease -> places
    spares: dict[int, Spare] = field(default_factory=dict)  # by owner

    def expire(self, now: float) -> None:
        for claims in (self.writers, self.readers):
            for id in [id for id, places in claims.items() if places[0].until <= now]:
                del claims[id]
        self.spares = {owner: spare for owner, spare in self.spares.items() if spare.until > now}

    def pending(self) -> set[int]:
        return {place.number for places in self.writers.values() for place in places if not place.revoked}

    def leased(self) -> set[int]:
        return {place.number for places in self.readers.values() for place in places}

    def occupied(self) -> set[tuple[int, int]]:
        claimed = [place for claims in (self.writers, self.readers) for places in claims.values() for place in places]
        return {(place.offset, place.length) for place in [*self.visible.values(), *claimed]}

    def lent(self) -> set[tuple[int, int]]:
        return {(spare.offset, spare.size) for spare in self.spares.values()}


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.index = ArenaIndex(SlabMap(SLABS * BLOCK, BLOCK), [0] * SLABS, self.clock, Limits(10.0, 10.0))
        self.index.spares.share = 4
        self.twin = Twin()

    @rule(size=st.sampled_from((BLOCK, *SIZES)), owner=st.integers(0, 1), begins=st.booleans())
    def lend(self, size: int, owner: int, begins: bool) -> None:
        """The same again where it fits; else another one, or none. ``begins``: its writer does at once."""
        before, leased = dict(self.twin.visible), self.twin.leased()
        known = self.twin.spares.pop(owner, None)
        ready = self.index.spare(size, owner)
        evicted = {number for number in before if name(number) not in self.index}
        assert len(evicted) <= 1
        assert not evicted & leased
        for number in evicted:
            del self.twin.visible[number]
        if known is not None and known.size == size:
            assert ready is not None
            assert (ready.offset, ready.size, evicted) == (known.offset, size, set())
        if ready is not None:
            self.twin.spares[owner] = Spare(ready.id, ready.offset, size, self.clock.now + 10.0)
            if begins:
                self._begin(self.twin.spares[owner])

    @precondition(lambda self: self.twin.spares)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A writer looks at the generation and begins to copy."""
        self._begin(self.twin.spares[data.draw(st.sampled_from(sorted(self.twin.spares)))])

    @precondition(lambda self: any(spare.began is not None for spare in self.twin.spares.values()))
    @rule(data=st.data(), number=st.integers(0, 30), removed=st.booleans())
    def write(self, data: st.DataObject, number: int, removed: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(owner for owner, spare in self.twin.spares.items() if spare.began is not None)))
        spare = self.twin.spares[owner]
        assert spare.began is not None
        number = max(spare.began) if removed and spare.began else number
        assert self.index.write_one(spare.number, name(number), spare.size, 7, spare.word, 1 - owner) == VOID
        assert self.index.write_one(spare.number, name(number), spare.size + BLOCK, 7, spare.word, owner) == VOID
        outcome = self.index.write_one(spare.number, name(number), spare.size, 7, spare.word, owner)
        if number in spare.began:
            assert outcome == Outcome.REFUSED
        elif number in self.twin.visible or number in self.twin.pending():
            assert outcome == (Outcome.EXISTS if number in self.twin.visible else Outcome.PENDING)
        else:
            assert outcome == Outcome.GRANTED
            self.twin.visible[number] = Place(number, spare.offset, spare.size)
            del self.twin.spares[owner]

    @rule(numbers=NUMBERS, size=st.sampled_from(SIZES), owner=st.integers(0, 1), seconds=st.sampled_from([1.0, 5.0, 100.0]))
    def reserve(self, numbers: list[int], size: int, owner: int, seconds: float) -> None:
        before, pending, leased = dict(self.twin.visible), self.twin.pending(), self.twin.leased()
        reservation = self.index.reserve([name(n) for n in numbers], [size] * len(numbers), owner, seconds)
        places = []
        for number, grant in zip(numbers, reservation.grants, strict=True):
            assert (grant.outcome is Outcome.PENDING) == (number in pending)
            assert (grant.outcome is Outcome.EXISTS) == (number in before)
            if grant.outcome is Outcome.GRANTED:
                places.append(Place(number, grant.offset, size, self.clock.now + min(seconds, 10.0)))
        if places:
            self.twin.writers[reservation.id] = places
        kept = {number for number, grant in zip(numbers, reservation.grants, strict=True) if grant.outcome is Outcome.EXISTS}
        evicted = {number for number in before if name(number) not in self.index}
        assert not evicted & (kept | leased)
        for number in evicted:
            del self.twin.visible[number]

    @precondition(lambda self: self.twin.writers)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.twin.writers)))
        places = self.twin.writers.pop(id)
        checksums = data.draw(st.lists(st.none() | st.integers(0, 9), min_size=len(places), max_size=len(places)))
        owner = self.index.claims.holds[id].owner
        assert self.index.seal(id, checksums, 1 - owner) == 0
        good = [checksum is not None and not place.revoked for place, checksum in zip(places, checksums, strict=True)]
        assert self.index.seal(id, checksums, owner) == bits.pack(good)
        for place, sealed in zip(places, good, strict=True):
            if sealed:
                self.twin.visible[place.number] = Place(place.number, place.offset, place.length)

    @rule(numbers=NUMBERS, seconds=st.sampled_from([1.0, 5.0, 100.0]))
    def lease(self, numbers: list[int], seconds: float) -> None:
        lease = self.index.lease([name(n) for n in numbers], 0, seconds)
        wanted = [self.twin.visible.get(n) for n in numbers]
        assert [loan and (loan.offset, loan.length) for loan in lease.loans] == [p and (p.offset, p.length) for p in wanted]
        until = self.clock.now + min(seconds, 10.0)
        places = [Place(p.number, p.offset, p.length, until) for p in wanted if p is not None]
        if places:
            self.twin.readers[lease.id] = places

    @precondition(lambda self: self.twin.readers)
    @rule(data=st.data(), bad=st.integers(0, 3))
    def release(self, data: st.DataObject, bad: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.twin.readers)))
        places = self.twin.readers.pop(id)
        self.index.release(id, bad)
        for i in bits.each(bad):
            if i < len(places):
                self._remove(places[i].number, places[i].offset)

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        assert self.index.drop([name(n) for n in numbers]) == bits.pack(n in self.twin.visible for n in numbers)
        for number in numbers:
            self.twin.visible.pop(number, None)
        self._revoke(set(numbers))

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.twin.visible)
        self.twin.visible.clear()
        self._revoke(set(range(31)))

    @rule(owner=st.integers(0, 1))
    def disconnect(self, owner: int) -> None:
        for id in [id for id in self.twin.writers if self.index.claims.holds[id].owner == owner]:
            del self.twin.writers[id]
        self.twin.spares.pop(owner, None)
        self.index.disconnect(owner)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.index.expire()
        self.twin.expire(self.clock.now)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert set(self.index.ids()) == {name(n) for n in self.twin.visible}
        answer = self.index.lookup([key(n) for n in range(31)], TAG)
        assert set(bits.each(answer.hit)) == set(self.twin.visible)
        assert set(bits.each(answer.pending)) == self.twin.pending()
        places = sorted(self.twin.occupied() | self.twin.lent())
        for (offset, length), (following, _) in itertools.pairwise(places):
            assert offset + length <= following, "two owners share bytes"
        assert all(offset >= 0 and offset + length <= SLABS * BLOCK for offset, length in places)
        assert self.index.used_bytes == sum(length for _, length in self.twin.occupied())
        assert self.index.stats().spare_bytes == sum(size for _, size in self.twin.lent())
        assert sum(slot_bytes(length) for _, length in places) <= SLABS * BLOCK
        assert self.index.stats().leases == len(self.twin.readers)

    def _begin(self, spare: Spare) -> None:
        spare.began, spare.word = set(), self.index.words[spare.offset // BLOCK]

    def _remove(self, number: int, offset: int) -> None:
        if number in self.twin.visible and self.twin.visible[number].offset == offset:
            del self.twin.visible[number]

    def _revoke(self, numbers: set[int]) -> None:
        for places in self.twin.writers.values():
            for place in places:
                place.revoked = place.revoked or place.number in numbers
        for spare in self.twin.spares.values():
            if spare.began is not None:
                spare.began |= numbers


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=40)
