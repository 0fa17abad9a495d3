"""What a node missed while it was away: clears that the others were told of, and it was not.

A clear reaches the nodes that are alive. One that was down, cut off or frozen still has its bytes when it is back, on its disk say. So it
asks every node that it has not seen for a moment which prefixes were cleared meanwhile, and drops what it has of them, before it tells
anybody what it has. It may also be that only the others took it for dead, as nobody reached it and it reached everybody: so it asks all of
them now and then. What it may lose by that is something that was stored just then; a copy of a page, never a right answer. A node that was
started after the clear does not know of it; so if all others were, what was cleared is there again.
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

_GAP_S = 1.0  # a node that was seen so long ago was not cut off meanwhile: it takes twice that until somebody counts it as dead
_EVERY_S = 5.0  # how often those are asked that were never missed
_APART_S = 1.0  # the last word of a clear reaches two nodes within this time; one that goes on without a node is later, as above
_BATCH = 1024
_KEPT = 256


class MissedClears:
    """For the node whose store is ``store`` and whose part of the directory, which knows the clears that did reach it, is ``index``.

    ``away_s``: for how long, before now, the node had not been there. ``drop_s``: most that it takes to drop what it missed, according to
    one node. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        index: HomeIndex,
        connect: Callable[[Member], Directory],
        clock: Callable[[], float],
        away_s: float,
        drop_s: float,
    ) -> None:
        self._store, self._index, self._connect, self._clock, self._drop_s = store, index, connect, clock, drop_s
        self._since = clock() - away_s
        self._asked: dict[str, float] = {}  # holder -> when it was asked the last question that is dealt with
        self._seen: dict[str, float] = {}  # holder -> when it was alive, and had been asked
        self._done: dict[bytes, float] = {}  # prefix -> when it was caught up with

    def catch_up(self, view: View, here: str, deadline: Deadline) -> None:
        """Ask who was not seen for a moment, or not asked for a while. Who does not answer is asked the next time, for as much more."""
        for member in view.alive:
            if member.node == here:
                continue
            try:
                if self._due(member.holder):
                    self._ask(member, deadline)
                self._seen[member.holder] = self._clock()
            except StoreError:
                continue
        for known in (self._asked, self._seen):
            for holder in known.keys() - view.known:
                del known[holder]

    def _due(self, holder: str) -> bool:
        now, never = self._clock(), float("-inf")
        return now - self._seen.get(holder, never) > _GAP_S or now - self._asked.get(holder, never) > _EVERY_S

    def _ask(self, member: Member, deadline: Deadline) -> None:
        """Raises StoreError."""
        asked, most = self._clock(), deadline.left() / 2  # one that hangs leaves time for the others
        since = self._asked.get(member.holder, self._since)
        told = self._connect(member).forgotten(asked - since + most, most)  # it looks back from when it hears of it
        now = self._clock()  # no clear was later than this says: the answer took time
        self._drop([prefix for prefix, age in told if not self._knows(prefix, now - age)], Deadline.after(self._clock, self._drop_s))
        self._asked[member.holder] = asked

    def _knows(self, prefix: bytes, cleared_at: float) -> bool:
        """Was this node told of it as well, or has it caught up since?

        That everything was forgotten may mean that the node of which it is said had too many clears to name; that says nothing of a prefix.
        """
        if any(prefix.startswith(own) and at >= cleared_at for own, at in self._done.items()):
            return True
        told = self._index.forgotten(self._clock() - cleared_at + _APART_S, 0.0)
        return any(prefix.startswith(own) and (own or not prefix) for own, _ in told)

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
