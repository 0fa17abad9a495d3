"""The Ray Serve deployment: an HTTP front of one cache group per replica.

Subclass :class:`HiCacheDeployment` to put your own front on the tier.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

import ray
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.util import get_current_placement_group

from hicache_ray import machine
from hicache_ray.actors import storage
from hicache_ray.actors.messages import Prompt, unknown_tenant
from hicache_ray.actors.replica import CacheGroup, Place
from hicache_ray.actors.setup import Prepared, fitted_on_node, host_bytes
from hicache_ray.config import Config
from hicache_ray.errors import Busy, Cancelled, CapacityError, EngineError, GroupLost, RequestRefused
from hicache_ray.records import Embedded

log = logging.getLogger("hicache_ray.actors")


class DuplicateId(Busy):
    """A request with this id is under way."""


#: Errors a client is told, and how; the first that fits.
STATUS = {CapacityError: 400, RequestRefused: 400, EngineError: 500, DuplicateId: 409, Busy: 503, GroupLost: 503, Cancelled: 499}
#: Requests that Serve lets through beyond those that may wait for the model, so that the replica can refuse them itself, with its reason.
REFUSABLE = 64
#: How often an idle group is looked after.
HEALTH_PERIOD_S = 5.0
#: A health check may take as long as a lost group takes to heal.
HEALTH_S = 240.0
#: Requests that may wait in one of Serve's routers; one more is refused as unavailable.
ROUTER_QUEUE = 1024

#: What separates one cache from another comes from trusted code and configuration only.
NOT_OF_A_REQUEST = ("salt", "tenant", "namespace")

#: Priorities of requests are between this and its negative.
MOST_PRIORITY = 1_000_000

#: A token as the core keeps it. Whether the model knows it is for the engine to say.
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Generate(BaseModel):
    """Body of ``POST /generate``. Decoding is greedy. ``stream``: server-sent events, the tokens as they come, then the rest.
    ``logprob_start``: tokens from this one on are computed, also where they are cached.

    Hints for eviction: pages of a higher ``priority`` stay longer where cache.eviction is ``priority``; ``ttl_s`` seconds after this use of
    them pages go first, under every policy, unless another request has said otherwise.
    """

    model_config = ConfigDict(extra="forbid")

    input_ids: list[Token] = Field(min_length=1)
    max_new_tokens: int = Field(16, ge=1)
    return_logprob: bool = False
    logprob_start: int | None = Field(None, ge=0)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    stream: bool = False
    digests: bool = False
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_namespace(cls, values: Any) -> Any:
        if isinstance(values, dict) and (given := [name for name in NOT_OF_A_REQUEST if name in values]):
            raise ValueError(
                f"a request does not say whose it is: leave out {', '.join(given)}; a tenant's clients send its key as "
                "'Authorization: Bearer ...'"
            )
        return values


class HiCacheDeployment:
    """One replica: owns a cache group. Use :func:`application` to bind it, or subclass it and bind your own."""

    def __init__(self, config: Config, prepared: Prepared, app: str) -> None:
        context = serve.get_replica_context()
        self.replica = context.replica_id.unique_id
        self.config = config
        self.group = CacheGroup(config, prepared, Place(app, self.replica, get_current_placement_group()))
        self._starting: asyncio.Task[None] | None = None
        self._running: set[str] = set()

    async def ready(self) -> None:
        """The group is up; the first caller starts it."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        if self.config.storage.backend != "none":
            node = ray.get_runtime_context().get_node_id()
            found = await asyncio.to_thread(storage.ensure, self.config, node, self.group.prepared.model_id)  # the first on a node makes it
            self.group.place = replace(self.group.place, socket=found.socket)
        self.group.config = await asyncio.to_thread(self._fitted)
        await self.group.start()

    def _fitted(self) -> Config:
        """The configuration with host pools that this node has memory for; its ranks are here as well."""
        config, spec = fitted_on_node(self.config, self.group.prepared, machine.memory()), self.group.prepared.spec
        if (have := host_bytes(config, spec)) < (wanted := host_bytes(self.config, spec)):
            log.warning("host pools of a rank take %d bytes here, not the %d of cache.host_ratio: the node has no more free", have, wanted)
        return config

    async def check_health(self) -> None:
        """Called by Serve now and then. The replica heals its group itself, so only a start that failed is reported."""
        await self.ready()
        await self.group.healthy()

    def __del__(self) -> None:
        # Serve calls this before it ends the process; ranks and coordinator would die with it anyway.
        if "group" in self.__dict__:  # the constructor may have failed before
            self.group.stop()

    async def generate(self, body: Generate, tenant: str | None = None, spans: Sequence[Embedded] = ()) -> dict[str, Any]:
        """The whole answer to a request. ``tenant``: whose it is, which only you know; without one it is in the deployment's own namespace.
        ``spans``: what is embedded in its tokens."""
        out: dict[str, Any] = {}
        async with aclosing(self.stream(body, tenant, spans)) as parts:
            async for part in parts:
                out |= part if "output_ids" in part else {}
        return out

    async def stream(
        self, body: Generate, tenant: str | None = None, spans: Sequence[Embedded] = ()
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Parts of the answer as they come: ``{"token_ids", "logprobs"}``, at the end the whole answer. Closing it cancels the request."""
        await self.ready()
        self._check(body.input_ids, body.max_new_tokens)
        if tenant is not None and tenant not in self.config.tenants:
            raise RequestRefused(unknown_tenant(tenant, self.config.tenants))
        rid = body.request_id or uuid.uuid4().hex
        if rid in self._running:
            raise DuplicateId(f'a request with the id "{rid}" is under way; choose another request_id')
        self._running.add(rid)
        try:
            prompt = Prompt(
                rid, body.input_ids, body.max_new_tokens, body.digests, tenant, tuple(spans), body.logprob_start, body.priority, body.ttl_s
            )
            async with aclosing(self.group.events(prompt)) as events:
                async for part in self._parts(rid, body, events):
                    yield part
        finally:
            self._running.discard(rid)

    async def _parts(self, rid: str, body: Generate, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        began, first = time.perf_counter(), None
        output: list[int] = []
        logprobs: list[float] = []
        async for event in events:
            if "tokens" in event:
                first = first if first is not None else time.perf_counter() - began
                output += event["tokens"]
                logprobs += event["logprobs"]
                yield {"token_ids": list(event["tokens"]), "logprobs": list(event["logprobs"])}
                continue
            report = event["report"]
            answer = {
                "request_id": rid,
                "replica": self.replica,
                "output_ids": output,
                "cached_tokens": {tier: report[tier] for tier in ("device", "host", "storage")},
                "computed_tokens": report["computed"],
                "ttft_s": first,
                "limit": str(report["limit"].value),
            }
            if body.return_logprob:
                answer["logprobs"] = logprobs
            if body.digests:
                answer["digests"] = report["digests"]
            yield answer

    def _check(self, tokens: Sequence[int], new_tokens: int) -> None:
        engine = self.config.engine
        for name, value, setting, most in (
            ("input_ids", len(tokens), "engine.max_prompt_tokens", engine.max_prompt_tokens),
            ("max_new_tokens", new_tokens, "engine.max_new_tokens", engine.max_new_tokens),
        ):
            if value > most:
                raise CapacityError(f"{name} asks for {value} tokens and this deployment takes at most {most} ({setting})")


def status_of(error: Exception) -> HTTPException:
    """The HTTP answer for an error of ours; others stay errors of the server."""
    for kind, code in STATUS.items():
        if isinstance(error, kind):
            return HTTPException(code, str(error))
    raise error


def tenant_of(config: Config, authorization: str) -> str | None:
    """Whose request it is, by the bearer key of its header; None where there are no tenants. Raises the HTTP answer to a wrong one.

    All keys are compared, each in constant time.
    """
    if not config.tenants:
        return None
    given, found = authorization.encode(), None
    for name, tenant in config.tenants.items():
        if tenant.key is not None and secrets.compare_digest(given, f"Bearer {tenant.key.get_secret_value()}".encode()):
            found = name
    if found is None:
        raise HTTPException(401, "send the key of a tenant as 'Authorization: Bearer ...'", {"WWW-Authenticate": "Bearer"})
    return found


async def _events(head: dict[str, Any], parts: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    try:
        async with aclosing(parts):
            yield f"data: {json.dumps(head)}\n\n"
            async for part in parts:
                yield f"data: {json.dumps(part)}\n\n"
    except tuple(STATUS) as error:
        yield f"data: {json.dumps({'error': str(error)})}\n\n"


http = FastAPI(title="hicache_ray", description="Generation with a cluster-wide KV cache.")


# Serve keeps the routes as they are at this point: what they use must be defined above.
@serve.deployment(max_queued_requests=ROUTER_QUEUE, graceful_shutdown_timeout_s=5)
@serve.ingress(http)
class HttpDeployment(HiCacheDeployment):
    """``POST /generate``; see :class:`Generate`."""

    # Annotations here are objects, not strings: Serve and FastAPI read them when the class is made.
    @http.post("/generate", response_model=None)
    async def post_generate(self, body: Generate, request: Request) -> Any:
        tenant = tenant_of(self.config, request.headers.get("authorization", ""))
        try:
            if not body.stream:
                return await self.generate(body, tenant)
            parts = self.stream(body, tenant)
            head = await anext(parts)  # so that a refusal is an HTTP status, not a broken stream
        except tuple(STATUS) as error:
            raise status_of(error) from error
        return StreamingResponse(_events(head, parts), media_type="text/event-stream")


def application(config: Config, prepared: Prepared, replicas: int, deployment: Any = None) -> serve.Application:
    """The deployment, bound. Each replica gets a placement group: one bundle for itself and its coordinator, one per rank.

    ``deployment``: one of your own over a subclass of :class:`HiCacheDeployment`; none: :class:`HttpDeployment`. Deployed again with
    another number of ``replicas`` and the same rest, the replicas that run stay.
    """
    rank = {"CPU": 1.0} | ({"GPU": 1.0} if config.model.device == "cuda" else {})
    bundles = [{"CPU": 0.1}] + [rank] * config.model.tp
    app = config.serve.name
    chosen: Any = deployment or HttpDeployment
    sized = chosen.options(
        # Without a version of ours Serve takes every deploy for new code and replaces all replicas, caches and all.
        version=hashlib.sha256(f"{config!r}{prepared!r}{app}".encode()).hexdigest()[:16],
        _internal=True,
        num_replicas=replicas,
        max_ongoing_requests=config.engine.max_queue + 1 + REFUSABLE,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_S,
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": 0.1},
    )
    bound: serve.Application = sized.bind(config, prepared, app)
    return bound
