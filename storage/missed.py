"""What a node missed while it was away: clears and drops that the others were told of, and it was not.

A clear reaches the nodes that are alive, and so does a drop of single ids, which is a clear of prefixes of full length. One that was down,
cut off or frozen still has its bytes when it is back, on its disk say. So it asks every node that it has not seen for a moment what was
cleared meanwhile, and drops what it has of it, before it tells anybody what it has. It may also be that only the others took it for dead,
as nobody reached it and it reached everybody: so it asks all of them now and then. What it may lose by that is something that was stored
just then; a copy of a page, never a right answer. A node that was started after the clear knows of it where its disk says so (see
:mod:`hicache_ray.storage.forgotten`); if all others were, and none has a disk, what was cleared is there again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from hicache_ray.errors import StoreError
from hicache_ray.keys import group_of
from hicache_ray.storage import bits
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.members import Member, View
from hicache_ray.store import Store

_GAP_S = 1.0  # a node that was seen so long ago was not cut off meanwhile: it takes twice that until somebody counts it as dead
_EVERY_S = 5.0  # how often those are asked that were never missed
_APART_S = 1.0  # the last word of a clear reaches two nodes within this time; one that goes on without a node is later, as above
_BATCH = 1024
_KEPT, _KEPT_IDS = 256, 1 << 15  # prefixes, and ids, of which it is known that they were caught up with


class MissedClears:
    """For the node whose store is ``store`` and whose part of the directory, which knows the clears that did reach it, is ``index``.

    ``away_s``: for how long, before now, the node had not been there. ``drop_s``: most that it takes to drop what it missed, according to
    one node. ``gone`` is told of what was dropped and has entries here that say otherwise, perhaps; ``heard``, how many seconds ago it was
    that everybody who is known had been asked. ``catch_up`` may be called from one thread.
    """

    def __init__(
        self,
        store: Store,
        index: HomeIndex,
        connect: Callable[[Member], Directory],
        clock: Callable[[], float],
        away_s: float,
        drop_s: float,
        gone: Callable[[Sequence[bytes]], None] = lambda ids: None,
        heard: Callable[[float], None] = lambda ago_s: None,
    ) -> None:
        self._store, self._index, self._connect, self._clock, self._drop_s = store, index, connect, clock, drop_s
        self._gone, self._heard = gone, heard
        self._since = clock() - away_s
        #: All that somebody who is known had been told by then is dealt with.
        self.heard_at = self._since
        self._asked: dict[str, float] = {}  # node -> when it was asked the last question that is dealt with, whatever its incarnation
        self._seen: dict[str, float] = {}  # holder -> when it was alive, and had been asked
        self._done: dict[bytes, float] = {}  # prefix -> when it was caught up with
        self._done_ids: dict[bytes, float] = {}
        self._lock = threading.Lock()  # of these two

    def catch_up(self, view: View, here: str, deadline: Deadline) -> None:
        """Ask who was not seen for a moment, or not asked for a while. Who does not answer is asked the next time, for as much more."""
        for member in view.alive:
            if member.node == here:
                continue
            try:
                if self._due(member):
                    self._ask(member, view, here, deadline)
                self._seen[member.holder] = self._clock()
            except StoreError:
                continue
        for holder in self._seen.keys() - view.known:
            del self._seen[holder]
        known = {holder.rpartition(":")[0] for holder in view.known}
        for node in self._asked.keys() - known:
            del self._asked[node]
        if known - {here}:  # one that knows nobody may only not know yet
            self.heard_at = min(self._asked.get(node, self._since) for node in known - {here})
            self._heard(self._clock() - self.heard_at)

    def caught(self, ids: Sequence[bytes], seconds: float) -> int:
        """Bitset of the ids of which a drop was caught up with in the last ``seconds``. From any thread."""
        since = self._clock() - seconds
        with self._lock:
            done = tuple(prefix for prefix, at in self._done.items() if at >= since)
            return bits.pack([id.startswith(done) or self._done_ids.get(id, float("-inf")) >= since for id in ids])

    def _due(self, member: Member) -> bool:
        now, never = self._clock(), float("-inf")
        return now - self._seen.get(member.holder, never) > _GAP_S or now - self._asked.get(member.node, never) > _EVERY_S

    def _ask(self, member: Member, view: View, here: str, deadline: Deadline) -> None:
        """Raises StoreError."""
        asked, most = self._clock(), deadline.left() / 2  # one that hangs leaves time for the others
        since = self._asked.get(member.node, self._since)
        told = self._connect(member).forgotten(asked - since + most, most)  # it looks back from when it hears of it
        now = self._clock()  # no clear was later than this says: the answer took time
        at: dict[float, list[bytes]] = defaultdict(list)
        for prefix, age in told:
            at[now - age].append(prefix)
        missed = [prefix for cleared_at, prefixes in at.items() for prefix in self._missed(prefixes, cleared_at)]
        self._drop(missed, lambda ids: self._left(view, here, ids), Deadline.after(self._clock, self._drop_s))
        self._asked[member.node] = asked

    def _missed(self, prefixes: Sequence[bytes], cleared_at: float) -> list[bytes]:
        """Those that this node was not told of as well, and has not caught up with since."""
        known = self._index.knows(prefixes, self._clock() - cleared_at + _APART_S)
        done = tuple(prefix for prefix, at in self._done.items() if at >= cleared_at)
        return [
            prefix
            for i, prefix in enumerate(prefixes)
            if not known >> i & 1 and not prefix.startswith(done) and self._done_ids.get(prefix, float("-inf")) < cleared_at
        ]

    def _left(self, view: View, here: str, ids: Sequence[bytes]) -> None:
        """Other homes have forgotten what this one was not told of."""
        homes = [view.home(group_of(id)) for id in ids]
        self._gone([id for id, home in zip(ids, homes, strict=True) if home is not None and home.node == here])

    def _drop(self, prefixes: Sequence[bytes], left: Callable[[Sequence[bytes]], None], deadline: Deadline) -> None:
        ids = [prefix for prefix in prefixes if len(prefix) == ID_BYTES]
        for start in range(0, len(ids), _BATCH):
            some, began = ids[start : start + _BATCH], self._clock()
            existed = self._store.drop(some, deadline.left())
            self._gone([some[i] for i in bits.each(existed)])
            with self._lock:
                _remember(self._done_ids, some, began, _KEPT_IDS)
        for prefix in prefixes:
            if len(prefix) == ID_BYTES:
                continue
            began = self._clock()
            mine = list(self._store.scan(prefix, deadline.left()))
            for start in range(0, len(mine), _BATCH):
                self._store.drop(mine[start : start + _BATCH], deadline.left())
                left(mine[start : start + _BATCH])
            with self._lock:
                _remember(self._done, [prefix], began, _KEPT)


def _remember(done: dict[bytes, float], prefixes: Sequence[bytes], at: float, most: int) -> None:
    for prefix in prefixes:
        done.pop(prefix, None)
        done[prefix] = at
    while len(done) > most:
        del done[next(iter(done))]
