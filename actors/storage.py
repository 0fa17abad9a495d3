"""The storage actor: owns the arena of its node and its socket service. Detached, one per node; no page byte passes through it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors import names
from hicache_ray.actors.remote import cause, living
from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import ArenaConfig, ArenaService
from hicache_ray.storage.owned import sweep as sweep_directory

log = logging.getLogger("hicache_ray.actors")

START_S = 60.0
#: Longest wait for those who use storage to let go of a dead incarnation, and for its memory to become free.
TELL_S = 10.0
ROOM_S = 60.0
SWEEP_S = 15.0


class StorageShell:
    """Lives until :meth:`close` and ``ray.kill``; Ray starts it anew after a crash, empty and with a new incarnation."""

    def __init__(self, config: ArenaConfig) -> None:
        if ray.get_runtime_context().was_current_actor_reconstructed:
            tell_coordinators()
            self.service = _start_again(config)
        else:
            self.service = ArenaService(config).start()

    def address(self) -> dict[str, str]:
        return self.service.address.to_dict()

    def stats(self) -> dict[str, Any]:
        """Counters since this incarnation began, and its process."""
        return {**asdict(self.service.stats()), "incarnation": self.service.address.incarnation, "pid": os.getpid()}

    def ping(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Hang up on all clients and remove segment and socket."""
        self.service.close()


def tell_coordinators() -> None:
    """L3 begins empty after a crash, while coordinators believe of some pages that it has them, and they and their ranks still hold the
    memory of the dead incarnation. Best effort: who does not answer is dead, or has not begun."""
    told = [actor.storage_died.remote() for actor in living(names.is_any_coordinator).values()]
    if told:
        ray.wait(told, num_returns=len(told), timeout=TELL_S)


def _start_again(config: ArenaConfig) -> ArenaService:
    """The memory of the dead incarnation is free only when its last reader has let go of it; until then there may be no room."""
    until = time.monotonic() + ROOM_S
    while True:
        try:
            return ArenaService(config).start()
        except ConfigError as error:
            if time.monotonic() > until:
                log.error("storage cannot start again, Ray tries anew: %s", error)
                os._exit(1)  # an error raised here would be for good
            time.sleep(0.2)


def sweep(config: ArenaConfig, timeout_s: float = SWEEP_S) -> None:
    """Remove what a storage actor of this machine leaves when it could not close itself: as soon as its process is dead, which may take
    Ray some seconds. What lives then is not touched."""
    until = time.monotonic() + timeout_s
    while config.socket_path.parent.exists():
        sweep_directory(config.directory)
        if time.monotonic() > until:
            return
        time.sleep(0.05)


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4}
StorageActor: Any = ray.remote(**OPTIONS)(StorageShell)


@dataclass(frozen=True)
class Ensured:
    """A storage actor, the path of its socket, and whether it was made just now."""

    actor: Any
    socket: str
    made: bool


def ensure(config: ArenaConfig, node: str) -> Ensured:
    """The storage actor of a node, made if there is none. Raises :class:`StoreError` when it does not come up."""
    name = names.storage(config.name, node)
    made = name not in living(lambda n: n == name)
    actor = StorageActor.options(
        name=name,
        namespace=names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(config)
    try:
        address = ray.get(actor.address.remote(), timeout=START_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        if made:
            ray.kill(actor)
        raise StoreError(f"the storage actor of this node did not start: {cause(error)}") from error
    return Ensured(actor, address["socket"], made)
