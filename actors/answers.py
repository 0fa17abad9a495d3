"""What a coordinator answers to those who ask how its group stands. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hicache_ray import lengths
from hicache_ray.actors.driver import Driver
from hicache_ray.ask import ask
from hicache_ray.errors import StoreError
from hicache_ray.explain_fields import differing_fields
from hicache_ray.keys import Namespace, page_keys
from hicache_ray.match import match
from hicache_ray.records import Lookup, Tokens
from hicache_ray.resume import ORDER
from hicache_ray.spec import Tier
from hicache_ray.store import Store

#: Longest wait for storage.
ASK_S = 2.0


@dataclass(frozen=True)
class Sought:
    """A prompt, whose it is, and what its objects are called."""

    prompt: Tokens
    namespace: Namespace
    tags: Mapping[str, tuple[bytes, ...]]
    recipe: Mapping[str, str]


async def where(driver: Driver, store: Store | None, sought: Sought) -> dict[str, Any]:
    """What each tier holds of a prompt: pages per component, and the length resumable from that tier alone.

    ``differs``: where L3 cannot give all of it, the fields of namespace or objects by which what it has of the prompt differs from what
    this group reads.
    """
    cache, prompt = driver.cache, sought.prompt
    spec, settings = cache.spec, cache.settings
    path = cache.path(page_keys(sought.namespace, prompt), prompt)
    allowed = lengths.within(len(prompt) + 1, spec.page_size, settings.step(spec))
    found = match(cache.res, path, allowed, not settings.exact)
    differs: tuple[str, ...] = ()
    if store is not None:
        told: dict[str, tuple[int, ...]] = {}
        for keys, names in cache.questions(found):
            answer = await asyncio.to_thread(ask, store, sought.tags, Lookup(0, "where", keys, names, ASK_S))
            told |= answer.found
        found = found.with_storage(told)
        if found.longest(Tier.STORAGE) < found.ceiling:
            try:
                differs = await asyncio.to_thread(differing_fields, store, sought.namespace, prompt, spec, sought.recipe)
            except StoreError:
                differs = ()
    held = {t.value: {name: bits.bit_count() for name, bits in found.present.get(t, {}).items()} for t in ORDER}
    resumable = {t.value: found.longest(t) * spec.page_size for t in ORDER}
    return {"held": held, "resumable": resumable, "pages": len(found.keys), "differs": differs}


def stats(driver: Driver) -> dict[str, Any]:
    """Per tier and component: capacity and use in pages, and counters; tokens by source, also of each tenant; calls to ranks and storage.

    ``requests``: served since the incarnation began; ``active``: under way.
    """
    cache, group = driver.cache, driver.group
    res, spec, fetches = cache.res, cache.spec, cache.restore.fetches
    tiers: dict[str, dict[str, Any]] = {}
    for (tier, name), counters in res.counters.items():
        row = asdict(counters)
        if (tier, name) in res.pools:
            pool = res.pools[(tier, name)]
            row |= {"capacity": pool.capacity, "used": pool.cached, "held": pool.held, "free": pool.free}
            row["used_other"] = res.others((tier, name))
        row["regretted"] = group.ledger.regretted[(tier, name)]
        row["page_bytes"] = spec[name].page_bytes(spec.page_size)
        tiers.setdefault(tier.value, {})[name] = row
    return {
        "incarnation": group.incarnation,
        "requests": cache.requests,
        "active": len(group.active()),
        "tokens": dict(cache.tokens),
        "tenants": {name: dict(row) for name, row in cache.tenants.items()},
        "tiers": tiers,
        "calls": dict(driver.calls),
        "leases": len(res.leases.open()),
        "fetches": {**asdict(fetches.counters), "tokens": fetches.tokens},
        "waits": cache.descent.waits,
        "persisting": cache.descent.persisting,
        "lost": driver.lost,
    }
