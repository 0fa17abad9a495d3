"""Whatever ends a tier, nothing of it is left: no process, no shared memory, no socket, no folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from hicache_ray.actors import cluster
from hicache_ray.config_sources import load
from hicache_ray.errors import ConfigError
from tests.actors.rig import command, kill, marked, prompt, ray_folders, shared_memory, small, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
#: Longest wait for the end of a tier that is told to end, on a busy machine.
END_S = 200.0


@dataclass
class Driver:
    """A process that runs a tier, with its own folder for temporary files."""

    process: subprocess.Popen[str]
    mark: str
    store: str
    folder: Path
    errors: Path
    told: list[str] = field(default_factory=list)

    def reach(self, line: str) -> str:
        """Read what it tells until a line begins so."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        for text in out:
            self.told.append(text.strip())
            if text.startswith(line):
                return text.strip()
        raise AssertionError(f"it never came to {line!r}: {self.told}, {self.errors.read_text()}")

    def end(self) -> int:
        """Its exit code. Where it does not end it is asked what it does."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            until(lambda: "most recent call first" in self.errors.read_text(), "an answer to SIGUSR1")
            raise AssertionError(f"it did not end within {END_S:g} s: {self.errors.read_text()}") from None

    def rays(self) -> set[Path]:
        found = ray_folders(marked(self.mark))
        assert found
        return found

    def workers(self, title: str) -> list[int]:
        return [p.pid for p in marked(self.mark) if f"ray::{title}" in "".join(command(p))]

    def nothing_is_left(self, rays: set[Path]) -> None:
        # No waiting: what a tier leaves behind must be gone when its process has ended.
        assert [command(p) for p in marked(self.mark)] == []
        assert shared_memory(self.store) == []
        assert [r for r in rays if r.exists()] == []
        assert [p for p in self.folder.rglob("*") if "hicache" in p.name] == []


@contextmanager
def driver(tmp_path: Path, repository: Path, *words: str, **more: object) -> Iterator[Driver]:
    settings, mark = {**small(), **more}, uuid.uuid4().hex
    env = {**os.environ, "TMPDIR": str(tmp_path), "MARK_OF_THIS_TEST": mark}
    begin = [sys.executable, "-m", "tests.actors.begin", json.dumps(settings), *words]
    errors = tmp_path / "errors"
    with errors.open("w") as told:  # a pipe that nobody reads would stop it one day
        process = subprocess.Popen(begin, cwd=repository, env=env, stdout=subprocess.PIPE, stderr=told, text=True)
    try:
        yield Driver(process, mark, str(settings["storage.name"]), tmp_path, errors)
    finally:
        process.kill()
        for left in marked(mark):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate()


def test_a_start_that_fails_late_leaves_nothing(tmp_path: Path, repository: Path) -> None:
    with driver(tmp_path, repository, "take-admin-port") as it:
        it.reach("starting the admin endpoint")
        rays = it.rays()
        told = it.reach("ConfigError")
        assert "choose another admin.port" in told
        assert it.end() == 2
        it.nothing_is_left(rays)


def test_interrupts_leave_nothing_and_touch_no_other_tier(tmp_path: Path, repository: Path) -> None:
    """One tier is interrupted while it starts; another beside it while it serves a request, with frozen processes at that."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    # File-backed storage, in the folder where temporary files lie: neither must take the other's for leftovers.
    with (
        driver(one, repository, **{"model.tp": 1}) as starting,
        driver(other, repository, **{"model.tp": 1, "storage.directory": str(other)}) as serving,
    ):
        starting.reach("starting 1 replica")
        until(lambda: starting.workers("RankShell"), "the start of a rank")
        rays = starting.rays()
        starting.process.send_signal(signal.SIGINT)
        starting.process.send_signal(signal.SIGTERM)  # another one changes nothing
        assert starting.end() == 130
        starting.nothing_is_left(rays)

        _, url, _ = serving.reach("up").split()
        rays = serving.rays()
        body = {"input_ids": prompt(4000, 600), "max_new_tokens": 256, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=60.0) as response:
            assert next(response.iter_lines()).startswith("data: ")
            for title in ("RankShell", "StorageShell"):
                kill(serving.workers(title)[0], signal.SIGSTOP)
            serving.process.send_signal(signal.SIGTERM)  # for which Ray has a handler, which would leave our files behind
            serving.process.send_signal(signal.SIGINT)
            assert serving.end() == 130
        serving.nothing_is_left(rays)


@pytest.mark.parametrize("section", ["serve", "admin"])
def test_a_port_that_is_taken_is_refused_before_anything_starts(section: str, tmp_path: Path, repository: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with driver(tmp_path, repository, **{f"{section}.port": port}) as it:  # the Ray of other tests may have ports of its own
            it.reach(f"ConfigError: {section}.port is {port}, and 127.0.0.1:{port} is taken; choose another {section}.port")
            assert len(it.told) == 1
            assert it.end() == 2


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "127.0.0.1:99999", "no.host.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_refused_before_anything_starts(address: str) -> None:
    told: list[str] = []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = address.format(port=nobody.getsockname()[1])
        with pytest.raises(ConfigError) as refused:
            cluster.start(load(flags=small()).config, address, told.append)
    assert told == []
    assert str(refused.value).startswith(f"no Ray cluster can be joined at {address}: ")
    assert str(refused.value).endswith("; start one with ray start --head, or give another --address")


def test_an_unknown_model_is_refused_before_anything_starts() -> None:
    told: list[str] = []
    with pytest.raises(ConfigError, match="nonesuch"):
        cluster.start(load(flags={**small(), "model.family": "nonesuch"}).config, progress=told.append)
    assert told == []
