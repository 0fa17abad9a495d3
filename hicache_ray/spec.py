"""What a model caches, as data: components, their fields, and how far back a resume needs them.

A *component* is one kind of cache over a set of layers (all full-attention layers; all sliding-window layers of one width; all recurrent
states). The whole of its behaviour under the one rule is ``lo(L)``: a resume at length ``L`` needs the component's pages that touch
``[lo(L), L)`` (DESIGN section 2). Everything else here is geometry: how many bytes a page has, and along which axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from hicache_ray.errors import ConfigError


class Tier(str, Enum):
    """Where bytes are. ``device`` is L1, ``host`` is L2, ``storage`` is L3."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Kind(str, Enum):
    """The four shapes of ``lo(L)``."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"


class Shard(str, Enum):
    """How the ranks of a group share a component: each its range of heads, all of them the same bytes, or each its pages, in turn (context
    parallelism)."""

    HEADS = "heads"
    REPLICATED = "replicated"
    CONTEXT = "context"


@dataclass(frozen=True)
class Field:
    """One array of a component, as one rank holds it.

    A token of a layer has ``heads`` rows of ``width`` items of ``itemsize`` bytes. ``shape`` is how an engine sees the ``width`` items
    (its product is ``width``; empty: one axis). Bytes are opaque to everything but the engine, ``dtype`` is a name only.
    """

    name: str
    heads: int
    width: int
    itemsize: int = 2
    dtype: str = "bfloat16"
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.heads, self.width, self.itemsize) < 1:
            have = f"{self.heads}, {self.width}, {self.itemsize}"
            raise ConfigError(f"field {self.name!r} needs at least one head, item and byte; it has {have}")
        if self.shape and math.prod(self.shape) != self.width:
            raise ConfigError(f"field {self.name!r}: the shape {self.shape} does not hold {self.width} items")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one layer, all heads."""
        return self.heads * self.width * self.itemsize


@dataclass(frozen=True)
class Component:
    """One kind of cache of a model. All lengths are in tokens.

    ``reach``: V of a window, A of a chunked component, the distance between snapshots of a state (0: wherever the engine makes one).
    ``page_span``: how many base pages one page of this component covers. ``ratio``: tokens per stored entry. ``lookahead``: the last so
    many tokens of a hit must be recomputed (draft models). ``role``: ``target`` limits a resume, ``draft`` only reports its own length.
    ``ranks``: those that hold it, as a pipeline stage holds its layers; empty: all.
    """

    name: str
    kind: Kind
    fields: tuple[Field, ...]
    layers: tuple[int, ...] = (0,)
    reach: int = 0
    page_span: int = 1
    ratio: int = 1
    lookahead: int = 0
    role: str = "target"
    shard: Shard = Shard.HEADS
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.fields or not self.layers:
            raise ConfigError(f"component {self.name!r} needs at least one field and one layer")
        if self.kind in (Kind.WINDOW, Kind.CHUNKED) and self.reach < 1:
            raise ConfigError(f"component {self.name!r} ({self.kind.value}) needs a reach of at least 1 token; it has {self.reach}")
        if min(self.page_span, self.ratio) < 1 or self.lookahead < 0:
            raise ConfigError(f"component {self.name!r}: page_span and ratio are at least 1 and lookahead at least 0")
        if self.role not in ("target", "draft"):
            raise ConfigError(f'component {self.name!r}: role is "{self.role}"; choose one of target, draft')

    def lo(self, length: int) -> int:
        """First token whose page a resume at ``length`` needs. A state needs a snapshot made at exactly ``length`` instead."""
        if self.kind is Kind.FULL:
            return 0
        if self.kind is Kind.WINDOW:
            return max(0, length - self.reach)
        if self.kind is Kind.CHUNKED:
            return length // self.reach * self.reach
        return length

    @property
    def is_state(self) -> bool:
        return self.kind is Kind.STATE

    @property
    def heads(self) -> int:
        """Length of the head axis: what the fields' head counts have in common, so that the axis can stand outside the fields."""
        return math.gcd(*(f.heads for f in self.fields))

    def entries(self, page_size: int) -> int:
        """Length of the token axis of a page: stored entries, or 1 for a snapshot."""
        if self.is_state:
            return 1
        if page_size * self.page_span % self.ratio:
            raise ConfigError(
                f"component {self.name!r}: a page of {page_size} x {self.page_span} tokens does not hold whole entries of {self.ratio} "
                f"tokens; choose cache.page_size or page_span so that {self.ratio} divides it"
            )
        return page_size * self.page_span // self.ratio

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page (or one snapshot) on one rank, all layers."""
        return len(self.layers) * self.entries(page_size) * sum(f.row_bytes for f in self.fields)


@dataclass(frozen=True)
class CacheSpec:
    """The caches of one model as one cache group holds them: the same components on each of ``ranks`` ranks."""

    model_type: str
    page_size: int
    components: tuple[Component, ...]
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.ranks < 1:
            raise ConfigError(f"cache.page_size and model.tp are at least 1; they are {self.page_size} and {self.ranks}")
        names = [c.name for c in self.components]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a cache spec needs components of unlike names; it has {names}")
        for c in self.components:
            c.entries(self.page_size)
            if any(not 0 <= rank < self.ranks for rank in c.ranks) or len(set(c.ranks)) != len(c.ranks):
                raise ConfigError(f"component {c.name!r} is on the ranks {c.ranks}; name each of the {self.ranks} ranks at most once")

    def __getitem__(self, name: str) -> Component:
        for c in self.components:
            if c.name == name:
                return c
        raise KeyError(name)

    def owners(self, component: Component) -> tuple[int, ...]:
        """The ranks that hold a component."""
        return component.ranks or tuple(range(self.ranks))

    def owns(self, component: Component, rank: int, page: int) -> bool:
        """Whether a rank holds its part of the component's page that ends with base page ``page``. Who does not, reports it present."""
        owners = self.owners(component)
        if component.shard is Shard.CONTEXT:
            return owners[((page + 1) // component.page_span - 1) % len(owners)] == rank
        return rank in owners

    def pages(self, tokens: int) -> int:
        """Pages needed to hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def bytes_per_token(self) -> float:
        """Bytes of one token on one rank, snapshots apart."""
        paged = (c for c in self.components if not c.is_state)
        return sum(c.page_bytes(self.page_size) / (self.page_size * c.page_span) for c in paged)

    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of all states on one rank."""
        return sum(c.page_bytes(self.page_size) for c in self.components if c.is_state)

    def step(self, grid: int | None) -> int:
        """Tokens between resumable lengths: lcm of page, grid, and the largest page span and ratio."""
        spans = [self.page_size * c.page_span for c in self.components if not c.is_state]
        ratios = [c.ratio for c in self.components]
        return math.lcm(self.page_size, grid or self.page_size, *spans, *ratios)

    def with_ranks(self, ranks: int) -> CacheSpec:
        return replace(self, ranks=ranks)
