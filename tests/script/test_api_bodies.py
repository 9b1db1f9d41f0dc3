"""Bodies of APIs from logs: the reader makes the messages of the server, and asks each request once."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.files import InputError, Record
from runner.script.anthropic_blocks import is_anthropic
from runner.script.conversation import Conversation
from runner.script.conversation_formats import parse_record
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import requests_of, schedule
from runner.serve.anthropic import MessagesBody
from runner.serve.openai import ChatBody
from runner.serve.options import ServeOptions
from runner.serve.request import Request, check_body
from runner.serve.responses import ResponsesBody

OPTIONS = ServeOptions()
RECORD = Record({}, Path("log.jsonl"), 1, "log#0")
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text("abc_", min_size=1, max_size=6)
text_blocks = texts.map(lambda text: {"type": "text", "text": text})
sources = texts.map(lambda text: {"type": "text", "data": text})
documents = st.builds(lambda source, title: {"type": "document", "title": title, "source": source}, sources, texts)
results = st.builds(
    lambda content, is_error: {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error},
    texts | st.lists(text_blocks, max_size=2),
    st.booleans(),
)
uses = st.builds(lambda name, text: {"type": "tool_use", "id": "t", "name": name, "input": {"a": text}}, names, texts)
thoughts = texts.map(lambda text: {"type": "thinking", "thinking": text, "signature": "s"})
searches = st.just({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})
asked_blocks, said_blocks = text_blocks | documents | results, text_blocks | uses | thoughts | searches
user_turns = (texts | st.lists(asked_blocks, min_size=1, max_size=4)).map(
    lambda each: {"role": "user", "content": each}
)
replies = (texts | st.lists(said_blocks, max_size=4)).map(lambda each: {"role": "assistant", "content": each})
anthropic_tools = st.builds(lambda name: {"name": name, "description": "d", "input_schema": {"type": "object"}}, names)
anthropic_bodies = st.fixed_dictionaries(
    {
        "model": st.just("claude"),
        "max_tokens": st.just(9),
        "messages": st.lists(user_turns | replies, max_size=4).flatmap(
            lambda turns: user_turns.map(lambda turn: [turn, *turns])
        ),
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 99}, {"type": "disabled"}, None]),
    },
    optional={"system": texts | st.lists(text_blocks, max_size=2), "tools": st.lists(anthropic_tools, max_size=2)},
)


def prompts_are_equal(request: Request, conversation: Conversation) -> None:
    """Compare what becomes the prompt. The reader drops keys with no value, and joins parts."""
    served = [{key: value for key, value in message.items() if value is not None} for message in request.messages]
    assert list(conversation.messages) == served
    assert list(conversation.tools or ()) == list(request.tools or ())
    assert dict(conversation.arguments) == dict(request.chat_template_kwargs or {})


def read_one(body: Any) -> Conversation:
    (conversation,) = parse_record(RECORD._replace(value=json.loads(json.dumps(body))))
    return conversation


def has_user_turn(request: Request) -> bool:
    return any(message["role"] == "user" for message in request.messages)


@settings(max_examples=100, deadline=None)
@given(anthropic_bodies)
def test_a_body_of_anthropic_s_api_is_read_as_the_server_reads_it(body: dict[str, Any]) -> None:
    request = MessagesBody.read(body).request(OPTIONS, "")
    if has_user_turn(request):
        prompts_are_equal(request, read_one(body))


@pytest.mark.parametrize(
    "more",
    [
        {"model": "m"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Go"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ],
)
def test_a_body_for_a_model_of_anthropic_s_may_be_openai_s(more: dict[str, Any]) -> None:
    given = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "Go"}]}
    assert is_anthropic(given)
    assert not is_anthropic({**given, **more})


def test_a_turn_that_has_only_what_a_tool_of_anthropic_s_servers_did_is_anthropic_s() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    body = {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": [search]}]}
    assert is_anthropic(body)


input_texts = texts.map(lambda text: [{"type": "input_text", "text": text}])
summaries = texts.map(lambda text: [{"type": "summary_text", "text": text}])
calls, outputs = {"type": "custom_tool_call", "name": "n"}, {"type": "function_call_output"}
items = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts)
    | input_texts.map(lambda parts: {"type": "message", "role": "user", "content": parts})
    | summaries.map(lambda parts: {"type": "reasoning", "id": "r", "summary": parts})
    | names.map(lambda name: {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"})
    | texts.map(lambda text: {**calls, "call_id": "c", "input": text})
    | texts.map(lambda text: {**outputs, "call_id": "c", "output": text})
    | st.just({"type": "web_search_call", "id": "w"}),
    max_size=6,
)
responses_bodies = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "input": texts.filter(bool) | items.map(lambda each: [{"role": "user", "content": "Go"}, *each]),
    },
    optional={
        "instructions": texts,
        "reasoning": st.sampled_from([{"effort": "low"}, {"effort": "none"}, None]),
        "tools": st.just([{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}]),
    },
)


@settings(max_examples=100, deadline=None)
@given(responses_bodies)
def test_a_body_of_the_responses_api_is_read_as_the_server_reads_it(body: dict[str, Any]) -> None:
    prompts_are_equal(check_body(ResponsesBody, body).request(OPTIONS, ""), read_one(body))


chat_bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(texts, min_size=1, max_size=3)},
    optional={
        "reasoning_effort": st.sampled_from(["low", "none"]),
        "enable_thinking": st.booleans(),
        "thinking": st.booleans() | st.sampled_from([{"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive"}]),
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "date"]), st.booleans()),
    },
)


@settings(max_examples=100, deadline=None)
@given(chat_bodies, st.booleans())
def test_arguments_of_the_template_are_read_as_the_server_reads_them(body: dict[str, Any], is_chat: bool) -> None:
    turns = [{"role": "user", "content": text} for text in body.pop("messages")]
    body = {**body, "messages" if is_chat else "input": turns}
    request = (
        ChatBody.read(body, OPTIONS).request("") if is_chat else check_body(ResponsesBody, body).request(OPTIONS, "")
    )
    prompts_are_equal(request, read_one(body))


def test_what_no_template_has_text_for_is_left_out_and_named() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE, {"type": "text", "text": "42"}]}
    thought, call = {"type": "redacted_thinking"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look", "citations": None}, IMAGE, pdf]},
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]
    found = read_one({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "messages": messages})
    assert [message["content"] for message in found.messages] == ["Look", "", "42"]
    assert found.left_out == {"tool web_search_20250305": 1, "image": 2, "document": 1, "redacted_thinking": 1}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, {"type": "input_image", "file_id": "f"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "computer_call", "id": "c"},
    ]
    found = read_one({"model": "m", "previous_response_id": "resp_1", "input": items})
    assert found.messages[0] == {"role": "user", "content": "Look"}
    assert found.left_out == {"previous_response_id": 1, "input_image": 1, "reasoning": 1, "computer_call": 1}


def test_a_wrong_field_of_a_body_is_named() -> None:
    with pytest.raises(InputError, match=r"log.jsonl:1: messages\.0\.user\.content\.0\.text\.text: Field requ"):
        read_one({"system": "s", "messages": [{"role": "user", "content": [{"type": "text"}]}]})
    for body in ({"system": "s", "messages": None}, {"model": "m", "input": None}):
        with pytest.raises(InputError, match=r"log\.jsonl:1: (messages|input): Input should be a valid list"):
            read_one(body)


def test_conversations_in_openai_s_form_may_have_a_system_prompt_beside_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "Go"}, calling, {"role": "tool", "content": "42"}]
    found = read_one({"system": "Be brief.", "messages": messages})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool"]


def test_lines_that_differ_in_every_request_are_left_out_as_by_the_server() -> None:
    billing = "x-anthropic-billing-header: cch=1f0a9;"
    parts = [{"type": "text", "text": text} for text in (billing, f"{billing}\nBe brief.")]
    asked = {"role": "user", "content": billing}
    for role, content in product(("system", "developer"), (billing, f"{billing}\nBe brief.", parts, parts[:1])):
        body = {"model": "m", "messages": [{"role": role, "content": content}, asked]}
        if isinstance(content, str):
            prompts_are_equal(ChatBody.read(body, OPTIONS).request(""), read_one(body))
        shown = [message["content"] for message in read_one(body).messages]
        assert shown == ([billing] if content in (billing, parts[:1]) else ["Be brief.", billing])


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def asked_of(path: Path) -> list[list[int]]:
    """For each conversation the lengths of the prompts that it asks for, in messages."""
    conversations = read_conversations(path).conversations
    return [[len(request.messages) for request in requests_of(each)] for each in conversations]


def test_each_request_of_a_log_is_asked_once_and_in_its_order(tmp_path: Path) -> None:
    def body(contents: str, **more: Any) -> dict[str, Any]:
        turns = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(contents)]
        return {"model": "m", "messages": turns, **more}

    by_users = [body(text, system="s", user=user) for text, user in zip("abcd", "xyyx", strict=True)]
    order = schedule(read_conversations(write(tmp_path / "users.jsonl", *by_users)).conversations)
    assert [each.messages[-1]["content"] for each in order] == [*"abcd"]
    # The first one begins in the middle of a conversation, the third one is the second again.
    path = write(tmp_path / "log.jsonl", *(body(each, system="s") for each in ("abc", "abcde", "abcde", "x")))
    assert asked_of(path) == [[2, 4], [6], [6], [2]]
    assert {each.user for each in read_conversations(path).conversations} == {"log"}
    assert asked_of(write(tmp_path / "talks.jsonl", body("ab"), body("ab"))) == [[1], [1]]


BODY = {"model": "m", "messages": [{"role": "user", "content": "Go"}]}
REPLY = {"role": "assistant", "content": "42"}


REPLIED = {"choices": [{"message": REPLY}]}
TOLD = {"role": "assistant", "content": [{"type": "text", "text": "42"}]}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]}
TALK = ["user", "assistant"]


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({"method": "POST", "url": "/v1/chat/completions", "body": BODY}, ["user"]),
        ({"params": {**BODY, "system": "s"}}, ["system", "user"]),
        ({"body": BODY, "response": {"body": REPLIED}}, TALK),
        ({"request": json.dumps(BODY), "response": REPLIED}, TALK),
        ({"request": {"url": "/v1/messages", "body": {**BODY, "system": "s"}}, "response": TOLD}, ["system", *TALK]),
        (
            {"url": "/v1/responses", "body": {"model": "m", "input": "Go"}, "response": {"body": {"output": [ITEM]}}},
            TALK,
        ),
    ],
    ids=["batch", "batch of Anthropic", "stored completion", "proxy", "proxy with a body", "responses"],
)
def test_a_body_may_be_inside_another_record_with_its_response(record: Any, roles: list[str]) -> None:
    found = read_one({"custom_id": "a", **record})
    assert found.conversation_id == "a"
    assert [message["role"] for message in found.messages] == roles
    assert found.messages[-1]["content"] == ("42" if roles[-1] == "assistant" else "Go")
    assert len([*requests_of(found)]) == 1


def test_what_a_response_has_beyond_its_first_reply_is_counted() -> None:
    further = {"message": {"role": "assistant", "content": "43"}}
    several = read_one({"id": "a", "body": BODY, "response": {"choices": [{"message": REPLY}, further, further]}})
    assert several.left_out == {"further choice": 2}
    unknown = read_one({"id": "a", "body": BODY, "response": {"error": "overloaded"}})
    assert unknown.left_out == {"response": 1}
    assert [message["role"] for message in unknown.messages] == ["user"]
    assert read_one({"body": BODY, "response": {"body": "data: {}\n\ndata: [DONE]"}}).left_out == {"response": 1}
    assert read_one({**BODY, "response": {"choices": []}}).left_out == {"response beside messages": 1}


@pytest.mark.parametrize(
    ("request_key", "output"),
    [
        ("body", {"id": "batch_req_1", "response": {"status_code": 200, "body": {"choices": [{"message": REPLY}]}}}),
        ("params", {"result": {"type": "succeeded", "message": {**REPLY, "type": "message"}}}),
    ],
    ids=["OpenAI", "Anthropic"],
)
def test_requests_of_a_batch_and_their_outputs_come_from_two_files(
    request_key: str, output: dict[str, Any], tmp_path: Path
) -> None:
    requests = [{"custom_id": name, request_key: BODY} for name in ("a", "b", "c")]
    failed = {"custom_id": "b", "response": None, "error": {"code": "batch_expired"}}
    write(tmp_path / "2-requests.jsonl", *requests)
    lone = write(tmp_path / "1-outputs.jsonl", {**output, "custom_id": "a", "error": None}, failed)
    found = read_conversations(tmp_path).conversations
    assert [each.conversation_id for each in found] == ["a", "b", "c"]
    assert [each.messages[-1]["content"] for each in found] == ["42", "Go", "Go"]
    assert [each.left_out for each in found] == [{}, {"response": 1}, {}]
    with pytest.raises(InputError, match=r"outputs\.jsonl:1: is an output without its request; wanted both"):
        read_conversations(lone)


def test_outputs_of_two_batches_with_the_same_ids_are_not_mixed_up(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"{number}-requests.jsonl", {"custom_id": "a", "body": {**BODY, "id": f"{number}"}})
        write(tmp_path / f"{number}-outputs.jsonl", {"custom_id": "a", "response": {"body": {"choices": []}}})
    write(tmp_path / "chat.jsonl", BODY)
    with pytest.raises(InputError, match=r"requests\.jsonl:1: several outputs have its custom_id"):
        read_conversations(tmp_path)
    found = read_conversations(tmp_path, skip_bad=True)
    assert (len(found.conversations), len(found.skipped)) == (1, 2)


def test_requests_with_one_custom_id_are_read_under_names_of_their_own(tmp_path: Path) -> None:
    response = {"body": {"choices": [{"message": REPLY}]}}
    rows = [{"custom_id": "a", "body": BODY, "response": response}] * 2
    path = write(tmp_path / "log.jsonl", *rows)
    assert [each.conversation_id for each in read_conversations(path).conversations] == ["a", "a/1"]
    write(tmp_path / "outputs.jsonl", {"custom_id": "a", "response": response})
    with pytest.raises(InputError, match=r"log\.jsonl:1: another request has its custom_id; wanted one batch\."):
        read_conversations(tmp_path)


@pytest.mark.parametrize("user_id", ["", 1.5, None, {}])
def test_a_user_in_the_metadata_that_is_no_name_is_passed_over(user_id: Any) -> None:
    assert read_one({**BODY, "metadata": {"user_id": user_id}}).messages == read_one(BODY).messages


def test_a_batch_of_no_chats_is_refused() -> None:
    with pytest.raises(InputError, match=r"log.jsonl:1: url is str '/v1/embeddings'; wanted a chat\."):
        read_one({"custom_id": "a", "url": "/v1/embeddings", "body": {"model": "m", "input": "Go"}})
