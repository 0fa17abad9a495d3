"""Who is in the directory, and what a heartbeat makes of what it says. Plain objects, no Ray."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_ray.actors import heartbeat
from hicache_ray.actors.directory import KEEP_S, SETTLE_S, Registry
from hicache_ray.actors.heartbeat import Heartbeat
from hicache_ray.errors import StoreError
from hicache_ray.storage.members import Member
from hicache_ray.storage.node_config import NodeAddress


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Node:
    """Where a heartbeat puts what it learns."""

    address: NodeAddress
    heard: list[list[str]] = field(default_factory=list)

    def set_members(self, members: Sequence[Member]) -> None:
        self.heard.append(sorted(member.holder for member in members))


def address(node: str, incarnation: str = "1") -> NodeAddress:
    return NodeAddress(f"/dev/shm/{node}/arena.sock", incarnation, node, "127.0.0.1:7000", "rack")


def told(registry: Registry, *addresses: NodeAddress) -> dict[str, Any]:
    return [registry.register(one.to_dict()) for one in addresses][-1]


def listed(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["node"], one["incarnation"]) for one in answer["members"]]


def test_the_directory_names_who_has_told_it_of_late() -> None:
    clock = Clock()
    registry = Registry(clock)
    assert listed(told(registry, address("a"), address("b"), address("a"))) == [("a", "1"), ("b", "1")]
    assert registry.members()["members"][0] == address("a").to_dict()
    assert listed(told(registry, address("a", "2"))) == [("a", "2"), ("b", "1")]  # a node has one incarnation
    clock.now += KEEP_S
    assert listed(told(registry, address("b"))) == [("a", "2"), ("b", "1")]
    clock.now += 0.1
    assert listed(registry.members()) == [("b", "1")]
    assert listed(told(registry, address("a", "2"))) == [("a", "2"), ("b", "1")]  # it is welcome back


def test_a_directory_that_has_just_begun_takes_nobody_for_gone() -> None:
    clock = Clock()
    first = Registry(clock)
    node = Node(address("a"))
    where = [first]
    heart = Heartbeat(node, lambda mine: where[0].register(mine))
    told(first, address("b"))
    heart.beat()
    assert node.heard[-1] == ["a:1", "b:1"]
    where[0] = Registry(clock)  # it died, and is empty
    heart.beat()
    assert node.heard[-1] == ["a:1", "b:1"]
    told(where[0], address("c"), address("b", "2"))
    heart.beat()
    assert node.heard[-1] == ["a:1", "b:2", "c:1"]
    clock.now += SETTLE_S
    told(where[0], address("c"))
    heart.beat()
    assert node.heard[-1] == ["a:1", "b:2", "c:1"]
    clock.now += KEEP_S
    told(where[0], address("c"))
    heart.beat()
    assert node.heard[-1] == ["a:1", "c:1"]  # now b is gone
    assert heart.stats() == {"beats": 5, "missed": 0}


@pytest.mark.parametrize("error", [StoreError("nobody is there"), RuntimeError("Ray is not itself"), KeyError("members")], ids=repr)
def test_a_directory_that_does_not_answer_changes_nothing(error: Exception) -> None:
    node = Node(address("a"))

    def register(_: Mapping[str, str]) -> Mapping[str, Any]:
        raise error

    heart = Heartbeat(node, register)
    with pytest.raises(type(error)):
        heart.beat()
    assert (node.heard, heart.stats()) == ([], {"beats": 0, "missed": 0})
    heart.start().close()
    assert node.heard == []
    assert heart.stats()["missed"] >= 1


def test_a_beat_that_fails_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    registry, failures = Registry(Clock()), iter([RuntimeError("Ray is not itself"), StoreError("nobody is there")])
    beaten = threading.Event()

    def register(mine: Mapping[str, str]) -> Mapping[str, Any]:
        for error in failures:
            raise error
        beaten.set()
        return registry.register(mine)

    heart = Heartbeat(Node(address("a")), register).start()
    try:
        assert beaten.wait(20.0)
    finally:
        heart.close()
    assert heart.missed == 2
    assert heart.beats >= 1
