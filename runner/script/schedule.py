"""The order of requests: conversations of several users, interleaved.

A request is a conversation up to a message that the model answers: a user's or a tool's message before a message of the
assistant, or at the end. If only the user's turns are recorded, the model answers each.

Requests of agents' logs come in the order of their times; there is nothing to draw.

  SQ1  A user's requests come in the order of the user's conversations and, within one, of its turns.
  SQ2  The same conversations, users and seed give the same requests.
"""

import hashlib
import json
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, takewhile
from typing import Any

from runner.script.conversation import Call, Conversation


@dataclass(frozen=True)
class ScheduledRequest:
    """A request for one reply. The model answers the message before position `end` of the conversation.

    `turn` is the number of the latest user message, from 0; a turn that calls tools makes several requests. `call`:
    what the log of an agent says.
    """

    index: int
    conversation: Conversation
    turn: int
    end: int
    call: Call | None = None

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The conversation up to the message that the model answers."""
        return self.conversation.messages[: self.end]

    @property
    def recorded_reply(self) -> dict[str, Any] | None:
        has_reply = self.conversation.replies_recorded and self.end < len(self.conversation.messages)
        return self.conversation.messages[self.end] if has_reply else None

    @property
    def reply_slots(self) -> tuple[int, ...]:
        """Positions in `messages` of the model's earlier replies, without those that call tools.

        A position has the recorded reply; if none is recorded, it has the user's next message.
        """
        messages = self.messages
        earlier = takewhile(lambda end: end < self.end, _reply_ends(self.conversation))
        return tuple(end for end in earlier if not messages[end].get("tool_calls"))

    @property
    def model(self) -> str:
        """The model as the log of an agent names it; '': there is no such log."""
        return "" if self.call is None else self.call.model

    @property
    def where(self) -> str:
        file = f"{self.conversation.source}: " if self.conversation.source else ""
        return f"{file}conversation {self.conversation.conversation_id}, turn {self.turn}"


class GeneratedReplies:
    """Replies of the model, by the recorded conversation up to and including the reply that each replaces.

    So conversations with the same recorded beginning have the same replies there.
    """

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}

    def record(self, request: ScheduledRequest, text: str) -> None:
        *_, end = beginnings(request.messages)
        self._texts[_digest_with(end, request.recorded_reply or {})] = text

    def messages(self, request: ScheduledRequest, placeholder: str | None = None) -> tuple[dict[str, Any], ...]:
        """The request's messages with generated replies in place of recorded ones.

        A reply that was neither recorded nor generated is the placeholder. ValueError: there is no placeholder.
        """
        messages, slots = request.messages, set(request.reply_slots)
        filled: list[dict[str, Any]] = []
        for position, (message, digest) in enumerate(zip(messages, beginnings(messages), strict=False)):
            is_recorded = message["role"] == "assistant"
            text = self._texts.get(_digest_with(digest, message if is_recorded else {})) if position in slots else None
            if position in slots and text is None and not is_recorded:
                if placeholder is None:
                    where = f"conversation {request.conversation.conversation_id!r}"
                    missing = f"the reply before message {position} was neither recorded nor generated"
                    raise ValueError(f"{where}: {missing}. Replay the turns in order, with generated replies.")
                text = placeholder
            if text is not None:
                filled.append({"role": "assistant", "content": text})
            if text is None or not is_recorded:
                filled.append(message)
        return tuple(filled)


def schedule(
    conversations: Sequence[Conversation], *, users: int | None = None, seed: int = 0, max_requests: int | None = None
) -> list[ScheduledRequest]:
    """Interleave the requests of the first `users` users: the next one is of a random user who has requests left.

    If all conversations are from agents' logs, the next one is the next in time.

    ValueError: no conversation, `users` or `max_requests` below 1, or more users than there are.
    """
    waiting: dict[str, deque[ScheduledRequest]] = defaultdict(deque)
    for conversation in conversations:
        waiting[conversation.user].extend(requests_of(conversation))
    count = len(waiting)
    if not waiting:
        raise ValueError("no conversations to schedule; wanted at least one.")
    if users is not None and not 1 <= users <= count:
        raise ValueError(f"users is {users}; wanted 1 to {count}, as the conversations have {count} users.")
    if max_requests is not None and max_requests < 1:
        raise ValueError(f"max_requests is {max_requests}; wanted at least 1.")
    queues = [queue for queue in list(waiting.values())[:users] if queue]
    if all(conversation.calls for conversation in conversations):
        # Without the Z, 10 comes before 10.5.
        found = sorted(chain.from_iterable(queues), key=lambda each: each.call.time.rstrip("Z") if each.call else "")
        return [replace(request, index=index) for index, request in enumerate(found[:max_requests])]
    draw = random.Random(seed)
    ordered: list[ScheduledRequest] = []
    while queues and (max_requests is None or len(ordered) < max_requests):
        queue = queues[draw.randrange(len(queues))]
        ordered.append(replace(queue.popleft(), index=len(ordered)))
        if not queue:
            queues.remove(queue)
    return ordered


def requests_of(conversation: Conversation) -> Iterator[ScheduledRequest]:
    """The requests of one conversation, in order, numbered from 0."""
    ends, of_log = [*_reply_ends(conversation)], bool(conversation.calls)
    calls = dict(zip(reversed(ends), reversed(conversation.calls), strict=False))
    users = [*accumulate(message["role"] == "user" for message in conversation.messages)]
    index = 0
    for end in ends:
        call = calls.get(end)
        if end > conversation.asked_messages and (call is not None or not of_log):
            yield ScheduledRequest(index, conversation, users[end - 1] - 1, end, call)
            index += 1


def _reply_ends(conversation: Conversation) -> Iterator[int]:
    """The positions behind the messages that the model answers."""
    following = chain(conversation.messages[1:], (None,))
    for end, (message, reply) in enumerate(zip(conversation.messages, following, strict=True), 1):
        is_answered = reply is None or not conversation.replies_recorded or reply["role"] == "assistant"
        if message["role"] in ("user", "tool") and is_answered:
            yield end


def beginnings(messages: Sequence[Mapping[str, Any]], digest: bytes = b"") -> Iterator[bytes]:
    """Yield the digests of `messages[:0]`, which is given, of `messages[:1]`, ... and of all messages."""
    return accumulate(messages, _digest_with, initial=digest)


def _digest_with(digest: bytes, message: Any) -> bytes:
    text = json.dumps(message, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(digest + text.encode(), digest_size=16).digest()
