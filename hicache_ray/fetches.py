"""Pages on their way from L3 to L2, and who waits for them.

A fetch is several records in a row, of which few are under way at once: what has arrived is known, and may be used, record by record.
Requests that want the same pages share one fetch; it goes on while anybody wants it, and is revoked when the last one has left. It has
one deadline, decided when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from hicache_ray import evict, prefetch, transfer
from hicache_ray.index import from_bits
from hicache_ray.prefetch import Arrivals, Slice
from hicache_ray.records import Merged, Move
from hicache_ray.residency import Residency
from hicache_ray.resume import Limit, Match, Part, Path, Plan
from hicache_ray.spec import Tier
from hicache_ray.story import Job
from hicache_ray.transfer import Leg

#: Records of one fetch that are under way at once: while one is committed the next one moves.
UNDER_WAY = 2

#: What hears of a record's outcome.
Landed = Callable[[Merged], None]


@dataclass(eq=False)
class Fetch:
    """Pages on their way. ``deadline``: on the group's clock. ``tokens``: what they count as. ``cut``: why it did not come to its end."""

    rid: str
    arrivals: Arrivals
    left: deque[Slice]
    deadline: float
    tokens: int
    flying: dict[int, Slice] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    cut: Limit = Limit.NONE

    @property
    def finished(self) -> bool:
        return not self.left and not self.flying


@dataclass
class FetchCounters:
    """What happened since the start. ``shared``: fetches that a further request joined; ``revoked``: given up by all who wanted them."""

    begun: int = 0
    shared: int = 0
    revoked: int = 0
    cut: int = 0


class Fetches:
    """All fetches of a cache group. ``now``: seconds on the group's clock. ``told``: called with a job when all that it has asked
    for is there, or will not come."""

    def __init__(self, res: Residency, next_id: Callable[[], int], now: Callable[[], float], told: Callable[[Job], None]) -> None:
        self.res = res
        self._now = now
        self.counters = FetchCounters()
        self.tokens = 0
        self._next_id = next_id
        self._tell = told
        self._open: list[Fetch] = []
        self._names: dict[tuple[str, bytes], Fetch] = {}
        self._launched: list[tuple[Move, Landed]] = []
        self._revoked: list[int] = []

    # -- what requests do -------------------------------------------------------------------------------------------------------

    def of(self, job: Job) -> list[Fetch]:
        """What a request waits for."""
        return [f for f in self._open if job.request.rid in f.jobs]

    def waiting(self, job: Job) -> bool:
        """Whether something of that may still come."""
        return any(not f.finished for f in self.of(job))

    def unread(self, job: Job) -> bool:
        """Whether something of that was not there, with nothing wrong otherwise."""
        fetches = self.of(job)
        return all(f.cut is Limit.NONE for f in fetches) and any(bool(np.any(flags)) for f in fetches for flags in f.arrivals.missed)

    def with_arrived(self, job: Job, found: Match) -> Match:
        """``found``, where what has arrived for a request counts as L3's: nobody has to ask for that again."""
        told = dict(found.found.get(Tier.STORAGE, {}))
        for fetch in self.of(job):
            told = prefetch.with_arrived(told, found, fetch.arrivals)
        return found.with_found(Tier.STORAGE, told)

    def missing(self, path: Path, parts: Sequence[Part]) -> tuple[Part, ...]:
        """What of these parts nobody is fetching."""
        out = []
        for part in parts:
            names = path.names(part.component, part.pages.tolist())
            alone = np.array([(part.component, name) not in self._names for name in names], dtype=bool)
            if np.any(alone):
                out.append(Part(part.component, part.tier, part.pages[alone]))
        return tuple(out)

    def apart(self, found: Match) -> tuple[Part, ...]:
        """What L3 alone has of a prompt and nobody is fetching."""
        parts = []
        for c in found.spec.components:
            near = found.present[Tier.DEVICE][c.name] | found.present[Tier.HOST][c.name]
            far = found.present.get(Tier.STORAGE, {}).get(c.name, 0) & ~near
            if far:
                parts.append(Part(c.name, Tier.STORAGE, np.flatnonzero(from_bits(far, far.bit_length())).astype(np.int32)))
        return self.missing(found.path, parts) if self._names else tuple(parts)

    def begin(self, job: Job, found: Match, chosen: Plan) -> None:
        """Have the plan's pages brought from L3 (there is room on the host): join the fetches that bring them, begin one for the rest."""
        assert job.deadline is not None
        parts = chosen.of(Tier.STORAGE)
        wanted = [(p.component, name) for p in parts for name in found.path.names(p.component, p.pages.tolist())]
        joined = dict.fromkeys(f for f in map(self._names.get, wanted) if f is not None)
        for fetch in joined:
            self.counters.shared += job.request.rid not in fetch.jobs
            fetch.jobs[job.request.rid] = job
        own = self.missing(found.path, parts)
        if own:
            victims = evict.choose(self.res, Tier.HOST, prefetch.need(own))
            assert victims is not None, "a plan was chosen that does not fit"
            evict.drop(self.res, Tier.HOST, victims)
            moved = transfer.begin(self.res, job.request.rid, Tier.HOST, own, found.path)
            left = deque(prefetch.slices(self.res.spec, moved, (*chosen.milestones, chosen.length)))
            fetch = Fetch(job.request.rid, Arrivals(moved), left, job.deadline, prefetch.tokens(self.res.spec, own))
            fetch.jobs[job.request.rid] = job
            self._open.append(fetch)
            self._names |= {(leg.component, name): fetch for leg in moved.legs for name in leg.keys}
            self.tokens += fetch.tokens
            self.counters.begun += 1
            self._launch(fetch)
        self._told([job])  # it may all be there already

    def commit(self, job: Job, found: Match) -> Limit:
        """Make of use what has arrived for a request, which then waits no longer. ``found``: what is local now. Returns why the rest has
        not come, should anything be missing."""
        fetches = self.of(job)
        prefetch.commit(self.res, found, [f.arrivals for f in fetches])
        for fetch in fetches:
            mine = fetch.arrivals.of(found)
            for leg, have, ours in zip(fetch.arrivals.moved.legs, fetch.arrivals.arrived, mine, strict=True):
                job.storage_pages |= {(leg.component, page) for page in leg.pages[have & ours].tolist()}
        why = [f.cut if f.finished else Limit.DEADLINE for f in fetches if f.cut is not Limit.NONE or not f.finished]
        self.leave(job)
        return next((limit for limit in (Limit.DETACHED, Limit.DEADLINE, Limit.FAILED) if limit in why), Limit.UNREAD)

    def leave(self, job: Job) -> None:
        """A request wants nothing any more of what it waits for."""
        for fetch in self.of(job):
            del fetch.jobs[job.request.rid]
            if not fetch.jobs:
                self._close(fetch)

    # -- what the group does ----------------------------------------------------------------------------------------------------

    def take_launched(self) -> list[tuple[Move, Landed]]:
        """Records to execute, and what to tell of each; they are handed out once."""
        out, self._launched = self._launched, []
        return out

    def take_revoked(self) -> list[int]:
        """Records that nobody wants any more."""
        out, self._revoked = self._revoked, []
        return out

    # -- how they move ----------------------------------------------------------------------------------------------------------

    def _launch(self, fetch: Fetch) -> None:
        while fetch.left and len(fetch.flying) < UNDER_WAY:
            some = fetch.left.popleft()
            left_s = max(0.0, fetch.deadline - self._now())
            record = Move(self._next_id(), fetch.rid, Tier.STORAGE, Tier.HOST, fetch.arrivals.spans(some), left_s)
            fetch.flying[record.id] = some
            self._launched.append((record, partial(self._landed, fetch, record.id)))

    def _landed(self, fetch: Fetch, record_id: int, got: Merged) -> None:
        some = fetch.flying.pop(record_id)
        fetch.arrivals.land(some, got.bits, not got.late and not got.error)
        for i, at in some:
            leg, have = fetch.arrivals.moved.legs[i], fetch.arrivals.arrived[i]
            self.res.counters[(Tier.STORAGE, leg.component)].failures += int(np.count_nonzero(~have[at]))
            self._forget(fetch, leg, at[~have[at]])
        if got.late or got.error:
            late = got.late or self._now() >= fetch.deadline
            fetch.cut = Limit.DETACHED if not self.res.storage else Limit.DEADLINE if late else Limit.FAILED
            self.counters.cut += 1
            for i, at in (part for cut in fetch.left for part in cut):
                self._forget(fetch, fetch.arrivals.moved.legs[i], at)
            fetch.left.clear()
        self._launch(fetch)
        if fetch.finished:
            self._told(list(fetch.jobs.values()))

    def _forget(self, fetch: Fetch, leg: Leg, at: npt.NDArray[np.intp]) -> None:
        """Items of a leg that this fetch will not bring: who wants them asks for them anew."""
        for j in at.tolist():
            if self._names.get((leg.component, leg.keys[j])) is fetch:
                del self._names[(leg.component, leg.keys[j])]

    def _told(self, jobs: Sequence[Job]) -> None:
        """Those of the requests that have everything, as far as it will come, go on."""
        for job in jobs:
            mine = self.of(job)
            if mine and all(f.finished for f in mine):
                self._tell(job)

    def _close(self, fetch: Fetch) -> None:
        if not fetch.finished:
            self.counters.revoked += 1
        self._revoked += fetch.flying
        fetch.left.clear()
        fetch.flying.clear()
        self._open.remove(fetch)
        for leg in fetch.arrivals.moved.legs:
            self._forget(fetch, leg, np.arange(len(leg.keys)))
        self.tokens -= fetch.tokens
        transfer.close(self.res, fetch.arrivals.moved)
