"""Coding-agent sessions: one JSON file each, with block ids of its own; many files make one trace.

A session's `t` counts seconds from its start. When sessions begin is not recorded: here they begin as a seeded Poisson
process, in the order of the files, so the timing of the joined trace is synthetic (that within a session is not).

Two things about the format that are easily missed:

  CA1  Only full blocks are hashed. The rest of a prompt becomes a last block that no other request shares.
  CA2  `t` of a sub-agent's entry is when it reported back, its own requests count from when it was sent off, which is
      `duration_ms` earlier. (In the files at hand agents that were sent off together then start within 0.02 s of one
      another and of the end of the request that sent them; with `t` as the start they would outlive the wait for them.)
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.files.excerpt import shown
from runner.traces.joined import join_traces
from runner.traces.keys import KeyTable
from runner.traces.lines import MOST_BLOCK_TOKENS, BadLines, block_ids, seconds, unreadable, whole_number
from runner.traces.request import Trace, TraceError, TraceRequest

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
