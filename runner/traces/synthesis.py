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
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from runner.traces.trace import Keys, Pace, Trace, TraceRequest

#: Standard deviation of the logarithm of each length.
SIGMA = {"system_tokens": 1.0, "user_tokens": 1.2, "reply_tokens": 0.8, "tool_result_tokens": 1.2}
#: The range of each parameter; 1 or more without an entry.
RANGES = {
    **dict.fromkeys(("zipf", "tool_calls"), (0, math.inf)),
    **dict.fromkeys(("agent_share", "branching"), (0, 1)),
    **dict.fromkeys(SIGMA, (1, 1e9)),
}


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
        for name, value in vars(self).items():
            low, high = RANGES.get(name, (1, math.inf))
            if not hasattr(Pace, name) and not (low <= value <= high and value < math.inf):
                wanted = f"{low} or more" if high == math.inf else f"{low} to {high:g}"
                raise ValueError(f"{name} is {value:g}; wanted {wanted}.")

    def length(self, name: str, draw: random.Random) -> int:
        median: float = getattr(self, name)
        return max(1, round(median * draw.lognormvariate(0.0, SIGMA[name])))


def synthesize(parameters: Synth, *, seed: int = 0, name: str = "synth") -> Trace:
    """Make a trace. ValueError: no conversation fits into `context_tokens`."""
    requests = list(_Traffic(parameters, random.Random(seed)).requests())
    return Trace(name, parameters.block_tokens, requests, True, f"synth, seed {seed}")


class _Text:
    """A growing prompt as block keys. The block before a block and the pieces of text in it identify the block."""

    def __init__(self, numbers: dict[object, int], block_tokens: int) -> None:
        self._numbers = numbers
        self._block_tokens = block_tokens
        self._keys: list[int] = []
        self._tail: tuple[tuple[int, int, int], ...] = ()
        self.tokens = 0

    def copy(self) -> _Text:
        other = _Text(self._numbers, self._block_tokens)
        other._keys, other._tail, other.tokens = self._keys.copy(), self._tail, self.tokens
        return other

    def append(self, piece: int, length: int) -> None:
        offset = 0
        while offset < length:
            taken = min(length - offset, self._block_tokens - self.tokens % self._block_tokens)
            self._tail = (*self._tail, (piece, offset, offset + taken))
            self.tokens += taken
            offset += taken
            if self.tokens % self._block_tokens == 0:
                self._keys.append(self._number())
                self._tail = ()

    def keys(self) -> Keys:
        return np.array([*self._keys, self._number()] if self._tail else self._keys, np.int64)

    def _number(self) -> int:
        block = (self._keys[-1] if self._keys else -1, self._tail)
        return self._numbers.setdefault(block, len(self._numbers))


@dataclass(frozen=True)
class _Application:
    piece: int
    system_tokens: int
    is_agent: bool


@dataclass
class _Conversation:
    """One user's conversation: the prompt of the next request, and the text and the turn before each user message."""

    name: str
    application: _Application
    text: _Text
    turns_left: int
    turn: int = 0
    calls_left: int = 0
    beginnings: list[tuple[_Text, int]] = field(default_factory=list)


class _Traffic:
    """All conversations on one time axis, as (time, order, conversation); None: the next conversation begins."""

    def __init__(self, parameters: Synth, draw: random.Random) -> None:
        self._parameters, self._draw = parameters, draw
        self._numbers: dict[object, int] = {}
        self._pieces = count()
        self._order = count()
        self._applications = [self._application() for _ in range(parameters.applications)]
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
            if conversation.text.tokens > self._parameters.context_tokens:
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
        text, parameters = conversation.text, self._parameters
        output_tokens = parameters.length("reply_tokens", self._draw)
        request = TraceRequest(
            text.keys(),
            text.tokens,
            output_tokens,
            round(1e3 * at_s),
            conversation.name,
            conversation.turn,
            "agent" if conversation.application.is_agent else "chat",
        )
        self._say(text, output_tokens)
        is_tool = conversation.calls_left > 0
        gap_s = self._parameters.request_gap_s(self._draw, output_tokens, is_tool=is_tool)
        if is_tool:
            conversation.calls_left -= 1
            conversation.turn += 1
            self._say(text, parameters.length("tool_result_tokens", self._draw))
        elif conversation.turns_left > 0:
            self._ask(conversation)
        else:
            return request
        self._plan(at_s + gap_s, conversation)
        return request

    def _begin(self) -> _Conversation:
        (application,) = self._draw.choices(self._applications, self._weights)
        text = _Text(self._numbers, self._parameters.block_tokens)
        text.append(application.piece, self._clipped(application.system_tokens))
        return _Conversation(
            f"s{next(self._pieces)}", application, text, 1 + self._geometric(self._parameters.turns - 1)
        )

    def _ask(self, conversation: _Conversation) -> None:
        if conversation.beginnings and self._draw.random() < self._parameters.branching:
            chosen = self._draw.randrange(len(conversation.beginnings))
            text, conversation.turn = conversation.beginnings[chosen]
            conversation.text = text.copy()
            del conversation.beginnings[chosen:]
        conversation.beginnings.append((conversation.text.copy(), conversation.turn))
        conversation.turns_left -= 1
        conversation.turn += 1
        self._say(conversation.text, self._parameters.length("user_tokens", self._draw))
        if conversation.application.is_agent:
            conversation.calls_left = self._geometric(self._parameters.tool_calls)

    def _say(self, text: _Text, length: int) -> None:
        text.append(next(self._pieces), self._clipped(length))

    def _clipped(self, length: int) -> int:
        """A piece's length, at most one token more than the context."""
        return min(length, self._parameters.context_tokens + 1)

    def _plan(self, at_s: float, conversation: _Conversation | None) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), conversation))

    def _application(self) -> _Application:
        length = self._parameters.length("system_tokens", self._draw)
        return _Application(next(self._pieces), length, self._draw.random() < self._parameters.agent_share)

    def _geometric(self, mean: float) -> int:
        """A number 0, 1, 2 ... with this mean."""
        number = 0
        while self._draw.random() < mean / (1 + mean):
            number += 1
        return number
