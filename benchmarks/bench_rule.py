"""The rule and the plan for a prompt of 131,072 tokens: page 64, 8 ranks, 3 components (full, window, state). Hashing is reported apart.

Half of the prompt is in L2, the rest in L3, where every rank lacks pages of its own. The baseline of each row is its goal.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import Row
from hicache_ray import lengths, plan
from hicache_ray.keys import Namespace, page_keys
from hicache_ray.match import match
from hicache_ray.residency import Residency
from hicache_ray.resume import Path
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.transfer import Part, arrive, begin, close

TOKENS, PAGE, RANKS, GRID = 131_072, 64, 8, 256
REPETITIONS = 15
KV = (Field("k", 1, 64), Field("v", 1, 64))
COMPONENTS = (
    Component("full", Kind.FULL, KV),
    Component("window", Kind.WINDOW, KV, reach=1023),
    Component("state", Kind.STATE, KV, reach=GRID),
)


def run() -> list[Row]:
    """Rows in milliseconds."""
    spec = CacheSpec("bench", PAGE, COMPONENTS, RANKS)
    tokens = np.random.default_rng(0).integers(0, 32_000, TOKENS).astype(np.int32)
    namespace = Namespace("bench", page_size=PAGE)
    keys = page_keys(namespace, tokens)
    allowed = lengths.within(TOKENS, PAGE, GRID)
    res = _filled(spec, keys[: len(keys) // 2])
    found = _found(len(keys))
    local = match(res, Path(keys), allowed, False)

    def rule_and_plan() -> plan.Plan:
        return plan.choose(local.with_storage(found), 4)

    chosen = rule_and_plan()
    if not len(keys) // 2 < chosen.length < len(keys):
        raise AssertionError(f"the plan resumes at {chosen.length} of {len(keys)} pages: this would measure something easier than it says")
    rows = [
        ("rule + plan, 131,072 tokens, 8 ranks, 3 components", _median_ms(rule_and_plan), 2.0),
        ("match in L1 and L2", _median_ms(lambda: match(res, Path(keys), allowed, False)), None),
        ("page keys (sha256)", _median_ms(lambda: page_keys(namespace, tokens)), None),
    ]
    return [_row(*row) for row in rows]


def _row(name: str, value: float, goal: float | None) -> Row:
    ratio = None if goal is None else round(value / goal, 3)
    text = "" if goal is None else f"< {goal:g} ms"
    met = goal is None or value < goal
    return {"name": name, "value": round(value, 3), "unit": "ms", "baseline": goal, "ratio": ratio, "goal": text, "met": met}


def _filled(spec: CacheSpec, keys: Sequence[bytes]) -> Residency:
    """L2 with the first half of the prompt."""
    res = Residency(spec, {(tier, c.name): len(keys) for tier in (Tier.DEVICE, Tier.HOST) for c in spec.components})
    pages = np.arange(len(keys), dtype=np.int32)
    snapshots = pages[GRID // PAGE - 1 :: GRID // PAGE]
    parts = [Part(c.name, Tier.STORAGE, snapshots if c.is_state else pages) for c in spec.components]
    moved = begin(res, "bench", Tier.HOST, parts, Path(tuple(keys)))
    arrive(res, moved, [(1 << len(leg.keys)) - 1 for leg in moved.legs])
    close(res, moved)
    return res


def _found(pages: int) -> dict[str, tuple[int, ...]]:
    """What a lookup found for each rank: everything, but for a few pages near the end that differ by rank."""
    chance = np.random.default_rng(1)
    out = {}
    for c in COMPONENTS:
        whole = lengths.multiples(GRID // PAGE, pages) >> 1 if c.is_state else lengths.ones(pages)
        holes = chance.integers(pages * 7 // 8, pages, RANKS)
        out[c.name] = tuple(whole & ~(1 << int(hole)) for hole in holes)
    return out


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
