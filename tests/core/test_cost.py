"""Load or recompute, on virtual time: records take as long as a machine of stationary speeds would need."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.cost import AGAIN, DECODED, Cost, Link, _some
from hicache_ray.group import Envelope
from hicache_ray.records import Compute, Lookup, Merged, Move, Record, Span, lane_of, slots_array
from hicache_ray.settings import LoadPolicy, Settings
from hicache_ray.spec import Tier
from hicache_ray.story import Sampled
from hicache_ray.testing import Stack, full, state
from tests.core.drive import prompt

TOKENS = 1025
PAGES = {"full": full(), "state": state()}
SLACK = 1.05


@dataclass(frozen=True)
class Machine:
    """Speeds in tokens and bytes per second (of one rank), latencies in seconds. ``growth``: of a token's price per 1,024 tokens."""

    prefill: float = 10_000.0
    growth: float = 0.0
    storage: float = 1e9
    latency: float = 0.0
    lookup: float = 0.0
    host: float = 1e11

    def seconds(self, record: Record, stack: Stack) -> float:
        if isinstance(record, Compute):
            end = record.start + len(record.feed)
            return self.compute(record.start, end) + (record.steps - 1) * 20 / self.prefill
        if isinstance(record, Lookup):
            return self.lookup
        if not isinstance(record, Move):
            return 0.0
        size = sum(stack.spec[s.component].page_bytes(stack.page) * len(s) for s in record.spans)
        if Tier.STORAGE in (record.source, record.target):
            return self.latency + size / self.storage
        return size / self.host

    def compute(self, start: int, end: int) -> float:
        return (end - start) * (1 + self.growth * (start + end) / 2 / 1024) / self.prefill


@dataclass
class Timed:
    """Runs a stack on a machine: lanes of a rank take one record after the other; each is executed when it is done."""

    stack: Stack
    machine: Machine
    order: int = 0
    flying: list[tuple[float, int, Envelope]] = field(default_factory=list)
    free: dict[tuple[int, str], float] = field(default_factory=dict)

    def first_token(self, tokens: list[int]) -> float:
        """Seconds until a request has its first token."""
        began, before = self.stack.clock(), len(self.stack.events)
        self.stack.begin(tokens, rid := f"r{self.order}")
        while not any(isinstance(e, Sampled) and e.rid == rid for e in self.stack.events[before:]):
            assert self.step()
        return self.stack.clock() - began

    def step(self) -> bool:
        now = self.stack.clock()
        for envelope in self.stack.pending():
            lane = (envelope.rank, lane_of(envelope.record).value)
            done = self.free[lane] = max(now, self.free.get(lane, 0.0)) + self.machine.seconds(envelope.record, self.stack)
            self.order += 1
            heapq.heappush(self.flying, (done, self.order, envelope))
        deadline = self.stack.group.next_deadline()
        if deadline is not None and (not self.flying or deadline < self.flying[0][0]):
            self.stack.clock.now = max(now, deadline)
            self.stack.group.tick()
            self.stack._collect()
            return True
        if not self.flying:
            return False
        done, _, envelope = heapq.heappop(self.flying)
        self.stack.clock.now = max(now, done)
        self.stack.run(envelope)
        return True

    def settle(self) -> None:
        while self.step():
            pass

    def flush(self) -> None:
        self.settle()
        self.stack.group.flush((Tier.DEVICE, Tier.HOST))
        self.stack._collect()
        self.settle()


def stack(machine: Machine, ranks: int = 1, pools: Any = PAGES, room: int = 64, **seeds: float) -> Stack:
    more = {"load_or_recompute": LoadPolicy.COST, "prefill_growth_per_1k": machine.growth, "lookup_deadline_s": 1e9, "prefetch_base_s": 1e9,
            "prefetch_cap_s": 1e9, "host_bytes_per_s": machine.host, **seeds}  # fmt: skip
    return Stack(pools=pools, l1=room, l2=room, ranks=ranks, settings=more)


def test_nothing_is_tried_where_nothing_would_be_read() -> None:
    """A link to the device that is slower than the prefill: what the host has is recomputed. That is no try, and none is spent on it."""
    machine = Machine(host=1e5)
    timed = Timed(stack(machine, prefill_tokens_per_s=machine.prefill, storage_bytes_per_s=1e12), machine)
    tokens = prompt(1, TOKENS)
    timed.first_token(tokens)
    timed.settle()
    timed.stack.evict_l1(64)
    assert timed.stack.probe(tokens).l2 == 1024
    assert timed.first_token(tokens) <= SLACK * machine.compute(0, TOKENS)
    timed.settle()
    assert timed.stack.explain(f"r{last_of(timed)}")["decision"]["decision"] == "recompute"
    cost = timed.stack.cache.restore.cost
    assert cost is not None
    assert (cost._trying, cost._declined) == (0, 0)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    storage=st.floats(-1, 11).map(lambda x: 10.0**x),
    latency=st.sampled_from([0.0, 1e-4, 1e-2, 1.0, 100.0]),
    lookup=st.sampled_from([0.0, 1e-4, 3e-3, 0.05, 30.0]),
    growth=st.sampled_from([0.0, 0.5]),
    lengths=st.lists(st.integers(300, TOKENS), min_size=3, max_size=5),
    seeded=st.booleans(),
)
def test_never_much_slower_than_recomputing(
    storage: float, latency: float, lookup: float, growth: float, lengths: list[int], seeded: bool
) -> None:
    machine = Machine(storage=storage, latency=latency, lookup=lookup, growth=growth)
    seeds = {"prefill_tokens_per_s": machine.prefill, "storage_bytes_per_s": 1e12} if seeded else {}
    timed = Timed(stack(machine, **seeds), machine)
    whole = prompt(1, TOKENS)
    timed.first_token(whole)  # fills L3, and measures prefill where that was not seeded
    for count in (*lengths, TOKENS, TOKENS):
        timed.flush()
        assert timed.first_token(whole[:count]) <= SLACK * machine.compute(0, count) + 1e-9
    timed.settle()
    timed.stack.audit()
    # Where loading is clearly better, it was found out.
    size = sum(c.page_bytes(64) for c in timed.stack.spec.components if not c.is_state) * 16
    loading = latency + size / storage
    if loading < machine.compute(0, TOKENS) / 4 and lookup < 0.02 * machine.compute(0, TOKENS):
        timed.flush()
        assert timed.first_token(whole) < 0.5 * machine.compute(0, TOKENS)
        timed.settle()
        assert timed.stack.explain(f"r{last_of(timed)}")["decision"]["decision"] == "load"


def last_of(timed: Timed) -> int:
    return max(int(rid[1:]) for rid in timed.stack.served)


def test_on_several_ranks_the_slowest_counts() -> None:
    machine = Machine(storage=1e7)
    timed = Timed(stack(machine, ranks=2, prefill_tokens_per_s=machine.prefill), machine)
    timed.first_token(prompt(1, TOKENS))
    for _ in range(3):
        timed.flush()
        assert timed.first_token(prompt(1, TOKENS)) <= SLACK * machine.compute(0, TOKENS)
    assert timed.stack.executed[1]


def test_a_store_that_became_fast_is_found_again() -> None:
    slow, fast = Machine(storage=1e4), Machine(storage=1e9)
    timed = Timed(stack(slow, prefill_tokens_per_s=slow.prefill), slow)
    whole = prompt(1, TOKENS)
    timed.first_token(whole)
    for _ in range(3):
        timed.flush()
        assert timed.first_token(whole) > 0.99 * slow.compute(0, TOKENS)
    timed.machine = fast
    times = []
    for _ in range(AGAIN + 5):
        timed.flush()
        times.append(timed.first_token(whole))
        assert times[-1] <= SLACK * slow.compute(0, TOKENS)
    assert min(times) < 0.1 * slow.compute(0, TOKENS)


def test_every_record_of_a_read_has_its_latency() -> None:
    """One record of 64 pages was measured; 64 pages come in four of 16, which together take longer than to recompute."""
    machine = Machine(latency=0.3)
    kit = stack(machine, prefill_tokens_per_s=machine.prefill, pools={"full": full()}, room=520)
    timed, whole = Timed(kit, machine), prompt(1, 64 * 512 + 1)
    timed.first_token(whole)
    for count in (len(whole), 4097, 4097, 1025):
        timed.flush()
        assert timed.first_token(whole[:count]) <= SLACK * machine.compute(0, count)
    assert kit.cache.restore.cost is not None
    assert kit.cache.restore.cost.storage.seen


def test_a_slow_host_is_not_loaded_from() -> None:
    machine = Machine(host=1e4)
    timed = Timed(stack(machine, prefill_tokens_per_s=machine.prefill), machine)
    whole = prompt(1, TOKENS)
    timed.first_token(whole)
    timed.settle()
    timed.stack.group.flush((Tier.DEVICE,))
    timed.stack._collect()
    timed.settle()
    assert timed.stack.probe(whole).l2 == 1024
    assert timed.first_token(whole) <= SLACK * machine.compute(0, TOKENS)


def test_what_was_weighed_is_told() -> None:
    machine = Machine(storage=1e4)
    timed = Timed(stack(machine, prefill_tokens_per_s=machine.prefill), machine)
    timed.first_token(prompt(1, TOKENS))
    for want in ("try", "recompute"):
        timed.flush()
        timed.first_token(prompt(1, TOKENS))
        timed.settle()
        told = timed.stack.explain(f"r{last_of(timed)}")
        assert told["decision"]["decision"] == want
        assert told["decision"]["recompute_s"] == round(machine.compute(0, TOKENS), 6)
        assert told["resumed_tokens"] == 0
    assert told["limit"]["cause"] == "cost"
    assert told["longer"] == {"tokens": 64, "missing": [], "otherwise": "recomputing is sooner done than loading (cache.load_or_recompute)"}


def test_always_load_weighs_nothing() -> None:
    kit = Stack()
    kit.put(prompt(1, 257), "r")
    assert kit.cache.restore.cost is None
    assert kit.explain("r")["decision"] == {}


# -- the model -----------------------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.floats(0, 10), st.floats(1e-9, 1), st.lists(st.integers(1, 10**9), min_size=1, max_size=10), st.integers(1, 10**9)
)  # fmt: skip
def test_the_bounds_of_a_stationary_link_hold(latency: float, each: float, sizes: list[int], asked: int) -> None:
    link = Link()
    assert (link.most(asked), link.least(asked)) == (float("inf"), 0.0)
    for size in sizes:
        link.learn(size, latency + each * size)
    real = latency + each * asked
    assert link.least(asked) <= real * (1 + 1e-9)
    assert link.most(asked) >= real * (1 - 1e-9)


def model(**more: float) -> Cost:
    return Cost(Stack(pools=PAGES, l1=1, l2=1).spec, Settings(**more))  # type: ignore[arg-type]


def computed(start: int, fed: int, steps: int) -> Compute:
    return Compute(1, "r", start, np.zeros(fed, dtype=np.int32), steps, 0, {})


def test_decoded_tokens_are_told_apart_from_prefill() -> None:
    cost = model()
    cost.learn(computed(0, 1000, 65), Merged(), 1.0)
    assert cost.token_s == 1.0 / (1000 + 64 * DECODED)  # less than it is: nothing is waited for that long
    cost = model()
    cost.learn(computed(1000, 1, 64), Merged(), 0.64)
    assert cost.decode_s == pytest.approx(0.01)
    cost.learn(computed(0, 1000, 65), Merged(), 1.64)
    assert cost.token_s == pytest.approx(0.001)
    cost.learn(computed(0, 1000, 1), Merged(error="failed"), 99.0)
    assert cost.token_s == pytest.approx(0.001)


def test_a_read_that_failed_at_once_is_no_measurement() -> None:
    cost = model()
    move = Move(1, "r", Tier.STORAGE, Tier.HOST, (Span("full", slots_array(), slots_array([1, 2]), (b"a", b"b")),))
    for got, known in ((Merged((0,), error="down"), False), (Merged((1,)), False), (Merged((3,)), True)):
        cost.learn(move, got, 0.5)
        assert bool(cost.storage.seen) is known
    cost.learn(move, Merged((0,), error="late"), 5.0)
    assert cost.storage.most(1) > 0.5


def test_candidates_keep_both_ends() -> None:
    assert _some(0b1011) == [3, 1, 0]
    many = _some((1 << 2049) - 1)
    assert (len(many), many[0], many[-1]) == (64, 2048, 0)
