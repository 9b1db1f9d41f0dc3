"""Tiny random models of every layer kind, and a byte-level tokenizer for them.

A kind is an mlx-lm architecture and a small configuration of it: about 64 wide, two to six layers, windows short enough
to wrap within a test's prompt. The weights come from the seed alone, not from MLX's global state, so that the same seed
gives the same model wherever it is built.

A model as its constructor leaves it hardly looks at its own state: weights are small, gates and kernels are zero, and a
wrong cache would go unnoticed. Here every weight is drawn so that the signal keeps its size through the layers
(`weight_scale` where that is not enough): the state of another prompt, put into any one layer, moves the next logits
far beyond rounding. tests/model/test_tiny_models.py holds every kind to that.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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

VOCABULARY_LENGTH = 256
CONTEXT_LENGTH = 32_768
WINDOW_LENGTH = 16
CHUNK_LENGTH = 32

# What the architectures call their matrices and kernels; `fn` mixes the streams of deepseek_v41, `conv_k` and `conv_v`
# join neighbouring keys and values in baichuan_m1.
MATRIX_NAMES = ("weight", "input_gate_weight", "recurrent_gate_weight", "fn", "conv_k", "conv_v")

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


@dataclass(frozen=True)
class TinyKind:
    """One architecture of `mlx_lm.models`, the configuration that makes it tiny, and the scale of its weights."""

    module: str
    config: Mapping[str, Any] = field(repr=False)
    weight_scale: float = 1.0


def tiny_model(kind: str, seed: int = 0) -> nn.Module:
    """Build the tiny model of `kind` in float32, ready for inference.

    Args:
        kind: a key of `TINY_KINDS`.
        seed: the same seed gives the same weights.

    Raises:
        ValueError: `kind` is not known.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"tiny model {kind!r} is not known. Known: {', '.join(sorted(TINY_KINDS))}.")
    tiny = TINY_KINDS[kind]
    architecture = importlib.import_module(f"mlx_lm.models.{tiny.module}")
    # Some architectures draw the values that they start from, and `_draw_weights` adds to those.
    mx.random.seed(seed)
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(dict(tiny.config)))
    _draw_weights(model, tiny.weight_scale, np.random.default_rng(seed))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_tokenizer() -> Any:
    """Return mlx-lm's wrapper around a tokenizer of bytes, with a chat template that knows tools and tool calls."""
    tokenizer = Tokenizer(BPE(vocab=_byte_vocabulary(), merges=[]))
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


def _byte_vocabulary() -> dict[str, int]:
    """Number the special tokens, then every byte of UTF-8 by the character that stands for it in byte-level BPE.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in printable else next(stand_ins)) for byte in range(0x100)]
    used = [character for byte, character in enumerate(characters) if byte not in BYTES_NOT_IN_UTF8]
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *used])}


def _draw_weights(model: nn.Module, scale: float, random: np.random.Generator) -> None:
    """Replace every parameter of `model` by a random one, in the order of their names."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    model.load_weights([(name, mx.array(_draw(name, parameters[name], scale, random))) for name in sorted(parameters)])


def _draw(name: str, value: mx.array, scale: float, random: np.random.Generator) -> NDArray[np.float32]:
    """Draw one parameter in float32, of the shape of `value`.

    Matrices get `scale` over the square root of what they sum over, so that the signal keeps its size. The rest (norms,
    biases, gates, skips) keeps the value its architecture starts from and gets some noise, since many start from zero
    and would switch their layer off.
    """
    noise: NDArray[np.float32] = random.standard_normal(value.shape, dtype=np.float32)
    leaf = name.rsplit(".", maxsplit=1)[-1]
    if leaf == "A_log":
        # How fast a state-space layer forgets: slowly here, so that the whole prompt stays in the state.
        return np.asarray(np.log(random.uniform(0.02, 0.5, value.shape)), dtype=np.float32)
    if leaf == "recurrent_param":
        return np.float32(-4.0) + np.float32(0.3) * noise
    if leaf in MATRIX_NAMES and value.ndim >= 2:
        summed = int(np.prod(value.shape[1:])) if leaf == "weight" and "conv" in name else value.shape[-1]
        return noise * np.float32(scale / np.sqrt(summed))
    return np.asarray(value.astype(mx.float32), dtype=np.float32) + np.float32(0.3) * noise


# What nearly every configuration has; kinds leave out and rename what their architecture wants otherwise.
_WIDTH = {
    "vocab_size": VOCABULARY_LENGTH,
    "hidden_size": 64,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10_000.0}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_MAMBA2 = {"conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]


def _tiny(module: str, *parts: Mapping[str, Any], weight_scale: float = 1.0, **more: Any) -> TinyKind:
    """Join the parts of a configuration; later ones win."""
    config: dict[str, Any] = {"model_type": module}
    for part in (*parts, more):
        config.update(part)
    return TinyKind(module, config, weight_scale)


TINY_KINDS: dict[str, TinyKind] = {
    # Full attention. `llama` has heads of 64, so that its cache can be quantized in groups of 64.
    "llama": _tiny("llama", _WIDTH, _HEADS, num_hidden_layers=3, head_dim=64, num_attention_heads=2),
    "qwen3": _tiny("qwen3", _WIDTH, _HEADS, num_hidden_layers=3, tie_word_embeddings=True),
    # One kv head, and queries, keys and values out of one product.
    "gpt_bigcode": _tiny(
        "gpt_bigcode",
        n_embd=64,
        n_layer=3,
        n_inner=128,
        n_head=4,
        n_positions=CONTEXT_LENGTH,
        layer_norm_epsilon=1e-5,
        vocab_size=VOCABULARY_LENGTH,
    ),
    # Sliding windows: in some layers, in all, and with attention sinks.
    "ministral3": _tiny(
        "ministral3",
        _WIDTH,
        _HEADS,
        num_hidden_layers=4,
        layer_types=_SLIDING_THEN_FULL * 2,
        sliding_window=WINDOW_LENGTH,
        rope_parameters={
            "rope_theta": 10_000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8192,
        },
    ),
    "step3p5": _tiny(
        "step3p5",
        _WIDTH,
        _HEADS,
        num_hidden_layers=3,
        num_attention_groups=2,
        sliding_window=WINDOW_LENGTH,
        layer_types=["sliding_attention"] * 3,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
    ),
    "llama_sliding": _tiny(
        "llama",
        _WIDTH,
        _HEADS,
        num_hidden_layers=4,
        layer_types=_SLIDING_THEN_FULL * 2,
        sliding_window=WINDOW_LENGTH,
    ),
    "gemma3_text": _tiny(
        "gemma3_text",
        _WIDTH,
        _HEADS,
        num_hidden_layers=4,
        sliding_window=WINDOW_LENGTH,
        sliding_window_pattern=2,
        query_pre_attn_scalar=32,
    ),
    "gpt_oss": _tiny(
        "gpt_oss",
        _WIDTH,
        _HEADS,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_LENGTH,
        layer_types=_SLIDING_THEN_FULL * 2,
    ),
    # Layers that have no cache of their own and read another layer's.
    "gemma3n": _tiny(
        "gemma3n",
        text_config={
            **_WIDTH,
            **_HEADS,
            "model_type": "gemma3n_text",
            "intermediate_size": [128] * 6,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY_LENGTH,
            "sliding_window": WINDOW_LENGTH,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _SLIDING_THEN_FULL * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    ),
    "gemma4_text": _tiny(
        "gemma4_text",
        _WIDTH,
        _HEADS,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCABULARY_LENGTH,
        hidden_size_per_layer_input=16,
        sliding_window=WINDOW_LENGTH,
        layer_types=_SLIDING_THEN_FULL * 3,
    ),
    # Chunked attention, with a full layer every fourth.
    "llama4": _tiny(
        "llama4",
        text_config={
            **_WIDTH,
            **_HEADS,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": CHUNK_LENGTH,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    ),
    # Recurrent state alone.
    "mamba": _tiny(
        "mamba",
        _WIDTH,
        num_hidden_layers=3,
        state_size=16,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=8,
    ),
    "mamba2": _tiny(
        "mamba2",
        _WIDTH,
        _MAMBA2,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=32,
        state_size=32,
        time_step_limit=(0.0, float("inf")),
        time_step_rank="auto",
        tie_word_embeddings=True,
    ),
    "rwkv7": _tiny(
        "rwkv7",
        vocab_size=VOCABULARY_LENGTH,
        hidden_size=64,
        intermediate_size=128,
        norm_eps=1e-5,
        head_dim=32,
        num_hidden_layers=3,
        a_low_rank_dim=16,
        v_low_rank_dim=16,
        gate_low_rank_dim=16,
        decay_low_rank_dim=16,
    ),
    # Recurrent or linear-attention state beside attention.
    "recurrent_gemma": _tiny(
        "recurrent_gemma",
        _WIDTH,
        num_hidden_layers=3,
        attention_bias=False,
        conv1d_width=4,
        logits_soft_cap=30.0,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_theta=10_000.0,
        attention_window_size=WINDOW_LENGTH,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "jamba": _tiny(
        "jamba",
        _WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "nemotron_h": _tiny(
        "nemotron_h",
        _WIDTH,
        _HEADS,
        _MAMBA2,
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_proj_bias=False,
        ssm_state_size=32,
        mlp_bias=False,
        hybrid_override_pattern=["M", "-", "*", "M", "-", "*"],
    ),
    "falcon_h1": _tiny(
        "falcon_h1",
        _WIDTH,
        _HEADS,
        weight_scale=0.7,
        num_hidden_layers=3,
        mamba_chunk_size=32,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_d_ssm=128,
        mamba_d_state=32,
        mamba_n_heads=4,
        # Its multipliers undo what training with them did; random weights have nothing to undo.
        attention_out_multiplier=1.0,
        embedding_multiplier=1.0,
        key_multiplier=1.0,
        lm_head_multiplier=1.0,
        mlp_multipliers=[1.0] * 2,
        ssm_in_multiplier=1.0,
        ssm_multipliers=[1.0] * 5,
        ssm_out_multiplier=1.0,
    ),
    "baichuan_m1": _tiny(
        "baichuan_m1",
        _WIDTH,
        _HEADS,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=WINDOW_LENGTH,
        sliding_window_layers=[0, 2],
        conv_window=2,
    ),
    "qwen3_next": _tiny(
        "qwen3_next",
        _WIDTH,
        _HEADS,
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[],
        moe_intermediate_size=32,
        partial_rotary_factor=0.5,
        full_attention_interval=2,
    ),
    "lfm2": _tiny(
        "lfm2",
        _WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "plamo2": _tiny(
        "plamo2",
        _WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size_per_head=32,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_num_heads=4,
        mamba_step=2,
    ),
    "kimi_linear": _tiny(
        "kimi_linear",
        _WIDTH,
        _LATENT,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        linear_attn_config={
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
        model_max_length=CONTEXT_LENGTH,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    # Latent attention; deepseek_v32 also keeps the keys of its index, and picks fewer of them than a test's prompt has.
    "deepseek_v3": _tiny(
        "deepseek_v3",
        _WIDTH,
        _LATENT,
        _EXPERTS,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
    ),
    "deepseek_v32": _tiny(
        "deepseek_v32",
        _WIDTH,
        _LATENT,
        _EXPERTS,
        weight_scale=1.3,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        index_head_dim=32,
        index_n_heads=2,
        index_topk=24,
    ),
    # The cache of the first entry belongs to no layer: it holds the last token ids for the n-gram embeddings.
    "longcat_flash_ngram": _tiny(
        "longcat_flash_ngram",
        _WIDTH,
        _LATENT,
        ffn_hidden_size=128,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        num_layers=2,
        num_attention_heads=2,
        routed_scaling_factor=1.0,
        rope_theta=10_000.0,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    # A window, compressed groups of four, and an open group. Heads of 24 leave out the rounding to 8 and 4 bits, which
    # turns a difference in the last bit into a large one.
    "deepseek_v41": _tiny(
        "deepseek_v41",
        _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=24,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_LENGTH,
        compress_ratios=(4, 4, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        index_n_heads=2,
        index_head_dim=24,
        index_topk=6,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    ),
}
