"""T031: a read that takes longer than its lease is a miss, on every read path, and its page is not published."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, DiskConfig, DiskStore, FaultyStore, NodeStore, bits
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


PATHS = {"single": single, "batch": batch, "same-node batch": same_node_batch}


@pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(("fetch_s", "hits"), [(FETCH_S, False), (LEASE_S, False), (LEASE_S - 1.0, True)])
def test_t031_expired_is_a_miss(
    path: Callable[[Store, Pause], set[int]], fetch_s: float, hits: bool, on_disk: bool, tmp_path: Path
) -> None:
    """Also where the bytes were given to nobody meanwhile. ``on_disk``: they are brought into the arena by the read itself."""
    clock = FakeClock()
    config = ArenaConfig(arena(ROOM * PAGE, "t031").name, ROOM * PAGE, slab_bytes=PAGE, lease_s=LEASE_S)
    with ExitStack() as opened:
        disk = opened.enter_context(closing(DiskStore(DiskConfig(str(tmp_path), 2 * ROOM * PAGE, segment_bytes=ROOM * PAGE), clock)))
        back = disk if on_disk else None
        service = opened.enter_context(ArenaService(config, clock, lambda arena: NodeStore(arena, back)))
        store = opened.enter_context(closing(ArenaClient(service.address, clock=clock)))
        put(disk if on_disk else store, range(8))
        wanted = {3} if path is single else set(range(8))
        assert path(_patient(store), lambda: clock.advance(fetch_s)) == (wanted if hits else set())
        assert disk.stats(TIMEOUT_S).gets == (len(wanted) if on_disk else 0)
        clock.advance(LEASE_S)
        assert store.stats(TIMEOUT_S).leases == 0
        assert get(store, range(8)) == set(range(8))  # in time


@pytest.mark.parametrize(("fetch_s", "hits"), [(FETCH_S, False), (LEASE_S, False), (LEASE_S - 1.0, True)])
def test_t031_what_a_disk_has_lent(fetch_s: float, hits: bool, tmp_path: Path) -> None:
    """Without an arena in front."""
    clock = FakeClock()
    config = DiskConfig(str(tmp_path), 2 * ROOM * PAGE, segment_bytes=ROOM * PAGE, lease_s=LEASE_S)
    with closing(DiskStore(config, clock)) as store:
        put(store, range(8))
        assert same_node_batch(store, lambda: clock.advance(fetch_s)) == (set(range(8)) if hits else set())
        clock.advance(LEASE_S)
        assert store.stats(TIMEOUT_S).leases == 0
        assert get(store, range(8)) == set(range(8))
        store.check()


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
