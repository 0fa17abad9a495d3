"""The tcp plane on loopback, from a second process, checksums on; and Arrow Flight over the same store.

The baseline of a put and a get moves the same bytes between the same two processes over two bare sockets, one thread each on each side,
in the same repetition, and checks nothing; ratios above 1 are faster than that.

    python -m benchmarks.bench_tcp            prints a table
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

from benchmarks import Row
from benchmarks.measure import at_most, beside, expect, timed
from hicache_ray.storage import ArenaConfig, LocalStore, NodeStore
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.flight import FlightEndpoint
from hicache_ray.storage.segment import Array
from hicache_ray.storage.tcp import TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.store import KEY_BYTES, TAG_BYTES

REPETITIONS = 15
PAGES, PAGE_BYTES, STREAMS = 128, 1 << 20, 2
ARENA_BYTES = 512 << 20
GOAL = 0.85
TIMEOUT_S = 30.0
TOKEN = "bench"
_BUFFER_BYTES = 4 << 20
_GET, _PUT = b"g", b"p"
_EVERYTHING = (1 << PAGES) - 1


def run() -> list[Row]:
    """Rows for put, get, Flight and lookup."""
    with _server() as (tcp_port, flight_port, raw_port), closing(TcpStore(f"127.0.0.1:{tcp_port}", TOKEN)) as client:
        client.warm_up(TIMEOUT_S)
        raw = [_tuned(socket.create_connection(("127.0.0.1", raw_port))) for _ in range(STREAMS)]
        try:
            sources, targets = _pages(1), _pages(0)
            ids = [os.urandom(KEY_BYTES + TAG_BYTES) for _ in range(PAGES)]
            seconds: dict[str, list[float]] = {name: [] for name in ("raw put", "put", "raw get", "get", "flight")}
            for repetition in range(REPETITIONS + 1):
                client.clear(TIMEOUT_S)
                found = {
                    "raw put": timed(lambda: _move(raw, _PUT, sources)),
                    "put": timed(lambda: expect(client.put(ids, sources, TIMEOUT_S), _EVERYTHING)),
                    "raw get": timed(lambda: _move(raw, _GET, targets)),
                    "get": timed(lambda: expect(client.get(ids, targets, TIMEOUT_S), _EVERYTHING)),
                    "flight": timed(lambda: _flight_get(flight_port, ids)),
                }
                expect(all((a == b).all() for a, b in zip(sources, targets, strict=True)), True)
                if repetition:  # the first one warms up
                    for name, value in found.items():
                        seconds[name].append(value)
            return [_row("put", seconds), _row("get", seconds), _flight_row(seconds), _lookup(client)]
        finally:
            for sock in raw:
                sock.close()


def _row(what: str, seconds: dict[str, list[float]]) -> Row:
    name = f"tcp {what}, {PAGES} x 1 MiB, against {STREAMS} bare sockets"
    return beside(name, PAGES * PAGE_BYTES, seconds[what], seconds[f"raw {what}"], GOAL)


def _flight_row(seconds: dict[str, list[float]]) -> Row:
    return beside(f"Arrow Flight get, {PAGES} x 1 MiB", PAGES * PAGE_BYTES, seconds["flight"], seconds["raw get"], None)


def _lookup(client: TcpStore) -> Row:
    keys, tag = [os.urandom(KEY_BYTES) for _ in range(2048)], os.urandom(TAG_BYTES)
    value = statistics.median(timed(lambda: client.lookup(keys, [tag], TIMEOUT_S)) for _ in range(50)) * 1e6
    return at_most("tcp lookup, 2048 keys", value, "us", 3000.0)


def _pages(seed: int) -> list[Array]:
    """Pages of one buffer, every byte of it written."""
    return list(np.random.default_rng(seed).integers(0, 256, PAGES * PAGE_BYTES, np.uint8).reshape(PAGES, PAGE_BYTES))


def _flight_get(port: int, ids: list[bytes]) -> None:
    import pyarrow.flight as flight

    options = flight.FlightCallOptions(timeout=TIMEOUT_S, headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    with flight.connect(f"grpc://127.0.0.1:{port}") as client:
        ticket = flight.Ticket(",".join(id.hex() for id in ids))
        expect(client.do_get(ticket, options).read_all().num_rows, PAGES)


# -- bare sockets ------------------------------------------------------------------------------------------------------------------


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return sock


def _move(socks: list[socket.socket], what: bytes, pages: list[Array]) -> None:
    """Every socket moves its share of the pages, each in a thread of its own."""

    def one(number: int) -> None:
        share = pages[number * PAGES // STREAMS : (number + 1) * PAGES // STREAMS]
        socks[number].sendall(what + struct.pack("<I", number))
        if what == _GET:
            _receive(socks[number], share)
        else:
            _send(socks[number], share)
            expect(socks[number].recv(1), b"k")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, STREAMS)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()


def _send(sock: socket.socket, pages: list[Array]) -> None:
    for page in pages:
        sock.sendall(page.data)


def _receive(sock: socket.socket, pages: list[Array]) -> None:
    for page in pages:
        seen = 0
        while seen < page.nbytes:
            count = sock.recv_into(page.data[seen:], 0, socket.MSG_WAITALL)
            expect(count > 0, True)
            seen += count


def _serve_raw(listener: socket.socket, pages: list[Array]) -> None:
    def one(sock: socket.socket) -> None:
        while ask := sock.recv(5, socket.MSG_WAITALL):
            number = struct.unpack("<I", ask[1:])[0]
            share = pages[number * PAGES // STREAMS : (number + 1) * PAGES // STREAMS]
            if ask[:1] == _GET:
                _send(sock, share)
            else:
                _receive(sock, share)
                sock.sendall(b"k")

    for _ in range(STREAMS):
        sock, _ = listener.accept()
        threading.Thread(target=one, args=(_tuned(sock),), daemon=True).start()


# -- the other process -------------------------------------------------------------------------------------------------------------


@contextmanager
def _server() -> Iterator[list[int]]:
    """Ports of the tcp plane, of Flight and of the bare sockets of a process that ends when its standard input does."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.bench_tcp", "--serve", folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ports = process.stdout.readline().split()
            if not ports:
                raise RuntimeError("the server did not start; its error is above")
            yield [int(port) for port in ports]
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _serve(folder: str) -> None:
    node = NodeStore(Arena(ArenaConfig(f"bench-{os.getpid()}", ARENA_BYTES, socket_dir=folder, prefault="start")))
    node.warm_up(TIMEOUT_S)
    store = LocalStore(node)
    with (
        TcpServer(store, TcpConfig(TOKEN)) as server,
        FlightEndpoint(store, token=TOKEN) as endpoint,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        threading.Thread(target=_serve_raw, args=(listener, _pages(1)), daemon=True).start()
        print(server.address.port, endpoint.port, listener.getsockname()[1], flush=True)
        sys.stdin.read()
    store.close()
    node.close()


def _main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2])
        return
    from rich.console import Console

    from benchmarks.__main__ import table

    Console(width=132).print(table(run()))


if __name__ == "__main__":
    _main()
