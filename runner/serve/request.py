"""Requests of HTTP tasks to the generation thread, and the events that come back. Plain data: never imports MLX.

Seven types carry a request to the row of a batch and its reply back; docs/architecture.md has the list.

`OpenRequest` is a Request that is being served. The generation thread puts events into it; any thread may cancel it.
`cancel` sets a flag that the generation thread reads before each round (scheduler.py, served_model.py). The request
ends within one chunk of prefill or one decode step; its state is stored. The engine writes the figures of a request
into its RequestRecord, which comes with the last event.

This file also has the types and ranges of fields that several APIs share. Ranges exclude values that make logits
infinite, make sampling fail, or cost memory or time without bound.

  OR1  The last event of each request is its RequestRecord or an ApiError. Earlier events are neither.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from radixcache.errors import CacheFullError, RequestTooLargeError
from runner.engine.token import Completion, DoneReason, Token
from runner.script.conversation import Checked, first_finding

MAX_ECHO_CHARS = 200  # of a model's name in replies, because each chunk of a stream repeats the name
NOT_KEPT = " not kept"  # end of a namespace that only one request uses; the namespace is cleared after the request
DEFAULT = "default_model"  # stands for the model, adapter or draft model that the server was started with
#: The client of the current HTTP request: the name of the API key, or the client's address.
CLIENT: ContextVar[str] = ContextVar("client", default="")


MAX_MESSAGES = 10_000  # rendering takes time for each message
MAX_TOOLS = 4096
LEAST_TEMPERATURE = 1e-3  # below it, float16 cannot tell the likeliest token from the others
LEAST_REPETITION_PENALTY = 0.01  # below it, logits become infinite in float16; 0 is no penalty


def _repetition_penalty(penalty: float) -> float:
    if 0 < penalty < LEAST_REPETITION_PENALTY:
        raise ValueError(f"wanted 0, which is none, or at least {LEAST_REPETITION_PENALTY}")
    return penalty


Count = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=10_000)]
RepetitionPenalty = Annotated[float, Field(ge=0, le=100), AfterValidator(_repetition_penalty)]
Penalty = Annotated[float, Field(ge=-100, le=100)]  # subtracted from a logit for each time that a token occurred
#: Added to a logit: -10,000 bans a token and 10,000 forces it, and both are finite in float16.
Bias = Annotated[float, Field(ge=-10_000, le=10_000)]
TokenId = Annotated[int, Field(strict=False, ge=0, lt=2**31)]
#: Name of a model, a pin or a namespace, at most as long as a path may be: records of requests keep the name.
Name = Annotated[str, Field(max_length=4096)]
StopWord = Annotated[str, Field(min_length=1, max_length=1000)]


class Sampling(Checked):
    """How tokens are chosen. Requests and the bodies of OpenAI's API have these fields. mlx-lm reads them by name."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] = 3
    min_tokens: Count = 0
    temperature: Annotated[Temperature, AfterValidator(lambda each: each if each >= LEAST_TEMPERATURE else 0.0)] = 0.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    repetition_penalty: RepetitionPenalty = 0.0
    repetition_context_size: Count = 20
    presence_penalty: Penalty = 0.0
    presence_context_size: Count = 20
    frequency_penalty: Penalty = 0.0
    frequency_context_size: Count = 20
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] = -1
    #: None: all requests without a seed share one random state.
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the reply's tokens come with their log-probabilities."""
        return self.logprobs or self.top_logprobs > 0


@dataclass(frozen=True)
class ModelNames:
    model: str = DEFAULT
    adapter: str | None = None
    draft: str | None = DEFAULT


@dataclass(frozen=True)
class Constraint:
    """What a reply must be; see grammars.py.

    Attributes:
        schema: JSON schema of the text; None: any text.
        calls: whether the model may call tools, must not, or must.
        functions: names of the functions that may be called; None: all.
        is_single: a reply has one call at most.
        has_tools: the prompt has tools.
        at: the field that the schema comes from, for errors.
    """

    schema: Any = None
    calls: Literal["auto", "none", "required"] = "auto"
    functions: tuple[str, ...] | None = None
    is_single: bool = False
    has_tools: bool = False
    at: str = "response_format"


@dataclass(frozen=True)
class Request:
    """One reply to generate. All fields are checked, except where the check needs a tokenizer.

    Attributes:
        prompt: the prompt of a text completion, as text or token ids; None: this is a chat.
        echo: whether the prompt's text is wanted with the reply.
        max_tokens: maximum length of the reply; None: the reply may go on to the end of the context.
        messages: the messages of a chat, in OpenAI's form, which mlx-lm's chat templates read.
        marked_texts: where to take checkpoints inside messages: (index of the message, characters before the place).
        chat_template_kwargs: arguments of the chat template; they override those of the server.
        constraint: None: the reply may be anything.
        prediction: text that the client expects as the reply; "": none.
        client: the sender of the request, see CLIENT; clients take turns.
    """

    names: ModelNames
    max_tokens: int | None
    prompt: str | Sequence[int] | None = None
    echo: bool = False
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] | None = None
    role_mapping: Mapping[str, str] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    marked_texts: Sequence[tuple[int, int]] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stop_words: Sequence[str] = ()
    namespace: str = ""
    constraint: Constraint | None = None
    prediction: str = ""
    client: str = field(default_factory=CLIENT.get)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are wanted, too."""
        return self.echo and self.sampling.has_logprobs

    @property
    def is_kept(self) -> bool:
        """Whether the state of this request stays in the cache."""
        return not self.namespace.endswith(NOT_KEPT)

    def has_plain_calls(self, tokenizer: Any) -> bool:
        """Whether calls are forced and the model has no form for them."""
        is_forced = self.constraint is not None and self.constraint.calls == "required"
        return is_forced and not tokenizer.has_tool_calling


@dataclass(frozen=True)
class PrefillProgress:
    """How many tokens of a prompt are evaluated or restored. The first event comes when the prompt is tokenized.

    Attributes:
        new_reader: makes the ReplyReader; only the first event has it.
        echo: the prompt's text, if the request wants it; only the first event has it.
        echoed: the prompt's tokens, if the request wants their log-probabilities; the first token has none.
    """

    done_tokens: int
    prompt_tokens: int
    new_reader: Callable[[], Any] | None = None
    echo: str = ""
    echoed: tuple[Token, ...] = ()


@dataclass
class RequestRecord(Completion):
    """The facts about a request, for usage, log, metrics and web page. They are final when the request has ended.

    `explanation`: an Explanation of what the cache had on arrival. `fork_part`: the part of the prompt that differs
    from the stored path. `fork_hint`: what to do about it. `movable_tokens`: how many more tokens --move-volatile would
    reuse. The future `naming` sets these three. `keys`: the tree's keys of the prompt. `saved_s`: prefill time saved
    by the cache.
    """

    id: str
    names: ModelNames
    namespace: str
    explanation: Any = None
    fork_part: str = ""
    fork_hint: str = ""
    movable_tokens: int = 0
    naming: Future[None] | None = None
    keys: Any = None
    saved_s: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"naming": None}  # replicas send records to the server; a future cannot be sent

    @property
    def outcome(self) -> DoneReason:
        return self.done_reason or "cancelled"

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that became part of the reply."""
        return sum(each.accepted for each in self.drafted.values())

    @property
    def rejected_tokens(self) -> int:
        return sum(each.proposed for each in self.drafted.values()) - self.accepted_tokens

    @property
    def fork_words(self) -> str:
        """Say where the prompt left a stored path: "diverged at 1,458 of 20,987, in system message 0"; "": nowhere.

        Also "" if the request reused the tokens after that place from other rows.
        """
        fork = self.explanation and self.explanation.fork
        if not fork or fork.end <= self.cached_tokens:
            return ""
        where = f", in {self.fork_part}" if self.fork_part else ""
        return f"diverged at {fork.start:,} of {self.prompt_tokens:,}{where}"

    @property
    def short_tokens(self) -> dict[str, int]:
        """Count the evaluated tokens of the prompt by reason. The sum is the number of tokens that were not cached."""
        found: dict[str, int] = {}
        for gap in () if self.explanation is None else self.explanation.gaps:
            if gap.end > (start := max(gap.start, self.cached_tokens)):
                reason = gap.reason.value
                found[reason] = found.get(reason, 0) + gap.end - start
        lost_tokens = self.prompt_tokens - self.cached_tokens - sum(found.values())  # lost between arrival and start
        if lost_tokens > 0:
            reason = self.reason or "evicted"
            found[reason] = found.get(reason, 0) + lost_tokens
        return found

    @property
    def timings(self) -> dict[str, float]:
        """The figures that llama.cpp's server gives with a reply. `prompt_n`: the evaluated tokens of the prompt."""
        prompt_n, predicted_n = self.prompt_tokens - self.cached_tokens, self.completion_tokens
        prompt_ms, predicted_ms = self.prompt_ms or 0.0, self.completion_ms
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
            "prompt_per_second": prompt_n / prompt_ms * 1e3 if prompt_ms > 0 else 0.0,
            "predicted_n": predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / len(self.gaps_ms) if self.gaps_ms else 0.0,
            "predicted_per_second": self.tokens_per_s or 0.0,
        }

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed; None for fewer than two tokens."""
        total_ms = self.completion_ms
        return len(self.gaps_ms) / total_ms * 1e3 if total_ms else None


class OpenRequest:
    """A request that is being served. Any thread may call `put` with an event; `put` never blocks.

    `cancel` calls `on_cancel`, for backends without polling. `on_record` gets the final record before the last event.
    The generation thread sets `prompt`, `options` of the reply, and `is_alone`: no other request may run meanwhile.
    """

    pending: Future[Any] | None = None  # the prompt, or the grammar, that another thread makes
    prompt: Any = None  # a RenderedPrompt, once it is made
    options: Mapping[str, Any]
    is_alone = False
    failure: Exception | None = None  # the error that ends the reply
    is_over = False
    on_cancel: Callable[[], object] | None = None
    on_record: Callable[[RequestRecord], object] | None = None

    def __init__(self, request: Request, put: Callable[[ReplyEvent], None], id: str | None = None) -> None:
        self.request, self.put, self.id = request, put, id or str(uuid.uuid4())
        self.arrived_s = time.perf_counter()
        self.record = RequestRecord(self.id, request.names, request.namespace)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the request soon; its state is stored. Any thread may call this, even twice."""
        self._cancelled.set()
        if self.on_cancel is not None:
            self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_running(self) -> bool:
        return self.record.queue_ms is not None and not self.is_over

    def end(self, outcome: DoneReason, note: str | None = None, text: str = "") -> None:
        """Put the last text, then the record. Do nothing if the request has ended."""
        if not self.is_over:
            self._close(outcome, note)
            if text:
                self.put(Token(text))
            self.put(self.record)

    def fail(self, error: BaseException | None) -> None:
        """End with an error. But if a reply has begun and room for more tokens is lacking, end it as "length"."""
        note = None
        if isinstance(error, (RequestTooLargeError, CacheFullError)):
            if self.record.ttft_ms is not None:
                self.end("length", str(error))
                return
            prompt_tokens, why, note = self.record.prompt_tokens, "do not fit the cache", str(error)
            if isinstance(error, RequestTooLargeError):
                limit = "--max-request-bytes allows" if error.is_limit else "the device can spare"
                why = f"need {error.needed_bytes} bytes while they run; {limit} {error.available_bytes}"
            message, anthropic_message = (f"{start} {prompt_tokens} tokens {why}" for start in STARTS)
            error = ApiError(400, f"{message}.", code=TOO_LONG, anthropic_message=anthropic_message)
        elif not isinstance(error, ApiError):
            error = ApiError(500, f"{type(error).__name__}: {error}")
        if not self.is_over:
            error.message, error.record = " ".join(error.message.split()), self.record
            self._close("error", note or error.message)
            self.put(error.with_traceback(None))

    def _close(self, outcome: DoneReason, note: str | None) -> None:
        self.is_over, record = True, self.record
        record.done_reason, record.note = outcome, note
        record.tokens, record.error = (), None  # records are kept and sent, so drop these
        if self.on_record is not None:
            self.on_record(self.record)


class ApiError(Exception):
    """An error for the client, in the form of the client's API: a message of one line, and the wrong field as `param`.

    In Anthropic's form, `anthropic_message` replaces the message: clients recognize some errors by their words.
    An error that is the last event of a request has the record.
    """

    record: RequestRecord | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        anthropic_message: str | None = None,
    ) -> None:
        super().__init__(status, message)  # unpickling in another process calls __init__ with these
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s, self.anthropic_message = retry_after_s, anthropic_message

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of_length(cls, prompt_tokens: int, context_length: int, *, is_least: bool = False) -> ApiError:
        """Return the error for a prompt longer than the context. Its words tell agents to shorten the conversation.

        `is_least`: the prompt has `prompt_tokens` or more tokens; counting stopped there.
        """
        found = f"at least {prompt_tokens}" if is_least else f"{prompt_tokens}"
        openai = (
            f"This model's maximum context length is {context_length} tokens. "
            f"However, your messages resulted in {found} tokens. Please reduce the length of the messages."
        )
        anthropic = f"prompt is too long: {found} tokens > {context_length} maximum"
        return cls(400, openai, param="messages", code=TOO_LONG, anthropic_message=anthropic)

    def rename(self, field: str, name: str) -> None:
        """Replace `field` in `param` by `name`, the name of the field in the client's body."""
        if self.param and self.param.partition(".")[0] == field:
            self.param = name + self.param.removeprefix(field)

    def in_openai_form(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.full_message(), "type": kind, "param": self.param, "code": self.code}}

    def in_anthropic_form(self) -> dict[str, Any]:
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.anthropic_message or self.full_message()}}

    def in_ollama_form(self) -> dict[str, Any]:
        return {"error": self.full_message()}

    def full_message(self) -> str:
        """The message, with the name of the wrong field."""
        has_name = not self.param or re.search(rf"(?<!\w){re.escape(self.param)}(?!\w)", self.message)
        return self.message if has_name else f"{self.param}: {self.message}"

    @classmethod
    def of_validation(cls, errors: Sequence[Any]) -> ApiError:
        """Return an error for the first of pydantic's errors."""
        field, message = first_finding(errors)
        return cls(400, message, param=field or None)


ReplyEvent: TypeAlias = PrefillProgress | Token | RequestRecord | ApiError

STARTS = ("the prompt's", "prompt is too long:")  # of errors about long prompts, in OpenAI's and Anthropic's form
TOO_LONG, NO_MODEL = "context_length_exceeded", "model_not_found"
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def short_name(name: Any) -> Any:
    """Shorten a model's name from a request, for replies."""
    return name if not isinstance(name, str) or len(name) <= MAX_ECHO_CHARS else f"{name[:MAX_ECHO_CHARS]}..."


Body = TypeVar("Body", bound=BaseModel)
NULLABLE = ("draft_model",)  # fields in which null has a meaning: no draft model


def check_body(kind: type[Body], fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Body:
    """Check all fields of a body. A field that is `null` counts as missing. ApiError: a field is missing or wrong."""
    given = {name: value for name, value in fields.items() if value is not None or name in NULLABLE}
    try:
        return kind.model_validate({**(defaults or {}), **given})
    except ValidationError as error:
        raise ApiError.of_validation(error.errors()) from error


@cache
def body_schema(kind: type[BaseModel], path: str, *, stream: str | None = None) -> dict[str, Any]:
    """Return the OpenAPI entry of a route that reads its body itself. Optional fields may be `null`.

    `stream`: the media type of a streamed reply.
    """
    at = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=at + "/$defs/{model}")
    optional = schema["properties"].keys() - schema.get("required", ())
    schema["properties"] |= {name: {"anyOf": [schema["properties"][name], {"type": "null"}]} for name in optional}
    entry = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return entry if stream is None else {**entry, "responses": {"200": {"content": {stream: {}}}}}
