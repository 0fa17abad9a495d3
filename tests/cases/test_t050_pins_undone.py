"""T050: a read that fails in its middle gives back all that it had taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_ray import executor
from hicache_ray.errors import StoreError
from hicache_ray.storage import ChecksumStore, FaultyStore, MemoryStore
from hicache_ray.storage.conformance_kit import PAGE, ROOM, TIMEOUT_S, get, name, put
from hicache_ray.storage.movers import PlainMover
from hicache_ray.testing import Served, Stack, full
from tests.storage import stores

EIGHT = range(8)


def fails_at(nth: int, make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose ``nth`` call finds no memory."""
    calls = iter(range(1, 1 << 30))

    def limited(*args: Any, **options: Any) -> Any:
        if next(calls) == nth:
            raise MemoryError
        return make(*args, **options)

    return limited


@pytest.mark.parametrize("kind", ["checksums", "checksums around an arena"])
def test_t050_staging_of_a_checked_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper reads into memory of its own: the allocation for the 5th of 8 entries fails."""
    with stores.STORES[kind]().make(ROOM * (PAGE + 8)) as store:
        assert isinstance(store, ChecksumStore)
        put(store, EIGHT)
        with monkeypatch.context() as patch:
            patch.setattr("hicache_ray.storage.checked.np.empty", fails_at(5, np.empty))
            with pytest.raises(StoreError, match="no memory for the .* bytes that this call moves; make its batch smaller"):
                store.get([name(n) for n in EIGHT], [bytearray(PAGE) for _ in EIGHT], TIMEOUT_S)
        assert store.stats(TIMEOUT_S).leases == 0
        assert get(store, EIGHT) == set(EIGHT)
        store.check()


def test_t050_a_copy_out_of_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 8 are leased, and the copy of the 5th fails: their pins go at the latest with the lease, and the next read works at once."""
    subject = stores.in_thread()
    clock = subject.abilities.clock
    assert clock is not None
    with subject.make(ROOM * PAGE) as store:
        put(store, EIGHT)
        with monkeypatch.context() as patch:
            patch.setattr(PlainMover, "move", fails_at(5, PlainMover.move))  # a slice is a page, and the compiled loop never runs
            with pytest.raises((MemoryError, StoreError)):
                get(store, EIGHT)
        assert get(store, EIGHT) == set(EIGHT)
        clock.advance(subject.abilities.lease_s)
        assert store.stats(TIMEOUT_S).leases == 0
        assert put(store, range(100, 100 + ROOM)) == (1 << ROOM) - 1


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_t050_staged_batches_of_the_core(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host layouts in which a page is no single run go through a staging pool, here of one page: the 5th of 8 reads fails."""
    monkeypatch.setattr(executor, "STAGING_BYTES", 1)
    store = FaultyStore(MemoryStore(64 << 20))
    stack = Stack(pools={"full": full()}, layout=layout, store=store)
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    free = {place: pool.free for place, pool in stack.res.pools.items()}
    store.fault("get", "error", 5)
    stack.prefetch("p", prompt)
    stack.settle()
    assert store.planned() == 0
    assert stack.have("l2", "full", prompt) <= set(range(4))  # nothing that was not read
    assert stack.res.leases.open() == ()
    stack.audit()
    assert stack.put(prompt).computed == 1  # the next read works
    stack.settle()
    stack.flush()
    assert {place: pool.free for place, pool in stack.res.pools.items()} == free
    stack.audit()


def test_t050_two_components_and_ranks_in_one_batch() -> None:
    store = FaultyStore(MemoryStore(64 << 20))
    stack = Stack(pools={"full": full(), "more": full(layers=1)}, store=store, ranks=2)
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    store.fault("get", "gone", only=[4])  # of 8 pages of one component on one rank, the 5th
    stack.prefetch("p", prompt)
    stack.settle()
    assert stack.poll("p").tokens == 256
    assert [len(lease.slots) for lease in stack.res.leases.open("p")] == [4, 4]  # kept for the request, the other 8 given back
    stack.abort("p")
    assert stack.res.leases.open() == ()
    stack.audit()
    assert stack.put(prompt) == Served(0, 256, 0, 257)
    stack.settle()
    assert stack.res.leases.open() == ()
    stack.audit()
