"""``hicache-ray size``: what a model's caches weigh, which pools a machine has room for, and what they hold."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_ray import cli_flags, cli_out, machine, sizing
from hicache_ray.config import Config
from hicache_ray.config_sizes import parse_size
from hicache_ray.config_sources import changed
from hicache_ray.errors import ConfigError
from hicache_ray.sizing_plan import Budget, SizePlan, plan
from hicache_ray.spec import CacheSpec

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
SpecFile = Annotated[str | None, typer.Option("--spec", metavar="FILE", help="cache spec as JSON, in the place of a model")]
Memory = Annotated[str | None, typer.Option("--device-memory", help="of a GPU for the cache; default: what the configured pools take")]
Host = Annotated[str | None, typer.Option("--host-memory", help="of a node, e.g. 512GiB; default: what this machine has free")]
Ranks = Annotated[int | None, typer.Option("--ranks-per-node", min=1, help="default: those of all replicas")]
Prompt = Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="length of prompts to plan for; default: all that are accepted")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(context_settings=SETTINGS)(size)


def size(
    context: typer.Context,
    config: Annotated[str | None, typer.Option("--config", help="YAML file with settings")] = None,
    spec: SpecFile = None,
    device_memory: Memory = None,
    host_memory: Host = None,
    ranks_per_node: Ranks = None,
    prompt_tokens: Prompt = None,
    json_to: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Plan the pools of all tiers for a model: bytes per token and per snapshot, slots, the largest prompt, and what to beware of."""
    with cli_out.ended_well():
        loaded = cli_flags.load(config, {}, context.args).config
        found = _spec(loaded, spec)
        made = _plan(loaded, found, (device_memory, host_memory), ranks_per_node, prompt_tokens)
    if json_to:
        print(json.dumps({"page_size": found.page_size, **made.to_json()}, indent=2))
        return
    _show(cli_out.out(), found, made)


def _spec(config: Config, file: str | None) -> CacheSpec:
    from hicache_ray.actors.model import read_spec
    from hicache_ray.actors.setup import spec_from_json

    if file is None:
        with tempfile.TemporaryDirectory(prefix="hicache-model-") as folder:
            return read_spec(config, folder)[1]
    try:
        return spec_from_json(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--spec {file} is no cache spec ({problem}); write one as hicache_ray.spec.CacheSpec has it, in JSON") from None


def _plan(config: Config, spec: CacheSpec, given: tuple[str | None, str | None], ranks: int | None, tokens: int | None) -> SizePlan:
    from hicache_ray.actors.setup import device_bytes, fitted, host_bytes, mix_of, settings_of

    config = changed(config, {"cache.page_size": spec.page_size})
    device, node = (_bytes(flag, text) for flag, text in zip(("--device-memory", "--host-memory"), given, strict=True))
    ranks = ranks or spec.ranks * config.serve.replicas
    memory = machine.memory() if node is None else sizing.Memory(node, node, "--host-memory")
    on_device = device or device_bytes(config, spec)
    share = sizing.host_share(memory.free, config.cache.host_reserve, config.cache.host_fraction, ranks)
    if node is not None and config.cache.host_size is None and share:
        config = changed(config, {"cache.host_size": share})  # what is asked is what all of it is good for
    config = fitted(config, spec, memory, ranks)
    storage = 0 if config.storage.backend == "none" else config.storage.size
    budget = Budget(on_device, host_bytes(config, spec), storage, ranks)
    settings = settings_of(config)
    settings.check(spec)
    return plan(spec, settings, budget, tokens, mix_of(config, spec))


def _bytes(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from None


def _show(out: Console, spec: CacheSpec, made: SizePlan) -> None:
    table = Table(title=f"{spec.model_type}: {spec.ranks} rank(s) per replica, page {spec.page_size}; bytes and slots of one rank")
    for name in ("component", "kind"):
        table.add_column(name)
    for name in ("layers", "bytes/token", "bytes/snapshot", "device slots", "host slots"):
        table.add_column(name, justify="right")
    for row in made.rows:
        numbers: tuple[Any, ...] = (row.layers, row.per_token, row.per_snapshot, row.device_slots, row.host_slots)
        table.add_row(row.name, row.kind, *(f"{n:,.10g}" if n else "-" for n in numbers))
    out.print(table)
    budget = made.budget
    out.print(
        f"device:  {_readable(made.device_bytes)} a rank, worth {made.tokens['device']:,} tokens; largest prompt {made.largest['device']:,}"
    )
    out.print(f"         --device-tokens {made.device_tokens} --device-snapshots {made.device_snapshots}")
    of_all = _readable(made.host_bytes * budget.ranks)
    out.print(
        f"host:    {_readable(made.host_bytes)} a rank, {of_all} for {budget.ranks} rank(s); restorable together: "
        f"{made.tokens['host']:,} tokens; largest prompt {made.largest['host']:,}"
    )
    out.print(f"         --host-size {budget.host}")
    out.print(f"storage: {_readable(budget.storage)} a node, worth {made.tokens['storage']:,} tokens of each of its ranks")
    for text in made.warnings:
        out.print(f"beware:  {text}", style="yellow", markup=False)


def _readable(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**29 else (2**20, "MiB")
    return f"{count / unit:,.2f} {name}"
