"""Routes of the cache: metrics, the page and its state, the tree, and what an admin may have done to it.

What only reads counters and trees runs on a thread of its own, beside generation. What evaluates, evicts or takes a
prompt apart runs on the generation thread, between two rounds. Who may ask is `runner.serve.access`'s to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import mlx.core as mx
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from radixcache import PrefixCache
from radixcache.errors import CacheClosedError, RadixCacheError
from radixcache.tokens.ids import checked_prompt, vocabulary_size
from runner.serve import border
from runner.serve.asked import DEFAULT, Asked
from runner.serve.errors import ApiError
from runner.serve.metrics import CONTENT_TYPE
from runner.serve.openai_bodies import ChatBody, CompletionBody
from runner.serve.options import ServeOptions
from runner.serve.page import cache_page, page_state, title
from runner.serve.prompts import Prompt
from runner.serve.streaming import to_json
from runner.serve.warming import WarmEntry
from runner.serve.watch import Watch

if TYPE_CHECKING:
    from runner.serve.models import Models
    from runner.serve.running import Running
    from runner.serve.served_model import ServedModel

T = TypeVar("T")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ReclaimBody(BaseModel):
    """POST /cache/reclaim: the bytes that all caches may hold together afterwards."""

    model_config = ConfigDict(strict=True, extra="forbid")

    target_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class PromptBody(BaseModel):
    """POST /cache/explain: one of tokens, prompt and messages. What says more of them is as in OpenAI's routes."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str = DEFAULT
    tokens: Annotated[list[TokenId], Field(min_length=1)] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    namespace: str = ""

    def asked(self, options: ServeOptions) -> Asked:
        """The prompt as a request has it; of tokens only whose they are.

        Raises:
            ApiError: it is none of the three or several, or a field is not what it may be.
        """
        if sum(given is not None for given in (self.tokens, self.prompt, self.messages)) != 1:
            raise ApiError(400, "wanted one of tokens, prompt and messages.")
        body = self.model_dump(exclude_none=True)
        if self.messages is not None:
            return ChatBody.read(body, options).asked(self.namespace)
        return CompletionBody.read({"prompt": "", **body}, options).asked(self.namespace)


class WarmBody(PromptBody):
    """POST /cache/warm: what is to be prefilled. With a name or a time it is pinned."""

    name: Annotated[str, Field(min_length=1)] | None = None
    ttl_requests: Annotated[int, Field(ge=1, lt=2**31)] | None = None


def cache_routes(running: Running, watch: Watch, options: ServeOptions) -> APIRouter:
    """Return the routes; each raises ApiError for what is wrong with a request."""
    router = APIRouter()
    watch.attach(running)

    async def on_generation_thread(work: Callable[[Models], T]) -> T:
        try:
            return await asyncio.wrap_future(running.call(work))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except RadixCacheError as error:
            raise ApiError(409, str(error)) from error

    async def evicted(cause: str, evict: Callable[[list[PrefixCache]], object]) -> Response:
        def work(models: Models) -> int:
            caches = [cache for _, cache in running.caches()]
            before = sum(map(_held_bytes, caches))
            with watch.evicting(cause):
                evict(caches)
            return before - sum(map(_held_bytes, caches))

        return to_json({"freed_bytes": await on_generation_thread(work)})

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(watch.metrics.exposition(), media_type=CONTENT_TYPE)

    @router.get("/cache")
    async def page() -> Response:
        content, headers = cache_page()
        return Response(content, headers=headers, media_type="text/html")

    @router.get("/cache/state")
    def state(model: str = "", seen: str = "", tree: bool = True) -> Response:
        return to_json(page_state(running, watch, model, seen, show_text=options.show_text, show_tree=tree))

    @router.get("/cache/tree")
    def tree(model: str | None = None, namespace: str | None = None) -> Response:
        for names, cache in reversed(running.caches()):
            if model in (None, title(names)):
                with suppress(CacheClosedError):
                    return Response(cache.view(namespace=namespace).to_json(), media_type="application/json")
        raise ApiError(404, "no such model has been served.", param="model")

    @router.post("/cache/explain")
    async def explain(body: PromptBody) -> Response:
        asked = body.asked(options)

        def work(models: Models) -> dict[str, Any]:
            loaded = models.loaded(asked.names)
            tokens = _given(body, loaded)
            prompt = Prompt(tokens, (), "") if tokens else loaded.prompt(asked)
            found = loaded.cache.explain(prompt.tokens, asked.namespace, keys=prompt.keys)
            return {**asdict(found), "cost": found.cost, "report": str(found)}

        return to_json(await on_generation_thread(work))

    @router.post("/cache/warm")
    async def warm(body: WarmBody) -> Response:
        asked = body.asked(options)

        def work(models: Models) -> dict[str, int]:
            loaded = models.loaded(asked.names)
            tokens: Any = _given(body, loaded)
            if any(border.image_parts(asked.messages)):
                raise ApiError(400, "a prompt with images cannot be warmed.", param="messages")
            if asked.messages:  # what conversations that go on from here have in common: not the reply's opening
                entry = WarmEntry("", asked.messages, asked.tools, asked.namespace, "messages")
                tokens = entry.tokens(loaded.tokenizer, options)
            elif not tokens:
                tokens = loaded.prompt(asked).tokens
            evaluated = loaded.warm(tokens, asked.namespace, name=body.name, ttl_requests=body.ttl_requests)
            return {"prompt_tokens": len(tokens), "evaluated_tokens": evaluated}

        return to_json(await on_generation_thread(work))

    @router.post("/cache/reclaim")
    async def reclaim(body: ReclaimBody) -> Response:
        return await evicted("reclaim", lambda caches: _reclaim(caches, body.target_bytes))

    @router.delete("/cache")
    async def clear() -> Response:
        return await evicted("clear", _clear)

    @router.post("/cache/check")
    async def check() -> Response:
        def work(models: Models) -> dict[str, Any]:
            for names, cache in running.caches():
                try:
                    cache.check()
                except AssertionError as error:
                    raise ApiError(500, f"{title(names)}: {error}") from error
            return {"active_bytes": mx.get_active_memory()}

        return to_json(await on_generation_thread(work))

    return router


def _given(body: PromptBody, loaded: ServedModel) -> list[int]:
    """Tokens of a body, all of which the model knows. ValueError: it does not."""
    if body.tokens:
        checked_prompt(body.tokens, None, (), vocabulary_size(loaded.model))
    return body.tokens or []


def _clear(caches: list[PrefixCache]) -> None:
    for cache in caches:
        cache.clear()


def _reclaim(caches: list[PrefixCache], target_bytes: int) -> None:
    """The caches of models that are not in memory give first."""
    for cache in caches:
        over_bytes = sum(map(_held_bytes, caches)) - target_bytes
        if over_bytes > 0:
            cache.reclaim(max(0, _held_bytes(cache) - over_bytes))


def _held_bytes(cache: PrefixCache) -> int:
    stats = cache.stats
    return stats.live_bytes + stats.paged_bytes
