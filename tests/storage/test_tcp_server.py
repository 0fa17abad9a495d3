"""The tcp server against peers that misbehave, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage import MemoryStore, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.tcp import NONCE_BYTES, TcpAddress, TcpClientConfig, TcpConfig, proof
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_frames import MAGIC, VERSION, TcpKind, encode, pack_indices
from hicache_ray.storage.tcp_links import Link
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.storage.wire import HEADER, MAX_BODY, REPLY
from tests.storage.objects import TIMEOUT_S, get, name, page, put
from tests.storage.peers import BarePeer, closing_all

TOKEN = "secret"
CONFIG = TcpConfig(TOKEN, io_timeout_s=0.5, max_connections=8)
BIG = 1 << 20


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(64 * BIG)


@pytest.fixture
def server(memory: MemoryStore, nothing_left: None) -> Iterator[TcpServer]:
    with TcpServer(memory, CONFIG) as running:
        yield running
    assert running.inflight_bytes == 0
    assert running.connections == 0


@pytest.fixture
def client(server: TcpServer) -> Iterator[TcpStore]:
    with contextlib.closing(TcpStore(server.address, TOKEN, TcpClientConfig(backoff_s=0, backoff_most_s=0))) as opened:
        yield opened


@pytest.fixture
def peer(server: TcpServer) -> Iterator[Callable[..., Peer]]:
    def make(greet: bool = True) -> Peer:
        peers.append(Peer(server.address, greet))
        return peers[-1]

    with closing_all(list[Peer]()) as peers:
        yield make


class Peer(BarePeer):
    def __init__(self, address: TcpAddress, greet: bool = True) -> None:
        super().__init__(socket.create_connection((address.host, address.port), timeout=TIMEOUT_S), TIMEOUT_S)
        self.challenge = self.read(HEADER.size + NONCE_BYTES)[HEADER.size :]
        if greet:
            nonce = bytes(NONCE_BYTES)
            self.sock.sendall(encode(TcpKind.PROOF, 0, nonce + proof(TOKEN, "client", self.challenge, nonce)))
            self.read(HEADER.size + 40)


def request(kind: int, body: bytes, seconds: float = TIMEOUT_S) -> bytes:
    return encode(kind, 1, wire.real(seconds) + body)


RESERVED = 1 << 40
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": HEADER.pack(MAGIC, VERSION + 1, TcpKind.PING, 1, 0),
    "a huge length": HEADER.pack(MAGIC, VERSION, TcpKind.RESERVE, 1, 2**32 - 1),
    "an unknown kind": HEADER.pack(MAGIC, VERSION, 77, 1, 0),
    "an answer": HEADER.pack(MAGIC, VERSION, TcpKind.PING | REPLY, 1, 0),
    "no seconds": encode(TcpKind.PING, 1, b""),
    "no number of seconds": request(TcpKind.PING, b"", float("nan")),
    "a count without items": request(TcpKind.LEASE, struct.pack("<I", 2**31)),
    "too many bytes": request(TcpKind.DROP, struct.pack("<I", 0) + b"x"),
    "an object of exabytes": request(TcpKind.RESERVE, wire.ids([name(1)]) + struct.pack("<Q", 1 << 60)),
    "bytes that nobody wanted": request(TcpKind.FILL, pack_indices(7, [0])),
    "an error": request(TcpKind.ERROR, b"no"),
    "a second proof": encode(TcpKind.PROOF, 1, bytes(64)),
    "a record that is not one": request(TcpKind.DESCRIBE, struct.pack("<H", 1) + b"d[1, 2"),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("greet", [True, False])
def test_garbage_ends_its_own_connection_only(
    what: str, greet: bool, client: TcpStore, peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    assert put(client, [1, 2]) == 0b11
    bad = peer(greet)
    with caplog.at_level(logging.WARNING, "hicache_ray.storage"):
        bad.sock.sendall(GARBAGE[what])
        assert bad.wait_for_the_end() == b""
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is closed" in caplog.text
    assert get(client, [1, 2]) == {1, 2}


def test_who_does_not_know_the_token_hears_nothing(server: TcpServer, peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture) -> None:
    """Neither a wrong proof, nor the server's own words said back to it, nor a proof for another challenge."""
    nonce = bytes(NONCE_BYTES)
    for mac in (
        lambda challenge: proof("another", "client", challenge, nonce),
        lambda challenge: proof(TOKEN, "server", challenge, nonce),
        lambda _: proof(TOKEN, "client", bytes(NONCE_BYTES), nonce),
    ):
        stranger = peer(greet=False)
        stranger.sock.sendall(encode(TcpKind.PROOF, 0, nonce + mac(stranger.challenge)))
        assert stranger.wait_for_the_end() == b""
    assert caplog.text.count("does not know the token") == 3
    with contextlib.closing(TcpStore(server.address, "another")) as wrong, pytest.raises(StoreClosed, match="its token is another one"):
        wrong.ping(TIMEOUT_S)


def test_a_client_does_not_believe_a_server_without_the_token(nothing_left: None) -> None:
    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(encode(TcpKind.CHALLENGE | REPLY, 0, bytes(NONCE_BYTES)))
            sock.recv(1000)
            sock.sendall(encode(TcpKind.WELCOME | REPLY, 0, bytes(40)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(StoreError, match="does not know the token; it is not asked anything"):
            Link(TcpAddress(*listener.getsockname()[:2]), TOKEN, 0, Deadline.after(time.monotonic, TIMEOUT_S))
        thread.join()


@pytest.mark.parametrize("half", [b"", request(TcpKind.PING, b"x" * 100)[:50], request(TcpKind.PING, b"")[:5]])
def test_half_open_peers_are_not_waited_for(half: bytes, client: TcpStore, peer: Callable[..., Peer]) -> None:
    silent = peer(greet=bool(half))
    silent.sock.sendall(half)
    assert silent.wait_for_the_end() == b""
    assert put(client, [1]) == 1


@pytest.mark.parametrize("greet", [True, False])
def test_a_peer_that_drips_is_not_waited_for(greet: bool, peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture) -> None:
    """A byte now and then, each in time, is still one frame that is late."""
    frame = request(TcpKind.PING, bytes(1000)) if greet else encode(TcpKind.PROOF, 0, bytes(100))
    assert 0 < peer(greet).drip(frame, 0.02) < 100
    assert "half a message" in caplog.text


def test_a_peer_that_reads_no_answers_is_dropped(client: TcpStore, peer: Callable[..., Peer]) -> None:
    deaf = peer()
    with pytest.raises(OSError, match="reset|pipe"):
        deaf.sock.sendall(request(TcpKind.PING, bytes(MAX_BODY - 8)) * 10)
    assert put(client, [1]) == 1


def test_a_slow_reader_is_cut_at_its_deadline_and_blocks_nobody(
    memory: MemoryStore, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    many = 16
    put(memory, range(many), BIG)
    with (
        TcpServer(memory, replace(CONFIG, buffer_bytes=64 << 10)) as server,
        contextlib.closing(TcpStore(server.address, TOKEN)) as client,
        contextlib.closing(Peer(server.address)) as slow,
    ):
        slow.sock.sendall(request(TcpKind.LEASE, wire.ids([name(n) for n in range(many)])))
        lease = int.from_bytes(slow.read(HEADER.size + 8)[HEADER.size :], "little")
        slow.read(many // 8 + many * 16)
        slow.sock.sendall(request(TcpKind.FETCH, pack_indices(lease, range(many)), seconds=0.5))
        assert get(client, range(many), BIG) == set(range(many))  # while the other one does not read
        while server.connections > 2:
            pass  # until the slow one is cut
        assert "reads too slowly" in caplog.text
        assert memory.stats(TIMEOUT_S).leases == 0


def test_puts_over_the_bytes_in_flight_are_refused_and_counted(memory: MemoryStore, nothing_left: None) -> None:
    with (
        TcpServer(memory, replace(CONFIG, inflight_bytes=3 * BIG)) as server,
        contextlib.closing(TcpStore(server.address, TOKEN)) as client,
    ):
        assert put(client, range(5), BIG) == 0b00111
        assert client.stats(TIMEOUT_S).put_refused == 2
        assert put(client, [3, 4], BIG) == 0b11
        holder = Peer(server.address)
        holder.sock.sendall(request(TcpKind.RESERVE, wire.ids([name(9)]) + struct.pack("<Q", 3 * BIG)))
        holder.read(HEADER.size + 9)
        assert server.inflight_bytes == 3 * BIG
        assert put(client, [5], BIG) == 0
        holder.sock.close()
        while server.inflight_bytes:
            pass  # until the server has seen it
        assert put(client, [5], BIG) == 1


def test_what_is_reserved_and_forgotten_ends_with_its_deadline(client: TcpStore, server: TcpServer, peer: Callable[..., Peer]) -> None:
    forgetful = peer()
    forgetful.sock.sendall(request(TcpKind.RESERVE, wire.ids([name(9)]) + struct.pack("<Q", BIG), seconds=0.0))
    forgetful.read(HEADER.size)
    assert put(client, [1]) == 1
    assert server.inflight_bytes == 0


def test_nobody_seals_or_fills_twice(client: TcpStore, peer: Callable[..., Peer]) -> None:
    first, second = peer(), peer()
    first.sock.sendall(request(TcpKind.RESERVE, wire.ids([name(1), name(2)]) + struct.pack("<QQ", 4, 4)))
    transfer = int.from_bytes(first.read(HEADER.size + 9)[HEADER.size : HEADER.size + 8], "little")
    sums = struct.pack("<Q", 0)
    second.sock.sendall(request(TcpKind.FILL, pack_indices(transfer, [0])) + b"good" + sums)
    assert second.read(HEADER.size + 1)[-1] == 0  # it came, and does not fit its checksum
    second.sock.sendall(request(TcpKind.FILL, pack_indices(transfer, [0])) + b"evil" + sums)
    assert second.wait_for_the_end() == b""
    seal = request(TcpKind.SEAL, wire.number(transfer, "Q") + wire.number(2))
    first.sock.sendall(seal + seal)
    assert first.read(2 * (HEADER.size + 1))[HEADER.size :: HEADER.size + 1] == b"\0\0"
    assert client.stats(TIMEOUT_S).objects == 0


def test_connections_are_bounded(server: TcpServer, client: TcpStore, peer: Callable[..., Peer]) -> None:
    peers = [peer() for _ in range(8)]
    with pytest.raises(StoreError, match="all 8 connections are taken; see storage.max_connections"):
        put(client, [1])
    peers[0].sock.close()
    while server.connections == 8:
        pass  # until the server has seen it
    assert put(client, [1]) == 1


def test_silent_strangers_do_not_keep_the_others_out(client: TcpStore, peer: Callable[..., Peer], server: TcpServer) -> None:
    strangers = [peer(greet=False) for _ in range(30)]
    assert server.connections <= 8
    assert put(client, [1]) == 1
    assert strangers[0].wait_for_the_end() == b""


def test_ten_thousand_connections_and_garbage(server: TcpServer, client: TcpStore) -> None:
    """A fixed budget of bad peers: whatever they send, threads and memory stay bounded and the others are served."""
    chance = random.Random(4)
    assert put(client, range(4)) == 0b1111
    frames = [*GARBAGE.values(), request(TcpKind.STATS, b""), b""]
    descriptors = len(os.listdir("/proc/self/fd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    until = time.monotonic() + 6.0  # on a slow machine fewer than ten thousand
    most_threads = made = 0
    host, port = server.address.host, server.address.port
    while made < 10_000 and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=TIMEOUT_S) as sock:
            made += 1
            if made % 16 == 0:
                sock.sendall(_mutated(chance, chance.choice(frames)))
            if made % 64 == 0:
                most_threads = max(most_threads, threading.active_count())
    assert made >= 500
    assert most_threads <= 8 + 8
    assert get(client, range(4)) == set(range(4))
    assert put(client, [5]) == 1
    while server.connections > 1:
        pass  # until the server has seen the last ones
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def _mutated(chance: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame + chance.randbytes(chance.randrange(20)))
    for _ in range(chance.randrange(4)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data) + 1)])


def test_garbage_of_those_that_know_the_token(client: TcpStore, peer: Callable[..., Peer]) -> None:
    """A peer with a bug: mutated requests over proved connections."""
    chance = random.Random(5)
    put(client, range(4))
    bodies = {
        TcpKind.LEASE: wire.ids([name(1), name(2)]),
        TcpKind.FETCH: pack_indices(1, [0, 1]),
        TcpKind.RELEASE: wire.number(1, "Q") + wire.number(2) + b"\3",
        TcpKind.RESERVE: wire.ids([name(7)]) + struct.pack("<Q", 100),
        TcpKind.FILL: pack_indices(1, [0]),
        TcpKind.SEAL: wire.number(1, "Q") + wire.number(1),
        TcpKind.LOOKUP: struct.pack("<II", 1, 1) + name(1),
        TcpKind.SCAN: b"\1\0\0",
        TcpKind.WHERE: struct.pack("<II", 1, 1) + name(1),
        TcpKind.ANNOUNCE: wire.number(1, "Q") + b"\1\0a" + wire.ids([name(1)]),
    }
    for _ in range(150):
        kind = chance.choice(list(bodies))
        body = _mutated(chance, bodies[kind])
        bad = peer()
        with contextlib.suppress(OSError):
            bad.sock.sendall(request(kind, body, seconds=1.0))
            bad.sock.shutdown(socket.SHUT_WR)
        bad.wait_for_the_end()
        bad.sock.close()
    assert get(client, range(4)) == set(range(4))
    assert put(client, [5], BIG) == 1


def test_close_hangs_up_and_stops_all_threads(memory: MemoryStore, nothing_left: None) -> None:
    server = TcpServer(memory, CONFIG).start()
    idle, half = Peer(server.address), Peer(server.address)
    half.sock.sendall(request(TcpKind.RESERVE, wire.ids([name(9)]) + struct.pack("<Q", BIG)))
    transfer = int.from_bytes(half.read(HEADER.size + 9)[HEADER.size : HEADER.size + 8], "little")
    half.sock.sendall(request(TcpKind.FILL, pack_indices(transfer, [0])) + b"x" * 1000)
    server.close()
    server.close()
    assert idle.wait_for_the_end() == half.wait_for_the_end() == b""
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-tcp")] == []
    assert server.inflight_bytes == 0
    for one in (idle, half):
        one.sock.close()
    with pytest.raises(StoreError, match="not running"):
        _ = server.address
    assert memory.put([name(1)], [np.zeros(3, np.uint8)], TIMEOUT_S) == 1  # the store is not the server's to close


def test_it_listens_on_loopback_unless_told_otherwise(server: TcpServer) -> None:
    assert server.address.host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:1"):
        TcpServer(MemoryStore(1), replace(CONFIG, host="203.0.113.1", port=1)).start()
    with pytest.raises(ConfigError, match="cannot listen on 127"):
        TcpServer(MemoryStore(1), replace(CONFIG, port=server.address.port)).start()


def test_pages_are_what_they_were(client: TcpStore) -> None:
    assert client.put([name(1)], [page(1, 3 * BIG)], TIMEOUT_S) == 1
    with client.lease([name(1)], TIMEOUT_S) as lent:
        assert lent.views[0] is not None
        assert bytes(lent.views[0]) == page(1, 3 * BIG).tobytes()
