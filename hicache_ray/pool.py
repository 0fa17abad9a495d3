"""A pool: slots of one component in one buffer, seen through one strided view per field.

The buffer comes from outside or is made here (zeroed, so that its memory is touched before the first request). Bytes are opaque; the
engine asks for typed views, copies use the byte strides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hicache_ray.errors import ConfigError, HiCacheError, Inconsistent
from hicache_ray.layout import CANONICAL, Geometry, View, copy_plan, order_of, views
from hicache_ray.spec import Component, Tier


class Pool:
    """``slots`` pages of ``component`` in ``layout``.

    ``buffer``: uint8, one axis of exactly ``slots * page_bytes`` contiguous bytes, on any device; it may be a part of something larger.
    Raises :class:`ConfigError` when it does not fit.
    """

    def __init__(
        self, component: Component, page_size: int, slots: int, layout: str = CANONICAL, buffer: torch.Tensor | None = None
    ) -> None:
        self.component = component
        self.geometry = Geometry.of(component, page_size)
        self.slots = slots
        self.layout = layout
        self.views: tuple[View, ...] = views(order_of(layout), self.geometry, slots)
        size = slots * self.geometry.page_bytes
        if buffer is None:
            buffer = torch.zeros(size, dtype=torch.uint8)
        if buffer.dtype != torch.uint8 or buffer.shape != (size,) or not buffer.is_contiguous():
            raise ConfigError(
                f"the pool of component {component.name!r} needs a buffer of {size} contiguous bytes ({slots} slots of "
                f"{self.geometry.page_bytes}); it was given {buffer.dtype} of shape {tuple(buffer.shape)} and stride {buffer.stride()}"
            )
        self.buffer = buffer
        self._contiguous = self._is_canonical()

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def contiguous_pages(self) -> bool:
        """Whether a page is one run of bytes in the canonical order, so that it is a stored object as it lies."""
        return self._contiguous

    def page(self, slot: int) -> memoryview:
        """The bytes of one page, writable, where :attr:`contiguous_pages` holds (CPU only)."""
        if not self._contiguous:
            raise HiCacheError(
                f"a page of component {self.component.name!r} is not one run of bytes in the layout {self.layout!r}; "
                f"copy it to a pool in the layout {CANONICAL!r} first"
            )
        if not 0 <= slot < self.slots:
            raise HiCacheError(f"slot {slot} is outside of the {self.slots} slots of component {self.component.name!r}")
        start = slot * self.page_bytes
        return self.buffer.numpy()[start : start + self.page_bytes].data

    def rows(self, field: str) -> torch.Tensor:
        """Bytes of a field: [slots, layers, tokens, heads, row bytes], a view."""
        v = self._view(field)
        g = self.geometry
        shape = (self.slots, g.layers, g.tokens, g.heads, v.row)
        return self.buffer.as_strided(shape, (v.page, v.layer, v.token, v.head, 1), self.buffer.storage_offset() + v.offset)

    def typed(self, field: str, layer: int) -> torch.Tensor:
        """What an engine reads and writes: a view of the ``layer``-th layer of the component in the field's dtype.

        Shape: [slots, tokens, heads, *shape] for pages, [slots, heads, *shape] for snapshots. Raises :class:`ConfigError` where the
        layout admits no such view.
        """
        f = next(f for f in self.component.fields if f.name == self._view(field).field)
        raw = self.rows(field)[:, layer]
        if any(n % f.itemsize for n in (raw.storage_offset(), *raw.stride()[:-1])):
            raise ConfigError(
                f"field {field!r} of component {self.component.name!r} does not start at multiples of its {f.itemsize} bytes in the layout "
                f"{self.layout!r}; put the fields with the widest items first"
            )
        parts = f.heads // self.geometry.heads
        item = raw.view(getattr(torch, f.dtype)).unflatten(-1, (parts, *(f.shape or (f.width,))))
        # Heads beyond the common head axis lie inside its rows; both are one axis where they continue each other.
        if self.geometry.heads > 1 and parts > 1 and item.stride(2) != parts * item.stride(3):
            raise ConfigError(
                f"field {field!r} has {f.heads} heads and the head axis {self.geometry.heads}, which layout {self.layout!r} tears apart; "
                f'an engine needs a pool in layout "layer_first"'
            )
        out = item.flatten(2, 3)
        return out[:, 0] if self.component.is_state else out

    def check(self) -> None:
        """The views of the fields cover the buffer exactly. Raises :class:`Inconsistent`."""
        g = self.geometry
        ends = [
            v.offset + (self.slots - 1) * v.page + (g.layers - 1) * v.layer + (g.tokens - 1) * v.token + (g.heads - 1) * v.head + v.row
            for v in self.views
        ]
        size = self.slots * g.page_bytes
        if self.slots and (max(ends) != size or self.buffer.numel() != size):
            raise Inconsistent(
                f"the views of component {self.component.name!r} end at {max(ends)} of {self.buffer.numel()} bytes, not at {size}"
            )

    def _is_canonical(self) -> bool:
        whole = views(order_of(CANONICAL), self.geometry, self.slots)
        plan = copy_plan(self.views, whole, self.geometry)
        return len(plan) == 1 and plan[0].run == self.page_bytes

    def _view(self, field: str) -> View:
        for v in self.views:
            if v.field == field:
                return v
        raise ConfigError(f"component {self.component.name!r} has no field {field!r}; it has {', '.join(v.field for v in self.views)}")


#: The pools of one rank.
Pools = Mapping[Tier, Mapping[str, Pool]]
