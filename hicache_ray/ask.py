"""Questions to L3 as a whole, and what a group's objects are called there. Free of torch: coordinators ask, ranks move bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.keys import ANY, CANONICAL, object_record, tag_of, tagged
from hicache_ray.records import Clear, Lookup, Outcome
from hicache_ray.spec import CacheSpec, Component
from hicache_ray.store import Store


def tags_of(spec: CacheSpec, recipe: Mapping[str, str]) -> Mapping[str, tuple[bytes, ...]]:
    """The tag of each component on each rank, for both kinds of bytes: canonical ones by their ``recipe``, others (:func:`tagged`)."""
    return {tagged(c.name, kind is ANY): tuple(tag_of(r) for r in records) for c, kind, records in _records(spec, recipe)}


def _records(spec: CacheSpec, recipe: Mapping[str, str]) -> Iterator[tuple[Component, Mapping[str, str], list[dict[str, str]]]]:
    for component in spec.components:
        for kind in (CANONICAL | dict(recipe), ANY):
            yield component, kind, [object_record(spec, component, rank, kind) for rank in range(spec.ranks)]


def describe(store: Store, spec: CacheSpec, recipe: Mapping[str, str], timeout_s: float) -> None:
    """Leave readable records of this group's objects in the store, so that a miss can name the field that differs."""
    for _, _, records in _records(spec, recipe):
        for record in records:
            store.describe(tag_of(record), record, timeout_s)


def ask(store: Store, tags: Mapping[str, tuple[bytes, ...]], record: Lookup | Clear) -> Outcome:
    """What L3 as a whole answers: which objects of all ranks exist, in one call; or how much was cleared."""
    try:
        if isinstance(record, Clear):
            return Outcome(count=store.clear(record.timeout_s, record.prefix))
        wanted = list(dict.fromkeys(t for c in record.components for t in tags[c]))
        answers = store.lookup(record.keys, wanted, record.timeout_s)
        found = {c: tuple(answers[t].hit for t in tags[c]) for c in record.components}
        return Outcome(found=found, retry=any(answer.retry for answer in answers.values()))
    except StoreError as error:
        return Outcome(error=str(error), late=isinstance(error, StoreTimeout))
