"""Who is in the cluster, and who of them is alive: a state machine that is told what was heard and what was missed.

It performs nothing and takes its clock from outside; :class:`~hicache_ray.storage.prober.Prober` drives it. Each client has its own view.
Views need not agree: while they differ, some entries are looked for, or announced, at the wrong home, which is a miss and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hicache_ray.errors import ConfigError, Inconsistent
from hicache_ray.storage.directory import holder_name
from hicache_ray.storage.rendezvous import ranked

_CACHED_GROUPS = 8192
_OVER = 1024
_PAST = 16


@dataclass(frozen=True)
class Member:
    """One node: ``node`` its lasting name, ``incarnation`` of its store, ``address`` for whoever connects, ``label`` its failure domain."""

    node: str
    incarnation: str
    address: str = ""
    label: str = ""

    @property
    def holder(self) -> str:
        """Its name in the directory."""
        return holder_name(self.node, self.incarnation)


@dataclass(frozen=True)
class MembersConfig:
    """A node is dead after ``misses`` pings missed in a row, or two when ``dead_after_s`` have passed since it was last heard.

    Pings go out every ``ping_s`` and wait ``ping_timeout_s``. For ``settle_s`` after a change, a miss at a home that is new to a group may
    only mean that the holders have not told it yet.
    """

    ping_s: float = 0.5
    ping_timeout_s: float = 0.4
    misses: int = 3
    dead_after_s: float = 2.0
    settle_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.ping_s, self.ping_timeout_s, self.dead_after_s) <= 0 or self.misses < 1 or self.settle_s < 0:
            raise ConfigError("the times of members must be positive, and misses at least 1")


@dataclass(frozen=True, eq=False)
class View:
    """Who is alive, at one moment. ``version`` grows with every change. ``before``: what was alive shortly before, now outdated.

    ``known``: holder names of every member, dead ones included. ``over``: of incarnations that will not come back.
    """

    version: int
    alive: tuple[Member, ...]
    before: tuple[tuple[Member, ...], ...] = ()
    known: frozenset[str] = frozenset()
    over: frozenset[str] = frozenset()
    _ranks: dict[bytes, tuple[Member, ...]] = field(default_factory=dict, repr=False)
    _moving: dict[bytes, bool] = field(default_factory=dict, repr=False)

    def member(self, node: str) -> Member | None:
        return next((member for member in self.alive if member.node == node), None)

    @property
    def holders(self) -> dict[str, Member]:
        """The members that are alive, by their name in the directory."""
        return {member.holder: member for member in self.alive}

    def ranked(self, group: bytes) -> tuple[Member, ...]:
        """The home of a group, then who is next."""
        found = self._ranks.get(group)
        if found is None:
            if len(self._ranks) >= _CACHED_GROUPS:
                self._ranks.clear()
            found = self._ranks[group] = _ranked(group, self.alive)
        return found

    def home(self, group: bytes) -> Member | None:
        return next(iter(self.ranked(group)), None)

    def moving(self, group: bytes) -> bool:
        """Was the home another one, or another incarnation, not long ago?"""
        if not self.before:
            return False
        found = self._moving.get(group)
        if found is None:
            if len(self._moving) >= _CACHED_GROUPS:
                self._moving.clear()
            now = self.ranked(group)[:1]
            found = self._moving[group] = any(_ranked(group, alive)[:1] != now for alive in self.before)
        return found


def _ranked(group: bytes, alive: tuple[Member, ...]) -> tuple[Member, ...]:
    by_node = {member.node: member for member in alive}
    return tuple(by_node[node] for node in ranked(group, by_node))


@dataclass
class _State:
    member: Member
    heard_at: float
    misses: int = 0
    alive: bool = True


class Members:
    """The members as one client sees them. Usable by several threads."""

    def __init__(self, clock: Callable[[], float], config: MembersConfig | None = None) -> None:
        self.config = config or MembersConfig()
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._over: dict[str, None] = {}  # holder names, oldest first
        self._version = 0
        self._last: tuple[Member, ...] = ()  # who is alive since the last change
        self._past: list[tuple[float, tuple[Member, ...]]] = []  # (until when, who was alive)
        self._view = View(0, ())

    def join(self, member: Member) -> None:
        """A member, or a new incarnation of one, is known to be there; alive until it is missed.

        One that is dead is not alive for being named again, and an incarnation that is over stays so.
        """
        if ":" in member.incarnation or not member.node or not member.incarnation:
            raise ConfigError(f"a member needs a node and an incarnation without a colon, not {member.node!r} and {member.incarnation!r}")
        with self._lock:
            state = self._states.get(member.node)
            if member.holder in self._over:
                return
            if state is None:
                self._states[member.node] = _State(member, self._clock())
                self._changed()
            elif member != state.member:
                self._renew(state, member)

    def leave(self, node: str) -> None:
        """It is gone for good."""
        with self._lock:
            state = self._states.pop(node, None)
            if state is not None:
                self._end(state.member)
                self._changed()

    def forget(self, node: str) -> None:
        """Whoever named it does so no longer. It is welcome back, as the same incarnation too."""
        with self._lock:
            if self._states.pop(node, None) is not None:
                self._changed()

    def heard(self, node: str, incarnation: str) -> None:
        """It answered. A new incarnation takes the place of the old one; a late answer of an older one says nothing."""
        with self._lock:
            state = self._states.get(node)
            if state is not None and holder_name(node, incarnation) not in self._over:
                self._renew(state, replace(state.member, incarnation=incarnation))

    def missed(self, node: str) -> None:
        """It did not answer a ping in time."""
        with self._lock:
            state = self._states.get(node)
            if state is None or not state.alive:
                return
            state.misses += 1
            silent = (
                state.misses > 1 and self._clock() - state.heard_at >= self.config.dead_after_s
            )  # one miss may be the asker's own pause
            if state.misses >= self.config.misses or silent:
                state.alive = False
                self._changed()

    def everyone(self) -> tuple[Member, ...]:
        """Dead ones included: they are pinged too, as they may come back."""
        with self._lock:
            return tuple(state.member for state in self._states.values())

    def alive(self) -> View:
        """The view of now. The same object until something changes."""
        with self._lock:
            recent = [past for past in self._past if past[0] > self._clock() - self.config.settle_s]
            if self._view.version != self._version or len(recent) != len(self._past):
                self._past = recent
                known = frozenset(state.member.holder for state in self._states.values())
                self._view = View(self._version, self._last, tuple(alive for _, alive in recent), known, frozenset(self._over))
            return self._view

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            if any(node != state.member.node or state.member.holder in self._over for node, state in self._states.items()):
                raise Inconsistent("a member has another one's name, or an incarnation that is over")
            if any(state.alive and state.misses >= self.config.misses for state in self._states.values()):
                raise Inconsistent("a member that missed too much is alive")

    # -- inside; the lock is held ------------------------------------------------------------------------------------------------

    def _living(self) -> tuple[Member, ...]:
        return tuple(sorted((state.member for state in self._states.values() if state.alive), key=lambda member: member.node))

    def _renew(self, state: _State, member: Member) -> None:
        changed = not state.alive or member != state.member
        if member.incarnation != state.member.incarnation:
            self._end(state.member)
        state.member, state.heard_at, state.misses, state.alive = member, self._clock(), 0, True
        if changed:
            self._changed()

    def _end(self, member: Member) -> None:
        self._over[member.holder] = None
        if len(self._over) > _OVER:
            del self._over[next(iter(self._over))]

    def _changed(self) -> None:
        """Remembers who was alive until now; the first member of a cluster takes nobody's place."""
        self._version += 1
        if self._last:
            self._past = [*self._past, (self._clock(), self._last)][-_PAST:]
        self._last = self._living()
