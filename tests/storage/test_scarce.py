"""A machine without descriptors, memory or threads to give: a StoreError for the caller, a line in the log, and service once it has."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hicache_ray.errors import StoreClosed, StoreError
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, ClientConfig, MemoryStore
from hicache_ray.storage.connection import Deadline, Overloaded
from hicache_ray.storage.lanes import Lane
from hicache_ray.storage.loading import Loader
from hicache_ray.storage.members import Member, Members
from hicache_ray.storage.prober import Prober
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.tcp import TcpClientConfig, TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.storage.threads import join_all
from tests.storage.conftest import FakeClock
from tests.storage.objects import CALLS, PAGE, TIMEOUT_S, get, name, page, put

EAGER = ClientConfig(backoff_s=0.0, backoff_most_s=0.0, kernel="off")
TCP_EAGER = TcpClientConfig(backoff_s=0.0, backoff_most_s=0.0, kernel="off")
Connect = Callable[..., ArenaClient]


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> Iterator[list[str]]:
    """The system gives none whose name begins with one of these; names of those that were asked for."""
    asked: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith(prefixes):
            return start(thread)
        asked.append(thread.name)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield asked


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open none, from now on."""
    page(0)  # imports what it needs
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("call", CALLS)
def test_no_descriptor_for_a_connection(call: str, service: ArenaService, connect: Connect) -> None:
    client = connect(service.address, EAGER)
    with no_descriptors(), pytest.raises(StoreClosed, match="Too many open files"):
        CALLS[call](client)
    assert put(client, [1]) == 1


def test_no_descriptor_for_a_link(nothing_left: None) -> None:
    with TcpServer(MemoryStore(PAGE), TcpConfig("secret")) as server, closing(TcpStore(server.address, "secret", TCP_EAGER)) as client:
        with no_descriptors(), pytest.raises(StoreClosed, match="Too many open files"):
            put(client, [1])
        assert put(client, [1]) == 1


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOENT])
def test_a_segment_that_cannot_be_mapped(number: int, service: ArenaService, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    client = connect(service.address, EAGER)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(StoreError, match=f"cannot be mapped: .*{os.strerror(number)}"):
            put(client, [1])
    assert put(client, [1]) == 1


def test_a_segment_under_no_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened: embedded null byte"):
        Segment.open(tmp_path / "a\0b", PAGE)


def test_no_thread_for_the_page_tables(service: ArenaService, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(service.address)
    with no_threads(monkeypatch, "hicache-prefault") as asked:
        assert put(client, range(4)) == 0b1111
        assert get(client, range(4)) == {0, 1, 2, 3}
    assert asked == ["hicache-prefault"]


def test_no_thread_for_a_compiled_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is none as long as there is no thread; whoever asks later gets it."""
    (tmp_path / "loop_of_a_test.py").write_text("move = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loop_of_a_test", raising=False)  # of an earlier run
    loader = Loader("loop_of_a_test", "move", "this goes on without", off=False)
    with no_threads(monkeypatch, "hicache-kernel") as asked:
        assert loader.get() is None
        assert loader.warm_up(0.0) is False
    assert asked == ["hicache-kernel"] * 2
    assert loader.warm_up(TIMEOUT_S) is True
    assert loader.get().move == 7  # type: ignore[union-attr]
    loader.close()


def test_no_thread_for_a_connection(config: ArenaConfig, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens goes on, and nothing of the refused ones is left."""
    with ArenaService(config) as service:
        client = connect(service.address, EAGER)
        with no_threads(monkeypatch, "hicache-arena") as asked:
            for _ in range(3):
                with pytest.raises(StoreError, match="no thread can be had for it now"):
                    put(client, [1])
        assert len(asked) == 3
        assert not service._handlers
        assert put(client, [1]) == 1


def test_no_thread_for_a_link(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with TcpServer(MemoryStore(PAGE), TcpConfig("secret")) as server, closing(TcpStore(server.address, "secret", TCP_EAGER)) as client:
        with no_threads(monkeypatch, "hicache-tcp-") as asked, pytest.raises(StoreError, match="no thread can be had for this connection"):
            put(client, [1])
        assert len(asked) == 1
        assert server.connections == 0
        assert put(client, [1]) == 1


def test_no_thread_for_a_stream(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own thread moves all shares, once each, though the pool has queued some."""
    size, numbers = 2 << 20, range(4)
    with TcpServer(MemoryStore(8 * size), TcpConfig("secret")) as server, closing(TcpStore(server.address, "secret", TCP_EAGER)) as client:
        with no_threads(monkeypatch, "hicache-tcp-stream") as asked:
            assert put(client, numbers, size) == 0b1111
            assert get(client, numbers, size) == set(numbers)
        assert asked
        assert get(client, numbers, size) == set(numbers)


def test_no_thread_for_a_lane(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane("n1", 2)
    with no_threads(monkeypatch, "hicache-n1"), pytest.raises(Overloaded, match="gives no thread"):
        lane.submit(lambda: 1)
    assert lane.submit(lambda: 2).result(TIMEOUT_S) == 2
    lane.close(TIMEOUT_S)


def test_no_thread_for_a_ping(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was not asked has missed nothing, and the others are asked."""
    members = Members(FakeClock())
    for node in ("n0", "n1", "n2"):
        members.join(Member(node, "1"))
    asked: list[str] = []

    def ping(member: Member, timeout_s: float) -> str:
        asked.append(member.node)
        raise StoreError("refused")

    prober = Prober("n0", members, ping)
    with no_threads(monkeypatch, "hicache-ping-n1"):
        for _ in range(members.config.misses):
            prober.step()
    assert asked == ["n2"] * members.config.misses
    assert [member.node for member in members.alive().alive] == ["n0", "n1"]
    prober.step()
    assert set(asked[members.config.misses :]) == {"n1", "n2"}
    prober.close()


def test_no_descriptor_to_accept_with(config: ArenaConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both acceptors say so, wait a moment and go on."""
    accept, refused = socket.socket.accept, {"hicache-arena-accept": 2, "hicache-tcp-accept": 2}

    def scarce(self: socket.socket) -> tuple[socket.socket, object]:
        sock, peer = accept(self)
        who = threading.current_thread().name
        if refused.get(who, 0):
            refused[who] -= 1
            sock.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return sock, peer

    monkeypatch.setattr(socket.socket, "accept", scarce)
    memory = MemoryStore(PAGE)
    with (
        caplog.at_level(logging.WARNING, "hicache_ray.storage"),
        ArenaService(config) as service,
        TcpServer(memory, TcpConfig("secret")) as server,
        closing(ArenaClient(service.address, EAGER)) as client,
        closing(TcpStore(server.address, "secret", TCP_EAGER)) as remote,
    ):
        for store in (client, remote):
            for _ in range(2):
                with pytest.raises(StoreError):
                    put(store, [1])
            assert put(store, [1]) == 1
    assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == 4


def test_threads_are_waited_for_together() -> None:
    """However many there are; those that never began are not waited for at all."""
    gate = threading.Event()
    waiting = [threading.Thread(target=gate.wait, args=(TIMEOUT_S,), daemon=True) for _ in range(3)]
    for thread in waiting[:2]:
        thread.start()
    assert join_all(waiting, 0.01) is False
    gate.set()
    assert join_all(waiting, TIMEOUT_S) is True
    assert [thread.is_alive() for thread in waiting] == [False] * 3


def test_a_closed_connection_is_not_lent_again(service: ArenaService, connect: Connect) -> None:
    """Though its number is another file's by then, on which there is nothing to read."""
    client = connect(service.address)
    assert put(client, [1]) == 1
    with client._session.asking(TIMEOUT_S) as (connection, _):
        connection.close()
    others = [os.pipe() for _ in range(2)]
    try:
        assert get(client, [1]) == {1}
        assert not connection.alive()
    finally:
        for pair in others:
            for descriptor in pair:
                os.close(descriptor)


def test_a_connection_given_back_at_the_last_moment_is_taken(
    service: ArenaService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told of it as its own wait ends takes it: nobody else was told."""
    client = connect(service.address, ClientConfig(connections=1))
    assert put(client, [1]) == 1
    pool, deadline = client._session._pool, Deadline.after(time.monotonic, TIMEOUT_S)
    first = pool.take(deadline)

    def late(seconds: float) -> bool:
        pool.give_back(first, broken=False)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(pool._turn, "wait", late)
        assert pool.take(deadline) is first
        patch.setattr(pool._turn, "wait", lambda seconds: False)
        with pytest.raises(Overloaded):
            pool.take(deadline)
    pool.give_back(first, broken=False)
    assert get(client, [1]) == {1}


def test_a_lane_keeps_nothing_of_what_it_ran(nothing_left: None) -> None:
    lane, gone = Lane("n1", 1), threading.Event()

    def call() -> Callable[[], bool]:
        def made() -> bool:
            return True

        weakref.finalize(made, gone.set)
        return made

    assert lane.submit(call).result(TIMEOUT_S)()
    assert gone.wait(TIMEOUT_S)
    lane.close(TIMEOUT_S)


def test_a_no_of_the_service_costs_no_connection(service: ArenaService, connect: Connect) -> None:
    client = connect(service.address)
    assert put(client, [1]) == 1
    handlers = set(service._handlers)
    for _ in range(3):
        with pytest.raises(StoreError, match="the descriptions would take"):
            client.describe(b"a", {"x": "y" * (2 << 20)}, TIMEOUT_S)
        with pytest.raises(StoreError, match="deadline"):
            client.stats(0.0)
        with pytest.raises(StoreError, match="bytes"):
            client.get([name(1)], [page(1)[::2]], TIMEOUT_S)
    assert get(client, [1]) == {1}
    assert set(service._handlers) == handlers
