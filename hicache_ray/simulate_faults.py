"""What goes wrong in a simulated world, and how it gets well again. Every fault ends by itself; none of them may cost a right byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hicache_ray.simulate_group import Member
from hicache_ray.simulate_store import Later, Link, Storage


class Faults:
    """Over the groups and the store of a world. ``later(seconds, call)`` has something happen afterwards."""

    def __init__(self, rng: random.Random, members: Sequence[Member], shelf: Storage, later: Later) -> None:
        self.rng = rng
        self.members = members
        self.shelf = shelf
        self.later = later
        self.happened: dict[str, int] = {}
        self._kinds: tuple[tuple[float, Callable[[], None]], ...] = (
            (3, self.slow_link), (2, self.cut_link), (2, self.throwing_rank), (2, self.hung_calls), (2, self.torn_writes),
            (2, self.flipped_bits), (2, self.lost_objects), (1, self.crashed_node), (1, self.split_nodes), (3, self.slow_rank),
            (2, self.failing_copies), (2, self.late_reports), (2, self.doubled_reports), (0.6, self.lost_group),
        )  # fmt: skip

    def strike(self) -> None:
        """One fault, by chance."""
        (kind,) = self.rng.choices([call for _, call in self._kinds], [weight for weight, _ in self._kinds])
        self.happened[kind.__name__] = self.happened.get(kind.__name__, 0) + 1
        kind()

    def mend(self) -> None:
        """Nothing is wrong any more, as far as it lasts."""
        self.shelf.mend()
        for member in self.members:
            for link in self._links(member):
                link.slow, link.cut_until, link.throws_until, link.hung, link.torn = 1.0, 0.0, 0.0, 0.0, 0.0
            member.late.clear()
            member.doubled = 0.0
            for rank in member.ranks:
                rank.speed.factor, rank.speed.failing = 1.0, 0.0

    def _member(self) -> Member:
        return self.rng.choice(self.members)

    @staticmethod
    def _links(member: Member) -> list[Link]:
        return [member.link, *(rank.link for rank in member.ranks)]

    def _some_links(self) -> list[Link]:
        links = self._links(self._member())
        return links if self.rng.random() < 0.4 else [self.rng.choice(links)]

    def _while(self, seconds: float) -> float:
        return seconds * (0.2 + 1.8 * self.rng.random())

    def slow_link(self) -> None:
        links, factor = self._some_links(), self.rng.choice([5.0, 50.0, 500.0])
        for link in links:
            link.slow = factor

        def over() -> None:
            for link in links:
                link.slow = 1.0

        self.later(self._while(1.0), over)

    def cut_link(self) -> None:
        for link in self._some_links():
            link.cut_until = self.members[0].clock() + self._while(1.5)

    def throwing_rank(self) -> None:
        link = self.rng.choice(self._links(self._member()))
        link.throws_until = self.members[0].clock() + self._while(1.0)

    def hung_calls(self) -> None:
        self._share("hung", self.rng.choice([0.1, 0.5]))

    def torn_writes(self) -> None:
        self._share("torn", self.rng.choice([0.05, 0.5]))

    def _share(self, what: str, share: float) -> None:
        links = self._some_links()
        for link in links:
            setattr(link, what, share)

        def over() -> None:
            for link in links:
                setattr(link, what, 0.0)

        self.later(self._while(0.6), over)

    def flipped_bits(self) -> None:
        self.shelf.flip(self.rng, self.rng.choice([1, 3, 30]))

    def lost_objects(self) -> None:
        self.shelf.lose(self.rng, self.rng.choice([1, 5, 50]))

    def crashed_node(self) -> None:
        self.shelf.crash(self.rng.randrange(self.shelf.nodes))

    def split_nodes(self) -> None:
        if self.shelf.nodes == 1:
            return
        one, other = self.rng.sample(range(self.shelf.nodes), 2)
        self.shelf.split(one, other, True)
        self.later(self._while(1.0), lambda: self.shelf.split(one, other, False))

    def slow_rank(self) -> None:
        speed = self.rng.choice(self._member().ranks).speed
        speed.factor = self.rng.choice([3.0, 20.0])
        self.later(self._while(1.0), lambda: setattr(speed, "factor", 1.0))

    def failing_copies(self) -> None:
        speed = self.rng.choice(self._member().ranks).speed
        speed.failing = self.rng.choice([0.05, 0.3])
        self.later(self._while(0.6), lambda: setattr(speed, "failing", 0.0))

    def late_reports(self) -> None:
        member = self._member()
        member.late["reports"] = self.rng.choice([0.02, 0.5, 3.0])
        self.later(self._while(0.8), member.late.clear)

    def doubled_reports(self) -> None:
        member = self._member()
        member.doubled = 0.3
        self.later(self._while(0.8), lambda: setattr(member, "doubled", 0.0))

    def lost_group(self) -> None:
        """Often not once only: the next incarnation has just begun, with record ids that the one before has used as well."""
        member = self._member()
        member.restart("injected: the ranks are gone")
        if self.rng.random() < 0.6:
            self.later(self.rng.random() ** 2 * 0.5, lambda: member.restart("injected: the ranks are gone again"))
