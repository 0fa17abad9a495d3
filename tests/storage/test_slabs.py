"""Arithmetic of slabs, runs and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.errors import ConfigError, Inconsistent
from hicache_ray.storage.slabs import ALIGN, BLOCK, SHARES_WORD, Entry, SlabMap, State, default_slab_bytes, slot_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [64, 4 * KIB, 32 * KIB, 48 * KIB, 64 * KIB, MIB, 3 * MIB])
def test_common_sizes_waste_nothing(size: int) -> None:
    assert slot_bytes(size) == size


@given(st.integers(4 * KIB, 64 * MIB))
def test_a_class_is_at_most_a_sixty_fourth_larger(length: int) -> None:
    assert length <= slot_bytes(length) < length + max(length / 64, ALIGN)
    assert slot_bytes(length) % ALIGN == 0
    assert slot_bytes(slot_bytes(length)) == slot_bytes(length)


def test_classes_are_few() -> None:
    assert len({slot_bytes(length) for length in range(MIB, 2 * MIB + 1, 64)}) == 65


def test_which_objects_share_a_generation_word() -> None:
    assert slot_bytes(SHARES_WORD) < BLOCK == slot_bytes(SHARES_WORD + 1)


@given(st.integers(4 * KIB, 64 * MIB))
def test_a_run_wastes_at_most_one_part_in_24(length: int) -> None:
    slabs = SlabMap(512 * MIB, 4 * MIB)
    entry = slabs.allocate(b"", length, slot_bytes(length), 1)
    assert entry is not None
    run = entry.run
    assert len(run.entries) * run.slot_bytes >= run.slabs * slabs.slab_bytes * 23 / 24


def test_slots_of_one_class_follow_each_other() -> None:
    slabs = SlabMap(16 * BLOCK, 4 * BLOCK)
    assert [allocate(slabs, BLOCK).offset for _ in range(6)] == [n * BLOCK for n in range(6)]
    assert slabs.free_slabs == 2


def test_objects_larger_than_a_slab_take_adjacent_slabs() -> None:
    slabs = SlabMap(8 * BLOCK, BLOCK)
    small = allocate(slabs, BLOCK)
    large = allocate(slabs, 5 * BLOCK)
    assert (small.offset, large.offset, large.run.slabs) == (0, BLOCK, 5)
    assert slabs.allocate(b"", 5 * BLOCK, 5 * BLOCK, 1) is None
    slabs.check()


def test_an_empty_run_dissolves_and_serves_another_class() -> None:
    slabs = SlabMap(2 * BLOCK, BLOCK)
    held = [allocate(slabs, 64) for _ in range(2 * BLOCK // 64)]
    assert slabs.allocate(b"", BLOCK, BLOCK, 1) is None
    for entry in held[: BLOCK // 64]:
        slabs.unpin(entry)
        slabs.free(entry)
    assert allocate(slabs, BLOCK).offset == 0
    slabs.check()


def test_the_coldest_window_is_found() -> None:
    slabs = SlabMap(4 * BLOCK, BLOCK)
    for tick in (5, 1, 2, 9):
        slabs.unpin(allocate(slabs, BLOCK, tick))
    single, double = slabs.coldest(BLOCK, before=10), slabs.coldest(2 * BLOCK, before=10)
    assert single is not None
    assert double is not None
    assert [run.start for run in single.runs] == [1]
    assert [run.start for run in double.runs] == [1, 2]
    assert double.mean_tick == 1.5
    assert slabs.coldest(2 * BLOCK, before=2) is None


def test_pinned_slots_are_in_no_window() -> None:
    slabs = SlabMap(2 * BLOCK, BLOCK)
    pinned, other = allocate(slabs, BLOCK, 1), allocate(slabs, BLOCK, 2)
    slabs.unpin(other)
    assert slabs.coldest(2 * BLOCK, before=10) is None
    with pytest.raises(Inconsistent, match="pinned"):
        slabs.free(pinned)


def test_check_sees_what_is_wrong() -> None:
    slabs = SlabMap(4 * BLOCK, BLOCK)
    entry = allocate(slabs, BLOCK)
    slabs.check()
    entry.pins = 0
    with pytest.raises(Inconsistent, match="pinned count"):
        slabs.check()
    entry.pins, entry.run.tick_sum = 1, 99
    with pytest.raises(Inconsistent, match="tick sum"):
        slabs.check()


def test_bad_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        SlabMap(MIB, 5000)
    with pytest.raises(ConfigError, match="less than one slab"):
        SlabMap(BLOCK, 2 * BLOCK)


@pytest.mark.parametrize(("capacity", "slab"), [(BLOCK, BLOCK), (MIB, 8 * KIB), (1 << 30, 8 * MIB), (1 << 45, 1 << 30)])
def test_default_slabs(capacity: int, slab: int) -> None:
    assert default_slab_bytes(capacity) == slab


def allocate(slabs: SlabMap, size: int, tick: int = 1) -> Entry:
    entry = slabs.allocate(b"", size, slot_bytes(size), tick)
    assert entry is not None
    assert entry.state is State.RESERVED
    return entry
