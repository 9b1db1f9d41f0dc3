"""Replies in OpenAI's form, field for field those of mlx_lm.server 0.32.2. Never imports MLX."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.serve.asked import Asked, Progress, Step
from runner.serve.errors import ApiError
from runner.serve.service import Delta, Ending, Reply
from runner.serve.streaming import server_sent_event

#: Stands for the logarithm of 0: JSON has no infinities.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class OpenAIReply:
    """Writes one reply.

    Attributes:
        model: as the request named it.
        fingerprint: of software and machine.
        created_s: since the epoch.
    """

    reply: Reply
    asked: Asked
    model: str
    fingerprint: str
    created_s: int

    async def whole(self) -> dict[str, Any]:
        """Wait for all of it.

        Raises:
            ApiError: it failed on the way.
        """
        deltas = [part async for part in self.reply if isinstance(part, Delta)]
        delta = Delta(
            "".join(delta.text for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            tuple(call for delta in deltas for call in delta.tool_calls),
            tuple(step for delta in deltas for step in delta.steps),
        )
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish_reason()}
        if logprobs := self._logprobs(delta.steps):
            choice["logprobs"] = {"content": logprobs}
        if self._is_chat:
            calls = [_tool_call(call) for call in delta.tool_calls]
            choice["message"] = {"content": None, **_message(delta, calls)}
        else:
            choice["text"] = delta.text
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    async def events(self, *, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events: comments while the prompt is evaluated, chunks, the usage if asked for.

        What fails on the way is the last event but one; the last says that there are no more.
        """
        call_count = 0
        try:
            async for part in self.reply:
                if isinstance(part, Progress):
                    yield f": keepalive {part.done_tokens}/{part.prompt_tokens}\n\n"
                elif self.reply.ending or part.text or part.reasoning or part.tool_calls:
                    calls = [_tool_call(call, call_count + index) for index, call in enumerate(part.tool_calls)]
                    call_count += len(calls)
                    yield server_sent_event(self._chunk(part, calls))
            if include_usage:
                usage = {**self._head("chat.completion"), "object": "chat.completion", "usage": self._usage()}
                yield server_sent_event({**usage, "choices": []})
        except ApiError as error:
            yield server_sent_event(error.in_openai_form())
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: Delta, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish_reason()}
        choice |= {"delta": _message(delta, calls)} if self._is_chat else {"text": delta.text}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    @property
    def _is_chat(self) -> bool:
        return self.asked.prompt is None

    def _head(self, of_chats: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{self.reply.id}",
            "system_fingerprint": self.fingerprint,
            "object": of_chats if self._is_chat else "text_completion",
            "model": self.model,
            "created": self.created_s,
        }

    def _finish_reason(self) -> str | None:
        """None until it is over."""
        ending = self.reply.ending
        if ending is None:
            return None
        return "tool_calls" if ending.has_tool_calls and ending.finish_reason == "stop" else ending.finish_reason

    def _usage(self) -> dict[str, Any]:
        ending = self.reply.ending
        assert isinstance(ending, Ending)
        prompt, completion = self.reply.prompt_tokens, ending.record.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": ending.record.cached_tokens},
        }

    def _logprobs(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        if self.asked.top_logprobs > 0:
            tops = [[_finite(asdict(token)) for token in step.top_tokens] for step in steps]
            return [{**top[0], "top_logprobs": top} if top else {} for top in tops]
        if self.asked.logprobs:
            return [_finite({"id": step.token, "logprob": step.logprob}) for step in steps]
        return []


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    # In this order NaN becomes the least, too.
    return {**fields, "logprob": max(LEAST_LOGPROB, fields["logprob"])}


def _message(delta: Delta, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    fields = {"content": delta.text, "reasoning": delta.reasoning, "tool_calls": calls}
    return {"role": "assistant", **{name: value for name, value in fields.items() if value}}


def _tool_call(call: dict[str, str], index: int | None = None) -> dict[str, Any]:
    """A call in OpenAI's form, numbered where it is streamed."""
    function = {"name": call["name"], "arguments": call["arguments"]}
    numbered = {} if index is None else {"index": index}
    return {"id": call["id"], "type": "function", "function": function, **numbered}
