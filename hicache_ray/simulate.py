"""The simulator: the production core on virtual time. One seed is one history, and every invariant is looked at after every event.

A :class:`World` is one or more cache groups over one L3. What happens is a queue of *occurrences* in the order of virtual time: an arrival
(a request, a prefetch, a cancel, a flush, an eviction), a record that reaches a rank, a record that a rank has done, a report that reaches
the group, a deadline, a fault or its end. Each counts as one event. Time and chance come from the seed alone; nothing depends on the
process. What is checked, and when:

* as it happens: every byte that is read, copied or becomes visible, on every rank; every slot that changes hands; every match and resume
  against the rule's definition; every record, report and end (:mod:`simulate_rank`, :mod:`simulate_watch`, :mod:`simulate_group`);
* after every event: free + held + cached = capacity, pins = leases, in every pool of the group that it touched;
* every 64 events, and whenever the world has come to rest: everything, every cached and stored byte.

A :class:`~hicache_ray.simulate_content.Violation` ends the history; :class:`Failed` is what to say of it.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hicache_ray.ask import tags_of
from hicache_ray.keys import KEY_BYTES, OTHER, space_of
from hicache_ray.simulate_cases import Case, case_of
from hicache_ray.simulate_checks import Asked
from hicache_ray.simulate_content import Contents, Violation, is_of, violation_of
from hicache_ray.simulate_drop import Drops
from hicache_ray.simulate_faults import Faults
from hicache_ray.simulate_group import Member
from hicache_ray.simulate_load import Load
from hicache_ray.simulate_rank import Around
from hicache_ray.simulate_settings import draw
from hicache_ray.simulate_shards import Shards
from hicache_ray.simulate_store import Shelf, Storage
from hicache_ray.spec import Tier
from hicache_ray.story import Report

#: Events between two full checks.
FULL_CHECK = 64
#: Events that a world may take to come to rest once nobody asks any more.
REST = 60_000
#: Seconds between the beats of storage nodes after which all of them know what there is: breakers close, all is said again.
SETTLING = (2.0, 2.0, 700.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)


@dataclass
class Tally:
    """What a history has brought. ``tokens``: of served prompts, by where they came from."""

    events: int = 0
    seconds: float = 0.0
    requests: int = 0
    served: int = 0
    hits: int = 0
    rests: int = 0
    restarts: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("device", "host", "storage", "computed"), 0))
    faults: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)
    history: int = 0

    @property
    def hit_share(self) -> float:
        """Share of served requests that have reused anything."""
        return self.hits / self.served if self.served else 0.0

    @property
    def token_share(self) -> float:
        """Share of prompt tokens that have not been computed."""
        total = sum(self.tokens.values())
        return 1 - self.tokens["computed"] / total if total else 0.0


class Failed(Violation):
    """A violation, with the line that reproduces it."""


class World:
    """One history. ``case``: the name of a case, or one of your own."""

    def __init__(self, seed: int, case: str | Case = "random") -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.case = case if isinstance(case, Case) else case_of(case, rng)
        self.now = 0.0
        self.tally = Tally()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._pushed = 0
        self._resting = False
        spec = self.case.spec()
        self.settings = settings = self.case.core(draw(rng, self.case.settings))
        settings.check(spec)
        self.contents = Contents(spec)
        self.floors: dict[bytes, int] = {}  # of each space: the least generation of what may be stored
        recipe = {"grid": str(settings.grid)}
        self.tags = tags_of(spec, recipe)
        mark = OTHER.decode()
        self._owners = {
            tag: (name.rstrip(mark), OTHER if name.endswith(mark) else b"", rank)
            for name, of in self.tags.items()
            for rank, tag in enumerate(of)
            if rank in spec.owners(spec[name.rstrip(mark)])
        }
        l1, l2 = rng.randint(*self.case.l1), rng.randint(*self.case.l2)
        capacity = {(t, c.name): n for t, n in ((Tier.DEVICE, l1), (Tier.HOST, l2)) for c in spec.components}
        room, nodes = rng.randint(*self.case.l3) * spec.ranks * len(spec.components), self.case.nodes
        self.shelf: Storage = Shelf(nodes, room, self._right)
        if self.case.shards is not None:
            self.shelf = Shards(nodes, room, self._right, lambda: self.now, rng, self.case.shards)
        self.members = [
            Member(
                Around(spec, settings, capacity, self.contents, self.shelf, i % self.case.nodes, self.tags, {}, rng),
                self.case, lambda: self.now, self.later, self._ended,
            )
            for i in range(self.case.replicas)
        ]  # fmt: skip
        self.faults = Faults(rng, self.members, self.shelf, self.later)
        self.drops = Drops(rng, self.members, self.shelf, self.contents, self.floors)
        self.load = Load(rng, self.case, self.contents, self.members, self.drops, self.later)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Something happens after ``seconds``."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + seconds, self._pushed, call))

    # -- what drives the history ----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Tally:
        """Live for ``steps`` events and come to rest; raises :class:`Failed` where an invariant does not hold."""
        try:
            while self.tally.events < steps:
                self._resting = False
                self.shelf.start(self.later)
                self._arrivals()
                if self.case.faults:
                    self._strikes()
                self._pump(min(steps, self.tally.events + self.rng.randint(500, 6000)))
                self._rest()
        except Exception as error:  # whatever it was, the line that lives it again is what helps
            told = f"{violation_of(error)} (event {self.tally.events}, at {self.now:.4f} s)"
            raise Failed(f"{self.reproduction(steps)}\n{told}") from error
        self.tally.seconds = self.now
        self.tally.faults, self.tally.stored = dict(self.faults.happened), dict(self.shelf.counts)
        self.tally.drops = dict(self.drops.counts)
        self.tally.restarts = sum(member.incarnation - 1 for member in self.members)
        return self.tally

    def reproduction(self, steps: int) -> str:
        """The command that lives this history once more."""
        return f"hicache-ray sim --seed {self.seed} --steps {steps} --case {self.case.name}"

    def _arrivals(self) -> None:
        if self._resting:
            return
        self.load.arrive()
        pace = 0.03 / len(self.members) * self.rng.choice([0.2, 1.0, 1.0, 2.0])
        self.later(self.rng.expovariate(1.0 / pace), self._arrivals)

    def _strikes(self) -> None:
        if self._resting:
            return
        self.faults.strike()
        self.later(self.rng.expovariate(2.0 * self.case.faults), self._strikes)

    def _pump(self, until: int) -> None:
        """Events in the order of their time."""
        queue, tally, pop = self._queue, self.tally, heapq.heappop
        while queue and tally.events < until:
            self.now, _, call = pop(queue)
            tally.events += 1
            call()
            if tally.events % FULL_CHECK == 0:
                self.look()

    def _rest(self) -> None:
        """Nobody asks any more and nothing fails any more: everything ends, and everything is as it should be."""
        self._resting = True
        self.faults.mend()
        self.load.let_go()
        start = self.tally.events
        while not all(member.resting for member in self.members):
            if not self._queue or self.tally.events > start + REST:
                names = [sorted(member.group._tales) for member in self.members]
                raise Violation(f"the groups never come to rest: {names} wait for something that nothing under way will bring")
            self._pump(self.tally.events + 1)
        self._look_at_storage()
        for member in self.members:
            member.look_at_rest()
        self._queue.clear()
        for member in self.members:
            member._tick_at = None
        self.tally.rests += 1

    def _ended(self, asked: Asked, report: Report | None) -> None:
        tally = self.tally
        line = f"{self.now:.6f} {asked.rid} {asked.kind} {report and (report.device, report.host, report.storage, report.computed)}"
        tally.history = zlib.crc32(line.encode(), tally.history)
        if asked.kind != "request":
            return
        tally.requests += 1
        if report is None:
            return
        tally.served += 1
        tally.hits += report.computed < asked.count
        for name in ("device", "host", "storage", "computed"):
            tally.tokens[name] += getattr(report, name)

    # -- full checks ------------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Everything in every group."""
        for member in self.members:
            member.look()

    def _look_at_storage(self) -> None:
        """Also whether all of it is found, once every node has had the time to hear of the others and to say again what it has."""
        self.shelf.look(self._right)
        if isinstance(self.shelf, Shards):
            for pause in SETTLING:
                self.now += pause
                self.shelf.beat()
            self.shelf.found_everywhere()

    def _right(self, id: bytes, content: int) -> None:
        name, kind, rank = self._owners[id[KEY_BYTES:]]
        if not is_of(content, self.contents.of_name(name, rank, id[:KEY_BYTES] + kind), self.floors.get(space_of(id), 0)):
            raise Violation(f"rank {rank} writes an object of {name!r} to storage that is not what its id says, or from before a drop")


def simulate(seed: int, steps: int, case: str | Case = "random") -> Tally:
    """Live one history. Raises :class:`Failed`, whose message begins with the line that reproduces it."""
    return World(seed, case).run(steps)
