"""What a request, a prefetch or a flush is held against: the rule's definition, what is where, what storage has said, the bytes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.cache import Cache
from hicache_ray.errors import Busy, Cancelled, CapacityError, EngineError, GroupLost
from hicache_ray.fetches import Fetch
from hicache_ray.keys import OTHER, is_other, page_of, space_of, tagged
from hicache_ray.lease import Place
from hicache_ray.records import Lookup, Outcome
from hicache_ray.resume import Limit, Match
from hicache_ray.settings import Settings
from hicache_ray.simulate_content import Prompt, Violation, is_of, same_page
from hicache_ray.simulate_rank import Around, VirtualRank
from hicache_ray.simulate_rule import There, legal_for, longest
from hicache_ray.simulate_watch import WatchedResidency
from hicache_ray.spec import Shard, Tier
from hicache_ray.story import Ended, Job, Phase, Report


class WatchedCache(Cache):
    """Holds the answers of ``match`` for requests whose turn has come against the twins, and remembers what the plan of a resume knew."""

    def __init__(self, res: WatchedResidency, settings: Settings) -> None:
        super().__init__(res, settings)
        self.twin = res.seen
        self.knew: dict[str, int] = {}
        self._known_at: dict[str, int] = {}
        self.restore.match = self._watched(self.restore.match)  # type: ignore[method-assign, assignment]

    def _watched(self, match: Callable[[Job], Match]) -> Callable[[Job], Match]:
        def watched(job: Job) -> Match:
            out, rid, local = match(job), job.request.rid, (Tier.DEVICE, Tier.HOST)
            # The last one before the load begins counts. Where something was dropped meanwhile, the plan is made anew.
            planned = job.phase in (Phase.LOADING, Phase.RUNNING) and self._known_at.get(rid) == self.res.era
            if rid == self.engine_owner and not planned:
                self._known_at[rid], self.knew[rid] = self.res.era, self.naive(job, *local)
                if out.longest(*local) != self.knew[rid]:
                    raise Violation(f"request {rid} may resume at {self.knew[rid]} pages and is told {out.longest(*local)}")
            return out

        return watched

    def naive(self, job: Job, *tiers: Tier, more: Container[tuple[str, bytes]] = ()) -> int:
        """The longest legal resume from these tiers, in pages, without bitsets. ``more``: (component, name) that are there as well."""
        request = job.request
        return longest(self.spec, self.settings, len(request.tokens), request.limit, self._there(job, tiers, more))

    def overtaken(self, job: Job) -> bool:
        """Whether a drop came between its load and its first forward, as where the drop itself has let it begin: it ends as usual, from
        slots that it has leased and that have no name any more."""
        return self.res.stale(job.space, job.era) and self._known_at.get(job.request.rid) != self.res.era

    def legal(self, job: Job, k: int) -> bool:
        """Whether the device alone allows a resume at ``k`` pages."""
        there, page = self._there(job, (Tier.DEVICE,), ()), self.spec.page_size
        return all(legal_for(c, k, page, there) for c in self.spec.components if c.role == "target")

    def _there(self, job: Job, tiers: Sequence[Tier], more: Container[tuple[str, bytes]]) -> There:
        visible = self.twin.visible
        keys = {c.name: job.path.ahead.get(c.name, job.path.keys) for c in self.spec.components}
        suffixes = (b"",) if self.settings.exact else (b"", b"~")

        def there(component: str, page: int) -> bool:
            if page >= len(keys[component]):
                return False
            key = keys[component][page]
            names = [key + end for end in suffixes]
            return any(n in visible[(tier, component)] for tier in tiers for n in names) or any((component, n) in more for n in names)

        return there


@dataclass(frozen=True)
class InStorage:
    """Which (component, name) storage has whole, on all ranks."""

    around: Around

    def __contains__(self, item: object) -> bool:
        assert isinstance(item, tuple)
        whole, key = self.around.shelf.whole, page_of(item[1])
        return all(whole(key + tag) for tag in self.around.tags[tagged(item[0], is_other(item[1]))])


@dataclass
class Asked:
    """A request, prefetch, flush or drop under way.

    ``told``: (component, name) that storage says it has, on all ranks, as it was told last.
    """

    rid: str
    kind: str
    prompt: Prompt | None
    count: int
    job: Job | None = None
    flushed: Sequence[Tier] = ()
    resumed: int | None = None
    cancelled: bool = False
    told: set[tuple[str, bytes]] = field(default_factory=set)


class Checks:
    """Over one cache group. ``alone``: no other group uses the store. ``keeps``: nothing that was cached once may be forgotten by all
    tiers.
    """

    def __init__(self, around: Around, ranks: Sequence[VirtualRank], keeps: bool, alone: bool) -> None:
        self.around = around
        self.ranks = ranks
        self.keeps = keeps
        self.alone = alone
        self.start()

    def start(self) -> None:
        """A new incarnation: L1 and L2 start empty."""
        self.res = WatchedResidency(self.around.spec, self.around.capacity, self.right)
        self.cache = WatchedCache(self.res, self.around.settings)

    def resume(self, asked: Asked, start: int) -> None:
        """Where a request resumes is legal from the device now, and the largest that its plan knew."""
        assert asked.job is not None
        asked.resumed, page = start // self.around.spec.page_size, self.around.spec.page_size
        limit, knew = asked.job.limit, self.cache.knew[asked.rid]
        if self.keeps:
            had = self.cache.naive(asked.job, more=self.res.seen.ever)
            have = self.cache.naive(asked.job, Tier.DEVICE, Tier.HOST, more=InStorage(self.around))
            if have < had:
                raise Violation(f"request {asked.rid} could once have resumed at {had} pages; now all tiers together allow {have}")
        if start % page or not (self.cache.overtaken(asked.job) or self.cache.legal(asked.job, asked.resumed)):
            legal = self.cache.naive(asked.job, Tier.DEVICE)
            raise Violation(f"request {asked.rid} resumes at {start} tokens and the device allows {legal * page}")
        weighed = self.cache.restore.cost is not None
        if asked.resumed > knew or (asked.resumed != knew and limit is not Limit.LOAD_FAILED and not weighed):
            raise Violation(f"request {asked.rid} resumes at {start} tokens where its plan knew that it may at {knew * page}")

    @staticmethod
    def note(asked: Asked, record: Lookup, outcome: Outcome) -> None:
        """What storage tells a request that still waits for it."""
        mark = OTHER.decode()
        for called, bits in outcome.found.items():
            name, kind = called.rstrip(mark), OTHER if called.endswith(mark) else b""
            said = [(name, key + kind) for key in record.keys]
            asked.told.difference_update(said)  # asked once more, it is the last answer that counts
            asked.told.update(one for i, one in enumerate(said) if all(b >> i & 1 for b in bits))

    def fetch(self, asked: Asked) -> None:
        """What is fetched makes a longer resume legal, and the longest that is known of, or the reason why not is told."""
        job, local = asked.job, (Tier.DEVICE, Tier.HOST)
        if job is None or job.phase is Phase.LOOKUP or asked.cancelled or not self.res.storage or self.res.stale(job.space, job.era):
            return  # another lookup is under way, it waits for room, or what it was told counts for nothing any more
        fetches = self.cache.restore.fetches.of(job)
        coming = {item for f in fetches for item in _coming(f)}
        best = self.cache.naive(job, *local, more=asked.told)
        planned = self.cache.naive(job, *local, more=coming)
        if planned < best and job.limit in (Limit.NONE, Limit.ABSENT):
            raise Violation(f"{asked.rid} could resume at {best} pages with what storage has, plans {planned}, and says: {job.limit.value}")
        if any(np.any(flags) for f in fetches for flags in f.arrivals.missed):
            return  # what it was told the first time was not there when it was read
        begun = {item for f in fetches if f.rid == asked.rid for item in _coming(f)}
        if not begun <= asked.told:
            raise Violation(f"{asked.rid} reads from storage what that has not said it has")
        # Canonical bytes are fetched although others are near, and what a draft needs; that makes no resume longer.
        better = any(name + OTHER in self.res.seen.visible[(t, c)] for c, name in begun for t in local)
        better |= any(self.around.spec[c].role == "draft" for c, _ in begun)
        if begun and not better and planned <= self.cache.naive(job, *local):
            raise Violation(f"{asked.rid} reads from storage what does not make its resume longer")

    def end(self, asked: Asked, event: Ended) -> None:
        error, report = event.error, event.report
        if error is not None and not isinstance(error, GroupLost):
            fair = isinstance(error, Cancelled) and asked.cancelled
            fair |= isinstance(error, CapacityError) and "everything is in use" in str(error)
            fair |= isinstance(error, EngineError) and any(why in str(error) for why in ("injected", "deadline passed", "was detached"))
            fair |= isinstance(error, Busy) and asked.kind in ("flush", "drop")
            fair |= isinstance(error, Cancelled) and asked.kind == "prefetch"  # revoked by a flush or a drop
            if not fair:
                raise Violation(f"{asked.kind} {asked.rid} ended with {type(error).__name__}: {error}")
        if asked.kind == "flush" and error is None:
            self._flushed(asked)
        if asked.kind == "request" and error is None:
            if report is None or report.device + report.host + report.storage + report.computed != asked.count or report.computed < 1:
                raise Violation(f"request {asked.rid} of {asked.count} tokens reports {report}")
            if report.computed != asked.count - (asked.resumed or 0) * self.around.spec.page_size:
                raise Violation(f"request {asked.rid} resumed at {asked.resumed} pages and reports {report}")
            self._digests(asked, report)

    def _digests(self, asked: Asked, report: Report) -> None:
        assert asked.prompt is not None
        for component, at in report.digests.items():
            c = self.around.spec[component]
            ids = asked.prompt.ahead[c.lookahead] if c.lookahead else asked.prompt.ids
            for page, digests in at.items():
                for rank, digest in enumerate(digests):
                    if not self.around.spec.owns(c, rank, page):
                        if digest:
                            raise Violation(f"request {asked.rid}: rank {rank} digests page {page} of {component!r}, which is not its own")
                    elif not same_page(int(digest), self.around.contents.made(component, rank, ids[page], True)):
                        raise Violation(f"request {asked.rid}: the digest of page {page} of {component!r} on rank {rank} is of other bytes")

    def _flushed(self, asked: Asked) -> None:
        for place, names in self.res.seen.visible.items():
            if place[0] in asked.flushed and names:
                raise Violation(f"the flush {asked.rid} has ended and {len(names)} pages of {place[1]!r} are still in {place[0].value}")
        if self.alone and Tier.STORAGE in asked.flushed and (left := self.around.shelf.starting(b"")):
            raise Violation(f"the flush {asked.rid} has ended and {left} objects are still in storage")

    def dropped(self, space: bytes) -> None:
        """A drop is complete as far as this group goes: nothing of the space is in L1 or L2."""
        for place, names in self.res.seen.visible.items():
            left = sum(name.startswith(space) for name in names)
            if left:
                raise Violation(f"a namespace has been dropped and {left} pages of {place[1]!r} are still in {place[0].value}")

    def right(self, place: Place, names: Sequence[bytes], slots: Sequence[int]) -> None:
        of_name, component, floors = self.around.contents.of_name, place[1], self.around.floors
        for rank in self.ranks:
            pool = rank.pools[place]
            whole = self._holds_all(component, rank.rank)
            for name, slot in zip(names, slots, strict=True):
                if not whole and not self.around.contents.owns(component, rank.rank, name):
                    continue
                named = of_name(component, rank.rank, name)
                if pool[slot] != named or floors:
                    if is_of(pool[slot], named, floors.get(space_of(name), 0)):
                        continue
                    raise Violation(
                        f"rank {rank.rank}: a page of {component!r} is visible in {place[0].value} slot {slot} and its bytes are "
                        f"{self._said(pool[slot])}, not those of its name"
                    )

    def _holds_all(self, component: str, rank: int) -> bool:
        c = self.around.spec[component]
        return c.shard is not Shard.CONTEXT and rank in self.around.spec.owners(c)

    @staticmethod
    def _said(content: int) -> str:
        return "not complete" if content < 0 else "of another page, rank, component or kind, or from before a drop"


def _coming(fetch: Fetch) -> Iterator[tuple[str, bytes]]:
    """(component, name) that a fetch has brought or may still bring, whoever has begun it."""
    a = fetch.arrivals
    for leg, arrived, missed in zip(a.moved.legs, a.arrived, a.missed, strict=True):
        flags = arrived if fetch.finished else arrived | ~missed
        yield from ((leg.component, name) for name, flag in zip(leg.keys, flags.tolist(), strict=True) if flag)
