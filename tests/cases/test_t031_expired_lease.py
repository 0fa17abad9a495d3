"""T031: a read that takes longer than its lease is a miss, on every read path, and its page is not published."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, FaultyStore, bits
from hicache_ray.storage.conformance_kit import PAGE, ROOM, TIMEOUT_S, get, name, page, put
from hicache_ray.store import Store
from hicache_ray.testing import FakeClock, Served, Stack, full
from tests.storage.stores import arena, slow_gets

LEASE_S, FETCH_S = 100.0, 150.0
PATIENT = {"prefetch_base_s": 1e6, "prefetch_cap_s": 1e6}  # no deadline of the core ends these reads either
Pause = Callable[[], None]


def single(store: Store, pause: Pause) -> set[int]:
    with slow_gets(store, pause):
        return get(store, [3])


def batch(store: Store, pause: Pause) -> set[int]:
    with slow_gets(store, pause):
        return get(store, range(8))


def same_node_batch(store: Store, pause: Pause) -> set[int]:
    """Views of the mapping itself, read in place."""
    with store.lease([name(n) for n in range(8)], TIMEOUT_S) as lent:
        read = [None if view is None else bytes(view) for view in lent.views]
        pause()
        found = set(bits.each(lent.valid()))
    assert all(read[n] == page(n).tobytes() for n in found)
    return found


#: Read paths. That of a disk is one entry more.
PATHS = {"single": single, "batch": batch, "same-node batch": same_node_batch}


@pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))
@pytest.mark.parametrize(("fetch_s", "hits"), [(FETCH_S, False), (LEASE_S, False), (LEASE_S - 1.0, True)])
def test_t031_expired_is_a_miss(path: Callable[[Store, Pause], set[int]], fetch_s: float, hits: bool) -> None:
    """Also where the bytes were given to nobody meanwhile."""
    clock = FakeClock()
    config = arena(ROOM * PAGE, "t031")
    with ArenaService(ArenaConfig(config.name, config.size_bytes, slab_bytes=PAGE, lease_s=LEASE_S), clock) as service:
        store = ArenaClient(service.address, clock=clock)
        try:
            put(store, range(8))
            timed = _patient(store)
            found = path(timed, lambda: clock.advance(fetch_s))
            assert found == ((set(range(8)) if path is not single else {3}) if hits else set())
            clock.advance(LEASE_S)
            assert store.stats(TIMEOUT_S).leases == 0
            assert get(store, range(8)) == set(range(8))  # in time
        finally:
            store.close()


def _patient(store: ArenaClient) -> Store:
    """No deadline of a call ends these reads: only the lease does."""
    lease, get_ = store.lease, store.get
    store.lease = lambda ids, timeout_s: lease(ids, 1e6)  # type: ignore[method-assign]
    store.get = lambda ids, targets, timeout_s: get_(ids, targets, 1e6)  # type: ignore[method-assign]
    return store


def test_t031_the_page_is_not_published() -> None:
    """Through the core: what came too late from storage is neither on the host nor on the device, and is computed."""
    clock = FakeClock()
    with ArenaService(ArenaConfig(arena(PAGE, "t031").name, 8 << 20, lease_s=LEASE_S), clock) as service:
        client = ArenaClient(service.address, clock=clock)
        try:
            stack = Stack(pools={"full": full()}, store=FaultyStore(client, clock.advance), clock=clock, settings=PATIENT)
            prompt = list(range(1, 514))
            stack.put(prompt)
            stack.settle()
            stack.flush()
            assert stack.probe(prompt).l3 == 512
            with slow_gets(client, lambda: clock.advance(FETCH_S)):
                stack.prefetch("p", prompt)
                stack.settle()
            assert stack.have("l2", "full", prompt) == set()
            assert stack.poll("p").tokens == 0
            clock.advance(LEASE_S)
            stack.audit()
            assert stack.put(prompt) == Served(0, 0, 512, 1)
            stack.settle()
            stack.audit()
        finally:
            client.close()
