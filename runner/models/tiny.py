"""Tiny random models of every layer kind by name, and a byte-level tokenizer for them.

A kind is an architecture of mlx-lm and a small configuration of it: about 64 wide, two to six layers, windows short
enough to wrap within a test's prompt. A configuration is made from `ModelArgs`, field by field: fields in `VALUES` get
the value there, other fields have their default, and the type decides for the rest. `_OVERRIDES` has what no rule can
know: which layers are of which kind, and sizes that depend on each other.

A new model hardly depends on its state: weights are small, gates and kernels are zero. These weights are scaled so that
the signal has about the same size in all layers. Then a wrong state in any layer changes the next logits far more than
rounding does. The weights depend only on the seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCABULARY_LENGTH = 256
CONTEXT_LENGTH = 32_768
WINDOW_LENGTH = 16
CHUNK_LENGTH = 32
LAYER_COUNT = 4

WIDTH = 64
INNER_WIDTH = 128
EXPERT_WIDTH = 32
HEAD_WIDTH = 32

VALUES: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY_LENGTH, "vocab_size num_vocab vocab_size_per_layer_input"),
        (CONTEXT_LENGTH, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
        (WINDOW_LENGTH, "sliding_window sliding_window_size attention_window_size window_size loop_window_size"),
        (CHUNK_LENGTH, "attention_chunk_size"),
        (WIDTH, "hidden_size hidden_dim d_model model_dim n_embd dim_model_base block_dim"),
        (INNER_WIDTH, "intermediate_size intermediate_size_mlp dense_intermediate_size ff_intermediate_size"),
        (INNER_WIDTH, "ffn_hidden_size n_inner block_ff_dim mamba_d_ssm"),
        (EXPERT_WIDTH, "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size"),
        (EXPERT_WIDTH, "shared_intermediate_size expert_ffn_hidden_size share_expert_dim moe_hidden_size"),
        (HEAD_WIDTH, "head_dim global_head_dim hidden_size_per_head index_head_dim swa_head_dim swa_v_head_dim"),
        (HEAD_WIDTH, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
        (32, "kv_lora_rank q_lora_rank ssm_state_size mamba_d_state state_size block_multiple_of ffn_dim_divisor"),
        # Fewer than a test's prompt has.
        (24, "index_topk"),
        (16, "qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim hidden_size_per_layer_input kv_channels"),
        (16, "o_lora_rank a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
        (8, "index_block_size laurel_rank"),
        (LAYER_COUNT, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
        (4, "num_attention_heads num_heads n_heads n_head swa_num_attention_heads linear_num_value_heads"),
        (4, "mamba_num_heads mamba_n_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
        (4, "conv_kernel mamba_d_conv conv1d_width linear_conv_kernel_dim hc_sinkhorn_iters"),
        (3, "emb_neighbor_num index_topk_blocks"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups swa_num_key_value_heads n_shared_head"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k zero_expert_num"),
        (2, "sliding_window_pattern full_attention_interval layer_group_size num_kv_shared_layers conv_window"),
        (2, "linear_num_key_heads index_n_heads loop_num num_loops group_norm_size o_groups hc_mult emb_split_num"),
        (2, "altup_num_inputs cla_share_factor attn_layer_period expert_layer_period interleave_moe_layer_step"),
        (2, "ngram_vocab_size_ratio dense_attention_every_n_layers"),
        (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts n_group n_groups topk_group"),
        (1, "num_expert_group mamba_n_groups num_kv_reuse_layers attn_layer_offset expert_layer_offset"),
        (1, "first_k_dense_replace num_dense_layers decoder_sparse_step moe_layer_freq"),
        (0, "altup_active_idx"),
        # Multipliers belong to trained weights; random weights need none.
        (1.0, "attention_out_multiplier embedding_multiplier key_multiplier lm_head_multiplier ssm_in_multiplier"),
        (1.0, "ssm_out_multiplier block_ffn_dim_multiplier"),
        (1e-5, "rms_norm_eps norm_eps"),
        (10_000.0, "rope_theta rope_local_base_freq rotary_emb_base"),
        (True, "altup_correct_scale mla_scale_kv_lora mla_scale_q_lora use_cla use_conv_bias"),
        (False, "conv_bias"),
    )
    for name in names.split()
}

REQUIRED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "mlp_only_layers": []}
#: Names of the dataclass of a nested configuration, in the modules that have their own.
TEXT_ARGS = ("TextConfig", "TextArgs", "TextModelArgs")
# Names of matrices and kernels; `fn` mixes the streams of deepseek_v41, `conv_k` and `conv_v` are of baichuan_m1.
MATRIX_NAMES = ("weight", "input_gate_weight", "recurrent_gate_weight", "fn", "conv_k", "conv_v")

_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}

_OVERRIDES: dict[str, dict[str, Any]] = {
    # Full attention. Heads of 64 can be quantized in groups of 64.
    "llama": {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 64, "layer_types": None},
    "qwen3": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    # One kv head, and queries, keys and values out of one product.
    "gpt_bigcode": {"n_layer": 3, "num_key_value_heads": None},
    # Sliding windows: in some layers, with attention sinks, and in all layers.
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "llama_sliding": {"layer_types": _SLIDING_THEN_FULL * 2},
    "ministral3": {
        "rope_parameters": {
            **{"rope_theta": 10_000.0, "rope_type": "default"},
            **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192},
        }
    },
    "gpt_oss": {},
    "step3p5": {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3},
    # The last layers have no cache of their own and read another layer's.
    "gemma3n": {
        "text_config": {
            **{"num_hidden_layers": 6, "layer_types": _SLIDING_THEN_FULL * 3, "intermediate_size": [INNER_WIDTH] * 6},
            **{"activation_sparsity_pattern": [0.0] * 6, "final_logit_softcapping": 30.0, "altup_coef_clip": 120.0},
        }
    },
    "gemma4_text": {"num_hidden_layers": 6},
    # Chunked attention, with a full layer every fourth.
    "llama4": {"text_config": {"num_experts_per_tok": 1, "num_local_experts": 2, "use_qk_norm": True}},
    # Recurrent state alone.
    "mamba": {"num_hidden_layers": 3, "state_size": 16, "time_step_rank": 8},
    "mamba2": {
        **{"num_hidden_layers": 3, "tie_word_embeddings": True},
        **{"time_step_limit": (0.0, float("inf")), "time_step_rank": "auto"},
    },
    "rwkv7": {"num_hidden_layers": 3},
    # Recurrent or linear-attention state beside attention.
    "falcon_h1": {
        **{"num_hidden_layers": 3, "mamba_chunk_size": 32},
        **{"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
    },
    "jamba": {"mamba_d_state": 16, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1},
    "kimi_linear": {
        **_TWO_HEADS,
        "linear_attn_config": {
            **{"num_heads": 2, "head_dim": HEAD_WIDTH, "short_conv_kernel_size": 4},
            **{"kda_layers": [1, 3], "full_attn_layers": [2, 4]},
        },
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "-", "*", "M", "-", "*"]},
    "plamo2": {},
    "qwen3_next": {"decoder_sparse_step": 2, "partial_rotary_factor": 0.5},
    "recurrent_gemma": {
        **{"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"logits_soft_cap": 30.0, "block_types": ["recurrent", "recurrent", "attention"]},
    },
    # Neighbouring keys and values are joined by a convolution of two; only some layers have a window.
    "baichuan_m1": {
        **{"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4},
        "sliding_window_layers": [0, 2],
    },
    # Latent attention; the second picks fewer keys than a test's prompt has.
    "deepseek_v3": {**_TWO_HEADS, "num_hidden_layers": 3},
    "deepseek_v32": {**_TWO_HEADS, "num_hidden_layers": 3},
    # The cache of the first entry belongs to no layer: it has the last token ids for the n-gram embeddings.
    "longcat_flash_ngram": {"num_layers": 2, "num_attention_heads": 2},
    # A window, compressed groups of four, and an open group. Heads of 24 are not rounded to 8 and 4 bits.
    "deepseek_v41": {
        **{"num_hidden_layers": 3, "num_attention_heads": 2, "index_topk": 6},
        **{"head_dim": 24, "index_head_dim": 24, "qk_rope_head_dim": 8},
        **{"compress_ratios": (4, 4, 0), "kv_source_layer_ids": (0, 1), "index_source_layer_ids": (0, 1)},
    },
}
_MODULES = {"llama_sliding": "llama"}  # modules that are not the kind's name
# Larger weights show a wrong state; falcon_h1 sums up the whole prompt, and smaller ones make its rounding smaller.
_WEIGHT_SCALES = {"falcon_h1": 0.7, "deepseek_v32": 1.3}


@dataclass(frozen=True)
class TinyKind:
    """One architecture of `mlx_lm.models`, what to set in its tiny configuration, and the scale of its weights.

    Overrides in `text_config` are of the nested configuration. If its `ModelArgs` is in another module, `model_type`
    there names that module.
    """

    module: str
    overrides: Mapping[str, Any] = field(repr=False)
    weight_scale: float = 1.0

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration from which the module's `ModelArgs.from_dict` makes a tiny model."""
        args = architecture(self.module).ModelArgs
        config = {"model_type": self.module, **_values_of(args, self.overrides)}
        if "text_config" in {field.name for field in fields(args)}:
            nested = self.overrides.get("text_config", {})
            inner = nested.get("model_type", self.module)
            config["text_config"] = {"model_type": inner, **_values_of(text_args(self.module, inner), nested)}
        return config


def architecture(module: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{module}")


def text_args(module: str, inner: str | None) -> Any:
    """The dataclass of the text part of `mlx_lm.models.MODULE`, whose own model_type is `inner`."""
    candidates = [architecture(module), architecture(inner or module)]
    found = (getattr(each, name) for each in candidates for name in TEXT_ARGS if hasattr(each, name))
    return next(found, candidates[-1].ModelArgs)


def _values_of(args: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the rules give to fields, then the overrides."""
    values = {}
    for each in fields(args):
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if each.name != "model_type" and (each.name in (*VALUES, "layer_types") or not has_default):
            values[each.name] = _value(each)
    values |= overrides
    if values.get("layer_types", ()) is None and "layer_types" not in overrides:
        values["layer_types"] = [_SLIDING_THEN_FULL[index % 2] for index in range(values["num_hidden_layers"])]
    return values


def _value(field: Field[Any]) -> Any:
    name, kind, known = field.name, str(field.type), REQUIRED | VALUES
    if name in known:
        return known[name]
    if "eps" in name:
        return 1e-5
    if "theta" in name:
        return 10_000.0
    if "Optional" in kind or "None" in kind or "ict" in kind:
        return None
    return {"bool": False, "float": 1.0}.get(getattr(field.type, "__name__", kind))


def build(kind: TinyKind, seed: int = 0) -> nn.Module:
    """Build the tiny model of `kind` in float32, ready for inference; the same seed gives the same weights."""
    module = architecture(kind.module)
    mx.random.seed(seed)  # some architectures draw the values that they start from, and `_draw` adds to those
    # Some architectures change their configuration, so they get a copy.
    model: nn.Module = module.Model(module.ModelArgs.from_dict(deepcopy(kind.config)))
    random = np.random.default_rng(seed)
    values: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    drawn = {name: _draw(name, values[name], kind.weight_scale, random) for name in sorted(values)}
    model.load_weights([(name, mx.array(value)) for name, value in drawn.items()])
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(name: str, value: mx.array, scale: float, random: np.random.Generator) -> NDArray[Any]:
    """Draw one parameter of the shape of `value`, in float32 unless it is packed bits.

    Matrices get `scale` over the square root of the number of summands, so the signal has the same size behind them.
    All others (norms, biases, gates, skips) get noise on their first value: many are zero and would disable a layer.
    """
    if value.dtype == mx.uint32:
        return random.integers(0, 1 << 32, value.shape, dtype=np.uint32)
    noise: NDArray[np.float32] = random.standard_normal(value.shape, dtype=np.float32)
    leaf = name.rsplit(".", maxsplit=1)[-1]
    if leaf == "A_log":
        # A state-space layer forgets slowly with these, so that the whole prompt stays in the state.
        return np.asarray(np.log(random.uniform(0.02, 0.5, value.shape)), dtype=np.float32)
    if leaf == "recurrent_param":
        return np.float32(-4.0) + np.float32(0.3) * noise
    if leaf in MATRIX_NAMES and value.ndim >= 2:
        summed = int(np.prod(value.shape[1:])) if leaf == "weight" and "conv" in name else value.shape[-1]
        return noise * np.float32(scale / np.sqrt(summed))
    return np.asarray(value.astype(mx.float32), dtype=np.float32) + np.float32(0.3) * noise


TINY_KINDS = {
    name: TinyKind(_MODULES.get(name, name), overrides, _WEIGHT_SCALES.get(name, 1.0))
    for name, overrides in _OVERRIDES.items()
}

# One id per byte that UTF-8 uses; the ids of the 13 bytes that it never uses go to special tokens.
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|reserved_{index}|>" for index in range(3, 13)))
BYTES_NOT_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(kind: str, seed: int = 0) -> nn.Module:
    """Build a tiny model of `TINY_KINDS` in float32. ValueError: `kind` is not known."""
    if kind not in TINY_KINDS:
        raise ValueError(f"tiny model {kind!r} is not known. Known: {', '.join(sorted(TINY_KINDS))}.")
    return build(TINY_KINDS[kind], seed)


def tiny_tokenizer() -> Any:
    """Return mlx-lm's wrapper around a tokenizer of bytes, with a chat template that knows tools and tool calls."""
    # A character stands for each byte of UTF-8, as in byte-level BPE.
    used = [character for byte, character in sorted(bytes_to_unicode().items()) if byte not in BYTES_NOT_IN_UTF8]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *used])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    fast.chat_template = CHAT_TEMPLATE
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
