"""Sessions of agents that speak in parts, as Gemini's API: qwen-code and Gemini CLI.

    qwen-code    ~/.qwen/projects/FOLDER/chats/SESSION.jsonl: rows with `uuid` and `parentUuid`, a tree
    Gemini CLI   ~/.gemini/tmp/FOLDER/chats/session-*.json or .jsonl: messages in order; a row may be there twice

A part is a text, a thought, a `functionCall` or a `functionResponse`; other parts have no text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from runner.files import Record
from runner.script.agent_sessions import Known, Tree, call_of, function_call, reply, result
from runner.script.conversation import Opening, dicts_in, found_in, object_of

KINDS = ("assistant", "system", "tool_result", "user")  # of rows of qwen-code
NOT_SENT = ("realtime_message", "code_mode_tool_result")  # rows of qwen-code that are no part of the history


def qwen_code(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of a log of qwen-code as bodies of the chat API, without the system prompt and the tools."""
    rows: dict[str, Record] = {}
    for record in records:  # a row may be written in pieces, or twice
        value = record.value
        if not isinstance(uuid := value.get("uuid"), str):
            continue
        if uuid in rows and (more := _parts(value.get("message"))) and more != _parts(rows[uuid].value.get("message")):
            before = rows[uuid].value
            message = {**object_of(before.get("message")), "parts": [*_parts(before.get("message")), *more]}
            rows[uuid] = record._replace(value={**before, **value, "message": message})
        rows.setdefault(uuid, record)
    tree = Tree(known)
    for uuid, record in rows.items():
        value, left_out = record.value, Counter[str]()
        kind, parent = value.get("type"), value.get("parentUuid")
        parent = parent if isinstance(parent, str) else None
        history = found_in(value, "systemPayload/compressedHistory")[1]
        if kind == "system" and value.get("subtype") == "chat_compression" and isinstance(history, list):
            said = [message for each in dicts_in(history) for message in _messages(each, left_out)]
            tree.compact(uuid, said, record)
            continue
        is_sent = kind in KINDS and kind != "system" and value.get("subtype") not in NOT_SENT
        message = object_of(value.get("message"))
        messages = _messages(message, left_out) if message and is_sent else []
        about = (value.get("timestamp", ""), value.get("model"), value.get("usageMetadata"))
        reply_id, counts = f"reply {uuid}", ("promptTokenCount", "cachedContentTokenCount")
        call = call_of(reply_id, *about, *counts) if kind == "assistant" else None
        opening = Opening.SUBAGENT if value.get("isSidechain") else Opening.SESSION
        tree.add(uuid, parent, messages, record, call=call, opening=opening, left_out=left_out)
    yield from tree.bodies(records[0].value.get("sessionId") or records[0].default_id)


def is_qwen_code(record: dict[str, Any]) -> bool:
    """Whether a row is of qwen-code. A message of Claude Code has `content`; its other rows have `isSidechain`."""
    message = object_of(record.get("message"))
    is_claude = "content" in message or "userType" in record or record["type"] not in KINDS
    return not is_claude and ("parts" in message or "isSidechain" not in record)


def gemini_cli(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """As `qwen_code`, for a log of Gemini CLI."""
    rows = [each for record in records for each in _rows(record)]
    latest = {row["id"]: row for row, _ in rows if "type" in row}
    head = next((row for row, _ in rows if "sessionId" in row), {})
    opening = Opening.SUBAGENT if head.get("kind") == "subagent" else Opening.SESSION
    tree, history = Tree(known), list[str]()
    for row, record in rows:
        if "$rewindTo" in row:
            back = str(row["$rewindTo"])
            history = history[: history.index(back)] if back in history else []
        elif isinstance(compressed := found_in(row, "$set/messages")[1], list):
            said = [message for each in dicts_in(compressed) for message in _gemini_messages(each, Counter())]
            tree.compact(name := f"{record.where} $set", said, record)
            history = [name]
        elif "type" in row and (name := row["id"]) not in tree.said:
            row, left_out = latest[name], Counter[str]()
            messages = _gemini_messages(row, left_out)
            about = (row.get("timestamp", ""), row.get("model"), row.get("tokens"))
            call = call_of(f"reply {name}", *about, "input", "cached")
            parent = history[-1] if history else None
            tree.add(name, parent, messages, record, call=call, opening=opening, left_out=left_out)
            history.append(name)
    yield from tree.bodies(head.get("sessionId") or records[0].default_id)


def _rows(record: Record) -> Iterator[tuple[dict[str, Any], Record]]:
    """The rows of a record, each with an id: a document has its messages in a list."""
    messages = dicts_in(record.value.get("messages"))
    head = {key: value for key, value in record.value.items() if key != "messages"}
    for at, row in enumerate([head, *messages]):
        yield {**row, "id": str(row.get("id") or f"{record.where} {at}")}, record


def _gemini_messages(row: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """A question, or a reply with the results of its calls; none for what Gemini CLI told the user."""
    if row.get("type") == "user":
        messages = _messages({"role": "user", "parts": row.get("content")}, left_out)
        text = "".join(message["content"] for message in messages).strip()
        return [] if text.startswith(("/", "?")) else messages
    if row.get("type") != "gemini":
        return []
    parts, calls = _parts({"parts": row.get("content")}), dicts_in(row.get("toolCalls"))
    known = {each["functionCall"].get("id") for each in parts if isinstance(each.get("functionCall"), dict)}
    parts += [{"functionCall": each} for each in calls if each.get("id") not in known]
    results: list[dict[str, Any]] = []
    for call in calls:
        result = call.get("result")
        if isinstance(result, str):
            response = {"id": call.get("id"), "name": call.get("name"), "response": {"output": result}}
            results.append({"functionResponse": response})
        elif result:
            results += _parts({"parts": result})
    replied = _messages({"role": "model", "parts": parts}, left_out)
    return replied + (_messages({"role": "user", "parts": results}, left_out) if results else [])


def _parts(content: Any) -> list[dict[str, Any]]:
    parts = object_of(content).get("parts")
    listed = parts if isinstance(parts, list) else [] if parts is None else [parts]
    return dicts_in([{"text": each} if isinstance(each, str) else each for each in listed])


def _messages(content: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """Messages of the chat API: a reply; or results, and what the user says. Parts without text are counted by type."""
    texts, thoughts = list[str](), list[str]()
    calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for part in _parts(content):
        if isinstance(text := part.get("text"), str):
            (thoughts if part.get("thought") else texts).append(text)
        elif isinstance(call := part.get("functionCall"), dict):
            calls.append(function_call(call.get("id") or call.get("name"), call.get("name"), call.get("args")))
        elif isinstance(response := part.get("functionResponse"), dict):
            call_id, name, answer = response.get("id"), response.get("name"), response.get("response")
            output = found_in(answer, "output error")[1]
            output = output if isinstance(output, str) else json.dumps(answer, ensure_ascii=False)
            results.append(result(call_id or name, name, output))
            left_out.update(key for each in dicts_in(response.get("parts")) for key in _kinds(each))
        else:
            left_out.update(_kinds(part))
    if content.get("role") == "model":
        return [reply("".join(texts), "".join(thoughts), calls)] if texts or thoughts or calls else []
    return results + ([{"role": "user", "content": "".join(texts)}] if texts or not results else [])


def _kinds(part: Mapping[str, Any]) -> Iterable[str]:
    return (key for key in ("inlineData", "fileData", "executableCode", "codeExecutionResult") if key in part)
