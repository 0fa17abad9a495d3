"""Stage 8, evict: who leaves a tier when room is needed. Chooses, and says who must be rescued to a lower tier first."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial

import numpy as np

from hicache_ray.index import ABSENT
from hicache_ray.ledger import ROOM
from hicache_ray.policy_order import Entries, Going
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.spec import Kind, Tier


def choose(res: Residency, tier: Tier, need: Mapping[str, int]) -> Mapping[str, Going] | None:
    """Victims per component so that ``need`` slots are free; None where leased pages leave too little room. Changes nothing."""
    out = {}
    for component, count in need.items():
        place = (tier, component)
        short = count - res.pools[place].free
        if short <= 0:
            continue
        victims = res.policies[place].victims(short, partial(res.idle, place), res.now())
        if len(victims) < short:
            return None
        out[component] = victims
    return out


def entries_of(chosen: Mapping[str, Going] | None) -> Mapping[str, Entries]:
    """The victims of each component, first to go first; none where there are not enough of them."""
    return {component: going.entries for component, going in (chosen or {}).items()}


def only_here(res: Residency, victims: Mapping[str, Entries], tried: Set[tuple[str, bytes]]) -> Mapping[str, Entries]:
    """Device victims that the host does not have: they are copied there first while it has room, so that no tier forgets for another.

    ``tried``: (component, key) of pages for which that was tried already.
    """
    out = {}
    for component, entries in victims.items():
        alone = res.index.slots((Tier.HOST, component), entries) == ABSENT
        alone &= np.array([(component, res.index.key(e)) not in tried for e in entries.tolist()], dtype=bool)
        if np.any(alone):
            out[component] = entries[alone]
    return out


def drop(res: Residency, tier: Tier, chosen: Mapping[str, Going]) -> None:
    """Those whom the policies have chosen just now leave the tier."""
    for component, going in chosen.items():
        res.policies[(tier, component)].learn(going)
    leave(res, tier, entries_of(chosen))


def leave(res: Residency, tier: Tier, leaving: Mapping[str, Entries]) -> None:
    """Pages leave the tier. Windows and snapshots that lose the page under them go next: nobody can resume there any more."""
    for component, entries in leaving.items():
        if not len(entries):
            continue
        res.counters[(tier, component)].evictions += len(entries)
        lost = entries[~res.index.durable((Tier.HOST, component), entries)]
        res.left((tier, component), entries, ROOM)
        res.withdraw((tier, component), entries)
        if res.spec[component].kind is Kind.FULL:
            _demote(res, component, lost)


def _demote(res: Residency, component: str, entries: Entries) -> None:
    alone = np.ones(len(entries), dtype=bool)
    for tier in LOCAL:
        alone &= res.index.slots((tier, component), entries) == ABSENT
    gone = entries[alone]
    for place, policy in res.policies.items():
        if place[1] == component:
            continue
        here = gone[res.index.slots(place, gone) != ABSENT]
        policy.demote(here)
