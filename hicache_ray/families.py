"""Model families as data: which components the layers of a model have.

A family maps the layer types of its Hugging Face configuration to component templates; a template says kind, fields, reach and ratio, each
size as an expression over the configuration's attributes. A configuration object is read by attribute only; nothing here imports
transformers. A new family of known templates is one line in :data:`FAMILIES`.

Field names are the contract with the engine: each name stands for one place in a transformers cache layer (``integrations.transformers
.places``), so that a spec can be compared with what the model really keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hicache_ray.errors import ConfigError, UnsupportedModel
from hicache_ray.spec import CacheSpec, Component, Field, Shard
from hicache_ray.templates import (
    CHUNKED_KV,
    CSA_ENTRIES,
    CSA_TAIL,
    FULL_KV,
    GATED_DELTA,
    HCA_ENTRIES,
    HCA_TAIL,
    INDEX_KEYS,
    KIMI_DELTA,
    MLA,
    SHARED_KV_WINDOW,
    WINDOW_KV,
    Template,
    conv_states,
    mamba2,
    with_heads,
)

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

#: Counts that the ranks of a tensor-parallel group share: reading one gives this rank's part.
SPLIT: Mapping[str, str] = MappingProxyType(
    {
        "num_key_value_heads": "key-value heads",
        "linear_num_key_heads": "linear key heads",
        "linear_num_value_heads": "linear value heads",
    }
)

#: Layers of these types cache nothing.
UNCACHED = ("moe", "mlp")


@dataclass(frozen=True)
class Family:
    """Layer type -> templates of its components. ``tp``: whether the engine can split the model over ranks. ``attention``: the
    implementation it is loaded with ("eager" where the model has attention sinks, which sdpa does not know). ``decode``: why a token that
    was decoded leaves another state than the same token in a prompt does, by more than rounding; empty where it does not."""

    layers: Mapping[str, tuple[Template, ...]]
    tp: bool = False
    attention: str = "sdpa"
    decode: str = ""


_FULL = {"full_attention": (FULL_KV,)}
_WINDOWS = {**_FULL, "sliding_attention": (WINDOW_KV,)}
#: transformers 5.24: ``torch_mamba_chunk_scan_combined`` is given ``dt_limit``, ``torch_selective_state_update`` is not.
_TIME_STEP = "its upstream code limits the time step (time_step_min) in prefill and not in decode"
_GDN = {**_FULL, "linear_attention": (GATED_DELTA,)}
_DSA = {"indexed_attention": (MLA, INDEX_KEYS)}
_MAMBA_D = mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON = mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_ZAMBA = mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv")
_MAMBA2 = mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
_LFM2 = conv_states("state", "conv_L_cache", "hidden_size")
_SWA = "swa_num_key_value_heads*swa_head_dim"
_GLOBAL = "num_key_value_heads*head_dim"
_INKLING_SLIDING = conv_states("window_state", "conv_kernel_size", _SWA, _SWA, "hidden_size", "hidden_size", dtype="float32")
_INKLING_FULL = conv_states("full_state", "conv_kernel_size", _GLOBAL, _GLOBAL, "hidden_size", "hidden_size", dtype="float32")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3": Family(_FULL, tp=True),
        "gemma3_text": Family(_WINDOWS, tp=True),
        "qwen3_5_text": Family(_GDN, tp=True),
        "llama": Family(_FULL),
        "qwen3_moe": Family(_WINDOWS),
        "mistral": Family(_WINDOWS),
        "gemma4_text": Family(_WINDOWS),
        "gpt_oss": Family(_WINDOWS, attention="eager"),
        "mimo_v2_flash": Family(
            {
                "full_attention": (with_heads(FULL_KV, "num_key_value_heads", "head_dim", "v_head_dim"),),
                "sliding_attention": (with_heads(WINDOW_KV, "2*num_key_value_heads", "head_dim", "v_head_dim"),),
            },
            attention="eager",
        ),
        "llama4_text": Family({**_FULL, "chunked_attention": (CHUNKED_KV,)}),
        "deepseek_v3": Family({"full_attention": (MLA,)}),
        "deepseek_v32": Family(_DSA),
        "glm_moe_dsa": Family(_DSA),
        "deepseek_v4": Family(
            {
                "sliding_attention": (SHARED_KV_WINDOW,),
                "compressed_sparse_attention": (SHARED_KV_WINDOW, CSA_ENTRIES, CSA_TAIL),
                "heavily_compressed_attention": (SHARED_KV_WINDOW, HCA_ENTRIES, HCA_TAIL),
            },
            attention="eager",
        ),
        "bamba": Family({**_FULL, "linear_attention": (_MAMBA_D,)}),
        "falcon_h1": Family({"hybrid": (FULL_KV, _MAMBA_D)}),
        "granitemoehybrid": Family({**_FULL, "linear_attention": (_MAMBA_D,)}),
        "nemotron_h": Family({**_FULL, "linear_attention": (_NEMOTRON,)}, decode=_TIME_STEP),
        "zamba2": Family(
            {"hybrid": (with_heads(FULL_KV, "num_key_value_heads", "attention_head_dim"), _ZAMBA), "linear_attention": (_ZAMBA,)},
            decode=_TIME_STEP,
        ),
        "mamba2": Family({"linear_attention": (_MAMBA2,)}, attention="eager"),
        "qwen3_next": Family(_GDN),
        "qwen3_5_moe_text": Family(_GDN),
        "kimi_linear": Family({"full_attention": (MLA,), "linear_attention": (KIMI_DELTA,)}),
        "lfm2": Family({**_FULL, "conv": (_LFM2,)}),
        "inkling_text": Family(
            {
                "hybrid": (FULL_KV, _INKLING_FULL),
                "hybrid_sliding": (with_heads(WINDOW_KV, "swa_num_key_value_heads", "swa_head_dim"), _INKLING_SLIDING),
            }
        ),
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


@dataclass(frozen=True)
class Reader:
    """Sizes of a configuration as one of ``ranks`` ranks sees them. ``config``: of one layer, where layers differ."""

    config: Any
    ranks: int
    dtype: str
    model_type: str = field(default="")

    def number(self, text: str) -> int:
        """The value of an expression: alternatives ``a | b`` (the first whose attributes are all there) of sums of products and quotients
        of attributes and integers; ``a.b`` is an entry of a mapping."""
        for alternative in text.split("|"):
            if (value := self._sum(alternative)) is not None:
                return value
        raise ConfigError(f'the model configuration of "{self.model_type}" has no {text}, which its cache spec needs')

    def _sum(self, text: str) -> int | None:
        total = 0
        for sign, term in re.findall(r"([+-]?)\s*([^+-]+)", text):
            value = 1
            for operator, factor in re.findall(r"([*/]?)\s*([\w.]+)", term):
                read = int(factor) if factor.isdigit() else self._attribute(factor)
                if read is None:
                    return None
                value = value // read if operator == "/" else value * read
            total += -value if sign == "-" else value
        return total

    def _attribute(self, name: str) -> int | None:
        first, _, rest = name.partition(".")
        value = getattr(self.config, first, None)
        value = value.get(rest) if rest and isinstance(value, Mapping) else value
        if value is None or first not in SPLIT:
            return None if value is None else int(value)
        if value % self.ranks:
            raise ConfigError(
                f'model.tp is {self.ranks}, which does not divide the {value} {SPLIT[first]} of "{self.model_type}"; choose a divisor'
            )
        return int(value) // self.ranks

    def component(self, template: Template, page_size: int) -> Component:
        """What ``template`` is for this configuration, of no particular layer yet."""
        fields = []
        for part in template.fields:
            shape = tuple(self.number(n) for n in part.shape)
            dtype = part.dtype or self.dtype
            fields.append(Field(part.name, self.number(part.heads), math.prod(shape), ITEMSIZE[dtype], dtype, shape))
        ratio = self.number(template.ratio)
        return Component(
            template.name,
            template.kind,
            tuple(fields),
            reach=self.number(template.reach),
            # A page holds whole entries.
            page_span=ratio // math.gcd(ratio, page_size),
            ratio=ratio,
            shard=Shard.REPLICATED if template.replicated else Shard.HEADS,
        )


def layer_types(config: Any) -> tuple[str, ...]:
    """The type of every layer, as transformers chooses its cache layers (``cache_utils.get_layer_types_and_kwargs`` of 5.24)."""
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [
            "sliding_attention"
            if getattr(c, "sliding_window", None) is not None
            else "chunked_attention"
            if getattr(c, "attention_chunk_size", None) is not None
            else "full_attention"
            for c in _per_layer(config)
        ]
    # A layer that reads the keys and values of another one has none of its own.
    shared = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    return tuple("mlp" if mode == "reuse" else t for t, mode in zip(types, shared, strict=True))


def _per_layer(config: Any) -> list[Any]:
    """One configuration per layer; the same one unless the model has unlike layers of one type."""
    return list(getattr(config, "per_layer_config", None) or [config] * int(config.num_hidden_layers))


def spec_from_config(config: Any, page_size: int, ranks: int = 1, dtype: str = "float32") -> CacheSpec:
    """The cache spec of a Hugging Face text configuration, per rank of ``ranks``. Raises :class:`ConfigError` on what does not fit."""
    family = family_of(config.model_type)
    _accept(config, family, ranks, dtype)
    readers = [Reader(c, ranks, dtype, config.model_type) for c in _per_layer(config)]
    found: dict[Component, list[int]] = {}
    for index, layer_type in enumerate(layer_types(config)):
        if layer_type in UNCACHED:
            continue
        if layer_type not in family.layers:
            raise UnsupportedModel(
                f'layer {index} of "{config.model_type}" is of type "{layer_type}", which its family has no component for; '
                f"the family knows {', '.join(family.layers)}"
            )
        for template in family.layers[layer_type]:
            if not template.absent(config, index):
                found.setdefault(readers[index].component(template, page_size), []).append(index)
    names = [c.name for c in found]
    components = [
        # Layers of one template but unlike sizes are components of their own.
        replace(c, layers=tuple(layers), name=c.name if names.index(c.name) == i else f"{c.name}.{names[:i].count(c.name) + 1}")
        for i, (c, layers) in enumerate(found.items())
    ]
    return CacheSpec(config.model_type, page_size, tuple(sorted(components, key=lambda c: c.name)), ranks)


def _accept(config: Any, family: Family, ranks: int, dtype: str) -> None:
    if dtype not in ITEMSIZE:
        raise ConfigError(f'model.dtype is "{dtype}"; choose one of {", ".join(ITEMSIZE)}')
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            f'model type "{config.model_type}" with use_bidirectional_attention is refused: '
            "what it caches of a prefix depends on the tokens that follow"
        )
    if ranks > 1 and not family.tp:
        able = ", ".join(name for name, f in FAMILIES.items() if f.tp)
        raise ConfigError(
            f'model.tp is {ranks}, but "{config.model_type}" runs on one rank only; set model.tp to 1 or choose one of {able}'
        )
