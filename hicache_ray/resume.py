"""What the stages of a request hand to each other: what is where, and from where to resume. Frozen; the lengths come from the one rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths
from hicache_ray.keys import other, tagged
from hicache_ray.spec import CacheSpec, Component, Tier

#: Nearest first.
ORDER = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)


@dataclass(frozen=True)
class Part:
    """Pages of one component that one tier gives. ``pages``: base page indices along the path, ascending, int32."""

    component: str
    tier: Tier
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Path:
    """Names of a prompt's objects. Under each page key a component may have two: one of canonical bytes and one of others.

    ``other[component]``: bits over base pages, where the one of other bytes is meant. Absent: canonical ones throughout.
    ``ahead[component]``: its keys where its bytes depend on the tokens after a page as well; they may be fewer.
    """

    keys: tuple[bytes, ...]
    other: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    def names(self, component: str, pages: Iterable[int] | None = None) -> list[bytes]:
        """Names of a component's objects at these base pages, of all without."""
        bits, keys = self.other.get(component, 0), self.ahead.get(component, self.keys)
        chosen = range(len(keys)) if pages is None else pages
        if not bits:
            return list(keys) if pages is None else [keys[i] for i in chosen]
        return [other(keys[i]) if bits >> i & 1 else keys[i] for i in chosen]


@dataclass(frozen=True)
class Match:
    """Availability of a prompt's pages, per tier and component (bits over base pages, see :mod:`hicache_ray.lengths`).

    ``allowed``: the set of lengths that the prompt itself, the caller and the grid allow. ``keys``: page keys up to its largest member.
    ``found``: what each tier has, canonical and other bytes apart (:func:`hicache_ray.keys.tagged`). Where both are to be had, in whatever
    tier, the canonical one is meant: ``path`` names the objects, ``present`` says where those are.
    """

    spec: CacheSpec
    keys: tuple[bytes, ...]
    allowed: int
    found: Mapping[Tier, Mapping[str, int]]
    ahead: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    path: Path = field(init=False)
    present: Mapping[Tier, Mapping[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        others: dict[str, int] = {}
        present: dict[Tier, dict[str, int]] = {tier: {} for tier in self.found}
        for c in self.spec.components:
            canonical, either = 0, 0
            for bits in self.found.values():
                canonical |= bits.get(c.name, 0)
                either |= bits.get(tagged(c.name, True), 0)
            others[c.name] = either & ~canonical
            for tier, bits in self.found.items():
                present[tier][c.name] = bits.get(c.name, 0) | (bits.get(tagged(c.name, True), 0) & others[c.name])
        object.__setattr__(self, "path", Path(self.keys, {name: bits for name, bits in others.items() if bits}, self.ahead))
        object.__setattr__(self, "present", present)

    def keys_of(self, component: str) -> tuple[bytes, ...]:
        return self.ahead.get(component, self.keys)

    def lengths(self, *tiers: Tier) -> int:
        """The set of legal resume lengths (in pages) from these tiers together."""
        union = {c.name: 0 for c in self.spec.components}
        for tier in tiers:
            for name, bits in self.present.get(tier, {}).items():
                union[name] |= bits
        return lengths.legal(self.spec.components, union, self.allowed, self.spec.page_size)

    def anywhere(self, component: str, tiers: Collection[Tier] = ORDER) -> int:
        """Which of a component's pages any of the tiers has."""
        return reduce(or_, (bits.get(component, 0) for tier, bits in self.present.items() if tier in tiers), 0)

    def needs(self, k: int, draft_tiers: Collection[Tier] = ORDER) -> Iterator[tuple[Component, int, Mapping[Tier, int]]]:
        """The rule backwards: of each component how many pages of it a resume at ``k`` pages takes (a draft may have fewer), and which of
        them (bits over base pages) come from which tier, each from the nearest that has it. ``draft_tiers``: those that drafts may use."""
        for component in self.spec.components:
            length = k
            if component.role == "draft":
                length = lengths.drafted(component, self.anywhere(component.name, draft_tiers), k, self.spec.page_size)
            wanted = lengths.needed_bits(component, length, self.spec.page_size)
            out = {}
            for tier in ORDER:
                out[tier] = wanted & self.present.get(tier, {}).get(component.name, 0)
                wanted ^= out[tier]
            yield component, length, out

    def longest(self, *tiers: Tier) -> int:
        return lengths.longest(self.lengths(*tiers))

    @property
    def ceiling(self) -> int:
        """No tier can give more than this many pages."""
        return lengths.longest(self.allowed)

    def only(self, *tiers: Tier) -> Match:
        """What these tiers have, as if there were no others."""
        return replace(self, found={tier: bits for tier, bits in self.found.items() if tier in tiers})

    def with_storage(self, found: Mapping[str, Sequence[int]]) -> Match:
        """The same with what a lookup found: per component one bitset for each rank, of which only what all have counts."""
        return self.with_found(Tier.STORAGE, {name: lengths.on_all(per_rank) for name, per_rank in found.items()})

    def with_found(self, tier: Tier, found: Mapping[str, int]) -> Match:
        """The same with what a tier has."""
        return replace(self, found={**self.found, tier: found})


class Limit(str, Enum):
    """What kept a resume from being longer."""

    NONE = "nothing: the prompt itself ends here"
    CALLER = "the request itself asked for no more (logprob_start)"
    ABSENT = "no tier has what a longer resume needs"
    THRESHOLD = "too little to gain from storage (cache.prefetch_threshold)"
    HOST_ROOM = "no host memory for more"
    IN_FLIGHT = "too much on its way from storage already (cache.prefetch_tokens_in_flight)"
    DEADLINE = "storage did not deliver in time"
    FAILED = "storage failed while it delivered"
    UNREAD = "storage could not deliver what it had promised"
    COST = "recomputing is sooner done than loading (cache.load_or_recompute)"
    LOAD_FAILED = "a copy from the host failed"
    LOOKUP = "storage did not answer in time"
    LOOKUP_FAILED = "storage could not say what it has"
    DETACHED = "storage was detached meanwhile"
    DROPPED = "what the request is of was dropped meanwhile"


@dataclass(frozen=True)
class Plan:
    """Resume at ``length`` base pages; ``parts`` are all pages that needs, each once, from the nearest tier that has it.

    ``drafts``: how many of those pages each draft component can resume at. ``milestones``: earlier lengths, ascending, whose pages are
    among ``parts`` as well; what they need comes first.
    """

    length: int
    parts: tuple[Part, ...]
    limit: Limit
    drafts: Mapping[str, int] = field(default_factory=dict)
    milestones: tuple[int, ...] = ()

    def of(self, tier: Tier) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if p.tier is tier)
