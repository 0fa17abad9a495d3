"""A naive twin of layouts: walks the axes in their order and counts bytes. Shares no arithmetic with hicache_ray.layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hicache_ray.layout import ORDERS, Geometry
from hicache_ray.pool import Pool
from hicache_ray.spec import Component, Field, Kind

#: (field, page, layer, token, head)
Row = tuple[int, int, int, int, int]


def kv(heads: int, k: int, v: int, layers: int = 3, itemsize: int = 2, dtype: str = "int16") -> Component:
    fields = (Field("k", heads, k, itemsize, dtype), Field("v", heads, v, itemsize, dtype))
    return Component("full", Kind.FULL, fields, tuple(range(layers)))


def state() -> Component:
    """Fields of unlike head counts and item sizes, one page of one token, as a gated delta net has them."""
    fields = (Field("conv", 1, 24, 2, "int16", (6, 4)), Field("recurrent", 4, 6, 4, "int32", (2, 3)))
    return Component("state", Kind.STATE, fields, (0, 1))


def addresses(layout: str, geometry: Geometry, slots: int) -> dict[Row, int]:
    """Where each row of each field begins."""
    extents = {"layer": geometry.layers, "field": len(geometry.fields), "page": slots, "token": geometry.tokens, "head": geometry.heads}
    axes = [a for a in ORDERS[layout] if a != "byte"]

    def walk(depth: int, at: dict[str, int]) -> Iterator[dict[str, int]]:
        if depth == len(axes):
            yield dict(at)
            return
        for i in range(extents[axes[depth]]):
            at[axes[depth]] = i
            yield from walk(depth + 1, at)

    out: dict[Row, int] = {}
    address = 0
    for at in walk(0, {}):
        out[at["field"], at["page"], at["layer"], at["token"], at["head"]] = address
        address += geometry.fields[at["field"]][1]
    assert address == slots * geometry.page_bytes
    return out


def copy_naively(source: Pool, target: Pool, source_slots: list[int], target_slots: list[int]) -> np.ndarray:
    """The target's bytes after the copy; ``target`` itself is left alone."""
    g = source.geometry
    of, to = addresses(source.layout, g, source.slots), addresses(target.layout, g, target.slots)
    page_of = dict(zip(target_slots, source_slots, strict=True))
    read, out = source.buffer.numpy(), target.buffer.numpy().copy()
    for (field, page, *rest), start in to.items():
        if page in page_of:
            begin = of[(field, page_of[page], *rest)]  # type: ignore[index]
            for i in range(g.fields[field][1]):
                out[start + i] = read[begin + i]
    return out
