"""The requests of a replay as tokens, the same for every cache.

If a conversation has only its user's turns, the replies that the first cache generates are put between them, once.

Invariants:

  SC1  A request is rendered once, so no two caches see different prompts.
  SC2  A conversation that the template refuses, or a prompt that is too long, is found when the script is made, before
       any cache runs. Replies that are not generated yet count with `max_tokens`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache import render_chat
from radixcache.chat import RenderedChat
from radixcache.chat_template import BREAK, ChatTemplate, common_rendering
from radixcache.tokens import common_length, token_text
from runner.models.load import LoadedModel, ModelOutline
from runner.script.conversation import Conversation
from runner.script.schedule import GeneratedReplies, ScheduledRequest

SHORTEN = "Shorten the prompt, or leave such requests out with --skip-bad."
AWAITED_REPLY = "..."  # stands for a reply that is not generated yet
# A generated token that is half a character becomes several tokens when its text is tokenized again.
REENCODED_TOKENS = 4

Messages = Sequence[dict[str, Any]]


class ScriptError(Exception):
    """A request cannot be replayed. The message is one line: which request, and why."""


@dataclass(frozen=True)
class Prompt:
    """One rendered request; `marks` are as `render_chat` gives them."""

    tokens: NDArray[np.int32]
    marks: tuple[int, ...]
    system_end: int  # 0: there is no system prompt
    ends_with_user: bool
    reply_tokens: int  # to reserve room for


@dataclass(frozen=True)
class RenderedRequest:
    """A scheduled request as tokens. `reply` is the recorded reply, empty when replies are generated."""

    scheduled: ScheduledRequest
    prompt: Prompt
    reply: NDArray[np.int32]


class Script:
    """The rendered requests in order. `longest_tokens` is an estimate of the longest prompt with its reply."""

    def __init__(
        self,
        loaded: LoadedModel | ModelOutline,
        requests: Sequence[ScheduledRequest],
        *,
        max_tokens: int,
        recorded: bool = False,
        skip_bad: bool = False,
    ) -> None:
        """Render the requests, with placeholders for replies to come. ScriptError: a request cannot be replayed.

        Replies have `max_tokens` at most, or are fed as `recorded`. With `skip_bad`, requests that cannot be replayed
        are left out; ScriptError only if none is left.
        """
        self._loaded, self._max_tokens, self._recorded = loaded, max_tokens, recorded
        self._replies = GeneratedReplies()
        self._rendered: list[RenderedRequest] = []
        self._waiting: set[int] = set()  # indices of requests with placeholders
        self._longest_token_chars = 0  # 0: not known
        self.longest_tokens = 0
        for request in requests:
            try:
                messages: Messages = request.messages
                if not request.conversation.replies_recorded:
                    messages = self._replies.messages(request, AWAITED_REPLY)
                awaited = len(messages) - len(request.messages)
                if awaited and recorded:
                    error = "earlier replies were not recorded. Generate them: leave --recorded out."
                    raise ScriptError(f"{request.where}: {error}")
                rendered = self._render(request, messages, awaited_tokens=awaited * max_tokens)
            except ScriptError:
                if not skip_bad:
                    raise
                continue
            if awaited:
                self._waiting.add(len(self._rendered))
            self._rendered.append(rendered)
        self.requests = tuple(each.scheduled for each in self._rendered)
        self.skipped_requests = len(requests) - len(self.requests)
        if not self.requests:
            raise ScriptError(f"nothing to replay: none of {len(requests)} requests fits {loaded.name}.")

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> RenderedRequest:
        if index in self._waiting:
            request = self.requests[index]
            try:
                messages = self._replies.messages(request)
            except ValueError as error:
                raise ScriptError(str(error)) from error
            self._rendered[index] = self._render(request, messages)
            self._waiting.remove(index)
        return self._rendered[index]

    def record_reply(self, index: int, text: str) -> None:
        """Store a generated reply for the prompts with a placeholder for it."""
        if self._waiting:
            self._replies.record(self.requests[index], text)

    def _render(self, request: ScheduledRequest, messages: Messages, awaited_tokens: int = 0) -> RenderedRequest:
        self._require_length(request, messages)
        conversation = request.conversation
        try:
            tokens, marks = render_chat(self._loaded.tokenizer, messages, conversation.tools, **conversation.arguments)
            system_end = self._system_end(conversation, messages, tokens)
            reply = recorded_reply(self._loaded.tokenizer, request, tokens) if self._recorded else np.empty(0, np.int32)
        except ValueError as error:
            raise ScriptError(f"{request.where}: {error}") from error
        reply_tokens = max(len(reply), 1) if self._recorded else self._max_tokens
        prompt_tokens, limit = len(tokens) + awaited_tokens, self._loaded.context_length
        if limit is not None and prompt_tokens + reply_tokens > limit:
            raise ScriptError(
                f"{request.where}: {prompt_tokens:,} prompt tokens and {reply_tokens:,} for the reply do not fit the "
                f"model's context of {limit:,} tokens. {SHORTEN}"
            )
        longest = len(tokens) + REENCODED_TOKENS * awaited_tokens + reply_tokens
        self.longest_tokens = max(self.longest_tokens, longest if limit is None else min(longest, limit))
        prompt = Prompt(tokens, marks, system_end, messages[-1]["role"] == "user", reply_tokens)
        return RenderedRequest(request, prompt, reply)

    def _system_end(self, conversation: Conversation, messages: Messages, tokens: NDArray[np.int32]) -> int:
        """The end of the system prompt, as mlx-lm's server finds it: the start of an empty first question."""
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        if not system:
            return 0
        probe = [*system, {"role": "user", "content": ""}]
        arguments = {**conversation.arguments, "add_generation_prompt": False}
        shared, _ = render_chat(self._loaded.tokenizer, probe, conversation.tools, **arguments)
        end = common_length(shared, tokens)
        return end if end < len(shared) else 0

    def _require_length(self, request: ScheduledRequest, messages: Messages) -> None:
        """Refuse a text that is too long however it is tokenized, which might take minutes."""
        limit = self._loaded.context_length
        if limit is None:
            return
        length_chars = sum(len(content.strip()) for each in messages if isinstance(content := each.get("content"), str))
        self._longest_token_chars = self._longest_token_chars or max(map(len, self._loaded.tokenizer.get_vocab()))
        least_tokens = length_chars // self._longest_token_chars
        if least_tokens > limit:
            raise ScriptError(
                f"{request.where}: {length_chars:,} characters are at least {least_tokens:,} tokens; the context of "
                f"the model has {limit:,}. {SHORTEN}"
            )


def recorded_reply(tokenizer: Any, request: ScheduledRequest, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """The recorded reply, if any, as the model wrote it, in tokens. ValueError: the template refuses it.

    A last reply is rendered with all that it says, but some templates add an empty pair of thinking tags to it. So the
    next turn's prompt spells the reply, unless this prompt leaves out some of it.
    """
    reply = request.recorded_reply
    if reply is None:
        return np.empty(0, np.int32)
    template = ChatTemplate(tokenizer, request.conversation.tools, dict(request.conversation.arguments))
    last = RenderedChat(template, [*request.messages, reply], "message")
    with suppress(ValueError):  # the template refuses the next message
        following = request.conversation.messages[request.end + 1 :][:1] or (_answer_to(reply),)
        later = RenderedChat(template, [*request.messages, reply, *following], "reply")
        said = [each.strip() for key in ("reasoning_content", "content") if (each := reply.get(key))]
        # Tokenizing takes long, so what the rendering leaves out is looked up in its text first.
        text = later.rendering.replace(BREAK, "") if isinstance(later.rendering, str) else "".join(said)
        is_rewritten = common_rendering(last.rendering, later.rendering) < len(last.rendering)
        if is_rewritten and all(each in text for each in said) and len(found := _spelling(later, request.end, prompt)):
            text = token_text(found.tolist(), tokenizer)
            if all(each in text for each in said):
                return found
    if len(spelled := _spelling(last, request.end, prompt)):
        return spelled
    # The template opens a reply in another way than it renders an earlier one, so the next turn differs here anyway.
    return np.array(tokenizer.encode(reply.get("content") or "", add_special_tokens=False), np.int32)


def _spelling(chat: RenderedChat, index: int, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens of the message behind a prompt in a longer chat; empty: the chat goes on from another prompt."""
    goes_on = len(prompt) == common_length(chat.tokens, prompt)
    return chat.tokens[len(prompt) : chat.end(index + 1)] if goes_on else np.empty(0, np.int32)


def _answer_to(reply: dict[str, Any]) -> dict[str, Any]:
    calls = reply.get("tool_calls")
    answer = {"role": "user", "content": AWAITED_REPLY}
    return {**answer, "role": "tool", "tool_call_id": calls[-1].get("id", "")} if calls else answer
