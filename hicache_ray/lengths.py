"""The one rule: the lengths from which a request may resume form a set; every constraint only intersects it; the answer is its largest.

A set of lengths is an int: bit ``k`` says "may resume at ``k`` base pages"; bit 0 is always there. What is available of a component is
an int over base pages: bit ``i`` says "the component's page that *ends* with base page ``i`` is there" (a component whose page spans
``s`` base pages uses every s-th bit), and for a state "a snapshot made at the end of base page ``i`` is there".

AND availability over the ranks first (:func:`on_all`), evaluate every component once, AND the sets, take the largest. The minimum of
per-rank or per-component lengths is wrong as soon as a window or a state is present. No other module computes how long a hit is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

from hicache_ray.settings import StateSnapshots
from hicache_ray.spec import Component, Kind


def ones(count: int) -> int:
    """The lowest ``count`` bits set."""
    return (1 << count) - 1 if count > 0 else 0


def on_all(per_rank: Iterable[int]) -> int:
    """What every rank has. A rank that does not own a page reports it present."""
    out = -1
    for bits in per_rank:
        out &= bits
    return out if out != -1 else 0


def multiples(step: int, last: int) -> int:
    """Bits 0, step, 2*step, ... up to at most ``last``."""
    return ones(step * (last // step + 1)) // ones(step)


def within(tokens: int, page_size: int, step: int, limit: int | None = None) -> int:
    """Lengths that a prompt of ``tokens`` tokens allows at all: at least one token is left to compute (the N-1 cap), the caller's own
    ``limit`` in tokens holds, and lengths are multiples of ``step`` tokens (page, grid, spans and ratios: :meth:`CacheSpec.step`).
    """
    last = max(0, tokens - 1 if limit is None else min(tokens - 1, limit)) // page_size
    return multiples(step // page_size, last)


def longest(lengths: int) -> int:
    """The largest member, in pages."""
    return lengths.bit_length() - 1


def shortest(lengths: int) -> int:
    """The smallest member, in pages; there must be one."""
    return (lengths & -lengths).bit_length() - 1


def members(lengths: int) -> Iterable[int]:
    """The members, largest first."""
    while lengths:
        k = lengths.bit_length() - 1
        yield k
        lengths ^= 1 << k


def lengths_of(component: Component, present: int, pages: int, page_size: int) -> int:
    """The set of lengths up to ``pages`` base pages that ``component`` alone allows, given which of its pages are ``present``."""
    present &= ones(pages)
    if component.kind is Kind.STATE:
        return (present << 1) | 1
    if component.page_span > 1:
        return _spanned(component, present, pages, page_size)
    if component.kind is Kind.FULL:
        return ones(_leading_ones(present) + 1)
    if component.kind is Kind.WINDOW:
        return _window(present, -(-component.reach // page_size), pages)
    return _chunked(component.reach, present, pages, page_size)


def _leading_ones(present: int) -> int:
    """Length of the run of ones that starts at bit 0."""
    return (~present & (present + 1)).bit_length() - 1


def _window(present: int, run: int, pages: int) -> int:
    """Ends of runs of ``run`` ones, with virtual ones before page 0: log2(run) shifts."""
    ends = (present << run) | ones(run)
    have = 1
    while have < run:
        shift = min(have, run - have)
        ends &= ends >> shift
        have += shift
    return (ends & ones(pages + 1)) | 1


def _chunked(reach: int, present: int, pages: int, page_size: int) -> int:
    """At a multiple of the chunk nothing is needed, inside a chunk its pages up to the length."""
    out = 1
    for start in range(0, pages * page_size + 1, reach):
        first = start // page_size
        reachable = min(first + _leading_ones(present >> first), pages)
        low = -(-start // page_size)
        high = min(reachable, (start + reach - 1) // page_size, pages)
        if start % page_size == 0 and low <= pages:
            out |= 1 << low
        if high >= low:
            out |= ones(high + 1) & ~ones(low)
    return out


def _spanned(component: Component, present: int, pages: int, page_size: int) -> int:
    """A component with wide pages: evaluate it on its own pages; its lengths are multiples of its span."""
    span = component.page_span
    own = sum(1 << j for j in range(pages // span) if present >> ((j + 1) * span - 1) & 1)
    narrow = Component(component.name, component.kind, component.fields, component.layers, component.reach)
    lengths = lengths_of(narrow, own, pages // span, page_size * span)
    return sum(1 << (j * span) for j in range(pages // span + 1) if lengths >> j & 1)


def legal(components: Sequence[Component], present: Mapping[str, int], allowed: int, page_size: int) -> int:
    """The set of lengths from which a request may resume: ``allowed`` and what every target component allows.

    ``present``: component name to availability, already intersected over the ranks. Draft components do not limit a target.
    """
    pages = longest(allowed)
    for component in components:
        if component.role == "target":
            allowed &= lengths_of(component, present.get(component.name, 0), pages, page_size)
    return allowed


def drafted(component: Component, present: int, k: int, page_size: int) -> int:
    """How many of the first ``k`` pages a draft component can resume at; its target does not wait for it."""
    return longest(lengths_of(component, present, k, page_size))


def needed(component: Component, k: int, page_size: int) -> range:
    """The rule backwards: base pages whose entries a resume at ``k`` pages needs of this component (for a state: where its snapshot is)."""
    if k == 0:
        return range(0)
    if component.is_state:
        return range(k - 1, k)
    span = component.page_span
    first = component.lo(k * page_size) // (page_size * span)
    return range((first + 1) * span - 1, k, span)


def needed_bits(component: Component, k: int, page_size: int) -> int:
    """The same as bits over base pages."""
    pages = needed(component, k, page_size)
    if not pages:
        return 0
    if pages.step == 1:
        return ones(pages.stop) & ~ones(pages.start)
    return multiples(pages.step, pages[-1] - pages.start) << pages.start


def fitting(component: Component, some: int, most: int, among: int, page_size: int) -> int:
    """Of the lengths ``among`` (all of them lengths that the component allows), those at which it needs at most ``most`` of the pages
    ``some``: what a resume takes of a capacity."""
    if most < 0:
        return 0
    if some.bit_count() <= most or (component.is_state and most):
        return among
    if component.kind is Kind.FULL:  # the longer, the more
        return among & ones(_position(some, most) + 1)
    if not most:  # as if those pages were not there
        return among & lengths_of(component, ~some, longest(among), page_size)
    return sum(1 << k for k in members(among) if (needed_bits(component, k, page_size) & some).bit_count() <= most)


def _position(bits: int, index: int) -> int:
    """Where the set bit number ``index`` (from 0) is; there are as many."""
    low, high = 0, bits.bit_length() - 1
    while low < high:
        middle = (low + high) // 2
        if (bits & ones(middle + 1)).bit_count() > index:
            high = middle
        else:
            low = middle + 1
    return low


def kept_snapshots(made: Sequence[int], prompt: int, how: StateSnapshots) -> set[int]:
    """Which of the snapshots of a path are kept; ``made``: their lengths, ascending; ``prompt``: tokens of the prompt that it began as.

    Always the last one, and the last one that the same prompt can resume from. ``log``: going back from the end, the next one at least
    twice as far away as the one before, so that there are about log2 of the path of them.
    """
    if how is StateSnapshots.ALL or not made:
        return set(made)
    last, own = made[-1], bisect_left(made, prompt)
    out = {last, *made[max(0, own - 1) : own]}
    if how is StateSnapshots.LOG:
        least, at = 1, len(made) - 1
        while at := bisect_right(made, last - least, 0, at):
            at -= 1
            out.add(made[at])
            least = 2 * (last - made[at])
    return out
