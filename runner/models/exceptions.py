"""What the rules of runner/models/configuration.py cannot know of an architecture: its layers, and odd names.

An entry names the fields that it sets; it is filed under the module of `mlx_lm.models`, or under a name of its own
where `_VARIANTS` says which module it configures a second way. The weights of some architectures are drawn larger or
smaller than usual (`_WEIGHT_SCALES`), or a wrong state would not show, or rounding would.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from runner.models.configuration import (
    EXPERT_WIDTH,
    HEAD_WIDTH,
    INNER_WIDTH,
    WIDTH,
    tiny_config,
)


@dataclass(frozen=True)
class TinyKind:
    """One architecture of `mlx_lm.models`, what to set in its tiny configuration, and the scale of its weights."""

    module: str
    overrides: Mapping[str, Any] = field(repr=False)
    weight_scale: float = 1.0

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole configuration, as a model's config.json would have it."""
        return tiny_config(self.module, self.overrides)


def kind_of(name: str) -> TinyKind:
    """Return the tiny kind of a module of `mlx_lm.models` or of a variant; that there is one shows when it is built."""
    return TinyKind(_VARIANTS.get(name, name), _EXCEPTIONS.get(name, {}), _WEIGHT_SCALES.get(name, 1.0))


_VARIANTS = {"llama_sliding": "llama"}

_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
_CONV_THEN_FULL = ["conv", "full_attention"]
_DEFAULT_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_ROPE_BY_KIND = dict.fromkeys(_SLIDING_THEN_FULL, _DEFAULT_ROPE)
_SCALED_ROPE = {**_DEFAULT_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
_NO_MULTIPLIERS = {
    # They undo what training with them did; random weights have nothing to undo.
    "attention_out_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [1.0] * 2,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "ssm_out_multiplier": 1.0,
}
_TWO_EQUAL_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_LATENT_THREE = {**_TWO_EQUAL_HEADS, "num_hidden_layers": 3}
_LINEAR_ATTENTION = {
    "num_heads": 2,
    "head_dim": HEAD_WIDTH,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
}
_LONGCAT = {"num_layers": 2, "num_attention_heads": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
_LFM2 = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "layer_types": _CONV_THEN_FULL * 2}

_LFM2_DENSE = {
    **_LFM2,
    "block_dim": WIDTH,
    "block_ff_dim": INNER_WIDTH,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
}

_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1},
    # Neighbouring keys and values are joined by a convolution of two; only some layers have a window.
    "baichuan_m1": {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
    },
    "bailing_hybrid": {"group_norm_size": 2},
    "bailing_moe_linear": {"group_norm_size": 2},
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": EXPERT_WIDTH, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}},
    "deepseek_v3": _LATENT_THREE,
    # Picks fewer keys than a test's prompt has.
    "deepseek_v32": _LATENT_THREE,
    # A window, compressed groups of four, and an open group. Heads of 24 leave out the rounding to 8 and 4 bits, which
    # turns a difference in the last bit into a large one.
    "deepseek_v41": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (4, 4, 0),
        "kv_source_layer_ids": (0, 1),
        "index_source_layer_ids": (0, 1),
        "index_head_dim": 24,
        "index_topk": 6,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
    "exaone": {"head_dim": 16},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, False, True]},
    "falcon_h1": {"num_hidden_layers": 3, "mamba_chunk_size": 32, "mamba_d_ssm": 128, **_NO_MULTIPLIERS},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"]},
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    # The last layers have no cache of their own and read another layer's.
    "gemma3n": {
        "text_config": {
            "intermediate_size": [INNER_WIDTH] * 6,
            "num_hidden_layers": 6,
            "layer_types": _SLIDING_THEN_FULL * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": {"model_type": "gemma4_text", "num_hidden_layers": 6}},
    "gemma4_text": {"num_hidden_layers": 6},
    "glm_moe_dsa": {"rope_parameters": _DEFAULT_ROPE, "q_lora_rank": 32},
    # One kv head, and queries, keys and values out of one product.
    "gpt_bigcode": {"n_layer": 3, "num_key_value_heads": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    # Every second layer reads the keys and values of the one before and leaves its own cache empty.
    "hunyuan": {
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "kimi_k3": {"text_config": {**_TWO_EQUAL_HEADS, "linear_attn_config": _LINEAR_ATTENTION}},
    "kimi_linear": {**_TWO_EQUAL_HEADS, "linear_attn_config": _LINEAR_ATTENTION},
    "lfm2": _LFM2_DENSE,
    "lfm2-vl": {"text_config": {"model_type": "lfm2", **_LFM2_DENSE}},
    "lfm2_moe": _LFM2,
    # Heads of 64, so that its cache can be quantized in groups of 64.
    "llama": {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 64, "layer_types": None},
    "llama_sliding": {"layer_types": _SLIDING_THEN_FULL * 2},
    # Chunked attention, with a full layer every fourth.
    "llama4": {
        "text_config": {
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    # The cache of the first entry belongs to no layer: it holds the last token ids for the n-gram embeddings.
    "longcat_flash_ngram": {
        **_LONGCAT,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"num_hidden_layers": 3, "state_size": 16, "use_conv_bias": True, "time_step_rank": 8},
    "mamba2": {
        "num_hidden_layers": 3,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    },
    "mellum": {"rope_parameters": _ROPE_BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "partial_rotary_factor": 0.5,
    },
    "minicpm3": {"rope_scaling": {"short_factor": 1.0, "long_factor": 1.0}},
    # Full attention, and attention to the blocks of keys that an index of their own picks.
    "minimax_m3_vl": {
        "text_config": {
            "layer_types": ["full_attention", "sparse_attention"] * 2,
            "moe_layer_freq": [0, 1, 1, 1],
            "index_block_size": 8,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": {"rope_parameters": _SCALED_ROPE},
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": _SCALED_ROPE}},
    "mistral4": {"rope_parameters": {**_SCALED_ROPE, "factor": 1.0}},
    "muse_spark": {
        "text_config": {
            "rope_parameters": _DEFAULT_ROPE,
            "layer_rope_theta": [10_000.0, 0.0] * 2,
            "num_shared_experts": 0,
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
    "nemotron_h": {
        "use_conv_bias": True,
        "layer_types": None,
        "hybrid_override_pattern": ["M", "-", "*", "M", "-", "*"],
    },
    "olmo_hybrid": {"layer_types": _LINEAR_THEN_FULL * 2},
    "openelm": {
        "ffn_dim_divisor": 32,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2, 2, 1, 1],
        "ffn_multipliers": [1.0, 2.0, 1.0, 2.0],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "pixtral": {"text_config": {"model_type": "llama", "layer_types": None}},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
        "text_config": {"model_type": "qwen3_5", "num_experts": 0},
    },
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5"}},
    "qwen3_next": {"decoder_sparse_step": 2, "partial_rotary_factor": 0.5},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "num_hidden_layers": 3,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {"rope_parameters": _ROPE_BY_KIND},
    # A window in every layer, and nothing else.
    "step3p5": {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3},
}

_WEIGHT_SCALES = {
    # The linear attention of these sums up the whole prompt: smaller weights keep the rounding of large sums small.
    "bailing_hybrid": 0.7,
    "bailing_moe_linear": 0.7,
    "granitemoehybrid": 0.7,
    "olmo_hybrid": 0.7,
    "falcon_h1": 0.7,
    "deepseek_v32": 1.3,
}
