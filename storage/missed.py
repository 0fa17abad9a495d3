"""What a node missed while it was away: clears that the others were told of, and it was not.

A clear reaches the nodes that are alive. One that was down, cut off or frozen still has its bytes when it is back, on its disk say. So it
asks every node that it has not heard for a moment which prefixes were cleared meanwhile, and drops what it has of them, before it tells
anybody what it has. What it may lose by that is something that was stored just then; a copy of a page, never a right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from hicache_ray.errors import StoreError
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.members import Member, View
from hicache_ray.store import Store

Told: TypeAlias = Sequence[tuple[bytes, float]]  # (prefix, seconds since it was cleared)

_GAP_S = 1.0  # a node that was heard so long ago was not cut off meanwhile: it takes twice that until somebody counts it as dead
_APART_S = 5.0  # the same clear reaches two nodes within this time
_BATCH = 1024
_KEPT = 256


class MissedClears:
    """For the node whose store is ``store`` and whose part of the directory, which knows the clears that did reach it, is ``index``.

    ``away_s``: for how long, before now, the node had not been there. Not thread-safe.
    """

    def __init__(
        self, store: Store, index: HomeIndex, connect: Callable[[Member], Directory], clock: Callable[[], float], away_s: float
    ) -> None:
        self._store, self._index, self._connect, self._clock = store, index, connect, clock
        self._since = clock() - away_s
        self._heard: dict[str, float] = {}  # holder -> when it was alive and had nothing more to tell
        self._done: dict[bytes, float] = {}  # prefix -> when it was caught up with

    def catch_up(self, view: View, here: str, deadline: Deadline) -> None:
        """Ask who was not heard for a moment. Who does not answer is asked again the next time, for as much more."""
        for member in view.alive:
            heard = self._heard.get(member.holder)
            if member.node != here and (heard is None or self._clock() - heard > _GAP_S):
                try:
                    now = self._clock()
                    told = self._connect(member).forgotten(now - (self._since if heard is None else heard), deadline.left())
                    self._drop([prefix for prefix, age in told if not self._knows(prefix, now - age)], deadline)
                except StoreError:
                    continue
            self._heard[member.holder] = self._clock()
        self._heard = {holder: at for holder, at in self._heard.items() if holder in view.known}

    def _knows(self, prefix: bytes, cleared_at: float) -> bool:
        """Was this node told of it as well, or has it caught up?"""
        now = self._clock()
        known = [(own, now - age) for own, age in self._index.forgotten(now - cleared_at + _APART_S, 0.0)]
        return any(prefix.startswith(own) and at >= cleared_at - _APART_S for own, at in [*known, *self._done.items()])

    def _drop(self, prefixes: Sequence[bytes], deadline: Deadline) -> None:
        for prefix in prefixes:
            began = self._clock()
            mine = list(self._store.scan(prefix, deadline.left()))
            for start in range(0, len(mine), _BATCH):
                self._store.drop(mine[start : start + _BATCH], deadline.left())
            self._done.pop(prefix, None)
            self._done[prefix] = began
            if len(self._done) > _KEPT:
                del self._done[next(iter(self._done))]
