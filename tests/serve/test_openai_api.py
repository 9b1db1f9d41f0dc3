"""Both APIs: refusals, clients that leave, time limits. OpenAI's alone: streams, failures, models, health."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.engine.token import LikelyToken, Token
from runner.serve import openai
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError, OpenRequest, PrefillProgress
from tests.serve.scripted import CACHED_TOKENS, PROMPT_TOKENS, ScriptedRuns, said
from tests.serve.scripted_app import (
    BODIES,
    CHAT,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    TEXT,
    USER,
    events,
    scripted_app,
    scripted_client,
    whole,
)

# What goes wrong on the way, in each API


def error_in(path: str, text: str) -> Any:
    """The error of an answer, or of the last event of a stream."""
    *_, last = (line for line in text.replace("data: [DONE]", "").splitlines() if line)
    found = json.loads(last.removeprefix("data: "))
    return found.get("response", found)["error"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_generation_thread_refuses_is_an_error_before_anything_of_a_reply(path, stream):
    with scripted_client(ScriptedRuns(refusal=ApiError(429, "full", retry_after_s=7))) as client:
        answer = client.post(path, json={**BODIES[path], "stream": stream})
    error = {"message": "full", "type": "rate_limit_error", "param": None, "code": None}
    wanted = {OLLAMA: "full", MESSAGES: {"type": "rate_limit_error", "message": "full"}}.get(path, error)
    assert (answer.status_code, error_in(path, answer.text), answer.headers["retry-after"]) == (429, wanted, "7")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_fails_on_the_way_is_an_error_or_ends_its_stream_with_it(path, stream):
    with scripted_client(ScriptedRuns(said("said so far"), ApiError(500, "it broke"))) as client:
        answer = client.post(path, json={**BODIES[path], "stream": stream})
    assert (answer.status_code, "said so far" in answer.text) == (200 if stream else 500, stream)
    kind = {MESSAGES: "api_error"}.get(path, "server_error")
    error = error_in(path, answer.text)
    assert (error if path == OLLAMA else error["message"]) == "it broke"
    assert path == OLLAMA or error["type"] == kind
    if stream and path == RESPONSES:
        assert (error["code"], "response.failed" in answer.text, '"usage": null' in answer.text) == (kind, True, True)
    assert answer.text.endswith("data: [DONE]\n\n") == (stream and path == CHAT)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_generation_thread_keeps_its_code_and_field(path, stream):
    with scripted_client(ScriptedRuns(said("x"), ApiError.of_length(9, 8))) as client:
        answer = client.post(path, json={**BODIES[path], "stream": stream})
    error = error_in(path, answer.text)
    if path == MESSAGES:
        wanted = {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}
        assert error == wanted
    else:
        message = error if path == OLLAMA else error["message"]
        assert "This model's maximum context length is 8 tokens. However, your " in message
        field = {CHAT: "messages"}.get(path, "input")
        assert path == OLLAMA or (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_a_stream_tells_the_progress_of_its_prompt_in_comments_and_its_usage_if_asked():
    runs = ScriptedRuns(PrefillProgress(8, PROMPT_TOKENS), PrefillProgress(20, PROMPT_TOKENS), said("x", finish="stop"))
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    with scripted_client(runs) as client:
        answer = client.post(CHAT, json=body)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    first, second, *_, usage, done, _ = answer.text.split("\n\n")
    assert (first, second, done) == (": keepalive 8/20", ": keepalive 20/20", "data: [DONE]")
    usage = json.loads(usage.removeprefix("data: "))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 3, 23)
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}


def test_only_the_first_chunk_of_a_stream_has_a_role():
    chunks = events(CHAT, ScriptedRuns(said("a"), said("b"), said("c", finish="stop")))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"role": "assistant", "content": "a"}, {"content": "b"}]
    assert not [delta for delta in deltas[1:] if "role" in delta]


def test_a_reply_cut_to_nothing_by_a_stop_word_has_an_empty_text():
    runs = ScriptedRuns(said("", finish="stop", stop_word="x"))
    assert whole(CHAT, runs)["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert events(CHAT, runs)[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_tool_calls_of_a_stream_are_numbered_and_end_it():
    calls = ([("f", "{}"), ("g", "{}")], [("h", "{}")])
    runs = ScriptedRuns(said(calls=calls[0]), said(calls=calls[1], finish="stop"))
    choice = whole(CHAT, runs)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(CHAT, runs)]
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in streamed] == [(0, "f"), (1, "g"), (2, "h")]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "g", "h"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"


def test_a_stream_of_several_choices_has_chunks_of_each_and_one_usage():
    runs = ScriptedRuns(said("x"), said("y", finish="stop"))
    ended = whole(CHAT, runs, n=3)
    *chunks, usage = events(CHAT, runs, n=3, stream_options={"include_usage": True})
    texts, ends = ["", "", ""], []
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (texts, ends) == (["xy"] * 3, ["stop"] * 3)
    assert [choice["message"]["content"] for choice in ended["choices"]] == ["xy"] * 3
    for counts in (usage["usage"], ended["usage"]):
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (PROMPT_TOKENS, 9)
        assert counts["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
    assert usage["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_ends_the_others(stream):
    class Failing(ScriptedRuns):
        def ask(self, opened: OpenRequest) -> None:
            self._is_endless = len(self.opened) != 1
            self._script = (said("x"),) if self._is_endless else (said("x"), ApiError(500, "it broke"))
            super().ask(opened)

    runs = Failing()
    with scripted_client(runs) as client:
        answer = client.post(CHAT, json={"messages": [USER], "n": 3, "stream": stream})
    assert "it broke" in answer.text
    assert all(opened.is_cancelled for opened in runs.opened)


def test_a_completion_counts_likely_tokens_in_its_own_form_and_has_its_own_object():
    runs = ScriptedRuns(said("x"), said("yz", finish="stop"))
    ended = whole(TEXT, runs, logprobs=0)["choices"][0]["logprobs"]
    chunks = events(TEXT, runs, logprobs=0, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    found = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if "logprobs" in choice]
    for logprobs in (ended, {name: [value for each in found for value in each[name]] for name in ended}):
        assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert logprobs["token_logprobs"] == [-0.5, -0.5]
        assert len(logprobs["tokens"]) == 2


def test_reasoning_has_both_names_and_the_last_chunk_has_timings():
    runs = ScriptedRuns(said(reasoning="hm"), said("x", finish="stop"))
    ended, chunks = whole(CHAT, runs), events(CHAT, runs)
    for message in (ended["choices"][0]["message"], chunks[0]["choices"][0]["delta"]):
        assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
    assert [("timings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for timings in (ended["timings"], chunks[-1]["timings"]):
        assert (timings["prompt_n"], timings["cache_n"]) == (PROMPT_TOKENS - CACHED_TOKENS, CACHED_TOKENS)
        assert (timings["prompt_ms"], timings["predicted_n"], timings["predicted_ms"]) == (39.0, 3, 50.0)
        assert (timings["predicted_per_second"], timings["predicted_per_token_ms"]) == (40.0, 25.0)


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_the_logarithm_of_a_probability_of_zero_is_a_number(logprob):
    runs = ScriptedRuns(said("x", finish="stop")._replace(logprob=logprob))
    with scripted_client(runs) as client:
        answer = client.post(CHAT, json={"messages": [USER], "logprobs": True})
    body = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_log_probabilities_name_the_sampled_token_with_its_bytes_in_streams_too():
    tops = (LikelyToken(5, b"a", -0.1), LikelyToken(6, b"\xc3", -3.0))
    tokens = (Token("", 6, -3.0, tops, None, data=b"\xc3"), Token("\u00e9", 9, -0.5, tops, "stop", data=b"\xa9"))
    runs = ScriptedRuns(*tokens)
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    found = whole(CHAT, runs, **asked)["choices"][0]["logprobs"]["content"]
    chunks = [chunk["choices"][0] for chunk in events(CHAT, runs, **asked)]
    top = [
        {"id": 5, "token": "a", "bytes": [97], "logprob": -0.1},
        {"id": 6, "token": "\ufffd", "bytes": [0xC3], "logprob": -3.0},
    ]
    assert found[0] == {"id": 6, "token": "\ufffd", "bytes": [0xC3], "logprob": -3.0, "top_logprobs": top}
    assert bytes(each for token in found for each in token["bytes"]).decode() == "\u00e9"
    assert [each for chunk in chunks for each in chunk.get("logprobs", {"content": []})["content"]] == found


async def leave(app: Any, runs: ScriptedRuns, path: str, body: dict[str, Any]) -> None:
    """Send a request, and go away once the generation thread has it; return when the server is through with it."""
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not runs.opened:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    async with asyncio.timeout(60):
        await app(scope, receive, send)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script", [(), (PrefillProgress(1, 20),), (said("x"),)], ids=["waiting", "prefill", "decoding"]
)
def test_a_client_that_goes_away_ends_its_request(path, stream, script):
    runs = ScriptedRuns(*script, is_endless=True)
    asyncio.run(leave(scripted_app(runs), runs, path, {**BODIES[path], "stream": stream}))
    assert runs.opened[0].is_cancelled


def repository(repo_id: str, repo_type: str = "model", ref: str = "main", less: str = "") -> SimpleNamespace:
    files = [SimpleNamespace(file_path=Path(name)) for name in openai.MODEL_FILES - {less}]
    return SimpleNamespace(repo_id=repo_id, repo_type=repo_type, refs={ref: SimpleNamespace(files=files)})


REPOSITORIES = [
    repository("a/model"), repository("b/model"), repository("a/data", "dataset"), repository("c/model", ref="other"),
    repository("d/model", less="config.json"),
]  # fmt: skip


def listed(path: str, served: str | None, **options: Any) -> list[str]:
    with scripted_client(ScriptedRuns(), ServeOptions(model=served, **options)) as client:
        answer = client.get(path)
    assert answer.status_code == 200
    assert answer.json()["object"] == "list"
    assert all(model["object"] == "model" and model["created"] > 0 for model in answer.json()["data"])
    return [model["id"] for model in answer.json()["data"]]


def test_models_are_those_of_the_hubs_cache_that_mlx_lm_could_load_and_the_served_one(monkeypatch, tmp_path):
    monkeypatch.setattr(openai, "scan_cache_dir", lambda: SimpleNamespace(repos=REPOSITORIES))
    assert listed("/v1/models", None) == ["a/model", "b/model"]
    assert listed("/v1/models", "tiny") == ["tiny", "a/model", "b/model"]
    assert listed("/v1/models", "a/model") == ["a/model", "b/model"]
    assert listed("/v1/models", str(tmp_path / ".")) == [str(tmp_path.resolve()), "a/model", "b/model"]
    assert listed("/v1/models", "tiny", served_model_names=("me", "us")) == ["me", "us", "a/model", "b/model"]
    assert listed("/v1/models", "tiny", only_model=True) == ["tiny"]


def test_one_model_is_one_object_or_an_error(monkeypatch):
    monkeypatch.setattr(openai, "scan_cache_dir", lambda: SimpleNamespace(repos=REPOSITORIES))
    with scripted_client(ScriptedRuns(), ServeOptions(model="tiny")) as client:
        for name in ("tiny", "b/model", "gpt-5"):
            answer = client.get(f"/v1/models/{name}").json()
            assert (answer["id"], answer["object"], answer["type"]) == (name, "model", "model")
        missing = client.get("/v1/models/x/y")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_health_is_that_of_the_generation_thread():
    runs = ScriptedRuns()
    with scripted_client(runs) as client:
        assert (client.get("/health").status_code, client.get("/health").json()) == (200, {"status": "ok"})
        runs.is_healthy = False
        assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "unavailable"})
