"""What the command line shows: tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hicache_ray import cli_out
from hicache_ray.config_sources import Loaded, render
from hicache_ray.probe_result import Result, Step


def probe_table(results: Sequence[Result]) -> Table:
    """One section per run: every step with its time to first token and what it reused."""
    head = results[0]
    table = Table(title=f"{head.model}, {head.tp} rank(s), prompt of {head.prompt_tokens} tokens, grid {head.grid}, page {head.page_size}")
    for name in ("policy", "step"):
        table.add_column(name)
    for name in ("first token", "speed-up", "device", "host", "storage", "computed"):
        table.add_column(name, justify="right")
    for name in ("bit-exact", "digests"):
        table.add_column(name, justify="center")
    for result in results:
        cold = result.step("cold").ttft_s
        for step in result.steps:
            table.add_row(result.write_policy, f"R-{step.name}", *_cells(step, cold))
        if result.on_grid is not None:
            tokens = result.on_grid.reused + result.on_grid.computed
            table.add_row(result.write_policy, f"R cut to {tokens}", *_cells(result.on_grid, None))
        table.add_section()
    return table


def _cells(step: Step, cold: float | None) -> list[str]:
    speed = "" if cold is None or step.name == "cold" else f"{cold / step.ttft_s:.1f}x"
    counts = (step.reused_device, step.reused_host, step.reused_storage, step.computed)
    verdicts = ("yes" if well else "NO" for well in (step.bit_exact, step.digests_equal))
    return [f"{step.ttft_s * 1000:,.0f} ms", speed, *(f"{n:,}" for n in counts), *verdicts]


def print_results(results: Sequence[Result], to_stderr: bool) -> None:
    """The table, then what was wrong. A table of ten columns is not squeezed where the output is no terminal."""
    cli_out.out(to_stderr).print(probe_table(results))
    for result in results:
        for problem in result.problems:
            cli_out.complain(f"{result.write_policy}: {problem}")


def print_config(loaded: Loaded) -> None:
    """Every setting with its value and where it came from."""
    table = Table()
    for name in ("setting", "value", "origin"):
        table.add_column(name, overflow="fold")
    for row in render(loaded):
        table.add_row(row.name, row.value, row.origin)
    cli_out.out().print(table)


def stats_table(stats: Mapping[str, Any]) -> Table:
    """Tiers and components of all replicas."""
    table = Table(title=f"{stats['requests']} requests; tokens by source: " + ", ".join(f"{k} {v:,}" for k, v in stats["tokens"].items()))
    columns = ("used", "capacity", "evictions", "regretted", "backups", "refused", "failures")
    for name in ("replica", "tier", "component"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    for replica, row in stats["replicas"].items():
        if "error" in row:
            table.add_row(replica, row["error"])
            continue
        for tier, components in row["tiers"].items():
            for component, counts in components.items():
                table.add_row(replica, tier, component, *(f"{counts[c]:,}" if c in counts else "" for c in columns))
    for node, store in stats["storage"].items():
        if "error" in store:
            table.add_row(node[:8], "storage", store["error"])
            continue
        alive = sum(member["alive"] for member in store["members"].values())
        _store_row(table, f"node {node[:8]} ({alive} of {len(store['members'])} seen)", "storage", store)
        if store["disk"] is not None:
            _store_row(table, f"node {node[:8]}", "disk", store["disk"])
    return table


def _store_row(table: Table, name: str, tier: str, row: Mapping[str, Any]) -> None:
    if "error" in row:
        table.add_row(name, tier, row["error"])
        return
    used, cap = (f"{row[k] / 2**20:,.1f} MiB" for k in ("used_bytes", "capacity_bytes"))
    table.add_row(name, tier, f"{row['objects']:,} objects", used, cap, f"{row['evictions']:,}")
