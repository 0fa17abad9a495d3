"""Two network namespaces with a cable between them, and what runs in each: ``python -m tests.storage.netns serve|ask ...``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from hicache_ray.errors import StoreError
from hicache_ray.storage import MemoryStore
from hicache_ray.storage.tcp import TcpAddress, TcpClientConfig, TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from tests.storage.objects import get, put

SERVER_HOST, CLIENT_HOST = "192.0.2.1", "192.0.2.2"
TOKEN = "secret"
COUNT, SIZE = 32, 1 << 20
BUFFER_BYTES = 64 << 10  # small, so that a transfer that stops has its middle on neither side
LOOKS = 12  # at the clock, before the middle of a read: fewer than there are chunks
PATIENCE_S = 30.0


def missing() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip tool (iproute2)"
    probe = f"hicache-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Cable:
    """Namespaces ``server`` and ``client``, joined. Of this process, and gone with :meth:`close`."""

    def __init__(self) -> None:
        self.server, self.client = (f"hicache-{os.getpid()}-{side}" for side in "sc")
        self._end = f"hc{os.getpid()}"  # names of devices are short
        try:
            for space in (self.server, self.client):
                _ip("netns", "add", space)
            _ip("link", "add", f"{self._end}s", "netns", self.server, "type", "veth", "peer", f"{self._end}c", "netns", self.client)
            for space, side, host in ((self.server, "s", SERVER_HOST), (self.client, "c", CLIENT_HOST)):
                _ip("-n", space, "addr", "add", f"{host}/24", "dev", f"{self._end}{side}")
                _ip("-n", space, "link", "set", f"{self._end}{side}", "up")
        except BaseException:
            self.close()
            raise

    def set(self, state: str) -> None:
        """``up`` or ``down``."""
        _ip("-n", self.server, "link", "set", f"{self._end}s", state)

    def close(self) -> None:
        for space in (self.server, self.client):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


class Program:
    """This module in a namespace: JSON lines in and out."""

    def __init__(self, space: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.storage.netns", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program ended; its error is above"
        return json.loads(line)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def running(space: str, *arguments: str) -> Iterator[Program]:
    program = Program(space, *arguments)
    try:
        yield program
    finally:
        program.close()


class Gate:
    """A clock that holds its readers from the ``LOOKS``-th look after :meth:`arm` until :meth:`open`."""

    def __init__(self) -> None:
        self._looks, self._lock, self._opened = -1, threading.Lock(), threading.Event()
        self._opened.set()

    def arm(self) -> None:
        self._opened.clear()
        self._looks = LOOKS

    def open(self) -> None:
        self._looks = -1
        self._opened.set()

    def __call__(self) -> float:
        if self._looks >= 0:
            with self._lock:
                self._looks -= self._looks > 0
                reached = self._looks == 0
                if reached and not self._opened.is_set():
                    self._say_and_wait()
        return time.monotonic()

    def _say_and_wait(self) -> None:
        """The others wait for the lock meanwhile."""
        _say("in the middle")
        assert sys.stdin.readline() == "go on\n"
        self.open()


def serve() -> None:
    memory = MemoryStore(2 * COUNT * SIZE)
    put(memory, range(COUNT), SIZE)
    with TcpServer(memory, TcpConfig(TOKEN, host=SERVER_HOST, buffer_bytes=BUFFER_BYTES)) as server:
        _say(server.address.to_dict())
        sys.stdin.read()


def ask(address: str) -> None:
    """``get SECONDS``, ``middle SECONDS`` (a get that stops half way until told to go on), ``put SECONDS``: how many objects came."""
    gate = Gate()
    config = TcpClientConfig(backoff_s=0.0, backoff_most_s=0.0, buffer_bytes=BUFFER_BYTES)
    store = TcpStore(TcpAddress.from_dict(json.loads(address)), TOKEN, config, gate)
    for line in iter(sys.stdin.readline, ""):
        word, seconds = line.split()
        if word == "middle":
            gate.arm()
        try:
            _say(_round_trip(store, word, float(seconds)))
        except StoreError as error:
            _say(f"{type(error).__name__}: {error}")
    store.close()


def _round_trip(store: TcpStore, word: str, seconds: float) -> int:
    timed = _Timed(store, seconds)
    if word == "put":
        return put(timed, range(1000, 1000 + COUNT // 2), SIZE).bit_count()  # type: ignore[arg-type]
    return len(get(timed, range(COUNT), SIZE))  # type: ignore[arg-type]


class _Timed:
    """A store whose calls take their deadline from here."""

    def __init__(self, store: TcpStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def get(self, ids: Any, targets: Any, _: float) -> int:
        return self._store.get(ids, targets, self._seconds)

    def put(self, ids: Any, sources: Any, _: float) -> int:
        return self._store.put(ids, sources, self._seconds)


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=PATIENCE_S)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
