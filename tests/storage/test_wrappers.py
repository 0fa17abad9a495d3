"""Faults on demand, counted calls, and that they compose."""

from __future__ import annotations

import threading

import pytest

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import (
    ArenaClient,
    ChecksumStore,
    CountingStore,
    FaultyStore,
    LatencyStore,
    MemoryStore,
    ReadOnlyStore,
    StoreWrapper,
)
from hicache_ray.storage.faults import ANY, FAULTS
from hicache_ray.store import Store
from tests.storage.objects import CALLS, PAGE, TAG, TIMEOUT_S, get, key, name, page, present, put


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def store(waits: list[float]) -> FaultyStore:
    return FaultyStore(MemoryStore(64 * PAGE), waits.append)


def test_wrappers_are_stores(store: FaultyStore) -> None:
    around = (CountingStore, StoreWrapper, FaultyStore, ChecksumStore, ReadOnlyStore)
    for wrapper in (store, *(kind(store) for kind in around), LatencyStore(store, 0.1), FaultyStore(ChecksumStore(ReadOnlyStore(store)))):
        assert isinstance(wrapper, Store)


def test_the_nth_call_fails_and_only_that(store: FaultyStore) -> None:
    store.fault("get", "error", 3)
    put(store, [1])
    assert [get(store, [1]) for _ in range(2)] == [{1}, {1}]
    with pytest.raises(StoreError, match="injected: this get fails"):
        get(store, [1])
    assert get(store, [1]) == {1}


def test_a_failed_put_stores_nothing(store: FaultyStore) -> None:
    store.fault("put", "error")
    with pytest.raises(StoreError):
        put(store, [1])
    assert present(store, [1]) == set()
    assert put(store, [1]) == 1


def test_delay_passes_time_and_goes_on(store: FaultyStore, waits: list[float]) -> None:
    put(store, [1])
    store.fault("lookup", "delay", seconds=0.25)
    assert present(store, [1]) == {1}
    assert waits == [0.25]


def test_a_hang_takes_the_callers_deadline(store: FaultyStore, waits: list[float]) -> None:
    store.fault("get", "hang")
    with pytest.raises(StoreTimeout, match="injected: this get hung"):
        get(store, [1])
    assert waits == [TIMEOUT_S]
    assert store.hung() == 0


def test_a_hang_ends_when_it_is_released() -> None:
    store, errors = FaultyStore(MemoryStore(PAGE)), list[StoreError]()
    store.fault("put", "hang", 1)
    store.fault("put", "hang", 2)

    def work() -> None:
        try:
            store.put([], [], 1000.0)
        except StoreTimeout as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while store.hung() < 2:
        pass
    assert errors == []
    store.release_hung()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(errors) == 2
    assert put(store, [1]) == 1


@pytest.mark.parametrize(
    ("op", "kind"), [("put", "torn"), ("put", "flip"), ("put", "gone"), ("get", "torn"), ("get", "flip"), ("get", "gone")]
)
def test_damaged_objects_are_misses(op: str, kind: str, store: FaultyStore) -> None:
    store.fault(op, kind)
    assert put(store, [1, 2]) == 0b11
    assert get(store, [1, 2]) == set()
    if (op, kind) != ("put", "torn"):  # a short object stays, and stays a miss
        assert present(store, [1, 2]) == set()
        assert put(store, [1, 2]) == 0b11
        assert get(store, [1, 2]) == {1, 2}
    assert get(store, [1, 2]) == (set() if (op, kind) == ("put", "torn") else {1, 2})


def test_only_some_objects_of_a_call(store: FaultyStore) -> None:
    store.fault("put", "flip", only=[1])
    store.fault("put", "torn", only=[2])
    store.fault("put", "gone", only=[3])
    assert put(store, range(5)) == 0b11111
    assert get(store, range(5)) == {0, 4}


def test_what_was_there_before_a_torn_put_is_kept(store: FaultyStore) -> None:
    put(store, [1])
    store.fault("put", "torn")
    assert put(store, [1]) == 1
    assert get(store, [1]) == {1}


def test_gone_at_a_lookup(store: FaultyStore) -> None:
    put(store, [1, 2, 3])
    store.fault("lookup", "gone", only=[0, 2])
    assert present(store, [1, 2, 3]) == {2}


def test_heal_forgets(store: FaultyStore) -> None:
    for op in FAULTS:
        store.fault(op, "error")
    assert store.planned() == len(FAULTS)
    store.heal()
    assert store.planned() == 0
    assert put(store, [1]) == 1
    assert present(store, [1]) == get(store, [1]) == {1}


@pytest.mark.parametrize(
    ("op", "kind", "nth"),
    [("shut", "error", 1), ("get", "explode", 1), ("get", "error", 0), ("lookup", "torn", 1), ("any", "flip", 1), ("drop", "gone", 1)],
)
def test_impossible_faults_are_refused(op: str, kind: str, nth: int, store: FaultyStore) -> None:
    with pytest.raises(ConfigError, match="no fault .* count from 1, and choose of put: error, hang, delay, lost, torn, flip, gone; get: "):
        store.fault(op, kind, nth)


def test_counting() -> None:
    inner = MemoryStore(64 * PAGE)
    store = CountingStore(inner)
    put(store, [1, 2])
    put(store, [3])
    get(store, [1, 2, 3])
    store.lookup([key(1)], [TAG], TIMEOUT_S)
    store.drop([], TIMEOUT_S)
    assert store.calls == {"put": 2, "get": 1, "lookup": 1, "drop": 1}
    assert store.items == {"put": 3, "get": 3, "lookup": 1, "drop": 0}
    assert store.total() == 5


def test_every_operation_can_fail() -> None:
    assert {*CALLS, ANY} == set(FAULTS)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("by", ["name", ANY])
def test_every_operation_fails_in_every_way(op: str, by: str, store: FaultyStore, waits: list[float]) -> None:
    planned = op if by == "name" else ANY
    store.fault(planned, "error")
    with pytest.raises(StoreError, match=f"injected: this {op} fails"):
        CALLS[op](store)
    store.fault(planned, "hang")
    with pytest.raises(StoreTimeout, match=f"injected: this {op} hung"):
        CALLS[op](store)
    store.fault(planned, "delay", seconds=0.5)
    CALLS[op](store)
    assert waits == [TIMEOUT_S, 0.5]
    store.fault(planned, "lost")
    with pytest.raises(StoreTimeout, match=f"injected: the answer to this {op} is lost"):
        CALLS[op](store)
    CALLS[op](store)
    assert store.planned() == 0
    assert store.stats(TIMEOUT_S).leases == 0


def test_a_lost_answer_is_to_a_call_that_was_made(store: FaultyStore) -> None:
    for call in (lambda: put(store, [1, 2]), lambda: store.drop([name(1)], TIMEOUT_S)):
        store.fault(ANY, "lost")
        with pytest.raises(StoreTimeout):
            call()
    assert present(store, [1, 2]) == {2}


@pytest.mark.parametrize(("kind", "held"), [("flip", [False, True]), ("gone", [None, True])])
def test_faults_of_a_lease(kind: str, held: list[bool | None], store: FaultyStore) -> None:
    put(store, [1, 2])
    store.fault("lease", kind, only=[0])
    with store.lease([name(1), name(2)], TIMEOUT_S) as lent:
        views = [None if view is None else bytes(view) == page(n).tobytes() for n, view in zip((1, 2), lent.views, strict=True)]
    assert views == held


def test_a_close_frees_what_hangs() -> None:
    store, errors = FaultyStore(MemoryStore(PAGE)), list[StoreError]()
    store.fault("scan", "hang")

    def work() -> None:
        try:
            store.scan(timeout_s=1000.0)
        except StoreTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while store.hung() < 1:
        pass
    store.close()
    thread.join(TIMEOUT_S)
    assert len(errors) == 1


@pytest.mark.parametrize("kind", ["torn", "flip", "gone"])
def test_faults_around_an_arena(kind: str, client: ArenaClient) -> None:
    store = FaultyStore(CountingStore(client))
    store.fault("put", kind, only=[1])
    assert put(store, range(4)) == 0b1111
    assert get(store, range(4)) == {0, 2, 3}


def test_flips_need_a_store_that_can() -> None:
    class Plain(MemoryStore):
        damage = None  # type: ignore[assignment]

    store = FaultyStore(Plain(64 * PAGE))
    store.fault("put", "flip")
    with pytest.raises(ConfigError, match="has no damage"):
        put(store, [1])
