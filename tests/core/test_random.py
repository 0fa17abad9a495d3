"""Random lives of a cache group: everything at once, in any order, with failures. One seed is one history."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field, replace

import pytest

from hicache_ray.copies_fake import FakeDevice
from hicache_ray.copies_queues import Queue
from hicache_ray.errors import Busy, CapacityError, HiCacheError
from hicache_ray.group import Envelope
from hicache_ray.keys import space_of
from hicache_ray.records import Compute, Outcome, lane_of
from hicache_ray.spec import Component, Tier
from hicache_ray.story import Phase
from hicache_ray.testing import Stack, chunked, full, state, window
from tests.core.drive import all_bytes_are_right, at_rest, ended
from tests.queues import slow, without_fences

PAGE = 8


def pools(rng: random.Random, grid: int | None = None) -> dict[str, Component]:
    """A model: always full attention, with some of the other kinds beside it. Snapshots are made at multiples of the grid."""
    out = {"full": full(layers=1)}
    if rng.random() < 0.6:
        out["swa"] = window(rng.randint(1, 40), layers=1)
    if rng.random() < 0.4:
        out["chunk"] = chunked(rng.randint(1, 40), layers=1)
    if rng.random() < 0.5:
        out["state"] = state((grid or PAGE) * rng.randint(1, 3), layers=1)
    if rng.random() < 0.2:
        out["wide"] = full(page_span=2, layers=1)
    if rng.random() < 0.2:
        out["shared"] = full(shard="replicated", layers=1)
    return out


def prompts(rng: random.Random, count: int = 5) -> list[list[int]]:
    """Some fork from others, at any token."""
    out: list[list[int]] = []
    for i in range(count):
        head = rng.choice(out) if out and rng.random() < 0.6 else []
        out.append((head[: rng.randint(0, len(head))] + [1000 * i + j for j in range(rng.randint(1, 80))])[:100])
    return out


@dataclass
class Life:
    seed: int
    slow: Queue | None = None  # devices have queues, of which this is the slow one
    rng: random.Random = field(init=False)
    stack: Stack = field(init=False)
    prompts: list[list[int]] = field(init=False)
    waiting: dict[tuple[int, str], list[Envelope]] = field(default_factory=dict)
    reports: list[tuple[Envelope, Outcome]] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)  # rid -> tokens of its prompt; prefetches: 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        exact = rng.random() < 0.3
        grid = 3 * PAGE if exact else None
        models, ranks = pools(rng, grid), rng.randint(1, 3)
        self.stack = Stack(
            page=PAGE, pools=models, ranks=ranks, devices=[FakeDevice(slow(self.slow)) for _ in range(ranks)] if self.slow else (),
            l1=rng.randint(28, 40), l2=rng.randint(4, 50), l3=rng.choice([20, 1000]),
            write_policy=rng.choice(["write_through", "write_back"]), exact=exact, grid=grid,
            layout=rng.choice(["page_first_direct", "page_first", "layer_first"]), max_requests=6,
        )  # fmt: skip
        self.prompts = prompts(rng)

    def live(self) -> None:
        for _ in range(self.rng.randint(20, 120)):
            self.act()
        for _ in range(2000):
            self.deliver()
            if not self.waiting_now() and not self.reports:
                held = [rid for rid in self.begun if self.held(rid)]
                deadline = self.stack.group.next_deadline()
                if held:
                    self.stack.abort(held[0])
                elif deadline is not None:
                    self.pass_time(max(0.0, deadline - self.stack.clock()))
                else:
                    return
        raise AssertionError("the group never comes to rest")

    def act(self) -> None:
        others = (self.begin, self.prefetch, self.go_on, self.abort, self.evict, self.flush, self.drop, self.plug)
        others += (self.empty_device,) if self.slow else ()
        self.rng.choice((self.deliver,) * 4 + others)()
        if self.rng.random() < 0.03:
            self.pass_time(self.rng.choice([0.5, 2.5, 40.0]))
        self.stack.group.check()

    def begin(self) -> None:
        tokens, rid = self.rng.choice(self.prompts), f"r{len(self.begun)}"
        decoded = self.rng.randint(0, min(12, len(tokens) - 1))
        try:
            self.stack.begin(tokens, rid, decoded)
            self.begun[rid] = len(tokens) - decoded
        except Busy:
            assert len(self.stack.group.active()) == 6

    def prefetch(self) -> None:
        rid = f"p{len(self.begun)}"
        try:
            self.stack.prefetch(rid, self.rng.choice(self.prompts))
            self.begun[rid] = 0
        except Busy:
            assert len(self.stack.group.active()) == 6

    def held(self, rid: str) -> bool:
        ready = self.stack._jobs[rid].phase in (Phase.READY, Phase.DECLINED)
        return rid.startswith("p") and ready and not ended(self.stack, rid) and rid in self.stack.group.active()

    def go_on(self) -> None:
        for rid in [rid for rid in self.begun if self.held(rid)][:1]:
            with contextlib.suppress(HiCacheError):  # it has gone on already and waits for the device
                self.stack.group.proceed(rid)
            self.stack._collect()

    def abort(self) -> None:
        if self.begun:
            self.stack.abort(self.rng.choice(sorted(self.begun)))

    def evict(self) -> None:
        tier = self.rng.choice([Tier.DEVICE, Tier.HOST])
        res = self.stack.res
        self.stack.group.evict(tier, {name: self.rng.randint(0, res.room((tier, name))) for name in self.stack.pools})
        self.stack._collect()

    def empty_device(self) -> None:
        """What comes next has to be loaded."""
        res = self.stack.res
        self.stack.group.evict(Tier.DEVICE, {name: res.room((Tier.DEVICE, name)) for name in self.stack.pools})
        self.stack._collect()

    def flush(self) -> None:
        if self.rng.random() < 0.9:
            return
        tiers = [t for t in Tier if self.rng.random() < 0.5]
        with contextlib.suppress(Busy):
            self.stack.group.flush(tiers, self.rng.choice([None, 1.0, 100.0]))
        self.stack._collect()

    def drop(self) -> None:
        """Everything there is; whoever runs goes on."""
        if self.rng.random() < 0.7:
            return
        with contextlib.suppress(Busy):
            self.stack.group.drop_space(space_of(self.stack.ns.digest()), self.rng.choice([1.0, 100.0]))
        self.stack._collect()

    def plug(self) -> None:
        """L3 comes and goes."""
        if self.rng.random() < 0.7:
            return
        if self.stack.res.storage:
            self.stack.detach()
        else:
            self.stack.attach()

    def pass_time(self, seconds: float) -> None:
        self.stack.clock.advance(seconds)
        self.stack.group.tick()
        self.stack._collect()

    def waiting_now(self) -> list[tuple[int, str]]:
        for envelope in self.stack.pending():
            self.waiting.setdefault((envelope.rank, lane_of(envelope.record)), []).append(envelope)
        return [lane for lane, queue in self.waiting.items() if queue]

    def deliver(self) -> None:
        """Execute the next record of some lane, or hand in some report."""
        ready = self.waiting_now()
        if ready and (not self.reports or self.rng.random() < 0.6):
            envelope = self.waiting[self.rng.choice(ready)].pop(0)
            self.reports.append((envelope, self.spoiled(envelope, self.stack.execute(envelope))))
        elif self.reports:
            envelope, outcome = self.reports.pop(self.rng.randrange(len(self.reports)))
            self.stack.report(envelope, outcome)
            if self.rng.random() < 0.1:
                self.stack.report(envelope, outcome)

    def spoiled(self, envelope: Envelope, outcome: Outcome) -> Outcome:
        if self.rng.random() < 0.9:
            return outcome
        if isinstance(envelope.record, Compute):
            return replace(outcome, error="injected") if self.rng.random() < 0.3 else outcome
        if self.rng.random() < 0.3:
            return Outcome(error="injected")
        return replace(outcome, bits=tuple(b & self.rng.getrandbits(64) for b in outcome.bits))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_any_life_ends_well(first: int) -> None:
    served = 0
    for seed in range(first, first + 50):
        print(f"seed {seed}")  # shown where the test fails
        served += check_life(seed)
    assert served > 100


@pytest.mark.parametrize("queue", Queue)
def test_any_life_ends_well_on_devices_with_queues(queue: Queue) -> None:
    assert sum(check_life(seed, queue) for seed in range(40)) > 80


def test_without_fences_lives_end_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fences(monkeypatch)
    bad = 0
    for seed in range(40):
        try:
            check_life(seed, Queue.COMPUTE)
        except (AssertionError, HiCacheError):
            bad += 1
    assert bad >= 10


def check_life(seed: int, slow_queue: Queue | None = None) -> int:
    """Live one life; returns how many requests were served."""
    life = Life(seed, slow_queue)
    life.live()
    stack, served = life.stack, 0
    at_rest(stack)
    all_bytes_are_right(stack, life.prompts)
    for rid, tokens in life.begun.items():
        (end,) = ended(stack, rid)
        assert not isinstance(end.error, CapacityError) or "everything is in use" in str(end.error)
        if end.report is not None:
            r = end.report
            assert r.device + r.host + r.storage + r.computed == tokens
            assert r.computed >= 1
            served += 1
        else:
            assert end.error is not None or rid.startswith("p")
    stack.attach()
    # And it is as good as new: a request is served, and its second run resumes where its pages allow.
    tokens = max(life.prompts, key=len)
    stack.put(tokens)
    stack.settle()
    assert stack.put(tokens).computed == len(tokens) - stack.probe(tokens).reusable
    for prompt in life.prompts if slow_queue else ():  # from host and storage, several under way at once
        stack.group.evict(Tier.DEVICE, {name: stack.res.room((Tier.DEVICE, name)) for name in stack.pools})
        stack._collect()
        stack.begin(prompt)
    stack.settle()
    at_rest(stack)
    all_bytes_are_right(stack, life.prompts)
    return served
