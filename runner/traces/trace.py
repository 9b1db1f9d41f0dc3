"""A trace: which prefixes were asked for, by whom and when. Readers make it; simulator and curves use it. No MLX.

A prompt is a list of blocks of `block_tokens` tokens; the last one may be partly filled. A key identifies a block.

Invariants of a `Trace` that a reader returns:

  TR1  len(keys) == ceil(tokens / block_tokens), and both are at least 1.
  TR2  Equal keys mean equal prefixes: a key always has one position, after the same keys.
  TR3  `time_ms` never decreases; requests that arrived at the same time keep the order of the file.
  TR4  Keys are 0 or more; files that were joined share none.

`TurnInference` finds the conversations in a trace without names, from earlier prompts only. A prompt that begins with
all full blocks of an earlier prompt continues its conversation. Because of two rules, a shared system prompt is no
conversation:

  TT1  A block is continued only from the request that used it first, or from a request that continues that one.
  TT2  A prompt that was continued in `MOST_BRANCHES` different ways is a shared beginning: a later request that begins
       with it starts a conversation. Numbers of earlier requests do not change.

A prompt shorter than a block is a first turn. O(blocks) per request.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runner.files import InputError, expect

Keys = npt.NDArray[np.int64]
MOST_BRANCHES = 3
MOST_EXACT = 1 << 53  # larger whole numbers are not exact as floats
MOST_TIME = 10**13  # milliseconds since 1970 are less


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: a key per block, the conversation with the turn from 1, and its kind, such as "subagent"."""

    keys: Keys
    tokens: int
    output_tokens: int
    time_ms: int
    session: str = ""
    turn: int | None = None
    kind: str = ""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, a line for each bad record that was left out, and what was assumed.

    `is_timing_synthetic`: the reader made up arrival times, at `sessions_per_hour` unless that is None.
    """

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    is_timing_synthetic: bool
    source: str
    skipped: tuple[str, ...] = ()
    sessions_per_hour: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def block_refs(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True)
class Pace:
    """Arrival times for data without them. Conversations begin as a Poisson process.

    `think_s` and `tool_s` are means of exponential times: from a reply to the user's next message, and for a tool.
    """

    sessions_per_hour: float = 30.0
    think_s: float = 30.0
    tool_s: float = 3.0
    output_tokens_per_s: float = 40.0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(Pace)):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}; wanted more than 0.")

    def session_gap_s(self, draw: random.Random) -> float:
        return draw.expovariate(self.sessions_per_hour / 3600.0)

    def request_gap_s(self, draw: random.Random, output_tokens: int, *, is_tool: bool) -> float:
        wait_s = draw.expovariate(1.0 / (self.tool_s if is_tool else self.think_s))
        return output_tokens / self.output_tokens_per_s + wait_s


@dataclass(slots=True)
class _End:
    """The last full block of a prompt: the turn that ended there, and in how many ways it was continued."""

    conversation: int
    turn: int
    branches: int = 0


class TurnInference:
    """Numbers conversations and turns of requests in the order of their arrival."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int, _End] = {}
        self._seen: set[int] = set()
        self._conversations = 0

    def place(self, request: TraceRequest) -> tuple[int, int]:
        """The number of a request's conversation, and its turn from 1. Call it once per request, in order."""
        full = request.tokens // self._block_tokens
        keys = request.keys[:full].tolist()
        # The longest earlier prompt that this one begins with, and its length in blocks.
        end: _End | None = None
        depth = 0
        for at in reversed(range(len(keys))):
            found = self._ends.get(keys[at])
            if found is not None and found.branches < MOST_BRANCHES:
                depth, end = at + 1, found
                break
        conversation, turn = (self._conversations, 1) if end is None else (end.conversation, end.turn + 1)
        self._conversations += end is None
        if keys:
            is_new = keys[-1] not in self._seen
            if end is not None and depth < full and is_new:
                end.branches += 1
            if is_new or (end is not None and depth == full):
                self._ends[keys[-1]] = _End(conversation, turn)
            self._seen.update(keys)
        return conversation, turn


def infer_turns(trace: Trace) -> Trace:
    """The trace with a turn for each request; unchanged if the trace knows any turn."""
    if any(request.turn is not None for request in trace.requests):
        return trace
    inference = TurnInference(trace.block_tokens)
    return replace(trace, requests=[replace(each, turn=inference.place(each)[1]) for each in trace.requests])


_NO_PARENT = -1


class KeyTable:
    """Turns the block ids of one file into keys, numbered from 0 in the order of first use. O(1) per id.

    A key stands for an id and all ids before it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | None, Hashable], int] = {}
        self._parents: dict[Hashable, int] = {}  # the key in front of each id where it was first used
        self._count = 0

    @property
    def has_prefix_ids(self) -> bool:
        """Whether each id was seen after one prefix only."""
        return len(self._parents) == len(self._numbers)

    def conflict(self, ids: Sequence[Hashable]) -> int | None:
        """Index of the first id that was seen behind another prefix; None: all agree."""
        before = set[Hashable]()
        previous: int | None = _NO_PARENT  # None: a block that is new
        for index, block_id in enumerate(ids):
            if block_id in before or self._parents.get(block_id, previous) != previous:
                return index
            before.add(block_id)
            previous = self._numbers.get((previous, block_id))
        return None

    def keys(self, ids: Sequence[Hashable], *, unhashed_tail: bool = False) -> Keys:
        """The keys of a prompt, and with `unhashed_tail` one for a last block that nobody shares."""
        keys = np.empty(len(ids) + unhashed_tail, np.int64)
        previous = _NO_PARENT
        for index, block_id in enumerate(ids):
            number = self._numbers.setdefault((previous, block_id), self._count)
            if number == self._count:
                self._parents.setdefault(block_id, previous)
                self._count += 1
            keys[index] = previous = number
        if unhashed_tail:
            keys[-1] = self._count
            self._count += 1
        return keys


def join_traces(traces: Sequence[Trace], *, name: str = "") -> Trace:
    """Join traces on one time axis, with keys numbered anew. InputError: their blocks differ in length."""
    first = traces[0]
    if len(traces) == 1:
        return replace(first, name=name or first.name)
    for trace in traces:
        if trace.block_tokens != first.block_tokens:
            wanted = f"{first.block_tokens}, as in {first.source}"
            raise InputError(f"{trace.source}: blocks of {trace.block_tokens} tokens; wanted {wanted}.")
    requests: list[TraceRequest] = []
    next_key = 0
    for trace in traces:
        if trace.requests:
            lengths = [len(each.keys) for each in trace.requests]
            distinct, numbers = np.unique(np.concatenate([each.keys for each in trace.requests]), return_inverse=True)
            pieces = np.split(numbers.astype(np.int64) + next_key, np.cumsum(lengths)[:-1])
            requests += [replace(each, keys=keys) for each, keys in zip(trace.requests, pieces, strict=True)]
            next_key += len(distinct)
    requests.sort(key=lambda request: request.time_ms)
    return Trace(
        name or "+".join(trace.name for trace in traces),
        first.block_tokens,
        requests,
        any(trace.is_timing_synthetic for trace in traces),
        ", ".join(trace.source for trace in traces),
    )


@dataclass
class Reading:
    """The arguments of `read_trace`, for readers of any format; the bad lines they left out, and what they assumed."""

    skip_bad: bool = False
    seed: int = 0
    pace: Pace = field(default_factory=Pace)
    tokenizer: Any = None
    block_tokens: int | None = None
    time_unit: str | None = None
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """With `skip_bad`, an InputError ends the block and is noted."""
        try:
            yield
        except InputError as error:
            if not self.skip_bad:
                raise
            self.skipped.append(str(error))


class Fields(NamedTuple):
    """A record, and where it is. The methods return a checked value. InputError: the value is wrong."""

    record: dict[str, Any]
    where: str

    def value(self, name: str, kind: Any, wanted: str, default: Any = None) -> Any:
        value = self.record.get(name, default)
        expect(isinstance(value, kind), f"{self.where}: {name} is", value, wanted)
        return value

    def whole_number(self, name: str, *, at_least: int = 0, at_most: int = MOST_EXACT) -> int:
        value: Any = self.record.get(name)
        if type(value) is float and value.is_integer():
            value = int(value)
        found = f"{self.where}: {name} is"
        expect(type(value) is int and value >= at_least, found, value, f"a whole number, {at_least} or more")
        expect(value <= at_most, found, value, f"at most {at_most:,}")
        return int(value)

    def duration(self, name: str, unit: str) -> float:
        value: Any = self.record.get(name)
        # NaN fails every comparison.
        is_time = type(value) in (int, float) and 0 <= value <= MOST_TIME
        expect(is_time, f"{self.where}: {name} is", value, f"{unit}, 0 to {MOST_TIME:,}")
        return float(value)
