"""OpenAI's API as mlx_lm.server has it: chats, text completions, models, health.

    ChatBody, CompletionBody    the checked body of a request; `request` makes a Request from it
    OpenAIReply                 the reply, whole or as server-sent events
    openai_routes               the routes

Names, defaults and replies match mlx_lm.server 0.32.2. Some fields accept narrower ranges (request.py). A field that is
`null` counts as missing. docs/serve-differences.md lists the differences.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from runner.engine.token import LikelyToken, Token
from runner.models.load import local_context_length
from runner.script.anthropic_blocks import ThinkingChoice
from runner.script.conversation import (
    SYSTEM,
    Checked,
    Many,
    as_parts,
    as_tool,
    in_present_form,
    reasoning_arguments,
    without_billing,
)
from runner.serve.mlx_lm_border import get_system_fingerprint
from runner.serve.options import ServeOptions
from runner.serve.request import (
    DEFAULT,
    MAX_MESSAGES,
    MAX_TOOLS,
    NO_MODEL,
    ApiError,
    Constraint,
    Count,
    ModelNames,
    Name,
    PrefillProgress,
    Request,
    Sampling,
    StopWord,
    Tokens,
    body_schema,
    check_body,
    short_name,
)
from runner.serve.service import (
    EVENTS,
    ServedReply,
    Service,
    merge_replies,
    namespace_of,
    read_json,
    server_sent_event,
    to_json,
)
from runner.serve.volatile import MOVES, behind_tools

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_CHOICES, MAX_REPLIES = 8, 64  # the largest `n` of a prompt; the most replies to one request
LEAST_LOGPROB = -9999.0  # written for the logarithm of 0, because JSON has no infinities
#: A repository with all these files has a model for mlx-lm. mlx_lm.server uses the same rule.
MODEL_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}

# Arguments that tokenizer.apply_chat_template uses itself. A request may not set them as variables of a template.
NOT_OF_TEMPLATES = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
))  # fmt: skip


def _template_args(arguments: dict[str, Any]) -> dict[str, Any]:
    if refused := sorted(NOT_OF_TEMPLATES.intersection(arguments)):
        raise ValueError(f"{refused[0]} cannot be set by a request")
    return arguments


def _require_name(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise ValueError("should be an object with a name")
    return function


def _require_count(logprobs: Any) -> Any:
    if not isinstance(logprobs, int) or not 0 <= logprobs <= 20:
        raise ValueError("wanted true, false, or 0 to 20 likeliest tokens")
    return logprobs


def _prompts(prompt: Any) -> Any:
    """Return a list of prompts; each is a text or a list of token ids. A single prompt may come without a list."""

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < 1 << 31

    def is_prompt(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(is_id, value)))

    prompts = prompt if isinstance(prompt, list) and not is_prompt(prompt) else [prompt]
    if not prompts or not all(map(is_prompt, prompts)):
        raise ValueError("wanted a text, token ids, or a list of texts or of lists of token ids")
    return prompts


def _words(stop: Any) -> Any:
    return [stop] * bool(stop) if isinstance(stop, str) else stop


StopWords = Annotated[
    Many[StopWord], Field(max_length=64), BeforeValidator(_words, json_schema_input_type=str | list[StopWord])
]

IDS = {"type": "array", "items": {"type": "integer"}}
PROMPTS = {"anyOf": [{"type": "string"}, IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, IDS]}}]}
COUNTED = {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 20}]}

# Messages and tools stay plain dicts: chat templates read all fields. _check_message and _check_function check them.
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TEXT = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
TEXTS = {"type": "array", "items": {**TEXT, "required": ["type", "text"]}}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "null"}, TEXTS]}
MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}, "content": CONTENT}, "required": ["role"]}
TOOL = {"type": "object", "properties": {"function": NAMED}, "required": ["function"]}
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
Tool = Annotated[dict[str, Any], WithJsonSchema(TOOL)]
Function = Annotated[dict[str, Any], AfterValidator(_require_name), WithJsonSchema(NAMED)]


class OpenAIBody(Sampling):
    """The fields that both bodies share."""

    model: Name = DEFAULT
    adapters: Name | None = None
    draft_model: Name | None = DEFAULT
    stream: bool = False
    stream_options: dict[str, bool] = Field(default_factory=dict)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: StopWords = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1

    @classmethod
    def read(cls, body: Mapping[str, Any], options: ServeOptions) -> Self:
        """Check a body; defaults come from `options`. ApiError: a field is missing or wrong."""
        names = ("num_draft_tokens", "max_tokens", "top_p", "top_k", "min_p")
        defaults = {"temperature": options.temp, **{name: getattr(options, name) for name in names}}
        defaults["move_volatile"] = options.move_volatile or MOVES.get()
        return check_body(cls, body, defaults)

    def request(self, namespace: str) -> Request:
        """Return the Request of this body. ApiError: a message or a tool is wrong."""
        most = self.max_completion_tokens or self.max_tokens
        _require(most is None or self.min_tokens <= most, "min_tokens", f"at most max_tokens, {most}")
        names = ModelNames(self.model, self.adapters, self.draft_model)
        sampling = Sampling.model_construct(**{name: getattr(self, name) for name in Sampling.model_fields})
        return Request(names, most, sampling=sampling, stop_words=self.stop, namespace=namespace)

    def requests(self, namespace: str) -> list[Request]:
        """Return a Request for each choice: `n` for each prompt. The Requests of one prompt differ in the seed."""
        first = self.request(namespace)
        seeds = [None if self.seed is None else (self.seed + index) % (1 << 64) for index in range(self.n)]
        samplings = [first.sampling.model_copy(update={"seed": seed}) for seed in seeds]
        return [replace(first, prompt=prompt, sampling=each) for prompt in self.prompts for each in samplings]

    @property
    def prompts(self) -> Sequence[Any]:
        return [None]


class CompletionBody(OpenAIBody):
    """The body of POST /v1/completions. An integer `logprobs` asks for so many top tokens."""

    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(PROMPTS)]
    logprobs: Annotated[Any, AfterValidator(_require_count), WithJsonSchema(COUNTED)] = False
    best_of: Count | None = None
    echo: bool = False
    suffix: Literal[""] = ""

    def request(self, namespace: str) -> Request:
        _require(self.best_of in (None, 1, self.n), "best_of", "1 or n: the server returns every choice")
        _require(len(self.prompt) * self.n <= MAX_REPLIES, "prompt", f"{MAX_REPLIES} replies at most, with n for each")
        _require(
            not self.echo or self.logprobs is not True, "echo", "false with logprobs true; give logprobs as a number"
        )
        request = replace(super().request(namespace), prompt=self.prompt[0], echo=self.echo)
        if not self.has_counted_logprobs:
            return request
        counted = {"logprobs": True, "top_logprobs": int(self.logprobs)}
        return replace(request, sampling=request.sampling.model_copy(update=counted))

    @property
    def prompts(self) -> Sequence[Any]:
        return list(self.prompt)

    @property
    def has_counted_logprobs(self) -> bool:
        return not isinstance(self.logprobs, bool)


class JsonSchema(Checked):
    """The schema that a reply's text must satisfy. Every schema is enforced, whatever `strict` says."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Checked):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class NamedFunction(Checked):
    name: str


class NamedChoice(Checked):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Checked):
    mode: Literal["auto", "required"]
    tools: Many[NamedChoice]


class AllowedChoice(Checked):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class PredictedText(Checked):
    type: Literal["text"]
    text: str


class Prediction(Checked):
    """The reply that the client expects, such as the file that it asks to edit. It only makes the reply faster."""

    type: Literal["content"]
    content: str | Many[PredictedText]

    @property
    def whole(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """The body of POST /v1/chat/completions. Older clients send `functions` instead of `tools`."""

    functions: Annotated[Many[Function], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    function_call: Literal["auto", "none"] | NamedFunction | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    role_mapping: dict[str, Annotated[str, Field(max_length=1000)]] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_args)] = Field(default_factory=dict)
    reasoning_effort: Annotated[str, Field(max_length=100)] | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingChoice | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["auto", "none", "required", "any"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    move_volatile: bool = False
    prediction: Prediction | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any], options: ServeOptions) -> Self:
        return super().read({**body, **_in_tools(body)}, options)

    @property
    def calls_functions(self) -> bool:
        """Whether replies write a call as `function_call`, the form for older clients."""
        return bool(self.functions) and [tool["function"] for tool in self.tools] == self.functions

    def request(
        self, namespace: str, *, format_field: str = "response_format", marked_texts: Sequence[tuple[int, int]] = ()
    ) -> Request:
        """Return the Request of this body. ApiError: a message or a tool is wrong.

        `marked_texts`: as in Request. `format_field`: the name of `response_format` in the client's body, for errors.
        """
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages.{index}")
        for index, tool in enumerate(self.tools):
            _check_function(tool, f"tools.{index}")
        messages = [*_without_billing(self.messages)]
        if self.move_volatile:
            messages, marked_texts = behind_tools(messages, marked_texts)
        reasoning = self.model_dump(include={"reasoning_effort", "enable_thinking", "thinking"})
        arguments = {**reasoning_arguments(reasoning), **self.chat_template_kwargs}
        constraint = self._constraint(format_field)
        _require(not self.min_tokens or constraint is None, "min_tokens", "0 where a format or a call is enforced")
        return replace(
            super().request(namespace),
            messages=messages,
            marked_texts=marked_texts,
            role_mapping=self.role_mapping,
            tools=self.tools or None,
            chat_template_kwargs=arguments or None,
            constraint=constraint,
            prediction="" if self.prediction is None else self.prediction.whole,
        )

    def _constraint(self, format_field: str) -> Constraint | None:
        """Return what the reply must be; None: anything. ApiError: a schema, a tool or a function is missing."""
        wanted = self.response_format
        schema = {"type": "object"} if wanted and wanted.type == "json_object" else None
        if wanted and wanted.type == "json_schema":
            _require(wanted.json_schema is not None, "response_format.json_schema", "an object with a schema")
            assert wanted.json_schema is not None
            schema = wanted.json_schema.schema_
        choice = self.tool_choice
        functions: tuple[str, ...] | None = None
        calls: Any = "required" if choice == "any" or isinstance(choice, NamedChoice) else choice
        if isinstance(choice, NamedChoice):
            functions = (choice.function.name,)
        elif isinstance(choice, AllowedChoice):
            functions = tuple(tool.function.name for tool in choice.allowed_tools.tools)
            calls = choice.allowed_tools.mode if functions else "none"
        names = {tool["function"]["name"] for tool in self.tools}
        _require(calls != "required" or bool(names), "tools", "a list of functions, as tool_choice asks for a call")
        _require(names.issuperset(functions or ()), "tool_choice", "the name of a function in tools")
        constraint = Constraint(
            schema,
            calls if names else "auto",
            functions,
            is_single=bool(names) and (not self.parallel_tool_calls or isinstance(choice, NamedChoice)),
            has_tools=bool(names),
            at=format_field,
        )
        return None if constraint == Constraint(has_tools=bool(names), at=format_field) else constraint


def _in_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `functions`, `function_call` and old messages. Return the fields that replace those of the body."""
    found: dict[str, Any] = {}
    if isinstance(messages := body.get("messages"), list):
        found["messages"] = [*map(in_present_form, messages)]
    functions, choice = body.get("functions"), body.get("function_call")
    if isinstance(functions, list) and functions and not body.get("tools"):
        found |= {"tools": [as_tool(each) for each in functions], "parallel_tool_calls": False}
        if choice is not None:
            found["tool_choice"] = as_tool(choice) if isinstance(choice, dict) else choice
    return found


def _without_billing(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages without billing lines in system texts. Skip a message that has no other text."""
    for message in messages:
        content = message.get("content")
        parts = as_parts(content)
        kept = without_billing(parts) if message["role"] in SYSTEM else parts
        if kept == parts:
            yield message
        elif kept:
            yield {**message, "content": kept if isinstance(content, list) else kept[0]["text"]}


def _check_message(message: dict[str, Any], at: str) -> None:
    _require(isinstance(message.get("role"), str), f"{at}.role", "a string")
    content, calls = message.get("content"), message.get("tool_calls")
    _require(content is None or isinstance(content, str | list), f"{at}.content", "a string or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        is_part = isinstance(part, dict) and isinstance(part.get("type"), str)
        _require(is_part, f"{at}.content.{index}", "an object with a type")
        has_text = part["type"] != "text" or isinstance(part.get("text"), str)
        _require(has_text, f"{at}.content.{index}.text", "a string")
    _require(calls is None or isinstance(calls, list), f"{at}.tool_calls", "a list")
    for index, call in enumerate(calls or ()):
        _check_function(call, f"{at}.tool_calls.{index}")


def _check_function(tool: Any, at: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _require(is_named, f"{at}.function", "an object with a name")
    arguments = function.get("arguments") if function else None
    _require(isinstance(arguments, str | dict | None), f"{at}.function.arguments", "a string of JSON")


def _require(holds: bool, param: str, wanted: str) -> None:
    if not holds:
        raise ApiError(400, f"{param} should be {wanted}.", param=param)


@dataclass
class ReplyChoice:
    """Writes one choice. `text`: the completion so far, for text offsets. `tokens`: the tokens of the next chunk."""

    index: int
    reply: ServedReply
    form: ReplyForm
    call_count: int = 0
    text: str = ""
    is_begun: bool = False
    tokens: list[Token] = field(default_factory=list)

    def whole(self, parts: Sequence[Token]) -> dict[str, Any]:
        said = join_parts(parts)
        choice: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason}
        choice |= self._logprobs([*self.reply.echoed, *parts])
        if self.form.is_chat:
            message = self._message(said, said.tool_calls) or {"content": ""}
            choice["message"] = {"role": "assistant", "content": None, **message}
        else:
            choice["text"] = self.reply.echo + said.text
        return choice

    def chunk(self, part: Token) -> dict[str, Any] | None:
        """Return the choice for the next chunk; None: there is nothing to send yet."""
        self.tokens.append(part)
        if not (self.reply.record or part.text or part.reasoning or part.tool_calls):
            return None
        calls = [{**call, "index": at} for at, call in enumerate(part.tool_calls, self.call_count)]
        self.call_count += len(calls)
        choice: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason}
        if self.form.is_chat:
            # Only the first chunk has the role: OpenAI's client joins equal fields of all chunks, even the role.
            said = self._message(part, calls)
            choice["delta"] = said if self.is_begun else {"role": "assistant", **(said or {"content": ""})}
        else:
            choice["text"] = part.text if self.is_begun else self.reply.echo + part.text
        choice |= self._logprobs(self.tokens if self.is_begun else [*self.reply.echoed, *self.tokens])
        self.is_begun = True
        self.tokens.clear()
        return choice

    @property
    def finish_reason(self) -> str | None:
        reply, called = self.reply, "function_call" if self.form.calls_functions else "tool_calls"
        return called if reply.has_tool_calls and reply.finish_reason == "stop" else reply.finish_reason

    def _message(self, said: Token, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a message. Some clients read `reasoning`, others `reasoning_content`."""
        reasoning = {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        called: dict[str, Any] = {"tool_calls": calls}
        if self.form.calls_functions:
            called = {"function_call": calls[0]["function"] if calls else None}
        return {name: value for name, value in {"content": said.text, **reasoning, **called}.items() if value}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        found = written_logprobs(tokens)
        if not found or not self.form.has_logprobs:
            return {}
        if not self.form.has_counted_logprobs:
            return {"logprobs": {"content": found}}
        texts = [each["token"] for each in found]
        starts = [*accumulate(map(len, texts[:-1]), initial=len(self.text))]
        self.text += "".join(texts)
        logprobs = [each["logprob"] for each in found]
        # Several tokens may have the same text, such as parts of characters. The likeliest of them counts.
        pairs = ([(top["token"], top["logprob"]) for top in reversed(each["top_logprobs"])] for each in found)
        tops: list[dict[str, float] | None] = [*map(dict, pairs)]
        if self.reply.echoed and not self.is_begun:
            logprobs[0] = tops[0] = None  # no token precedes the first one, so it has no probability
        return {"logprobs": {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": starts}}


@dataclass(frozen=True)
class ReplyForm:
    """What is the same in all chunks of a reply. `model`: as the request names it. `created_s`: seconds since 1970."""

    model: str
    fingerprint: str
    created_s: int
    is_chat: bool
    n: int = 1
    has_logprobs: bool = False
    has_counted_logprobs: bool = False
    include_usage: bool = False
    has_prediction: bool = False
    calls_functions: bool = False


class OpenAIReply:
    """Writes the reply to a request: `n` choices for each prompt."""

    def __init__(self, replies: Sequence[ServedReply], form: ReplyForm) -> None:
        self._replies, self._form = replies, form
        self._choices = [ReplyChoice(index, reply, form) for index, reply in enumerate(replies)]

    async def whole(self) -> dict[str, Any]:
        said: list[list[Token]] = [[] for _ in self._replies]
        async for index, part in merge_replies(self._replies):
            if isinstance(part, Token):
                said[index].append(part)
        choices = [choice.whole(parts) for choice, parts in zip(self._choices, said, strict=True)]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(), **self._timings()}

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events: comments during prefill, chunks, usage if wanted, an error if any, [DONE]."""
        try:
            async for index, part in merge_replies(self._replies):
                if isinstance(part, PrefillProgress):
                    yield f": keepalive {part.done_tokens}/{part.prompt_tokens}\n\n"
                elif choice := self._choices[index].chunk(part):
                    timings = self._timings() if choice["finish_reason"] else {}
                    yield server_sent_event({**self._head("chat.completion.chunk"), "choices": [choice], **timings})
            if self._form.include_usage:
                yield server_sent_event({**self._head("chat.completion"), "choices": [], "usage": self._usage()})
        except ApiError as error:
            error.rename("messages", "messages" if self._form.is_chat else "prompt")
            yield server_sent_event(error.in_openai_form())
        yield "data: [DONE]\n\n"

    def _head(self, chat_object: str) -> dict[str, Any]:
        form = self._form
        return {
            "id": f"{'chatcmpl' if form.is_chat else 'cmpl'}-{self._replies[0].id}",
            "system_fingerprint": form.fingerprint,
            "object": chat_object if form.is_chat else "text_completion",
            "model": form.model,
            "created": form.created_s,
        }

    def _timings(self) -> dict[str, Any]:
        record = self._replies[0].record
        return {"timings": record.timings} if record and len(self._replies) == 1 else {}

    def _usage(self) -> dict[str, Any]:
        """Count the tokens of each prompt once, even if the prompt has several choices."""
        records = [reply.record for reply in self._replies if reply.record]
        prompt = sum(reply.prompt_tokens for reply in self._replies[:: self._form.n])
        completion = sum(record.completion_tokens for record in records)
        cached = sum(record.cached_tokens for record in records[:: self._form.n])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        accepted, rejected = (
            sum(getattr(each, f"{how}_tokens") for each in records) for how in ("accepted", "rejected")
        )
        if accepted or rejected or self._form.has_prediction:
            named = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            usage["completion_tokens_details"] = named
        return usage


def join_parts(parts: Sequence[Token]) -> Token:
    """Join the text, the reasoning and the tool calls of the parts of a reply."""
    text, reasoning = ("".join(getattr(each, name) for each in parts) for name in ("text", "reasoning"))
    return Token(text, reasoning=reasoning, tool_calls=tuple(call for each in parts for call in each.tool_calls))


def written_logprobs(parts: Sequence[Token]) -> list[dict[str, Any]]:
    tokens = (each for each in parts if each.id is not None)
    return [{**_logprob(token), "top_logprobs": [*map(_logprob, token.top_tokens)]} for token in tokens]


def _logprob(token: Token | LikelyToken) -> dict[str, Any]:
    text, logprob = token.data.decode("utf-8", "replace"), 0.0 if token.logprob is None else token.logprob
    # In this order, max() also turns NaN into LEAST_LOGPROB.
    return {"id": token.id, "token": text, "bytes": [*token.data], "logprob": max(LEAST_LOGPROB, logprob)}


def model_object(name: str, created_s: int, context_tokens: int | None = None) -> dict[str, Any]:
    """Describe a model with the fields of OpenAI and of Anthropic. `max_model_len` is a field of vLLM."""
    openai = {"id": name, "object": "model", "created": created_s, "owned_by": "radixcache"}
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    length = {"max_model_len": context_tokens} if context_tokens else {}
    return {**openai, "type": "model", "display_name": name, "created_at": created_at, **length}


def list_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [model["id"] for model in models] or [None]
    return {"object": "list", "data": models, "first_id": names[0], "last_id": names[-1], "has_more": False}


def downloaded_models() -> list[str]:
    """List the models for mlx-lm in the local cache of the Hugging Face hub."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and "main" in repository.refs
        and MODEL_FILES.issubset(file.file_path.name for file in repository.refs["main"].files)
    )


def nameable_models(options: ServeOptions) -> Callable[[], list[str]]:
    """Return a function that lists the models that a request may name: the served one, with all names; downloaded ones.

    The function reads the local cache of the Hugging Face hub, which is slow.
    """
    # A tenant must not see the models that another tenant downloads later.
    at_start = downloaded_models() if options.namespace_by == "key" else None

    def nameable() -> list[str]:
        own = options.listed_names
        downloaded = [] if options.is_only_model else downloaded_models() if at_start is None else at_start
        return [*own, *(name for name in downloaded if name not in own)]

    return nameable


def openai_routes(service: Service, options: ServeOptions) -> APIRouter:
    router, nameable = APIRouter(), nameable_models(options)
    fingerprint: str = get_system_fingerprint()
    started_s = int(time.time())

    async def answer(http_request: HttpRequest, kind: type[OpenAIBody]) -> Response:
        created_s = int(time.time())

        def asked(given: dict[str, Any]) -> tuple[ReplyForm, list[Request], bool]:
            body = kind.read(given, options)
            requests = body.requests(namespace_of(http_request, given))
            form = ReplyForm(
                short_name(body.model),
                fingerprint,
                created_s,
                is_chat=requests[0].prompt is None,
                n=body.n,
                has_logprobs=requests[0].sampling.has_logprobs,
                has_counted_logprobs=isinstance(body, CompletionBody) and body.has_counted_logprobs,
                include_usage=body.stream_options.get("include_usage", False),
                has_prediction=isinstance(body, ChatBody) and body.prediction is not None,
                calls_functions=isinstance(body, ChatBody) and body.calls_functions,
            )
            return form, requests, body.stream

        form, requests, stream = await read_json(http_request, asked)
        return await service.answer(http_request, requests, lambda replies: OpenAIReply(replies, form), stream=stream)

    @router.post(CHAT, openapi_extra=body_schema(ChatBody, CHAT, stream=EVENTS))
    @router.post(CHAT.removeprefix("/v1"), openapi_extra=body_schema(ChatBody, CHAT, stream=EVENTS))
    async def chat_completions(request: HttpRequest) -> Response:
        return await answer(request, ChatBody)

    @router.post(COMPLETIONS, openapi_extra=body_schema(CompletionBody, COMPLETIONS, stream=EVENTS))
    async def completions(request: HttpRequest) -> Response:
        return await answer(request, CompletionBody)

    def describe(name: str) -> dict[str, Any]:
        spec = options.model if options.model and options.means_served(name) else name
        return model_object(name, started_s, options.context or local_context_length(spec))

    # The next two routes read files. They are plain functions, so FastAPI runs them on a thread.
    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        return list_models([describe(name) for name in nameable()])

    @router.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        if name not in nameable() and not options.means_served(name):
            raise ApiError(404, f"model {name!r:.200} is not served here.", param="model", code=NO_MODEL)
        return describe(name)

    @router.get("/health")
    async def health() -> Response:
        return to_json({"status": "ok"}) if service.backend.is_healthy else to_json({"status": "unavailable"}, 503)

    return router
