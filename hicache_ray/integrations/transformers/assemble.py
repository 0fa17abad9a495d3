"""The cache of a model, made of its spec and its device pools: one cache layer per model layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from hicache_ray.errors import ConfigError
from hicache_ray.integrations.transformers.compressed import CompressedLayer
from hicache_ray.integrations.transformers.pages import PagedLayer, Rows, Table
from hicache_ray.integrations.transformers.places import ENTRIES, PLACES, Place
from hicache_ray.integrations.transformers.states import HybridLayer, Snapshots, Stateful, StateLayer
from hicache_ray.pool import Pool
from hicache_ray.spec import CacheSpec

#: (component, its layer) before pages of that layer are read; see :meth:`hicache_ray.copies.Mover.by_layer`.
WaitLayer: TypeAlias = Callable[[str, int], None]
CacheLayer: TypeAlias = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


class PoolCache(Cache):
    """The ``cache=`` argument of a forward. ``tables``: of each paged component; ``states``: the layers of each state component."""

    def __init__(self, spec: CacheSpec, pools: Mapping[str, Pool], layers: int, wait_layer: WaitLayer | None = None) -> None:
        """``layers``: of the model; those in no component cache nothing. ``wait_layer``: None where restored pages are there at once."""
        self._wait_layer = wait_layer
        self.tables = {c.name: Table(c, spec.page_size, pools[c.name].buffer.device) for c in spec.components if not c.is_state}
        self.states: dict[str, list[Stateful]] = {c.name: [] for c in spec.components if c.is_state}
        super().__init__(layers=[self._layer(spec, pools, layer) for layer in range(layers)])

    def _layer(self, spec: CacheSpec, pools: Mapping[str, Pool], layer: int) -> CacheLayer:
        rows: dict[Place, Rows] = {}
        snapshots: Snapshots | None = None
        owner = ""
        for c in spec.components:
            if layer not in c.layers:
                continue
            index, pool = c.layers.index(layer), pools[c.name]
            if c.is_state:
                if snapshots is not None:
                    raise ConfigError(
                        f"layer {layer} is in the state components {owner!r} and {c.name!r}; make them one of all their fields"
                    )
                snapshots, owner = Snapshots(pool, index), c.name
            else:
                arrived = partial(self._wait_layer, c.name, index) if self._wait_layer is not None else None
                rows.update({PLACES[f.name]: Rows(self.tables[c.name], pool.typed(f.name, index), arrived) for f in c.fields})
        made = _made_of(rows, snapshots)
        if owner:
            self.states[owner].append(made)  # type: ignore[arg-type]  # a layer with snapshots is one of the three stateful classes
        return made


def _made_of(rows: Mapping[Place, Rows], snapshots: Snapshots | None) -> CacheLayer:
    if snapshots is None:
        return PagedLayer(rows) if rows else DummyLayer()
    if not rows:
        return StateLayer(snapshots)
    return CompressedLayer(rows, snapshots) if ENTRIES in rows else HybridLayer(rows, snapshots)
