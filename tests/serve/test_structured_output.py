"""Replies of random weights are what their requests demand: JSON of a schema, calls of functions, none or one call."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from mlx_lm.utils import load_tokenizer

from runner.engine.token import Token
from runner.models.tiny import VOCABULARY_LENGTH, tiny_tokenizer
from runner.serve import rules, schemas
from runner.serve.grammars import Grammars, Marks
from runner.serve.mlx_lm_border import make_text_state_machine
from runner.serve.prompts import RenderedPrompt
from runner.serve.reply_reader import ReplyReader
from runner.serve.request import ApiError, Constraint, ModelNames, Request
from runner.serve.scheduler import Scheduler
from runner.serve.schemas import argument_schemas
from tests.serve.jobs import MESSAGES as TURNS
from tests.serve.jobs import Waiting, application, local_client, running
from tests.serve.scripted_app import CHAT, MESSAGES, RESPONSES, USER
from tests.serve.talking_model import CALL, CALLED, END, THINK, THOUGHT, TOOL_F, saying, write_talking_model

LEAF, SHORT_TEXT = {"$ref": "#/$defs/leaf"}, {"type": "string", "minLength": 1, "maxLength": 6}
CHAIN = {"properties": {"next": {"anyOf": [LEAF, {"type": "null"}]}}, "required": ["next"]}
#: Whose texts and lists are short, so that most replies end.
KINDS: list[dict[str, Any]] = [
    SHORT_TEXT, {"type": "string", "pattern": "^[0-9]{3}-[0-9]{2}$"}, {"type": "string", "pattern": "^(red|blue)$"},
    {"type": "integer", "minimum": -500, "maximum": 500}, {"type": "boolean"}, {"type": "null"},
    {"type": "number", "exclusiveMinimum": -5, "maximum": 7.5}, {"enum": ["x", "", 7, -1.5, None, ["a"], {"b": 1}]},
    {"const": [1, {"a": None}]}, {"type": "array", "items": LEAF, "minItems": 1, "maxItems": 3},
    {"anyOf": [LEAF, {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"type": "object", "properties": {"na\u00efve": LEAF, 'quo"te': SHORT_TEXT}, "required": ["na\u00efve"],
     "additionalProperties": False},
    {**LEAF, "$defs": {"leaf": {"type": "object", **CHAIN, "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module", params=["together", "alone"])
def talking(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    folder = write_talking_model(tmp_path_factory.mktemp("talking") / "model", "llama")
    with running(model=str(folder), exact=request.param == "alone", prefill_step_size=64) as thread:
        yield thread


def said(reply: Waiting) -> str:
    """The text of a reply without its reasoning."""
    _, mark, text = reply.text.partition("</think>")
    assert bool(mark) == reply.text.startswith("<think>")
    return text if mark else reply.text


def test_replies_that_end_are_json_of_their_schemas(talking: Scheduler) -> None:
    """Requests at temperature 1, with another one beside them that may say anything."""
    schemas = [{"$defs": {"leaf": SHORT_TEXT}, **schema} for schema in KINDS]
    asked: dict[str, Any] = {"messages": TURNS, "temperature": 1.0, "max_tokens": 300}
    group = [Waiting(talking, **asked, constraint=Constraint(schema), seed=5) for schema in schemas]
    beside = Waiting(talking, **{**asked, "max_tokens": 20})
    ended = [each for each in zip(group, schemas, strict=True) if each[0].record.outcome == "stop"]
    for reply, schema in ended:
        jsonschema.validate(json.loads(said(reply)), schema)
    assert beside.record.completion_tokens > 0
    assert len(ended) >= 0.8 * len(schemas)


def test_no_compilation_keeps_other_requests_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request comes while the grammar of the first one is compiled, and its reply does not wait for that."""
    costly = {"type": "string", "allOf": [{"pattern": f"[a-{chr(98 + each)}].{{{each + 3}}}b"} for each in range(14)]}
    is_answered, compile_grammar = threading.Event(), Grammars._grammar

    def wait_and_compile(*args: Any, **more: Any) -> Any:
        assert is_answered.wait(60)
        return compile_grammar(*args, **more)

    monkeypatch.setattr(Grammars, "_grammar", wait_and_compile)
    with running() as thread:
        first = Waiting(thread, messages=TURNS, constraint=Constraint(costly))
        second = Waiting(thread, messages=TURNS, max_tokens=4)
        assert second.record.completion_tokens == 4
        is_answered.set()
        assert first.failure.status == 400


def counted(*counts: int) -> dict[str, Any]:
    """Texts of a pattern with counts inside of counts."""
    pattern = "a"
    for count in counts:
        pattern = f"({pattern}){{{count}}}"
    return {"type": "string", "pattern": f"^{pattern}$"}


def nested(depth: int) -> dict[str, Any]:
    inner = nested(depth - 1) if depth else {"type": "string"}
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


#: Schemas that would take very long or very much memory without limits.
EXPLOSIVE: dict[str, dict[str, Any]] = {
    "deep": nested(60),
    "many values": {"enum": [f"value {index}" for index in range(5000)]},
    "counts in counts": counted(1000, 1000, 1000),
    "a large count": counted(10**9),
    "stars in stars": {"type": "string", "pattern": "(.*)*(.*)*(.*)*x"},
    "many alternatives": {"type": "string", "pattern": "|".join(f"w{each}.*z{each}" for each in range(300))},
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}},
    "doubled": {
        "$ref": "#/$defs/30",
        "$defs": {"0": {"type": "string"}}
        | {f"{each}": {"allOf": [{"$ref": f"#/$defs/{each - 1}"}] * 2} for each in range(1, 31)},
    },
    "items in items": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000}},
    "a long text of a pattern": {"type": "string", "pattern": "^(ab|ba|.)*$", "maxLength": 5000},
    "branches in branches": {
        "$defs": {"a": {"oneOf": [{"properties": {"k": {"const": each}}, "type": "object"} for each in range(40)]}},
        "anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]} for _ in range(1500)],
    },
    "a chain": {
        "$ref": "#/$defs/0", "$defs": {f"{each}": {"anyOf": [{"$ref": f"#/$defs/{each + 1}"}]} for each in range(1500)}
    },
    "many multiples": {"properties": {f"p{i}": {"type": "integer", "multipleOf": 9000 + i} for i in range(300)}},
}  # fmt: skip


@pytest.mark.own_process
@pytest.mark.nightly
def test_schemas_made_to_explode_are_refused_or_cost_little(tmp_path: Path) -> None:
    """Processor time of compiling and of masks, and memory of all of them together, each in many copies."""
    tokenizer = load_tokenizer(write_talking_model(tmp_path / "model", "llama"))
    grammars, draws = Grammars(tokenizer, len(tokenizer)), random.Random(0)
    before_bytes = psutil.Process().memory_info().rss
    for index in range(3):
        for name, schema in EXPLOSIVE.items():
            # Another schema each time, so that each is compiled and kept.
            request = Request(ModelNames(), 1, messages=TURNS, constraint=Constraint({**schema, "title": str(index)}))
            started_s = time.process_time()
            try:
                guide = grammars._guide(request, RenderedPrompt([1], (), "normal"))
            except ApiError:
                continue
            finally:
                assert time.process_time() - started_s < 2, name
            token = None
            for _ in range(60):
                started_s = time.process_time()
                try:
                    allowed = guide(token)
                except ApiError:
                    break
                finally:
                    assert time.process_time() - started_s < 0.5, name
                token = draws.choice(np.flatnonzero(allowed).tolist())
                if token in tokenizer.eos_token_ids:
                    break
    assert psutil.Process().memory_info().rss - before_bytes < 300 << 20


def test_a_reply_that_goes_beyond_a_limit_ends_alone() -> None:
    """Copies of a grammar share states: those of all replies together went beyond the limit, and all of them ended."""
    wide = {"type": "string", "pattern": "^(.{1,100}x.{1,100}y){1,100}$"}
    tokenizer, draws = tiny_tokenizer(), random.Random(0)
    grammars = Grammars(tokenizer, VOCABULARY_LENGTH)
    request = Request(ModelNames(), 1, messages=TURNS, constraint=Constraint(wide))
    for _ in range(12):
        guide, token = grammars._guide(request, RenderedPrompt([1], (), "normal")), None
        for _ in range(400):
            token = draws.choice(np.flatnonzero(guide(token)).tolist())


FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}
    for name, parameters in {
        "near": {
            "type": "object", "properties": {"place": {"$ref": "#/$defs/place"}, "km": {"type": "integer"}},
            "required": ["place"], "additionalProperties": False, "$defs": {"place": {"enum": ["here", "there"]}},
        },
        "now": {},
        "say": {"properties": {"text": {"type": "string", "maxLength": 9}}, "additionalProperties": False},
    }.items()
]  # fmt: skip
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] or {"maxProperties": 0} for tool in FUNCTIONS}
#: Reasoning of random weights has no end.
ASKED = {"temperature": 1.0, "max_tokens": 300, "messages": [USER], "tools": FUNCTIONS, "logit_bias": {THINK: -100}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_talking_model(tmp_path_factory.mktemp("talking") / "model", "llama")
    with application(model=str(folder)) as (app, _), local_client(app) as client:
        yield client


def as_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def ask(client: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def require_calls(choice: dict[str, Any], names: set[str]) -> int:
    calls = choice["message"].get("tool_calls", [])
    if choice["finish_reason"] == "tool_calls":
        assert not (choice["message"]["content"] or "").strip()
        assert calls
        for call in calls:
            assert call["function"]["name"] in names
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[call["function"]["name"]])
    else:
        assert choice["finish_reason"] == "length"
    return len(calls)


def test_a_forced_call_is_a_call_with_arguments_of_its_schema(client: Any) -> None:
    counts = [require_calls(ask(client, seed=seed, tool_choice="required"), set(PARAMETERS)) for seed in range(4)]
    assert max(counts) > 1, "nothing but one call has been seen"


@pytest.mark.parametrize("name", ["near", "say"])
def test_a_named_function_is_called_once(client: Any, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    assert {require_calls(ask(client, seed=seed, tool_choice=choice), {name}) for seed in range(3)} <= {0, 1}


def test_functions_of_older_clients_are_tools_and_get_one_call_in_their_form(client: Any) -> None:
    functions = {"tools": None, "functions": [tool["function"] for tool in FUNCTIONS], "function_call": {"name": "say"}}
    found = ask(client, seed=1, **functions)
    choice = {"type": "function", "function": {"name": "say"}}
    (call,) = ask(client, seed=1, tool_choice=choice, parallel_tool_calls=False)["message"]["tool_calls"]
    assert found["message"]["function_call"] == call["function"]
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "function_call"
    with client.stream("POST", CHAT, json={**ASKED, **functions, "seed": 1, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [each["function_call"] for each in deltas if "function_call" in each] == [call["function"]]


#: By mlx-lm's parser: what makes mlx-lm choose it when it stands in a template, and tokens that it may have.
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "json_tools": ("<tool_call> tool_call.name", ("<tool_call>", "</tool_call>")),
    "qwen3_coder": ("<tool_call>\n<function=", ("<tool_call>", "</tool_call>")),
    "glm47": ("<arg_key>", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "longcat": ("<longcat_tool_call>", ("<longcat_tool_call>", "</longcat_tool_call>", "</longcat_arg_value>")),
    "minimax_m2": ("<minimax:tool_call>", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "minicpm5": ('<function name="<param name="', ()),
    "pythonic": ("<|tool_call_start|>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "function_gemma": ("<start_function_call>", ("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": ("<|tool_call><tool_call|>", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "kimi_k2": ("<|tool_calls_section_begin|>", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "mistral with [ARGS]": ("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]")),
}
SHORT = {"type": "string", "maxLength": 6}
#: Arguments of each kind that parsers tell apart. Flat forms leave out lists and objects that need not be there.
MANY = [
    *FUNCTIONS,
    {"type": "function", "function": {"name": "set_up", "parameters": {
        "type": "object",
        "required": ["text", "code", "count", "mode", "title", "also", "share", "is_on", "level", "at"],
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "properties": {
            "text": SHORT, "code": {"type": "string", "pattern": "^[a-z ]{2,5}$"},
            "count": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "mode": {"enum": ["", "a b", "on"]},
            "title": {"anyOf": [SHORT, {"type": "null"}]},
            "also": {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
            "share": {"type": "number", "minimum": -1, "maximum": 1}, "is_on": {"type": "boolean"},
            "level": {"enum": [1, 2.5, None, True]}, "at": {"$ref": "#/$defs/n"},
            "list": {"type": "array", "items": SHORT, "maxItems": 2},
            "inner": {
                "type": "object", "properties": {"a": SHORT, "b": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                "required": ["a"], "additionalProperties": False,
            },
        }, "additionalProperties": False,
    }}},
]  # fmt: skip
MANY_PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] or {"maxProperties": 0} for tool in MANY}


def called_at_random(grammars: Grammars, tokenizer: Any, request: Request, seed: int) -> list[dict[str, Any]] | None:
    """The calls of a reply of random tokens that its guide allows; None: it has not ended."""
    guide = grammars.guide(request, RenderedPrompt([9], (), "normal")).result()
    draw, tokens = np.random.default_rng(seed), list[int]()
    for before in itertools.chain([None], tokens):
        allowed = guide(before)
        tokens.append(int(draw.choice(np.flatnonzero(allowed))))
        if tokens[-1] in tokenizer.eos_token_ids:
            break
        if len(tokens) > 2000:
            return None
    arguments = argument_schemas(request.tools or ())
    reader = ReplyReader(make_text_state_machine(tokenizer), "normal", tokenizer.tool_parser, arguments)
    delta = reader.add(Token(tokenizer.decode(tokens[:-1]), tokens[-1], 0.0, (), "stop"))
    last = reader.finish()
    assert not (delta.text + last.text).strip()
    return [call["function"] for call in (*delta.tool_calls, *last.tool_calls)]


def tokenizer_of(folder: Path, form: str, *, is_special: bool) -> Any:
    """The tiny tokenizer with a template of this form, and its marks as special tokens or as text."""
    hint, special = FORMS[form]
    names = dict(enumerate(special if is_special else (), THINK))
    tokenizer = load_tokenizer(write_talking_model(folder, "llama", names, "{# " + hint + " #}"))
    assert tokenizer.tool_parser.__module__.rpartition(".")[2] == form.partition(" ")[0]
    return tokenizer


def require_calls_at_random(tokenizer: Any, seeds: range) -> None:
    grammars = Grammars(tokenizer, len(tokenizer))
    constraint = Constraint(calls="required", has_tools=True)
    single = replace(constraint, functions=("set_up",), is_single=True)
    for each in (constraint, single):
        asked = Request(ModelNames(), 1, messages=[USER], tools=MANY, constraint=each)
        found = [called_at_random(grammars, tokenizer, asked, seed) for seed in seeds]
        ended = [calls for calls in found if calls is not None]
        assert len(ended) >= 0.5 * len(seeds)
        assert {len(calls) for calls in ended} == {1} or each is constraint
        for calls in ended:
            assert calls
            for call in calls:
                jsonschema.validate(json.loads(call["arguments"]), MANY_PARAMETERS[call["name"]])


@pytest.mark.parametrize("form", FORMS)
def test_forced_calls_of_random_tokens_parse_and_are_of_their_schemas(form: str, tmp_path: Path) -> None:
    require_calls_at_random(tokenizer_of(tmp_path, form, is_special=True), range(2))


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if "[ARGS]" not in form])
def test_forced_calls_parse_where_marks_are_text(form: str, tmp_path: Path) -> None:
    require_calls_at_random(tokenizer_of(tmp_path, form, is_special=False), range(20))


def test_a_schema_that_refers_to_itself_many_times_is_looked_into_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four references and eight hops there are 65,536 ways, and all mean the same as one reference."""
    tokenizer = tokenizer_of(tmp_path, "qwen3_coder", is_special=False)
    own = Marks.of(tokenizer, len(tokenizer)).tokenizer
    looks, real = 0, schemas.resolve

    def counting(schema: Any, root: Any, *hops: int) -> Any:
        nonlocal looks
        looks += 1
        return real(schema, root, *hops)

    for module in (rules, schemas):
        monkeypatch.setattr(module, "resolve", counting)
    for last in ({"type": ["string", "null"]}, {"type": "integer"}, {"enum": ["yes", 5]}):
        found = []
        for count in (1, 4):
            whole = {"properties": {"a": {"anyOf": [*[{"$ref": "#/properties/a"}] * count, last]}}, "required": ["a"]}
            tools = [{"type": "function", "function": {"name": "f", "parameters": whole}}]
            known = schemas.argument_schemas(tools)["f"]["a"]
            asked = Request(ModelNames(), 1, tools=tools, constraint=Constraint(calls="required", has_tools=True))
            schema = whole["properties"]["a"]  # type: ignore[call-overload]
            texts = rules.texts_of(schema, whole, {})
            found.append((known, texts, "TEXT" in rules.call_rules(asked, tokenizer, own)))
        assert found[0] == found[1]
    assert looks < 2000


def test_a_product_of_many_large_multiples_is_refused_without_its_digits() -> None:
    schema = {"properties": {f"p{index}": {"multipleOf": 10**300 * (index + 1)} for index in range(40)}}
    with pytest.raises(ApiError, match="multipleOf"):
        schemas.checked_schema(schema, "response_format")


def test_what_a_form_cannot_write_is_refused_and_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "function_gemma", is_special=False)
    grammars = Grammars(tokenizer, len(tokenizer))
    for parameters, word in (
        ({"properties": {"of": {"type": "array"}}, "required": ["of"]}, "'of'"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        constraint = Constraint(calls="required", has_tools=True)
        asked = Request(ModelNames(), 1, messages=[USER], tools=tools, constraint=constraint)
        with pytest.raises(ApiError, match=word) as refused:
            grammars.guide(asked, RenderedPrompt([9], (), "normal")).result()
        assert (refused.value.status, refused.value.param) == (400, "tools.0.function.parameters")


@pytest.mark.parametrize("names", [{}, {THINK: "<think>", THOUGHT: "</think>"}], ids=["", "that thinks"])
def test_a_model_without_a_form_for_calls_writes_forced_ones_as_json(names: Any, tmp_path: Path) -> None:
    folder = write_talking_model(tmp_path, "llama", names, "")
    say = {"type": "function", "function": {"name": "say"}}
    with application(model=str(folder)) as (app, _), local_client(app) as client:
        (newline,) = tiny_tokenizer().encode("\n")
        more = {"logit_bias": {THINK: -100, newline: 2}, "tool_choice": "required"}  # a line break ends a call
        found = [ask(client, seed=seed, **more) for seed in range(8)]
        assert max(require_calls(each, set(PARAMETERS)) for each in found) > 1
        assert {require_calls(ask(client, seed=seed, tool_choice=say), {"say"}) for seed in range(3)} == {1}
        body = {"model": "m", "max_tokens": 300, "messages": [USER], "temperature": 1.0}
        tools = [{"name": name, "input_schema": parameters} for name, parameters in PARAMETERS.items()]
        with client.stream(
            "POST", MESSAGES, json={**body, "tools": tools, "tool_choice": {"type": "any"}, "stream": True}
        ) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        starts = [each["content_block"] for each in events if each["type"] == "content_block_start"]
        assert {each["type"] for each in starts} == {"tool_use"}


def test_of_some_allowed_tools_one_may_be_called_and_the_prompt_stays(client: Any) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "say"}}]}
    only_say = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "parallel_tool_calls": False}
    eager = {"logit_bias": {THINK: -100, CALL: 100}}
    counts = [require_calls(ask(client, seed=seed, **eager, **only_say), {"say"}) for seed in range(4)]
    assert sum(counts) > 0
    assert max(counts) == 1
    spoken = {**saying("A", "B", END), "temperature": 0}
    answers = [client.post(CHAT, json={**ASKED, **spoken, **more}).json() for more in ({}, only_say)]
    assert [each["choices"][0]["message"]["content"] for each in answers] == ["AB", "AB"], "no call is forced"
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    none = {"mode": "auto", "tools": []}
    choice = {"type": "allowed_tools", "allowed_tools": none}
    assert not ask(client, **eager, max_tokens=5, tool_choice=choice)["message"].get("tool_calls")
    body = {"input": "?", "tools": [{**tool["function"], "type": "function"} for tool in FUNCTIONS], "temperature": 1.0}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    more = {**eager, "max_output_tokens": 60, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    items = client.post(RESPONSES, json={**body, **more}).json()["output"]
    assert {item["name"] for item in items if item["type"] == "function_call"} == {"now"}


def test_no_tools_means_no_call_and_the_same_prompt(client: Any) -> None:
    spoken = {**saying("A", CALL, TOOL_F, CALLED, "B", END), "temperature": 0}
    usage = []
    for choice, names in (("auto", ["f"]), ("none", [])):
        answer = client.post(CHAT, json={**ASKED, **spoken, "tool_choice": choice}).json()
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == names
        usage.append(answer["usage"])
    assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] >= usage[1]["prompt_tokens"] - 1


def test_without_parallel_calls_a_reply_ends_behind_its_first_call(client: Any) -> None:
    spoken = {**saying("A", CALL, TOOL_F, CALLED, "B", END), "temperature": 0}
    both = ask(client, **spoken)
    one = ask(client, **spoken, parallel_tool_calls=False)
    assert (both["message"]["content"], one["message"]["content"]) == ("AB", "A")
    assert [len(each["message"]["tool_calls"]) for each in (both, one)] == [1, 1]
    assert one["finish_reason"] == "tool_calls"


def test_the_format_begins_where_the_reasoning_ends(client: Any) -> None:
    spoken = {**saying(THINK, END, "AB", THOUGHT, "Q"), "temperature": 0, "max_tokens": 40, "tools": []}
    choice = ask(client, **spoken, **as_format({"enum": ["XYZ"]}))
    assert choice["message"]["reasoning"] == "AB", "an end of the reply in the reasoning has been possible"
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"XYZ"', "stop")


def test_a_tool_call_may_take_the_place_of_the_format(client: Any) -> None:
    wanted = {"type": "json_object"}
    call = ask(client, **{**saying(CALL, TOOL_F, CALLED, END), "temperature": 0}, response_format=wanted)
    assert [each["function"]["name"] for each in call["message"]["tool_calls"]] == ["f"]
    other = ask(client, **{**saying("A", "{", "}", END), "temperature": 0}, response_format=wanted)
    assert other["message"]["content"] == "{}"


SCHEMA = "response_format"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (as_format({"type": "array", "uniqueItems": True}), SCHEMA, "uniqueItems"),
    (as_format({"type": "string", "pattern": "(?=a)b"}), SCHEMA, "pattern: regex"),
    (as_format({"$ref": "http://127.0.0.1/x"}), SCHEMA, "$ref: Resource 'http://127.0.0.1/x'"),
    (as_format({"not": {}}), SCHEMA, "not"),
    (as_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), SCHEMA, "no reply"),
    (as_format({"type": "integer", "multipleOf": 999_983}), SCHEMA, "multipleOf"),
    (as_format({"type": "number", "multipleOf": 0.123456789}), SCHEMA, "multipleOf"),
    (as_format({"allOf": [{"multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}), SCHEMA, "multipleOf"),
    (as_format({"enum": ["x" * 20_000]}), SCHEMA, "enum"),
    (as_format({"properties": {f"p{index}": {} for index in range(1000)}}), SCHEMA, "properties"),
    (as_format({"enum": [f"value {index}" for index in range(100_000)]}), SCHEMA, "characters"),
    (as_format({"properties": 1, "required": 2, "enum": 3, "format": {}}), SCHEMA, "schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"tool_choice": "required", "tools": []}, "tools", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "far"}}}, "tool_choice", "function"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
        },
        "tools.0.function.parameters",
        "not",
    ),
]


@pytest.mark.parametrize(("fields", "param", "word"), REFUSED, ids=[json.dumps(each[0])[:70] for each in REFUSED])
def test_what_cannot_be_enforced_is_refused_and_says_why(client: Any, fields: Any, param: str, word: str) -> None:
    answer = client.post(CHAT, json={**ASKED, **fields, "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert word in error["message"]
    assert "llguidance" not in error["message"]
