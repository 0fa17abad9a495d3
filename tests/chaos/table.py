"""The results as people read them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.chaos.clients import DEADLINE_S, SHARE
from tests.chaos.faults import PAUSE_S, Result


def show(results: Sequence[Result], remains: Sequence[str]) -> None:
    console = Console(width=160)
    out = Table(title=f"Faults under 8 clients; frozen and cut for {PAUSE_S:g} s; deadline of a request {DEADLINE_S:g} s")
    for heading in ("fault", "fault to ping s", "ping to service s", "hits", "usual", "requests", "wrong", "lost", "hung", "sent again"):
        out.add_column(heading, justify="left" if heading == "fault" else "right")
    for heading in ("slowest s", "left at rest", "met"):
        out.add_column(heading, justify="right" if heading == "slowest s" else "left", overflow="fold")
    for r in results:
        counts = (str(n) for n in (r.requests, r.wrong, r.lost, r.hung, r.retries))
        shares = (f"{r.hits:.2f}", f"{r.usual:.2f}")
        times = (_seconds(r.to_ping_s), _seconds(r.to_service_s))
        out.add_row(r.fault, *times, *shares, *counts, f"{r.worst_s:.1f}", r.left or "nothing", "yes" if r.met else "[red]no[/red]")
    console.print(out)
    for r in results:
        for error in r.errors:
            console.print(f"{r.fault}: a client was told: {error}", markup=False)
    console.print(
        f"Service is back when 16 requests in a row, begun from then on, are answered by all replicas at {SHARE:.0%} of the usual hit "
        "rate. Goal: within 10 s of the ping; nothing wrong, lost, hung or left."
    )
    console.print(
        f"The machine: {os.cpu_count()} CPUs, load {' '.join(f'{n:.0f}' for n in os.getloadavg())} (1, 5, 15 minutes) at the end."
    )
    console.print(f"Left at the end: {', '.join(remains) or 'nothing'}", markup=False)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"
