"""What is where of a prompt: in L1 and L2, which the group knows, and in L3, which is asked.

A question is a part of a story (see :mod:`hicache_ray.story`): it yields records like the story that asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from hicache_ray import prefetch
from hicache_ray.cost import Cost
from hicache_ray.keys import tagged
from hicache_ray.match import match
from hicache_ray.records import Lookup, Merged, Record
from hicache_ray.residency import Residency
from hicache_ray.resume import ORDER, Limit, Match
from hicache_ray.settings import LoadPolicy, Settings
from hicache_ray.story import Job, Phase, Wait


class Asking:
    """Over one :class:`Residency`. ``next_id`` numbers records."""

    def __init__(self, res: Residency, settings: Settings, next_id: Callable[[], int]) -> None:
        self.res = res
        self.spec = res.spec
        self.settings = settings
        self._next_id = next_id
        self.clock: Callable[[], float] = float  # stands still at 0.0 until a group gives it its own
        self.cost = Cost(res.spec, settings) if settings.load_or_recompute is LoadPolicy.COST else None

    def match(self, job: Job) -> Match:
        """What is where now, L1 and L2."""
        return match(self.res, job.path, job.allowed, not self.settings.exact)

    def questions(self, found: Match) -> list[tuple[tuple[bytes, ...], tuple[str, ...]]]:
        """What to ask L3 of a prompt: keys, and the components under them, of each the kinds of bytes that count."""
        kinds = (False,) if self.settings.exact else (False, True)
        named: dict[tuple[bytes, ...], list[str]] = {}
        for c in self.spec.components:
            named.setdefault(found.keys_of(c.name), []).extend(tagged(c.name, kind) for kind in kinds)
        return [(keys, tuple(names)) for keys, names in named.items() if keys]

    def stale(self, job: Job) -> bool:
        """Whether what the request is of was dropped after it began: it publishes nothing any more."""
        return self.res.stale(job.space, job.era)

    def _ask(self, job: Job, found: Match, deadline_s: float) -> Generator[Record | Wait, Merged, Match]:
        """What L3 says that it has. An answer from before a drop is none."""
        if self.cost is not None:
            worth_s = self.cost.ask_s(found, len(job.request.tokens))
            if not worth_s:
                job.limit = Limit.COST
                return found
            deadline_s = min(deadline_s, worth_s)
        job.phase = Phase.LOOKUP
        told: dict[str, tuple[int, ...]] = {}
        sure: dict[str, tuple[int, ...]] = {}  # of that what has been said for good: a page that is not in it is not there
        until, trouble = self.clock() + deadline_s, Limit.NONE
        for keys, names in self.questions(found):
            answer = yield from self._answer(job.request.rid, keys, names, until)
            told |= answer.found
            if answer.late or answer.error:
                trouble = Limit.LOOKUP if answer.late else Limit.LOOKUP_FAILED
                break
            sure |= {} if answer.retry else answer.found
        if self.stale(job) or not self.res.storage:  # what was dropped or detached meanwhile gives nothing, whatever it has said
            job.limit = Limit.DROPPED if self.stale(job) else Limit.DETACHED
            return self.match(job)
        local = self.match(job)
        found, job.told = local.with_storage(told), told
        if found.longest(*ORDER) < found.ceiling:
            job.limit = trouble
        prefetch.note(self.res, local.with_storage(sure))
        return found

    def _answer(
        self, rid: str, keys: tuple[bytes, ...], names: tuple[str, ...], until: float
    ) -> Generator[Record | Wait, Merged, Merged]:
        """One question. Where the store could not say all, once more in what is left of the time; should that be too little, or fail, what
        it has said holds as far as it goes."""
        left_s = until - self.clock()
        if left_s <= 0:
            return Merged(late=True)
        answer = yield Lookup(self._next_id(), rid, keys, names, left_s)
        if not answer.retry or answer.late or answer.error:
            return answer
        left_s = until - self.clock()
        again = (yield Lookup(self._next_id(), rid, keys, names, left_s)) if left_s > 0 else Merged(late=True)
        return replace(answer, late=again.late, error=again.error) if again.late or again.error else again
