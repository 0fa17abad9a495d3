"""Cache layers with states: what one layer carries from token to token, saved to and loaded from the slots of a pool.

The running state is tensors of the layer's own, as transformers' ``DynamicCache`` has them: models update them in place and multiply with
them as they lie, so their alignment must not depend on a slot. A record loads them when it begins and saves them when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from transformers.cache_utils import LinearAttentionLayer

from hicache_ray.integrations.transformers.pages import PagedLayer, Rows
from hicache_ray.integrations.transformers.places import PLACES, Place
from hicache_ray.pool import Pool


class Stateful(Protocol):
    """A layer with a running state."""

    def load(self, slot: int, length: int) -> None:
        """Make the state of ``length`` tokens in ``slot`` the running state; 0 tokens: an empty one, whatever the slot holds."""

    def save(self, slot: int) -> None:
        """Copy the running state to ``slot``."""


class Snapshots:
    """One layer of a state component: its fields in any slot, as bytes (no field needs to be aligned)."""

    def __init__(self, pool: Pool, layer: int) -> None:
        self.fields = {PLACES[f.name]: f for f in pool.component.fields}
        self._rows = {PLACES[f.name]: pool.rows(f.name)[:, layer] for f in pool.component.fields}
        self._device = pool.buffer.device

    def new(self, place: Place) -> torch.Tensor:
        """Zeros of a field's shape for a batch of one: [1, *shape], or [1, heads, *shape]."""
        f = self.fields[place]
        heads = (f.heads,) if f.heads > 1 else ()
        return torch.zeros((1, *heads, *(f.shape or (f.width,))), dtype=getattr(torch, f.dtype), device=self._device)

    def load(self, place: Place, slot: int, into: torch.Tensor) -> None:
        rows = self._rows[place][slot]
        into.view(-1).view(torch.uint8).view(rows.shape).copy_(rows)

    def save(self, place: Place, slot: int, state: torch.Tensor) -> None:
        rows = self._rows[place][slot]
        rows.copy_(state.reshape(-1).view(torch.uint8).view(rows.shape))


class StateLayer(LinearAttentionLayer):
    """Conv and recurrent states, any number of them. ``has_previous_state`` False makes transformers take the path of a fresh cache."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._keep(snapshots)

    def _keep(self, snapshots: Snapshots) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=1 + max(int(p.key or 0) for p in snapshots.fields))
        self.snapshots = snapshots
        self._states = {place: snapshots.new(place) for place in snapshots.fields}
        for place, state in self._states.items():
            index = int(place.key or 0)
            getattr(self, place.attribute)[index] = state
            getattr(self, f"is_{place.attribute}_initialized")[index] = True
            if place.attribute == "conv_states":
                self.conv_kernel_size[index] = state.shape[-1]

    def load(self, slot: int, length: int) -> None:
        if length:
            for place, state in self._states.items():
                self.snapshots.load(place, slot, state)
        self.has_previous_state = dict.fromkeys(self.has_previous_state, length > 0)

    def save(self, slot: int) -> None:
        for place, state in self._states.items():
            self.snapshots.save(place, slot, state)


class HybridLayer(StateLayer, PagedLayer):  # type: ignore[override]  # is_croppable, as in transformers' own
    """Attention and states in one layer."""

    # As transformers' own: a cache of compileable layers gets a mask even where none is needed, and with it another attention kernel.
    is_compileable = False

    def __init__(self, rows: Mapping[Place, Rows], snapshots: Snapshots) -> None:
        PagedLayer.__init__(self, rows)
        self._keep(snapshots)
