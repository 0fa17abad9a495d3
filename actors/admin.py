"""The admin application: routes, bodies, and the guard before them. Over any :class:`Backend`."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import Self

from hicache_ray.errors import Busy, ConfigError, HiCacheError, StorageDetached
from hicache_ray.explain import KEPT

#: The only path that needs no token.
OPEN = "/health"
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Flush(BaseModel):
    """Body of ``POST /flush``. Without ``timeout_s`` a flush is refused while requests run. ``preserve``: what only device and host have
    is written to storage first."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[Literal["device", "host", "storage"]] = Field(default=["device", "host"], min_length=1)
    timeout_s: float | None = Field(None, gt=0, le=600)
    preserve: bool = False

    @model_validator(mode="after")
    def _kept_somewhere(self) -> Self:
        if self.preserve and "storage" in self.tiers:
            raise ValueError("preserve keeps in storage what device and host lose, and this flush empties storage; leave one of them out")
        return self


class Where(BaseModel):
    """Body of ``POST /where``: a prompt, and whose it is (none: the deployment's own namespace)."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[Token] = Field(min_length=1)
    tenant: str | None = None


class Fields(BaseModel):
    """By which of its readable fields a namespace is known; all that are given must agree."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    revision: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    page_size: str | None = None


class Drop(BaseModel):
    """Body of ``POST /drop``: a tenant by its name, or namespaces by fields of theirs."""

    model_config = ConfigDict(extra="forbid")

    tenant: str | None = Field(None, min_length=1)
    namespace: Fields | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.tenant is None) == (self.namespace is None) or (self.namespace is not None and not self.fields()):
            raise ValueError("say what to drop: the name of a tenant, or a namespace with one of its fields at least")
        return self

    def fields(self) -> dict[str, str]:
        if self.namespace is None:
            return {"tenant": str(self.tenant)}
        return self.namespace.model_dump(exclude_none=True)


class Backend(Protocol):
    """What the endpoints ask of the cluster."""

    async def flush(self, tiers: Sequence[str], timeout_s: float | None, preserve: bool = False) -> int:
        """Flush all replicas; how many there were. Raises :class:`Busy`, :class:`StorageDetached`, another :class:`HiCacheError` where it
        is not complete."""
        ...

    async def drop(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        """Drop the namespaces with these fields; what was removed. Raises :class:`Busy`, :class:`StorageDetached`,
        :class:`UnknownNamespace`, another :class:`HiCacheError` where it is not complete."""
        ...

    async def plug(self, attached: bool) -> int:
        """Take storage away from all replicas, or give it back; how many there were. Raises :class:`HiCacheError`."""
        ...

    async def stats(self) -> Mapping[str, Any]: ...

    async def where(self, tokens: Sequence[int], tenant: str | None = None) -> Mapping[str, Any]: ...

    async def explain(self, rid: str) -> Mapping[str, Any]:
        """Why a request went as it did. Raises :class:`UnknownRequest`, or another :class:`HiCacheError` where nobody can say."""
        ...

    def config(self) -> Mapping[str, Any]: ...


class UnknownNamespace(HiCacheError):
    """No namespace is known by these fields."""


class UnknownRequest(HiCacheError):
    """No replica knows a request by this id."""


def unknown_request(rid: str) -> UnknownRequest:
    return UnknownRequest(
        f'no replica knows a request with the id "{rid[:128]}"; it may be under way still, or older than the last {KEPT} of its replica'
    )


class Guard:
    """Lets only what carries the token pass, whatever the route, before a body is read. The comparison takes constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN and not self._trusted(scope):
            told = {"detail": "send the admin token as 'Authorization: Bearer ...'"}
            return await JSONResponse(told, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        await self._app(scope, receive, send)

    def _trusted(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._wanted)


def create_app(backend: Backend, token: str) -> FastAPI:
    """The admin application. ``token``: the bearer token that every route but :data:`OPEN` asks for."""
    # No pages of documentation: they would need the token as well, and browsers do not send it.
    app = FastAPI(title="hicache_ray admin", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token)

    @app.get(OPEN)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/flush")
    async def flush(body: Flush | None = None) -> dict[str, Any]:
        body = body or Flush()
        with _told():
            count = await backend.flush(body.tiers, body.timeout_s, body.preserve)
        return {"flushed": body.tiers, "replicas": count}

    @app.post("/drop")
    async def drop(body: Drop) -> Mapping[str, Any]:
        with _told():
            return await backend.drop(body.fields())

    @app.post("/storage/detach")
    async def detach() -> dict[str, Any]:
        with _told():
            return {"attached": False, "replicas": await backend.plug(False)}

    @app.post("/storage/attach")
    async def attach() -> dict[str, Any]:
        with _told():
            return {"attached": True, "replicas": await backend.plug(True)}

    @app.get("/stats")
    async def stats() -> Mapping[str, Any]:
        with _told():
            return await backend.stats()

    @app.post("/where")
    async def where(body: Where) -> Mapping[str, Any]:
        with _told():
            return await backend.where(body.input_ids, body.tenant)

    @app.get("/explain/{rid:path}")
    async def explain(rid: str) -> Mapping[str, Any]:
        with _told():
            return await backend.explain(rid)

    @app.get("/config")
    async def config() -> Mapping[str, Any]:
        return backend.config()

    return app


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors of ours as HTTP answers."""
    try:
        yield
    except (Busy, StorageDetached) as error:
        raise HTTPException(409, str(error)) from error
    except (UnknownNamespace, UnknownRequest) as error:
        raise HTTPException(404, str(error)) from error
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error
    except HiCacheError as error:
        raise HTTPException(503, str(error)) from error
