"""Read a trace in any known format; a folder is the files below it.

The beginning of a file shows its format. To add one, add a row to `FORMS`.
Conversations have no block hashes: `read_conversation_trace` makes blocks of a tokenizer's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.observe.trace import block_digests
from runner.files import BLANK_BYTES, InputError, input_files, nothing_found, read_beginning
from runner.script.conversation import Call, Conversation, json_of
from runner.script.conversation_formats import lengths_alone
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import ScheduledRequest, requests_of
from runner.text import printable, shown
from runner.traces.trace import KeyTable, Pace, Reading, Trace, TraceRequest, infer_turns, join_traces
from runner.traces.trace_formats import FORMS, UNITS_MS, TraceForm

#: The longest beginning of a file that is looked at.
_PROBE_BYTES = 1 << 16
_SUFFIXES = (".json", ".jsonl")
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
    time_unit: str | None = None,
) -> Trace:
    """Read files or folders of any formats into one trace.

    Args:
        skip_bad: list bad lines in `Trace.skipped` instead of raising.
        seed, pace: of arrival times that are not recorded.
        tokenizer: for conversations: mlx-lm's or transformers', with a chat template.
        block_tokens: for conversations (64 by default), Mooncake's format (512) and Bailian's (16).
        time_unit: "seconds" or "milliseconds", for rows: by default milliseconds, in Bailian's format seconds.

    Raises:
        InputError: a file or a line is bad, blocks differ in length, or no request is left.
        ValueError: no path was given, or an unknown unit.
    """
    if not paths:
        raise ValueError("no trace was given; wanted at least one path.")
    if time_unit not in (None, *UNITS_MS):
        raise ValueError(f"the time unit is {time_unit!r}; wanted one of {', '.join(UNITS_MS)}.")
    reading = Reading(skip_bad, seed, pace or Pace(), tokenizer, block_tokens, time_unit)
    files: dict[TraceForm, list[Path]] = {}
    unknown: dict[Path, InputError] = {}
    for path in (file for each in paths for file in input_files(Path(each), _SUFFIXES, "a trace")):
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is a pipe or a device; wanted a file that can be read twice.")
        beginning = bytes(read_beginning(path, "a trace", _PROBE_BYTES))
        try:
            files.setdefault(_form_of(path, beginning), []).append(path)
        except InputError as error:
            unknown[path] = error
    if _CONVERSATIONS in files:
        files[_CONVERSATIONS] += unknown  # their reader skips what is beside sessions of agents
    else:
        for refused in unknown.values():
            with reading.skipping():
                raise refused
    for form, (path, *_) in [*files.items()][:1]:
        if block_tokens is not None and not any(each.block_tokens for each in files):
            raise InputError(f"{path}: a {form.name} trace names its own block length. Leave --block-tokens out.")
        if time_unit is not None and not any(each.time_unit for each in files):
            raise InputError(f"{path}: the times of a {form.name} trace have a unit. Leave --time-unit out.")
    found = [trace for form, own in files.items() for trace in form.read(form, own, reading)]
    traces = [infer_turns(trace) for trace in found if trace.requests]
    if not traces:
        raise nothing_found(paths, "request", reading.skipped)
    name = name or (printable(Path(paths[0]).resolve().stem) if len(paths) == 1 else "")
    rate = next((each.sessions_per_hour for each in traces if each.sessions_per_hour), None)
    trace = replace(join_traces(traces, name=name), source=", ".join(map(str, paths)), sessions_per_hour=rate)
    return replace(trace, skipped=tuple(reading.skipped), notes=tuple(reading.notes))


def read_conversation_trace(form: TraceForm, paths: Sequence[Path], reading: Reading) -> list[Trace]:
    """One trace of all conversations, with a request for each reply.

    Logs of agents say when a reply was there. Otherwise arrivals are made up, in the order of the files.
    """
    tokenizer = reading.tokenizer
    if tokenizer is None:
        known = ", ".join(each.name for each in FORMS)
        raise InputError(
            f"{paths[0]}:1: no known form of trace ({known}), so perhaps conversations. "
            "Give --model to cut them into blocks with the tokenizer of that model, or use radixcache replay, tree or "
            "explain."
        )
    read = read_conversations(*paths, skip_bad=reading.skip_bad)
    reading.skipped += read.skipped
    reading.notes += read.notes
    draw, block_tokens = random.Random(reading.seed), reading.block_tokens or form.block_tokens
    table = KeyTable()
    requests: list[TraceRequest] = []
    start_s, first_ms = 0.0, _first_reply_ms(read.conversations)
    for conversation in read.conversations:
        with reading.skipping():
            at_s, name = start_s, conversation.conversation_id
            for turn, (request, prompt) in enumerate(_render(conversation, tokenizer), 1):
                reply = request.recorded_reply or {}
                calls = reply.get("tool_calls") or ()
                texts = [str(reply.get("content") or ""), *(str(call["function"]) for call in calls)]
                output_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)
                keys = table.keys(block_digests(prompt.astype(np.int64), block_tokens, namespace=request.model))
                time_ms = round(1e3 * at_s) if first_ms is None else _reply_ms(request.call) - first_ms
                requests.append(TraceRequest(keys, len(prompt), output_tokens, time_ms, name, turn))
                at_s += reading.pace.request_gap_s(draw, output_tokens, is_tool=bool(calls))
            start_s += reading.pace.session_gap_s(draw)
    requests.sort(key=lambda request: request.time_ms)
    source, rate = ", ".join(map(str, paths)), reading.pace.sessions_per_hour if first_ms is None else None
    if first_ms is not None:
        reading.notes.append(f"{source}: requests arrive at the times that the logs have for their replies.")
    return [Trace(paths[0].stem, block_tokens, requests, first_ms is None, source, sessions_per_hour=rate)]


def _render(conversation: Conversation, tokenizer: Any) -> list[tuple[ScheduledRequest, Any]]:
    """The requests of a conversation, each with the tokens of its prompt."""
    from radixcache.chat import chat_tokens  # needs MLX, which no other format does

    tools, arguments = conversation.tools, conversation.arguments
    try:
        found = requests_of(conversation)
        return [(each, chat_tokens(tokenizer, each.messages, tools, **arguments)) for each in found]
    except ValueError as error:
        raise InputError(f"{conversation.source}: conversation {conversation.conversation_id}: {error}") from error


def _first_reply_ms(conversations: Sequence[Conversation]) -> int | None:
    """When the first reply of agents' logs was there. None: some conversation is of no such log or has no times."""
    try:
        calls = [call for each in conversations for call in (each.calls or (None,)) if call or not each.calls]
        return min(map(_reply_ms, calls), default=None)
    except ValueError:
        return None


def _reply_ms(call: Call | None) -> int:
    """When a reply was there, in Unix milliseconds. ValueError: its log does not say so."""
    time = datetime.fromisoformat("" if call is None else call.time)
    return round(1e3 * (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


_CONVERSATIONS = TraceForm("conversations", (), read_conversation_trace, block_tokens=64)


def _form_of(path: Path, beginning: bytes) -> TraceForm:
    if beginning.startswith(_COMPRESSED):
        raise InputError(f"{path}: is compressed; wanted gzip, or an unpacked file.")
    content = beginning.lstrip(BLANK_BYTES)
    if not content:
        raise InputError(f"{path}: the file is empty; wanted a trace.")
    first = content.partition(b"\n")[0]
    record = json_of(first)
    record = record if isinstance(record, dict) else dict.fromkeys(first.decode(errors="replace").strip().split(","))
    # The second look is for a document of many lines, a line longer than the probe, and a broken line.
    for known in (record, {key for form in FORMS for key in form.told_by if f'"{key}"'.encode() in content}):
        for form in FORMS:
            if not {*form.told_by}.difference(known):
                return form
    if name := lengths_alone(record):
        lacks = "lengths and arrivals, but no hash_ids, which tell what prompts begin alike"
        raise InputError(f"{path}:1: is {name}: {lacks}; wanted hash_ids, or conversations.")
    if not content.startswith((b"{", b"[")):
        value = json_of(content)
        what = "not JSON" if value is content else f"is {shown(value)}"
        raise InputError(f"{path}:1: {what}; wanted a trace as JSON or JSONL.")
    return _CONVERSATIONS
