"""The arena from a second process, checksums on: puts, gets and lookups of batches of pages, and what else is installed beside it.

The baseline of a put and a get is one thread's ``memmove``, page by page, between the same caller's buffers (touched before); that of a
row "than ..." is the other store with the same pages. All are measured in the same repetition; ratios above 1 are faster than that.

    python -m benchmarks.bench_arena            prints a table
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks import Row
from benchmarks.measure import at_most, beside, expect, timed
from benchmarks.peers import Known, Peer, known, ray_call
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, ClientConfig
from hicache_ray.storage.segment import Array
from hicache_ray.store import KEY_BYTES, TAG_BYTES

ARENA_BYTES = 512 << 20
TIMEOUT_S = 30.0
LOOKUPS = 200
RAY_CALLS = 50
RAY_GOAL = 10.0


@dataclass(frozen=True)
class Case:
    """A batch of pages, and what share of memmove its put and its get are to reach. ``peers``: compare with others too."""

    name: str
    pages: int
    page_bytes: int
    put_goal: float
    get_goal: float
    repetitions: int = 7
    peers: bool = False


CASES = (
    Case("128 x 1 MiB", 128, 1 << 20, put_goal=0.8, get_goal=0.9, peers=True),
    Case("128 x 64 KiB", 128, 64 << 10, put_goal=0.6, get_goal=0.7, repetitions=30),
    Case("1 x 1 MiB", 1, 1 << 20, put_goal=0.5, get_goal=0.5, repetitions=100),
)


class Pages:
    """The caller's side of a case: memory of which every byte was touched, and how long everything took.

    Every repetition moves the next pages of it: a batch of one page comes from memory too, not from the caches.
    """

    def __init__(self, case: Case, buffers: Sequence[Array]) -> None:
        self.case = case
        self._sources, self._targets = (buffer.reshape(-1, case.page_bytes) for buffer in buffers)
        self._next = 0
        self.seconds: dict[str, list[float]] = {}

    def turn(self) -> None:
        """On to the next pages."""
        rows = range(self._next, self._next + self.case.pages)
        self.sources, self.targets = ([buffer[i] for i in rows] for buffer in (self._sources, self._targets))
        self._next = rows.stop if rows.stop + self.case.pages <= len(self._sources) else 0

    def time(self, what: str, work: Callable[[], object], keep: bool) -> None:
        seconds = timed(work)
        if keep:
            self.seconds.setdefault(what, []).append(seconds)

    def row(self, name: str, what: str, baseline: str, goal: float) -> Row:
        """Speed of ``what`` beside that of ``baseline``."""
        return beside(name, self.case.pages * self.case.page_bytes, self.seconds[what], self.seconds[baseline], goal)


def run() -> list[Row]:
    """Rows for put, get and lookup."""
    size = max(case.pages * case.page_bytes for case in CASES)
    buffers = [_touched(size, seed) for seed in (1, 0)]
    with _service() as socket:
        client = ArenaClient(socket, ClientConfig(prefault="start"))
        try:
            client.warm_up(TIMEOUT_S)
            rows = [row for case in CASES for row in _copies(client, case, buffers)]
            return [*rows, _lookup(client, 2048, 3000.0), _beside_ray(client, 128)]
        finally:
            client.close()


def _touched(size: int, seed: int) -> Array:
    """Memory as a host pool has it: whole pages of the machine, all of them faulted in."""
    buffer: Array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return buffer


def _copies(client: ArenaClient, case: Case, buffers: Sequence[Array]) -> list[Row]:
    pages = Pages(case, buffers)
    with ExitStack() as stack:
        others = known() if case.peers else []
        peers = {other.name: stack.enter_context(other.open()) for other in others if not other.missing}
        for peer in peers.values():
            for buffer in buffers:
                peer.register(buffer)
        for repetition in range(case.repetitions + 1):
            _repeat(client, peers, pages, keep=repetition > 0)  # the first one warms up
    rows = [pages.row(f"arena put, {case.name}", "put", "memmove", case.put_goal)]
    rows.append(pages.row(f"arena get, {case.name}", "get", "memmove", case.get_goal))
    return rows + [row for other in others for row in _beside(pages, other)]


def _repeat(client: ArenaClient, peers: dict[str, Peer], pages: Pages, keep: bool) -> None:
    """Everything once, with ids that were not there before."""
    pages.turn()
    ids = [os.urandom(KEY_BYTES + TAG_BYTES) for _ in pages.sources]
    everything = (1 << len(ids)) - 1
    pages.time("memmove", lambda: _memmove(pages.sources, pages.targets), keep)
    client.clear(TIMEOUT_S)
    pages.time("put", lambda: expect(client.put(ids, pages.sources, TIMEOUT_S), everything), keep)
    _forget(pages)
    pages.time("get", lambda: expect(client.get(ids, pages.targets, TIMEOUT_S), everything), keep)
    _expect_equal(pages)
    names = [id.hex() for id in ids]
    for name, peer in peers.items():
        pages.time(f"put {name}", lambda peer=peer: peer.put(names, pages.sources), keep)  # type: ignore[misc]
        _forget(pages)
        pages.time(f"get {name}", lambda peer=peer: peer.get(names, pages.targets), keep)  # type: ignore[misc]
        _expect_equal(pages)
        peer.clear()


def _beside(pages: Pages, other: Known) -> list[Row]:
    """A put and a get beside those of another store."""
    names = {what: f"arena {what}, {pages.case.name}, than {other.name}" for what in ("put", "get")}
    if other.missing:
        goal = f">= {other.goal:g}; {other.missing}"
        return [Row(name=name, value=None, unit="", baseline=None, ratio=None, goal=goal, met=False) for name in names.values()]
    return [pages.row(name, what, f"{what} {other.name}", other.goal) for what, name in names.items()]


def _lookup(client: ArenaClient, keys: int, goal_us: float) -> Row:
    return at_most(f"arena lookup, {keys} keys", _lookup_us(client, keys), "us", goal_us)


def _beside_ray(client: ArenaClient, keys: int) -> Row:
    """A lookup beside the same question to an actor of a local Ray."""
    value, names = _lookup_us(client, keys), [os.urandom(KEY_BYTES) for _ in range(keys)]
    with ray_call() as ask:
        for _ in range(RAY_CALLS):
            ask(names)  # connections and caches get warm
        call = statistics.median(timed(lambda: ask(names)) for _ in range(RAY_CALLS)) * 1e6
    name, ratio = f"arena lookup, {keys} keys, than a Ray call", call / value
    return Row(name=name, value=value, unit="us", baseline=call, ratio=ratio, goal=f">= {RAY_GOAL:g}", met=ratio >= RAY_GOAL)


def _lookup_us(client: ArenaClient, keys: int) -> float:
    """Half of the keys are there."""
    client.clear(TIMEOUT_S)
    names, tag = [os.urandom(KEY_BYTES) for _ in range(keys)], os.urandom(TAG_BYTES)
    present = [name + tag for name in names[: keys // 2]]
    there = (1 << len(present)) - 1
    expect(client.put(present, [b"page"] * len(present), TIMEOUT_S), there)
    ask = lambda: expect(client.lookup(names, [tag], TIMEOUT_S)[tag].hit, there)  # noqa: E731
    return statistics.median(timed(ask) for _ in range(LOOKUPS)) * 1e6


def _memmove(sources: list[Array], targets: list[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def _forget(pages: Pages) -> None:
    for target in pages.targets:
        target[:8] = 0


def _expect_equal(pages: Pages) -> None:
    expect(all(np.array_equal(a, b) for a, b in zip(pages.sources, pages.targets, strict=True)), True)


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
        service.node.warm_up(TIMEOUT_S)
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
