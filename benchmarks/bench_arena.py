"""The arena from a second process, checksums on: puts, gets and lookups of batches of pages.

The baseline of a put and a get is one thread's ``memmove``, page by page, between the same caller's buffers (touched before), measured
in the same repetition; ratios above 1 are faster than that. A lookup has no baseline but its goal.

    python -m benchmarks.bench_arena            prints a table
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks import Row
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, ClientConfig
from hicache_ray.storage.segment import Array
from hicache_ray.store import KEY_BYTES, TAG_BYTES

REPETITIONS = 5
PAGES = 128
ARENA_BYTES = 512 << 20
TIMEOUT_S = 30.0
LOOKUPS = 200


@dataclass(frozen=True)
class Case:
    """One size of page, and what share of memmove a put and a get of the batch are to reach."""

    name: str
    page_bytes: int
    put_goal: float
    get_goal: float


CASES = (
    Case("1 MiB", 1 << 20, put_goal=0.8, get_goal=0.9),
    Case("64 KiB", 64 << 10, put_goal=0.6, get_goal=0.7),
)


def run() -> list[Row]:
    """Rows for put, get and lookup."""
    with _service() as socket:
        client = ArenaClient(socket, ClientConfig(prefault="start"))
        try:
            rows = [row for case in CASES for row in _copies(client, case)]
            return [*rows, _lookup(client, 128, 75.0), _lookup(client, 2048, 3000.0)]
        finally:
            client.close()


def _copies(client: ArenaClient, case: Case) -> list[Row]:
    sources, targets = _pages(case, 1), _pages(case, 0)
    ids = [os.urandom(KEY_BYTES + TAG_BYTES) for _ in range(PAGES)]
    everything = (1 << PAGES) - 1
    seconds: dict[str, list[float]] = {"memmove": [], "put": [], "get": []}
    for repetition in range(REPETITIONS + 1):
        client.clear(TIMEOUT_S)
        move = _timed(lambda: _memmove(sources, targets))
        put = _timed(lambda: _expect(client.put(ids, sources, TIMEOUT_S), everything))
        for target in targets:
            target[:8] = 0
        get = _timed(lambda: _expect(client.get(ids, targets, TIMEOUT_S), everything))
        _expect(all((a == b).all() for a, b in zip(sources, targets, strict=True)), True)
        if repetition:  # the first one warms up
            for name, value in (("memmove", move), ("put", put), ("get", get)):
                seconds[name].append(value)
    return [_copy_row(case, "put", case.put_goal, seconds), _copy_row(case, "get", case.get_goal, seconds)]


def _copy_row(case: Case, what: str, goal: float, seconds: dict[str, list[float]]) -> Row:
    amount = PAGES * case.page_bytes / 1e9
    ratio = statistics.median(base / own for base, own in zip(seconds["memmove"], seconds[what], strict=True))
    name = f"arena {what}, {PAGES} x {case.name}"
    value, baseline = amount / statistics.median(seconds[what]), amount / statistics.median(seconds["memmove"])
    return Row(name=name, value=value, unit="GB/s", baseline=baseline, ratio=ratio, goal=f">= {goal}", met=ratio >= goal)


def _lookup(client: ArenaClient, keys: int, goal_us: float) -> Row:
    """Half of the keys are there."""
    client.clear(TIMEOUT_S)
    names, tag = [os.urandom(KEY_BYTES) for _ in range(keys)], os.urandom(TAG_BYTES)
    present = [name + tag for name in names[: keys // 2]]
    _expect(client.put(present, [b"page"] * len(present), TIMEOUT_S), (1 << len(present)) - 1)
    times = [
        _timed(lambda: _expect(client.lookup(names, [tag], TIMEOUT_S)[tag].hit, (1 << len(present)) - 1)) * 1e6 for _ in range(LOOKUPS)
    ]
    value = statistics.median(times)
    goal = f"<= {goal_us:g} us"
    return Row(name=f"arena lookup, {keys} keys", value=value, unit="us", baseline=None, ratio=None, goal=goal, met=value <= goal_us)


def _pages(case: Case, seed: int) -> list[Array]:
    """Pages of one buffer, every byte of it written."""
    buffer = np.random.default_rng(seed).integers(0, 256, PAGES * case.page_bytes, np.uint8)
    return list(buffer.reshape(PAGES, case.page_bytes))


def _memmove(sources: list[Array], targets: list[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError("the arena did not do what was asked; the numbers would mean nothing")


@contextmanager
def _service() -> Iterator[str]:
    """A service in a process of its own; its socket. The process ends when its standard input does."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.bench_arena", "--serve", folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            socket = process.stdout.readline().strip()
            if not socket:
                raise RuntimeError("the arena's service did not start; its error is above")
            yield socket
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _serve(folder: str) -> None:
    config = ArenaConfig(f"bench-{os.getpid()}", ARENA_BYTES, socket_dir=folder, prefault="start")
    with ArenaService(config) as service:
        print(service.address.socket, flush=True)
        sys.stdin.read()


def _main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2])
        return
    from rich.console import Console

    from benchmarks.__main__ import table

    Console(width=132).print(table(run()))


if __name__ == "__main__":
    _main()
