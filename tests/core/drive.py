"""Drives a :class:`Stack` one envelope at a time, and compares every cached byte with what a recompute would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.group import STORE, Envelope
from hicache_ray.keys import as_tokens, page_keys, page_of
from hicache_ray.records import Outcome, Tokens
from hicache_ray.spec import Tier
from hicache_ray.store import KEY_BYTES
from hicache_ray.story import Ended
from hicache_ray.testing import Stack

#: What a rank reports in place of the truth.
Spoil = Callable[[Envelope, Outcome], Outcome]


def prompt(seed: int, tokens: int) -> list[int]:
    """Unlike in the first token already."""
    return [(seed * 7919 + i * 31) % 50_000 + 1 for i in range(tokens)]


@dataclass
class Steps:
    """Envelopes of a stack in the order in which they were given out, executed and reported one by one."""

    stack: Stack
    queue: list[Envelope] = field(default_factory=list)
    seen: list[Envelope] = field(default_factory=list)

    def collect(self) -> None:
        self.queue += self.stack.pending()

    def next(self, spoil: Spoil | None = None) -> Envelope | None:
        """Execute and report the next one; None when there is none."""
        self.collect()
        if not self.queue:
            return None
        envelope = self.queue.pop(0)
        outcome = self.stack.execute(envelope)
        self.seen.append(envelope)
        self.stack.report(envelope, spoil(envelope, outcome) if spoil else outcome)
        return envelope

    def run(self, count: int | None = None, spoil: Spoil | None = None) -> int:
        """Up to ``count`` of them, or all there will be; returns how many."""
        done = 0
        while (count is None or done < count) and self.next(spoil) is not None:
            done += 1
        return done

    def until(self, wanted: Callable[[Envelope], bool]) -> Envelope:
        """Run what comes before the first envelope that is wanted, and give that out unexecuted."""
        while True:
            self.collect()
            assert self.queue, "nothing under way brings the wanted record"
            if wanted(self.queue[0]):
                return self.queue.pop(0)
            self.next()

    def settle(self) -> None:
        """Everything under way completes, also what was taken out of the stack's hands."""
        self.run()
        self.stack.settle()
        self.collect()
        assert not self.queue


def ended(stack: Stack, rid: str) -> list[Ended]:
    return [e for e in stack.events if isinstance(e, Ended) and e.rid == rid]


def at_rest(stack: Stack) -> None:
    """Nothing under way, nothing leased, every slot free or cached."""
    assert stack.group.idle
    stack.audit()
    assert stack.res.leases.open() == ()
    for pool in stack.res.pools.values():
        assert pool.held == 0
        assert pool.free + pool.cached == pool.capacity


def expected_content(stack: Stack, prompts: Iterable[Sequence[int]]) -> Mapping[bytes, tuple[Tokens, int]]:
    """Page key -> the tokens and the length that its objects are a function of."""
    out: dict[bytes, tuple[Tokens, int]] = {}
    for tokens in map(as_tokens, map(list, prompts)):
        for i, key in enumerate(page_keys(stack.ns, tokens)):
            out[key] = (tokens, (i + 1) * stack.page)
    return out


def all_bytes_are_right(stack: Stack, prompts: Iterable[Sequence[int]]) -> int:
    """Every object cached anywhere is, byte for byte, what its key names. Returns how many were compared."""
    known = expected_content(stack, prompts)
    compared = 0
    for place in stack.res.pools:
        tier, name = place
        component, entries = stack.spec[name], stack.res.index.in_place(place)
        for rank, engine in enumerate(stack._engines):
            pool = stack._executors[rank]._rank.pools[tier][name]
            rows = [pool.rows(f.name) for f in component.fields]
            for entry, slot in zip(entries.tolist(), stack.res.slots(place, entries).tolist(), strict=True):
                tokens, end = known[page_of(stack.res.index.key(entry))]
                if not engine.holds(component, end):
                    continue
                have = b"".join(row[slot].contiguous().numpy().tobytes() for row in rows)
                assert have == engine.content(component, tokens, end), f"{tier.value} {name} of rank {rank}, length {end}"
                compared += 1
    return compared + _stored_bytes_are_right(stack, known)


def _stored_bytes_are_right(stack: Stack, known: Mapping[bytes, tuple[Tokens, int]]) -> int:
    assert stack.store is not None
    named = [(name.rstrip("~"), tags) for name, tags in stack.tags.items()]
    owners = {tags[rank]: (name, rank) for name, tags in named for rank in stack.spec.owners(stack.spec[name])}
    ids = [i for i in stack.store.scan() if i[:KEY_BYTES] in known and i[KEY_BYTES:] in owners]
    for i in ids:
        name, rank = owners[i[KEY_BYTES:]]
        tokens, end = known[i[:KEY_BYTES]]
        with stack.store.lease([i], 1.0) as lent:
            view = lent.views[0]
            assert view is not None
            assert bytes(view) == stack._engines[rank].content(stack.spec[name], tokens, end)
    return len(ids)


def is_move(envelope: Envelope, source: Tier, target: Tier) -> bool:
    record = envelope.record
    return getattr(record, "source", None) is source and getattr(record, "target", None) is target


def to_store(envelope: Envelope) -> bool:
    return envelope.rank == STORE
