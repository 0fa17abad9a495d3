"""The cache group of one Serve replica: its ranks and coordinator, started together, healed together, ended together.

When a rank or the coordinator dies or freezes, the group gets a new incarnation: ranks that still answer stay and keep their loaded model,
the others are replaced; all join a new process group on a new port and start with empty L1 and L2. L3 makes that restart warm.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hicache_ray.actors import names
from hicache_ray.actors.coordinator import Coordinator, GroupSetup
from hicache_ray.actors.rank import RankActor, RankSetup
from hicache_ray.actors.setup import Prepared, capacities, namespace_of, recipe_of
from hicache_ray.config import Config
from hicache_ray.errors import GroupLost

#: Loading a model and joining the group may take this long on a busy machine.
START_S = 180.0
#: A rank that does not answer a ping within this time counts as frozen.
PING_S = 2.0
#: How often a request is resubmitted to a new incarnation before its client is told.
ATTEMPTS = 3


@dataclass(frozen=True)
class Place:
    """Where a replica's actors go: its placement group (bundle 0 is the replica's own), its names, the arena of its node."""

    app: str
    replica: str
    group: PlacementGroup | None
    socket: str


@dataclass(frozen=True)
class Answer:
    """A finished request: what was generated, and how it was served."""

    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    report: dict[str, Any]


@dataclass
class CacheGroup:
    """Owns the actors of one cache group. All methods run on one event loop."""

    config: Config
    prepared: Prepared
    place: Place
    incarnation: int = 0
    ranks: list[Any] = field(default_factory=list)
    coordinator: Any = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _recipe: dict[str, str] = field(default_factory=dict)

    async def start(self) -> None:
        """Bring all actors up. Raises :class:`GroupLost` when they do not come up in time."""
        async with self._lock:
            await self._heal()

    async def heal(self, seen: int) -> None:
        """Replace what has failed, unless that has happened since incarnation ``seen``."""
        async with self._lock:
            if self.incarnation == seen:
                await self._heal()

    async def _heal(self) -> None:
        alive = await asyncio.gather(*(self._answers(r) for r in self.ranks))
        for rank, well in zip(self.ranks, alive, strict=True):
            if not well:
                ray.kill(rank)
        old = [r if well else None for r, well in zip(self.ranks, alive, strict=True)] or [None] * self.config.model.tp
        self.ranks = [r if r is not None else self._new_rank(i) for i, r in enumerate(old)]
        fresh = [r for r, before in zip(self.ranks, old, strict=True) if before is None]
        loaded = await _all([r.load.remote() for r in fresh], START_S, "load the model")
        if loaded:
            self._recipe = dict(recipe_of(self.config, loaded[0]["engine"]))
        if self.coordinator is not None and not await self._answers(self.coordinator):
            ray.kill(self.coordinator)
            self.coordinator = None
        if self.coordinator is None:
            self.coordinator = self._new_coordinator()
        self.incarnation += 1
        port = _free_port()
        await _all([r.join.remote(port, self.incarnation, self._recipe) for r in self.ranks], START_S, "join the group")
        await _all([self.coordinator.adopt.remote(self.ranks, self.incarnation)], START_S, "start the coordinator")

    async def _answers(self, actor: Any) -> bool:
        try:
            await asyncio.wait_for(_ref(actor.ping.remote()), PING_S)
        except (ray.exceptions.RayError, asyncio.TimeoutError):
            return False
        return True

    def _new_rank(self, rank: int) -> Any:
        capacity = capacities(self.config, self.prepared.spec)
        setup = RankSetup(self.config, rank, self.prepared.folder, capacity, self.place.socket)
        threads = str(self.config.model.threads_per_rank)
        # Set before torch is imported: later it would be too late, and the results would be other bits.
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        return RankActor.options(**self._at(rank + 1), runtime_env={"env_vars": env}).remote(setup)

    def _new_coordinator(self) -> Any:
        namespace = namespace_of(self.config, self.prepared.model_id)
        setup = GroupSetup(self.config, self.prepared.spec, namespace, self._recipe, self.place.socket)
        name = names.coordinator(self.place.app, self.place.replica)
        return Coordinator.options(name=name, namespace=names.NAMESPACE, **self._at(0)).remote(setup)

    def _at(self, bundle: int) -> dict[str, Any]:
        if self.place.group is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self.place.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}

    async def events(self, rid: str, tokens: Sequence[int], new_tokens: int, digests: bool = False) -> AsyncIterator[dict[str, Any]]:
        """A request's events; see :meth:`CoordinatorShell.generate`. A lost group is healed and the request resubmitted: decoding is
        greedy and exact, so what was sent already is skipped, not sent twice."""
        sent = 0
        for attempt in range(ATTEMPTS):
            seen, skip = self.incarnation, sent
            try:
                async for event in self._attempt(f"{rid}.{seen}", list(tokens), new_tokens, digests):
                    if "tokens" in event:
                        drop = min(skip, len(event["tokens"]))
                        skip -= drop
                        event = {key: values[drop:] for key, values in event.items()}
                        sent += len(event["tokens"])
                        if not event["tokens"]:
                            continue
                    yield event
                return
            except (GroupLost, ray.exceptions.RayActorError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise GroupLost(f"request {rid} was lost {ATTEMPTS} times with its cache group: {error}") from error
                await self.heal(seen)

    async def _attempt(self, rid: str, tokens: list[int], new_tokens: int, digests: bool) -> AsyncIterator[dict[str, Any]]:
        """One try with the present incarnation. Abandoning it cancels the request there."""
        coordinator, ended = self.coordinator, False
        stream = coordinator.generate.options(num_returns="streaming").remote(rid, tokens, new_tokens, digests)
        try:
            async for ref in stream:
                yield await ref
            ended = True
        except ray.exceptions.RayError:
            ended = True
            raise
        finally:
            if not ended:
                coordinator.cancel.remote(rid)

    async def healthy(self) -> bool:
        """Whether all actors answer; heals when not, and then says no."""
        seen = self.incarnation
        if all(await asyncio.gather(*(self._answers(a) for a in [*self.ranks, self.coordinator]))):
            return True
        await self.heal(seen)
        return False

    def stop(self) -> None:
        """End all actors now."""
        for actor in [self.coordinator, *self.ranks]:
            if actor is not None:
                ray.kill(actor)
        self.ranks, self.coordinator = [], None


async def _ref(ref: Any) -> Any:
    return await ref


async def _all(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Results of calls made at once. Raises :class:`GroupLost` when one does not come in time; other errors as they are."""
    try:
        return list(await asyncio.wait_for(asyncio.gather(*refs), timeout_s))
    except asyncio.TimeoutError:
        raise GroupLost(f"the cache group could not {what} within {timeout_s:g} s") from None
    except ray.exceptions.RayActorError as error:
        raise GroupLost(f"the cache group could not {what}: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
