"""The commands that talk to a running tier's admin endpoint: ``status``, ``stats``, ``flush``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from hicache_ray import cli_flags, cli_tables

Url = Annotated[str | None, typer.Option("--url", help="admin endpoint; default: from the configuration")]
Token = Annotated[str | None, typer.Option("--token", help="bearer token; default: from the configuration (HICACHE__ADMIN__TOKEN)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Tiers = Annotated[list[str] | None, typer.Option("--tier", help="device, host or storage; repeat for several; default: device and host")]
Timeout = Annotated[float | None, typer.Option(help="seconds to wait for running requests; without it a busy tier refuses")]

REQUEST_S = 90.0


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (status, stats, flush):
        app.command()(command)


def status(url: Url = None, token: Token = None) -> None:
    """Whether the tier answers, with how many replicas."""
    _call("GET", "/health", url, token)
    found = _call("GET", "/stats", url, token)
    replicas = found["replicas"]
    well = [name for name, row in replicas.items() if "error" not in row and not row["lost"]]
    Console().print(
        f"{len(well)} of {len(replicas)} replicas and {len(found['storage'])} storage node(s) answer; {found['requests']} requests served"
    )
    raise typer.Exit(0 if replicas and len(well) == len(replicas) else 1)


def stats(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Use, evictions, backups and failures per tier and component; tokens by source."""
    found = _call("GET", "/stats", url, token)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(cli_tables.stats_table(found))


def flush(url: Url = None, token: Token = None, tier: Tiers = None, timeout: Timeout = None) -> None:
    """Empty tiers of all replicas. Complete when it returns."""
    body: dict[str, Any] = {"tiers": tier or ["device", "host"], "timeout_s": timeout}
    done = _call("POST", "/flush", url, token, body)
    Console().print(f"flushed {', '.join(done['flushed'])} of {done['replicas']} replica(s)")


def _call(method: str, path: str, url: str | None, token: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    admin = cli_flags.load(None, {}, []).config.admin
    base = url or f"http://{admin.host}:{admin.port}"
    secret = token or (admin.token.get_secret_value() if admin.token is not None else "")
    console = Console(stderr=True, highlight=False)
    wait = REQUEST_S + float((body or {}).get("timeout_s") or 0)
    try:
        response = httpx.request(method, base + path, json=body, headers={"Authorization": f"Bearer {secret}"}, timeout=wait)
    except httpx.HTTPError as error:
        problem = f"hicache-ray: no admin endpoint answers at {base}: {error}; start one with hicache-ray serve, or give --url"
        console.print(problem, style="bold red", markup=False)
        raise typer.Exit(2) from None
    if response.status_code != 200:
        detail = response.json().get("detail", response.text) if "json" in response.headers.get("content-type", "") else response.text
        console.print(f"hicache-ray: {base}{path} answered {response.status_code}: {detail}", style="bold red", markup=False)
        raise typer.Exit(2)
    out: dict[str, Any] = response.json()
    return out
