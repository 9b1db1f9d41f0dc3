"""What the server uses of mlx-lm for prompts and tokens.

The server calls mlx-lm's own code for prompts, samplers and penalties, so they are those of mlx_lm.server. Importing
this file loads no model and changes no setting. The names are those of mlx-lm 0.32.2; `missing` has those that the
installed mlx-lm lacks, and `radixcache serve` names them when it starts.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from mlx_lm.models.cache import KVCache as KVCache
from mlx_lm.models.cache import make_prompt_cache as make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer as BPEStreamingDetokenizer
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer as SPMStreamingDetokenizer

missing: list[str] = []


def _named(module: str, name: str) -> Any:
    """An object of mlx-lm, by name. If this mlx-lm has none, the name is in `missing`, and a call is an error."""
    with suppress(ImportError, AttributeError):
        return getattr(import_module(f"mlx_lm.{module}"), name)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"this mlx-lm lacks mlx_lm.{module}.{name}; install mlx-lm 0.32.2 or later.")

    missing.append(f"mlx_lm.{module}.{name}")
    return refuse


TextStateMachine = _named("generate", "TextStateMachine")
make_text_state_machine = _named("generate", "make_text_state_machine")
get_system_fingerprint = _named("server", "get_system_fingerprint")
maybe_set_recommended_wired_limit = _named("utils", "maybe_set_recommended_wired_limit")
make_sampler = _named("server", "_make_sampler")  # (args, tokenizer): `args.sampling` may be a Sampling
make_logits_processors = _named("server", "_make_logits_processors")  # (args): `args.logits` may be a Sampling, too
byte_decoder = _named("tokenizer_utils", "_byte_decoder")  # (): the byte for each character of a byte-level token
parse_size = _named("utils", "_parse_size")  # (text): bytes; KeyError or ArithmeticError if it is no size
image_parts = _named("server", "_image_parts")  # (messages): the parts of their contents that are images
image_url = _named("server", "_image_url")  # (part): its address, or a data URL
decode_image = _named("server", "_decode_image")  # (data URL): an array
make_vision = _named("server", "_make_vision")  # (tokens, urls, pixel_values, token_id): mlx-lm's Vision
convert_chat = _named("server", "convert_chat")  # (messages, role_mapping): the text for models without a template
#: (text): a call, or several, in the form of Gemma 4; ValueError: there is none.
parse_gemma4 = _named("tool_parsers.gemma4", "parse_tool_call")
