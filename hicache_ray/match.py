"""Stage 1, match: what of a prompt is where. Asks, changes nothing."""

from __future__ import annotations

from hicache_ray import lengths
from hicache_ray.keys import other, tagged
from hicache_ray.policy_order import Entries
from hicache_ray.residency import LOCAL, Residency
from hicache_ray.resume import Match, Path
from hicache_ray.spec import Tier


def match(res: Residency, path: Path, allowed: int, others: bool) -> Match:
    """Look the prompt whose keys are ``path`` up in L1 and L2. ``others``: bytes that are not canonical count as well."""
    count = lengths.longest(allowed)
    known, ahead = path.keys[:count], {name: keys[:count] for name, keys in path.ahead.items()}
    found: dict[Tier, dict[str, int]] = {tier: {} for tier in LOCAL}
    for kind in (False, True) if others else (False,):
        entries = _entries(res, known, kind)
        for c in res.spec.components:
            mine = _entries(res, ahead[c.name], kind) if c.name in ahead else entries
            for tier in LOCAL:
                found[tier][tagged(c.name, kind)] = res.index.present((tier, c.name), mine)
    return Match(res.spec, known, allowed, found, ahead)


def _entries(res: Residency, keys: tuple[bytes, ...], kind: bool) -> Entries:
    return res.index.find([other(k) for k in keys] if kind else keys)
