"""``hicache-ray verify``: a hit equals a recompute, on this machine; which cells ran and which not, and what every model gave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from hicache_ray import cli_out
from hicache_ray.errors import ConfigError
from hicache_ray.verify.result import CHECKS, Result, Verdict

#: Problems that are told of one run; all of them are in the JSON.
TOLD = 20
Models = Annotated[list[str] | None, typer.Option("--model", help="a family, or the folder of a saved model; repeat for several")]
Only = "repeat for several; default: all that this machine can run"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)


def verify(
    model: Models = None,
    every: Annotated[bool, typer.Option("--all", help="all families, one tiny model with random weights each")] = False,
    full: Annotated[bool, typer.Option("--full", help="every combination of choices, not only every pair")] = False,
    json_to: cli_out.JsonTo = None,
    layout: Annotated[list[str] | None, typer.Option(help=f"layout of the host pools; {Only}")] = None,
    io_backend: Annotated[list[str] | None, typer.Option(help=f"io backend; {Only}")] = None,
    write_policy: Annotated[list[str] | None, typer.Option(help=f"write policy; {Only}")] = None,
    tier: Annotated[list[str] | None, typer.Option(help=f"device, host, storage or other replica; {Only}")] = None,
    page_size: Annotated[int | None, typer.Option(help="tokens in a page; default 16, for a folder 64")] = None,
    grid: Annotated[int | None, typer.Option(help="tokens in a prefill chunk; default 4 pages")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of weights, prompts and the order of events")] = 0,
    directory: Annotated[str, typer.Option(help="folder of the storage that is used meanwhile")] = "/dev/shm",
) -> None:
    """Prove on this machine that a hit equals a recompute, for a model, in every tier, layout and policy."""
    with cli_out.working() as work:
        cli_out.check_json(json_to)
        if not model and not every:
            raise ConfigError("name a family or a folder with --model, or verify all families with --all")
        # Set before torch is imported: later it would be too late, and the results would be other bits.
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
        from hicache_ray.verify.run import Options, run

        page = page_size or (64 if any(os.path.isdir(name) for name in model or ()) else 16)
        axes = {"layout": layout, "io_backend": io_backend, "write_policy": write_policy, "tier": tier}
        wanted = {name: values for name, values in axes.items() if values}
        options = Options(model or (), full, wanted, page, grid or 4 * page, dtype, seed, threads, directory)
        result = run(options, work.progress)
        cli_out.write_json(json_to, result.to_json())
    print_verified(result, to_stderr=json_to == "-")
    raise typer.Exit(0 if result.passed else 1)


def print_verified(result: Result, to_stderr: bool) -> None:
    """The tables, what was not run and why, then what was wrong."""
    out = cli_out.out(to_stderr)
    if result.cells:
        out.print(cells_table(result))
    for text in _not_run(result):
        out.print(text, markup=False)
    out.print(models_table(result))
    out.print(f"{'all checks passed' if result.passed else 'NOT PASSED'} in {result.seconds:,.0f} s", markup=False)
    for problem in result.problems[:TOLD]:
        cli_out.complain(problem)
    if len(result.problems) > TOLD:
        cli_out.complain(f"and {len(result.problems) - TOLD} more; --json FILE has them all")


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
