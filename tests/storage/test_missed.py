"""Clears that a node missed: whom it asks for them, when, and what it drops then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage import MemoryStore
from hicache_ray.storage.conformance import Clock
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.fences import IDS
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.missed import MissedClears
from hicache_ray.storage.tcp_frames import pack_forgotten, unpack_forgotten
from hicache_ray.storage.wire import Reader, WireError
from hicache_ray.store import SPACE_BYTES
from tests.storage.objects import TAG

S = 1.0
MEMBERS = tuple(Member(name, "1", "", "") for name in ("n0", "n1", "n2"))
VIEW = View(1, MEMBERS, (), frozenset(member.holder for member in MEMBERS))


def space(number: int) -> bytes:
    return number.to_bytes(SPACE_BYTES, "big")


def name(number: int) -> bytes:
    return (space(number) + bytes(40)) + TAG


class Late(HomeIndex):
    """One that takes its time to hear a question, and has none left to answer where it takes too much."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.time, self.takes, self.asked = clock, 0.0, 0

    def forgotten(self, seconds: float, timeout_s: float) -> Sequence[tuple[bytes, float]]:
        self.asked += 1
        self.time.advance(min(self.takes, timeout_s))
        if self.takes > timeout_s:
            raise StoreTimeout("no answer")
        return super().forgotten(seconds, timeout_s)


class Three:
    """``n0`` has a store; it, and the two others, were told of clears."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.store = MemoryStore(1 << 20, 10.0, self.clock)
        self.homes = {member.node: Late(self.clock) for member in MEMBERS}
        self.missed = MissedClears(self.store, self.homes["n0"], self._connect, self.clock, 0.0, 10.0)

    def put(self, *numbers: int) -> None:
        self.store.put([name(n) for n in numbers], [b"page"] * len(numbers), S)

    def cleared(self, node: str, *prefixes: bytes) -> None:
        for prefix in prefixes:
            self.homes[node].forget(prefix, S)

    def step(self) -> set[bytes]:
        """What ``n0`` has afterwards."""
        self.missed.catch_up(VIEW, "n0", Deadline.after(self.clock, S))
        return set(self.store.scan(timeout_s=10.0))

    def _connect(self, member: Member) -> Directory:
        return self.homes[member.node]


@pytest.fixture
def three() -> Three:
    return Three()


def test_who_was_cut_off_without_seeing_it_asks_all_the_same(three: Three) -> None:
    three.put(1, 2)
    three.step()
    three.cleared("n1", space(1))  # nobody reached n0, which reaches everybody
    for _ in range(12):
        three.clock.advance(0.5)
        left = three.step()
    assert left == {name(2)}
    three.put(1)
    for _ in range(24):
        three.clock.advance(0.5)
        left = three.step()
    assert left == {name(1), name(2)}
    assert three.homes["n1"].asked == three.homes["n2"].asked < 6


def test_a_clear_while_a_question_is_on_its_way_is_not_missed(three: Three) -> None:
    three.put(1)
    three.step()
    three.clock.advance(0.1)
    three.cleared("n1", space(1))
    three.clock.advance(10.0)
    three.homes["n1"].takes = 0.4  # it looks back from later than it was asked
    assert three.step() == set()


def test_one_that_hangs_leaves_time_for_the_next(three: Three) -> None:
    three.put(1)
    three.homes["n1"].takes = 100.0
    three.cleared("n2", space(1))
    assert three.step() == set()


def test_what_is_missed_again_is_dropped_again(three: Three) -> None:
    three.put(1)
    three.cleared("n1", space(1))
    assert three.step() == set()
    three.put(1)
    three.clock.advance(2.0)
    three.cleared("n1", space(1))
    three.clock.advance(0.5)
    three.cleared("n2", space(1))
    three.clock.advance(4.0)
    assert three.step() == set()


def test_a_clear_that_was_begun_here_and_ended_without_this_node_was_missed(three: Three) -> None:
    """It had the fence, but its store was not emptied; who asked for it tried again when the node counted as dead."""
    three.put(1)
    three.step()
    three.cleared("n0", space(1))
    three.cleared("n1", space(1))
    three.clock.advance(2.0)
    three.cleared("n1", space(1))
    three.clock.advance(2.0)
    assert three.step() == set()


def test_that_there_were_too_many_clears_to_name_does_not_hide_one(three: Three) -> None:
    three.put(1)
    three.step()
    many = [space(n) for n in range(100, 400)]
    three.cleared("n0", *many)
    three.clock.advance(1.0)
    three.cleared("n1", space(1))
    three.clock.advance(1.5)
    assert three.step() == set()


def test_many_clears_that_reached_all_cost_nobody_anything(three: Three) -> None:
    three.put(1)
    three.step()
    for number in range(100, 400):
        for node in three.homes:
            three.cleared(node, space(number))
    three.clock.advance(6.0)
    assert three.step() == {name(1)}


def test_a_drop_that_takes_long_has_its_own_time(three: Three) -> None:
    three.put(1)
    scan = three.store.scan

    def slow(prefix: bytes = b"", timeout_s: float = 10.0) -> object:
        three.clock.advance(3.0)
        if timeout_s < 3.0:
            raise StoreError("no time for that")
        return scan(prefix, timeout_s)

    three.store.scan = slow  # type: ignore[method-assign, assignment]
    three.cleared("n1", space(1))
    assert three.step() == set()


def test_dropped_ids_are_caught_up_with_once(three: Three) -> None:
    three.put(1, 2, 3, 4)
    three.step()
    for node in ("n1", "n2"):
        three.homes[node].forget_ids([name(1), name(2)], S)
    three.homes["n0"].forget_ids([name(2)], S)  # it was told of this one, and what it has was put again
    three.homes["n1"].forget_ids([name(3)], S)
    three.clock.advance(2.0)
    assert three.step() == {name(2), name(4)}
    three.put(1, 3)
    for _ in range(24):
        three.clock.advance(0.5)
        left = three.step()
    assert left == {name(1), name(2), name(3), name(4)}
    three.homes["n2"].forget_ids([name(1)], S)
    three.clock.advance(6.0)
    assert three.step() == {name(2), name(3), name(4)}


def test_a_clear_that_was_told_covers_a_drop_of_before_and_not_one_of_later(three: Three) -> None:
    three.put(1)
    three.step()
    three.homes["n1"].forget_ids([name(1)], S)
    three.clock.advance(0.5)
    three.cleared("n0", space(1))
    three.clock.advance(5.0)
    assert three.step() == {name(1)}
    three.homes["n1"].forget_ids([name(1)], S)
    three.clock.advance(5.5)
    assert three.step() == set()


def test_a_drop_of_more_than_is_kept_drops_everything_where_it_was_missed(three: Three) -> None:
    three.put(1)
    three.step()
    many = [name(n) for n in range(100, 100 + IDS + 1)]
    for home in three.homes.values():
        home.forget_ids(many, S)
    three.clock.advance(2.0)
    assert three.step() == {name(1)}  # told as well
    three.homes["n2"].forget_ids([name(7)], S)
    three.homes["n2"].forget_ids(many, S)
    three.clock.advance(2.0)
    assert three.step() == set()


def test_what_a_node_says_of_its_clears_must_be_times() -> None:
    said = [(space(1), 2.5), (b"", 0.0)]
    assert unpack_forgotten(Reader(pack_forgotten(said))) == said
    for age in (float("nan"), float("inf"), -1.0):
        with pytest.raises(WireError, match="is not a number of seconds"):
            unpack_forgotten(Reader(pack_forgotten([(space(1), age)])))
