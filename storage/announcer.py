"""What a holder tells the homes of its own accord: what it evicted, and everything that a new home has not heard yet.

A pure step; the thread around it only calls it. The homes are told in batches, a home that fails is asked again in a later step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.keys import group_of
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory, HomeIndex
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.missed import MissedClears
from hicache_ray.storage.sharded_reads import by_home, visible
from hicache_ray.store import Store

log = logging.getLogger("hicache_ray.storage")
_JOIN_S = 5.0
_AGAIN_S = 2.0  # by then every client has heard of a change, and its puts from before have ended
_PAST = 16


def announce_visible(holder: str, store: Store, home: Directory, ids: Sequence[bytes], timeout_s: float) -> int:
    """Announce those of ``ids`` that the holder's store has now. Returns how many the home entered.

    The epoch is read first: what is seen after a ``clear`` was stored after it, what was seen before it is refused.
    """
    since = home.epoch(timeout_s)
    there = visible(store, ids, timeout_s)
    mine = [id for i, id in enumerate(ids) if there >> i & 1]
    return home.announce(holder, mine, timeout_s, since).bit_count() if mine else 0


@dataclass(frozen=True)
class AnnouncerConfig:
    """``batch``: ids per message. ``withdrawals``: evicted ids that wait at most. ``refresh_s``: how often everything is said again, which
    mends what was lost on the way. ``step_s``: pause between steps of the thread; ``timeout_s``: most that a step takes to tell the homes,
    ``scan_s`` to read what its own store has."""

    batch: int = 1024
    withdrawals: int = 1 << 16
    refresh_s: float = 600.0
    step_s: float = 0.25
    timeout_s: float = 1.0
    scan_s: float = 30.0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.withdrawals < 1 or min(self.refresh_s, self.step_s, self.timeout_s, self.scan_s) <= 0:
            raise ConfigError("the sizes and times of an announcer must be positive")


@dataclass
class AnnouncerStats:
    """Counters since the start. ``dropped``: withdrawals that found the queue full; their entries go when somebody asks in vain."""

    announced: int = 0
    withdrawn: int = 0
    dropped: int = 0
    failures: int = 0


@dataclass
class Announcer:
    """For the node ``here``, whose store is ``store``. ``connect(member)`` gives the directory of a home; it may raise StoreError.
    ``index``: this node's own part of the directory, from which the entries of incarnations that are over are dropped. ``away_s``: how long
    ago the node was last there, with what its store has; where there is an index, what it missed since is caught up with first, and
    ``heard`` is told how long ago it was that this was done.

    ``evicted`` may be called from any thread, ``step`` from one.
    """

    here: Callable[[], Member]
    store: Store
    view: Callable[[], View]
    connect: Callable[[Member], Directory]
    config: AnnouncerConfig = field(default_factory=AnnouncerConfig)
    clock: Callable[[], float] = time.monotonic
    index: HomeIndex | None = None
    away_s: float = 0.0
    heard: Callable[[float], None] = lambda ago_s: None

    def __post_init__(self) -> None:
        if self.index is None:
            self._missed = None
        else:
            self._missed = MissedClears(
                self.store, self.index, self.connect, self.clock, self.away_s, self.config.scan_s, self.evicted, self.heard
            )
        self.stats = AnnouncerStats()
        self._lock = threading.Lock()
        self._evicted: dict[bytes, None] = {}
        self._told: View | None = None  # the view whose homes have been told, or are about to be
        self._past: list[tuple[View, float]] = []  # views that some client may have used a moment longer, and when none does any more
        self._todo: dict[bytes, None] = {}
        self._announcing = False
        self._said_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def evicted(self, ids: Sequence[bytes]) -> None:
        """The store has these no longer. Never waits."""
        with self._lock:
            for id in ids:
                if len(self._evicted) < self.config.withdrawals:
                    self._evicted[id] = None
                else:
                    self.stats.dropped += 1

    def idle(self) -> bool:
        """Is there nothing left to tell, as far as is known?"""
        with self._lock:
            return not self._evicted and self._has_announced()

    def announced(self) -> bool:
        """Do the homes of now know of all that was here when they became so?"""
        with self._lock:
            return self._has_announced()

    def caught(self, ids: Sequence[bytes], seconds: float) -> int:
        """Bitset of the ids of which this node had missed a drop, and caught up with it in the last ``seconds``. From any thread."""
        return 0 if self._missed is None else self._missed.caught(ids, seconds)

    def heard_at(self) -> float:
        """When everybody who is known was asked, of the last time that this was so. From any thread."""
        return self.clock() if self._missed is None else self._missed.heard_at

    def step(self) -> None:
        """Tell the homes what there is to tell, within ``timeout_s``. What failed stays for the next step."""
        view = self.view()
        if self._missed is not None:
            self._missed.catch_up(view, self.here().node, Deadline.after(self.clock, self.config.timeout_s))
        self._plan(view)
        deadline = Deadline.after(self.clock, self.config.timeout_s)
        down: set[str] = set()
        with self._lock:
            evicted, self._evicted = list(self._evicted), {}
        for start in range(0, len(evicted), self.config.batch):
            self._send(view, evicted[start : start + self.config.batch], self._withdraw, self.evicted, down, deadline)
        waiting, self._todo, self._announcing = list(self._todo), {}, True
        for start in range(0, len(waiting), self.config.batch):
            self._send(view, waiting[start : start + self.config.batch], self._announce, self._later, down, deadline)
        self._announcing = False

    def start(self) -> Announcer:
        self._thread = threading.Thread(target=self._run, name="hicache-announcer", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(self.config.step_s):
            try:
                self.step()
            except Exception:  # whatever it was: without this thread nobody would hear of anything again
                self.stats.failures += 1
                log.exception("a step of the announcer failed; the next one goes on")

    def _plan(self, view: View) -> None:
        """Put on the list what has a home that has not heard of it: another node, or another incarnation; all of it now and then. After a
        change twice, as a client that had not noticed it yet has told the home of before."""
        told, now = self._told, self.clock()
        due = now - self._said_at >= self.config.refresh_s
        changed = told is None or told.version != view.version
        old = [past for past, at in self._past if now >= at]
        if not changed and not due and not old:
            return
        try:
            mine = list(self.store.scan(b"", self.config.scan_s))
        except StoreError:
            self.stats.failures += 1
            return  # the next step tries again, as the view is not told
        alone = told is not None and len(told.alive) == 1  # then nobody had to be told, and what was written was not announced
        if told is None or due or alone or told.member(self.here().node) != view.member(self.here().node):
            # Also as a new incarnation: the old one's entries count for nothing.
            self._todo, self._said_at = dict.fromkeys(mine), self.clock()
            if alone:  # and once more when every client has heard that others are there
                self._said_at -= max(self.config.refresh_s - _AGAIN_S, 0.0)
        else:
            old += [told] if changed else []
            groups = {group_of(id) for id in mine}
            moved = {group for group in groups if any(past.home(group) != view.home(group) for past in old)}
            self._later([id for id in mine if group_of(id) in moved])
        self._past = [(past, at) for past, at in self._past if now < at]
        if changed and told is not None:
            self._past = [*self._past, (told, now + _AGAIN_S)][-_PAST:]
        self._told = view
        if self.index is not None:
            for holder in view.over:
                self.index.leave(holder)

    def _has_announced(self) -> bool:
        return not self._todo and not self._announcing and self._told is not None and self._told.version == self.view().version

    def _later(self, ids: Sequence[bytes]) -> None:
        self._todo.update(dict.fromkeys(ids))

    def _send(
        self,
        view: View,
        ids: Sequence[bytes],
        tell: Callable[[Directory, Sequence[bytes], float], None],
        keep: Callable[[Sequence[bytes]], None],
        down: set[str],
        deadline: Deadline,
    ) -> None:
        """``tell`` each home its part of ``ids``; ``keep`` those of a home that is ``down``, or for which there is no time."""
        for home, positions in by_home(view, ids).items():
            part = [ids[i] for i in positions]
            if home is None or home.holder in down:
                keep(part)
                continue
            try:
                tell(self.connect(home), part, deadline.left())
            except StoreError:
                down.add(home.holder)
                self.stats.failures += 1
                keep(part)

    def _announce(self, home: Directory, ids: Sequence[bytes], timeout_s: float) -> None:
        self.stats.announced += announce_visible(self.here().holder, self.store, home, ids, timeout_s)

    def _withdraw(self, home: Directory, ids: Sequence[bytes], timeout_s: float) -> None:
        """Those that are not there, be it on a disk. What has come back since is announced after the withdrawal, so that it is known in the
        end."""
        there = visible(self.store, ids, timeout_s)
        gone = [id for i, id in enumerate(ids) if not there >> i & 1]
        if gone:
            home.withdraw(self.here().holder, gone, timeout_s)
            announce_visible(self.here().holder, self.store, home, gone, timeout_s)
        self.stats.withdrawn += len(gone)
