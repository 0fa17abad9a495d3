"""The service against peers that misbehave, and its end."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, messages, wire
from hicache_ray.storage.lent import release_body
from hicache_ray.storage.owned import PREFIX
from hicache_ray.storage.serving import Log
from hicache_ray.storage.wire import HEADER, MAGIC, VERSION, Kind
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, put
from tests.storage.peers import BarePeer, closing_all


class Peer(BarePeer):
    def __init__(self, path: str, greet: bool = True) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)  # blocking: waits while the queue of the listener is full
        super().__init__(sock, TIMEOUT_S)
        self.splitter = wire.Splitter(wire.REPLY)
        if greet:
            assert self.ask(Kind.HELLO, b"").kind == Kind.HELLO

    def ask(self, kind: int, body: bytes) -> wire.Frame:
        self.sock.sendall(wire.encode(kind, 1, body))
        while (frame := self.splitter.next()) is None:
            data = self.sock.recv(65536)
            assert data, "the service hung up"
            self.splitter.feed(data)
        return frame


@pytest.fixture
def peer(service: ArenaService) -> Iterator[Callable[..., Peer]]:
    def make(greet: bool = True) -> Peer:
        peers.append(Peer(service.address.socket, greet))
        return peers[-1]

    with closing_all(list[Peer]()) as peers:
        yield make


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": HEADER.pack(MAGIC, VERSION + 1, Kind.PING, 1, 0),
    "a huge length": HEADER.pack(MAGIC, VERSION, Kind.RESERVE, 1, 2**32 - 1),
    "an unknown kind": HEADER.pack(MAGIC, VERSION, 77, 1, 0),
    "a reply": HEADER.pack(MAGIC, VERSION, Kind.PING | wire.REPLY, 1, 0),
    "a count without items": wire.encode(Kind.LEASE, 1, struct.pack("<I", 2**31)),
    "too many bytes": wire.encode(Kind.DROP, 1, struct.pack("<I", 0) + b"x"),
    "an error": wire.encode(Kind.ERROR, 1, b"no"),
    "a second hello": wire.encode(Kind.HELLO, 1, b""),
    "a record that is not one": wire.encode(Kind.DESCRIBE, 1, struct.pack("<H", 1) + b"d[1, 2"),
    "bits of more than there are": wire.encode(Kind.RELEASE, 1, struct.pack("<QIB", 1, 3, 0b1000)),
}
BODIES = {
    Kind.LOOKUP: messages.pack_lookup([key(1)], [TAG]),
    Kind.RESERVE: messages.pack_reserve([name(1)], [PAGE], 1.0),
    Kind.SEAL: messages.pack_seal(1, [1]),
    Kind.WRITE: messages.WRITE.pack(1, name(1), PAGE, 1, 1),
    Kind.LEASE: wire.ids([name(1)]) + wire.real(1.0),
    Kind.RELEASE: release_body(1, 1, 1),
    Kind.DROP: wire.ids([name(1)]),
    Kind.CLEAR: wire.number(1, "H") + b"k",
    Kind.SCAN: wire.number(0) + wire.number(1, "H") + b"k",
    Kind.DESCRIBED: b"",
    Kind.STATS: b"",
    Kind.MEMBERS: b"",
}
GARBAGE |= {f"{kind.name} and a byte": wire.encode(kind, 1, body + b"x") for kind, body in BODIES.items()}


@pytest.mark.parametrize(
    ("what", "greet"), [(what, greet) for what in GARBAGE for greet in (True, False) if greet or what != "a second hello"]
)
def test_garbage_ends_its_own_connection_only(
    what: str, greet: bool, client: ArenaClient, peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    assert put(client, [1, 2]) == 0b11
    bad = peer(greet)
    with caplog.at_level(logging.WARNING, "hicache_ray.storage"):
        bad.sock.sendall(GARBAGE[what])
        assert bad.wait_for_the_end() == b""
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is closed" in caplog.text
    assert get(client, [1, 2]) == {1, 2}


@pytest.mark.parametrize("half", [b"", wire.encode(Kind.PING, 1, b"x" * 100)[:50]])
def test_half_open_peers_are_not_waited_for(half: bytes, client: ArenaClient, peer: Callable[..., Peer]) -> None:
    silent = peer(greet=bool(half))
    silent.sock.sendall(half)
    assert silent.wait_for_the_end() == b""
    assert put(client, [1]) == 1


@pytest.mark.parametrize("greet", [True, False])
def test_a_peer_that_drips_is_not_waited_for(greet: bool, config: ArenaConfig, caplog: pytest.LogCaptureFixture) -> None:
    """A byte now and then, each in time, is still one frame that is late."""
    with caplog.at_level(logging.WARNING, "hicache_ray.storage"), ArenaService(replace(config, io_timeout_s=0.2)) as service:
        slow = Peer(service.address.socket, greet)
        assert 0 < slow.drip(wire.encode(Kind.PING if greet else Kind.HELLO, 1, bytes(1000)), 0.02) < 500
        slow.close()
    assert "half a frame" in caplog.text


def test_a_peer_that_reads_no_answers_is_dropped(client: ArenaClient, peer: Callable[..., Peer]) -> None:
    deaf = peer()
    ping = wire.encode(Kind.PING, 1, bytes(1 << 20))
    with pytest.raises(OSError, match="reset|pipe"):
        deaf.sock.sendall(ping * 100)
    assert put(client, [1]) == 1


def test_connections_are_bounded(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    with ArenaService(replace(config, max_connections=3)) as service:
        peers = [Peer(service.address.socket) for _ in range(3)]
        refused = connect(service.address)
        with pytest.raises(StoreError, match="all 3 connections are taken; see storage.max_connections"):
            put(refused, [1])
        peers[0].sock.close()
        peers[1].ask(Kind.PING, b"")
        while len(service._handlers) == 3:  # until the service has seen it
            peers[1].ask(Kind.PING, b"")
        assert put(connect(service.address), [1]) == 1
        for peer in peers:
            peer.sock.close()


def test_many_connections_leave_nothing(service: ArenaService, client: ArenaClient) -> None:
    assert put(client, [1]) == 1
    for _ in range(500):
        Peer(service.address.socket, greet=False).sock.close()
    assert get(client, [1]) == {1}


def test_ten_thousand_connections_are_refused_in_few_words(
    config: ArenaConfig, connect: Callable[..., ArenaClient], caplog: pytest.LogCaptureFixture
) -> None:
    """Bounded threads, bounded log, and whoever is connected is served."""
    with ArenaService(replace(config, max_connections=4)) as service:
        client = connect(service.address)
        assert put(client, [1]) == 1
        peers = [Peer(service.address.socket) for _ in range(3)]
        with caplog.at_level(logging.WARNING, "hicache_ray.storage"):
            for _ in range(10_000):
                Peer(service.address.socket, greet=False).sock.close()
            last = Peer(service.address.socket, greet=False)
            assert b"all 4 connections are taken" in last.wait_for_the_end()
        last.sock.close()
        assert 1 <= len(caplog.records) <= 400
        assert sum(t.name.startswith("hicache-arena") for t in threading.enumerate()) == 5
        assert len(service._threads) <= 5
        assert get(client, [1]) == {1}
        for peer in peers:
            peer.sock.close()


def test_a_flood_of_lines_is_a_few_and_a_count(clock: FakeClock) -> None:
    said = Log(clock, most=3, seconds=10.0)
    assert [said.admit() for _ in range(5)] == [0, 0, 0, None, None]
    clock.advance(10.0)
    assert [said.admit() for _ in range(4)] == [2, 0, 0, None]


def mangled(chance: np.random.Generator) -> bytes:
    """A frame as a broken or hostile peer would send it."""
    kind, count = int(chance.integers(0, 16)), int(chance.integers(0, 5))
    ids = wire.ids([name(int(n)) for n in chance.integers(0, 9, count)])
    body = ids + chance.bytes(int(chance.integers(0, 80)))
    if chance.random() < 0.4:  # well formed up to the last byte
        words = wire.numbers("Q", [(0, 1, PAGE, 2**40, 2**64 - 1)[n] for n in chance.integers(0, 5, count)])
        body = ids + words * bool(chance.integers(2)) + struct.pack("<d", float(chance.choice([0.0, 1.0, 1e300, np.nan, -1.0])))
    raw = bytearray(wire.encode(kind, 1, body))
    for _ in range(int(chance.integers(0, 3))):
        raw[int(chance.integers(len(raw)))] ^= 1 << int(chance.integers(8))
    return bytes(raw[: int(chance.integers(1, len(raw) + 1))] if chance.random() < 0.3 else raw)


def test_fuzz(service: ArenaService, client: ArenaClient, caplog: pytest.LogCaptureFixture) -> None:
    """A fixed budget of hostile frames; what others stored may be dropped by a peer that may drop, but never changed."""
    chance, sent = np.random.default_rng(7), 0
    with caplog.at_level(logging.CRITICAL, "hicache_ray.storage"):
        for round in range(150):
            peer = Peer(service.address.socket)
            frames = [mangled(chance) for _ in range(int(chance.integers(1, 12)))]  # the same ones however soon the service hangs up
            sent += len(frames)
            with contextlib.suppress(OSError):
                for frame in frames:
                    peer.sock.sendall(frame)
            peer.sock.shutdown(socket.SHUT_WR)
            peer.wait_for_the_end()
            peer.sock.close()
            if round % 10 == 0:
                service.check()
                put(client, range(9))
                get(client, range(9))
    assert sent > 500
    while len(service._handlers) > 1:
        client.ping(TIMEOUT_S)  # until the service has seen that they are gone
    client.clear(TIMEOUT_S)
    assert client.stats(TIMEOUT_S).pending_bytes == 0
    assert put(client, [1]) == 1


def test_a_closed_peers_reservation_is_reclaimed(client: ArenaClient, peer: Callable[..., Peer]) -> None:
    """What a writer leaves that dies between reserve and seal."""
    writer = peer()
    ids = wire.ids([name(n) for n in range(64)])
    writer.ask(Kind.RESERVE, ids + wire.numbers("Q", [PAGE] * 64) + wire.real(30.0))
    assert client.lookup([key(1)], [TAG], TIMEOUT_S)[TAG].pending == 1
    assert put(client, [1, 100]) == 0
    writer.sock.close()
    while client.stats(TIMEOUT_S).used_bytes:
        pass  # until the service has seen it
    assert put(client, [1, 100]) == 0b11


def test_a_stolen_reservation_seals_nothing(client: ArenaClient, peer: Callable[..., Peer]) -> None:
    writer, thief = peer(), peer()
    reply = writer.ask(Kind.RESERVE, wire.ids([name(1)]) + wire.numbers("Q", [PAGE]) + wire.real(30.0))
    reservation = wire.Reader(reply.body).number("Q")
    seal = wire.number(reservation, "Q") + wire.number(1) + b"\x01" + wire.number(0, "Q")
    assert thief.ask(Kind.SEAL, seal).body == b"\x00"
    assert writer.ask(Kind.SEAL, seal).body == b"\x01"


def test_descriptions_are_bounded(client: ArenaClient) -> None:
    client.describe(b"a", {"x": "y" * (wire.MAX_RECORDS // 2)}, TIMEOUT_S)
    with pytest.raises(StoreError, match="the descriptions would take"):
        client.describe(b"b", {"x": "y" * (wire.MAX_RECORDS // 2)}, TIMEOUT_S)
    assert list(client.described(TIMEOUT_S)) == [b"a"]


def test_a_scan_of_many_pages_is_as_of_its_first(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    many = 2 * wire.MAX_IDS + 5
    with ArenaService(replace(config, size_bytes=4 << 20, slab_bytes=None)) as service:
        client = connect(service.address)
        ids = [name(n) for n in range(many)]
        assert client.put(ids, [memoryview(b"x")] * many, TIMEOUT_S) == (1 << many) - 1
        assert set(client.scan(timeout_s=TIMEOUT_S)) == set(ids)
        targets = [bytearray(1) for _ in ids]
        assert client.get(ids, targets, TIMEOUT_S) == (1 << many) - 1  # type: ignore[arg-type]
        assert client.lookup([key(n) for n in range(many)], [TAG], TIMEOUT_S)[TAG].hit == (1 << many) - 1
        assert client.drop(ids, TIMEOUT_S) == (1 << many) - 1


def test_close_hangs_up_and_removes_everything(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    service = ArenaService(config).start()
    clients = [connect(service.address) for _ in range(4)]
    for n, client in enumerate(clients):
        put(client, [n])
    idle = Peer(service.address.socket)
    service.close()
    service.close()
    assert idle.wait_for_the_end() == b""
    idle.sock.close()
    assert [path.name for path in Path("/dev/shm").glob(f"{PREFIX}{config.name}*")] == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("hicache-arena")] == []
    with pytest.raises(StoreClosed):
        get(clients[0], [0])
    with pytest.raises(StoreError, match="not running"):
        service.stats()


def test_a_failed_start_leaves_nothing(config: ArenaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", refuse)
    with pytest.raises(ConfigError, match="cannot listen on"):
        ArenaService(config).start()
