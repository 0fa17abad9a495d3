"""The admin endpoint: flush, stats, config over HTTP for all replicas of an application. Loopback by default; everything but health needs
the bearer token.

The app is made by :func:`hicache_ray.actors.admin.create_app`, hosted by uvicorn in an actor of its own, so that it answers while replicas
come and go.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import uvicorn

from hicache_ray.actors import dropping, names
from hicache_ray.actors.admin import UnknownNamespace, create_app, unknown_request
from hicache_ray.actors.remote import answer, living
from hicache_ray.errors import Busy, ConfigError, HiCacheError

#: Longest wait for one actor's answer to a question.
ASK_S = 10.0
#: Longest time that a flush waits for backups to end, and that storage takes to empty itself.
FLUSH_S = 30.0
#: Longest wait for the endpoint to bind.
START_S = 60.0
STORAGE = "storage"


class ClusterBackend:
    """The coordinators of one application and the storage actors of its store, found by name at every question."""

    def __init__(self, app: str, store: str, shown: Mapping[str, Any]) -> None:
        self._app, self._store, self._shown = app, store, shown

    def config(self) -> Mapping[str, Any]:
        return self._shown

    async def flush(self, tiers: Sequence[str], timeout_s: float | None, preserve: bool = False) -> int:
        replicas = await self._some_coordinators()
        if preserve or STORAGE in tiers:
            await self._all(replicas, "require_storage", preserve, wait_s=ASK_S)
        if timeout_s is None:
            # Whoever does not say will not flush either.
            busy = [name for name, n in (await self._ask(replicas, "active")).items() if n and not isinstance(n, Exception)]
            if busy:
                raise Busy(f"requests are under way on {len(busy)} of {len(replicas)} replicas; give timeout_s to wait for them")
        # First all empty what is their own, and have nothing in flight from before; then one of them empties the stores of all nodes.
        near = [tier for tier in tiers if tier != STORAGE]
        await self._all(replicas, "flush", near, timeout_s, preserve, wait_s=(timeout_s or FLUSH_S) + ASK_S + (FLUSH_S if preserve else 0))
        if STORAGE in tiers:
            name, first = next(iter(replicas.items()))
            await self._all({name: first}, "flush", [STORAGE], timeout_s or FLUSH_S, wait_s=(timeout_s or FLUSH_S) + FLUSH_S + ASK_S)
            # Those as well that have begun meanwhile: they may know what was there before.
            await self._all(await self._some_coordinators(), "forget_storage", wait_s=ASK_S)
            if headless := (await self._found()).headless:
                # Its ranks may still write what they were told to by a coordinator that is gone.
                raise HiCacheError(f"replica {headless[0]} is being started anew and may have written to storage; flush again")
        return len(replicas)

    async def drop(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        replicas = await self._some_coordinators()
        spaces: dict[str, Any] = {}
        calls = (answer(c.spaces.remote(dict(fields)), ASK_S) for c in replicas.values())
        told: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        _require_all(dict(zip(replicas, told, strict=True)))
        for found in told:
            spaces |= found
        if not spaces:
            raise UnknownNamespace(f"there is no namespace with {', '.join(f'{k} {v!r}' for k, v in fields.items())}; nothing was dropped")
        removed = await dropping.drop(self._found, sorted(spaces))
        left = removed.pop("left")
        return {"dropped": list(spaces.values()), "removed": removed, "left": left, "replicas": len(replicas)}

    async def plug(self, attached: bool) -> int:
        replicas = await self._some_coordinators()
        method = "attach_storage" if attached else "detach_storage"
        await self._all(replicas, method, wait_s=ASK_S)
        return len(replicas)

    async def _all(self, actors: Mapping[str, Any], method: str, *args: Any, wait_s: float) -> None:
        """Raise what kept one of them from doing it."""
        calls = (answer(getattr(actor, method).remote(*args), wait_s) for actor in actors.values())
        _require_all(dict(zip(actors, await asyncio.gather(*calls, return_exceptions=True), strict=True)))

    async def _some_coordinators(self) -> Mapping[str, Any]:
        replicas = await self._coordinators()
        if not replicas:
            raise HiCacheError("no replica is up, so nobody can do that; try again when one is")
        return replicas

    async def stats(self) -> Mapping[str, Any]:
        replicas = _shown(await self._ask(await self._coordinators(), "stats"))
        stores = _shown(await self._ask(await self._named(lambda n: names.is_storage(n, self._store)), "stats"))
        totals = {"device": 0, "host": 0, "storage": 0, "computed": 0}
        for row in replicas.values():
            for source, count in row.get("tokens", {}).items():
                totals[source] += count
        requests = sum(r.get("requests", 0) for r in replicas.values())
        return {"tokens": totals, "requests": requests, "replicas": replicas, "storage": stores, "gateway": {"pid": os.getpid()}}

    async def where(self, tokens: Sequence[int], tenant: str | None = None) -> Mapping[str, Any]:
        return _shown(await self._ask(await self._coordinators(), "where", list(tokens), tenant))

    async def explain(self, rid: str) -> Mapping[str, Any]:
        answers = await self._ask(await self._some_coordinators(), "explain", rid)
        for replica, told in answers.items():
            if isinstance(told, dict):
                return {"replica": replica, **told}
        if silent := [replica for replica, told in answers.items() if told is not None]:
            raise HiCacheError(f"replica {', '.join(silent)} did not say whether it knows the request; try again")
        raise unknown_request(rid)

    async def _coordinators(self) -> Mapping[str, Any]:
        return await self._named(lambda n: names.is_coordinator(n, self._app))

    async def _found(self) -> dropping.Found:
        """All replicas, also those that have no coordinator at this moment."""
        app = self._app
        actors = await self._named(lambda n: names.is_coordinator(n, app) or names.replica_of_rank(n, app) is not None)
        coordinators = {_replica(name): actor for name, actor in actors.items() if names.is_coordinator(name, app)}
        replicas = {replica for name in actors if (replica := names.replica_of_rank(name, app)) is not None}
        return dropping.Found(list(coordinators.values()), sorted(replicas - set(coordinators)))

    async def _named(self, wanted: Any) -> Mapping[str, Any]:
        """Living actors by name; the question blocks, so it is asked beside the loop. Raises :class:`HiCacheError`."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(living, wanted), ASK_S)
        except asyncio.TimeoutError:
            raise HiCacheError(f"Ray's control service did not answer within {ASK_S:g} s; try again") from None
        except (ray.exceptions.RayError, RuntimeError) as error:
            raise HiCacheError(f"Ray's control service could not be asked: {type(error).__name__}: {error}; try again") from error

    async def _ask(self, actors: Mapping[str, Any], method: str, *args: Any) -> dict[str, Any]:
        """The answers of all; in the place of one that cannot be had, why not."""

        async def one(actor: Any) -> Any:
            try:
                return await answer(getattr(actor, method).remote(*args), ASK_S)
            except Exception as error:  # of one that is dead, or frozen, or wrong: the others are worth knowing
                return error

        answers = await asyncio.gather(*(one(a) for a in actors.values()))
        return {_replica(name): answer for name, answer in zip(actors, answers, strict=True)}


def _replica(name: str) -> str:
    """Of a coordinator's name; or the node, of a store's."""
    return name.rpartition(":")[2]


def _shown(answers: Mapping[str, Any]) -> dict[str, Any]:
    """For people: an error as a row."""
    return {name: {"error": f"{type(told).__name__}: {told}"} if isinstance(told, Exception) else told for name, told in answers.items()}


def _require_all(outcomes: Mapping[str, Any]) -> None:
    """Raise what kept a replica from doing it: that it is busy first of all, since the caller can do something about that."""
    errors = {_replica(name): error for name, error in outcomes.items() if isinstance(error, BaseException)}
    for name, error in sorted(errors.items(), key=lambda item: not isinstance(item[1], Busy)):
        if isinstance(error, HiCacheError):
            raise error
        if isinstance(error, (ray.exceptions.RayError, asyncio.TimeoutError)):
            raise HiCacheError(f"replica {name} did not complete that: {type(error).__name__}; try again") from error
        raise error


@dataclass(frozen=True)
class GatewaySetup:
    """What the admin endpoint is told: whom it speaks for, what it shows as configuration, where it listens, its token."""

    app: str
    store: str
    shown: Mapping[str, Any]
    host: str
    port: int
    token: str = field(repr=False)


class GatewayShell:
    """Hosts the admin application on a thread of its own, from birth, so that it answers again when Ray has restarted it."""

    def __init__(self, setup: GatewaySetup) -> None:
        self._setup = setup
        app = create_app(ClusterBackend(setup.app, setup.store, setup.shown), setup.token)
        self._server = uvicorn.Server(uvicorn.Config(app, host=setup.host, port=setup.port, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._serve, name="hicache-admin", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):  # uvicorn's way to say that it could not bind
            self._server.run()

    def port(self) -> int:
        """Where it answers. Raises :class:`ConfigError` when the address is taken."""
        until = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                where = f"{self._setup.host}:{self._setup.port}"
                raise ConfigError(f"the admin endpoint cannot bind to {where}; choose another admin.port (or admin.host)")
            time.sleep(0.02)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.should_exit = True
        self._thread.join(ASK_S)


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 2}
GatewayActor: Any = ray.remote(**OPTIONS)(GatewayShell)
