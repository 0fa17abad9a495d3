"""T064: a store that raises on every call costs hits and nothing else, and is used again when it has healed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_ray.actors.driver import Driver
from hicache_ray.errors import StoreError
from hicache_ray.group import Envelope
from hicache_ray.keys import as_tokens
from hicache_ray.records import Lane, Outcome, Record, lane_of
from hicache_ray.spec import Tier
from hicache_ray.storage import FaultyStore, StoreWrapper
from hicache_ray.story import Ended, Report, Request
from hicache_ray.testing import Stack, full, state
from tests.storage import stores

#: Of a rank, as in its actor: forwards and copies one after the other, transfers from and to storage two at a time.
THREADS = {Lane.COMPUTE: 1, Lane.COPY: 1, Lane.STORAGE: 2}
PAGE, REQUESTS, RANKS = 4, 50, 2
PATIENCE_S = 60.0


class Moody(StoreWrapper):
    """Raises on every call while ``broken``."""

    broken = False
    refused = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("lookup", "put", "get", "lease", "drop", "clear", "scan", "describe", "described", "stats") and self.broken:
            self.refused += 1
            raise StoreError(f"injected: {name} fails")
        return super().__getattribute__(name)


class Clock:
    """Real time where the kit expects one that can be advanced."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        raise AssertionError("nothing here waits by itself")


@dataclass
class Workers:
    """Ranks with real worker threads."""

    stack: Stack
    pools: dict[tuple[int, Lane], ThreadPoolExecutor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(RANKS):
            for lane, count in THREADS.items():
                self.pools[rank, lane] = ThreadPoolExecutor(count, thread_name_prefix=f"t064-{rank}-{lane}")

    def execute(self, rank: int, record: Record, incarnation: int) -> Awaitable[Outcome]:
        envelope = Envelope(rank, record, incarnation)
        return asyncio.get_running_loop().run_in_executor(self.pools[rank, lane_of(record)], self.stack.execute, envelope)

    def alive(self) -> int:
        """Every worker answers."""
        barriers = [(pool, threading.Barrier(THREADS[lane])) for (_, lane), pool in self.pools.items()]
        waits = [pool.submit(barrier.wait, PATIENCE_S) for pool, barrier in barriers for _ in range(barrier.parties)]
        return len([wait.result(PATIENCE_S) for wait in waits])

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()


def request(stack: Stack, number: int) -> Request:
    """9 pages; neighbours share 4."""
    tokens = [10_000 * (number // 5) + i for i in range(4 * PAGE)] + [1_000_000 + 1000 * number + i for i in range(5 * PAGE + 1)]
    stack._prompts[f"r{number}"] = as_tokens([*tokens, 7])
    return Request(f"r{number}", as_tokens(tokens), stack.ns, 1)


async def report(driver: Driver, asked: Request) -> Report:
    *_, ended = [event async for event in driver.serve(asked)]
    assert isinstance(ended, Ended)
    assert ended.report is not None
    return ended.report


async def at_rest(driver: Driver) -> None:
    while not driver.group.idle:
        await asyncio.sleep(0.001)
    driver.group.check()


async def story(stack: Stack, workers: Workers, moody: Moody) -> None:
    driver = Driver(stack.cache, workers, stack.store, stack.tags, stack.group)
    moody.broken = True
    for first in range(0, REQUESTS, 10):  # ten at a time
        some = [request(stack, n) for n in range(first, first + 10)]
        for done in await asyncio.gather(*(report(driver, asked) for asked in some)):
            assert done.device + done.host + done.storage + done.computed == 9 * PAGE + 1
            assert done.storage == 0
    await at_rest(driver)
    assert moody.refused > REQUESTS
    assert not driver.lost
    assert workers.alive() == RANKS * sum(THREADS.values())
    assert stack.res.leases.open() == ()

    moody.broken = False
    asked = request(stack, 1000)
    await report(driver, asked)
    await at_rest(driver)
    prompt = asked.tokens.tolist()
    assert stack.have("l3", "full", prompt) == set(range(9))
    await driver.flush([Tier.DEVICE, Tier.HOST], PATIENCE_S)
    assert all(pool.free == pool.capacity for pool in stack.res.pools.values())  # every page was given back
    again = request(stack, 1000)
    assert (await report(driver, again)).storage == 9 * PAGE
    await at_rest(driver)
    await driver.close()


@pytest.mark.parametrize("kind", ["memory", "arena in a thread"])
def test_t064_a_store_that_raises(kind: str) -> None:
    subject = stores.STORES[kind]()
    with subject.make(8 << 20) as inner:
        moody = Moody(inner)
        pools = {"full": full(), "state": state(PAGE)}
        stack = Stack(page=PAGE, pools=pools, ranks=RANKS, l1=96, l2=64, store=FaultyStore(moody), clock=Clock())  # type: ignore[arg-type]
        workers = Workers(stack)
        before = threading.active_count()
        try:
            asyncio.run(asyncio.wait_for(story(stack, workers, moody), PATIENCE_S))
        finally:
            workers.close()
        assert threading.active_count() <= before + 4  # of the store's client at most
