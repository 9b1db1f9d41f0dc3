"""MessageDraft: a reply as Anthropic's message, while it is being written. Never imports MLX.

    draft.start()          message_start
    draft.add(delta)       content_block_start, content_block_delta, content_block_stop
    draft.end(ending)      content_block_stop, message_delta, message_stop

These are the events of a stream, as they come about; `draft.message` is what they come to, for whoever wants it whole.
At most one block is open at a time, and it is the last one.
"""

from __future__ import annotations

import copy
import json
from typing import Any, TypeAlias

from runner.serve.asked import Record
from runner.serve.service import Delta, Ending

Event: TypeAlias = dict[str, Any]


class MessageDraft:
    """Takes a reply's deltas in their order.

    Args:
        id: of the reply.
        model: as the request named it.
        prompt_tokens: how many of them came from the cache is known at the end.
    """

    def __init__(self, id: str, model: str, prompt_tokens: int) -> None:
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._blank = ""
        self._stop_word: str | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }

    def start(self) -> Event:
        """The first event: the message while it is empty."""
        return {"type": "message_start", "message": copy.deepcopy(self.message)}

    def add(self, delta: Delta) -> list[Event]:
        """Write on: reasoning, then text, then tool calls."""
        for step in delta.steps:
            self._stop_word = step.stop_word
        events = self._write("thinking", delta.reasoning) if delta.reasoning else []
        # White space alone is no block: models put it between reasoning, calls and text.
        text = self._blank + delta.text
        if self._is_writing("text") or text.strip():
            events += self._write("text", text) if text else []
            text = ""
        self._blank = text
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def end(self, ending: Ending) -> list[Event]:
        """Close the message with why it ended and what it took."""
        if self._stop_word is not None:
            reason = "stop_sequence"
        elif ending.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if ending.has_tool_calls else "end_turn"
        why = {"stop_reason": reason, "stop_sequence": self._stop_word}
        usage = _usage_of(ending.record)
        self.message |= {**why, "usage": usage}
        return [*self._close(), {"type": "message_delta", "delta": why, "usage": usage}, {"type": "message_stop"}]

    def _is_writing(self, kind: str) -> bool:
        return self._is_open and self._content[-1]["type"] == kind

    def _write(self, kind: str, text: str) -> list[Event]:
        """Add to the open block, or to a new one; in blocks of either kind the text's field is named like the kind."""
        events = []
        if not self._is_writing(kind):
            # Nothing is signed here, and clients want the field.
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._open({"type": kind, kind: "", **signature})
        self._content[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: dict[str, str]) -> list[Event]:
        # JSON has no NaN, but a model's arguments may.
        arguments = json.loads(call["arguments"], parse_constant=str)
        # The API has objects alone, but a model's arguments may be anything.
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        events = self._open({"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}})
        self._content[-1]["input"] = arguments
        delta = self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments)})
        return [*events, delta, *self._close()]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._is_open = True
        self._blank = ""
        self._content.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}]

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]


def _usage_of(record: Record) -> dict[str, int]:
    return _usage(record.prompt_tokens, record.cached_tokens, record.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Each prompt token is counted once. Putting it into the cache costs nothing extra, so none is counted there."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
