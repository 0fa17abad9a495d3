"""Other ways to keep pages beside an engine, for the benchmarks to compare with: what is installed is measured, what is not is said.

A peer moves batches of pages between the caller's memory and its own, named by numbers. It is used by one thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8]
START_S = 20.0
SEGMENT_BYTES = 512 << 20


class Peer(Protocol):
    """Raises RuntimeError where a page was not moved."""

    def register(self, buffer: Array) -> None:
        """Before pages of ``buffer`` are moved."""
        ...

    def put(self, names: Sequence[str], pages: Sequence[Array]) -> None: ...

    def get(self, names: Sequence[str], pages: Sequence[Array]) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True)
class Known:
    """A peer by name. ``goal``: how many times faster the arena is to be. ``missing``: why it cannot be measured here, or nothing."""

    name: str
    goal: float
    open: Callable[[], AbstractContextManager[Peer]]
    missing: str = ""


def known() -> list[Known]:
    """All peers, those that are not installed too."""
    missing = _mooncake_missing()
    return [
        Known("a file per page in shared memory", 1.5, _files),
        Known("Mooncake over TCP", 3.0, lambda: _mooncake(local=False), missing),
        Known("Mooncake, segment in the client", 0.95, lambda: _mooncake(local=True), missing),
    ]


class Files:
    """As SGLang's file backend does it: one file a page, written and read without a buffer of Python's."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def register(self, buffer: Array) -> None:
        pass

    def put(self, names: Sequence[str], pages: Sequence[Array]) -> None:
        for name, page in zip(names, pages, strict=True):
            page.tofile(f"{self._folder}/{name}.bin")

    def get(self, names: Sequence[str], pages: Sequence[Array]) -> None:
        for name, page in zip(names, pages, strict=True):
            with open(f"{self._folder}/{name}.bin", "rb", buffering=0) as file:
                if file.readinto(page.data) != page.nbytes:
                    raise RuntimeError(f"the file of page {name} is too short")

    def clear(self) -> None:
        for path in Path(self._folder).iterdir():
            path.unlink()


@contextmanager
def _files() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir="/dev/shm") as folder:
        yield Files(folder)


class Mooncake:
    """A client of a Mooncake store. ``segment_bytes``: of the pool's memory, how much lies in this process."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        found = store.setup(f"127.0.0.1:{_free_port()}", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
        if found:
            raise RuntimeError(f"Mooncake's client did not start: error {found}")
        self.store: Any = store

    def register(self, buffer: Array) -> None:
        self._expect(self.store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0, "did not register a buffer")

    def put(self, names: Sequence[str], pages: Sequence[Array]) -> None:
        done = self.store.batch_put_from(list(names), [page.ctypes.data for page in pages], [page.nbytes for page in pages])
        self._expect(not any(done), "did not put a page")

    def get(self, names: Sequence[str], pages: Sequence[Array]) -> None:
        done = self.store.batch_get_into(list(names), [page.ctypes.data for page in pages], [page.nbytes for page in pages])
        self._expect(done == [page.nbytes for page in pages], "did not get a page")

    def clear(self) -> None:
        self.store.remove_all(True)

    def _expect(self, done: bool, failure: str) -> None:
        if not done:
            raise RuntimeError(f"Mooncake {failure}")


@contextmanager
def _mooncake(local: bool) -> Iterator[Peer]:
    """``local``: the segment is memory of this process; else of a second one, reached over TCP."""
    port, metrics = _free_port(), _free_port()
    master = f"127.0.0.1:{port}"
    command = [str(_mooncake_master()), f"--rpc_port={port}", f"--metrics_port={metrics}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(command))
        _wait_for(port)
        if not local:
            server = stack.enter_context(_process([sys.executable, "-m", "benchmarks.peers", master], subprocess.PIPE))
            if "ready\n" not in iter(server.stdout or []):  # reads until then; Mooncake may print something before
                raise RuntimeError("the process with Mooncake's segment did not start")
        peer = Mooncake(master, SEGMENT_BYTES if local else 0)
        stack.callback(peer.store.close)
        yield peer


def _mooncake_missing() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine is not installed"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake cannot be imported: {error}"
    return "" if _mooncake_master().exists() else "Mooncake's master is not installed"


def _mooncake_master() -> Path:
    """The program of the wheel; its start script would need the package's own interpreter."""
    return Path(str(importlib.import_module("mooncake").__path__[0])) / "mooncake_master"


@contextmanager
def _process(command: Sequence[str], output: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """What it logs is not shown."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nobody listens on port {port}")


def _serve_mooncake(master: str) -> None:
    """A process that lends the pool its memory, until it is told to end."""
    peer = Mooncake(master, SEGMENT_BYTES)
    print("ready", flush=True)
    sys.stdin.read()
    peer.store.close()


@contextmanager
def ray_call() -> Iterator[Callable[[Sequence[bytes]], int]]:
    """Asks an actor of a local Ray, in a process of its own, which of the keys it has (none): what a lookup by a Ray call costs."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = importlib.import_module("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:

        class Index:
            def lookup(self, keys: list[bytes]) -> int:
                return sum(1 << i for i, key in enumerate(keys) if not key)

        actor = ray.remote(Index).remote()
        yield lambda keys: int(ray.get(actor.lookup.remote(list(keys)), timeout=START_S))
        ray.kill(actor)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    _serve_mooncake(sys.argv[1])
