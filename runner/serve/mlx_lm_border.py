"""What the server uses of mlx-lm for prompts and tokens.

The server calls mlx-lm's own code for prompts, samplers and penalties, so they are those of mlx_lm.server. Importing
this file loads no model and changes no setting. Source: mlx-lm 0.32.2.
"""

from __future__ import annotations

from mlx_lm import server, tokenizer_utils, utils
from mlx_lm.generate import TextStateMachine as TextStateMachine
from mlx_lm.generate import make_text_state_machine as make_text_state_machine
from mlx_lm.models.cache import KVCache as KVCache
from mlx_lm.models.cache import RotatingKVCache as RotatingKVCache
from mlx_lm.models.cache import can_trim_prompt_cache as can_trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer as BPEStreamingDetokenizer
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer as SPMStreamingDetokenizer

CompletionRequest, ToolCallFormatter = server.CompletionRequest, server.ToolCallFormatter
get_system_fingerprint = server.get_system_fingerprint
maybe_set_recommended_wired_limit = utils.maybe_set_recommended_wired_limit
make_sampler = server._make_sampler  # (args, tokenizer): `args.sampling` may be a Request, which has all fields
make_logits_processors = server._make_logits_processors  # (args): `args.logits` may be a Request, too
byte_decoder = tokenizer_utils._byte_decoder  # (): the byte that each character of a byte-level token stands for
parse_size = utils._parse_size  # (text): bytes; KeyError or ArithmeticError if it is no size
#: (messages): the parts of their contents that are images. image_url (part): its address, or a data URL.
image_parts, image_url = server._image_parts, server._image_url
#: (self, tokenizer, request, args): tokens, segments, their kinds, the initial state, images. `self` needs
#: `model_provider.processor` and `model_provider.cli_args.chat_template_args`; `args` may be a Request.
tokenize = server.ResponseGenerator._tokenize
