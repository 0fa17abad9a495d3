"""A simulator that finds nothing proves nothing: faults are planted in the core, one at a time, and every one must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache_ray import compute, evict, group, keys, lengths, plan, transfer
from hicache_ray.cost import Cost
from hicache_ray.group import Group
from hicache_ray.index import Index
from hicache_ray.lease import Leases
from hicache_ray.records import Outcome
from hicache_ray.residency import Residency
from hicache_ray.settings import LoadPolicy
from hicache_ray.simulate import Failed, simulate
from hicache_ray.simulate_cases import Case, cases
from hicache_ray.simulate_store import Shelf
from hicache_ray.slots import SlotPool
from hicache_ray.storage.announcer import Announcer

#: Events within which a planted fault must be found, over all seeds that are tried.
EVENTS = 24_000
Plant = Callable[[pytest.MonkeyPatch], None]


def publish_before_completion(patch: pytest.MonkeyPatch) -> None:
    """Pages are visible when a transfer begins."""
    begin = transfer.begin

    def too_early(res, holder, target, parts, path):  # type: ignore[no-untyped-def]
        moved = begin(res, holder, target, parts, path)
        transfer.arrive(res, moved, [(1 << len(leg.keys)) - 1 for leg in moved.legs])
        return moved

    patch.setattr(transfer, "begin", too_early)


def release_twice(patch: pytest.MonkeyPatch) -> None:
    """A lease may be given back again, and gives its slots back again."""

    def release(self, lease):  # type: ignore[no-untyped-def]
        self._open.pop(lease.id, None)
        pool = self._pools[lease.place]
        pool.release(lease.slots)
        if all(pool._pins[lease.slots] > 0):
            pool.release(lease.slots)

    patch.setattr(Leases, "release", release)


def forget_a_release(patch: pytest.MonkeyPatch) -> None:
    """What a revoked prefetch or a cancelled request has read stays leased."""
    close = transfer.close

    def half(res, moved):  # type: ignore[no-untyped-def]
        close(res, transfer.Transfer(moved.source, moved.target, moved.legs[:-1]) if len(moved.legs) > 1 else moved)

    patch.setattr(transfer, "close", half)


def minimum_of_lengths(patch: pytest.MonkeyPatch) -> None:
    """The resume is the minimum of what every component allows by itself."""

    def legal(components, present, allowed, page_size):  # type: ignore[no-untyped-def]
        pages = lengths.longest(allowed)
        each = (lengths.lengths_of(c, present.get(c.name, 0), pages, page_size) for c in components if c.role == "target")
        low = min((lengths.longest(allowed & mine) for mine in each), default=0)
        return allowed & lengths.ones(low + 1) | 1

    patch.setattr(lengths, "legal", legal)


def skip_checksums(patch: pytest.MonkeyPatch) -> None:
    """What is read from storage is not verified."""
    init = Shelf.__post_init__

    def careless(self):  # type: ignore[no-untyped-def]
        init(self)
        self.verify = False

    patch.setattr(Shelf, "__post_init__", careless)


def or_over_ranks(patch: pytest.MonkeyPatch) -> None:
    """What one rank has is taken for what all have."""
    merge = group.merge

    def either(record, outcomes):  # type: ignore[no-untyped-def]
        best = max(outcomes, key=lambda o: sum(o.bits))
        return merge(record, [Outcome(best.bits, o.found, o.output, o.logprobs, o.digests, o.error) for o in outcomes])

    patch.setattr(group, "merge", either)


def stale_reports_count(patch: pytest.MonkeyPatch) -> None:
    """Reports of an earlier incarnation are taken for those of this one."""
    report = Group.report

    def anyhow(self, rank, record_id, incarnation, outcome):  # type: ignore[no-untyped-def]
        report(self, rank, record_id, self.incarnation, outcome)

    patch.setattr(Group, "report", anyhow)


def slots_free_at_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """A record's slots are given back when its story goes on without it, although a rank may still write to them."""
    tick = Group.tick

    def hasty(self):  # type: ignore[no-untyped-def]
        tick(self)
        for flight in self._flights.values():
            if flight.tale is None and flight.leases:
                self.cache.res.leases.release_all(flight.leases)
                flight.leases = []

    patch.setattr(Group, "tick", hasty)


def evict_what_is_leased(patch: pytest.MonkeyPatch) -> None:
    """Eviction takes pages that somebody uses, and frees their slots."""

    def withdraw(self, slots):  # type: ignore[no-untyped-def]
        real(self, slots)
        pinned = slots[self._pins[slots] > 0]
        self._pins[pinned] = 0
        self._free.extend(pinned.tolist())

    real = SlotPool.withdraw
    patch.setattr(SlotPool, "withdraw", withdraw)
    patch.setattr(Residency, "idle", lambda self, place, entries: self.index.slots(place, entries) >= 0)


def canonical_by_name_only(patch: pytest.MonkeyPatch) -> None:
    """All that a run has made counts as canonical."""
    made = compute.made

    def all_of_it(*args):  # type: ignore[no-untyped-def]
        return tuple(compute.Made(m.component, m.pages, m.positions, len(m.pages)) for m in made(*args))

    patch.setattr(compute, "made", all_of_it)


def keep_all_that_arrived(patch: pytest.MonkeyPatch) -> None:
    """What did not arrive is published with what did."""
    arrive = transfer.arrive

    def generous(res, moved, bits):  # type: ignore[no-untyped-def]
        arrive(res, moved, [(1 << len(leg.keys)) - 1 for leg in moved.legs])

    patch.setattr(transfer, "arrive", generous)


def one_page_too_few(patch: pytest.MonkeyPatch) -> None:
    """A window needs one page less than it does."""
    needed = lengths.needed

    def fewer(component, k, page_size):  # type: ignore[no-untyped-def]
        pages = needed(component, k, page_size)
        return pages[1:] if len(pages) > 1 and component.kind.value == "window" else pages

    patch.setattr(lengths, "needed", fewer)


def flush_what_is_idle(patch: pytest.MonkeyPatch) -> None:
    """A flush leaves a page behind."""

    def clear(self, tier):  # type: ignore[no-untyped-def]
        for place in self.pools:
            if place[0] is tier:
                self.withdraw(place, self.index.in_place(place)[1:])

    patch.setattr(Residency, "clear", clear)


def a_report_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """A report that arrives twice stands for two ranks."""
    real = Group.report

    def report(self, rank, record_id, incarnation, outcome):  # type: ignore[no-untyped-def]
        flight = self._flights.get(record_id)
        if flight is not None and rank in flight.outcomes and incarnation == self.incarnation:
            rank = next(r for r in flight.ranks if r not in flight.outcomes)
        real(self, rank, record_id, incarnation, outcome)

    patch.setattr(Group, "report", report)


def shorter_than_it_may(patch: pytest.MonkeyPatch) -> None:
    """The second longest resume is taken for the longest."""
    from hicache_ray.resume import Match

    real = Match.longest

    def longest(self, *tiers):  # type: ignore[no-untyped-def]
        k = real(self, *tiers)
        members = list(lengths.members(self.lengths(*tiers)))
        return members[1] if k > 2 and len(members) > 1 else k

    patch.setattr(Match, "longest", longest)


def shorter_plan(patch: pytest.MonkeyPatch) -> None:
    """Of what storage has, less is fetched than there is."""
    choose = plan.choose

    def modest(match, threshold, bounds=()):  # type: ignore[no-untyped-def]
        best = choose(match, threshold, bounds)
        less = choose(match, threshold, [*bounds, (best.limit, lengths.ones(best.length))])
        return replace(less, limit=best.limit)

    patch.setattr(plan, "choose", modest)


def any_rank_will_do(patch: pytest.MonkeyPatch) -> None:
    """What storage has for one rank counts as there for all."""

    def some(per_rank):  # type: ignore[no-untyped-def]
        out = 0
        for bits in per_rank:
            out |= bits
        return out

    patch.setattr(lengths, "on_all", some)


def evict_without_rescue(patch: pytest.MonkeyPatch) -> None:
    """What only the device has is forgotten when it leaves it."""
    patch.setattr(evict, "only_here", lambda res, victims, tried: {})


def a_drop_forgets_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    """What began before a drop becomes visible after it."""
    patch.setattr(Residency, "stale", lambda self, name, era: False)


def a_drop_waits_for_no_writer(patch: pytest.MonkeyPatch) -> None:
    """L3 is cleared while records of the space are on their way to it."""
    patch.setattr(Group, "_storing", lambda self, space=b"": [])

    def write(self, node, ids, contents, whole, timeout_s):  # type: ignore[no-untyped-def]
        yield  # a store that has no fence against late writers
        return (yield from real(self, node, ids, contents, whole, timeout_s))

    real = Shelf.write
    patch.setattr(Shelf, "write", write)


def detached_in_name_only(patch: pytest.MonkeyPatch) -> None:
    """Records go to a store that was taken away."""
    detach = Group.detach

    def stay(self):  # type: ignore[no-untyped-def]
        detach(self)
        self.cache.res.storage = True

    patch.setattr(Group, "detach", stay)


def blind_to_what_is_embedded(patch: pytest.MonkeyPatch) -> None:
    """Prompts of the same tokens are the same, whatever their images."""
    patch.setattr(keys, "_embedded", lambda spans, begin, end: b"")


def homes_are_told_once(patch: pytest.MonkeyPatch) -> None:
    """A home that is new to a group is not told what there is."""
    plan_once = Announcer._plan

    def once(self, view):  # type: ignore[no-untyped-def]
        if self._told is None:
            plan_once(self, view)

    patch.setattr(Announcer, "_plan", once)


def others_pages_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """Ranks that hold their pages in turn are told another place in the prompt."""
    depth = Index.depth
    patch.setattr(Index, "depth", lambda self, entries: depth(self, entries) + 1)


def weighed_without_the_rule(patch: pytest.MonkeyPatch) -> None:
    """Where it is sooner to recompute a little more, nobody asks whether that length is legal."""
    local = Cost.local

    def a_little_less(self, found, count):  # type: ignore[no-untyped-def]
        return max(0, local(self, found, count) - 1)

    patch.setattr(Cost, "local", a_little_less)


def requests_take_all_of_the_host(patch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left for what leaves the device."""
    patch.setattr(Residency, "reserve", lambda self, place: 0)


PLANTS: tuple[Plant, ...] = (
    publish_before_completion, release_twice, forget_a_release, minimum_of_lengths, skip_checksums, or_over_ranks, stale_reports_count,
    slots_free_at_the_deadline, evict_what_is_leased, canonical_by_name_only, keep_all_that_arrived, one_page_too_few, flush_what_is_idle,
    a_report_counts_twice, shorter_than_it_may, shorter_plan, any_rank_will_do, evict_without_rescue,
    a_drop_forgets_what_is_under_way, a_drop_waits_for_no_writer, detached_in_name_only, blind_to_what_is_embedded,
    homes_are_told_once, others_pages_for_its_own, weighed_without_the_rule, requests_take_all_of_the_host,
)  # fmt: skip
#: A world in which much goes wrong.
STORMY = replace(cases()["hybrid"], faults=6.0)
#: One in which little else goes wrong than bytes.
BROKEN = replace(cases()["full"], faults=2.0)
#: Where a fault shows: other cases than this one have nothing that it could break.
CASE: dict[Plant, str | Case] = {
    canonical_by_name_only: "loose",
    minimum_of_lengths: "hybrid",
    one_page_too_few: "window",
    evict_without_rescue: "keeps_back",
    skip_checksums: BROKEN,
    homes_are_told_once: replace(cases()["shards"], faults=3.0),
    stale_reports_count: STORMY,
    others_pages_for_its_own: "in_turn",
    requests_take_all_of_the_host: "keeps_tight",
    weighed_without_the_rule: replace(cases()["state"], settings={"load_or_recompute": LoadPolicy.COST}),
}


# Stories of the broken world are wound up when they are collected, and stumble again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Failed, match="hicache-ray sim --seed") as found:
        live(CASE.get(plant, "hybrid"))
    print(found.value)


def live(case: str | Case) -> None:
    for seed in range(EVENTS // 3000):
        simulate(seed, 3000, case)


def test_without_a_planted_fault_the_same_histories_hold() -> None:
    for case in ("hybrid", *CASE.values()):
        simulate(0, 1000, case)
