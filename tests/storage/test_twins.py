"""The arena against the memory store: the same calls give the same answers, evictions included, while all pages are of one size."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, MemoryStore
from hicache_ray.store import Lent
from tests.storage.conftest import FakeClock
from tests.storage.objects import TIMEOUT_S, get, name, present, put

ROOM = 6
SIZE = 4096
NUMBERS = st.lists(st.integers(0, 11), max_size=8)
LEASE_S = 10.0


class Stores(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.clock = FakeClock()
        self.service = ArenaService(ArenaConfig("test-twins", ROOM * SIZE, slab_bytes=SIZE, lease_s=LEASE_S), self.clock).start()
        self.arena = ArenaClient(self.service.address, clock=self.clock)
        self.memory = MemoryStore(ROOM * SIZE, LEASE_S, self.clock)
        self.lent: list[tuple[Lent, Lent]] = []

    @rule(numbers=NUMBERS)
    def put(self, numbers: list[int]) -> None:
        assert put(self.arena, numbers, SIZE) == put(self.memory, numbers, SIZE)

    @rule(numbers=NUMBERS)
    def get(self, numbers: list[int]) -> None:
        assert get(self.arena, numbers, SIZE) == get(self.memory, numbers, SIZE)

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        ids = [name(n) for n in numbers]
        assert self.arena.drop(ids, TIMEOUT_S) == self.memory.drop(ids, TIMEOUT_S)

    @rule()
    def clear(self) -> None:
        assert self.arena.clear(TIMEOUT_S) == self.memory.clear(TIMEOUT_S)

    @rule(number=st.integers(0, 11))
    def damage(self, number: int) -> None:
        assert self.arena.damage(name(number)) == self.memory.damage(name(number))
        get(self.memory, [number], SIZE)
        get(self.arena, [number], SIZE)

    @rule(numbers=NUMBERS)
    def lease(self, numbers: list[int]) -> None:
        ids = [name(n) for n in numbers]
        self.lent.append((self.arena.lease(ids, TIMEOUT_S), self.memory.lease(ids, TIMEOUT_S)))

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        if which < len(self.lent):
            for lent in self.lent.pop(which):
                lent.release()

    @rule(seconds=st.sampled_from([1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "service"):
            return
        assert present(self.arena, range(12)) == present(self.memory, range(12))
        assert sorted(self.arena.scan()) == sorted(self.memory.scan())
        ours, theirs = (asdict(store.stats(TIMEOUT_S)) for store in (self.arena, self.memory))
        for counter in ("gets", "get_misses"):  # damaging an arena's object takes a lease, which counts
            del ours[counter], theirs[counter]
        assert ours == theirs
        for arena, memory in self.lent:
            assert arena.valid() == memory.valid()
        self.service.check()
        self.memory.check()

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.arena.close()
            self.service.close()


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=40, stateful_step_count=25)
