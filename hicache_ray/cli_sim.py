"""``hicache-ray sim``: the production core on virtual time, seed after seed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from hicache_ray import cli_out
from hicache_ray.errors import ConfigError
from hicache_ray.interrupts import Interrupts
from hicache_ray.simulate import Failed, Tally, simulate
from hicache_ray.simulate_cases import cases
from hicache_ray.simulate_report import Loss, Row, losses, measure


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sim)


def sim(
    seed: Annotated[int, typer.Option(min=0, help="one seed is one history")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="events of a history")] = 20_000,
    case: Annotated[
        str, typer.Option(help="what is simulated; random: drawn from the seed; all: every case; mixed: in turn a named and a random one")
    ] = "random",
    minutes: Annotated[float, typer.Option(min=0, help="go on with the next seeds for so long")] = 0,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="measure how much each policy reuses of branching prompts, and how much of that survives a lost storage node"
        ),
    ] = False,
) -> None:
    """Simulate cache groups, their ranks and storage under faults. After every event every byte that it used is checked, and every
    invariant for what it changed; all of them for everything every 64 events, and when all is at rest."""
    with Interrupts() as interrupts, cli_out.ended_well():
        try:
            if report:
                cli_out.out().print(report_table(measure(seed, steps)))
                cli_out.out().print(loss_table(losses(seed, steps)))
            else:
                _live(seed, steps, case, minutes, interrupts)
        except Failed as failure:
            cli_out.complain(str(failure))
            raise typer.Exit(1) from None


def _live(seed: int, steps: int, case: str, minutes: float, interrupts: Interrupts) -> None:
    """Histories until the time is over, at least one of every case that is asked for."""
    until, errors = time.monotonic() + minutes * 60, cli_out.err()
    told = []
    while True:
        for name in _names(case, seed):
            begun = time.monotonic()
            errors.print(f"hicache-ray sim --seed {seed} --steps {steps} --case {name}", markup=False)
            tally = simulate(seed, steps, name)
            interrupts.check()  # its exception may have been lost in a generator that ended just then
            told.append((seed, name, tally, time.monotonic() - begun))
            if time.monotonic() >= until and minutes:
                break
        seed += 1
        if time.monotonic() >= until:
            break
    cli_out.out().print(lives_table(told[-40:]))


def _names(case: str, seed: int) -> Sequence[str]:
    named = list(cases())
    if case not in ("random", "all", "mixed", *named):
        raise ConfigError(f'there is no case "{case}"; choose one of {", ".join(["random", *named, "all", "mixed"])}')
    if case == "mixed":
        return (named[seed // 2 % len(named)] if seed % 2 else "random",)
    return named if case == "all" else (case,)


def lives_table(told: list[tuple[int, str, Tally, float]]) -> Table:
    """One row per history."""
    table = Table(title="every invariant held")
    width = max((len(name) for _, name, _, _ in told), default=0)  # names are to be typed again
    for name in (
        "seed",
        "case",
        "events",
        "us per event",
        "virtual s",
        "requests",
        "served",
        "hits",
        "tokens reused",
        "restarts",
        "rests",
        "history",
    ):
        least = width if name == "case" else None
        table.add_column(name, justify="left" if name == "case" else "right", min_width=least)
    for seed, name, t, seconds in told:
        table.add_row(
            str(seed), name, f"{t.events:,}", f"{seconds / t.events * 1e6:.0f}", f"{t.seconds:.1f}", f"{t.requests:,}", f"{t.served:,}",
            f"{t.hits:,}", f"{t.token_share:.0%}", str(t.restarts), str(t.rests), f"{t.history:08x}",
        )  # fmt: skip
    return table


def report_table(rows: list[Row]) -> Table:
    """What each policy reuses."""
    table = Table(title="share of requests that reuse anything, and of prompt tokens by where they came from")
    for name in ("model", "write policy", "eviction", "requests", "hits", "tokens reused", "device", "host", "storage", "computed"):
        table.add_column(name, justify="left" if name in ("model", "write policy", "eviction") else "right")
    last = ""
    for row in rows:
        if last and row.case != last:
            table.add_section()
        last = row.case
        t, total = row.tally, sum(row.tally.tokens.values()) or 1
        shares = (f"{t.tokens[name] / total:.1%}" for name in ("device", "host", "storage", "computed"))
        table.add_row(row.case, row.policy, row.eviction, f"{t.served:,}", f"{t.hit_share:.1%}", f"{t.token_share:.1%}", *shares)
    return table


def loss_table(rows: list[Loss]) -> Table:
    """What survives the loss of a storage node."""
    table = Table(title="share of hit tokens that are left without one of ten storage nodes")
    for name in ("placement", "copies", "mean", "least", "most"):
        table.add_column(name, justify="left" if name == "placement" else "right")
    for row in rows:
        table.add_row(row.placement, str(row.replicas), f"{row.mean:.1%}", f"{min(row.left):.1%}", f"{max(row.left):.1%}")
    return table
