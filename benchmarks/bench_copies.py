"""Copies between a layer-first device pool and host pools of all layouts, on the CPU.

The baseline is one thread's ``memmove`` of as many contiguous bytes, in memory touched before, measured in the same repetition. The
pages are in random slots on both sides, so nothing adjoins by chance. Ratios are of medians; above 1 is faster than the baseline.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import Row
from hicache_ray.copies import Copier, Mover, choose
from hicache_ray.layout import ORDERS, copy_plan
from hicache_ray.pool import Pool
from hicache_ray.spec import Component, Field, Kind

REPETITIONS = 11
PAGE_SIZE = 64
THREADS = 2
#: From DESIGN: what a copy reaches, of a memmove, where the inner runs are at least LONG_RUN bytes, and where they are shorter.
LONG_RUN, LONG_GOAL, SHORT_GOAL = 4096, 0.8, 0.6


@dataclass(frozen=True)
class Model:
    """A KV cache (layers x heads x width), how many pages one copy moves, and how many slots the pools have."""

    name: str
    layers: int
    heads: int
    width: int
    dtype: str
    itemsize: int
    pages: int
    slots: int

    @property
    def component(self) -> Component:
        fields = tuple(Field(name, self.heads, self.width, self.itemsize, self.dtype) for name in "kv")
        return Component("full", Kind.FULL, fields, tuple(range(self.layers)))


MODELS = (
    Model("4x2x64 fp32", 4, 2, 64, "float32", 4, pages=256, slots=512),
    Model("32x8x128 bf16", 32, 8, 128, "bfloat16", 2, pages=16, slots=32),
)


def run() -> list[Row]:
    """A row per model, layout and direction."""
    rows: list[Row] = []
    for model in MODELS:
        device = touched(model, "layer_first")
        for layout in ORDERS:
            host = touched(model, layout)
            with Mover(choose("auto", "cpu", layout), THREADS) as mover:
                rows.append(measure(f"copy host to device, {layout}", host, device, mover, model))
                rows.append(measure(f"copy device to host, {layout}", device, host, mover, model))
            del host
            gc.collect()
    return rows


def touched(model: Model, layout: str) -> Pool:
    pool = Pool(model.component, PAGE_SIZE, model.slots, layout)
    pool.buffer.fill_(1)
    return pool


def measure(name: str, source: Pool, target: Pool, mover: Mover, model: Model) -> Row:
    size = model.pages * source.page_bytes
    of, to = (np.random.default_rng(seed).permutation(model.slots)[: model.pages].astype(np.int32) for seed in (1, 2))
    copier = Copier(source, target, mover)
    plain = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def memmove() -> None:
        ctypes.memmove(plain[0].data_ptr(), plain[1].data_ptr(), size)

    ours, baseline = interleaved(lambda: copier.copy(of, to), memmove)
    inner = min(step.run for step in copy_plan(source.views, target.views, source.geometry))
    goal = LONG_GOAL if inner >= LONG_RUN else SHORT_GOAL
    ratio = baseline / ours
    return Row(
        name=f"{name}, {model.name}, {inner} B runs",
        value=round(size / ours / 1e9, 2),
        unit="GB/s",
        baseline=round(size / baseline / 1e9, 2),
        ratio=round(ratio, 3),
        goal=f">= {goal}",
        met=ratio >= goal,
    )


def interleaved(*actions: Callable[[], None]) -> list[float]:
    """Median seconds of each action; one of each in every repetition, so that all see the same machine."""
    times: list[list[float]] = [[] for _ in actions]
    for repetition in range(REPETITIONS + 1):
        for action, out in zip(actions, times, strict=True):
            begin = time.perf_counter()
            action()
            if repetition:  # the first one warms caches and threads
                out.append(time.perf_counter() - begin)
    return [statistics.median(t) for t in times]


if __name__ == "__main__":
    for row in run():
        print(json.dumps(row))
