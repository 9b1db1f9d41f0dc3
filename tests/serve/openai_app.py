"""OpenAI's routes alone, before a scripted generation thread."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from fastapi.testclient import TestClient

from runner.serve.openai import openai_routes
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError
from runner.serve.service import ReplyBackend, Service, to_json

USER = {"role": "user", "content": "?"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def openai_app(runs: ReplyBackend, options: ServeOptions | None = None, *, timeout_s: float = 60) -> FastAPI:
    """An application that answers ApiError with its body in OpenAI's form."""

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError), error
        return to_json(error.in_openai_form(), error.status)

    app = FastAPI(exception_handlers={ApiError: refuse})
    app.include_router(openai_routes(Service(runs, timeout_s=timeout_s), options or ServeOptions()))
    return app


def openai_client(runs: ReplyBackend, options: ServeOptions | None = None) -> TestClient:
    """A client of it, to be entered."""
    return TestClient(openai_app(runs, options))
