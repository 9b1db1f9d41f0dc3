"""Tiny random models of every layer kind by name, and a byte-level tokenizer for them.

A kind is an mlx-lm architecture and a small configuration of it: about 64 wide, two to six layers, windows short enough
to wrap within a test's prompt. configuration.py and weights.py say how these come about; the kinds here are a choice of
them that has every class of cache and every mix of classes.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from runner.models.configuration import CHUNK_LENGTH, CONTEXT_LENGTH, VOCABULARY_LENGTH, WINDOW_LENGTH
from runner.models.exceptions import TinyKind, kind_of
from runner.models.weights import build

__all__ = [
    "CHUNK_LENGTH",
    "CONTEXT_LENGTH",
    "SPECIAL_TOKENS",
    "TINY_KINDS",
    "VOCABULARY_LENGTH",
    "WINDOW_LENGTH",
    "TinyKind",
    "tiny_model",
    "tiny_tokenizer",
]

TINY_KINDS: dict[str, TinyKind] = {
    name: kind_of(name)
    for name in (
        # Full attention; the second with queries, keys and values out of one product.
        "llama", "gpt_bigcode", "qwen3",
        # Sliding windows: in some layers, in all, and with attention sinks.
        "gemma3_text", "gpt_oss", "llama_sliding", "ministral3", "step3p5",
        # Layers that have no cache of their own and read another layer's.
        "gemma3n", "gemma4_text",
        # Chunked attention.
        "llama4",
        # Recurrent state alone.
        "mamba", "mamba2", "rwkv7",
        # Recurrent or linear-attention state beside attention.
        "baichuan_m1", "falcon_h1", "jamba", "kimi_linear", "lfm2", "nemotron_h", "plamo2", "qwen3_next",
        "recurrent_gemma",
        # Latent attention, an index of keys, a cache that is no layer's, a class of cache of its own.
        "deepseek_v3", "deepseek_v32", "longcat_flash_ngram", "deepseek_v41",
    )
}  # fmt: skip

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
    """Build the tiny model of `kind` in float32, ready for inference.

    Args:
        kind: a key of `TINY_KINDS`.
        seed: the same seed gives the same weights.

    Raises:
        ValueError: `kind` is not known.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"tiny model {kind!r} is not known. Known: {', '.join(sorted(TINY_KINDS))}.")
    return build(TINY_KINDS[kind], seed)


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
