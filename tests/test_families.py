"""Bytes of a token and of a snapshot, computed by hand for sizes that models really have; shapes of specs that need no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ray.errors import ConfigError
from hicache_ray.families import Reader, spec_from_config
from hicache_ray.spec import CacheSpec, Kind, Shard

V4_LAYERS = ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
V4 = {
    "num_hidden_layers": 6,
    "layer_types": V4_LAYERS,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}


def spec(model_type: str, page: int = 64, dtype: str = "bfloat16", **sizes: Any) -> CacheSpec:
    return spec_from_config(SimpleNamespace(model_type=model_type, **sizes), page, 1, dtype)


# family, sizes, bytes per token, bytes per snapshot; all in bfloat16 (2 bytes), recurrent states in float32 (4 bytes).
BY_HAND: list[tuple[str, dict[str, Any], float, int]] = [
    # 32 layers x (8 heads x 128 of K + the same of V) x 2 bytes
    ("llama", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 131_072, 0),
    # 61 layers x (512 of latent + 64 of rope key) x 2 bytes
    ("deepseek_v3", {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70_272, 0),
    # 61 layers x (512 + 64 + 128 of the indexer) x 2 bytes
    (
        "deepseek_v32",
        {
            "num_hidden_layers": 61,
            "layer_types": ["indexed_attention"] * 61,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
        },
        85_888,
        0,
    ),
    # 9 full layers x 4 heads x (192 of K + 128 of V) x 2 = 23,040; 39 window layers x 8 heads x (192 + 128) x 2 = 199,680
    (
        "mimo_v2_flash",
        {
            "num_hidden_layers": 48,
            "layer_types": ["full_attention"] * 9 + ["sliding_attention"] * 39,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
        },
        222_720,
        0,
    ),
    # 12 full layers x (2 heads x 256 x 2) x 2 = 24,576. 36 states of (2 x 16 x 128 + 32 x 128 = 8,192 channels x 4) x 2 = 65,536 bytes of
    # conv state and 32 x 128 x 128 x 4 = 2,097,152 bytes of recurrent state
    (
        "qwen3_next",
        {
            "num_hidden_layers": 48,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        24_576,
        36 * (65_536 + 2_097_152),
    ),
    # 44 layers that have both: (2 heads x 64 x 2) x 2 = 512 bytes a token; (24 x 128 + 2 x 1 x 256 = 3,584 channels x 4) x 2 = 28,672 and
    # 24 x 128 x 256 x 4 = 3,145,728 a snapshot
    (
        "falcon_h1",
        {
            "num_hidden_layers": 44,
            "layer_types": ["hybrid"] * 44,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        44 * 512,
        44 * (28_672 + 3_145_728),
    ),
    # 6 full layers x (8 heads x 64 x 2) x 2 = 12,288; 10 conv states x (2,048 channels x 3) x 2 = 122,880
    (
        "lfm2",
        {
            "num_hidden_layers": 16,
            "layer_types": ["conv"] * 10 + ["full_attention"] * 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 2048,
            "conv_L_cache": 3,
        },
        12_288,
        122_880,
    ),
    # Windows: 6 layers x 512 (keys are values) x 2 = 6,144. An entry per 4 tokens: 2 layers x (512 + 128) x 2 / 4 = 640. One per 128:
    # 2 x 512 x 2 / 128 = 16. Tails: 2 layers x (3 tokens x (1,024 + 256) x 2 (kv, gate) x 2 bytes = 15,360, and of the overlap
    # 4 tokens x (512 + 128) x (2 + 4 bytes) = 15,360), and 2 layers x 127 tokens x 512 x 2 (kv, gate) x 2 bytes = 520,192
    ("deepseek_v4", V4, 6_144 + 640 + 16, 2 * (15_360 + 15_360) + 520_192),
    # 2 of 3 layers with a window: 2 x (4 heads x 32 x 2) x 2 = 1,024; 1 full layer x (2 heads x 32 x 2) x 2 = 256. States in float32:
    # 2 x (128 + 128 + 96 + 96) x 4 x 4 = 14,336 and 1 x (64 + 64 + 96 + 96) x 4 x 4 = 5,120
    (
        "inkling_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "hidden_size": 96,
            "sliding_window": 96,
            "conv_kernel_size": 4,
        },
        1_280,
        14_336 + 5_120,
    ),
]


@pytest.mark.parametrize(("family", "sizes", "token", "snapshot"), BY_HAND, ids=[b[0] for b in BY_HAND])
def test_bytes_by_hand(family: str, sizes: dict[str, Any], token: float, snapshot: int) -> None:
    made = spec(family, **sizes)
    assert made.bytes_per_token() == token
    assert made.snapshot_bytes() == snapshot
    # Twice the bytes in fp32, save for what is fp32 anyway.
    assert spec(family, dtype="float32", **sizes).bytes_per_token() == 2 * token


def test_a_component_whose_ratio_exceeds_the_page_spans_pages() -> None:
    made = spec("deepseek_v4", **V4)
    kinds = {c.name: (c.kind, c.layers, c.ratio, c.page_span, c.entries(64)) for c in made.components}
    assert kinds == {
        "window": (Kind.WINDOW, (0, 1, 2, 3, 4, 5), 1, 1, 64),
        "csa": (Kind.FULL, (2, 4), 4, 1, 16),
        "hca": (Kind.FULL, (3, 5), 128, 2, 1),
        "csa_tail": (Kind.STATE, (2, 4), 1, 1, 1),
        "hca_tail": (Kind.STATE, (3, 5), 1, 1, 1),
    }
    assert {c.shard for c in made.components} == {Shard.REPLICATED}
    assert made["window"].lo(1000) == 1000 - 127
    # Resume lengths are multiples of lcm(largest ratio, grid).
    assert made.step(256) == 256
    assert made.step(64) == 128
    assert made.step(192) == 384


def test_expressions() -> None:
    reader = Reader(SimpleNamespace(a=6, b=4, none=None, d={"x": 5}, num_key_value_heads=8), 2, "float32", "m")
    values = {
        "7": 7,
        "a": 6,
        "a - 1": 5,
        "2*a + b*b - d.x": 23,
        "a/4*b": 4,
        "none | b": 4,
        "d.y | missing | a*3": 18,
        "num_key_value_heads": 4,
    }
    assert {text: reader.number(text) for text in values} == values
    with pytest.raises(ConfigError, match='configuration of "m" has no none . d.y'):
        reader.number("none | d.y")
