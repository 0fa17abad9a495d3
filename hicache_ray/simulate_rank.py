"""One rank in virtual time: executes records over pools of contents, and complains about every byte that is not what it should be.

A record takes time: it *begins* (its targets become unreadable, what it reads is noted) and *ends* (what it read must still be the same,
nobody else may have written to its targets). Between the two everything else happens; what goes to or comes from L3 does so batch after
batch on the way. A call that is abandoned has the same two ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hicache_ray.group import Envelope
from hicache_ray.keys import is_other, page_of, tagged, writer
from hicache_ray.lease import Place
from hicache_ray.records import Compute, Digest, Lane, Lookup, Move, Outcome, Record, Span, lane_of
from hicache_ray.settings import Settings
from hicache_ray.simulate_content import EMPTY, GARBAGE, Contents, Prompt, Violation
from hicache_ray.simulate_engine import Engine, Written
from hicache_ray.simulate_store import Fate, Link, Storage, StorageFailed, fate
from hicache_ray.simulate_watch import WatchedResidency
from hicache_ray.spec import CacheSpec, Shard, Tier

Item = TypeVar("Item")


@dataclass
class Speed:
    """How fast a rank is now (1: as usual), and how often a copy or a forward of its fails."""

    factor: float = 1.0
    failing: float = 0.0


@dataclass(frozen=True)
class Around:
    """What the ranks of a group know of their world. ``capacity``: slots per place. ``prompts``: by request.

    ``floors``: of each space that has been dropped, the least generation of bytes that may be seen. ``born``: generation by request;
    ``least``: of what it may resume from, as it was when its first forward was sent.
    """

    spec: CacheSpec
    settings: Settings
    capacity: Mapping[Place, int]
    contents: Contents
    shelf: Storage
    node: int
    tags: Mapping[str, tuple[bytes, ...]]
    prompts: dict[str, Prompt]
    rng: random.Random
    floors: dict[bytes, int] = field(default_factory=dict)
    born: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)

    def look_up(self, record: Lookup) -> dict[str, tuple[int, ...]]:
        """What L3 answers now: per component, one bitset for each rank."""
        wanted = list(dict.fromkeys(t for c in record.components for t in self.tags[c]))
        known = self.shelf.lookup(self.node, record.keys, wanted, record.timeout_s)
        return {c: tuple(known[t] for t in self.tags[c]) for c in record.components}


@dataclass
class Op:
    """A record that a rank is executing.

    ``mine``: of each span the items that are this rank's, ``read`` what it reads of those. To and from L3: ``going`` is the rest of it,
    ``batches`` how many calls it makes, ``bits`` and ``got`` (slot -> content) what has come of each span so far.
    """

    envelope: Envelope
    lane: Lane
    mark: int
    fate: Fate
    mine: list[list[int]] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    work: Written | None = None
    bits: list[int] = field(default_factory=list)
    got: list[dict[int, int]] = field(default_factory=list)
    batches: int = 0
    going: Generator[None, None, None] | None = None

    @property
    def record(self) -> Record:
        return self.envelope.record


class VirtualRank:
    """See the module. ``res``: what the group holds now; ``engines``: of its ranks, in their order. ``link``: to L3; faults change it, and
    ``speed``."""

    def __init__(self, rank: int, around: Around, res: Callable[[], WatchedResidency], engines: list[Engine]) -> None:
        self.rank = rank
        self.around = around
        self.pools: dict[Place, list[int]] = {place: [EMPTY] * n for place, n in around.capacity.items()}
        self.link = Link()
        self.speed = Speed()
        self._res = res
        self._tags = {name: of[rank] for name, of in around.tags.items()}
        device = {name: pool for (tier, name), pool in self.pools.items() if tier is Tier.DEVICE}
        self.engine = Engine(rank, around.spec, around.settings, around.contents, device, engines)
        engines.append(self.engine)

    def begin(self, envelope: Envelope, now: float) -> Op:
        """The rank takes a record up."""
        record, rng = envelope.record, self.around.rng
        op = Op(envelope, lane_of(record), self.around.contents.mark(), Fate(0.0))
        if isinstance(record, Compute):
            prompt, around = self.around.prompts[record.rid], self.around
            op.work = self.engine.begin(record, prompt, op.mark, around.born.get(record.rid, 0), around.least.get(record.rid, 0))
            self._check_pins(op)
            seconds = 0.002 + 0.0002 * (len(record.feed) + 3 * record.steps)
            op.fate = Fate(seconds * (0.5 + rng.random()) * self.speed.factor, 1.0, self._failure())
        elif isinstance(record, Move):
            self._begin_move(op, record, now)
        else:
            op.fate = Fate(0.001 * (0.5 + rng.random()) * self.speed.factor, 1.0, self._failure())
        return op

    def _failure(self) -> str:
        failing = self.speed.failing
        return f"injected on rank {self.rank}" if failing and self.around.rng.random() < failing else ""

    def _begin_move(self, op: Op, record: Move, now: float) -> None:
        self._check_pins(op)
        items = 0
        for span in record.spans:
            mine = self._own(span)
            op.mine.append(mine)
            items += len(mine)
            if record.source is not Tier.STORAGE:
                pool = self.pools[(record.source, span.component)]
                op.read.append([pool[s] for s in span.source[mine].tolist()])
            if record.target is not Tier.STORAGE:
                pool = self.pools[(record.target, span.component)]
                for s in span.target[mine].tolist():
                    pool[s] = op.mark
        rng = self.around.rng
        if op.lane is Lane.STORAGE:
            op.fate = fate(self.link, rng, now, items, record.timeout_s)
            self._begin_calls(op, record)
        else:
            op.fate = Fate((0.0005 + 0.0001 * items) * (0.5 + rng.random()) * self.speed.factor, 1.0, self._failure())

    def _own(self, span: Span) -> list[int]:
        """Items of a span that are this rank's; the others count as done."""
        spec, component = self.around.spec, self.around.spec[span.component]
        return [i for i, page in enumerate(span.pages.tolist()) if spec.owns(component, self.rank, page)]

    def end(self, op: Op, drained: bool = False) -> Outcome:
        """What the rank has done and reports. ``drained``: of a group that is gone, whose leases are no more."""
        record = op.record
        if not drained:
            self._check_pins(op)
        if isinstance(record, Compute):
            assert op.work is not None
            if op.fate.error:
                self.engine.spoil(op.work)
                return Outcome(error=op.fate.error)
            return self.engine.end(record, op.work)
        if isinstance(record, Digest):
            if op.fate.error:
                return Outcome(error=op.fate.error)
            pools = self.pools
            told = {c: tuple(str(pools[(Tier.DEVICE, c)][s]) for s in slots.tolist()) for c, slots in record.slots.items()}
            return Outcome(digests=told)
        assert isinstance(record, Move)
        if record.source is not Tier.STORAGE:
            self._check_sources(op, record)
        return self._end_copy(op, record) if op.going is None else self._end_calls(op, record)

    def _check_sources(self, op: Op, record: Move) -> None:
        for span, mine, before in zip(record.spans, op.mine, op.read, strict=True):
            pool = self.pools[(record.source, span.component)]
            if [pool[s] for s in span.source[mine].tolist()] != before:
                raise Violation(
                    f"rank {self.rank}: a {record.source.value} page of {span.component!r} changed while record {record.id} of "
                    f"{record.rid} copied it to {record.target.value}"
                )

    def _own_target(self, op: Op, record: Move, span: Span, slot: int) -> list[int]:
        pool = self.pools[(record.target, span.component)]
        if pool[slot] != op.mark:
            raise Violation(
                f"rank {self.rank}: somebody else wrote to slot {slot} of the {record.target.value} pool {span.component!r} while record "
                f"{record.id} of {record.rid} did"
            )
        return pool

    def _end_copy(self, op: Op, record: Move) -> Outcome:
        bits, rng = [], self.around.rng
        for span, mine, contents in zip(record.spans, op.mine, op.read, strict=True):
            good = (1 << len(span)) - 1
            if op.fate.error:
                good &= rng.getrandbits(len(span)) if len(span) else 0
            for i, slot, content in zip(mine, span.target[mine].tolist(), contents, strict=True):
                self._own_target(op, record, span, slot)[slot] = content if good >> i & 1 else GARBAGE
            bits.append(good | _others(span, mine))
        return Outcome(bits=tuple(bits), error=op.fate.error)

    # -- to and from L3 -------------------------------------------------------------------------------------------------------------

    def _begin_calls(self, op: Op, record: Move) -> None:
        """Calls of up to so many objects each, one after the other; the first begins now."""
        total = sum(map(len, op.mine))
        left, most = int(op.fate.done * total) if op.fate.done < 1.0 else total, self.around.rng.choice([2, 5, 128])
        op.bits = [_others(span, mine) for span, mine in zip(record.spans, op.mine, strict=True)]
        op.going = self._reading(op, record, left, most) if record.source is Tier.STORAGE else self._writing(op, record, left, most)
        op.batches = sum((len(mine) + most - 1) // most for mine in op.mine)
        self.go_on(op)

    @staticmethod
    def go_on(op: Op) -> None:
        """The next moment of a record's calls."""
        if op.going is not None:
            next(op.going, None)

    def _writing(self, op: Op, record: Move, left: int, most: int) -> Generator[None, None, None]:
        """L2 to L3, span after span; where the call ends early, what has landed of the batch under way is not claimed."""
        shelf, node, rng = self.around.shelf, self.around.node, self.around.rng
        for at, (span, contents) in enumerate(zip(record.spans, op.read, strict=True)):
            tried = list(zip(op.mine[at][:left], contents, strict=False))
            op.bits[at] |= sum(1 << i for i, _ in tried if not self._writes(record, span, i))
            for batch in _batches([(i, content) for i, content in tried if self._writes(record, span, i)], most):
                whole = [not (self.link.torn and rng.random() < self.link.torn) for _ in batch]
                ids = [self._id(span.component, span.keys[i]) for i, _ in batch]
                try:
                    put = yield from shelf.write(node, ids, [content for _, content in batch], whole, record.timeout_s)
                except StorageFailed as failure:
                    op.fate = replace(op.fate, error=str(failure))
                    return
                op.bits[at] |= sum(1 << i for j, (i, _) in enumerate(batch) if put >> j & 1)
            left = max(0, left - len(op.mine[at]))

    def _reading(self, op: Op, record: Move, left: int, most: int) -> Generator[None, None, None]:
        """L3 to L2. What has arrived is looked at when the record ends."""
        shelf, node = self.around.shelf, self.around.node
        for at, span in enumerate(record.spans):
            op.got.append({})
            slots = span.target.tolist()
            for batch in _batches(op.mine[at][:left], most):
                try:
                    got = yield from shelf.read(node, [self._id(span.component, span.keys[i]) for i in batch], record.timeout_s)
                except StorageFailed as failure:
                    op.fate = replace(op.fate, error=str(failure))
                    return
                for i, content in zip(batch, got, strict=True):
                    if content is not None:
                        op.got[at][slots[i]] = content
                        op.bits[at] |= 1 << i
            left = max(0, left - len(op.mine[at]))

    def _end_calls(self, op: Op, record: Move) -> Outcome:
        for _ in op.going or ():
            pass
        if record.source is Tier.STORAGE:
            op.got += [{}] * (len(record.spans) - len(op.got))
            for span, mine, got in zip(record.spans, op.mine, op.got, strict=True):
                for slot in span.target[mine].tolist():
                    self._own_target(op, record, span, slot)[slot] = got.get(slot, GARBAGE)
        return Outcome(bits=tuple(op.bits), error=op.fate.error)

    def _writes(self, record: Move, span: Span, item: int) -> bool:
        """Whether this rank stores a page of its own: of replicated ones each has one writer."""
        spec, component = self.around.spec, self.around.spec[span.component]
        return component.shard is not Shard.REPLICATED or writer(spec, component, span.keys[item], record.turn) == self.rank

    def _id(self, component: str, name: bytes) -> bytes:
        return page_of(name) + self._tags[tagged(component, is_other(name))]

    def _check_pins(self, op: Op) -> None:
        """A slot that a record reads or writes is leased, from the moment it is given out to the moment it is reported."""
        record, pinned = op.record, self._res().pinned
        if isinstance(record, Move):
            for span in record.spans:
                if record.source is not Tier.STORAGE:
                    pinned((record.source, span.component), span.source.tolist())
                if record.target is not Tier.STORAGE:
                    pinned((record.target, span.component), span.target.tolist())
        elif op.work is not None:
            for component, slots in op.work.touched.items():
                pinned((Tier.DEVICE, component), slots)


def _others(span: Span, mine: Sequence[int]) -> int:
    """Bits of the items that are other ranks'."""
    return ((1 << len(span)) - 1) ^ sum(1 << i for i in mine)


def _batches(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    return [items[start : start + most] for start in range(0, len(items), most)]
