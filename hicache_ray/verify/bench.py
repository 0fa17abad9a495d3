"""A model on its bench: an engine over device pools, with eyes on what it reads and what it makes.

The digests are taken at the moment of truth: of what a request is resumed from, just before its first forward; of what it has made, just
after its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hicache_ray import compute, lengths
from hicache_ray.digest import digest_pages
from hicache_ray.integrations.transformers import Engine, Loaded
from hicache_ray.keys import Namespace, as_tokens, page_keys
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Outcome, Slots, Tokens, slots_array
from hicache_ray.settings import Settings
from hicache_ray.spec import CacheSpec, Component
from hicache_ray.story import Request

#: (component, index of the base page that the page or snapshot ends with)
Spot = tuple[str, int]


def room(spec: CacheSpec, settings: Settings, prompt: int, new: int) -> dict[str, int]:
    """Slots per component for one request; a snapshot to resume from included."""
    need = compute.need(spec, settings, compute.Shape.cold(prompt, new))
    return {name: n + spec[name].is_state for name, n in need.items()}


@dataclass
class Life:
    """What one request read and made. ``start``: where it was resumed."""

    tokens: Tokens
    prompt: int
    namespace: Namespace
    start: int = 0
    read: dict[Spot, str] = field(default_factory=dict)
    made: dict[Spot, str] = field(default_factory=dict)

    def keys(self) -> tuple[bytes, ...]:
        return page_keys(self.namespace, self.tokens)


@dataclass(frozen=True)
class Image:
    """What a cold run has left in its slots: bytes per component, and what it answered."""

    outcome: Outcome
    pages: Mapping[str, Mapping[int, Any]]


class Bench:
    """``slots``: of each component's device pool. One request's records at a time, as the engine has them."""

    def __init__(self, loaded: Loaded, slots: Mapping[str, int], layout: str = "layer_first") -> None:
        self.loaded, self.spec = loaded, loaded.spec
        self.pools = {c.name: Pool(c, self.spec.page_size, slots[c.name], layout) for c in self.spec.components}
        self.engine = Engine(loaded.model, self.spec, self.pools)
        self.lives: dict[str, Life] = {}
        self._images: dict[tuple[Any, ...], Image] | None = None

    def remember(self) -> None:
        """From now on a cold run that was made before is repeated by copying what it left, bit by bit. (Its first time is real.)"""
        self._images = {}

    def expect(self, request: Request) -> None:
        """A request is about to run."""
        self.lives[request.rid] = Life(request.tokens, len(request.tokens), request.namespace)

    def spoil(self) -> None:
        """All bytes of the pools become 0xFF, which is not a number in any type."""
        for pool in self.pools.values():
            pool.buffer.fill_(255)

    def run(self, record: Compute) -> Outcome:
        """Execute a record as the engine does."""
        life = self.lives[record.rid]
        if record.start and len(life.tokens) == life.prompt and not life.made and not life.start:
            life.start = record.start
            life.read = self._digests(record, self._reads(record))
        outcome = self._cold(record) if record.start == 0 and self._images is not None else self.engine.run(record)
        if not outcome.error:
            life.tokens = np.concatenate([life.tokens, as_tokens(outcome.output)])
            life.made |= self._digests(record, self._makes(record))
        return outcome

    def cold(self, tokens: Tokens, new: int, grid: int) -> Outcome:
        """A run without the tier: no pages but its own, in order. A failure is in its ``error``."""
        return self.engine.run(self._alone(0, tokens, new, grid))

    def stop_and_go(self, tokens: Tokens, prompt: int, stop: int, new: int, grid: int) -> Outcome:
        """Without the tier as well: decode from ``prompt`` to ``stop`` cached tokens, then take the rest of ``tokens`` as a prompt."""
        first = self.cold(tokens[:prompt], stop - prompt + 1, grid)
        return first if first.error else self.engine.run(self._alone(stop, tokens[stop:], new, grid))

    def _alone(self, start: int, feed: Tokens, steps: int, grid: int) -> Compute:
        pages = {c.name: -(-(start + len(feed) + steps - 1) // (self.spec.page_size * c.page_span)) for c in self.spec.components}
        tables = {c.name: slots_array(range(pages[c.name])) for c in self.spec.components if not c.is_state}
        live = {c.name: 0 for c in self.spec.components if c.is_state}
        return Compute(0, "alone", start, feed, steps, grid, tables, live, dict.fromkeys(live, -1))

    # -- what a record reads and makes --------------------------------------------------------------------------------------------------

    def _reads(self, record: Compute) -> dict[Spot, int]:
        """Spot -> slot, of all that a resume at the record's start needs by the one rule."""
        out: dict[Spot, int] = {}
        for c in self.spec.components:
            for i in lengths.needed(c, record.start // self.spec.page_size, self.spec.page_size):
                out[c.name, i] = record.resume[c.name] if c.is_state else int(record.tables[c.name][self._own(c, i)])
        return out

    def _makes(self, record: Compute) -> dict[Spot, int]:
        out: dict[Spot, int] = {}
        for c in self.spec.components:
            if c.is_state:
                out |= {(c.name, n // self.spec.page_size - 1): slot for n, slot in record.snapshots.get(c.name, ())}
                continue
            span = self.spec.page_size * c.page_span
            for page in range(record.start // span, record.end // span):
                out[c.name, (page + 1) * c.page_span - 1] = int(record.tables[c.name][page])
        return out

    def _own(self, component: Component, index: int) -> int:
        return (index + 1) // component.page_span - 1

    def _digests(self, record: Compute, spots: Mapping[Spot, int]) -> dict[Spot, str]:
        out: dict[Spot, str] = {}
        for name, pool in self.pools.items():
            some = [(spot, slot) for spot, slot in spots.items() if spot[0] == name and slot >= 0]
            out |= dict(zip((spot for spot, _ in some), digest_pages(pool, [slot for _, slot in some]), strict=True))
        return out

    # -- a cold run once for all --------------------------------------------------------------------------------------------------------

    def _cold(self, record: Compute) -> Outcome:
        assert self._images is not None
        lengths_of = tuple((name, tuple(n for n, _ in pairs)) for name, pairs in sorted(record.snapshots.items()))
        name = (record.feed.tobytes(), record.steps, record.grid, lengths_of)
        if name not in self._images:
            outcome = self.engine.run(record)
            if outcome.error:
                return outcome
            pages = {c.name: {i: self._bytes(c, slot) for i, slot in enumerate(self._slots(record, c))} for c in self.spec.components}
            self._images[name] = Image(replace(outcome), pages)
            return outcome
        image = self._images[name]
        for c in self.spec.components:
            for i, slot in enumerate(self._slots(record, c)):
                for rows, content in zip(self._rows(c, slot), image.pages[c.name][i], strict=True):
                    rows.copy_(content)
        return image.outcome

    def _slots(self, record: Compute, component: Component) -> list[int]:
        """All slots that the record writes, in an order of their own."""
        if component.is_state:
            return [record.live[component.name], *(slot for _, slot in record.snapshots.get(component.name, ()))]
        table: Slots = record.tables[component.name]
        return [int(slot) for slot in table[: -(-record.end // (self.spec.page_size * component.page_span))]]

    def _rows(self, component: Component, slot: int) -> list[Any]:
        return [self.pools[component.name].rows(f.name)[slot] for f in component.fields]

    def _bytes(self, component: Component, slot: int) -> list[Any]:
        return [rows.clone() for rows in self._rows(component, slot)]
