"""Why a request missed: which field of the namespace or of the objects differs from what L3 holds."""

from __future__ import annotations

from collections.abc import Mapping

from hicache_ray.keys import CANONICAL, Namespace, chain, differing, object_record, tag_of
from hicache_ray.records import Tokens
from hicache_ray.spec import CacheSpec
from hicache_ray.store import KEY_BYTES, Store


def differing_fields(store: Store, namespace: Namespace, tokens: Tokens, spec: CacheSpec, recipe: Mapping[str, str], timeout_s: float = 2.0) -> tuple[str, ...]:  # noqa: E501
    """Fields by which the first page of ``tokens`` in L3 differs from what this group would read; empty where nothing comes near.

    Namespaces and objects are compared by the readable records that writers left beside the digests.
    """
    records = store.described(timeout_s)
    first = tokens[: spec.page_size]
    wanted = [object_record(spec, c, r, CANONICAL | dict(recipe)) for c in spec.components for r in range(spec.ranks)]
    for key in chain(namespace.digest(), spec.page_size, (), first):
        tags = {i[KEY_BYTES:] for i in store.scan(key, timeout_s)}
        for record in wanted:
            if tag_of(record) in tags:
                continue
            near = [r for r in map(records.get, sorted(tags)) if r is not None and r.get("component") == record["component"]]
            if near:
                return min((differing(record, stored) for stored in near), key=len)
    for digest, stored in sorted(records.items()):
        if "page_size" not in stored or digest == namespace.digest():
            continue
        size = int(stored["page_size"])
        for key in chain(digest, size, (), tokens[:size]):
            if next(iter(store.scan(key, timeout_s)), None) is not None:
                return differing(namespace.record(), stored)
    return ()
