"""Cache layers of compressed attention (DeepSeek-V4): a window of tokens, and beyond it one entry for every ``ratio`` tokens.

The methods are the contract of ``DeepseekV4HCACache`` and ``DeepseekV4CSACache`` in transformers 5.24. Entries live in pages. A
compressor also carries a *tail*: the tokens after the last whole window and, where windows overlap, a part of the last whole one. How
much of it is in use follows from the number of tokens, so a snapshot holds no counts; unused rows are zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hicache_ray.integrations.transformers.pages import PagedLayer, Rows
from hicache_ray.integrations.transformers.places import ENTRIES, Place
from hicache_ray.integrations.transformers.states import Snapshots


class CompressedLayer(PagedLayer):
    def __init__(self, rows: Mapping[Place, Rows], snapshots: Snapshots) -> None:
        super().__init__(rows)
        self.snapshots = snapshots
        self.compress_rate = rows[ENTRIES].table.component.ratio
        self._tails: dict[Place, torch.Tensor] = {}

    def load(self, slot: int, length: int) -> None:
        self._tails = {}
        for place in self.snapshots.fields:
            state = self.snapshots.new(place)
            overlap = place.attribute.startswith("overlap")
            used = (self.compress_rate if length >= self.compress_rate else 0) if overlap else length % self.compress_rate
            if used:
                self.snapshots.load(place, slot, state)
                self._tails[place] = state[:, :used]

    def save(self, slot: int) -> None:
        for place in self.snapshots.fields:
            state, tail = self.snapshots.new(place), self._tails.get(place)
            if tail is not None:
                state[:, : tail.shape[1]] = tail
            self.snapshots.save(place, slot, state)

    def store_compression_weights(self, name: str, kv: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The tokens ([1, n, width]) that fill whole windows, the tail's before the new ones, and the position of the first."""
        places = Place("buffer_kv", name), Place("buffer_gate", name)
        rate = self.compress_rate
        if places[0] in self._tails:
            kv, gate = (torch.cat([self._tails[p], new], dim=1) for p, new in zip(places, (kv, gate), strict=True))
        usable = kv.shape[1] // rate * rate
        for place, all_of_it in zip(places, (kv, gate), strict=True):
            self._tails.pop(place, None)
            if usable < all_of_it.shape[1]:
                self._tails[place] = all_of_it[:, usable:]
        return kv[:, :usable], gate[:, :usable], self.table.start // rate * rate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """[1, new entries, width] in, all entries out."""
        return self.rows[Place("compressed_kv", name)].extend(compressed.unsqueeze(1)).squeeze(1)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the window before this chunk left (None: there is none); keeps what this chunk's last window leaves.

        ``chunk_kv``, ``chunk_gate``: [1, windows, ratio, 2 * head_dim].
        """
        places = Place("overlap_kv", name), Place("overlap_gate", name)
        before = self._tails.get(places[0]), self._tails.get(places[1])
        for place, chunk in zip(places, (chunk_kv, chunk_gate), strict=True):
            self._tails[place] = chunk[:, -1, :, :head_dim].clone()
        return before
