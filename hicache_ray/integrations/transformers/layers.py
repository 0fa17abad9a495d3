"""Cache layers of Hugging Face models that live in a tier's device pools.

transformers asks a cache layer for three things (5.24): the size of the mask of the next chunk, to take in new keys and values and give
back all that the chunk attends to, and, of a linear-attention layer, its conv and recurrent states. The layers here answer from the pages
and snapshots of :class:`~hicache_ray.pool.Pool`; there is no second copy of the cache.

Bit-exactness: every tensor handed to the model has the shape, strides and alignment that transformers' own ``DynamicCache`` would hand
it (a fresh contiguous tensor), so the same kernels run on the same numbers whichever slots the pages lie in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hicache_ray.errors import EngineError
from hicache_ray.pool import Pool
from hicache_ray.records import Slots
from hicache_ray.spec import Component, Kind

#: torch's CPU allocator aligns to this many bytes; matrix kernels may take another path, with other rounding, on other operands.
ALIGNMENT = 64


class Table:
    """The pages of one component for the request in hand, and the chunk in hand; shared by the component's layers.

    A chunk computes tokens ``[start, start + count)`` and reads ``[lo(start), start)`` from pages.
    """

    def __init__(self, component: Component, page_size: int, device: torch.device) -> None:
        self.component = component
        self.page = component.entries(page_size)
        self.device = device
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.begin(np.empty(0, dtype=np.int32))

    def begin(self, slots: Slots) -> None:
        """Take the table of a new request: slot per page, -1 for a page that is neither read nor written."""
        self._known = np.array(slots, dtype=np.int64)
        self.slots = torch.from_numpy(self._known).to(self.device)
        self.start = self.past = self.skip = 0
        self.read = self.slots[:0]
        self.write: tuple[Any, Any, Any] = (0, 0, None)

    def need(self, first: int, stop: int, length: int) -> None:
        """:class:`EngineError` unless every page that touches ``[first, stop)`` has a slot, as the forward at ``length`` needs."""
        if stop <= first:
            return
        low, high = first // self.page, -(-stop // self.page)
        held = self._known[low:high]
        if len(held) < high - low or held.min() < 0:
            page = low + len(held) if not (held < 0).any() else low + int(np.argmax(held < 0))
            raise EngineError(
                f"the forward at length {length} needs tokens [{first}, {stop}) of component {self.component.name!r}, "
                f"but its table has no slot for page {page}; give the record a slot for every page it reads or writes"
            )

    def place(self, start: int, count: int) -> None:
        """Make ``[start, start + count)`` the chunk in hand."""
        first = self.component.lo(start)
        low = first // self.page
        self.start, self.past, self.skip = start, start - first, first - low * self.page
        self.read = self.slots[low : -(-start // self.page)]
        if count == 1:
            self.write = (int(self._known[start // self.page]), start % self.page, None)
            return
        tokens = np.arange(start, start + count)
        slots = self._known[tokens // self.page]
        kept = None if slots.min() >= 0 else torch.from_numpy(np.flatnonzero(slots >= 0)).to(self.device)
        offsets = torch.from_numpy(tokens % self.page).to(self.device)
        index = torch.from_numpy(slots).to(self.device)
        self.write = (index, offsets, None) if kept is None else (index[kept], offsets[kept], kept)

    def scatter(self, pool: torch.Tensor, new: torch.Tensor) -> None:
        """Write the chunk's tokens to their pages. ``pool``: [slots, page, heads, width]; ``new``: [1, heads, count, width]."""
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
        return torch.cat([past.transpose(0, 1)[None], new], dim=-2)


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer in the pages of a pool: the ``layer``-th of its component."""

    def __init__(self, table: Table, pool: Pool, layer: int) -> None:
        super().__init__()
        self.table = table
        self.is_sliding = table.component.kind is Kind.WINDOW
        self.is_initialized = True
        self._keys, self._values = pool.typed("k", layer), pool.typed("v", layer)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool was there before the request."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.table
        table.scatter(self._keys, key_states)
        table.scatter(self._values, value_states)
        return table.gather(self._keys, key_states), table.gather(self._values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that the chunk attends to, and the position of the first of them."""
        return self.table.past + query_length, self.table.start - self.table.past

    def get_seq_length(self) -> int:
        return self.table.start

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):
    """Conv and recurrent state of one gated delta net, kept in one slot of a pool; what the model writes ends in the pool.

    The base class copies into the tensors that it finds in its dictionaries, and the one-token kernel updates the conv state in place, so
    both are views of the pool. ``has_previous_state`` False makes transformers take the path of a fresh cache (it never reads the slot).
    """

    def __init__(self, pool: Pool, layer: int) -> None:
        super().__init__()
        self._conv, self._recurrent = pool.typed("conv", layer), pool.typed("recurrent", layer)
        self.conv_kernel_size[0] = self._conv.shape[-1]
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True

    def bind(self, live: int, fresh: bool) -> None:
        """Keep the running state in slot ``live``; ``fresh``: there is none yet."""
        # [1, channels, kernel]: the pool's axis of one head is the batch axis of a batch of one.
        self.conv_states[0] = self._conv[live]
        self.recurrent_states[0] = self._recurrent[live : live + 1]
        self.has_previous_state[0] = not fresh


class PagedCache(Cache):
    """The ``cache=`` argument of a forward, made of the layers above."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        # It is an operand of matrix products as it lies; a slot at an odd address must not round unlike one at an even address.
        return state if state is None or state.data_ptr() % ALIGNMENT == 0 else state.clone()
