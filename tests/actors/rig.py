"""A tier on a local Ray as its clients and its operator see it, and the processes behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil

from hicache_ray.actors.cluster import Cluster

GRID, PAGE, VOCABULARY = 256, 64, 512
#: Longest wait for something that must happen on a busy machine.
LONG_S = 60.0
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def small() -> dict[str, object]:
    """Settings of a tier that fits beside others: two ranks, small pools, addresses and names of its own, deadlines of seconds."""
    return {
        "model.size": "tiny",
        "model.tp": 2,
        "cache.device_tokens": 2048,
        "cache.device_snapshots": 16,
        "cache.lookup_deadline_s": 1.0,
        "cache.prefetch_timeout_cap_s": 5.0,
        "engine.max_prompt_tokens": 1500,
        "engine.max_new_tokens": 256,
        "engine.max_queue": 8,
        "engine.gloo_timeout_s": 3.0,
        "storage.name": f"test-{uuid.uuid4().hex[:8]}",
        "storage.size": "32MiB",
        "serve.port": free_port(),
        "admin.port": free_port(),
        "namespace.salt": "a tenant's secret",
    }


def tenants() -> dict[str, object]:
    """Settings of two tenants; requests are of the first unless they say otherwise."""
    return {
        "tenants.acme.salt": "the salt of acme",
        "tenants.acme.key": "key-of-acme",
        "tenants.zenith.salt": "the salt of zenith",
        "tenants.zenith.key": "key-of-zenith",
        "tenants.inside.salt": "of no access over HTTP",
    }


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that no other seed begins with."""
    tokens: list[int] = np.random.default_rng([77, seed]).integers(3, VOCABULARY, count).tolist()
    return tokens


def until(condition: Callable[[], T], what: str, seconds: float = LONG_S) -> T:
    """The first true value of a condition, polled."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def held(where: Mapping[str, Any], tier: str) -> int:
    """Pages and snapshots of a prompt that a tier of a replica holds."""
    return sum(where["held"][tier].values())


def reused(answer: Mapping[str, Any]) -> int:
    return sum(answer["cached_tokens"].values())


def same(answer: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Bit for bit."""
    return all(answer[key] == other[key] for key in ("output_ids", "logprobs"))


@dataclass(frozen=True)
class Tier:
    """One running tier, over its two endpoints."""

    cluster: Cluster
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120.0))
    name: str = ""

    # -- as a client --------------------------------------------------------------------------------------------------------------

    def post(self, tokens: Sequence[int], new: int = 4, **more: Any) -> httpx.Response:
        body = {"input_ids": list(tokens), "max_new_tokens": new, "return_logprob": True, **more}
        return self.client.post(f"{self.cluster.url}/generate", json=body, headers=self.headers())

    @property
    def tenant(self) -> str | None:
        """The tenant that requests are of where nothing else is said: the first one, if there are any."""
        return self.name or next(iter(self.cluster.config.tenants), None)

    def headers(self) -> dict[str, str]:
        key = None if self.tenant is None else self.cluster.config.tenants[self.tenant].key
        return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}

    def of(self, tenant: str) -> Tier:
        """The same tier as another tenant sees it."""
        return replace(self, name=tenant)

    def generate(self, tokens: Sequence[int], new: int = 4, **more: Any) -> dict[str, Any]:
        """A whole answer, which accounts for every token of the prompt."""
        response = self.post(tokens, new, **more)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert reused(answer) + answer["computed_tokens"] == len(tokens)
        assert len(answer["output_ids"]) == len(answer["logprobs"]) == new
        return answer

    @contextmanager
    def streamed(self, tokens: Sequence[int], new: int) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a streamed request as they come. Leaving the block hangs up."""
        body = {"input_ids": list(tokens), "max_new_tokens": new, "return_logprob": True, "stream": True}
        with httpx.stream("POST", f"{self.cluster.url}/generate", json=body, timeout=120.0, headers=self.headers()) as response:
            assert response.status_code == 200, response.read()
            yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: "))

    # -- as the operator ----------------------------------------------------------------------------------------------------------

    def admin(self, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.cluster.token if token is None else token}"}
        return self.client.request(method, f"{self.cluster.admin_url}{path}", headers=headers, **more)

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.admin("GET", "/stats").json()
        return answer

    def replica(self) -> dict[str, Any]:
        """The row of the only replica, once there is one that has begun."""

        def only() -> dict[str, Any] | None:
            rows = [row for row in self.stats()["replicas"].values() if "error" not in row and not row["lost"]]
            return rows[0] if len(rows) == 1 else None

        return until(only, "a replica that answers")

    def storage(self) -> dict[str, Any]:
        rows = until(lambda: [r for r in self.stats()["storage"].values() if "error" not in r], "storage that answers")
        assert len(rows) == 1
        row: dict[str, Any] = rows[0]
        return row

    def where(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What the only replica holds of a prompt."""
        (row,) = self.admin("POST", "/where", json={"input_ids": list(tokens), "tenant": self.tenant}).json().values()
        assert "error" not in row, row
        found: dict[str, Any] = row
        return found

    def flush(self, *tiers: str) -> None:
        response = self.admin("POST", "/flush", json={"tiers": tiers, "timeout_s": 30})
        assert response.status_code == 200, response.text

    def sealed(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Wait until storage holds all of a prompt that the device holds."""

        def complete() -> dict[str, Any] | None:
            where = self.where(tokens)
            here, there = where["held"]["device"], where["held"]["storage"]
            return where if all(there[name] >= count for name, count in here.items()) else None

        return until(complete, "the backup to storage")

    def at_rest(self) -> dict[str, Any]:
        """Wait until nothing is under way and nothing is leased."""

        def rested() -> dict[str, Any] | None:
            row = self.replica()
            return row if not row["active"] and not row["leases"] else None

        return until(rested, "rest")


# -- processes -------------------------------------------------------------------------------------------------------------------


def titled(title: str) -> list[int]:
    """Living Ray workers below this process whose title begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "".join(process.cmdline()).startswith(f"ray::{title}"):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that were started, by whomever, with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().values():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def command(process: psutil.Process) -> list[str]:
    """Of a process that may be gone."""
    try:
        words: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return words


def ray_folders(processes: Sequence[psutil.Process]) -> set[Path]:
    """Session folders of the Rays that these processes belong to."""
    words = [word for process in processes for word in command(process)]
    return {Path(found) for word in words for found in re.findall(r"/tmp/hicache-ray-\w+", word)}


def shared_memory(name: str) -> list[Path]:
    """What a store of this name has in shared memory, sockets included."""
    return sorted(Path("/dev/shm").glob(f"*{name}*"))
