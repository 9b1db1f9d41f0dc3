"""Random mid-size models: a forward pass has a realistic cost, and a model is built in a second.

    kv        full attention in every layer (llama)
    sliding   a sliding window of WINDOW_TOKENS in five layers of six (gemma3_text)
    hybrid    recurrent state, attention and a feed-forward layer by turns (nemotron_h)
    conv      short convolutions and attention by turns (lfm2)
    mixed     recurrent state, a sliding window of WINDOW_TOKENS and full attention by turns (gear)

`small` models have the same layers and are narrower. Use them to measure bytes, not speed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.architectures.kinds import kind_of
from runner.models.tiny import TinyKind, build

WINDOW_TOKENS = 512
VOCABULARY = 4096

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "kv": ("llama", {"layer_types": None}),
    "sliding": ("gemma3_text", {"sliding_window": WINDOW_TOKENS, "sliding_window_pattern": 6}),
    "hybrid": ("nemotron_h", {"mamba_head_dim": 64, "ssm_state_size": 64}),
    "conv": ("lfm2", {}),
    "mixed": ("gear", {"sliding_window": WINDOW_TOKENS}),
}
_WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 12,
}
_NARROW = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "mamba_num_heads": 2,
}


def random_model(kind: str, *, small: bool = False, vocabulary: int = VOCABULARY, seed: int = 0) -> Any:
    """Build the model of `kind` in float32; the same seed gives the same weights."""
    return build(random_kind(kind, small=small, vocabulary=vocabulary), seed)


def random_kind(kind: str, *, small: bool = False, vocabulary: int = VOCABULARY) -> TinyKind:
    module, layers = _KINDS[kind]
    size = _NARROW if small else _WIDE
    thirds = size["num_hidden_layers"] // 3
    if kind == "hybrid":
        layers = {**layers, "hybrid_override_pattern": ["M", "-", "*"] * thirds}
    elif kind == "conv":
        layers = {"layer_types": ["conv", "conv", "full_attention"] * thirds}
        layers |= {"block_dim": size["hidden_size"], "block_ff_dim": size["intermediate_size"]}
    elif kind == "mixed":
        layers = {**layers, "layer_types": ["conv_mixer", "sliding_attention", "full_attention"] * thirds}
    tiny = kind_of(module)
    return replace(tiny, overrides={**tiny.overrides, "vocab_size": vocabulary, **layers, **size})
