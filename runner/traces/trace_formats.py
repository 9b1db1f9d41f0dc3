"""Readers and writers of the trace formats with block hashes: `read_compact`, `read_rows`, `read_coding_agent`.

A bad line stops a reader, or with `skip_bad` is counted and left out. This file never imports MLX.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from radixcache.observe.trace import CLOCKS, DIGEST_BYTES, FORMAT, VERSION, Clock, TraceWriter, block_digests
from runner.files import BLANK, MOST_RECORD_BYTES, InputError, document_records, read_text
from runner.text import plural, printable, shortened, shown
from runner.traces.trace import (
    MOST_BLOCK_TOKENS,
    KeyTable,
    Reading,
    Trace,
    TraceRequest,
    duration,
    hash_ids,
    join_traces,
    read_objects,
    whole_number,
)


def _field(record: dict[str, Any], name: str, where: str, kind: Any, wanted: str, default: Any = None) -> Any:
    value = record.get(name, default)
    if not isinstance(value, kind):
        raise InputError(f"{where}: {name} is {shown(value)}; wanted {wanted}.")
    return value


def _block_ids(
    table: KeyTable, record: dict[str, Any], where: str, length: str, tokens: int, block_tokens: int
) -> list[int] | list[str]:
    """A record's `hash_ids`, for the tokens that it counts in `length`; of a last part of a block there may be none."""
    ids = hash_ids(record, where)
    full, rest = divmod(tokens, block_tokens)
    if len(ids) not in (full, full + bool(rest)):
        wanted = f"{length} {tokens} needs {full} full blocks of {block_tokens} tokens"
        raise InputError(f"{where}: hash_ids has {len(ids)} ids; {wanted}.")
    if (at := table.conflict(ids)) is not None:
        found = f"hash id {shortened(repr(ids[at]), 40)} (index {at}) follows another prefix than before"
        raise InputError(f"{where}: {found}; wanted equal ids only for equal prefixes.")
    return ids


# Compact: what PrefixCache(trace=FILE) records; radixcache/observe/trace.py describes the format
#
# After a restart or a failed write a file has one more part, with a header. The times of a part continue from the end
# of the part before it. Requests are written when they end; the reader sorts them by arrival.


def is_compact_header(record: dict[str, Any]) -> bool:
    return record.get("format") == FORMAT


def read_compact(paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """A trace per file. A torn line is left out and counted, even without `skip_bad`."""
    return [_CompactReader(path, reading).trace() for path in paths]


def compact_bytes(trace: Trace) -> bytes:
    clock: Clock = "synthetic_ms" if trace.is_timing_synthetic else "ms"
    with TemporaryDirectory() as folder:
        complete = Path(folder) / "trace"
        with TraceWriter(complete, block_tokens=trace.block_tokens, salt=b"", clock=clock) as writer:
            for request in trace.requests:
                writer.append_blocks(
                    [key.to_bytes(DIGEST_BYTES, "big") for key in request.keys.tolist()],
                    tokens=request.tokens,
                    time=request.time_ms,
                    output_tokens=request.output_tokens,
                    session=request.session,
                    turn=request.turn,
                    kind=request.kind,
                )
        return complete.read_bytes()


class _CompactReader:
    """All requests so far, and of the present part its header, its start and the blocks of its requests."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self._table = KeyTable()
        self._requests: list[TraceRequest] = []
        self._is_timing_synthetic = False
        self._block_tokens: int | None = None
        self._salt_id = ""
        self._is_plain = False
        self._is_open = False
        self._part_start = 0
        self._digests: dict[int, list[bytes]] = {}

    def trace(self) -> Trace:
        for (where, record), (_, following) in pairwise(chain(read_objects(self._path), [("", None)])):
            ends_part = following is None or (isinstance(following, dict) and is_compact_header(following))
            try:
                if isinstance(record, dict) and is_compact_header(record):
                    self._begin_part(record, where)
                elif isinstance(record, dict):
                    self._requests.append(self._request(record, where))
                elif ends_part:
                    self._reading.skipped.append(
                        f"{where}: an incomplete line, as the writer was stopped here; skipped."
                    )
                elif record is not None:
                    raise record
            except InputError as error:
                self._reading.skip(error)
        self._end_part()
        source = str(self._path)
        return Trace(self._path.stem, self._block_tokens or 1, self._requests, self._is_timing_synthetic, source)

    def _begin_part(self, header: dict[str, Any], where: str) -> None:
        # Even a bad header ends the part before it.
        self._end_part()
        if header.get("version") != VERSION:
            raise InputError(f"{where}: version is {shown(header.get('version'))}; wanted {VERSION}.")
        block_tokens = whole_number(header, "block_tokens", where, at_least=1, at_most=MOST_BLOCK_TOKENS)
        if self._block_tokens not in (None, block_tokens):
            raise InputError(f"{where}: block_tokens is {block_tokens}; wanted {self._block_tokens}, as before.")
        if header.get("clock") not in CLOCKS:
            raise InputError(f"{where}: clock is {shown(header.get('clock'))}; wanted one of {', '.join(CLOCKS)}.")
        self._is_open = True
        self._block_tokens = block_tokens
        self._is_plain = header.get("plain") is True
        self._salt_id = str(header.get("salt_id"))
        self._is_timing_synthetic |= header["clock"] != "ms"

    def _end_part(self) -> None:
        """Sort the part's requests by arrival, and continue the times of the part before it."""
        part = sorted(self._requests[self._part_start :], key=lambda request: request.time_ms)
        if part:
            earlier_ms = self._requests[self._part_start - 1].time_ms if self._part_start else 0
            shift_ms = earlier_ms - part[0].time_ms
            self._requests[self._part_start :] = [replace(each, time_ms=each.time_ms + shift_ms) for each in part]
        self._part_start = len(self._requests)
        self._digests = {}
        self._is_open = False

    def _request(self, record: dict[str, Any], where: str) -> TraceRequest:
        if not self._is_open:
            raise InputError(f"{where}: no header; wanted a line with format {FORMAT!r} first.")
        number = whole_number(record, "request", where)
        if number in self._digests:
            self._end_part()
            raise InputError(f"{where}: request {number} is there twice; wanted a header before each part of a trace.")
        time_ms = whole_number(record, "time", where)
        tokens = whole_number(record, "tokens", where, at_least=1)
        output_tokens = whole_number(record, "output", where)
        turn = whole_number(record, "turn", where) if "turn" in record else None
        session, kind = (printable(_field(record, name, where, str, "text", "")) for name in ("session", "kind"))
        assert self._block_tokens is not None
        digests = self._shared(record, where)
        if self._is_plain:
            digests = digests + self._plain_blocks(record, where, digests, tokens, self._block_tokens)
        else:
            digests = digests + self._hashed_blocks(record, where)
        wanted = -(-tokens // self._block_tokens)
        if len(digests) != wanted:
            needed = f"{tokens} tokens need {wanted} blocks of {self._block_tokens} tokens"
            raise InputError(f"{where}: {len(digests)} blocks; {needed}.")
        ids = [(self._salt_id, digest) for digest in digests]
        if (at := self._table.conflict(ids)) is not None:
            raise InputError(f"{where}: block {at} follows another prefix earlier on; wanted equal prefixes.")
        self._digests[number] = digests
        return TraceRequest(self._table.keys(ids), tokens, output_tokens, time_ms, session, turn, kind)

    def _shared(self, record: dict[str, Any], where: str) -> list[bytes]:
        """The first blocks, shared with an earlier request of the part."""
        after = record.get("after")
        if after is None:
            return []
        if not isinstance(after, list) or len(after) != 2 or not all(type(each) is int for each in after):
            raise InputError(f"{where}: after is {shown(after)}; wanted [request, blocks].")
        earlier, count = after
        found = self._digests.get(earlier, [])
        if not 1 <= count <= len(found):
            named = f"after names {count} blocks of request {earlier}, which has {len(found)} here"
            raise InputError(f"{where}: {named}; wanted an earlier request of this part.")
        return found[:count]

    def _hashed_blocks(self, record: dict[str, Any], where: str) -> list[bytes]:
        try:
            content = base64.b64decode(record["blocks"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise InputError(f"{where}: blocks is {shown(record.get('blocks'))}; wanted base64.") from None
        if len(content) % DIGEST_BYTES:
            raise InputError(f"{where}: blocks has {len(content)} bytes; wanted a multiple of {DIGEST_BYTES}.")
        return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]

    def _plain_blocks(
        self, record: dict[str, Any], where: str, shared: list[bytes], tokens: int, block_tokens: int
    ) -> list[bytes]:
        ids = record.get("ids")
        if not isinstance(ids, list) or not all(type(each) is int and abs(each) < 1 << 63 for each in ids):
            raise InputError(f"{where}: ids is {shown(ids)}; wanted a list of whole numbers.")
        wanted = max(0, tokens - len(shared) * block_tokens)
        if len(ids) != wanted:
            raise InputError(f"{where}: {len(ids)} ids after {len(shared)} blocks; {tokens} tokens need {wanted} ids.")
        namespace = _field(record, "namespace", where, str, "text", "")
        before = shared[-1] if shared else None
        return block_digests(np.array(ids, np.int64), block_tokens, namespace=namespace, before=before)


# Rows: {"timestamp": t, "input_length": tokens, "output_length": tokens, "hash_ids": [...]} per line
#
# The ids are those of the whole prompt, without the output. A last block that is partly filled may be hashed or not.
# Rows of one session may be apart. A later row may have a `delay` after the reply before it instead of a timestamp.


@dataclass(frozen=True, slots=True)
class RowForm:
    """The keys that tell a form, the usual units, and the key that has the session.

    `are_prefix_ids`: the publisher promises that equal ids mean equal prefixes. Otherwise, the file shows it.
    """

    told_by: tuple[str, ...]
    block_tokens: int
    time_unit: str
    are_prefix_ids: bool
    session: str


#: Bailian: Wang et al., arXiv 2506.02634. Mooncake: Qin et al., arXiv 2407.00079; AIPerf and Dynamo add sessions.
ROW_FORMS = {
    "bailian": RowForm(("chat_id", "hash_ids"), 16, "seconds", are_prefix_ids=False, session="chat_id"),
    "mooncake": RowForm(("hash_ids",), 512, "milliseconds", are_prefix_ids=True, session="session_id"),
}
UNITS_MS = {"seconds": 1e3, "milliseconds": 1.0}
#: Other names of keys, as in Dynamo.
_ALIASES = {
    "created_time": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
}


def read_rows(form: RowForm, paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """A trace per file, hashed by blocks of the form's length or of `reading.block_tokens`."""
    return [_RowReader(form, path, reading).trace() for path in paths]


def mooncake_bytes(trace: Trace) -> bytes:
    """A trace in Mooncake's format, without session, turn and kind."""
    numbers: dict[int, int] = {}
    records = (
        {
            "timestamp": request.time_ms,
            "input_length": request.tokens,
            "output_length": request.output_tokens,
            "hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys.tolist()],
        }
        for request in trace.requests
    )
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _link(record: dict[str, Any], name: str, where: str) -> str | None:
    """The id of a row or of the row before it. None: there is none, as -1, no text or NaN say in files of tables."""
    value = record.get(name)
    if isinstance(value, float) and (value.is_integer() or math.isnan(value)):
        value = None if math.isnan(value) else int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise InputError(f"{where}: {name} is {shown(value)}; wanted a whole number or text.")
    return None if value in (None, "", "-1", -1) else str(value)


class _RowReader:
    """The requests of a file so far, the row before each row, the latest request of each session, what was assumed.

    Until the end of the file the session of a request is the id of its row: a parent may come later in the file.
    """

    def __init__(self, form: RowForm, path: Path, reading: Reading) -> None:
        self._form, self._path, self._reading = form, path, reading
        self._block_tokens = reading.block_tokens or form.block_tokens
        self._unit = reading.time_unit or form.time_unit
        self._table = KeyTable(are_prefix_ids=form.are_prefix_ids)
        self._requests: list[TraceRequest] = []
        self._parents: dict[str, str] = {}
        self._latest: dict[str, TraceRequest] = {}
        self._draw, self._next_start_s = random.Random(reading.seed), 0.0
        self._is_timing_synthetic = self._has_times = False
        self._rows_without_output = 0

    def trace(self) -> Trace:
        for where, record in read_objects(self._path):
            try:
                if isinstance(record, InputError):
                    raise record
                self._requests.append(self._request(record, where))
            except InputError as error:
                self._reading.skip(error)
        requests = sorted(self._requests, key=lambda request: request.time_ms)
        notes = self._notes(are_sorted=requests != self._requests)
        requests = [*self._with_sessions(requests)]
        self._reading.notes += [f"{self._path}: {note}" for note in notes]
        return Trace(
            self._path.stem,
            self._block_tokens,
            requests,
            self._is_timing_synthetic,
            str(self._path),
            sessions_per_hour=self._reading.pace.sessions_per_hour if self._is_timing_synthetic else None,
        )

    def _notes(self, *, are_sorted: bool) -> Iterator[str]:
        if are_sorted:
            yield "rows are not in the order of their timestamps; sorted."
        if self._has_times and self._reading.time_unit is None:
            yield f"times are taken as {self._unit}; if they are not, give --time-unit."
        if self._rows_without_output:
            yield f"{plural(self._rows_without_output, 'row')} without output_length; taken as 0 tokens."
        if not self._form.are_prefix_ids and self._requests:
            yield (
                "equal hash_ids mean equal prefixes."
                if self._table.has_prefix_ids
                else "equal hash_ids follow different prefixes; a block counts as known only after the same blocks."
            )

    def _request(self, record: dict[str, Any], where: str) -> TraceRequest:
        record = {_ALIASES.get(name, name): value for name, value in record.items() if value is not None}
        tokens = whole_number(record, "input_length", where, at_least=1)
        has_output = "output_length" in record
        output_tokens = whole_number(record, "output_length", where) if has_output else 0
        kind = printable(str(_field(record, "type", where, str | int, "text", "")))
        own, parent = (_link(record, name, where) or "" for name in (self._form.session, "parent_chat_id"))
        before = parent or own
        earlier = self._latest.get(self._root(before))
        turn = whole_number(record, "turn", where, at_least=1) if "turn" in record else None
        ids = _block_ids(self._table, record, where, "input_length", tokens, self._block_tokens)
        time_ms = self._arrival_ms(record, where, earlier)
        keys = self._table.keys(ids, unhashed_tail=len(ids) * self._block_tokens < tokens)
        request = TraceRequest(keys, tokens, output_tokens, time_ms, own, turn, kind)
        if own:
            self._parents[own] = before
            self._latest[self._root(own)] = request
        self._rows_without_output += not has_output
        return request

    def _root(self, row: str) -> str:
        """The first row of a row's session, as far as is known."""
        path = {row}
        while (parent := self._parents.get(row, row)) not in path:
            path.add(row := parent)
        self._parents.update(dict.fromkeys(path, row))
        return row

    def _with_sessions(self, requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
        """Requests by time, with the names of their sessions. Without a turn, they are numbered in this order."""
        turns: dict[str, int] = {}
        for request in requests:
            if request.session:
                session = printable(f"{self._path}/{self._root(request.session)}")
                turns[session] = request.turn or turns.get(session, 0) + 1
                yield replace(request, session=session, turn=turns[session])
            else:
                yield request

    def _arrival_ms(self, record: dict[str, Any], where: str, earlier: TraceRequest | None) -> int:
        """When a row arrived; made up without a timestamp: as sessions begin, or after the reply and the delay."""
        unit_ms, pace, delay_ms = UNITS_MS[self._unit], self._reading.pace, None
        self._has_times |= "timestamp" in record or "delay" in record
        if "timestamp" in record:
            return round(unit_ms * duration(record, "timestamp", where, self._unit))
        if "delay" in record:
            delay_ms = unit_ms * duration(record, "delay", where, self._unit)
        elif "delay_ms" in record:
            delay_ms = duration(record, "delay_ms", where, "milliseconds")
        self._is_timing_synthetic = True
        if earlier is None:
            start_s = self._next_start_s
            self._next_start_s += pace.session_gap_s(self._draw)
            return round(1e3 * start_s)
        if delay_ms is None:
            return earlier.time_ms + round(1e3 * pace.request_gap_s(self._draw, earlier.output_tokens, is_tool=False))
        return earlier.time_ms + round(1e3 * earlier.output_tokens / pace.output_tokens_per_s + delay_ms)


# Coding agent: a JSON file per session, with block ids of its own
#
# A session's `t` counts seconds from its start. The files do not say when sessions begin: here they begin as a seeded
# Poisson process, in the order of the files, so the time between sessions is synthetic. Two rules of the format:
#
#   CA1  Only full blocks are hashed. The rest of a prompt becomes a last block that no other request shares.
#   CA2  `t` of a sub-agent is the end of its work. Its own requests count from its start, `duration_ms` earlier. (Then
#        sub-agents of one request start within 0.02 s of one another and of that request.)


_MOST_DEPTH = 16


def read_coding_agent(paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """One trace of all sessions; the first one begins at 0, and the seed decides when the others begin."""
    draw = random.Random(reading.seed)
    sessions: list[Trace] = []
    sources: dict[str, str] = {}
    start_s = 0.0
    for path in paths:
        try:
            session = _Session(path, reading)
            if sessions and session.block_tokens != sessions[0].block_tokens:
                found, wanted = session.block_tokens, sessions[0].block_tokens
                raise InputError(f"{session.where}: block_size is {found}; wanted {wanted}, as before.")
            if session.name in sources:
                used = f"the id {session.name!r} was already used at {sources[session.name]}"
                raise InputError(f"{session.where}: {used}; wanted distinct ids.")
        except InputError as error:
            reading.skip(error)
            continue
        sources[session.name] = session.where
        requests = [replace(each, time_ms=each.time_ms + round(1e3 * start_s)) for each in session.requests()]
        sessions.append(Trace(path.stem, session.block_tokens, requests, True, str(path)))
        start_s += reading.pace.session_gap_s(draw)
    rate = reading.pace.sessions_per_hour
    return [replace(join_traces(sessions), name=paths[0].stem, sessions_per_hour=rate)] if sessions else []


@dataclass(frozen=True, slots=True)
class _Agent:
    """The requests of the main agent or a sub-agent, with a clock of their own."""

    session: str
    kind: str
    start_s: float
    records: list[Any]
    where: str
    depth: int = 0


class _Session:
    def __init__(self, path: Path, reading: Reading) -> None:
        self._reading = reading
        self._table = KeyTable()
        document, self.where, self._lines = _session_document(path)
        self.block_tokens = whole_number(document, "block_size", self.where, at_least=1, at_most=MOST_BLOCK_TOKENS)
        records = _field(document, "requests", self.where, list, "a list")
        self.name = printable(str(document.get("id") or path))
        self._main = _Agent(self.name, "main", 0.0, records, str(path))

    def requests(self) -> list[TraceRequest]:
        """All requests, those of sub-agents included, by time from the session's start."""
        return sorted(self._requests_of(self._main), key=lambda request: request.time_ms)

    def _requests_of(self, agent: _Agent) -> Iterator[TraceRequest]:
        turn = 0
        for index, record in enumerate(agent.records):
            line = f":{self._lines[index]}" if agent is self._main and index < len(self._lines) else ""
            where = f"{agent.where}{line}: requests[{index}]"
            try:
                if not isinstance(record, dict):
                    raise InputError(f"{where} is {shown(record)}; wanted an object.")
                if record.get("type") == "subagent":
                    found = self._requests_of(self._subagent(record, agent, where))
                else:
                    found = iter([self._request(record, agent, turn + 1, where)])
                    turn += 1
            except InputError as error:
                self._reading.skip(error)
                continue
            yield from found

    def _subagent(self, record: dict[str, Any], agent: _Agent, where: str) -> _Agent:
        if agent.depth == _MOST_DEPTH:
            raise InputError(f"{where} is a sub-agent, {_MOST_DEPTH} sub-agents deep; wanted fewer.")
        records = _field(record, "requests", where, list, "a list")
        duration_s = whole_number(record, "duration_ms", where) / 1e3 if "duration_ms" in record else 0.0
        start_s = agent.start_s + max(0.0, duration(record, "t", where, "seconds") - duration_s)
        name = printable(f"{agent.session}/{record.get('agent_id', where)}")
        return _Agent(name, "subagent", start_s, records, where, agent.depth + 1)

    def _request(self, record: dict[str, Any], agent: _Agent, turn: int, where: str) -> TraceRequest:
        time_s = agent.start_s + duration(record, "t", where, "seconds")
        tokens = whole_number(record, "in", where, at_least=1)
        output_tokens = whole_number(record, "out", where)
        ids = _block_ids(self._table, record, where, "in", tokens, self.block_tokens)
        keys = self._table.keys(ids, unhashed_tail=len(ids) * self.block_tokens < tokens)
        return TraceRequest(keys, tokens, output_tokens, round(1e3 * time_s), agent.session, turn, agent.kind)


def _session_document(path: Path) -> tuple[dict[str, Any], str, list[int]]:
    """A session, where it begins, and the lines where its requests begin."""
    text = read_text(path, "a session", MOST_RECORD_BYTES)
    (line, document), *more = document_records(text, len(text) - len(text.lstrip(BLANK)), path)
    where = f"{path}:{line}"
    for value in (document, *(value for _, value in more)):
        if isinstance(value, InputError):
            raise value
    if more or not isinstance(document, dict):
        raise InputError(f"{where}: found {shown(document)}; wanted one object with block_size and requests.")
    found = re.search(r'"requests"\s*:\s*(?=\[)', text)
    records = () if found is None else document_records(text, found.end(), path)
    return document, where, [line for line, _ in records]
