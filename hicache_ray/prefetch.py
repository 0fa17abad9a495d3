"""Stage 3, prefetch: L3 to L2. Takes host memory only for what the lookup has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths, transfer
from hicache_ray.index import from_bits, to_bits
from hicache_ray.keys import is_other, other, page_of, tagged
from hicache_ray.records import Span, slots_array
from hicache_ray.residency import Residency
from hicache_ray.resume import ORDER, Limit, Match, Part, Plan
from hicache_ray.spec import CacheSpec, Tier
from hicache_ray.transfer import Transfer

Flags: TypeAlias = npt.NDArray[np.bool_]
#: Items of each leg of a transfer: (leg, positions in it).
Slice: TypeAlias = tuple[tuple[int, npt.NDArray[np.intp]], ...]


@dataclass
class Arrivals:
    """What of a transfer from L3 has arrived, is published, and turned out not to be there: flags over the items of each leg."""

    moved: Transfer
    arrived: list[Flags] = field(init=False)
    published: list[Flags] = field(init=False)
    missed: list[Flags] = field(init=False)

    def __post_init__(self) -> None:
        self.arrived, self.published, self.missed = ([np.zeros(len(leg.keys), dtype=bool) for leg in self.moved.legs] for _ in range(3))

    def land(self, some: Slice, bits: Sequence[int], known: bool) -> None:
        """A part of it was reported. ``known``: what has not arrived is not there."""
        for (i, at), got in zip(some, bits, strict=True):
            flags = from_bits(got, len(at))
            self.arrived[i][at] = flags
            if known:
                self.missed[i][at] = ~flags

    def spans(self, some: Slice) -> tuple[Span, ...]:
        out = []
        for i, at in some:
            leg = self.moved.legs[i]
            assert leg.target is not None
            out.append(Span(leg.component, slots_array(), leg.target.slots[at], tuple(leg.keys[j] for j in at.tolist()), leg.depth[at]))
        return tuple(out)

    def of(self, match: Match) -> list[Flags]:
        """Which items are a prompt's: another one may have asked for them."""
        out = []
        for leg in self.moved.legs:
            known = match.keys_of(leg.component)
            flags = leg.pages < len(known)
            here = [page_of(key) == known[page] for key, page in zip(leg.keys, leg.pages.tolist(), strict=True) if page < len(known)]
            flags[flags] = here
            out.append(flags)
        return out


def need(parts: Sequence[Part]) -> Mapping[str, int]:
    """Host slots that pages from storage take, per component."""
    return {part.component: len(part.pages) for part in parts}


def tokens(spec: CacheSpec, parts: Sequence[Part]) -> int:
    """How many tokens they stand for."""
    return max((len(p.pages) * spec[p.component].page_span for p in parts), default=0) * spec.page_size


@dataclass(frozen=True)
class Taking:
    """What a component's pages from L3 would take. ``come``: those that L3 alone has and nobody brings yet; ``hold``: host pages that a
    plan may use, and whose slots then cannot be had; both as bits over base pages. ``room``: slots for both together; ``flight``: how many
    may be brought."""

    come: int
    hold: int
    room: int
    flight: int

    def refusal(self, come: int, hold: int) -> Limit:
        """Why so many cannot come beside so many that are held."""
        if come > self.flight:
            return Limit.IN_FLIGHT
        return Limit.HOST_ROOM if come and come + hold > self.room else Limit.NONE


@dataclass(frozen=True)
class Intake:
    """What the host can take of a prompt's pages from L3: of which plans, and at which lengths."""

    match: Match
    taking: Mapping[str, Taking]

    def refusal(self, plan: Plan, drafts: bool = False) -> Limit:
        """Why a plan's pages cannot come from L3; ``drafts``: those of drafts as well, for which no target waits."""
        out = [Limit.NONE]
        for name, takes in self.taking.items():
            if self.match.spec[name].role == "draft" and not drafts:
                continue
            come, hold = (_bits([p for p in plan.of(tier) if p.component == name]) for tier in (Tier.STORAGE, Tier.HOST))
            out.append(takes.refusal((come & takes.come).bit_count(), (hold & takes.hold).bit_count()))
        return Limit.IN_FLIGHT if Limit.IN_FLIGHT in out else Limit.HOST_ROOM if Limit.HOST_ROOM in out else Limit.NONE

    def bounds(self) -> tuple[tuple[Limit, int], ...]:
        """The same of all lengths at once, drafts apart: sets of legal lengths, for :func:`hicache_ray.plan.choose`."""
        legal, page = self.match.lengths(*ORDER), self.match.spec.page_size
        flight = room = legal
        for c in (c for c in self.match.spec.components if c.role != "draft"):
            takes = self.taking[c.name]
            flight &= lengths.fitting(c, takes.come, takes.flight, legal, page)
            room &= lengths.fitting(c, takes.come, 0, legal, page) | lengths.fitting(c, takes.come | takes.hold, takes.room, legal, page)
        return ((Limit.IN_FLIGHT, flight), (Limit.HOST_ROOM, room))


def intake(res: Residency, match: Match, come: Sequence[Part], tokens: int, alone: bool = False) -> Intake:
    """``come``: of what L3 alone has of the prompt, what nobody brings yet; ``tokens``: that may be brought. ``alone``: as if nobody else
    leased anything on the host."""
    taking = {}
    for c in res.spec.components:
        place = (Tier.HOST, c.name)
        hold = match.present[Tier.HOST][c.name] & ~match.present[Tier.DEVICE][c.name]
        room = res.capacity[place] if alone else res.room(place)
        if not alone and hold:
            pages = np.flatnonzero(from_bits(hold, hold.bit_length()))
            idle = res.idle(place, res.index.find(match.path.names(c.name, pages.tolist())))
            hold = _pages(pages[idle].astype(np.int32))
        flight = max(0, tokens // (c.page_span * res.spec.page_size))
        taking[c.name] = Taking(_bits([p for p in come if p.component == c.name]), hold, room - res.reserve(place), flight)
    return Intake(match, taking)


def slices(spec: CacheSpec, moved: Transfer, stops: Sequence[int]) -> list[Slice]:
    """The transfer in parts, so that what makes an earlier length legal arrives first. ``stops``: the lengths on the way, in pages, and
    the last one."""
    left = [np.ones(len(leg.keys), dtype=bool) for leg in moved.legs]
    total = max((len(leg.keys) for leg in moved.legs), default=0)
    size = transfer.piece(total)
    out: list[Slice] = []
    for stop in (*stops, None):
        chosen = []
        for leg, rest in zip(moved.legs, left, strict=True):
            mine = rest.copy()
            if stop is not None:
                wanted = lengths.needed(spec[leg.component], stop, spec.page_size)
                mine &= np.isin(leg.pages, np.asarray(wanted))
            rest &= ~mine
            chosen.append(mine)
        out += _cut(moved, chosen, size)
    return out


def _cut(moved: Transfer, chosen: Sequence[Flags], size: int) -> list[Slice]:
    """Some items of a transfer in parts of at most ``size`` base pages."""
    pages = np.unique(np.concatenate([leg.pages[flags] for leg, flags in zip(moved.legs, chosen, strict=True)]))
    out = []
    for start in range(0, len(pages), size):
        some = pages[start : start + size]
        items = [(i, np.flatnonzero(chosen[i] & np.isin(leg.pages, some))) for i, leg in enumerate(moved.legs)]
        out.append(tuple((i, at) for i, at in items if len(at)))
    return out


def commit(res: Residency, match: Match, arrivals: Sequence[Arrivals]) -> None:
    """Publish what of the arrivals is worth something, by the one rule. ``match``: what L1 and L2 have now.

    Pages beyond the longest resume that L1, L2 and the arrivals allow together are not kept.
    """
    host = match.found[Tier.HOST]
    for a in arrivals:
        host = with_arrived(host, match, a)
    after = match.with_found(Tier.HOST, host)
    k = after.longest(*ORDER)
    for a in arrivals:
        _publish(res, after, k, a)


def with_arrived(found: Mapping[str, int], match: Match, a: Arrivals) -> dict[str, int]:
    """What a tier has of a path together with the arrivals."""
    out = dict(found)
    for leg, have, ours in zip(a.moved.legs, a.arrived, a.of(match), strict=True):
        for kind in (False, True):
            right = np.array([is_other(name) is kind for name in leg.keys], dtype=bool)
            at = tagged(leg.component, kind)
            out[at] = out.get(at, 0) | _pages(leg.pages[have & ours & right])
    return out


def _publish(res: Residency, after: Match, k: int, a: Arrivals) -> None:
    """``k``: the length, in pages, that they are worth."""
    mine = a.of(after)
    for i, leg in enumerate(a.moved.legs):
        component, length = res.spec[leg.component], k
        if component.role == "draft":
            local = after.present[Tier.DEVICE][component.name] | after.present[Tier.HOST][component.name]
            length = lengths.drafted(component, local, k, res.spec.page_size)
        keep = np.isin(leg.pages, np.asarray(lengths.needed(component, length, res.spec.page_size)))
        now = a.arrived[i] & mine[i] & keep & ~a.published[i]
        transfer.arrive(res, replace(a.moved, legs=(leg,)), [to_bits(now)])
        a.published[i] |= now
        # What could not be read is not there, whatever was believed: once it has been recomputed it is written again.
        told = transfer.fresh(res, a.moved, leg) & mine[i] & (a.arrived[i] | a.missed[i])
        names = [key for key, known in zip(leg.keys, told, strict=True) if known]
        res.set_durable(leg.component, res.index.find(names), a.arrived[i][told])


def note(res: Residency, found: Match) -> None:
    """A lookup has said what L3 holds of a path: objects that it has lost since are written again by the next backup."""
    told = found.found[Tier.STORAGE]
    for c in res.spec.components:
        keys = found.keys_of(c.name)
        for kind in (False, True):
            if tagged(c.name, kind) in told:
                entries = res.index.find([other(k) for k in keys] if kind else keys)
                res.set_durable(c.name, entries, from_bits(told[tagged(c.name, kind)], len(entries)))


def _bits(parts: Sequence[Part]) -> int:
    """The pages of some parts."""
    return reduce(or_, (_pages(part.pages) for part in parts), 0)


def _pages(pages: npt.NDArray[np.int32]) -> int:
    """A bitset over base pages."""
    flags = np.zeros(int(pages[-1]) + 1 if len(pages) else 0, dtype=bool)
    flags[pages] = True
    return to_bits(flags)
