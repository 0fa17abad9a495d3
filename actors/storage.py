"""The storage actor: owns the arena of its node and its socket service. Detached, one per node; no page byte passes through it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors import names
from hicache_ray.errors import StoreError
from hicache_ray.storage import ArenaConfig, ArenaService

START_S = 60.0


class StorageShell:
    """Lives until :meth:`close` and ``ray.kill``; Ray starts it anew after a crash, empty and with a new incarnation."""

    def __init__(self, config: ArenaConfig) -> None:
        self.service = ArenaService(config).start()

    def address(self) -> dict[str, str]:
        return self.service.address.to_dict()

    def stats(self) -> dict[str, Any]:
        return asdict(self.service.stats())

    def ping(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Hang up on all clients and remove segment and socket."""
        self.service.close()


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4}
StorageActor: Any = ray.remote(**OPTIONS)(StorageShell)


def ensure(config: ArenaConfig, node: str) -> Any:
    """The storage actor of a node, made if there is none. Raises :class:`StoreError` when it does not come up."""
    actor = StorageActor.options(
        name=names.storage(config.name, node),
        namespace=names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(config)
    try:
        ray.get(actor.address.remote(), timeout=START_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        ray.kill(actor)
        raise StoreError(f"the storage actor of this node did not start: {error}") from error
    return actor
