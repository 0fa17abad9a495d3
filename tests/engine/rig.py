"""What the engine's tests share: a tiny model with its pools, records over it, and a plain transformers run to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hicache_ray.digest import digest_pages
from hicache_ray.integrations.transformers import Engine, Loaded, build, chunks, make_weights
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Outcome, Slots, Tokens, slots_array

PAGE, GRID, SLOTS = 16, 64, 64
#: Tables and snapshots of a second request are taken this many slots further on.
ELSEWHERE = 24
FAMILIES = ("qwen3_5", "gemma3", "qwen3")


def prompt(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, 512, count).astype(np.int32)


def load(family: str, folder: Path, dtype: str = "float32", **changes: object) -> Loaded:
    return build(make_weights(family, folder, "tiny", seed=3, dtype=dtype, **changes), PAGE, dtype)


def plain(model: PreTrainedModel, tokens: Tokens, steps: int, grid: int = GRID) -> Outcome:
    """The same chunks through transformers' own cache."""
    cache = DynamicCache(config=model.config)
    output: list[int] = []
    logprobs: list[float] = []
    pieces = [tokens[a:b] for a, b in chunks(0, len(tokens), grid)]
    length = 0
    with torch.inference_mode():
        while len(output) < steps:
            piece = pieces.pop(0) if pieces else np.array(output[-1:])
            positions = torch.arange(length, length + len(piece))[None]
            ids = torch.as_tensor(piece, dtype=torch.int64)[None]
            logits = model(input_ids=ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
            length += len(piece)
            if not pieces:
                output.append(int(logits.argmax()))
                logprobs.append(float(torch.log_softmax(logits, -1)[output[-1]]))
    return Outcome(output=tuple(output), logprobs=tuple(logprobs))


@dataclass(frozen=True)
class Result:
    """What a record gave, and the digests of what it left: full pages and snapshots, by component, page and length."""

    outcome: Outcome
    digests: dict[tuple[str, int], str]

    def after(self, length: int) -> Result:
        """Without what a resume at ``length`` has not computed."""
        return Result(self.outcome, {k: v for k, v in self.digests.items() if k[1] > length})


class Rig:
    """An engine over pools of ``SLOTS`` slots, each component's in an order of its own."""

    def __init__(self, loaded: Loaded, shuffled: bool = True, layout: str = "page_first_direct", offset: int = 0) -> None:
        """``offset``: bytes by which the buffers of the pools miss the alignment of a tensor."""
        self.spec = loaded.spec
        self.pools = {}
        for c in loaded.spec.components:
            buffer = torch.zeros(SLOTS * c.page_bytes(PAGE) + offset, dtype=torch.uint8)[offset:]
            self.pools[c.name] = Pool(c, PAGE, SLOTS, layout, buffer)
        self.engine = Engine(loaded.model, loaded.spec, self.pools)
        rng = np.random.default_rng(7)
        self.order = {name: rng.permutation(SLOTS) if shuffled else np.arange(SLOTS) for name in self.pools}
        for pool in self.pools.values():
            pool.buffer.fill_(255)

    def span(self, name: str) -> int:
        """Tokens of one page of a component."""
        return PAGE * self.spec[name].page_span

    def table(self, name: str, pages: int, shift: int = 0) -> Slots:
        return slots_array(self.order[name][shift : shift + pages])

    def snapshot_slot(self, name: str, length: int, shift: int = 0) -> int:
        return int(self.order[name][shift + length // PAGE])

    def record(
        self, tokens: Tokens, steps: int, start: int = 0, snapshots: Iterable[int] = (), shift: int = 0, grid: int = GRID
    ) -> Compute:
        """Feed ``tokens[start:]`` at ``start``. The running state lives in the last slot of the order."""
        end = len(tokens) + steps - 1
        tables = {c.name: self.table(c.name, -(-end // self.span(c.name)), shift) for c in self.spec.components if not c.is_state}
        for name, table in tables.items():
            table[: self.spec[name].lo(start) // self.span(name)] = -1
            table.flags.writeable = False  # as arrays are that come from another process
        states = [c.name for c in self.spec.components if c.is_state]
        live = {name: int(self.order[name][-1]) for name in states}
        resume = {name: self.snapshot_slot(name, start, shift) for name in states} if start else {}
        made = {name: tuple((n, self.snapshot_slot(name, n, shift)) for n in snapshots if n > start) for name in states}
        return Compute(1, "request", start, tokens[start:], steps, grid, tables, live, resume, made)

    def run(self, record: Compute) -> Result:
        outcome = self.engine.run(record)
        assert outcome.error == "", outcome.error
        digests = {}
        for name, table in record.tables.items():
            pages = [p for p in range(record.end // self.span(name)) if table[p] >= 0]
            found = digest_pages(self.pools[name], table[pages])
            digests.update({(name, (p + 1) * self.span(name)): d for p, d in zip(pages, found, strict=True)})
        for name, made in record.snapshots.items():
            found = digest_pages(self.pools[name], [slot for _, slot in made])
            digests.update({(name, n): d for (n, _), d in zip(made, found, strict=True)})
        return Result(outcome, digests)

    def save_elsewhere(self, cold: Compute, start: int) -> None:
        """Keep only what a resume at ``start`` needs, in other slots; everything else becomes 0xFF (not a number in any dtype)."""
        for name, pool in self.pools.items():
            c = self.spec[name]
            if c.is_state:
                source, target = [self.snapshot_slot(name, start)], [self.snapshot_slot(name, start, ELSEWHERE)]
            else:
                first, stop = c.lo(start) // self.span(name), start // self.span(name)
                source = cold.tables[name][first:stop].tolist()
                target = self.table(name, stop, ELSEWHERE)[first:].tolist()
            rows = [pool.rows(f.name) for f in c.fields]
            kept = [r[source].clone() for r in rows]
            pool.buffer.fill_(255)
            for r, k in zip(rows, kept, strict=True):
                r[target] = k

    def cold_and_resumed(self, tokens: Tokens, steps: int, start: int) -> tuple[Result, Result]:
        """A cold run, and one that resumes at ``start`` from what the cold one left; both cut down to what lies after ``start``."""
        boundaries = range(GRID, len(tokens) + 1, GRID)
        cold = self.record(tokens, steps, snapshots=boundaries)
        first = self.run(cold)
        self.save_elsewhere(cold, start)
        second = self.run(self.record(tokens, steps, start, boundaries, ELSEWHERE))
        return first.after(start), second.after(start)
