"""Every setting of the tier, as one frozen tree. Names, defaults, legal values, and what must fit together.

The tree is pure data. :mod:`hicache_ray.config_sources` builds it from a YAML file, the environment and flags, tells where each value came
from, and turns whatever is wrong into sentences. What needs a model's spec (is the family known, do the pools hold one request) or the
machine (shared memory, io backends) is checked where those are known. Field descriptions are shown to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo
from typing_extensions import Self

from hicache_ray.config_sizes import parse_size, parse_size_or_0

Layout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
Size: TypeAlias = Annotated[int, BeforeValidator(parse_size)]
SizeOr0: TypeAlias = Annotated[int, BeforeValidator(parse_size_or_0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
AnyPort: TypeAlias = Annotated[int, Field(ge=0, le=65535)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$")]

_STORE_NAME = 31
_BYTES: dict[str, Any] = {"unit": "bytes"}


class Section(BaseModel):
    """One level of the tree: frozen, unknown names refused, infinities refused, and true/false are not numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are not numbers or text; write the value itself")
        return value


class ModelConfig(Section):
    """The model that the replica runs, and how it is spread over ranks."""

    family: str = Field("qwen3_5", description="model type as in the config of Hugging Face transformers, e.g. qwen3_5, qwen3, gemma3")
    path: str | None = Field(None, description="folder with the model; null: a small one with random weights is made")
    size: Literal["demo", "tiny"] = Field("demo", description="size of the model that is made when path is null")
    tp: Count = Field(1, description="tensor-parallel ranks of one replica")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the ranks compute; with cuda each rank takes one GPU")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of weights, activations and cache")
    threads_per_rank: Count = Field(1, description="CPU threads of one rank; part of what bit-exactness depends on")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the random weights when path is null")


class CacheConfig(Section):
    """The device and host tiers of one cache group, and the policies between all three tiers."""

    page_size: Count = Field(64, description="tokens in a page")
    grid: Annotated[int, Field(ge=0)] = Field(
        256, description="tokens in a prefill chunk, which ends at an absolute multiple of it; a multiple of page_size; 0: no grid"
    )
    track_interval: Count = Field(256, description="tokens between two state snapshots during decode; a multiple of page_size")
    exact: bool = Field(True, description="resume on the grid from canonical bytes only, so that output is bit-identical")
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        "write_through",
        description="when the device's pages go to the host: once they are complete, at their selective_threshold-th use, or when they are "
        "evicted",
    )
    selective_threshold: Count = Field(2, description="the use at which write_through_selective backs a page up")
    device_reserve: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="share of the device pools that can be had without waiting for a copy; for write policies that back up late"
    )
    eviction: Literal["lru", "lfu", "s3fifo", "priority"] = Field(
        "lru", description="which pages leave device and host first, among those whose loss costs the same"
    )
    layout: Layout = Field("page_first_direct", description="order of axes of the host pools")
    device_layout: Layout = Field("layer_first", description="order of axes of the device pools")
    io_backend: Literal["auto", "direct", "kernel"] = Field("auto", description="how bytes move between device and host")
    device_tokens: Count = Field(8192, description="capacity of the device pools: the tokens whose pages they hold")
    device_snapshots: Count = Field(64, description="state snapshots (and running states) that the device pool of a hybrid model holds")
    host_ratio: Annotated[float, Field(gt=0)] = Field(2.0, description="size of the host pools as a multiple of the device pools")
    host_size: Size | None = Field(
        None, description="size of one rank's host pools; wins over host_ratio; null: use the ratio", json_schema_extra=_BYTES
    )
    host_reserve: Size = Field(1024**3, description="memory of a node that the host pools leave free", json_schema_extra=_BYTES)
    host_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="of a node's free memory beyond the reserve, how much the host pools of all its ranks take at most by host_ratio"
    )
    load_or_recompute: Literal["always_load", "cost"] = Field(
        "always_load", description="resume as far as what is cached allows, or where the first token is there soonest"
    )
    prefill_tokens_per_s: Annotated[float, Field(ge=0)] = Field(0.0, description="for cost, until it was measured; 0: not known")
    prefill_growth_per_1k: Annotated[float, Field(ge=0)] = Field(
        0.0, description="for cost: how much dearer a token is for every 1,024 tokens before it, as a part of the first one's price"
    )
    storage_bytes_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="for cost, until it was measured: of one rank; 0: not known"
    )
    host_bytes_per_s: Annotated[float, Field(ge=0)] = Field(0.0, description="the same between host and device")
    state_snapshots: Literal["all", "log", "last"] = Field("all", description="which state snapshots of a path are kept")
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = Field(
        "timeout", description="what ends a request's wait for pages from storage: its turn, all are there, or the deadline"
    )
    prefetch_threshold: Annotated[int, Field(ge=0)] = Field(256, description="tokens; fewer than this are not fetched from storage")
    prefetch_tokens_in_flight: Count = Field(1 << 20, description="most tokens on their way from storage at once; more are not asked for")
    lookup_deadline_s: Seconds = Field(2.0, description="longest wait for storage to say which pages it has")
    load_deadline_s: Seconds = Field(10.0, description="longest time for a copy between host and device; 10 s later its rank is lost")
    prefetch_timeout_base_s: Seconds = Field(2.0, description="deadline of a prefetch: this, plus prefetch_timeout_per_1k_tokens_s")
    prefetch_timeout_per_1k_tokens_s: Annotated[float, Field(ge=0)] = Field(
        0.1, description="added to the deadline of a prefetch for every 1,024 tokens"
    )
    prefetch_timeout_cap_s: Seconds = Field(30.0, description="longest deadline of a prefetch; caps wait_complete as well")

    @model_validator(mode="after")
    def _pages_fit(self) -> Self:
        for name in ("grid", "track_interval"):
            value = getattr(self, name)
            if value % self.page_size:
                below = value - value % self.page_size
                near = " or ".join(str(n) for n in (below, below + self.page_size) if n)
                raise ValueError(f"cache.{name} is {value}; it must be a multiple of cache.page_size ({self.page_size}), such as {near}")
        if self.exact and not self.grid:
            raise ValueError(
                "cache.grid is 0, and cache.exact needs a grid; choose a multiple of cache.page_size, or set cache.exact to false"
            )
        if self.device_tokens < (least := max(self.grid, self.page_size)):
            raise ValueError(f"cache.device_tokens is {self.device_tokens}; it must be at least {least}, one chunk of the grid or one page")
        if self.prefetch_timeout_cap_s < self.prefetch_timeout_base_s:
            raise ValueError(
                f"cache.prefetch_timeout_cap_s is {self.prefetch_timeout_cap_s}; it must be at least "
                f"cache.prefetch_timeout_base_s ({self.prefetch_timeout_base_s})"
            )
        return self


class StorageConfig(Section):
    """The storage tier (L3): a store on every node that has replicas; all of them together answer every replica."""

    backend: Literal["arena", "none"] = Field("arena", description="shared-memory arena, or no storage tier")
    size: Size = Field(512 * 1024**2, description="hard cap of one node's store", json_schema_extra=_BYTES)
    directory: str | None = Field(None, description="folder of the arena's files; null: shared memory")
    lease_s: Seconds = Field(30.0, description="how long a reader may hold an object before its bytes may be reused")
    batch: Count = Field(128, description="most objects of one call to the store; a longer transfer makes several")
    backup_in_flight: Size = Field(
        1024**3, description="bytes of one rank on their way to storage at once; more are left for the next use", json_schema_extra=_BYTES
    )
    name: Name = Field("hicache-storage", description="name of the store; clusters on one machine need different ones")
    huge_pages: Literal["auto", "off"] = Field("auto", description="whether the arena asks the system for huge pages")
    pending: Size | None = Field(
        None,
        description="most bytes that all writers of a node may have under way; more are dropped and counted; null: a quarter of size",
        json_schema_extra=_BYTES,
    )
    workers: Annotated[int, Field(ge=2, le=16)] = Field(2, description="threads of a rank that may wait for storage at once")
    disk_path: str | None = Field(
        None, description="folder on each node's disk, where what is stored survives a restart; null: in memory only"
    )
    disk_size: Size = Field(8 * 1024**3, description="hard cap of what one node's store takes on disk", json_schema_extra=_BYTES)
    fsync: Literal["never", "batch", "always"] = Field("batch", description="what a loss of power may take of the disk, for speed")
    direct: Literal["auto", "on", "off"] = Field("auto", description="whether the disk is read and written past the page cache")
    write_behind: Size | None = Field(
        None,
        description="bytes that may wait to be written to disk; what exceeds them stays in memory only; null: a quarter of size",
        json_schema_extra=_BYTES,
    )
    placement: Literal["writer", "home"] = Field(
        "writer", description="where bytes lie: on the node that wrote them, or on the node that its prefix belongs to"
    )
    replicas: Annotated[int, Field(ge=1, le=2)] = Field(1, description="nodes that keep a copy of each object")
    repair_rate: SizeOr0 = Field(
        64 * 1024**2,
        description="bytes per second that a node sends to make lost second copies again; 0: they are made by the next write only",
        json_schema_extra=_BYTES,
    )
    host: str = Field(
        "127.0.0.1", description="address at which the other nodes reach a node's store; auto: the node's own, as Ray knows it"
    )
    port: AnyPort = Field(0, description="port for the other nodes; 0: any that is free")
    streams: Annotated[int, Field(ge=1, le=16)] = Field(2, description="connections that a large read from another node is spread over")
    flight_port: AnyPort | None = Field(None, description="port of an Arrow Flight endpoint on each node; 0: any that is free; null: none")
    label: str = Field("", description="Ray node label whose value is the failure domain of a node; empty: each node is its own")

    @model_validator(mode="after")
    def _storage_fits(self) -> Self:
        for name in ("pending", "write_behind"):
            value = getattr(self, name)
            if value is not None and value > self.size:
                raise ValueError(f"storage.{name} is {value}; it must be at most storage.size ({self.size}), in which those bytes lie")
        if self.port and self.port == self.flight_port:
            raise ValueError(f"storage.flight_port is {self.port}, and so is storage.port; choose different ports")
        if self.disk_path is not None and not self.disk_path.startswith("/"):
            raise ValueError(f'storage.disk_path is "{self.disk_path}"; every node opens it by itself, so write the whole path, from / on')
        if len(self.name) > _STORE_NAME:
            raise ValueError(f'storage.name is "{self.name}"; use at most {_STORE_NAME} characters, because the name of a node is added')
        if not self.host:
            raise ValueError("storage.host is empty; write an address of the node, or auto")
        return self


class EngineConfig(Section):
    """Limits of one replica's engine."""

    max_queue: Count = Field(32, description="requests that may wait for the model; one more is refused as busy")
    max_prompt_tokens: Count = Field(7680, description="longest prompt that is accepted")
    max_new_tokens: Count = Field(256, description="most tokens that one request may generate")
    gloo_timeout_s: Seconds = Field(10.0, description="longest wait of a rank for another one; ends a forward when a rank froze or died")
    forward_deadline_s: Seconds = Field(120.0, description="longest time for one call of the model; more than gloo_timeout_s")

    @model_validator(mode="after")
    def _deadlines_nest(self) -> Self:
        if self.forward_deadline_s <= self.gloo_timeout_s:
            raise ValueError(
                f"engine.forward_deadline_s is {self.forward_deadline_s}; it must be more than engine.gloo_timeout_s "
                f"({self.gloo_timeout_s}), or a frozen rank ends the call before its peers notice"
            )
        return self


class ServeConfig(Section):
    """The Ray Serve deployment."""

    host: str = Field("127.0.0.1", description="address that the HTTP proxy binds to")
    port: Port = Field(8000, description="port of the HTTP proxy")
    replicas: Count = Field(1, description="replicas of the deployment; each has model.tp ranks")
    name: Name = Field("hicache", description="name of the Serve application")


class AdminConfig(Section):
    """The administration endpoint."""

    host: str = Field("127.0.0.1", description="address to bind to; loopback unless you mean otherwise")
    port: Port = Field(8401, description="port of the endpoint")
    token: SecretStr | None = Field(
        None, min_length=8, description="bearer token, at least 8 characters; null: one is generated and printed once"
    )


class NamespaceConfig(Section):
    """What separates one cache from another: pages are shared only where all of it is equal. Never taken from a request."""

    model_id: str = Field("", description="name of the model; empty: follows from model.path, or from the seed")
    revision: str = Field("", description="revision of the weights; change it when the weights change")
    adapter: str = Field("", description="adapter (LoRA) that the weights carry")
    salt: SecretStr = Field(SecretStr(""), description="secret of a tenant: caches with unlike salts share nothing")


class TenantConfig(Section):
    """One tenant: who may use the cache of this deployment apart from the others."""

    salt: SecretStr = Field(min_length=8, description="secret of the tenant, at least 8 characters: no other tenant finds its pages")
    key: SecretStr | None = Field(
        None, min_length=8, description="bearer key of its clients, at least 8 characters; null: it has no access over HTTP"
    )
    max_bytes: Size | None = Field(
        None, description="cap of each node's store, in memory and again on disk; null: none", json_schema_extra=_BYTES
    )


class Config(Section):
    """The whole tree. Build it with :func:`hicache_ray.config_sources.load`, whose errors are sentences."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    storage: StorageConfig = StorageConfig()
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()
    admin: AdminConfig = AdminConfig()
    namespace: NamespaceConfig = NamespaceConfig()
    tenants: dict[Name, TenantConfig] = {}

    @model_validator(mode="after")
    def _tenants_apart(self) -> Self:
        known: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            if tenant.key is None:
                continue
            other = known.setdefault(tenant.key.get_secret_value(), name)
            if other != name:
                raise ValueError(f"tenants.{other}.key and tenants.{name}.key are equal; give every tenant a key of its own")
        return self

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.model.device == "cpu" and self.cache.io_backend == "kernel":
            raise ValueError('cache.io_backend is "kernel", which needs model.device cuda; on a cpu choose one of auto, direct')
        if (self.serve.host, self.serve.port) == (self.admin.host, self.admin.port):
            raise ValueError(f"admin.port is {self.admin.port}, and so is serve.port; choose different ports")
        return self


def sections() -> Mapping[str, type[Section]]:
    """Section name -> its class, in the order of the tree."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}


def settings() -> Mapping[str, FieldInfo]:
    """Every setting: dotted name -> pydantic's description of it, in the order of the tree."""
    return {f"{s}.{name}": field for s, section in sections().items() for name, field in section.model_fields.items()}


def tenant_settings() -> Mapping[str, FieldInfo]:
    """The settings of every tenant: name -> pydantic's description of it. Their dotted names are ``tenants.NAME.setting``."""
    return TenantConfig.model_fields


def setting(name: str) -> FieldInfo | None:
    """What the dotted name stands for, also of a tenant; None where it is no setting."""
    section, _, rest = name.partition(".")
    return tenant_settings().get(rest.rpartition(".")[2]) if section == "tenants" and "." in rest else settings().get(name)


def _known(name: str) -> FieldInfo:
    found = setting(name)
    if found is None:
        raise KeyError(name)
    return found


def choices(name: str) -> tuple[Any, ...]:
    """The values that the setting ``name`` can take where they are a fixed list, else an empty tuple."""
    annotation = _known(name).annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def is_secret(name: str) -> bool:
    """Whether the value of this setting must never be shown."""
    annotation = _known(name).annotation
    return annotation is SecretStr or SecretStr in get_args(annotation)


def is_size(name: str) -> bool:
    """Whether the setting is a number of bytes."""
    return _known(name).json_schema_extra == _BYTES


def is_optional(name: str) -> bool:
    """Whether the setting may be null."""
    return NoneType in get_args(_known(name).annotation)
