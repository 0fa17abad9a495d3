"""Arenas of 64 pages in a folder of their own, and the proof that nothing of them is left."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, DiskStore
from hicache_ray.storage.owned import PREFIX
from tests.storage.objects import PAGE
from tests.storage.services import Process

PAGES = 64


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def config() -> ArenaConfig:
    """In /dev/shm, under a name of this process."""
    return ArenaConfig(f"test-{os.getpid()}", PAGES * PAGE, slab_bytes=PAGE, io_timeout_s=1.0)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, for tests that make many disk stores: syncs of a real disk would take minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hicache-tests-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No file of ours in shared memory, no thread of ours, whatever a test did."""
    yield
    mine = f"{PREFIX}test-{os.getpid()}"
    assert [path.name for path in Path("/dev/shm").glob(mine + "*")] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache")] == []


@pytest.fixture
def service(config: ArenaConfig, nothing_left: None) -> Iterator[ArenaService]:
    with ArenaService(config) as running:
        yield running
        running.check()


@pytest.fixture
def client(service: ArenaService) -> Iterator[ArenaClient]:
    opened = ArenaClient(service.address)
    yield opened
    opened.close()


@pytest.fixture
def process(config: ArenaConfig, nothing_left: None) -> Iterator[Process]:
    running = Process(config)
    yield running
    running.close()


@pytest.fixture
def connect(nothing_left: None) -> Iterator[Callable[..., ArenaClient]]:
    """Opens clients that are closed at the end of the test."""
    opened: list[ArenaClient] = []

    def open_one(*args: object, **options: object) -> ArenaClient:
        opened.append(ArenaClient(*args, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def disk(nothing_left: None) -> Iterator[Callable[..., DiskStore]]:
    """Opens disk stores that are closed at the end of the test, however it ends."""
    opened: list[DiskStore] = []

    def open_one(*args: object, **options: object) -> DiskStore:
        opened.append(DiskStore(*args, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
