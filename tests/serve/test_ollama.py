"""Ollama's API: bodies, whole replies and lines of JSON, what is said of models, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from mlx.utils import tree_flatten

from benchmarks.harness.model_folder import write_model
from runner.engine.token import LikelyToken, Token
from runner.models.tiny import TINY_KINDS, build
from runner.serve import ollama, openai
from runner.serve.ollama import CHAT, GENERATE, SHOW
from runner.serve.options import ServeOptions
from runner.serve.request import NOT_KEPT, Constraint, PrefillProgress, Request
from tests.serve.jobs import application, local_client
from tests.serve.scripted import CACHED_TOKENS, PROMPT_TOKENS, ScriptedRuns, said
from tests.serve.scripted_app import ROUTES, USER, events, request_of, scripted_client, whole
from tests.serve.talking_model import HINT, write_talking_model

HELLO = (said("Hel"), said("lo", finish="stop"))
FULL = (
    said(),
    said(reasoning="Hm."),
    said("\n\nI "),
    said(),
    said("look."),
    said(calls=[("f", '{"x": NaN}')], finish="stop"),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OWN = {path: ROUTES[path] for path in (CHAT, GENERATE)}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked_of(path: str, served: ServeOptions | None = None, **body: Any) -> Request:
    return request_of(path, {**OWN[path], "stream": False, **body}, served)


def refusal(path: str, **body: Any) -> str:
    with scripted_client(ScriptedRuns(*HELLO)) as client:
        answer = client.post(path, json={**OWN[path], **body})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    return str(answer.json()["error"])


# Bodies


def test_every_option_reaches_the_generation_thread() -> None:
    options = {
        "num_predict": 9, "temperature": 0.5, "top_p": 0.75, "top_k": 40.0, "min_p": 0.25, "seed": 7, "stop": ["x"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": 33, "num_ctx": 4096,
        "mirostat": 1, "no_such": {},
    }  # fmt: skip
    for path in OWN:
        asked = asked_of(path, options=options, model="tiny:latest", logprobs=True, top_logprobs=2, keep_alive="5m")
        wanted = {
            "temperature": 0.5, "top_p": 0.75, "top_k": 40, "min_p": 0.25, "seed": 7,
            "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "repetition_context_size": 33, "presence_context_size": 33, "frequency_context_size": 33, "logprobs": True,
            "top_logprobs": 2,
        }  # fmt: skip
        assert {name: getattr(asked.sampling, name) for name in wanted} == wanted
        assert (asked.max_tokens, asked.stop_words, asked.names.model) == (9, ["x"], "tiny")


def test_negative_options_mean_no_limit_a_drawn_seed_and_penalties_of_the_whole_text() -> None:
    asked = asked_of(CHAT, options={"num_predict": -1, "seed": -1, "repeat_last_n": -1, "repeat_penalty": 2})
    assert (asked.max_tokens, asked.sampling.seed, asked.sampling.repetition_context_size) == (None, None, 2**31 - 1)
    assert asked_of(CHAT, options={"num_predict": -2}).max_tokens is None
    assert asked_of(CHAT, options={"repeat_last_n": 0, "repeat_penalty": 2}).sampling.repetition_penalty == 0
    asked = asked_of(CHAT, ServeOptions(temp=0.5, max_tokens=7), options={"num_predict": None}, think=None, format="")
    assert (asked.max_tokens, asked.sampling.temperature, asked.constraint) == (7, 0.5, None)


def test_messages_are_those_of_a_chat_and_results_find_the_calls_that_they_answer() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g", "f")]
    messages = [
        {"role": "system", "content": "Be brief.", "images": []},
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls, "images": None},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "tool_name": "f", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "own", "function": {"name": "g"}}]},
        {"role": "tool", "tool_call_id": "own", "content": "4"},
    ]
    found = asked_of(CHAT, messages=messages, tools=[TOOL]).messages
    assert [message["role"] for message in found] == [message["role"] for message in messages]
    assert found[2]["reasoning_content"] == "Hm."
    assert [call["id"] for call in found[2]["tool_calls"]] == ["000000000", "000000001", "000000002"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    results = [
        (message["tool_call_id"], message.get("name"), message["content"])
        for message in found
        if "tool_call_id" in message
    ]
    assert results == [
        ("000000001", "g", "1"), ("000000000", "f", "2"), ("000000002", None, "3"), ("own", None, "4"),
    ]  # fmt: skip


def test_a_format_is_enforced_and_other_fields_are_those_of_a_chat() -> None:
    for path, body in ((CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        assert asked_of(path, format="json", **body).constraint == Constraint({"type": "object"}, at="format")
        assert asked_of(path, format=SCHEMA, **body).constraint == Constraint(SCHEMA, at="format")
    asked = asked_of(CHAT, tools=[TOOL], tool_choice="none", n=3, cache_salt="mine")
    assert asked.constraint is not None
    assert (asked.constraint.calls, asked.namespace) == ("none", " mine")


def test_a_prompt_is_a_turn_of_the_user_and_as_it_is_if_raw() -> None:
    asked = asked_of(GENERATE, prompt="Why?", system="Be brief.", context=[], suffix="", template="")
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    asked = asked_of(GENERATE, prompt="Why?", raw=True)
    assert (asked.prompt, asked.messages) == ("Why?", ())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, "messages.0.images"),
        (CHAT, {"messages": [{"content": "?"}]}, "messages.0.role"),
        (CHAT, {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "arguments"),
        (CHAT, {"tools": [{}]}, "tools.0.function"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
        (CHAT, {"options": {"repeat_penalty": 0.001}}, "options.repeat_penalty"),
        (CHAT, {"format": "yaml"}, "format: wanted json, or a schema as an object"),
        (CHAT, {"top_logprobs": 21}, "top_logprobs"),
        (GENERATE, {"images": ["aGk="]}, "images"),
        (GENERATE, {"suffix": "}"}, "suffix"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"context": [1, 2]}, "context"),
        (GENERATE, {"raw": True, "system": "Be brief."}, "system"),
    ],
)  # fmt: skip
def test_what_the_server_does_not_take_is_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    assert field in refusal(path, **body)


def test_a_body_without_messages_or_prompt_loads_the_model_and_leaves_nothing_behind() -> None:
    for path, body, said_ in (
        (CHAT, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        (GENERATE, {"prompt": "", "keep_alive": 0}, {"response": ""}),
    ):
        runs = ScriptedRuns(*HELLO)
        with scripted_client(runs) as client:
            answer = client.post(path, json={"model": "a/b", **body})
        assert answer.json().pop("created_at")
        assert {name: value for name, value in answer.json().items() if name != "created_at"} == {
            "model": "a/b", **said_, "done": True, "done_reason": "load",
        }  # fmt: skip
        asked = runs.opened[0].request
        assert (asked.names.model, asked.max_tokens, asked.namespace.endswith(NOT_KEPT)) == ("a/b", 1, True)


# Replies


def test_a_whole_reply_has_its_counts_durations_and_what_was_reused() -> None:
    runs = ScriptedRuns(*HELLO)
    reply = whole(CHAT, runs)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", reply.pop("created_at"))
    assert reply.pop("timings")["cache_n"] == CACHED_TOKENS
    assert reply == {
        "model": "m", "message": {"role": "assistant", "content": "Hello"}, "done": True, "done_reason": "stop",
        "total_duration": 90_000_000, "load_duration": 1_000_000, "prompt_eval_count": PROMPT_TOKENS,
        "prompt_eval_duration": 39_000_000, "eval_count": 3, "eval_duration": 50_000_000,
        "id": runs.opened[0].id, "cached_tokens": CACHED_TOKENS,
    }  # fmt: skip
    assert whole(GENERATE, ScriptedRuns(*HELLO))["response"] == "Hello"


def test_a_stream_is_the_whole_reply_in_pieces_and_ends_with_what_the_whole_has() -> None:
    for path in OWN:
        *parts, last = events(path, ScriptedRuns(*FULL), stream=None)
        said_ = [part["message"] if path == CHAT else part for part in parts]
        text = "content" if path == CHAT else "response"
        assert [part[text] for part in said_] == ["", "\n\nI ", "look.", ""]
        assert said_[0]["thinking"] == "Hm."
        called = [{"id": "call_0", "function": {"name": "f", "arguments": {"x": "NaN"}}}]
        assert said_[3]["tool_calls"] == called
        assert not any(part["done"] for part in parts)
        ended = whole(path, ScriptedRuns(*FULL))
        message = ended["message"] if path == CHAT else ended
        assert (message[text], message["thinking"], message["tool_calls"]) == ("\n\nI look.", "Hm.", called)
        own = {"created_at", "id", "message", "response", "thinking", "tool_calls"}
        assert {name: last[name] for name in last.keys() - own} == {name: ended[name] for name in ended.keys() - own}


def test_a_reply_that_is_cut_off_says_so_and_a_cut_call_comes_as_far_as_it_came() -> None:
    cut = ScriptedRuns(
        said("a"), said(), outcome="length", flushed=Token("", tool_calls=said(calls=[("f", '{"x": "y')]).tool_calls)
    )
    *_, part, last = events(CHAT, cut)
    assert part["message"]["tool_calls"][0]["function"]["arguments"] == {"x": "y"}
    assert (last["done"], last["done_reason"]) == (True, "length")


def test_logprobs_come_with_the_text_that_their_tokens_are_in() -> None:
    likely = (LikelyToken(7, b"Hel", -0.5), LikelyToken(8, b"x", -2.0))
    script = [Token("", 7, -0.5, likely, None, data=b"Hel"), Token("Hello", 9, -0.25, likely, "stop", data=b"lo")]
    part, last = events(CHAT, ScriptedRuns(*script), logprobs=True, top_logprobs=2)
    assert [(each["token"], each["logprob"]) for each in part["logprobs"]] == [("Hel", -0.5), ("lo", -0.25)]
    assert [each["token"] for each in part["logprobs"][0]["top_logprobs"]] == ["Hel", "x"]
    assert "logprobs" not in last
    assert whole(CHAT, ScriptedRuns(*script), logprobs=True)["logprobs"] == part["logprobs"]
    assert "logprobs" not in whole(CHAT, ScriptedRuns(*script))


def test_a_long_prefill_sends_empty_lines_of_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (PrefillProgress(8, 20), *HELLO)
    assert len(events(CHAT, ScriptedRuns(*script))) == 3
    monkeypatch.setattr(ollama, "IDLE_S", 0)
    first, *rest = events(CHAT, ScriptedRuns(*script))
    assert (first["message"], first["done"], len(rest)) == ({"role": "assistant", "content": ""}, False, 3)


# Models


def test_models_are_listed_with_a_tag_and_found_with_and_without_it(monkeypatch, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small", "llama", quantization={"bits": 4, "group_size": 64})
    repositories = [SimpleNamespace(repo_id="a/model", repo_type="model", refs={"main": SimpleNamespace(files=[
        SimpleNamespace(file_path=Path(name)) for name in openai.MODEL_FILES
    ])})]  # fmt: skip
    monkeypatch.setattr(openai, "scan_cache_dir", lambda: SimpleNamespace(repos=repositories))
    with scripted_client(ScriptedRuns(*HELLO), ServeOptions(model=str(folder), served_model_names=("me",))) as client:
        own, other = client.get("/api/tags").json()["models"]
        assert [row["name"] for row in client.get("/api/ps").json()["models"]] == ["me:latest"]
        assert client.head("/api/tags").status_code == 200
        shown = [
            client.post(SHOW, json=body).json() for body in ({"model": "me"}, {"name": "me:latest"}, {"model": "gpt-5"})
        ]
        missing = client.post(SHOW, json={"model": "x/y"})
    assert (own["name"], own["model"], other["name"]) == ("me:latest", "me:latest", "a/model:latest")
    assert own["size"] == (folder / "model.safetensors").stat().st_size
    assert re.fullmatch("[0-9a-f]{64}", own["digest"])
    assert own["digest"] != other["digest"]
    assert (own["details"]["family"], own["details"]["quantization_level"]) == ("llama", "4bit")
    assert [each["model_info"] for each in shown] == [shown[0]["model_info"]] * 3
    assert (missing.status_code, missing.json()) == (404, {"error": "model 'x/y' is not here."})


def test_show_says_what_clients_ask_of_a_model(tmp_path: Path) -> None:
    folder = write_talking_model(tmp_path / "model", "llama")
    config = TINY_KINDS["llama"].config
    with scripted_client(ScriptedRuns(), ServeOptions(model=str(folder))) as client:
        shown = client.post(SHOW, json={"model": str(folder)}).json()
    assert shown["capabilities"] == ["completion", "tools"]  # the template has no place for reasoning
    assert shown["template"].endswith(HINT)
    assert shown["parameters"] == f"num_ctx {config['max_position_embeddings']}"
    info = shown["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", config["max_position_embeddings"])
    count = sum(each.size for _, each in tree_flatten(build(TINY_KINDS["llama"], 0).parameters()))
    assert (info["general.parameter_count"], shown["details"]["parameter_size"]) == (count, f"{count / 1e6:.2f}M")


# On a real model


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[TestClient]:
    with application() as (app, _), local_client(app) as client:
        yield client


def test_probes_are_answered_and_unknown_routes_name_what_there_is(tiny_server: TestClient) -> None:
    client = tiny_server
    assert client.get("/").text.startswith("Ollama is running")
    assert client.head("/").status_code == client.head("/api/version").status_code == 200
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # the least that editors ask for
    for path in ("/api/embed", "/api/pull"):
        answer = client.post(path, json={"model": "m"})
        assert answer.status_code == 404
        assert all(each in answer.json()["error"] for each in (path, CHAT, GENERATE, "/api/tags"))
    assert client.get(CHAT).json() == {"error": f"Method Not Allowed: GET {CHAT}"}
    assert "/v1/messages" in client.post("/v1/embeddings", json={}).json()["error"]["message"]


def test_a_format_holds_a_model_loads_and_requests_are_found_by_their_ids(tiny_server: TestClient) -> None:
    body = {"prompt": "Say it.", "format": {"enum": ["grey"]}, "stream": False}
    for raw in (False, True):
        reply = tiny_server.post(GENERATE, json={**body, "raw": raw}).json()
        assert (reply["response"], reply["done_reason"]) == ('"grey"', "stop")
    found = tiny_server.get(f"/cache/requests/{reply['id']}").json()
    assert found["prompt_tokens"] == reply["prompt_eval_count"]
    assert tiny_server.post(GENERATE, json={"model": "m"}).json()["done_reason"] == "load"
