"""Ids in arrays against a dict; and what they weigh."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_ray.errors import Inconsistent
from hicache_ray.storage import kernel_table
from hicache_ray.storage import table as module
from hicache_ray.storage.table import IdTable, packed, unpacked
from hicache_ray.store import KEY_BYTES
from tests.storage.objects import TAG, key, name

NUMBERS = st.lists(st.integers(0, 400), max_size=60, unique=True)


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 64), np.uint8)


class Small(IdTable):
    LEAST = 128


class Tables(RuleBasedStateMachine):
    """Few numbers, so that slots are taken and left many times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Small(columns={"number": "i8"})
        self.twin: dict[bytes, int] = {}
        self.hidden: list[int] = []

    @rule(numbers=NUMBERS)
    def add(self, numbers: list[int]) -> None:
        fresh = [n for n in numbers if name(n) not in self.twin]
        rows = self.table.add([name(n) for n in fresh])
        assert not set(rows.tolist()) & (set(self.twin.values()) | set(self.hidden))
        self.table["number"][rows] = fresh
        self.twin.update({name(n): row for n, row in zip(fresh, rows.tolist(), strict=True)})

    @rule(numbers=NUMBERS, hide=st.sampled_from(["", "all", "one by one"]))
    def remove(self, numbers: list[int], hide: str) -> None:
        rows = [self.twin.pop(name(n)) for n in numbers if name(n) in self.twin]
        if hide:
            for row in rows if hide == "one by one" else []:
                self.table.hide_one(row)
            self.table.hide(np.array([] if hide == "one by one" else rows, np.int64))
            self.hidden += rows
        else:
            self.table.remove(np.array(rows, np.int64))

    @rule(one=st.booleans())
    def free(self, one: bool) -> None:
        if one and self.hidden:
            self.table.free_one(self.hidden.pop())
        self.table.free(np.array(self.hidden, np.int64))
        self.hidden.clear()

    @rule(numbers=NUMBERS)
    def find(self, numbers: list[int]) -> None:
        wanted = [self.twin.get(name(n), -1) for n in numbers]
        assert self.table.find([name(n) for n in numbers]).tolist() == wanted
        assert self.table.find_pairs([key(n) for n in numbers], TAG).tolist() == wanted
        assert [self.table.find_one(name(n)) for n in numbers] == wanted

    @rule(number=st.integers(0, 400))
    def starting(self, number: int) -> None:
        prefix = key(number)[: KEY_BYTES - 1]
        found = unpacked(self.table.ids(self.table.rows(prefix)))
        assert sorted(found) == sorted(id for id in self.twin if id.startswith(prefix))

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.twin)
        assert unpacked(self.table.ids(self.table.rows())) == sorted(self.twin, key=self.twin.__getitem__)
        assert all(name(int(self.table["number"][row])) == id for id, row in self.twin.items())


class CompiledTables(Tables):
    """The same by the compiled loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table.compiled = kernel_table


TestTables, TestCompiledTables = Tables.TestCase, CompiledTables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=25, derandomize=True, deadline=None)
TestCompiledTables.settings = TestTables.settings


@pytest.mark.parametrize("width", [64, KEY_BYTES])
def test_both_loops_find_the_same(width: int) -> None:
    """In a table that is as full as tables get; ids of equal hashes, at the ends of each other's searches, among them."""
    chance = np.random.default_rng(5)
    ids = chance.integers(0, 256, (3000, width), np.uint8)
    ids[1000:2000] = ids[:1000]
    words = ids[1000:2000].view(np.uint64)
    words[:, 0] += module._WORD_FACTORS[1]
    words[:, 1] -= module._WORD_FACTORS[0]
    table = IdTable(width)
    assert (table.hashes(ids[:1000]) == table.hashes(ids[1000:2000])).all()
    rows = table.add(ids[:2000])
    table.remove(rows[::3])
    wanted = np.where(np.arange(3000) < 2000, np.append(rows, np.zeros(1000, np.int64)), -1)
    wanted[:2000:3] = -1
    keys, tags = ids[:, : width - 16], [ids[n, width - 16 :].tobytes() for n in (1, 2, 2500)]
    plain = [found.tolist() for found in table.find_tagged(keys, tags)]
    assert table.find(ids).tolist() == wanted.tolist()
    assert [plain[0][1], plain[1][2], plain[2][2500], plain[0][2]] == [rows[1], rows[2], -1, -1]
    table.compiled = kernel_table
    assert table.find(ids).tolist() == wanted.tolist()
    assert [found.tolist() for found in table.find_tagged(keys, tags)] == plain
    assert table.find_tagged(keys[:0], tags)[2].tolist() == [] == table.find_tagged(keys, [])


def test_equal_fingerprints_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids at the same place with the same mark: slow, and right."""
    monkeypatch.setattr(module, "_mixed", np.zeros_like)
    monkeypatch.setattr(IdTable, "hash_one", lambda self, id: 0)
    table = IdTable()
    rows = table.add([name(n) for n in range(40)])
    assert table.find([name(n) for n in range(50)]).tolist() == [*rows.tolist(), *[-1] * 10]
    table.remove(rows[::2])
    assert table.find([name(n) for n in range(40)]).tolist() == [-1 if n % 2 == 0 else rows[n] for n in range(40)]
    table.check()


def test_both_ways_to_hash_agree() -> None:
    ids = [hashlib.sha512(bytes([n])).digest() for n in range(100)]
    table = IdTable()
    rows = table.add(ids)
    assert [table.find_one(id) for id in ids] == rows.tolist() == table.find(packed(ids)).tolist()


def test_keys_of_another_width() -> None:
    table = IdTable(KEY_BYTES)
    rows = table.add([key(n) for n in range(1000)])
    assert table.find([key(n) for n in range(1001)]).tolist() == [*rows.tolist(), -1]


@pytest.mark.parametrize("count", [10_000, 12_501, 49_000, 100_000])
def test_a_table_is_light(count: int) -> None:
    table = IdTable()
    for start in range(0, count, 1000):
        table.add(random_ids(min(1000, count - start), start))
    assert len(table) == count
    assert table.nbytes <= 140 * count


def test_churn_does_not_grow_it() -> None:
    table = IdTable()
    rows = table.add(random_ids(2000))
    before = 0
    for n in range(60):
        table.remove(rows[:1000])
        rows = np.concatenate([rows[1000:], table.add(random_ids(1000, n + 1))])
        before = before or table.nbytes
    table.check()
    assert table.nbytes <= 2 * before
    assert len(table) == 2000


def test_what_is_absent_cannot_be_removed() -> None:
    table = IdTable()
    rows = table.add(random_ids(10))
    table.remove(rows)
    with pytest.raises(Inconsistent, match="absent"):
        table.hide(rows)
