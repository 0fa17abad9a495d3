"""The storage actor: owns the store of its node and the sockets by which it is reached. Detached, one per node; no page byte passes
through it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors import directory, names
from hicache_ray.actors.heartbeat import CALL_S, Heartbeat
from hicache_ray.actors.remote import cause, living
from hicache_ray.actors.setup import LOOPBACK, SHARED_MEMORY, Here, arena_name, node_config, space_records
from hicache_ray.config import Config
from hicache_ray.errors import StoreError
from hicache_ray.storage.owned import PREFIX
from hicache_ray.storage.owned import sweep as sweep_directory
from hicache_ray.storage.runtime import StorageNode

log = logging.getLogger("hicache_ray.actors")
T = TypeVar("T")

START_S = 60.0
#: Longest wait for the memory of a dead incarnation to become free, and how often it is looked for.
ROOM_S, RETRY_S = 60.0, 0.2
SWEEP_S = 15.0
#: An actor that does not close itself within this time is killed; longer where it may have a disk to write to.
CLOSE_S, DISK_CLOSE_S = 5.0, 15.0

Records = Mapping[bytes, Mapping[str, str]]


class StorageShell:
    """Lives until :meth:`close` and ``ray.kill``; Ray starts it anew after a crash, with a new incarnation and what its disk kept."""

    def __init__(self, config: Config, node: str, records: Records) -> None:
        """``records``: of the namespaces, known from the start of every incarnation."""
        if ray.get_runtime_context().was_current_actor_reconstructed:
            told: list[Here] = []
            self.node = persistently(lambda: _start_again(config, node, records, told))
        else:
            self.node = _start(config, where(node), records)
        self.heart = Heartbeat(self.node, registrar(config.storage.name)).start()

    def address(self) -> dict[str, str]:
        return self.node.address.to_dict()

    def stats(self) -> dict[str, Any]:
        """Counters of the arena since this incarnation began, its process, and what the node knows of the others."""
        told = dict(self.node.stats())
        address, arena = told.pop("address"), told.pop("arena")
        return {**arena, **address, **told, "directory": self.heart.stats(), "pid": os.getpid()}

    def ping(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Hang up on everybody and remove memory and sockets."""
        self.heart.close()
        self.node.close()


def where(node: str) -> Here:
    """A node of this cluster, as Ray knows it. Raises :class:`StoreError` where it is gone."""
    for found in ray.nodes():
        if found["NodeID"] == node:
            address, name = found["NodeManagerAddress"], found.get("NodeName") or ""
            return Here(node, address, "" if name == address else name, found.get("Labels") or {})
    raise StoreError(f"Ray knows no node {node}")


def registrar(store: str) -> Callable[[Mapping[str, str]], Mapping[str, Any]]:
    """How a heartbeat reaches the directory of a store; the directory is looked for again whenever it has not answered."""
    found: list[Any] = []

    def register(address: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            if not found:
                found.append(directory.find(store))
            told: Mapping[str, Any] = ray.get(found[0].register.remote(dict(address)), timeout=CALL_S)
            return told
        except (ray.exceptions.RayError, TimeoutError) as error:
            found.clear()
            raise StoreError(f"the directory of store {store} did not answer: {type(error).__name__}") from error

    return register


def tell_coordinators(config: Config, here: Here) -> None:
    """L3 may begin empty after a crash, while the coordinators of this node believe of some pages that it has them, and they and their
    ranks still hold the memory of the dead incarnation. Best effort: who does not hear it is dead, or has not begun. Nobody's answer is
    waited for: where their memory is what we lack, :func:`persistently` waits for that."""
    arena = arena_name(config, here.node)
    for actor in living(names.is_any_coordinator).values():
        actor.storage_died.remote(arena)


def _start(config: Config, here: Here, records: Records) -> StorageNode:
    try:
        token = ray.get(directory.find(config.storage.name).token.remote(), timeout=START_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise StoreError(f"the directory of store {config.storage.name} did not answer: {cause(error)}") from error
    return StorageNode(node_config(config, here, token, records)).start()


def _start_again(config: Config, node: str, records: Records, told: list[Here]) -> StorageNode:
    """In the place of a dead incarnation. ``told``: filled when those who use it have been told, which once is enough."""
    here = where(node)
    if not told:
        tell_coordinators(config, here)
        told.append(here)
    return _start(config, here, records)


def persistently(start: Callable[[], T]) -> T:
    """What an actor that Ray has started anew begins with. It is tried for some time: the memory of the dead incarnation is free only when
    its last reader has let go of it. An error that left the constructor, whatever it is, would be the end of the actor for good; so the
    process ends, and Ray tries anew."""
    until = time.monotonic() + ROOM_S
    while True:
        try:
            return start()
        except Exception as error:
            if time.monotonic() > until:
                log.error("storage cannot start again, Ray tries anew: %s: %s", type(error).__name__, error)
                os._exit(1)
            time.sleep(RETRY_S)


def sweep(folder: str | None, store: str, timeout_s: float = SWEEP_S) -> None:
    """Remove what the storage actors of this machine leave, in ``folder`` and in shared memory, when they could not close themselves: as
    soon as their processes are dead, which may take Ray some seconds. What lives then is not touched."""
    places, ours = {Path(folder or SHARED_MEMORY), Path(SHARED_MEMORY)}, re.compile(rf"{re.escape(store)}-[0-9a-f]{{8}}(-[0-9a-f]{{16}})?")
    until = time.monotonic() + timeout_s
    while any(ours.fullmatch(path.name.removeprefix(PREFIX)) for place in places for path in place.glob(f"{PREFIX}{store}-*")):
        for place in places:
            sweep_directory(place)
        if time.monotonic() > until:
            return
        time.sleep(0.05)


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4}
StorageActor: Any = ray.remote(**OPTIONS)(StorageShell)
_Sweep: Any = ray.remote(num_cpus=0, max_retries=0)(sweep)


@dataclass(frozen=True)
class Ensured:
    """A storage actor, and the path of its socket."""

    actor: Any
    socket: str


def ensure(config: Config, node: str, model_id: str | None = None) -> Ensured:
    """The storage actor of a node, and the directory of its store, made if there is none. ``model_id``: of the model that is served, None
    where that is not known: then the store learns whose bytes it keeps from whoever describes them. Raises :class:`StoreError` when it
    does not come up."""
    store = config.storage.name
    directory.ensure(store, node)
    name = names.storage(store, node)
    made = name not in living(lambda n: n == name)
    actor = StorageActor.options(
        name=name,
        namespace=names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=on(node),
    ).remote(config, node, {} if model_id is None else space_records(config, model_id))
    try:
        address = ray.get(actor.address.remote(), timeout=START_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        if made:
            ray.kill(actor)
        raise StoreError(f"the storage actor of this node did not start: {cause(error)}") from error
    return Ensured(actor, address["socket"])


def end(config: Config) -> None:
    """End the whole store: the storage actors of all nodes, what those leave that cannot close themselves, and the directory."""
    store = config.storage.name
    actors = living(lambda n: names.is_storage(n, store))
    closing = {name: actor.close.remote() for name, actor in actors.items()}
    patience_s = DISK_CLOSE_S if config.storage.disk_path else CLOSE_S
    closed = set(ray.wait(list(closing.values()), num_returns=len(closing), timeout=patience_s)[0]) if closing else set()
    for actor in [*actors.values(), *living(lambda n: n == names.directory(store)).values()]:
        ray.kill(actor)
    left = [name.rpartition(":")[2] for name, call in closing.items() if call not in closed or not _well(call)]
    sweeps = [_Sweep.options(scheduling_strategy=on(node)).remote(config.storage.directory, store) for node in left]
    if sweeps:
        ray.wait(sweeps, num_returns=len(sweeps), timeout=SWEEP_S + CLOSE_S)


def unreachable(config: Config) -> str:
    """Why the stores of this cluster cannot speak to each other, as a sentence; empty where they can."""
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if config.storage.host not in (LOOPBACK, "localhost", "::1") or len(addresses) < 2:
        return ""
    return (
        f"storage.host is {config.storage.host} and this cluster has nodes at {len(addresses)} addresses, so their stores cannot reach "
        "each other; set it to auto"
    )


def _well(call: Any) -> bool:
    try:
        ray.get(call, timeout=0)
    except (ray.exceptions.RayError, TimeoutError):
        return False
    return True


def on(node: str) -> NodeAffinitySchedulingStrategy:
    """There and nowhere else."""
    return NodeAffinitySchedulingStrategy(node, soft=False)
