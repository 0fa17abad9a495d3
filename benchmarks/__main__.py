"""``python -m benchmarks [name ...]``: run the benchmarks, print one table, write ``benchmarks/results.json``.

The exit code is 0 when every benchmark ran, whether or not a goal was met (a shared machine may miss one); 1 when one failed to run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import Row

NAMES = ("rule", "core", "replay", "copies", "host", "arena", "disk", "tcp")
RESULTS = Path(__file__).with_name("results.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when all of it ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks and print one table.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones: {', '.join(NAMES)}; all by default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the results go, as JSON")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    names = options.names or [name for name in NAMES if importlib.util.find_spec(f"benchmarks.bench_{name}")]
    rows, failed = collect({name: _runner(name) for name in names})
    options.output.write_text(json.dumps(rows, indent=2) + "\n")
    Console(width=max(Console().width, 132)).print(table(rows))
    return int(failed)


def _runner(name: str) -> Callable[[], Sequence[Row]]:
    return lambda: importlib.import_module(f"benchmarks.bench_{name}").run()


def collect(benchmarks: Mapping[str, Callable[[], Sequence[Row]]]) -> tuple[list[Row], bool]:
    """The rows of all benchmarks, and whether one failed. One that fails gives a row with its error, and the others still run."""
    rows: list[Row] = []
    failed = False
    for name, run in benchmarks.items():
        print(f"benchmark {name} ...", file=sys.stderr, flush=True)
        try:
            found = list(run())
            if wrong := [row for row in found if set(row) != set(Row.__annotations__)]:
                raise KeyError(f"a row has the keys {', '.join(wrong[0])} and not {', '.join(Row.__annotations__)}")
            rows += found
        except Exception as error:
            failed = True
            rows.append(Row(name=name, value=None, unit="", baseline=None, ratio=None, goal=f"{type(error).__name__}: {error}", met=False))
    return rows, failed


def table(rows: Sequence[Row]) -> Table:
    """The rows as people read them."""
    out = Table(title="Ratios in one run on this machine")
    for heading in ("what", "value", "unit", "baseline", "ratio", "goal", "met"):
        out.add_column(heading, justify="right" if heading in ("value", "baseline", "ratio") else "left", overflow="fold")
    for row in rows:
        numbers = (_number(row["value"]), row["unit"], _number(row["baseline"]), _number(row["ratio"]))
        out.add_row(row["name"], *numbers, str(row["goal"]), "[green]yes[/green]" if row["met"] else "[red]no[/red]")
    return out


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value or "-")


if __name__ == "__main__":
    sys.exit(main())
