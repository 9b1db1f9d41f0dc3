"""What comes out of a ParallelGenerator: tokens as they are sampled, and what is known of a request. Never imports MLX.

`Token` and `Completion` are the only types of a reply: the engine makes them, the server adds to them, the APIs write
them to the socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from radixcache.speculate.drafting import Drafted

FinishReason = Literal["stop", "length"]
DoneReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(kw_only=True)
class Completion:
    """What is known of a request. Final once `done_reason` is set, which is when callers get it.

    Attributes:
        prompt_tokens: of the whole prompt.
        matched_tokens, cached_tokens, reason: what the cache had of the prompt, as for a Session; 0 and None before
            admission.
        drafted: by source, how many tokens were proposed and accepted so far.
        queue_ms: from arrival to admission; None before it.
        ttft_ms: from arrival to the first token: lookup, page-in and `prompt_ms`; None without one.
        gaps_ms: from each token to the next.
        shifted_tokens: taken out of the full context during the reply.
        omitted_tokens: of the prompt, left out before prefill because the conversation exceeds the context.
        tokens: all sampled tokens, with a stop token.
        note: why the reply is shorter than requested, if `done_reason` does not say it.
        error: the exception, if `done_reason` is "error".
    """

    prompt_tokens: int = 0
    matched_tokens: int = 0
    cached_tokens: int = 0
    reason: str | None = None
    drafted: Mapping[str, Drafted] = field(default_factory=dict)
    queue_ms: float | None = None
    ttft_ms: float | None = None
    gaps_ms: Sequence[float] = ()
    shifted_tokens: int = 0
    omitted_tokens: int = 0
    completion_tokens: int = 0
    tokens: Sequence[int] = ()
    done_reason: DoneReason | None = None
    note: str | None = None
    error: Exception | None = None

    @property
    def prompt_ms(self) -> float | None:
        """From the start of prefill to the first token; None without one."""
        return None if self.ttft_ms is None else self.ttft_ms - (self.queue_ms or 0.0)

    @property
    def completion_ms(self) -> float:
        """From the first token to the last."""
        return sum(self.gaps_ms)


class LikelyToken(NamedTuple):
    """A token that could have been sampled; `data` is its text in UTF-8, which may be a part of a character."""

    id: int
    data: bytes
    logprob: float


class Token(NamedTuple):
    """One token of a reply, with the text that it completes; the last one carries the completion.

    An unfinished character, and text that may be the beginning of a stop word, come with a later token. A stop token
    has no text. The last one of a cancelled or failed request may have no `id`.

    Attributes:
        logprob: the token's own, if known.
        top_tokens, data: the likeliest tokens, and the token's own text in UTF-8; the server adds them if a request
            asks for log-probabilities.
        finish_reason: why the reply ends here.
        stop_word: the one that ended the reply.
        reasoning, tool_calls: what the server's ReplyReader has told apart from `text`; calls are in OpenAI's form.
        logprobs: of all tokens (V,), float32, if wanted.
    """

    text: str
    id: int | None = None
    logprob: float | None = None
    top_tokens: tuple[LikelyToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_word: str | None = None
    data: bytes = b""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    logprobs: Any = None
    completion: Completion | None = None

    @property
    def token(self) -> int | None:
        """The same as `id`."""
        return self.id
