"""What decided over a resume, as the group saw it when it planned: the evidence from which :mod:`hicache_ray.explain` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hicache_ray import lengths
from hicache_ray.index import ABSENT, from_bits
from hicache_ray.keys import other
from hicache_ray.ledger import UNWRITTEN, Eviction, Ledger
from hicache_ray.residency import Residency
from hicache_ray.resume import Match, Plan
from hicache_ray.spec import Kind


@dataclass(frozen=True)
class Missing:
    """A page (snapshot) that the next longer resume needs and no tier has. ``page``: base page that it ends with. ``kind``: why."""

    component: str
    page: int
    name: bytes
    kind: str
    went: Eviction | None = None


@dataclass
class Evidence:
    """``found``: what was where when the resume was planned; ``told``: what L3 said it has for each rank; ``chosen``: the plan;
    ``decision``: numbers behind it where loading was weighed against recomputing. The rest is filled in by :func:`judge`: ``longer``: the
    next longer length that the prompt allows (0: none), ``missing``: the first thing of each component that it lacks.
    """

    found: Match
    chosen: Plan
    told: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    decision: Mapping[str, Any] = field(default_factory=dict)
    judged: bool = False
    when: float = 0.0
    longer: int = 0
    missing: tuple[Missing, ...] = ()


def judge(evidence: Evidence, res: Residency, ledger: Ledger, now: float) -> None:
    """Say what the next longer resume lacks and why, and count what is regretted. Once, when the plan is made."""
    evidence.judged, evidence.when = True, now
    found, k = evidence.found, evidence.chosen.length
    beyond = found.allowed >> (k + 1)
    if not beyond:
        return
    evidence.longer = k + 1 + ((beyond & -beyond).bit_length() - 1)
    anywhere = {c.name: found.anywhere(c.name) for c in found.spec.components}
    missing = []
    for c in found.spec.components:
        if c.role == "draft":
            continue
        keys, page_size = found.keys_of(c.name), found.spec.page_size
        lacks = ~anywhere[c.name] & lengths.ones(len(keys))
        if here := lacks & lengths.needed_bits(c, evidence.longer, page_size):
            first = lengths.shortest(here)
            missing.append(_missing(c.name, first, keys[first], evidence, anywhere, res, ledger))
        wanted = lacks & lengths.needed_bits(c, found.ceiling, page_size)
        for i in np.flatnonzero(from_bits(wanted, len(keys))).tolist():
            # Of a path the deepest pages go first: where one was never there, those beyond it were not either.
            if not ledger.miss(c.name, keys[i], now) and c.kind is Kind.FULL:
                break
    evidence.missing = tuple(missing)


def _missing(
    component: str, page: int, name: bytes, evidence: Evidence, anywhere: Mapping[str, int], res: Residency, ledger: Ledger
) -> Missing:
    went = ledger.last(component, name)
    spec = evidence.found.spec
    if went is not None:
        kind = went.why if went.why in UNWRITTEN else "evicted"
    elif int(res.index.find([other(name)])[0]) != ABSENT and _has_other(component, name, res):
        kind = "not_canonical"
    elif spec[component].is_state and any(anywhere[c.name] >> page & 1 for c in spec.components if not c.is_state):
        kind = "no_snapshot"
    else:
        kind = "never_stored"
    return Missing(component, page, name, kind, went)


def _has_other(component: str, name: bytes, res: Residency) -> bool:
    entries = res.index.find([other(name)])
    return any(int(res.index.slots(place, entries)[0]) != ABSENT for place in res.pools if place[1] == component)
