"""The cache group of one Serve replica: its ranks and coordinator, started together, healed together, ended together.

When a rank or the coordinator dies or freezes, the group gets a new incarnation: ranks that still answer stay and keep their loaded model,
the others are replaced; all join a new process group on a new port and start with empty L1 and L2. L3 makes that restart warm.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hicache_ray.actors import names
from hicache_ray.actors.coordinator import Coordinator
from hicache_ray.actors.messages import Begun, GroupSetup, Prompt
from hicache_ray.actors.rank import JOIN_S, RankSetup, drain_s, rank_actor
from hicache_ray.actors.remote import answer, cause, together
from hicache_ray.actors.setup import Prepared, capacities, namespace_of, recipe_of, tenant_namespaces
from hicache_ray.config import Config
from hicache_ray.errors import Cancelled, GroupLost

log = logging.getLogger("hicache_ray.actors")

#: Loading a model may take this long on a busy machine.
START_S = 180.0
#: How long the coordinator may take to begin an incarnation.
ADOPT_S = 30.0
#: While a lost group is being healed, an actor that does not answer a ping within this time is replaced.
PING_S = 2.0
#: An idle group counts as lost when an actor does not answer within this time: the caches of the others are lost with it.
HEALTH_PING_S = 10.0
#: While a request hears nothing for so long, its group is looked after: a frozen actor does not end by itself, and the coordinator's own
#: deadlines are those of a forward. Whoever does not answer within the second time is frozen.
SILENCE_S, SILENT_PING_S = 3.0, 5.0
#: How often a request is resubmitted to a new incarnation before its client is told.
ATTEMPTS = 3
#: How often a group that is being healed may lose another actor.
ROUNDS = 3
#: How long the name of a dead coordinator may stay taken.
NAME_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where a replica's actors go: its placement group (bundle 0 is the replica's own), its names. ``socket``: of its node's storage, empty
    for none."""

    app: str
    replica: str
    group: PlacementGroup | None
    socket: str = ""


@dataclass
class CacheGroup:
    """Owns the actors of one cache group. All methods run on one event loop. ``incarnation``: of the group that serves now, 0 for none."""

    config: Config
    prepared: Prepared
    place: Place
    incarnation: int = 0
    ranks: list[Any] = field(default_factory=list)
    coordinator: Any = None
    _tried: int = 0
    _healing: asyncio.Task[None] | None = None
    _looking: asyncio.Task[str] | None = None
    _recipe: dict[str, str] = field(default_factory=dict)

    async def start(self) -> None:
        """Bring all actors up. Raises :class:`GroupLost` when they do not come up in time, ConfigError where a rank refuses a setting."""
        await self.heal(0, "")

    async def heal(self, seen: int, why: str) -> None:
        """Replace what has failed, unless that has happened since incarnation ``seen``. Whoever comes while it happens waits for it; a
        caller that gives up does not end it. ``why``: for those who ask later. Raises :class:`GroupLost`."""
        if self._healing is None:
            if self.incarnation != seen:
                return
            if seen:
                log.warning("the cache group of replica %s is lost with incarnation %d: %s", self.place.replica, seen, why)
            # In a context of its own: Ray cancels what a request has begun when its client hangs up.
            self._healing = Context().run(asyncio.get_running_loop().create_task, self._rounds(why))
            self._healing.add_done_callback(self._healed)
        await asyncio.shield(self._healing)

    async def _rounds(self, why: str) -> None:
        for left in reversed(range(ROUNDS)):
            try:
                return await self._heal(why)
            except GroupLost:
                if not left:
                    raise

    def _healed(self, task: asyncio.Task[None]) -> None:
        self._healing = None
        if not task.cancelled():
            task.exception()  # told to those who waited, if anybody did

    async def _settled(self) -> None:
        """A group that is being healed is worth the wait, whatever comes of it."""
        if self._healing is not None:
            await asyncio.wait([self._healing])

    async def _heal(self, why: str) -> None:
        """One round. Whoever fails in it is killed, so that the next round replaces it."""
        self._tried += 1
        ranks, fresh = await self._ranks()
        self.ranks = ranks
        if not await self._answers(self.coordinator):
            self.coordinator = await self._new_coordinator()  # its process starts while the ranks load
        loaded = await together(fresh, [r.load.remote() for r in fresh], START_S, "load the model")
        for note in {told["note"] for told in loaded} - {""}:
            log.warning("the ranks of replica %s say: %s", self.place.replica, note)
        if loaded:
            self._recipe = dict(recipe_of(self.config, loaded[0]["engine"]))
        port, patience_s = _free_port(), drain_s(self.config) + JOIN_S
        joining = [r.join.remote(port, self._tried, self._recipe) for r in ranks]
        joined = await together(ranks, joining, patience_s, "meet")
        begun = Begun(self._tried, self._recipe, tuple(j.pid for j in joined), why, all(j.attached for j in joined))
        adopting = [self.coordinator.adopt.remote(ranks, begun)]
        await together([self.coordinator], adopting, ADOPT_S, "start the coordinator")
        self.incarnation = self._tried

    async def _ranks(self) -> tuple[list[Any], list[Any]]:
        """The ranks, those that do not answer replaced; and which of them are new."""
        old = self.ranks or [None] * self.config.model.tp
        alive = await asyncio.gather(*(self._answers(r) for r in old))
        ranks = [r if well else self._new_rank(i) for i, (r, well) in enumerate(zip(old, alive, strict=True))]
        for rank, well in zip(old, alive, strict=True):
            if rank is not None and not well:
                ray.kill(rank)
        return ranks, [r for r, well in zip(ranks, alive, strict=True) if not well]

    async def _answers(self, actor: Any, timeout_s: float = PING_S) -> bool:
        if actor is None:
            return False
        try:
            await answer(actor.ping.remote(), timeout_s)
        except (ray.exceptions.RayError, asyncio.TimeoutError):
            return False
        return True

    def _new_rank(self, rank: int) -> Any:
        capacity = capacities(self.config, self.prepared.spec)
        setup = RankSetup(self.config, rank, self.prepared.folder, capacity, self.place.socket)
        threads = str(self.config.model.threads_per_rank)
        # Set before torch is imported: later it would be too late, and the results would be other bits.
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        gpus = 1 if self.config.model.device == "cuda" else 0
        name = names.rank(self.place.app, self.place.replica, rank, self._tried)  # so that an operator sees which is which
        options = {**self._at(rank + 1), "name": name, "namespace": names.NAMESPACE, "num_gpus": gpus, "runtime_env": {"env_vars": env}}
        return rank_actor(self.config).options(**options).remote(setup)

    async def _new_coordinator(self) -> Any:
        """In the place of the old one, whose name is free only when Ray has seen it die."""
        if self.coordinator is not None:
            ray.kill(self.coordinator)
            self.coordinator = None
        namespace = namespace_of(self.config, self.prepared.model_id)
        tenants = tenant_namespaces(self.config, namespace)
        setup = GroupSetup(self.config, self.prepared.spec, namespace, self.place.socket, tenants, first=not self.incarnation)
        name = names.coordinator(self.place.app, self.place.replica)
        until = asyncio.get_running_loop().time() + NAME_S
        while True:
            try:
                return Coordinator.options(name=name, namespace=names.NAMESPACE, **self._at(0)).remote(setup)
            except ValueError as error:
                if asyncio.get_running_loop().time() > until:
                    raise GroupLost(f"the old coordinator of this cache group does not end: {error}") from error
                await asyncio.sleep(0.05)

    def _at(self, bundle: int) -> dict[str, Any]:
        if self.place.group is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self.place.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}

    async def events(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        """A request's events; see :meth:`CoordinatorShell.generate`. A lost group is healed and the request resubmitted: decoding is
        greedy and exact, so what was sent already is skipped, not sent twice."""
        sent = 0
        for attempt in range(ATTEMPTS):
            await self._settled()
            seen, skip = self.incarnation, sent
            try:
                async with aclosing(self._attempt(prompt)) as parts:
                    async for event in parts:
                        if "tokens" in event:
                            drop = min(skip, len(event["tokens"]))
                            skip -= drop
                            event = {key: values[drop:] for key, values in event.items()}
                            sent += len(event["tokens"])
                            if not event["tokens"]:
                                continue
                        yield event
                return
            except (GroupLost, ray.exceptions.RayError) as error:
                why = f"{type(error).__name__}: {error}"
                if attempt + 1 == ATTEMPTS:
                    raise GroupLost(f"request {prompt.rid} was lost {ATTEMPTS} times with its cache group: {error}") from error
            await self.heal(seen, why)

    async def _attempt(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        """One try with the present incarnation. Abandoning it cancels the request there. Raises what ended it, or RayError."""
        coordinator, ended = self.coordinator, False
        if coordinator is None:
            raise GroupLost("the cache group has no coordinator")
        stream = coordinator.generate.options(num_returns="streaming").remote(prompt)
        try:
            async with aclosing(self._heard(aiter(stream))) as parts:
                async for event in parts:
                    yield event
            ended = True
        except ray.exceptions.TaskCancelledError as error:
            raise Cancelled(f"request {prompt.rid} was cancelled") from error
        except ray.exceptions.RayError as error:
            ended = True
            raise cause(error) from None
        finally:
            if not ended:
                Context().run(coordinator.cancel.remote, prompt.rid)  # not a child of what is being cancelled

    async def _heard(self, refs: AsyncIterator[Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Events as they come. Raises :class:`GroupLost` where they stay away because an actor does not answer."""
        while True:
            coming = asyncio.ensure_future(_next(refs))
            try:
                while not (await asyncio.wait([coming], timeout=SILENCE_S))[0]:
                    if why := await self._silent():
                        raise GroupLost(why)
                if (event := coming.result()) is None:
                    return
            finally:
                coming.cancel()
            yield event

    async def _silent(self) -> str:
        """Why nothing can be heard of this group: an actor that does not answer; empty where all do. One look for all who wait."""
        if self._looking is None or self._looking.done():
            self._looking = Context().run(asyncio.get_running_loop().create_task, self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> str:
        actors = {"the coordinator": self.coordinator, **{f"rank {i}": rank for i, rank in enumerate(self.ranks)}}
        for patience_s in (SILENT_PING_S, PING_S):  # twice: the first time it may have been this process that stood still
            alive = await asyncio.gather(*(self._answers(actor, patience_s) for actor in actors.values()))
            actors = {name: actor for (name, actor), well in zip(actors.items(), alive, strict=True) if not well}
        return f"{' and '.join(actors)} did not answer within {SILENT_PING_S:g} s; frozen, or gone" if actors else ""

    async def healthy(self) -> bool:
        """Whether all actors answer and the group is not lost; heals when not, and then says no."""
        await self._settled()
        seen, actors, coordinator = self.incarnation, [*self.ranks, self.coordinator], self.coordinator
        alive = await asyncio.gather(*(self._answers(a, HEALTH_PING_S) for a in actors))
        why = f"{alive.count(False)} of its {len(actors)} actors did not answer a health check within {HEALTH_PING_S:g} s"
        if all(alive):
            try:
                why = await answer(coordinator.lost.remote(), HEALTH_PING_S)
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                why = f"the coordinator did not answer: {type(error).__name__}"
            if not why:
                return True
        await self.heal(seen, why)
        return False

    def stop(self) -> None:
        """End all actors now."""
        for task in (self._healing, self._looking):
            if task is not None:
                task.cancel()
        for actor in [self.coordinator, *self.ranks]:
            if actor is not None:
                ray.kill(actor)
        self.ranks, self.coordinator = [], None


async def _next(refs: AsyncIterator[Any]) -> dict[str, Any] | None:
    """The next event of a stream, None at its end."""
    async for ref in refs:
        event: dict[str, Any] = await ref
        return event
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
