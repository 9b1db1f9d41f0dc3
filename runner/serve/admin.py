"""Admin: routes for metrics, the page at /cache and its data, the tree, and changes of the cache by an admin.

Routes that only read counters and trees run on another thread, at the same time as generation; so does rendering of
prompts. Routes that evaluate or evict run on the generation thread, between two rounds. The page at /cache holds no
data, so a browser may load it without a key. The script of the page sends the key in a header.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import mlx.core as mx
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import ConfigDict, Field

from radixcache import CacheStats, PrefixCache
from radixcache.errors import CacheClosedError, RadixCacheError
from radixcache.observe.page import content_policy, document, page_file, tree_data, tree_markup
from radixcache.observe.words import about_words, bytes_words, tokens_words, total_words
from radixcache.stores.block_store import StoreStats
from radixcache.tokens import checked_prompt, vocabulary_size
from runner.script.anthropic_blocks import is_anthropic
from runner.script.conversation import Checked, Many
from runner.serve.anthropic import AnthropicPromptBody
from runner.serve.metrics import CONTENT_TYPE, LISTED_REQUESTS, Watch, read_caches
from runner.serve.ollama import is_ollama, ollama_request
from runner.serve.openai import ChatBody, CompletionBody
from runner.serve.options import ServeOptions
from runner.serve.prompts import RenderedPrompt
from runner.serve.request import (
    DEFAULT,
    ApiError,
    Count,
    ModelNames,
    Name,
    Request,
    RequestRecord,
    body_schema,
    check_body,
)
from runner.serve.responses import ResponseMemory, ResponsesBody
from runner.serve.service import beside_loop, read_json, to_json
from runner.text import cut, plural

if TYPE_CHECKING:
    from runner.serve.models import Models
    from runner.serve.scheduler import Scheduler

T = TypeVar("T")

EXPLAIN, RECLAIM = "/cache/explain", "/cache/reclaim"
SHOWN_NODES = 2000  # the most nodes of a tree that the page shows; further nodes are only counted
#: Fields of a RequestRecord that the page shows as they are.
SHOWN_FIELDS = (
    "id", "namespace", "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms",
    "ttft_ms", "tokens_per_s", "outcome", "saved_s", "fork_words", "accepted_tokens", "rejected_tokens",
    "movable_tokens",
)  # fmt: skip


@functools.cache
def cache_page() -> tuple[str, dict[str, str]]:
    style, script = (page_file(f"page.{kind}") + page_file(f"page.{kind}", __package__) for kind in ("css", "js"))
    connect = "; connect-src 'self'"
    body = page_file("page.html", __package__) + tree_markup()
    policy = f"{content_policy(style, script)}{connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return document("radixcache", body, style, script, connect), {**headers, "Referrer-Policy": "no-referrer"}


def page_state(
    watched: Scheduler, watch: Watch, model: str, seen: str, *, show_text: bool, show_tree: bool = True
) -> dict[str, Any]:
    """The data of the page, as JSON values. Messages of errors may quote a prompt: only with `show_text`.

    The tree is that of `model` if it has a cache, else of the current model; None if its version is `seen`.
    """
    held = read_caches(watched, lambda cache: (cache, cache.stats))
    models = [title(names) for names, _ in held]
    index = models.index(model) if model in models else len(models) - 1
    return {
        "models": models,
        "model": models[index] if models else "",
        "stats": {
            name: {field: "+Inf" if value == math.inf else value for field, value in asdict(stats).items()}
            for name, (_, (_, stats)) in zip(models, held, strict=True)
        },
        "running": watched.running,
        "waiting": watched.waiting,
        "disk": stores_words(watched.store_stats(), sum(stats.brought_tokens for _, (_, stats) in held)),
        "points": [point._asdict() for point in watch.points()],
        "refused": [each._replace(reason=cut(each.reason) if show_text else "")._asdict() for each in watch.refusals()],
        "requests": [_row(time_s, record, show_text) for time_s, record in watch.last_requests()],
        "tree": _tree(models[index], *held[index][1], watched.running, seen) if models and show_tree else None,
    }


def stores_words(stores: Mapping[str, StoreStats], brought_tokens: int) -> list[str]:
    lines = [line for tier, stats in stores.items() for line in _store_words(tier, stats)]
    return [*lines, f"Since the start {tokens_words(brought_tokens)} were brought back."] if lines else []


def _store_words(tier: str, stats: StoreStats) -> list[str]:
    held = f"{plural(stats.blocks, 'block')} and {plural(stats.checkpoints, 'checkpoint')}"
    of = f" of {bytes_words(stats.budget_bytes)}" if stats.budget_bytes else ", as far as is known"
    lines = [
        f"{tier.capitalize()}: {held}, {bytes_words(stats.stored_bytes)}{of}.",
        f"Since the start: {bytes_words(stats.read_bytes)} read, {bytes_words(stats.written_bytes)} written, "
        f"{bytes_words(stats.evicted_bytes)} evicted. To be written: {bytes_words(stats.waiting_bytes)}.",
    ]
    files = {
        "damaged and removed": stats.damaged_files,
        "missing when they were read": stats.vanished_files,
        "could not be read": stats.read_errors,
    }
    dropped = {f"because {why}": blocks for why, blocks in sorted(stats.dropped.items())}
    failed = dict(sorted(stats.failed_calls.items()))
    for what, found in (("Files", files), ("Blocks that were not written", dropped), ("Calls that failed", failed)):
        if counts := [f"{count:,} {kind}" for kind, count in found.items() if count]:
            lines.append(f"{what}: {', '.join(counts)}.")
    if stats.stopped:
        lines.append(f"Nothing is written now: {stats.stopped}.")
    return lines


def title(names: ModelNames) -> str:
    draft = None if names.draft == DEFAULT else names.draft
    return " + ".join(name for name in (names.model, names.adapter, draft) if name)


def _tree(name: str, cache: PrefixCache, stats: CacheStats, running: int, seen: str) -> dict[str, Any] | None:
    version = f"{zlib.crc32(repr((name, stats, running)).encode()):08x}"
    if version == seen:
        return None
    view = cache.view()
    words = {"version": version, "totals": total_words(view), "about": about_words(view)}
    return {**words, **tree_data(view, SHOWN_NODES)}


def explanation_of(time_s: float, record: RequestRecord) -> dict[str, Any]:
    """What the cache had for a request when it came, as JSON values; with texts if the cache shows them."""
    found = record.explanation
    gaps = [] if found is None else found.gaps
    fork = None if found is None else found.fork
    return {
        "id": record.id, "time_s": time_s, "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens, "path": [] if found is None else list(found.path),
        "gaps": [{"start": gap.start, "end": gap.end, "reason": gap.reason, "words": str(gap)} for gap in gaps],
        "hints": [] if found is None else [str(hint) for hint in found.hints],
        "fork": None if fork is None else {
            "start": fork.start, "words": record.fork_words, "part": record.fork_part, "hint": record.fork_hint,
            "before": fork.before_text, "stored": fork.stored_text, "asked": fork.asked_text,
        },
    }  # fmt: skip


def _row(time_s: float, record: RequestRecord, show_text: bool) -> dict[str, Any]:
    note = cut(record.note) if record.note and (show_text or record.outcome != "error") else None
    about = {"time_s": time_s, "model": cut(title(record.names)), "short": record.short_tokens, "note": note}
    return {**about, **{name: getattr(record, name) for name in SHOWN_FIELDS}}


class ReclaimBody(Checked):
    model_config = ConfigDict(extra="forbid")

    #: The most bytes that all caches may hold together afterwards.
    target_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    #: Count and evict only state of this namespace.
    namespace: Name | None = None


class PromptBody(Checked):
    """A prompt in one of the fields tokens, prompt and messages. Other fields are those of OpenAI's routes."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str = DEFAULT
    tokens: Annotated[Many[Count], Field(min_length=1)] | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    namespace: Name = ""

    def request(self, options: ServeOptions) -> Request:
        """Return the Request of this body; with tokens, its prompt is empty. ApiError: a field is wrong."""
        if sum(given is not None for given in (self.tokens, self.prompt, self.messages)) != 1:
            raise ApiError(400, "wanted one of tokens, prompt and messages.")
        body = dict(self)  # model_dump would copy all messages
        if self.messages is not None:
            return ChatBody.read(body, options).request(self.namespace)
        return CompletionBody.read({**body, "prompt": self.prompt or ""}, options).request(self.namespace)


def request_to_explain(body: dict[str, Any], options: ServeOptions) -> tuple[Request, list[int]]:
    """The Request in a body of any API, and its tokens if the body has tokens, not text. ApiError: a field is wrong."""
    namespace = body.pop("namespace", None)
    if not isinstance(namespace, str | None):
        raise ApiError(400, "wanted a string.", param="namespace")
    namespace = namespace or ""
    if "input" in body:
        return check_body(ResponsesBody, body).request(options, namespace), []
    if is_ollama(body):
        return ollama_request(body, options, namespace), []
    if "messages" in body and is_anthropic(body):
        return AnthropicPromptBody.read(body).request(options, namespace), []
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        body["prompt"] = prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        body["tokens"] = body.pop("prompt")
    asked = check_body(PromptBody, {**body, "namespace": namespace})
    return asked.request(options), asked.tokens or []


class WarmBody(PromptBody):
    """POST /cache/warm: the prompt to prefill. With a name or a time it is pinned."""

    name: Annotated[Name, Field(min_length=1)] | None = None
    ttl_requests: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=2**31)] | None = None


async def _result_of(future: Future[T]) -> T:
    """The result of a call on another thread. ApiError: it raised an error of the cache (409) or a ValueError (400)."""
    try:
        return await asyncio.wrap_future(future)
    except RadixCacheError as error:
        raise ApiError(409, str(error)) from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error


async def _on_generation_thread(scheduler: Scheduler, work: Callable[[Models], dict[str, Any]]) -> Response:
    return to_json(await _result_of(scheduler.call(work)))


def cache_routes(scheduler: Scheduler, watch: Watch, options: ServeOptions, memory: ResponseMemory) -> APIRouter:
    """Return the routes. A body to explain may continue a conversation in `memory`; DELETE /cache clears it, too."""
    router = APIRouter()
    watch.attach(scheduler)

    async def evicted(cause: str, evict: Callable[[Models, list[PrefixCache]], object]) -> Response:
        def work(models: Models) -> dict[str, Any]:
            caches = [cache for _, cache in scheduler.caches()]
            before = sum(map(_held_bytes, caches))
            with watch.evicting(cause):
                evict(models, caches)
            return {"freed_bytes": before - sum(map(_held_bytes, caches))}

        return await _on_generation_thread(scheduler, work)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(watch.exposition(), media_type=CONTENT_TYPE)

    @router.get("/cache", response_class=HTMLResponse)
    async def page() -> Response:
        content, headers = cache_page()
        return Response(content, headers=headers, media_type="text/html")

    @router.get("/cache/state")
    def state(model: str = "", seen: str = "", tree: bool = True) -> Response:
        return to_json(page_state(scheduler, watch, model, seen, show_text=options.show_text, show_tree=tree))

    @router.get("/cache/tree")
    def tree(model: str | None = None, namespace: str | None = None) -> Response:
        for names, cache in reversed(scheduler.caches()):
            if model in (None, title(names)):
                with suppress(CacheClosedError):
                    return Response(cache.view(namespace=namespace).to_json(), media_type="application/json")
        raise ApiError(404, "no such model has been served.", param="model")

    @router.post("/cache/warm", openapi_extra=body_schema(WarmBody, "/cache/warm"))
    async def warm(http_request: HttpRequest) -> Response:
        def asked(given: dict[str, Any]) -> tuple[WarmBody, Request]:
            body = check_body(WarmBody, given)
            return body, body.request(options)

        body, request = await read_json(http_request, asked)
        made: Any = body.tokens
        if made is None:
            made = await _result_of(await _result_of(scheduler.call(lambda models: models.warming(request))))

        def work(models: Models) -> dict[str, Any]:
            loaded = models.loaded(request.names)
            if body.tokens is not None:
                if (length := len(body.tokens)) > (most := loaded.most_tokens):
                    raise ApiError(400, f"wanted at most {most} tokens, the context; found {length}.", param="tokens")
                checked_prompt(body.tokens, None, (), vocabulary_size(loaded.model))
            evaluated = loaded.warm(
                made, request.namespace, name=body.name, ttl_requests=body.ttl_requests, ttl_s=body.ttl_s
            )
            return {"prompt_tokens": len(made), "evaluated_tokens": evaluated}

        return await _on_generation_thread(scheduler, work)

    @router.post(RECLAIM, openapi_extra=body_schema(ReclaimBody, RECLAIM))
    async def reclaim(http_request: HttpRequest) -> Response:
        body = await read_json(http_request, functools.partial(check_body, ReclaimBody))
        return await evicted("reclaim", lambda models, caches: _reclaim(caches, body.target_bytes, body.namespace))

    @router.delete("/cache")
    async def clear(namespace: str | None = None) -> Response:
        def drop(models: Models, caches: list[PrefixCache]) -> None:
            for cache in caches:
                cache.clear(namespace)

        memory.clear(namespace)
        return await evicted("clear", drop)

    @router.post("/cache/check")
    async def check() -> Response:
        def work(models: Models) -> dict[str, Any]:
            for names, cache in scheduler.caches():
                try:
                    cache.check()
                except AssertionError as error:
                    raise ApiError(500, f"{title(names)}: {error}") from error
            return {"active_bytes": mx.get_active_memory()}

        return await _on_generation_thread(scheduler, work)

    router.include_router(_explain_routes(scheduler, watch, options, memory))
    return router


def _explain_routes(scheduler: Scheduler, watch: Watch, options: ServeOptions, memory: ResponseMemory) -> APIRouter:
    router = APIRouter()

    # The body is not read by FastAPI: clients that send a file as the body often give no content type.
    @router.post(EXPLAIN, openapi_extra=body_schema(PromptBody, EXPLAIN))
    async def explain(http_request: HttpRequest) -> Response:
        owner = str(getattr(getattr(http_request.state, "tenant", None), "name", ""))
        body = memory.join(await read_json(http_request, lambda given: given), owner)
        length = len(await http_request.body())
        request, tokens = await beside_loop(length, lambda: request_to_explain(body, options))
        made: RenderedPrompt | None = None
        if not tokens:
            asked = scheduler.call(lambda models: models.loaded(request.names).rendering(request))
            if (rendering := await asyncio.wrap_future(asked)) is not None:
                made = await scheduler.result_of(rendering)

        def work(models: Models) -> tuple[dict[str, Any], Future[tuple[str, str]] | None]:
            loaded = models.loaded(request.names)
            if tokens:
                checked_prompt(tokens, None, (), vocabulary_size(loaded.model))
            prompt = RenderedPrompt(tokens, (), "") if tokens else made or loaded.prompt(request)
            found = loaded.cache.explain(prompt.tokens, request.namespace, keys=prompt.keys)
            last = watch.last_with(prompt.keys or prompt.tokens, request.namespace)
            came = explanation_of(*last) if last else None

            part = None if found.fork is None else loaded.fork_part(request, prompt, found.fork.start)
            about = {**asdict(found), "cost": found.cost, "report": str(found), "as_it_came": came}
            del about["change"]  # `part` names it
            return about, part

        about, naming = await _result_of(scheduler.call(work))
        part, hint = ("", "") if naming is None else await scheduler.result_of(naming)
        return to_json({**about, "part": part, "part_hint": hint})

    @router.get("/cache/requests/{id}")
    def requested(id: str) -> Response:
        """What the cache had for one of the last requests when it came, and the path of its prompt now.

        `id` is the id in the reply or in the log, or the beginning of the id in the log.
        """
        id = re.sub(r"^(chatcmpl-|cmpl-|resp_|msg_)", "", id)
        caches = dict(scheduler.caches())
        for time_s, record in watch.last_requests():
            if id and record.id.startswith(id):
                path: Sequence[int] = ()
                if record.keys is not None and record.names in caches:
                    with suppress(CacheClosedError, ValueError):  # keys of images are no tokens
                        path = caches[record.names].explain(record.keys, record.namespace, keys=record.keys).path
                return to_json({**explanation_of(time_s, record), "path_now": path})
        raise ApiError(404, f"no request {cut(id)!r} among the last {LISTED_REQUESTS}.", param="id")

    return router


def _reclaim(caches: list[PrefixCache], target_bytes: int, namespace: str | None) -> None:
    """Evict until all caches together, or a namespace in each, hold `target_bytes`; unloaded models first."""
    for cache in caches:
        if namespace is not None:
            cache.reclaim(target_bytes, namespace)
        elif (over_bytes := sum(map(_held_bytes, caches)) - target_bytes) > 0:
            cache.reclaim(max(0, _held_bytes(cache) - over_bytes))


def _held_bytes(cache: PrefixCache) -> int:
    stats = cache.stats
    return stats.live_bytes + stats.paged_bytes
