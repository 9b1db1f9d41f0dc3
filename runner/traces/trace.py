"""A trace: who asked for which prefix, when. Every reader returns this, the simulator and the curves take it. No MLX.

A prompt is a list of blocks of `block_tokens` tokens; the last one may be partly filled. A block is known by its key.

Invariants of a `Trace` that a reader returns:

  TR1  len(keys) == ceil(tokens / block_tokens), and both are at least 1.
  TR2  Equal keys mean equal prefixes: a key always stands at one position, behind the same keys.
  TR3  `time_ms` never decreases; requests that arrived at the same time keep the order of the file.
  TR4  Keys are 0 or more; files that were joined share none.

KeyTable: block ids of one file become keys, and equal ids are held to equal prefixes.

Ids are numbered from 0 in the order they appear, so the same file gives the same keys whatever its ids look like. Keys
of different files mean different blocks: `join_traces` numbers them anew.

Lines of a trace file as JSON, and what to do with a bad one: stop, or count it and go on.

A file is read line by line, so a trace may be larger than memory. Lines count from 1.

Arrival times for data that has none: conversations begin as a Poisson process, people think, tools take a while.

Everything is drawn from one seeded generator; a trace with such times is labelled synthetic.

Several traces on one time axis, each from its own beginning, without a key in common.
"""

from __future__ import annotations

import json
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.text import shown

Keys = npt.NDArray[np.int64]


class TraceError(ValueError):
    """A file that is not a trace, or a line that cannot be one: where, what was found, what was wanted, on one line."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    Attributes:
        keys: int64, one key per block of the prompt, unique per whole prefix.
        tokens: length of the prompt.
        output_tokens: length of the reply.
        time_ms: arrival, counted from the start of the trace.
        session: the conversation, where the trace says so; "" unknown.
        turn: the conversation's turn, from 1, where known or inferred from the past alone.
        kind: what sort of request, "main" or "subagent" say; "" unknown.
    """

    keys: Keys
    tokens: int
    output_tokens: int
    time_ms: int
    session: str = ""
    turn: int | None = None
    kind: str = ""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: what tables and plots call it.
        block_tokens: tokens per block.
        is_timing_synthetic: whether arrival times were made up by the reader; every output says so.
        source: the path or paths it was read from.
        skipped: one line for each bad record that was left out.
        sessions_per_hour: the rate at which conversations begin, where the reader made arrivals up.
    """

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    is_timing_synthetic: bool
    source: str
    skipped: tuple[str, ...] = ()
    sessions_per_hour: float | None = None

    @property
    def block_refs(self) -> int:
        """Blocks of all prompts together."""
        return sum(len(request.keys) for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True)
class Pace:
    """How time passes.

    Attributes:
        sessions_per_hour: rate at which conversations begin.
        think_s: mean time that a person takes from the reply to the next message; exponential.
        tool_s: mean time that a tool takes; exponential.
        output_tokens_per_s: how fast replies are generated.
    """

    sessions_per_hour: float = 30.0
    think_s: float = 30.0
    tool_s: float = 3.0
    output_tokens_per_s: float = 40.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}; wanted more than 0.")

    def session_gap_s(self, draw: random.Random) -> float:
        """Time from the beginning of one conversation to that of the next."""
        return draw.expovariate(self.sessions_per_hour / 3600.0)

    def request_gap_s(self, draw: random.Random, output_tokens: int, *, is_tool: bool) -> float:
        """Time from a request to the next one of its conversation."""
        wait_s = draw.expovariate(1.0 / (self.tool_s if is_tool else self.think_s))
        return output_tokens / self.output_tokens_per_s + wait_s


_NO_PARENT = -1


class KeyTable:
    """The ids of a file with the number of each and of the block before it. O(1) per id."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._parents: list[int] = []

    def conflict(self, ids: Sequence[Hashable]) -> int | None:
        """Index of the first id that stands behind another prefix than before; None where all agree."""
        numbers, parents = self._numbers, self._parents
        previous: int | None = _NO_PARENT
        for index, block_id in enumerate(ids):
            number = numbers.get(block_id)
            if number is not None and parents[number] != previous:
                return index
            previous = number
        if len(set(ids)) < len(ids):
            return next(index for index, block_id in enumerate(ids) if block_id in ids[:index])
        return None

    def keys(self, ids: Sequence[Hashable], *, unhashed_tail: bool = False) -> Keys:
        """Keys of a prompt without conflict; an unhashed tail is a last block of its own that nobody shares."""
        keys = np.empty(len(ids) + unhashed_tail, np.int64)
        previous = _NO_PARENT
        for index, block_id in enumerate(ids):
            number = self._numbers.get(block_id)
            if number is None:
                number = self._numbers[block_id] = self._append(previous)
            keys[index] = previous = number
        if unhashed_tail:
            keys[-1] = self._append(previous)
        return keys

    def _append(self, parent: int) -> int:
        self._parents.append(parent)
        return len(self._parents) - 1


#: Numbers up to here are exact as floats.
MOST_EXACT = 1 << 53
MOST_BLOCK_TOKENS = 1 << 31


class BadLines:
    """Where readers take what they cannot use. Without `skip_bad` the first one ends the reading."""

    def __init__(self, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self.skipped: list[str] = []

    def add(self, error: TraceError) -> None:
        """Count a bad line.

        Raises:
            TraceError: the same, where nothing is skipped.
        """
        if not self._skip_bad:
            raise error
        self.skipped.append(str(error))


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line: its JSON object, or what is wrong with it."""

    where: str
    value: Any
    error: TraceError | None = None


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Every line of a JSONL file that is not blank.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.strip():
                    yield _parse(content, f"{path}:{number}")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> TraceError:
    """The one line for a file that cannot be read."""
    return TraceError(f"{path}: cannot be read ({error.strerror}); wanted a trace.")


def whole_number(record: dict[str, Any], name: str, where: str, *, at_least: int = 0, at_most: int = MOST_EXACT) -> int:
    """A field that holds a whole number.

    Raises:
        TraceError: it holds something else, too little or too much.
    """
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted a whole number, {at_least} or more.")
    if value > at_most:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted at most {at_most:,}.")
    return value


def seconds(record: dict[str, Any], name: str, where: str) -> float:
    """A field that holds seconds, 0 or more.

    Raises:
        TraceError: it holds something else.
    """
    value = record.get(name)
    # Comparisons with NaN are False, so it ends here too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted seconds, 0 or more.")
    return float(value)


def block_ids(record: dict[str, Any], where: str) -> list[int]:
    """The field `hash_ids`: a list of whole numbers.

    Raises:
        TraceError: it holds something else.
    """
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block_id) is int for block_id in ids):
        raise TraceError(f"{where}: hash_ids is {shown(ids)}; wanted a list of whole numbers.")
    return ids


def _parse(content: bytes, where: str) -> TraceLine:
    try:
        value = json.loads(content)
    except RecursionError:
        return TraceLine(where, None, TraceError(f"{where}: nested too deeply; wanted a request."))
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8"
        return TraceLine(where, None, TraceError(f"{where}: {found}; wanted one JSON object per line."))
    except ValueError as error:
        return TraceLine(where, None, TraceError(f"{where}: not JSON ({error}); wanted one object per line."))
    if not isinstance(value, dict):
        return TraceLine(where, None, TraceError(f"{where}: found {shown(value)}; wanted an object."))
    return TraceLine(where, value)


def join_traces(traces: Sequence[Trace], *, name: str = "") -> Trace:
    """Join traces; requests that arrive at the same time come in the order of the traces.

    Args:
        name: of the result; the names with a + between them where there is none.

    Raises:
        TraceError: their blocks differ in length.
        ValueError: there is no trace.
    """
    if not traces:
        raise ValueError("no trace to join; wanted at least one.")
    if len(traces) == 1:
        return traces[0] if not name else replace(traces[0], name=name)
    first = traces[0]
    for trace in traces:
        if trace.block_tokens != first.block_tokens:
            raise TraceError(
                f"{trace.source}: blocks of {trace.block_tokens} tokens; wanted {first.block_tokens}, as in"
                f" {first.source}."
            )
    requests: list[TraceRequest] = []
    next_key = 0
    for trace in traces:
        fresh, count = _renumbered(trace.requests, next_key)
        requests += fresh
        next_key += count
    requests.sort(key=lambda request: request.time_ms)
    return Trace(
        name or "+".join(trace.name for trace in traces),
        first.block_tokens,
        requests,
        any(trace.is_timing_synthetic for trace in traces),
        ", ".join(trace.source for trace in traces),
        tuple(line for trace in traces for line in trace.skipped),
    )


def _renumbered(requests: Sequence[TraceRequest], first_key: int) -> tuple[list[TraceRequest], int]:
    """Requests with their keys numbered from `first_key`, and how many keys there are."""
    if not requests:
        return [], 0
    distinct, inverse = np.unique(np.concatenate([request.keys for request in requests]), return_inverse=True)
    pieces = np.split(inverse.astype(np.int64) + first_key, np.cumsum([len(each.keys) for each in requests])[:-1])
    return [replace(each, keys=keys) for each, keys in zip(requests, pieces, strict=True)], len(distinct)
