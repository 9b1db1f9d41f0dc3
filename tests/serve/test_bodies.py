"""The same question in the words of each API makes the same Request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.serve.options import ServeOptions
from tests.serve.scripted_app import CHAT, MESSAGES, OLLAMA, RESPONSES, USER, request_of

OPTIONS = ServeOptions(temp=0.5, top_p=0.9, top_k=7, min_p=0.1, num_draft_tokens=4)
FUNCTION = {"name": "f", "description": "?", "parameters": {"type": "object"}}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
MESSAGES_TOOLS = {"tools": [{"name": "f", "description": "?", "input_schema": {"type": "object"}}]}
RESPONSES_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
SAMPLING = {"temperature": 1, "top_p": 0.5, "top_k": 40, "stop": ["END", "\n"]}
#: The body that each API takes, and the field of a format for errors.
BASE: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": [USER], "model": "m", "max_tokens": 16}, "response_format"),
    MESSAGES: ({"messages": [USER], "model": "m", "max_tokens": 16}, "output_config.format"),
    RESPONSES: ({"input": [USER], "model": "m", "max_output_tokens": 16}, "text.format"),
    OLLAMA: ({"messages": [USER], "model": "m", "options": {"num_predict": 16, "repeat_last_n": 20}}, "format"),
}
#: Fields of a question, in the order of BASE; None: the API cannot ask that.
QUESTIONS: dict[str, tuple[dict[str, Any] | None, ...]] = {
    "nothing but messages": ({}, {}, {}, {}),
    "null and what has no effect": (
        {"tools": None, "user": "u"}, {"system": None, "tools": None, "metadata": {"user_id": "u"}, "thinking": None},
        {"instructions": None, "tools": None, "text": None, "reasoning": None, "conversation": None},
        {"think": None, "tools": None, "format": "", "keep_alive": "5m"},
    ),
    "sampling": (
        SAMPLING, {**SAMPLING, "stop": None, "stop_sequences": ["END", "\n"]}, SAMPLING,
        {"options": {"num_predict": 16, "repeat_last_n": 20, **SAMPLING, "top_k": 40.0, "mirostat": 1, "no_such": {}}},
    ),
    "an effort": (
        {"reasoning_effort": "low"}, {"output_config": {"effort": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}}, None,
    ),
    "an effort and thinking": ({"reasoning_effort": "low", "thinking": True}, None, None, {"think": "low"}),
    "no effort": ({"reasoning_effort": "none"}, None, {"reasoning": {"effort": "none"}}, {"think": "none"}),
    "thinking": ({"thinking": True}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, None, {"think": True}),
    "no thinking": ({"thinking": False}, {"thinking": {"type": "disabled"}}, None, {"think": False}),
    "thinking as it likes": ({}, {"thinking": {"type": "adaptive"}}, {"reasoning": {"effort": None}}, {"think": None}),
    "a system text": (
        {"messages": [{"role": "system", "content": "Be brief."}, USER]}, {"system": "Be brief."},
        {"instructions": "Be brief.", "input": "?"},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "tools": (CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS, CHAT_TOOLS),
    "tools and no call": (
        {**CHAT_TOOLS, "tool_choice": "none"}, {**MESSAGES_TOOLS, "tool_choice": {"type": "none"}},
        {**RESPONSES_TOOLS, "tool_choice": "none"}, {**CHAT_TOOLS, "tool_choice": "none"},
    ),
    "a call": (
        {**CHAT_TOOLS, "tool_choice": "required"}, {**MESSAGES_TOOLS, "tool_choice": {"type": "any"}},
        {**RESPONSES_TOOLS, "tool_choice": "required"}, {**CHAT_TOOLS, "tool_choice": "any"},
    ),
    "a call of this tool": (
        {**CHAT_TOOLS, "tool_choice": NAMED}, {**MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
        {**RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "f"}}, {**CHAT_TOOLS, "tool_choice": NAMED},
    ),
    "one call at most": (
        {**CHAT_TOOLS, "parallel_tool_calls": False},
        {**MESSAGES_TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {**RESPONSES_TOOLS, "parallel_tool_calls": False}, {**CHAT_TOOLS, "parallel_tool_calls": False},
    ),
    "a format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"format": SCHEMA},
    ),
    "any object": ({"response_format": {"type": "json_object"}}, None, {"text": {"format": {"type": "json_object"}}},
                   {"format": "json"}),
    "a beginning of the reply": (*[{"messages": [USER, {"role": "assistant", "content": "So I"}]}] * 2,
                                 {"input": [USER, {"role": "assistant", "content": "So I"}]}, None),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_same_question_in_each_api_makes_the_same_request(question: str) -> None:
    found = {}
    for (path, (base, at)), fields in zip(BASE.items(), QUESTIONS[question], strict=True):
        if fields is not None:
            asked = request_of(path, {**base, **fields, "stream": False}, OPTIONS)
            assert asked.constraint is None or asked.constraint.at == at
            constraint = asked.constraint and replace(asked.constraint, at="")
            sampling = asked.sampling.model_copy(update={"top_logprobs": -1})  # 0 in Ollama's API, also none
            found[path] = replace(asked, constraint=constraint, sampling=sampling, marked_texts=())
    for path, asked in found.items():
        assert asked == found[CHAT], path
