"""Second copies that were lost are made again, at a limited rate, and never of what is dropped meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.conformance import Clock, Gate
from hicache_ray.storage.conformance_kit import Worker
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.repair import Pace, RepairConfig, Repairer
from hicache_ray.store import SPACE_BYTES
from tests.storage.cluster import CAPACITY, LONG_S, Cluster
from tests.storage.test_sharded import PAGE, TWICE, Start, get, holding, name, put, seen, start

__all__ = ["start"]

SPACE = bytes([1]) * SPACE_BYTES
IDS = [name(n, n) for n in range(48)]
STEPS = 1000
EAGER = ShardConfig(replicas=2, backoff_s=0.0, backoff_most_s=0.0)  # back-off goes by real time


def finish(cluster: Cluster, *repairers: Repairer) -> float:
    """Let them come to their end; how much time passed in which they had to wait."""
    waited = 0.0
    for repairer in repairers:
        for _ in range(STEPS):
            pause = repairer.step()
            if repairer.idle():
                break
            waited += pause
            cluster.clock.advance(pause)
        assert repairer.idle()
        assert repairer.waiting == 0
    return waited


def settle(cluster: Cluster) -> None:
    """All have noticed what has changed, and said what they have."""
    cluster.announce()
    cluster.settle()
    cluster.announce()


def repair(cluster: Cluster, config: RepairConfig | None = None, shard: ShardConfig = TWICE) -> list[Repairer]:
    """Every living node, one after the other."""
    settle(cluster)
    repairers = [cluster.repairer(node.name, config, shard) for node in cluster.nodes.values() if node.up]
    finish(cluster, *repairers)
    return repairers


def fill(cluster: Cluster, shard: ShardConfig = TWICE) -> None:
    """Every node writes a part, and all of it lies twice."""
    cluster.announce()
    for i, node in enumerate(cluster.nodes):
        mine = IDS[i :: len(cluster.nodes)]
        assert put(cluster.client(node, shard), mine) == (1 << len(mine)) - 1
    assert {len(holding(cluster, id)) for id in IDS} == {2}


def living(cluster: Cluster, id: bytes) -> list[str]:
    return [node for node in holding(cluster, id) if cluster.nodes[node].up]


@pytest.mark.parametrize("placement", ["writer", "home"])
def test_redundancy_comes_back_by_itself_after_the_loss_of_a_node(start: Start, placement: str) -> None:
    cluster, shard = start(5, ["a", "a", "b", "b", "c"]), ShardConfig(placement, 2)
    fill(cluster, shard)
    for lost in ("n1", "n3"):
        cluster.lose(lost)
        alone = [id for id in IDS if len(living(cluster, id)) == 1]
        assert alone
        repairers = repair(cluster, shard=shard)
        assert {len(living(cluster, id)) for id in IDS} == {2}
        assert sum(repairer.stats.repaired for repairer in repairers) == len(alone)
        assert sum(repairer.stats.repaired_bytes for repairer in repairers) == len(alone) * PAGE
        assert [(repairer.stats.repair_dropped, repairer.stats.failures) for repairer in repairers] == [(0, 0)] * len(repairers)
        labels = {id: {cluster.nodes[node].label for node in living(cluster, id)} for id in alone}
        assert {len(found) for found in labels.values()} == {2}  # in another failure domain, as a put does it
    cluster.lose("n4")
    settle(cluster)
    reader = cluster.client("n0", shard)
    assert seen(reader, IDS) == ((1 << len(IDS)) - 1, 0)
    assert get(reader, IDS) == (1 << len(IDS)) - 1


def test_a_node_that_came_back_empty_gets_its_part_again(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    (first, second) = repair(cluster)
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS)
    assert (first.stats.repaired, second.stats.repaired) == (len(IDS), 0)
    cluster.lose("n0")
    settle(cluster)
    assert get(cluster.client("n1", TWICE), IDS) == (1 << len(IDS)) - 1


def test_a_node_that_came_back_with_its_disk_costs_nothing(start: Start) -> None:
    cluster = start(3)
    fill(cluster)
    cluster.restart("n1")
    assert [repairer.stats.repaired for repairer in repair(cluster)] == [0, 0, 0]
    assert {len(holding(cluster, id)) for id in IDS} == {2}


def test_nothing_is_done_before_it_has_settled_and_once_is_enough(start: Start) -> None:
    cluster = start(3)
    fill(cluster)
    repairer = cluster.repairer("n0")
    finish(cluster, repairer)
    cluster.lose("n1")
    assert not repairer.idle()
    for settling in (lambda: None, cluster.announce):  # others may not have said yet what they have
        settling()
        calls = {node.name: node.calls for node in cluster.nodes.values()}
        for _ in range(3):
            assert repairer.step() == repairer.config.step_s
        assert {node.name: node.calls for node in cluster.nodes.values()} == calls
    settle(cluster)
    finish(cluster, repairer)
    repaired = repairer.stats.repaired
    assert repaired > 0
    cluster.nodes["n2"].inner.drop(IDS, 1.0)  # evicted, say: the room there is for others
    for _ in range(10):
        cluster.clock.advance(100.0)
        assert repairer.step() == repairer.config.step_s
    assert repairer.stats.repaired == repaired


@pytest.mark.parametrize(("config", "shard"), [(RepairConfig(0), TWICE), (RepairConfig(), ShardConfig())], ids=["rate 0", "one copy"])
def test_it_can_be_off(start: Start, config: RepairConfig, shard: ShardConfig) -> None:
    cluster = start(3)
    fill(cluster)
    cluster.lose("n1")
    before = {id: living(cluster, id) for id in IDS}
    assert {repairer.stats.repaired for repairer in repair(cluster, config, shard)} == {0}
    assert {id: living(cluster, id) for id in IDS} == before
    assert cluster.repairer("n0", config, shard).start()._thread is None


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="number of bytes per second, or 0 for none, not -1"):
        RepairConfig(-1)
    with pytest.raises(ConfigError, match="the sizes and times of repairs must be positive"):
        RepairConfig(batch=0)


# -- what fails, or is refused ---------------------------------------------------------------------------------------------------------


def test_a_target_that_fails_is_asked_again(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", shard=EAGER)
    cluster.nodes["n1"].fail = lambda call: call == "put"
    for _ in range(8):
        cluster.clock.advance(repairer.step())
    assert (repairer.stats.repaired, repairer.stats.repair_dropped, repairer.stats.failures) == (0, 0, 1)
    assert not repairer.idle()
    cluster.nodes["n1"].fail = lambda call: False
    assert finish(cluster, repairer) > repairer.config.again_s / 2
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS)
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS), 0)


def test_a_target_that_has_no_room_refuses_as_it_does_any_put(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    other, target = name(9999, 9999, 2), cluster.nodes["n1"].inner
    target.put([other], [b"x" * (CAPACITY - 5 * PAGE)], 1.0)
    with target.lease([other], 1.0):
        repairer = cluster.repairer("n0")
        finish(cluster, repairer)
        assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (5, len(IDS) - 5)
        assert target.stats(1.0).used_bytes == CAPACITY
    cluster.clock.advance(1000.0)
    finish(cluster, repairer)
    assert repairer.stats.repaired == 5  # not again and again


def test_what_fails_for_long_is_tried_ever_more_seldom(start: Start) -> None:
    """As every time all that there is is gone through; and at once where the members change."""
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", RepairConfig(again_s=30.0), EAGER)
    cluster.nodes["n1"].fail = lambda call: call == "put"
    scans = [cluster.clock()]
    scan = cluster.nodes["n0"].inner.scan

    def counted(*arguments: Any) -> Any:
        scans.append(cluster.clock())
        return scan(*arguments)

    cluster.nodes["n0"].inner.scan = counted  # type: ignore[method-assign]
    while len(scans) < 9:
        cluster.clock.advance(repairer.step())
    assert [round((b - a) / 30.0) for a, b in pairwise(scans)] == [0, 1, 2, 4, 8, 16, 16, 16]
    cluster.nodes["n1"].fail = lambda call: False
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    assert finish(cluster, repairer) < 30.0
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS)


def test_what_failed_is_tried_again_after_a_while(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", RepairConfig(again_s=30.0), EAGER)
    failing = ["holders"]
    cluster.nodes["n0"].fail = lambda call: bool(failing) and call == failing[0] and bool(failing.pop())
    repairer.step()
    assert repairer.stats.failures == 1
    assert finish(cluster, repairer) >= 29.0
    assert {len(living(cluster, id)) for id in IDS} == {2}


def test_what_went_before_its_turn_is_given_up(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0")
    repairer.step()
    assert repairer.waiting == len(IDS)
    cluster.nodes["n0"].inner.drop(IDS[:5], 1.0)
    finish(cluster, repairer)
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS) - 5, 5)
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS[5:])


def test_the_queue_is_bounded(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", RepairConfig(queue=8, ask=6, batch=4))
    most = 0
    for _ in range(STEPS):
        cluster.clock.advance(repairer.step())
        most = max(most, repairer.waiting)
        if repairer.idle():
            break
    assert most <= 8
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS)


def test_what_somebody_has_after_all_when_its_turn_comes_is_not_sent(start: Start) -> None:
    """A node that is back with its disk, and takes its time to say what it has."""
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1")
    cluster.announcers["n0"].step()
    cluster.settle()
    cluster.announcers["n0"].step()
    repairer = cluster.repairer("n0")
    repairer.step()
    assert repairer.waiting == len(IDS)
    cluster.announce()
    before = cluster.nodes["n1"].inner.stats(1.0).puts
    finish(cluster, repairer)
    assert cluster.nodes["n1"].inner.stats(1.0).puts == before
    assert (repairer.stats.repaired, repairer.stats.repaired_bytes, repairer.stats.repair_dropped) == (0, 0, 0)


# -- a drop that comes across ----------------------------------------------------------------------------------------------------------


def begun(cluster: Cluster, call: str, node: str) -> tuple[Repairer, Worker, Gate]:
    """n0 is about to copy all that it has to n1, and has stopped at a call."""
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", shard=EAGER)
    repairer.step()
    assert repairer.waiting == len(IDS)
    gate = cluster.nodes[node].gates[call] = Gate()
    worker = Worker(repairer.step)
    assert gate.reached.wait(LONG_S)
    return repairer, worker, gate


DROPS: dict[str, Callable[[Cluster], object]] = {
    "drop": lambda cluster: cluster.client("n1").drop(IDS[:20], LONG_S),
    "clear": lambda cluster: cluster.client("n1").clear(LONG_S, SPACE),
}


def nothing_came_back(cluster: Cluster, what: str, repairer: Repairer) -> None:
    gone = IDS[:20] if what == "drop" else IDS
    assert [holding(cluster, id) for id in gone] == [[]] * len(gone)
    assert seen(cluster.client("n1"), gone) == (0, 0)
    cluster.clock.advance(100.0)
    cluster.announce()
    finish(cluster, repairer)
    assert [holding(cluster, id) for id in gone] == [[]] * len(gone)
    assert {len(holding(cluster, id)) for id in IDS if id not in gone} <= {2}
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS) - len(gone), len(gone))


@pytest.mark.parametrize("what", DROPS)
@pytest.mark.parametrize(("call", "node"), [("epoch", "n0"), ("epoch", "n1"), ("put", "n1"), ("announce", "n0"), ("announce", "n1")])
def test_a_drop_during_a_repair_wins(start: Start, call: str, node: str, what: str) -> None:
    cluster = start(2)
    repairer, worker, gate = begun(cluster, call, node)
    DROPS[what](cluster)
    gate.open()
    worker.join()
    nothing_came_back(cluster, what, repairer)


@pytest.mark.parametrize("what", DROPS)
def test_a_drop_that_is_slow_to_reach_the_holder_wins(start: Start, what: str) -> None:
    """Its fence stands everywhere, the target has done its part, and the holder has not when it is read from."""
    cluster = start(2)
    repairer, worker, gate = begun(cluster, "epoch", "n1")
    slow = cluster.nodes["n0"].gates[what] = Gate()
    done, inner = threading.Event(), cluster.nodes["n1"].inner
    real = getattr(inner, what)

    def told(*args: object) -> object:
        try:
            return real(*args)
        finally:
            done.set()

    setattr(inner, what, told)
    dropping = Worker(lambda: DROPS[what](cluster))
    assert slow.reached.wait(LONG_S)
    assert done.wait(LONG_S)
    gate.open()
    worker.join()
    assert [holding(cluster, id) for id in IDS[:20]] == [["n0"]] * 20
    slow.open()
    dropping.join()
    nothing_came_back(cluster, what, repairer)


def test_what_was_dropped_shortly_ago_and_is_here_again_is_copied_later(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    cluster.client("n1").drop(IDS[:3], LONG_S)
    put(cluster.client("n0"), IDS[:3])
    repairer = cluster.repairer("n0")
    waited = finish(cluster, repairer)
    assert 59.0 < waited < 120.0
    assert {len(holding(cluster, id)) for id in IDS} == {2}
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS), 0)


@pytest.mark.parametrize("late_s", [0.0, 100.0])
def test_a_drop_that_the_holder_missed_takes_its_copies_too(start: Start, late_s: float) -> None:
    """Nobody reached it, and it reached everybody: it copied what the others had dropped, before it heard of that, be it much later."""
    cluster = start(3)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    lonely = [id for id in IDS if holding(cluster, id) == ["n0"]]
    assert len(lonely) > 5
    dropped = lonely[:4]
    repairer = cluster.repairer("n0")
    for other in ("n1", "n2"):
        cluster.nodes[other].index.forget_ids(dropped, 1.0)
    cluster.announcers["n0"]._evicted.clear()
    for node in cluster.nodes.values():
        node.index.announce("n0:1", dropped, 1.0)  # as it says now and then what it has
    finish(cluster, repairer)
    assert [len(holding(cluster, id)) for id in dropped] == [2] * 4
    cluster.clock.advance(late_s)
    repairer.step()
    assert [len(holding(cluster, id)) for id in dropped] == [2] * 4
    cluster.clock.advance(6.0)
    cluster.announce()
    assert set(dropped).isdisjoint(cluster.nodes["n0"].inner.scan())
    cluster.clock.advance(repairer.config.caught_s)
    repairer.step()
    assert [holding(cluster, id) for id in dropped] == [[]] * 4
    assert seen(cluster.client("n2"), dropped) == (0, 0)
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(lonely), 4)  # they were made, and taken back
    assert {len(holding(cluster, id)) for id in lonely[4:]} == {2}


def test_a_home_that_was_told_of_a_drop_refuses_the_copy_of_a_holder_that_was_not(start: Start) -> None:
    cluster = start(2)
    repairer, worker, gate = begun(cluster, "announce", "n1")
    dropped = [id for id in IDS if cluster.home(id) == "n1"]
    cluster.nodes["n1"].index.forget_ids(dropped, 1.0)
    gate.open()
    worker.join()
    assert [holding(cluster, id) for id in dropped] == [["n0"]] * len(dropped)
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS) - len(dropped), len(dropped))


def test_a_copy_that_cannot_be_taken_back_is_taken_back_later(start: Start) -> None:
    cluster = start(2)
    repairer, worker, gate = begun(cluster, "put", "n1")
    cluster.client("n1").drop(IDS[:20], LONG_S)
    failing = ["drop"]
    cluster.nodes["n1"].fail = lambda call: bool(failing) and call == failing[0] and bool(failing.pop())
    gate.open()
    worker.join()
    assert [holding(cluster, id) for id in IDS[:20]] == [["n1"]] * 20
    assert seen(cluster.client("n0"), IDS[:20]) == (0, 0)
    repairer.step()
    assert [holding(cluster, id) for id in IDS[:20]] == [[]] * 20
    assert (repairer.stats.repaired, repairer.stats.repair_dropped) == (len(IDS) - 20, 20)


# -- the rate, the thread --------------------------------------------------------------------------------------------------------------


def test_the_rate_is_kept() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    assert pace.wait() == 0.0
    pace.spend(500)
    assert pace.wait() == 0.0  # a second's worth at once
    pace.spend(500)
    assert pace.wait() == 0.0
    pace.spend(250)
    assert pace.wait() == pytest.approx(0.25)
    clock.advance(0.25)
    assert pace.wait() == 0.0
    pace.spend(4000)
    assert pace.wait() == pytest.approx(4.0)
    clock.advance(3.0)
    assert pace.wait() == pytest.approx(1.0)
    clock.advance(101.0)
    pace.spend(1500)  # a long rest saves up no more than a second
    assert pace.wait() == pytest.approx(0.5)


def test_a_repair_takes_the_time_that_its_rate_says(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    rate = 4 * PAGE
    began = cluster.clock()
    finish(cluster, cluster.repairer("n0", RepairConfig(rate)))
    assert set(cluster.nodes["n1"].inner.scan()) == set(IDS)
    assert cluster.clock() - began >= len(IDS) * PAGE / rate - 2.0  # but for the first second, and the last batch


def test_a_batch_ends_with_the_object_that_fills_it(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer = cluster.repairer("n0", RepairConfig(batch_bytes=3 * PAGE - 1))
    repairer.step()
    repairer.step()
    assert repairer.stats.repaired == 3
    assert repairer.waiting == len(IDS) - 3
    finish(cluster, repairer)
    assert repairer.stats.repaired == len(IDS)


def test_it_runs_on_a_thread_of_its_own_and_ends_in_the_middle(start: Start) -> None:
    cluster = start(2)
    fill(cluster)
    cluster.restart("n1", keep_bytes=False)
    settle(cluster)
    repairer, failed, step = cluster.repairer("n0"), threading.Event(), Repairer.step
    gate = cluster.nodes["n1"].gates["put"] = Gate()

    def fail_once() -> float:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the thread lives on")
        return step(repairer)

    repairer.step = fail_once  # type: ignore[method-assign]
    repairer.start()
    assert gate.reached.wait(LONG_S)
    assert repairer.stats.failures == 1
    closing = Worker(repairer.close)
    gate.open()
    closing.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-repairer"]
    with pytest.raises(StoreError):
        repairer.client.lacking(IDS, LONG_S)
