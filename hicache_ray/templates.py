"""Component templates: what kinds of attention and of state space cache, with sizes as expressions over a configuration's attributes.

``"2*linear_num_key_heads*linear_key_head_dim"`` is read by :meth:`hicache_ray.families.Reader.number`. Nothing here knows a model family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hicache_ray.spec import Kind


@dataclass(frozen=True)
class Part:
    """A field: ``heads`` rows of ``shape``. ``dtype``: empty for the one of the model's weights."""

    name: str
    heads: str
    shape: tuple[str, ...]
    dtype: str = ""


@dataclass(frozen=True)
class Template:
    """A component of a family. ``unless``: (attribute, value): a layer whose entry of that list has that value lacks the component."""

    name: str
    kind: Kind
    fields: tuple[Part, ...]
    reach: str = "0"
    ratio: str = "1"
    replicated: bool = False
    unless: tuple[str, str] = ("", "")

    def absent(self, config: Any, layer: int) -> bool:
        attribute, value = self.unless
        entries = (getattr(config, attribute, None) if attribute else None) or ()
        return layer < len(entries) and bool(entries[layer] == value)


def with_heads(template: Template, heads: str, k: str, v: str = "") -> Template:
    """The same with keys of another size, and values of theirs or of their own."""
    return replace(template, fields=(Part("k", heads, (k,)), Part("v", heads, (v or k,))))


_HEAD_DIM = "head_dim | hidden_size/num_attention_heads"
_KV = (Part("k", "num_key_value_heads", (_HEAD_DIM,)), Part("v", "num_key_value_heads", (_HEAD_DIM,)))

FULL_KV = Template("full", Kind.FULL, _KV)
# transformers' sliding_window counts the query's own position, a window of ours only what precedes it.
WINDOW_KV = Template("window", Kind.WINDOW, _KV, reach="sliding_window - 1")
CHUNKED_KV = Template("chunked", Kind.CHUNKED, _KV, reach="attention_chunk_size")

#: Multi-head latent attention caches the compressed latent and one rotated key; every rank needs all of both.
MLA = Template("full", Kind.FULL, (Part("latent", "1", ("kv_lora_rank",)), Part("rope", "1", ("qk_rope_head_dim",))), replicated=True)
#: Keys of a sparse-attention indexer; a "shared" layer uses the choice of the one before it.
INDEX_KEYS = Template("index", Kind.FULL, (Part("index", "1", ("index_head_dim",)),), replicated=True, unless=("indexer_types", "shared"))

#: A window whose keys are its values too.
SHARED_KV_WINDOW = Template("window", Kind.WINDOW, (Part("kv", "1", ("head_dim",)),), reach="sliding_window - 1", replicated=True)
_CSA, _HCA = "compress_rates.compressed_sparse_attention", "compress_rates.heavily_compressed_attention"
CSA_ENTRIES = Template(
    "csa",
    Kind.FULL,
    (Part("entry", "1", ("head_dim",)), Part("index_entry", "1", ("index_head_dim",))),
    ratio=_CSA,
    replicated=True,
)
HCA_ENTRIES = Template("hca", Kind.FULL, (Part("entry", "1", ("head_dim",)),), ratio=_HCA, replicated=True)
#: What a compressor keeps between chunks: tokens of the window that is not full yet (none at a multiple of the ratio), and of
#: overlapping windows the half of the last full one that the next entry is made of. Gates are summed with an fp32 bias.
CSA_TAIL = Template(
    "csa_tail",
    Kind.STATE,
    (
        Part("overlap_gate", "1", (_CSA, "head_dim"), "float32"),
        Part("index_overlap_gate", "1", (_CSA, "index_head_dim"), "float32"),
        Part("overlap_kv", "1", (_CSA, "head_dim")),
        Part("index_overlap_kv", "1", (_CSA, "index_head_dim")),
        Part("tail_kv", "1", (f"{_CSA} - 1", "2*head_dim")),
        Part("tail_gate", "1", (f"{_CSA} - 1", "2*head_dim")),
        Part("index_tail_kv", "1", (f"{_CSA} - 1", "2*index_head_dim")),
        Part("index_tail_gate", "1", (f"{_CSA} - 1", "2*index_head_dim")),
    ),
    replicated=True,
)
HCA_TAIL = Template(
    "hca_tail",
    Kind.STATE,
    (Part("tail_kv", "1", (f"{_HCA} - 1", "head_dim")), Part("tail_gate", "1", (f"{_HCA} - 1", "head_dim"))),
    replicated=True,
)

# Recurrent states are kept in fp32 by the models whatever their weights are.
GATED_DELTA = Template(
    "state",
    Kind.STATE,
    (
        Part(
            "conv",
            "1",
            (
                "2*linear_num_key_heads*linear_key_head_dim + linear_num_value_heads*linear_value_head_dim",
                "linear_conv_kernel_dim",
            ),
        ),
        Part("recurrent", "linear_num_value_heads", ("linear_key_head_dim", "linear_value_head_dim"), "float32"),
    ),
)
KIMI_DELTA = Template(
    "state",
    Kind.STATE,
    (
        Part("conv", "1", ("3*linear_num_heads*linear_head_dim", "linear_conv_kernel_dim")),
        Part("recurrent", "linear_num_heads", ("linear_head_dim", "linear_head_dim"), "float32"),
    ),
)


def mamba2(heads: str, head_dim: str, groups: str, state: str, kernel: str) -> Template:
    """Mamba2's conv state (inputs, B and C) and recurrent state, by the names that a family has for their sizes."""
    conv = Part("conv", "1", (f"{heads}*{head_dim} + 2*{groups}*{state}", kernel))
    return Template("state", Kind.STATE, (conv, Part("recurrent", heads, (head_dim, state), "float32")))


def conv_states(name: str, kernel: str, *channels: str, dtype: str = "") -> Template:
    """Any number of short convolutions in one layer."""
    names = ("conv", *(f"conv{i}" for i in range(1, len(channels))))
    return Template(name, Kind.STATE, tuple(Part(n, "1", (c, kernel), dtype) for n, c in zip(names, channels, strict=True)))
