"""The benchmark of the arena, at sizes that take no time; and its peers, of which the files are always there."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from benchmarks import Row, bench_arena, peers

CASE = bench_arena.Case("4 x 8 KiB", 4, 8 << 10, put_goal=0.6, get_goal=0.7, repetitions=2, peers=True)


def test_rows_of_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    files, *_ = peers.known()
    absent = peers.Known("Mooncake over TCP", 3.0, peers._files, missing="mooncake-transfer-engine is not installed")
    monkeypatch.setattr(bench_arena, "known", lambda: [files, absent])
    with bench_arena._service() as socket:
        client = bench_arena.ArenaClient(socket)
        buffers = [bench_arena._touched(16 * CASE.page_bytes, seed) for seed in (1, 0)]
        rows = bench_arena._copies(client, CASE, buffers)
        lookup = bench_arena._lookup(client, 32, 1e9)
        client.close()
    assert [row["name"] for row in rows] == [
        "arena put, 4 x 8 KiB",
        "arena get, 4 x 8 KiB",
        "arena put, 4 x 8 KiB, than a file per page in shared memory",
        "arena get, 4 x 8 KiB, than a file per page in shared memory",
        "arena put, 4 x 8 KiB, than Mooncake over TCP",
        "arena get, 4 x 8 KiB, than Mooncake over TCP",
    ]
    assert [row["goal"] for row in rows[:4]] == [">= 0.6", ">= 0.7", ">= 1.5", ">= 1.5"]
    assert all(row["value"] and row["baseline"] and row["ratio"] for row in rows[:4])
    assert [(row["value"], row["goal"], row["met"]) for row in rows[4:]] == [
        (None, ">= 3; mooncake-transfer-engine is not installed", False)
    ] * 2
    assert lookup["met"] is True
    assert all(set(row) == set(Row.__annotations__) for row in [*rows, lookup])


def test_a_batch_takes_the_next_pages() -> None:
    pages = bench_arena.Pages(CASE, [np.repeat(np.arange(9, dtype=np.uint8), CASE.page_bytes)] * 2)
    seen = []
    for _ in range(3):
        pages.turn()
        seen.append([int(page[0]) for page in pages.sources])
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_files_keep_pages() -> None:
    files, *others = peers.known()
    sources, targets = [np.full(100, n, np.uint8) for n in (1, 2)], [np.zeros(100, np.uint8) for _ in range(2)]
    with files.open() as peer:
        peer.put(["a", "b"], sources)
        peer.get(["b", "a"], targets)
        assert [int(target[99]) for target in targets] == [2, 1]
        with pytest.raises(RuntimeError, match="the file of page a is too short"):
            peer.get(["a"], [np.zeros(101, np.uint8)])
        peer.clear()
        with pytest.raises(FileNotFoundError):
            peer.get(["a"], targets[:1])
    if importlib.util.find_spec("mooncake") is None:
        assert {other.missing for other in others} == {"mooncake-transfer-engine is not installed"}
