"""The command line: ``hicache-ray demo | probe | verify | serve | size | sim | replay``, and ``status | stats | flush | drop | explain |
storage`` for a tier that runs.

Results go to stdout, progress to stderr. Every setting of the configuration is a flag of every command that starts a tier, and of ``size``
(``--storage-size 1GiB``). Exit codes: 0 well, 1 probe, verify, sim or status found a problem, 2 something is wrong with what was asked, 130
interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hicache_ray import cli_admin, cli_flags, cli_out, cli_replay, cli_sim, cli_size, cli_tables, cli_verify
from hicache_ray.config_sources import Loaded

PROMPT_TOKENS = 6145

app = typer.Typer(
    name="hicache-ray",
    help="A KV-cache tier for LLM serving on Ray: device, host and storage, bit-exact for every kind of model cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Every setting is a flag too, e.g. --storage-size 1GiB; see --print-config of serve for all of them.",
)
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigFile = Annotated[str | None, typer.Option("--config", help="YAML file with settings")]
PromptTokens = Annotated[int, typer.Option(help="length of the prompt R; k * grid + 1 leaves one token to compute")]


def _load(context: typer.Context, file: str | None, address: str | None = None, tp: int | None = None) -> Loaded:
    """The configuration; and an environment that Ray, imported after this, likes."""
    from hicache_ray.actors import environment

    loaded = cli_flags.load(file, {"model.tp": tp}, context.args)
    if address is None:
        environment.own_token()
    environment.quiet()
    return loaded


@app.command(context_settings=SETTINGS)
def probe(
    context: typer.Context,
    config: ConfigFile = None,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    json_to: cli_out.JsonTo = None,
) -> None:
    """Find out whether the tier really reuses: cold, return from the host, again, from storage, on another replica."""
    with cli_out.working() as work:
        loaded = _load(context, config)
        cli_out.check_json(json_to)
        from hicache_ray.actors import probe as probes

        given = frozenset(name for name, origin in loaded.origins.items() if origin != "default")
        result = probes.run(probes.sized(loaded.config, prompt_tokens, given), prompt_tokens, work.progress, work.interrupts)
        cli_out.write_json(json_to, result.to_json())
    cli_tables.print_results([result], to_stderr=json_to == "-")
    raise typer.Exit(0 if result.passed else 1)


@app.command(context_settings=SETTINGS)
def demo(
    context: typer.Context,
    config: ConfigFile = None,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    json_to: cli_out.JsonTo = None,
) -> None:
    """Serve a hybrid model on a local Ray with two ranks, and probe it under write_through and write_back. Leaves nothing behind."""
    from hicache_ray.config_sources import changed

    results = []
    with cli_out.working() as work:
        loaded = _load(context, config, tp=2)
        cli_out.check_json(json_to)
        from hicache_ray.actors import probe as probes

        given = frozenset(name for name, origin in loaded.origins.items() if origin != "default")
        sized = probes.sized(loaded.config, prompt_tokens, given)
        for policy in ("write_through", "write_back"):

            def told(text: str, policy: str = policy) -> None:
                work.progress(f"{policy}: {text}")

            results.append(probes.run(changed(sized, {"cache.write_policy": policy}), prompt_tokens, told, work.interrupts))
        cli_out.write_json(json_to, [r.to_json() for r in results])
    cli_tables.print_results(results, to_stderr=json_to == "-")
    raise typer.Exit(0 if all(r.passed for r in results) else 1)


@app.command(context_settings=SETTINGS)
def serve(
    context: typer.Context,
    config: ConfigFile = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to run on; none: a local one is started")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="show every setting with its origin, and end")] = False,
) -> None:
    """Serve a model with the tier until interrupted."""
    with cli_out.working() as work:
        loaded = _load(context, config, address)
        if print_config:
            cli_tables.print_config(loaded)
            return
        from hicache_ray.actors import cluster

        with cluster.start(loaded.config, address, work.progress, interrupts=work.interrupts) as running:
            typer.echo(f"generate: POST {running.url}/generate")
            typer.echo(f"admin:    {running.admin_url} (health, stats, flush, drop, storage, where, explain, config)")
            if loaded.config.admin.token is None:
                typer.echo(f"token:    {running.token}  (shown once; export HICACHE__ADMIN__TOKEN for the commands that speak to it)")
            work.progress("serving; Ctrl-C stops")
            work.interrupts.wait()


for commands in (cli_verify, cli_size, cli_sim, cli_replay, cli_admin):
    commands.register(app)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
