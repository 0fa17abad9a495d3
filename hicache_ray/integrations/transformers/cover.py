"""Whether a cache spec covers what a model really keeps: a short forward through transformers' own cache, looked at layer by layer.

A cache that the tier did not know of would be lost at every resume, and the output would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hicache_ray.errors import ConfigError
from hicache_ray.integrations.transformers.places import KEYS, PLACES, VALUES, Place
from hicache_ray.spec import CacheSpec, Component, Field, Kind


def check_covered(model: PreTrainedModel, spec: CacheSpec) -> None:
    """:class:`ConfigError` with the layer's name and class unless the fields of ``spec`` (of one rank) are what each layer keeps."""
    cache = DynamicCache(config=model.config)
    # Enough tokens for an entry of every layer that compresses, and one more for its tail.
    count = 1 + max(int(getattr(layer, "compress_rate", 1)) for layer in cache.layers)
    tokens = torch.arange(count, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
    for index, layer in enumerate(cache.layers):
        _check_layer(layer, index, spec, count)


def _check_layer(layer: Any, index: int, spec: CacheSpec, count: int) -> None:
    who = f'layer {index} of "{spec.model_type}" ({type(layer).__name__})'
    wanted = {PLACES[f.name]: (c, f) for c in spec.components if index in c.layers for f in c.fields}
    kept = dict(_kept(layer))
    if VALUES in kept and VALUES not in wanted and torch.equal(kept[KEYS], kept[VALUES]):
        del kept[VALUES]  # values that are the keys need no field of their own
    for place, tensor in kept.items():
        if place not in wanted:
            raise ConfigError(
                f"{who} keeps {place} of shape {tuple(tensor.shape)}, which no component of the cache spec holds; "
                "give its family a component with a field for it"
            )
        component, field = wanted[place]
        have, want = _described(tensor), _expected(component, field, layer, count)
        if have != want:
            raise ConfigError(f"{who} keeps {place} as {have}, but component {component.name!r} of the cache spec expects {want}")
        _check_kind(layer, component, who)
    if missing := [place for place in wanted if place not in kept]:
        raise ConfigError(f"{who} does not keep {missing[0]}, which the cache spec expects of it")


def _kept(layer: Any) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every tensor with content that a cache layer holds in a public attribute."""
    for name, value in vars(layer).items():
        if name.startswith("_"):
            continue
        for key, tensor in value.items() if isinstance(value, dict) else [(None, value)]:
            place = Place(name, key)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                yield place, tensor


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _expected(component: Component, field: Field, layer: Any, count: int) -> str:
    shape = list(field.shape or (field.width,))
    if component.is_state:
        # A snapshot has room for all tokens of a window but the last; so many are there now.
        if PLACES[field.name].attribute.startswith("buffer") and shape[0] == int(layer.compress_rate) - 1:
            shape[0] = count % int(layer.compress_rate)
        shape = [*([field.heads] if field.heads > 1 else []), *shape]
    else:
        entries = min(count, component.reach) if component.kind is Kind.WINDOW else count // component.ratio
        # An indexer's keys and compressed entries have no axis of heads.
        shape = [*([field.heads] if PLACES[field.name] in (KEYS, VALUES) else []), entries, *shape]
    return f"{field.dtype}{[1, *shape]}"


def _check_kind(layer: Any, component: Component, who: str) -> None:
    """A window that transformers keeps must be a window of the same length here; what it keeps whole must be kept whole."""
    if component.is_state or component.ratio > 1:
        return
    window = getattr(layer, "sliding_window", None)
    fits = {
        Kind.WINDOW: window == component.reach + 1,
        Kind.CHUNKED: window == component.reach,
        Kind.FULL: window is None,
    }[component.kind]
    if not fits:
        keeps = "all tokens" if window is None else f"a window of {window} tokens"
        raise ConfigError(
            f"{who} keeps {keeps}, but component {component.name!r} of the cache spec is {component.kind.value} "
            f"with a reach of {component.reach}"
        )
