"""How a store of many nodes makes a second copy again: a put of what this node has, of which only the other node of its replica set takes
its part. The target stores it, or refuses it, as it does any put; the homes hear of it, and refuse it, as they do of any put.

**Against a drop.** A put says what its writer knows; this one says what lay here, which somebody may be dropping. A drop, or a clear, is a
fence on all nodes, then the removal from all, then a fence again. Bytes are read here after the homes' epochs: so where the fence was there
before, they may be read only while it is on its way to this node's store; this node's own part of the directory has the fence by then, and
who asks for the copy looks there afterwards, and takes it back. Else the home refuses the copy, or the removal still comes to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache_ray.errors import StoreError
from hicache_ray.keys import group_of
from hicache_ray.storage import bits
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.peers import NodeHandle, Sent, ShardConfig, settle
from hicache_ray.storage.sharded_reads import Asked, at, by_home
from hicache_ray.storage.sharded_writes import Writing, targets_of
from hicache_ray.store import Bytes

#: The bytes of an object of this node, verified; None where it is not there (or not to be read now). Raises nothing.
Read = Callable[[bytes], "Bytes | None"]


@dataclass(frozen=True)
class Lacking:
    """Bitsets. ``alone``: nobody else who is alive has it, as far as its home knows. ``unsure``: the home did not say."""

    alone: int
    unsure: int


def second_of(view: View, group: bytes, here: str, config: ShardConfig) -> Member | None:
    """Who has the other copy of what is here, as placement has it now."""
    return next((member for member in targets_of(view, group, here, config) if member.node != here), None)


def lacking(asked: Asked, ids: Sequence[bytes]) -> Lacking:
    """Of ids that this node has. A home that has not heard of this node's copy does not know enough: then there is nothing to do."""
    here, living = asked.view.member(asked.here), asked.view.holders
    if here is None:
        return Lacking(0, 0)
    sent: list[tuple[Sequence[int], Sent[Sequence[tuple[str, ...]]]]] = []
    for home, positions in by_home(asked.view, ids).items():
        if home is not None:
            sent.append((positions, asked.send(home, _holders(at(ids, positions)))))
    settle([one for _, one in sent], asked.deadline)
    alone = unsure = 0
    for positions, one in sent:
        try:
            found = one.result()
        except StoreError:
            unsure |= bits.only(len(ids), positions)
            continue
        lonely = [i for i, holders in zip(positions, found, strict=True) if living.keys() & set(holders) == {here.holder}]
        alone |= bits.only(len(ids), lonely)
    return Lacking(alone, unsure)


def _holders(ids: Sequence[bytes]) -> Callable[[NodeHandle, float], Sequence[tuple[str, ...]]]:
    return lambda node, left: node.directory.holders(ids, left)


@dataclass
class Remaking(Writing):
    """``readable``: bitset of the sources that there are."""

    readable: int = 0

    def _plan(self, homes: Mapping[Member | None, Sequence[int]], since: Mapping[Member, int]) -> Mapping[Member, list[int]]:
        plan: dict[Member, list[int]] = {}
        for home, positions in homes.items():
            for i in positions:
                if home not in since or not self.readable >> i & 1:
                    continue
                target = second_of(self.asked.view, group_of(self.ids[i]), self.asked.here, self.config)
                if target is not None:
                    plan.setdefault(target, []).append(i)
        return {target: sorted(positions) for target, positions in plan.items()}


def remake(asked: Asked, ids: Sequence[bytes], read: Read, config: ShardConfig) -> Remaking:
    """``read`` is called once for each id, when the homes' epochs are known. What it made is in what it returns, with what went wrong."""
    sources: list[Bytes] = [b""] * len(ids)
    writing = Remaking(asked, ids, sources, config)
    steps = writing.steps()
    next(steps)
    for i, id in enumerate(ids):
        found = read(id)
        if found is not None:
            sources[i] = found
            writing.readable |= 1 << i
    for _ in steps:
        pass
    return writing


def withdraw(asked: Asked, holder: str, ids: Sequence[bytes]) -> None:
    """A holder has these no longer. A home that fails keeps hints that are wrong, and no more."""

    def tell(mine: Sequence[bytes]) -> Callable[[NodeHandle, float], None]:
        return lambda node, left: node.directory.withdraw(holder, mine, left)

    homes = by_home(asked.view, ids)
    settle([asked.send(home, tell(at(ids, positions))) for home, positions in homes.items() if home is not None], asked.deadline)
