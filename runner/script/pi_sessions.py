"""Sessions of pi: ~/.pi/agent/sessions/FOLDER/*.jsonl.

Behind the head, a row has an `id` and a `parentId`: a tree. A row of the type `compaction` has a summary. The summary
stands in front of the rows from `firstKeptEntryId` to that row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.files import Record
from runner.script.agent_sessions import Known, Tree, call_of, function_call, reply, result
from runner.script.conversation import as_parts, dicts_in, object_of

COMPACTED = "The conversation history before this point was compacted into the following summary:\n\n<summary>\n"
BRANCHED = "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n"


def pi(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of a log as bodies of the chat API, without the system prompt and the tools."""
    tree, parents = Tree(known), dict[str, str | None]()
    rows = dict[str, str]()  # by id, which is short; a copied row has its time, too
    last: str | None = None
    for record in records:
        value = record.value
        if value.get("type") == "session":
            continue
        id = str(value.get("id") or record.where)
        if id in rows:
            continue
        row = rows[id] = f"pi {id} {value.get('timestamp')}"
        parents[row] = parent = rows.get(str(value["parentId"])) if "parentId" in value else last
        last = row
        if value.get("type") == "compaction":
            summary = {"role": "user", "content": f"{COMPACTED}{value.get('summary')}\n</summary>"}
            kept = _kept(parents, parent, rows.get(str(value.get("firstKeptEntryId"))))
            tree.compact(row, [summary, *(message for each in kept for message in tree.said[each])], record)
            continue
        left_out = Counter[str]()
        messages, said = _messages(value, left_out), object_of(value.get("message"))
        time, usage = value.get("timestamp", ""), said.get("usage")
        call = call_of(f"reply {row}", time, said.get("model"), usage, "input cacheRead cacheWrite", "cacheRead")
        tree.add(row, parent, messages, record, call=call, left_out=left_out)
    yield from tree.bodies(records[0].value.get("id") or records[0].default_id)


def _kept(parents: Mapping[str, str | None], last: str | None, first: str | None) -> list[str]:
    """The rows from `first` to `last`, each below the one before; none if they are not joined."""
    found: dict[str, None] = {}
    while last is not None and last not in found:
        found[last] = None
        if last == first:
            return [*reversed(found)]
        last = parents.get(last)
    return []


def _messages(row: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """What a row adds to the prompt; none for settings, and for replies that failed."""
    kind, message = row.get("type"), object_of(row.get("message"))
    if kind == "branch_summary":
        return [{"role": "user", "content": f"{BRANCHED}{row.get('summary')}</summary>"}]
    if kind == "custom_message":
        message = {"role": "custom", "content": row.get("content")}
    elif kind != "message":
        return []
    role, blocks = message.get("role"), dicts_in(as_parts(message.get("content")))
    texts = [text for each in blocks if isinstance(text := each.get("text"), str)]
    left_out.update(str(each.get("type")) for each in blocks if each.get("type") == "image")
    if role == "bashExecution" and not message.get("excludeFromContext"):
        output = message.get("output")
        return [{"role": "user", "content": f"Ran `{message.get('command')}`\n```\n{output}\n```"}]
    if role == "toolResult":
        return [result(message.get("toolCallId"), message.get("toolName"), "\n".join(texts))]
    if role in ("user", "custom"):
        return [{"role": "user", "content": "".join(texts)}]
    if role != "assistant" or message.get("stopReason") in ("aborted", "error"):
        return []
    thoughts = [text for each in blocks if isinstance(text := each.get("thinking"), str)]
    called = (each for each in blocks if each.get("type") == "toolCall")
    calls = (function_call(each.get("id"), each.get("name"), each.get("arguments")) for each in called)
    return [reply("".join(texts), "".join(thoughts), calls)]
