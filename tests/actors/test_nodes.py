"""A tier over two nodes: what one computes the other reuses, and what is left when a storage, a directory or the whole tier ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from hicache_ray.errors import StoreError
from hicache_ray.storage.connect import open_store
from tests.actors.rig import GRID, kill, prompt, shared_memory, small, until

pytestmark = pytest.mark.ray
TIMEOUT_S = 2.0


@dataclass
class Nodes:
    """The process that runs the cluster, as its caller sees it. ``up``: what it told when it was up."""

    process: subprocess.Popen[str]
    settings: dict[str, Any]
    up: dict[str, Any] = field(default_factory=dict)
    left: list[str] | None = None

    def tell(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise AssertionError(f"the cluster has ended: {self.process.wait(60)}")

    def ask(self, command: str, *args: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()
        return self.tell()

    def admin(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.up['token']}"}
        return httpx.request(method, f"{self.up['admin']}{path}", headers=headers, timeout=60.0, **more)

    def stats(self) -> dict[str, Any]:
        told: dict[str, Any] = self.admin("GET", "/stats").json()
        return told

    def flushed(self, *tiers: str) -> bool:
        """Complete; or a replica that is gone has not been missed yet."""
        response = self.admin("POST", "/flush", json={"tiers": tiers, "timeout_s": 30})
        assert response.status_code in (200, 503), response.text
        return response.status_code == 200

    def stored(self, replica: str, tokens: list[int]) -> None:
        """Wait until L3 holds all of a prompt that a replica's device holds."""

        def complete() -> bool:
            held = self.ask("where", replica, tokens)["held"]
            return all(held["storage"][name] >= count > 0 for name, count in held["device"].items())

        until(complete, "the backup to storage")

    def settled(self) -> dict[str, Any]:
        """Storage of both nodes, once each knows that the other lives as it is now."""

        def both() -> dict[str, Any] | None:
            found: dict[str, Any] = self.ask("storages")
            now = {node: row["incarnation"] for node, row in found.items()}
            known = [{n: m["incarnation"] for n, m in row["members"].items() if m["alive"]} for row in found.values()]
            return found if len(now) == 2 and all(seen == now for seen in known) else None

        return until(both, "two storage nodes that know each other")


@contextmanager
def running(settings: dict[str, Any], repository: Path, disk: Path) -> Iterator[Nodes]:
    """Two nodes with a replica each; nothing of them is left afterwards."""
    begin = [sys.executable, "-m", "tests.actors.nodes", json.dumps(settings), str(disk)]
    process = subprocess.Popen(begin, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    it = Nodes(process, settings)
    processes: list[psutil.Process] = []
    try:
        it.up = it.tell()
        yield it
        processes = psutil.Process(process.pid).children(recursive=True)
        kill(next(iter(it.ask("storages").values()))["pid"], signal.SIGSTOP)  # it cannot close itself
        assert process.stdin is not None
        process.stdin.close()
        it.left = it.tell()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        for each in processes:
            if each.is_running():
                each.kill()
    assert [name for name in it.left if name.startswith("hicache:")] == []
    assert shared_memory(str(settings["storage.name"])) == []


@pytest.fixture(scope="module")
def nodes(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    settings = {**small(), "model.tp": 1, "serve.replicas": 2, "storage.label": "rack", "storage.host": "auto"}
    with running(settings, repository, tmp_path_factory.mktemp("disk")) as it:
        yield it


def far(nodes: Nodes) -> dict[str, Any]:
    """The storage of the node on which the driver is not."""
    (row,) = (row for row in nodes.settled().values() if row["socket"] != nodes.up["socket"])
    return row


def placed(nodes: Nodes) -> list[tuple[str, str]]:
    """(node, replica) of both replicas."""
    rows = nodes.ask("replicas")
    assert len(rows) == 2
    return [(node, rows[node]["name"]) for node in sorted(rows)]


def test_a_prompt_of_one_node_is_reused_on_the_other_bit_for_bit(nodes: Nodes) -> None:
    found = nodes.settled()
    (one, first), (other, second) = placed(nodes)
    assert {found[one]["label"], found[other]["label"]} == {"one", "two"}
    tokens = prompt(5000, 4 * GRID + 1)
    cold = nodes.ask("generate", first, tokens)
    assert (cold["storage"], cold["computed"]) == (0, len(tokens))
    nodes.stored(first, tokens)
    before = nodes.settled()
    assert before[one]["objects"] - found[one]["objects"] == 16 + 4
    assert before[other]["objects"] == found[other]["objects"]  # the bytes lie with their writer
    until(lambda: nodes.ask("where", second, tokens)["resumable"]["storage"] == 4 * GRID, "the other node's knowledge of it")
    warm = nodes.ask("generate", second, tokens)
    assert (warm["device"], warm["host"], warm["storage"], warm["computed"]) == (0, 0, 4 * GRID, 1)
    assert (warm["tokens"], warm["logprobs"]) == (cold["tokens"], cold["logprobs"])


def test_t095_a_clear_reaches_all_nodes_and_the_index(nodes: Nodes) -> None:
    nodes.settled()
    (_, first), (_, second) = placed(nodes)
    tokens, others = prompt(5010, 2 * GRID + 1), prompt(5011, 2 * GRID + 1)
    nodes.ask("generate", first, tokens)
    nodes.ask("generate", second, others)
    nodes.stored(first, tokens)
    nodes.stored(second, others)
    assert nodes.flushed("device", "host")
    for replica in (first, second):
        for each in (tokens, others):  # with L3 kept, it names the store's tier
            found = nodes.ask("where", replica, each)
            assert found["resumable"] == {"device": 0, "host": 0, "storage": 2 * GRID}
    assert nodes.flushed("storage")
    for replica in (first, second):
        for each in (tokens, others):
            found = nodes.ask("where", replica, each)
            assert (sum(found["held"]["storage"].values()), found["resumable"]["storage"]) == (0, 0)
    assert [row["objects"] for row in nodes.settled().values()] == [0, 0]
    assert nodes.ask("generate", second, tokens)["computed"] == len(tokens)


def test_stats_show_every_node(nodes: Nodes) -> None:
    nodes.settled()
    told = nodes.stats()
    assert set(told["storage"]) == set(nodes.up["names"])
    for node, row in told["storage"].items():
        assert row["node"] == node
        assert {name for name, member in row["members"].items() if member["alive"]} == set(told["storage"])
        assert row["disk"] is None
        assert row["directory"]["beats"] > 0
        assert row["tcp"]["connections"] > 0
        assert row["capacity_bytes"] > 0
    assert {row["node"] for row in told["replicas"].values()} == set(told["storage"])


def test_t097_storage_killed_during_gets(nodes: Nodes) -> None:
    """20 gets from the other node and 20 on the same one, and its storage dies by kill -9 under them."""
    before = nodes.settled()
    (one, first), (other, second) = placed(nodes)
    ids, pages = objects(16, 1 << 20)
    here, there = (open_store(before[node]["socket"]) for node in (one, other))
    try:
        assert here.put(ids, pages, 10.0) == (1 << len(ids)) - 1
        until(lambda: read(there, ids, pages) == len(ids), "a read of all from the other node")
        killed = threading.Event()

        def reader(store: Any) -> list[int]:
            """Reads until the kill, then five more; what counts as read was equal to its source."""
            while not killed.is_set():
                read(store, ids, pages)
            return [read(store, ids, pages) for _ in range(5)]

        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(reader, store) for store in (here, there, here, there)]
            kill(before[one]["pid"])
            until(lambda: not psutil.pid_exists(before[one]["pid"]), "the death of the storage")
            killed.set()
            assert [call.result() for call in calls] == [[0] * 5] * 4
        after = nodes.settled()
        assert after[one]["incarnation"] != before[one]["incarnation"]
        assert after[other]["incarnation"] == before[other]["incarnation"]
        assert after[one]["objects"] == 0
        for store in (here, there):  # what they knew of the old one names nothing
            assert until(lambda store=store: answer(store, ids), "an answer about the old objects") == [0, 0]
            assert read(store, ids, pages) == 0
        assert here.put(ids, pages, 10.0) == (1 << len(ids)) - 1
        until(lambda: read(there, ids, pages) == len(ids), "a read from the new incarnation")
    finally:
        here.close()
        there.close()
    tokens = prompt(5020, 2 * GRID + 1)
    cold = nodes.ask("generate", first, tokens)
    nodes.stored(first, tokens)
    until(lambda: nodes.ask("where", second, tokens)["resumable"]["storage"] == 2 * GRID, "the other node's knowledge of it")
    warm = nodes.ask("generate", second, tokens)
    assert (warm["storage"], warm["tokens"], warm["logprobs"]) == (2 * GRID, cold["tokens"], cold["logprobs"])


def test_a_killed_directory_is_filled_again_and_nobody_is_lost(nodes: Nodes) -> None:
    before, old = nodes.settled(), nodes.ask("directory")["pid"]
    kill(old)

    def again() -> dict[str, Any] | None:
        told: dict[str, Any] | None = nodes.ask("directory")
        return told if told and told["pid"] != old and len(told["members"]) == 2 else None

    assert {member["node"] for member in until(again, "a directory that knows both")["members"]} == set(before)
    after = nodes.settled()
    assert {node: row["incarnation"] for node, row in after.items()} == {node: row["incarnation"] for node, row in before.items()}


def test_storage_with_a_disk_is_warm_after_a_kill(nodes: Nodes) -> None:
    node = sorted(nodes.up["names"])[0]
    store = open_store(nodes.ask("begin_disk", node))
    ids, pages = objects(8, 1 << 18)
    try:
        assert store.put(ids, pages, 10.0) == (1 << len(ids)) - 1
        row = until(lambda: written(nodes, node, len(ids)), "the write to the disk")
        kill(row["pid"])
        until(lambda: another(nodes, node, row["incarnation"]), "the next incarnation")
        until(lambda: read(store, ids, pages) == len(ids), "hits in what the disk has kept")
    finally:
        store.close()
        nodes.ask("end_disk")
    assert nodes.ask("storages", True) == {}


def test_a_lost_node_takes_its_bytes_along_and_no_more(nodes: Nodes) -> None:
    """The last test: the node does not come back."""
    gone = far(nodes)["node"]
    ((_, replica),) = [(node, name) for node, name in placed(nodes) if node != gone]
    tokens = prompt(5030, 2 * GRID + 1)
    cold = nodes.ask("generate", replica, tokens)
    nodes.stored(replica, tokens)
    nodes.ask("lose", gone)
    until(lambda: nodes.flushed("device", "host"), "a flush that waits for nobody who is gone")
    warm = nodes.ask("generate", replica, tokens)
    assert (warm["storage"], warm["tokens"], warm["logprobs"]) == (2 * GRID, cold["tokens"], cold["logprobs"])
    until(lambda: set(nodes.stats()["storage"]) == set(nodes.up["names"]) - {gone}, "stats without the node that is gone")


# -- objects ---------------------------------------------------------------------------------------------------------------------


def objects(count: int, size: int) -> tuple[list[bytes], list[np.ndarray[Any, Any]]]:
    mark = uuid.uuid4().bytes
    random = np.random.default_rng(list(mark))
    return [mark * 3 + i.to_bytes(16, "big") for i in range(count)], [random.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


def read(store: Any, ids: list[bytes], pages: list[np.ndarray[Any, Any]]) -> int:
    """How many were hits; all of those must be what was put. A store that fails is a miss."""
    targets = [np.zeros(len(page), np.uint8) for page in pages]
    try:
        hits = store.get(ids, targets, TIMEOUT_S)
    except StoreError:
        return 0
    for i in range(len(ids)):
        if hits >> i & 1:
            assert np.array_equal(targets[i], pages[i])
    return int(hits).bit_count()


def answer(store: Any, ids: list[bytes]) -> list[int] | None:
    """Hits and retries of a lookup, None where nobody can say yet."""
    try:
        found = [store.lookup([id[:48]], [id[48:]], TIMEOUT_S)[id[48:]] for id in ids]
    except StoreError:
        return None
    counts = [sum(a.hit for a in found), sum(a.retry for a in found)]
    return None if counts[1] else counts


def written(nodes: Nodes, node: str, count: int) -> dict[str, Any] | None:
    row: dict[str, Any] = nodes.ask("storages", True)[node]
    return row if row["disk"]["objects"] == count else None


def another(nodes: Nodes, node: str, old: str) -> bool:
    row = nodes.ask("storages", True).get(node)
    return row is not None and row["incarnation"] != old
