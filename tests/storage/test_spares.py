"""Spare slots: bytes that are written before anybody knows of which object they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, NodeStore
from hicache_ray.storage.descriptors import EXISTS, GRANTED, PENDING, REFUSED, VOID, Ready
from hicache_ray.storage.ids import unpacked
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.slabs import BLOCK, SlabMap
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, present, put
from tests.storage.watching import during_the_copy, kinds_asked

ME, OTHER = 1, 2
SLABS = 256  # so that spares may take two blocks
SUM = 77


def _index(clock: FakeClock, limits: Limits | None = None) -> ArenaIndex:
    return ArenaIndex(SlabMap(SLABS * BLOCK, BLOCK), [0] * SLABS, clock, limits or Limits(10.0, 30.0))


def _word(index: ArenaIndex, spare: Ready) -> int:
    return index.words[spare.offset // BLOCK]


def _lent(index: ArenaIndex, owner: int = ME, size: int = BLOCK) -> Ready:
    spare = index.spare(size, owner)
    assert spare is not None
    index.check()
    return spare


def _write(index: ArenaIndex, spare: Ready, number: int, word: int | None = None, owner: int = ME, size: int = BLOCK) -> int:
    outcome = index.write_one(spare.id, name(number), size, SUM, _word(index, spare) if word is None else word, owner)
    index.check()
    return outcome


def _place(index: ArenaIndex, number: int, size: int = BLOCK) -> None:
    held = index.reserve_one(name(number), size, OTHER, 5.0)
    assert held.outcome == GRANTED
    assert index.seal_one(held.id, SUM, OTHER) == 1


def test_what_is_written_to_a_spare_is_an_object_like_any_other(clock: FakeClock) -> None:
    index = _index(clock)
    spare = _lent(index)
    assert (spare.seconds, spare.size) == (10.0, BLOCK)
    stats = index.stats()
    assert (stats.spare_bytes, stats.used_bytes, stats.objects, stats.pending_bytes) == (BLOCK, 0, 0, 0)
    assert _write(index, spare, 1) == GRANTED
    stats = index.stats()
    assert (stats.spare_bytes, stats.used_bytes, stats.objects, stats.puts) == (0, BLOCK, 1, 1)
    loan = index.lease_one(name(1), OTHER, 5.0).loan
    assert loan is not None
    assert (loan.offset, loan.length, loan.checksum, loan.generation) == (spare.offset, BLOCK, SUM, _word(index, spare))
    assert _write(index, spare, 2) == VOID  # it is an object's now
    assert index.lookup([key(1), key(2)], TAG).hit == 1


def test_who_reads_what_was_in_the_slot_sees_that_it_is_given_away(clock: FakeClock) -> None:
    index = _index(clock, Limits(lease_s=1.0))
    _place(index, 1)
    loan = index.lease_one(name(1), OTHER, 1.0).loan
    assert loan is not None
    clock.advance(2.0)
    index.drop([name(1)])
    spare = _lent(index)
    assert spare.offset == loan.offset
    assert _word(index, spare) != loan.generation


def test_it_belongs_to_one_connection_and_one_size(clock: FakeClock) -> None:
    index = _index(clock)
    spare = _lent(index)
    assert _write(index, spare, 1, owner=OTHER) == VOID
    assert _write(index, spare, 1, size=2 * BLOCK) == VOID
    assert _lent(index).offset == spare.offset  # not used: the same once more, under another number
    assert _write(index, spare, 1) == VOID
    larger = _lent(index, size=2 * BLOCK)
    assert index.stats().spare_bytes == 2 * BLOCK
    assert _write(index, larger, 1, size=2 * BLOCK - 1) == GRANTED
    assert index.stats().used_bytes == 2 * BLOCK - 1


def test_what_is_there_already_stays_and_so_does_the_spare(clock: FakeClock) -> None:
    index = _index(clock)
    _place(index, 1)
    assert index.reserve_one(name(2), BLOCK, OTHER, 5.0).outcome == GRANTED
    spare = _lent(index)
    assert [_write(index, spare, number) for number in (1, 2, 3, 4)] == [EXISTS, PENDING, GRANTED, VOID]
    assert set(index.ids()) == {name(1), name(3)}


@pytest.mark.parametrize("removal", ["drop", "clear", "prefix", "many"])
def test_what_is_removed_while_it_is_written_does_not_come_back(clock: FakeClock, removal: str) -> None:
    """A reservation of it would be revoked, and a put that begins afterwards is of course let in."""
    index = _index(clock)
    spare = _lent(index)
    word = _word(index, spare)
    {
        "drop": lambda: index.drop([name(1)]),
        "clear": lambda: index.clear(),
        "prefix": lambda: index.clear(name(1)[:8]),
        "many": lambda: index.drop([name(1), *map(name, range(100, 200))]),
    }[removal]()
    assert _write(index, spare, 1, word) == REFUSED
    assert (index.objects, index.stats().spare_bytes) == (0, BLOCK)
    assert _write(index, spare, 1) == GRANTED


def test_a_removal_of_something_else_is_nobodys_business(clock: FakeClock) -> None:
    index = _index(clock)
    spare = _lent(index)
    word = _word(index, spare)
    index.drop([name(2)])
    index.clear(name(3))
    assert _word(index, spare) == word + 2
    assert _write(index, spare, 1, word) == GRANTED


@pytest.mark.parametrize("count", [64, 65])
def test_who_began_before_more_removals_than_are_remembered_is_refused(clock: FakeClock, count: int) -> None:
    index = _index(clock)
    spare = _lent(index)
    word = _word(index, spare)
    for number in range(count):
        index.drop([name(2 + number)])
    assert _write(index, spare, 1, word) == (GRANTED if count == 64 else REFUSED)


@pytest.mark.parametrize("word", [0, 1 << 63])
def test_a_word_that_never_was(clock: FakeClock, word: int) -> None:
    index = _index(clock)
    spare = _lent(index)
    assert _write(index, spare, 1, word) == REFUSED
    assert index.objects == 0


def test_its_end(clock: FakeClock) -> None:
    """After its time, or with its connection, the slot is anybody's."""
    index = _index(clock)
    spare = _lent(index)
    clock.advance(10.0)
    assert _write(index, spare, 1) == VOID
    assert (index.stats().spare_bytes, index.slabs.free_slabs) == (0, SLABS)
    spare = _lent(index)
    index.disconnect(OTHER)
    assert index.stats().spare_bytes == BLOCK
    index.disconnect(ME)
    assert (index.stats().spare_bytes, index.slabs.free_slabs) == (0, SLABS)
    assert _write(index, spare, 1) == VOID


def test_they_take_little_and_stand_back_where_they_would_be_in_the_way(clock: FakeClock) -> None:
    index = _index(clock)
    assert index.spare(BLOCK // 2, ME) is None  # several of those share a generation word
    assert [index.spare(BLOCK, owner) is not None for owner in (1, 2, 3)] == [True, True, False]
    index.disconnect(1)
    assert index.spare(BLOCK, 3) is not None
    assert index.spare(BLOCK, 1) is None
    capped = _index(clock, Limits(tenant_bytes={"t": BLOCK}))
    assert capped.spare(BLOCK, ME) is None


def test_a_full_arena_gives_its_oldest_object_for_one(clock: FakeClock) -> None:
    """As it would for the put that comes next."""
    index = _index(clock)
    index.lost = []
    for number in range(SLABS):
        _place(index, number)
    spare = _lent(index)
    assert [unpacked(part) for part in index.lost] == [[name(0)]]
    assert index.stats().evictions == 1
    lent = index.lease([name(n) for n in range(1, SLABS)], OTHER, 5.0)
    assert _write(index, spare, 500) == GRANTED
    assert index.spare(BLOCK, ME) is None  # the only object that nobody reads is younger than all others
    assert index.lookup([key(500)], TAG).hit == 1
    index.release(lent.id, 0)
    assert _lent(index).offset != spare.offset


# -- over the socket ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(config: ArenaConfig) -> ArenaConfig:
    """With room for one spare."""
    return replace(config, size_bytes=128 * PAGE)


def _spare_bytes(client: ArenaClient) -> int:
    return client.stats(TIMEOUT_S).spare_bytes


def test_the_third_put_of_one_takes_one_exchange(service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = kinds_asked(service, monkeypatch)
    for number in range(4):
        assert put(client, [number]) == 1
        service.check()
    assert asked == ["RESERVE", "SEAL", "RESERVE", "SEAL", "WRITE", "WRITE"]
    assert _spare_bytes(client) == PAGE
    assert get(client, [0, 1, 2, 3]) == {0, 1, 2, 3}  # compared with their sources
    stats = client.stats(TIMEOUT_S)
    assert (stats.puts, stats.used_bytes, stats.objects, stats.pending_bytes) == (4, 4 * PAGE, 4, 0)
    del asked[:]
    assert put(client, [2]) == 1  # it is there already
    assert put(client, [5], PAGE - 1) == 1  # of the same class
    assert put(client, [6], PAGE // 2) == 1  # of another
    assert asked == ["WRITE", "WRITE", "RESERVE", "SEAL"]
    assert get(client, [5], PAGE - 1) == {5}
    assert client.stats(TIMEOUT_S).puts == 6


@pytest.mark.parametrize("removal", ["drop", "clear"])
def test_a_put_that_began_before_a_removal_does_not_outlive_it(
    service: ArenaService, client: ArenaClient, connect: Callable[..., ArenaClient], removal: str
) -> None:
    other = connect(service.address)
    for number in range(3):
        put(client, [number])
    remove = {"drop": lambda: other.drop([name(7)], TIMEOUT_S), "clear": lambda: other.clear(TIMEOUT_S, name(7)[:4])}[removal]
    with during_the_copy(client, remove):
        assert put(client, [7]) == 0
        assert put(client, [8]) == (1 if removal == "drop" else 0)
    assert present(client, [7]) == set()
    assert put(client, [7]) == 1
    assert get(client, [7]) == {7}


def test_a_spare_whose_time_is_over_is_left_alone(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    clock = FakeClock()
    with ArenaService(replace(config, hold_s=4.0), clock) as service:
        client = connect(service.address, clock=clock)
        for number in range(2):
            put(client, [number])
        assert _spare_bytes(client) == PAGE
        late = iter([5.0])
        with during_the_copy(client, lambda: clock.advance(next(late, 0.0))):  # it ends in the middle of it
            assert put(client, [2]) == 0
            assert put(client, [2]) == 1
        clock.advance(3.9)
        for number in (3, 4, 5):
            assert put(client, [number]) == 1
        assert get(client, [2, 3, 4, 5]) == {2, 3, 4, 5}
        clock.advance(4.0)
        assert _spare_bytes(client) == 0
        service.check()


def test_a_put_that_is_cut_off_gives_its_spare_back(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    """At once, not at its deadline: the clock of the service stands still."""
    with ArenaService(config, FakeClock()) as service:
        client = connect(service.address)
        for number in range(3):
            put(client, [number])

        def break_off() -> None:
            raise KeyboardInterrupt

        with during_the_copy(client, break_off), pytest.raises(KeyboardInterrupt):
            put(client, [3])
        until = time.monotonic() + TIMEOUT_S
        while service.stats().spare_bytes and time.monotonic() < until:
            client.ping(TIMEOUT_S)  # until the service has seen that its connection is closed
        assert service.stats().spare_bytes == 0
        assert put(client, [3]) == 1
        assert get(client, [3]) == {3}


def test_every_connection_has_its_own(service: ArenaService, connect: Callable[..., ArenaClient]) -> None:
    """Two put at once, turn by turn, what the other put too; the room for spares is enough for one."""
    clients = [connect(service.address) for _ in range(2)]
    for number in range(20):
        assert [put(client, [number]) for client in clients] == [1, 1]
        assert service.stats().spare_bytes <= PAGE
        service.check()
    assert get(clients[0], list(range(20))) == set(range(20))
    assert service.stats().puts == 20


def test_the_disk_behind_hears_of_it(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    heard: list[tuple[list[bytes], list[int]]] = []

    class Behind:
        def on_sealed(self, ids: Sequence[bytes], lengths: Sequence[int]) -> None:
            heard.append((list(ids), list(lengths)))

        def on_removed(self, ids: Sequence[bytes], timeout_s: float) -> None: ...

        def on_cleared(self, prefix: bytes, timeout_s: float) -> None: ...

    with ArenaService(config, make_node=lambda arena: NodeStore(arena, behind=Behind())) as service:
        client = connect(service.address)
        for number in range(4):
            put(client, [number])
        put(client, [3])
        assert heard == [([name(number)], [PAGE]) for number in range(4)]
