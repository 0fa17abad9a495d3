"""Large objects through the compiled loops, and through those of Python: the same bytes, sums and errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreTimeout
from hicache_ray.storage import MemoryStore
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import checksum
from hicache_ray.storage.loading import KERNELS
from hicache_ray.storage.tcp import TcpClientConfig, TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.storage.tcp_streams import Stream
from tests.storage.conftest import FakeClock
from tests.storage.objects import TIMEOUT_S, get, name, page, put
from tests.storage.proxies import Harm, proxied

BIG = 1 << 20
PATIENCE_S = 120.0  # for a compiler on a busy machine
SLICES, STRIPE = (256 << 10, 512 << 10), 64  # of the compiled loops
EDGES = [size + n for size in SLICES for n in (-1, 0, 1, 63, 64, 65)]
SIZES = [32 << 10, (32 << 10) + 1, 100_000, *EDGES, BIG, BIG + 1, BIG + STRIPE, BIG + STRIPE + 1, BIG + 1023, BIG + 1024]


@pytest.fixture(scope="module", params=KERNELS)
def loops(request: pytest.FixtureRequest) -> Any:
    if request.param == "off":
        return None
    from hicache_ray.storage import kernel_tcp

    return kernel_tcp


@pytest.fixture
def streams() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a connection with small buffers: everything comes in many parts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    ends = Stream(one, "one", 64 << 10), Stream(other, "other", 64 << 10)
    yield ends
    for end in ends:
        end.close()


def soon(clock: FakeClock, seconds: float = TIMEOUT_S) -> Deadline:
    """For the socket it is real time that counts."""
    return Deadline(clock, clock.now + seconds)


def test_bytes_and_sums(streams: tuple[Stream, Stream], loops: Any, clock: FakeClock) -> None:
    sources = [page(n, size) for n, size in enumerate(SIZES)]
    targets, sent, found = [np.zeros(size, np.uint8) for size in SIZES], [None] * len(SIZES), [None] * len(SIZES)
    sender = threading.Thread(target=lambda: streams[0].send_objects(sources, sent, soon(clock), loops))
    sender.start()
    streams[1].receive_objects(targets, found, soon(clock), loops)
    sender.join(TIMEOUT_S)
    assert sent == found == [checksum(source) for source in sources]
    assert all((source == target).all() for source, target in zip(sources, targets, strict=True))


@pytest.mark.parametrize("offset", [0, 1, 16, 64])
def test_targets_that_begin_anywhere(streams: tuple[Stream, Stream], loops: Any, clock: FakeClock, offset: int) -> None:
    """Nothing is written beside them."""
    sources, found = [page(n, size) for n, size in enumerate(SIZES)], [None] * len(SIZES)
    memory = [np.full(size + 256, 7, np.uint8) for size in SIZES]
    begins = [-one.ctypes.data % 64 + offset for one in memory]
    targets = [one[begin : begin + size] for one, begin, size in zip(memory, begins, SIZES, strict=True)]
    sender = threading.Thread(target=lambda: streams[0].send_objects(sources, None, soon(clock)))
    sender.start()
    streams[1].receive_objects(targets, found, soon(clock), loops)
    sender.join(TIMEOUT_S)
    assert found == [checksum(source) for source in sources]
    assert all((source == target).all() for source, target in zip(sources, targets, strict=True))
    rest = [np.concatenate((one[:begin], one[begin + size :])) for one, begin, size in zip(memory, begins, SIZES, strict=True)]
    assert all((one == 7).all() for one in rest)


def test_who_hangs_up_leaves_what_was_whole(streams: tuple[Stream, Stream], loops: Any, clock: FakeClock) -> None:
    sources, found = [page(n, 40_000) for n in range(3)], [None] * 3

    def send() -> None:
        streams[0].send([sources[0].data, sources[1].data, sources[2][:39_999].data], soon(clock))
        streams[0].hang_up()

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(StoreClosed):
        streams[1].receive_objects([np.zeros(40_000, np.uint8) for _ in sources], found, soon(clock), loops)
    sender.join(TIMEOUT_S)
    assert found[2] is None
    assert loops is None or found[:2] == [checksum(source) for source in sources[:2]]  # else they came in one part with the third


def test_silence_ends_at_the_deadline(streams: tuple[Stream, Stream], loops: Any, clock: FakeClock) -> None:
    found: list[int | None] = [None]
    with pytest.raises(StoreTimeout):
        streams[1].receive_objects([np.zeros(BIG, np.uint8)], found, soon(clock, 0.05), loops)
    with pytest.raises(StoreTimeout):  # nobody reads: the buffers fill
        streams[0].send_objects([np.zeros(BIG, np.uint8)] * 32, [None] * 32, soon(clock, 0.05), loops)
    assert found == [None]


def test_a_lost_connection(streams: tuple[Stream, Stream], loops: Any, clock: FakeClock) -> None:
    streams[1].close()
    with pytest.raises(StoreClosed):
        streams[0].send_objects([np.zeros(BIG, np.uint8)] * 4, [None] * 4, soon(clock), loops)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_store(kernel: str, nothing_left: None) -> None:
    """Puts, gets, and damage on the way."""
    memory = MemoryStore(16 * BIG)
    config = TcpClientConfig(backoff_s=0.0, backoff_most_s=0.0, kernel=kernel)
    with TcpServer(memory, TcpConfig("secret")) as server:
        client = TcpStore(server.address, "secret", config)
        try:
            assert client.warm_up(PATIENCE_S) == (kernel == "auto")
            assert put(client, range(8), BIG) == 255
            assert get(client, range(8), BIG) == set(range(8))
        finally:
            client.close()
        with proxied(server.address, Harm("flip", "client", 3 * BIG // 2)) as proxy:
            harmed = TcpStore(proxy.address, "secret", config)
            try:
                harmed.warm_up(PATIENCE_S)
                targets = [np.zeros(BIG, np.uint8) for _ in range(8)]
                hits = harmed.get([name(n) for n in range(8)], targets, TIMEOUT_S)
                assert 0 < hits.bit_count() < 8
                assert all((targets[i] == page(i, BIG)).all() for i in range(8) if hits >> i & 1)
            finally:
                harmed.close()
    assert memory.stats(TIMEOUT_S).objects == 8  # damage on the way is none in the store


def test_a_kernel_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="kernel is 'fast'"):
        TcpClientConfig(kernel="fast")
