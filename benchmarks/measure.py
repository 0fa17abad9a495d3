"""What the benchmarks share: times, checks that what was measured has happened, and rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks import Row


def timed(work: Callable[[], object]) -> float:
    """Seconds that pass."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cpu(work: Callable[[], object]) -> float:
    """Seconds of CPU of this process; what else the machine does is not in them."""
    start = time.process_time()
    work()
    return time.process_time() - start


def median_cpu_ms(work: Callable[[], object], repetitions: int) -> float:
    """The first one, which warms caches, is left out."""
    return statistics.median([cpu(work) for _ in range(repetitions + 1)][1:]) * 1000


def expect(found: object, wanted: object) -> None:
    """Raise where the work was not done: its time would mean nothing."""
    if found != wanted:
        raise RuntimeError("a store did not do what was asked; the numbers would mean nothing")


def beside(name: str, amount: float, own: Sequence[float], base: Sequence[float], goal: float | None) -> Row:
    """Speed of ``amount`` bytes beside that of a baseline, of times taken in turn. Without a goal for comparison only."""
    ratio = statistics.median(b / o for b, o in zip(base, own, strict=True))
    value, other = amount / 1e9 / statistics.median(own), amount / 1e9 / statistics.median(base)
    text = "for comparison" if goal is None else f">= {goal:g}"
    return Row(name=name, value=value, unit="GB/s", baseline=other, ratio=ratio, goal=text, met=goal is None or ratio >= goal)


def at_most(name: str, value: float, unit: str, goal: float | None) -> Row:
    """A number that is to be small. Without a goal for information only."""
    ratio = None if goal is None or not goal else round(value / goal, 3)
    text = "" if goal is None else f"<= {goal:g} {unit}".rstrip()
    return Row(name=name, value=round(value, 3), unit=unit, baseline=goal, ratio=ratio, goal=text, met=goal is None or value <= goal)
