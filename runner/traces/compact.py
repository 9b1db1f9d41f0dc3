"""Our own compact traces, as a live cache records them; the format is described in radixcache/observe/trace.py.

A file may have several parts, each behind a header: the cache was restarted, or a write failed. Times of a part count
on from the end of the part before it. Requests are written when they end; here they come by the time they arrived.
"""

import base64
import binascii
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from radixcache.observe.trace import CLOCKS, DIGEST_BYTES, FORMAT, VERSION, Clock, TraceWriter, block_digests
from runner.text import shown
from runner.traces.trace import (
    MOST_BLOCK_TOKENS,
    BadLines,
    KeyTable,
    Trace,
    TraceError,
    TraceLine,
    TraceRequest,
    read_lines,
    whole_number,
)


def is_header(record: dict[str, Any]) -> bool:
    """Whether a line begins a part of a compact trace."""
    return record.get("format") == FORMAT


def read_compact(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a trace. A torn line is left out and counted, with or without `skip_bad`.

    Raises:
        TraceError: the file cannot be read, has no header, or a line is bad and `skip_bad` is off.
    """
    reader = _Reader(path, BadLines(skip_bad))
    before: TraceLine | None = None
    for line in read_lines(path):
        if before is not None:
            reader.take(before, is_last_of_part=line.error is None and is_header(line.value))
        before = line
    if before is not None:
        reader.take(before, is_last_of_part=True)
    return reader.trace()


def compact_bytes(trace: Trace) -> bytes:
    """A trace as a compact one."""
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


class _Reader:
    """The state between lines: the part that is being read, and all requests so far."""

    def __init__(self, path: Path, bad: BadLines) -> None:
        self._path = path
        self._bad = bad
        self._table = KeyTable()
        self._requests: list[TraceRequest] = []
        self._is_timing_synthetic = False
        self._block_tokens: int | None = None
        self._salt_id = ""
        self._is_plain = False
        # Of the part: whether its header was understood, where its requests begin, the blocks of its lines by number.
        self._is_open = False
        self._part_start = 0
        self._digests: dict[int, list[bytes]] = {}

    def take(self, line: TraceLine, *, is_last_of_part: bool) -> None:
        """Read a line."""
        if is_last_of_part and line.error is not None:
            self._bad.skipped.append(f"{line.where}: torn, as the writer was stopped here; left out.")
            return
        try:
            if line.error is not None:
                raise line.error
            if is_header(line.value):
                self._begin_part(line.value, line.where)
            elif not self._is_open:
                raise TraceError(f"{line.where}: no header; wanted a line with format {FORMAT!r} first.")
            else:
                self._requests.append(self._request(line.value, line.where))
        except TraceError as error:
            self._bad.add(error)

    def trace(self) -> Trace:
        """What was read."""
        self._end_part()
        return Trace(
            self._path.stem,
            self._block_tokens or 1,
            self._requests,
            self._is_timing_synthetic,
            str(self._path),
            tuple(self._bad.skipped),
        )

    def _begin_part(self, header: dict[str, Any], where: str) -> None:
        # Also where this header cannot be used: what follows it is no part of the one before.
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
        """Sort the part's requests by arrival and put them behind the part before it."""
        part = sorted(self._requests[self._part_start :], key=lambda request: request.time_ms)
        if part:
            earlier_ms = self._requests[self._part_start - 1].time_ms if self._part_start else 0
            shift_ms = earlier_ms - part[0].time_ms
            self._requests[self._part_start :] = [replace(each, time_ms=each.time_ms + shift_ms) for each in part]
        self._part_start = len(self._requests)
        self._digests = {}
        self._is_open = False

    def _request(self, record: dict[str, Any], where: str) -> TraceRequest:
        number = whole_number(record, "request", where)
        if number in self._digests:
            self._end_part()
            raise TraceError(f"{where}: request {number} was there before; wanted a header in front of another part.")
        time_ms = whole_number(record, "time", where)
        tokens = whole_number(record, "tokens", where, at_least=1)
        output_tokens = whole_number(record, "output", where)
        turn = whole_number(record, "turn", where) if "turn" in record else None
        session, kind = (_text(record, name, where) for name in ("session", "kind"))
        shared = self._shared(record, where)
        following = self._plain_blocks if self._is_plain else self._hashed_blocks
        digests = shared + following(record, where, shared, tokens)
        assert self._block_tokens is not None
        wanted = -(-tokens // self._block_tokens)
        if len(digests) != wanted:
            raise TraceError(
                f"{where}: {len(digests)} blocks; tokens {tokens} needs {wanted} blocks of {self._block_tokens} tokens."
            )
        ids = [(self._salt_id, digest) for digest in digests]
        conflict = self._table.conflict(ids)
        if conflict is not None:
            raise TraceError(f"{where}: block {conflict} was seen behind another prefix; wanted equal prefixes only.")
        self._digests[number] = digests
        return TraceRequest(self._table.keys(ids), tokens, output_tokens, time_ms, session, turn, kind)

    def _shared(self, record: dict[str, Any], where: str) -> list[bytes]:
        """The blocks that an earlier request had too."""
        after = record.get("after")
        if after is None:
            return []
        if not isinstance(after, list) or len(after) != 2 or not all(type(each) is int for each in after):
            raise TraceError(f"{where}: after is {shown(after)}; wanted [request, blocks].")
        earlier, count = after
        if not 1 <= count <= len(self._digests.get(earlier, ())):
            raise TraceError(
                f"{where}: after names {count} blocks of request {earlier}, which has"
                f" {len(self._digests.get(earlier, ()))} here; wanted an earlier request of this part."
            )
        return self._digests[earlier][:count]

    def _hashed_blocks(self, record: dict[str, Any], where: str, shared: list[bytes], tokens: int) -> list[bytes]:
        try:
            content = base64.b64decode(record["blocks"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise TraceError(f"{where}: blocks is {shown(record.get('blocks'))}; wanted base64.") from None
        if len(content) % DIGEST_BYTES:
            raise TraceError(f"{where}: blocks has {len(content)} bytes; wanted a multiple of {DIGEST_BYTES}.")
        return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]

    def _plain_blocks(self, record: dict[str, Any], where: str, shared: list[bytes], tokens: int) -> list[bytes]:
        ids = record.get("ids")
        if not isinstance(ids, list) or not all(type(each) is int and abs(each) < 1 << 63 for each in ids):
            raise TraceError(f"{where}: ids is {shown(ids)}; wanted a list of whole numbers.")
        assert self._block_tokens is not None
        wanted = max(0, tokens - len(shared) * self._block_tokens)
        if len(ids) != wanted:
            raise TraceError(f"{where}: {len(ids)} ids behind {len(shared)} blocks; tokens {tokens} needs {wanted}.")
        namespace = _text(record, "namespace", where)
        before = shared[-1] if shared else None
        return block_digests(np.array(ids, np.int64), self._block_tokens, namespace=namespace, before=before)


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record.get(name, "")
    if not isinstance(value, str):
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted text.")
    return value
