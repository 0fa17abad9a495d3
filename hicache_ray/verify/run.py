"""The run: every model through all checks, in one process with one storage service."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.families import FAMILIES
from hicache_ray.integrations.transformers.process import settle_process
from hicache_ray.spec import CacheSpec
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.store import Store
from hicache_ray.verify.branching import Branching
from hicache_ray.verify.choices import choices
from hicache_ray.verify.numbers import chunked, inexact
from hicache_ray.verify.replica import Interference
from hicache_ray.verify.restore import Restore, nothing
from hicache_ray.verify.result import CHECKS, Cell, Check, Result, Verdict
from hicache_ray.verify.subject import DTYPES, Sizes, Subject, load, require

#: Tokens and snapshots of all conversations of the branching run, roughly; storage is to hold them.
STORED_TOKENS, STORED_SNAPSHOTS, LEAST_BYTES = 12_000, 300, 64 << 20


@dataclass(frozen=True)
class Options:
    """``models``: families or folders, none for all families. ``full``: every cell, not only every pair. ``wanted``: axis -> the values
    that are to run; none for all that can. ``interfere``: for tests."""

    models: Sequence[str] = ()
    full: bool = False
    wanted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    page: int = 16
    grid: int = 64
    dtype: str = "float32"
    seed: int = 0
    threads: int = 1
    directory: str = "/dev/shm"
    interfere: Interference = nothing
    checks: Sequence[str] = tuple(CHECKS)


def run(options: Options, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Raises :class:`ConfigError` for what cannot be run at all; what a check finds is in the result."""
    begun = time.monotonic()
    settle_process(options.threads)
    if options.dtype not in DTYPES:
        raise ConfigError(f'--dtype is "{options.dtype}"; choose one of {", ".join(DTYPES)}')
    if not Path(options.directory).is_dir():
        raise ConfigError(f'--directory is "{options.directory}", which is not a folder; make it, or choose another')
    if options.page < 1 or options.grid < 1 or options.grid % options.page:
        raise ConfigError(f"--grid is {options.grid}; it must be a multiple of --page-size ({options.page})")
    chosen = choices(options.wanted)
    cells = chosen.product() if options.full else chosen.pairs()
    sizes = Sizes(options.page, options.grid, options.dtype)
    result = Result(options.page, options.grid, options.dtype, not_run=dict(chosen.not_run))
    result.left_out = [cell for cell in chosen.product() if cell not in cells]
    models = options.models or tuple(name.removesuffix("_text") for name in FAMILIES)
    for name in models:
        require(name)
    for number, name in enumerate(models):
        place = f"{name} ({number + 1} of {len(models)})" if len(models) > 1 else name
        progress(f"{place}: loading")
        with tempfile.TemporaryDirectory(prefix="hicache-verify-") as folder:
            loaded = load(name, sizes, Path(folder), options.seed)
            with _store(loaded.spec, options.directory) as store:
                result.checks += _checks(Subject(name, loaded, sizes, store, options.seed), options, cells, partial(_told, progress, place))
        del loaded  # before the next one is loaded
    result.seconds = round(time.monotonic() - begun, 1)
    return result


def _told(progress: Callable[[str], None], place: str, text: str) -> None:
    progress(f"{place}: {text}")


def _checks(subject: Subject, options: Options, cells: Sequence[Cell], progress: Callable[[str], None]) -> Iterator[Check]:
    for name in options.checks:
        progress(f"restore, {len(cells)} cells" if name == "restore" else name)
        try:
            if name == "restore":
                yield from Restore(subject, options.interfere).run(cells)
            elif name == "chunked":
                yield chunked(subject)
            elif name == "branching":
                yield Branching(subject).run()
            else:
                yield inexact(subject, options.interfere)
        except HiCacheError as error:
            yield Check(subject.name, name, Verdict.FAILED, "it ended early", (f"{type(error).__name__}: {error}",))


@contextmanager
def _store(spec: CacheSpec, directory: str) -> Iterator[Store]:
    """A storage service of this process, and a client of it."""
    size = max(LEAST_BYTES, int(spec.bytes_per_token() * STORED_TOKENS) + spec.snapshot_bytes() * STORED_SNAPSHOTS)
    config = ArenaConfig(f"verify-{os.getpid()}", size, directory, prefault="off")
    with ArenaService(config) as service:
        client = ArenaClient(service.address)
        try:
            yield client
        finally:
            client.close()
