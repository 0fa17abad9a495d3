"""The driver on an event loop, over the real core and real copies of the test kit; no Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest

from hicache_ray.actors import driver as drivers
from hicache_ray.actors.driver import Driver
from hicache_ray.cache import Ended, Event, Request, Sampled
from hicache_ray.errors import Busy, Cancelled, GroupLost
from hicache_ray.group import Envelope
from hicache_ray.keys import as_tokens, space_of
from hicache_ray.records import Compute, Outcome, Record
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack


@dataclass
class Ranks:
    """Executes on a thread; ``before`` may wait, raise, or answer in the place of the rank."""

    stack: Stack
    before: Callable[[int, Record], Awaitable[Outcome | None]] | None = None

    async def execute(self, rank: int, record: Record, incarnation: int) -> Outcome:
        if self.before is not None and (outcome := await self.before(rank, record)) is not None:
            return outcome
        return await asyncio.to_thread(self.stack.execute, Envelope(rank, record, incarnation))


class Clock:
    """Real time where the kit expects one that can be advanced."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        raise AssertionError("nothing here waits by itself")


def make(before: Callable[[int, Record], Awaitable[Outcome | None]] | None = None) -> tuple[Stack, Driver]:
    stack = Stack(page=4, ranks=2, clock=Clock())  # type: ignore[arg-type]
    return stack, Driver(stack.cache, Ranks(stack, before), stack.store, stack.tags, stack.group)


def request(stack: Stack, count: int, rid: str = "r", new: int = 2) -> Request:
    tokens = as_tokens(list(range(count + new)))
    stack._prompts[rid] = tokens  # what the engine of the kit is to generate
    return Request(rid, tokens[:count], stack.ns, new)


async def collect(driver: Driver, asked: Request) -> list[Event]:
    return [event async for event in driver.serve(asked)]


async def at_rest(driver: Driver) -> None:
    while not driver.group.idle:
        await asyncio.sleep(0)
    driver.group.check()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30.0))


def test_a_request_is_served_and_backed_up() -> None:
    async def story() -> None:
        stack, driver = make()
        *sampled, ended = await collect(driver, request(stack, 10))
        assert [t for s in sampled if isinstance(s, Sampled) for t in s.tokens] == [10, 11]
        assert isinstance(ended, Ended)
        assert ended.report is not None
        assert ended.report.computed == 10
        await at_rest(driver)
        assert stack.have("l3", "full", range(12)) == {0, 1}
        await driver.close()

    run(story())


def test_a_rank_that_raises_loses_the_group_and_tells_everybody() -> None:
    async def dies(rank: int, record: Record) -> Outcome | None:
        if isinstance(record, Compute) and rank == 1:
            raise GroupLost("the other rank does not answer")
        return None

    async def story() -> None:
        stack, driver = make(dies)
        asked = [request(stack, 10, "a"), request(stack, 20, "b"), request(stack, 30, "c")]
        ends = await asyncio.gather(*(collect(driver, a) for a in asked), return_exceptions=True)
        assert [type(e) for e in ends] == [GroupLost] * 3
        assert "rank 1 failed" in driver.lost
        with pytest.raises(GroupLost, match="rank 1 failed"):
            await collect(driver, request(stack, 5, "d"))
        await driver.close()

    run(story())


def test_nonsense_from_a_rank_loses_the_group_and_hangs_nobody() -> None:
    async def nonsense(rank: int, record: Record) -> Outcome | None:
        return Outcome(output=None) if isinstance(record, Compute) else None  # type: ignore[arg-type]

    async def story() -> None:
        stack, driver = make(nonsense)
        with pytest.raises(GroupLost, match="the coordinator failed: TypeError"):
            await collect(driver, request(stack, 10))
        await driver.close()

    run(story())


def test_a_reader_that_leaves_cancels_its_request() -> None:
    async def story() -> None:
        reached, on = asyncio.Event(), asyncio.Event()

        async def holds(rank: int, record: Record) -> Outcome | None:
            if isinstance(record, Compute) and record.start:
                reached.set()
                await on.wait()
            return None

        stack, driver = make(holds)
        events = driver.serve(request(stack, 10, new=20))
        assert isinstance(await anext(events), Sampled)
        await reached.wait()
        await events.aclose()  # type: ignore[attr-defined]
        on.set()
        await at_rest(driver)
        assert driver.cache.requests == 0
        assert isinstance((await collect(driver, request(stack, 10)))[-1], Ended)  # its id and its slots are free again
        await driver.close()

    run(story())


def test_a_cancelled_request_says_so() -> None:
    async def story() -> None:
        reached, on = asyncio.Event(), asyncio.Event()

        async def holds(rank: int, record: Record) -> Outcome | None:
            reached.set()
            await on.wait()
            return None

        stack, driver = make(holds)
        task = asyncio.create_task(collect(driver, request(stack, 10)))
        await reached.wait()
        driver.cancel("r")
        on.set()
        with pytest.raises(Cancelled):
            await task
        await at_rest(driver)
        await driver.close()

    run(story())


def test_a_reader_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(drivers, "EVENT_QUEUE", 2)
        stack, driver = make()
        events = driver.serve(request(stack, 10, new=40))
        await anext(events)
        await at_rest(driver)
        with pytest.raises(Busy, match="too slow"):
            async for _ in events:
                pass
        await driver.close()

    run(story())


def test_storage_that_never_answers_is_a_miss_and_no_lost_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(drivers, "GRACE_S", 0.05)
        stack, driver = make()
        on = asyncio.Event()
        loop = asyncio.get_running_loop()
        assert stack.store is not None
        answers, store = stack.store.lookup, stack.store

        class Slow:
            """Does not keep the deadline that it is given."""

            def lookup(self, *args: Any) -> Any:
                asyncio.run_coroutine_threadsafe(on.wait(), loop).result(20)
                return answers(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        object.__setattr__(driver.cache.settings, "lookup_deadline_s", 0.05)
        driver.store = Slow()  # type: ignore[assignment]
        last = (await collect(driver, request(stack, 10)))[-1]
        assert isinstance(last, Ended)
        assert last.report is not None
        assert last.report.computed == 10
        while driver._tasks:
            await asyncio.sleep(0)
        assert driver.lost == ""
        on.set()
        await at_rest(driver)
        await driver.close()

    run(story())


def test_a_flush_waits_and_refuses() -> None:
    async def story() -> None:
        reached, on = asyncio.Event(), asyncio.Event()

        async def holds(rank: int, record: Record) -> Outcome | None:
            reached.set()
            await on.wait()
            return None

        stack, driver = make(holds)
        task = asyncio.create_task(collect(driver, request(stack, 10)))
        await reached.wait()
        with pytest.raises(Busy):
            await driver.flush([Tier.DEVICE], None)
        with pytest.raises(Busy):
            await driver.flush([Tier.DEVICE], 0.01)
        flush = asyncio.create_task(driver.flush([Tier.DEVICE, Tier.HOST, Tier.STORAGE], 20.0))
        await asyncio.sleep(0)
        on.set()
        await flush
        assert task.done()
        assert stack.have("l1", "full", range(12)) | stack.have("l3", "full", range(12)) == set()
        await driver.close()

    run(story())


def test_records_go_out_in_no_context_of_a_request() -> None:
    """Ray cancels what was called in the context of a request together with it, and a record may be of another one."""
    mine: ContextVar[str] = ContextVar("mine", default="")

    async def story() -> None:
        seen: list[str] = []

        class Looking(Ranks):
            def execute(self, rank: int, record: Record, incarnation: int) -> Any:
                seen.append(mine.get())
                return super().execute(rank, record, incarnation)

        stack = Stack(page=4, ranks=2, clock=Clock())  # type: ignore[arg-type]
        driver = Driver(stack.cache, Looking(stack), stack.store, stack.tags, stack.group)
        mine.set("a request")
        await collect(driver, request(stack, 10))
        assert seen
        assert set(seen) == {""}
        await at_rest(driver)
        await driver.close()

    run(story())


def test_a_drop_returns_when_everything_is_gone_and_holds_new_requests_until_it_is_lifted() -> None:
    async def story() -> None:
        reached, on = asyncio.Event(), asyncio.Event()

        async def holds(rank: int, record: Record) -> Outcome | None:
            if isinstance(record, Compute) and record.rid == "running":
                reached.set()
                await on.wait()
            return None

        stack, driver = make(holds)
        await collect(driver, request(stack, 10))
        await at_rest(driver)
        running = asyncio.create_task(collect(driver, request(stack, 14, "running")))
        await reached.wait()
        space = space_of(stack.ns.digest())
        dropped = await driver.drop(space, 30.0)
        assert dropped.device == 2
        assert dropped.host == 2
        with pytest.raises(Busy, match="is being dropped"):
            await driver.drop(space, 30.0)
        assert stack.have("l1", "full", range(12)) | stack.have("l2", "full", range(12)) == set()
        assert stack.store is not None
        assert stack.store.clear(1.0, space) == 2 * 2
        new = asyncio.create_task(collect(driver, request(stack, 10, "new")))
        await asyncio.sleep(0)
        assert "new" in driver.group.active()
        driver.lift(dropped.rid)
        on.set()
        assert (await running)[-1].report.device == 8  # type: ignore[union-attr]
        assert (await new)[-1].report.computed == 10  # type: ignore[union-attr]
        await at_rest(driver)
        assert stack.have("l3", "full", range(16)) == {0, 1}  # of the new one alone
        await driver.close()

    run(story())


def test_storage_that_is_detached_in_flight_is_a_miss_at_once() -> None:
    async def story() -> None:
        on = threading.Event()
        stack, driver = make()
        assert stack.store is not None
        await collect(driver, request(stack, 10))
        await at_rest(driver)
        await driver.flush([Tier.DEVICE, Tier.HOST], 20.0)
        answers, store, asked = stack.store.lookup, stack.store, threading.Event()

        class Slow:
            def lookup(self, *args: Any) -> Any:
                asked.set()
                assert on.wait(20.0)
                return answers(*args)

        driver.store = Slow()  # type: ignore[assignment]
        task = asyncio.create_task(collect(driver, request(stack, 10, "s")))
        await asyncio.to_thread(asked.wait, 20.0)
        driver.detach()
        ended = (await task)[-1]
        assert isinstance(ended, Ended)
        assert ended.report is not None
        assert ended.report.computed == 10
        on.set()
        await at_rest(driver)
        driver.attach(store)
        await driver.flush([Tier.DEVICE, Tier.HOST], 20.0)
        ended = (await collect(driver, request(stack, 10, "t")))[-1]
        assert isinstance(ended, Ended)
        assert ended.report is not None
        assert ended.report.storage == 8
        await at_rest(driver)
        await driver.close()

    run(story())
