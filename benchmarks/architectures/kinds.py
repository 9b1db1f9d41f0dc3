"""A tiny configuration of every architecture of mlx-lm, with those that `tiny:KIND` does not offer."""

from collections.abc import Mapping
from typing import Any

from runner.models.tiny import EXPERT_WIDTH, TINY_KINDS, TinyKind

_DEFAULT_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
#: Scales of weights other than 1: linear attention sums up the whole prompt, and these make its rounding smaller.
_WEIGHT_SCALES = dict.fromkeys(("bailing_hybrid", "bailing_moe_linear", "granitemoehybrid", "olmo_hybrid"), 0.7)
#: Fields that the rules of `runner.models.tiny` do not know, by module of `mlx_lm.models`.
_OVERRIDES: dict[str, Mapping[str, Any]] = {
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": EXPERT_WIDTH, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}},
    "exaone": {"head_dim": 16},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, False, True]},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"]},
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma4": {"text_config": {"model_type": "gemma4_text", "num_hidden_layers": 6}},
    "glm_moe_dsa": {"rope_parameters": _DEFAULT_ROPE, "q_lora_rank": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    # Every second layer reads the keys and values of the one before and leaves its own cache empty.
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k3": {"text_config": TINY_KINDS["kimi_linear"].overrides},
    "lfm2-vl": {"text_config": {"model_type": "lfm2", **TINY_KINDS["lfm2"].overrides}},
    "lfm2_moe": TINY_KINDS["lfm2"].overrides,
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        **TINY_KINDS["longcat_flash_ngram"].overrides,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
    },
    "mellum": {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _DEFAULT_ROPE)},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "partial_rotary_factor": 0.5,
    },
    "minicpm3": {"rope_scaling": {"short_factor": 1.0, "long_factor": 1.0}},
    # Full attention, and attention to the blocks of keys that an index of their own picks.
    "minimax_m3_vl": {
        "text_config": {"layer_types": ["full_attention", "sparse_attention"] * 2, "moe_layer_freq": [0, 1, 1, 1]}
    },
    "mistral3": {"text_config": {"model_type": "ministral3", **TINY_KINDS["ministral3"].overrides}},
    "mistral4": {"rope_parameters": {**TINY_KINDS["ministral3"].overrides["rope_parameters"], "factor": 1.0}},
    "muse_spark": {
        "text_config": {
            **{"rope_parameters": _DEFAULT_ROPE, "layer_rope_theta": [10_000.0, 0.0] * 2, "num_shared_experts": 0}
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    # A layer without attention has no cache.
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {"num_query_heads": [4] * 4, "num_kv_heads": [2, 2, 1, 1], "ffn_multipliers": [1.0, 2.0, 1.0, 2.0]},
    "phi3small": {"gegelu_limit": 20.0},
    "pixtral": {"text_config": {"model_type": "llama", "layer_types": None}},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
        "text_config": {"model_type": "qwen3_5", "num_experts": 0},
    },
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5"}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "spark2_5": {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _DEFAULT_ROPE)},
}


def kind_of(name: str) -> TinyKind:
    """The tiny kind of a module of `mlx_lm.models`; `build` finds out whether the module is a model."""
    return TINY_KINDS.get(name) or TinyKind(name, _OVERRIDES.get(name, {}), _WEIGHT_SCALES.get(name, 1.0))
