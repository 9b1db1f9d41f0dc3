"""The real clients against a real server: conversations side by side, streams left in the middle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai
import pytest

from tests.serve.serving import GUARD_S, serving

TURNS, REPLY_TOKENS = 4, 12
#: A reply that only its client's leaving ends.
ENDLESS = 1_000_000
SYSTEM = "You answer in few words, and never twice the same. " * 4
#: What MLX keeps beside weights and caches: constants, a random state, a round's arrays.
SLACK_BYTES = 1 << 20

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server is reached."""
    with serving() as server:
        yield server.url


class Turn(NamedTuple):
    """What a client was told of one reply."""

    text: str
    prompt_tokens: int
    cached_tokens: int


#: A conversation and whether to leave once its reply begins; None: left.
Say = Callable[[Messages, bool], Awaitable[Turn | None]]


def with_openai(client: openai.AsyncOpenAI) -> Say:
    async def say(messages: Messages, leaves: bool) -> Turn | None:
        arguments: Any = {
            "model": "default_model",
            "messages": [{"role": "system", "content": SYSTEM}, *messages],
            "max_tokens": ENDLESS if leaves else REPLY_TOKENS,
            "stream_options": {"include_usage": True},
        }
        stream = await client.chat.completions.create(stream=True, **arguments)
        text, usage = "", None
        async with stream:
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
                if leaves and text:
                    return None
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return Turn(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)

    return say


def with_anthropic(client: anthropic.AsyncAnthropic) -> Say:
    async def say(messages: Messages, leaves: bool) -> Turn | None:
        max_tokens = ENDLESS if leaves else REPLY_TOKENS
        arguments: Any = {"model": "claude-x", "system": SYSTEM, "messages": messages, "max_tokens": max_tokens}
        text = ""
        async with client.messages.stream(**arguments) as stream:
            async for piece in stream.text_stream:
                text += piece
                if leaves:
                    return None
            usage = (await stream.get_final_message()).usage
        cached_tokens = usage.cache_read_input_tokens or 0
        return Turn(text, usage.input_tokens + cached_tokens, cached_tokens)

    return say


async def converse(say: Say, name: str, *, leaves_at: int | None) -> list[Turn]:
    """Talk for some turns, and return those whose reply came whole."""
    messages: Messages = []
    turns: list[Turn] = []
    for number in range(TURNS):
        messages.append({"role": "user", "content": f"{name} asks for the {number}th time: what is next?"})
        turn = await say(messages, number == leaves_at)
        if turn is None:
            break
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.text})
    return turns


def settled(client: httpx2.Client) -> dict[str, Any]:
    """State of the server once nothing runs."""
    give_up_s = time.monotonic() + GUARD_S
    while True:
        state: dict[str, Any] = client.get("/cache/state").json()
        if state["running"] == state["waiting"] == 0:
            return state
        assert time.monotonic() < give_up_s, state
        time.sleep(0.01)


def test_conversations_side_by_side_reuse_their_turns_and_leave_what_the_stats_say(url: str) -> None:
    async def all_of_them() -> list[list[Turn]]:
        async with (
            openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0, timeout=GUARD_S) as first,
            anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0, timeout=GUARD_S) as second,
        ):
            talks = [
                converse(say, f"{who} {number}", leaves_at=2 if number == 0 else None)
                for who, say in (("Ann", with_openai(first)), ("Ben", with_anthropic(second)))
                for number in range(4)
            ]
            return await asyncio.gather(*talks)

    with httpx2.Client(base_url=url, timeout=GUARD_S) as admin:
        admin.delete("/cache").raise_for_status()
        earlier_count = len(settled(admin)["requests"])
        before_bytes = admin.post("/cache/check").json()["active_bytes"]
        talks = asyncio.run(all_of_them())
        state = settled(admin)
        active_bytes = admin.post("/cache/check").json()["active_bytes"] - before_bytes
        admin.delete("/cache").raise_for_status()
        left_bytes = admin.post("/cache/check").json()["active_bytes"] - before_bytes

    assert sorted(map(len, talks)) == [2] * 2 + [TURNS] * 6
    for earlier, later in (pair for turns in talks for pair in pairwise(turns)):
        assert later.cached_tokens >= earlier.prompt_tokens - 16, (earlier, later)
    outcomes = Counter(request["outcome"] for request in state["requests"])
    assert (outcomes["cancelled"], outcomes["error"]) == (2, 0)
    assert outcomes.total() == earlier_count + 2 * 3 + 6 * TURNS
    (stats,) = state["stats"].values()
    held_bytes = stats["live_bytes"] + stats["paged_bytes"]
    assert held_bytes > 4 * SLACK_BYTES
    # MLX may hand out a freed buffer that is larger than what was asked for.
    assert held_bytes - SLACK_BYTES < active_bytes < 2 * held_bytes + SLACK_BYTES
    assert left_bytes < SLACK_BYTES
