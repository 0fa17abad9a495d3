"""A pool: slots of one component in one buffer, seen through one strided view per field.

The buffer comes from outside or is made here (zeroed, so that its memory is touched before the first request). Bytes are opaque; the
engine asks for typed views, copies use the byte strides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hicache_ray.errors import ConfigError
from hicache_ray.layout import CANONICAL, Geometry, View, order_of, views
from hicache_ray.spec import Component, Tier


class Pool:
    """``slots`` pages of ``component`` in ``layout``.

    ``buffer``: uint8, one axis of exactly ``slots * page_bytes`` bytes, on any device. Raises :class:`ConfigError` when it does not fit.
    """

    def __init__(self, component: Component, page_size: int, slots: int, layout: str = CANONICAL, buffer: torch.Tensor | None = None) -> None:
        self.component = component
        self.geometry = Geometry.of(component, page_size)
        self.slots = slots
        self.layout = layout
        self.views: tuple[View, ...] = views(order_of(layout), self.geometry, slots)
        size = slots * self.geometry.page_bytes
        if buffer is None:
            buffer = torch.zeros(size, dtype=torch.uint8)
        if buffer.dtype != torch.uint8 or buffer.shape != (size,):
            raise ConfigError(
                f"the pool of component {component.name!r} needs a buffer of {size} bytes ({slots} slots of {self.geometry.page_bytes}); "
                f"it was given {buffer.dtype} of shape {tuple(buffer.shape)}"
            )
        self.buffer = buffer

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def contiguous_pages(self) -> bool:
        """Whether a page is one run of bytes in the canonical order, so that it is a stored object as it lies."""
        whole = views(order_of(CANONICAL), self.geometry, self.slots)
        return self.views == whole

    def page(self, slot: int) -> memoryview:
        """The bytes of one page where :attr:`contiguous_pages` holds (CPU only)."""
        start = slot * self.page_bytes
        return self.buffer.numpy()[start : start + self.page_bytes].data

    def rows(self, field: str) -> torch.Tensor:
        """Bytes of a field: [slots, layers, tokens, heads, row bytes], a view."""
        v = self._view(field)
        g = self.geometry
        shape = (self.slots, g.layers, g.tokens, g.heads, v.row)
        return self.buffer.as_strided(shape, (v.page, v.layer, v.token, v.head, 1), v.offset)

    def typed(self, field: str, layer: int) -> torch.Tensor:
        """What an engine reads and writes: a view of the ``layer``-th layer of the component in the field's dtype.

        Shape: [slots, tokens, heads, *shape] for pages, [slots, heads, *shape] for snapshots.
        """
        f = next(f for f in self.component.fields if f.name == field)
        raw = self.rows(field)[:, layer]
        item = raw.view(getattr(torch, f.dtype))
        g = self.geometry
        parts = f.heads // g.heads
        tail = f.shape or (f.width,)
        if parts == 1:
            out = item.unflatten(-1, tail)
        elif g.heads == 1:
            out = item.squeeze(2).unflatten(-1, (parts, *tail))
        else:
            raise ConfigError(f"field {field!r} has {f.heads} heads beside a head axis of {g.heads}; an engine needs one of them to be 1 or equal")
        return out[:, 0] if self.component.is_state else out

    def _view(self, field: str) -> View:
        for v in self.views:
            if v.field == field:
                return v
        raise ConfigError(f"component {self.component.name!r} has no field {field!r}; it has {', '.join(v.field for v in self.views)}")


#: The pools of one rank.
Pools = Mapping[Tier, Mapping[str, Pool]]
