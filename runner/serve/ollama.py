"""Ollama's API: bodies, their translation to OpenAI's form, replies, models, routes. Never imports MLX.

    OllamaChatBody, GenerateBody   the checked body of a request; becomes a body of OpenAI's API, then a Request
    OllamaReply                    the reply, whole or as lines of JSON
    ollama_routes                  POST /api/chat, /api/generate, /api/show; GET /api/tags, /api/ps, /api/version, /

`chat_messages` turns messages into OpenAI's form, which chat templates read:

    thinking               ->  reasoning_content
    tool_calls             ->  tool_calls with ids; most of Ollama's clients send no ids
    tool_name of a result  ->  name, and the id of the first call of this tool that has no result yet

Lists show a model with the tag `latest`; a request may leave the tag out. A body without messages or prompt loads the
model. A field that is `null` counts as missing. Options that the server does not know have no effect.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from radixcache import __version__
from runner.engine.token import Token
from runner.models.load import ModelError, ModelOutline, parameter_count, stored_folder
from runner.script.conversation import Checked, Many, null_as, tool_call
from runner.serve.models import outline_of
from runner.serve.openai import ChatBody, CompletionBody, StopWords, join_parts, nameable_models, written_logprobs
from runner.serve.options import ServeOptions
from runner.serve.reply_reader import read_arguments
from runner.serve.request import (
    DEFAULT,
    MAX_MESSAGES,
    NO_MODEL,
    ApiError,
    Constraint,
    ModelNames,
    Penalty,
    RepetitionPenalty,
    Request,
    Share,
    Temperature,
    body_schema,
    check_body,
    short_name,
)
from runner.serve.service import IDLE_S, ServedReply, Service, namespace_of, read_json, to_json

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
LINES = "application/x-ndjson"
#: The version of Ollama that this server reports. Clients refuse versions that are too old for them.
OLLAMA_VERSION = "0.12.11"
LATEST = ":latest"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # Ollama's names
MAX_CALLS = 1000  # calls of one message; each tool result searches all of them for its call
REPEAT_LAST_N = 64  # penalties look at so many last tokens; Ollama's default
#: Fields of a body and of its messages that no other API has.
OWN_FIELDS = frozenset(("context", "format", "keep_alive", "options", "raw", "template", "think"))
OWN_MESSAGE_FIELDS = frozenset(("images", "thinking", "tool_name"))


def _refuse_value(why: str) -> AfterValidator:
    """Refuse any value but an empty one."""

    def require_empty(value: Any) -> Any:
        if value:
            raise ValueError(why)
        return value

    return AfterValidator(require_empty)


def _whole(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _known_format(format: Any) -> Any:
    if isinstance(format, str) and format not in ("", "json"):
        raise ValueError("wanted json, or a schema as an object")
    return format


Images = Annotated[
    list[Any] | None, _refuse_value("this route takes no images; /v1/chat/completions and /v1/messages do")
]
#: Many clients write a whole number with a decimal point, such as 5.0.
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), lt=2**31)]


class OllamaOptions(Checked):
    """Options of a request. Options that are not listed here, such as num_ctx, have no effect."""

    num_predict: Annotated[Whole, Field(ge=-2)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopWords | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1)] | None = None

    def in_chats(self) -> dict[str, Any]:
        """Return the options as fields of ChatBody. A `num_predict` below 1 or a negative seed counts as missing."""
        last_n = REPEAT_LAST_N if self.repeat_last_n is None else self.repeat_last_n
        penalties = {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if last_n == 0:
            penalties = {}
        elif last_n < 0:
            last_n = 2**31 - 1
        sizes = [f"{kind}_context_size" for kind in ("repetition", "presence", "frequency")]
        return {
            **self.model_dump(include={"temperature", "top_p", "top_k", "min_p", "stop"}),
            **penalties,
            **dict.fromkeys(sizes, last_n),
            "max_tokens": self.num_predict if self.num_predict and self.num_predict > 0 else None,
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
        }


class CalledFunction(Checked):
    name: str
    arguments: Annotated[dict[str, Any], null_as({})] = Field(default_factory=dict)


class OllamaCall(Checked):
    id: str | None = None
    function: CalledFunction


class OllamaMessage(Checked):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[Many[OllamaCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def chat_messages(messages: Iterable[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Messages in OpenAI's form."""
    open_calls: dict[str, str] = {}  # names of the calls that have no result yet, by id
    call_count = 0
    for message in messages:
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            # Some templates take only ids of nine characters.
            calls = {call.id or f"{at:09d}": call.function for at, call in enumerate(message.tool_calls, call_count)}
            call_count += len(message.tool_calls)
            open_calls = {id: function.name for id, function in calls.items()}
            pairs = calls.items()
            made["tool_calls"] = [tool_call(id, each.name, json.dumps(each.arguments)) for id, each in pairs]
        if message.role == "tool":
            first = next(iter(open_calls), "")
            named = next((id for id, name in open_calls.items() if name == message.tool_name), first)
            made["tool_call_id"] = message.tool_call_id or named
            open_calls.pop(made["tool_call_id"], None)
            if message.tool_name:
                made["name"] = message.tool_name
        yield made


class OllamaBody(Checked):
    """The fields that both bodies share. Other fields go to the body of OpenAI's API: `tool_choice` and so on."""

    model_config = ConfigDict(extra="allow")

    model: str = DEFAULT
    stream: bool = True
    format: Annotated[str | dict[str, Any], AfterValidator(_known_format)] = ""
    options: OllamaOptions = OllamaOptions()
    think: bool | Annotated[str, Field(max_length=100)] | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @property
    def schema_of_reply(self) -> dict[str, Any] | None:
        if isinstance(self.format, dict):
            return self.format
        return {"type": "object"} if self.format else None

    def _fields(self, options: ServeOptions) -> dict[str, Any]:
        """Return the fields for a body of OpenAI's API, except messages and prompt."""
        return {
            **(self.model_extra or {}),
            **self.options.in_chats(),
            "model": own_name(self.model, options),
            "n": None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }

    def _chat_request(
        self, messages: Iterable[OllamaMessage], tools: Any, options: ServeOptions, namespace: str
    ) -> Request:
        schema, effort = self.schema_of_reply, self.think if isinstance(self.think, str) else None
        chat = {
            **self._fields(options),
            "messages": [*chat_messages(messages)],
            "tools": tools,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": {"schema": schema}},
            "reasoning_effort": effort,
            "thinking": self.think if effort is None else effort != "none",
        }
        return ChatBody.read(chat, options).request(namespace, format_field="format")


class OllamaChatBody(OllamaBody):
    """The body of POST /api/chat."""

    messages: Annotated[Many[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: list[Any] | None = None

    @property
    def is_load(self) -> bool:
        return not self.messages

    def request(self, options: ServeOptions, namespace: str) -> Request:
        return self._chat_request(self.messages, self.tools, options, namespace)


class GenerateBody(OllamaBody):
    """The body of POST /api/generate."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: Images = None
    suffix: Annotated[str, _refuse_value("the server only continues a text; it cannot fill in the middle")] = ""
    template: Annotated[str, _refuse_value("the model has its own chat template; with raw, a prompt needs none")] = ""
    context: Annotated[
        list[int] | None, _refuse_value("the server returns no context; send the earlier messages to /api/chat")
    ] = None

    @property
    def is_load(self) -> bool:
        return not self.prompt

    def request(self, options: ServeOptions, namespace: str) -> Request:
        if not self.raw:
            system = [OllamaMessage(role="system", content=self.system)] if self.system else []
            turn = OllamaMessage(role="user", content=self.prompt)
            return self._chat_request([*system, turn], None, options, namespace)
        if self.system:
            raise ApiError(400, "wanted none with raw: the prompt is taken as it is.", param="system")
        body = CompletionBody.read({**self._fields(options), "prompt": self.prompt}, options)
        schema = self.schema_of_reply
        constraint = None if schema is None else Constraint(schema, at="format")
        return replace(body.request(namespace), constraint=constraint)


def is_ollama(body: Mapping[str, Any]) -> bool:
    """Whether a body has fields that only Ollama's API has. Any other chat gives the same prompt in all APIs."""
    messages = body.get("messages")
    found = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    is_generate = "prompt" in body and "system" in body
    return (
        is_generate
        or not OWN_FIELDS.isdisjoint(body)
        or any(not OWN_MESSAGE_FIELDS.isdisjoint(message) for message in found)
    )


def ollama_request(body: Mapping[str, Any], options: ServeOptions, namespace: str) -> Request:
    """Make a Request from a body of either kind. ApiError: a field is wrong."""
    kind: type[OllamaChatBody | GenerateBody] = OllamaChatBody if "messages" in body else GenerateBody
    return check_body(kind, body).request(options, namespace)


def own_name(name: str, options: ServeOptions) -> str:
    """The name of a model without the tag that it has in lists."""
    return name if name in options.names else name.removesuffix(LATEST)


def _now() -> str:
    return _written_time(time.time())


def _written_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaReply:
    """Writes one reply. The last object has `done`, its reason, durations, and the number of cached tokens."""

    def __init__(
        self, reply: ServedReply, model: str, *, is_chat: bool, has_logprobs: bool = False, is_load: bool = False
    ) -> None:
        self._reply, self._model, self._is_chat = reply, model, is_chat
        self._has_logprobs, self._is_load = has_logprobs, is_load

    async def whole(self) -> dict[str, Any]:
        parts = [part async for part in self._reply if isinstance(part, Token)]
        if self._is_load:  # a load generates one token, which is not shown
            return {**self._object(), "done": True, "done_reason": "load"}
        return {**self._object(*parts), **self._end()}

    async def events(self) -> AsyncIterator[str]:
        """Yield lines of JSON. An error is the last line.

        During a long prefill, yield lines without text, because clients drop silent connections.
        """
        tokens: list[Token] = []
        told_s = time.monotonic()
        try:
            async for part in self._reply:
                if isinstance(part, Token):
                    tokens.append(part)
                    if not (part.text or part.reasoning or part.tool_calls):
                        continue
                    yield _line(self._object(*tokens))
                    tokens.clear()
                elif time.monotonic() - told_s >= IDLE_S:
                    yield _line(self._object())
                    told_s = time.monotonic()
            yield _line({**self._object(*tokens), **self._end()})
        except ApiError as error:
            yield _line(error.in_ollama_form())

    def _object(self, *parts: Token) -> dict[str, Any]:
        part = join_parts(parts)
        said: dict[str, Any] = {"role": "assistant", "content": part.text} if self._is_chat else {"response": part.text}
        if part.reasoning:
            said["thinking"] = part.reasoning
        if part.tool_calls:
            said["tool_calls"] = [*map(_call, part.tool_calls)]
        head = {"model": self._model, "created_at": _now(), **({"message": said} if self._is_chat else said)}
        logprobs = written_logprobs(parts) if self._has_logprobs else []
        return {**head, "done": False, **({"logprobs": logprobs} if logprobs else {})}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last object. `prompt_eval_count` counts cached tokens, too."""
        record = self._reply.record
        assert record is not None
        queue_ms, decode_ms = record.queue_ms or 0.0, sum(record.gaps_ms)
        ttft_ms = queue_ms if record.ttft_ms is None else record.ttft_ms
        return {
            "done": True,
            "done_reason": self._reply.finish_reason,
            "total_duration": _nanoseconds(ttft_ms + decode_ms),
            "load_duration": _nanoseconds(queue_ms),
            "prompt_eval_count": record.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(ttft_ms - queue_ms),
            "eval_count": record.completion_tokens,
            "eval_duration": _nanoseconds(decode_ms),
            "id": self._reply.id,
            "cached_tokens": record.cached_tokens,
            "timings": record.timings,
        }


def _line(part: Mapping[str, Any]) -> str:
    return json.dumps(part) + "\n"


def _nanoseconds(duration_ms: float) -> int:
    return round(duration_ms * 1e6)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments, _ = read_arguments(call["function"]["arguments"])
    return {"id": call["id"], "function": {"name": call["function"]["name"], "arguments": arguments}}


@lru_cache(256)
def _parameters(folder: Path, digest: str) -> int:
    """Count a model's parameters; 0: its files cannot be read. A new `digest` means changed files, so count again."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return parameter_count(folder)
    return 0


def listed_model(name: str, spec: str, started_at: str) -> dict[str, Any]:
    """Describe a model for a list, from its files on this machine. `started_at`: the date of a model without files."""
    folder = stored_folder(spec)
    weights = [] if folder is None else sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    stats = [file.stat() for file in weights]
    versions = [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(weights, stats, strict=True)]
    digest = sha256(repr((spec, versions)).encode()).hexdigest()
    config: Any = None
    with suppress(OSError, ValueError):
        config = None if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    count = 0 if folder is None else _parameters(folder, digest)
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _written_time(max(stat.st_mtime for stat in stats)) if stats else started_at,
        "size": sum(stat.st_size for stat in stats),
        "digest": digest,
        "details": model_details(config if isinstance(config, dict) else {}, count),
    }


def model_details(config: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    family = str(config.get("model_type", ""))
    quantization, dtype = config.get("quantization"), str(config.get("dtype") or config.get("torch_dtype"))
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    in_millions = f"{parameters / 1e6:.2f}M" if parameters else ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else in_millions,
        "quantization_level": f"{bits}bit" if bits else DTYPES.get(dtype, ""),
    }


def shown_model(listed: Mapping[str, Any], outline: ModelOutline, parameters: int) -> dict[str, Any]:
    """Return the reply to POST /api/show."""
    tokenizer, config = outline.tokenizer, {**outline.config, **(outline.config.get("text_config") or {})}
    family = str(outline.config.get("model_type", ""))
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    fields = {
        f"{family}.context_length": outline.context_length,
        f"{family}.embedding_length": config.get("hidden_size"),
        f"{family}.block_count": config.get("num_hidden_layers"),
        f"{family}.attention.head_count": config.get("num_attention_heads"),
        f"{family}.attention.head_count_kv": config.get("num_key_value_heads"),
        f"{family}.vocab_size": config.get("vocab_size"),
        "general.parameter_count": parameters or None,
    }
    has_thinking = tokenizer.has_thinking and "think" in template
    abilities = {"completion": True, "tools": tokenizer.has_tool_calling, "thinking": has_thinking}
    return {
        "modelfile": f"FROM {listed['name']}",
        "parameters": f"num_ctx {outline.context_length}" if outline.context_length else "",
        "template": template,
        "details": model_details(outline.config, parameters),
        "model_info": {
            "general.architecture": family,
            **{name: value for name, value in fields.items() if value is not None},
        },
        "capabilities": [name for name, is_able in abilities.items() if is_able],
        "modified_at": listed["modified_at"],
    }


class ShowBody(Checked):
    model: str = ""
    name: str = ""  # the name of `model` in older clients


def ollama_routes(service: Service, options: ServeOptions) -> APIRouter:
    router, nameable, started_at = APIRouter(), nameable_models(options), _now()
    shown: dict[tuple[str, str], dict[str, Any]] = {}  # by the model and the digest of its files

    def listed(names: Sequence[str]) -> list[dict[str, Any]]:
        specs = [options.model if name in options.names else name for name in names]
        return [listed_model(name, spec or name, started_at) for name, spec in zip(names, specs, strict=True)]

    def show(name: str) -> dict[str, Any]:
        is_served = options.means_served(name)
        spec = options.model if is_served else name
        if spec is None or not (is_served or name in nameable()):
            raise ApiError(404, f"model {name!r:.200} is not here.", param="model", code=NO_MODEL)
        found = listed_model(name, spec, started_at)
        key = spec, found["digest"]
        if key not in shown:
            folder = stored_folder(spec)
            try:
                outline = outline_of(spec if folder is None else str(folder), options)
            except ModelError as error:
                raise ApiError(404, str(error), param="model", code=NO_MODEL) from error
            shown[key] = shown_model(found, outline, 0 if folder is None else _parameters(folder, found["digest"]))
        return shown[key]

    async def answer(http_request: HttpRequest, kind: type[OllamaChatBody | GenerateBody]) -> Response:
        def read_body(given: dict[str, Any]) -> tuple[OllamaChatBody | GenerateBody, Request]:
            body = check_body(kind, given)
            if not body.is_load:
                return body, body.request(options, namespace_of(http_request, given))
            # The shortest request makes the server load the model, and leaves nothing in the cache.
            namespace = namespace_of(http_request, {"cache_prompt": False})
            return body, Request(ModelNames(own_name(body.model, options)), 1, prompt=[0], namespace=namespace)

        body, asked = await read_json(http_request, read_body)

        def writer(replies: Sequence[ServedReply]) -> OllamaReply:
            return OllamaReply(
                replies[0],
                short_name(body.model),
                is_chat=kind is OllamaChatBody,
                has_logprobs=body.logprobs or body.top_logprobs > 0,
                is_load=body.is_load,
            )

        is_streamed = body.stream and not body.is_load
        return await service.answer(http_request, [asked], writer, stream=is_streamed, media_type=LINES)

    @router.post(CHAT, openapi_extra=body_schema(OllamaChatBody, CHAT, stream=LINES))
    async def ollama_chat(request: HttpRequest) -> Response:
        return await answer(request, OllamaChatBody)

    @router.post(GENERATE, openapi_extra=body_schema(GenerateBody, GENERATE, stream=LINES))
    async def generate(request: HttpRequest) -> Response:
        return await answer(request, GenerateBody)

    @router.post(SHOW, openapi_extra=body_schema(ShowBody, SHOW))
    async def show_model(request: HttpRequest) -> Response:
        body = await read_json(request, partial(check_body, ShowBody))
        return to_json(await asyncio.to_thread(show, own_name(body.model or body.name, options)))

    # The next two routes read files. They are plain functions, so FastAPI runs them on a thread.
    @router.head("/api/tags", include_in_schema=False)
    @router.get("/api/tags")
    def tags() -> Response:
        return to_json({"models": listed(nameable())})

    @router.get("/api/ps")
    def running() -> Response:
        """List only the model that the server was started with. Other models in memory may belong to other tenants."""
        return to_json({"models": [{**each, "size_vram": each["size"]} for each in listed(options.listed_names)]})

    @router.head("/api/version", include_in_schema=False)
    @router.get("/api/version")
    async def version() -> Response:
        return to_json({"version": OLLAMA_VERSION, "radixcache": __version__})

    @router.head("/", include_in_schema=False)
    @router.get("/", response_class=PlainTextResponse)
    async def root() -> Response:
        return Response("Ollama is running: radixcache answers for it.\n", media_type="text/plain")

    return router
