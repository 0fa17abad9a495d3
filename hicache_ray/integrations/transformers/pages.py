"""Cache layers whose tokens live in the pages of a tier's device pools.

transformers asks an attention cache layer for two things (5.24): the size of the mask of the next chunk, and to take in new keys and
values and give back all that the chunk attends to. There is no second copy of these caches.

Bit-exactness: every tensor handed to the model has the shape, strides and alignment that transformers' own ``DynamicCache`` would hand
it (a fresh contiguous tensor), so the same kernels run on the same numbers whichever slots the pages lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hicache_ray.errors import EngineError
from hicache_ray.integrations.transformers.places import INDEX, KEYS, VALUES, Place
from hicache_ray.records import Slots
from hicache_ray.spec import Component, Kind


class Table:
    """The pages of one component for the request in hand, and the chunk in hand; shared by the component's layers.

    A chunk computes tokens ``[start, start + count)`` and reads the entries of ``[lo(start), start)`` from pages. An entry is a token
    where the component's ratio is 1; a chunk completes entries ``[start // ratio, (start + count) // ratio)``.
    """

    def __init__(self, component: Component, page_size: int, device: torch.device) -> None:
        self.component = component
        self.page = component.entries(page_size)
        self.tokens = page_size * component.page_span
        self.device = device
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.begin(np.empty(0, dtype=np.int32))

    def begin(self, slots: Slots) -> None:
        """Take the table of a new request: slot per page, -1 for a page that is neither read nor written."""
        self._known = np.array(slots, dtype=np.int64)
        self.slots = torch.from_numpy(self._known).to(self.device)
        self.start = self.past = self.skip = self.blank = 0
        self.read = self.slots[:0]
        self.write: tuple[Any, Any, Any] = (0, 0, None)

    def need(self, first: int, stop: int, length: int) -> None:
        """:class:`EngineError` unless every page that touches tokens ``[first, stop)`` has a slot, as the forward at ``length`` needs."""
        if stop <= first:
            return
        low, high = first // self.tokens, -(-stop // self.tokens)
        held = self._known[low:high]
        if len(held) < high - low or held.min() < 0:
            page = low + len(held) if not (held < 0).any() else low + int(np.argmax(held < 0))
            raise EngineError(
                f"the forward at length {length} needs tokens [{first}, {stop}) of component {self.component.name!r}, "
                f"but its table has no slot for page {page}; give the record a slot for every page it reads or writes"
            )

    def place(self, start: int, count: int) -> None:
        """Make tokens ``[start, start + count)`` the chunk in hand."""
        c = self.component
        first, entry, stop = c.lo(start) // c.ratio, start // c.ratio, (start + count) // c.ratio
        low = first // self.page
        self.start, self.past, self.skip = start, entry - first, first - low * self.page
        self.read = self.slots[low : -(-entry // self.page)]
        # transformers keeps A - 1 tokens of a chunked layer and masks those of an earlier chunk: rows of zeros, to the same shape.
        self.blank = min(start, c.reach - 1) - self.past if c.kind is Kind.CHUNKED else 0
        if stop - entry == 1:
            self.write = (int(self._known[entry // self.page]), entry % self.page, None)
            return
        entries = np.arange(entry, stop)
        slots = self._known[entries // self.page]
        kept = None if not len(slots) or slots.min() >= 0 else torch.from_numpy(np.flatnonzero(slots >= 0)).to(self.device)
        offsets = torch.from_numpy(entries % self.page).to(self.device)
        index = torch.from_numpy(slots).to(self.device)
        self.write = (index, offsets, None) if kept is None else (index[kept], offsets[kept], kept)

    def scatter(self, pool: torch.Tensor, new: torch.Tensor) -> None:
        """Write the chunk's entries to their pages. ``pool``: [slots, page, heads, width]; ``new``: [1, heads, count, width]."""
        slots, offsets, kept = self.write
        if isinstance(slots, int):
            if slots >= 0:
                pool[slots, offsets].copy_(new[0, :, 0])
            return
        rows = new[0].transpose(0, 1)
        pool[slots, offsets] = rows if kept is None else rows[kept]

    def gather(self, pool: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What the chunk attends to: the past from its pages, then ``new``; contiguous [1, heads, past + count, width]."""
        past = pool.index_select(0, self.read).flatten(0, 1)[self.skip : self.skip + self.past]
        # The same call as DynamicCache's, also where there is no past: a fresh contiguous tensor.
        parts = [past.transpose(0, 1)[None], new]
        if self.blank:
            parts.insert(0, new.new_zeros(1, new.shape[1], self.blank, new.shape[3]))
        return torch.cat(parts, dim=-2)


class Rows:
    """One field of one layer in its pages."""

    def __init__(self, table: Table, pool: torch.Tensor, arrived: Callable[[], None] | None = None) -> None:
        """``pool``: [slots, page, heads, width]. ``arrived``: called before pages of this layer are read; None: they are there."""
        self.table, self._pool, self._arrived = table, pool, arrived

    def extend(self, new: torch.Tensor) -> torch.Tensor:
        """Take in the chunk's ``new`` [1, heads, count, width]; all that it attends to, [1, heads, past + count, width]."""
        if self._arrived is not None:
            self._arrived()
        self.table.scatter(self._pool, new)
        return self.table.gather(self._pool, new)


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, and an indexer's keys where it has one.

    Without values of their own the keys are the values too.
    """

    def __init__(self, rows: Mapping[Place, Rows]) -> None:
        super().__init__()
        self._use(rows)

    def _use(self, rows: Mapping[Place, Rows]) -> None:
        self.rows = rows
        self.table = rows[KEYS].table
        self.is_sliding = self.table.component.kind in (Kind.WINDOW, Kind.CHUNKED)
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool was there before the request."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.rows[KEYS].extend(key_states)
        return keys, self.rows[VALUES].extend(value_states) if VALUES in self.rows else keys

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """[1, count, width] in, [1, past + count, width] out."""
        return self.rows[INDEX].extend(indexer_key_states.unsqueeze(1)).squeeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that the chunk attends to, and the position of the first of them."""
        past = self.table.blank + self.table.past
        return past + query_length, self.table.start - past

    def get_seq_length(self) -> int:
        return self.table.start

    def get_max_length(self) -> int:
        return -1
