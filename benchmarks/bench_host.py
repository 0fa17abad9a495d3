"""Start of a host pool: touching fresh memory by one thread against several; with a GPU, pinning it as well.

8 GiB where the machine has that to spare, else less. The goal holds for machines with at least 8 cores; smaller ones report their ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import Row
from hicache_ray import machine
from hicache_ray.host_memory import TOUCHERS, cores, touched

WANTED, LEAST = 8 << 30, 64 << 20
GOAL, CORES = 1.5, 8


def run() -> list[Row]:
    size = LEAST
    while size * 8 <= min(machine.memory().free, 8 * WANTED) and size < WANTED:
        size *= 2
    pin, how = _pinning()
    alone = _seconds(size, 1, pin)
    together = _seconds(size, min(TOUCHERS, cores()), pin)
    ratio = alone / together
    goal = f">= {GOAL:g}" if cores() >= CORES else ""
    name = f"first touch{how} of {size >> 20:,} MiB of host pool, {min(TOUCHERS, cores())} threads"
    rate, base = size / together / 1e9, size / alone / 1e9
    return [
        Row(
            name=name,
            value=round(rate, 2),
            unit="GB/s",
            baseline=round(base, 2),
            ratio=round(ratio, 3),
            goal=goal,
            met=not goal or ratio >= GOAL,
        )
    ]


def _seconds(size: int, threads: int, pin: Callable[[Any], None]) -> float:
    """The better of two."""
    out = []
    for _ in range(2):
        begin = time.perf_counter()
        memory = touched(size, threads, shared=True)
        pin(memory)
        out.append(time.perf_counter() - begin)
        del memory
    return min(out)


def _pinning() -> tuple[Callable[[Any], None], str]:
    """Pin and unpin, where the machine can; it falls back to touching alone."""
    if not Path("/dev/nvidiactl").exists():
        return (lambda memory: None), ""
    from hicache_ray import copies_cuda

    if copies_cuda.no_direct():
        return (lambda memory: None), ""
    runtime = copies_cuda._runtime()

    def pin(memory: Any) -> None:
        runtime.register(int(memory.ctypes.data), memory.nbytes)
        runtime.unregister(int(memory.ctypes.data))

    return pin, " and pinning"
