"""T085: bytes that would be code, lengths that are lies: a miss or a refusal, nothing is run, nothing large is allocated."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.errors import StoreError
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, FaultyStore, MemoryStore, messages, wire
from hicache_ray.storage.conformance_kit import PAGE, ROOM, TIMEOUT_S, Worker, get, name, put
from hicache_ray.storage.descriptors import Lease, Outcome
from hicache_ray.storage.wire import HEADER, MAGIC, VERSION, Kind
from hicache_ray.testing import Served, Stack, full
from tests.storage.stores import arena

HUGE = 1 << 40
LITTLE = 16 << 20  # bytes that a refusal may allocate at most


def bomb(marker: Path) -> bytes:
    """A pickle, written by hand, that makes a file when it is loaded."""
    return b"c_io\nopen\n(V%b\nVw\ntR." % str(marker).encode()


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture
def service() -> Iterator[ArenaService]:
    config = arena(ROOM * PAGE, "t085")
    with ArenaService(ArenaConfig(config.name, config.size_bytes, slab_bytes=PAGE, io_timeout_s=1.0)) as running:
        yield running
        running.check()


@pytest.fixture
def client(service: ArenaService) -> Iterator[ArenaClient]:
    with contextlib.closing(ArenaClient(service.address)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


def test_t085_the_bomb_is_one(tmp_path: Path) -> None:
    """Else the rest would show nothing."""
    pickle.loads(bomb(tmp_path / "made")).close()  # noqa: S301
    assert (tmp_path / "made").exists()


def test_t085_bytes_are_bytes(client: ArenaClient, marker: Path) -> None:
    """As an object, as a record: kept as they are, and run by nobody."""
    raw = bomb(marker)
    assert client.put([name(1)], [raw], TIMEOUT_S) == 1
    target = bytearray(len(raw))
    assert client.get([name(1)], [target], TIMEOUT_S) == 1
    assert bytes(target) == raw
    client.describe(raw[:64], {"model": raw.decode()}, TIMEOUT_S)
    assert client.described(TIMEOUT_S) == {raw[:64]: {"model": raw.decode()}}


@pytest.mark.parametrize("pools", [1, 2])
def test_t085_through_the_core(pools: int, marker: Path) -> None:
    """In the place of a page: a miss from there on, for every rank; it is computed, and the request knows nothing of it."""
    stack = Stack(pools={f"full{i}": full() for i in range(pools)}, ranks=2, store=FaultyStore(MemoryStore(64 << 20)))
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    assert stack.store is not None
    ids = sorted(stack.store.scan())
    key = stack._path(stack._prompts[next(iter(stack._prompts))]).names("full0")[3]
    bad = [id for id in ids if id.startswith(key)]
    assert len(bad) == 2 * pools
    stack.store.drop(bad, TIMEOUT_S)
    assert stack.store.put(bad, [bomb(marker)] * len(bad), TIMEOUT_S) == (1 << len(bad)) - 1
    assert stack.put(prompt) == Served(0, 0, 192, 321)
    stack.settle()
    stack.audit()
    for rank in range(2):
        assert stack.read(prompt, "full0", rank) == stack.made(prompt, "full0", rank)


# -- to the service -------------------------------------------------------------------------------------------------------------------

LIES = {
    "a pickle": bomb(Path("/nowhere/marker")),
    "a truncated header": HEADER.pack(MAGIC, VERSION, Kind.PING, 1, 0)[:-1],
    "half a header": MAGIC,
    "the largest length": HEADER.pack(MAGIC, VERSION, Kind.RESERVE, 1, 2**32 - 1),
    "2^40 as a length": struct.pack("<2sBBIQ", MAGIC, VERSION, Kind.RESERVE, 1, HUGE + 2**32 - 1),
    "more ids than bytes": wire.encode(Kind.LEASE, 1, struct.pack("<I", 2**32 - 1)),
    "a seal of 2^32 objects": wire.encode(Kind.SEAL, 1, struct.pack("<QI", 1, 2**32 - 1)),
    "a prefix longer than its frame": wire.encode(Kind.CLEAR, 1, struct.pack("<H", 65535)),
}


@pytest.mark.parametrize("greet", [True, False])
@pytest.mark.parametrize("what", LIES)
def test_t085_lies_to_the_service(what: str, greet: bool, service: ArenaService, client: ArenaClient) -> None:
    """Their own connection is closed; the others do not notice."""
    put(client, [1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(service.address.socket)
        peer.settimeout(TIMEOUT_S)
        if greet:
            peer.sendall(wire.encode(Kind.HELLO, 1, b""))
            assert peer.recv(65536)
        peer.sendall(LIES[what])
        peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(65536):
                pass
    assert get(client, [1]) == {1}
    assert client.stats(TIMEOUT_S).objects == 1


def test_t085_an_object_of_2_to_the_40_bytes(client: ArenaClient) -> None:
    """Announced properly, it is refused like anything that can never fit; what was there stays."""
    put(client, [1])
    with client._session.asking(TIMEOUT_S) as (connection, deadline):
        asked = messages.pack_reserve([name(2), name(3)], [HUGE, 2**64 - 1], 1.0)
        reservation = messages.unpack_reservation(connection.call(Kind.RESERVE, asked, deadline), 2)
    assert [grant.outcome for grant in reservation.grants] == [Outcome.REFUSED, Outcome.REFUSED]
    assert client.stats(TIMEOUT_S).used_bytes == PAGE
    assert get(client, [1]) == {1}


# -- to a client ----------------------------------------------------------------------------------------------------------------------

REPLY = wire.REPLY


def lease_of(length: int) -> bytes:
    return messages.pack_lease(Lease(1, 10.0, np.array([True]), np.array([[0, length, 0, 0]], np.uint64)))


ANSWERS = {
    "a pickle": bomb(Path("/nowhere/marker")),
    "a truncated header": HEADER.pack(MAGIC, VERSION, Kind.LEASE | REPLY, 2, 0)[:-1],
    "the largest length": HEADER.pack(MAGIC, VERSION, Kind.LEASE | REPLY, 2, 2**32 - 1),
    "a loan of 2^40 bytes": wire.encode(Kind.LEASE | REPLY, 2, lease_of(HUGE)),
    "half a loan": wire.encode(Kind.LEASE | REPLY, 2, lease_of(PAGE)[:-1]),
    "nothing": b"",
}


@pytest.mark.parametrize("what", ANSWERS)
def test_t085_lies_of_a_service(what: str, service: ArenaService, tmp_path: Path) -> None:
    """Somebody else answers at the socket: a miss or a StoreError, within the deadline, and no memory beyond the mapping is touched."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(TIMEOUT_S)
        liar = Worker(lambda: lie(listener, service, ANSWERS[what]))
        client = ArenaClient(path)
        try:
            with contextlib.suppress(StoreError):
                assert client.get([name(1)], [bytearray(PAGE)], TIMEOUT_S) == 0
        finally:
            client.close()
            liar.join()


def lie(listener: socket.socket, service: ArenaService, answer: bytes) -> None:
    """A right hello, and then something else."""
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(TIMEOUT_S)
        peer.recv(65536)
        segment = service.arena.segment
        hello = messages.Hello(service.arena.incarnation, [(str(segment.path), segment.data_bytes)])
        peer.sendall(wire.encode(Kind.HELLO | REPLY, 1, messages.pack_hello(hello)))
        peer.recv(65536)
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while peer.recv(65536):
                pass
