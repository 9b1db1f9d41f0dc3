"""Anthropic's Messages API over HTTP: replies whole and streamed, read by the real client too, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import anthropic
import httpx2
import openai
import pytest

from runner.engine.token import Token
from runner.serve import service
from runner.serve.request import OpenRequest, PrefillProgress
from tests.serve.scripted import CACHED_TOKENS, PROMPT_TOKENS, ScriptedReading, ScriptedRuns, said
from tests.serve.scripted_app import MESSAGES, USER, events, scripted_app, whole

T = TypeVar("T")

USAGE = {
    "input_tokens": PROMPT_TOKENS - CACHED_TOKENS, "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": CACHED_TOKENS, "output_tokens": 3,
}  # fmt: skip
TOOL = {"name": "weather", "description": "of a place", "input_schema": {"type": "object"}}
HELLO = (said("Hel"), said("lo"), said(finish="stop"))
#: A reply of every kind of block, with the white space that models put between them.
FULL = (
    PrefillProgress(16, 20), said(reasoning="It "), said(reasoning="asks."), said("\n\n"), said("Let me "),
    said("look."), said("\n", calls=[("weather", '{"place": "Ulm"}')]), said(" \n"),
    said(calls=[("time", "{}")], finish="stop"),
)  # fmt: skip
FULL_CONTENT = [
    {"type": "thinking", "thinking": "It asks.", "signature": ""},
    {"type": "text", "text": "\n\nLet me look.\n"},
    {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"place": "Ulm"}},
    {"type": "tool_use", "id": "call_0", "name": "time", "input": {}},
]


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


def client_of(runs: ScriptedRuns) -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(scripted_app(runs))
    http_client = anthropic.DefaultAsyncHttpxClient(transport=transport)
    return anthropic.AsyncAnthropic(api_key="k", base_url="http://test", http_client=http_client, max_retries=0)


def test_a_reply_is_a_message_whose_usage_counts_each_prompt_token_once() -> None:
    runs = ScriptedRuns(*HELLO)
    assert whole(MESSAGES, runs) == {
        "id": f"msg_{runs.opened[0].id}",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }


def test_reasoning_text_and_tool_calls_are_blocks_and_white_space_between_them_is_none() -> None:
    message = whole(MESSAGES, ScriptedRuns(*FULL))
    assert (message["content"], message["stop_reason"]) == (FULL_CONTENT, "tool_use")


@pytest.mark.parametrize(
    ("runs", "reason", "word"),
    [
        (ScriptedRuns(said("a"), said(finish="length"), outcome="length"), "max_tokens", None),
        (ScriptedRuns(said("a"), outcome="cancelled"), "max_tokens", None),
        (ScriptedRuns(said(calls=[("t", "{}")]), said(finish="length"), outcome="length"), "max_tokens", None),
        (ScriptedRuns(said("a"), said(finish="stop", stop_word="END")), "stop_sequence", "END"),
        (ScriptedRuns(said(finish="stop")), "end_turn", None),
    ],
)
def test_a_reply_says_why_it_ended(runs: ScriptedRuns, reason: str, word: str | None) -> None:
    message = whole(MESSAGES, runs)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, word)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [("[1]", {"arguments": [1]}), ('{"x": NaN}', {"x": "NaN"}), ('"\\ud800"', {"arguments": "\ud800"})],
)
def test_a_tools_input_is_always_an_object_of_json(arguments: str, wanted: dict[str, Any]) -> None:
    script = (said(calls=[("t", arguments)], finish="stop"),)
    message = whole(MESSAGES, ScriptedRuns(*script))
    assert message["content"][0]["input"] == wanted
    event = next(event for event in events(MESSAGES, ScriptedRuns(*script)) if event["type"] == "content_block_delta")
    assert json.loads(event["delta"]["partial_json"]) == wanted


def test_a_stream_has_anthropics_events_in_their_order() -> None:
    start, *others = events(MESSAGES, ScriptedRuns(PrefillProgress(8, 20), *HELLO))
    usage = start["message"].pop("usage")
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (PROMPT_TOKENS - 8, 8)
    assert usage["output_tokens"] == 0
    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == ("message_start", [], None)
    delta = {"type": "content_block_delta", "index": 0}
    assert others == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {**delta, "delta": {"type": "text_delta", "text": "Hel"}},
        {**delta, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]


def test_a_stream_that_waits_pings_until_it_knows_what_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(ScriptedRuns):
        """Begins to run after some time."""

        def ask(self, opened: OpenRequest) -> None:
            opened.put(PrefillProgress(0, PROMPT_TOKENS, ScriptedReading([said("x")], Token(""))))
            threading.Timer(0.1, super().ask, [opened]).start()

    monkeypatch.setattr(service, "IDLE_S", 0.01)
    found = events(MESSAGES, Waits(PrefillProgress(8, PROMPT_TOKENS), said("x")))
    kinds = [event["type"] for event in found]
    begin = kinds.index("message_start")
    assert begin > 0
    assert set(kinds[:begin]) == {"ping"}
    assert found[begin]["message"]["usage"]["cache_read_input_tokens"] == 8


def test_the_real_client_reads_a_stream_to_the_message_that_comes_whole() -> None:
    async def read() -> tuple[anthropic.types.Message, anthropic.types.Message, str]:
        async with client_of(ScriptedRuns(*FULL)) as client:
            arguments: Any = {"model": "claude-x", "max_tokens": 16, "messages": [USER], "tools": [TOOL]}
            async with client.messages.stream(**arguments) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                streamed = await stream.get_final_message()
            return streamed, await client.messages.create(**arguments), text

    streamed, ended, text = run(read())
    assert [block.to_dict() for block in ended.content] == FULL_CONTENT
    assert streamed.to_dict() == {**ended.to_dict(), "id": streamed.id, "stop_details": None}
    assert text == "\n\nLet me look.\n"


def test_the_real_client_of_openai_reads_a_stream_to_the_reply_that_comes_whole() -> None:
    async def read() -> tuple[str, str | None, int]:
        transport = httpx2.ASGITransport(scripted_app(ScriptedRuns(*HELLO)))
        http_client = openai.DefaultAsyncHttpxClient(transport=transport)
        async with openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http_client) as client:
            arguments: Any = {"model": "m", "messages": [USER]}
            usage: Any = {"include_usage": True}
            stream = await client.chat.completions.create(stream=True, stream_options=usage, **arguments)
            *chunks, last = [chunk async for chunk in stream]
            ended = await client.chat.completions.create(**arguments)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return text, ended.choices[0].message.content, last.usage.prompt_tokens_details.cached_tokens

    assert run(read()) == ("Hello", "Hello", CACHED_TOKENS)


def test_a_cut_tool_call_is_a_block_with_the_arguments_that_came() -> None:
    runs = ScriptedRuns(
        said(calls=[("write", '{"path": "a.txt", "text": "Once up')], finish="length"), outcome="length"
    )
    message = whole(MESSAGES, runs)
    block = message["content"][0]
    assert (block["type"], block["input"]) == ("tool_use", {"path": "a.txt", "text": "Once up"})
    assert message["stop_reason"] == "max_tokens"
    written = [
        event["delta"]["partial_json"] for event in events(MESSAGES, runs) if event["type"] == "content_block_delta"
    ]
    assert "".join(written) == '{"path": "a.txt", "text": "Once up'
