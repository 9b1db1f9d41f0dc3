"""Routes of Anthropic's Messages API. Runs on the event loop; never imports MLX."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from runner.serve.anthropic_bodies import MessagesBody, PromptBody
from runner.serve.anthropic_message import Event, MessageDraft
from runner.serve.asked import Asked, Progress
from runner.serve.errors import ApiError
from runner.serve.options import ServeOptions
from runner.serve.service import Reply, Service
from runner.serve.streaming import (
    ReplyStream,
    namespace_of,
    read_json,
    server_sent_event,
    to_json,
    while_connected,
)

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


def anthropic_routes(
    service: Service, options: ServeOptions, tokens_of: Callable[[Asked], Coroutine[Any, Any, int]]
) -> APIRouter:
    """POST /v1/messages and POST /v1/messages/count_tokens.

    Args:
        tokens_of: how many tokens the prompt of a request has; may raise ApiError.
    """
    router = APIRouter()

    @router.post(MESSAGES, openapi_extra=_takes(MessagesBody, MESSAGES))
    async def messages(request: Request) -> Response:
        """A reply to a conversation, whole or as events."""
        body = MessagesBody.read(await read_json(request))
        reply = await while_connected(request, service.ask(body.asked(options, namespace_of(request))))
        draft = MessageDraft(reply.id, body.model, reply.prompt_tokens)
        events = _events(reply, draft)
        if body.stream:
            return ReplyStream(reply, _sent(events))
        await while_connected(request, _whole(events))
        return to_json(draft.message)

    @router.post(COUNT_TOKENS, openapi_extra=_takes(PromptBody, COUNT_TOKENS))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation would be."""
        body = PromptBody.read(await read_json(request))
        asked = body.asked(options, namespace_of(request))
        return to_json({"input_tokens": await while_connected(request, tokens_of(asked))})

    return router


def _takes(kind: type[PromptBody], path: str) -> dict[str, Any]:
    """What the OpenAPI document says of a route that reads its body itself."""
    at = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=at + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _events(reply: Reply, draft: MessageDraft) -> AsyncIterator[Event]:
    yield draft.start()
    async for part in reply:
        for event in [{"type": "ping"}] if isinstance(part, Progress) else draft.add(part):
            yield event
    assert reply.ending is not None
    for event in draft.end(reply.ending):
        yield event


async def _whole(events: AsyncIterator[Event]) -> None:
    async for _ in events:
        pass


async def _sent(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Server-sent events. What fails on the way is the last of them."""
    try:
        async for event in events:
            yield server_sent_event(event, event["type"])
    except ApiError as error:
        yield server_sent_event(error.in_anthropic_form(), "error")
