"""The command line: ``hicache-ray demo | probe | verify | sim | replay | serve | status | stats | flush``.

Results go to stdout, progress to stderr. Every setting of the configuration is a flag of every command that starts a tier
(``--storage-size 1GiB``). Exit codes: 0 well, 1 probe or verify found a problem, 2 something is
wrong with what was asked, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from hicache_ray import cli_admin, cli_flags, cli_replay, cli_sim, cli_size, cli_tables, cli_verify
from hicache_ray.config_sources import Loaded
from hicache_ray.errors import ConfigError, HiCacheError

PROMPT_TOKENS = 6145

app = typer.Typer(
    name="hicache-ray",
    help="A KV-cache tier for LLM serving on Ray: device, host and storage, bit-exact for every kind of model cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Every setting is a flag too, e.g. --storage-size 1GiB; see --print-config of serve for all of them.",
)
cli_admin.register(app)
cli_replay.register(app)
cli_sim.register(app)
cli_size.register(app)
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigFile = Annotated[str | None, typer.Option("--config", help="YAML file with settings")]
PromptTokens = Annotated[int, typer.Option(help="length of the prompt R; k * grid + 1 leaves one token to compute")]
JsonTo = Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for stdout")]


@contextmanager
def _ended_well() -> Iterator[Callable[[str], None]]:
    """Progress on stderr; errors of ours as sentences; Ctrl-C and SIGTERM unwind everything that was started."""
    console = Console(stderr=True, highlight=False)

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with console.status("starting") as status:

            def progress(text: str) -> None:
                status.update(text)
                if not console.is_terminal:
                    console.print(text)

            yield progress
    except HiCacheError as error:
        console.print(f"hicache-ray: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _load(context: typer.Context, file: str | None, address: str | None = None, tp: int | None = None) -> Loaded:
    """The configuration; and an environment that Ray, imported after this, likes."""
    from hicache_ray.actors import environment

    loaded = cli_flags.load(file, {"model.tp": tp}, context.args)
    if address is None:
        environment.own_token()
    environment.quiet()
    return loaded


def _write(target: str | None, value: Any) -> None:
    if target is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        with open(target, "w", encoding="utf-8") as out:
            out.write(text)


@app.command(context_settings=SETTINGS)
def probe(
    context: typer.Context,
    config: ConfigFile = None,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    json_to: JsonTo = None,
) -> None:
    """Find out whether the tier really reuses: cold, return from the host, again, from storage, on another replica."""
    with _ended_well() as progress:
        loaded = _load(context, config)
        from hicache_ray.actors import probe as probes

        given = frozenset(name for name, origin in loaded.origins.items() if origin != "default")
        result = probes.run(probes.sized(loaded.config, prompt_tokens, given), prompt_tokens, progress)
    _write(json_to, result.to_json())
    cli_tables.print_results([result], to_stderr=json_to == "-")
    raise typer.Exit(0 if result.passed else 1)


@app.command(context_settings=SETTINGS)
def demo(
    context: typer.Context,
    config: ConfigFile = None,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    json_to: JsonTo = None,
) -> None:
    """Serve a hybrid model on a local Ray with two ranks, and probe it under write_through and write_back. Leaves nothing behind."""
    from hicache_ray.config_sources import changed

    results = []
    with _ended_well() as progress:
        loaded = _load(context, config, tp=2)
        from hicache_ray.actors import probe as probes

        given = frozenset(name for name, origin in loaded.origins.items() if origin != "default")
        sized = probes.sized(loaded.config, prompt_tokens, given)
        for policy in ("write_through", "write_back"):

            def told(text: str, policy: str = policy) -> None:
                progress(f"{policy}: {text}")

            results.append(probes.run(changed(sized, {"cache.write_policy": policy}), prompt_tokens, told))
    _write(json_to, [r.to_json() for r in results])
    cli_tables.print_results(results, to_stderr=json_to == "-")
    raise typer.Exit(0 if all(r.passed for r in results) else 1)


Models = Annotated[list[str] | None, typer.Option("--model", help="a family, or the folder of a saved model; repeat for several")]
Only = "repeat for several; default: all that this machine can run"


@app.command()
def verify(
    model: Models = None,
    every: Annotated[bool, typer.Option("--all", help="all families, one tiny model with random weights each")] = False,
    full: Annotated[bool, typer.Option("--full", help="every combination of choices, not only every pair")] = False,
    json_to: JsonTo = None,
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
    with _ended_well() as progress:
        if not model and not every:
            raise ConfigError("name a family or a folder with --model, or verify all families with --all")
        # Set before torch is imported: later it would be too late, and the results would be other bits.
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
        from hicache_ray.verify.run import Options, run

        page = page_size or (64 if any(os.path.isdir(name) for name in model or ()) else 16)
        axes = {"layout": layout, "io_backend": io_backend, "write_policy": write_policy, "tier": tier}
        wanted = {name: values for name, values in axes.items() if values}
        options = Options(model or (), full, wanted, page, grid or 4 * page, dtype, seed, threads, directory)
        result = run(options, progress)
    _write(json_to, result.to_json())
    cli_verify.print_verified(result, to_stderr=json_to == "-")
    raise typer.Exit(0 if result.passed else 1)


@app.command(context_settings=SETTINGS)
def serve(
    context: typer.Context,
    config: ConfigFile = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to run on; none: a local one is started")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="show every setting with its origin, and end")] = False,
) -> None:
    """Serve a model with the tier until interrupted."""
    with _ended_well() as progress:
        loaded = _load(context, config, address)
        if print_config:
            cli_tables.print_config(loaded)
            return
        from hicache_ray.actors import cluster

        with cluster.start(loaded.config, address, progress) as running:
            out = Console()
            out.print(f"generate: POST {running.url}/generate")
            out.print(f"admin:    {running.admin_url} (health, stats, flush, config)")
            if loaded.config.admin.token is None:
                out.print(f"token:    {running.token}  (shown once; export HICACHE__ADMIN__TOKEN to use it with stats and flush)")
            progress("serving; Ctrl-C stops")
            while True:
                signal.pause()


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
