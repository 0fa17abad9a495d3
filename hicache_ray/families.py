"""Model families as data: which components the layers of a model have.

A family maps the layer types of its Hugging Face configuration to component templates. A configuration object is read by attribute only;
nothing here imports transformers. A new family of known templates is one line in :data:`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hicache_ray.errors import ConfigError, UnsupportedModel
from hicache_ray.spec import CacheSpec, Component, Field, Kind

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True)
class Reader:
    """What a template may ask for: the configuration, the ranks, and the dtype of keys and values."""

    config: Any
    ranks: int
    dtype: str

    def get(self, name: str, default: int | None = None) -> int:
        value = getattr(self.config, name, default)
        if value is None:
            raise ConfigError(f"the model configuration of {self.config.model_type!r} has no {name}, which its cache spec needs")
        return int(value)

    def share(self, count: int, what: str) -> int:
        """This rank's part of ``count`` heads."""
        if count % self.ranks:
            raise ConfigError(
                f"model.tp is {self.ranks}, which does not divide the {count} {what} of {self.config.model_type!r}; choose a divisor"
            )
        return count // self.ranks

    def field(self, name: str, heads: int, shape: tuple[int, ...], dtype: str = "") -> Field:
        width = 1
        for n in shape:
            width *= n
        kind = dtype or self.dtype
        return Field(name, heads, width, ITEMSIZE[kind], kind, shape)


Template = Callable[[Reader, tuple[int, ...]], Component]


def _kv_fields(r: Reader) -> tuple[Field, ...]:
    heads = r.share(r.get("num_key_value_heads"), "key-value heads")
    head_dim = getattr(r.config, "head_dim", None) or r.get("hidden_size") // r.get("num_attention_heads")
    return r.field("k", heads, (int(head_dim),)), r.field("v", heads, (int(head_dim),))


def full_kv(r: Reader, layers: tuple[int, ...]) -> Component:
    return Component("full", Kind.FULL, _kv_fields(r), layers)


def window_kv(r: Reader, layers: tuple[int, ...]) -> Component:
    # HF's sliding_window counts the query's own position, a window of ours only what precedes it.
    return Component("window", Kind.WINDOW, _kv_fields(r), layers, reach=r.get("sliding_window") - 1)


def gated_delta(r: Reader, layers: tuple[int, ...]) -> Component:
    """Conv and recurrent state of a gated delta net; both are sharded by heads over the ranks."""
    keys = r.share(r.get("linear_num_key_heads"), "linear key heads")
    values = r.share(r.get("linear_num_value_heads"), "linear value heads")
    dk, dv = r.get("linear_key_head_dim"), r.get("linear_value_head_dim")
    channels = 2 * keys * dk + values * dv
    fields = (
        r.field("conv", 1, (channels, r.get("linear_conv_kernel_dim"))),
        # The recurrent state is kept in fp32 by the model whatever its weights are.
        r.field("recurrent", values, (dk, dv), "float32"),
    )
    return Component("state", Kind.STATE, fields, layers)


@dataclass(frozen=True)
class Family:
    """Layer type -> template. ``uniform``: the layer type of every layer where the configuration has no ``layer_types``."""

    templates: Mapping[str, Template]
    uniform: str = ""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3": Family({"full_attention": full_kv}, uniform="full_attention"),
        "gemma3_text": Family({"full_attention": full_kv, "sliding_attention": window_kv}),
        "qwen3_5_text": Family({"full_attention": full_kv, "linear_attention": gated_delta}),
    }
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mamba": "its upstream code ignores the cached state when more than one token continues it, so a hit would give wrong output",
        "jamba": "its upstream code ignores the cached state when more than one token continues it, so a hit would give wrong output",
        "recurrent_gemma": "it keeps its recurrent state outside the cache object, so the tier cannot save or restore it",
    }
)


def canonical_type(model_type: str) -> str:
    """The model type as :data:`FAMILIES` spells it: a text model may be named without its ``_text`` suffix, or with one it does not have.

    Raises :class:`UnsupportedModel` with the reason and the legal choices.
    """
    if model_type in REFUSED:
        raise UnsupportedModel(f'model type "{model_type}" is refused: {REFUSED[model_type]}; choose one of {", ".join(FAMILIES)}')
    for name in (model_type, f"{model_type}_text", model_type.removesuffix("_text")):
        if name in FAMILIES:
            return name
    raise UnsupportedModel(f'model type "{model_type}" is not known; choose one of {", ".join(FAMILIES)}')


def family_of(model_type: str) -> Family:
    """The family, or :class:`UnsupportedModel` with the reason and the legal choices."""
    return FAMILIES[canonical_type(model_type)]


def spec_from_config(config: Any, page_size: int, ranks: int = 1, dtype: str = "float32") -> CacheSpec:
    """The cache spec of a Hugging Face text configuration, per rank of ``ranks``. Raises :class:`ConfigError` on what does not fit."""
    family = family_of(config.model_type)
    if dtype not in ITEMSIZE:
        raise ConfigError(f'model.dtype is "{dtype}"; choose one of {", ".join(ITEMSIZE)}')
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            f'model type "{config.model_type}" with use_bidirectional_attention is refused: '
            "what it caches of a prefix depends on the tokens that follow"
        )
    types = list(getattr(config, "layer_types", None) or [family.uniform] * int(config.num_hidden_layers))
    reader = Reader(config, ranks, dtype)
    by_type: dict[str, list[int]] = {}
    for index, layer_type in enumerate(types):
        if layer_type not in family.templates:
            raise UnsupportedModel(
                f'layer {index} of "{config.model_type}" is of type "{layer_type}", which its family has no component for; '
                f"the family knows {', '.join(family.templates)}"
            )
        by_type.setdefault(layer_type, []).append(index)
    components = tuple(family.templates[t](reader, tuple(layers)) for t, layers in sorted(by_type.items()))
    return CacheSpec(config.model_type, page_size, components, ranks)
