"""Who is alive, told by an injected clock; and the prober that asks."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.members import Member, Members, MembersConfig
from hicache_ray.storage.prober import Prober
from hicache_ray.storage.rendezvous import ranked
from tests.storage.conftest import FakeClock

GROUPS = [n.to_bytes(8, "big") for n in range(2000)]


def cluster(clock: FakeClock, count: int = 3) -> Members:
    members = Members(clock, MembersConfig(ping_timeout_s=20.0))
    for n in range(count):
        members.join(Member(f"n{n}", "1", f"host{n}:7", f"rack{n % 2}"))
    return members


def names(members: Members) -> list[str]:
    return [member.holder for member in members.alive().alive]


# -- rendezvous ------------------------------------------------------------------------------------------------------------------------


def test_the_order_is_the_same_in_every_process_and_whatever_the_order_of_the_nodes() -> None:
    assert ranked(b"group 01", ["a", "b", "c", "d"]) == ranked(b"group 01", ["d", "b", "a", "c"])
    assert [ranked(n.to_bytes(8, "big"), ["a", "b", "c"])[0] for n in range(8)] == ["c", "c", "c", "c", "b", "b", "c", "c"]


def test_nodes_get_equal_parts_and_a_lost_one_moves_only_its_own() -> None:
    nodes = [f"n{i}" for i in range(10)]
    homes = {group: ranked(group, nodes)[0] for group in GROUPS}
    assert all(150 <= count <= 250 for count in Counter(homes.values()).values())
    for group, home in homes.items():
        without = ranked(group, [node for node in nodes if node != "n3"])
        assert without[0] == (ranked(group, nodes)[1] if home == "n3" else home)


# -- members ---------------------------------------------------------------------------------------------------------------------------


def test_three_missed_pings_are_a_death_and_a_word_is_a_return(clock: FakeClock) -> None:
    members = cluster(clock)
    version = members.alive().version
    members.missed("n1")
    members.missed("n1")
    members.heard("n1", "1")
    members.missed("n1")
    members.missed("n1")
    assert names(members) == ["n0:1", "n1:1", "n2:1"]
    assert members.alive().version == version
    members.missed("n1")
    assert names(members) == ["n0:1", "n2:1"]
    assert members.alive().version == version + 1
    assert members.alive().known == {"n0:1", "n1:1", "n2:1"}
    members.missed("n1")
    members.heard("n1", "1")
    assert names(members) == ["n0:1", "n1:1", "n2:1"]
    assert members.alive().version == version + 2
    members.check()


def test_two_misses_two_seconds_after_the_last_word_are_a_death(clock: FakeClock) -> None:
    """Where pings are far apart. A single miss may be the pause of the one who asked."""
    members = cluster(clock)
    clock.advance(1.0)
    members.missed("n1")
    clock.advance(1.0)
    members.missed("n1")
    assert names(members) == ["n0:1", "n2:1"]
    clock.advance(3600)
    members.missed("n2")
    assert names(members) == ["n0:1", "n2:1"]
    members.heard("n2", "1")
    members.missed("n2")
    members.missed("n2")
    assert names(members) == ["n0:1", "n2:1"]


def test_silence_alone_is_no_death(clock: FakeClock) -> None:
    """Who was not asked has missed nothing: a client that was stopped itself must not take all others for dead."""
    members = cluster(clock)
    clock.advance(3600)
    assert len(names(members)) == 3


def test_a_new_incarnation_takes_the_place_and_the_old_one_is_over(clock: FakeClock) -> None:
    members = cluster(clock)
    members.heard("n1", "2")
    assert names(members) == ["n0:1", "n1:2", "n2:1"]
    assert members.alive().over == {"n1:1"}
    members.heard("n1", "1")  # an answer that was late
    members.join(Member("n1", "1"))
    assert names(members) == ["n0:1", "n1:2", "n2:1"]
    assert members.alive().member("n1") == Member("n1", "2", "host1:7", "rack1")
    members.leave("n1")
    members.join(Member("n1", "2"))
    assert names(members) == ["n0:1", "n2:1"]
    members.join(Member("n1", "3"))
    assert names(members) == ["n0:1", "n1:3", "n2:1"]
    members.check()


def test_who_is_dead_is_not_alive_for_being_named_again(clock: FakeClock) -> None:
    members = cluster(clock)
    for _ in range(3):
        members.missed("n1")
    members.join(Member("n1", "1", "host1:7", "rack1"))
    assert names(members) == ["n0:1", "n2:1"]


def test_the_homes_of_a_node_move_and_settle(clock: FakeClock) -> None:
    members = cluster(clock)
    clock.advance(members.config.settle_s)
    before = members.alive()
    assert not any(before.moving(group) for group in GROUPS)
    for _ in range(3):
        members.missed("n1")
    after = members.alive()
    mine = [group for group in GROUPS if before.home(group) == Member("n1", "1", "host1:7", "rack1")]
    assert [group for group in GROUPS if after.moving(group)] == mine
    assert [group for group in GROUPS if before.home(group) != after.home(group)] == mine
    clock.advance(members.config.settle_s)
    assert not any(members.alive().moving(group) for group in GROUPS)
    members.heard("n1", "2")
    assert [group for group in GROUPS if members.alive().moving(group)] == mine


def test_a_home_that_was_restarted_is_moving(clock: FakeClock) -> None:
    members = cluster(clock)
    clock.advance(members.config.settle_s)
    members.heard("n2", "2")
    view = members.alive()
    assert [group for group in GROUPS if view.moving(group)] == [g for g in GROUPS if view.ranked(g)[0].node == "n2"]


def test_bad_members_are_refused(clock: FakeClock) -> None:
    members = cluster(clock)
    with pytest.raises(ConfigError, match="without a colon"):
        members.join(Member("n9", "1:2"))
    with pytest.raises(ConfigError, match="must be positive"):
        MembersConfig(ping_s=0)


# -- prober ----------------------------------------------------------------------------------------------------------------------------


class Pings:
    """Answers for the nodes; a round takes the time of a ping's deadline where one hangs."""

    def __init__(self) -> None:
        self.incarnations = {"n0": "1", "n1": "1", "n2": "1"}
        self.asked: Counter[str] = Counter()
        self.hangs = threading.Event()
        self.hanging: set[str] = set()

    def __call__(self, member: Member, timeout_s: float) -> str:
        self.asked[member.node] += 1
        if member.node in self.hanging:
            self.hangs.wait(20.0)
        if member.node not in self.incarnations:
            raise StoreError("refused")
        return self.incarnations[member.node]


def test_a_dead_node_is_noticed_within_two_seconds(clock: FakeClock) -> None:
    """Pings every half second: at 0.5, 1.0 and 1.5 s after its last answer nobody is there."""
    members, pings = cluster(clock), Pings()
    prober = Prober("n0", members, pings)
    prober.step()
    del pings.incarnations["n1"]
    died, rounds = clock.now, 0
    while len(names(members)) == 3:
        clock.advance(members.config.ping_s)
        prober.step()
        rounds += 1
    assert names(members) == ["n0:1", "n2:1"]
    assert (rounds, clock.now - died) == (3, 1.5)
    pings.incarnations["n1"] = "2"
    prober.step()
    assert names(members) == ["n0:1", "n1:2", "n2:1"]
    assert pings.asked == {"n1": 5, "n2": 5}  # never itself
    prober.close()


def test_a_ping_that_hangs_is_missed_in_every_round_and_takes_one_thread(clock: FakeClock) -> None:
    members, pings = Members(clock, MembersConfig(ping_timeout_s=0.01)), Pings()
    for n in range(2):
        members.join(Member(f"n{n}", "1"))
    pings.hanging.add("n1")
    prober = Prober("n0", members, pings)
    for _ in range(3):
        assert names(members) == ["n0:1", "n1:1"]
        prober.step()
    assert names(members) == ["n0:1"]
    assert pings.asked == {"n1": 1}
    pings.hangs.set()
    prober.close()


def test_the_prober_runs_until_it_is_closed() -> None:
    clock, rounds = FakeClock(), threading.Semaphore(0)
    members, pings = cluster(clock), Pings()
    go_on = threading.Semaphore(0)

    def pause(seconds: float) -> bool:
        rounds.release()
        go_on.acquire(timeout=20.0)
        return False

    prober = Prober("n0", members, pings, pause, clock).start()
    del pings.incarnations["n2"]
    for _ in range(4):
        assert rounds.acquire(timeout=20.0)
        go_on.release()
    assert rounds.acquire(timeout=20.0)
    assert names(members) == ["n0:1", "n1:1"]
    prober._stopping.set()
    go_on.release()
    prober.close()
