"""The admin endpoint: flush, stats, config over HTTP for all replicas of an application. Loopback by default; everything but health needs
the bearer token.

The app is made by :func:`create_app` over any :class:`Backend`, hosted by uvicorn in an actor of its own, so that it answers while replicas
come and go.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import ray
import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from hicache_ray.actors import names
from hicache_ray.errors import Busy, GroupLost, HiCacheError

#: Longest wait for one replica's answer to a question.
ASK_S = 10.0
START_S = 60.0


class Flush(BaseModel):
    """Body of ``POST /flush``. Without ``timeout_s`` a flush is refused while requests run."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[Literal["device", "host", "storage"]] = Field(default=["device", "host"], min_length=1)
    timeout_s: float | None = Field(None, gt=0, le=600)


class Where(BaseModel):
    """Body of ``POST /where``: a prompt."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int] = Field(min_length=1)


class Backend(Protocol):
    """What the endpoints ask of the cluster."""

    async def flush(self, tiers: Sequence[str], timeout_s: float | None) -> int:
        """Flush all replicas; how many there were. Raises :class:`Busy`."""
        ...

    async def stats(self) -> Mapping[str, Any]: ...

    async def where(self, tokens: Sequence[int]) -> Mapping[str, Any]: ...

    def config(self) -> Mapping[str, Any]: ...


def create_app(backend: Backend, token: str) -> FastAPI:
    """The admin application. ``token``: the bearer token, compared in constant time."""
    app = FastAPI(title="hicache_ray admin")
    scheme = HTTPBearer(auto_error=False)

    def trusted(given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        if given is None or not secrets.compare_digest(given.credentials.encode(), token.encode()):
            raise HTTPException(401, "send the admin token as 'Authorization: Bearer ...'", {"WWW-Authenticate": "Bearer"})

    guarded = [Depends(trusted)]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/flush", dependencies=guarded)
    async def flush(body: Flush | None = None) -> dict[str, Any]:
        body = body or Flush()
        try:
            count = await backend.flush(body.tiers, body.timeout_s)
        except Busy as error:
            raise HTTPException(409, str(error)) from error
        except HiCacheError as error:
            raise HTTPException(503, str(error)) from error
        return {"flushed": body.tiers, "replicas": count}

    @app.get("/stats", dependencies=guarded)
    async def stats() -> Mapping[str, Any]:
        return await backend.stats()

    @app.post("/where", dependencies=guarded)
    async def where(body: Where) -> Mapping[str, Any]:
        return await backend.where(body.input_ids)

    @app.get("/config", dependencies=guarded)
    async def config() -> Mapping[str, Any]:
        return backend.config()

    return app


class ClusterBackend:
    """The coordinators of one application and the storage actors of its store, found by name at every question."""

    def __init__(self, app: str, store: str, shown: Mapping[str, Any]) -> None:
        self._app, self._store, self._shown = app, store, shown

    def config(self) -> Mapping[str, Any]:
        return self._shown

    async def flush(self, tiers: Sequence[str], timeout_s: float | None) -> int:
        replicas = await self._coordinators()
        if timeout_s is None:
            busy = [name for name, n in (await self._ask(replicas, "active")).items() if n]
            if busy:
                raise Busy(f"requests are under way on {len(busy)} of {len(replicas)} replicas; give timeout_s to wait for them")
        # The last of these to empty L3 does so when all others have nothing in flight from before.
        wait = (timeout_s or ASK_S) + ASK_S
        await asyncio.wait_for(asyncio.gather(*(c.flush.remote(list(tiers), timeout_s) for c in replicas.values())), wait)
        if "storage" in tiers:
            await self._ask(replicas, "forget_storage")
        return len(replicas)

    async def stats(self) -> Mapping[str, Any]:
        replicas = await self._ask(await self._coordinators(), "stats")
        stores = await self._ask(await self._named(lambda n: names.is_storage(n, self._store)), "stats")
        totals = {"device": 0, "host": 0, "storage": 0, "computed": 0}
        for row in replicas.values():
            for source, count in row.get("tokens", {}).items():
                totals[source] += count
        return {"tokens": totals, "requests": sum(r.get("requests", 0) for r in replicas.values()), "replicas": replicas, "storage": stores}

    async def where(self, tokens: Sequence[int]) -> Mapping[str, Any]:
        return await self._ask(await self._coordinators(), "where", list(tokens))

    async def _coordinators(self) -> dict[str, Any]:
        return await self._named(lambda n: names.is_coordinator(n, self._app))

    async def _named(self, wanted: Any) -> dict[str, Any]:
        """Living actors by name. Listing is a blocking call of Ray's, so it runs beside the loop."""

        def find() -> dict[str, Any]:
            found = {}
            for entry in ray.util.list_named_actors(all_namespaces=True):
                if entry["namespace"] == names.NAMESPACE and wanted(entry["name"]):
                    with contextlib.suppress(ValueError):  # it died in between
                        found[entry["name"]] = ray.get_actor(entry["name"], names.NAMESPACE)
            return found

        return await asyncio.wait_for(asyncio.to_thread(find), ASK_S)

    async def _ask(self, actors: Mapping[str, Any], method: str, *args: Any) -> dict[str, Any]:
        """The answers of all; an actor that does not answer is answered for with an ``error`` (questions), or left out (counts)."""

        async def one(actor: Any) -> Any:
            try:
                return await asyncio.wait_for(_ref(getattr(actor, method).remote(*args)), ASK_S)
            except (ray.exceptions.RayError, GroupLost, asyncio.TimeoutError) as error:
                return {"error": f"{type(error).__name__}: {error}"} if method in ("stats", "where") else 0

        answers = await asyncio.gather(*(one(a) for a in actors.values()))
        return {name.rsplit(":", 1)[-1]: answer for name, answer in zip(actors, answers, strict=True)}


async def _ref(ref: Any) -> Any:
    return await ref


class GatewayShell:
    """Hosts the admin application. Lives until it is killed."""

    def __init__(self, app: str, store: str, shown: Mapping[str, Any], token: str) -> None:
        self._app = create_app(ClusterBackend(app, store, shown), token)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def serve(self, host: str, port: int) -> int:
        """Bind and answer from now on; returns the port. Raises :class:`HiCacheError` when the address is taken."""
        self._server = uvicorn.Server(uvicorn.Config(self._app, host=host, port=port, log_level="warning", lifespan="off"))
        self._task = asyncio.get_running_loop().create_task(_quietly(self._server))
        until = asyncio.get_running_loop().time() + START_S
        while not self._server.started:
            if self._task.done() or asyncio.get_running_loop().time() > until:
                raise HiCacheError(f"the admin endpoint cannot bind to {host}:{port}; choose another admin.port")
            await asyncio.sleep(0.02)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait_for(self._task, ASK_S)


async def _quietly(server: uvicorn.Server) -> None:
    with contextlib.suppress(SystemExit):  # uvicorn's way to say that it could not bind
        await server.serve()


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
GatewayActor: Any = ray.remote(**OPTIONS)(GatewayShell)
