"""Ranks that hold different things: pipeline stages, pages in turn (context parallelism), what all have alike. One AND for all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hicache_ray.errors import ConfigError
from hicache_ray.group import Envelope
from hicache_ray.keys import other, tagged
from hicache_ray.records import Move, Outcome
from hicache_ray.spec import Shard, Tier
from hicache_ray.story import Ended
from hicache_ray.testing import Served, Stack, full, state, window
from tests.core.drive import Steps, all_bytes_are_right, at_rest, is_move, prompt
from tests.core.rule_twin import resume

PAGE = 8
#: Two pipeline stages of two ranks each, with a window on the second stage and a state on one rank alone.
POOLS = {
    "low": full(layers=1, ranks=(0, 1)),
    "high": full(layers=1, ranks=(2, 3)),
    "swa": window(20, layers=1, ranks=(2, 3)),
    "turns": full(layers=1, shard="context"),
    "wide": full(layers=1, shard="context", page_span=2, ranks=(1, 3)),
    "latent": full(layers=1, shard="replicated"),
    "state": state(2 * PAGE, layers=1, ranks=(2,)),
}


def stack_of(pools: dict[str, object] | None = None, **more: object) -> Stack:
    return Stack(**{"page": PAGE, "pools": pools or POOLS, "ranks": 4, "l1": 80, "l2": 80, **more})  # type: ignore[arg-type]


def objects(stack: Stack, tokens: list[int]) -> dict[str, list[set[int]]]:
    """Of each component, the base pages that each rank's own store objects are of."""
    assert stack.store is not None
    keys, out = stack._path(stack._request(tokens, "x", 0, {}, None).tokens).keys, {}
    for c in stack.spec.components:
        rows = []
        for rank in range(stack.ranks):
            tag = stack.tags[tagged(c.name, True)][rank]
            bits = stack.store.lookup(keys, [tag], 1.0)[tag].hit
            rows.append({i for i in range(len(keys)) if bits >> i & 1 and stack.spec.owns(c, rank, i)})
        out[c.name] = rows
    return out


def test_each_rank_stores_and_reads_what_is_its_own() -> None:
    stack = stack_of()
    tokens = prompt(1, 16 * PAGE + 1)
    stack.put(tokens)
    stack.settle()
    stored = objects(stack, tokens)
    every, none = set(range(16)), set[int]()
    assert stored["low"] == [every, every, none, none]
    assert stored["high"] == stored["swa"] == [none, none, every, every]
    assert stored["turns"] == [set(range(rank, 16, 4)) for rank in range(4)]
    assert stored["wide"] == [none, {1, 5, 9, 13}, none, {3, 7, 11, 15}]
    assert stored["state"] == [none, none, set(range(1, 16, 2)), none]
    # Stage by stage, and once each for what is shared: nothing is stored for a rank that does not hold it.
    assert len(list(stack.store.scan())) == 2 * 16 + 2 * 16 + 2 * 16 + 16 + 8 + 16 + 8  # type: ignore[union-attr]
    stack.flush()
    assert stack.put(tokens) == Served(0, 0, 128, 1)
    for rank in range(4):
        for pool in POOLS:
            assert stack.read(tokens, pool, rank) == stack.made(tokens, pool, rank)
    assert stack.read(tokens, "high", 0) == b"" != stack.read(tokens, "high", 2)
    stack.settle()
    all_bytes_are_right(stack, [tokens])
    at_rest(stack)


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_holes_of_any_rank_against_brute_force(first: int) -> None:
    """Objects vanish of any component on any rank; what is told, promised and served is what the definition says, and the bytes are
    right."""
    lengths = set()
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        stack = stack_of(prefetch_policy=rng.choice(["timeout", "wait_complete"]))
        tokens = prompt(seed, 20 * PAGE + rng.randint(1, 8))
        stack.put(tokens)
        stack.settle()
        stack.flush()
        present = [dict.fromkeys(POOLS, (1 << 20) - 1) for _ in range(4)]
        for _ in range(rng.randint(1, 6)):
            name, page, rank = rng.choice(list(POOLS)), rng.randrange(2, 20), rng.randrange(4)
            c = stack.spec[name]
            if not stack.spec.owns(c, rank, page) or (c.page_span > 1 and page % 2 == 0):
                continue
            if c.is_state and page % 2 == 0:
                continue
            stack.drop("l3", name, tokens, [(page + 1) * PAGE if c.is_state else page], rank=rank)
            for r in range(4):
                if r == rank or c.shard is not Shard.HEADS:
                    present[r][name] &= ~(1 << page)
        for row in present:
            row["state"] &= int("10" * 10, 2)
        wanted = resume(stack.spec.components, present, len(tokens), PAGE, 2 * PAGE, None) * PAGE
        assert stack.probe(tokens).l3 == wanted, f"seed {seed}"
        assert stack.put(tokens) == Served(0, 0, wanted, len(tokens) - wanted)
        lengths.add(wanted)
        stack.settle()
        all_bytes_are_right(stack, [tokens])
        at_rest(stack)
    assert len(lengths) > 2


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("kind", ["throws", "refuses"])
def test_the_writer_of_what_all_have_alike_is_replaced(broken: int, kind: str) -> None:
    """One rank cannot write to storage any more. What is replicated is stored all the same, by another rank."""
    stack = Stack(page=PAGE, pools={"latent": full(shard="replicated", layers=1)}, ranks=3)
    tokens = prompt(1, 20 * PAGE + 1)

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        if not is_move(envelope, Tier.HOST, Tier.STORAGE) or envelope.rank != broken:
            return outcome
        record = envelope.record
        assert isinstance(record, Move)
        others = [sum(1 << i for i, k in enumerate(s.keys) if (k[47] + record.turn) % 3 != broken) for s in record.spans]
        return Outcome(bits=tuple(others), error="injected" if kind == "throws" else "")

    steps = Steps(stack)
    stack.begin(tokens, "r")
    # The rank executes nothing: what it should write is not in the store.
    while True:
        steps.collect()
        if not steps.queue:
            break
        envelope = steps.queue.pop(0)
        lost = is_move(envelope, Tier.HOST, Tier.STORAGE) and envelope.rank == broken
        stack.report(envelope, spoil(envelope, Outcome() if lost else stack.execute(envelope)))
    stack.executed = [[] for _ in stack.executed]
    assert stack.probe(tokens).l3 == 20 * PAGE
    assert len(stack.res.index.in_place((Tier.HOST, "latent"))) == 20
    assert stack.res.counters[(Tier.STORAGE, "latent")].failures == 0
    stack.flush()
    assert stack.put(tokens) == Served(0, 0, 160, 1)
    assert stack.read(tokens, "latent", broken) == stack.made(tokens, "latent", broken) != b""
    at_rest_after_settling(stack)


def at_rest_after_settling(stack: Stack) -> None:
    stack.settle()
    at_rest(stack)


@pytest.mark.parametrize("exact", [False, True])
def test_pages_in_turn_of_a_draft_that_looks_ahead(exact: bool) -> None:
    """Its pages have names of their own, and each rank moves those that are its own, whatever was under their entries before."""
    pools = {"full": full(layers=1), "mtp": full(layers=1, role="draft", lookahead=1, shard="context")}
    stack = stack_of(pools, ranks=3, l1=20, l2=20, exact=exact, grid=2 * PAGE if exact else None)
    for seed in range(4):  # the entries of those that leave are used again, at other places of their paths
        first, tokens = prompt(10 + seed, (3 + 2 * seed) * PAGE + 2), prompt(seed, 12 * PAGE + 2)
        stack.put(first)
        stack.put(tokens)
        stack.settle()
        depth = stack.res.index.depth(stack.res.index.in_place((Tier.DEVICE, "mtp")))
        assert len(depth)
        assert min(depth) >= 0
        stack.flush(l1=True, l2=False)
        stack.put(tokens)
        for rank in range(3):
            assert stack.read(tokens, "mtp", rank) == stack.made(tokens, "mtp", rank) != b""
        stack.settle()
        keys = stack._path(stack._request(tokens, "x", 0, {}, None).tokens).ahead["mtp"]
        names = keys if exact else [other(k) for k in keys]
        entries = stack.res.index.find(names)
        assert stack.res.index.depth(entries[entries >= 0]).tolist() == list(range(int((entries >= 0).sum())))
        stack.flush()
        assert stack.put(tokens).l3 == 12 * PAGE
        for rank in range(3):
            assert stack.read(tokens, "mtp", rank) == stack.made(tokens, "mtp", rank) != b""
        stack.settle()
        stack.flush()
    at_rest_after_settling(stack)


def test_a_rank_has_no_digest_of_what_it_does_not_hold() -> None:
    """What lies in the slot of another rank's page is nobody's business: two runs would differ in it."""
    pools = {"full": full(shard="context"), "late": full(ranks=(2,)), "state": state(PAGE, ranks=(0, 1))}
    stack = stack_of(pools, ranks=3)
    tokens = prompt(1, 6 * PAGE + 1)
    stack.group.submit(replace(stack._request(tokens, "told", 0, {}, None), digests=True))
    stack.settle()
    (report,) = [event.report for event in stack.events if isinstance(event, Ended) and event.rid == "told"]
    assert report is not None
    holders = {c: {page: [bool(d) for d in each] for page, each in of.items()} for c, of in report.digests.items()}
    assert holders["full"] == {page: [page % 3 == rank for rank in range(3)] for page in range(6)}
    assert holders["late"] == {page: [False, False, True] for page in range(6)}
    assert holders["state"] == {page: [True, True, False] for page in range(6)}


def test_ranks_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"component 'low' is on the ranks \(0, 4\); name each of the 4 ranks at most once"):
        stack_of({"low": full(ranks=(0, 4))})
