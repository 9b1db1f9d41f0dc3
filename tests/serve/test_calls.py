"""Calls in each form that models write: values of every JSON type, values that do not fit, and calls that are none."""

from __future__ import annotations

import importlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.token import Token
from runner.serve.mlx_lm_border import TextStateMachine
from runner.serve.ollama import CHAT as OLLAMA
from runner.serve.reply_reader import ReplyReader, argument_of
from runner.serve.schemas import ArgumentSchema, argument_schemas
from tests.serve.call_forms import FORMS, TAGS, as_json, in_form
from tests.serve.scripted import ScriptedRuns, said
from tests.serve.scripted_app import CHAT, MESSAGES, RESPONSES, USER, scripted_client

TEXT, WHOLE, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
LIST, OBJECT, NULL = ({"type": kind} for kind in ("array", "object", "null"))
OR_NULL, OR_WHOLE = {"anyOf": [TEXT, NULL]}, {"anyOf": [WHOLE, TEXT]}


def known(schema: Any) -> ArgumentSchema:
    """What is known of an argument with this schema."""
    parameters = {"properties": {"a": schema}, "$defs": {"n": WHOLE}}
    return argument_schemas([{"function": {"name": "f", "parameters": parameters}}])["f"]["a"]


VALUES: list[tuple[dict[str, Any], str, Any]] = [
    (TRUTH, "true", True), (TRUTH, "False", False), (TRUTH, "yes", "yes"), (TRUTH, "on", "on"), (TRUTH, "1", "1"),
    (TEXT, "null", "null"), (TEXT, "NULL", "NULL"), (TEXT, "5", "5"), (TEXT, "[1]", "[1]"), (TEXT, "  a\n", "  a\n"),
    ({"enum": ["null", "all"]}, "null", "null"), ({"enum": [1, "null"]}, "null", "null"), ({"enum": [1, 2]}, "2", 2),
    ({"const": "7"}, "7", "7"), (WHOLE, "2026-01-15", "2026-01-15"), (WHOLE, "12 apples", "12 apples"),
    (WHOLE, "12345678901234567890", 12345678901234567890), (WHOLE, " 5 ", 5), (WHOLE, "5.0", 5), (WHOLE, "5.5", "5.5"),
    (WHOLE, "null", "null"), (NUMBER, "1e400", "1e400"), (NUMBER, "NaN", "NaN"), (NUMBER, "2.50", 2.5),
    (NUMBER, "3", 3), (NULL, "None", None), (NULL, "Null", "Null"), (OR_NULL, "null", None), (OR_NULL, "Null", "Null"),
    (OR_NULL, "None", "None"), (OR_WHOLE, "12", 12), (OR_WHOLE, "012", "012"), (OR_WHOLE, "12.0", "12.0"),
    ({"anyOf": [WHOLE, NULL]}, "None", None), ({}, "5", "5"), ({}, "null", None), ({}, '{"a": [null]}', {"a": [None]}),
    (LIST, '["a", null]', ["a", None]), (LIST, "['a', True]", ["a", True]), (LIST, "[a]", "[a]"), (LIST, "{1}", "{1}"),
    (OBJECT, '{"a": "b\nc"}', {"a": "b\nc"}), (OBJECT, "[1]", "[1]"), (OBJECT, "[" * 9999, "[" * 9999),
    ({"$ref": "#/$defs/n"}, "07", "07"), ({"$ref": "#/$defs/n"}, "7", 7), ({"type": ["boolean", "null"]}, "true", True),
    ({"type": "dict"}, '{"a": 1}', {"a": 1}), ({"type": "float"}, "0.5", 0.5), ({"type": "String"}, "0.5", "0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), VALUES, ids=[f"{each[0]} {each[1]!r:.20}" for each in VALUES])
def test_an_argument_has_the_type_that_its_schema_allows_or_stays_text(schema: Any, text: str, value: Any) -> None:
    found = argument_of(text, known(schema))
    assert (found, type(found)) == (value, type(value))


TYPES = {
    "string": st.text(), "integer": st.integers(), "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(), "null": st.none(),
}  # fmt: skip
NESTED = st.recursive(
    st.one_of(*TYPES.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner),
    max_leaves=6,
)
TYPES |= {
    "array": st.lists(NESTED, max_size=3),
    "object": st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), NESTED),
}


def fits(value: Any, kind: str) -> bool:
    types = {
        "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None),
        "array": list, "object": dict,
    }  # fmt: skip
    return isinstance(value, types[kind]) and isinstance(value, bool) == (kind == "boolean")


@given(kind=st.sampled_from(sorted(TYPES)), text=st.text("01-.eE+ [{}]\"':,anNulTrueFsN\n") | st.text())
def test_what_is_read_is_of_the_type_or_the_text_itself(kind: str, text: str) -> None:
    found = argument_of(text, known({"type": kind}))
    assert found == text or fits(found, kind)
    json.dumps(found, allow_nan=False)


@given(kind=st.sampled_from(sorted(TYPES)), data=st.data())
def test_a_value_that_a_template_wrote_is_read_as_this_value(kind: str, data: st.DataObject) -> None:
    value = data.draw(TYPES[kind])
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    for schema in ({"type": kind}, {"anyOf": [{"type": kind}, {"type": "null"}]}, {"type": [kind, "null"]}):
        found = argument_of(written, known(schema))
        assert found == value or (written == "null" and found is None)


#: Characters of the tags are among the texts, and whole tags are not: no form can write its own tags in a value.
CHARACTERS = "ab <>/[]{}()\"'\\\n\t,:=&yes10nulé🙂"
PARAMETERS = {"type": "object", "properties": {kind: {"type": kind} for kind in TYPES}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}


def read(form: str, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls of a reply."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{form}")
    start, end = module.tool_call_start, module.tool_call_end
    machine = TextStateMachine({"normal": [(start, "tool")], "tool": [(end, "normal")] if end else []})
    arguments = argument_schemas([tool("f"), tool("g")])
    reader = ReplyReader(machine, "normal", module.parse_tool_call, arguments, call_marks=(start, end))
    deltas = [reader.add(Token(piece, 1, 0.0, (), None)) for piece in pieces]
    deltas += [reader.add(Token("", 2, 0.0, (), "stop")), reader.finish()]
    calls = [call["function"] for delta in deltas for call in delta.tool_calls]
    return "".join(delta.text for delta in deltas), calls


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)] or [""]


some_text = st.text(CHARACTERS, max_size=12) | st.sampled_from(["null", "None", "5", "true", "[1]", '{"a": 1}', " a "])
values = {**TYPES, "string": some_text}
some_nested = st.recursive(
    some_text | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)
values |= {"array": st.lists(some_nested, max_size=2), "object": st.dictionaries(st.sampled_from("ab"), some_nested)}
one_call = st.tuples(st.sampled_from("fg"), st.fixed_dictionaries({}, optional=values))


@pytest.mark.parametrize("form", FORMS)
@given(calls=st.lists(one_call, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_calls_in_a_template_s_own_form_are_read_as_they_were_streamed_or_not(form: str, calls: Any, cuts: Any) -> None:
    written = in_form(form, calls)
    text, found = read(form, [written])
    assert not text.strip()
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    assert read(form, pieces_of(written, cuts)) == (text, found)


@pytest.mark.parametrize("form", TAGS)
def test_a_model_of_tags_that_writes_a_call_as_json_calls_with_these_values(form: str) -> None:
    arguments = {"string": "5", "integer": 5, "array": ["null"]}
    module = importlib.import_module(f"mlx_lm.tool_parsers.{form}")
    written = module.tool_call_start + as_json({"name": "f", "arguments": arguments}) + module.tool_call_end
    _, calls = read(form, [written])
    assert [json.loads(call["arguments"]) for call in calls] == [arguments]


@pytest.mark.parametrize("form", FORMS)
@given(calls=st.lists(one_call, min_size=1, max_size=2), start=st.integers(0, 300), junk=some_text, data=st.data())
def test_of_a_damaged_call_all_is_there_as_a_call_or_as_text(
    form: str, calls: Any, start: int, junk: str, data: Any
) -> None:
    written = in_form(form, calls)
    at = min(start, len(written))
    damaged = written[:at] + junk + written[at + data.draw(st.integers(0, 9)) :]
    text, found = read(form, [damaged])
    assert read(form, [*damaged]) == (text, found)
    assert found or text.strip() or not damaged.strip()


USE = {"type": "tool_use", "id": "1", "name": "f", "input": None}
PAST = {
    CHAT: {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}]},
    MESSAGES: {
        "model": "m", "max_tokens": 1,
        "messages": [USER, {"role": "assistant", "content": [USE]}],
    },
    RESPONSES: {"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": None}]},
    OLLAMA: {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}]},
}  # fmt: skip


@pytest.mark.parametrize("path", PAST)
def test_a_past_call_whose_arguments_are_null_is_taken_by_each_api(path: str) -> None:
    runs = ScriptedRuns(said("x", finish="stop"))
    with scripted_client(runs) as client:
        answer = client.post(path, json=PAST[path])
    assert answer.status_code == 200, answer.text
    (call,) = runs.opened[0].request.messages[1]["tool_calls"]
    assert call["function"]["arguments"] in (None, "{}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PAST)
def test_a_long_name_of_a_model_is_cut_where_a_reply_repeats_it(path: str, *, stream: bool) -> None:
    with scripted_client(ScriptedRuns(said("a"), said("b", finish="stop"))) as client:
        answer = client.post(path, json={**PAST[path], "model": "m" * 4_000, "stream": stream})
    assert answer.status_code == 200
    assert "m" * 200 + "..." in answer.text
    assert "m" * 201 not in answer.text
