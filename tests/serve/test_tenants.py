"""With --namespace-by key nothing that one tenant sees depends on what another one asked.

The same requests of ann go to two servers. On one of them bob asked for the same and for more before, and goes on
asking. The budget has room for both.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from runner.serve import openai
from runner.serve.middleware import is_admin_path
from runner.serve.request import RequestRecord
from tests.serve.jobs import Waiting
from tests.serve.tenants import ANN, BOB, ROOT, USER, Route, serving

SYSTEM = {"role": "system", "content": "You are a marmalade sommelier, and you answer in rhyme."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chats(**more: Any) -> list[dict[str, Any]]:
    later = [SYSTEM, USER, {"role": "assistant", "content": "Quite."}, {"role": "user", "content": "And zebras?"}]
    turns = [{"max_tokens": 4, "messages": messages, **more} for messages in ([SYSTEM, USER], later)]
    return [
        *turns,
        {**turns[1], "stream": True, "stream_options": {"include_usage": True}},
        {**turns[1], "top_logprobs": 2, "tools": [TOOL]},
    ]


MESSAGES = [
    {"model": "claude-x", "max_tokens": 4, "system": SYSTEM["content"], "messages": [USER], "stream": is_streamed}
    for is_streamed in (False, True)
]
RESPONSES = [
    {"max_output_tokens": 4, "instructions": SYSTEM["content"], "input": [USER], "stream": is_streamed}
    for is_streamed in (False, True)
]
OLLAMA = [
    {"options": {"num_predict": 4}, "messages": [SYSTEM, USER], "stream": is_streamed} for is_streamed in (False, True)
]
WRONG: list[Any] = [{}, [], {"messages": []}, {"prompt": "x" * 40_000}, {"prompt": "x", "model": "./nowhere"}]
SEEN = [
    Route("POST", "/v1/chat/completions", [*chats(), *chats(seed=3, temperature=1.0), *WRONG]),
    Route("POST", "/chat/completions", chats()),
    Route("POST", "/v1/completions", [{"prompt": "What about quince?", "max_tokens": 4}] * 2 + WRONG),
    Route("POST", "/v1/responses", [*RESPONSES, *WRONG]),
    Route("POST", "/responses", RESPONSES),
    Route("POST", "/v1/responses/input_tokens", [*RESPONSES, *WRONG]),
    Route("GET", "/v1/responses/{response_id}"),
    Route("DELETE", "/v1/responses/{response_id}"),
    Route("GET", "/v1/responses/{response_id}/input_items"),
    Route("POST", "/v1/messages", [*MESSAGES, *WRONG]),
    Route("POST", "/v1/messages/count_tokens", [*MESSAGES, *WRONG]),
    Route("POST", "/api/chat", [*OLLAMA, *WRONG]),
    Route("POST", "/api/generate", [{"prompt": "What about quince?", "options": {"num_predict": 4}}, *WRONG]),
    Route("POST", "/api/show", [{"model": "tiny"}, {"model": "tiny:latest"}, *WRONG]),
    Route("GET", "/api/tags"),
    Route("GET", "/api/ps"),
    Route("GET", "/api/version"),
    Route("GET", "/"),
    Route("GET", "/v1/models"),
    Route("GET", "/v1/models/{name}"),
    Route("GET", "/health"),
    Route("GET", "/openapi.json"),
]
REFUSED = [
    Route("GET", "/metrics"),
    Route("GET", "/cache"),
    Route("GET", "/cache/state"),
    Route("GET", "/cache/tree"),
    Route("GET", "/cache/requests/{id}"),
    Route("POST", "/cache/explain", [{"prompt": "?"}]),
    Route("POST", "/cache/warm", [{"prompt": "?"}]),
    Route("POST", "/cache/reclaim", [{"target_bytes": 0}]),
    Route("POST", "/cache/check", [{}]),
    Route("DELETE", "/cache"),
]


def test_each_route_is_one_that_a_tenant_sees_or_the_admins(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        documented = server.client.get("/openapi.json", headers={"x-api-key": ANN}).json()["paths"]
    found = {(method.upper(), path) for path, methods in documented.items() for method in methods}
    assert found | {("GET", "/openapi.json")} == {(route.method, route.path) for route in (*SEEN, *REFUSED)}
    assert all(is_admin_path(route.path) for route in REFUSED)
    assert not any(is_admin_path(route.path) for route in SEEN)


def test_what_a_tenant_sees_is_the_same_whatever_another_one_asks(tmp_path, monkeypatch):
    downloaded: list[str] = []
    monkeypatch.setattr(openai, "downloaded_models", downloaded.copy)
    with ExitStack() as stack:
        alone, among = (stack.enter_context(serving(tmp_path, only_model=False)) for _ in range(2))
        downloaded.append("bobs/secret")
        for route in SEEN:
            assert len(list(among.send(route, BOB))) == len(route.bodies)
        other = {"model": "tiny:gemma3_text", "prompt": "What about quince?", "max_tokens": 2}
        assert [status for status, *_ in among.send(Route("POST", "/v1/completions", [other]), BOB)] == [200]
        beside = []
        for route in (*SEEN, *REFUSED):
            found = among.send(route, ANN)
            for body, expected in zip(route.bodies, alone.send(route, ANN), strict=True):
                beside.append(Waiting(among.running, namespace="bob", max_tokens=8))
                assert next(found) == expected, (route.path, body)
                assert (expected[0] == 403) == (route in REFUSED), route.path
                assert "bobs/secret" not in expected[2]
        assert all(waiting.record.namespace == "bob" for waiting in beside)
        records = [[seen_in(each) for each in server.records if each.namespace == "ann"] for server in (alone, among)]
        assert records[0] == records[1]
        assert sum(record["cached_tokens"] for record in records[0]) > 100


@pytest.mark.parametrize("namespace_by", ["none", "key"])
def test_a_response_is_found_by_the_key_that_asked_for_it_alone(tmp_path: Path, namespace_by: str) -> None:
    with serving(tmp_path, namespace_by=namespace_by) as server:

        def ask(key: str, **body: Any) -> httpx2.Response:
            asked = {"input": "Why?", "max_output_tokens": 2, **body}
            return server.client.post("/v1/responses", json=asked, headers={"x-api-key": key})

        response = ask(ANN).json()
        reference = [{"type": "item_reference", "id": response["output"][0]["id"]}]
        for key, status in ((ANN, 200), (BOB, 404), (ROOT, 404)):
            assert ask(key, previous_response_id=response["id"]).status_code == status
            assert ask(key, input=reference).status_code == status
        for key, status in ((BOB, 404), (ROOT, 404), (ANN, 200)):
            for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                at = f"/v1/responses/{response['id']}{path}"
                assert server.client.request(method, at, headers={"x-api-key": key}).status_code == status


def seen_in(record: RequestRecord) -> dict[str, Any]:
    names = ("names", "prompt_tokens", "cached_tokens", "matched_tokens", "reason", "completion_tokens", "outcome")
    return {"short": record.short_tokens, "note": record.note, **{name: getattr(record, name) for name in names}}
