"""What every store does, whatever it is made of: a dict, an arena in this process, an arena in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hicache_ray.errors import StoreClosed, StoreError
from hicache_ray.storage import (
    ArenaClient,
    ArenaConfig,
    ArenaService,
    CountingStore,
    DiskConfig,
    DiskStore,
    FaultyStore,
    MemoryStore,
    TieredStore,
    WriteBehind,
)
from hicache_ray.store import KEY_BYTES, SPACE_BYTES, TAG_BYTES, Store
from tests.storage.conftest import PAGES
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, page, present, put
from tests.storage.services import Process

ALL = (1 << PAGES) - 1


@pytest.fixture(params=["memory", "wrapped", "disk", "tiered-front", "tiered-back", "thread", "process"])
def store(request: pytest.FixtureRequest, config: ArenaConfig, nothing_left: None, tmp_path: Path) -> Iterator[Store]:
    """Room for PAGES pages."""
    if request.param in ("memory", "wrapped"):
        memory = MemoryStore(PAGES * PAGE)
        yield memory if request.param == "memory" else FaultyStore(CountingStore(memory))
        memory.check()
        return
    if request.param == "disk":
        disk = DiskStore(DiskConfig(str(tmp_path), PAGES * PAGE + (64 << 10), segment_bytes=PAGES * PAGE))
        yield disk
        disk.check()
        disk.close()
        return
    if request.param.startswith("tiered"):  # all room on one side: the other refuses everything
        rooms = (PAGES * PAGE, 1) if request.param == "tiered-front" else (1, PAGES * PAGE)
        front, back = (MemoryStore(room) for room in rooms)
        tiered = TieredStore(front, back, WriteBehind(front, back, 1))  # nor is anything written behind, which would count as a use
        yield tiered
        tiered.check()
        tiered.close()
        return
    service = ArenaService(config).start() if request.param == "thread" else Process(config)
    client = ArenaClient(service.address)
    try:
        yield client
        if isinstance(service, ArenaService):
            service.check()
    finally:
        client.close()
        service.close()


def test_it_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


def test_what_was_put_is_read_back(store: Store) -> None:
    assert put(store, range(10)) == 0b1111111111
    assert present(store, range(12)) == set(range(10))
    assert get(store, [3, 11, 7]) == {3, 7}
    stats = store.stats(TIMEOUT_S)
    assert (stats.objects, stats.used_bytes, stats.puts, stats.gets, stats.get_misses) == (10, 10 * PAGE, 10, 3, 1)
    assert stats.capacity_bytes == PAGES * PAGE


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4096, PAGE - 1, 300_000, 700_001])
def test_objects_of_any_size(store: Store, size: int) -> None:
    assert put(store, [1], size) == 1
    assert get(store, [1], size) == {1}


def test_any_contiguous_buffer_is_a_source_and_a_target(store: Store) -> None:
    floats = np.linspace(0, 1, PAGE // 8)
    sources = [floats, pa.py_buffer(floats.tobytes()), memoryview(floats), bytearray(floats.tobytes())]
    assert store.put([name(i) for i in range(4)], sources, TIMEOUT_S) == 0b1111  # type: ignore[arg-type]
    targets = [np.zeros(PAGE // 8), np.zeros(PAGE, np.uint8), memoryview(bytearray(PAGE)), bytearray(PAGE)]
    assert store.get([name(i) for i in range(4)], targets, TIMEOUT_S) == 0b1111  # type: ignore[arg-type]
    assert all(bytes(target) == floats.tobytes() for target in targets)


def test_a_target_of_another_length_is_a_miss(store: Store) -> None:
    put(store, [1])
    assert get(store, [1], PAGE - 1) == set()
    assert get(store, [1], PAGE + 1) == set()
    assert get(store, [1]) == {1}


def test_bad_buffers_are_refused_and_say_why(store: Store) -> None:
    put(store, [1])
    with pytest.raises(StoreError, match="read-only"):
        store.get([name(1)], [memoryview(bytes(PAGE))], TIMEOUT_S)
    with pytest.raises(StoreError, match="contiguous"):
        store.put([name(2)], [np.zeros((4, 4))[:, 1]], TIMEOUT_S)  # type: ignore[list-item]
    with pytest.raises(StoreError, match="id has 64 bytes, not 3"):
        store.put([b"abc"], [memoryview(b"abc")], TIMEOUT_S)
    with pytest.raises(StoreError, match="key has 48 bytes, not 3"):
        store.lookup([b"abc"], [TAG], TIMEOUT_S)


def test_empty_batches(store: Store) -> None:
    assert store.put([], [], TIMEOUT_S) == 0
    assert store.get([], [], TIMEOUT_S) == 0
    assert store.drop([], TIMEOUT_S) == 0
    assert store.lookup([], [TAG], TIMEOUT_S)[TAG].hit == 0
    assert store.lookup([key(1)], [], TIMEOUT_S) == {}


def test_an_existing_object_is_kept(store: Store) -> None:
    put(store, [1])
    assert store.put([name(1)], [page(2).data], TIMEOUT_S) == 1
    assert get(store, [1]) == {1}


def test_the_same_id_twice_in_one_call(store: Store) -> None:
    assert store.put([name(1), name(1)], [page(1).data, page(2).data], TIMEOUT_S) == 0b11
    assert get(store, [1, 1]) == {1}
    assert store.stats(TIMEOUT_S).objects == 1
    assert store.drop([name(1)], TIMEOUT_S) == 1
    big = page(2, PAGES * PAGE + 1)
    assert store.put([name(2), name(2), name(3)], [big.data, page(2).data, page(3).data], TIMEOUT_S) == 0b100
    assert store.stats(TIMEOUT_S).put_refused == 1


def test_one_lookup_answers_for_every_tag(store: Store) -> None:
    one, two, none = (bytes([n]) * TAG_BYTES for n in (1, 2, 3))
    store.put([key(0) + one, key(2) + one, key(1) + two], [page(n).data for n in range(3)], TIMEOUT_S)
    found = store.lookup([key(n) for n in range(3)], [one, two, none], TIMEOUT_S)
    assert {tag: answer.hit for tag, answer in found.items()} == {one: 0b101, two: 0b010, none: 0}
    assert all(answer.pending == answer.retry == 0 for answer in found.values())


def test_the_cap_is_a_cap_and_the_oldest_goes(store: Store) -> None:
    for first in range(0, 5 * PAGES, 8):
        assert put(store, range(first, first + 8)) == 0xFF
        stats = store.stats(TIMEOUT_S)
        assert stats.used_bytes == stats.objects * PAGE <= PAGES * PAGE
    assert present(store, range(5 * PAGES)) == set(range(4 * PAGES, 5 * PAGES))
    assert store.stats(TIMEOUT_S).evictions == 4 * PAGES


def test_a_read_and_a_second_put_are_uses_and_a_lookup_is_not(store: Store) -> None:
    for n in range(PAGES):
        put(store, [n])
    get(store, [0])
    put(store, [1])
    present(store, [2])
    put(store, [100])
    put(store, [101])
    assert present(store, [0, 1, 2, 3, 4, 100, 101]) == {0, 1, 4, 100, 101}


def test_within_a_call_the_first_stays_longest(store: Store) -> None:
    """Callers pass pages from the root down; what stays must be reachable from the root."""
    put(store, range(PAGES))
    put(store, [100, 101])
    assert present(store, range(PAGES)) == set(range(PAGES - 2))


def test_what_a_call_found_counts_in_its_place(store: Store) -> None:
    """A longer prompt: its first pages are there already and must not go before the new ones."""
    put(store, [0, 1])
    put(store, range(10, 10 + PAGES - 4))
    put(store, [0, 1, 2, 3])
    put(store, range(100, 100 + PAGES - 1))
    assert present(store, [0, 1, 2, 3]) == {0}


def test_a_call_does_not_evict_what_it_stored(store: Store) -> None:
    put(store, [1000])
    assert put(store, [*range(PAGES - 1), 5000, 5001, 1000]) == ALL & ~(1 << PAGES - 1) | 1 << PAGES + 1
    assert present(store, [*range(PAGES), 1000, 5000]) == {*range(PAGES - 1), 1000}
    assert store.stats(TIMEOUT_S).put_refused == 2


def test_what_can_never_fit_is_refused(store: Store) -> None:
    big = PAGES * PAGE + 1
    assert store.put([name(1), name(2)], [page(1, big).data, page(2).data], TIMEOUT_S) == 0b10
    assert store.stats(TIMEOUT_S).put_refused == 1
    assert put(store, [3], PAGES * PAGE) == 1  # the whole store, in exchange for everything
    assert present(store, [1, 2, 3]) == {3}


def test_drop_and_clear(store: Store) -> None:
    put(store, range(6))
    assert store.drop([name(1), name(9), name(3), name(1)], TIMEOUT_S) == 0b101
    assert present(store, range(6)) == {0, 2, 4, 5}
    assert store.clear(TIMEOUT_S) == 4
    assert present(store, range(6)) == set()
    assert store.stats(TIMEOUT_S).used_bytes == 0
    assert put(store, range(PAGES)) == ALL


def test_clear_by_prefix(store: Store) -> None:
    """A namespace goes as a whole, and nothing else does."""
    mine, other = (bytes([space]) * (KEY_BYTES - 1) for space in (1, 2))
    ids = [start + bytes([n]) + TAG for start in (mine, other) for n in range(4)]
    assert store.put(ids, [page(n).data for n in range(8)], TIMEOUT_S) == 0xFF
    assert store.clear(TIMEOUT_S, mine[:SPACE_BYTES]) == 4
    assert set(store.scan(timeout_s=TIMEOUT_S)) == set(ids[4:])
    assert store.clear(TIMEOUT_S, mine[:SPACE_BYTES]) == 0
    assert store.stats(TIMEOUT_S).used_bytes == 4 * PAGE


def test_scan_names_what_is_visible(store: Store) -> None:
    put(store, range(20))
    store.drop([name(7)], TIMEOUT_S)
    assert set(store.scan(timeout_s=TIMEOUT_S)) == {name(n) for n in range(20) if n != 7}
    assert set(store.scan(key(3)[:KEY_BYTES], TIMEOUT_S)) == {name(3)}
    assert list(store.scan(b"\xff", TIMEOUT_S)) == []
    assert list(store.scan(name(1) + b"longer than an id", TIMEOUT_S)) == []


def test_descriptions(store: Store) -> None:
    store.describe(b"\x00\xff", {"model": "a"}, TIMEOUT_S)
    store.describe(b"\x01", {"model": "b", "größe": "ü"}, TIMEOUT_S)
    store.describe(b"\x00\xff", {"model": "c"}, TIMEOUT_S)
    assert store.described(TIMEOUT_S) == {b"\x00\xff": {"model": "c"}, b"\x01": {"model": "b", "größe": "ü"}}


def test_a_lease_lends_the_bytes(store: Store) -> None:
    put(store, [1, 2])
    with store.lease([name(1), name(9), name(2)], TIMEOUT_S) as lent:
        assert [None if view is None else bytes(view) for view in lent.views] == [page(1).tobytes(), None, page(2).tobytes()]
        assert lent.valid() == 0b101
        assert all(memoryview(view).readonly for view in lent.views if view is not None)
        assert store.stats(TIMEOUT_S).leases == 1
    assert lent.valid() == 0
    lent.release()
    assert store.stats(TIMEOUT_S).leases == 0


def test_leased_bytes_are_not_reused(store: Store) -> None:
    put(store, range(PAGES))
    with store.lease([name(n) for n in range(PAGES - 2)], TIMEOUT_S) as lent:
        assert put(store, range(100, 110)).bit_count() == 2
        assert store.drop([name(0)], TIMEOUT_S) == 1
        assert present(store, [0]) == set()
        assert put(store, [200]) == 1  # evicts one of the two, not the leased
        assert lent.valid() == (1 << PAGES - 2) - 1
        assert all(bytes(view) == page(n).tobytes() for n, view in enumerate(lent.views) if view is not None)
        assert store.stats(TIMEOUT_S).used_bytes == PAGES * PAGE
    assert store.stats(TIMEOUT_S).used_bytes == (PAGES - 1) * PAGE
    assert put(store, range(300, 310)).bit_count() == 10


def test_a_lease_outlives_a_clear(store: Store) -> None:
    put(store, [1])
    with store.lease([name(1)], TIMEOUT_S) as lent:
        assert store.clear(TIMEOUT_S) == 1
        assert put(store, range(10, 10 + PAGES)).bit_count() == PAGES - 1
        assert lent.valid() == 1
        assert lent.views[0] is not None
        assert bytes(lent.views[0]) == page(1).tobytes()


def test_a_flipped_bit_is_a_miss_and_is_gone_then(store: Store) -> None:
    put(store, [1, 2])
    assert store.damage(name(1))  # type: ignore[attr-defined]
    assert get(store, [1, 2]) == {2}
    stats = store.stats(TIMEOUT_S)
    assert (stats.checksum_failures, stats.get_misses, stats.objects) == (1, 1, 1)
    assert put(store, [1]) == 1
    assert get(store, [1]) == {1}


def test_a_closed_handle_says_so(store: Store) -> None:
    put(store, [1])
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        present(store, [1])
