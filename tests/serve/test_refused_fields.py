"""A field of a wrong type, out of range, or that the server does not take is refused by its name, in each API."""

from __future__ import annotations

import re
from typing import Any

from runner.serve.ollama import GENERATE
from tests.serve.scripted import ScriptedRuns
from tests.serve.scripted_app import CHAT, MESSAGES, OLLAMA, RESPONSES, ROUTES, TEXT, USER, scripted_client

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
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}
IMAGE, PDF = {"type": "image", "source": SOURCE}, {**SOURCE, "media_type": "application/pdf"}
TOOL = {"name": "weather", "description": "of a place", "input_schema": {"type": "object"}}
BLOCKS = "messages.0.user.content.0"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
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
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"content": "Hi"}]}, "messages.0"),
    (MESSAGES, {"messages": [{**USER, "role": "tool"}]}, "messages.0"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages.0.user.content"),
    (MESSAGES, {"messages": [{**USER, "content": 1}]}, "messages.0.user.content"),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "text"}]}]}, f"{BLOCKS}.text.text"),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "image"}]}]}, f"{BLOCKS}.image.source"),
    (MESSAGES, {"messages": [{**USER, "content": [{**IMAGE, "source": {"type": "url", "url": "http://a/b.png"}}]}]},
     f"{BLOCKS}.image.source.type"),
    (MESSAGES, {"messages": [{**USER, "content": [{**IMAGE, "source": {**SOURCE, "media_type": "image/tiff"}}]}]},
     f"{BLOCKS}.image.source.media_type"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [IMAGE]}, USER]}, "messages.0.assistant.content.0"),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "document", "source": PDF}]}]}, f"{BLOCKS}.document.source"),
    (MESSAGES, {"messages": [{**USER, "content": [{"text": "x"}]}]}, f"{BLOCKS}.foreign.type"),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     BLOCKS),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "tool_result"}]}]}, f"{BLOCKS}.tool_result.tool_use_id"),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "text", "text": "", "cache_control": {}}]}]},
     f"{BLOCKS}.text.cache_control.type"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system.0.type"),
    (MESSAGES, {"tools": [{"name": "t"}]}, "tools.0.input_schema"),
    (MESSAGES, {"tools": [{**TOOL, "name": ""}]}, "tools.0.name"),
    (MESSAGES, {"tools": [{**TOOL, "type": 5}]}, "tools.0.type"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tools"),
    (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice.type"),
    (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "t"}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
     "tool_choice.disable_parallel_tool_use"),
    (MESSAGES, {"thinking": {"type": "between_tools"}}, "thinking.type"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences.0"),
    (MESSAGES, {"cache_control": {"type": "forever"}}, "cache_control.type"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"role": "critic", "content": "?"}]}, "input.0.message.role"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.function_call.arguments"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input.0.message.content.0.input_image.image_url"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.message.content.0"),
    (RESPONSES, {"input": [{"type": ["message"]}]}, "input.0.foreign.type"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools.0.function.name"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"temperature": -1}, "temperature"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (OLLAMA, {"messages": [{**USER, "images": ["aGk="]}]}, "messages.0.images"),
    (OLLAMA, {"messages": [{"content": "?"}]}, "messages.0.role"),
    (OLLAMA, {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "arguments"),
    (OLLAMA, {"tools": [{}]}, "tools.0.function"),
    (OLLAMA, {"options": {"temperature": -1}}, "options.temperature"),
    (OLLAMA, {"options": {"num_predict": -3}}, "options.num_predict"),
    (OLLAMA, {"options": {"repeat_penalty": 0.001}}, "options.repeat_penalty"),
    (OLLAMA, {"format": "yaml"}, "format: wanted json, or a schema as an object"),
    (OLLAMA, {"top_logprobs": 21}, "top_logprobs"),
    (GENERATE, {"images": ["aGk="]}, "images"),
    (GENERATE, {"suffix": "}"}, "suffix"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"raw": True, "system": "Be brief."}, "system"),
]  # fmt: skip


def test_every_wrong_field_is_refused_by_its_name() -> None:
    runs = ScriptedRuns()
    with scripted_client(runs) as client:
        for path, wrong, param in REFUSED:
            answer = client.post(path, json={**ROUTES[path], **wrong})
            assert answer.status_code == 400, (path, wrong, answer.text)
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message), (path, wrong, error)
            if path in (CHAT, TEXT, RESPONSES):
                kind = "invalid_request_error"
                assert error == {"message": message, "type": kind, "param": param, "code": None}, (wrong, error)
    assert runs.opened == []
