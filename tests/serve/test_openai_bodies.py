"""Bodies of OpenAI's requests: what each field comes to, and what is refused by name."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from runner.serve.openai import ChatBody
from runner.serve.options import ServeOptions
from runner.serve.request import ModelNames, Request, Sampling
from runner.serve.volatile import behind_tools
from tests.serve.scripted import ScriptedRuns, said
from tests.serve.scripted_app import CHAT, TEXT, USER, request_of, scripted_client

OPTIONS = ServeOptions(temp=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=33, num_draft_tokens=4)
MOVING = ServeOptions(move_volatile=True)


def asked_by(body: dict[str, Any]) -> Request:
    return request_of(CHAT, body, OPTIONS)


def test_what_a_body_leaves_open_or_null_is_as_the_server_was_started():
    wanted = Request(
        ModelNames(), 33, messages=[USER], stop_words=[],
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, num_draft_tokens=4),
    )  # fmt: skip
    nulls = ("model", "max_tokens", "temperature", "top_k", "stop", "tools", "stream", "seed", "logit_bias", "n")
    assert asked_by({"messages": [USER]}) == wanted
    assert asked_by({"messages": [USER], **dict.fromkeys(nulls)}) == wanted


def test_every_field_of_a_chat_reaches_the_generation_thread():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s"}], "own": 1},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    body = {
        "messages": messages, "tools": [tool], "role_mapping": {"user": "U"}, "chat_template_kwargs": {"think": False},
        "model": "m", "adapters": "a", "draft_model": "d", "num_draft_tokens": 2, "max_tokens": 9,
        "max_completion_tokens": 8, "temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0, "xtc_probability": 1,
        "xtc_threshold": 0.2, "repetition_penalty": 1.1, "repetition_context_size": 5, "presence_penalty": -1,
        "presence_context_size": 6, "frequency_penalty": 2.5, "frequency_context_size": 7, "logit_bias": {"5": -100},
        "logprobs": True, "top_logprobs": 3, "seed": 2**64 - 1, "stop": ["x", "y"], "user": {"ignored": True},
    }  # fmt: skip
    assert asked_by(body) == Request(
        ModelNames("m", "a", "d"), 8, messages=messages, tools=[tool], role_mapping={"user": "U"},
        chat_template_kwargs={"think": False}, stop_words=["x", "y"],
        sampling=Sampling(
            temperature=1.0, top_p=0.5, top_k=3, min_p=0.0, xtc_probability=1.0, xtc_threshold=0.2,
            logit_bias={5: -100.0}, repetition_penalty=1.1, repetition_context_size=5, presence_penalty=-1.0,
            presence_context_size=6, frequency_penalty=2.5, frequency_context_size=7, num_draft_tokens=2,
            logprobs=True, top_logprobs=3, seed=2**64 - 1,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("stop", "words"), [("x", ["x"]), ("", []), ([], []), (["x"], ["x"])])
def test_a_stop_word_may_stand_alone_and_an_empty_one_is_none(stop, words):
    assert asked_by({"messages": [USER], "stop": stop}).stop_words == words


def test_how_much_to_reason_reaches_the_template_by_each_name_that_templates_have():
    def arguments(**fields):
        return asked_by({"messages": [{"role": "user", "content": "Hi"}], **fields}).chat_template_kwargs

    on, off = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))
    assert arguments() is None
    assert arguments(enable_thinking=False) == arguments(thinking={"type": "disabled"}) == off
    assert arguments(thinking=True) == arguments(thinking={"type": "enabled", "budget_tokens": 9}) == on
    assert arguments(thinking={"type": "adaptive"}) is None
    assert arguments(reasoning_effort="high") == {"reasoning_effort": "high"}
    assert arguments(reasoning_effort="none") == {"reasoning_effort": "none", **off}
    assert arguments(reasoning_effort="none", enable_thinking=True) == {"reasoning_effort": "none", **on}
    assert arguments(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}) == {
        **on,
        **{"enable_thinking": False},
    }


BILLING = "x-anthropic-billing-header: cc_version=2; cch=1f0a9;"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_of_a_system_text_only_the_lines_that_bill_the_client_are_left_out(role):
    def contents(content):
        mine = asked_by({"messages": [{"role": role, "content": content}, {"role": "user", "content": BILLING}]})
        return [message["content"] for message in mine.messages]

    assert contents(f"{BILLING}\nYou are brief.") == ["You are brief.", BILLING]
    assert contents(f"You are brief.\n{BILLING}\n\nSo {BILLING}") == [f"You are brief.\n\nSo {BILLING}", BILLING]
    texts = [{"type": "text", "text": text} for text in (BILLING, "You are", f"{BILLING}\nbrief.")]
    assert contents(texts) == [[{"type": "text", "text": "You are"}, {"type": "text", "text": "brief."}], BILLING]
    assert contents(BILLING) == contents(texts[:1]) == [BILLING], "a turn that had nothing else is no turn"
    assert contents(None) == [None, BILLING]


OPENCODE = (
    "You are powered by the model named m.\nHere is some useful information about the environment you are running in:\n"
    "<env>\n  Working directory: /home/ann\n</env>"
)
CONTINUE = (
    "Here is useful information about the environment you are running in:\n<env>\nPlatform: linux\n</env>",
    "As you answer the user's questions, you can use the following context:\n\n"
    '<context name="gitStatus">This is the git status.\n\nM note.txt\n</context>',
)
QWEN_CODE = (
    "Git snapshot at conversation start.\n```text\ngit: M note.txt\n```\n\n---\n\n# auto memory\n\nIt is in /home"
)
PI = "Current date: 2026-11-25\nCurrent working directory: /home/ann"


@pytest.mark.parametrize(
    ("text", "kept", "moved"),
    [
        (f"Be brief.\n\n{OPENCODE}\nSkills:\n- one", "Be brief.\n\nSkills:\n- one", OPENCODE),
        ("A\n{}\nB\n{}\nC".format(*CONTINUE), "A\nB\nC", "\n\n".join(CONTINUE)),
        (f"Be brief.\n{QWEN_CODE}\n", "Be brief.\n", QWEN_CODE),
        (f"{PI}\nBe brief.", "Be brief.", PI),
        (f"Be brief.\n{PI}", "Be brief.\n", PI),
    ],
    ids=["opencode", "continue", "qwen-code", "pi", "pi, at the end"],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_an_agent_says_of_folder_and_day_follows_the_system_prompt_as_a_turn(role, text, kept, moved):
    def asked(messages, options=MOVING, **more):
        return ChatBody.read({"messages": messages, **more}, options).request("").messages

    messages = [{"role": role, "content": text}, USER]
    wanted = [{"role": role, "content": kept}, {"role": role, "content": moved}, USER]
    assert asked(messages) == wanted
    parts = [{"type": "text", "text": part} for part in (text[:9], text[9:])]
    assert asked([{"role": role, "content": parts}, USER]) == wanted
    second = [{"role": "system", "content": "One."}, *messages]
    assert asked(second) == [second[0], *wanted]
    assert asked(messages, move_volatile=False) == asked(messages, ServeOptions()) == messages
    assert asked(messages, ServeOptions(), move_volatile=True) == wanted
    for same in ([second[0], USER, *messages], [{"role": role, "content": moved}, USER], [{**USER, "content": text}]):
        assert asked(same) == same


def test_what_an_agent_says_of_its_model_leaves_no_trace_in_the_system_prompt():
    known = "You are powered by the model named Opus. Its ID is opus.\n\nAssistant knowledge cutoff is May.\n\n\n"
    unknown = "You are powered by the model local.\n\n\n"
    kept = [behind_tools([{"role": "system", "content": f"Hi.\n\n{text}So."}])[0] for text in (known, unknown)]
    assert [messages[0]["content"] for messages in kept] == ["Hi.\n\nSo."] * 2
    assert [messages[1]["content"] for messages in kept] == [known.rstrip(), unknown.rstrip()]


def test_functions_of_older_clients_are_tools():
    said, result = {"role": "assistant", "content": "x"}, {"name": "f", "content": "Done."}
    called = {"name": "f", "arguments": "{}"}
    messages = [USER, {**said, "function_call": called}, {**result, "role": "function"}]
    older = {"messages": messages, "functions": [{"name": "f", "parameters": {}}]}
    tools = [{"type": "function", "function": each} for each in older["functions"]]
    calls = [{"type": "function", "function": called}]
    newer = {"messages": [USER, {**said, "tool_calls": calls}, {**result, "role": "tool"}], "tools": tools}
    for old, new in (
        ("none", "none"),
        ("auto", "auto"),
        ({"name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ):
        asked = asked_by({**older, "function_call": old})
        assert asked == asked_by({**newer, "tool_choice": new, "parallel_tool_calls": False})
        assert asked.tools == tools
    others = [{"function": {"name": "g"}}]
    assert asked_by({**older, "tools": others}).tools == others


def test_a_text_with_half_of_a_known_part_stays_as_it_is():
    text = "Say: Here is useful information\n</env>\nEnvironment you are running in:\n<env>\nMore"
    messages = [{"role": "system", "content": text}, USER]
    assert behind_tools(messages)[0] == messages


def test_any_number_of_openings_without_an_end_takes_no_time():
    text = "Be brief.\n" + "Environment you are running in:\n" * 200_000
    started_s = time.perf_counter()
    assert behind_tools([{"role": "system", "content": text}])[0] == [{"role": "system", "content": text}]
    assert time.perf_counter() - started_s < 1


def test_a_temperature_that_float16_cannot_tell_from_greedy_is_greedy():
    assert asked_by({"messages": [USER], "temperature": 1e-8}).sampling.temperature == 0
    assert asked_by({"messages": [USER], "temperature": 1e-3}).sampling.temperature == 1e-3


def test_null_as_a_draft_model_is_none_and_no_draft_model_is_the_servers():
    assert asked_by({"messages": [USER], "draft_model": None}).names.draft is None
    assert asked_by({"messages": [USER]}).names.draft == "default_model"


# What is refused

INTEGERS = (
    "num_draft_tokens", "max_tokens", "max_completion_tokens", "top_k", "repetition_context_size",
    "presence_context_size", "frequency_context_size", "top_logprobs", "seed",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("top_p", 1.01), ("xtc_threshold", 0.6), ("top_logprobs", 21), ("repetition_penalty", 0.001),
    ("seed", 2**64), ("n", 9), ("n", 0), ("stop", 1), ("stop", ["x"] * 65), ("stream_options", True), ("messages", []),
    ("chat_template_kwargs", []), ("chat_template_kwargs", {"chat_template": "x"}),
]  # fmt: skip
REFUSED = [
    *((CHAT, {name: value}, name) for name in INTEGERS for value in ("1", 1.5, True, [], {}, -2, 10**400)),
    *((CHAT, {name: value}, name) for name in NUMBERS for value in ("1", True, [], {}, -101, 1e300, 10**400)),
    *((CHAT, {name: value}, name) for name in ("stream", "logprobs") for value in ("true", 1, [])),
    *((CHAT, {name: value}, name) for name in ("model", "adapters", "draft_model") for value in (1, True, [], {})),
    *((CHAT, {name: value}, name) for name, value in WRONG),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a"),
    (CHAT, {"logit_bias": {"1": "1"}}, "logit_bias.1"),
    (CHAT, {"logit_bias": {"1": 1e9}}, "logit_bias.1"),
    (CHAT, {"stop": [1]}, "stop.0"),
    (CHAT, {"stop": [""]}, "stop.0"),
    (CHAT, {"stop": "x" * 1001}, "stop.0"),
    (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"role_mapping": {"user": 1}}, "role_mapping.user"),
    (CHAT, {"messages": ["x"]}, "messages.0"),
    (CHAT, {"messages": [USER, {"content": "x"}]}, "messages.1.role"),
    (CHAT, {"messages": [{"role": 1}]}, "messages.0.role"),
    (CHAT, {"messages": [{**USER, "content": 1}]}, "messages.0.content"),
    (CHAT, {"messages": [{**USER, "content": ["x"]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (CHAT, {"messages": [{**USER, "tool_calls": {}}]}, "messages.0.tool_calls"),
    (CHAT, {"messages": [{**USER, "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0.function"),
    (
        CHAT,
        {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.function"),
    (CHAT, {"tool_choice": "some"}, "tool_choice"),
    (CHAT, {"functions": {"name": "f"}}, "functions"),
    (CHAT, {"functions": [{"description": "?"}]}, "functions.0"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "tool_choice"),
    (CHAT, {"messages": [{**USER, "function_call": {"name": 1}}]}, "messages.0.tool_calls.0.function"),
    (CHAT, {"tools": [{"function": {"name": 1}}]}, "tools.0.function"),
    *((TEXT, {"prompt": value}, "prompt") for value in (None, 1, [], [[]], ["x", 1], [-1], [True], ["x"] * 65)),
    *((TEXT, {name: value}, name) for name, value in (("echo", 1), ("best_of", 2), ("suffix", "x"))),
    *((TEXT, {"logprobs": value}, "logprobs") for value in (21, -1, 1.5, "1")),
    (TEXT, {"echo": True, "logprobs": True}, "echo"),
]


def test_every_field_of_a_wrong_type_or_out_of_range_is_refused_by_its_name():
    runs = ScriptedRuns()
    with scripted_client(runs) as client:
        for path, wrong, param in REFUSED:
            answer = client.post(path, json={**({"prompt": "?"} if path == TEXT else {"messages": [USER]}), **wrong})
            assert answer.status_code == 400, (wrong, answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), wrong
            assert re.search(rf"(?<!\w){re.escape(param)}(?!\w)", error["message"]), error
    assert runs.opened == []


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"x", b"[]", b"1", b'"x"', b"null", b"{", b'{"messages": [],}', b"\xff\xfe", b'{"x": "\xff"}',
        b"[" * 200_000, b'{"a":' * 200_000, b'{"temperature": NaN}', b'{"top_p": Infinity}', b'{"top_p": 1e999}',
        b'{"x": ["\\ud800"]}', b'{"x": ' + b"9" * 5000 + b"}",
    ],
    ids=range(17),
)  # fmt: skip
def test_a_body_that_is_no_object_of_json_is_refused(raw):
    with scripted_client(ScriptedRuns()) as client:
        answer = client.post(CHAT, content=raw)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_fields_that_change_nothing_here_are_taken():
    plain = asked_by({"messages": [USER]})
    more = {
        "service_tier": "auto", "store": True, "user": "u",
        "verbosity": "low", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
    assert asked_by({"messages": [USER], **more}) == plain


def test_a_foreign_part_beside_a_billing_line_stays_as_it_is() -> None:
    parts = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "count", "text": 5}]
    body = ChatBody.read({"messages": [{"role": "system", "content": parts}, USER]}, ServeOptions())
    assert body.request("").messages[0]["content"] == parts[1:]


def test_a_refusal_that_a_client_sends_back_is_text() -> None:
    content = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I cannot."}]
    body = ChatBody.read({"messages": [USER, {"role": "assistant", "content": content}, USER]}, ServeOptions())
    said = body.request("").messages[1]["content"]
    assert said == [{"type": "text", "text": "No: "}, {"type": "text", "text": "I cannot."}]


def prompts_of(body: dict[str, Any]) -> list[Any]:
    runs = ScriptedRuns(said("x", finish="stop"))
    with scripted_client(runs, OPTIONS) as client:
        answer = client.post(TEXT, json=body)
    assert [choice["index"] for choice in answer.json()["choices"]] == [*range(len(runs.opened))]
    return [(opened.request.prompt, opened.request.sampling.seed) for opened in runs.opened]


def test_a_prompt_is_text_or_token_ids_or_a_list_of_these_with_n_choices_each():
    assert prompts_of({"prompt": "a"}) == [("a", None)]
    assert prompts_of({"prompt": [1, 2]}) == [([1, 2], None)]
    assert prompts_of({"prompt": ["a", [3]]}) == [("a", None), ([3], None)]
    assert prompts_of({"prompt": ["a", "b"], "n": 2, "seed": 2**64 - 1, "best_of": 2}) == [
        ("a", 2**64 - 1), ("a", 0), ("b", 2**64 - 1), ("b", 0),
    ]  # fmt: skip
