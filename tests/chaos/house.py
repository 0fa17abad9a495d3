"""A Ray cluster of several nodes on this machine, each in a network namespace of its own: real addresses, links that can be cut, nodes that
can be killed or frozen with all their processes. Needs root and iproute2."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray

from tests.actors.rig import marked

#: What a node's processes carry in their environment, and their children with them.
MARK = "HICACHE_CHAOS_NODE"
OBJECT_STORE = 80 << 20
START_S = 180.0
HEAD = "a"


def able() -> str:
    """Why this machine cannot do it, as a sentence; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root"
    tried = f"hct{os.getpid()}"
    try:
        for words in (("netns", "add", tried), ("netns", "delete", tried)):
            _ip(*words)
    except FileNotFoundError:
        return "there is no ip command; install iproute2"
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.strip()}"
    return ""


def _ip(*words: str) -> str:
    done = subprocess.run(("ip", *words), check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


@dataclass
class House:
    """The head is the node ``a``, in the namespace of the machine itself, where the clients are. The others have one each, joined by a
    bridge. ``folder``: Ray's sessions; ``cpus``: of each of the others, room for one replica."""

    folder: Path
    cpus: int
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = int(self.mark, 16)
        self._net = f"10.{64 + number % 64}.{number // 64 % 256}"
        self._bridge = f"hcb{self.mark}"

    @property
    def address(self) -> str:
        """Of Ray's control service."""
        return f"{self.ip(HEAD)}:{self.port}"

    @property
    def port(self) -> int:
        return 20000 + int(self.mark, 16) % 9000

    def ip(self, name: str) -> str:
        return f"{self._net}.{ord(name) - ord(HEAD) + 1}"

    def namespace(self, name: str) -> str:
        return f"hcn{self.mark}{name}"

    # -- nodes -----------------------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """The network, and the head."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.ip(HEAD)}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        head = ("--head", f"--port={self.port}", "--num-cpus=0", f"--temp-dir={self.folder}", "--include-dashboard=false")
        self._ray(HEAD, *head)

    def join(self, name: str) -> None:
        """A node with room for one replica, wired up unless it was before."""
        if name not in self._names:
            self._wire(name)
            self._names.append(name)
        self._ray(name, f"--address={self.address}", f"--num-cpus={self.cpus}")

    def _wire(self, name: str) -> None:
        space, outside = self.namespace(name), self._link(name)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._bridge, "up")
        for words in (("address", "add", f"{self.ip(name)}/24", "dev", "eth0"), ("link", "set", "eth0", "up"), ("link", "set", "lo", "up")):
            _ip("-n", space, *words)

    def _link(self, name: str) -> str:
        return f"hcv{self.mark}{name}"

    def _ray(self, name: str, *words: str) -> None:
        ray_start = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={self.ip(name)}", *words]
        ray_start += [f"--node-name={name}", f"--object-store-memory={OBJECT_STORE}", f"--labels=rack={name}", "--disable-usage-stats"]
        inside = [] if name == HEAD else ["ip", "netns", "exec", self.namespace(name)]
        env = {**os.environ, MARK: self.marked(name), "RAY_worker_niceness": "0"}
        log = (self.folder.parent / f"ray-{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen([*inside, *ray_start], env=env, stdout=log, stderr=log, start_new_session=True)

    def up(self, count: int) -> None:
        """Connect this process, and wait until so many nodes are alive."""
        until = time.monotonic() + START_S
        while not ray.is_initialized():
            while not _listens(self.address):
                if time.monotonic() > until:
                    raise RuntimeError(f"the head of the cluster did not come up; see {self.folder.parent}/ray-*.log")
                time.sleep(0.1)
            try:
                ray.init(self.address, _node_ip_address=self.ip(HEAD), log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
        while len(self.alive()) < count:
            self.rejoin()
            if time.monotonic() > until:
                raise RuntimeError(f"only {sorted(self.alive())} of {count} nodes came up; see {self.folder.parent}/ray-*.log")
            time.sleep(0.1)

    def rejoin(self) -> None:
        """Start nodes again that did not come up: Ray gives up after 30 s, which a busy machine may need."""
        for name in [name for name, process in self.processes.items() if process.poll()]:
            self.join(name)

    @staticmethod
    def alive() -> dict[str, str]:
        """Name -> id of the nodes that Ray believes alive."""
        return {node["NodeName"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def marked(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def members(self, name: str) -> list[psutil.Process]:
        """All living processes of a node."""
        return marked(self.marked(name))

    def signal(self, name: str, number: int) -> None:
        """To all processes of a node. Those killed are gone when it returns."""
        members = self.members(name)
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGKILL:
            with suppress(KeyError):
                self.processes.pop(name).wait(10)
            psutil.wait_procs(members, 10)

    # -- links -----------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def parted(self, one: str, other: str) -> Iterator[None]:
        """Neither reaches the other; both are reached by everybody else."""
        pairs = [(self.namespace(here), self.ip(there)) for here, there in ((one, other), (other, one))]
        for space, ip in pairs:
            _ip("-n", space, "route", "add", "blackhole", f"{ip}/32")
        try:
            yield
        finally:
            for space, ip in pairs:
                _ip("-n", space, "route", "del", "blackhole", f"{ip}/32")

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Nobody reaches the node."""
        _ip("link", "set", self._link(name), "down")
        try:
            yield
        finally:
            _ip("link", "set", self._link(name), "up")

    # -- the end ---------------------------------------------------------------------------------------------------------------------

    def tear_down(self) -> None:
        """End Ray and the network, whatever state they are in. Call :meth:`left` before, to see what should have gone by itself."""
        ray.shutdown()
        for name in self.processes:
            for process in self.members(name):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
        ends = dict(self.processes)
        for process in ends.values():
            process.send_signal(signal.SIGTERM)
        for process in ends.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for name in [HEAD, *self._names]:
            self.signal(name, signal.SIGKILL)
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self.namespace(name))
            with suppress(subprocess.CalledProcessError):
                _ip("link", "delete", self._link(name))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)

    def workers(self, titles: Sequence[str]) -> dict[str, list[int]]:
        """Ids of the living workers on all nodes, by the first of ``titles`` that theirs begins with."""
        out: dict[str, list[int]] = {title: [] for title in titles}
        for name in [HEAD, *self._names]:
            for process in self.members(name):
                with suppress(psutil.NoSuchProcess):
                    line = "".join(process.cmdline())
                    for title in titles:
                        if line.startswith(f"ray::{title}"):
                            out[title].append(process.pid)
        return out
