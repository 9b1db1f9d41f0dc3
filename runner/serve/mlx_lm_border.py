"""What the server uses of mlx-lm where tokens are concerned; `tests/serve/test_border.py` pins each name.

Called, never copied: prompts, samplers, penalties, stop sequences and log-probabilities are those of mlx_lm.server
because they are made by its own code. Importing it loads no model, opens no socket and changes no setting.

Source: mlx-lm 0.32.2.
"""

from __future__ import annotations

from mlx_lm.generate import TextStateMachine, make_stop_sequences, make_text_state_machine
from mlx_lm.models.cache import KVCache, RotatingKVCache, TokenBuffer, can_trim_prompt_cache, make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    ResponseGenerator,
    ToolCallFormatter,
    _format_top_logprobs,
    _image_parts,
    _image_url,
    _make_logits_processors,
    _make_sampler,
    get_system_fingerprint,
)
from mlx_lm.utils import _parse_size, maybe_set_recommended_wired_limit

__all__ = [
    "CompletionRequest",
    "KVCache",
    "RotatingKVCache",
    "TextStateMachine",
    "TokenBuffer",
    "ToolCallFormatter",
    "can_trim_prompt_cache",
    "get_system_fingerprint",
    "image_parts",
    "image_url",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "make_stop_sequences",
    "make_text_state_machine",
    "maybe_set_recommended_wired_limit",
    "parse_size",
    "tokenize",
    "top_logprobs",
]

#: (args, tokenizer): `args.sampling` has the fields of asked.Sampling.
make_sampler = _make_sampler
#: (args): `args.logits` has the fields of asked.Penalties.
make_logits_processors = _make_logits_processors
#: (logprobs (V,), how many, tokenizer): tuple of {"id", "token", "logprob"}.
top_logprobs = _format_top_logprobs
#: (text): bytes; KeyError or ArithmeticError for what is no size.
parse_size = _parse_size
#: (messages): the parts of their contents that are images. image_url (part): where the image is, or has its bytes.
image_parts, image_url = _image_parts, _image_url
#: (self, tokenizer, request, args): tokens, segments, their kinds, the initial state, images. Of `self` it asks for
#: `model_provider.processor` and `model_provider.cli_args.chat_template_args`, of `args` for `chat_template_kwargs`.
tokenize = ResponseGenerator._tokenize
