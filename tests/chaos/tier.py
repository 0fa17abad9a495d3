"""The tier under fault, as its operator sees it: whom it consists of, whether they answer, what stays when nothing is asked of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import ray

from hicache_ray.actors import cluster, names
from hicache_ray.actors.cluster import Cluster
from hicache_ray.actors.remote import living
from hicache_ray.config_sources import load
from hicache_ray.storage.owned import PREFIX
from tests.actors.rig import command, shared_memory, small
from tests.chaos.clients import NEW_TOKENS, Clients, Expected, prompts
from tests.chaos.house import House

ASK_S = 2.0
LEASE_S = 5.0
#: How long after a fault the tier may take to let go of everything: leases of dead readers run out, dead workers are noticed.
REST_S = 30.0
#: How long the last workers may take to end when the tier has ended.
END_S = 5.0
TITLES = ("RankShell", "CoordinatorShell", "StorageShell", "ServeReplica", "DirectoryShell", "GatewayShell")


def settings(disk: str, tp: int) -> dict[str, object]:
    """Two replicas, storage on every node with a disk and two copies of everything; device and host hold less than the clients ask for."""
    return {
        **small(),
        "model.tp": tp,
        "serve.replicas": 2,
        "cache.device_tokens": 1024,
        "engine.max_prompt_tokens": 900,
        "engine.max_new_tokens": 16,
        "engine.max_queue": 32,
        "engine.gloo_timeout_s": 3.0,
        "engine.forward_deadline_s": 8.0,
        "storage.size": "64MiB",
        "storage.lease_s": LEASE_S,
        "storage.replicas": 2,
        "storage.host": "auto",
        "storage.disk_path": disk,
        "storage.disk_size": "256MiB",
    }


def begin(house: House, tp: int) -> Cluster:
    """The tier, on the nodes that are up."""
    disk = house.folder.parent / "disk"
    disk.mkdir(exist_ok=True)
    return cluster.start(load(flags=settings(str(disk), tp)).config)


@dataclass
class Tier:
    cluster: Cluster
    house: House

    # -- who is there ------------------------------------------------------------------------------------------------------------

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What the coordinators that answer tell, by replica."""
        return self._told(cluster.find(self.cluster.config.serve.name))

    def storages(self) -> dict[str, dict[str, Any]]:
        """What the storage actors that answer tell, by the id of their node."""
        return self._told(living(lambda name: names.is_storage(name, self.store)))

    @property
    def store(self) -> str:
        return self.cluster.config.storage.name

    def replica_on(self, node: str) -> tuple[str, dict[str, Any]]:
        """The replica on a node: its name and what its coordinator tells."""
        return next((name, row) for name, row in self.replicas().items() if row["node"] == node)

    @staticmethod
    def _told(actors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        calls = {name.rpartition(":")[2]: actor.stats.remote() for name, actor in actors.items()}
        ray.wait(list(calls.values()), num_returns=max(len(calls), 1), timeout=ASK_S) if calls else None
        out = {}
        for name, call in calls.items():
            try:
                out[name] = ray.get(call, timeout=0)
            except (ray.exceptions.RayError, TimeoutError):
                continue
        return out

    @staticmethod
    def ping(beginning: str) -> set[int]:
        """Processes of the actors whose names begin so and that answer."""
        calls = [actor.ping.remote() for actor in living(lambda name: name.startswith(beginning)).values()]
        done = ray.wait(calls, num_returns=len(calls), timeout=0.5)[0] if calls else []
        found = set()
        for call in done:
            try:
                found.add(int(ray.get(call, timeout=0)))
            except (ray.exceptions.RayError, TimeoutError):
                continue
        return found

    # -- the work and its answers --------------------------------------------------------------------------------------------------

    def clients(self, count: int = 8) -> Clients:
        """Clients with their prompts and the answers they must get: the tokens of the plain model, the bits of a cold computation."""
        work = prompts()
        command = [sys.executable, "-m", "tests.chaos.reference", self.cluster.prepared.folder, str(NEW_TOKENS)]
        plain = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cold = [self._cold(tokens) for tokens in work]
        told, _ = plain.communicate(json.dumps(work), timeout=300)
        tokens = json.loads(told.strip().splitlines()[-1])
        for which, (here, there) in enumerate(zip(tokens, cold, strict=True)):
            if list(there.tokens) != here:
                raise AssertionError(f"prompt {which}: the plain model says {here}, a cold computation {there.tokens}")
        return Clients(self.cluster.url, work, cold, count)

    def _cold(self, tokens: Sequence[int]) -> Expected:
        """Everything is flushed before, so nothing of the answer comes from a cache."""
        for _ in range(20):
            self.flush("device", "host", "storage")
            body = {"input_ids": list(tokens), "max_new_tokens": NEW_TOKENS, "return_logprob": True}
            response = httpx.post(f"{self.cluster.url}/generate", json=body, timeout=120.0)
            response.raise_for_status()
            answer = response.json()
            if answer["computed_tokens"] == len(tokens):
                return Expected(tuple(answer["output_ids"]), tuple(answer["logprobs"]))
        raise AssertionError(f"a flushed tier still has {len(tokens) - answer['computed_tokens']} tokens")

    def flush(self, *tiers: str) -> None:
        headers = {"Authorization": f"Bearer {self.cluster.token}"}
        body = {"tiers": tiers, "timeout_s": 30}
        httpx.post(f"{self.cluster.admin_url}/flush", json=body, headers=headers, timeout=60.0).raise_for_status()

    # -- what is left over ---------------------------------------------------------------------------------------------------------

    def audit(self, nodes: Sequence[str]) -> str:
        """With no request under way: what is still held though it should not be, after some patience; empty where nothing is."""
        until = time.monotonic() + REST_S
        while problem := self._unrest(nodes):
            if time.monotonic() > until:
                return problem
            time.sleep(0.25)
        return ""

    def _unrest(self, nodes: Sequence[str]) -> str:
        replicas, storages, alive = self.replicas(), self.storages(), self.house.alive()
        wanted = self.cluster.config.serve.replicas
        if len(replicas) != wanted or len(storages) != len(nodes):
            return f"{len(replicas)} coordinators and {len(storages)} storages answer"
        for name, row in replicas.items():
            held = {f"{tier} {c}": r["held"] for tier, cs in row["tiers"].items() for c, r in cs.items() if r.get("held")}
            if row["active"] or row["leases"] or held or row["lost"]:
                return f"replica {name}: {row['active']} active, {row['leases']} leases, held {held}, lost {row['lost']!r}"
        by_id = {id: name for name, id in alive.items()}
        for node, row in storages.items():
            if row["leases"] or row["pending_bytes"]:
                return f"storage {by_id.get(node, node)}: {row['leases']} leases, {row['pending_bytes']} bytes pending"
        return self._processes(replicas, storages) or self._files(storages) or self._consistent()

    def _processes(self, replicas: Mapping[str, Any], storages: Mapping[str, Any]) -> str:
        tp, found = self.cluster.config.model.tp, self.house.workers(TITLES)
        wanted = dict(zip(TITLES, (len(replicas) * tp, len(replicas), len(storages), len(replicas), 1, 1), strict=True))
        wrong = [f"{len(found[t])} of {t} instead of {count}" for t, count in wanted.items() if len(found[t]) != count]
        return "processes: " + ", ".join(wrong) if wrong else ""

    def _files(self, storages: Mapping[str, Any]) -> str:
        """A node's socket lies in STORE-NODE, its memory in STORE-NODE-INCARNATION."""
        known = {f"{self.store}-{node[:8]}" for node in storages}
        known |= {f"{self.store}-{node[:8]}-{row['incarnation']}" for node, row in storages.items()}
        strange = [path.name for path in shared_memory(self.store) if path.name.removeprefix(PREFIX) not in known]
        return f"in shared memory: {', '.join(strange)}" if strange else ""

    def _consistent(self) -> str:
        for name, actor in cluster.find(self.cluster.config.serve.name).items():
            try:
                ray.get(actor.check.remote(), timeout=ASK_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                return f"replica {name} is not consistent: {error}"
        return ""


def left(house: House, store: str, tiers_only: bool = False) -> list[str]:
    """After the end of the tier: workers of ours and shared memory. After the end of Ray: any process at all. What is about to end is given
    some seconds."""
    until = time.monotonic() + END_S
    while (found := _left(house, store, tiers_only)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _left(house: House, store: str, tiers_only: bool) -> list[str]:
    found = [f"{title} {pid}" for title, pids in house.workers(TITLES).items() for pid in pids]
    if not tiers_only:
        found = [f"{' '.join(command(p))[:80]} ({p.pid})" for name in "abc" for p in house.members(name)]
    return found + [f"/dev/shm/{path.name}" for path in (shared_memory(store) if store else [])]
