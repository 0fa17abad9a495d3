"""Caps by tenant on a disk: from the first byte, over restarts, and while objects move."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.keys import Namespace
from hicache_ray.storage import DiskConfig, DiskStore, bits, disk_tenants
from hicache_ray.store import SPACE_BYTES
from tests.storage.conftest import FakeClock
from tests.storage.disks import BLOCK, CountingOs, OpenDisk, small
from tests.storage.nodes import Nodes, node_config
from tests.storage.objects import PAGE, TIMEOUT_S, name, page

A, B, C = (bytes([n]) * SPACE_BYTES for n in (1, 2, 3))
CAPS = {"ann": 4 * BLOCK}
RECORDS = {A: {"tenant": "ann"}, B: {"tenant": "ann"}}


def of(space: bytes, number: int) -> bytes:
    return space + number.to_bytes(56, "big")


def fill(store: DiskStore, space: bytes, *numbers: int, size: int = BLOCK) -> set[int]:
    """Numbers that are visible after one put of them."""
    hit = store.put([of(space, n) for n in numbers], [page(n, size) for n in numbers], TIMEOUT_S)
    store.check()
    return {numbers[i] for i in bits.each(hit)}


def there(store: DiskStore, space: bytes) -> set[int]:
    return {int.from_bytes(id[SPACE_BYTES:], "big") for id in store.scan(space)}


def usage(store: DiskStore, tenant: str = "ann") -> Mapping[str, int]:
    return store.stats(TIMEOUT_S).tenants[tenant]


def test_all_spaces_of_a_tenant_come_under_one_cap(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), tenant_bytes=CAPS, records=RECORDS)
    assert fill(store, A, 1, 2) == fill(store, B, 1, 2) == {1, 2}
    assert fill(store, C, *range(10)) == set(range(10))
    assert fill(store, A, 3) == {3}  # in exchange for the oldest: the last of the first call
    assert (there(store, A), there(store, B)) == ({1, 3}, {1, 2})
    assert fill(store, A, 1, 4, 5, 6) == {1, 4, 5, 6}
    assert (there(store, A), there(store, B)) == ({1, 4, 5, 6}, set())
    assert fill(store, B, *range(20, 26)) == {20, 21, 22, 23}
    assert usage(store) == {"bytes": 4 * BLOCK, "objects": 4, "refused": 2, "evictions": 8, "cap": 4 * BLOCK}
    assert store.stats(TIMEOUT_S).evictions == 8
    assert usage(store, "")["objects"] == 10
    assert store.drop([of(B, 20)], TIMEOUT_S) == 1
    assert store.clear(TIMEOUT_S, B) == 3
    assert usage(store)["bytes"] == 0


def test_what_can_never_fit_costs_nobody(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), tenant_bytes=CAPS, records=RECORDS)
    assert fill(store, A, 1, 2, 3, 4) == {1, 2, 3, 4}
    assert fill(store, A, 9, size=5 * BLOCK) == set()
    assert fill(store, A, 9, size=9 * BLOCK) == set()  # longer than a segment
    assert there(store, A) == {1, 2, 3, 4}
    assert usage(store)["refused"] == 1
    assert store.stats(TIMEOUT_S).put_refused == 2


def test_what_is_leased_stays_and_a_new_object_is_refused(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), tenant_bytes=CAPS, records=RECORDS)
    fill(store, A, 1, 2, 3, 4)
    with store.lease([of(A, n) for n in (1, 2, 3, 4)], TIMEOUT_S) as lent:
        assert fill(store, A, 5) == set()
        assert lent.valid() == 0b1111
    assert fill(store, A, 5) == {5}


def test_a_start_counts_what_is_there_and_keeps_a_smaller_cap(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), tenant_bytes=CAPS)
    for space, record in RECORDS.items():
        store.describe(space, record, TIMEOUT_S)
    fill(store, A, 1, 2, 3, 4)
    fill(store, C, 1, 2)
    target = np.zeros(BLOCK, np.uint8)
    assert store.get([of(A, 4)], [target], TIMEOUT_S) == 1
    lost = tmp_path.with_name(f"{tmp_path.name}-lost")
    shutil.copytree(tmp_path, lost)
    store.close()
    for directory in (tmp_path, lost):
        store = disk(small(directory), tenant_bytes=CAPS)  # it was described before
        assert usage(store)["bytes"] == 4 * BLOCK
        store.check()
        store.close()
    store = disk(small(tmp_path), tenant_bytes={"ann": 2 * BLOCK})
    assert there(store, A) == {1, 4}
    assert there(store, C) == {1, 2}
    store.check()


def test_a_space_that_changes_hands_takes_its_bytes_along(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), tenant_bytes=CAPS, records=RECORDS)
    fill(store, C, 1, 2, 3)
    fill(store, A, 1, 2)
    store.describe(C, {"tenant": "ann"}, TIMEOUT_S)
    store.check()
    assert usage(store)["bytes"] == 4 * BLOCK
    assert (there(store, C), there(store, A)) == ({1, 2}, {1, 2})
    store.describe(A, {"tenant": "bob"}, TIMEOUT_S)
    store.check()
    assert usage(store)["bytes"] == usage(store, "bob")["bytes"] == 2 * BLOCK


@pytest.mark.parametrize("act", ["nothing", "drop", "describe"])
def test_what_moves_counts_once_and_may_be_dropped_or_change_hands_on_its_way(tmp_path: Path, disk: OpenDisk, act: str) -> None:
    armed, kept = threading.Event(), range(0, 48, 8)

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pread" and armed.is_set():
            armed.clear()
            if act == "drop":
                assert store.drop([of(A, n) for n in kept], TIMEOUT_S) == 0b111111
            elif act == "describe":
                store.describe(A, {"tenant": "bob"}, TIMEOUT_S)

    room = (6 * 15 + 2) * BLOCK  # the lock and the records take a block each
    caps = {"ann": 48 * BLOCK, "bob": 7 * BLOCK}
    store = disk(small(tmp_path, size_bytes=room, io_threads=2), os_port=CountingOs(strike), tenant_bytes=caps, records=RECORDS)
    fill(store, A, *range(48))
    store.drop([of(A, n) for n in range(48) if n not in kept], TIMEOUT_S)
    assert usage(store)["bytes"] == 6 * BLOCK
    armed.set()
    assert fill(store, C, 1, size=2 * BLOCK) == {1}
    assert not armed.is_set()
    assert there(store, A) == (set() if act == "drop" else set(kept))
    assert usage(store, "bob" if act == "describe" else "ann")["objects"] == len(there(store, A))
    store.check()


def test_random_calls_keep_every_cap(memory: Path, disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tenants, "_VICTIMS", 3)
    chance, clock = np.random.default_rng(3), FakeClock()
    caps = {"ann": 9 * BLOCK, "": 7 * BLOCK, "dan": 20 * BLOCK}
    store = disk(small(memory, lease_s=5.0), clock, tenant_bytes=caps, records=RECORDS)
    for step in range(150):
        space = (A, B, C)[chance.integers(3)]
        numbers = [int(n) for n in chance.integers(0, 20, chance.integers(1, 6))]
        kept = fill(store, space, *dict.fromkeys(numbers), size=BLOCK * int(chance.integers(1, 4)))
        if chance.random() < 0.3:
            store.lease([of(space, n) for n in kept], TIMEOUT_S)
        if chance.random() < 0.2:
            store.drop([of(space, numbers[0])], TIMEOUT_S)
        if step % 40 == 39:
            clock.advance(5.0)  # what is leased cannot go
            store.describe(C, {"tenant": ("dan", "ann", "bob")[step // 40]}, TIMEOUT_S)
        clock.advance(1.0)
        store.check()
        for tenant in store.stats(TIMEOUT_S).tenants.values():
            assert tenant["bytes"] <= (tenant["cap"] or 90 * BLOCK)
    assert usage(store)["evictions"] > 20


def test_a_node_holds_the_caps_on_its_disk_too(tmp_path: Path, clock: FakeClock, nothing_left: None) -> None:
    space = Namespace("m", tenant="ann")
    config = node_config(0, disk=DiskConfig(str(tmp_path), 256 * PAGE, segment_bytes=64 * PAGE, fsync="never"))
    config = replace(config, arena=replace(config.arena, tenant_bytes={"ann": 3 * PAGE}), records={space.digest(): space.record()})
    nodes = Nodes(clock, [config])
    store = nodes.open(0)
    for n in range(6):
        assert store.put([space.digest()[:SPACE_BYTES] + name(n)[SPACE_BYTES:]], [page(n)], TIMEOUT_S) == 1
        assert nodes[0].behind is not None
        assert nodes[0].behind.flush(TIMEOUT_S)
    found = nodes[0].stats()["disk"]
    assert (found["objects"], found["tenants"]["ann"]["bytes"], found["tenants"]["ann"]["evictions"]) == (3, 3 * PAGE, 3)
    nodes.check()
    nodes.close()
