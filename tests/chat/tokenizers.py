"""Tokenizers of each kind that real models have, trained on a few sentences."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

KINDS = ["bytes", "trimmed", "words", "pieces"]
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SENTENCES = [
    "You are a helpful assistant. User: how are you today? Assistant: it's fine, it'll do.\n\n",
    "system user assistant tool [INST] the weather in Lisbon is 21 degrees </s> <<SYS>>\n",
    "Tools: name, description, parameters; the user's train leaves at 10:40, doesn't it?\n",
] * 20
# Words with the apostrophe inside, as recent models cut them: the end of a word depends on two characters behind it.
WORDS = r"\p{L}+(?:'s|'t|'ll)?| ?\p{L}+(?:'s|'t|'ll)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def backend(kind: str) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "pieces"))
    if kind in ("bytes", "trimmed"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "trimmed":  # spans leave the spaces of their tokens out, as with Llama 3
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
    else:  # like Llama 2: no words, spaces are characters of the pieces
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{value:02X}>" for value in range(256)]
    added = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=alphabet if kind != "pieces" else [],
        special_tokens=added + (alphabet if kind == "pieces" else []),
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return without_byte_pieces_as_control(tokenizer) if kind == "pieces" else tokenizer


def without_byte_pieces_as_control(trained: Tokenizer) -> Tokenizer:
    """The trainer can only be given the byte pieces as added tokens; in a real vocabulary they are plain ones."""
    state = json.loads(trained.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in CONTROL]
    return Tokenizer.from_str(json.dumps(state))


def make_tokenizer(template: str | None, kind: str = "bytes") -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend(kind), chat_template=template, eos_token="</s>")


class OffsetlessTokenizer:
    """A tokenizer of another maker: renders and tokenizes in one go, tells no offsets."""

    def __init__(self, tokenizer: Any) -> None:
        self._inside = tokenizer
        self.calls = 0

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, **arguments: Any) -> list[int]:
        self.calls += 1
        return list(
            self._inside.apply_chat_template(messages, tokenize=tokenize, **{**arguments, "return_dict": False})
        )
