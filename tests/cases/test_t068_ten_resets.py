"""T068: ten resets under load, with the threads of real ranks: as many threads after as before, and no late write lands in a page that was
given out after the reset."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from hicache_ray.actors.driver import Driver
from hicache_ray.group import Envelope
from hicache_ray.keys import as_tokens
from hicache_ray.records import Lane, Move, Outcome, Record, lane_of
from hicache_ray.spec import Tier
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.store import Bytes
from hicache_ray.story import Ended, Event, Request
from hicache_ray.testing import Stack, full, state
from tests.core.drive import all_bytes_are_right, prompt

RANKS, PAGE, RESETS = 2, 8, 10
#: As a rank actor has them.
THREADS = {Lane.COMPUTE: 1, Lane.COPY: 1, Lane.STORAGE: 2}
WAIT_S = 60.0


class RealClock:
    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        raise AssertionError("nothing here waits by itself")


class Gate(FaultyStore):
    """When it closes, one read of each rank waits until it opens, and then writes to its targets."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Semaphore(0)
        self.stops = threading.Semaphore(0)

    def close_for(self, reads: int) -> None:
        self.open.clear()
        self.stops.release(reads)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        if self.stops.acquire(blocking=False):
            self.waiting.release()
            assert self.open.wait(WAIT_S)
        return super().get(ids, targets, timeout_s)


class Ranks:
    """Threads of their own for each rank and kind of record."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.pools = {(rank, lane): ThreadPoolExecutor(n) for rank in range(RANKS) for lane, n in THREADS.items()}
        for (_, lane), pool in self.pools.items():  # all threads are there from the start
            meet = threading.Barrier(THREADS[lane] + 1)
            for _ in range(THREADS[lane]):
                pool.submit(meet.wait)
            meet.wait(WAIT_S)

    def execute(self, rank: int, record: Record, incarnation: int) -> Awaitable[Outcome]:
        envelope = Envelope(rank, record, incarnation)
        return asyncio.get_running_loop().run_in_executor(self.pools[(rank, lane_of(record))], self.stack.execute, envelope)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()


@contextmanager
def running() -> Iterator[tuple[Stack, Driver]]:
    gate = Gate(MemoryStore(1 << 24))
    pools = {"full": full(), "state": state(2 * PAGE)}
    patient = {"prefetch_base_s": WAIT_S, "prefetch_cap_s": WAIT_S}
    stack = Stack(page=PAGE, pools=pools, ranks=RANKS, l1=24, l2=17, store=gate, settings=patient, clock=RealClock())  # type: ignore[arg-type]
    ranks = Ranks(stack)
    try:
        yield stack, Driver(stack.cache, ranks, stack.store, stack.tags, stack.group)
    finally:
        gate.open.set()
        ranks.close()


def request(stack: Stack, tokens: Sequence[int], rid: str) -> Request:
    stack._prompts[rid] = as_tokens(tokens)
    return Request(rid, as_tokens(tokens[:-1]), stack.ns, 1)


async def serve(driver: Driver, asked: Request) -> Ended:
    events: list[Event] = [event async for event in driver.serve(asked)]
    assert isinstance(events[-1], Ended)
    return events[-1]


async def at_rest(driver: Driver) -> None:
    while not driver.group.idle or driver._tasks:
        await asyncio.sleep(0)
    assert driver.lost == ""
    driver.group.check()


def pinned(stack: Stack, read: Move) -> bool:
    held = [(stack.res.pools[(Tier.HOST, span.component)], span.target) for span in read.spans]
    return all(bool(np.all(pool.pinned(slots))) for pool, slots in held)


async def story(stack: Stack, driver: Driver) -> None:
    gate = stack.store
    assert isinstance(gate, Gate)
    prompts = [prompt(50 + i, 8 * PAGE + 2) for i in range(4)]
    first = prompts[0]
    await serve(driver, request(stack, first, "first"))
    await at_rest(driver)
    await driver.flush([Tier.DEVICE, Tier.HOST], WAIT_S)
    threads: list[int] = []
    for turn in range(RESETS):
        gate.close_for(RANKS)
        driver.group.prefetch(request(stack, first, f"prefetch {turn}"))
        driver._pump()
        for _ in range(RANKS):
            assert await asyncio.to_thread(gate.waiting.acquire, True, WAIT_S)
        (read,) = [f.record for f in driver.group._flights.values() if isinstance(f.record, Move) and f.record.source is Tier.STORAGE]
        await driver.flush([Tier.DEVICE, Tier.HOST], WAIT_S)
        assert all(pool.cached == 0 for pool in stack.res.pools.values())
        # After the reset pages are given out again, more than the host has beside those that the read may still write to.
        ends = await asyncio.gather(*(serve(driver, request(stack, p, f"{turn} {i}")) for i, p in enumerate(prompts[1:])))
        assert all(end.report is not None for end in ends)
        assert pinned(stack, read)
        gate.open.set()
        await at_rest(driver)
        assert all_bytes_are_right(stack, prompts) > 0
        assert stack.probe(first).l2 == 0
        threads.append(threading.active_count())
    assert threads == threads[:1] * RESETS
    assert (await serve(driver, request(stack, first, "last"))).report.storage == 8 * PAGE  # type: ignore[union-attr]
    await at_rest(driver)


def test_t068_ten_resets_under_load() -> None:
    before = threading.active_count()

    async def whole() -> None:
        with running() as (stack, driver):
            # What the loop and the driver start when they need it is there before the first count.
            meet = threading.Barrier(5)
            await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(driver._threads, meet.wait) for _ in range(4)),
                                 asyncio.to_thread(meet.wait))  # fmt: skip
            await asyncio.wait_for(story(stack, driver), 2 * WAIT_S)
            await driver.close()
            driver._threads.shutdown()

    asyncio.run(whole())
    assert threading.active_count() == before
