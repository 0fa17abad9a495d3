"""The home index: entries, fences, bounds, memory."""

from __future__ import annotations

import random

import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage.directory import HOLDERS, Directory, HomeIndex
from hicache_ray.storage.fences import IDS
from hicache_ray.store import SPACE_BYTES
from tests.storage.conftest import FakeClock
from tests.storage.objects import TAG, TIMEOUT_S, key, name

A, B, C = "a:1", "b:1", "b:2"
KEYS = [key(n) for n in range(20)]


def where(index: HomeIndex, tag: bytes = TAG) -> dict[str, int]:
    index.check()
    return dict(index.where(KEYS, [tag], TIMEOUT_S)[tag])


def names(*numbers: int) -> list[bytes]:
    return [name(n) for n in numbers]


def test_it_is_a_directory() -> None:
    assert isinstance(HomeIndex(), Directory)


def test_who_holds_what() -> None:
    index = HomeIndex()
    assert index.announce(A, names(0, 2, 3), TIMEOUT_S) == 0b111
    assert index.announce(B, names(3, 3, 4), TIMEOUT_S) == 0b111
    index.announce(A, names(0), TIMEOUT_S)
    assert where(index) == {A: 0b01101, B: 0b11000}
    assert index.holders(names(3, 9, 0), TIMEOUT_S) == [(A, B), (), (A,)]
    other = b"u" * len(TAG)
    index.announce(A, [key(1) + other], TIMEOUT_S)
    assert index.where(KEYS, [TAG, other, b"v" * len(TAG)], TIMEOUT_S) == {TAG: {A: 0b01101, B: 0b11000}, other: {A: 0b10}, b"v" * 16: {}}
    assert index.stats().entries == 5


def test_empty_batches() -> None:
    index = HomeIndex()
    assert index.announce(A, [], TIMEOUT_S) == 0
    index.withdraw(A, [], TIMEOUT_S)
    assert index.holders([], TIMEOUT_S) == []
    assert index.where([], [TAG], TIMEOUT_S) == {TAG: {}}
    assert index.where(KEYS, [], TIMEOUT_S) == {}
    with pytest.raises(StoreError, match="id has 64 bytes, not 3"):
        index.announce(A, [b"abc"], TIMEOUT_S)
    with pytest.raises(StoreError, match="key has 48 bytes, not 3"):
        index.where([b"abc"], [TAG], TIMEOUT_S)


def test_withdrawn_and_gone() -> None:
    index = HomeIndex()
    for holder in (A, B, C):
        index.announce(holder, names(1, 2, 3), TIMEOUT_S)
    index.withdraw(A, names(1, 1, 7), TIMEOUT_S)
    index.withdraw("nobody:1", names(2), TIMEOUT_S)
    assert where(index) == {A: 0b1100, B: 0b1110, C: 0b1110}
    assert index.leave(B) == 3
    assert index.leave(B) == 0
    assert where(index) == {A: 0b1100, C: 0b1110}
    assert index.leave(C) == 3
    assert where(index) == {A: 0b1100}
    assert index.stats().entries == 2
    index.announce("d:1", names(9), TIMEOUT_S)  # takes a number that was used before
    assert where(index) == {A: 0b1100, "d:1": 1 << 9}


def test_the_first_holders_are_known() -> None:
    index = HomeIndex()
    for n in range(HOLDERS + 2):
        index.announce(f"n{n}:1", names(1), TIMEOUT_S)
    assert index.holders(names(1), TIMEOUT_S) == [tuple(f"n{n}:1" for n in range(HOLDERS))]
    index.withdraw("n1:1", names(1), TIMEOUT_S)
    index.announce("n5:1", names(1), TIMEOUT_S)
    assert set(index.holders(names(1), TIMEOUT_S)[0]) == {"n0:1", "n2:1", "n3:1", "n5:1"}
    index.check()


def test_what_was_forgotten_does_not_come_back_by_a_late_announcement() -> None:
    mine, other = (bytes([n]) * SPACE_BYTES for n in (1, 2))
    ids = [space + name(n)[SPACE_BYTES:] for n in range(3) for space in (mine, other)]
    index = HomeIndex()
    since = index.epoch(TIMEOUT_S)
    assert index.announce(A, ids, TIMEOUT_S, since) == 0b111111
    assert index.forget(mine, TIMEOUT_S) == 3
    assert index.announce(B, ids, TIMEOUT_S, since) == 0b101010
    assert list(index.holders(ids, TIMEOUT_S)) == [(), (A, B)] * 3
    assert index.announce(B, ids, TIMEOUT_S, index.epoch(TIMEOUT_S)) == 0b111111
    assert index.forget(b"", TIMEOUT_S) == 6
    assert index.announce(A, ids, TIMEOUT_S, since + 1) == 0
    assert index.announce(A, ids, TIMEOUT_S) == 0b111111  # from one that knows no epoch
    assert index.stats().refused == 9
    index.check()


def test_fences_are_bounded_and_refuse_rather_too_much() -> None:
    index = HomeIndex()
    for n in range(1000):
        index.forget(n.to_bytes(SPACE_BYTES, "big"), TIMEOUT_S)
    assert index.announce(A, names(1), TIMEOUT_S, 700) == 0  # which prefixes were forgotten since then is not known any more
    free = [b"\xff" * SPACE_BYTES + name(1)[SPACE_BYTES:]]
    assert index.announce(A, free, TIMEOUT_S, 700) == 0
    assert index.announce(A, free, TIMEOUT_S, 800) == 1
    assert index.announce(A, names(1), TIMEOUT_S, 999) == 1


def test_the_bound_is_a_bound_and_the_oldest_go() -> None:
    index = HomeIndex(max_entries=100)
    for n in range(0, 300, 10):
        index.announce(A, names(*range(n, n + 10)), TIMEOUT_S)
        index.announce(A, names(0), TIMEOUT_S)  # said again and again
        index.check()
    held = {n for n in range(300) if index.holders(names(n), TIMEOUT_S)[0]}
    assert held == {0, *range(300 - len(held) + 1, 300)}
    assert 90 <= len(held) <= 100
    assert index.stats().dropped == 300 - len(held)
    index.announce(A, names(*range(1000, 1500)), TIMEOUT_S)  # more than fit in one call
    assert index.stats().entries <= 100
    index.check()


def test_what_was_forgotten_of_late_is_known(clock: FakeClock) -> None:
    index = HomeIndex(clock=clock)
    index.forget(b"a", TIMEOUT_S)
    clock.advance(10.0)
    index.forget(b"b", TIMEOUT_S)
    clock.advance(5.0)
    assert index.forgotten(5.0, TIMEOUT_S) == [(b"b", 5.0)]
    assert index.forgotten(15.0, TIMEOUT_S) == [(b"a", 15.0), (b"b", 5.0)]
    index.forget(b"a", TIMEOUT_S)
    assert index.forgotten(3600.0, TIMEOUT_S) == [(b"b", 5.0), (b"a", 0.0)]
    for n in range(255):
        index.forget(b"%d" % n, TIMEOUT_S)
    assert index.forgotten(5.0, TIMEOUT_S)[:2] == [(b"", 5.0), (b"a", 0.0)]  # which one it was is not known any more: so it was all
    assert index.forgotten(4.0, TIMEOUT_S)[0] == (b"a", 0.0)


def test_dropped_ids_are_forgotten_fenced_and_known(clock: FakeClock) -> None:
    index = HomeIndex(clock=clock)
    since = index.epoch(TIMEOUT_S)
    for holder in (A, B):
        index.announce(holder, names(1, 2, 3), TIMEOUT_S, since)
    assert index.forget_ids(names(1, 3, 3, 9), TIMEOUT_S) == 2
    assert where(index) == {A: 0b100, B: 0b100}
    assert index.announce(A, names(1, 2, 3, 4), TIMEOUT_S, since) == 0b1010
    assert index.announce(A, names(1), TIMEOUT_S, index.epoch(TIMEOUT_S)) == 1
    clock.advance(3.0)
    index.forget_ids(names(9), TIMEOUT_S)
    assert index.forgotten(3.0, TIMEOUT_S) == [(name(1), 3.0), (name(3), 3.0), (name(9), 0.0)]
    assert index.forgotten(2.0, TIMEOUT_S) == [(name(9), 0.0)]
    assert index.knows([*names(1, 2, 9), name(1)[:8], b""], 3.0) == 0b101
    assert index.knows(names(1, 9), 2.0) == 0b10
    index.forget(name(2)[:40], TIMEOUT_S)
    assert index.knows([*names(1, 2), name(2)[:40], name(2)[:39], b""], 2.0) == 0b111
    index.check()


def test_more_dropped_ids_than_are_kept_count_for_everything(clock: FakeClock) -> None:
    """As more cleared prefixes do."""
    index = HomeIndex(clock=clock)
    index.forget_ids(names(0), TIMEOUT_S)
    since = index.epoch(TIMEOUT_S)
    clock.advance(5.0)
    index.forget_ids(names(*range(1, IDS)), TIMEOUT_S)
    assert index.forgotten(5.0, TIMEOUT_S)[0] == (name(0), 5.0)
    clock.advance(2.0)
    index.forget_ids(names(IDS), TIMEOUT_S)
    assert index.forgotten(7.0, TIMEOUT_S)[:2] == [(b"", 7.0), (name(1), 2.0)]
    assert len(index.forgotten(6.0, TIMEOUT_S)) == IDS
    assert index.knows([b""], 7.0) == 1
    assert index.knows([b"", name(0), name(1)], 6.0) == 0b100
    assert index.announce(A, [b"\xff" * 8 + name(1)[8:]], TIMEOUT_S, since - 1) == 0  # from before the one that is not known any more
    assert index.announce(A, [b"\xff" * 8 + name(1)[8:]], TIMEOUT_S, since) == 1


def test_a_closed_index_says_so() -> None:
    index = HomeIndex()
    index.close()
    index.close()
    with pytest.raises(StoreClosed):
        index.epoch(TIMEOUT_S)
    with pytest.raises(ConfigError, match="raise max_entries"):
        HomeIndex(0)


def test_an_entry_takes_less_than_250_bytes() -> None:
    index = HomeIndex()
    for n in range(0, 30_000, 1000):
        index.announce(A, names(*range(n, n + 1000)), TIMEOUT_S)
        index.announce(B, names(*range(n, n + 500)), TIMEOUT_S)
    stats = index.stats()
    assert stats.entries == 30_000
    assert stats.bytes / stats.entries < 250


@pytest.mark.parametrize("seed", range(5))
def test_against_a_dict(seed: int) -> None:
    """A dict of sets does the same, slowly."""
    chance = random.Random(seed)
    index, twin = HomeIndex(), {n: set[str]() for n in range(20)}
    for _ in range(200):
        holder, numbers = chance.choice([A, B, C]), chance.choices(range(20), k=chance.randrange(8))
        act = chance.randrange(10)
        if act < 5:
            index.announce(holder, names(*numbers), TIMEOUT_S)
            for n in numbers:
                twin[n].add(holder)
        elif act < 8:
            index.withdraw(holder, names(*numbers), TIMEOUT_S)
            for n in numbers:
                twin[n].discard(holder)
        elif act < 9:
            assert index.leave(holder) == sum(holder in held for held in twin.values())
            for held in twin.values():
                held.discard(holder)
        else:
            n = chance.randrange(20)
            assert index.forget(key(n), TIMEOUT_S) == bool(twin[n])
            twin[n].clear()
        assert [set(held) for held in index.holders(names(*range(20)), TIMEOUT_S)] == list(twin.values())
        assert where(index) == {h: m for h in (A, B, C) if (m := sum(1 << n for n in range(20) if h in twin[n]))}
