"""Stage 5, compute: the device slots that a request needs of its own, and the records that run it.

A request owns, until it ends: the pages it fills, a slot for the running state of each state component, and a slot for each snapshot
it will make. All are taken before the first token, so that nothing can run out half-way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hicache_ray import lengths
from hicache_ray.lease import Lease
from hicache_ray.records import Slots
from hicache_ray.residency import Residency
from hicache_ray.resume import Path, Plan
from hicache_ray.settings import Settings
from hicache_ray.spec import CacheSpec, Component, Tier


@dataclass(frozen=True)
class Shape:
    """A request's lengths: resume at ``start``, ``prompt`` tokens given, ``end`` tokens in the cache when it is done.

    ``drafts``: where draft components resume, which may be earlier; they have to catch up by themselves. ``fork``: where it leaves a cached
    path, a snapshot is made at this length as well (0: nowhere).
    """

    start: int
    prompt: int
    end: int
    drafts: Mapping[str, int] = field(default_factory=dict)
    fork: int = 0

    @classmethod
    def of(cls, plan: Plan, page_size: int, prompt: int, new_tokens: int, fork: int = 0) -> Shape:
        """For a request that resumes by a plan."""
        drafts = {name: pages * page_size for name, pages in plan.drafts.items()}
        return cls(plan.length * page_size, prompt, prompt + max(new_tokens, 1) - 1, drafts, fork)

    @classmethod
    def cold(cls, prompt: int, new_tokens: int) -> Shape:
        """For a request that resumes from nothing: the most that it can need."""
        return cls(0, prompt, prompt + max(new_tokens, 1) - 1)

    def begin(self, component: Component) -> int:
        """Where a component resumes, in tokens."""
        return self.drafts.get(component.name, self.start)


def snapshot_lengths(component: Component, settings: Settings, shape: Shape, spec: CacheSpec) -> tuple[int, ...]:
    """Lengths at which a request makes snapshots: at every chunk boundary of the prompt, then at the track interval; of those only where
    no wide page or entry of another component is cut.

    Under ``exact`` decode makes none that anybody could use: what decode made is not canonical.
    """
    stride = component.reach or settings.grid or spec.page_size
    out = list(range((shape.start // stride + 1) * stride, shape.prompt + 1, stride))
    if not settings.exact:
        step = component.reach or settings.track_interval
        out += range((max(shape.prompt, shape.start) // step + 1) * step, shape.end + 1, step)
    whole = spec.step(None)
    kept = lengths.kept_snapshots([n for n in out if n % whole == 0], shape.prompt, settings.state_snapshots)
    return tuple(sorted(kept | {n for n in (shape.fork,) if shape.start < n <= shape.prompt}))


def fork_at(spec: CacheSpec, settings: Settings, length: int) -> int:
    """Where to keep a state for a path that leaves another one at ``length``: the last end of a chunk before, where no wide page is cut."""
    if not any(c.is_state for c in spec.components):
        return 0
    step = math.lcm(chunk(spec, settings), spec.step(None))
    return length // step * step


def chunk(spec: CacheSpec, settings: Settings) -> int:
    """Tokens between the ends of the prefill's chunks: the grid; without one wherever states make snapshots; 0 where there are none."""
    return settings.grid or math.gcd(*(c.reach or spec.page_size for c in spec.components if c.is_state))


def need(spec: CacheSpec, settings: Settings, shape: Shape) -> Mapping[str, int]:
    """Device slots per component beside the pages it resumes from."""
    out = {}
    for c in spec.components:
        if c.is_state:
            out[c.name] = 1 + len(snapshot_lengths(c, settings, shape, spec))
        else:
            span = spec.page_size * c.page_span
            out[c.name] = -(-shape.end // span) - shape.begin(c) // span
    return out


@dataclass(frozen=True)
class Run:
    """The slots of a request that runs. ``own``: leases of its own pages, page order (states: snapshots in order, then live).

    ``pure``: it resumes on the grid, from canonical bytes only, so that what whole chunks make is canonical as well.
    """

    shape: Shape
    tables: Mapping[str, Slots]
    live: Mapping[str, int]
    resume: Mapping[str, int]
    snapshots: Mapping[str, tuple[tuple[int, int], ...]]
    own: Mapping[str, Lease]
    pure: bool

    def snapshots_in(self, start: int, end: int) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Those made while the cached length goes from ``start`` to ``end``."""
        return {c: tuple((n, s) for n, s in pairs if start < n <= end) for c, pairs in self.snapshots.items()}


def begin(res: Residency, settings: Settings, holder: str, path: Path, shape: Shape) -> Run:
    """Take the slots (there is room) and lay out the tables over what the request resumes from, which must be on the device."""
    spec, wanted = res.spec, need(res.spec, settings, shape)
    tables, live, resume, snapshots, own = {}, {}, {}, {}, {}
    pure = bool(settings.grid) and shape.start % settings.grid == 0
    for c in spec.components:
        place = (Tier.DEVICE, c.name)
        lease = own[c.name] = res.leases.alloc(holder, place, wanted[c.name])
        used = lengths.needed(c, shape.begin(c) // spec.page_size, spec.page_size)
        cached = res.slots(place, res.index.find(path.names(c.name, used)))
        pure &= c.role == "draft" or not any(path.other.get(c.name, 0) >> i & 1 for i in used)
        if c.is_state:
            made = snapshot_lengths(c, settings, shape, spec)
            snapshots[c.name] = tuple(zip(made, lease.slots[:-1].tolist(), strict=True))
            live[c.name] = int(lease.slots[-1])
            if len(cached):
                resume[c.name] = int(cached[0])
        else:
            before = shape.begin(c) // (spec.page_size * c.page_span)
            table = np.full(before + len(lease.slots), -1, dtype=np.int32)
            table[before - len(cached) : before] = cached
            table[before:] = lease.slots
            tables[c.name] = table
    return Run(shape, tables, live, resume, snapshots, own, pure)


@dataclass(frozen=True)
class Made:
    """Pages (snapshots) of one component that may be cached: their base page indices and the positions in the run's own lease.

    ``canonical``: how many of them, from the first on, have canonical bytes.
    """

    component: str
    pages: tuple[int, ...]
    positions: tuple[int, ...]
    canonical: int


def made(spec: CacheSpec, settings: Settings, run: Run, end: int) -> tuple[Made, ...]:
    """What a run that has come to ``end`` cached tokens may publish. Under ``exact``: only what whole chunks of the grid have made.

    A draft only proposes: its bytes cannot change what is generated, so all of them count as canonical.
    """
    start, page = run.shape.start, spec.page_size
    pure = min(end, run.shape.prompt // settings.grid * settings.grid) if run.pure else start
    top = pure if settings.exact else end
    out = []
    for c in spec.components:
        if c.is_state:
            good = [(n // page - 1, i) for i, (n, _) in enumerate(run.snapshots[c.name]) if n <= top and n % page == 0]
        else:
            span, last = c.page_span, end if c.role == "draft" else top
            own_pages = range(run.shape.begin(c) // (page * span), last // (page * span))
            good = [((j + 1) * span - 1, i) for i, j in enumerate(own_pages)]
        canonical = len(good) if c.role == "draft" else sum((p + 1) * page <= pure for p, _ in good)
        out.append(Made(c.name, tuple(p for p, _ in good), tuple(i for _, i in good), canonical))
    return tuple(out)


def decode_steps(prompt: int, sampled: int, new_tokens: int, page_size: int) -> int:
    """Tokens to sample in the next decode record: up to the next page boundary of the cached length, so that no call is made in between."""
    cached = prompt + sampled - 1
    return min(page_size - cached % page_size, new_tokens - sampled)
