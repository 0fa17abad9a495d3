"""Caps by tenant, and the cap on what all writers together hold reserved."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.keys import Namespace
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, bits
from hicache_ray.storage.descriptors import Outcome
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.slabs import BLOCK, SlabMap
from hicache_ray.storage.tenants import MOST, Tenants
from hicache_ray.store import SPACE_BYTES
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TIMEOUT_S, page

A, B, C = (bytes([n]) * SPACE_BYTES for n in (1, 2, 3))
ME = 1


def name(space: bytes, number: int) -> bytes:
    return space + number.to_bytes(56, "big")


def make(clock: FakeClock, slots: int = 16, **limits: object) -> ArenaIndex:
    index = ArenaIndex(SlabMap(slots * BLOCK, BLOCK), [0] * slots, clock, Limits(**limits))  # type: ignore[arg-type]
    index.assign(A, "ann")
    index.assign(B, "ann")
    return index


def fill(index: ArenaIndex, space: bytes, *numbers: int, size: int = BLOCK) -> set[int]:
    """Numbers that are visible after one put of them."""
    reservation = index.reserve([name(space, n) for n in numbers], [size] * len(numbers), ME, 5.0)
    index.seal(reservation.id, [0] * len(reservation.granted), ME)
    index.check()
    return {n for n in numbers if name(space, n) in index}


def test_all_spaces_of_a_tenant_count_together(clock: FakeClock) -> None:
    index = make(clock, tenant_bytes={"ann": 4 * BLOCK})
    assert fill(index, A, 1, 2) == fill(index, B, 1, 2) == {1, 2}
    assert fill(index, C, *range(10)) == set(range(10))
    assert fill(index, A, 3) == {3}  # in exchange for her oldest: the last id of her first call
    assert (name(A, 1) in index, name(A, 2) in index, name(B, 1) in index) == (True, False, True)
    stats = index.stats().tenants
    assert stats["ann"] == {"bytes": 4 * BLOCK, "objects": 4, "refused": 0, "evictions": 1, "cap": 4 * BLOCK}
    assert stats[""] == {"bytes": 10 * BLOCK, "objects": 10, "refused": 0, "evictions": 0, "cap": 0}


def test_a_call_evicts_neither_what_it_found_nor_what_is_leased(clock: FakeClock) -> None:
    index = make(clock, tenant_bytes={"ann": 4 * BLOCK})
    fill(index, A, 1, 2, 3, 4)
    lease = index.lease([name(A, 2)], ME, 5.0)
    assert fill(index, A, 1, 5, 6, 7) == {1, 5, 6}
    assert index.stats().tenants["ann"]["refused"] == index.stats().put_refused == 1
    assert name(A, 2) in index
    index.release(lease.id, 0)
    assert fill(index, A, 7) == {7}


def test_more_than_the_cap_is_refused_and_costs_nobody(clock: FakeClock) -> None:
    index = make(clock, tenant_bytes={"ann": 2 * BLOCK, "": 6 * BLOCK})
    fill(index, C, 1)
    assert fill(index, A, 1, 2, 3, 4) == {1, 2}
    assert fill(index, A, 9, size=3 * BLOCK) == set()
    assert name(A, 1) in index
    assert fill(index, C, *range(20, 30)) == set(range(20, 26))
    usage = index.stats().tenants
    assert (usage["ann"]["refused"], usage[""]["refused"], usage[""]["bytes"]) == (3, 4, 6 * BLOCK)


def test_removed_bytes_count_until_nobody_reads_them(clock: FakeClock) -> None:
    index = make(clock, tenant_bytes={"ann": 2 * BLOCK})
    fill(index, A, 1, 2)
    index.lease([name(A, 1)], ME, 5.0)
    assert index.drop([name(A, 1)]) == 1
    assert fill(index, A, 3, 4) == {3}
    assert index.clear(A) == 1
    clock.advance(5.0)
    index.expire()
    index.check()
    assert index.stats().tenants["ann"]["bytes"] == 0


def test_a_space_that_is_described_late_takes_its_bytes_along(clock: FakeClock) -> None:
    index = make(clock)
    fill(index, C, 1, 2)
    index.assign(C, "cat")
    index.check()
    assert index.stats().tenants["cat"]["bytes"] == 2 * BLOCK
    index.assign(C, "ann")
    index.check()
    assert "cat" not in index.stats().tenants
    assert index.stats().tenants["ann"]["objects"] == 2


def test_a_space_that_changes_hands_fits_under_the_new_cap(clock: FakeClock) -> None:
    """The oldest of the new tenant go, whichever space they came with, and the old one's order knows nothing of them any more."""
    index = make(clock, slots=24, tenant_bytes={"ann": 4 * BLOCK, "": 8 * BLOCK})
    fill(index, C, *range(8))
    fill(index, A, 1, 2)
    assert fill(index, C, 8) == {8}  # the order of who is nobody's is known now: 7 went
    index.assign(C, "ann")
    index.check()
    assert index.stats().tenants["ann"]["bytes"] == 4 * BLOCK
    assert [name(A, 1) in index, name(A, 2) in index, name(C, 8) in index, name(C, 0) in index] == [True, True, True, True]
    assert fill(index, bytes(SPACE_BYTES), *range(9)) == set(range(8))
    assert index.stats().tenants["ann"]["bytes"] == 4 * BLOCK


def test_numbers_of_tenants_are_used_again_and_bounded(clock: FakeClock) -> None:
    index = make(clock, tenant_bytes={"cat": 4 * BLOCK})
    fill(index, C, 1)
    for n in range(100):
        index.assign(C, f"tenant {n}")
    index.check()
    stats = index.stats().tenants
    assert list(stats) == ["", "ann", "tenant 99"]
    assert stats["tenant 99"]["bytes"] == BLOCK
    assert int(index.table["tenant"].max()) <= 3
    index.assign(C, "cat")
    index.assign(C, "dan")
    assert index.stats().tenants["cat"]["cap"] == 4 * BLOCK  # who has a cap is not forgotten
    many = Tenants()
    for n in range(1, MOST):
        many.assign(n.to_bytes(SPACE_BYTES, "big"), f"tenant {n}")
    with pytest.raises(StoreError, match=f"counts for {MOST} tenants already; 'one more'"):
        many.assign(A, "one more")
    assert many.assign(A, "tenant 7") == (0, 7)


def test_random_calls_keep_every_cap(clock: FakeClock) -> None:
    chance = np.random.default_rng(3)
    index = make(clock, slots=40, tenant_bytes={"ann": 9 * BLOCK, "": 5 * BLOCK})
    index.assign(bytes(SPACE_BYTES), "dan")
    spaces = (A, B, C, bytes(SPACE_BYTES))
    for _ in range(300):
        ids = [name(spaces[chance.integers(4)], int(chance.integers(60))) for _ in range(chance.integers(1, 9))]
        reservation = index.reserve(ids, (BLOCK * chance.integers(1, 3, len(ids))).tolist(), ME, 5.0)
        if chance.random() < 0.3:
            index.lease(ids[::2], ME, 2.0)
        index.seal(reservation.id, [None if chance.random() < 0.1 else 0 for _ in reservation.granted], ME)
        clock.advance(0.5)
        index.check()
        for usage in index.stats().tenants.values():
            assert usage["bytes"] <= (usage["cap"] or 40 * BLOCK)
    assert min(usage["evictions"] for usage in index.stats().tenants.values()) > 0


def test_writers_that_hold_too_much_are_pushed_back(clock: FakeClock) -> None:
    index = make(clock, pending_bytes=4 * BLOCK)
    alone = index.reserve([name(C, n) for n in range(6)], [BLOCK] * 6, ME, 5.0)
    assert len(alone.granted) == 6  # nobody else is held up by it
    late = index.reserve([name(C, 10)], [BLOCK], 2, 5.0)
    assert late.outcomes.tolist() == [Outcome.REFUSED]
    assert (index.stats().pending_bytes, index.stats().dropped, index.stats().put_refused) == (6 * BLOCK, 1, 1)
    assert index.seal(alone.id, [0] * 6, ME) == 0b111111
    index.reserve([name(C, 11)], [BLOCK], 2, 5.0)
    assert len(index.reserve([name(C, n) for n in range(20, 29)], [BLOCK] * 9, ME, 5.0).granted) == 3
    index.check()
    clock.advance(5.0)
    assert index.stats().pending_bytes == 0


def test_through_the_service(config: ArenaConfig) -> None:
    space = Namespace("m", tenant="ann")
    capped = ArenaConfig(config.name, config.size_bytes, slab_bytes=PAGE, tenant_bytes={"ann": 3 * PAGE})
    with ArenaService(capped) as service:
        client = ArenaClient(service.address)
        client.describe(space.digest(), space.record(), TIMEOUT_S)
        ids = [name(space.digest()[:SPACE_BYTES], n) for n in range(5)]
        visible = client.put(ids, [page(n).data for n in range(5)], TIMEOUT_S)
        assert list(bits.each(visible)) == [0, 1, 2]
        assert client.stats(TIMEOUT_S).tenants["ann"]["refused"] == 2
        client.close()


def test_bad_caps_are_refused() -> None:
    with pytest.raises(ConfigError, match="cap of tenant 'ann' must be positive"):
        ArenaConfig("x", 1 << 20, tenant_bytes={"ann": 0})
    with pytest.raises(ConfigError, match="storage.pending_bytes must be positive"):
        ArenaConfig("x", 1 << 20, pending_bytes=-1)
    with pytest.raises(ConfigError, match="storage.huge_pages 'on' must be one of auto, off"):
        ArenaConfig("x", 1 << 20, huge_pages="on")
