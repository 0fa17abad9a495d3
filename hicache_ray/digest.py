"""Digests of pages and snapshots, to compare caches bit by bit across runs, slots and layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hicache_ray.pool import Pool


def digest_pages(pool: Pool, slots: Iterable[int]) -> tuple[str, ...]:
    """One hex digest (128 bits) per slot, over the page's bytes in the order of the stored object, whatever the pool's layout."""
    rows = [pool.rows(f.name) for f in pool.component.fields]
    out = []
    for slot in slots:
        digest = hashlib.blake2b(digest_size=16)
        for field in rows:
            # [layers, tokens, heads, bytes]: field by field this is the order of a stored object.
            digest.update(field[int(slot)].contiguous().cpu().numpy().data)
        out.append(digest.hexdigest())
    return tuple(out)
