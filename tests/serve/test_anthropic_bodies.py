"""Bodies of Anthropic's Messages API: what they ask for, and which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.models.tiny import tiny_tokenizer
from runner.serve.anthropic import MessagesBody
from runner.serve.options import ServeOptions
from runner.serve.prompts import RenderedPrompt, prompt_of
from runner.serve.request import ApiError, Request

USER = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "claude-sonnet", "max_tokens": 16, "messages": [USER]}
MARK = {"type": "ephemeral", "ttl": "1h"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}
IMAGE = {"type": "image", "source": SOURCE, "cache_control": MARK}
TOOL = {"name": "weather", "description": "of a place", "input_schema": {"type": "object"}}


def asked(options: ServeOptions | None = None, **fields: Any) -> Request:
    return MessagesBody.read({**BODY, **fields}).request(options or ServeOptions(), "ann")


def test_blocks_become_messages_in_openais_form() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Ulm?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "A tool.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "weather", "input": {"at": "Ulm"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "dry"}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "no such place", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c"},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Ulm"}'}}
    assert asked(system="Be brief.", messages=messages).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather\nin Ulm?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "A tool.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no such place"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "And now?"},
    ]


def test_where_images_are_a_message_is_a_list_of_parts_without_marks() -> None:
    text = {"type": "text", "text": "What is it?", "cache_control": MARK}
    messages = [
        {"role": "user", "content": [text, IMAGE, text]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]},
            {"type": "tool_result", "tool_use_id": "b", "content": [IMAGE], "is_error": True},
        ]},
    ]  # fmt: skip
    mine = asked(messages=messages)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    question = {"type": "text", "text": "What is it?"}
    assert [message["content"] for message in mine.messages] == [
        [question, image, question], "", [image], [{"type": "text", "text": "Error: "}, image],
    ]  # fmt: skip
    assert mine.marked_texts == []


def test_turns_of_one_role_become_one_and_an_empty_reply_stays_a_turn() -> None:
    messages = [USER, {**USER, "content": "there"}, {"role": "assistant", "content": []}, {**USER, "content": []}]
    assert asked(messages=messages).messages == [
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_what_a_client_says_of_itself_in_front_of_the_system_prompt_is_no_part_of_it() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f0a9;"}
    system = [header, {"type": "text", "text": "You are"}, {"type": "text", "text": "brief."}]
    assert asked(system=system).messages[0] == {"role": "system", "content": "You are\nbrief."}
    assert asked(system=[header]).messages == [USER]
    one = f"{header['text']}\nYou are brief.\nx-anthropic-billing-header: cch=2;\nBe kind.\n"
    assert asked(system=one).messages[0]["content"] == "You are brief.\nBe kind.\n"
    marked = [{"type": "text", "text": f"{header['text']}\nYou are", "cache_control": MARK}, system[2]]
    mine = asked(system=marked, messages=[USER, {"role": "system", "content": [header]}, USER])
    assert mine.messages == [{"role": "system", "content": "You are\nbrief."}, {**USER, "content": "Hi\nHi"}]
    assert mine.marked_texts == [(0, len("You are"))]
    assert asked(messages=[{**USER, "content": one}]).messages[0]["content"] == one, "a question stays as it is"


def test_a_marked_text_inside_of_a_message_asks_for_a_checkpoint_where_it_ends() -> None:
    def text(of: str, *, is_marked: bool = False) -> dict[str, Any]:
        return {"type": "text", "text": of, **({"cache_control": MARK} if is_marked else {})}

    result = {"type": "tool_result", "tool_use_id": "a", "content": "dry", "cache_control": MARK}
    header = text("x-anthropic-billing-header: cch=1", is_marked=True)
    mine = asked(
        system=[header, text("You are", is_marked=True), text("brief.")],
        tools=[{**TOOL, "cache_control": MARK}],
        cache_control=MARK,
        messages=[
            {"role": "user", "content": [text("a"), text("bc", is_marked=True)]},
            {"role": "user", "content": [text("de", is_marked=True), text("f", is_marked=True)]},
            {"role": "assistant", "content": [text("So."), {"type": "tool_use", "id": "a", "name": "t", "input": {}}]},
            {"role": "user", "content": [result, text("g", is_marked=True), text("h", is_marked=True)]},
        ],
    )
    contents = [message["content"] for message in mine.messages]
    assert contents == ["You are\nbrief.", "a\nbc\nde\nf", "So.", "dry", "g\nh"]
    # The ends of messages are checkpoints anyway.
    before = [contents[index][:end] for index, end in mine.marked_texts]
    assert before == ["You are", "a\nbc", "a\nbc\nde", "g"]
    assert [index for index, _ in mine.marked_texts] == [0, 1, 1, 4]


def test_marks_stay_where_they_were_when_a_volatile_part_is_moved() -> None:
    def text(of: str) -> dict[str, Any]:
        return {"type": "text", "text": of, "cache_control": MARK}

    part = "Environment you are running in:\n<env>\nWorking Directory: /home/ann\n</env>"
    system = [text("You are brief."), text(part), text("You are kind."), {"type": "text", "text": "So."}]
    moving = ServeOptions(move_volatile=True)
    mine = asked(moving, system=system, messages=[{"role": "user", "content": [text("a"), text("b")]}])
    assert [message["content"] for message in mine.messages] == ["You are brief.\nYou are kind.\nSo.", part, "a\nb"]
    before = [mine.messages[index]["content"][:end] for index, end in mine.marked_texts]
    assert before == ["You are brief.", "You are brief.\n", "You are brief.\nYou are kind.", "a"]


def test_a_prompt_is_marked_where_a_marked_text_ends_and_others_with_that_beginning_have_its_tokens() -> None:
    tokenizer = tiny_tokenizer()
    marked = {"type": "text", "text": "You are brief.", "cache_control": MARK}

    def prompt(today: str) -> RenderedPrompt:
        system = [marked, {"type": "text", "text": today}]
        return prompt_of(asked(system=system, tools=[TOOL]), tokenizer, {}, with_marks=True)

    monday, sunday = prompt("Monday"), prompt("Sunday")
    ends = [mark for mark in monday.marks if tokenizer.decode(monday.tokens[:mark]).endswith("You are brief.")]
    assert len(ends) == 1
    assert ends[0] in sunday.marks
    assert monday.tokens[: ends[0]] == sunday.tokens[: ends[0]]


BLOCKS = "messages.0.user.content.0"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages.0"),
    ({"messages": [{**USER, "role": "tool"}]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "messages.0.user.content"),
    ({"messages": [{**USER, "content": 1}]}, "messages.0.user.content"),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, f"{BLOCKS}.text.text"),
    ({"messages": [{**USER, "content": [{"type": "image"}]}]}, f"{BLOCKS}.image.source"),
    ({"messages": [{**USER, "content": [{**IMAGE, "source": {"type": "url", "url": "http://a/b.png"}}]}]},
     f"{BLOCKS}.image.source.type"),
    ({"messages": [{**USER, "content": [{**IMAGE, "source": {**SOURCE, "media_type": "image/tiff"}}]}]},
     f"{BLOCKS}.image.source.media_type"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}, USER]}, "messages.0.assistant.content.0"),
    ({"messages": [{**USER, "content": [{"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}}]}]},
     f"{BLOCKS}.document.source"),
    ({"messages": [{**USER, "content": [{"text": "x"}]}]}, f"{BLOCKS}.foreign.type"),
    ({"messages": [{**USER, "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, BLOCKS),
    ({"messages": [{**USER, "content": [{"type": "tool_result"}]}]}, f"{BLOCKS}.tool_result.tool_use_id"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "", "cache_control": {}}]}]},
     f"{BLOCKS}.text.cache_control.type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    ({"tools": [{"name": "t"}]}, "tools.0.input_schema"),
    ({"tools": [{**TOOL, "name": ""}]}, "tools.0.name"),
    ({"tools": [{**TOOL, "type": 5}]}, "tools.0.type"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "t"}}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[json.dumps(fields)[:60] for fields, _ in WRONG])
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        asked(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_documents_search_results_and_references_to_tools_are_text() -> None:
    text = {"type": "text", "text": "Compare."}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}, "title": "A"}
    blocks = {"type": "document", "source": {"type": "content", "content": [text]}, "context": "of 1912"}
    found = {"type": "search_result", "source": "http://a", "title": "T", "content": [text], "citations": {}}
    reference = {"type": "tool_reference", "tool_name": "grep"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found, reference, plain]}
    mine = asked(messages=[{"role": "user", "content": [result, {**plain, "cache_control": MARK}, blocks, text]}])
    assert mine.messages == [
        {"role": "tool", "tool_call_id": "a", "content": "T\nhttp://a\nCompare.\ngrep\nA\nOnce."},
        {"role": "user", "content": "A\nOnce.\nof 1912\nCompare.\nCompare."},
    ]
    assert mine.marked_texts == [(1, len("A\nOnce."))]


def test_blocks_of_unknown_types_are_left_out_with_a_line_and_the_text_of_a_compaction_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    advised = {"type": "advisor_tool_result", "tool_use_id": "s", "content": {"type": "advisor_result", "text": "No."}}
    text = {"type": "text", "text": "It rains."}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "hologram"}, {**text, "text": "dry"}]}
    turns = [
        {"role": "user", "content": [{"type": "what_comes_next", "text": ["any"]}, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [
            {"type": "compaction", "content": "So far: rain."}, advised, text,
            {"type": "tool_use", "id": "a", "name": "t", "input": {}},
        ]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "compaction", "content": None}, advised]},
        USER,
    ]  # fmt: skip
    contents = [message["content"] for message in asked(messages=turns).messages]
    assert contents == ["Hi", "So far: rain.\nIt rains.", "dry", "", "Hi"]
    assert [record.getMessage() for record in caplog.records] == [
        "left out of a prompt, as only Anthropic's servers have it: advisor_tool_result, hologram, what_comes_next"
    ]


def test_tools_of_anthropics_servers_and_what_they_did_are_left_out_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert asked(tools=[search, TOOL, {"type": "bash_20250124", "name": "bash"}]).tools == asked(tools=[TOOL]).tools
    turns = [
        USER,
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "It rains."},
        ]},
        USER,
    ]  # fmt: skip
    assert asked(messages=turns).messages[1] == {"role": "assistant", "content": "It rains."}
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "left out of a prompt, as only Anthropic's servers have it: web_search_20250305, bash_20250124",
        "left out of a prompt, as only Anthropic's servers have it: server_tool_use, web_search_tool_result",
    ]
