"""Wrappers that verify, take time, or only read."""

from __future__ import annotations

import pytest

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ChecksumStore, FaultyStore, LatencyStore, MemoryStore, ReadOnlyStore
from tests.storage.objects import CALLS, PAGE, TIMEOUT_S, get, name, page, present, put
from tests.storage.stores import Unverified


@pytest.fixture
def waits() -> list[float]:
    return []


# -- checksums -------------------------------------------------------------------------------------------------------------------------


def test_checksums_make_a_store_without_any_safe() -> None:
    """The same faults with and without them: wrong bytes served, or misses."""
    for kind in ("flip", "torn"):
        bare, safe = (FaultyStore(Unverified(64 * PAGE)) for _ in range(2))
        checked = ChecksumStore(safe)
        for inner, store in ((bare, bare), (safe, checked)):
            inner.fault("put", kind, only=[1])
            assert store.put([name(1), name(2)], [page(1).data, page(2).data], TIMEOUT_S) == 0b11
        assert get(checked, [1, 2]) == {1}
        if kind == "flip":
            with pytest.raises(AssertionError):
                get(bare, [1, 2])
            stats = checked.stats(TIMEOUT_S)
            assert (stats.checksum_failures, stats.objects, stats.get_misses) == (1, 1, 1)
            assert put(checked, [2]) == 1
            assert get(checked, [2]) == {2}


def test_a_checksum_is_of_an_id_too() -> None:
    """A store that mixes up its objects serves right bytes under a wrong name."""
    inner = Unverified(64 * PAGE)
    store = ChecksumStore(inner)
    put(store, [1, 2])
    inner._objects[name(1)], inner._objects[name(2)] = inner._objects[name(2)], inner._objects[name(1)]
    assert get(store, [1]) == set()
    with store.lease([name(2)], TIMEOUT_S) as lent:
        assert lent.valid() == 0


def test_a_lent_view_is_verified_after_it_was_read() -> None:
    inner = Unverified(64 * PAGE)
    store = ChecksumStore(inner)
    put(store, [1, 2])
    with store.lease([name(1), name(2)], TIMEOUT_S) as lent:
        assert lent.valid() == 0b11
        inner.damage(name(1))
        assert lent.valid() == 0b10


def test_an_object_without_a_trailer_is_a_miss() -> None:
    inner = Unverified(64 * PAGE)
    store = ChecksumStore(inner)
    inner.put([name(1), name(2)], [b"", b"twelve bytes"], TIMEOUT_S)
    assert store.get([name(1), name(2)], [bytearray(0), bytearray(4)], TIMEOUT_S) == 0
    with store.lease([name(1), name(2)], TIMEOUT_S) as lent:
        assert (lent.views[0], lent.valid()) == (None, 0)
    assert inner.stats(TIMEOUT_S).objects == 1  # one was read and found wrong; of the other the length did not fit


@pytest.mark.parametrize("size", [0, 1, PAGE])
def test_checksums_around_an_arena(size: int, client: ArenaClient) -> None:
    store = ChecksumStore(client)
    assert put(store, range(4), size) == 0b1111
    assert get(store, range(5), size) == {0, 1, 2, 3}
    assert client.stats(TIMEOUT_S).used_bytes == 4 * (size + 8)
    with store.lease([name(3), name(9)], TIMEOUT_S) as lent:
        assert [None if view is None else bytes(view) for view in lent.views] == [page(3, size).tobytes(), None]
        assert lent.valid() == 0b01


# -- time, and reading only -------------------------------------------------------------------------------------------------------------


def test_latency_per_call_and_per_byte(waits: list[float]) -> None:
    store = LatencyStore(MemoryStore(64 * PAGE), 0.25, 1 / PAGE, waits.append)
    for call in CALLS.values():
        call(store)
    put(store, [3, 4])
    assert waits == [1.25, 1.25, *(len(CALLS) - 2) * [0.25], 2.25]


def test_what_takes_longer_than_its_timeout_ends_with_it(waits: list[float]) -> None:
    store = LatencyStore(MemoryStore(64 * PAGE), 0.0, 1 / PAGE, waits.append)
    with pytest.raises(StoreTimeout, match="takes 20 s, its timeout is 10 s"):
        put(store, range(20))
    assert waits == [TIMEOUT_S]
    assert present(store, range(20)) == set()
    with pytest.raises(ConfigError, match="not negative"):
        LatencyStore(store, -1.0)


def test_a_read_only_store_reads_only() -> None:
    inner = MemoryStore(64 * PAGE)
    put(inner, [1, 2])
    store = ReadOnlyStore(inner)
    assert put(store, [1, 3, 2, 3]) == 0b0101
    assert get(store, [1, 2, 3]) == {1, 2}
    with pytest.raises(StoreError, match="read-only; drop objects where"):
        store.drop([name(1)], TIMEOUT_S)
    with pytest.raises(StoreError, match="read-only; clear it where"):
        store.clear(TIMEOUT_S)
    with pytest.raises(StoreError, match="2 ids need as many sources, not 1"):
        store.put([name(1), name(2)], [page(1).data], TIMEOUT_S)
    store.describe(b"1", {"model": "m"}, TIMEOUT_S)
    assert store.described(TIMEOUT_S) == {}
    assert (store.stats(TIMEOUT_S).objects, store.stats(TIMEOUT_S).put_refused) == (2, 1)
    assert put(store, []) == 0
