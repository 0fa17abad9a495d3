"""Storage nodes as their processes run them, and the store of all of them as a rank opens it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError, StoreTimeout
from hicache_ray.keys import Namespace
from hicache_ray.storage import ArenaClient, NodeAddress, ShardConfig, StorageNode, bits, open_store
from hicache_ray.storage.announcer import AnnouncerConfig
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.fences import IDS
from hicache_ray.storage.members import Member, MembersConfig
from hicache_ray.storage.repair import RepairConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.store import SPACE_BYTES
from tests.storage.conftest import FakeClock
from tests.storage.nodes import GROUP, Nodes, in_groups, node_config
from tests.storage.objects import CALLS, PAGE, TAG, TIMEOUT_S, get, key, name, page, present, put

MANY = in_groups(24)


@pytest.fixture
def nodes(clock: FakeClock, nothing_left: None) -> Iterator[Nodes]:
    made = Nodes(clock, [node_config(i) for i in range(3)])
    yield made
    made.check()
    made.close()


@pytest.fixture
def make(clock: FakeClock, nothing_left: None) -> Iterator[Callable[..., Nodes]]:
    """Nodes with options of one's own, closed at the end of the test."""
    made: list[Nodes] = []

    def make_some(count: int, **options: Any) -> Nodes:
        made.append(Nodes(clock, [node_config(i, **options) for i in range(count)]))
        return made[-1]

    yield make_some
    for one in made:
        one.check()
        one.close()


def homed(nodes: Nodes, number: int, count: int) -> list[int]:
    """Numbers of objects whose entries lie on node ``number``, each in its own group."""
    view = nodes[number].plane.members.alive()
    found = [n for n in in_groups(64) if view.home(key(n)[8:16]) == nodes[number].address.member]
    return found[:count]


def entries(nodes: Nodes) -> int:
    return sum(node.stats()["home"]["entries"] for node in nodes.nodes.values())


def unsure(store: Any, numbers: list[int]) -> int:
    return store.lookup([key(n) for n in numbers], [TAG], TIMEOUT_S)[TAG].retry


# -- several nodes -------------------------------------------------------------------------------------------------------------------


def test_what_one_node_stores_every_node_reads(nodes: Nodes) -> None:
    stores = [nodes.open(i) for i in range(3)]
    for i, store in enumerate(stores):
        assert put(store, MANY[8 * i : 8 * i + 8]) == 0xFF
        assert nodes[i].stats()["arena"]["objects"] == 8
    for store in stores:
        assert present(store, MANY) == set(MANY)
        assert get(store, MANY) == set(MANY)
        with store.lease([name(n) for n in MANY], TIMEOUT_S) as lent:
            assert [bytes(view) for view in lent.views if view is not None] == [page(n).tobytes() for n in MANY]
            assert lent.valid() == (1 << len(MANY)) - 1
        assert sorted(store.scan()) == sorted(name(n) for n in MANY)
        assert store.stats(TIMEOUT_S).objects == len(MANY)
    assert entries(nodes) == len(MANY)


def test_after_a_clear_a_lookup_names_nothing_anywhere(nodes: Nodes) -> None:
    stores = [nodes.open(i) for i in range(3)]
    for i, store in enumerate(stores):
        put(store, MANY[8 * i : 8 * i + 8])
    assert stores[1].clear(TIMEOUT_S) == len(MANY)
    assert entries(nodes) == 0
    for store in stores:
        assert present(store, MANY) == set()
        assert get(store, MANY) == set()
    nodes.announce()
    assert entries(nodes) == 0


def test_a_drop_reaches_every_node(nodes: Nodes) -> None:
    first, second = nodes.open(0), nodes.open(1)
    put(first, MANY[:4])
    assert second.drop([name(n) for n in MANY[:3]], TIMEOUT_S) == 0b111
    assert present(nodes.open(2), MANY) == {MANY[3]}
    assert entries(nodes) == 1


def test_what_is_evicted_is_withdrawn(make: Callable[..., Nodes]) -> None:
    nodes = make(2, pages=16)
    first, second = nodes.open(0), nodes.open(1)
    put(first, MANY[:16])
    put(first, MANY[16:])  # in the room of eight; of one call the last go first
    assert entries(nodes) == 24
    nodes.announce()
    assert entries(nodes) == 16
    assert nodes[0].stats()["announcer"] == {"announced": 16, "withdrawn": 8, "dropped": 0, "failures": 0}
    assert present(second, MANY) == {*MANY[:8], *MANY[16:]}


def test_what_was_dropped_at_the_node_alone_is_withdrawn(nodes: Nodes) -> None:
    """By a process that knows this node only."""
    store = nodes.open(0)
    put(store, MANY[:4])
    alone = ArenaClient(nodes[0].address.socket)
    assert alone.drop([name(n) for n in MANY[:2]], TIMEOUT_S) == 0b11
    nodes.announce()
    assert present(nodes.open(1), MANY) == set(MANY[2:4])
    assert alone.damage(name(MANY[2]))
    assert alone.get([name(MANY[2])], [bytearray(PAGE)], TIMEOUT_S) == 0
    alone.ping(TIMEOUT_S)  # behind the report of the damage, which has no answer
    nodes.announce()
    assert present(nodes.open(1), MANY) == {MANY[3]}
    alone.close()


# -- nodes that go and come ----------------------------------------------------------------------------------------------------------


def test_a_node_that_is_gone_is_noticed_and_its_bytes_are_misses(nodes: Nodes) -> None:
    first, second = nodes.open(0), nodes.open(1)
    put(first, MANY[:8])
    put(second, MANY[8:16])
    nodes.probe()
    nodes.lose(1)
    assert get(first, MANY[:16]) == set(MANY[:8])  # whatever its home says
    nodes.probe()
    assert [m["alive"] for m in nodes[0].stats()["members"].values()] == [True, True, True]
    nodes.probe()  # 2 s without an answer
    assert [m["alive"] for m in nodes[0].stats()["members"].values()] == [True, False, True]
    nodes.settle()
    nodes.announce()
    for i in (0, 2):
        assert present(nodes.open(i), MANY) == set(MANY[:8])
        assert unsure(nodes.open(i), MANY) == 0
        assert get(nodes.open(i), MANY) == set(MANY[:8])
    put(first, MANY)  # nothing waits for it any more
    assert get(nodes.open(2), MANY) == set(MANY)


def test_with_two_copies_nothing_is_lost_with_a_node(make: Callable[..., Nodes]) -> None:
    nodes = make(3, shard=ShardConfig(replicas=2))
    put(nodes.open(0), MANY)
    assert sum(node.stats()["arena"]["objects"] for node in nodes.nodes.values()) == 2 * len(MANY)
    nodes.lose(0)
    for _ in range(3):
        nodes.probe()
    nodes.settle()
    nodes.announce()
    for i in (1, 2):
        assert present(nodes.open(i), MANY) == set(MANY)
        assert get(nodes.open(i), MANY) == set(MANY)


def test_a_home_that_comes_back_empty_is_told_again(nodes: Nodes) -> None:
    mine = homed(nodes, 2, 8)
    first, second = nodes.open(0), nodes.open(1)
    put(first, mine)
    incarnation = nodes[2].address.incarnation
    nodes.restart(2)
    assert nodes[2].address.incarnation != incarnation
    nodes.clock.advance(1.0)
    assert unsure(second, mine) == 0xFF  # the holders have not told it yet
    nodes.announce()
    assert present(second, mine) == set(mine)
    nodes.settle()
    assert get(second, mine) == set(mine)
    assert get(nodes.open(2), mine) == set(mine)
    assert put(nodes.open(2), MANY) == (1 << len(MANY)) - 1


def test_a_client_outlives_the_service_of_its_node(nodes: Nodes) -> None:
    store = nodes.open(0)
    put(store, MANY[:4])
    nodes[0].close()
    nodes.clock.advance(1.0)
    for call in CALLS.values():
        with pytest.raises(StoreError):
            call(store)
    nodes.restart(0)
    nodes.clock.advance(10.0)
    nodes.announce()
    assert present(store, MANY) == set()
    put(store, MANY[:4])
    assert get(nodes.open(1), MANY) == set(MANY[:4])


def test_a_node_that_nobody_names_any_more_may_be_named_again(nodes: Nodes) -> None:
    """The directory was restarted, and for a moment it knew half of the cluster."""
    put(nodes.open(2), MANY)
    for node in nodes.nodes.values():
        node.set_members(nodes.members[:2])
    nodes.clock.advance(1.0)
    assert present(nodes.open(0), MANY) == set()
    nodes.introduce()
    nodes.settle()
    nodes.announce()
    assert present(nodes.open(0), MANY) == set(MANY)


# -- one node ------------------------------------------------------------------------------------------------------------------------


def test_what_was_written_before_the_others_came_is_found_by_them(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    store = nodes.open(0)
    nodes.announce()
    put(store, MANY)
    nodes.announce()
    nodes.start(node_config(1))
    nodes.introduce()
    nodes.settle()
    nodes.announce()
    assert entries(nodes) == len(MANY)
    assert get(nodes.open(1), MANY) == set(MANY)
    assert get(store, MANY) == set(MANY)


def test_what_a_client_wrote_that_knew_nobody_yet_is_found_a_moment_later(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    store = nodes.open(0)
    put(store, MANY[:8])
    nodes.announce()
    nodes.start(node_config(1))
    nodes.introduce()
    nodes.announce()
    put(store, MANY[8:])  # no time has passed: it still believes that its node is alone
    assert present(nodes.open(1), MANY) == set(MANY[:8])
    nodes.settle()
    nodes.announce()
    assert get(nodes.open(1), MANY) == set(MANY)


def test_a_node_alone_is_its_arena_and_no_more(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    store = nodes.open(0)
    assert put(store, MANY) == (1 << len(MANY)) - 1
    assert get(store, MANY) == set(MANY)
    assert nodes[0].stats()["tcp"]["connections"] == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-node")] == []


def test_a_node_without_a_token_speaks_to_no_other(make: Callable[..., Nodes]) -> None:
    nodes = make(2, token="")
    assert nodes[0].address.tcp == ""
    assert nodes[0].stats()["tcp"] is None
    put(nodes.open(0), MANY)
    assert present(nodes.open(0), MANY) == set(MANY)
    assert present(nodes.open(1), MANY) == set()


# -- who is not well -----------------------------------------------------------------------------------------------------------------


def test_a_hung_node_delays_nobody_beyond_the_deadline(nodes: Nodes) -> None:
    """It takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = Member("hung", "0" * 16, f"127.0.0.1:{silent.getsockname()[1]}")
        for node in nodes.nodes.values():
            node.set_members([*nodes.members, hung])
        nodes.settle()
        store = open_store(nodes[0].address.socket)  # on real time
        numbers = in_groups(32)
        view = nodes[0].plane.members.alive()
        lost = {n for n in numbers if view.home(key(n)[8:16]) == hung}
        assert 0 < len(lost) < len(numbers)
        done: list[int] = []

        def ask() -> None:
            found = store.lookup([key(n) for n in numbers], [TAG], 0.2)[TAG]
            done.append(found.retry)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        waiting = [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-node-hung")]
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(waiting) <= nodes[0].config.shard.workers
        assert done == [sum(1 << i for i, n in enumerate(numbers) if n in lost)] * 8
        store.close()


def test_a_frozen_service_costs_one_deadline_and_not_every_call_one(tmp_path: Path, clock: FakeClock, nothing_left: None) -> None:
    """Nothing is known of it yet, and it takes connections and never says a word."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(path)
        silent.listen()
        store = open_store(path, clock=clock)
        with pytest.raises(StoreTimeout):
            store.lookup([key(1)], [TAG], 0.05)
        for call in CALLS.values():  # whose deadlines are far
            with pytest.raises(StoreError, match="not asked again for 0.50 s"):
                call(store)
        clock.advance(0.5)
        with pytest.raises(StoreTimeout):
            store.lookup([key(1)], [TAG], 0.05)
        store.close()


def test_another_node_at_the_same_address_is_not_taken_for_it(nodes: Nodes) -> None:
    address = nodes[1].address
    store = TcpStore(address.tcp, "secret", incarnation="0" * 16)
    with pytest.raises(StoreClosed, match=f"answers incarnation {address.incarnation}, no longer 0000000000000000"):
        store.ping(TIMEOUT_S)
    store.close()
    nodes[0].set_members([replace(address.member, incarnation="0" * 16)])
    for _ in range(3):
        nodes[0].plane.prober.step()
    assert [member.node for member in nodes[0].plane.members.alive().alive] == ["n0"]


def test_what_the_directory_may_not_say(nodes: Nodes) -> None:
    for member, wrong in [
        (Member("x", "1", "nowhere"), "'nowhere' is not an address"),
        (Member("", "1", "a:1"), "a member is a node"),
        (Member("x", "1", "a:1", "l" * 257), "a member is a node"),
    ]:
        with pytest.raises(ConfigError, match=wrong):
            nodes[0].set_members([*nodes.members, member])
    with pytest.raises(ConfigError, match="a cluster of 1024 nodes is over|a cluster of 1025 nodes is over"):
        nodes[0].set_members([Member(f"m{i}", "1", "a:1") for i in range(1024)])
    stale = replace(nodes[0].address.member, incarnation="1" * 16)
    nodes[0].set_members([stale, *nodes.members[1:]])
    assert nodes[0].plane.members.alive().member("n0") == nodes[0].address.member
    assert len(nodes[0].plane.members.everyone()) == 3


# -- start, end, counters ------------------------------------------------------------------------------------------------------------


def ours() -> set[str]:
    """What this process has in shared memory."""
    return {path.name for path in Path("/dev/shm").glob(f"*test-{os.getpid()}*")}


def test_lost_copies_come_back_with_nobody_asking_for_it(nothing_left: None) -> None:
    """On the threads of nodes as they run, in their own time."""
    options: dict[str, Any] = {
        "shard": ShardConfig(replicas=2),
        "members": MembersConfig(settle_s=0.3),
        "announcer": AnnouncerConfig(step_s=0.02),
        "repair": RepairConfig(step_s=0.02),
    }
    until, pause = time.monotonic() + 60.0, threading.Event()

    def wait_for(what: Callable[[], bool]) -> None:
        while not what() and time.monotonic() < until:
            pause.wait(0.01)
        assert what()

    with StorageNode(node_config(0, **options)) as holder:
        with StorageNode(node_config(1, **options)) as lost:
            for node in (holder, lost):
                node.set_members([holder.address.member, lost.address.member])
            store = open_store(holder.address.socket)
            wait_for(lambda: store.view(TIMEOUT_S) is not None and len(store.view(TIMEOUT_S).alive) == 2)  # type: ignore[union-attr]
            assert put(store, MANY) == (1 << len(MANY)) - 1
            assert lost.stats()["arena"]["objects"] == len(MANY)
        with StorageNode(node_config(1, **options)) as back:
            for node in (holder, back):
                node.set_members([holder.address.member, back.address.member])
            wait_for(lambda: back.stats()["arena"]["objects"] == len(MANY))
            wait_for(lambda: holder.stats()["repair"]["repaired"] == len(MANY))
            store.close()
            store = open_store(back.address.socket)
            assert get(store, MANY) == set(MANY)
            store.close()


def test_so_many_drops_that_they_have_no_names_may_be_of_any_object(nodes: Nodes) -> None:
    plane = nodes[0].plane
    plane.home.forget_ids([name(1)], TIMEOUT_S)
    assert plane._told([name(1), name(2)], 10.0) == 0b01
    plane.home.forget_ids([name(n) for n in range(10, 10 + IDS)], TIMEOUT_S)
    assert plane._told([name(1), name(2)], 10.0) == 0b11
    nodes.clock.advance(11.0)
    assert plane._told([name(1), name(2)], 10.0) == 0


def test_a_failed_start_leaves_nothing(nodes: Nodes) -> None:
    taken = int(nodes[0].address.tcp.rpartition(":")[2])
    files, descriptors = ours(), len(os.listdir("/proc/self/fd"))
    for options in ({"port": taken}, {"host": "no.such.host.invalid"}, {"flight_port": taken}):
        with pytest.raises(ConfigError, match="cannot listen on"):
            StorageNode(node_config(9, **options)).start()
    assert ours() == files
    assert len(os.listdir("/proc/self/fd")) == descriptors
    background = ("hicache-prober", "hicache-announcer", "hicache-repairer")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(background)]


@pytest.mark.parametrize(
    "options", [{"node": ""}, {"streams": 0}, {"max_connections": 0}, {"host": "0.0.0.0"}, {"token": "", "flight_port": 0}]
)
def test_settings_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        node_config(0, **options)


def test_nothing_is_left_of_nodes_and_clients(nothing_left: None) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    nodes = [StorageNode(node_config(i)).start() for i in range(2)]  # with their threads
    for node in nodes:
        node.set_members([other.address.member for other in nodes])
    stores = [open_store(node.address.socket) for node in nodes]
    put(stores[0], MANY)
    assert get(stores[1], MANY) == set(MANY)
    for store in stores:
        store.close()
        store.close()
        with pytest.raises(StoreClosed):
            present(store, MANY)
    for node in nodes:
        node.close()
        node.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(Path("/dev/shm").glob(f"*test-{os.getpid()}*"))


def test_counters_and_the_address_are_json(nodes: Nodes) -> None:
    put(nodes.open(0), MANY)
    stats = json.loads(json.dumps(nodes[0].stats()))
    assert stats["arena"]["puts"] == len(MANY)
    assert stats["members"]["n1"] == {"incarnation": nodes[1].address.incarnation, "tcp": nodes[1].address.tcp, "label": "", "alive": True}
    assert stats["address"] == nodes[0].address.to_dict()
    assert NodeAddress.from_dict(stats["address"]) == nodes[0].address


def test_a_flight_endpoint_if_asked_for(make: Callable[..., Nodes]) -> None:
    flight = pytest.importorskip("pyarrow.flight")
    nodes = make(1, flight_port=0)
    put(nodes.open(0), MANY[:2])
    headers = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])
    with flight.connect(nodes[0].stats()["flight"]) as client:
        table = client.do_get(flight.Ticket(name(MANY[1])), headers).read_all()
    assert table["data"][0].as_py() == page(MANY[1]).tobytes()


def test_a_forked_child_is_told_to_open_its_own(nodes: Nodes) -> None:
    store = nodes.open(0)
    put(store, MANY)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            present(store, MANY)
        except StoreClosed as error:
            os.write(write, str(error).encode())
        store.close()
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    assert b"open another one in the child" in os.read(read, 1000)
    os.close(read)
    assert get(store, MANY) == set(MANY)


def test_the_numbers_of_this_file_are_in_groups_of_their_own() -> None:
    assert len({key(n)[8:16] for n in MANY}) == len(MANY)
    assert key(GROUP)[8:16] == (1).to_bytes(8, "big")


def test_caps_hold_from_the_first_byte_of_every_incarnation(clock: FakeClock, nothing_left: None) -> None:
    """Of a node that starts anew too, and without anybody who describes the namespace there."""
    space = Namespace("m", tenant="ann")
    config = node_config(0)
    config = replace(config, arena=replace(config.arena, tenant_bytes={"ann": 3 * PAGE}), records={space.digest(): space.record()})
    ids = [space.digest()[:SPACE_BYTES] + name(n)[SPACE_BYTES:] for n in range(5)]
    nodes = Nodes(clock, [config])
    for _ in range(2):
        store = nodes.open(0)
        assert list(bits.each(store.put(ids, [page(n) for n in range(5)], TIMEOUT_S))) == [0, 1, 2]
        usage = store.stats(TIMEOUT_S).tenants
        assert (usage["ann"]["bytes"], usage["ann"]["refused"], usage[""]["bytes"]) == (3 * PAGE, 2, 0)
        assert store.described(TIMEOUT_S) == {space.digest(): space.record()}
        nodes.restart(0)
    nodes.close()


def test_a_client_that_is_closed_while_it_learns_of_the_members_leaves_nothing(nodes: Nodes) -> None:
    store = nodes.open(0)
    ask = store._ask

    def close_meanwhile(deadline: Deadline) -> bytes:
        said = ask(deadline)
        store.close()
        return said

    store._ask = close_meanwhile  # type: ignore[method-assign]
    with pytest.raises(StoreClosed):
        put(store, [1])
    assert store._sharded is not None
    with pytest.raises(StoreClosed, match="this handle of the store is closed"):
        present(store._sharded, [1])
