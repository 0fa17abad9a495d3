"""A store of many nodes when a node hangs, and when a clear meets a put that is late."""

from __future__ import annotations

import threading

import pytest

from hicache_ray.errors import StoreError
from hicache_ray.storage.conformance import Gate
from hicache_ray.storage.conformance_kit import Worker
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.store import SPACE_BYTES
from tests.storage.cluster import LONG_S, Cluster
from tests.storage.test_sharded import HOME, PAGE, TWICE, Start, get, group_at, holding, name, page, put, seen, start

__all__ = ["start"]

MINE = bytes([1]) * SPACE_BYTES
THREADS = 6


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(3)


# -- a node that hangs -----------------------------------------------------------------------------------------------------------------


def test_a_hung_home_costs_one_deadline_and_its_keys_are_to_be_retried(cluster: Cluster) -> None:
    ids = [name(n, group_at(cluster, f"n{n % 3}")) for n in range(9)]
    put(cluster.client("n1"), ids)
    store = cluster.client("n0", clock=cluster.clock)
    hung = cluster.nodes["n2"].hung = threading.Event()
    answer = store.lookup([id[:48] for id in ids], [ids[0][48:]], 1.0)[ids[0][48:]]
    assert (answer.hit, answer.retry) == (0b011011011, 0b100100100)
    calls = cluster.nodes["n2"].calls
    assert seen(store, ids) == (0b011011011, 0b100100100)  # with all the time in the world, but it is not asked
    assert get(store, ids) == 0b011011011
    assert cluster.nodes["n2"].calls == calls
    hung.set()
    cluster.nodes["n2"].hung = None
    cluster.clock.advance(10.0)
    assert seen(store, ids) == (0x1FF, 0)


def test_a_hung_home_leaves_time_to_store_here_and_to_ask_the_others(cluster: Cluster) -> None:
    mine, theirs = name(1, group_at(cluster, "n2")), name(2, group_at(cluster, "n1"))
    put(cluster.client("n1"), [theirs])
    reader, writer = cluster.client("n0"), cluster.client("n0")
    hung = cluster.nodes["n2"].hung = threading.Event()
    assert reader.get([mine, theirs], [bytearray(PAGE), bytearray(PAGE)], 4.0) == 0b10
    assert writer.put([mine], [page(mine)], 4.0) == 1
    assert holding(cluster, mine) == ["n0"]
    hung.set()


def test_no_more_threads_wait_on_a_hung_node_than_configured(cluster: Cluster) -> None:
    store = cluster.client("n0", ShardConfig(workers=2), clock=cluster.clock)
    ids = [name(1, group_at(cluster, "n2"))]
    hung = cluster.nodes["n2"].hung = threading.Event()
    begin = threading.Barrier(THREADS)

    def look() -> int:
        begin.wait(LONG_S)
        return store.lookup([ids[0][:48]], [ids[0][48:]], 0.2)[ids[0][48:]].retry

    assert [worker.join() for worker in [Worker(look) for _ in range(THREADS)]] == [1] * THREADS
    assert cluster.nodes["n2"].most_waiting <= 2
    hung.set()


def test_a_hung_holder_leaves_time_for_the_replica(cluster: Cluster) -> None:
    ids = [name(n, group_at(cluster, "n0")) for n in range(4)]
    put(cluster.client("n1", TWICE), ids)
    first = cluster.nodes["n0"].index.holders(ids, 1.0)[0][0].split(":")[0]
    reader = next(node for node in cluster.nodes if node not in holding(cluster, ids[0]))
    cluster.nodes[first].store.fault("get", "hang")
    assert get(cluster.client(reader), ids) == 0b1111
    other = next(node for node in holding(cluster, ids[0]) if node != first)
    assert [len(cluster.nodes[node].waits) for node in (first, other)] == [1, 0]
    assert 0 < cluster.nodes[first].waits[0] <= LONG_S / 2


def test_a_hung_holder_is_a_miss_where_it_is_the_only_one(cluster: Cluster) -> None:
    ids = [name(n, group_at(cluster, "n0")) for n in range(4)]
    put(cluster.client("n1"), ids[:2])
    put(cluster.client("n2"), ids[2:])
    cluster.nodes["n1"].store.fault("get", "hang")
    reader = cluster.client("n0", clock=cluster.clock)
    assert get(reader, ids) == 0b1100
    calls = cluster.nodes["n1"].calls
    assert get(reader, ids) == 0b1100
    assert cluster.nodes["n1"].calls == calls
    cluster.clock.advance(10.0)
    assert get(reader, ids) == 0b1111


def test_a_put_reads_no_source_after_it_returned(cluster: Cluster) -> None:
    """The second copy goes to a node that takes its time: the put waits for it, as the caller's buffer is its own again afterwards."""
    gate = Gate()
    id = name(1, group_at(cluster, "n0"))
    source = bytearray(page(id))
    target = next(node.node for node in cluster.members.alive().ranked(id[8:16]) if node.node != "n1")
    cluster.nodes[target].gates["put"] = gate
    store = cluster.client("n1", TWICE)
    worker = Worker(lambda: store.put([id], [source], LONG_S))
    assert gate.reached.wait(LONG_S)
    gate.open()
    assert worker.join() == 1
    source[:] = bytes(PAGE)
    assert holding(cluster, id) == sorted(["n1", target])
    cluster.nodes["n1"].inner.clear(1.0)
    assert get(cluster.client("n1"), [id]) == 1


# -- a clear and a late writer ---------------------------------------------------------------------------------------------------------


def nothing_is_left(cluster: Cluster, ids: list[bytes]) -> None:
    assert [holding(cluster, id) for id in ids] == [[]] * len(ids)
    assert [node.index.stats().entries for node in cluster.nodes.values()] == [0, 0, 0]
    reader = cluster.client("n0")
    assert list(reader.scan(MINE, LONG_S)) == []
    assert seen(reader, ids) == (0, 0)


@pytest.mark.parametrize("call", ["epoch", "put", "announce"])
@pytest.mark.parametrize("config", [ShardConfig(), TWICE, HOME, ShardConfig("home", 2)], ids=["writer", "writer x2", "home", "home x2"])
def test_a_put_that_began_before_a_clear_leaves_nothing(cluster: Cluster, config: ShardConfig, call: str) -> None:
    """Stopped on its way to a node; the clear comes and goes; then the put goes on."""
    ids = [name(n, group_at(cluster, "n2")) for n in range(3)]
    gate = Gate()
    cluster.nodes["n1" if call == "put" and config.placement == "writer" else "n2"].gates[call] = gate
    writer, other = cluster.client("n1", config), cluster.client("n0")
    worker = Worker(lambda: put(writer, ids))
    assert gate.reached.wait(LONG_S)
    other.clear(LONG_S, MINE)
    if call != "put" or config.replicas == 1:  # else the other copy may come as late, and be there until the put takes it back
        assert list(other.scan(MINE, LONG_S)) == []
    gate.open()
    if call == "epoch":  # nothing was stored or said before: it is a put that comes after the clear
        assert worker.join() == 0b111
    else:
        assert worker.join() == 0
        nothing_is_left(cluster, ids)
    assert put(writer, ids) == 0b111
    assert seen(other, ids) == (0b111, 0)


@pytest.mark.parametrize("config", [ShardConfig(), TWICE, HOME], ids=["writer", "writer x2", "home"])
def test_a_put_that_began_before_a_drop_leaves_nothing_of_what_was_dropped(cluster: Cluster, config: ShardConfig) -> None:
    ids = [name(n, group_at(cluster, "n2")) for n in range(3)]
    gate = cluster.nodes["n2"].gates["announce"] = Gate()
    writer, other = cluster.client("n1", config), cluster.client("n0")
    worker = Worker(lambda: put(writer, ids))
    assert gate.reached.wait(LONG_S)
    assert other.drop(ids[:2], LONG_S) == 0b11
    gate.open()
    assert worker.join() == 0b100
    assert [holding(cluster, id) for id in ids[:2]] == [[], []]
    assert seen(other, ids) == (0b100, 0)
    assert put(writer, ids) == 0b111
    assert seen(other, ids) == (0b111, 0)


def test_a_clear_refuses_from_its_beginning(cluster: Cluster) -> None:
    """The fence stands before the first store is emptied: what is said from then on of bytes seen before is not believed."""
    ids = [name(n, group_at(cluster, "n2")) for n in range(3)]
    late, slow = Gate(), Gate()
    cluster.nodes["n2"].gates |= {"announce": late, "clear": slow}
    writing = Worker(lambda: put(cluster.client("n1"), ids))
    assert late.reached.wait(LONG_S)
    clearing = Worker(lambda: cluster.client("n0").clear(LONG_S, MINE))
    assert slow.reached.wait(LONG_S)
    late.open()
    assert writing.join() == 0
    slow.open()
    clearing.join()
    nothing_is_left(cluster, ids)


def test_a_second_copy_that_is_late_is_taken_back(cluster: Cluster) -> None:
    ids = [name(n, group_at(cluster, "n2")) for n in range(3)]
    gate = cluster.nodes["n2"].gates["put"] = Gate()
    writer, other = cluster.client("n1", TWICE), cluster.client("n0")
    worker = Worker(lambda: put(writer, ids))
    assert gate.reached.wait(LONG_S)
    other.clear(LONG_S, MINE)
    gate.open()
    assert worker.join() == 0
    nothing_is_left(cluster, ids)


def test_a_copy_that_cannot_be_taken_back_is_taken_back_later(cluster: Cluster) -> None:
    id, gate = name(1, group_at(cluster, "n2")), Gate()
    writer = cluster.client("n1", TWICE, cluster.clock)
    target = next(node.node for node in cluster.members.alive().ranked(id[8:16]) if node.node != "n1")
    cluster.nodes["n2"].gates["announce"] = gate
    worker = Worker(lambda: put(writer, [id]))
    assert gate.reached.wait(LONG_S)
    cluster.nodes[target].store.fault("clear", "error")  # not even the clear gets there
    with pytest.raises(StoreError, match="the clear is not complete"):
        cluster.client("n0").clear(LONG_S, MINE)
    cluster.nodes[target].store.fault("drop", "error")
    gate.open()
    assert worker.join() == 0
    assert holding(cluster, id) == [target]
    cluster.clock.advance(10.0)  # the breaker lets one through
    other = name(2, group_at(cluster, "n2"), 2)
    assert put(writer, [other]) == 1
    assert holding(cluster, id) == []
    assert holding(cluster, other) == sorted(["n1", target])


def test_a_holder_that_announces_late_is_refused(cluster: Cluster) -> None:
    ids = [name(n, group_at(cluster, "n2")) for n in range(3)]
    cluster.nodes["n1"].inner.put(ids, [page(id) for id in ids], 1.0)
    gate = cluster.nodes["n2"].gates["announce"] = Gate()
    worker = Worker(cluster.announcers["n1"].step)
    assert gate.reached.wait(LONG_S)
    assert cluster.client("n0").clear(LONG_S, MINE) == 3
    gate.open()
    worker.join()
    nothing_is_left(cluster, ids)
    assert cluster.nodes["n2"].index.stats().refused == 3


def test_a_clear_that_a_node_does_not_answer_says_so(cluster: Cluster) -> None:
    ids = [name(n, n) for n in range(9)]
    put(cluster.client("n1"), ids)
    gate = cluster.nodes["n2"].gates["clear"] = Gate()
    with pytest.raises(StoreError, match="the clear is not complete, as not every node answered: n2"):
        cluster.client("n0").clear(1.0, MINE)
    gate.open()
    assert cluster.client("n1").clear(LONG_S, MINE) == 0
    nothing_is_left(cluster, ids)


def test_clears_under_load_leave_no_entry_without_bytes(cluster: Cluster) -> None:
    stop = threading.Event()

    def write(store: ShardedStore, first: int) -> None:
        for n in range(10**6):
            if stop.is_set():
                return
            put(store, [name(first + (n + i) % 40, i) for i in range(5)])

    configs = (("n0", ShardConfig()), ("n1", TWICE), ("n2", HOME))
    writers = [cluster.client(node, config) for node, config in configs]
    workers = [Worker(lambda n=n, store=store: write(store, 1000 * n)) for n, store in enumerate(writers)]  # type: ignore[misc]
    clearer = cluster.client("n0")
    for _ in range(15):
        clearer.clear(LONG_S, MINE)
    stop.set()
    for worker in workers:
        worker.join()
    for home in cluster.nodes.values():
        for n in range(3):
            for group in range(5):
                ids = [name(1000 * n + i, group) for i in range(40)]
                for id, holders in zip(ids, home.index.holders(ids, 1.0), strict=True):
                    assert {holder.split(":")[0] for holder in holders} <= set(holding(cluster, id))
    clearer.clear(LONG_S, MINE)
    assert list(clearer.scan(b"", LONG_S)) == []
    assert [node.index.stats().entries for node in cluster.nodes.values()] == [0, 0, 0]
