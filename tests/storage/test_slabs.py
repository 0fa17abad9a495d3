"""Arithmetic of slabs, runs and slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.errors import ConfigError, Inconsistent
from hicache_ray.storage.runs import Numbers
from hicache_ray.storage.slabs import ALIGN, BLOCK, SHARES_WORD, SlabMap, Window, default_slab_bytes, slot_bytes, slots_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [64, 4 * KIB, 32 * KIB, 48 * KIB, 64 * KIB, MIB, 3 * MIB])
def test_common_sizes_waste_nothing(size: int) -> None:
    assert slot_bytes(size) == size


@given(st.integers(4 * KIB, 64 * MIB))
def test_a_class_is_at_most_a_sixty_fourth_larger(length: int) -> None:
    assert length <= slot_bytes(length) < length + max(length / 64, ALIGN)
    assert slot_bytes(length) % ALIGN == 0
    assert slot_bytes(slot_bytes(length)) == slot_bytes(length)


@given(st.lists(st.integers(0, 1 << 50) | st.integers(0, 5000), max_size=30))
def test_classes_of_many_at_once(lengths: list[int]) -> None:
    assert slots_bytes(np.array(lengths, np.int64)).tolist() == [slot_bytes(length) for length in lengths]


def test_classes_are_few() -> None:
    assert len({slot_bytes(length) for length in range(MIB, 2 * MIB + 1, 64)}) == 65


def test_which_objects_share_a_generation_word() -> None:
    assert slot_bytes(SHARES_WORD) < BLOCK == slot_bytes(SHARES_WORD + 1)


@given(st.integers(4 * KIB, 64 * MIB))
def test_a_run_wastes_at_most_one_part_in_24(length: int) -> None:
    slabs = SlabMap(512 * MIB, 4 * MIB)
    assert len(take(slabs, length)) == 1
    (run,) = slabs.runs.values()
    assert run.count * run.slot_bytes >= run.slabs * slabs.slab_bytes * 23 / 24


@given(st.integers(4 * KIB, 64 * MIB))
def test_size_classes_and_runs_waste_less_than_six_percent(length: int) -> None:
    slabs = SlabMap(512 * MIB, 4 * MIB)
    take(slabs, length)
    (run,) = slabs.runs.values()
    assert run.count * length > run.slabs * slabs.slab_bytes * 0.94


def test_slots_of_one_class_follow_each_other() -> None:
    slabs = SlabMap(16 * BLOCK, 4 * BLOCK)
    assert take(slabs, BLOCK, 6).tolist() == [n * BLOCK for n in range(6)]
    assert slabs.free_slabs == 2


def test_slots_given_back_are_given_out_in_order() -> None:
    """Neighbours are copied as one."""
    slabs = SlabMap(16 * BLOCK, 16 * BLOCK)
    held = take(slabs, BLOCK, 12)
    give(slabs, held[[7, 3, 5, 4]])
    assert take(slabs, BLOCK, 6).tolist() == [n * BLOCK for n in (3, 4, 5, 7, 12, 13)]
    check(slabs, np.arange(14) * BLOCK)


def test_objects_larger_than_a_slab_take_adjacent_slabs() -> None:
    slabs = SlabMap(8 * BLOCK, BLOCK)
    small, large = take(slabs, BLOCK), take(slabs, 5 * BLOCK)
    assert (small.tolist(), large.tolist(), slabs.runs[1].slabs) == ([0], [BLOCK], 5)
    assert len(take(slabs, 5 * BLOCK)) == 0
    check(slabs, np.concatenate([small, large]))


def test_an_empty_run_dissolves_and_serves_another_class() -> None:
    slabs = SlabMap(2 * BLOCK, BLOCK)
    held = take(slabs, 64, 2 * BLOCK // 64)
    assert len(take(slabs, 64)) == len(take(slabs, BLOCK)) == 0
    give(slabs, held[: BLOCK // 64])
    assert take(slabs, BLOCK).tolist() == [0]
    check(slabs, np.concatenate([[0], held[BLOCK // 64 :]]))


def test_the_coldest_window_is_found() -> None:
    slabs = SlabMap(4 * BLOCK, BLOCK)
    for tick in (5, 1, 2, 9):
        slabs.unpin(take(slabs, BLOCK, tick=tick))
    assert slabs.coldest(BLOCK, before=10) == Window(1.0, BLOCK, 2 * BLOCK)
    assert slabs.coldest(2 * BLOCK, before=10) == Window(1.5, BLOCK, 3 * BLOCK)
    assert slabs.coldest(2 * BLOCK, before=2) is None


def test_a_window_takes_whole_runs() -> None:
    slabs = SlabMap(5 * BLOCK, BLOCK)
    for size, tick in ((BLOCK, 9), (3 * BLOCK, 1), (BLOCK, 9)):
        slabs.unpin(take(slabs, size, tick=tick))
    assert slabs.coldest(2 * BLOCK, before=10) == Window(1.0, BLOCK, 4 * BLOCK)


def test_pinned_slots_are_in_no_window() -> None:
    slabs = SlabMap(2 * BLOCK, BLOCK)
    pinned, other = take(slabs, BLOCK), take(slabs, BLOCK, tick=2)
    slabs.unpin(other)
    assert slabs.coldest(2 * BLOCK, before=10) is None
    with pytest.raises(Inconsistent, match="pinned"):
        slabs.give(pinned, np.array([1]))


def test_check_sees_what_is_wrong() -> None:
    slabs = SlabMap(4 * BLOCK, BLOCK)
    held = take(slabs, BLOCK)
    check(slabs, held)
    for flags, ticks, says in (([False], [1], "pinned count"), ([True], [99], "tick sum")):
        with pytest.raises(Inconsistent, match=says):
            slabs.check(held, np.array(flags), np.array(ticks))
    with pytest.raises(Inconsistent, match="free slab"):
        slabs.check(held + BLOCK, np.array([True]), np.array([1]))


def test_bad_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        SlabMap(MIB, 5000)
    with pytest.raises(ConfigError, match="less than one slab"):
        SlabMap(BLOCK, 2 * BLOCK)


@pytest.mark.parametrize(("capacity", "slab"), [(BLOCK, BLOCK), (MIB, 8 * KIB), (1 << 30, 8 * MIB), (1 << 45, 1 << 30)])
def test_default_slabs(capacity: int, slab: int) -> None:
    assert default_slab_bytes(capacity) == slab


def take(slabs: SlabMap, length: int, count: int = 1, tick: int = 1) -> Numbers:
    return slabs.take(slot_bytes(length), count, tick)


def give(slabs: SlabMap, offsets: Numbers) -> None:
    slabs.unpin(offsets)
    slabs.give(offsets, np.ones(len(offsets), np.int64))


def check(slabs: SlabMap, offsets: Numbers) -> None:
    """All pinned, used at tick 1."""
    slabs.check(offsets, np.ones(len(offsets), np.bool_), np.ones(len(offsets), np.int64))
