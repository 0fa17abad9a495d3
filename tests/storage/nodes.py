"""Storage nodes in this process, on a clock that a test moves, whose rounds a test makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hicache_ray.storage import ArenaConfig, ClusterClient, NodeConfig, StorageNode, open_store
from hicache_ray.storage.members import Member
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE

GROUP = 1 << 256  # numbers this far apart are in different groups


def in_groups(count: int, first: int = 0) -> list[int]:
    """Numbers of objects, each in a group of its own."""
    return [number * GROUP + number for number in range(first, first + count)]


def node_config(number: int, pages: int = 64, **options: Any) -> NodeConfig:
    arena = ArenaConfig(f"test-{os.getpid()}-n{number}", pages * PAGE, slab_bytes=PAGE, io_timeout_s=1.0, prefault="off")
    return NodeConfig(**{"node": f"n{number}", "arena": arena, "token": "secret", **options})


class Nodes:
    """Nodes n0, n1, ... that know each other; close it."""

    def __init__(self, clock: FakeClock, configs: Sequence[NodeConfig]) -> None:
        self.clock = clock
        self._closing = ExitStack()
        self.nodes: dict[str, StorageNode] = {}
        try:
            for config in configs:
                self.start(config)
            self.introduce()
            self.settle()
        except BaseException:
            self.close()
            raise

    def start(self, config: NodeConfig) -> StorageNode:
        node = self.nodes[config.node] = self._closing.enter_context(StorageNode(config, self.clock, background=False))
        return node

    def __getitem__(self, number: int) -> StorageNode:
        return self.nodes[f"n{number}"]

    @property
    def members(self) -> list[Member]:
        return [node.address.member for node in self.nodes.values()]

    def introduce(self) -> None:
        """The directory knows of all, and says so."""
        for node in self.nodes.values():
            node.set_members(self.members)

    def open(self, number: int) -> ClusterClient:
        opened = open_store(self[number].address.socket, clock=self.clock)
        self._closing.callback(opened.close)
        return opened

    def lose(self, number: int) -> None:
        """It is gone; nobody has noticed."""
        self.nodes.pop(f"n{number}").close()

    def restart(self, number: int, **changes: Any) -> StorageNode:
        """A new incarnation, which the directory knows."""
        old = self[number]
        old.close()
        self.start(replace(old.config, **changes))
        self.introduce()
        return self[number]

    def probe(self) -> None:
        """Every node makes one round of pings, and the clients will ask for the members anew."""
        for node in self.nodes.values():
            node.plane.prober.step()
        self.clock.advance(1.0)

    def announce(self) -> None:
        """Every node says what it has to say."""
        for node in self.nodes.values():
            node.plane.announcer.step()
            assert node.plane.announcer.idle()

    def settle(self) -> None:
        """Time passes, until nothing is moving."""
        self.clock.advance(max(node.config.members.settle_s for node in self.nodes.values()))

    def check(self) -> None:
        for node in self.nodes.values():
            node.check()

    def close(self) -> None:
        self._closing.close()
