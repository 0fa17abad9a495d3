"""One rank of a cache group: its pools, its engine, its client of the node's storage. A thin shell around the executor."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from hicache_ray.actors.messages import Joined
from hicache_ray.config import Config
from hicache_ray.errors import GroupLost
from hicache_ray.lease import Place
from hicache_ray.records import Compute, Outcome, Record
from hicache_ray.spec import CacheSpec, Component, Tier
from hicache_ray.storage.connect import open_store
from hicache_ray.store import Store

log = logging.getLogger("hicache_ray.actors")

#: Ranks that join a group have loaded their model already, so they meet soon or not at all.
JOIN_S = 30.0
WARM_UP_S = 30.0  # for the compiled loops of copies to load; without them copies are slower, and right
#: How much longer than its deadline a copy of an earlier incarnation may take to end.
DRAIN_GRACE_S = 10.0
#: Threads per kind of call. Forwards and copies run one after the other, in the order of the coordinator's calls; of transfers from and
#: to storage ``storage.workers`` run at a time, two at least, so that a slow write does not keep a read waiting.
GROUPS = {"compute": 1, "copy": 1, "control": 2}


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told at birth. ``socket``: of the node's arena, empty where storage is not attached."""

    config: Config
    rank: int
    folder: str
    capacity: Mapping[Place, int]
    socket: str


class RankShell:
    """Made by the replica, dies with it. Loading is a call of its own, so that all ranks load at once."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.incarnation = 0
        self.lock = threading.Lock()
        self.running = 0
        self.store: Store | None = None
        self.executor: Any = None
        self.attached = bool(setup.socket)
        self.swap = threading.Lock()  # of whoever changes the two above, or the store of the third

    @ray.method(concurrency_group="compute")
    def load(self) -> dict[str, Any]:
        """Load the model, make the pools, warm up what is compiled. Returns the spec and what the engine's exactness depends on."""
        from hicache_ray.copies import Mover, choose
        from hicache_ray.integrations.transformers import Engine, build
        from hicache_ray.integrations.transformers.fingerprint import fingerprint
        from hicache_ray.pool import Pool

        config = self.setup.config
        model = config.model
        loaded = build(self.setup.folder, config.cache.page_size, model.dtype, self.setup.rank, model.tp, model.device)
        self.spec: CacheSpec = loaded.spec
        device = str(loaded.model.device)
        self.mover = mover = Mover(choose(config.cache.io_backend, device, config.cache.layout), device=device)

        def pool(tier: Tier, c: Component, layout: str) -> Pool:
            slots, page = self.setup.capacity[(tier, c.name)], loaded.spec.page_size
            return Pool(c, page, slots, layout, mover.buffer(tier, slots * c.page_bytes(page)))

        layouts = ((Tier.DEVICE, config.cache.device_layout), (Tier.HOST, config.cache.layout))
        self.pools = {tier: {c.name: pool(tier, c, layout) for c in loaded.spec.components} for tier, layout in layouts}
        self.engine = Engine(loaded.model, loaded.spec, self.pools[Tier.DEVICE], self.mover.by_layer())
        return {"spec": loaded.spec, "engine": fingerprint(loaded.model), "note": self.mover.note, "pid": os.getpid()}

    @ray.method(concurrency_group="compute")
    def join(self, port: int, incarnation: int, recipe: Mapping[str, str], address: str = "127.0.0.1") -> Joined:
        """Enter the group of this incarnation, on a new port; whatever an earlier one still asks for is refused from now on.

        Raises :class:`~hicache_ray.errors.LayoutBroken` where pages do not survive the way through the tiers.
        """
        from hicache_ray.ask import tags_of
        from hicache_ray.executor import Executor, Rank
        from hicache_ray.integrations.transformers import TpConfig, join, leave
        from hicache_ray.selftest import self_test

        self._drain()
        leave()
        setup = self.setup
        tags = {name: of[setup.rank] for name, of in tags_of(self.spec, recipe).items()}
        rank = Rank(setup.rank, self.spec, self.pools, tags, setup.config.storage.batch)
        executor = Executor(rank, self.mover, None, self.engine.run, time.monotonic)
        with self.swap:
            self.executor = executor
            self._use(open_store(setup.socket) if self.store is None and self.attached else self.store)
        if note := self_test(rank, self.executor, secrets.token_hex(16), setup.config.cache.lookup_deadline_s):
            log.warning("rank %d: %s", setup.rank, note)
        engine = setup.config.engine
        join(TpConfig(setup.rank, setup.config.model.tp, port, address, JOIN_S, engine.gloo_timeout_s))
        self._warm_up()
        if warm_up := getattr(self.store, "warm_up", None):
            warm_up(WARM_UP_S)  # the loops of its copies, which would otherwise be loaded beside the first of them
        self.incarnation = incarnation
        return Joined(os.getpid(), self.attached)

    def _warm_up(self) -> None:
        """One short forward on all ranks together, so that first-use costs do not fall on a request. The pools are still empty."""
        grid = self.setup.config.cache.grid or self.spec.page_size
        count = min(grid + 1, self.setup.config.engine.max_prompt_tokens)
        tables, live = {}, {}
        for c in self.spec.components:
            if c.is_state:
                live[c.name] = 0
            else:
                tables[c.name] = np.arange(-(-(count + 1) // (self.spec.page_size * c.page_span)), dtype=np.int32)
        self.engine.run(Compute(0, "warm-up", 0, np.zeros(count, dtype=np.int32), 2, grid, tables, live))

    @ray.method(concurrency_group="compute")
    def compute(self, record: Record, incarnation: int) -> Outcome:
        return self._execute(record, incarnation)

    @ray.method(concurrency_group="copy")
    def copy(self, record: Record, incarnation: int) -> Outcome:
        return self._execute(record, incarnation)

    @ray.method(concurrency_group="store")
    def transfer(self, record: Record, incarnation: int) -> Outcome:
        return self._execute(record, incarnation)

    def _execute(self, record: Record, incarnation: int) -> Outcome:
        with self.lock:
            if incarnation != self.incarnation:
                raise GroupLost(f"rank {self.setup.rank} is of incarnation {self.incarnation}; a record of {incarnation} is ignored")
            self.running += 1
        try:
            return self.executor.execute(record)
        finally:
            with self.lock:
                self.running -= 1

    def _drain(self) -> None:
        """No copy of an earlier incarnation is running when this returns."""
        with self.lock:
            self.incarnation = 0
        timeout_s = drain_s(self.setup.config)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with self.lock:
                if not self.running:
                    return
            time.sleep(0.005)
        raise GroupLost(f"rank {self.setup.rank} has copies that did not end within {timeout_s:g} s")

    @ray.method(concurrency_group="control")
    def reopen_storage(self) -> None:
        """Let go of a dead incarnation of storage and of its memory. Transfers under way fail; later ones look for the next."""
        with self.swap:
            old = self.store
            if old is None:
                return
            self._use(open_store(self.setup.socket))
        old.close()

    def _use(self, store: Store | None) -> None:
        """What is executed from now on finds this one; whatever runs keeps the one that it has begun with."""
        self.store = store
        if self.executor is not None:
            self.executor.store = store

    @ray.method(concurrency_group="control")
    def detach_storage(self) -> None:
        """Let go of storage and its memory. Transfers under way fail, later ones are refused."""
        with self.swap:
            self.attached = False
            old = self.store
            self._use(None)
        if old is not None:
            old.close()

    @ray.method(concurrency_group="control")
    def attach_storage(self) -> None:
        with self.swap:
            self.attached = True
            if self.store is None:
                self._use(open_store(self.setup.socket))

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return os.getpid()


def drain_s(config: Config) -> float:
    """Seconds within which the copies of an earlier incarnation have ended."""
    return max(config.cache.prefetch_timeout_cap_s, config.cache.load_deadline_s) + DRAIN_GRACE_S


OPTIONS: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}


def rank_actor(config: Config) -> Any:
    """The actor class of a rank: its threads depend on the configuration."""
    options: dict[str, Any] = OPTIONS | {"concurrency_groups": GROUPS | {"store": config.storage.workers}}
    made: Any = ray.remote(**options)(RankShell)
    return made
