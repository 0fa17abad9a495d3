"""A store of many nodes: where bytes and entries go, and what is found when nodes come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.store import GROUP_BYTES, SPACE_BYTES
from tests.storage.cluster import CAPACITY, LONG_S, Cluster
from tests.storage.objects import TAG

PAGE = 256
HOME = ShardConfig(placement="home")
TWICE = ShardConfig(replicas=2)
Start = Callable[..., Cluster]


def key(number: int, group: int = 0, space: int = 1) -> bytes:
    return bytes([space]) * SPACE_BYTES + group.to_bytes(GROUP_BYTES, "big") + number.to_bytes(32, "big")


def name(number: int, group: int = 0, space: int = 1) -> bytes:
    return key(number, group, space) + TAG


def page(id: bytes) -> bytes:
    return (id * 4)[:PAGE]


def put(store: ShardedStore, ids: list[bytes]) -> int:
    return store.put(ids, [page(id) for id in ids], LONG_S)


def get(store: ShardedStore, ids: list[bytes]) -> int:
    """What was read, after comparing it."""
    targets = [bytearray(PAGE) for _ in ids]
    hit = store.get(ids, targets, LONG_S)
    for i in bits.each(hit):
        assert bytes(targets[i]) == page(ids[i])
    return hit


def seen(store: ShardedStore, ids: list[bytes]) -> tuple[int, int]:
    """(hit, retry) of a lookup."""
    answer = store.lookup([id[:48] for id in ids], [TAG], LONG_S)[TAG]
    assert not answer.hit & answer.retry
    assert not answer.pending
    return answer.hit, answer.retry


@pytest.fixture
def start(nothing_left: None) -> Iterator[Start]:
    """A cluster of ``count`` nodes."""
    opened: list[Cluster] = []

    def make(count: int = 3, labels: list[str] | None = None) -> Cluster:
        opened.append(Cluster([CAPACITY] * count, labels or []))
        return opened[-1]

    yield make
    for cluster in opened:
        cluster.close()
        cluster.check()


def group_at(cluster: Cluster, node: str) -> int:
    """A group whose home is ``node``."""
    return next(g for g in range(1000) if cluster.home(key(0, g)) == node)


def holding(cluster: Cluster, id: bytes) -> list[str]:
    return [node.name for node in cluster.nodes.values() if id in set(node.inner.scan())]


# -- placement -------------------------------------------------------------------------------------------------------------------------


def test_bytes_stay_with_the_writer_and_entries_go_to_the_home(start: Start) -> None:
    cluster = start()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    assert put(cluster.client("n0"), ids) == 0b11111
    assert [holding(cluster, id) for id in ids] == [["n0"]] * 5
    assert [node.index.stats().entries for node in cluster.nodes.values()] == [0, 0, 5]
    assert cluster.nodes["n2"].index.holders(ids[:1], 1.0) == [("n0:1",)]
    for reader in ("n0", "n1", "n2"):
        store = cluster.client(reader)
        assert seen(store, [*ids, name(9)]) == (0b11111, 0)
        assert get(store, [name(9), *reversed(ids)]) == 0b111110


def test_bytes_go_to_the_home(start: Start) -> None:
    cluster = start()
    ids = [name(n, group) for group in range(6) for n in range(3)]
    store = cluster.client("n0", HOME)
    assert put(store, ids) == (1 << 18) - 1
    assert [holding(cluster, id) for id in ids] == [[cluster.home(id)] for id in ids]
    assert len({cluster.home(id) for id in ids}) == 3
    assert get(cluster.client("n1", HOME), ids) == (1 << 18) - 1


def test_the_second_copy_lies_in_another_failure_domain(start: Start) -> None:
    cluster = start(4, ["rack0", "rack0", "rack0", "rack1"])
    ids = [name(n, n) for n in range(12)]
    put(cluster.client("n0", TWICE), ids)
    assert [holding(cluster, id) for id in ids] == [["n0", "n3"]] * 12
    put(cluster.client("n3", TWICE), [name(100, group_at(cluster, "n1"))])
    assert holding(cluster, name(100, group_at(cluster, "n1"))) == ["n1", "n3"]


def test_where_there_is_no_other_domain_the_next_node_has_it(start: Start) -> None:
    cluster = start(3)
    id = name(1, group_at(cluster, "n0"))
    put(cluster.client("n0", TWICE), [id])
    after = cluster.members.alive().ranked(id[8:16])[1].node
    assert holding(cluster, id) == sorted(["n0", after])


def test_one_lookup_asks_the_homes_of_its_groups_and_nobody_else(start: Start) -> None:
    cluster = start(5)
    store = cluster.client("n0")
    mine = [name(n, group_at(cluster, "n3")) for n in range(100)]
    seen(store, mine)
    before = {node.name: node.calls for node in cluster.nodes.values()}
    seen(store, mine)
    assert {node.name: node.calls - before[node.name] for node in cluster.nodes.values()} == {"n0": 1, "n1": 0, "n2": 0, "n3": 1, "n4": 0}


def test_one_lookup_answers_for_every_tag_and_from_every_holder(start: Start) -> None:
    cluster = start()
    other = b"o" * 16
    keys = [key(n, n % 3) for n in range(40)]
    cluster.client("n0").put([k + TAG for k in keys[:20]], [page(k + TAG) for k in keys[:20]], LONG_S)
    cluster.client("n1").put([k + TAG for k in keys[10:30]], [page(k + TAG) for k in keys[10:30]], LONG_S)
    cluster.client("n2").put([keys[35] + other], [page(keys[35] + other)], LONG_S)
    found = cluster.client("n2").lookup(keys, [TAG, other], LONG_S)
    assert {tag: (answer.hit, answer.pending, answer.retry) for tag, answer in found.items()} == {
        TAG: ((1 << 30) - 1, 0, 0),
        other: (1 << 35, 0, 0),
    }


def test_a_lease_lends_what_any_node_has(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(6)]
    for n, node in enumerate(["n0", "n1", "n2"]):
        put(cluster.client(node), ids[2 * n : 2 * n + 2])
    store = cluster.client("n0")
    with store.lease([*ids, name(99)], LONG_S) as lent:
        assert [None if view is None else bytes(view) for view in lent.views] == [*map(page, ids), None]
        assert lent.valid() == 0b111111
        assert store.stats(LONG_S).leases == 3
    assert lent.valid() == 0
    assert store.stats(LONG_S).leases == 0


def test_a_client_of_no_node_reads_and_writes(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(8)]
    store = cluster.client("a gateway")
    assert put(store, ids) == 0xFF
    assert [holding(cluster, id) for id in ids] == [[cluster.home(id)] for id in ids]
    assert get(store, ids) == 0xFF
    with store.lease(ids, LONG_S) as lent:
        assert lent.valid() == 0xFF


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="placement must be one of writer, home, not 'reader'"):
        ShardConfig(placement="reader")
    with pytest.raises(ConfigError, match="replicas must be 1 or 2, not 3"):
        ShardConfig(replicas=3)


def test_a_get_spreads_over_the_holders(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(8)]
    for node in ("n1", "n2"):
        put(cluster.client(node), ids)
    assert get(cluster.client("n0"), ids) == 0xFF
    assert [node.inner.stats(1.0).gets for node in cluster.nodes.values()] == [8, 4, 4]


# -- nodes come and go -----------------------------------------------------------------------------------------------------------------


def test_what_a_dead_incarnation_held_is_a_miss(start: Start) -> None:
    cluster = start()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    reader = cluster.client("n0")
    assert seen(reader, ids) == (0b11111, 0)
    cluster.restart("n1", keep_bytes=False)
    assert seen(reader, ids) == (0, 0)
    assert get(reader, ids) == 0
    put(cluster.client("n1"), ids[:2])
    assert seen(reader, ids) == (0b00011, 0)
    assert get(reader, ids) == 0b00011


def test_entries_of_an_incarnation_that_is_over_are_dropped(start: Start) -> None:
    cluster = start()
    cluster.announce()
    ids = [name(n, n) for n in range(30)]
    put(cluster.client("n1"), ids)
    put(cluster.client("n2"), ids[:10])
    cluster.lose("n1")  # it may come back as it was
    cluster.announce()
    assert sum(node.index.stats().entries for node in cluster.nodes.values() if node.up) >= 20
    cluster.restart("n1", keep_bytes=False)
    cluster.announce()
    assert {holder for node in cluster.nodes.values() for holders in node.index.holders(ids, 1.0) for holder in holders} == {"n2:1"}
    assert seen(cluster.client("n0"), ids)[0] == 0x3FF


def test_a_lost_home_is_to_be_retried_until_the_holders_have_told_the_next(start: Start) -> None:
    cluster = start()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    reader = cluster.client("n0")
    cluster.nodes["n2"].up = False
    assert seen(reader, ids) == (0, 0b11111)  # it does not answer, and nobody has noticed yet
    cluster.lose("n2")
    assert seen(reader, ids) == (0, 0b11111)
    cluster.announce()
    assert seen(reader, [*ids, name(9, group_at(cluster, cluster.home(ids[0])))])[0] == 0b11111
    assert get(reader, ids) == 0b11111
    assert seen(reader, [name(77, 3)])[0] == 0
    cluster.settle()
    assert seen(reader, [*ids, name(77, 3)]) == (0b11111, 0)


def test_a_home_that_comes_back_hears_it_again(start: Start) -> None:
    cluster = start()
    cluster.announce()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    cluster.lose("n2")
    cluster.announce()
    cluster.restart("n2", keep_bytes=False)
    cluster.announce()
    cluster.settle()
    assert cluster.nodes["n2"].index.stats().entries == 5
    assert seen(cluster.client("n0"), ids) == (0b11111, 0)
    assert cluster.announcers["n1"].stats.announced == 10  # five to the next home, five to the one that is back


def test_a_holder_that_was_cut_off_is_found_again(start: Start) -> None:
    cluster = start()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    reader = cluster.client("n0")
    cluster.lose("n1")
    assert seen(reader, ids) == (0, 0)
    cluster.heal("n1")
    assert seen(reader, ids)[0] == 0b11111
    assert get(cluster.client("n2"), ids) == 0b11111


def test_a_replica_serves_what_a_holder_lost(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(9)]
    put(cluster.client("n1", TWICE), ids)
    reader = cluster.client("n0", TWICE)
    cluster.nodes["n1"].inner.clear(1.0)  # its entries are still there
    assert seen(reader, ids)[0] == 0x1FF
    assert get(reader, ids) == 0x1FF
    cluster.lose("n1")
    cluster.announce()
    assert seen(reader, ids)[0] == 0x1FF


def test_a_replica_serves_though_the_holder_fails(start: Start) -> None:
    """And though the home does not answer either: copies lie where the order of the group says."""
    cluster = start()
    ids = [name(n, n) for n in range(9)]
    put(cluster.client("n1", TWICE), ids)
    cluster.nodes["n1"].up = False
    assert get(cluster.client("n0", TWICE), ids) == 0x1FF


def test_an_entry_without_bytes_goes_when_somebody_asks_in_vain(start: Start) -> None:
    cluster = start()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    cluster.nodes["n1"].inner.drop(ids[1:3], 1.0)
    reader = cluster.client("n0")
    assert seen(reader, ids) == (0b11111, 0)
    assert get(reader, ids) == 0b11001
    assert seen(reader, ids) == (0b11001, 0)
    assert reader.get(ids[:1], [bytearray(PAGE - 1)], LONG_S) == 0  # another length: it is there all the same
    assert seen(reader, ids) == (0b11001, 0)
    cluster.nodes["n1"].inner.drop(ids[3:4], 1.0)
    assert get(cluster.client("n1"), ids) == 0b10001
    assert seen(reader, ids) == (0b10001, 0)


def test_what_was_evicted_is_withdrawn(start: Start) -> None:
    cluster = start()
    cluster.announce()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    put(cluster.client("n1"), ids)
    cluster.nodes["n1"].inner.drop(ids[:3], 1.0)
    put(cluster.client("n1"), ids[:1])  # back before anybody was told
    cluster.announcers["n1"].evicted(ids[:3])
    assert not cluster.announcers["n1"].idle()
    cluster.announce()
    assert seen(cluster.client("n0"), ids) == (0b11001, 0)
    assert cluster.announcers["n1"].stats.withdrawn == 2  # the one that is back was not


def test_withdrawals_are_bounded(start: Start) -> None:
    cluster = start()
    announcer = cluster.announcers["n1"]
    announcer.evicted([name(n) for n in range(announcer.config.withdrawals + 7)])
    assert announcer.stats.dropped == 7


def test_a_home_that_is_down_is_told_later(start: Start) -> None:
    cluster = start()
    cluster.announce()
    ids = [name(n, group_at(cluster, "n2")) for n in range(5)]
    cluster.nodes["n2"].up = False
    store = cluster.client("n1", clock=cluster.clock)
    assert put(store, ids) == 0b11111
    assert [holding(cluster, id) for id in ids] == [["n1"]] * 5
    assert seen(store, ids) == (0b11111, 0)
    assert cluster.nodes["n2"].index.stats().entries == 0
    cluster.nodes["n2"].up = True
    cluster.clock.advance(10.0)  # the breaker lets one through
    cluster.nodes["n1"].inner.drop(ids[:1], 1.0)
    put(store, [name(9, group_at(cluster, "n2"))])
    assert cluster.nodes["n2"].index.stats().entries == 5
    assert seen(cluster.client("n0"), ids) == (0b11110, 0)


def test_the_announcer_asks_again_after_a_failure(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(30)]
    cluster.nodes["n1"].inner.put(ids, [page(id) for id in ids], 1.0)
    cluster.nodes["n2"].up = False
    announcer = cluster.announcers["n1"]
    announcer.step()
    assert not announcer.idle()
    assert announcer.stats.failures == 1
    before = sum(cluster.home(id) != "n2" for id in ids)
    assert announcer.stats.announced == before < 30
    cluster.nodes["n2"].up = True
    announcer.step()
    assert announcer.idle()
    assert announcer.stats.announced == 30
    assert seen(cluster.client("n0"), ids) == ((1 << 30) - 1, 0)


def test_what_a_client_told_the_home_of_before_is_told_the_new_one(start: Start) -> None:
    """It had not noticed the change yet, and the holder had said by then all that it had."""
    cluster = start(3)
    cluster.lose("n2")
    cluster.announce()
    before = cluster.members.alive()
    cluster.heal("n2")
    cluster.announce()
    ids = [id for n in range(60) if cluster.home(id := name(n, n)) == "n2"]
    assert len(ids) > 6
    late = ShardedStore("n0", lambda: before, cluster.connect)
    cluster.clients.append(late)
    assert put(late, ids) == (1 << len(ids)) - 1
    cluster.announce()
    assert not any(cluster.nodes["n2"].index.holders(ids, LONG_S))
    cluster.clock.advance(2.0)
    cluster.announce()
    assert cluster.nodes["n2"].index.holders(ids, LONG_S) == [("n0:1",)] * len(ids)
    told = cluster.announcers["n0"].stats.announced
    cluster.clock.advance(10.0)
    cluster.announce()
    assert cluster.announcers["n0"].stats.announced == told


def test_everything_is_said_again_now_and_then(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(30)]
    put(cluster.client("n1"), ids)
    cluster.announce()
    for node in cluster.nodes.values():
        node.index.leave("n1:1")
    cluster.announce()
    assert seen(cluster.client("n0"), ids) == (0, 0)
    cluster.clock.advance(cluster.announcers["n1"].config.refresh_s)
    cluster.announce()
    assert seen(cluster.client("n0"), ids) == ((1 << 30) - 1, 0)


def test_the_announcer_runs_on_a_thread_of_its_own(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(30)]
    cluster.nodes["n1"].inner.put(ids, [page(id) for id in ids], 1.0)
    announcer, failed = cluster.announcers["n1"], threading.Event()
    scan = announcer.store.scan

    def fail_once(prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the thread lives on")
        return scan(prefix, timeout_s)

    announcer.store.scan = fail_once  # type: ignore[method-assign]
    announcer.start()
    until = time.monotonic() + LONG_S
    while not (failed.is_set() and announcer.idle()) and time.monotonic() < until:
        announcer._stopping.wait(0.01)
    announcer.close()
    assert (announcer.stats.announced, announcer.stats.failures) == (30, 1)


def test_a_node_that_fails_in_its_own_way_is_a_store_error(start: Start) -> None:
    """A bug or a refusal of the system behind a node is no more than a miss."""
    cluster = start()
    ids = [name(n, group_at(cluster, "n0")) for n in range(4)]
    put(cluster.client("n1"), ids)

    def broken(ids: Sequence[bytes], targets: Sequence[object], timeout_s: float) -> int:
        raise OSError("no buffer space")

    cluster.nodes["n1"].inner.get = broken  # type: ignore[method-assign]
    assert get(cluster.client("n0"), ids) == 0


# -- all nodes -------------------------------------------------------------------------------------------------------------------------


def test_drop_removes_every_copy_and_every_entry(start: Start) -> None:
    cluster = start()
    ids = [name(n, n) for n in range(6)]
    put(cluster.client("n0"), ids)
    put(cluster.client("n1"), ids)
    assert cluster.client("n2").drop([ids[1], name(99), ids[4]], LONG_S) == 0b101
    assert [holding(cluster, id) for id in ids] == [["n0", "n1"], [], ["n0", "n1"], ["n0", "n1"], [], ["n0", "n1"]]
    assert seen(cluster.client("n2"), ids) == (0b101101, 0)
    assert sum(node.index.stats().entries for node in cluster.nodes.values()) == 4


def test_clear_by_prefix_on_all_nodes(start: Start) -> None:
    cluster = start()
    mine, others = [[name(n, n, space) for n in range(6)] for space in (1, 2)]
    for node in cluster.nodes:
        put(cluster.client(node), mine + others)
    store = cluster.client("n0")
    assert store.clear(LONG_S, bytes([1]) * SPACE_BYTES) == 18
    assert set(store.scan(timeout_s=LONG_S)) == set(others)
    assert sum(node.index.stats().entries for node in cluster.nodes.values()) == 6
    assert seen(store, mine + others) == (0b111111000000, 0)
    assert put(store, mine) == 0b111111
    assert store.clear(LONG_S) == 24
    assert list(store.scan(timeout_s=LONG_S)) == []


@pytest.mark.parametrize("how", ["restarted", "cut off"])
def test_a_node_that_missed_a_clear_catches_up_before_it_says_what_it_has(start: Start, how: str) -> None:
    cluster = start(3)
    mine, others = [name(n, n) for n in range(20)], [name(n, n, 2) for n in range(20)]
    put(cluster.client("n2"), mine + others)
    cluster.announce()
    cluster.clock.advance(100.0)
    cluster.announce()
    cluster.lose("n2")
    cluster.clock.advance(30.0)
    cluster.announce()
    assert cluster.client("n0").clear(LONG_S, mine[0][:SPACE_BYTES]) == 0
    put(cluster.client("n0"), mine[:3])  # the others go on with the namespace
    cluster.clock.advance(30.0)
    if how == "restarted":
        cluster.restart("n2", away_s=60.0)
    else:
        cluster.heal("n2")
    cluster.announce()
    assert set(cluster.nodes["n2"].inner.scan()) == set(others)
    assert seen(cluster.client("n1"), others)[0] == (1 << 20) - 1
    assert get(cluster.client("n1"), mine) == 0b111
    put(cluster.client("n2"), mine[10:])  # once is enough
    for _ in range(3):
        cluster.clock.advance(10.0)
        cluster.announce()
    assert set(cluster.nodes["n2"].inner.scan()) == {*others, *mine[10:]}


@pytest.mark.parametrize("how", ["restarted", "cut off"])
def test_a_node_that_missed_a_drop_catches_up_before_it_says_what_it_has(start: Start, how: str) -> None:
    cluster = start(3)
    ids = [name(n, n) for n in range(20)]
    dropped, again, kept = ids[:12], ids[8:12], ids[12:]
    put(cluster.client("n2"), ids)
    put(cluster.client("n1"), ids[:3])
    cluster.announce()
    cluster.clock.advance(100.0)
    cluster.announce()
    cluster.lose("n2")
    cluster.clock.advance(30.0)
    cluster.announce()
    assert cluster.client("n0").drop(dropped, LONG_S) == 0b111
    put(cluster.client("n0"), again)  # computed anew: these stay
    cluster.clock.advance(30.0)
    if how == "restarted":
        cluster.restart("n2", away_s=60.0)
    else:
        cluster.heal("n2")
    cluster.announce()
    cluster.settle()
    assert set(cluster.nodes["n2"].inner.scan()) == set(kept)
    assert [holding(cluster, id) for id in ids] == [[]] * 8 + [["n0"]] * 4 + [["n2"]] * 8
    for reader in cluster.nodes:
        assert get(cluster.client(reader), ids) == (1 << 20) - (1 << 8)
        assert seen(cluster.client(reader), ids) == ((1 << 20) - (1 << 8), 0)
    put(cluster.client("n2"), dropped)  # once is enough
    for _ in range(3):
        cluster.clock.advance(10.0)
        cluster.announce()
    assert set(cluster.nodes["n2"].inner.scan()) == set(ids)


def test_a_drop_from_before_a_node_went_is_not_caught_up_with(start: Start) -> None:
    cluster = start(3)
    ids = [name(n, n) for n in range(20)]
    cluster.client("n0").drop(ids, LONG_S)
    cluster.clock.advance(100.0)
    put(cluster.client("n2"), ids)
    cluster.clock.advance(10.0)
    cluster.restart("n2", away_s=5.0)
    cluster.announce()
    assert set(cluster.nodes["n2"].inner.scan()) == set(ids)


def test_a_clear_from_before_a_node_went_is_not_caught_up_with(start: Start) -> None:
    cluster = start(3)
    ids = [name(n, n) for n in range(20)]
    assert cluster.client("n0").clear(LONG_S, ids[0][:SPACE_BYTES]) == 0
    cluster.clock.advance(100.0)
    put(cluster.client("n2"), ids)
    cluster.clock.advance(10.0)
    cluster.restart("n2", away_s=5.0)
    cluster.announce()
    assert set(cluster.nodes["n2"].inner.scan()) == set(ids)


def test_what_is_not_complete_says_which_node_is_missing(start: Start) -> None:
    cluster = start()
    store = cluster.client("n0")
    cluster.nodes["n1"].up = False
    for call in (store.clear, lambda s: store.drop([name(1)], s), lambda s: store.scan(b"", s)):
        with pytest.raises(StoreError, match="not every node answered: n1"):
            call(LONG_S)
    cluster.lose("n1")
    assert store.clear(LONG_S) == 0
    store.close()
    with pytest.raises(StoreClosed):
        store.clear(LONG_S)


def test_records_and_counters_come_from_all_nodes(start: Start) -> None:
    cluster = start()
    store = cluster.client("n0")
    store.describe(b"a", {"model": "x"}, LONG_S)
    cluster.nodes["n1"].inner.describe(b"b", {"model": "y"}, LONG_S)
    put(store, [name(n) for n in range(4)])
    put(cluster.client("n1"), [name(n) for n in range(2)])
    cluster.nodes["n2"].up = False
    assert store.described(LONG_S) == {b"a": {"model": "x"}, b"b": {"model": "y"}}
    stats = store.stats(LONG_S)
    assert (stats.capacity_bytes, stats.objects, stats.used_bytes, stats.puts) == (2 * CAPACITY, 6, 6 * PAGE, 6)
    assert cluster.client("n1").described(LONG_S)[b"a"] == {"model": "x"}


def test_arrays_are_sources_and_targets_over_the_wire(start: Start) -> None:
    cluster = start()
    floats = np.linspace(0, 1, 32)
    assert cluster.client("n0").put([name(1)], [floats], LONG_S) == 1
    target = np.zeros(32)
    assert cluster.client("n1").get([name(1)], [target], LONG_S) == 1
    assert (target == floats).all()
    with pytest.raises(StoreError, match="read-only"):
        cluster.client("n1").get([name(1)], [bytes(PAGE)], LONG_S)
