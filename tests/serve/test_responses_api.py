"""OpenAI's Responses API: replies and streams, checked by the types of the real client, and how they end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from runner.serve import responses
from runner.serve.options import ServeOptions
from runner.serve.request import PrefillProgress
from tests.serve.scripted import CACHED_TOKENS, PROMPT_TOKENS, ScriptedRuns, said
from tests.serve.scripted_app import BODIES, RESPONSES, events, scripted_app, scripted_client, whole

BODY: dict[str, Any] = BODIES[RESPONSES]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO = (said("Hel"), said("lo", finish="stop"))
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
]
FULL = (
    said(), said(reasoning="Hm"), said(), said(reasoning="m."), said(), said("\n\n"), said("Let me look."), said("\n"),
    said(calls=[("f", '{"x": 1}'), ("patch", '{"input": "+a\\n"}')]), said("\n", finish="stop"),
)  # fmt: skip
FULL_OUTPUT = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm."}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "\n\nLet me look.\n", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": '{"x": 1}'},
    {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "+a\n"},
]


def response_to(runs: ScriptedRuns, **fields: Any) -> dict[str, Any]:
    response = whole(RESPONSES, runs, **fields)
    Response.model_validate(response)
    return response


def events_of(runs: ScriptedRuns, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream: each of the client's types, and numbered."""
    found = events(RESPONSES, runs, **fields)
    for number, event in enumerate(found):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    return found


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(item["status"] == "completed" for item in output)
    assert len({item["id"] for item in output}) == len(output)
    return [{name: value for name, value in item.items() if name not in ("id", "status")} for item in output]


def test_a_reply_is_a_response_that_repeats_what_was_asked() -> None:
    runs = ScriptedRuns(*HELLO)
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "tools": TOOLS}
    response = response_to(runs, **asked, temperature=0.5, text={"verbosity": "low"}, max_output_tokens=9, store=False)
    assert response["id"] == f"resp_{runs.opened[0].id}"
    message = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert without_ids(response["output"]) == [{"type": "message", "role": "assistant", "content": [message]}]
    assert response["usage"] == {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + 3,
    }
    assert response["completed_at"] >= response["created_at"] > 1e9
    repeated = {
        **asked, "model": "m", "status": "completed", "error": None, "incomplete_details": None, "temperature": 0.5,
        "top_p": 1.0, "text": {"format": {"type": "text"}, "verbosity": "low"}, "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": None}, "store": False, "previous_response_id": None,
        "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled",
    }  # fmt: skip
    assert {name: response[name] for name in repeated} == repeated


def test_reasoning_text_and_calls_are_items_and_white_space_between_them_is_none() -> None:
    response = response_to(ScriptedRuns(*FULL), tools=TOOLS)
    assert without_ids(response["output"]) == FULL_OUTPUT
    assert response["status"] == "completed"
    # The mark before the reasoning, and one whose text came later; not the mark behind it.
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_a_stream_of_text_has_the_events_of_the_api_in_their_order() -> None:
    found = events_of(ScriptedRuns(PrefillProgress(8, 20), *HELLO))
    created, started, added, part_added, *deltas, text_done, part_done, done, completed = found
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert created["response"] == started["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part_added["part"]["text"] == ""
    assert [event["delta"] for event in deltas] == ["Hel", "lo"]
    assert text_done["text"] == part_done["part"]["text"] == done["item"]["content"][0]["text"] == "Hello"
    assert {event["item_id"] for event in (part_added, *deltas, text_done, part_done)} == {done["item"]["id"]}
    assert completed["response"]["output"] == [done["item"]]


def test_a_stream_of_all_kinds_of_items_ends_with_what_comes_whole() -> None:
    found = events_of(ScriptedRuns(*FULL), tools=TOOLS)
    assert [event["type"].removeprefix("response.") for event in found[2:-1]] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert without_ids(items) == FULL_OUTPUT
    response = found[-1]["response"]
    assert response["output"] == items
    ended = response_to(ScriptedRuns(*FULL), tools=TOOLS)
    assert response["usage"] == ended["usage"]
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"].get("arguments", event["item"].get("input")) for event in added] == [None, None, "", ""]


@pytest.mark.parametrize(
    "runs",
    [
        ScriptedRuns(said("a"), said(finish="length"), outcome="length"),
        ScriptedRuns(said("a"), outcome="cancelled"),
        ScriptedRuns(said("a"), said(), outcome="length", flushed=said(calls=[("f", '{"x"')])),
    ],
    ids=["length", "cancelled", "call"],
)
def test_a_reply_that_was_cut_off_is_incomplete_and_so_is_its_last_item(runs: ScriptedRuns) -> None:
    found = events_of(runs)
    assert found[-1]["type"] == "response.incomplete"
    response = found[-1]["response"]
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    *before, last = response["output"]
    assert last["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_in_a_namespace_has_the_name_that_the_client_knows(*, stream: bool) -> None:
    tools = [{"type": "namespace", "name": "mcp__files", "description": "", "tools": TOOLS}]
    calls = [("mcp__files__f", '{"x": 1}'), ("mcp__files__patch", '{"input": "+a"}'), ("f", "{}")]
    runs = ScriptedRuns(said(calls=calls, finish="stop"))
    items = (
        events_of(runs, tools=tools)[-1]["response"]["output"] if stream else response_to(runs, tools=tools)["output"]
    )
    assert without_ids(items) == [
        {"type": "function_call", "call_id": "call_0", "name": "f", "namespace": "mcp__files", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "namespace": "mcp__files", "input": "+a"},
        {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": "{}"},
    ]
    assert [tool["function"]["name"] for tool in runs.opened[0].request.tools or ()] == [each[0] for each in calls[:2]]


def test_an_input_that_is_no_json_is_given_whole_to_a_custom_tool() -> None:
    calls = [("patch", "+a"), ("patch", '{"other": 1}'), ("patch", '["input"]')]
    response = response_to(ScriptedRuns(said(calls=calls, finish="stop")), tools=TOOLS)
    assert [item["input"] for item in response["output"]] == ["+a", '{"other": 1}', '["input"]']
    cut = ScriptedRuns(said(), outcome="length", flushed=said(calls=[("patch", '{"input": "+a')]))
    assert response_to(cut, tools=TOOLS)["output"][0]["input"] == "+a"


def test_a_long_prefill_is_told_in_comments_and_now_and_then_in_events(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(PrefillProgress(8, 20), *HELLO)
    assert [event["type"] for event in events_of(runs)].count("response.in_progress") == 1
    with scripted_client(runs) as client:
        assert ": keepalive 8/20\n\n" in client.post(RESPONSES, json={**BODY, "stream": True}).text
    monkeypatch.setattr(responses, "KEEPALIVE_S", 0)
    assert [event["type"] for event in events_of(runs)].count("response.in_progress") == 2


def test_reasoning_goes_into_the_field_that_clients_send_back_if_they_ask_for_it() -> None:
    plain = response_to(ScriptedRuns(*FULL))["output"][0]
    assert "encrypted_content" not in plain
    found = events_of(ScriptedRuns(*FULL), include=["reasoning.encrypted_content"])
    reasoning = found[-1]["response"]["output"][0]
    assert reasoning["content"][0]["text"] == "Hmm."
    runs = ScriptedRuns(*HELLO)
    # Codex sends reasoning back without its text.
    response_to(runs, input=[{**reasoning, "content": None}, *BODY["input"]])
    assert runs.opened[0].request.messages[0] == {"role": "assistant", "content": "", "reasoning_content": "Hmm."}


def client_of(runs: ScriptedRuns, options: ServeOptions | None = None) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(scripted_app(runs, options))
    http_client = openai.DefaultAsyncHttpxClient(transport=transport)
    return openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http_client, max_retries=0)


def test_the_real_client_reads_a_stream_to_the_response_that_comes_whole() -> None:
    async def read() -> tuple[Any, Any, str]:
        async with client_of(ScriptedRuns(*FULL)) as client:
            asked: Any = {"model": "m", "input": "Hi", "tools": TOOLS}
            text = ""
            async with client.responses.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                streamed = await stream.get_final_response()
            return streamed, await client.responses.create(**asked), text

    streamed, ended, text = asyncio.run(read())
    assert text == ended.output_text == "\n\nLet me look.\n"
    assert without_ids([item.to_dict() for item in ended.output]) == FULL_OUTPUT
    parsed = [{**item.to_dict(), "parsed_arguments": None} for item in streamed.output]
    assert [item["type"] for item in parsed] == [item["type"] for item in FULL_OUTPUT]
    assert ended.usage is not None
    assert ended.usage.input_tokens_details.cached_tokens == CACHED_TOKENS


def test_a_remembered_response_is_read_listed_counted_and_deleted() -> None:
    with scripted_client(ScriptedRuns(*FULL)) as client:
        first = client.post(RESPONSES, json={**BODY, "input": "Hi", "tools": TOOLS}).json()
        result = {"type": "function_call_output", "call_id": "call_0", "output": "2"}
        more = {**BODY, "input": [result], "tools": TOOLS, "previous_response_id": first["id"]}
        with client.stream("POST", RESPONSES, json={**more, "stream": True}) as stream:
            second = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")][-1]["response"]
        counted = client.post(f"{RESPONSES}/input_tokens", json=more).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": len("Hi" + "\n\nLet me look.\n" + "2")}
        for each in (first, second):
            assert client.get(f"{RESPONSES}/{each['id']}").json() == each
            Response.model_validate(each)
        at = f"{RESPONSES}/{second['id']}/input_items"
        page = client.get(at, params={"order": "asc"}).json()
        assert page["data"][0] == {
            "id": "item_0", "type": "message", "status": "completed", "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}],
        }  # fmt: skip
        assert page["data"][1:-1] == first["output"]
        assert page["data"][-1] == {"id": f"item_{len(first['output']) + 1}", **result}
        assert (page["has_more"], page["first_id"]) == (False, "item_0")
        newest = client.get(at, params={"limit": 2}).json()
        assert (newest["data"], newest["has_more"]) == (page["data"][:-3:-1], True)
        rest = client.get(at, params={"after": newest["last_id"]}).json()
        assert rest["data"] == page["data"][-3::-1]
        assert client.get(at, params={"after": "x"}).status_code == 400
        assert client.get(f"{RESPONSES}/{second['id']}", params={"stream": True}).status_code == 400
        assert client.get(f"{RESPONSES}/{second['id']}", params={"cache_salt": "x"}).status_code == 404
        deleted = client.delete(f"{RESPONSES}/{first['id']}").json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        assert client.get(at).status_code == 200, "the second has what it needs of the first"
        for answer in (client.get(f"{RESPONSES}/{first['id']}"), client.delete(f"{RESPONSES}/{first['id']}")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        again = client.post(RESPONSES, json=more)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "previous_response_not_found")
