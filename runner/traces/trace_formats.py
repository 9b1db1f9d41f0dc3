"""Readers and writers of the trace formats with block hashes: `read_compact`, `read_mooncake`, `read_coding_agent`.

A bad line stops a reader, or with `skip_bad` is counted and left out. This file never imports MLX.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from radixcache.observe.trace import CLOCKS, DIGEST_BYTES, FORMAT, VERSION, Clock, TraceWriter, block_digests
from runner.text import shown
from runner.traces.trace import (
    MOST_BLOCK_TOKENS,
    KeyTable,
    Reading,
    Trace,
    TraceError,
    TraceRequest,
    hash_ids,
    join_traces,
    read_lines,
    seconds,
    unreadable,
    whole_number,
)

MOONCAKE_BLOCK_TOKENS = 512


def _field(record: dict[str, Any], name: str, where: str, kind: type[Any], wanted: str, default: Any = None) -> Any:
    value = record.get(name, default)
    if not isinstance(value, kind):
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted {wanted}.")
    return value


def _require_known_prefix(table: KeyTable, ids: Sequence[int], where: str) -> None:
    conflict = table.conflict(ids)
    if conflict is not None:
        raise TraceError(
            f"{where}: hash id {ids[conflict]} (index {conflict}) follows another prefix in an earlier line; wanted"
            " equal ids only for equal prefixes."
        )


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
        for (where, record), (_, following) in pairwise(chain(read_lines(self._path), [("", None)])):
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
            except TraceError as error:
                self._reading.skip(error)
        self._end_part()
        source = str(self._path)
        return Trace(self._path.stem, self._block_tokens or 1, self._requests, self._is_timing_synthetic, source)

    def _begin_part(self, header: dict[str, Any], where: str) -> None:
        # Even a bad header ends the part before it.
        self._end_part()
        if header.get("version") != VERSION:
            raise TraceError(f"{where}: version is {shown(header.get('version'))}; wanted {VERSION}.")
        block_tokens = whole_number(header, "block_tokens", where, at_least=1, at_most=MOST_BLOCK_TOKENS)
        if self._block_tokens not in (None, block_tokens):
            raise TraceError(f"{where}: block_tokens is {block_tokens}; wanted {self._block_tokens}, as before.")
        if header.get("clock") not in CLOCKS:
            raise TraceError(f"{where}: clock is {shown(header.get('clock'))}; wanted one of {', '.join(CLOCKS)}.")
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
            raise TraceError(f"{where}: no header; wanted a line with format {FORMAT!r} first.")
        number = whole_number(record, "request", where)
        if number in self._digests:
            self._end_part()
            raise TraceError(f"{where}: request {number} is there twice; wanted a header before each part of a trace.")
        time_ms = whole_number(record, "time", where)
        tokens = whole_number(record, "tokens", where, at_least=1)
        output_tokens = whole_number(record, "output", where)
        turn = whole_number(record, "turn", where) if "turn" in record else None
        session, kind = (_field(record, name, where, str, "text", "") for name in ("session", "kind"))
        assert self._block_tokens is not None
        digests = self._shared(record, where)
        if self._is_plain:
            digests = digests + self._plain_blocks(record, where, digests, tokens, self._block_tokens)
        else:
            digests = digests + self._hashed_blocks(record, where)
        wanted = -(-tokens // self._block_tokens)
        if len(digests) != wanted:
            raise TraceError(
                f"{where}: {len(digests)} blocks; {tokens} tokens need {wanted} blocks of {self._block_tokens} tokens."
            )
        ids = [(self._salt_id, digest) for digest in digests]
        conflict = self._table.conflict(ids)
        if conflict is not None:
            raise TraceError(f"{where}: block {conflict} follows another prefix earlier on; wanted equal prefixes.")
        self._digests[number] = digests
        return TraceRequest(self._table.keys(ids), tokens, output_tokens, time_ms, session, turn, kind)

    def _shared(self, record: dict[str, Any], where: str) -> list[bytes]:
        """The first blocks, shared with an earlier request of the part."""
        after = record.get("after")
        if after is None:
            return []
        if not isinstance(after, list) or len(after) != 2 or not all(type(each) is int for each in after):
            raise TraceError(f"{where}: after is {shown(after)}; wanted [request, blocks].")
        earlier, count = after
        found = self._digests.get(earlier, [])
        if not 1 <= count <= len(found):
            raise TraceError(
                f"{where}: after names {count} blocks of request {earlier}, which has {len(found)} here; wanted an"
                " earlier request of this part."
            )
        return found[:count]

    def _hashed_blocks(self, record: dict[str, Any], where: str) -> list[bytes]:
        try:
            content = base64.b64decode(record["blocks"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise TraceError(f"{where}: blocks is {shown(record.get('blocks'))}; wanted base64.") from None
        if len(content) % DIGEST_BYTES:
            raise TraceError(f"{where}: blocks has {len(content)} bytes; wanted a multiple of {DIGEST_BYTES}.")
        return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]

    def _plain_blocks(
        self, record: dict[str, Any], where: str, shared: list[bytes], tokens: int, block_tokens: int
    ) -> list[bytes]:
        ids = record.get("ids")
        if not isinstance(ids, list) or not all(type(each) is int and abs(each) < 1 << 63 for each in ids):
            raise TraceError(f"{where}: ids is {shown(ids)}; wanted a list of whole numbers.")
        wanted = max(0, tokens - len(shared) * block_tokens)
        if len(ids) != wanted:
            raise TraceError(f"{where}: {len(ids)} ids after {len(shared)} blocks; {tokens} tokens need {wanted} ids.")
        namespace = _field(record, "namespace", where, str, "text", "")
        before = shared[-1] if shared else None
        return block_digests(np.array(ids, np.int64), block_tokens, namespace=namespace, before=before)


# Mooncake: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]} per line
#
# A block is 512 tokens, equal ids mean equal prefixes, outputs are not hashed. Source: the traces published with Qin et
# al., Mooncake, arXiv 2407.00079.


def read_mooncake(paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """A trace per file, hashed by blocks of 512 tokens or of `reading.block_tokens`."""
    block_tokens = reading.block_tokens or MOONCAKE_BLOCK_TOKENS
    traces = []
    for path in paths:
        table = KeyTable()
        requests: list[TraceRequest] = []
        for where, record in read_lines(path):
            try:
                if isinstance(record, TraceError):
                    raise record
                earlier_ms = requests[-1].time_ms if requests else 0
                requests.append(_mooncake_request(record, where, table, block_tokens, earlier_ms))
            except TraceError as error:
                reading.skip(error)
        traces.append(Trace(path.stem, block_tokens, requests, False, str(path)))
    return traces


def mooncake_bytes(trace: Trace) -> bytes:
    """A trace in Mooncake's format, which has no field for session, turn and kind."""
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


def _mooncake_request(
    record: dict[str, Any], where: str, table: KeyTable, block_tokens: int, earlier_ms: int
) -> TraceRequest:
    time_ms = whole_number(record, "timestamp", where)
    tokens = whole_number(record, "input_length", where, at_least=1)
    output_tokens = whole_number(record, "output_length", where)
    ids = hash_ids(record, where)
    wanted = -(-tokens // block_tokens)
    if len(ids) != wanted:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} ids; input_length {tokens} needs {wanted} blocks of"
            f" {block_tokens} tokens."
        )
    if time_ms < earlier_ms:
        raise TraceError(
            f"{where}: timestamp {time_ms} is before {earlier_ms} of an earlier line; wanted ascending timestamps."
        )
    _require_known_prefix(table, ids, where)
    return TraceRequest(table.keys(ids), tokens, output_tokens, time_ms)


# Coding agent: a JSON file per session, with block ids of its own
#
# A session's `t` counts seconds from its start. The files do not say when sessions begin: here they begin as a seeded
# Poisson process, in the order of the files, so the time between sessions is synthetic. Two rules of the format:
#
#   CA1  Only full blocks are hashed. The rest of a prompt becomes a last block that no other request shares.
#   CA2  `t` of a sub-agent is the end of its work. Its own requests count from its start, `duration_ms` earlier. (Then
#        sub-agents of one request start within 0.02 s of one another and of that request.)


def read_coding_agent(paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """One trace of all sessions; the first one begins at 0, and the seed decides when the others begin."""
    draw = random.Random(reading.seed)
    sessions: list[Trace] = []
    start_s = 0.0
    for path in paths:
        try:
            session = _Session(path, reading)
            if sessions and session.block_tokens != sessions[0].block_tokens:
                raise TraceError(
                    f"{path}: block_size is {session.block_tokens}; wanted {sessions[0].block_tokens}, as before."
                )
        except TraceError as error:
            reading.skip(error)
            continue
        requests = [replace(each, time_ms=each.time_ms + round(1e3 * start_s)) for each in session.requests()]
        sessions.append(Trace(path.stem, session.block_tokens, requests, True, str(path)))
        start_s += reading.pace.session_gap_s(draw)
    return [replace(join_traces(sessions), name=paths[0].stem)] if sessions else []


@dataclass(frozen=True, slots=True)
class _Agent:
    """The requests of the main agent or a sub-agent, with a clock of their own."""

    session: str
    kind: str
    start_s: float
    records: list[Any]
    where: str


class _Session:
    def __init__(self, path: Path, reading: Reading) -> None:
        self._reading = reading
        self._table = KeyTable()
        document = _session_document(path)
        self.block_tokens = whole_number(document, "block_size", str(path), at_least=1, at_most=MOST_BLOCK_TOKENS)
        records, session_id = _field(document, "requests", str(path), list, "a list"), document.get("id")
        self._main = _Agent(session_id if isinstance(session_id, str) else path.stem, "main", 0.0, records, str(path))

    def requests(self) -> list[TraceRequest]:
        """All requests, those of sub-agents included, by time from the session's start."""
        return sorted(self._requests_of(self._main), key=lambda request: request.time_ms)

    def _requests_of(self, agent: _Agent) -> Iterator[TraceRequest]:
        turn = 0
        for index, record in enumerate(agent.records):
            where = f"{agent.where}: requests[{index}]"
            try:
                if not isinstance(record, dict):
                    raise TraceError(f"{where} is {shown(record)}; wanted an object.")
                if record.get("type") == "subagent":
                    found = self._requests_of(self._subagent(record, agent, where))
                else:
                    found = iter([self._request(record, agent, turn + 1, where)])
                    turn += 1
            except TraceError as error:
                self._reading.skip(error)
                continue
            yield from found

    def _subagent(self, record: dict[str, Any], agent: _Agent, where: str) -> _Agent:
        records = _field(record, "requests", where, list, "a list")
        duration_s = whole_number(record, "duration_ms", where) / 1e3 if "duration_ms" in record else 0.0
        start_s = agent.start_s + max(0.0, seconds(record, "t", where) - duration_s)
        return _Agent(f"{agent.session}/{record.get('agent_id', where)}", "subagent", start_s, records, where)

    def _request(self, record: dict[str, Any], agent: _Agent, turn: int, where: str) -> TraceRequest:
        time_s = agent.start_s + seconds(record, "t", where)
        tokens = whole_number(record, "in", where, at_least=1)
        output_tokens = whole_number(record, "out", where)
        ids = hash_ids(record, where)
        full, rest = divmod(tokens, self.block_tokens)
        # A last block that is only partly filled may be hashed too.
        if len(ids) not in (full, full + bool(rest)):
            raise TraceError(
                f"{where}: hash_ids has {len(ids)} ids; in {tokens} needs {full} full blocks of"
                f" {self.block_tokens} tokens."
            )
        _require_known_prefix(self._table, ids, where)
        keys = self._table.keys(ids, unhashed_tail=rest > 0 and len(ids) == full)
        return TraceRequest(keys, tokens, output_tokens, round(1e3 * time_s), agent.session, turn, agent.kind)


def _session_document(path: Path) -> dict[str, Any]:
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
