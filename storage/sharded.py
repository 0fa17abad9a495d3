"""One store of many nodes: bytes where they were written, entries on the home of their prefix group.

Keys of one path share a group, so its entries lie on one home (two, for its first pages): a lookup asks one node or two, and losing one of
ten nodes loses a tenth of the paths, not a page out of each. Bytes and entries are found again apart: a home that is lost loses no bytes,
as the holders announce them to the next home.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hicache_ray.errors import StoreError
from hicache_ray.storage import sharded_lease, sharded_reads, sharded_repair, sharded_whole
from hicache_ray.storage.announcer import announce_visible
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.ids import require_ids, require_keys
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.peers import NodeHandle, Peers, ShardConfig, settle
from hicache_ray.storage.sharded_reads import Asked, by_home
from hicache_ray.storage.sharded_repair import Lacking, Read, Remaking
from hicache_ray.storage.sharded_writes import Writing, drop_from
from hicache_ray.store import Answer, Bytes, Lent, StoreStats


class ShardedStore:
    """A :class:`~hicache_ray.store.Store` over the nodes of ``view()``, for a process on the node ``here``.

    ``connect(member)`` opens a handle to an incarnation of a node, and raises StoreError where it cannot; the store closes the handles that
    it asked for. A process that is on no node of the view is a client without a store of its own: what it writes goes to the homes.
    """

    def __init__(
        self,
        here: str,
        view: Callable[[], View],
        connect: Callable[[Member], NodeHandle],
        config: ShardConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.here, self.config = here, config or ShardConfig()
        self._clock = clock
        self._peers = Peers(view, connect, self.config, clock)
        self._lock = threading.Lock()
        self._late: dict[bytes, None] = {}  # ids of this node that their home has not been told; oldest first
        self._owed: dict[tuple[str, bytes], None] = {}  # (holder, id) that a clear came across and that could not be taken back
        self.late_dropped = 0

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        return sharded_reads.lookup(self._asked(timeout_s), keys, tags)

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        for _, source in zip(ids, sources, strict=True):
            as_array(source)
        asked = self._asked(timeout_s)
        writing = Writing(asked, ids, sources, self.config)
        try:
            return writing.run() if ids else 0
        finally:
            self._say_late(asked)
            self._take_back(asked)
            self._keep_late(writing.late)  # its home failed just now
            for member, owed in writing.owed.items():
                self._owe(member.holder, owed)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        for _, target in zip(ids, targets, strict=True):
            as_array(target, writable=True)
        return sharded_reads.get(self._asked(timeout_s), ids, targets, self._guess())

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:
        require_ids(ids)
        return sharded_lease.lease(self._asked(timeout_s), ids, self._guess())

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        return sharded_whole.drop(self._asked(timeout_s), ids)

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        """Raises StoreError where a node that counts as alive does not answer: the message names it. A dead one has no say: what it holds
        counts for nothing until it is back, and then it drops what it missed the clear of (see :mod:`hicache_ray.storage.missed`)."""
        asked = self._asked(timeout_s)
        return sharded_whole.clear(asked, lambda: self._again(asked), prefix)

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        return iter(sharded_whole.scan(self._asked(timeout_s), prefix))

    def lacking(self, ids: Sequence[bytes], timeout_s: float) -> Lacking:
        """Which of this node's objects nobody else has."""
        return sharded_repair.lacking(self._asked(timeout_s), ids)

    def remake(self, ids: Sequence[bytes], read: Read, timeout_s: float) -> Remaking:
        """Make the other copy of objects of this node: see :mod:`hicache_ray.storage.sharded_repair`."""
        asked = self._asked(timeout_s)
        made = sharded_repair.remake(asked, ids, read, self.config)
        for member, owed in made.owed.items():
            self._owe(member.holder, owed)
        return made

    def take_back(self, holder: Member, ids: Sequence[bytes], timeout_s: float) -> None:
        """Drop copies that should not have been made; where that fails now, by the next call of this or of :meth:`settle_up`."""
        asked = self._asked(timeout_s)
        self._owe(holder.holder, ids)
        self._take_back(asked)
        sharded_repair.withdraw(asked, holder.holder, ids)

    def settle_up(self, timeout_s: float) -> None:
        """Do what earlier calls could not: every put does it; this is for a store that is not written for a while."""
        self._take_back(self._asked(timeout_s))

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        sharded_whole.describe(self._asked(timeout_s), digest, record)

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        return sharded_whole.described(self._asked(timeout_s))

    def stats(self, timeout_s: float) -> StoreStats:
        return sharded_whole.stats(self._asked(timeout_s))

    def let_go(self) -> None:
        """Close the handles to nodes that are gone by now. Every call does it; this is for a store that is not used for a while."""
        self._peers.view()

    def close(self) -> None:
        self._peers.close()

    def damage(self, id: bytes) -> bool:
        """For tests: flip one stored bit of every copy, leaving its checksum. False where there is no such object."""
        return any(sharded_whole.everywhere(self._asked(1.0), lambda node, left: _damage(node, id))[0])

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _asked(self, timeout_s: float) -> Asked:
        return Asked(self.here, self._peers.view(), self._peers, Deadline.after(self._clock, timeout_s))

    def _again(self, asked: Asked) -> Asked:
        return Asked(self.here, self._peers.view(), self._peers, asked.deadline)

    def _guess(self) -> int:
        """How many nodes in the order of a group are worth asking though its home is silent: they may hold copies by placement."""
        return 2 if self.config.replicas == 2 or self.config.placement == "home" else 0

    def _keep_late(self, ids: Sequence[bytes]) -> None:
        with self._lock:
            self._late.update(dict.fromkeys(ids))
            while len(self._late) > self.config.late_ids:
                self._late.pop(next(iter(self._late)))
                self.late_dropped += 1

    def _say_late(self, asked: Asked) -> None:
        """Announce again what a home did not take. One that is still down fails at once, by its breaker."""
        here = asked.view.member(self.here)
        if not self._late or here is None or asked.deadline.passed():
            return
        with self._lock:
            ids, self._late = list(self._late), {}
        sent = []
        for home, positions in by_home(asked.view, ids).items():
            mine = [ids[i] for i in positions]
            if home is None:
                self._keep_late(mine)
            else:
                sent.append((mine, asked.send(home, _say(asked, here, mine))))
        settle([one for _, one in sent], asked.deadline)
        for mine, one in sent:
            try:
                one.result()
            except StoreError:
                self._keep_late(mine)

    def _owe(self, holder: str, ids: Sequence[bytes]) -> None:
        with self._lock:
            self._owed.update(dict.fromkeys((holder, id) for id in ids))
            while len(self._owed) > self.config.late_ids:
                self._owed.pop(next(iter(self._owed)))
                self.late_dropped += 1

    def _take_back(self, asked: Asked) -> None:
        """Drop again what an earlier put could not take back. What is owed to an incarnation that is over is forgotten."""
        if not self._owed or asked.deadline.passed():
            return
        with self._lock:
            owed, self._owed = list(self._owed), {}
        by_holder: dict[str, list[bytes]] = {}
        for holder, id in owed:
            by_holder.setdefault(holder, []).append(id)
        alive = asked.view.holders
        for holder in by_holder.keys() & asked.view.known - alive.keys():
            self._owe(holder, by_holder[holder])
        sent = [asked.send(alive[holder], drop_from(ids)) for holder, ids in by_holder.items() if holder in alive]
        settle(sent, asked.deadline)
        for one in sent:
            try:
                one.result()
            except StoreError:
                self._owe(one.member.holder, by_holder[one.member.holder])


def _say(asked: Asked, here: Member, ids: Sequence[bytes]) -> Callable[[NodeHandle, float], int]:
    return lambda home, left: announce_visible(here.holder, asked.peers.of(here).handle().store, home.directory, ids, left)


def _damage(node: NodeHandle, id: bytes) -> bool:
    damage: Callable[[bytes], bool] | None = getattr(node.store, "damage", None)
    return damage is not None and damage(id)
