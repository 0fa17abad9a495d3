"""How a store of many nodes stores: bytes to one node or two, then word of it to the homes.

**Against a late writer.** ``clear`` makes every home forget (a fence), empties every node's store, and makes every home forget again. A put
reads its homes' epochs before it stores a byte, and announces with them. If any ``clear`` of its ids began in between, the home refuses,
and the put takes back what it stored: when both have returned, nothing of it is left. Bytes that go to another node are taken back as well
where the home cannot say. So the worst that this does is to lose a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.errors import StoreError
from hicache_ray.keys import group_of
from hicache_ray.storage import bits
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.peers import NodeHandle, Sent, ShardConfig, finish, half, settle
from hicache_ray.storage.sharded_reads import Asked, at, by_home
from hicache_ray.store import Bytes


def targets_of(view: View, group: bytes, here: str, config: ShardConfig) -> tuple[Member, ...]:
    """The nodes that get a copy: the writer's, or the home; then, for a second one, the next in the order of the group that is in another
    failure domain, or else the next."""
    order = view.ranked(group)
    first = view.member(here) if config.placement == "writer" else None
    if first is None:
        first = next(iter(order), None)
    if first is None:
        return ()
    rest = [member for member in order if member.node != first.node]
    apart = [member for member in rest if member.label != first.label]
    return (first, *(apart or rest)[: config.replicas - 1])


@dataclass
class Writing:
    """One put. ``stored[member]``: positions that are visible there. ``late``: what this node has and no home knows. ``owed``: what could
    not be taken back."""

    asked: Asked
    ids: Sequence[bytes]
    sources: Sequence[Bytes]
    config: ShardConfig
    stored: dict[Member, int] = field(default_factory=dict)
    errors: list[StoreError] = field(default_factory=list)
    late: list[bytes] = field(default_factory=list)
    owed: dict[Member, list[bytes]] = field(default_factory=dict)

    def run(self) -> int:
        """Bitset of what is visible on at least one node. Raises StoreError where no node took anything and one failed."""
        for _ in self.steps():
            pass
        return self.visible()

    def steps(self) -> Iterator[None]:
        """All of it; what others do at the same time may come in between wherever it yields."""
        homes = by_home(self.asked.view, self.ids)
        since = self._epochs([home for home in homes if home is not None])
        yield
        self._store(self._plan(homes, since))
        yield
        self._announce(homes, since)

    def visible(self) -> int:
        """Of a put that has ended; see :meth:`run`."""
        out = 0
        for held in self.stored.values():
            out |= held
        if not out and self.errors:
            raise self.errors[0]
        return out

    def _epochs(self, homes: Sequence[Member]) -> Mapping[Member, int]:
        """Of the homes that answer, at the start; one that hangs leaves time to store the bytes here."""
        sent = [self.asked.send(home, lambda node, left: node.directory.epoch(left)) for home in homes]
        settle(sent, half(self.asked.deadline))
        out = {}
        for one in sent:
            try:
                out[one.member] = one.result()
            except StoreError as error:
                self.errors.append(error)
        return out

    def _plan(self, homes: Mapping[Member | None, Sequence[int]], since: Mapping[Member, int]) -> Mapping[Member, list[int]]:
        """Target -> positions, ascending. Where the home does not answer, only this node's own store is written."""
        view, here = self.asked.view, self.asked.view.member(self.asked.here)
        groups: dict[bytes, tuple[Member, ...]] = {}
        plan: dict[Member, list[int]] = {}
        for home, positions in homes.items():
            for i in positions:
                group = group_of(self.ids[i])
                if group not in groups:
                    known = targets_of(view, group, self.asked.here, self.config) if home in since else ()
                    groups[group] = known or (() if here is None else (here,))
                for target in groups[group]:
                    plan.setdefault(target, []).append(i)
        return {target: sorted(positions) for target, positions in plan.items()}

    def _store(self, plan: Mapping[Member, list[int]]) -> None:
        """In parallel; this node's part on the caller's thread. Returns when nobody reads the sources any more."""
        sent = [
            (positions, self.asked.send(member, self._part(positions)))
            for member, positions in plan.items()
            if member.node != self.asked.here
        ]
        for member, positions in plan.items():
            if member.node == self.asked.here:
                self._take(member, positions, lambda mine=positions: self._local(mine))  # type: ignore[misc]
        finish([one for _, one in sent], self.asked.deadline)
        for positions, one in sent:
            self._take(one.member, positions, one.result)

    def _local(self, positions: Sequence[int]) -> int:
        handle = self.asked.handle()
        return 0 if handle is None else self._part(positions)(handle, self.asked.deadline.left())

    def _part(self, positions: Sequence[int]) -> Callable[[NodeHandle, float], int]:
        return lambda node, left: node.store.put(at(self.ids, positions), at(self.sources, positions), left)

    def _take(self, member: Member, positions: Sequence[int], result: Callable[[], int]) -> None:
        try:
            self.stored[member] = bits.spread(result(), positions)
        except StoreError as error:
            self.errors.append(error)

    def _announce(self, homes: Mapping[Member | None, Sequence[int]], since: Mapping[Member, int]) -> None:
        """Every target's part to every home; then take back what a home refused, and what lies elsewhere without its home's word."""
        sent: list[tuple[Member, list[int], Sent[int]]] = []
        unsaid: dict[Member, int] = {}
        for home, positions in homes.items():
            for target, held in self.stored.items():
                mine = [i for i in positions if held >> i & 1]
                if mine and home is not None and home in since:
                    call = _announce(target.holder, [self.ids[i] for i in mine], since[home])
                    sent.append((target, mine, self.asked.send(home, call)))
                elif mine:
                    unsaid[target] = unsaid.get(target, 0) | bits.only(len(self.ids), mine)
        settle([one for _, _, one in sent], self.asked.deadline)
        refused = 0  # by one home, for one copy: then a clear came, and the others are gone or too late as well
        for target, mine, one in sent:
            try:
                refused |= bits.only(len(self.ids), mine) & ~bits.spread(one.result(), mine)
            except StoreError:
                unsaid[target] = unsaid.get(target, 0) | bits.only(len(self.ids), mine)
        back = {target: held & refused for target, held in self.stored.items()}
        for target, silent in unsaid.items():
            if target.node == self.asked.here:
                self.late.extend(self.ids[i] for i in bits.each(silent & ~refused))
            else:
                back[target] |= silent
        self._take_back({target: positions for target, positions in back.items() if positions})

    def _take_back(self, back: Mapping[Member, int]) -> None:
        gone = {target: [self.ids[i] for i in bits.each(positions)] for target, positions in back.items()}
        sent = [self.asked.send(target, drop_from(ids)) for target, ids in gone.items()]
        settle(sent, self.asked.deadline)
        for one in sent:
            self.stored[one.member] &= ~back[one.member]
            try:
                one.result()
            except StoreError:
                self.owed[one.member] = gone[one.member]


def _announce(holder: str, ids: Sequence[bytes], since: int) -> Callable[[NodeHandle, float], int]:
    return lambda node, left: node.directory.announce(holder, ids, left, since)


def drop_from(ids: Sequence[bytes]) -> Callable[[NodeHandle, float], int]:
    return lambda node, left: node.store.drop(ids, left)
