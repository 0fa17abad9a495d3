"""The one rule once more, token by token from the definition of ``lo(L)``; slow, and written without looking at the bitset forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_ray.spec import Component, Field, Kind

KV = (Field("k", 1, 1), Field("v", 1, 1))


def component(kind: Kind, reach: int = 0, span: int = 1, name: str = "c", role: str = "target") -> Component:
    return Component(name, kind, KV, reach=reach, page_span=span, role=role)


def first_token(c: Component, length: int) -> int:
    """``lo(L)`` as DESIGN section 2 has it."""
    return {
        Kind.FULL: lambda: 0,
        Kind.WINDOW: lambda: max(0, length - c.reach),
        Kind.CHUNKED: lambda: length - length % c.reach,
        Kind.STATE: lambda: length,
    }[c.kind]()


def may_resume(c: Component, present: int, k: int, page: int) -> bool:
    """Whether ``c`` allows a resume at ``k`` pages. ``present``: bit ``i`` is the component's page that ends with base page ``i``."""
    if k == 0:
        return True
    if c.kind is Kind.STATE:
        return bool(present >> (k - 1) & 1)
    wide = page * c.page_span
    if k * page % wide:
        return False  # the page that holds the last token is not whole
    ends_with = {token // wide * c.page_span + c.page_span - 1 for token in range(first_token(c, k * page), k * page)}
    return all(present >> i & 1 for i in ends_with)


def lengths_of(c: Component, present: int, pages: int, page: int) -> set[int]:
    return {k for k in range(pages + 1) if may_resume(c, present, k, page)}


def resume(
    components: Sequence[Component], ranks: Sequence[Mapping[str, int]], tokens: int, page: int, grid: int, limit: int | None
) -> int:
    """The longest resume of a prompt in pages: every candidate from the top, every component on every rank."""
    for k in range(tokens // page, 0, -1):
        length = k * page
        if length > tokens - 1 or (limit is not None and length > limit) or length % grid:
            continue
        if all(may_resume(c, rank[c.name], k, page) for rank in ranks for c in components if c.role == "target"):
            return k
    return 0
