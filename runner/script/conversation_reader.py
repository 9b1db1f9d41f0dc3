"""Read conversations from files, whatever known format each is in.

A text has JSON records: one per line (JSONL), or the values of one document. A bad record is an error of one line,
or, with `skip_bad`, a line in `ReadResult.skipped`. A file that cannot be read at all is always an error, except beside
sessions of agents. A JSON document ends at a syntax error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

from runner.files import (
    BLANK,
    InputError,
    Record,
    document_records,
    input_files,
    is_jsonl,
    line_records,
    note_id,
    nothing_found,
    read_text,
)
from runner.script.agent_sessions import Known
from runner.script.conversation import Conversation
from runner.script.conversation_formats import (
    conversations_in,
    form_of,
    is_message,
    joining_form,
    lengths_alone,
    parse_record,
)
from runner.script.schedule import beginnings
from runner.text import plural, printable, shortened

MOST_UNPACKED_BYTES = 2 << 30  # a packed file may unpack to a thousand times its bytes
SUFFIXES = (".json", ".jsonl", ".ndjson", ".traj")
OUTPUT_KEYS = {"error", "response", "result"}  # of an output of a batch
NAMED_KINDS = 12  # kinds of parts that a note names
MOST_HEADER_CHARS = 1000  # of a table's first line
PROBED_RECORDS = 100  # at the start of a file, whose conversations may be several records each


@dataclass(frozen=True)
class ReadResult:
    """The conversations in the order of the files, and a line for each record that was skipped."""

    conversations: list[Conversation]
    skipped: list[str]

    @property
    def notes(self) -> list[str]:
        """What the prompts lack, a sentence each: parts that are no text of a message, counted by their type."""
        left_out: Counter[str] = Counter()
        for each in self.conversations:
            left_out.update(each.left_out)
        parts = ", ".join(f"{count:,} {shortened(kind, 40)}" for kind, count in left_out.most_common(NAMED_KINDS))
        notes = [f"left out of the prompts, as they are no text of a message: {parts}."] * bool(parts)
        if missing := " and not ".join(not_in_logs(self.conversations)):
            notes.append(f"the logs hold no {missing}: these parts of prompts cannot be judged.")
        return notes


class _UnreadableError(InputError):
    """A whole file cannot be read."""


def builtin_conversations(name: str = "builtin.jsonl") -> list[Conversation]:
    """Conversations of four applications with two users each; some turns are edited or regenerated.

    "builtin_short.jsonl": four users of one application take turns. One edits a question, and two begin with one text.
    """
    with as_file(files(__package__) / name) as path:
        return read_conversations(path).conversations


def read_conversations(*paths: str | PathLike[str], skip_bad: bool = False) -> ReadResult:
    """Read all conversations of files and folders, at any depth, in any form of conversation_formats.py, or gzipped.

    OpenAI messages are an object with `messages` (and `tools`, `user`, `id`, `first_turn`), or a bare list of messages.
    Beside sessions of agents, what cannot be read is skipped, with or without `skip_bad`.
    InputError: a file cannot be read, a record is bad and `skip_bad` is off, or nothing is left. ValueError: no
    path was given.
    """
    if not paths:
        raise ValueError("no conversation file was given; wanted at least one path.")
    found = [file for each in paths for file in input_files(Path(each), SUFFIXES, "conversations")]
    stems = Counter(path.stem for path in found)
    conversations: list[Conversation] = []
    errors: list[InputError] = []
    sources: dict[str, str] = {}
    asked: set[bytes] = set()
    replies: set[str] = set()
    # Conversations without an id are named after their file, and its folder if the file's name is not unique.
    known = Known()
    every = (_records(path, path.stem if stems[path.stem] == 1 else str(path), skip_bad, known) for path in found)
    for record in _with_outputs(chain.from_iterable(every)):
        try:
            read = [*_conversations_of(record, sources, asked)]
            conversations += [new for each in read if (new := _without(replies, each)) is not None]
        except InputError as error:
            errors.append(error.with_traceback(None))  # its frames hold the record
    # Folders of agents have other files, too, and logs that are being written.
    bad = [error for error in errors if not skip_bad or isinstance(error, _UnreadableError)]
    if bad and not any(each.calls for each in conversations):
        raise bad[0]
    skipped = [str(error) for error in errors]
    if not conversations:
        raise nothing_found(paths, "conversation", skipped)
    return ReadResult(conversations, skipped)


def not_in_logs(conversations: Iterable[Conversation]) -> list[str]:
    """The parts of prompts that the logs of agents do not hold; empty if there are no such logs."""
    logs = [each for each in conversations if each.calls]
    bare = sum(each.messages[0]["role"] not in ("system", "developer") for each in logs)
    tools = ["tools"] if any(each.tools is None for each in logs) else []
    return tools + ([f"the system prompt of {bare:,} of {plural(len(logs), 'conversation')}"] if bare else [])


def _with_outputs(records: Iterable[Record]) -> Iterator[Record]:
    """The records. Those of batches come last, each request with its output, which is in another file."""
    requests: list[Record] = []
    outputs: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        value = record.value
        name = value.get("custom_id") if isinstance(value, dict) else None
        if not isinstance(name, str):
            yield record
        elif value.keys() & OUTPUT_KEYS and not value.keys() & {"body", "params"}:
            outputs[name].append(record)
        else:
            requests.append(record)
    asked, counted = Counter(request.value["custom_id"] for request in requests), Counter[str]()
    for request in requests:
        name = request.value["custom_id"]
        found, at, merged = outputs.get(name, []), counted[name], dict[str, Any]()
        counted[name] += 1
        for each in found:
            merged |= {key: each.value[key] for key in OUTPUT_KEYS & each.value.keys()}
        merged |= request.value | ({"custom_id": f"{name}/{at}"} if at else {})
        is_clear = len(found) <= 1 and (not found or asked[name] == 1)
        what = "several outputs have" if len(found) > 1 else "another request has"
        error = InputError(f"{request.where}: {what} its custom_id; wanted one batch.")
        yield request._replace(value=merged if is_clear else error)
    names = {request.value["custom_id"] for request in requests}
    for lone in (each for name, found in outputs.items() if name not in names for each in found):
        lacking = "is an output without its request; wanted both files of the batch."
        yield lone._replace(value=InputError(f"{lone.where}: {lacking}"))


def _conversations_of(record: Record, sources: dict[str, str], asked: set[bytes]) -> Iterator[Conversation]:
    """The conversations of a record, if their ids were not seen before.

    A request of a log asks for the replies that no earlier request has asked for, and for the last one.
    """
    if isinstance(record.value, InputError):
        raise record.value
    try:
        conversations = list(parse_record(record))
    except RecursionError:
        raise InputError(f"{record.where}: nested too deeply; wanted a conversation.") from None
    for each in conversations:
        note_id(each.conversation_id, record.where, sources)
    for each in conversations:
        if each.is_request:
            messages = each.messages
            *earlier, last = beginnings(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
            known = [length for length, digest in enumerate(earlier) if digest in asked]
            asked.add(last)
            each = replace(each, asked_messages=max([each.asked_messages, *known]))
        yield each


def _without(replies: set[str], conversation: Conversation) -> Conversation | None:
    """A conversation without calls whose replies are in `replies`; None: no call is left. Adds the replies to the set.

    Agents copy a session into a new file when they continue it.
    """
    if not conversation.calls:
        return conversation
    calls = tuple(call if call and call.reply_id not in replies else None for call in conversation.calls)
    replies.update(call.reply_id for call in calls if call)
    return replace(conversation, calls=calls) if any(calls) else None


def _records(path: Path, label: str, skip_bad: bool, known: Known) -> Iterator[Record]:
    """Each record of a file; one InputError for a bad file."""
    # With `skip_bad`, bytes that are not UTF-8 become lone surrogates, which spoil one record.
    errors = "surrogateescape" if skip_bad else "strict"
    try:
        records = _split(read_text(path, "a file of conversations", MOST_UNPACKED_BYTES, errors), path)
    except InputError as error:
        yield Record(_UnreadableError(str(error)), path, 1)
        return
    values = (record._replace(value=value) for record in records for value in conversations_in(record.value))
    found = (each._replace(default_id=f"{printable(label)}#{at}") for at, each in enumerate(values))
    first = list(islice(found, PROBED_RECORDS))
    form = joining_form(each.value for each in first)
    if form is None or form.join is None:
        yield from chain(first, found)
        return
    own: list[Record] = []
    for record in chain(first, found):
        if isinstance(record.value, dict) and form_of(record.value) in (form, None):
            own.append(record)
        else:
            yield record
    has_found = False
    try:
        for record in form.join(own, known):
            has_found = True
            yield record
    except InputError as error:
        yield own[0]._replace(value=error)
    else:
        if not has_found:
            lacking = f"no reply of a model in {plural(len(own), 'record')} of {form.name}; wanted a session."
            yield own[0]._replace(value=InputError(f"{own[0].where}: {lacking}"))


def _split(text: str, path: Path) -> Iterable[Record]:
    """Split a text into records, whether it is JSONL or a document. InputError: it is empty."""
    start = len(text) - len(text.lstrip(BLANK))
    if start == len(text):
        raise InputError(f"{path}: the file is empty; wanted conversations as JSON or JSONL.")
    if what := lengths_alone(text[start : start + MOST_HEADER_CHARS].partition("\n")[0].strip().split(",")):
        raise InputError(f"{path}:1: is {what}: lengths without text; wanted conversations as JSON or JSONL.")
    if is_jsonl(text, start, path):
        # Not splitlines: JSON text may have U+2028 and other ends of line that end no record.
        return (found for line, each in enumerate(text.split("\n"), 1) for found in line_records(each, path, line))
    if text[start] != "[":
        return document_records(text, path)
    # An array is a list of conversations, or the messages of a single one.
    records = [*document_records(text, path)]
    if not any(is_message(record.value) for record in records):
        return records
    errors = [record for record in records if isinstance(record.value, InputError)]
    return errors[:1] or [records[0]._replace(value=[record.value for record in records])]
