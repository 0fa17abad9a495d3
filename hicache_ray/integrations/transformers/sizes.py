"""Configurations of models with random weights: one tiny model of every family, and larger ones to try the tier with.

Tiny models have all kinds of layers of their family, windows that are no multiple of a page, and no two sizes alike by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Untied: with random weights a model whose head is its embedding repeats the last token for ever.
COMMON = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}

_WIDTH = {"hidden_size": 128, "intermediate_size": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY = {**_WIDTH, **_HEADS, "head_dim": 32}
_DEMO = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 64}
_WINDOWS = {"num_hidden_layers": 6, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}
_THREE_WINDOWS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 96}
_LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4}
_GDN = {**_LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
_TINY_GDN = {**_TINY, **_GDN, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MLA = {
    **_WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
_DEEPSEEK = {**_MLA, **_ROUTED, "q_lora_rank": 48, "num_hidden_layers": 3}
# 32 index heads: with 4 exact ties between scores flip the choice of the top k.
_DSA = {**_DEEPSEEK, "index_topk": 64, "index_head_dim": 40, "index_n_heads": 32}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_ALTERNATE = ["mamba", "attention"]

#: (model type, size) -> configuration. The demo size of qwen3_5_text has few, wide layers: a step waits for two collectives per layer.
SIZES: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
    {
        ("qwen3", "tiny"): {**_TINY, "num_hidden_layers": 3},
        ("qwen3", "demo"): {**_DEMO, "num_hidden_layers": 4},
        ("gemma3_text", "tiny"): {**_TINY, **_WINDOWS, "sliding_window": 96, "query_pre_attn_scalar": 32},
        ("gemma3_text", "demo"): {**_DEMO, **_WINDOWS, "sliding_window": 1024, "query_pre_attn_scalar": 64},
        ("qwen3_5_text", "tiny"): _TINY_GDN,
        ("qwen3_5_text", "demo"): {**_DEMO, **_GDN, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
        ("llama", "tiny"): {**_WIDTH, **_HEADS, "num_hidden_layers": 3},
        ("qwen3_moe", "tiny"): {**_TINY, **_EXPERTS, "num_hidden_layers": 2, "num_experts": 4},
        ("mistral", "tiny"): {**_TINY, "num_hidden_layers": 3, "sliding_window": 96},
        ("gemma4_text", "tiny"): {
            **_TINY,
            **_WINDOWS,
            "sliding_window": 96,
            "global_head_dim": 48,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
        },
        ("gpt_oss", "tiny"): {**_TINY, **_THREE_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
        ("mimo_v2_flash", "tiny"): {**_TINY, **_THREE_WINDOWS, **_ROUTED, "v_head_dim": 16},
        ("llama4_text", "tiny"): {
            **_TINY,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 256,
            "attention_chunk_size": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        ("deepseek_v3", "tiny"): {**_DEEPSEEK, "first_k_dense_replace": 1},
        ("deepseek_v32", "tiny"): {**_DSA, "first_k_dense_replace": 1},
        ("glm_moe_dsa", "tiny"): {**_DSA, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
        ("deepseek_v4", "tiny"): {
            "hidden_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "q_lora_rank": 48,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "sliding_window": 96,
            "o_groups": 2,
            "o_lora_rank": 32,
            "index_n_heads": 32,
            "index_head_dim": 40,
            "index_topk": 16,
            "hc_mult": 2,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        },
        ("bamba", "tiny"): {**_WIDTH, **_HEADS, **_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        ("falcon_h1", "tiny"): {**_TINY, **_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 256},
        ("granitemoehybrid", "tiny"): {
            **_WIDTH,
            **_HEADS,
            **_MAMBA2,
            "num_hidden_layers": 3,
            "layer_types": [*_ALTERNATE, "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
        },
        ("nemotron_h", "tiny"): {
            **_TINY,
            "layers_block_type": [*_ALTERNATE, "mamba", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
        },
        ("zamba2", "tiny"): {
            **_WIDTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "attention_head_dim": 64,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 64,
            "num_mem_blocks": 1,
        },
        ("mamba2", "tiny"): {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "expand": 2,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
        ("qwen3_next", "tiny"): {**_TINY_GDN, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
        ("qwen3_5_moe_text", "tiny"): {**_TINY_GDN, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
        ("kimi_linear", "tiny"): {
            **_MLA,
            **_EXPERTS,
            **_LINEAR,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "n_shared_experts": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        ("lfm2", "tiny"): {
            **_WIDTH,
            **_HEADS,
            "num_hidden_layers": 4,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        ("inkling_text", "tiny"): {
            **_TINY,
            **_ROUTED,
            "num_hidden_layers": 3,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "sliding_window_size": 96,
            "d_rel": 8,
            "rel_extent": 64,
            "local_layer_ids": [0, 1],
        },
    }
)
