"""The one rule once more, from its definition, for the simulator to hold against the bitset forms. Slow, and shares no code with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hicache_ray.settings import Settings
from hicache_ray.spec import CacheSpec, Component, Kind

#: (component, base page that its page or snapshot ends with) -> whether it is there.
There = Callable[[str, int], bool]


def pages(c: Component, k: int, page: int) -> list[int] | None:
    """Base pages that a component's pages end with, as a resume at ``k`` base pages needs them; None where it cuts a page of theirs."""
    length = k * page
    if k == 0:
        return []
    if c.kind is Kind.STATE:
        return [k - 1]
    wide = page * c.page_span
    if length % wide:
        return None
    low = {Kind.FULL: 0, Kind.WINDOW: max(0, length - c.reach), Kind.CHUNKED: length - length % max(c.reach, 1)}[c.kind]
    return [(token // wide + 1) * c.page_span - 1 for token in range(low // wide * wide, length, wide)]


def candidates(spec: CacheSpec, settings: Settings, tokens: int, limit: int | None) -> Iterator[int]:
    """Lengths in pages that the prompt, its caller and the grid allow, the longest first, without 0."""
    page = spec.page_size
    for k in range(tokens // page, 0, -1):
        length = k * page
        if length > tokens - 1 or (limit is not None and length > limit):
            continue
        if settings.exact and length % settings.grid:
            continue
        if any(length % (page * c.page_span) or length % c.ratio for c in spec.components if not c.is_state):
            continue
        if any(length % c.ratio for c in spec.components):
            continue
        yield k


def longest(spec: CacheSpec, settings: Settings, tokens: int, limit: int | None, there: There) -> int:
    """The longest legal resume in pages."""
    targets = [c for c in spec.components if c.role == "target"]
    for k in candidates(spec, settings, tokens, limit):
        if all(legal_for(c, k, spec.page_size, there) for c in targets):
            return k
    return 0


def legal_for(c: Component, k: int, page: int, there: There) -> bool:
    """Whether one component allows a resume at ``k`` pages."""
    needed = pages(c, k, page)
    return needed is not None and all(there(c.name, i) for i in needed)
