"""Parts of the test kit: components by a word, a clock that stands still, an engine whose bytes name themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_ray.errors import EngineError
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Outcome, Tokens
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Shard

KV = (Field("k", 2, 4), Field("v", 2, 4))
STATE = (Field("conv", 1, 6), Field("recurrent", 2, 8, 4, "float32"))


@dataclass(frozen=True)
class Probe:
    """Resumable lengths in tokens: from each tier alone, and from all together. ``differs``: fields that kept L3 from being a hit."""

    l1: int
    l2: int
    l3: int
    reusable: int
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Poll:
    """State of a prefetch: a :class:`Phase` value, or ``failed`` / ``cancelled``. ``tokens``: what may be promised to others."""

    state: str
    tokens: int
    limit: str


@dataclass(frozen=True)
class Served:
    """How a finished request was served, in tokens."""

    l1: int
    l2: int
    l3: int
    computed: int


@dataclass
class FakeClock:
    """Seconds that pass only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def _component(kind: Kind, reach: int, fields: Sequence[Field], more: Mapping[str, Any]) -> Component:
    rest = dict(more)
    layers = tuple(range(rest.pop("layers", 2)))
    shard = Shard(rest.pop("shard", "heads"))
    return Component("unnamed", kind, tuple(rest.pop("fields", fields)), layers, reach, shard=shard, **rest)


def full(**more: Any) -> Component:
    """All pages of [0, L). Options: ``role, lookahead, shard, page_span, ratio, layers`` (a number), ``fields``."""
    return _component(Kind.FULL, 0, KV, more)


def window(tokens: int, **more: Any) -> Component:
    """The pages that touch the ``tokens`` tokens before L."""
    return _component(Kind.WINDOW, tokens, KV, more)


def chunked(tokens: int, **more: Any) -> Component:
    """The pages of the chunk of ``tokens`` tokens that L is in."""
    return _component(Kind.CHUNKED, tokens, KV, more)


def state(every: int = 0, **more: Any) -> Component:
    """A snapshot made at exactly L; the engine makes one every ``every`` tokens."""
    return _component(Kind.STATE, every, STATE, more)


@dataclass
class ContentEngine:
    """Stands in for a model on one rank: fills pages with bytes that name their own identity."""

    rank: int
    spec: CacheSpec
    pools: Mapping[str, Pool]
    prompts: Mapping[str, Tokens]

    def content(self, component: Component, tokens: Tokens, end: int) -> bytes:
        """Bytes of the page (snapshot) that ends with token ``end``: a function of component, rank and all tokens up to there.

        Of a component that looks ahead also of the tokens that follow.
        """
        end += component.lookahead
        rank = 0 if component.shard is Shard.REPLICATED else self.rank
        name = f"{component.name}/{rank}/".encode() + np.ascontiguousarray(tokens[:end], dtype="<i4").tobytes()
        return hashlib.shake_128(name).digest(component.page_bytes(self.spec.page_size))

    def write(self, component: Component, slot: int, content: bytes) -> None:
        """Canonical bytes into a device slot of any layout."""
        pool, at = self.pools[component.name], 0
        for f in component.fields:
            rows = pool.rows(f.name)[slot]
            size = rows.numel()
            raw = np.frombuffer(content, dtype=np.uint8, count=size, offset=at)
            rows.numpy()[...] = raw.reshape(tuple(rows.shape))
            at += size

    def run(self, record: Compute) -> Outcome:
        tokens = self.prompts[record.rid]
        self._verify(record, tokens)
        for c in self.spec.components:
            for end, slot in self.made(c, record):
                self.write(c, slot, self.content(c, tokens, end))
        return self.sampled(record, tokens)

    def made(self, component: Component, record: Compute) -> list[tuple[int, int]]:
        """(length at its end, device slot) of the pages or snapshots that a record fills."""
        if component.is_state:
            return list(record.snapshots.get(component.name, ()))
        span, table = self.spec.page_size * component.page_span, record.tables[component.name]
        return [((page + 1) * span, int(table[page])) for page in range(_begin(component, record) // span, record.end // span)]

    def used(self, component: Component, record: Compute) -> list[tuple[int, int]]:
        """(length at its end, device slot) of the whole pages, or the snapshot, that a model would read."""
        if component.is_state:
            slot = record.resume.get(component.name, -1)
            return [(record.start, slot)] if slot >= 0 else []
        span, table = self.spec.page_size * component.page_span, record.tables[component.name]
        start = _begin(component, record)
        return [((p + 1) * span, int(table[p])) for p in range(component.lo(start) // span, start // span)]

    def sampled(self, record: Compute, tokens: Tokens) -> Outcome:
        first = record.start + len(record.feed)
        output = tuple(int(t) for t in tokens[first : first + record.steps])
        output += (0,) * (record.steps - len(output))
        return Outcome(output=output, logprobs=(0.0,) * len(output))

    def read(self, component: Component, slot: int) -> bytes:
        """Canonical bytes of a device slot."""
        pool = self.pools[component.name]
        return b"".join(pool.rows(f.name)[slot].contiguous().numpy().tobytes() for f in component.fields)

    def _verify(self, record: Compute, tokens: Tokens) -> None:
        """What a model would read must be there, byte for byte, and snapshots be asked for where a forward ends."""
        stop, grid = record.start + len(record.feed), record.grid
        ends = {*range(record.start - record.start % grid, stop, grid)} if grid else set()
        ends |= {*range(stop, record.end + 1)}
        for c in self.spec.components:
            wrong = any(self.read(c, slot) != self.content(c, tokens, end) for end, slot in self.used(c, record))
            if c.is_state:
                wrong |= any(n not in ends or n <= record.start for n, _ in record.snapshots.get(c.name, ()))
            if wrong:
                raise EngineError(f"request {record.rid}: component {c.name!r} has wrong bytes or snapshots at length {record.start}")


def _begin(component: Component, record: Compute) -> int:
    """Where a component's cache ends when the record begins; a draft's may end earlier than its target's."""
    return record.valid.get(component.name, record.start)
