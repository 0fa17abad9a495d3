"""``python -m tests.actors.nodes SETTINGS DISK``: a Ray cluster of two nodes on this machine, a tier on it with a replica on each, and a
second store that has a disk. A process of its own, because a process can only be in one Ray. It answers commands, a JSON list a line, and
stops everything at the end of its input, telling what is left then."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayCluster

from hicache_ray.actors import cluster, directory, names, storage
from hicache_ray.actors.cluster import Cluster
from hicache_ray.actors.local import NICENESS
from hicache_ray.actors.messages import Prompt
from hicache_ray.actors.remote import living
from hicache_ray.config_sources import changed, load

#: A replica needs 1.1 CPUs: two do not fit on one node.
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
ASK_S = 60.0


class Commands:
    """What the tests ask for; every method is a command."""

    def __init__(self, nodes: RayCluster, running: Cluster, disk: str) -> None:
        self._nodes, self._running = nodes, running
        self._other = changed(running.config, {"storage.name": f"{running.config.storage.name}-d", "storage.disk_path": disk})
        self._requests = 0

    def replicas(self) -> dict[str, Any]:
        """Rows of all replicas by the node they are on."""
        rows = {name: ray.get(actor.stats.remote(), timeout=ASK_S) for name, actor in cluster.find("hicache").items()}
        return {row["node"]: {**row, "name": name} for name, row in rows.items()}

    def scale(self, count: int) -> None:
        self._running.scale(count)

    def generate(self, replica: str, tokens: list[int], new: int = 4) -> dict[str, Any]:
        """By this replica, around Serve's router."""
        self._requests += 1
        prompt = Prompt(f"r{self._requests}", tokens, new)
        out: dict[str, Any] = {"tokens": [], "logprobs": []}
        for ref in cluster.find("hicache")[replica].generate.options(num_returns="streaming").remote(prompt):
            event = ray.get(ref, timeout=ASK_S)
            for key in ("tokens", "logprobs"):
                out[key] += event.get(key, [])
            out |= {k: v for k, v in event.get("report", {}).items() if k in ("device", "host", "storage", "computed")}
        return out

    def where(self, replica: str, tokens: list[int]) -> dict[str, Any]:
        found: dict[str, Any] = ray.get(cluster.find("hicache")[replica].where.remote(tokens), timeout=ASK_S)
        return found

    def storages(self, disk: bool = False) -> dict[str, Any]:
        """What the storage actors tell, by node; those that do not answer are left out."""
        store = (self._other if disk else self._running.config).storage.name
        found = {}
        for name, actor in living(lambda n: names.is_storage(n, store)).items():
            try:
                found[name.rpartition(":")[2]] = ray.get(actor.stats.remote(), timeout=5.0)
            except (ray.exceptions.RayError, TimeoutError):
                continue
        return found

    def directory(self) -> dict[str, Any] | None:
        """Its process and whom it knows; None while it does not answer."""
        actor = directory.find(self._running.config.storage.name)
        try:
            return {"pid": ray.get(actor.ping.remote(), timeout=ASK_S), **ray.get(actor.members.remote(), timeout=ASK_S)}
        except ray.exceptions.RayError:
            return None

    def lose(self, node: str) -> None:
        """The whole node, at once."""
        (lost,) = (each for each in self._nodes.list_all_nodes() if each.node_id == node)
        self._nodes.remove_node(lost, allow_graceful=False)

    def begin_disk(self, node: str) -> str:
        return storage.ensure(self._other, node).socket

    def end_disk(self) -> None:
        storage.end(self._other)


def main() -> None:
    settings, disk = json.loads(sys.argv[1]), sys.argv[2]
    os.environ[NICENESS] = "0"
    nodes = RayCluster()
    try:
        _add(nodes, node_name="a", labels={"rack": "one"})
        _add(nodes, node_name="b", labels={"rack": "two"})
        nodes.wait_for_nodes(ASK_S)
        with cluster.start(load(flags=settings).config, address=nodes.address) as running:
            ray.init(address=nodes.address, ignore_reinit_error=True, log_to_driver=False)
            commands = Commands(nodes, running, disk)
            told = {"url": running.url, "admin": running.admin_url, "token": running.token, "socket": running.socket}
            _say({**told, "names": {n["NodeID"]: n["NodeName"] for n in ray.nodes()}})
            for line in sys.stdin:
                name, *args = json.loads(line)
                _say(getattr(commands, name)(*args))
        ray.init(address=nodes.address, log_to_driver=False)
        _say(list(living(lambda _: True)))
        ray.shutdown()
    finally:
        nodes.shutdown()


def _add(nodes: RayCluster, **options: Any) -> None:
    """Ray gives a node 30 s to start, which a busy machine may not keep: twice."""
    try:
        nodes.add_node(**NODE, **options)
    except Exception:  # Ray raises no narrower one
        nodes.add_node(**NODE, **options)


def _say(what: object) -> None:
    print(f"> {json.dumps(what)}", flush=True)


if __name__ == "__main__":
    main()
