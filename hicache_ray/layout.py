"""Layouts as data: an order of axes, and what follows from it.

A pool is ``slots`` pages of one component in one buffer. Its layout is an order of the six axes ``layer, field, page, token, head, byte``
(DESIGN section 4). From the order follow, per field, an offset and one stride per axis; from two such views follows how to copy between
them: the axes they have in common, outermost first, and the longest inner run that is contiguous on both sides. Nothing else in the
package knows a layout by its name.

The ``field`` axis may be ragged (K and V of unlike width): what lies inside of it is sized by the field, axes outside see the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hicache_ray.errors import ConfigError
from hicache_ray.spec import Component

#: Orders of axes, outermost first. Names and meaning are SGLang's, plus ``field`` so that a page is one object.
ORDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layer_first": ("layer", "field", "page", "token", "head", "byte"),
        "page_first": ("page", "field", "token", "layer", "head", "byte"),
        "page_first_direct": ("page", "field", "layer", "token", "head", "byte"),
        "page_head": ("page", "head", "field", "token", "layer", "byte"),
    }
)
#: The order of the stored object in L3, whatever the host layout.
CANONICAL = "page_first_direct"


@dataclass(frozen=True)
class Geometry:
    """Extents of one component's pool. ``fields``: name and bytes of one (token, head) row per field."""

    layers: int
    tokens: int
    heads: int
    fields: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, component: Component, page_size: int) -> Geometry:
        heads = component.heads
        rows = tuple((f.name, f.row_bytes // heads) for f in component.fields)
        return cls(len(component.layers), component.entries(page_size), heads, rows)

    @property
    def page_bytes(self) -> int:
        return self.layers * self.tokens * self.heads * sum(b for _, b in self.fields)

    def extent(self, axis: str, slots: int) -> int:
        return {"layer": self.layers, "page": slots, "token": self.tokens, "head": self.heads}[axis]


@dataclass(frozen=True)
class View:
    """Where one field lies in a pool: byte offset, bytes of a row, and the byte stride of each of the other axes."""

    field: str
    offset: int
    row: int
    layer: int
    page: int
    token: int
    head: int

    def at(self, layer: int) -> View:
        """The same field of one layer only."""
        return replace(self, offset=self.offset + layer * self.layer)


def views(order: tuple[str, ...], geometry: Geometry, slots: int) -> tuple[View, ...]:
    """The view of every field of a pool with ``slots`` pages in this order of axes."""
    cut = order.index("field")
    inner = [a for a in order[cut + 1 :] if a != "byte"]
    inner_count = math.prod(geometry.extent(a, slots) for a in inner)
    total = inner_count * sum(row for _, row in geometry.fields)
    out, offset = [], 0
    for name, row in geometry.fields:
        strides: dict[str, int] = {}
        for axes, stride in ((inner, row), (order[:cut], total)):
            for axis in reversed(axes):
                strides[axis] = stride
                stride *= geometry.extent(axis, slots)
        out.append(View(name, offset, row, **strides))
        offset += inner_count * row
    return tuple(out)


def order_of(name: str, setting: str = "cache.layout") -> tuple[str, ...]:
    """The order of axes called ``name``; a :class:`ConfigError` names the legal ones."""
    if name not in ORDERS:
        raise ConfigError(f'{setting} is "{name}"; choose one of {", ".join(ORDERS)}')
    return ORDERS[name]


@dataclass(frozen=True)
class Loop:
    """One axis of a copy: how often, and how far each side moves (bytes)."""

    count: int
    source: int
    target: int


@dataclass(frozen=True)
class Strided:
    """A copy of one page between two pools: for each index of ``loops`` (outermost first) one run of ``run`` contiguous bytes.

    Page ``p`` of the source starts at ``source + p * source_page``; the same for the target.
    """

    loops: tuple[Loop, ...]
    run: int
    source: int
    source_page: int
    target: int
    target_page: int


def copy_plan(source: tuple[View, ...], target: tuple[View, ...], geometry: Geometry) -> tuple[Strided, ...]:
    """How a page moves between two pools of one geometry: one strided copy per field, or fewer where fields adjoin on both sides.

    Loops run in the order of the source's bytes: with short runs, reading in order and scattering the writes is up to three times as
    fast as the reverse (measured between all layouts, runs of 256 bytes to 128 KiB).
    """
    out: list[Strided] = []
    for s, t in zip(source, target, strict=True):
        axes = [(geometry.extent(a, 1), getattr(s, a), getattr(t, a)) for a in ("layer", "token", "head")]
        loops = [Loop(n, x, y) for n, x, y in axes if n > 1]
        loops.sort(key=lambda loop: (loop.source, loop.target), reverse=True)
        out.append(_coalesce(Strided(tuple(loops), s.row, s.offset, s.page, t.offset, t.page)))
        # A field that continues the one before it, step for step, is the same copy with longer runs.
        while len(out) > 1 and _continues(out[-2], out[-1]):
            first, second = out[-2:]
            out[-2:] = [_coalesce(replace(first, run=first.run + second.run))]
    return tuple(out)


def layer_plan(source: tuple[View, ...], target: tuple[View, ...], geometry: Geometry, layer: int) -> tuple[Strided, ...]:
    """How one layer of a page moves."""
    return copy_plan(tuple(v.at(layer) for v in source), tuple(v.at(layer) for v in target), replace(geometry, layers=1))


def _continues(a: Strided, b: Strided) -> bool:
    pages = a.source_page == b.source_page and a.target_page == b.target_page
    return pages and a.loops == b.loops and a.source + a.run == b.source and a.target + a.run == b.target


def _coalesce(copy: Strided) -> Strided:
    """Innermost axes that continue the run on both sides become part of it."""
    loops, run = list(copy.loops), copy.run
    while found := next((loop for loop in loops if loop.source == run and loop.target == run), None):
        loops.remove(found)
        run *= found.count
    return replace(copy, loops=tuple(loops), run=run)
