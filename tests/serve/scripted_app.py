"""The routes of all APIs before a scripted generation thread, with errors as the whole server writes them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from runner.serve.anthropic import MESSAGES, anthropic_routes
from runner.serve.middleware import Frame
from runner.serve.ollama import CHAT as OLLAMA
from runner.serve.ollama import GENERATE, ollama_routes
from runner.serve.openai import CHAT, openai_routes
from runner.serve.openai import COMPLETIONS as TEXT
from runner.serve.options import ServeOptions
from runner.serve.request import Request
from runner.serve.responses import RESPONSES, ResponseMemory, responses_routes
from runner.serve.service import ReplyBackend, Service
from tests.serve.scripted import ScriptedRuns, said

__all__ = ["CHAT", "MESSAGES", "OLLAMA", "RESPONSES", "TEXT"]

USER = {"role": "user", "content": "?"}
#: A body that each API takes.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"model": "m", "input": [USER]},
    MESSAGES: {"model": "claude-x", "max_tokens": 16, "messages": [USER]},
    OLLAMA: {"model": "m", "messages": [USER]},
}
ROUTES: dict[str, dict[str, Any]] = {**BODIES, TEXT: {"prompt": "?"}, GENERATE: {"model": "m", "prompt": "?"}}


def scripted_app(runs: ReplyBackend, options: ServeOptions | None = None, *, timeout_s: float = 60) -> FastAPI:
    app, service, chosen = FastAPI(), Service(runs, timeout_s=timeout_s), options or ServeOptions()
    app.include_router(openai_routes(service, chosen))
    app.include_router(responses_routes(service, chosen, ResponseMemory()))
    app.include_router(anthropic_routes(service, chosen))
    app.include_router(ollama_routes(service, chosen))
    app.add_middleware(Frame, allowed_origins=(), count=lambda *_: None)
    return app


def scripted_client(runs: ReplyBackend, options: ServeOptions | None = None) -> TestClient:
    return TestClient(scripted_app(runs, options))


def request_of(path: str, body: dict[str, Any], options: ServeOptions | None = None) -> Request:
    """The Request that a route makes of a body."""
    runs = ScriptedRuns(said("x", finish="stop"))
    with scripted_client(runs, options) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return runs.opened[0].request


def whole(path: str, runs: ScriptedRuns, **fields: Any) -> dict[str, Any]:
    """The whole answer to the body of a route."""
    with scripted_client(runs) as client:
        answer = client.post(path, json={**ROUTES[path], "stream": False, **fields})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(path: str, runs: ScriptedRuns, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, or its lines, without comments. The name of an event is its type."""
    with scripted_client(runs) as client:
        answer = client.post(path, json={**ROUTES[path], "stream": True, **fields})
    if path in (OLLAMA, GENERATE):
        assert (answer.headers["content-type"], answer.text[-1]) == ("application/x-ndjson", "\n")
        return [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for event in answer.text.split("\n\n")[:-1]:
        *name, data = event.split("\n")
        if data.startswith("data: {"):
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == ([f"event: {found[-1]['type']}"] if path in (MESSAGES, RESPONSES) else [])
    return found
