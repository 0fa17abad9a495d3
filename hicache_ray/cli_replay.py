"""``hicache-ray replay``: a trace through the production core, over capacities and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hicache_ray import cli_out
from hicache_ray.errors import ConfigError
from hicache_ray.interrupts import Interrupts
from hicache_ray.replay import Replay, Replayed, Sizes
from hicache_ray.settings import Eviction
from hicache_ray.trace import BLOCK, Ceiling, ceiling, read


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(replay)


def replay(
    file: Annotated[str, typer.Argument(help="JSON lines in Mooncake's format: timestamp, input_length, output_length, hash_ids")],
    capacity: Annotated[
        str | None, typer.Option(help="sizes of the device tier in blocks, e.g. 1000,10000; default: all that the trace can use")
    ] = None,
    policy: Annotated[str, typer.Option(help="cache.eviction, one or several of lru,lfu,s3fifo,priority")] = "lru",
    host: Annotated[int, typer.Option(min=0, help="size of a host tier behind the device, in blocks; 0: none")] = 0,
    storage: Annotated[bool, typer.Option("--storage", help="storage without bound behind the host (--host)")] = False,
    block: Annotated[int, typer.Option(min=1, help="tokens in a block of the trace")] = BLOCK,
    json_to: cli_out.JsonTo = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="draw the hit ratio over the capacity for each policy")] = None,
) -> None:
    """Tell which share of a trace's blocks each eviction policy would have served. The core decides as in production; no byte moves.

    A hit is a whole block that need not be computed; at least one token of each prompt is. The ratio is hits over all blocks.
    """
    console = cli_out.err()
    with Interrupts() as interrupts, cli_out.ended_well():
        cli_out.check_json(json_to)
        sizes = [Sizes(device, host, storage) for device in _numbers(capacity)]
        policies = _policies(policy)
        requests = read(file, block)
        limits = ceiling(requests, block)
        runs = []
        for size in sizes:
            for name in policies:
                with _progress(console, _called(name, size), len(requests), interrupts) as progress:
                    runs.append(Replay(name, size, limits, block).run(requests, progress))
        if plot is not None:
            from hicache_ray.cli_plot import draw

            draw(plot, Path(file).name, runs, limits)
        cli_out.write_json(json_to, to_json(file, limits, runs))
    cli_out.out(to_stderr=json_to == "-").print(table(file, limits, runs))


def _numbers(text: str | None) -> Sequence[int | None]:
    """Capacities in the order given; all of it where none is."""
    if text is None:
        return [None]
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f'--capacity is "{text}"; give whole numbers of blocks, such as 1000,10000')
    return found


def _policies(text: str) -> Sequence[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in list(Eviction):
            raise ConfigError(f'--policy has "{name}"; choose some of {",".join(e.value for e in Eviction)}')
    return names


def _called(policy: str, sizes: Sizes) -> str:
    return f"{policy}, {'unlimited' if sizes.device is None else f'{sizes.device:,} blocks'}"


@contextmanager
def _progress(console: Console, name: str, count: int, interrupts: Interrupts) -> Iterator[Callable[[int], None]]:
    """A line that changes on a terminal; elsewhere one line per run."""
    if not console.is_terminal:
        console.print(f"replaying: {name}", markup=False)
        yield lambda _: interrupts.check()
        return
    with console.status(name) as status:

        def progress(done: int) -> None:
            interrupts.check()
            status.update(f"{name}: {done:,} of {count:,} requests")

        yield progress


def to_json(file: str, limits: Ceiling, runs: Sequence[Replayed]) -> dict[str, object]:
    """``hit_ratio`` and ``tiers`` are those of the first run; ratios are fractions of all blocks."""
    first = runs[0].to_json()
    return {
        "trace": file,
        "requests": limits.requests,
        "blocks": limits.blocks,
        "distinct_blocks": limits.distinct,
        "ceiling": limits.hit_ratio,
        "hit_ratio": first["hit_ratio"],
        "tiers": first["tiers"],
        "runs": [run.to_json() for run in runs],
    }


def table(file: str, limits: Ceiling, runs: Sequence[Replayed]) -> Table:
    """One row per run."""
    out = Table(
        title=f"{Path(file).name}: {limits.requests:,} requests, {limits.blocks:,} blocks, of which {limits.hit_ratio:.2%} can be hits"
    )
    for name in ("policy", "capacity", "hit ratio", "device", "host", "storage", "evictions", "refused", "seconds"):
        out.add_column(name, justify="left" if name == "policy" else "right")
    for run in runs:
        size = "unlimited" if run.sizes.device is None else f"{run.sizes.device:,}"
        shares = (f"{hits / run.blocks:.2%}" for hits in run.tiers.values())
        out.add_row(
            run.policy, size, f"{run.hit_ratio:.2%}", *shares, f"{run.evictions:,}", f"{run.refused:,}", f"{run.seconds:.1f}"
        )  # fmt: skip
    return out
