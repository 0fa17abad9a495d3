"""T098: the process that owns the store is ten times slower than those who write to it, 8 callers with 2,000 puts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import psutil
import pytest

from hicache_ray.storage import ArenaConfig, ClusterClient, open_store
from hicache_ray.store import KEY_BYTES, Store, StoreStats
from tests.storage.services import Process

CALLERS, PUTS, BATCH, PAGE = 8, 2000, 5, 64 << 10
PENDING = 16 * PAGE  # three batches of the eight
ROOM = 512 * PAGE  # a quarter of all
PATIENCE_S = 30.0
SLICE_S = 0.005


@pytest.fixture
def slow() -> Iterator[Process]:
    name = f"t098-{os.getpid()}"
    process = Process(ArenaConfig(name, ROOM, slab_bytes=PAGE * 8, pending_bytes=PENDING, prefault="start", huge_pages="off"))
    try:
        yield process
    finally:
        process.close()


def put_all(store: Store, caller: int) -> tuple[int, int]:
    """(visible, dropped) objects of one caller."""
    pages = [np.full(PAGE, caller + 1, np.uint8) for _ in range(BATCH)]
    visible = 0
    count = PUTS // CALLERS
    for start in range(0, count, BATCH):
        ids = [bytes([caller + 1]) * KEY_BYTES + i.to_bytes(16, "big") for i in range(start, start + BATCH)]
        visible += store.put(ids, pages, PATIENCE_S).bit_count()
    return visible, count - visible


def private(process: Process) -> int:
    """Bytes that belong to this process alone."""
    return int(psutil.Process(process.process.pid).memory_full_info().uss)


def test_t098_what_is_under_way_is_bounded_over_all_callers(slow: Process) -> None:
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(open_store(slow.address.socket))) for _ in range(CALLERS)]
        rush(slow, stores, opened.enter_context(closing(open_store(slow.address.socket))))


def rush(slow: Process, stores: list[ClusterClient], watcher: ClusterClient) -> None:
    seen: list[StoreStats] = [watcher.stats(PATIENCE_S)]
    sizes = [private(slow)]
    over = threading.Event()

    def hinder() -> None:
        """A time slice of ten."""
        while not over.is_set():
            slow.freeze()
            over.wait(SLICE_S * 9)
            slow.thaw()
            seen.append(watcher.stats(PATIENCE_S))
            sizes.append(private(slow))
            over.wait(SLICE_S)

    with ThreadPoolExecutor(CALLERS + 1) as pool:
        hindering = pool.submit(hinder)
        try:
            counts = [call.result() for call in [pool.submit(put_all, store, i) for i, store in enumerate(stores)]]
        finally:
            over.set()
        hindering.result()
    last = watcher.stats(PATIENCE_S)
    visible, dropped = (sum(column) for column in zip(*counts, strict=True))
    assert visible + dropped == PUTS
    assert last.dropped == dropped > 0  # every one is counted, and refused for this reason
    assert max(row.pending_bytes for row in seen) <= PENDING
    assert last.pending_bytes == 0
    assert last.objects + last.evictions == visible
    assert last.used_bytes <= ROOM
    assert max(sizes) - sizes[0] < 32 << 20
    # What was refused in the rush is taken when there is room.
    ids = [b"x" * KEY_BYTES + i.to_bytes(16, "big") for i in range(BATCH)]
    assert stores[0].put(ids, [np.zeros(PAGE, np.uint8)] * BATCH, PATIENCE_S) == (1 << BATCH) - 1
