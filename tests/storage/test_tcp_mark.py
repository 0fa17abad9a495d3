"""The low-water mark of a receiving socket: up for the bulk of a transfer only, and nobody waits for its sake."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hicache_ray.errors import StoreClosed, StoreTimeout
from hicache_ray.storage import MemoryStore, tcp_mark
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import checksum
from hicache_ray.storage.segment import Array
from hicache_ray.storage.tcp import TcpClientConfig, TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_frames import TcpKind
from hicache_ray.storage.tcp_mark import STALL_S, LowWater
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.storage.tcp_streams import Stream
from hicache_ray.storage.wire import MAX_BODY
from tests.storage.conftest import FakeClock
from tests.storage.objects import TIMEOUT_S, get, page, put

BIG = 1 << 20
PIECES = [BIG] * 12
WAYS = ("compiled", "hashed", "plain")
PATIENCE_S = 120.0  # for a compiler on a busy machine


class Watched(socket.socket):
    """Writes down where its mark is set to. ``down``: it was lowered. ``refuse``: a system that knows no mark."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.marks: list[int] = []
        self.down, self.refuse = threading.Event(), False

    def setsockopt(self, level: int, option: int, value: Any) -> None:  # type: ignore[override]
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            if self.refuse:
                raise OSError(errno.ENOPROTOOPT, "Protocol not available")
            self.marks.append(value)
        super().setsockopt(level, option, value)
        if self.marks[-1:] == [1]:
            self.down.set()


class Ends:
    """A sender, and a receiver with buffers of ``buffer_bytes``. ``most``: where the receiver's mark is when it is up."""

    def __init__(self, buffer_bytes: int, clock: FakeClock) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
        self.sock, self.clock = Watched(other.detach()), clock
        self.sender, self.receiver = Stream(one, "the sender", buffer_bytes), Stream(self.sock, "the receiver", buffer_bytes)
        self.most = LowWater(self.sock).most

    def soon(self, seconds: float = TIMEOUT_S) -> Deadline:
        """For the socket it is real time that counts."""
        return Deadline(self.clock, self.clock.now + seconds)

    def send(self, data: Array) -> None:
        self.sender.send([data.data], self.soon())

    @property
    def mark(self) -> int:
        return self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=[128 << 10, 4 << 20], ids=["small buffers", "large buffers"])
def ends(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Ends]:
    opened = Ends(request.param, clock)
    yield opened
    opened.close()


@pytest.fixture(params=WAYS)
def receive(request: pytest.FixtureRequest, ends: Ends) -> Callable[..., list[int | None]]:
    """Receives into targets of sizes or arrays, by each of the ways; returns the sums, which are none by the plain one."""

    def run(targets: list[Array], sums: list[int | None], seconds: float = TIMEOUT_S) -> list[int | None]:
        kernel = None
        if request.param == "compiled":
            from hicache_ray.storage import kernel_tcp as kernel  # type: ignore[no-redef]
        ends.receiver.receive_objects(targets, None if request.param == "plain" else sums, ends.soon(seconds), kernel)
        return [checksum(target) for target in targets] if request.param == "plain" else sums

    return run


@pytest.fixture
def no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits under the mark for what does not come waits until the deadline."""
    monkeypatch.setattr(tcp_mark, "STALL_S", 2 * TIMEOUT_S)


Receive = Callable[..., list[int | None]]


def empty(sizes: list[int]) -> list[Array]:
    return [np.zeros(size, np.uint8) for size in sizes]


def cut(data: Array, sizes: list[int]) -> list[Array]:
    """The pieces of ``data`` of these sizes."""
    return np.split(data, np.cumsum(sizes)[:-1])


def test_it_is_up_while_enough_is_to_come(ends: Ends) -> None:
    low = LowWater(ends.sock)
    want = low.most // 2
    assert 0 < low.most <= ends.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4
    assert (low.floor(10 * low.most, want), low.patience(9.0), ends.mark) == (0, 9.0, 1)
    with low.raised(3 * low.most - 1, want):
        assert (low.bytes, ends.mark) == (0, 1)
    with low.raised(3 * low.most, want):
        assert (low.bytes, ends.mark) == (low.most, low.most)  # the system has taken it as it is
        assert (low.patience(9.0), low.patience(STALL_S / 2)) == (STALL_S, STALL_S / 2)
        assert low.floor(want + low.most + 1, want) == want + low.most
        assert ends.mark == low.most
        assert low.floor(want + low.most, want) == 0
        assert (low.bytes, ends.mark) == (0, 1)
    with pytest.raises(ZeroDivisionError), low.raised(3 * low.most, want):
        raise ZeroDivisionError
    assert (low.bytes, ends.mark) == (0, 1)


def test_a_buffer_that_is_too_small_has_none(clock: FakeClock) -> None:
    tiny = Ends(16 << 10, clock)
    try:
        assert tiny.most == 0
        with LowWater(tiny.sock).raised(100 * BIG, 1):
            assert (tiny.mark, tiny.sock.marks) == (1, [])
    finally:
        tiny.close()


@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.parametrize("marks", [1, 2, 12])
def test_sizes_around_the_mark(ends: Ends, receive: Receive, no_way_out: None, marks: int, by: int) -> None:
    """One object, and all of it before the receiver looks, or after it has begun to wait."""
    source = page(1, marks * ends.most + by)
    target, sums = empty([source.nbytes]), [None]
    sender = threading.Thread(target=ends.send, args=(source,))
    sender.start()
    assert receive(target, sums) == [checksum(source)]
    sender.join(TIMEOUT_S)
    assert (target[0] == source).all()
    assert ends.mark == 1


@pytest.mark.parametrize("size", [100, 40_000])
def test_many_small_pieces(ends: Ends, receive: Receive, no_way_out: None, size: int) -> None:
    sizes = [size + n for n in range(10 * BIG // size if size > 1000 else 3000)]
    source, targets = page(1, sum(sizes)), empty(sizes)
    sender = threading.Thread(target=ends.send, args=(source,))
    sender.start()
    assert receive(targets, [None] * len(sizes)) == [checksum(piece) for piece in cut(source, sizes)]
    sender.join(TIMEOUT_S)
    assert ends.mark == 1


def test_a_small_object_alone_needs_no_mark(ends: Ends, receive: Receive) -> None:
    source = page(1, ends.most - 1)
    ends.send(source[:50_000])
    sender = threading.Thread(target=ends.send, args=(source[50_000:],))
    sender.start()
    assert receive(empty([source.nbytes]), [None]) == [checksum(source)]
    sender.join(TIMEOUT_S)
    assert ends.sock.marks == []


@pytest.mark.parametrize("missing", [1, 70_000, 7 * BIG - 70_000], ids=["last byte", "tail", "middle"])
def test_a_sender_that_stops_ends_at_the_deadline(ends: Ends, receive: Receive, missing: int) -> None:
    sizes = PIECES
    source, sums = page(1, sum(sizes)), [None] * len(sizes)
    sender = threading.Thread(target=ends.send, args=(source[: source.nbytes - missing],))
    sender.start()
    with pytest.raises(StoreTimeout):
        receive(empty(sizes), sums, 3 * STALL_S)
    sender.join(TIMEOUT_S)
    assert sums[-1] is None
    assert (ends.sock.marks, ends.mark) == ([ends.most, 1], 1)


def test_a_sender_that_hangs_up_ends_it(ends: Ends, receive: Receive) -> None:
    source, sums = page(1, sum(PIECES)), [None] * len(PIECES)

    def send() -> None:
        ends.send(source[: 5 * BIG + 1000])
        ends.sender.hang_up()

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(StoreClosed):
        receive(empty(PIECES), sums)
    sender.join(TIMEOUT_S)
    assert sums[5] is None
    assert ends.mark == 1


@pytest.mark.parametrize("first", [5 * BIG + 1000, 5 * BIG + 524_288])
def test_after_a_pause_the_rest_is_received_without_the_mark(ends: Ends, receive: Receive, first: int) -> None:
    """The rest comes only when the mark is down, the first bytes of it one by one."""
    source, targets = page(1, sum(PIECES)), empty(PIECES)

    def send() -> None:
        ends.send(source[:first])
        assert ends.sock.down.wait(TIMEOUT_S)
        for n in range(3):
            ends.send(source[first + n : first + n + 1])
        ends.send(source[first + 3 :])

    sender = threading.Thread(target=send)
    sender.start()
    assert receive(targets, [None] * len(PIECES)) == [checksum(piece) for piece in cut(source, PIECES)]
    sender.join(TIMEOUT_S)
    assert all((target == piece).all() for target, piece in zip(targets, cut(source, PIECES), strict=True))
    assert ends.sock.marks == [ends.most, 1]


def test_frames_after_the_bulk_arrive_at_once(ends: Ends, receive: Receive, no_way_out: None) -> None:
    """One right behind it, and one that is sent when that has been answered."""
    source = page(1, sum(PIECES))

    def send() -> None:
        ends.send(source)
        ends.sender.send_frame(TcpKind.PING, 1, b"1", ends.soon())
        assert ends.sender.receive_frame(0, MAX_BODY, ends.soon()).body == b"2"
        ends.sender.send_frame(TcpKind.PING, 3, b"", ends.soon())

    sender = threading.Thread(target=send)
    sender.start()
    receive(empty(PIECES), [None] * len(PIECES))
    assert ends.receiver.receive_frame(0, MAX_BODY, ends.soon()).body == b"1"
    ends.receiver.send_frame(TcpKind.PING, 2, b"2", ends.soon())
    begun = ends.receiver.wait()
    assert ends.receiver.receive_frame(0, MAX_BODY, ends.soon(), begun).request == 3
    sender.join(TIMEOUT_S)
    assert ends.sock.marks == [ends.most, 1]


def test_a_system_without_it(ends: Ends, receive: Receive) -> None:
    ends.sock.refuse = True
    source = page(1, sum(PIECES))
    sender = threading.Thread(target=ends.send, args=(source,))
    sender.start()
    assert receive(empty(PIECES), [None] * len(PIECES)) == [checksum(piece) for piece in cut(source, PIECES)]
    sender.join(TIMEOUT_S)
    assert ends.mark == 1


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_a_store_answers_on_the_connections_that_moved_bulk(kernel: str, nothing_left: None) -> None:
    with TcpServer(MemoryStore(16 * BIG), TcpConfig("secret")) as server:
        client = TcpStore(server.address, "secret", TcpClientConfig(streams=1, connections=1, kernel=kernel))
        try:
            client.warm_up(PATIENCE_S)
            for _ in range(2):
                assert put(client, range(8), BIG) == 255
                client.ping(TIMEOUT_S)
                assert get(client, range(8), BIG) == set(range(8))
                client.ping(TIMEOUT_S)
                assert client.clear(TIMEOUT_S) == 8
            assert server.connections == 1
        finally:
            client.close()
