"""What keeps a node's storage in the directory, and the others' addresses with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hicache_ray.storage.members import Member
from hicache_ray.storage.node_config import NodeAddress

log = logging.getLogger("hicache_ray.actors")

BEAT_S = 1.0
#: Longest wait for one answer of the directory.
CALL_S = 2.0
JOIN_S = 5.0


class Node(Protocol):
    """What it needs of a :class:`~hicache_ray.storage.runtime.StorageNode`."""

    @property
    def address(self) -> NodeAddress: ...

    def set_members(self, members: Sequence[Member]) -> None: ...


class Heartbeat:
    """``register(address)`` tells the directory that a node lives and returns whom it knows; it raises a :class:`HiCacheError` where there
    is no answer in time. Whoever is not there then is no less a member than before."""

    def __init__(self, node: Node, register: Callable[[Mapping[str, str]], Mapping[str, Any]]) -> None:
        self._node, self._register = node, register
        self._known: dict[str, Member] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-heartbeat", daemon=True)
        self.beats = 0
        self.missed = 0

    def start(self) -> Heartbeat:
        self._thread.start()
        return self

    def beat(self) -> None:
        """Once. Raises :class:`HiCacheError`."""
        told = self._register(self._node.address.to_dict())
        found = {address["node"]: NodeAddress.from_dict(address).member for address in told["members"]}
        # A directory that has just begun does not know everybody yet.
        self._known = found if told["settled"] else self._known | found
        self._node.set_members(list(self._known.values()))
        self.beats += 1

    def stats(self) -> dict[str, int]:
        """Calls that the directory has answered, and those that it has not."""
        return {"beats": self.beats, "missed": self.missed}

    def close(self) -> None:
        """Idempotent. A call under way ends by its own deadline."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        well = True
        while True:
            try:
                self.beat()
                well = True
            except Exception as error:  # whatever it is: a node that beats no more is gone for the others
                self.missed += 1
                if well:
                    log.warning("the storage of this node does not reach its directory and tries on: %s: %s", type(error).__name__, error)
                well = False
            if self._stopping.wait(BEAT_S):
                return
