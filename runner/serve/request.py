"""What HTTP tasks ask of the generation thread, and what it answers. Plain data: this file never imports MLX.

    HTTP task                             generation thread
    Request in a OpenRequest        ── ask ──▶      prompt tokens, a row or a session
    Mailbox               ◀── put ──      Started, Progress ..., Token ..., Ended    or Failed at any time
    OpenRequest.cancel()          ────────▶       ends within one chunk of prefill or one step of decoding

A OpenRequest gets exactly one Ended or Failed, as its last answer, whatever happens.

ApiError: what is wrong with a request, before anything of a reply was sent.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

#: What stands for the model, adapter or draft model that the server was started with.
DEFAULT = "default_model"


@dataclass(frozen=True)
class ModelNames:
    """Which weights a request wants, in mlx_lm.server's words."""

    model: str = DEFAULT
    adapter: str | None = None
    draft: str | None = DEFAULT


@dataclass(frozen=True)
class Sampling:
    """Arguments of mlx_lm.sample_utils.make_sampler."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True)
class Penalties:
    """Arguments of mlx_lm.sample_utils.make_logits_processors."""

    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20


@dataclass(frozen=True)
class Request:
    """One reply that is asked for, checked as far as can be without a tokenizer.

    Attributes:
        prompt: of a text completion; None: a chat.
        messages: of a chat, in OpenAI's form, as mlx-lm's chat templates take them.
        marked_texts: where in a message a checkpoint is asked for besides its end: its index, and how many characters
            of its content lie before.
        seed: None: the samples of all such replies come from one stream.
        namespace: nothing is shared between two of them.
    """

    names: ModelNames
    max_tokens: int
    prompt: str | None = None
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] | None = None
    role_mapping: Mapping[str, str] | None = None
    template_args: Mapping[str, Any] | None = None
    marked_texts: Sequence[tuple[int, int]] = ()
    sampling: Sampling = Sampling()
    penalties: Penalties = Penalties()
    stop_words: Sequence[str] = ()
    num_draft_tokens: int = 3
    logprobs: bool = False
    top_logprobs: int = -1
    seed: int | None = None
    namespace: str = ""


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class TopToken:
    """One of the likeliest tokens at a place."""

    id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class Started:
    """The prompt is in tokens, and the request waits for its turn or runs.

    `reading` turns what is decoded into text, reasoning and tool calls; see `runner.serve.reply_reader`.
    """

    prompt_tokens: int
    reading: Any


@dataclass(frozen=True)
class PrefillProgress:
    """So many of the prompt's tokens are evaluated or restored."""

    done_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Token:
    """One sampled token. `text` is what it completes; a stop token brings none.

    `stop_word` is the one of `Request.stop_words` that it completes; None for any other token, an end of turn too.
    """

    text: str
    id: int
    logprob: float
    top_tokens: tuple[TopToken, ...]
    finish_reason: FinishReason | None
    stop_word: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """What a request came to: for its reply's usage, the log line, the metrics and the page.

    Attributes:
        matched_tokens: how many of the prompt's first tokens the cache had seen; more than `cached_tokens` if some of
            the state was lost. `reason` says why.
        shortfalls: what the cache lacked of the prompt on arrival, [start, end) and a Reason of PrefixCache.explain.
        queue_ms: from arrival to admission; None where it never was. `ttft_ms`: from arrival to the first token.
        gaps_ms: between one token and the next.
        outcome: how it ended.
    """

    id: str
    names: ModelNames
    namespace: str
    prompt_tokens: int
    cached_tokens: int
    matched_tokens: int
    reason: str | None
    completion_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    gaps_ms: tuple[float, ...]
    outcome: Literal["stop", "length", "cancelled", "error"]
    note: str | None = None
    shortfalls: tuple[tuple[int, int, str], ...] = ()

    @property
    def short_tokens(self) -> dict[str, int]:
        """How many of the prompt's tokens were evaluated, by why; the sum is all but the cached ones."""
        found: dict[str, int] = {}
        for start, end, reason in self.shortfalls:
            if end > (start := max(start, self.cached_tokens)):
                found[reason] = found.get(reason, 0) + end - start
        gone = self.prompt_tokens - self.cached_tokens - sum(found.values())  # between arrival and admission
        if gone > 0:
            reason = self.reason or "evicted"
            found[reason] = found.get(reason, 0) + gone
        return found

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding; None for fewer than two tokens."""
        total_ms = sum(self.gaps_ms)
        return len(self.gaps_ms) / total_ms * 1e3 if total_ms else None


@dataclass(frozen=True)
class Ended:
    """The reply is over."""

    record: RequestRecord


@dataclass(frozen=True)
class Failed:
    """There will be no reply, or no more of it. `status` is HTTP's; `message` is for whoever asked."""

    status: int
    message: str
    record: RequestRecord | None = None
    retry_after_s: int | None = None


ReplyEvent: TypeAlias = Started | PrefillProgress | Token | Ended | Failed


@dataclass(eq=False)
class OpenRequest:
    """A request on its way. `put` may be called by any thread and never blocks.

    `on_cancel` is for whoever answers it elsewhere than on a generation thread, which looks at `is_cancelled`.
    """

    request: Request
    put: Callable[[ReplyEvent], None]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    arrived_s: float = field(default_factory=time.perf_counter)
    on_cancel: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End it soon; what was computed is kept. Any thread may call this, any number of times."""
        self._cancelled.set()
        if self.on_cancel is not None:
            self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to end."""
        return self._cancelled.is_set()


class ApiError(Exception):
    """Becomes an error body in the form of the API that was asked.

    Args:
        status: HTTP's, 4xx or 5xx.
        message: one line for whoever asked: what was found, what was wanted.
        kind: OpenAI's `type`; by default it follows from the status.
        param: the field that is wrong.
        retry_after_s: becomes the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = retry_after_s

    def in_openai_form(self) -> dict[str, Any]:
        """The body of an error, or the data of a stream's last event, in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def in_anthropic_form(self) -> dict[str, Any]:
        """The same in Anthropic's form, which has types of its own and names the field in the message."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = f"{self.param}: {self.message}" if self.param else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}

    @classmethod
    def of_validation(cls, errors: Sequence[Any]) -> ApiError:
        """The first of pydantic's findings about a request, naming the field."""
        first = errors[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return cls(400, first["msg"].removeprefix("Value error, "), param=field or None)


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
