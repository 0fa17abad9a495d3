"""The commands that talk to a running tier's admin endpoint: ``status``, ``stats``, ``flush``, ``drop``, ``explain``, ``storage``."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from hicache_ray import cli_flags, cli_out, cli_tables
from hicache_ray.errors import HiCacheError

Url = Annotated[str | None, typer.Option("--url", help="admin endpoint; default: from the configuration")]
Token = Annotated[str | None, typer.Option("--token", help="bearer token; default: from the configuration (HICACHE__ADMIN__TOKEN)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Tiers = Annotated[list[str] | None, typer.Option("--tier", help="device, host or storage; repeat for several; default: device and host")]
Timeout = Annotated[float | None, typer.Option(help="seconds to wait for running requests; without it a busy tier refuses")]

#: A drop may wait as long as replicas may take to let go and storage to clear itself.
REQUEST_S = 150.0


class What(str, Enum):
    """What to do with storage."""

    DETACH = "detach"
    ATTACH = "attach"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (status, stats, flush, drop, explain):
        app.command()(command)
    app.command("storage")(plug)


def status(url: Url = None, token: Token = None) -> None:
    """Whether the tier answers, with how many replicas."""
    found = _call("GET", "/stats", url, token)
    replicas, stores = found["replicas"], found["storage"].values()
    well = [name for name, row in replicas.items() if "error" not in row and not row["lost"]]
    there = sum("error" not in row for row in stores)
    typer.echo(f"{len(well)} of {len(replicas)} replicas and {there} storage node(s) answer; {found['requests']} requests served")
    raise typer.Exit(0 if replicas and len(well) == len(replicas) else 1)


def stats(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Use, evictions, backups and failures per tier and component; tokens by source."""
    found = _call("GET", "/stats", url, token)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        cli_out.out().print(cli_tables.stats_table(found))


def flush(
    url: Url = None,
    token: Token = None,
    tier: Tiers = None,
    timeout: Timeout = None,
    preserve: Annotated[bool, typer.Option("--preserve", help="write what only device and host have to storage first")] = False,
) -> None:
    """Empty tiers of all replicas. Complete when it returns."""
    body: dict[str, Any] = {"tiers": tier or ["device", "host"], "timeout_s": timeout, "preserve": preserve}
    done = _call("POST", "/flush", url, token, body)
    typer.echo(f"flushed {', '.join(done['flushed'])} of {done['replicas']} replica(s)")


def drop(tenant: Annotated[str, typer.Argument(help="name of the tenant")], url: Url = None, token: Token = None) -> None:
    """Drop everything of a tenant from all tiers of all replicas. Complete when it returns."""
    done = _call("POST", "/drop", url, token, {"tenant": tenant})
    gone = ", ".join(f"{count} from {tier}" for tier, count in done["removed"].items())
    typer.echo(f"dropped {tenant}: {gone}; {done['left']} left")


def explain(
    request_id: Annotated[str, typer.Argument(help="as the answer to the request tells it")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Why a request was served as it was: where its pages came from, what limited the resume, what would have made it longer."""
    from hicache_ray.explain import lines

    told = _call("GET", f"/explain/{quote(request_id, safe='')}", url, token)
    print(json.dumps(told, indent=2) if as_json else "\n".join(lines(told)))


def plug(what: Annotated[What, typer.Argument(help="detach or attach")], url: Url = None, token: Token = None) -> None:
    """Take storage away from all replicas, with requests in flight, or give it back."""
    done = _call("POST", f"/storage/{what.value}", url, token)
    typer.echo(f"storage is {what.value}ed {'to' if done['attached'] else 'from'} {done['replicas']} replica(s)")


def _call(method: str, path: str, url: str | None, token: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with cli_out.ended_well():
        admin = cli_flags.load(None, {}, []).config.admin
        base = url or f"http://{admin.host}:{admin.port}"
        secret = token or (admin.token.get_secret_value() if admin.token is not None else "")
        wait = REQUEST_S + float((body or {}).get("timeout_s") or 0)
        try:
            # As bytes: a token may hold what no header of text can.
            headers = {b"Authorization": f"Bearer {secret}".encode()}
            response = httpx.request(method, base + path, json=body, headers=headers, timeout=wait)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"no admin endpoint answers at {base}: {error}; start one with hicache-ray serve, or give --url"
            raise HiCacheError(why) from None
        try:
            told = response.json()
        except ValueError:
            told = response.text[:500]
        if response.status_code != 200:
            detail = told.get("detail", told) if isinstance(told, dict) else told
            raise HiCacheError(f"{base}{path} answered {response.status_code}: {detail}")
        if not isinstance(told, dict):
            raise HiCacheError(f"{base}{path} answered something else than an admin endpoint does; give --url")
        return told
