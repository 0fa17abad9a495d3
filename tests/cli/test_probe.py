"""The probe as a user runs it: a process of its own, a real tier, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.model]

PROMPT, GRID = 1025, 256
MARK = "HICACHE_TEST_RUN"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started_by(run: str) -> list[list[str]]:
    """Living processes that were started, at whatever depth, by the run of that name: they inherit its environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.info["cmdline"])
    return found


@pytest.fixture
def store() -> Iterator[str]:
    """A store name of this test; afterwards nothing of that name, and no process of the run, is left."""
    name = f"probe-{os.getpid()}"
    yield name
    assert started_by(name) == []
    assert [x for folder in ("/dev/shm", "/tmp") for x in os.listdir(folder) if name in x] == []


def probe(store: str, *more: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "hicache_ray.cli", "probe", "--model", "qwen3_5", "--size", "tiny", "--prompt-tokens", str(PROMPT)]
    command += ["--storage-name", store, "--storage-size", "64MiB", "--serve-port", str(free_port()), "--admin-port", str(free_port())]
    env = {**os.environ, MARK: store}
    done = subprocess.run([*command, "--json", "-", *more], capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout), done.stderr


def test_write_back_over_two_ranks_hits_every_tier(store: str, tmp_path: Path) -> None:
    code, result, said = probe(store, "--tp", "2", "--write-policy", "write_back", "--layout", "page_head")
    assert code == 0, said[-3000:]
    head = {"model": "qwen3_5", "tp": 2, "write_policy": "write_back", "layout": "page_head", "page_size": 64, "grid": GRID}
    assert {k: result[k] for k in head} == head
    assert result["prompt_tokens"] == PROMPT
    sources = {s["name"]: (s["reused_device"], s["reused_host"], s["reused_storage"], s["computed"]) for s in result["steps"]}
    assert list(sources) == ["cold", "return", "again", "storage", "other"]
    assert sources == {
        "cold": (0, 0, 0, 1025),
        "return": (0, 1024, 0, 1),
        "again": (1024, 0, 0, 1),
        "storage": (0, 0, 1024, 1),
        "other": (0, 0, 1024, 1),
    }
    assert all(s["bit_exact"] and s["digests_equal"] and s["ttft_s"] > 0 for s in result["steps"])
    assert result["steps"][-1]["replica"] != result["steps"][0]["replica"]
    # 1,024 tokens are a multiple of the grid: by the N-1 cap one grid step earlier.
    assert (result["on_grid"]["reused_device"], result["on_grid"]["computed"]) == (768, 256)
    cold = result["steps"][0]["ttft_s"]
    assert result["speedup_return"] == round(cold / result["steps"][1]["ttft_s"], 1)
    assert result["speedup_storage"] == round(cold / result["steps"][3]["ttft_s"], 1)


def test_a_tier_that_cannot_hold_the_prompt_fails_the_probe(store: str) -> None:
    """The host holds less than R: what cannot come back is named, and the exit code says so."""
    code, result, said = probe(store, "--host-ratio", "0.4")
    assert code == 1
    assert not result["passed"]
    assert any("R-return" in p and "should have" in p for p in result["problems"]), result["problems"]
    assert "R-return" in said
    assert all(s["bit_exact"] for s in result["steps"])
