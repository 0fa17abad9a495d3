"""What the commands have in common: results on stdout, progress and what went wrong on stderr, exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.interrupts import Interrupts

JsonTo = Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for stdout")]
#: Columns of a table that goes to a file or a pipe.
WIDTH = 120
STOPPED = "interrupted; whatever was started has been stopped"


def out(to_stderr: bool = False) -> Console:
    """Where a table goes. It is not squeezed where the output is no terminal."""
    console = Console(stderr=to_stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=to_stderr, highlight=False, width=max(WIDTH, console.width))


def err() -> Console:
    return Console(stderr=True, highlight=False)


def complain(text: str) -> None:
    """What was wrong, on stderr."""
    err().print(text, style="bold red", markup=False)


def write_json(target: str | None, value: Any) -> None:
    """To a file, or to stdout for ``-``; nothing for None. Raises :class:`ConfigError` where it cannot be written."""
    if target is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--json {target} cannot be written: {error.strerror}; choose another file") from None


def check_json(target: str | None) -> None:
    """Before a long run: raise :class:`ConfigError` where its result could not be written."""
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {target} cannot be written; name a file in a folder that is there and yours to write")


@dataclass(frozen=True)
class Work:
    """A command under way: told what it does, and interrupted."""

    interrupts: Interrupts
    console: Console
    status: Status

    def progress(self, text: str) -> None:
        """A line that changes on a terminal, elsewhere a line each."""
        self.status.update(text)
        if not self.console.is_terminal:
            self.console.print(text, markup=False)


@contextmanager
def ended_well() -> Iterator[None]:
    """Errors of ours are sentences, with exit code 2; an interrupt is 130."""
    try:
        yield
    except HiCacheError as error:
        complain(f"hicache-ray: {error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err().print(STOPPED)
        raise typer.Exit(130) from None


@contextmanager
def working() -> Iterator[Work]:
    """As :func:`ended_well`, with progress; Ctrl-C and SIGTERM unwind everything that was started."""
    console = err()
    with Interrupts() as interrupts, ended_well(), console.status("starting") as status:
        yield Work(interrupts, console, status)
