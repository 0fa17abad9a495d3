"""The core by itself, in CPU: what a page costs to insert and to evict, whether that grows with what is cached, what an event of the
simulator costs, and how often a decode step calls the tier.

What is inserted goes through the whole story of a request: nothing is computed, its ranks say at once that all is done. A page is one
object: a page of one component, or a snapshot.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path as File
from types import FrameType
from typing import Any

import numpy as np

from benchmarks import Row
from benchmarks.measure import at_most, cpu, expect, median_cpu_ms
from hicache_ray import compute, evict, lengths
from hicache_ray.cache import Cache
from hicache_ray.group import Group
from hicache_ray.keys import Namespace, page_keys
from hicache_ray.match import match
from hicache_ray.records import Compute, Move, Outcome, Record
from hicache_ray.residency import Residency
from hicache_ray.resume import Path
from hicache_ray.settings import Settings
from hicache_ray.simulate import simulate
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.story import Ended, Job, Request

TOKENS, PAGE, GRID = 131_072, 64, 256
PAGES = TOKENS // PAGE
KV = (Field("k", 1, 64), Field("v", 1, 64))
FULL = (Component("full", Kind.FULL, KV),)
HYBRID = (*FULL, Component("window", Kind.WINDOW, KV, reach=1023), Component("state", Kind.STATE, KV, reach=GRID))
SETTINGS = Settings(grid=GRID, exact=False, track_interval=GRID, storage=False)
#: Pages that are cached, few and many.
CACHED = (10_000, 100_000, 1_000_000)
REPETITIONS = 5
#: Events of each history, and the histories: an easy one, hard ones, what seeds make up.
EVENTS = 8_000
HISTORIES = (("hybrid", 1), ("everything", 2), ("shards", 1), ("random", 3), ("random", 11), ("random", 12))
#: Microseconds of a page and of an event (200,000 events in a minute), milliseconds of a match; growth from the few to the many.
PAGE_GOAL_US, EVENT_GOAL_US, FLAT_GOAL = 15.0, 300.0, 2.0
#: Tokens that are decoded by the model whose steps are counted: whole pages and a rest.
DECODED = 3 * PAGE + 9


def run() -> list[Row]:
    rows = [*_page_rows("full", FULL), *_page_rows("full, window and state", HYBRID), *_flat_rows(), _event_row(), *_idle_rows()]
    return rows


# -- pages ---------------------------------------------------------------------------------------------------------------------------


class _TimedCache(Cache):
    """Counts what its inserts take. ``names``: a prompt's keys, where somebody has made them already."""

    insert_s = 0.0
    names: tuple[bytes, ...] | None = None

    def _insert(self, job: Job, run: compute.Run, path: Path, end: int) -> None:
        self.insert_s += cpu(lambda: super(_TimedCache, self)._insert(job, run, path, end))


class _Driven:
    """A group whose one rank does everything at once. ``room``: pages of each component on the device and on the host."""

    def __init__(self, components: tuple[Component, ...], room: int) -> None:
        self.spec = CacheSpec("bench", PAGE, components)
        self.res = Residency(self.spec, {(tier, c.name): room for tier in (Tier.DEVICE, Tier.HOST) for c in components})
        self.cache = _TimedCache(self.res, SETTINGS)
        self.now = 0.0
        self.group = Group(self.cache, lambda: self.now)
        self.count = 0

    def serve(self, tokens: np.ndarray) -> None:
        self.count += 1
        self.group.submit(Request(f"request {self.count}", tokens, Namespace("bench", page_size=PAGE)))
        while envelopes := self.group.take():
            for e in envelopes:
                self.group.report(e.rank, e.record.id, e.incarnation, _done(e.record))
        ended = [event for event in self.group.events() if isinstance(event, Ended)]
        expect([event.error for event in ended], [None])

    def cached(self) -> int:
        return sum(pool.cached for (tier, _), pool in self.res.pools.items() if tier is Tier.DEVICE)

    def evict(self, pages: int) -> int:
        """The device has at least so many free slots of each component. How many have gone."""
        before = self.cached()
        need = {name: min(pages, n) for (tier, name), n in self.res.capacity.items() if tier is Tier.DEVICE}
        victims = evict.choose(self.res, Tier.DEVICE, need)
        assert victims is not None
        evict.drop(self.res, Tier.DEVICE, victims)
        return before - self.cached()


def _done(record: Record) -> Outcome:
    if isinstance(record, Compute):
        return Outcome(output=(0,) * record.steps)
    return Outcome(bits=tuple((1 << len(span)) - 1 for span in record.spans)) if isinstance(record, Move) else Outcome()


def _prompt(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 30, tokens).astype(np.int32)


def _page_rows(name: str, components: tuple[Component, ...]) -> list[Row]:
    """Prompts of 131,072 tokens that share nothing, one after the other."""
    insert, leave = [], []
    for repetition in range(REPETITIONS + 1):
        driven = _Driven(components, PAGES + PAGES // 2)
        driven.serve(_prompt(repetition))
        pages = driven.cached()
        gone: list[int] = []
        seconds = cpu(lambda driven=driven, gone=gone: gone.append(driven.evict(PAGES)))  # type: ignore[misc]
        if repetition:
            insert.append(driven.cache.insert_s / pages)
            leave.append(seconds / gone[0])
    return [
        at_most(f"insert, per page of {name}", statistics.median(insert) * 1e6, "us of CPU", PAGE_GOAL_US),
        at_most(f"evict, per page of {name}", statistics.median(leave) * 1e6, "us of CPU", PAGE_GOAL_US),
    ]


def _flat_rows() -> list[Row]:
    """The same request, whole on the device, and one that is not, beside few pages and beside many."""
    found = {count: _beside_cached(count) for count in CACHED}
    few, many = found[CACHED[0]], found[CACHED[-1]]
    out = []
    for what, unit in (("match", "ms of CPU"), ("insert", "us of CPU"), ("evict", "us of CPU")):
        told = ", ".join(f"{found[count][what]:.3g} at {count:,}" for count in CACHED)
        out.append(at_most(f"{what}, {told} cached pages ({unit}): growth", many[what] / few[what], "", FLAT_GOAL))
    return out


def _beside_cached(count: int) -> dict[str, float]:
    driven = _Driven(FULL, count + 2 * PAGES)
    for seed in range(count // PAGES):
        driven.serve(_prompt(seed))
    tokens = _prompt(0)
    keys, allowed = page_keys(Namespace("bench", page_size=PAGE), tokens), lengths.within(TOKENS, PAGE, PAGE)
    expect(match(driven.res, Path(keys), allowed, True).longest(Tier.DEVICE), PAGES - 1)
    looked = median_cpu_ms(lambda: match(driven.res, Path(keys), allowed, True).longest(Tier.DEVICE), REPETITIONS)
    insert, leave = [], []
    for repetition in range(REPETITIONS):
        before = driven.cache.insert_s
        driven.serve(_prompt(10**6 + repetition))
        insert.append((driven.cache.insert_s - before) / PAGES)
        gone: list[int] = []
        seconds = cpu(lambda gone=gone: gone.append(driven.evict(driven.res.pools[(Tier.DEVICE, "full")].free + PAGES)))  # type: ignore[misc]
        expect(gone, [PAGES])
        leave.append(seconds / PAGES)
    return {"match": looked, "insert": statistics.median(insert) * 1e6, "evict": statistics.median(leave) * 1e6}


# -- events --------------------------------------------------------------------------------------------------------------------------


def _event_row() -> Row:
    seconds, events = 0.0, 0
    for case, seed in HISTORIES:
        told: list[int] = []
        seconds += cpu(lambda case=case, seed=seed, told=told: told.append(simulate(seed, EVENTS, case).events))  # type: ignore[misc]
        events += told[0]
    return at_most(f"simulator, per event of {events:,}, all checks on", seconds / events * 1e6, "us of CPU", EVENT_GOAL_US)


# -- an idle tier --------------------------------------------------------------------------------------------------------------------


class _Calls:
    """Counts every call of a function of this package while it is entered, but those of the engine's own integration, and what that asks
    the spec of its model (where a window begins)."""

    def __init__(self) -> None:
        package = File(sys.modules[Cache.__module__].__file__ or "").parent
        self._inside, self._engine = f"{package}/", (f"{package}/integrations/", f"{package}/spec.py")
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        self.count += event == "call" and name.startswith(self._inside) and not name.startswith(self._engine)

    def during(self, work: Callable[[], Outcome]) -> tuple[Outcome, int]:
        self.count = 0
        sys.setprofile(self)
        try:
            outcome = work()
        finally:
            sys.setprofile(None)
        return outcome, self.count


def _idle_rows() -> list[Row]:
    """A small hybrid model decodes; everything that is called meanwhile is counted. What a record costs at its two ends does not depend on
    its steps, so a step costs what records of unlike length differ by."""
    decoded, others = _decode()
    (long, most), (short, least) = max(decoded), min(decoded)
    each = (most - least) / (long - short)
    expect(sum(steps for steps, _ in decoded), DECODED - 1)
    return [
        at_most("calls of an idle tier in a decode step", each, "", 0.0),
        at_most(f"records that are no forward while {DECODED} tokens are decoded", float(others), "", 0.0),
        at_most("forward records per decoded page", len(decoded) / -(-DECODED // PAGE), "", None),
    ]


def _decode() -> tuple[list[tuple[int, int]], int]:
    """(steps, calls) of each record that only decodes, and how many records of other kinds were between the first of them and the last."""
    from hicache_ray.copies import Mover, choose
    from hicache_ray.executor import Executor, Rank
    from hicache_ray.integrations.transformers import Engine, build, make_weights
    from hicache_ray.pool import Pool

    with tempfile.TemporaryDirectory() as folder:
        loaded = build(make_weights("qwen3_5", folder, "tiny"), PAGE)
    pools = {tier: {c.name: Pool(c, PAGE, 24, "page_first_direct") for c in loaded.spec.components} for tier in (Tier.DEVICE, Tier.HOST)}
    res = Residency(loaded.spec, {(tier, name): pool.slots for tier, of in pools.items() for name, pool in of.items()})
    group = Group(Cache(res, SETTINGS), time.monotonic)
    engine, tags = Engine(loaded.model, loaded.spec, pools[Tier.DEVICE]), {c.name: b"" for c in loaded.spec.components}
    mover = Mover(choose("auto", "cpu", "page_first_direct"), threads=1)
    executor = Executor(Rank(0, loaded.spec, pools, tags), mover, None, engine.run, time.monotonic)
    group.submit(Request("decodes", _prompt(1, 2 * PAGE + 1) % 500 + 3, Namespace("bench", page_size=PAGE), DECODED))
    decoded, others, since = [], 0, 0
    waiting = deque(group.take())
    while waiting:
        e = waiting.popleft()
        outcome, calls = _Calls().during(lambda e=e: executor.execute(e.record))  # type: ignore[misc]
        expect(outcome.error, "")
        if isinstance(e.record, Compute) and len(e.record.feed) == 1:
            decoded.append((e.record.steps, calls))
            others, since = others + since, 0
        elif decoded:
            since += 1
        group.report(e.rank, e.record.id, e.incarnation, outcome)
        waiting += group.take()
    return decoded, others
