"""Mooncake's JSONL: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}` per line.

A block is 512 tokens, equal ids mean equal prefixes, outputs are not hashed. Source: the traces published with Qin et
al., Mooncake, arXiv 2407.00079.

Coding-agent sessions: one JSON file each, with block ids of its own; many files make one trace.

A session's `t` counts seconds from its start. When sessions begin is not recorded: here they begin as a seeded Poisson
process, in the order of the files, so the timing of the joined trace is synthetic (that within a session is not).

Two things about the format that are easily missed:

  CA1  Only full blocks are hashed. The rest of a prompt becomes a last block that no other request shares.
  CA2  `t` of a sub-agent's entry is when it reported back, its own requests count from when it was sent off, which is
      `duration_ms` earlier. (In the files at hand agents that were sent off together then start within 0.02 s of one
      another and of the end of the request that sent them; with `t` as the start they would outlive the wait for them.)

Recorded conversations as a trace: each reply that was due is a request, in blocks of a tokenizer's tokens.

Arrivals are made up (runner/traces/trace.py), so the timing is synthetic. This is the one reader that needs MLX,
since mlx-lm's tokenizer and the cache's own `chat_tokens` do the rendering.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.observe.trace import block_digests
from runner.script.conversation import Conversation, ConversationError
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import ScheduledRequest, requests_of
from runner.text import shown
from runner.traces.trace import (
    MOST_BLOCK_TOKENS,
    BadLines,
    KeyTable,
    Pace,
    Trace,
    TraceError,
    TraceRequest,
    block_ids,
    join_traces,
    read_lines,
    seconds,
    unreadable,
    whole_number,
)

MOONCAKE_BLOCK_TOKENS = 512


def read_mooncake(path: Path, *, block_tokens: int = MOONCAKE_BLOCK_TOKENS, skip_bad: bool = False) -> Trace:
    """Read a trace; `block_tokens` where it was hashed by blocks of another length.

    Raises:
        TraceError: the file cannot be read, or a line is bad and `skip_bad` is off.
    """
    bad = BadLines(skip_bad)
    table = KeyTable()
    requests: list[TraceRequest] = []
    time_ms = 0
    for line in read_lines(path):
        try:
            if line.error is not None:
                raise line.error
            request = _request(line.value, line.where, table, block_tokens, time_ms)
        except TraceError as error:
            bad.add(error)
            continue
        requests.append(request)
        time_ms = request.time_ms
    return Trace(path.stem, block_tokens, requests, False, str(path), tuple(bad.skipped))


def mooncake_bytes(trace: Trace) -> bytes:
    """A trace's requests; what the format has no field for (session, turn, kind) is left out."""
    return "".join(_lines(trace.requests)).encode()


def _lines(requests: Iterable[TraceRequest]) -> Iterable[str]:
    numbers: dict[int, int] = {}
    for request in requests:
        record = {
            "timestamp": request.time_ms,
            "input_length": request.tokens,
            "output_length": request.output_tokens,
            "hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys.tolist()],
        }
        yield json.dumps(record) + "\n"


def _request(record: dict[str, Any], where: str, table: KeyTable, block_tokens: int, earlier_ms: int) -> TraceRequest:
    time_ms = whole_number(record, "timestamp", where)
    tokens = whole_number(record, "input_length", where, at_least=1)
    output_tokens = whole_number(record, "output_length", where)
    ids = block_ids(record, where)
    wanted = -(-tokens // block_tokens)
    if len(ids) != wanted:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} ids; input_length {tokens} needs {wanted} blocks of"
            f" {block_tokens} tokens."
        )
    if time_ms < earlier_ms:
        raise TraceError(f"{where}: timestamp {time_ms} is before {earlier_ms} of an earlier line; wanted them sorted.")
    conflict = table.conflict(ids)
    if conflict is not None:
        raise TraceError(
            f"{where}: hash id {ids[conflict]} (index {conflict}) was seen behind another prefix; wanted equal ids for"
            " equal prefixes only."
        )
    return TraceRequest(table.keys(ids), tokens, output_tokens, time_ms)


SESSIONS_PER_HOUR = 30.0


def read_coding_agent(
    paths: Sequence[Path],
    *,
    name: str = "",
    seed: int = 0,
    sessions_per_hour: float = SESSIONS_PER_HOUR,
    skip_bad: bool = False,
) -> Trace:
    """Read sessions into one trace.

    Args:
        name: of the trace; the first file's stem where there is none.
        seed: of the arrivals.
        sessions_per_hour: rate of the Poisson process by which sessions begin; the first one begins at 0.

    Raises:
        TraceError: a file cannot be read, a request is bad and `skip_bad` is off, or block sizes differ.
    """
    bad = BadLines(skip_bad)
    draw = random.Random(seed)
    sessions: list[Trace] = []
    start_s = 0.0
    for path in paths:
        try:
            session = _Session(path, bad)
            if sessions and session.block_tokens != sessions[0].block_tokens:
                raise TraceError(
                    f"{path}: block_size is {session.block_tokens}; wanted {sessions[0].block_tokens}, as before."
                )
        except TraceError as error:
            bad.add(error)
            continue
        requests = [replace(each, time_ms=each.time_ms + round(1e3 * start_s)) for each in session.requests()]
        sessions.append(Trace(path.stem, session.block_tokens, requests, True, str(path)))
        start_s += draw.expovariate(sessions_per_hour / 3600.0)
    trace = join_traces(sessions) if sessions else Trace("", 1, [], True, "")
    source = ", ".join(map(str, paths))
    return replace(trace, name=name or paths[0].stem, source=source, skipped=tuple(bad.skipped))


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of requests with a clock of its own: the main agent's, or a sub-agent's."""

    session: str
    kind: str
    start_s: float
    records: list[Any]
    where: str


class _Session:
    """One file."""

    def __init__(self, path: Path, bad: BadLines) -> None:
        self._bad = bad
        self._path = path
        self._table = KeyTable()
        document = _load(path)
        self.block_tokens = whole_number(document, "block_size", str(path), at_least=1, at_most=MOST_BLOCK_TOKENS)
        records = document.get("requests")
        if not isinstance(records, list):
            raise TraceError(f"{path}: requests is {shown(records)}; wanted a list.")
        session_id = document.get("id")
        self._main = _Part(session_id if isinstance(session_id, str) else path.stem, "main", 0.0, records, str(path))

    def requests(self) -> list[TraceRequest]:
        """All requests, also those of sub-agents, by time from the session's start."""
        found = list(self._requests_of(self._main))
        found.sort(key=lambda request: request.time_ms)
        return found

    def _requests_of(self, part: _Part) -> Iterator[TraceRequest]:
        turn = 0
        for index, record in enumerate(part.records):
            where = f"{part.where}: requests[{index}]"
            try:
                if not isinstance(record, dict):
                    raise TraceError(f"{where} is {shown(record)}; wanted an object.")
                if record.get("type") == "subagent":
                    inner = self._subagent(record, part, where)
                else:
                    request = self._request(record, part, turn + 1, where)
                    inner, turn = None, turn + 1
            except TraceError as error:
                self._bad.add(error)
                continue
            if inner is not None:
                yield from self._requests_of(inner)
            else:
                yield request

    def _subagent(self, record: dict[str, Any], part: _Part, where: str) -> _Part:
        records = record.get("requests")
        if not isinstance(records, list):
            raise TraceError(f"{where}: requests is {shown(records)}; wanted a list.")
        duration_s = whole_number(record, "duration_ms", where) / 1e3 if "duration_ms" in record else 0.0
        start_s = part.start_s + max(0.0, seconds(record, "t", where) - duration_s)
        return _Part(f"{part.session}/{record.get('agent_id', where)}", "subagent", start_s, records, where)

    def _request(self, record: dict[str, Any], part: _Part, turn: int, where: str) -> TraceRequest:
        time_s = part.start_s + seconds(record, "t", where)
        tokens = whole_number(record, "in", where, at_least=1)
        output_tokens = whole_number(record, "out", where)
        ids = block_ids(record, where)
        full, rest = divmod(tokens, self.block_tokens)
        # A last block that is only partly filled may be hashed too.
        if len(ids) not in (full, full + bool(rest)):
            raise TraceError(
                f"{where}: hash_ids has {len(ids)} ids; in {tokens} needs {full} full blocks of"
                f" {self.block_tokens} tokens."
            )
        conflict = self._table.conflict(ids)
        if conflict is not None:
            raise TraceError(
                f"{where}: hash id {ids[conflict]} (index {conflict}) was seen behind another prefix; wanted equal ids"
                " for equal prefixes only."
            )
        keys = self._table.keys(ids, unhashed_tail=rest > 0 and len(ids) == full)
        return TraceRequest(keys, tokens, output_tokens, round(1e3 * time_s), part.session, turn, part.kind)


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno}); wanted a session."
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON ({error}); wanted a session.") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path}: found {shown(document)}; wanted an object with block_size and requests.")
    return document


CONVERSATION_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Rendered:
    prompt: NDArray[np.int32]
    output_tokens: int
    is_tool: bool
    turn: int


def read_conversation_trace(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    name: str = "",
    block_tokens: int = CONVERSATION_BLOCK_TOKENS,
    pace: Pace | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> Trace:
    """Read conversations into one trace, in the order of the files.

    Args:
        tokenizer: mlx-lm's or transformers', with a chat template.
        block_tokens: tokens per block.
        pace: how time passes; the default is `Pace()`.
        seed: of the arrivals.

    Raises:
        TraceError: a file cannot be read, or a conversation cannot be rendered and `skip_bad` is off.
    """
    try:
        read = read_conversations(*paths, skip_bad=skip_bad)
    except ConversationError as error:
        raise TraceError(str(error)) from error
    bad = BadLines(skip_bad)
    pace, draw = pace or Pace(), random.Random(seed)
    table = KeyTable()
    requests: list[TraceRequest] = []
    start_s = 0.0
    for conversation in read.conversations:
        try:
            rendered = _render(conversation, tokenizer)
        except TraceError as error:
            bad.add(error)
            continue
        at_s = start_s
        for each in rendered:
            digests = block_digests(each.prompt.astype(np.int64), block_tokens)
            keys, time_ms = table.keys(digests), round(1e3 * at_s)
            requests.append(
                TraceRequest(
                    keys, len(each.prompt), each.output_tokens, time_ms, conversation.conversation_id, each.turn
                )
            )
            at_s += pace.request_gap_s(draw, each.output_tokens, is_tool=each.is_tool)
        start_s += pace.session_gap_s(draw)
    requests.sort(key=lambda request: request.time_ms)
    source = ", ".join(map(str, paths))
    return Trace(name or paths[0].stem, block_tokens, requests, True, source, (*read.skipped, *bad.skipped))


def _render(conversation: Conversation, tokenizer: Any) -> list[_Rendered]:
    """The requests of a conversation. Replies that were not recorded are left out of later prompts."""
    from radixcache.chat import chat_tokens

    rendered = []
    for index, request in enumerate(requests_of(conversation)):
        try:
            prompt = chat_tokens(tokenizer, request.messages, request.tools)
        except ValueError as error:
            raise TraceError(f"{conversation.source}: conversation {conversation.conversation_id}: {error}") from error
        is_tool = bool((request.recorded_reply or {}).get("tool_calls"))
        rendered.append(_Rendered(prompt, _output_tokens(request, tokenizer), is_tool, index + 1))
    return rendered


def _output_tokens(request: ScheduledRequest, tokenizer: Any) -> int:
    """Tokens of the recorded reply's text and calls, without what the template puts around them; 0 for none."""
    reply = request.recorded_reply or {}
    texts = [str(reply.get("content") or ""), *(str(call["function"]) for call in reply.get("tool_calls") or ())]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)
