"""T025: a page that is read is freed only when its reader is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_ray.storage.conformance_kit import PAGE, ROOM, TIMEOUT_S, Gate, Worker, get, name, page, present, put
from hicache_ray.store import Store
from tests.storage import stores
from tests.storage.stores import Subject

X = 0
#: Stores that lend their bytes, or copies of them and the slots that they came from.
LENDERS = {name: stores.STORES[name] for name in ("memory", "arena in a thread", "disk", "tiered, in front", "tiered, behind")}


def read_lent(store: Store, gate: Gate) -> set[int]:
    """Holds the view of X until the gate opens, and reads it then."""
    with store.lease([name(X)], TIMEOUT_S) as lent:
        gate.stop()
        (view,) = lent.views
        same = view is not None and bytes(view) == page(X).tobytes()
        return {X} if lent.valid() == 1 and same else set()


def evict_until_chosen(store: Store) -> tuple[int, int]:
    """Puts page after page: X is the least recently used. Returns how many were stored and how many refused."""
    stored = sum(put(store, [n]) for n in range(1000, 1000 + 2 * ROOM))
    batch = put(store, range(2000, 2000 + ROOM)).bit_count()  # more than all that may go
    return stored, batch


@pytest.mark.parametrize("make", LENDERS.values(), ids=list(LENDERS))
def test_t025_a_lent_page_outlives_its_eviction(make: Callable[[], Subject]) -> None:
    with make().make(ROOM * PAGE) as store:
        put(store, range(ROOM))
        get(store, range(1, ROOM))  # X is the oldest
        gate = Gate()
        reader = Worker(lambda: read_lent(store, gate))
        assert gate.reached.wait(TIMEOUT_S)
        try:
            assert Worker(lambda: evict_until_chosen(store)).join() == (2 * ROOM, ROOM - 1)  # everything went but X
            assert store.drop([name(X)], TIMEOUT_S) == 1  # and now X is chosen
            assert put(store, [3000]) == 1
            stats = store.stats(TIMEOUT_S)
            assert (stats.leases, stats.used_bytes, stats.objects) == (1, ROOM * PAGE, ROOM - 1)
        finally:
            gate.open()
        assert reader.join() == {X}
        stats = store.stats(TIMEOUT_S)
        assert (stats.leases, stats.used_bytes) == (0, (ROOM - 1) * PAGE)  # freed now, and only now
        assert put(store, [3001]) == 1
        assert store.stats(TIMEOUT_S).objects == ROOM
        if check := getattr(store, "check", None):
            check()


def test_t025_a_copy_in_the_middle_of_an_eviction() -> None:
    """A get that stands still when its bytes are copied, and is judged after all that."""
    subject = stores.in_thread()
    with subject.make(ROOM * PAGE) as store:
        put(store, range(ROOM))
        get(store, range(1, ROOM))
        gate = Gate()
        with stores.slow_gets(store, gate.stop):
            reader = Worker(lambda: get(store, [X]))
            assert gate.reached.wait(TIMEOUT_S)
            evictions = [put(store, [n]) for n in range(1000, 1000 + 2 * ROOM)]
            assert sum(evictions) == 2 * ROOM
            assert present(store, [X]) == {X}  # leased: everything else went before it
            assert store.clear(TIMEOUT_S) == ROOM
            assert store.stats(TIMEOUT_S).used_bytes == PAGE
            gate.open()
            assert reader.join() == {X}
        stats = store.stats(TIMEOUT_S)
        assert (stats.leases, stats.used_bytes) == (0, 0)
