"""OpenAI's API as mlx_lm.server has it: chats, text completions, models, health."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from runner.serve.border import get_system_fingerprint
from runner.serve.model_list import downloaded_models, list_models
from runner.serve.openai_bodies import ChatBody, CompletionBody, OpenAIBody
from runner.serve.openai_replies import OpenAIReply
from runner.serve.options import ServeOptions
from runner.serve.service import Service
from runner.serve.streaming import ReplyStream, namespace_of, read_json, to_json, while_connected


def openai_routes(service: Service, options: ServeOptions) -> APIRouter:
    """Return the routes; each raises ApiError for what is wrong with a request."""
    router = APIRouter()
    fingerprint: str = get_system_fingerprint()

    async def answer(request: Request, kind: type[OpenAIBody]) -> Response:
        created_s = int(time.time())
        body = kind.read(await read_json(request), options)
        asked = body.asked(namespace_of(request))
        reply = await while_connected(request, service.ask(asked))
        writer = OpenAIReply(reply, asked, body.model, fingerprint, created_s)
        if body.stream:
            return ReplyStream(reply, writer.events(include_usage=body.stream_options.get("include_usage", False)))
        try:
            return to_json(await while_connected(request, writer.whole()))
        finally:
            reply.cancel()

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    @router.post("/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatBody)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody)

    # What is fetched later is fetched for somebody, and other tenants are not to know.
    at_start = downloaded_models() if options.namespace_by == "key" else None

    def listed(only: str | None = None) -> dict[str, Any]:
        return list_models(options.model, downloaded_models() if at_start is None else at_start, only)

    # Looking through the hub's cache takes its time, so these two run on a thread.
    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        return listed()

    @router.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return listed(name)

    @router.get("/health")
    async def health() -> Response:
        return to_json({"status": "ok"}) if service.is_healthy else to_json({"status": "unavailable"}, 503)

    return router


def _takes(kind: type[OpenAIBody]) -> dict[str, Any]:
    """What the OpenAPI document says of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
