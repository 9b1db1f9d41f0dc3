"""Readers and writers of the trace formats with block hashes. `FORMS` is the table of all known formats.

A bad line stops a reader. With `skip_bad`, the reader counts the line and goes on. This file never imports MLX.
"""

from __future__ import annotations

import base64
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from radixcache.observe.trace import CLOCKS, DIGEST_BYTES, FORMAT, VERSION, Clock, TraceWriter, block_digests
from runner.files import InputError, Record, document_records, expect, note_id, read_objects, read_text
from runner.text import plural, printable, shortened, shown
from runner.traces.trace import MOST_EXACT, Fields, KeyTable, Reading, Trace, TraceRequest, join_traces

MOST_BLOCK_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class TraceForm:
    """A format of traces: a row of `FORMS`.

    Attributes:
        told_by: keys at the beginning of a file that identify the format.
        read: reads files in the format and returns one or more traces.
        block_tokens, time_unit: the defaults, if the user may name others; empty if the files name them.
        are_prefix_ids: the publisher promises that equal ids mean equal prefixes. Otherwise, the reader checks it.
        session: the key of the session.
    """

    name: str
    told_by: tuple[str, ...]
    read: Callable[[TraceForm, Sequence[Path], Reading], Iterable[Trace]]
    block_tokens: int = 0
    time_unit: str = ""
    are_prefix_ids: bool = True
    session: str = ""


def _block_ids(
    table: KeyTable,
    fields: Fields,
    length: str,
    tokens: int,
    block_tokens: int,
    *,
    are_prefix_ids: bool = True,
    is_named: bool = True,
) -> list[Any]:
    """Return a record's `hash_ids`, one for each block of its `tokens`. A last block that is not full may have no id.

    `length`: the record's key of `tokens`. `is_named`: the file names the length of its blocks; else the user may.
    """
    wanted = "a list of whole numbers, or of texts"
    ids: list[Any] = fields.value("hash_ids", list, wanted)
    if float in map(type, ids):
        # A float above MOST_EXACT may stand for several ids, so it stays a float and is refused.
        ids = [int(x) if isinstance(x, float) and x.is_integer() and 0 <= x <= MOST_EXACT else x for x in ids]
    # Refuse numbers beside texts: 1 and "1" could be the same block.
    expect({*map(type, ids)} in (set(), {int}, {str}), f"{fields.where}: hash_ids is", ids, wanted)
    full, rest = divmod(tokens, block_tokens)
    if len(ids) not in (full, full + bool(rest)):
        wanted = f"{length} {tokens} needs {full} full blocks of {block_tokens} tokens"
        advice = "" if is_named else " Are the blocks of another length? Name it with --block-tokens."
        raise InputError(f"{fields.where}: hash_ids has {len(ids)} ids; {wanted}.{advice}")
    if are_prefix_ids and (at := table.conflict(ids)) is not None:
        found = f"hash id {shortened(repr(ids[at]), 40)} (index {at}) follows another prefix than before"
        raise InputError(f"{fields.where}: {found}; wanted equal ids only for equal prefixes.")
    return ids


# Compact: what PrefixCache(trace=FILE) records; radixcache/observe/trace.py describes the format
#
# A restart or a failed write begins a new part of the file, with a header. The times of a part continue from the end
# of the part before it. Requests are written when they end; the reader sorts them by arrival.


def _is_compact_header(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == FORMAT


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


@dataclass(frozen=True, slots=True)
class _Part:
    """A header and the requests after it, in the order of the file. `digests`: request number -> its blocks."""

    block_tokens: int
    clock: str
    salt_id: str
    is_plain: bool
    requests: list[TraceRequest] = field(default_factory=list)
    digests: dict[int, list[bytes]] = field(default_factory=dict)

    def add(self, number: int, fields: Fields, table: KeyTable) -> None:
        time_ms = fields.whole_number("time")
        tokens = fields.whole_number("tokens", at_least=1)
        output_tokens = fields.whole_number("output")
        turn = fields.whole_number("turn") if "turn" in fields.record else None
        session, kind = (printable(fields.value(name, str, "text", "")) for name in ("session", "kind"))
        shared = self._shared_blocks(fields)
        own = self._plain_blocks(fields, shared, tokens) if self.is_plain else _hashed_blocks(fields)
        digests, wanted = shared + own, -(-tokens // self.block_tokens)
        if len(digests) != wanted:
            needed = f"{tokens} tokens need {wanted} blocks of {self.block_tokens} tokens"
            raise InputError(f"{fields.where}: {len(digests)} blocks; {needed}.")
        ids = [(self.salt_id, digest) for digest in digests]
        if (at := table.conflict(ids)) is not None:
            raise InputError(f"{fields.where}: block {at} follows another prefix earlier on; wanted equal prefixes.")
        self.digests[number] = digests
        self.requests.append(TraceRequest(table.keys(ids), tokens, output_tokens, time_ms, session, turn, kind))

    def _shared_blocks(self, fields: Fields) -> list[bytes]:
        """Return the first blocks, which an earlier request of the part has, too."""
        after = fields.record.get("after")
        if after is None:
            return []
        is_pair = isinstance(after, list) and [type(each) for each in after] == [int, int]
        expect(is_pair, f"{fields.where}: after is", after, "[request, blocks]")
        earlier, count = after
        found = self.digests.get(earlier, [])
        if not 1 <= count <= len(found):
            named = f"after names {count} blocks of request {earlier}, which has {len(found)} here"
            raise InputError(f"{fields.where}: {named}; wanted an earlier request of this part.")
        return found[:count]

    def _plain_blocks(self, fields: Fields, shared: list[bytes], tokens: int) -> list[bytes]:
        ids: Any = fields.record.get("ids")
        are_ids = isinstance(ids, list) and all(type(each) is int and abs(each) < 1 << 63 for each in ids)
        expect(are_ids, f"{fields.where}: ids is", ids, "a list of whole numbers")
        wanted = max(0, tokens - len(shared) * self.block_tokens)
        if len(ids) != wanted:
            found = f"{len(ids)} ids after {len(shared)} blocks"
            raise InputError(f"{fields.where}: {found}; {tokens} tokens need {wanted} ids.")
        namespace = fields.value("namespace", str, "text", "")
        before = shared[-1] if shared else None
        return block_digests(np.array(ids, np.int64), self.block_tokens, namespace=namespace, before=before)


def _hashed_blocks(fields: Fields) -> list[bytes]:
    blocks = fields.value("blocks", str, "base64")
    try:
        content = base64.b64decode(blocks, validate=True)
    except ValueError:
        raise InputError(f"{fields.where}: blocks is {shown(blocks)}; wanted base64.") from None
    if len(content) % DIGEST_BYTES:
        raise InputError(f"{fields.where}: blocks has {len(content)} bytes; wanted a multiple of {DIGEST_BYTES}.")
    return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]


def read_compact(_: TraceForm, paths: Sequence[Path], reading: Reading) -> Iterator[Trace]:
    """Yield a trace per file. An incomplete last line of a part is skipped and counted, even without `skip_bad`."""
    for path in paths:
        parts = _parts(path, reading)
        requests: list[TraceRequest] = []
        for part in parts:  # its times continue from the end of the part before it
            own = sorted(part.requests, key=lambda request: request.time_ms)
            earlier_ms = requests[-1].time_ms if requests else 0
            requests += [replace(each, time_ms=each.time_ms + earlier_ms - own[0].time_ms) for each in own]
        is_synthetic = any(part.clock != "ms" for part in parts)
        yield Trace(path.stem, parts[0].block_tokens if parts else 1, requests, is_synthetic, str(path))


def _parts(path: Path, reading: Reading) -> list[_Part]:
    table, parts = KeyTable(), list[_Part]()
    part: _Part | None = None  # a header must come first
    end = Record({"format": FORMAT}, path, 0)
    for record, following in pairwise(chain(read_objects(path, "a trace"), [end])):
        with reading.skipping():
            fields = Fields(record.value, record.where)
            if _is_compact_header(record.value):
                part = None  # even a bad header ends the part before it
                parts.append(part := _part_of(fields, parts))
            elif _is_compact_header(following.value) and isinstance(record.value, InputError):
                reading.skipped.append(f"{fields.where}: an incomplete line, as the writer was stopped here; skipped.")
            elif isinstance(record.value, InputError):
                raise record.value
            elif part is None:
                raise InputError(f"{fields.where}: no header; wanted a line with format {FORMAT!r} first.")
            elif (number := fields.whole_number("request")) in part.digests:
                part = None
                wanted = "wanted a header before each part of a trace"
                raise InputError(f"{fields.where}: request {number} is there twice; {wanted}.")
            else:
                part.add(number, fields, table)
    return parts


def _part_of(header: Fields, before: Sequence[_Part]) -> _Part:
    """The part that a header begins. InputError: the header is wrong."""
    version, clock = header.record.get("version"), header.record.get("clock")
    expect(version == VERSION, f"{header.where}: version is", version, f"{VERSION}")
    block_tokens = header.whole_number("block_tokens", at_least=1, at_most=MOST_BLOCK_TOKENS)
    wanted = before[0].block_tokens if before else block_tokens
    expect(block_tokens == wanted, f"{header.where}: block_tokens is", block_tokens, f"{wanted}, as before")
    expect(clock in CLOCKS, f"{header.where}: clock is", clock, f"one of {', '.join(CLOCKS)}")
    return _Part(block_tokens, str(clock), str(header.record.get("salt_id")), header.record.get("plain") is True)


# Rows: {"timestamp": t, "input_length": tokens, "output_length": tokens, "hash_ids": [...]} per line
#
# `hash_ids` cover the whole prompt, not the output. A last block that is not full may have an id or none. Rows of other
# sessions may stand between rows of a session. Instead of a timestamp, a row may have a `delay` after the last reply.


UNITS_MS = {"seconds": 1e3, "milliseconds": 1.0}
#: Other names of keys, as in Dynamo.
_ALIASES = {"created_time": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}


def read_rows(form: TraceForm, paths: Sequence[Path], reading: Reading) -> Iterator[Trace]:
    """Yield a trace per file. The length of blocks is `reading.block_tokens`, or that of the form if this is 0."""
    return (_RowReader(form, path, reading).trace() for path in paths)


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


def _link(fields: Fields, name: str) -> str:
    """Return the id of a row, or of the row before it; "": none. Files from tables write -1, "" or NaN for none."""
    value = fields.record.get(name)
    if isinstance(value, float) and (value.is_integer() or math.isnan(value)):
        value = None if math.isnan(value) else int(value)
    is_id = isinstance(value, str | int | None) and not isinstance(value, bool)
    expect(is_id, f"{fields.where}: {name} is", value, "a whole number or text")
    return "" if value in (None, "-1", -1) else str(value)


class _RowReader:
    """Reads one file: the requests so far, the parent of each row, the latest request of each session.

    A parent may come later in the file. So until the end of the file, `session` of a request is the id of its row.
    """

    def __init__(self, form: TraceForm, path: Path, reading: Reading) -> None:
        self._form, self._path, self._reading = form, path, reading
        self._block_tokens = reading.block_tokens or form.block_tokens
        self._unit = reading.time_unit or form.time_unit
        self._table = KeyTable()
        self._requests: list[TraceRequest] = []
        self._parents: dict[str, str] = {}
        self._latest: dict[str, TraceRequest] = {}
        self._draw, self._next_start_s = random.Random(reading.seed), 0.0
        self._is_timing_synthetic = self._has_times = False
        self._rows_without_output = 0

    def trace(self) -> Trace:
        for record in read_objects(self._path, "a trace"):
            with self._reading.skipping():
                if isinstance(record.value, InputError):
                    raise record.value
                self._requests.append(self._request(record))
        requests = sorted(self._requests, key=lambda request: request.time_ms)
        notes = self._notes(are_sorted=requests != self._requests)
        requests = [*self._with_sessions(requests)]
        self._reading.notes += [f"{self._path}: {note}" for note in notes]
        is_made_up, source = self._is_timing_synthetic, str(self._path)
        rate = self._reading.pace.sessions_per_hour if is_made_up else None
        return Trace(self._path.stem, self._block_tokens, requests, is_made_up, source, sessions_per_hour=rate)

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

    def _request(self, record: Record) -> TraceRequest:
        given = {_ALIASES.get(name, name): value for name, value in record.value.items() if value is not None}
        fields = Fields(given, record.where)
        tokens = fields.whole_number("input_length", at_least=1)
        has_output = "output_length" in given
        output_tokens = fields.whole_number("output_length") if has_output else 0
        kind = printable(str(fields.value("type", str | int, "text", "")))
        own, parent = _link(fields, self._form.session), _link(fields, "parent_chat_id")
        before = parent or own
        earlier = self._latest.get(self._root(before))
        turn = fields.whole_number("turn", at_least=1) if "turn" in given else None
        block_tokens, are_prefix_ids = self._block_tokens, self._form.are_prefix_ids
        of_ids = {"are_prefix_ids": are_prefix_ids, "is_named": False}
        ids = _block_ids(self._table, fields, "input_length", tokens, block_tokens, **of_ids)
        time_ms = self._arrival_ms(fields, earlier)
        keys = self._table.keys(ids, unhashed_tail=len(ids) * block_tokens < tokens)
        request = TraceRequest(keys, tokens, output_tokens, time_ms, own, turn, kind)
        if own:
            self._parents[own] = before
            self._latest[self._root(own)] = request
        self._rows_without_output += not has_output
        return request

    def _root(self, row: str) -> str:
        """Return the first known row of a row's session."""
        path = {row}
        while (parent := self._parents.get(row, row)) not in path:
            path.add(row := parent)
        self._parents.update(dict.fromkeys(path, row))
        return row

    def _with_sessions(self, requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield the requests with the names of their sessions. A request without a turn gets the next number."""
        turns: dict[str, int] = {}
        for request in requests:
            if request.session:
                session = printable(f"{self._path}/{self._root(request.session)}")
                turns[session] = request.turn or turns.get(session, 0) + 1
                yield replace(request, session=session, turn=turns[session])
            else:
                yield request

    def _arrival_ms(self, fields: Fields, earlier: TraceRequest | None) -> int:
        """Return when a row arrived. Without a timestamp: a made-up start, or the last reply's end plus the delay."""
        unit_ms, pace, delay_ms = UNITS_MS[self._unit], self._reading.pace, None
        names = fields.record.keys()
        self._has_times |= not names.isdisjoint(("timestamp", "delay"))
        if "timestamp" in names:
            return round(unit_ms * fields.duration("timestamp", self._unit))
        if "delay" in names:
            delay_ms = unit_ms * fields.duration("delay", self._unit)
        elif "delay_ms" in names:
            delay_ms = fields.duration("delay_ms", "milliseconds")
        self._is_timing_synthetic = True
        if earlier is None:
            start_s = self._next_start_s
            self._next_start_s += pace.session_gap_s(self._draw)
            return round(1e3 * start_s)
        if delay_ms is None:
            return earlier.time_ms + round(1e3 * pace.request_gap_s(self._draw, earlier.output_tokens, is_tool=False))
        return earlier.time_ms + round(1e3 * earlier.output_tokens / pace.output_tokens_per_s + delay_ms)


# Coding agent: a JSON file per session; block ids mean nothing in other files
#
# `t` counts seconds from the start of the session. The files do not say when sessions begin: here the starts are a
# seeded Poisson process, in the order of the files, so the time between sessions is synthetic. Two rules of the format:
#
#   CA1  Only full blocks are hashed. The rest of a prompt becomes a last block that no other request shares.
#   CA2  `t` of a sub-agent is when it ended; it started `duration_ms` earlier. `t` of its requests counts from there.
#        (Read like this, the sub-agents of one request start within 0.02 s of one another and of that request.)


_MOST_DEPTH = 16


def read_coding_agent(_: TraceForm, paths: Sequence[Path], reading: Reading) -> Iterator[Trace]:
    """Yield one trace of all sessions. The first session begins at 0; the seed decides when other sessions begin."""
    draw = random.Random(reading.seed)
    sessions: list[Trace] = []
    sources: dict[str, str] = {}
    start_s, rate = 0.0, reading.pace.sessions_per_hour
    for path in paths:
        with reading.skipping():
            text = read_text(path, "a session")
            documents = [*document_records(text, path)]
            for each in documents:
                if isinstance(each.value, InputError):
                    raise each.value
            document, where = documents[0].value, documents[0].where
            is_one = isinstance(document, dict) and len(documents) == 1
            expect(is_one, f"{where}: found", document, "one object with block_size and requests")
            fields = Fields(document, where)
            block_tokens = fields.whole_number("block_size", at_least=1, at_most=MOST_BLOCK_TOKENS)
            name, records = printable(str(document.get("id") or path)), fields.value("requests", list, "a list")
            found = re.search(r'"requests"\s*:\s*(?=\[)', text)
            lines = [each.line for each in document_records(text, path, found.end())] if found else []
            if sessions and block_tokens != sessions[0].block_tokens:
                wanted = f"{sessions[0].block_tokens}, as before"
                raise InputError(f"{where}: block_size is {block_tokens}; wanted {wanted}.")
            note_id(name, where, sources)
            places = [f"{path}:{line}" for line in lines[: len(records)]]
            places += [str(path)] * (len(records) - len(places))
            session = _Session(reading, KeyTable(), block_tokens)
            requests = sorted(session.requests(records, places, name), key=lambda request: request.time_ms)
            requests = [replace(each, time_ms=each.time_ms + round(1e3 * start_s)) for each in requests]
            sessions.append(Trace(path.stem, block_tokens, requests, True, str(path)))
            start_s += reading.pace.session_gap_s(draw)
    if sessions:
        yield replace(join_traces(sessions), name=paths[0].stem, sessions_per_hour=rate)


@dataclass(frozen=True)
class _Session:
    """The file of a session. All its blocks share one table."""

    reading: Reading
    table: KeyTable
    block_tokens: int

    def requests(
        self, records: list[Any], places: Sequence[str], name: str, start_s: float = 0.0, depth: int = 0
    ) -> Iterator[TraceRequest]:
        """Yield the requests of an agent that starts at `start_s`, and of its sub-agents. Depth 0: the main agent."""
        turn = 0
        for index, (record, place) in enumerate(zip(records, places, strict=True)):
            where = f"{place}: requests[{index}]"
            with self.reading.skipping():
                expect(isinstance(record, dict), f"{where} is", record, "an object")
                fields = Fields(record, where)
                if record.get("type") == "subagent":
                    if depth == _MOST_DEPTH:
                        raise InputError(f"{where} is a sub-agent, {_MOST_DEPTH} sub-agents deep; wanted fewer.")
                    own = fields.value("requests", list, "a list")
                    duration_s = fields.whole_number("duration_ms") / 1e3 if "duration_ms" in record else 0.0
                    begin_s = start_s + max(0.0, fields.duration("t", "seconds") - duration_s)
                    agent = printable(f"{name}/{record.get('agent_id', where)}")
                    yield from self.requests(own, [where] * len(own), agent, begin_s, depth + 1)
                    continue
                time_ms = round(1e3 * (start_s + fields.duration("t", "seconds")))
                tokens, output_tokens = fields.whole_number("in", at_least=1), fields.whole_number("out")
                ids = _block_ids(self.table, fields, "in", tokens, self.block_tokens)
                keys = self.table.keys(ids, unhashed_tail=len(ids) * self.block_tokens < tokens)
                turn += 1
                kind = "subagent" if depth else "main"
                yield TraceRequest(keys, tokens, output_tokens, time_ms, name, turn, kind)


#: Bailian: Wang et al., arXiv 2506.02634. Mooncake: Qin et al., arXiv 2407.00079; AIPerf and Dynamo add sessions.
FORMS = (
    TraceForm("compact", (FORMAT,), read_compact),
    TraceForm("coding-agent", ("block_size", "requests"), read_coding_agent),
    TraceForm("bailian", ("chat_id", "hash_ids"), read_rows, 16, "seconds", are_prefix_ids=False, session="chat_id"),
    TraceForm("mooncake", ("hash_ids",), read_rows, 512, "milliseconds", session="session_id"),
)
