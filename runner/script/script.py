"""The requests of a replay as tokens: what every cache is given, the same for all of them.

Prompts come from the recorded conversations. Where a conversation has only its user's turns, the replies that the first
cache generates are put between them, once; later caches get the same prompts.

Invariants:

  SC1  A request is rendered once, so no two caches see different prompts.
  SC2  What cannot be replayed is found when the script is made, before any cache runs: a conversation that the template
      refuses, or a prompt that is too long. Replies still to come count with the most they can have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache import render_chat
from radixcache.tokens import common_length
from runner.models.load import LoadedModel, ModelOutline
from runner.script.schedule import GeneratedReplies, ScheduledRequest

# Stands for a reply that is not generated yet, where only the length of the prompt matters.
AWAITED_REPLY = "..."
# A generated token that is half a character comes back from its text as several tokens, each of one byte.
REENCODED_TOKENS = 4

Messages = Sequence[dict[str, Any]]


class ScriptError(Exception):
    """A request that cannot be replayed; the message says which and why, in one line."""


@dataclass(frozen=True)
class Prompt:
    """One rendered request.

    `tokens` has at least one id. `marks` are offsets worth keeping, as `render_chat` gives them; `system_end` is where
    the system prompt ends, 0 without one. `ends_with_user` tells whether the last message is a user's. `reply_tokens`
    says how much room to keep for the reply.
    """

    tokens: NDArray[np.int32]
    marks: tuple[int, ...]
    system_end: int
    ends_with_user: bool
    reply_tokens: int


@dataclass(frozen=True)
class RenderedRequest:
    """A scheduled request as tokens. `reply` is the recorded reply, empty when replies are generated."""

    user: str
    conversation_id: str
    turn: int
    prompt: Prompt
    reply: NDArray[np.int32]


class Script:
    """The rendered requests in order. `skipped_requests` says how many were left out."""

    def __init__(
        self,
        loaded: LoadedModel | ModelOutline,
        requests: Sequence[ScheduledRequest],
        *,
        max_tokens: int,
        recorded: bool = False,
        skip_bad: bool = False,
    ) -> None:
        """Render what can be rendered now and check the rest.

        Args:
            max_tokens: tokens generated per reply at most.
            recorded: replies are fed as recorded instead of generated.
            skip_bad: leave out what cannot be replayed instead of raising.

        Raises:
            ScriptError: the template refuses a conversation; prompt and reply do not fit the model's context; a reply
                that is to be fed was never recorded; or nothing is left.
        """
        self._loaded = loaded
        self._max_tokens = max_tokens
        self._recorded = recorded
        self._replies = GeneratedReplies()
        self._requests: list[ScheduledRequest] = []
        self._rendered: list[RenderedRequest | None] = []
        self._longest_tokens = 0
        for request in requests:
            try:
                rendered = self._prepare(request)
            except ScriptError:
                if not skip_bad:
                    raise
                continue
            self._requests.append(request)
            self._rendered.append(rendered)
        self.skipped_requests = len(requests) - len(self._requests)
        if not self._requests:
            raise ScriptError(f"nothing to replay: none of {len(requests)} requests can be given to {loaded.name}.")

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The requests that were kept, in order."""
        return tuple(self._requests)

    @property
    def longest_tokens(self) -> int:
        """Tokens that hardly a request comes to more of, its reply and those before it at their longest."""
        return self._longest_tokens

    def __getitem__(self, index: int) -> RenderedRequest:
        rendered = self._rendered[index]
        if rendered is None:
            request = self._requests[index]
            try:
                messages = self._replies.messages(request)
            except ValueError as error:
                raise ScriptError(str(error)) from error
            rendered = self._rendered[index] = self._render(request, messages)
        return rendered

    def record_reply(self, index: int, text: str) -> None:
        """Keep a generated reply for the prompts that wait for it."""
        if any(rendered is None for rendered in self._rendered):
            self._replies.record(self._requests[index], text)

    def _prepare(self, request: ScheduledRequest) -> RenderedRequest | None:
        """Render a request; None, after the checks, when it waits for generated replies."""
        awaited = [slot for slot in request.reply_slots if request.messages[slot]["role"] != "assistant"]
        if not awaited:
            return self._render(request, request.messages)
        if self._recorded:
            raise ScriptError(
                f"{request.where}: earlier replies were not recorded. Generate them: leave --recorded out."
            )
        filled = list(request.messages)
        for slot in reversed(awaited):
            filled.insert(slot, {"role": "assistant", "content": AWAITED_REPLY})
        self._render(request, filled, awaited_tokens=len(awaited) * self._max_tokens)
        return None

    def _render(self, request: ScheduledRequest, messages: Messages, awaited_tokens: int = 0) -> RenderedRequest:
        self._require_length(request, messages)
        try:
            tokens, marks = render_chat(self._loaded.tokenizer, messages, request.tools)
            system_end = self._system_end(request, messages, tokens)
            reply = recorded_reply(self._loaded.tokenizer, request, tokens) if self._recorded else np.empty(0, np.int32)
        except ValueError as error:
            raise ScriptError(f"{request.where}: {error}") from error
        reply_tokens = max(len(reply), 1) if self._recorded else self._max_tokens
        self._require_fit(request, len(tokens) + awaited_tokens, reply_tokens)
        longest = len(tokens) + REENCODED_TOKENS * awaited_tokens + reply_tokens
        limit = self._loaded.context_length
        self._longest_tokens = max(self._longest_tokens, longest if limit is None else min(longest, limit))
        prompt = Prompt(
            tokens=tokens,
            marks=marks,
            system_end=system_end,
            ends_with_user=messages[-1]["role"] == "user",
            reply_tokens=reply_tokens,
        )
        return RenderedRequest(request.user, request.conversation_id, request.turn, prompt, reply)

    def _system_end(self, request: ScheduledRequest, messages: Messages, tokens: NDArray[np.int32]) -> int:
        """Where the system prompt ends, as mlx-lm's server finds it: where an empty first question would begin."""
        first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if first == 0:
            return 0
        probe = [*messages[:first], {"role": "user", "content": ""}]
        shared, _ = render_chat(self._loaded.tokenizer, probe, request.tools, add_generation_prompt=False)
        end = common_length(shared, tokens)
        return end if end < len(shared) else 0

    def _require_length(self, request: ScheduledRequest, messages: Messages) -> None:
        """Refuse what cannot fit whatever its tokens are: to find out which they are may take minutes."""
        limit = self._loaded.context_length
        if limit is None:
            return
        length_chars = sum(len(content.strip()) for each in messages if isinstance(content := each.get("content"), str))
        least_tokens = length_chars // self._longest_token_chars
        if least_tokens > limit:
            raise ScriptError(
                f"{request.where}: {length_chars:,} characters are {least_tokens:,} tokens at least, and do not fit "
                f"the model's context of {limit:,}. Shorten it, or leave such requests out with --skip-bad."
            )

    @cached_property
    def _longest_token_chars(self) -> int:
        """No token stands for more characters of a text."""
        return max(map(len, self._loaded.tokenizer.get_vocab()))

    def _require_fit(self, request: ScheduledRequest, prompt_tokens: int, reply_tokens: int) -> None:
        limit = self._loaded.context_length
        if limit is not None and prompt_tokens + reply_tokens > limit:
            raise ScriptError(
                f"{request.where}: {prompt_tokens:,} prompt tokens and {reply_tokens:,} for the reply do not fit the "
                f"model's context of {limit:,} tokens. Shorten it, or leave such requests out with --skip-bad."
            )


def recorded_reply(tokenizer: Any, request: ScheduledRequest, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """The recorded reply as the next turn's prompt will spell it, behind this prompt; empty when there is none.

    Raises:
        ValueError: the template refuses it.
    """
    if request.recorded_reply is None:
        return np.empty(0, np.int32)
    tokens, marks = render_chat(
        tokenizer, [*request.messages, request.recorded_reply], request.tools, add_generation_prompt=False
    )
    end = marks[-1] if marks else 0
    if end > len(prompt) == common_length(tokens, prompt):
        return tokens[len(prompt) : end]
    # The template opens a reply otherwise than it writes one later, so the next turn parts here anyway.
    content = request.recorded_reply.get("content") or ""
    return np.array(tokenizer.encode(content, add_special_tokens=False), np.int32)
