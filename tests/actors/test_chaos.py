"""A storage process dies, or freezes, under clients at work, on two nodes with two copies. All faults, on real links: ``make chaos``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.actors.rig import kill, small, until
from tests.actors.test_nodes import Nodes, placed, running
from tests.chaos.clients import NEW_TOKENS, Clients, Expected, back, prompts

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
USUAL = 0.9


@pytest.fixture(scope="module")
def nodes(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    disk = tmp_path_factory.mktemp("disk")
    more = {"storage.replicas": 2, "storage.disk_path": str(disk), "storage.disk_size": "64MiB", "storage.lease_s": 5.0}
    pools = {"cache.device_tokens": 1024, "engine.max_prompt_tokens": 900, "engine.max_new_tokens": 16}
    settings = {**small(), **pools, **more, "model.tp": 1, "serve.replicas": 2, "storage.label": "rack", "storage.host": "auto"}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING", "0")  # both replicas get requests
        with running(settings, repository, disk) as it:
            yield it


@pytest.fixture(scope="module")
def work(nodes: Nodes) -> tuple[list[list[int]], list[Expected]]:
    """Prompts, and their answers as a cold tier computes them. All tiers together hold them, the device alone does not."""
    tokens, answers = prompts(3), []
    for each in tokens:
        until(lambda: nodes.flushed("device", "host", "storage"), "a flush")
        body = {"input_ids": each, "max_new_tokens": NEW_TOKENS, "return_logprob": True}
        answer = httpx.post(f"{nodes.up['url']}/generate", json=body, timeout=60.0).json()
        assert answer["computed_tokens"] == len(each)
        answers.append(Expected(tuple(answer["output_ids"]), tuple(answer["logprobs"])))
    return tokens, answers


@contextmanager
def at_work(nodes: Nodes, work: tuple[list[list[int]], list[Expected]]) -> Iterator[Clients]:
    """Clients of a warm tier; at the end nobody has got a wrong answer, or none, and nothing is leased."""
    clients = Clients(nodes.up["url"], *work, count=4).start()
    try:
        until(lambda: back(clients.since(0.0), USUAL, 2), "the usual hit rate")
        yield clients
    finally:
        clients.close()
    assert [one for one in clients.sent if one.error or one.wrong] == []
    until(lambda: _at_rest(nodes), "rest")


def _at_rest(nodes: Nodes) -> bool:
    replicas, storages = nodes.ask("replicas"), nodes.ask("storages")
    counts = [row["active"] + row["leases"] for row in replicas.values()]
    return counts == [0, 0] and [row["leases"] + row["pending_bytes"] for row in storages.values()] == [0, 0]


def test_storage_killed_under_clients(nodes: Nodes, work: Any) -> None:
    before = nodes.settled()
    (node, _), _ = placed(nodes)
    with at_work(nodes, work) as clients:
        kill(before[node]["pid"])
        after = until(lambda: nodes.settled(), "both storages")
        assert after[node]["incarnation"] != before[node]["incarnation"]
        again = time.monotonic()
        until(lambda: back(clients.since(again), USUAL, 2), "the usual hit rate")


def test_storage_frozen_under_clients(nodes: Nodes, work: Any) -> None:
    before = nodes.settled()
    (node, _), _ = placed(nodes)
    with at_work(nodes, work) as clients:
        began = time.monotonic()
        kill(before[node]["pid"], signal.SIGSTOP)
        try:
            until(lambda: len({one.replica for one in clients.since(began)}) == 2, "answers of both replicas, of what began later")
        finally:
            kill(before[node]["pid"], signal.SIGCONT)
        after = nodes.settled()
        assert after[node]["incarnation"] == before[node]["incarnation"]
        again = time.monotonic()
        until(lambda: back(clients.since(again), USUAL, 2), "the usual hit rate")
