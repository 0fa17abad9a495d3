"""The rule and the plan for a prompt of 131,072 tokens: page 64, 8 ranks, 3 components (full, window, state). Hashing is reported apart.

Half of the prompt is in L2, the rest in L3, where every rank lacks pages of its own. The baseline of each row is its goal. Times are
of the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from benchmarks import Row
from benchmarks.measure import at_most, expect, median_cpu_ms
from hicache_ray import lengths, plan, prefetch
from hicache_ray.fetches import Fetches
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

    fetches = Fetches(res, count().__next__, lambda: 0.0, lambda job: None)

    chosen = rule_and_plan()
    if not len(keys) // 2 < chosen.length < len(keys):
        raise AssertionError(f"the plan resumes at {chosen.length} of {len(keys)} pages: this would measure something easier than it says")
    pages = [part.pages for part in chosen.of(Tier.STORAGE)]
    arrived = _arrived(res, chosen, Path(keys))
    after = match(res, Path(keys), allowed, False)
    prefetch.commit(res, after, [arrived])
    expect(all(flags.all() for flags in arrived.published) and len(pages) == len(COMPONENTS), True)

    def all_three() -> None:
        """As a request is matched, planned and, when its pages are here, committed; what becomes visible is the row of insert."""
        here = match(res, Path(keys), allowed, False)
        asked = here.with_storage(found)
        plan.choose(asked, 4, prefetch.intake(res, asked, fetches.apart(asked), TOKENS).bounds())
        prefetch.commit(res, here, [arrived])

    work: list[tuple[str, Callable[[], object], float | None]] = [
        ("rule + plan, 131,072 tokens, 8 ranks, 3 components", rule_and_plan, 2.0),
        ("match + plan + commit of the same", all_three, 5.0),
        ("match in L1 and L2", lambda: match(res, Path(keys), allowed, False), None),
        ("page keys (sha256)", lambda: page_keys(namespace, tokens), None),
    ]
    return [at_most(name, median_cpu_ms(do, REPETITIONS), "ms of CPU", goal) for name, do, goal in work]


def _arrived(res: Residency, chosen: plan.Plan, path: Path) -> prefetch.Arrivals:
    """All that the plan has from L3 has come."""
    out = prefetch.Arrivals(begin(res, "bench", Tier.HOST, chosen.of(Tier.STORAGE), path))
    counts = [len(leg.keys) for leg in out.moved.legs]
    out.land(tuple((i, np.arange(n)) for i, n in enumerate(counts)), [(1 << n) - 1 for n in counts], True)
    return out


def _filled(spec: CacheSpec, keys: Sequence[bytes]) -> Residency:
    """L2 with the first half of the prompt."""
    res = Residency(spec, {(tier, c.name): TOKENS // PAGE for tier in (Tier.DEVICE, Tier.HOST) for c in spec.components})
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


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
