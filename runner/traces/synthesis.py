"""Synthetic traffic of many users, instead of a recorded trace. Equal parameters and seeds give equal traces.

    applications    each has its own system prompt, tool list included; a new conversation picks one by Zipf's law
    conversations   begin as a Poisson process; each has a geometric number of user turns
    a turn          the user's message, then one request; in an agent's conversation a geometric number of tool calls
                    comes before the answer, each a request of its own that ends in the tool's result
    branching       before a turn the user may go back to an earlier one and ask again (regenerate, edit)
    time            see `Pace`: thinking, tools, and the time to generate the reply

Lengths are log-normal, given by their median and the standard deviation of their logarithm. Replies become part of the
next prompt. Different conversations share no token behind the system prompt.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from runner.traces.trace import Pace, Trace, TraceRequest

#: Standard deviation of the logarithm of each length.
SIGMA = {"system_tokens": 1.0, "user_tokens": 1.2, "reply_tokens": 0.8, "tool_result_tokens": 1.2}


@dataclass(frozen=True)
class Synth(Pace):
    """Parameters of the traffic: means of geometric numbers, and medians of log-normal lengths.

    Attributes:
        applications, zipf: each has a system prompt; Zipf exponent of their shares, 0 for equal ones.
        agent_share: share of the applications whose conversations use tools.
        turns, tool_calls: user turns of a conversation; tool calls in an agent's turn.
        branching: probability that a turn goes back to an earlier one.
        context_tokens: most tokens of a prompt; a conversation ends before that.
    """

    requests: int = 10_000
    block_tokens: int = 64
    applications: int = 20
    zipf: float = 1.0
    agent_share: float = 0.3
    turns: float = 3.5
    tool_calls: float = 4.0
    branching: float = 0.05
    context_tokens: int = 131_072
    sessions_per_hour: float = 600.0
    system_tokens: float = 1_000
    user_tokens: float = 60
    reply_tokens: float = 200
    tool_result_tokens: float = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        shares, at_least_0 = ("agent_share", "branching"), ("agent_share", "branching", "tool_calls", "zipf")
        for name, value in vars(self).items():
            low, high = 0 if name in at_least_0 else 1, 1 if name in shares else 1e9 if name in SIGMA else math.inf
            if not hasattr(Pace, name) and not (low <= value <= high and value < math.inf):
                wanted = f"{low} or more" if high == math.inf else f"{low} to {high:g}"
                raise ValueError(f"{name} is {value:g}; wanted {wanted}.")


def synthesize(parameters: Synth, *, seed: int = 0, name: str = "synth") -> Trace:
    """Make a trace. ValueError: no conversation fits into `context_tokens`."""
    requests = list(_Traffic(parameters, random.Random(seed)).requests())
    return Trace(name, parameters.block_tokens, requests, True, f"synth, seed {seed}")


@dataclass
class _Conversation:
    """One user's conversation, with the prompt of the next request.

    `keys` are the prompt's full blocks, `tail` is what stands behind them: pieces of text, each with a start and an
    end. `beginnings` has the conversation in front of each of the user's messages.
    """

    name: str
    is_agent: bool
    turns_left: int
    keys: list[int] = field(default_factory=list)
    tail: tuple[tuple[int, int, int], ...] = ()
    tokens: int = 0
    turn: int = 0
    calls_left: int = 0
    beginnings: list[_Conversation] = field(default_factory=list)


class _Traffic:
    """All conversations on one time axis, as (time, order, conversation); None: the next conversation begins.

    The block before a block and the pieces of text in it identify the block.
    """

    def __init__(self, parameters: Synth, draw: random.Random) -> None:
        self._parameters, self._draw = parameters, draw
        self._numbers: dict[object, int] = {}
        self._pieces, self._order = count(), count()
        self._applications = [
            (next(self._pieces), self._length("system_tokens"), draw.random() < parameters.agent_share)
            for _ in range(parameters.applications)
        ]
        self._weights = [rank**-parameters.zipf for rank in range(1, parameters.applications + 1)]
        self._agenda: list[tuple[float, int, _Conversation | None]] = []

    def requests(self) -> Iterator[TraceRequest]:
        made, failed = 0, 0
        self._plan(0.0, None)
        while made < self._parameters.requests:
            at_s, _, conversation = heapq.heappop(self._agenda)
            if conversation is None:
                self._plan(at_s + self._parameters.session_gap_s(self._draw), None)
                conversation = self._begin()
                self._ask(conversation)
            if conversation.tokens > self._parameters.context_tokens:
                failed += 1
                if made == 0 and failed == 1000:
                    raise ValueError(
                        f"none of {failed} conversations fit into {self._parameters.context_tokens} tokens of"
                        " context; wanted shorter lengths or a larger context."
                    )
                continue
            yield self._request(conversation, at_s)
            made += 1

    def _request(self, conversation: _Conversation, at_s: float) -> TraceRequest:
        output_tokens, kind = self._length("reply_tokens"), "agent" if conversation.is_agent else "chat"
        last = [self._number(conversation)] if conversation.tail else []
        keys, time_ms = np.array([*conversation.keys, *last], np.int64), round(1e3 * at_s)
        about = (conversation.name, conversation.turn, kind)
        request = TraceRequest(keys, conversation.tokens, output_tokens, time_ms, *about)
        self._say(conversation, output_tokens)
        is_tool = conversation.calls_left > 0
        gap_s = self._parameters.request_gap_s(self._draw, output_tokens, is_tool=is_tool)
        if is_tool:
            conversation.calls_left -= 1
            conversation.turn += 1
            self._say(conversation, self._length("tool_result_tokens"))
        elif conversation.turns_left > 0:
            self._ask(conversation)
        else:
            return request
        self._plan(at_s + gap_s, conversation)
        return request

    def _begin(self) -> _Conversation:
        ((piece, system_tokens, is_agent),) = self._draw.choices(self._applications, self._weights)
        name = f"s{next(self._pieces)}"
        conversation = _Conversation(name, is_agent, 1 + self._geometric(self._parameters.turns - 1))
        self._say(conversation, system_tokens, piece)
        return conversation

    def _ask(self, conversation: _Conversation) -> None:
        beginnings = conversation.beginnings
        if beginnings and self._draw.random() < self._parameters.branching:
            chosen = self._draw.randrange(len(beginnings))
            before = beginnings[chosen]
            conversation.keys, conversation.tail = before.keys, before.tail
            conversation.tokens, conversation.turn = before.tokens, before.turn
            del beginnings[chosen:]
        beginnings.append(replace(conversation, keys=conversation.keys.copy()))
        conversation.turns_left -= 1
        conversation.turn += 1
        self._say(conversation, self._length("user_tokens"))
        if conversation.is_agent:
            conversation.calls_left = self._geometric(self._parameters.tool_calls)

    def _say(self, conversation: _Conversation, length: int, piece: int | None = None) -> None:
        """Append a piece of text to the prompt: a new one, or one that others have, too."""
        piece, offset = next(self._pieces) if piece is None else piece, 0
        length = min(length, self._parameters.context_tokens + 1)  # enough to end the conversation
        while offset < length:
            room = self._parameters.block_tokens - conversation.tokens % self._parameters.block_tokens
            end = min(length, offset + room)
            conversation.tail = (*conversation.tail, (piece, offset, end))
            conversation.tokens += end - offset
            if end - offset == room:
                conversation.keys.append(self._number(conversation))
                conversation.tail = ()
            offset = end

    def _number(self, conversation: _Conversation) -> int:
        """The key of the tail of a prompt."""
        block = (conversation.keys[-1] if conversation.keys else -1, conversation.tail)
        return self._numbers.setdefault(block, len(self._numbers))

    def _plan(self, at_s: float, conversation: _Conversation | None) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), conversation))

    def _length(self, name: str) -> int:
        median: float = getattr(self._parameters, name)
        return max(1, round(median * self._draw.lognormvariate(0.0, SIGMA[name])))

    def _geometric(self, mean: float) -> int:
        """A number 0, 1, 2 ... with this mean."""
        number = 0
        while self._draw.random() < mean / (1 + mean):
            number += 1
        return number
