"""Drops and flushes while replicas begin late, begin anew, or have no storage. The coordinators' shells in this process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from hicache_ray.actors import dropping, names
from hicache_ray.actors.coordinator import CoordinatorShell
from hicache_ray.actors.dropping import Found
from hicache_ray.actors.gateway import ClusterBackend
from hicache_ray.actors.messages import Begun, GroupSetup, Prompt
from hicache_ray.actors.setup import namespace_of
from hicache_ray.config_sources import load
from hicache_ray.errors import Busy, ConfigError, GroupLost, HiCacheError, StorageDetached
from hicache_ray.keys import space_of
from hicache_ray.records import Compute, Move, Outcome, Record
from hicache_ray.spec import CacheSpec
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.testing import full

CONFIG = load(flags={"model.tp": 1, "storage.size": "1MiB"}).config
SPEC = CacheSpec("test", CONFIG.cache.page_size, (full(),), 1)
MINE = namespace_of(CONFIG, "a model")
SPACE = space_of(MINE.digest())
HEX = SPACE.hex()


class Handle:
    """An object in this process, called the way an actor is."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.shell, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class Rank:
    """One that does at once whatever it is told; the model says the same token again and again."""

    async def compute(self, record: Record, _: int) -> Outcome:
        assert isinstance(record, Compute)
        return Outcome(output=(7,) * record.steps, logprobs=(0.0,) * record.steps)

    async def copy(self, record: Record, _: int) -> Outcome:
        assert isinstance(record, Move)
        return Outcome(bits=tuple((1 << len(span)) - 1 for span in record.spans))

    transfer = copy

    async def detach_storage(self) -> None: ...

    async def attach_storage(self) -> None: ...


def coordinator(store: MemoryStore, first: bool = True) -> CoordinatorShell:
    shell = CoordinatorShell(GroupSetup(CONFIG, SPEC, MINE, "no/such/socket", first=first))
    assert shell.store is not None
    shell.store.close()
    shell.store = store  # type: ignore[assignment]
    return shell


async def adopt(shell: CoordinatorShell, incarnation: int = 1) -> None:
    await shell.adopt([Handle(Rank())], Begun(incarnation))


async def generate(shell: CoordinatorShell, rid: str, count: int = 300) -> int:
    """Tokens that were computed."""
    events = [event async for event in shell.generate(Prompt(rid, [3] * count, 1))]
    computed: int = events[-1]["report"]["computed"]
    return computed


async def held(shell: CoordinatorShell, rid: str) -> asyncio.Task[int]:
    """A request that a drop keeps from beginning."""
    task = asyncio.create_task(generate(shell, rid))
    while shell.driver is None or rid not in shell.driver.group.active():
        await asyncio.sleep(0)
    assert shell.driver.calls["rank"] == 0
    return task


def stored(store: MemoryStore, name: int) -> None:
    assert store.put([SPACE + name.to_bytes(ID_BYTES - len(SPACE), "big")], [b"page"], 1.0) == 1


def objects(store: MemoryStore) -> int:
    return sum(1 for _ in store.scan(SPACE, 1.0))


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30.0))


def test_a_group_that_begins_during_a_drop_learns_of_it_before_it_serves() -> None:
    async def story() -> None:
        shell = coordinator(MemoryStore(1 << 20))
        begun = await shell.begin_drop(HEX, 30.0)  # nothing has been before, so there is nothing to wait for
        assert (begun["device"], begun["host"]) == (0, 0)
        with pytest.raises(Busy, match="is being dropped"):
            await shell.begin_drop(HEX, 30.0)
        await adopt(shell)
        waiting = await held(shell, "r")
        assert not waiting.done()
        await adopt(shell, 2)  # the group is lost, with those who waited
        with pytest.raises(GroupLost):
            await waiting
        waiting = await held(shell, "s")
        await shell.end_drop(begun["name"])
        assert await waiting == 300
        with pytest.raises(HiCacheError, match="drop again"):
            await shell.end_drop(begun["name"])
        await adopt(shell, 3)
        assert await generate(shell, "t") == 300

    run(story())


def test_ranks_of_a_group_that_is_lost_may_still_write_so_a_drop_waits_for_the_next_one() -> None:
    async def story() -> None:
        for lost in (False, True):
            shell = coordinator(MemoryStore(1 << 20), first=False)
            if lost:
                await adopt(shell)
                assert shell.driver is not None
                shell.driver.lose("a rank is gone")
            begun = asyncio.create_task(shell.begin_drop(HEX, 30.0))
            await asyncio.sleep(0.01)
            assert not begun.done()
            await adopt(shell, 2)
            await shell.end_drop((await begun)["name"])
            assert await generate(shell, "r") == 300
            late = coordinator(MemoryStore(1 << 20), first=False)
            with pytest.raises(GroupLost, match="has not begun in time; drop again"):
                await late.begin_drop(HEX, 0.01)

    run(story())


def test_a_coordinator_that_appears_during_a_drop_is_part_of_it() -> None:
    async def story() -> None:
        store = MemoryStore(1 << 20)
        early, late = coordinator(store), coordinator(store)
        await adopt(early)
        stored(store, 1)
        handles, looks = [Handle(early), Handle(late)], 0

        async def find() -> Found:
            nonlocal looks
            looks += 1
            if looks == 3:  # storage is clear; this one has read it before, and now it writes it back
                assert objects(store) == 0
                stored(store, 2)
                await adopt(late)
            return Found(handles[: 1 if looks < 3 else 2])

        told = await dropping.drop(find, [HEX])
        assert told == {"device": 0, "host": 0, "storage": 2, "left": 0}
        assert objects(store) == 0
        assert await generate(early, "r") == await generate(late, "r") == 300

    run(story())


def test_a_replica_without_a_coordinator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        store = MemoryStore(1 << 20)
        early, late = coordinator(store), coordinator(store, first=False)
        await adopt(early)
        looks = 0

        async def find() -> Found:
            nonlocal looks
            looks += 1
            if looks == 2:
                stored(store, 1)  # by a rank whose coordinator has died
                await adopt(late)
            return Found([Handles[early]], ["late"]) if looks < 2 else Found([Handles[early], Handles[late]])

        Handles = {shell: Handle(shell) for shell in (early, late)}
        assert (await dropping.drop(find, [HEX]))["storage"] == 1
        assert objects(store) == 0

        async def never() -> Found:
            return Found([Handles[early]], ["late"])

        monkeypatch.setattr(dropping, "LET_GO_S", 0.1)
        with pytest.raises(HiCacheError, match=r"the drop is not complete: .*replica late is being started anew .*; drop again"):
            await dropping.drop(never, [HEX])
        assert await generate(early, "r") == 300  # nobody is held any longer

    run(story())


def test_nothing_is_claimed_of_storage_that_is_detached() -> None:
    async def story() -> None:
        store = MemoryStore(1 << 20)
        stored(store, 1)
        shell = coordinator(store)
        await adopt(shell)
        assert await generate(shell, "r") == 300
        await shell.flush(["device", "host", "storage"], 5.0)
        assert objects(store) == 0
        await shell.detach_storage()
        for tiers, preserve in ((["storage"], False), (["device", "host", "storage"], False), (["device"], True)):
            with pytest.raises(StorageDetached, match="storage is detached"):
                await shell.flush(tiers, 5.0, preserve)
        await shell.flush(["device", "host"], 5.0)
        with pytest.raises(StorageDetached):
            await shell.spaces({})

        async def find() -> Found:
            return Found([handle])

        handle = Handle(shell)
        with pytest.raises(StorageDetached):
            await dropping.drop(find, [HEX])
        assert await generate(shell, "s") == 300  # nobody is held any longer
        await adopt(shell, 2)
        assert not shell.attached

    run(story())


def test_nothing_is_preserved_where_there_is_no_storage() -> None:
    async def story() -> None:
        shell = CoordinatorShell(GroupSetup(CONFIG, SPEC, MINE, ""))
        await shell.adopt([Handle(Rank())], Begun(1, attached=False))
        assert await generate(shell, "r") == 300
        backend = Known(hicache_coordinator_app_one=Handle(shell))
        for flush in (shell.flush(["device", "host"], 5.0, True), backend.flush(["device", "host"], 5.0, True)):
            with pytest.raises(ConfigError, match="storage.backend is none, so nothing can be preserved"):
                await flush
        assert await generate(shell, "again") < 300
        assert await backend.flush(["device", "host", "storage"], 5.0) == 1
        assert await generate(shell, "cold") == 300

    run(story())


def test_storage_that_is_given_back_while_ranks_join_stays() -> None:
    """They had joined without it and got it since; only a coordinator that is new has nothing but their word."""

    async def story() -> None:
        shell = coordinator(MemoryStore(1 << 20))
        await adopt(shell)
        await shell.detach_storage()
        joined = Begun(2, attached=False)
        await shell.attach_storage()
        await shell.adopt([Handle(Rank())], joined)
        assert shell.attached
        assert shell.driver is not None
        assert shell.driver.cache.res.storage
        new = coordinator(MemoryStore(1 << 20), first=False)
        await new.adopt([Handle(Rank())], joined)
        assert not new.attached
        assert new.driver is not None
        assert not new.driver.cache.res.storage

    run(story())


@pytest.mark.parametrize(
    ("name", "replica"),
    [
        (names.rank("app", "r#1", 0, 3), "r#1"),
        (names.rank("app-2", "r#1", 0, 3), None),
        (names.coordinator("app", "r#1"), None),
        (names.storage("rank:app", "node"), None),
    ],
)
def test_whose_rank_an_actor_is(name: str, replica: str | None) -> None:
    assert names.replica_of_rank(name, "app") == replica


def test_every_wait_of_a_drop_fits_into_the_time_that_replicas_hold() -> None:
    waits: Sequence[float] = (dropping.LET_GO_S, dropping.CLEAR_S, dropping.CLEAR_S)
    assert sum(waits) < dropping.HOLD_S


class Known(ClusterBackend):
    """Asks these actors."""

    def __init__(self, **actors: Any) -> None:
        super().__init__("app", "store", {})
        self.actors = {name.replace("_", ":"): actor for name, actor in actors.items()}

    async def _named(self, wanted: Any) -> Mapping[str, Any]:
        return {name: actor for name, actor in self.actors.items() if wanted(name)}


class Deaf(Handle):
    """Its actor dies when it is told to forget."""

    def __getattr__(self, name: str) -> Any:
        if name == "forget_storage":

            async def die() -> None:
                raise RayActorError

            return SimpleNamespace(remote=lambda: asyncio.ensure_future(die()))
        return super().__getattr__(name)


def test_a_flush_of_storage_that_a_replica_does_not_hear_of_is_not_complete() -> None:
    async def story() -> None:
        store = MemoryStore(1 << 20)
        one, other = coordinator(store), coordinator(store)
        await adopt(one)
        await adopt(other)
        stored(store, 1)
        backend = Known(hicache_coordinator_app_one=Handle(one), hicache_coordinator_app_other=Handle(other))
        assert await backend.flush(["storage"], None) == 2
        assert objects(store) == 0
        backend.actors["hicache:coordinator:app:other"] = Deaf(other)
        with pytest.raises(HiCacheError, match="replica other did not complete that: RayActorError; try again"):
            await backend.flush(["storage"], None)
        backend.actors["hicache:coordinator:app:other"] = Handle(other)
        backend.actors["hicache:rank:app:third:0:1"] = Handle(Rank())
        with pytest.raises(HiCacheError, match="replica third is being started anew and may have written to storage; flush again"):
            await backend.flush(["storage"], None)
        await one.detach_storage()
        for tiers, preserve in ((["storage"], False), (["host"], True)):
            with pytest.raises(StorageDetached):
                await backend.flush(tiers, None, preserve)
        with pytest.raises(StorageDetached):
            await backend.drop({"model": "a model"})
        assert await backend.flush(["host"], None) == 2

    run(story())


def test_a_drop_that_begins_while_a_group_learns_of_others_reaches_it_too() -> None:
    async def story() -> None:
        shell = coordinator(MemoryStore(1 << 20))
        other = space_of(b"\x55" * 32).hex()
        first = await shell.begin_drop(other, 30.0)
        beginning = asyncio.create_task(adopt(shell))
        while not any(fence.rid for fence in shell._fences._open.values()) and not beginning.done():
            await asyncio.sleep(0)
        second = await shell.begin_drop(HEX, 30.0)
        await beginning
        waiting = await held(shell, "r")
        await shell.end_drop(first["name"])
        assert not waiting.done()
        await shell.end_drop(second["name"])
        assert await waiting == 300

    run(story())
