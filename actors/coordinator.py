"""The coordinator actor: a named shell around the group's driver. Free of torch; its control messages are few, no page byte passes here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray

from hicache_ray.actors import answers
from hicache_ray.actors.answers import Sought
from hicache_ray.actors.driver import Driver
from hicache_ray.actors.fences import Fences
from hicache_ray.actors.messages import Begun, GroupSetup, Prompt, unknown_tenant
from hicache_ray.actors.remote import answer
from hicache_ray.actors.setup import capacities, settings_of, tenant_caps
from hicache_ray.ask import ask, describe, tags_of
from hicache_ray.cache import Cache
from hicache_ray.errors import ConfigError, GroupLost, RequestRefused, StorageDetached, StoreError
from hicache_ray.explain import Explainer, lacks_all
from hicache_ray.explain_fields import foreign_fields
from hicache_ray.group import Group
from hicache_ray.keys import Namespace, space_of
from hicache_ray.records import Clear, Lane, Outcome, Record, lane_of
from hicache_ray.residency import Residency
from hicache_ray.spec import Tier
from hicache_ray.storage.connect import open_store
from hicache_ray.storage.owned import PREFIX
from hicache_ray.store import Store
from hicache_ray.story import Ended, Request, Sampled

#: How long a rank may take to let go of storage.
REOPEN_S = 5.0
#: How long storage may take to tell what it knows of namespaces.
DROP_S = 5.0
AWAY = "storage is detached, so what it holds cannot be reached and nothing can be written to it; attach it first (POST /storage/attach)"


@dataclass
class RankHandles:
    """The ranks as Ray actors."""

    handles: Sequence[Any]

    def execute(self, rank: int, record: Record, incarnation: int) -> Awaitable[Outcome]:
        handle = self.handles[rank]
        calls = {Lane.COMPUTE: handle.compute, Lane.COPY: handle.copy, Lane.STORAGE: handle.transfer}
        out: Awaitable[Outcome] = calls[lane_of(record)].remote(record, incarnation)
        return out


class CoordinatorShell:
    """One per cache group. Made by the replica, dies with it."""

    def __init__(self, setup: GroupSetup) -> None:
        self.setup = setup
        self.driver: Driver | None = None
        self.store = open_store(setup.socket) if setup.socket else None
        self.tags: Mapping[str, tuple[bytes, ...]] = {}
        self.ranks = RankHandles(())
        self.begun = Begun()
        self.attached = bool(setup.socket)
        self._swap = asyncio.Lock()  # of whoever takes the store, gives it back or replaces it; each takes several steps
        self._changes = 0  # of that
        self._fences = Fences()
        self.explainer = Explainer(settings_of(setup.config), tenant_caps(setup.config))

    async def adopt(self, ranks: Sequence[Any], begun: Begun) -> None:
        """Begin a new incarnation with these ranks, which have joined it; L1 and L2 start empty. Storage that was taken away stays away:
        a coordinator that is new learns of it from the ranks, ranks that are new from their coordinator."""
        async with self._swap:
            await self._adopt(ranks, begun)
        await asyncio.to_thread(self._describe)

    async def _adopt(self, ranks: Sequence[Any], begun: Begun) -> None:
        if self.driver is not None:
            await self.driver.close()
        setup, self.begun = self.setup, begun
        self.tags = tags_of(setup.spec, begun.recipe)
        res = Residency(setup.spec, capacities(setup.config, setup.spec))
        cache = Cache(res, settings_of(setup.config))
        # One request runs, the others wait for it.
        group = Group(cache, time.monotonic, begun.incarnation, setup.config.engine.max_queue + 1)
        self.ranks = RankHandles(ranks)
        driver = Driver(cache, self.ranks, self.store, self.tags, group, self.explainer)
        if not self.attached or (self.driver is None and not begun.attached):  # ranks that joined without it may have got it since
            await self._detach(driver)
        await self._fences.apply(driver)
        self.driver = driver

    def _describe(self) -> None:
        """Readable records for whoever asks why something missed; storage may be down, then there are none."""
        store = self.store
        if store is None:
            return
        try:
            describe(store, self.setup.spec, self.begun.recipe, 1.0)
            for namespace in (self.setup.namespace, *self.setup.tenants.values()):
                store.describe(namespace.digest(), namespace.record(), 1.0)
        except StoreError:
            return

    def _running(self) -> Driver:
        if self.driver is None:
            raise GroupLost("the cache group has not started")
        return self.driver

    def _namespace(self, tenant: str | None) -> Namespace:
        if tenant is None:
            return self.setup.namespace
        if tenant not in self.setup.tenants:
            raise RequestRefused(unknown_tenant(tenant, self.setup.tenants))
        return self.setup.tenants[tenant]

    async def generate(self, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
        """Events of a request as plain data: ``{"tokens", "logprobs"}`` as they come, then ``{"report"}``. Raises what ended it."""
        tokens, namespace = np.asarray(prompt.tokens, dtype=np.int32), self._namespace(prompt.tenant)
        request = Request(
            prompt.rid, tokens, namespace, prompt.new_tokens, prompt.limit, prompt.digests, prompt.spans, prompt.priority, prompt.ttl_s
        )
        async for event in self._running().serve(request):
            if isinstance(event, Sampled):
                yield {"tokens": event.tokens, "logprobs": event.logprobs}
            elif isinstance(event, Ended) and event.report is not None:
                yield {"report": asdict(event.report)}

    async def cancel(self, rid: str) -> None:
        self._running().cancel(rid)

    async def flush(self, tiers: Sequence[str], timeout_s: float | None = None, preserve: bool = False) -> None:
        """Complete when it returns. Raises as :meth:`require_storage` does where storage is needed, also where it was taken away
        meanwhile."""
        needed, changes = preserve or Tier.STORAGE.value in tiers, self._changes
        if needed:
            await self.require_storage(preserve)
        await self._running().flush([Tier(t) for t in tiers], timeout_s, preserve)
        if needed and changes != self._changes:
            raise StorageDetached("storage was detached during the flush, which is not complete; attach it and flush again")

    async def require_storage(self, writing: bool = False) -> None:
        """Raise :class:`StorageDetached` where storage was taken away. A deployment without any has nothing there either; ``writing``:
        something is to be kept there, so for that raise :class:`ConfigError`."""
        if writing and not self.setup.socket:
            raise ConfigError("storage.backend is none, so nothing can be preserved; flush without preserve, or deploy with storage")
        if self.setup.socket and not self.attached:
            raise StorageDetached(AWAY)

    async def forget_storage(self) -> None:
        """Somebody else has emptied L3: nothing counts as sealed any more."""
        if self.driver is not None:
            self.driver.cache.res.clear_durable()

    async def storage_died(self, arena: str) -> None:
        """The storage of a node has crashed; ``arena``: its name. If it is ours, we and the ranks let go of its memory, so that there is
        room for the next incarnation, and find that by ourselves; what it knew may be gone."""
        if f"/{PREFIX}{arena}/" not in self.setup.socket:
            return
        await self.forget_storage()
        async with self._swap:
            if self.store is None:
                return
            old, self.store = self.store, open_store(self.setup.socket)
            if self.driver is not None:
                self.driver.store = self.store
            # Those that are dead or frozen are found by others.
            calls = (answer(rank.reopen_storage.remote(), REOPEN_S) for rank in self.ranks.handles)
            await asyncio.gather(asyncio.to_thread(old.close), *calls, return_exceptions=True)

    async def detach_storage(self) -> None:
        """Take L3 away, with requests in flight: their reads end as misses. Returns when we and all ranks have let go of it."""
        async with self._swap:
            await self._detach(self.driver)

    async def _detach(self, driver: Driver | None) -> None:
        self.attached = False
        self._changes += 1
        old, self.store = self.store, None
        if driver is not None and not driver.lost:
            driver.detach()
        calls = [answer(rank.detach_storage.remote(), REOPEN_S) for rank in self.ranks.handles]
        if old is not None:
            await asyncio.to_thread(old.close)
        await asyncio.gather(*calls)

    async def attach_storage(self) -> None:
        """L3 is there again, with whatever it holds. Raises :class:`ConfigError` where the deployment has none."""
        if not self.setup.socket:
            raise ConfigError("storage.backend is none, so there is no storage to attach; choose another backend and deploy again")
        async with self._swap:
            if self.attached:
                return
            await asyncio.gather(*(answer(rank.attach_storage.remote(), REOPEN_S) for rank in self.ranks.handles))
            self.attached, self.store = True, open_store(self.setup.socket)
            if self.driver is not None and not self.driver.lost:
                self.driver.attach(self.store)
        await asyncio.to_thread(self._describe)

    async def spaces(self, wanted: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Spaces (hex) of the namespaces, ours and those known to storage, whose records have these fields; with the records. Raises
        :class:`StorageDetached`: what is there is not known, and would be back with it."""
        await self.require_storage()
        known: dict[bytes, Mapping[str, str]] = {}
        if (store := self.store) is not None:
            known |= dict(await asyncio.to_thread(store.described, DROP_S))
        known |= {n.digest(): n.record() for n in (self.setup.namespace, *self.setup.tenants.values())}
        found = {d: r for d, r in known.items() if "page_size" in r and all(r.get(name) == value for name, value in wanted.items())}
        return {space_of(digest).hex(): dict(record) for digest, record in found.items()}

    async def begin_drop(self, space: str, timeout_s: float) -> dict[str, Any]:
        """Everything of a space has left L1 and L2 when it returns, and nothing of it is written to L3 until :meth:`end_drop`."""
        name, gone = await self._fences.begin(bytes.fromhex(space), timeout_s, self.driver, self.setup.first)
        return {"name": name, "device": gone.device, "host": gone.host}

    async def end_drop(self, name: str) -> None:
        """L3 has been cleared. Raises where that took so long that the drop is void."""
        self._fences.end(name, self.driver)

    async def clear_space(self, space: str, timeout_s: float) -> dict[str, int]:
        """Clear L3 of a space: how many objects were removed, and how many a scan finds afterwards. Raises :class:`StoreError`."""
        store, prefix = self.store, bytes.fromhex(space)
        if store is None:
            await self.require_storage()
            return {"storage": 0, "left": 0}
        done = await asyncio.to_thread(ask, store, self.tags, Clear(0, "drop", timeout_s, prefix))
        if done.error:
            raise StoreError(f"storage could not be cleared: {done.error}")
        return {"storage": done.count, "left": await asyncio.to_thread(_count, store, prefix, timeout_s)}

    async def active(self) -> int:
        """Requests under way."""
        return len(self._running().group.active())

    async def where(self, tokens: Sequence[int], tenant: str | None = None) -> dict[str, Any]:
        """What each tier holds of a prompt (:func:`hicache_ray.actors.answers.where`)."""
        prompt, namespace = np.asarray(tokens, dtype=np.int32), self._namespace(tenant)
        return await answers.where(self._running(), self.store, Sought(prompt, namespace, self.tags, self.begun.recipe))

    async def explain(self, rid: str) -> dict[str, Any] | None:
        """Why a request that has ended here went as it did, as :mod:`hicache_ray.explain` tells it; None where it is not known (any more).

        Where nothing was known of its prompt, storage is asked now whether it has it under other names.
        """
        kept, store = self.explainer.find(rid), self.store
        differs: tuple[str, ...] = ()
        if kept is not None and store is not None and lacks_all(kept.told):
            exact = self.setup.config.cache.exact
            try:
                differs = await asyncio.to_thread(foreign_fields, store, kept, self.setup.spec, self.begun.recipe, exact)
            except StoreError:
                differs = ()
        return self.explainer.explain(rid, differs)

    async def stats(self) -> dict[str, Any]:
        """The group's numbers (:func:`hicache_ray.actors.answers.stats`); ``attached``: whether it has L3; where its actors are;
        ``restarted``: why there had to be a new incarnation."""
        return {
            **answers.stats(self._running()),
            "attached": self.attached,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "rank_pids": list(self.begun.pids),
            "restarted": self.begun.why,
        }

    async def check(self) -> None:
        """Raise unless every count and lease is consistent."""
        self._running().group.check()

    async def lost(self) -> str:
        """Why the group has to be started anew; empty while it is well."""
        return self.driver.lost if self.driver is not None else "the cache group has not started"

    async def ping(self) -> int:
        return os.getpid()


def _count(store: Store, prefix: bytes, timeout_s: float) -> int:
    return sum(1 for _ in store.scan(prefix, timeout_s))


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
Coordinator: Any = ray.remote(**OPTIONS)(CoordinatorShell)
