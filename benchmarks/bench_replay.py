"""What the eviction policies reach on traces of requests: the published ones where they are, and the generated one.

The published traces (``conversation_trace.jsonl``, ``synthetic_trace.jsonl``, Mooncake's format) are looked for in the folder that
``HICACHE_TRACES`` names, or in ``../shared/traces`` beside this repository.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import Row
from benchmarks.measure import cpu
from hicache_ray.replay import Replay, Replayed, Sizes
from hicache_ray.settings import Eviction
from hicache_ray.trace import Ceiling, Traced, ceiling, read

HERE = Path(__file__).resolve().parent
FOLDER = Path(os.environ.get("HICACHE_TRACES", HERE.parent.parent / "shared" / "traces"))


@dataclass(frozen=True)
class Case:
    """A trace. ``blocks``: the capacity under which policies differ. ``most``: of all its blocks, in percent, what a cache that never
    forgets can serve. ``plain``: what least recently used reaches, whatever the order of touches; another policy is to beat it."""

    file: Path
    blocks: int
    most: float | None = None
    plain: float | None = None


CASES = (
    Case(FOLDER / "conversation_trace.jsonl", 10_000, 36.60, 21.5),
    Case(FOLDER / "synthetic_trace.jsonl", 10_000, 63.79, 43.4),
    Case(HERE / "small_trace.jsonl", 300),
)


def run() -> list[Row]:
    return [row for case in CASES for row in _rows(case)]


def _rows(case: Case) -> list[Row]:
    name = case.file.stem
    if not case.file.exists():
        missing = f"{case.file.name} is not here; HICACHE_TRACES names its folder"
        return [Row(name=f"replay {name}", value=None, unit="", baseline=None, ratio=None, goal=missing, met=False)]
    requests = read(str(case.file))
    limits = ceiling(requests)
    rows = [_unbounded(name, case, requests, limits)]
    reached: dict[Eviction, float] = {}
    for policy in Eviction:
        found, _ = _replayed(requests, limits, policy, Sizes(case.blocks))
        reached[policy] = found.hit_ratio * 100
        rows.append(_row(f"replay {name}, {case.blocks:,} blocks, {policy.value}", reached[policy], reached[Eviction.LRU], "", True))
    best = max(reached.values())
    least = max(reached[Eviction.LRU], case.plain or 0.0)
    rows.append(_row(f"replay {name}, {case.blocks:,} blocks, the best policy", best, least, "> lru", best > least))
    return rows


def _unbounded(name: str, case: Case, requests: Sequence[Traced], limits: Ceiling) -> Row:
    found, seconds = _replayed(requests, limits, Eviction.LRU, Sizes())
    ratio, most = found.hit_ratio * 100, limits.hit_ratio * 100
    wanted = most if case.most is None else case.most
    what = f"replay {name}, without bound ({seconds / len(requests) * 1e3:.2f} ms of CPU a request)"
    return _row(what, ratio, wanted, f"{wanted:.2f} %, the ceiling", round(ratio, 2) == round(wanted, 2) == round(most, 2))


def _replayed(requests: Sequence[Traced], limits: Ceiling, policy: Eviction, sizes: Sizes) -> tuple[Replayed, float]:
    out: list[Replayed] = []
    seconds = cpu(lambda: out.append(Replay(policy, sizes, limits).run(requests)))
    return out[0], seconds


def _row(name: str, value: float, baseline: float, goal: str, met: bool) -> Row:
    value, baseline, ratio = round(value, 2), round(baseline, 2), round(value / baseline, 3)
    return Row(name=name, value=value, unit="% of blocks", baseline=baseline, ratio=ratio, goal=goal, met=met)
