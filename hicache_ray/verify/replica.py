"""One cache group of one rank in this process: the production core over a bench, host pools and a store.

Records of one kind are executed in their order, as a rank does it; which kind goes next is the caller's choice, so that a seed is a
history. Time stands still: nothing here ends by a deadline of the group; the store's client has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hicache_ray.ask import ask, describe, tags_of
from hicache_ray.cache import Cache
from hicache_ray.copies import Mover, choose
from hicache_ray.errors import HiCacheError
from hicache_ray.executor import Executor, Rank
from hicache_ray.group import STORE, Envelope, Group
from hicache_ray.pool import Pool
from hicache_ray.records import Clear, Lane, Lookup, lane_of
from hicache_ray.residency import Residency
from hicache_ray.selftest import self_test
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier
from hicache_ray.store import Store
from hicache_ray.story import Ended, Report, Request, Sampled
from hicache_ray.verify.bench import Bench

DESCRIBE_S = 10.0


class Chance(Protocol):
    """Chooses one of ``count``."""

    def __call__(self, count: int) -> int: ...


@dataclass
class Answer:
    """Of one request."""

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    report: Report | None = None
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.report is not None or self.error is not None


@dataclass(frozen=True)
class Setup:
    """``slots``: of each host pool. ``recipe``: of the stored objects."""

    settings: Settings
    layout: str
    io_backend: str
    slots: Mapping[str, int]
    recipe: Mapping[str, str]


class Replica:
    """Close it: it has copy threads."""

    def __init__(self, bench: Bench, setup: Setup, store: Store) -> None:
        spec = bench.spec
        self.bench, self.spec, self.setup, self.store = bench, spec, setup, store
        self.host = {c.name: Pool(c, spec.page_size, setup.slots[c.name], setup.layout) for c in spec.components}
        self.spoil()
        capacity = {(Tier.DEVICE, name): pool.slots for name, pool in bench.pools.items()}
        capacity |= {(Tier.HOST, name): pool.slots for name, pool in self.host.items()}
        self.res = Residency(spec, capacity)
        self.cache = Cache(self.res, setup.settings)
        self.group = Group(self.cache, _no_time)
        self.tags = tags_of(spec, setup.recipe)
        describe(store, spec, setup.recipe, DESCRIBE_S)
        self.mover = Mover(choose(setup.io_backend, "cpu", setup.layout), threads=1)
        self.rank = Rank(0, spec, {Tier.DEVICE: bench.pools, Tier.HOST: self.host}, {name: of[0] for name, of in self.tags.items()})
        self.executor = Executor(self.rank, self.mover, store, bench.run, _no_time)
        self.answers: dict[str, Answer] = {}
        self._lanes: dict[Lane, deque[Envelope]] = {lane: deque() for lane in Lane}
        self._done: set[str] = set()

    def close(self) -> None:
        self.mover.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests -----------------------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Answer:
        """Submit a request; it moves with :meth:`step`."""
        self.bench.expect(request)
        answer = self.answers[request.rid] = Answer()
        self.group.submit(request)
        self._collect()
        return answer

    def put(self, request: Request) -> Answer:
        """A request runs to its end, and whatever it has set going as well. Raises what ended it."""
        answer = self.begin(request)
        self.settle()
        if answer.error is not None:
            raise answer.error
        if not answer.ended:
            raise HiCacheError(f"request {request.rid} waits for something that nothing under way will bring")
        return answer

    def step(self, chance: Chance = lambda count: 0) -> bool:
        """Execute one record. False: there is none."""
        lanes = [lane for lane in self._lanes.values() if lane]
        if not lanes:
            return False
        envelope = lanes[chance(len(lanes))].popleft()
        record = envelope.record
        if envelope.rank == STORE:
            assert isinstance(record, Lookup | Clear)
            outcome = ask(self.store, self.tags, record)
        else:
            outcome = self.executor.execute(record)
        self.group.report(envelope.rank, record.id, envelope.incarnation, outcome)
        self._collect()
        return True

    def settle(self, chance: Chance = lambda count: 0) -> None:
        """Until nothing is under way. Raises where a structure is not consistent then."""
        while self.step(chance):
            pass
        self.group.check()

    def _collect(self) -> None:
        for envelope in self.group.take():
            self._lanes[lane_of(envelope.record)].append(envelope)
        for event in self.group.events():
            if isinstance(event, Ended) and event.rid not in self.answers:
                self._done.add(event.rid)
                continue
            answer = self.answers[event.rid]
            if isinstance(event, Sampled):
                answer.output += event.tokens
                answer.logprobs += event.logprobs
            elif isinstance(event, Ended):
                answer.report, answer.error = event.report, event.error

    # -- tiers --------------------------------------------------------------------------------------------------------------------------

    def leave_device(self) -> None:
        """Everything goes from the device by eviction, so that under every policy the host has it, and storage soon after."""
        self.group.evict(Tier.DEVICE, {name: self.res.room((Tier.DEVICE, name)) for name in self.bench.pools})
        self._collect()
        self.settle()
        self.bench.spoil()

    def spoil(self) -> None:
        """All bytes of device and host become 0xFF."""
        self.bench.spoil()
        for pool in self.host.values():
            pool.buffer.fill_(255)

    def self_test(self) -> None:
        """What a rank does at start. Raises :class:`~hicache_ray.errors.LayoutBroken`."""
        self_test(self.rank, self.executor, "verify", DESCRIBE_S)
        self.spoil()

    def flush(self) -> None:
        """Device and host are empty afterwards, and their bytes no numbers."""
        name = self.group.flush([Tier.DEVICE, Tier.HOST])
        self._collect()
        self.settle()
        if name not in self._done:
            raise HiCacheError("a flush did not end")
        self.spoil()


def _no_time() -> float:
    return 0.0


#: Comes between production and restore: tests spoil bytes of a tier there, and verify must see it.
Interference = Callable[[Replica, Request], None]
