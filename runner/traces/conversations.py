"""Recorded conversations as a trace: each reply that was due is a request, in blocks of a tokenizer's tokens.

Arrivals are made up (runner/traces/arrivals.py), so the timing is synthetic. This is the one reader that needs MLX,
since mlx-lm's tokenizer and the cache's own `chat_tokens` do the rendering.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.watch.trace import block_digests
from runner.script.conversations.conversation import Conversation, ConversationError
from runner.script.conversations.reader import read_conversations
from runner.script.schedule import ScheduledRequest, requests_of
from runner.traces.arrivals import Pace
from runner.traces.keys import KeyTable
from runner.traces.lines import BadLines
from runner.traces.request import Trace, TraceError, TraceRequest

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Rendered:
    prompt: NDArray[np.int32]
    output_tokens: int
    is_tool: bool
    turn: int


def read_conversation_trace(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    name: str = "",
    block_tokens: int = BLOCK_TOKENS,
    pace: Pace | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> Trace:
    """Read conversations into one trace, in the order of the files.

    Args:
        tokenizer: mlx-lm's or transformers', with a chat template.
        block_tokens: tokens per block.
        pace: how time passes; the default is `Pace()`.
        seed: of the arrivals.

    Raises:
        TraceError: a file cannot be read, or a conversation cannot be rendered and `skip_bad` is off.
    """
    try:
        read = read_conversations(*paths, skip_bad=skip_bad)
    except ConversationError as error:
        raise TraceError(str(error)) from error
    bad = BadLines(skip_bad)
    pace, draw = pace or Pace(), random.Random(seed)
    table = KeyTable()
    requests: list[TraceRequest] = []
    start_s = 0.0
    for conversation in read.conversations:
        try:
            rendered = _render(conversation, tokenizer)
        except TraceError as error:
            bad.add(error)
            continue
        at_s = start_s
        for each in rendered:
            digests = block_digests(each.prompt.astype(np.int64), block_tokens)
            keys, time_ms = table.keys(digests), round(1e3 * at_s)
            requests.append(
                TraceRequest(
                    keys, len(each.prompt), each.output_tokens, time_ms, conversation.conversation_id, each.turn
                )
            )
            at_s += pace.request_gap_s(draw, each.output_tokens, is_tool=each.is_tool)
        start_s += pace.session_gap_s(draw)
    requests.sort(key=lambda request: request.time_ms)
    source = ", ".join(map(str, paths))
    return Trace(name or paths[0].stem, block_tokens, requests, True, source, (*read.skipped, *bad.skipped))


def _render(conversation: Conversation, tokenizer: Any) -> list[_Rendered]:
    """The requests of a conversation. Replies that were not recorded are left out of later prompts."""
    from radixcache.chat.render import chat_tokens

    rendered = []
    for index, request in enumerate(requests_of(conversation)):
        try:
            prompt = chat_tokens(tokenizer, request.messages, request.tools)
        except ValueError as error:
            raise TraceError(f"{conversation.source}: conversation {conversation.conversation_id}: {error}") from error
        is_tool = bool((request.recorded_reply or {}).get("tool_calls"))
        rendered.append(_Rendered(prompt, _output_tokens(request, tokenizer), is_tool, index + 1))
    return rendered


def _output_tokens(request: ScheduledRequest, tokenizer: Any) -> int:
    """Tokens of the recorded reply's text and calls, without what the template puts around them; 0 for none."""
    reply = request.recorded_reply or {}
    texts = [str(reply.get("content") or ""), *(str(call["function"]) for call in reply.get("tool_calls") or ())]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)
