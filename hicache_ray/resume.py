"""What the stages of a request hand to each other: what is where, and from where to resume. Frozen; the lengths come from the one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths
from hicache_ray.spec import CacheSpec, Tier

#: Nearest first.
ORDER = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)


@dataclass(frozen=True)
class Part:
    """Pages of one component that one tier gives. ``pages``: base page indices along the path, ascending, int32."""

    component: str
    tier: Tier
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Match:
    """Availability of a prompt's pages, per tier and component (bits over base pages, see :mod:`hicache_ray.lengths`).

    ``allowed``: the set of lengths that the prompt itself, the caller and the grid allow. ``keys``: page keys up to its largest member.
    """

    spec: CacheSpec
    keys: tuple[bytes, ...]
    allowed: int
    present: Mapping[Tier, Mapping[str, int]]

    def lengths(self, *tiers: Tier) -> int:
        """The set of legal resume lengths (in pages) from these tiers together."""
        union = {c.name: 0 for c in self.spec.components}
        for tier in tiers:
            for name, bits in self.present.get(tier, {}).items():
                union[name] |= bits
        return lengths.legal(self.spec.components, union, self.allowed, self.spec.page_size)

    def longest(self, *tiers: Tier) -> int:
        return lengths.longest(self.lengths(*tiers))

    @property
    def ceiling(self) -> int:
        """No tier can give more than this many pages."""
        return lengths.longest(self.allowed)

    def without_storage(self) -> Match:
        return replace(self, present={tier: bits for tier, bits in self.present.items() if tier is not Tier.STORAGE})

    def with_storage(self, found: Mapping[str, Sequence[int]]) -> Match:
        """The same with what a lookup found: per component one bitset for each rank, of which only what all have counts."""
        storage = {name: lengths.on_all(per_rank) for name, per_rank in found.items()}
        return replace(self, present={**self.present, Tier.STORAGE: storage})


class Limit(str, Enum):
    """What kept a resume from being longer."""

    NONE = "nothing: the prompt itself ends here"
    ABSENT = "no tier has what a longer resume needs"
    THRESHOLD = "too little to gain from storage (cache.prefetch_threshold)"
    HOST_ROOM = "no host memory for more"
    LOAD_FAILED = "a copy from the host failed"
    LOOKUP = "storage did not answer in time"


@dataclass(frozen=True)
class Plan:
    """Resume at ``length`` base pages; ``parts`` are all pages that needs, each once, from the nearest tier that has it."""

    length: int
    parts: tuple[Part, ...]
    limit: Limit

    def of(self, tier: Tier) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if p.tier is tier)
