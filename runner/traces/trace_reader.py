"""Read a trace, whatever known format it is in; a folder is the files in it.

Formats are told by the first line: a header of ours, Mooncake's requests, a coding agent's session, or conversations,
which take a tokenizer. Adding one: a line in `_kind` and in `_read_files`.

Which turn of its conversation a request is, told from the prompts that came before it and from nothing later.

A prompt that begins with all full blocks of an earlier request's prompt carries that conversation on. Two rules keep a
system prompt that many share from being taken for a conversation:

  TT1  Only the request that brought a block in for the first time, or carries on from that one, can be continued there.
  TT2  A prompt that has been carried on in `MOST_BRANCHES` different ways is a shared beginning: who comes after that
      starts a conversation. (Those that came before keep their number: nothing is known from the future.)

Prompts shorter than a block cannot be recognized and count as first turns. O(blocks) per request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from radixcache.observe.trace import FORMAT
from runner.files import files_below
from runner.text import printable, shown
from runner.traces.compact import is_header, read_compact
from runner.traces.trace import BadLines, Pace, Trace, TraceError, TraceRequest, join_traces, unreadable
from runner.traces.trace_formats import read_coding_agent, read_mooncake

MOST_BRANCHES = 3


@dataclass(slots=True)
class _End:
    """The last full block of a prompt: whose turn ended there, and in how many ways it was carried on."""

    conversation: int
    turn: int
    branches: int = 0


class TurnInference:
    """Takes requests in the order they arrive and numbers them."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int, _End] = {}
        self._seen: set[int] = set()
        self._conversations = 0

    def place(self, request: TraceRequest) -> tuple[int, int]:
        """A number for its conversation and the turn, from 1, of a request; call it once per request, in order."""
        full = request.tokens // self._block_tokens
        keys = request.keys[:full].tolist()
        depth, end = self._continued(keys)
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

    def _continued(self, keys: list[int]) -> tuple[int, _End | None]:
        """The longest earlier prompt that this one begins with, and its length in blocks."""
        for index in reversed(range(len(keys))):
            end = self._ends.get(keys[index])
            if end is not None and end.branches < MOST_BRANCHES:
                return index + 1, end
        return 0, None


def infer_turns(trace: Trace) -> Trace:
    """The same trace with a turn for each request; as it is where the trace knows any turn itself."""
    if any(request.turn is not None for request in trace.requests):
        return trace
    inference = TurnInference(trace.block_tokens)
    return replace(trace, requests=[replace(each, turn=inference.place(each)[1]) for each in trace.requests])


Kind = Literal["compact", "mooncake", "coding-agent", "conversations"]

#: Longest beginning of a file that is looked at.
_PROBE_BYTES = 1 << 16
_SUFFIXES = (".json", ".jsonl")
#: Blanks, and the mark that some editors put before UTF-8.
_BLANK = b" \t\r\n\xef\xbb\xbf"
#: How compressed files begin.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")


def read_trace(
    *paths: str | PathLike[str],
    name: str = "",
    skip_bad: bool = False,
    seed: int = 0,
    pace: Pace | None = None,
    tokenizer: Any = None,
    block_tokens: int | None = None,
) -> Trace:
    """Read files or folders into one trace; files of different formats may stand beside one another.

    Args:
        name: of the trace; a single path's own name where there is none.
        skip_bad: leave bad lines out and say so in `Trace.skipped` instead of raising.
        seed, pace: of arrival times that are not recorded.
        tokenizer: for conversations.
        block_tokens: for conversations, 64 where it is None; for Mooncake's format, 512 where it is None.

    Raises:
        TraceError: a file cannot be read or is in no known format, a line is bad and `skip_bad` is off, blocks differ
            in length, or no request is left.
        ValueError: no path was given.
    """
    if not paths:
        raise ValueError("no trace was given; wanted at least one path.")
    bad = BadLines(skip_bad)
    files: dict[Kind, list[Path]] = {}
    for path in (file for each in paths for file in _files(Path(each))):
        beginning = _beginning(path)
        try:
            files.setdefault(_kind(path, beginning), []).append(path)
        except TraceError as error:
            bad.add(error)
    if block_tokens is not None and not files.keys() & {"mooncake", "conversations"}:
        kind, (path, *_) = next(iter(files.items()), ("", [Path()]))
        raise TraceError(f"{path}: a {kind} trace says itself how long its blocks are; leave --block-tokens out.")
    pace = pace or Pace()
    traces = [
        trace
        for kind, own in files.items()
        for trace in _read_files(kind, own, skip_bad, seed, pace, tokenizer, block_tokens)
    ]
    source = ", ".join(map(str, paths))
    skipped = (*bad.skipped, *(line for trace in traces for line in trace.skipped))
    traces = [infer_turns(trace) for trace in traces if trace.requests]
    if not traces:
        first = f"; the first of {len(skipped)} skipped: {skipped[0]}" if skipped else "."
        raise TraceError(f"{source}: no request found{first}")
    name = name or (printable(Path(paths[0]).resolve().stem) if len(paths) == 1 else "")
    rate = pace.sessions_per_hour if files.keys() & {"coding-agent", "conversations"} else None
    return replace(join_traces(traces, name=name), source=source, skipped=skipped, sessions_per_hour=rate)


def _read_files(
    kind: Kind,
    paths: Sequence[Path],
    skip_bad: bool,
    seed: int,
    pace: Pace,
    tokenizer: Any,
    block_tokens: int | None,
) -> list[Trace]:
    if kind == "compact":
        return [read_compact(path, skip_bad=skip_bad) for path in paths]
    if kind == "mooncake":
        options = {} if block_tokens is None else {"block_tokens": block_tokens}
        return [read_mooncake(path, skip_bad=skip_bad, **options) for path in paths]
    if kind == "coding-agent":
        rate = pace.sessions_per_hour
        return [read_coding_agent(paths, seed=seed, sessions_per_hour=rate, skip_bad=skip_bad)]
    if tokenizer is None:
        raise TraceError(
            f"{paths[0]}: no block hashes, so it is no trace; conversations are for radixcache replay, tree and "
            "explain, and with --model MODEL, whose tokenizer makes blocks of them, for simulate, mrc and advise."
        )
    # Imported here, as nothing else in this package needs MLX.
    from runner.traces.trace_formats import CONVERSATION_BLOCK_TOKENS, read_conversation_trace

    return [
        read_conversation_trace(
            paths,
            tokenizer,
            block_tokens=block_tokens or CONVERSATION_BLOCK_TOKENS,
            pace=pace,
            seed=seed,
            skip_bad=skip_bad,
        )
    ]


def _files(path: Path) -> list[Path]:
    """The path itself, or the JSON and JSONL files of a folder and of those below it, by name."""
    try:
        if not path.is_dir():
            return [path]
        files = files_below(path, _SUFFIXES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not files:
        raise TraceError(f"{path}: the folder has no {' or '.join(_SUFFIXES)} file; wanted a trace.")
    return files


def _beginning(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is a pipe or a device; wanted a file, which can be read twice.")
        with path.open("rb") as file:
            return file.read(_PROBE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def _kind(path: Path, beginning: bytes) -> Kind:
    if beginning.startswith(_COMPRESSED):
        raise TraceError(f"{path}: is compressed; wanted it unpacked.")
    if not beginning.strip():
        raise TraceError(f"{path}: the file is empty; wanted a trace.")
    first = _first_line(beginning)
    if is_header(first) or f'"{FORMAT}"'.encode() in beginning:
        return "compact"
    if "hash_ids" in first:
        return "mooncake"
    # A document of many lines, a line longer than what was read, or a broken one: its keys tell.
    if b'"block_size"' in beginning and b'"requests"' in beginning:
        return "coding-agent"
    if b'"hash_ids"' in beginning:
        return "mooncake"
    if beginning.lstrip(_BLANK)[:1] not in (b"{", b"["):
        raise TraceError(f"{path}:1: {_what_it_is(beginning)}; wanted a trace as JSON or JSONL.")
    return "conversations"


def _what_it_is(beginning: bytes) -> str:
    try:
        return f"is {shown(json.loads(beginning.lstrip(_BLANK)))}"
    except (ValueError, RecursionError):
        return "not JSON"


def _first_line(beginning: bytes) -> dict[str, Any]:
    """The first line that holds something; empty where it is no JSON object."""
    line = beginning.lstrip().split(b"\n", 1)[0]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
