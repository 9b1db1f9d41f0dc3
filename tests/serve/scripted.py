"""A generation thread that says what a test wants, without a thread or a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from runner.engine.token import Token
from runner.serve.request import ApiError, OpenRequest, PrefillProgress, ReplyEvent, Request, RequestRecord
from tests.serve import watched

PROMPT_TOKENS, MATCHED_TOKENS, CACHED_TOKENS = 20, 16, 12


def said(text="", reasoning="", calls=(), finish=None, stop_word=None) -> Token:
    """What one token adds to a reply; `calls` are names and arguments of tool calls."""
    tool_calls = tuple(
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    )
    return Token(text, 7, -0.5, (), finish, stop_word, reasoning=reasoning, tool_calls=tool_calls)


def record(opened: OpenRequest, **changes: Any) -> RequestRecord:
    about = {"id": opened.id, "names": opened.request.names, "namespace": opened.request.namespace}
    counts = {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS, "matched_tokens": MATCHED_TOKENS}
    return watched.record(**about, **{**counts, "explanation": watched.explained(), **changes})


class ScriptedReading:
    def __init__(self, parts: Sequence[Token], flushed: Token) -> None:
        self._parts: Iterator[Token] = iter(parts)
        self._flushed = flushed

    def add(self, token: Token) -> Token:
        part = next(self._parts)
        assert part == token
        return part

    def finish(self) -> Token:
        return self._flushed


class ScriptedRuns:
    """Answers every request with the script: its beginning, its parts, and the record unless it fails or `is_endless`.

    `flushed` comes with the end. `refusal` is raised instead of taking a request in; `outcome` is the record's.
    """

    def __init__(self, *script, flushed=None, refusal=None, is_endless=False, outcome="stop") -> None:
        self.opened: list[OpenRequest] = []
        self._script, self._refusal, self._is_endless, self._outcome = script, refusal, is_endless, outcome
        self._flushed = flushed or Token("")
        self.is_healthy = True

    def ask(self, opened: OpenRequest) -> None:
        if self._refusal:
            raise self._refusal
        self.opened.append(opened)
        parts = [part for part in self._script if isinstance(part, Token)]
        answers: list[ReplyEvent] = [
            PrefillProgress(0, PROMPT_TOKENS, ScriptedReading(parts, self._flushed)),
            *self._script,
        ]
        for answer in answers:
            opened.put(answer)
        if not self._is_endless and not isinstance(answers[-1], ApiError):
            self.end(opened)

    def end(self, opened: OpenRequest) -> None:
        opened.put(record(opened, done_reason=self._outcome))

    async def count_tokens(self, request: Request) -> int:
        return sum(len(message["content"]) for message in request.messages)

    async def cancelled(self) -> OpenRequest:
        async with asyncio.timeout(60):
            while not (self.opened and self.opened[0].is_cancelled):
                await asyncio.sleep(0.001)
        return self.opened[0]
