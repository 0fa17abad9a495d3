"""The tcp plane as its client sees it: deadlines, broken wires, restarts, many threads, many streams."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, CountingStore, FaultyStore, LocalStore, MemoryStore, NodeStore, bits
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.connection import Overloaded
from hicache_ray.storage.directory import ALWAYS, Directory, HomeIndex
from hicache_ray.storage.tcp import TcpAddress, TcpClientConfig, TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.store import KEY_BYTES, TAG_BYTES, Answer, Store
from tests.storage.conftest import FakeClock
from tests.storage.objects import TAG, TIMEOUT_S, get, key, name, page, present, put
from tests.storage.proxies import HARMS, Harm, proxied

BIG = 1 << 20
COUNT = 8  # of BIG objects: enough to be spread over two streams
TOKEN = "secret"
PATIENCE_S = 120.0  # for a compiler on a busy machine
CONFIG = TcpConfig(TOKEN, io_timeout_s=2.0)
NO_BACKOFF = TcpClientConfig(backoff_s=0.0, backoff_most_s=0.0)
Connect = Callable[..., TcpStore]


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(4 * COUNT * BIG)


@pytest.fixture
def server(memory: MemoryStore, nothing_left: None) -> Iterator[TcpServer]:
    with TcpServer(memory, CONFIG) as running:
        yield running
    assert running.inflight_bytes == 0
    assert running.connections == 0
    memory.check()


@pytest.fixture
def dial(nothing_left: None) -> Iterator[Connect]:
    """Opens clients that are closed at the end of the test."""
    opened: list[TcpStore] = []

    def open_one(address: TcpAddress, config: TcpClientConfig = NO_BACKOFF, **options: object) -> TcpStore:
        opened.append(TcpStore(address, TOKEN, config, **options))  # type: ignore[arg-type]
        assert opened[-1].warm_up(PATIENCE_S)  # what goes without the compiled loops: test_tcp_loops
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def numbers() -> range:
    return range(COUNT)


def test_addresses_are_written_and_read() -> None:
    for text in ("10.0.0.7:7070", "[::1]:7", "node-3.local:65535"):
        assert str(TcpAddress.parse(text)) == text
        assert TcpAddress.from_dict(TcpAddress.parse(text).to_dict()) == TcpAddress.parse(text)
    for text in ("", "10.0.0.7", ":7", "a:0", "a:65536", "a:b"):
        with pytest.raises(ConfigError, match="host:port"):
            TcpAddress.parse(text)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        TcpConfig("")
    with pytest.raises(ConfigError, match="needs a token"):
        TcpStore("a:1", "")
    with pytest.raises(ConfigError, match="streams is 3; choose 1 to 2"):
        TcpClientConfig(streams=3, connections=2)
    with pytest.raises(ConfigError, match="at least one connection"):
        TcpConfig(TOKEN, max_connections=0)
    assert TOKEN not in repr(CONFIG)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_large_calls_use_all_streams(server: TcpServer, dial: Connect, streams: int) -> None:
    client = dial(server.address, replace(NO_BACKOFF, streams=streams))
    assert put(client, numbers(), BIG) == (1 << COUNT) - 1
    assert get(client, numbers(), BIG) == set(numbers())
    assert server.connections == streams
    assert put(client, [100, 101], 70) == 0b11  # a small one needs but one


@pytest.mark.parametrize("sizes", [[3 * BIG + 1], [0, 5 * BIG, 0, 1], [1] * 700 + [2 * BIG] + [0] * 3])
def test_sizes_that_do_not_fit_the_chunks(server: TcpServer, dial: Connect, sizes: list[int]) -> None:
    client = dial(server.address)
    sources = [page(n, size) for n, size in enumerate(sizes)]
    ids, everything = [name(n) for n in range(len(sizes))], (1 << len(sizes)) - 1
    assert client.put(ids, sources, TIMEOUT_S) == everything
    targets = [np.full(size, 7, np.uint8) for size in sizes]
    assert client.get(ids, targets, TIMEOUT_S) == everything
    assert all((a == b).all() for a, b in zip(sources, targets, strict=True))


def test_over_an_arena(config: ArenaConfig, dial: Connect) -> None:
    """Whatever the store of the process is made of."""
    with ArenaService(replace(config, size_bytes=2 * COUNT * BIG, slab_bytes=None)) as service:
        arena = ArenaClient(service.address)
        try:
            with TcpServer(arena, CONFIG) as server:
                client = dial(server.address)
                assert put(client, numbers(), BIG) == (1 << COUNT) - 1
                assert get(arena, numbers(), BIG) == get(client, numbers(), BIG) == set(numbers())
                assert arena.damage(name(3))
                assert get(client, numbers(), BIG) == set(numbers()) - {3}
                assert not present(arena, [3])
                client.close()
        finally:
            arena.close()


@pytest.mark.parametrize("at", [0, 40, 400, 4 * BIG // 2])
def test_a_close_ends_the_calls_under_way(server: TcpServer, memory: MemoryStore, dial: Connect, at: int) -> None:
    """Whoever they wait for hangs: in the handshake, before the answer, or in the middle of the bytes."""
    put(memory, numbers(), BIG)
    ended: list[int | StoreError] = []
    with proxied(server.address, Harm("hang", "client", at)) as proxy:
        client = dial(proxy.address)

        def ask() -> None:
            try:
                ended.append(client.get([name(n) for n in numbers()], [np.zeros(BIG, np.uint8) for _ in numbers()], 2 * PATIENCE_S))
            except StoreError as error:
                ended.append(error)

        caller = threading.Thread(target=ask)
        caller.start()
        assert proxy.struck.wait(PATIENCE_S)
        client.close()
        caller.join(PATIENCE_S)
        assert not caller.is_alive()
    (end,) = ended
    assert isinstance(end, (StoreClosed, int))  # a get that is cut off in the middle gives what has arrived; which it is, is a race
    assert end != (1 << COUNT) - 1
    assert at > 40 or isinstance(end, StoreClosed)


@pytest.mark.parametrize("what", HARMS)
@pytest.mark.parametrize("at", [40, 4 * BIG // 2])
def test_a_get_over_a_bad_wire(server: TcpServer, memory: MemoryStore, dial: Connect, what: str, at: int) -> None:
    """In the handshake, or in the middle of the bytes: what did not arrive whole is a miss or an error, within the deadline."""
    put(memory, numbers(), BIG)
    with proxied(server.address, Harm(what, "client", at)) as proxy:
        client = dial(proxy.address)
        timeout = 1.0 if what == "hang" else TIMEOUT_S
        targets = [np.zeros(BIG, np.uint8) for _ in numbers()]
        try:
            hit = client.get([name(n) for n in numbers()], targets, timeout)
        except StoreError:
            hit = 0
        assert proxy.struck.is_set()
        assert hit != (1 << COUNT) - 1
        assert all((targets[i] == page(i, BIG)).all() for i in bits.each(hit))
        before = [target.copy() for target in targets]
        assert get(client, numbers(), BIG) == set(numbers())  # the next call finds a way
        assert all((a == b).all() for a, b in zip(before, targets, strict=True))  # nobody wrote after the call
    assert memory.stats(TIMEOUT_S).objects == COUNT  # damage on the way is none in the store
    client.close()


@pytest.mark.parametrize("what", HARMS)
@pytest.mark.parametrize("at", [40, 4 * BIG // 2])
def test_a_put_over_a_bad_wire(server: TcpServer, memory: MemoryStore, dial: Connect, what: str, at: int) -> None:
    with proxied(server.address, Harm(what, "server", at)) as proxy:
        client = dial(proxy.address)
        try:
            visible = put(client, numbers(), BIG) if what != "hang" else client.put(
                [name(n) for n in numbers()], [page(n, BIG) for n in numbers()], 1.0
            )  # fmt: skip
        except StoreError:
            visible = 0
        assert proxy.struck.is_set()
        assert visible != (1 << COUNT) - 1
        stored = present(memory, numbers())
        assert set(bits.each(visible)) <= stored
        assert get(memory, sorted(stored), BIG) == stored  # nothing torn is visible
        assert put(client, numbers(), BIG) == (1 << COUNT) - 1
        assert get(client, numbers(), BIG) == set(numbers())
        client.close()


def test_a_put_that_the_wire_damaged_is_a_miss_in_an_arena(config: ArenaConfig, dial: Connect) -> None:
    """The writer's own checksum is kept with the object, so every reader sees it."""
    node = NodeStore(Arena(replace(config, size_bytes=2 * COUNT * BIG, slab_bytes=None)))
    local = LocalStore(node)
    with TcpServer(local, CONFIG) as server, proxied(server.address, Harm("flip", "server", BIG // 2)) as proxy:
        client = dial(proxy.address)
        put(client, numbers(), BIG)
        assert proxy.struck.is_set()
        assert len(get(client, numbers(), BIG)) == COUNT - 1
        assert len(present(local, numbers())) == COUNT - 1
        assert put(client, numbers(), BIG) == (1 << COUNT) - 1
        assert get(local, numbers(), BIG) == get(client, numbers(), BIG) == set(numbers())
        assert server.inflight_bytes == 0
        client.close()
    node.check()
    local.close()
    node.close()


def test_a_server_that_never_answers_costs_one_deadline(dial: Connect, clock: FakeClock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = dial(TcpAddress(*silent.getsockname()[:2]), TcpClientConfig(), clock=clock)
        with pytest.raises(StoreTimeout):
            client.ping(0.2)
        with pytest.raises(StoreError, match="failed just now"):
            client.ping(TIMEOUT_S)


def test_nobody_listens(dial: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = TcpAddress(*gone.getsockname()[:2])
    with pytest.raises(StoreClosed, match="cannot be reached"):
        dial(address).ping(TIMEOUT_S)


def test_no_time_is_no_time(server: TcpServer, dial: Connect) -> None:
    client = dial(server.address, TcpClientConfig())
    with pytest.raises(StoreTimeout):
        client.stats(0.0)
    assert put(client, [1]) == 1  # and nothing is held against the server


def test_a_restarted_server_is_found_again(memory: MemoryStore, dial: Connect) -> None:
    with TcpServer(memory, CONFIG) as first:
        client = dial(first.address)
        put(client, numbers(), BIG)
        assert client.ping(TIMEOUT_S) == first.incarnation
        config = replace(CONFIG, port=first.address.port)
    with TcpServer(memory, config, incarnation="00" * 8):
        assert client.ping(TIMEOUT_S) == "00" * 8
        assert get(client, numbers(), BIG) == set(numbers())
        client.close()


def test_what_the_servers_store_refuses_says_why_and_leaves_the_connection(dial: Connect, memory: MemoryStore) -> None:
    faulty = FaultyStore(memory)
    with TcpServer(faulty, CONFIG) as server:
        client = dial(server.address, TcpClientConfig())
        faulty.fault("lookup", "error")
        with pytest.raises(StoreError, match="injected: this lookup fails"):
            present(client, [1])
        faulty.fault("lookup", "hang")
        with pytest.raises(StoreTimeout):  # whoever says so first; where it is the client, it leaves the server alone for a while
            dial(server.address, TcpClientConfig()).lookup([key(1)], [TAG], 0.2)
        faulty.fault("put", "error")
        with pytest.raises(StoreError, match="this put fails"):
            put(client, [1])
        assert put(client, [1]) == 1
        memory.close()
        with pytest.raises(StoreClosed, match="this handle of the store is closed"):
            present(client, [1])
        client.close()


def test_four_values(dial: Connect, memory: MemoryStore) -> None:
    class Moving(CountingStore):
        def lookup(self, keys: object, tags: object, timeout_s: float) -> dict[bytes, Answer]:
            return {TAG: Answer(hit=0b001, pending=0b010, retry=0b100), b"u" * TAG_BYTES: Answer()}

    with TcpServer(Moving(memory), CONFIG) as server:
        client = dial(server.address)
        found = client.lookup([key(n) for n in range(4)], [TAG, b"u" * TAG_BYTES], TIMEOUT_S)
        assert found == {TAG: Answer(hit=0b001, pending=0b010, retry=0b100), b"u" * TAG_BYTES: Answer()}
        client.close()


def test_a_put_that_a_clear_overtakes_makes_nothing_visible(dial: Connect, memory: MemoryStore) -> None:
    """The bytes are on the way when the store is cleared."""
    reached, go_on = threading.Event(), threading.Event()

    with TcpServer(memory, CONFIG) as server:
        client, other = dial(server.address), dial(server.address)
        put(client, [99])
        source = page(1, BIG)
        original = client._mover.run

        def paused(*arguments: object) -> object:
            error = original(*arguments)  # type: ignore[arg-type]
            reached.set()
            go_on.wait(TIMEOUT_S)
            return error

        client._mover.run = paused  # type: ignore[method-assign,assignment]
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(client.put([name(1)], [source], TIMEOUT_S)))
        thread.start()
        assert reached.wait(TIMEOUT_S)
        assert other.clear(TIMEOUT_S) == 1
        go_on.set()
        thread.join()
        assert found == [0]
        assert memory.stats(TIMEOUT_S).objects == 0
        client._mover.run = original  # type: ignore[method-assign]
        assert put(client, [1], BIG) == 1
        for one in (client, other):
            one.close()


def test_many_ids_go_in_several_frames(server: TcpServer, dial: Connect) -> None:
    many = 16384 + 300
    client = dial(server.address)
    ids, everything = [name(n) for n in range(many)], (1 << many) - 1
    assert client.put(ids, [memoryview(b"x")] * many, TIMEOUT_S) == everything
    assert client.lookup([key(n) for n in range(many)], [TAG], TIMEOUT_S)[TAG].hit == everything
    assert set(client.scan(timeout_s=TIMEOUT_S)) == set(ids)
    targets = [bytearray(1) for _ in ids]
    assert client.get(ids, targets, TIMEOUT_S) == everything
    assert set(map(bytes, targets)) == {b"x"}
    assert client.drop(ids, TIMEOUT_S) == everything


def test_threads_share_a_client(server: TcpServer, dial: Connect) -> None:
    client = dial(server.address, replace(NO_BACKOFF, streams=2, connections=3))
    found: list[set[int]] = []

    def work(first: int) -> None:
        for _ in range(5):
            put(client, range(first, first + 3), BIG)
            found.append(get(client, range(first, first + 3), BIG))

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(min, found)) == sorted([10 * n for n in range(5)] * 5)
    assert all(len(numbers) == 3 for numbers in found)
    assert server.connections <= 3


def test_connections_in_use_are_waited_for_until_the_deadline(dial: Connect, memory: MemoryStore) -> None:
    faulty = FaultyStore(memory)
    with TcpServer(faulty, CONFIG) as server:
        client = dial(server.address, TcpClientConfig(streams=1, connections=1))
        faulty.fault("lookup", "hang")

        def wait() -> None:
            with pytest.raises(StoreTimeout):
                present(client, [1])

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not faulty.hung():
            pass
        with pytest.raises(Overloaded):
            client.ping(0.1)
        faulty.release_hung()
        waiting.join()
        client.close()


def test_lent_views_are_a_copy_that_was_verified(server: TcpServer, memory: MemoryStore, dial: Connect) -> None:
    client = dial(server.address)
    put(client, numbers(), BIG)
    memory.damage(name(2))
    lent = client.lease([name(n) for n in numbers()], TIMEOUT_S)
    assert lent.valid() == (1 << COUNT) - 1 & ~(1 << 2)
    assert memory.stats(TIMEOUT_S).objects == COUNT - 1
    client.close()
    assert lent.views[5] is not None
    assert bytes(lent.views[5]) == page(5, BIG).tobytes()
    lent.release()
    with pytest.raises(StoreError, match="at most 10 are copied"):
        dial(server.address, replace(NO_BACKOFF, lease_bytes=10)).lease([name(1)], TIMEOUT_S)


def test_a_lost_client_leaves_no_lease_behind(server: TcpServer, memory: MemoryStore, dial: Connect) -> None:
    client = dial(server.address)
    put(client, [1, 2])
    lent = client.lease([name(1)], TIMEOUT_S)
    assert memory.stats(TIMEOUT_S).leases == 1
    client.close()
    while server.connections:
        pass  # until the server has seen it
    assert memory.stats(TIMEOUT_S).leases == 0
    lent.release()


def test_a_forked_child_may_only_close(server: TcpServer, dial: Connect) -> None:
    client = dial(server.address)
    put(client, [1])
    child = os.fork()
    if not child:
        status = 1
        try:
            client.ping(TIMEOUT_S)
        except StoreClosed:
            client.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert get(client, [1]) == {1}


def test_the_directory_over_tcp(memory: MemoryStore, dial: Connect) -> None:
    """The same questions to a home index and to its client."""
    home = HomeIndex()
    with TcpServer(memory, CONFIG, home) as server:
        client = dial(server.address)
        assert isinstance(client, Directory)
        assert isinstance(client, Store)
        keys, tags = [key(n) for n in range(20)], [TAG, b"u" * TAG_BYTES, b"v" * TAG_BYTES]
        ids = [k + t for t in tags[:2] for k in keys]
        assert client.announce("node-a:1", ids, TIMEOUT_S) == (1 << 40) - 1
        assert client.announce("nöde-b:2", ids[5:25], TIMEOUT_S, ALWAYS) == (1 << 20) - 1
        client.withdraw("node-a:1", ids[:3], TIMEOUT_S)
        assert client.where(keys, tags, TIMEOUT_S) == home.where(keys, tags, TIMEOUT_S)
        assert client.where(keys, tags, TIMEOUT_S)[TAG]["node-a:1"] == (1 << 20) - 1 & ~0b111
        assert list(client.holders(ids, TIMEOUT_S)) == list(home.holders(ids, TIMEOUT_S))
        assert client.holders([ids[0], ids[7]], TIMEOUT_S)[1] == ("node-a:1", "nöde-b:2")
        epoch = client.epoch(TIMEOUT_S)
        assert client.forget(keys[7][:KEY_BYTES], TIMEOUT_S) == 2
        assert client.epoch(TIMEOUT_S) == home.epoch(TIMEOUT_S) == epoch + 1
        ((prefix, age),) = client.forgotten(3600.0, TIMEOUT_S)
        assert prefix == keys[7][:KEY_BYTES]
        assert 0.0 <= age < 3600.0
        assert client.forgotten(-1.0, TIMEOUT_S) == []
        assert client.announce("node-a:1", ids[6:9], TIMEOUT_S, epoch) == 0b101
        assert client.forget_ids([ids[8], ids[39], name(99)], TIMEOUT_S) == 2
        assert {prefix for prefix, _ in client.forgotten(3600.0, TIMEOUT_S)} == {prefix, ids[8], ids[39], name(99)}
        assert client.announce("node-a:1", ids[6:9], TIMEOUT_S, epoch) == 0b001
        client.close()


def test_a_node_without_a_directory_says_so(server: TcpServer, dial: Connect) -> None:
    client = dial(server.address, TcpClientConfig())
    with pytest.raises(StoreError, match="keeps no directory"):
        client.where([key(1)], [TAG], TIMEOUT_S)
    assert put(client, [1]) == 1
