"""From the configuration to what the core and the ranks need: settings, pool sizes, namespace, recipe. And what does not fit together."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache_ray import compute, sizing
from hicache_ray.config import Config
from hicache_ray.config_sizes import format_size
from hicache_ray.config_sources import changed
from hicache_ray.errors import ConfigError
from hicache_ray.keys import Namespace
from hicache_ray.lease import Place
from hicache_ray.settings import Eviction, LoadPolicy, PrefetchPolicy, Settings, StateSnapshots, WritePolicy
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Shard, Tier
from hicache_ray.storage import ArenaConfig, ShardConfig
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.node_config import NodeConfig
from hicache_ray.storage.repair import RepairConfig

SHARED_MEMORY = "/dev/shm"
LOOPBACK = "127.0.0.1"
#: Letters of a node's id in the names of its files.
NODE_LETTERS = 8
#: Least time that a writer to storage is given, and how much more than the longest transfer.
HOLD_S, HOLD_MARGIN_S = 30.0, 10.0


@dataclass(frozen=True)
class Prepared:
    """A model folder and the cache spec of its ranks. ``model_id`` names the weights. ``fitted``: the host pools were sized for the machine
    that all ranks are on; else each replica does it on its own node."""

    folder: str
    spec: CacheSpec
    model_id: str
    fitted: bool = False


def settings_of(config: Config) -> Settings:
    """The core's settings."""
    c = config.cache
    return Settings(
        grid=c.grid,
        exact=c.exact,
        write_policy=WritePolicy(c.write_policy),
        selective_threshold=c.selective_threshold,
        device_reserve=c.device_reserve,
        backup_bytes=config.storage.backup_in_flight,
        state_snapshots=StateSnapshots(c.state_snapshots),
        track_interval=c.track_interval,
        eviction=Eviction(c.eviction),
        storage=config.storage.backend != "none",
        prefetch_policy=PrefetchPolicy(c.prefetch_policy),
        prefetch_tokens_in_flight=c.prefetch_tokens_in_flight,
        prefetch_threshold=c.prefetch_threshold,
        lookup_deadline_s=c.lookup_deadline_s,
        prefetch_base_s=c.prefetch_timeout_base_s,
        prefetch_per_1k_s=c.prefetch_timeout_per_1k_tokens_s,
        prefetch_cap_s=c.prefetch_timeout_cap_s,
        copy_deadline_s=c.load_deadline_s,
        compute_deadline_s=config.engine.forward_deadline_s,
        load_or_recompute=LoadPolicy(c.load_or_recompute),
        prefill_tokens_per_s=c.prefill_tokens_per_s,
        prefill_growth_per_1k=c.prefill_growth_per_1k,
        storage_bytes_per_s=c.storage_bytes_per_s,
        host_bytes_per_s=c.host_bytes_per_s,
    )


def capacities(config: Config, spec: CacheSpec) -> Mapping[Place, int]:
    """Slots of every pool of one rank. The device's: its tokens and snapshots. The host's memory is split so that a set of prompts that
    fits it is restorable as a whole, whatever their lengths (:func:`hicache_ray.sizing.split`)."""
    device = {}
    for c in spec.components:
        span = spec.page_size * c.page_span
        device[c.name] = config.cache.device_snapshots if c.is_state else config.cache.device_tokens // span
    host = sizing.split(spec, settings_of(config), host_bytes(config, spec), mix_of(config, spec)).slots
    return {(Tier.DEVICE, name): n for name, n in device.items()} | {(Tier.HOST, name): n for name, n in host.items()}


def device_bytes(config: Config, spec: CacheSpec) -> int:
    """Memory of one rank's device pools."""
    slots = {c.name: config.cache.device_tokens // (spec.page_size * c.page_span) for c in spec.components if not c.is_state}
    states = spec.snapshot_bytes() * config.cache.device_snapshots
    return states + sum(spec[name].page_bytes(spec.page_size) * n for name, n in slots.items())


def host_bytes(config: Config, spec: CacheSpec) -> int:
    """Memory for one rank's host pools: cache.host_size, or cache.host_ratio times the device's."""
    if config.cache.host_size is not None:
        return config.cache.host_size
    return int(device_bytes(config, spec) * config.cache.host_ratio)


def mix_of(config: Config, spec: CacheSpec) -> sizing.Mix:
    """All prompts that the deployment accepts and that something can be restored of."""
    step = settings_of(config).step(spec)
    return sizing.Mix(step, max(step, config.engine.max_prompt_tokens))


def fitted(config: Config, spec: CacheSpec, memory: sizing.Memory, ranks: int) -> Config:
    """The configuration with a host size that ``ranks`` ranks of a node have memory for. An explicit size is honoured, or refused now
    (:class:`ConfigError`) rather than when memory runs out; one that follows from cache.host_ratio is cut to an equal share."""
    cache = config.cache
    if cache.host_size is not None:
        most = sizing.host_share(memory.free, cache.host_reserve, 1.0, ranks)
        if cache.host_size > most:
            raise ConfigError(
                f"cache.host_size is {format_size(cache.host_size)} for each of {ranks} rank(s) of this node, and of the {memory.free:,} "
                f"bytes free ({memory.limit}) {cache.host_reserve:,} stay so (cache.host_reserve); choose at most {most} bytes"
            )
        return config
    share = sizing.host_share(memory.free, cache.host_reserve, cache.host_fraction, ranks)
    if host_bytes(config, spec) <= share:
        return config
    if not share:
        raise ConfigError(f"this node has {memory.free:,} bytes free ({memory.limit}), no more than cache.host_reserve; lower that")
    return changed(config, {"cache.host_size": share})


def fitted_on_node(config: Config, prepared: Prepared, memory: sizing.Memory) -> Config:
    """The configuration of a replica all of whose ranks are on this node, which has ``memory``. Raises :class:`ConfigError`, naming the
    node, where it is too small."""
    if prepared.fitted:
        return config
    try:
        found = fitted(config, prepared.spec, memory, config.model.tp)
        check_capacities(found, prepared.spec)
    except ConfigError as error:
        raise ConfigError(f"on node {os.uname().nodename}: {error}") from error
    return found


def check_capacities(config: Config, spec: CacheSpec) -> None:
    """Raise :class:`ConfigError` unless the pools hold the longest request that the configuration accepts."""
    have = capacities(config, spec)
    prompt, new = config.engine.max_prompt_tokens, config.engine.max_new_tokens
    needed = compute.need(spec, settings_of(config), compute.Shape.cold(prompt, new))
    for name, count in needed.items():
        state = spec[name].is_state
        most = count + 1 if state else count  # a resumed request also holds the snapshot that it resumes from
        if most > have[(Tier.DEVICE, name)]:
            setting, value, least = (
                ("cache.device_snapshots", config.cache.device_snapshots, most)
                if state
                else ("cache.device_tokens", config.cache.device_tokens, most * spec.page_size * spec[name].page_span)
            )
            raise ConfigError(
                f"{setting} is {value}, too small for one request of engine.max_prompt_tokens {prompt} and engine.max_new_tokens {new}; "
                f"choose at least {least}, or shorter requests"
            )
        if not have[(Tier.HOST, name)]:
            raise ConfigError(f"the host pool of component {name!r} would hold nothing; raise cache.host_size or cache.host_ratio")


@dataclass(frozen=True)
class Here:
    """A node as Ray knows it. ``node``: its id; ``name``: the one it was given, empty where it has none."""

    node: str = "0" * 56
    address: str = LOOPBACK
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def arena_name(config: Config, node: str) -> str:
    """Of a node's arena: several nodes may be one machine."""
    return f"{config.storage.name}-{node[:NODE_LETTERS]}"


def arena_config(config: Config, here: Here | None = None) -> ArenaConfig:
    """Settings of a node's arena. Raises :class:`ConfigError` where shared memory, or the folder, has less room."""
    store = config.storage
    directory = store.directory or SHARED_MEMORY
    if not Path(directory).is_dir():
        raise ConfigError(f'storage.directory is "{directory}", which is not a folder; make it, or choose another')
    free = shutil.disk_usage(directory).free
    if store.size > free:
        where = "shared memory" if store.directory is None else directory
        raise ConfigError(
            f"storage.size is {format_size(store.size)} and {where} has {format_size(free)} free; lower storage.size, or set "
            "storage.directory to a folder on a disk (slower, file-backed)"
        )
    # A writer may take as long as the longest transfer; after that its reservation is void, and so is what it wrote.
    hold_s = max(HOLD_S, config.cache.prefetch_timeout_cap_s + HOLD_MARGIN_S)
    return ArenaConfig(
        arena_name(config, (here or Here()).node),
        store.size,
        directory,
        # Sockets need a short path.
        SHARED_MEMORY if Path(SHARED_MEMORY).is_dir() else None,
        lease_s=store.lease_s,
        hold_s=hold_s,
        pending_bytes=store.pending,
        tenant_bytes=tenant_caps(config),
        huge_pages=store.huge_pages,
    )


def node_config(config: Config, here: Here, token: str, records: Mapping[bytes, Mapping[str, str]] | None = None) -> NodeConfig:
    """Settings of a node's storage; to be called on that node. ``token``: of the cluster's stores. ``records``: see
    :func:`space_records`. Raises :class:`ConfigError`."""
    store = config.storage
    domain = here.labels.get(store.label, "") if store.label else ""
    return NodeConfig(
        here.node,
        arena_config(config, here),
        token,
        here.address if store.host == "auto" else store.host,
        store.port,
        store.streams,
        label=domain or here.node,
        shard=ShardConfig(store.placement, store.replicas, store.workers),
        flight_port=store.flight_port,
        disk=disk_config(config, here),
        write_behind_bytes=store.write_behind or max(store.size // 4, 1),
        records=records or {},
        repair=RepairConfig(store.repair_rate),
    )


def check_disk(config: Config) -> Path | None:
    """The folder of ``storage.disk_path`` on this machine, None for none. Raises :class:`ConfigError` where it cannot be used."""
    if config.storage.disk_path is None:
        return None
    path = Path(config.storage.disk_path)
    if not path.is_dir():
        raise ConfigError(f'storage.disk_path is "{path}", which is not a folder on {os.uname().nodename}; make it, or choose another')
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f'storage.disk_path is "{path}", which cannot be written on {os.uname().nodename}; choose another')
    return path


def disk_config(config: Config, here: Here) -> DiskConfig | None:
    """Settings of the disk behind a node's arena, in a folder that the same node finds again; to be called on that node. Raises
    :class:`ConfigError`."""
    path, store = check_disk(config), config.storage
    if path is None:
        return None
    name = f"-{re.sub(r'[^A-Za-z0-9_.-]', '_', here.name)}" if here.name else ""
    folder = path / f"{store.name}{name}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        taken = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
        room = shutil.disk_usage(folder).free + taken
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; choose another storage.disk_path") from error
    if store.disk_size > room:
        raise ConfigError(f"storage.disk_size is {format_size(store.disk_size)} and {path} has {format_size(room)} for it; lower it")
    return DiskConfig(str(folder), store.disk_size, direct=store.direct, fsync=store.fsync, lease_s=store.lease_s)


def namespace_of(config: Config, model_id: str) -> Namespace:
    """Who may share pages with this deployment: trusted configuration only."""
    n = config.namespace
    return Namespace(n.model_id or model_id, n.revision, n.adapter, n.salt.get_secret_value(), config.cache.page_size)


def tenant_namespaces(config: Config, base: Namespace) -> Mapping[str, Namespace]:
    """The namespace of each tenant: the deployment's own with the tenant's name and salt."""
    out = {}
    for name, tenant in config.tenants.items():
        secret = tenant.salt.get_secret_value()
        out[name] = replace(base, tenant=name, salt=f"{len(base.salt)}:{base.salt}:{secret}" if base.salt else secret)
    return out


def space_records(config: Config, model_id: str) -> Mapping[bytes, Mapping[str, str]]:
    """Records, by digest, of the namespaces of a deployment: with them a store knows from its start whose bytes it keeps."""
    base = namespace_of(config, model_id)
    return {space.digest(): space.record() for space in (base, *tenant_namespaces(config, base).values())}


def tenant_caps(config: Config) -> Mapping[str, int]:
    """Bytes that each tenant with a cap may keep in one node's store."""
    return {name: tenant.max_bytes for name, tenant in config.tenants.items() if tenant.max_bytes is not None}


def recipe_of(config: Config, engine: Mapping[str, str]) -> Mapping[str, str]:
    """What canonical bytes depend on beside the namespace; ``engine``: what the engine says of itself (build, attention, processor)."""
    return {
        "grid": str(config.cache.grid),
        "threads": str(config.model.threads_per_rank),
        "tp": str(config.model.tp),
        **engine,
    }


def weights_id(folder: str) -> str:
    """A name for the weights in a folder: a digest of all that its files hold (about a second per GB; namespace.model_id spares it)."""
    h = hashlib.blake2b(digest_size=32)
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".json", ".safetensors", ".bin"):
            h.update(f"{path.name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 24):
                    h.update(chunk)
    return f"weights-{h.hexdigest()[:16]}"


def spec_from_json(data: Mapping[str, Any]) -> CacheSpec:
    components = []
    for c in data["components"]:
        fields = tuple(Field(**{**f, "shape": tuple(f["shape"])}) for f in c["fields"])
        more = {"kind": Kind(c["kind"]), "shard": Shard(c["shard"]), "fields": fields, "layers": tuple(c["layers"])}
        components.append(Component(**{**c, **more}))
    return CacheSpec(data["model_type"], data["page_size"], tuple(components), data["ranks"])
