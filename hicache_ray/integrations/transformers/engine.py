"""The real engine: a Hugging Face model whose attention caches are the pages and snapshots of a tier's device pools.

One request at a time (a batch of one: another batch shape rounds differently). The engine executes
:class:`~hicache_ray.records.Compute` records and knows nothing of matches, leases or tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from hicache_ray.errors import ConfigError, EngineError, GroupLost
from hicache_ray.integrations.transformers.assemble import PoolCache, WaitLayer
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Outcome
from hicache_ray.spec import CacheSpec, Component, Kind


def chunks(start: int, stop: int, grid: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` cut at the multiples of ``grid`` (0: not cut)."""
    while start < stop:
        end = min(stop, (start // grid + 1) * grid) if grid else stop
        yield start, end
        start = end


@dataclass(frozen=True)
class Ran:
    """What the last record was cut into: tokens of each prefill chunk, and one-token forwards after them."""

    prefill: tuple[int, ...] = ()
    decode: int = 0


class Engine:
    """Executes Compute records of one rank. ``device_pools``: one pool for each component of ``spec``, in memory the model can reach.

    ``wait_layer``: what to call before a layer's restored pages are read (:meth:`hicache_ray.copies.Mover.by_layer`), on a device with
    queues; None where they are there when a record begins.
    """

    def __init__(
        self, model: PreTrainedModel, spec: CacheSpec, device_pools: Mapping[str, Pool], wait_layer: WaitLayer | None = None
    ) -> None:
        self.model, self.spec, self.pools = model, spec, dict(device_pools)
        self.ran = Ran()
        for c in spec.components:
            if c.name not in self.pools or self.pools[c.name].component != c:
                raise ConfigError(f"component {c.name!r} of the cache spec needs a device pool made for it; pass one under this name")
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self._wait_layer = wait_layer
        self.cache = PoolCache(spec, self.pools, int(config.num_hidden_layers), wait_layer)
        self.tables = self.cache.tables

    def run(self, record: Compute) -> Outcome:
        """Execute a record. A failure of this request is an outcome with an error sentence; the engine stays usable.

        Raises :class:`GroupLost` when another rank does not answer. A forward cannot be interrupted: ``record.timeout_s`` is for the
        caller to watch. Whatever is refused here is refused before the first forward, and so by all ranks alike.
        """
        try:
            self._accept(record)
            with torch.inference_mode():
                return self._compute(record)
        except GroupLost:
            raise
        except EngineError as error:
            return Outcome(error=str(error), refused=True)
        except Exception as error:  # whatever a model's forward may raise
            return Outcome(error=f"the forward of request {record.rid!r} failed: {type(error).__name__}: {error}")

    def _compute(self, record: Compute) -> Outcome:
        """Prefill on the grid, then one token a step. All but the last sampled token enter the cache."""
        self._begin(record)
        stop = record.start + len(record.feed)
        # Copied: records may come in read-only memory, which torch does not wrap.
        feed = torch.from_numpy(np.array(record.feed, dtype=np.int64)).to(self.model.device)[None]
        prefill: list[int] = []
        logits = torch.empty(0)
        for start, end in chunks(record.start, stop, record.grid):
            logits = self._forward(feed[:, start - record.start : end - record.start], start)
            self._snapshot(record, end)
            prefill.append(end - start)
        output, logprobs = [], []
        for length in range(stop, stop + record.steps):
            # Ties fall to the first of the highest, on every rank alike.
            token = int(logits.argmax())
            output.append(token)
            logprobs.append(float(torch.log_softmax(logits, -1)[token]))
            if len(output) < record.steps:
                logits = self._forward(torch.tensor([[token]], device=self.model.device), length)
                self._snapshot(record, length + 1)
        for name, layers in self.cache.states.items():
            for layer in layers:
                layer.save(record.live[name])
        self.ran = Ran(tuple(prefill), record.steps - 1)
        return Outcome(output=tuple(output), logprobs=tuple(logprobs))

    def _forward(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Logits (fp32, one axis) after the last of ``tokens`` ([1, count], at positions ``start``, ...)."""
        count = tokens.shape[1]
        for table in self.tables.values():
            table.place(start, count)
        positions = torch.arange(start, start + count, device=tokens.device)[None]
        out = self.model(input_ids=tokens, position_ids=positions, cache=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits

    def _begin(self, record: Compute) -> None:
        """Tables and running states of a new request."""
        for name, table in self.tables.items():
            table.begin(record.tables[name])
        for name, layers in self.cache.states.items():
            snapshot = record.resume.get(name, -1)
            if self._wait_layer is not None:
                for index in range(len(self.spec[name].layers)):
                    self._wait_layer(name, index)
            for layer in layers:
                layer.load(snapshot if snapshot >= 0 else record.live[name], record.start)
        if record.start:
            self._snapshot(record, record.start)

    def _snapshot(self, record: Compute, length: int) -> None:
        """Save the running states for which the record asks at this cached length."""
        for name, wanted in record.snapshots.items():
            for at, slot in wanted:
                if at == length:
                    for layer in self.cache.states[name]:
                        layer.save(slot)

    def _accept(self, record: Compute) -> None:
        """:class:`EngineError` when the record cannot be executed to its end. Nothing has been computed or written yet."""
        if len(record.feed) < 1 or record.steps < 1 or record.start < 0 or record.grid < 0:
            raise EngineError(
                f"request {record.rid!r} feeds {len(record.feed)} tokens at {record.start} for {record.steps} steps on a grid of "
                f"{record.grid}; a record needs at least one token to feed and one step"
            )
        low, high = int(record.feed.min()), int(record.feed.max())
        if low < 0 or high >= self.vocabulary:
            token = low if low < 0 else high
            raise EngineError(f"request {record.rid!r} holds token {token}; the model knows tokens 0 to {self.vocabulary - 1}")
        stop = record.start + len(record.feed)
        lengths = [(a, b) for a, b in chunks(record.start, stop, record.grid)] + [(n, n + 1) for n in range(stop, record.end)]
        for c in self.spec.components:
            if c.is_state:
                self._accept_state(record, c, {record.start, *(b for _, b in lengths)} - {0})
            else:
                self._accept_table(record, c, lengths)

    def _accept_table(self, record: Compute, component: Component, lengths: list[tuple[int, int]]) -> None:
        name, table = component.name, self.tables[component.name]
        if name not in record.tables:
            raise EngineError(f"request {record.rid!r} has no table for component {name!r}; give it one slot per page")
        slots = record.tables[name]
        self._accept_slots(record, name, slots[slots != -1].tolist())
        table.begin(slots)
        if len(slots) * table.tokens < record.end:
            table.need(len(slots) * table.tokens, record.end, record.end)
        if component.kind is Kind.FULL:
            table.need(0, record.end, record.end)
            return
        for start, _ in lengths:
            table.need(component.lo(start), start, start)

    def _accept_state(self, record: Compute, component: Component, lengths: set[int]) -> None:
        name = component.name
        if name not in record.live:
            raise EngineError(f"request {record.rid!r} has no live slot for component {name!r}; give it one")
        if record.start and name not in record.resume:
            raise EngineError(
                f"request {record.rid!r} starts at {record.start} without a snapshot of component {name!r}; name its slot in resume"
            )
        wanted = record.snapshots.get(name, ())
        self._accept_slots(record, name, [record.live[name], *(slot for _, slot in wanted), max(0, record.resume.get(name, 0))])
        for length, _ in wanted:
            if length not in lengths:
                raise EngineError(
                    f"request {record.rid!r} wants a snapshot at length {length}, where no forward ends; "
                    "choose a multiple of the grid, the end of the prompt or a decode step"
                )

    def _accept_slots(self, record: Compute, name: str, slots: list[int]) -> None:
        count = self.pools[name].slots
        if wrong := [slot for slot in slots if not 0 <= slot < count]:
            raise EngineError(f"request {record.rid!r} names slot {wrong[0]} of component {name!r}, whose pool has {count} slots")
