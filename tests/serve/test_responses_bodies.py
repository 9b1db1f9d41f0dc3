"""Bodies of OpenAI's Responses API: what they ask for, what they go on with, and which field is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from runner.serve import responses
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError, Request, check_body
from runner.serve.responses import ResponseMemory, ResponsesBody
from tests.serve.scripted import ScriptedRuns, said
from tests.serve.scripted_app import RESPONSES, USER, scripted_client

TOOL = {"type": "function", "name": "f", "description": "of x", "parameters": {"type": "object"}, "strict": True}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "a",
    "name": "f",
    "arguments": '{"x": 1}',
    "status": "completed",
}
PATCH = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "+a\n"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A tool."}]}


def asked(options: ServeOptions | None = None, **fields: Any) -> Request:
    return check_body(ResponsesBody, {"input": [USER], **fields}).request(options or ServeOptions(), "ann")


def test_items_of_one_reply_become_one_message_of_the_assistant() -> None:
    look = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    ]}  # fmt: skip
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": text} for text in ("Be", "kind.")]},
        {"role": "user", "content": "Look."},
        THOUGHT, look, CALL, PATCH,
        {"type": "function_call_output", "call_id": "a", "output": "dry"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
        {**THOUGHT, "summary": [{"type": "summary_text", "text": "Short."}], "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Never."},
    ]  # fmt: skip
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "patch", "arguments": '{"input": "+a\\n"}'}},
    ]
    assert asked(input=items).messages == [
        {"role": "developer", "content": "Be\nkind."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "A tool.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
        {"role": "tool", "tool_call_id": "b", "content": "done"},
        {"role": "assistant", "content": "No.\nNever.", "reasoning_content": "Short."},
    ]


def test_what_another_server_has_encrypted_is_no_reasoning() -> None:
    other = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    assert asked(input=[USER, other, CALL]).messages[1].keys() == {"role", "content", "tool_calls"}


def test_images_make_a_message_a_list_of_parts() -> None:
    url = "data:image/png;base64,iVBORw=="
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    content = [{"type": "input_text", "text": "What?"}, image]
    output = {"type": "function_call_output", "call_id": "a", "output": [image]}
    part = {"type": "image_url", "image_url": {"url": url}}
    assert [message["content"] for message in asked(input=[{"role": "user", "content": content}, output]).messages] == [
        [{"type": "text", "text": "What?"}, part], [part],
    ]  # fmt: skip


def test_tools_become_functions_and_those_of_openai_are_left_out_with_a_line_in_the_log(caplog: Any) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [
        {"type": "web_search"}, TOOL, {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar},
        {"type": "namespace", "name": "agents", "tools": [TOOL]}, {"type": "function", "name": "g", "parameters": None},
    ]  # fmt: skip
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    with caplog.at_level(logging.INFO):
        request = asked(tools=tools, input=[USER, CALL, search, {**CALL, "call_id": "c"}])
    description = "Text of this lark grammar:\nstart: /a/"
    text = {"type": "object", "properties": {"input": {"type": "string", "description": description}}}
    assert [tool["function"] for tool in request.tools or ()] == [
        {"name": "f", "description": "of x", "parameters": {"type": "object"}},
        {"name": "patch", "description": "Edits.", "parameters": {**text, "required": ["input"]}},
        {"name": "agents__f", "description": "of x", "parameters": {"type": "object"}},
        {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
    assert [len(message.get("tool_calls", ())) for message in request.messages] == [0, 2]
    (line,) = caplog.messages
    assert line.endswith(": web_search, web_search_call")


def test_tools_of_a_namespace_have_names_of_their_own_and_past_calls_have_them_too() -> None:
    tools = [
        {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [TOOL, {"type": "web_search"}]},
        {"type": "namespace", "name": "mcp__web", "tools": [TOOL, {"type": "custom", "name": "patch"}]},
        {**TOOL, "name": "mcp__web__f"},
    ]
    past = [{**CALL, "namespace": "mcp__web"}, {**CALL, "call_id": "b", "namespace": "gone"}, {**CALL, "call_id": "c"}]
    request = asked(tools=tools, input=[USER, *past, {**PATCH, "call_id": "d", "namespace": "mcp__web"}])
    names = [tool["function"]["name"] for tool in request.tools or ()]
    assert names == ["mcp__files__f", "mcp__web__f", "mcp__web__patch", "mcp__web__f_2"]
    calls = [call["function"]["name"] for call in request.messages[1]["tool_calls"]]
    assert calls == ["mcp__web__f", "gone__f", "f", "mcp__web__patch"]
    named = {"type": "function", "name": "f", "namespace": "mcp__web"}
    forced = asked(tools=tools, tool_choice=named).constraint
    assert forced is not None
    assert forced.functions == ("mcp__web__f",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "critic", "content": "?"}]}, "input.0.message.role"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.function_call.arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input_image.image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.message.content.0"),
        ({"input": [{"type": ["message"]}]}, "input.0.foreign.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as wrong:
        asked(**fields)
    assert wrong.value.status == 400
    assert param in str(wrong.value.param)


# Conversations that go on


@pytest.fixture
def runs() -> ScriptedRuns:
    call = said(calls=[("f", '{"x": 1}')], finish="stop")
    return ScriptedRuns(said(reasoning="A tool."), said("I look."), call)


@pytest.fixture
def client(runs: ScriptedRuns) -> Iterator[TestClient]:
    with scripted_client(runs) as connected:
        yield connected


def post(client: TestClient, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = client.post(RESPONSES, json={"model": "m", **body})
    return answer.status_code, answer.json()


RESULT = {"type": "function_call_output", "call_id": "call_0", "output": "dry"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_with_the_items_before_it_but_not_with_their_instructions(
    runs: ScriptedRuns, client: TestClient, stream: bool
) -> None:
    body = {"model": "m", "input": "Look.", "instructions": "Be brief.", "stream": stream}
    answer = client.post(RESPONSES, json=body).text
    first = json.loads(answer.rpartition("data: ")[2])
    second = post(client, input=[RESULT], previous_response_id=first["response"]["id"] if stream else first["id"])[1]
    assert second["previous_response_id"]
    post(client, input="And now?", previous_response_id=second["id"])
    repeated = [{"role": "user", "content": "Look."}, *json.loads(answer)["output"], RESULT] if not stream else None
    called = {"role": "assistant", "content": "I look.", "reasoning_content": "A tool.", "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]}  # fmt: skip
    messages = [
        {"role": "user", "content": "Look."},
        called,
        {"role": "tool", "tool_call_id": "call_0", "content": "dry"},
    ]
    assert runs.opened[1].request.messages == messages
    assert runs.opened[2].request.messages == [*messages, called, {"role": "user", "content": "And now?"}]
    if repeated:  # Codex and many others send all items instead.
        post(client, input=repeated)
        assert runs.opened[3].request.messages == messages


def test_items_of_a_response_may_be_named(runs: ScriptedRuns, client: TestClient) -> None:
    output = post(client, input="Look.")[1]["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    third = post(client, input=[{"role": "user", "content": "Look."}, *references, RESULT])[1]
    assert [message["role"] for message in runs.opened[1].request.messages] == ["user", "assistant", "tool"]
    assert runs.opened[1].request.messages[1].keys() == {"role", "content", "reasoning_content", "tool_calls"}
    post(client, input="And now?", previous_response_id=third["id"])
    assert runs.opened[2].request.messages[:3] == runs.opened[1].request.messages
    twice = [{"type": "item_reference", "id": output[0]["id"]}] * 2
    assert post(client, input=twice)[0] == 404
    for id in (output[0]["id"] + "0", "msg_1_1", "x", "", None, [1]):
        status, answer = post(client, input=[{"type": "item_reference", "id": id}])
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "input", "item_not_found")


def test_reasoning_that_comes_back_without_its_text_is_found_again(runs: ScriptedRuns, client: TestClient) -> None:
    thought, *others = post(client, input="Look.")[1]["output"]
    bare = {"type": "reasoning", "id": thought["id"], "summary": [], "content": []}
    post(client, input=[USER, bare, *others, RESULT])
    assert runs.opened[1].request.messages[1]["reasoning_content"] == "A tool."
    assert post(client, input=[{**bare, "id": "rs_1"}, *others, RESULT])[0] == 200
    assert "reasoning_content" not in runs.opened[2].request.messages[0]


def test_a_response_that_is_not_here_or_was_not_to_be_stored_is_not_found(client: TestClient) -> None:
    secret = post(client, input="Look.", store=False)[1]
    for id in (secret["id"], "resp_1", ""):
        status, answer = post(client, input="?", previous_response_id=id)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (404, "previous_response_id", "previous_response_not_found")
        assert repr(id) in error["message"]


def test_a_memory_keeps_the_conversations_last_used_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED", 3)
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 100)
    memory, ann = ResponseMemory(), ("ann", "")

    def kept() -> list[str]:
        return [id for _, id in memory._conversations]

    for id in "abc":
        memory.put(ann, id, (b"x" * 20, b"x" * 10))
    memory.get(ann, "a")
    memory.put(ann, "d", (b"x" * 30,))
    assert kept() == ["c", "a", "d"]
    memory.put(ann, "e", (b"x" * 70,))
    assert kept() == ["d", "e"]
    memory.put(ann, "f", (b"x" * 101,))
    assert kept() == ["d", "e"]
    memory.put(ann, "g", (b"x" * 100,))
    assert kept() == ["g"]
    with pytest.raises(ApiError):
        memory.get(("bob", ""), "g")
    memory.put(("ann", "x"), "h", (b"x" * 50,))
    memory.put(ann, "i", (b"x" * 50,))
    memory.clear("x")
    memory.put(ann, "j", (b"x" * 50,))
    assert kept() == ["i", "j"]


def test_the_schema_takes_an_item_or_a_tool_as_one_kind_only() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    items = [USER, CALL, PATCH, THOUGHT, RESULT, {"type": "custom_tool_call_output", "call_id": "b", "output": []}]
    search = {"type": "web_search_call", "id": "ws_1"}
    body = {"input": [*items, search], "tools": [TOOL, {"type": "custom", "name": "patch"}, {"type": "web_search"}]}
    jsonschema.validate(body, ResponsesBody.model_json_schema())
    jsonschema.validate({"input": "Hi"}, ResponsesBody.model_json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": [{**CALL, "name": 1}]}, ResponsesBody.model_json_schema())
