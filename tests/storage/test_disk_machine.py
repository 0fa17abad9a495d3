"""The disk store against the memory store: the same calls give the same answers, evictions included, while all pages are of one size.

Starts anew are among the calls: neither a clean close nor the loss of the process changes an answer, but that evicted objects may come
back where a slot of theirs was not written to again (so nothing is compared that an eviction could decide after a loss).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ray.storage import DiskConfig, DiskStore, MemoryStore
from hicache_ray.storage.disk_format import Geometry
from hicache_ray.store import Lent
from tests.storage.conftest import FakeClock
from tests.storage.objects import TIMEOUT_S, get, name, present, put

ROOM, SIZE = 6, 4096
NUMBERS = st.lists(st.integers(0, 11), max_size=8)


class Stores(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.clock = FakeClock()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hicache-machine-"))
        size = Geometry(SIZE, ROOM).disk_bytes + 4096
        self.config = DiskConfig(str(self.directory), size, segment_bytes=ROOM * SIZE, fsync="never", io_threads=1)
        self.disk = DiskStore(self.config, self.clock)
        self.memory = MemoryStore(ROOM * SIZE, self.config.lease_s, self.clock)
        self.lent: list[tuple[Lent, Lent]] = []

    @rule(numbers=NUMBERS)
    def put(self, numbers: list[int]) -> None:
        assert put(self.disk, numbers, SIZE) == put(self.memory, numbers, SIZE)

    @rule(numbers=NUMBERS)
    def get(self, numbers: list[int]) -> None:
        assert get(self.disk, numbers, SIZE) == get(self.memory, numbers, SIZE)

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        ids = [name(n) for n in numbers]
        assert self.disk.drop(ids, TIMEOUT_S) == self.memory.drop(ids, TIMEOUT_S)

    @rule()
    def clear(self) -> None:
        assert self.disk.clear(TIMEOUT_S) == self.memory.clear(TIMEOUT_S)

    @rule(number=st.integers(0, 11))
    def damage(self, number: int) -> None:
        assert self.disk.damage(name(number)) == self.memory.damage(name(number))
        get(self.memory, [number], SIZE)
        get(self.disk, [number], SIZE)

    @rule(numbers=NUMBERS)
    def lease(self, numbers: list[int]) -> None:
        ids = [name(n) for n in numbers]
        self.lent.append((self.disk.lease(ids, TIMEOUT_S), self.memory.lease(ids, TIMEOUT_S)))

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        if which < len(self.lent):
            for lent in self.lent.pop(which):
                lent.release()

    @rule(seconds=st.sampled_from([1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def reopen(self) -> None:
        """A clean start: leases end, order of use is kept."""
        self._release()
        self.disk.close()
        self.disk = DiskStore(self.config, self.clock)

    @rule()
    def lose(self) -> None:
        """A copy of the files as they are now, opened as after the loss of the process, holds what was visible, whole."""
        copy = self.directory.with_name(self.directory.name + "-copy")
        shutil.copytree(self.directory, copy)
        lost = DiskStore(DiskConfig(str(copy), self.config.size_bytes, ROOM * SIZE, fsync="never", io_threads=1), self.clock)
        try:
            lost.check()
            there = present(lost, range(12))
            assert there >= present(self.memory, range(12))
            assert get(lost, sorted(there), SIZE) == there
        finally:
            lost.close()
            shutil.rmtree(copy)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "disk"):
            return
        assert present(self.disk, range(12)) == present(self.memory, range(12))
        assert sorted(self.disk.scan()) == sorted(self.memory.scan())
        ours, theirs = self.disk.stats(TIMEOUT_S), self.memory.stats(TIMEOUT_S)
        assert (ours.used_bytes, ours.objects, ours.leases) == (theirs.used_bytes, theirs.objects, theirs.leases)
        assert ours.capacity_bytes == theirs.capacity_bytes
        for disk, memory in self.lent:
            assert disk.valid() == memory.valid()
        self.disk.check()
        self.memory.check()
        assert self.disk.disk_bytes() <= self.config.size_bytes

    def _release(self) -> None:
        for pair in self.lent:
            for lent in pair:
                lent.release()
        self.lent.clear()

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            shutil.rmtree(self.directory)


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=25, stateful_step_count=25, derandomize=True, deadline=None)
