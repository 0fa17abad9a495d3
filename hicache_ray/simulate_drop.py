"""Everything of a namespace is dropped, by one group for itself, or by all of them as the product's service does it.

With several groups over one store each drops its part and holds; when all have done that L3 is cleared, then they are let go. Where a part
fails nothing is promised. Where all is well: when the drop is complete nothing of the space from before is in any tier, and none of it is
ever seen again (:mod:`hicache_ray.simulate_content`, on generations).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hicache_ray.simulate_content import Contents, Violation
from hicache_ray.simulate_group import Member
from hicache_ray.simulate_store import Storage
from hicache_ray.story import Dropped


@dataclass
class Drop:
    """One under way. ``names``: what it is called in each group that has not ended its part; ``told``: groups that have gone through it."""

    space: bytes
    generation: int
    hold: bool
    names: dict[int, str] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    failed: bool = False
    complete: bool = False


class Drops:
    """Over the groups of a world. ``floors``: of each space, the least generation of what L3 may have; groups have such floors as well."""

    def __init__(self, rng: random.Random, members: Sequence[Member], shelf: Storage, contents: Contents, floors: dict[bytes, int]) -> None:
        self.rng = rng
        self.members = members
        self.shelf = shelf
        self.contents = contents
        self.floors = floors
        self.counts = dict.fromkeys(("begun", "complete", "failed"), 0)
        self._open: dict[bytes, Drop] = {}
        for number, member in enumerate(members):
            member.dropped, member.drop_over = partial(self._told, number), partial(self._over, number)

    def begin(self, space: bytes) -> None:
        """Unless one is under way, or a group is not there to do its part."""
        if space in self._open or any(member.down for member in self.members):
            return
        hold = len(self.members) > 1 or self.rng.random() < 0.5
        drop = self._open[space] = Drop(space, self.contents.drop_begins(space), hold)
        self.counts["begun"] += 1
        for number, member in enumerate(self.members):
            member.around.floors[space] = drop.generation
            drop.names[number] = member.drop(space, self.rng.choice([0.05, 5.0, 5.0]), hold)
        for number in list(drop.names):
            self.members[number].after()

    def _of(self, number: int, name: str) -> Drop:
        return next(drop for drop in self._open.values() if drop.names.get(number) == name)

    def _told(self, number: int, event: Dropped) -> None:
        """A group has gone through all it has; without ``hold``, L3 as well."""
        drop = self._of(number, event.rid)
        self.members[number].checks.dropped(drop.space)
        drop.told.add(number)
        if not drop.hold and event.storage is not None:
            self._completed(drop)
        elif drop.hold and len(drop.told) == len(self.members) and not drop.failed:
            member = self.rng.choice(self.members)
            clearing = self.shelf.clear(member.around.node, drop.space, 5.0)
            member.clear(clearing, 0.01, lambda count, error: self._cleared(drop, error))

    def _cleared(self, drop: Drop, error: str) -> None:
        if not error and not drop.failed:
            self._completed(drop)
        for number, name in list(drop.names.items()):
            self.members[number].act(partial(self.members[number].group.lift, name))

    def _completed(self, drop: Drop) -> None:
        drop.complete = True
        self.counts["complete"] += 1
        if not self.shelf.forgets(drop.space):
            return  # nodes that are away keep what they have
        self.floors[drop.space] = drop.generation
        if left := self.shelf.starting(drop.space):
            raise Violation(f"a namespace has been dropped and {left} objects of it are still in storage")
        for member in self.members:
            member.checks.dropped(drop.space)

    def _over(self, number: int, name: str) -> None:
        """A group's part has ended; where the drop has not been completed before, L3's old bytes may be seen again."""
        drop = self._of(number, name)
        del drop.names[number]
        drop.failed |= not drop.complete
        floor = self.floors.get(drop.space, 0)
        self.members[number].around.floors[drop.space] = floor
        if not drop.names:
            self.counts["failed"] += drop.failed
            del self._open[drop.space]
