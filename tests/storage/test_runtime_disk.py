"""Storage nodes with a disk behind their arena: what is written there survives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.errors import ConfigError, StoreTimeout
from hicache_ray.storage import ArenaClient, DiskConfig, MemoryStore, NodeStore, StorageNode
from hicache_ray.storage.announcer import AnnouncerConfig
from hicache_ray.storage.arena import Arena, ArenaConfig
from hicache_ray.storage.behind_arena import ArenaBehind
from hicache_ray.storage.conformance import Gate
from hicache_ray.storage.disk_log import LOG
from hicache_ray.storage.local import LocalStore
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.repair import RepairConfig
from tests.storage.conftest import PAGES, FakeClock
from tests.storage.nodes import Nodes, in_groups, node_config
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, present, put

MANY = in_groups(32)


@pytest.fixture
def make(clock: FakeClock, tmp_path: Path, nothing_left: None) -> Iterator[Callable[..., Nodes]]:
    """Nodes whose arenas hold 16 pages and whose disks hold far more."""
    made: list[Nodes] = []

    def make_some(count: int, **options: Any) -> Nodes:
        configs = []
        for i in range(count):
            (folder := tmp_path / f"n{i}").mkdir()
            disk = DiskConfig(str(folder), 256 * PAGE, segment_bytes=64 * PAGE, fsync="never")
            patient = AnnouncerConfig(timeout_s=TIMEOUT_S)  # a question that a busy machine is slow to answer is asked once here
            configs.append(node_config(i, 16, **{"disk": disk, "announcer": patient, **options}))
        made.append(Nodes(clock, configs))
        return made[-1]

    yield make_some
    for one in made:
        one.check()
        one.close()


def flush(nodes: Nodes) -> None:
    for node in nodes.nodes.values():
        assert node.behind is None or node.behind.flush(TIMEOUT_S)


def store_all(nodes: Nodes, store: Any) -> None:
    """Twice what the arena holds; none of it is lost."""
    for at in range(0, len(MANY), 8):
        assert put(store, MANY[at : at + 8]) == 0xFF
        flush(nodes)


def test_what_left_the_arena_is_read_from_the_disk_and_is_in_the_arena_then(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    store = nodes.open(0)
    store_all(nodes, store)
    stats = nodes[0].stats()
    assert (stats["arena"]["objects"], stats["disk"]["objects"], stats["behind"]["written"]) == (16, 32, 32)
    assert stats["arena"]["writes_off"] == ""
    assert present(store, MANY) == set(MANY)
    assert get(store, MANY[:8]) == set(MANY[:8])
    assert nodes[0].stats()["disk"]["gets"] == 8 + stats["disk"]["gets"]
    assert get(store, MANY[:8]) == set(MANY[:8])
    assert nodes[0].stats()["disk"]["gets"] == 8 + stats["disk"]["gets"]  # from the arena


def test_what_is_damaged_in_the_arena_does_not_get_to_the_disk(make: Callable[..., Nodes]) -> None:
    """There it would have a checksum that it fits."""
    nodes = make(1)
    store, behind = nodes.open(0), nodes[0].behind
    assert behind is not None
    with behind._queue.paused():
        assert put(store, MANY[:3]) == 0b111
        assert store.damage(name(MANY[1]))
    flush(nodes)
    stats = nodes[0].stats()
    assert (stats["disk"]["objects"], stats["behind"]["written"], stats["behind"]["lost"]) == (2, 2, 1)
    assert get(store, MANY[:3]) == {MANY[0], MANY[2]}
    assert present(store, MANY[:3]) == {MANY[0], MANY[2]}


def test_another_node_reads_what_is_on_the_disk(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    store_all(nodes, nodes.open(0))
    nodes.announce()  # what left the arena is there as before
    assert [node.stats()["announcer"]["withdrawn"] for node in nodes.nodes.values()] == [0, 0, 0]
    assert present(nodes.open(1), MANY) == set(MANY)
    for at in range(0, len(MANY), 8):
        assert get(nodes.open(1), MANY[at : at + 8]) == set(MANY[at : at + 8])


def test_a_new_incarnation_starts_warm(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    store_all(nodes, nodes.open(0))
    nodes.restart(0)
    nodes.settle()
    nodes.announce()
    assert nodes[0].stats()["arena"]["objects"] == 0
    for i in range(3):
        assert present(nodes.open(i), MANY) == set(MANY)
        assert get(nodes.open(i), MANY[:8]) == set(MANY[:8])


def test_what_waits_is_written_at_the_end(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    put(nodes.open(0), MANY[:16])
    nodes.restart(0)
    assert get(nodes.open(0), MANY) == set(MANY[:16])


def test_a_clear_reaches_arena_disk_and_home(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    stores = [nodes.open(i) for i in range(3)]
    store_all(nodes, stores[0])
    put(stores[1], MANY[:4])  # its own copies; nobody waits for its disk
    assert stores[2].clear(TIMEOUT_S) == len(MANY) + 4
    for node in nodes.nodes.values():
        stats = node.stats()
        assert (stats["arena"]["objects"], stats["disk"]["objects"], stats["home"]["entries"]) == (0, 0, 0)
    for store in stores:
        assert present(store, MANY) == set()
    nodes.restart(0)
    nodes.settle()
    nodes.announce()
    assert present(nodes.open(1), MANY) == set()


def test_a_node_that_was_down_during_a_clear_has_nothing_of_it_when_it_is_back(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    store_all(nodes, nodes.open(1))
    config = nodes[1].config
    nodes.lose(1)
    nodes[0].set_members(nodes.members)
    assert nodes.open(0).clear(TIMEOUT_S) == 0
    nodes.start(config)
    nodes.introduce()
    assert nodes[1].disk is not None
    assert len(list(nodes[1].disk.scan())) == len(MANY)
    nodes.announce()
    nodes.settle()
    assert list(nodes[1].disk.scan()) == []
    assert present(nodes.open(0), MANY) == set()
    nodes.restart(1)
    assert list(nodes[1].disk.scan()) == []


@pytest.mark.parametrize("left", [1, 2])
def test_a_node_that_was_down_during_a_drop_has_nothing_of_it_when_it_is_back(make: Callable[..., Nodes], left: int) -> None:
    """Also where one node was left, which then keeps all to itself."""
    nodes = make(left + 1)
    store_all(nodes, nodes.open(left))
    config = nodes[left].config
    nodes.lose(left)
    for node in nodes.nodes.values():
        node.set_members(nodes.members)
    store = nodes.open(0)
    assert store.drop([name(n) for n in MANY[:20]], TIMEOUT_S) == 0
    assert put(store, MANY[:2]) == 0b11
    nodes.start(config)
    nodes.introduce()
    disk = nodes[left].disk
    assert disk is not None
    assert len(list(disk.scan())) == len(MANY)
    nodes.announce()
    nodes.settle()
    assert set(disk.scan()) == {name(n) for n in MANY[20:]}
    for i in range(left + 1):
        assert get(nodes.open(i), MANY[:20]) == set(MANY[:2])
        assert present(nodes.open(i), MANY) == {*MANY[:2], *MANY[20:]}


def restart_all(nodes: Nodes, *left: int) -> None:
    """All these at once: nobody lives who was told of anything."""
    configs = [nodes[i].config for i in left]
    for i in left:
        nodes.lose(i)
    for config in configs:
        nodes.start(config)
    nodes.introduce()


@pytest.mark.parametrize("what", ["clear", "drop"])
def test_what_was_dropped_stays_so_though_everybody_else_was_started_anew(make: Callable[..., Nodes], what: str) -> None:
    nodes = make(3)
    store_all(nodes, nodes.open(2))
    config = nodes[2].config
    nodes.lose(2)
    for node in nodes.nodes.values():
        node.set_members(nodes.members)
    store = nodes.open(0)
    if what == "clear":
        assert store.clear(TIMEOUT_S) == 0
    else:
        assert store.drop([name(n) for n in MANY[:20]], TIMEOUT_S) == 0
    assert nodes[0].stats()["home"]["unkept"] == 0
    restart_all(nodes, 0, 1)
    restart_all(nodes, 1)  # only one is left who has heard of somebody who was told
    nodes.start(config)
    nodes.introduce()
    disk = nodes[2].disk
    assert disk is not None
    assert len(list(disk.scan())) == len(MANY)
    nodes.announce()
    nodes.settle()
    kept = set() if what == "clear" else set(MANY[20:])
    assert set(disk.scan()) == {name(n) for n in kept}
    assert present(nodes.open(0), MANY) == get(nodes.open(1), MANY) == kept


def test_a_damaged_list_of_drops_costs_a_node_that_was_away_its_pages_and_nobody_else(
    make: Callable[..., Nodes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = make(3)
    store_all(nodes, nodes.open(2))
    nodes.announce()
    assert put(nodes.open(1), MANY[:4]) == 0b1111
    flush(nodes)
    nodes.announce()
    nodes.clock.advance(60.0)
    nodes.announce()
    config, damaged = nodes[2].config, nodes[0].config
    nodes.lose(2)
    nodes[0].plane.home.forget(b"nobody's", TIMEOUT_S)
    nodes.clock.advance(20.0)
    nodes[1].plane.announcer.step()  # it asks, and there is nothing
    nodes.lose(0)
    log = tmp_path / "n0" / LOG
    log.write_bytes(log.read_bytes()[:-1])
    age(20.0, log)
    age(60.0, *(tmp_path / "n2").iterdir())
    nodes.start(damaged)
    assert ["is damaged; nodes that come back will drop all" in line for line in caplog.messages] == [True]
    nodes.introduce()
    nodes[1].plane.announcer.step()
    nodes.start(config)
    nodes.introduce()
    nodes.announce()
    nodes.settle()
    disks = {name: node.disk for name, node in nodes.nodes.items() if node.disk is not None}
    assert {name: len(list(disk.scan())) for name, disk in disks.items()} == {"n0": 0, "n1": 4, "n2": 0}
    assert present(nodes.open(2), MANY) == set(MANY[:4])


@pytest.mark.parametrize("cut_off", [False, True], ids=["was not introduced", "saw nobody"])
def test_a_node_that_wrote_before_it_asked_and_is_started_anew_still_asks_for_all_that_it_missed(
    make: Callable[..., Nodes], tmp_path: Path, cut_off: bool
) -> None:
    """What it wrote says when it was last there, and not what it has heard of."""
    nodes = make(2)
    store_all(nodes, nodes.open(1))
    nodes.announce()
    config = nodes[1].config
    if not cut_off:
        nodes.lose(1)
    store = nodes.open(0)
    nodes[0].plane.home.forget(b"", TIMEOUT_S)  # what a clear does on every node that is reached
    nodes.clock.advance(60.0)
    age(60.0, *(tmp_path / "n1").iterdir())
    if not cut_off:
        nodes.start(config)
    assert put(nodes.open(1), in_groups(1, 100)) == 1
    flush(nodes)
    nodes.lose(1)
    nodes.start(config)
    nodes.introduce()
    nodes.announce()
    nodes.settle()
    assert nodes[1].disk is not None
    assert list(nodes[1].disk.scan()) == []
    assert present(store, MANY) == set()


def age(seconds: float, *files: Path) -> None:
    """They were last written so long ago."""
    for file in files:
        then = file.stat().st_mtime - seconds
        os.utime(file, (then, then))


def repair(nodes: Nodes) -> dict[str, int]:
    """Every node that is there makes the copies that are lost; how many."""
    nodes.announce()
    nodes.settle()
    nodes.announce()
    for node in nodes.nodes.values():
        repairer = node.plane.repairer
        for _ in range(60):
            nodes.clock.advance(repairer.step())
            flush(nodes)  # a real arena holds more than a batch
        assert repairer.idle()
    return {name: node.stats()["repair"]["repaired"] for name, node in nodes.nodes.items()}


def test_what_is_lost_with_a_node_is_copied_from_the_disk_past_the_arena(make: Callable[..., Nodes]) -> None:
    nodes = make(4, shard=ShardConfig(replicas=2), repair=RepairConfig(batch=4))
    store_all(nodes, nodes.open(1))
    nodes.announce()
    arenas = {name: node.stats()["arena"]["puts"] for name, node in nodes.nodes.items()}
    nodes.lose(1)
    for node in nodes.nodes.values():
        node.set_members(nodes.members)
    repaired = repair(nodes)
    assert sum(repaired.values()) == len(MANY)
    flush(nodes)
    stats = {name: node.stats() for name, node in nodes.nodes.items()}
    assert sum(stat["disk"]["objects"] for stat in stats.values()) == 2 * len(MANY)
    assert sum(stat["arena"]["puts"] - arenas[name] for name, stat in stats.items()) == len(MANY)  # the copies, and nothing that was read
    assert [stat["repair"] for stat in stats.values()] == [
        {"repaired": n, "repaired_bytes": n * PAGE, "repair_dropped": 0, "failures": 0, "waiting": 0} for n in repaired.values()
    ]
    nodes.lose(2)
    for node in nodes.nodes.values():
        node.set_members(nodes.members)
    nodes.announce()
    nodes.settle()
    store = nodes.open(0)
    assert present(store, MANY) == set(MANY)
    assert {n for n in MANY if get(store, [n])} == set(MANY)


def test_what_is_damaged_is_not_copied(make: Callable[..., Nodes]) -> None:
    """Elsewhere it would have a checksum that it fits."""
    nodes = make(2, shard=ShardConfig(replicas=2), disk=None)
    store = nodes.open(0)
    assert put(store, MANY[:6]) == 0b111111
    nodes.restart(1)
    assert nodes[0].node.scan(b"", TIMEOUT_S).shape == (6, 64)
    assert LocalStore(nodes[0].node).damage(name(MANY[1]))
    assert repair(nodes) == {"n0": 5, "n1": 0}
    assert nodes[0].stats()["repair"]["repair_dropped"] == 1
    assert nodes[1].stats()["arena"]["objects"] == 5
    assert get(nodes.open(1), MANY[:6]) == {MANY[0], *MANY[2:6]}


def test_a_drop_reaches_the_disk(make: Callable[..., Nodes]) -> None:
    nodes = make(1)
    store_all(nodes, nodes.open(0))
    alone = ArenaClient(nodes[0].address.socket)
    assert alone.drop([name(n) for n in MANY[:4]], TIMEOUT_S) == 0b1111
    assert present(alone, MANY) == set(MANY[4:])
    alone.close()


def test_what_finds_no_room_in_the_queue_is_counted(make: Callable[..., Nodes]) -> None:
    nodes = make(1, write_behind_bytes=PAGE - 1)
    put(nodes.open(0), MANY[:8])
    assert nodes[0].stats()["behind"]["dropped"] == 8
    assert nodes[0].stats()["disk"]["objects"] == 0


def test_a_disk_that_cannot_be_used_is_refused_and_nothing_is_left(nothing_left: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        StorageNode(node_config(5, disk=DiskConfig(str(tmp_path / "nowhere"), 256 * PAGE))).start()
    with pytest.raises(ConfigError, match="write_behind_bytes must be positive"):
        node_config(5, write_behind_bytes=0)


# -- against what is on its way between arena and disk -------------------------------------------------------------------------------


class Slow(MemoryStore):
    """Its next put stops at ``gate``, before it has begun."""

    gate: Gate | None = None
    hook: Callable[[], object] = staticmethod(lambda: None)  # done at the beginning of a clear

    def put(self, ids: Any, sources: Any, timeout_s: float) -> int:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.stop()
        return super().put(ids, sources, timeout_s)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        self.hook()
        return super().clear(timeout_s, prefix)


@pytest.fixture
def behind(config: ArenaConfig, nothing_left: None) -> Iterator[tuple[LocalStore, Slow]]:
    back = Slow(10 * PAGES * PAGE)
    node = NodeStore(Arena(config), back)
    queue = node.behind = ArenaBehind(node, back, PAGES * PAGE)
    local = LocalStore(node)
    yield local, back
    local.close()
    queue.close(TIMEOUT_S)
    queue.check()
    node.check()
    node.close()


def test_a_clear_waits_for_what_is_being_written(behind: tuple[LocalStore, Slow]) -> None:
    local, back = behind
    gate = back.gate = Gate()
    put(local, [1])
    assert gate.reached.wait(TIMEOUT_S)
    with pytest.raises(StoreTimeout, match="being written to the disk"):
        local.clear(0.05)
    assert present(local, [1]) == set()
    gate.open()
    local.clear(TIMEOUT_S)
    assert back.stats(TIMEOUT_S).objects == 0
    assert present(local, [1]) == get(local, [1]) == set()


def test_what_is_read_from_the_disk_during_a_clear_does_not_come_back(behind: tuple[LocalStore, Slow]) -> None:
    local, back = behind
    put(back, [1, 2])
    back.hook = lambda: get(local, [1, 2])
    local.clear(TIMEOUT_S)
    assert present(local, [1, 2]) == get(local, [1, 2]) == set()
    put(local, [1])
    assert get(local, [1]) == {1}
