"""The coordinator actor: a named shell around the group's driver. Free of torch; its control messages are few, no page byte passes here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import ray

from hicache_ray import lengths
from hicache_ray.actors.driver import Driver
from hicache_ray.actors.remote import answer
from hicache_ray.actors.setup import capacities, settings_of
from hicache_ray.ask import ask, describe, tags_of
from hicache_ray.cache import Cache
from hicache_ray.config import Config
from hicache_ray.errors import GroupLost, StoreError
from hicache_ray.explain import differing_fields
from hicache_ray.group import Group
from hicache_ray.keys import Namespace, page_keys
from hicache_ray.match import match
from hicache_ray.records import Lane, Lookup, Outcome, Record, Tokens, lane_of
from hicache_ray.residency import Residency
from hicache_ray.resume import ORDER
from hicache_ray.spec import CacheSpec, Tier
from hicache_ray.storage import ArenaClient
from hicache_ray.story import Ended, Request, Sampled

#: How long a rank may take to let go of storage.
REOPEN_S = 5.0


@dataclass(frozen=True)
class GroupSetup:
    """What a coordinator needs to know of its group. ``socket``: of the arena, empty for none."""

    config: Config
    spec: CacheSpec
    namespace: Namespace
    socket: str


@dataclass(frozen=True)
class Begun:
    """A new incarnation. ``recipe``: of the canonical bytes, which the ranks' engine tells; ``pids``: the ranks' processes; ``why``: what
    ended the one before, empty for the first."""

    incarnation: int = 0
    recipe: Mapping[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    why: str = ""


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
        self.store = ArenaClient(setup.socket) if setup.socket else None
        self.tags: Mapping[str, tuple[bytes, ...]] = {}
        self.ranks = RankHandles(())
        self.begun = Begun()

    async def adopt(self, ranks: Sequence[Any], begun: Begun) -> None:
        """Begin a new incarnation with these ranks, which have joined it; L1 and L2 start empty."""
        if self.driver is not None:
            await self.driver.close()
        setup, self.begun = self.setup, begun
        self.tags = tags_of(setup.spec, begun.recipe)
        res = Residency(setup.spec, capacities(setup.config, setup.spec))
        cache = Cache(res, settings_of(setup.config))
        # One request runs, the others wait for it.
        group = Group(cache, time.monotonic, begun.incarnation, setup.config.engine.max_queue + 1)
        self.ranks = RankHandles(ranks)
        self.driver = Driver(cache, self.ranks, self.store, self.tags, group)
        await asyncio.to_thread(self._describe)

    def _describe(self) -> None:
        """Readable records for whoever asks why something missed; storage may be down, then there are none."""
        if self.store is None:
            return
        try:
            describe(self.store, self.setup.spec, self.begun.recipe, 1.0)
            self.store.describe(self.setup.namespace.digest(), self.setup.namespace.record(), 1.0)
        except StoreError:
            return

    def _running(self) -> Driver:
        if self.driver is None:
            raise GroupLost("the cache group has not started")
        return self.driver

    async def generate(self, rid: str, tokens: Sequence[int], new_tokens: int, digests: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Events of a request as plain data: ``{"tokens", "logprobs"}`` as they come, then ``{"report"}``. Raises what ended it."""
        request = Request(rid, np.asarray(tokens, dtype=np.int32), self.setup.namespace, new_tokens, digests=digests)
        async for event in self._running().serve(request):
            if isinstance(event, Sampled):
                yield {"tokens": event.tokens, "logprobs": event.logprobs}
            elif isinstance(event, Ended) and event.report is not None:
                yield {"report": asdict(event.report)}

    async def cancel(self, rid: str) -> None:
        self._running().cancel(rid)

    async def flush(self, tiers: Sequence[str], timeout_s: float | None = None) -> None:
        await self._running().flush([Tier(t) for t in tiers], timeout_s)

    async def forget_storage(self) -> None:
        """Somebody else has emptied L3: nothing counts as sealed any more."""
        if self.driver is not None:
            self.driver.cache.res.index.clear_durable()

    async def storage_died(self) -> None:
        """The node's storage has crashed. We and the ranks let go of its memory, so that there is room for the next incarnation, and find
        that by ourselves; what it knew is gone."""
        await self.forget_storage()
        if self.store is None:
            return
        old, self.store = self.store, ArenaClient(self.setup.socket)
        if self.driver is not None:
            self.driver.store = self.store
        # Those that are dead or frozen are found by others.
        calls = (answer(rank.reopen_storage.remote(), REOPEN_S) for rank in self.ranks.handles)
        await asyncio.gather(asyncio.to_thread(old.close), *calls, return_exceptions=True)

    async def active(self) -> int:
        """Requests under way."""
        return len(self._running().group.active())

    async def where(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What each tier holds of a prompt: pages per component, and the length resumable from that tier alone. Changes nothing.

        ``differs``: where L3 cannot give all of it, the fields of namespace or objects by which what it has of the prompt differs from what
        this group reads.
        """
        driver, spec = self._running(), self.setup.spec
        prompt = np.asarray(tokens, dtype=np.int32)
        path = driver.cache.path(page_keys(self.setup.namespace, prompt), prompt)
        settings = driver.cache.settings
        allowed = lengths.within(len(prompt) + 1, spec.page_size, settings.step(spec))
        found = match(driver.cache.res, path, allowed, not settings.exact)
        differs: tuple[str, ...] = ()
        if self.store is not None:
            told: dict[str, tuple[int, ...]] = {}
            for keys, names in driver.cache.questions(found):
                answer = await asyncio.to_thread(ask, self.store, self.tags, Lookup(0, "where", keys, names, 2.0))
                told |= answer.found
            found = found.with_storage(told)
            if found.longest(Tier.STORAGE) < found.ceiling:
                differs = await self._differs(prompt)
        held = {t.value: {name: bits.bit_count() for name, bits in found.present.get(t, {}).items()} for t in ORDER}
        resumable = {t.value: found.longest(t) * spec.page_size for t in ORDER}
        return {"held": held, "resumable": resumable, "pages": len(found.keys), "differs": differs}

    async def _differs(self, prompt: Tokens) -> tuple[str, ...]:
        setup = self.setup
        assert self.store is not None
        try:
            return await asyncio.to_thread(differing_fields, self.store, setup.namespace, prompt, setup.spec, self.begun.recipe)
        except StoreError:
            return ()

    async def stats(self) -> dict[str, Any]:
        """Per tier and component: capacity and use in pages, and counters; tokens by source; calls to ranks and storage.

        ``requests``: served since the incarnation began; ``active``: under way; ``restarted``: why there had to be a new incarnation.
        """
        driver = self._running()
        res = driver.cache.res
        tiers: dict[str, dict[str, Any]] = {}
        for (tier, name), counters in res.counters.items():
            row = asdict(counters)
            if (tier, name) in res.pools:
                pool = res.pools[(tier, name)]
                row |= {"capacity": pool.capacity, "used": pool.cached, "held": pool.held, "free": pool.free}
                row["used_other"] = res.others((tier, name))
            row["page_bytes"] = self.setup.spec[name].page_bytes(self.setup.spec.page_size)
            tiers.setdefault(tier.value, {})[name] = row
        return {
            "incarnation": driver.group.incarnation,
            "requests": driver.cache.requests,
            "active": len(driver.group.active()),
            "tokens": dict(driver.cache.tokens),
            "tiers": tiers,
            "calls": dict(driver.calls),
            "leases": len(res.leases.open()),
            "lost": driver.lost,
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


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
Coordinator: Any = ray.remote(**OPTIONS)(CoordinatorShell)
