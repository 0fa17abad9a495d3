"""The directory: which nodes have a storage that lives, with which incarnation. One per store, detached; no page byte passes through it.

It keeps nothing that its nodes do not tell it again every second, so that it may die at any time: the next one is empty, and full a second
later. Until then (``settled`` is false) nobody is taken for gone because it is not named.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors import names
from hicache_ray.actors.remote import cause
from hicache_ray.errors import StoreError

#: A node that has not been heard of for so long is named no more. That it is dead is for its peers to notice, much earlier.
KEEP_S = 30.0
#: How long a directory that has just begun may know only some of the nodes.
SETTLE_S = 5.0
#: Longest wait for the directory to begin.
START_S = 60.0


@dataclass
class Registry:
    """The directory as a plain object, usable by several threads. ``addresses`` are those of :class:`StorageNode`, as plain data."""

    clock: Callable[[], float] = time.monotonic
    keep_s: float = KEEP_S
    settle_s: float = SETTLE_S
    _heard: dict[str, tuple[float, Mapping[str, str]]] = field(default_factory=dict)  # node -> (when, address)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def register(self, address: Mapping[str, str]) -> dict[str, Any]:
        """A node lives; the latest address of a node counts. Returns the same as :meth:`members`."""
        with self._lock:
            self._heard[address["node"]] = (self.clock(), dict(address))
        return self.members()

    def members(self) -> dict[str, Any]:
        """``members``: addresses of the nodes, by their names; ``settled``: whether one that is not among them is gone."""
        with self._lock:
            now = self.clock()
            self._heard = {node: told for node, told in self._heard.items() if now - told[0] <= self.keep_s}
            found = [dict(address) for _, (_, address) in sorted(self._heard.items())]
            return {"members": found, "settled": now - self._began >= self.settle_s}


class DirectoryShell:
    """``token``: of the cluster's stores. Ray passes it again when it starts the directory anew, so that it outlives it."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._registry = Registry()

    def token(self) -> str:
        """For storage actors only."""
        return self._token

    def register(self, address: Mapping[str, str]) -> dict[str, Any]:
        return self._registry.register(address)

    def members(self) -> dict[str, Any]:
        return self._registry.members()

    def ping(self) -> int:
        return os.getpid()


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4}
DirectoryActor: Any = ray.remote(**OPTIONS)(DirectoryShell)


def ensure(store: str, node: str) -> Any:
    """The directory of a store, made if there is none, on this node as long as that lives. Raises :class:`StoreError` when it does not come
    up."""
    actor = DirectoryActor.options(
        name=names.directory(store),
        namespace=names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    ).remote(secrets.token_urlsafe(32))
    try:
        ray.get(actor.ping.remote(), timeout=START_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise StoreError(f"the directory of store {store} did not start: {cause(error)}") from error
    return actor


def find(store: str) -> Any:
    """The directory of a store. Raises :class:`StoreError` where there is none."""
    try:
        return ray.get_actor(names.directory(store), names.NAMESPACE)
    except ValueError as error:
        raise StoreError(f"there is no directory of store {store}") from error
