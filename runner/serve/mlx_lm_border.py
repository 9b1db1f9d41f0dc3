"""What the server uses of mlx-lm for prompts and tokens.

The server calls mlx-lm's own code for prompts, samplers and penalties, so they are those of mlx_lm.server. Importing
this file loads no model and changes no setting. Source: mlx-lm 0.32.2.
"""

from __future__ import annotations

from mlx_lm import server, tokenizer_utils, utils
from mlx_lm.generate import TextStateMachine as TextStateMachine
from mlx_lm.generate import make_text_state_machine as make_text_state_machine
from mlx_lm.models.cache import KVCache as KVCache
from mlx_lm.models.cache import make_prompt_cache as make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer as BPEStreamingDetokenizer
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer as SPMStreamingDetokenizer
from mlx_lm.tool_parsers import gemma4

get_system_fingerprint = server.get_system_fingerprint
maybe_set_recommended_wired_limit = utils.maybe_set_recommended_wired_limit
make_sampler = server._make_sampler  # (args, tokenizer): `args.sampling` may be a Sampling
make_logits_processors = server._make_logits_processors  # (args): `args.logits` may be a Sampling, too
byte_decoder = tokenizer_utils._byte_decoder  # (): the byte that each character of a byte-level token stands for
parse_size = utils._parse_size  # (text): bytes; KeyError or ArithmeticError if it is no size
#: (messages): the parts of their contents that are images. image_url (part): its address, or a data URL.
image_parts, image_url = server._image_parts, server._image_url
#: decode_image (data URL): an array. make_vision (tokens, urls, pixel_values, token_id): mlx-lm's Vision.
decode_image, make_vision = server._decode_image, server._make_vision
convert_chat = server.convert_chat  # (messages, role_mapping): the prompt's text for models without a chat template
parse_gemma4 = gemma4.parse_tool_call  # (text): a call, or several, in the form of Gemma 4; ValueError: there is none
