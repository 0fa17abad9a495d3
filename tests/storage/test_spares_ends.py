"""Spare slots and time: how long one is lent, what happens meanwhile, and puts that end at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.storage.descriptors import EXISTS, GRANTED, REFUSED, VOID, Ready
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.serving import Handler
from hicache_ray.storage.slabs import BLOCK, SlabMap
from hicache_ray.storage.wire import Kind, Reader, WireError
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, present, put
from tests.storage.watching import during_the_copy, kinds_asked

ME, OTHER = 1, 2
SUM = 77


@pytest.fixture
def config(config: ArenaConfig) -> ArenaConfig:
    """With room for one spare."""
    return replace(config, size_bytes=128 * PAGE)


def test_a_put_that_outlives_its_spare_does_not_outlive_a_removal(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    """It was being written when it was removed; nobody remembers that any more when its writer goes on."""
    clock = FakeClock()
    with ArenaService(config, clock) as service:
        client, other = (connect(service.address, clock=clock) for _ in range(2))
        for number in range(3):
            put(client, [number])

        def away_for_long() -> None:
            clock.advance(11.0)
            other.drop([name(7)], TIMEOUT_S)

        with during_the_copy(client, away_for_long):
            assert client.put([name(7)], [page(7)], 60.0) == 0
        assert present(client, [7]) == set()
        service.check()


def test_a_put_without_time_asks_nobody_and_keeps_its_spare(
    service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put(client, [number])
    with pytest.raises(StoreTimeout):
        client.put([name(3)], [page(3)], 0.0)
    asked = kinds_asked(service, monkeypatch)
    assert put(client, [3]) == 1
    assert asked == ["WRITE"]
    assert get(client, [3]) == {3}


@pytest.mark.parametrize(("kind", "nonsense"), [(Kind.WRITE, b""), (Kind.WRITE, b"\7"), (Kind.WRITE, b"\0spare"), (Kind.SEAL, b"\7")])
def test_an_answer_that_is_none(
    service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch, kind: Kind, nonsense: bytes
) -> None:
    put(client, [0])
    for number in range(1, 3 if kind == Kind.WRITE else 1):
        put(client, [number])
    answer = service.answer
    monkeypatch.setattr(service, "answer", lambda asked, *rest: nonsense if asked == kind else answer(asked, *rest))
    with pytest.raises(WireError):
        put(client, [3])


@pytest.mark.parametrize(("seconds", "stored"), [(8.9, 1), (9.1, 0)])
def test_a_copy_ends_long_before_its_slot_is_anybodys(
    config: ArenaConfig, connect: Callable[..., ArenaClient], seconds: float, stored: int
) -> None:
    """A writer that is held up within a slice looks at the clock afterwards only."""
    clock = FakeClock()
    with ArenaService(config, clock) as service:
        client = connect(service.address, clock=clock)
        for number in range(3):
            put(client, [number])
        with during_the_copy(client, lambda: clock.advance(seconds)):
            assert client.put([name(3)], [page(3)], 60.0) == stored
        assert service.stats().spare_bytes == PAGE


def test_the_time_of_a_spare_counts_from_the_question(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    """The answer may have been long under way."""
    clock = FakeClock()
    with ArenaService(config, clock) as service:
        client, answer, late, asked = connect(service.address, clock=clock), service.answer, [5.0], []

        def slow(kind: int, reader: Reader, handler: Handler) -> bytes:
            body = answer(kind, reader, handler)
            asked.append(Kind(kind).name)
            clock.advance(late.pop() if kind == Kind.WRITE and late else 0.0)
            return body

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "answer", slow)
            for number in range(3):
                assert client.put([name(number)], [page(number)], 60.0) == 1
            clock.advance(4.5)
            assert put(client, [3]) == 1
        assert asked == ["RESERVE", "SEAL", "RESERVE", "SEAL", "WRITE", "RESERVE", "SEAL"]


def test_another_size_in_between(service: ArenaService, client: ArenaClient) -> None:
    for number in range(12):
        size = (PAGE, PAGE // 2, PAGE, PAGE)[number % 4]
        assert put(client, [number], size) == 1
        assert get(client, [number], size) == {number}
        service.check()


def test_what_goes_for_a_spare_is_told_at_once(service: ArenaService, client: ArenaClient) -> None:
    lost: list[bytes] = []
    service.node.watch(lost.extend, lambda prefix: None)
    for number in range(127):
        assert put(client, [number]) == 1
    assert (lost, service.stats().evictions) == ([], 0)
    for number in range(127, 130):
        assert put(client, [number]) == 1
        assert lost == [name(n) for n in range(number - 126)]
    assert service.stats().evictions == 3


# -- the index ---------------------------------------------------------------------------------------------------------------------


def _index(clock: FakeClock, slab_blocks: int = 1) -> ArenaIndex:
    slabs = SlabMap(256 * BLOCK, slab_blocks * BLOCK)
    return ArenaIndex(slabs, [0] * 256, clock, Limits(10.0, 30.0))


def _lent(index: ArenaIndex, owner: int = ME) -> Ready:
    spare = index.spare(BLOCK, owner)
    assert spare is not None
    index.check()
    return spare


def _write(index: ArenaIndex, spare: Ready, number: int, word: int) -> int:
    outcome = index.write_one(spare.id, name(number), BLOCK, SUM, word, ME)
    index.check()
    return outcome


def _place(index: ArenaIndex, number: int) -> None:
    assert index.seal_one(index.reserve_one(name(number), BLOCK, OTHER, 5.0).id, SUM, OTHER) == 1


def test_who_asks_again_has_it_for_longer(clock: FakeClock) -> None:
    index = _index(clock)
    _lent(index)
    clock.advance(9.0)
    spare = _lent(index)
    clock.advance(9.0)
    assert _write(index, spare, 1, index.words[spare.offset // BLOCK]) == GRANTED


def test_those_whose_time_is_over_make_room_for_others(clock: FakeClock) -> None:
    index = _index(clock)
    _lent(index, 1)
    _lent(index, 2)
    assert index.spare(BLOCK, 3) is None
    clock.advance(10.0)
    assert _lent(index, 3).size == BLOCK
    assert index.stats().spare_bytes == BLOCK


def test_the_slot_of_an_object_that_went_has_another_generation_once_it_is_lent(clock: FakeClock) -> None:
    """Not only once it is another object's: it is written to before."""
    index = _index(clock, slab_blocks=4)
    _place(index, 1)
    _place(index, 2)  # the run stays
    loan = index.lease_one(name(1), OTHER, 1.0).loan
    assert loan is not None
    clock.advance(2.0)
    index.drop([name(1)])
    spare = _lent(index)
    assert spare.offset == loan.offset
    assert index.words[spare.offset // BLOCK] == loan.generation + 1


def test_only_what_was_removed_since_the_copy_began_counts(clock: FakeClock) -> None:
    index = _index(clock)
    spare = _lent(index)
    words = [index.words[spare.offset // BLOCK]]
    for number in (1, 2, 3):
        index.drop([name(number)])
        words.append(index.words[spare.offset // BLOCK])
    assert [_write(index, spare, 3, word) for word in words[:3]] == [REFUSED, REFUSED, REFUSED]
    assert [_write(index, spare, 2, word) for word in words] == [REFUSED, REFUSED, GRANTED, VOID]


def test_what_is_found_there_was_used(clock: FakeClock) -> None:
    index = _index(clock)
    for number in range(255):
        _place(index, number)
    spare = _lent(index)
    assert _write(index, spare, 0, index.words[spare.offset // BLOCK]) == EXISTS
    _place(index, 300)
    assert set(range(255)) - {n for n in range(255) if name(n) in index} == {1}


def test_none_is_forgotten_among_many_that_are_over(clock: FakeClock) -> None:
    """Closed claims leave their deadlines behind, which are cleared away now and then."""
    index = _index(clock)
    _lent(index, OTHER)
    for _ in range(1500):
        index.spare(BLOCK, ME)
    assert len(index.claims) < 1100
    index.check()
    clock.advance(10.0)
    assert index.stats().spare_bytes == 0


def test_one_that_is_never_written_to_does_not_look_cold(clock: FakeClock) -> None:
    """Where its run seemed to be older than all objects, every put would compare runs, and none would be lent a slot."""
    index = _index(clock)
    _lent(index, OTHER)
    for number in range(300):
        _place(index, number)
        index.spare(BLOCK, OTHER)
    assert index.stats().evictions == 45
    assert _lent(index).size == BLOCK
    assert index.stats().evictions == 46


def test_a_write_for_which_there_is_no_memory_changes_nothing(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    index = _index(clock)
    spare = _lent(index)
    word = index.words[spare.offset // BLOCK]

    def scarce(id: bytes, value: int) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(index.table, "add_one", scarce)
        with pytest.raises(MemoryError):
            index.write_one(spare.id, name(1), BLOCK, SUM, word, ME)
    index.check()
    assert index.stats().spare_bytes == BLOCK
    assert _write(index, spare, 1, word) == GRANTED
