"""The runner of the benchmarks: one row per number, one row per failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import Row
from benchmarks.__main__ import collect, main, table

GOOD = Row(name="copy", value=12.5, unit="GB/s", baseline=10.0, ratio=1.25, goal=">= 0.8", met=True)


def failing() -> Sequence[Row]:
    raise MemoryError("no room for the pools")


def test_a_benchmark_that_fails_is_a_row_and_the_others_run() -> None:
    rows, failed = collect({"arena": failing, "copies": lambda: [GOOD]})
    assert failed
    assert [(row["name"], row["goal"], row["met"]) for row in rows] == [
        ("arena", "MemoryError: no room for the pools", False),
        ("copy", ">= 0.8", True),
    ]
    console = Console(width=120, record=True)
    console.print(table(rows))
    text = console.export_text()
    assert "MemoryError: no room for the pools" in text
    assert "12.5" in text


def test_a_step_of_an_idle_tier_calls_nothing() -> None:
    """Counted, not timed."""
    from benchmarks import bench_core

    decoded, others = bench_core._decode()
    assert [steps for steps, _ in decoded] == [63, 64, 64, 9]
    assert len({calls for _, calls in decoded}) == 1
    assert others == 0


def test_what_the_core_is_measured_by_has_happened() -> None:
    """Few pages, so that it takes no time: all are inserted, those that are asked for are evicted."""
    from benchmarks import bench_core

    driven = bench_core._Driven(bench_core.HYBRID, 300)
    driven.serve(bench_core._prompt(0, 200 * bench_core.PAGE))
    assert driven.cached() == 200 + 200 + 50
    assert driven.cache.insert_s > 0
    assert driven.evict(300) == 450


def test_a_trace_that_is_not_here_is_a_row_that_says_so(tmp_path: Path) -> None:
    from benchmarks import bench_replay

    (row,) = bench_replay._rows(bench_replay.Case(tmp_path / "conversation_trace.jsonl", 10))
    assert (row["name"], row["met"]) == ("replay conversation_trace", False)
    assert row["goal"] == "conversation_trace.jsonl is not here; HICACHE_TRACES names its folder"


def test_rows_have_the_agreed_keys() -> None:
    rows, failed = collect({"copies": lambda: [{"name": "copy", "met": True}]})  # type: ignore[typeddict-item]
    assert failed
    assert rows[0]["goal"] == "KeyError: 'a row has the keys name, met and not name, value, unit, baseline, ratio, goal, met'"


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["speed"])
    assert stop.value.code == 2
    assert "no benchmark is called speed; choose from rule, core, replay, copies, host, arena" in capsys.readouterr().err


def test_results_are_a_list_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies, at a size that takes no time."""
    from benchmarks import bench_copies

    small = bench_copies.Model("1x1x8 fp32", 1, 1, 8, "float32", 4, pages=2, slots=4)
    monkeypatch.setattr(bench_copies, "MODELS", (small,))
    assert main(["copies", "--output", str(tmp_path / "results.json")]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in rows][:2] == [
        "copy host to device, layer_first, 1x1x8 fp32, 2048 B runs",
        "copy device to host, layer_first, 1x1x8 fp32, 2048 B runs",
    ]
    assert len(rows) == 8
    assert all(set(row) == {"name", "value", "unit", "baseline", "ratio", "goal", "met"} for row in rows)
