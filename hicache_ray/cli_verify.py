"""What ``hicache-ray verify`` shows: which cells ran and which not, and what every model gave."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from hicache_ray.verify.result import CHECKS, Result, Verdict

#: Columns of tables that go to a file or a pipe; and problems that are told of one run, all of which are in the JSON.
WIDTH, TOLD = 120, 20


def print_verified(result: Result, to_stderr: bool) -> None:
    """The tables, what was not run and why, then what was wrong."""
    out = Console(stderr=to_stderr, highlight=False)
    out = out if out.is_terminal else Console(stderr=to_stderr, highlight=False, width=WIDTH)
    if result.cells:
        out.print(cells_table(result))
    for text in _not_run(result):
        out.print(text, markup=False)
    out.print(models_table(result))
    out.print(f"{'all checks passed' if result.passed else 'NOT PASSED'} in {result.seconds:,.0f} s", markup=False)
    console = Console(stderr=True, highlight=False)
    for problem in result.problems[:TOLD]:
        console.print(problem, style="bold red", markup=False)
    if len(result.problems) > TOLD:
        console.print(f"and {len(result.problems) - TOLD} more; --json FILE has them all", style="bold red", markup=False)


def cells_table(result: Result) -> Table:
    """Every cell that ran, and for how many models it passed."""
    table = Table(title=f"restores: page {result.page_size}, grid {result.grid}, {result.dtype}")
    for name in ("layout", "io backend", "write policy", "tier"):
        table.add_column(name)
    table.add_column("models", justify="right")
    for cell in result.cells:
        verdicts = [c.verdict for c in result.checks if c.cell == cell]
        passed = verdicts.count(Verdict.PASSED)
        text = f"{passed} passed" if passed == len(verdicts) else f"{passed} of {len(verdicts)} PASSED"
        table.add_row(cell.layout, cell.io_backend, cell.write_policy, cell.tier, text)
    return table


def _not_run(result: Result) -> Iterator[str]:
    if result.left_out:
        yield f"not run: {len(result.left_out)} cells of which every pair of choices is in another one (--full runs them)"
    for choice, why in result.not_run.items():
        yield f"not run: {choice}: {why}"


def models_table(result: Result) -> Table:
    """One row per model and check."""
    table = Table(title="models")
    table.add_column("model")
    table.add_column("check")
    table.add_column("verdict")
    table.add_column("what it showed")
    for model in result.models:
        for name in CHECKS:
            checks = result.of(model, name)
            if not checks:
                continue
            failed = [c for c in checks if c.verdict is Verdict.FAILED]
            text = (failed or checks)[0].note
            verdict = "FAILED" if failed else checks[0].verdict.value
            if name == "restore":
                text = f"{len(checks) - len(failed)} of {len(checks)} cells; {text}"
            table.add_row(model, name, verdict, text)
        table.add_section()
    return table
