"""Sessions of agents whose rows become messages of the chat API, without the system prompt and the tools.

    qwen-code    ~/.qwen/projects/FOLDER/chats/SESSION.jsonl: rows with `uuid` and `parentUuid`, a tree
    Gemini CLI   ~/.gemini/tmp/FOLDER/chats/session-*.json or .jsonl: messages in order; a row may be there twice
    opencode     a document of `opencode export`: messages in order
    pi           ~/.pi/agent/sessions/FOLDER/*.jsonl: behind the head, rows with `id` and `parentId`, a tree

qwen-code and Gemini CLI speak in parts, as Gemini's API does: a text, a thought, a `functionCall` or a
`functionResponse`; other parts have no text. A reply of opencode has several steps, each of which is a request.

A compaction has the whole new history (qwen-code, Gemini CLI), or a summary that stands in front of the messages from
`tail_start_id` (opencode) or `firstKeptEntryId` (pi) on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from runner.files import Record
from runner.script.agent_sessions import Known, LogNode, bodies, call_of
from runner.script.conversation import Call, Opening, as_parts, as_tool, dicts_in, named_value, object_of, value_at

KINDS = ("assistant", "system", "tool_result", "user")  # of rows of qwen-code
NOT_SENT = ("realtime_message", "code_mode_tool_result")  # rows of qwen-code that are no part of the history
OPENCODE_ASKED = "What did we do so far?"  # what stands in front of a summary
INTERRUPTED = "[Tool execution was interrupted]"
COMPACTED = "The conversation history before this point was compacted into the following summary:\n\n<summary>\n"
BRANCHED = "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n"


class Tree:
    """The nodes of a log whose rows become chat messages. A row goes on from another one, its parent."""

    def __init__(self, known: Known) -> None:
        self.said: dict[str, Sequence[dict[str, Any]]] = {}  # by row
        self._known = known
        self._nodes: dict[str, LogNode] = {}
        self._left_out: Counter[str] = Counter()
        self._ends: dict[str | None, str | None] = {}  # by row: the last message that a row below sees

    def add(
        self,
        row: str,
        parent: str | None,
        messages: Sequence[dict[str, Any]],
        record: Record,
        *,
        call: Call | None = None,
        opening: Opening = Opening.SESSION,
        left_out: Mapping[str, int] | None = None,
        is_copy: bool = False,
    ) -> None:
        """Add what a row says behind its parent. With a call, its first reply is one."""
        is_copy = is_copy or not self._known.adds(row)
        if not is_copy:
            self._left_out.update(left_out or {})
        self.said[row], above = messages, self._ends.get(parent)
        for at, message in enumerate(messages):
            name, is_reply = f"{row}/{at}", message["role"] == "assistant"
            self._nodes[name] = LogNode(message, record, above, is_reply, opening, call if is_reply else None, is_copy)
            above, call = name, None if is_reply else call
        self._ends[row] = above

    def compact(self, row: str, messages: Sequence[dict[str, Any]], record: Record) -> None:
        """Let the rows below this one see these messages in place of the history."""
        self.add(row, None, messages, record, opening=Opening.COMPACTION, is_copy=True)
        self.said[row] = ()

    def bodies(self, user: Any) -> Iterator[Record]:
        """The requests of the log as bodies of the chat API, without the system prompt and the tools."""
        return bodies(self._nodes, "messages", self._left_out, user=str(user))


def reply(content: str, reasoning: str = "", calls: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """A message of the assistant."""
    said = {"reasoning_content": reasoning or None, "tool_calls": [*calls] or None}
    return {"role": "assistant", "content": content, **{key: value for key, value in said.items() if value}}


def function_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": str(call_id), **as_tool({"name": str(name), "arguments": object_of(arguments)})}


def result(call_id: Any, name: Any, content: str) -> dict[str, Any]:
    """A message with the result of a call."""
    return {"role": "tool", "tool_call_id": str(call_id), "name": str(name), "content": content}


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
        history = value_at(value, "systemPayload/compressedHistory")
        if kind == "system" and value.get("subtype") == "chat_compression" and isinstance(history, list):
            said = [message for each in dicts_in(history) for message in _messages_of_parts(each, left_out)]
            tree.compact(uuid, said, record)
            continue
        is_sent = kind in KINDS and kind != "system" and value.get("subtype") not in NOT_SENT
        message = object_of(value.get("message"))
        messages = _messages_of_parts(message, left_out) if message and is_sent else []
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
    rows = [each for record in records for each in _gemini_rows(record)]
    latest = {row["id"]: row for row, _ in rows if "type" in row}
    head = next((row for row, _ in rows if "sessionId" in row), {})
    opening = Opening.SUBAGENT if head.get("kind") == "subagent" else Opening.SESSION
    tree, history = Tree(known), list[str]()
    for row, record in rows:
        if "$rewindTo" in row:
            back = str(row["$rewindTo"])
            history = history[: history.index(back)] if back in history else []
        elif isinstance(compressed := value_at(row, "$set/messages"), list):
            said = [message for each in dicts_in(compressed) for message in _messages_of_gemini(each, Counter())]
            tree.compact(name := f"{record.where} $set", said, record)
            history = [name]
        elif "type" in row and (name := row["id"]) not in tree.said:
            row, left_out = latest[name], Counter[str]()
            messages = _messages_of_gemini(row, left_out)
            about = (row.get("timestamp", ""), row.get("model"), row.get("tokens"))
            call = call_of(f"reply {name}", *about, "input", "cached")
            parent = history[-1] if history else None
            tree.add(name, parent, messages, record, call=call, opening=opening, left_out=left_out)
            history.append(name)
    yield from tree.bodies(head.get("sessionId") or records[0].default_id)


def _gemini_rows(record: Record) -> Iterator[tuple[dict[str, Any], Record]]:
    """The rows of a record, each with an id: a document has its messages in a list."""
    messages = dicts_in(record.value.get("messages"))
    head = {key: value for key, value in record.value.items() if key != "messages"}
    for at, row in enumerate([head, *messages]):
        yield {**row, "id": str(row.get("id") or f"{record.where} {at}")}, record


def _messages_of_gemini(row: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """A question, or a reply with the results of its calls; none for what Gemini CLI told the user."""
    if row.get("type") == "user":
        messages = _messages_of_parts({"role": "user", "parts": row.get("content")}, left_out)
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
    replied = _messages_of_parts({"role": "model", "parts": parts}, left_out)
    return replied + (_messages_of_parts({"role": "user", "parts": results}, left_out) if results else [])


def _parts(content: Any) -> list[dict[str, Any]]:
    parts = object_of(content).get("parts")
    listed = parts if isinstance(parts, list) else [] if parts is None else [parts]
    return dicts_in([{"text": each} if isinstance(each, str) else each for each in listed])


def _messages_of_parts(content: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
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
            output = value_at(answer, "output error")
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


def opencode(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of exported sessions as bodies of the chat API, without the system prompt and the tools."""
    tree = Tree(known)
    for record in records:
        is_child = value_at(record.value, "info/parentID") is not None
        opening = Opening.SUBAGENT if is_child else Opening.SESSION
        rows: list[str] = []
        starts: dict[str, int] = {}  # where the rows of each message begin
        compaction: Mapping[str, Any] | None = None
        ms: float = 0  # a step without a time has that of the step before
        for message in dicts_in(record.value.get("messages")):
            info, parts = object_of(message.get("info")), dicts_in(message.get("parts"))
            name, parent = str(info.get("id") or f"{record.where} {len(rows)}"), rows[-1] if rows else None
            starts[name] = len(rows)
            asked = [each for each in parts if each.get("type") == "compaction"]
            if info.get("role") == "user" and asked:
                compaction = asked[0]
            elif info.get("role") == "user":
                # The texts of other files are parts of their own.
                files = [str(each.get("mime")) for each in parts if each.get("type") == "file"]
                left_out = Counter(file=sum(each.startswith(("image/", "application/pdf")) for each in files))
                said = [{"role": "user", "content": "".join(_texts(parts, "text"))}]
                tree.add(name, parent, said, record, opening=opening, left_out=left_out)
                rows.append(name)
            elif info.get("summary") is True and compaction is not None:
                # What writes a summary is a request, too; but the log has no prompt of it.
                tail = rows[starts.get(str(compaction.get("tail_start_id")), len(rows)) :]
                summary = [{"role": "user", "content": OPENCODE_ASKED}, reply("".join(_texts(parts, "text")))]
                tree.compact(name, [*summary, *(each for row in tail for each in tree.said[row])], record)
                compaction, rows = None, [*rows, name]
            elif not info.get("error"):
                for at, step in enumerate(_steps(parts)):
                    row = f"{name} {at}"
                    finish = next((each for each in step if each.get("type") == "step-finish"), {})
                    times = (
                        value_at(named_value(each, "time state/time")[1], "start created") for each in (*step, info)
                    )
                    known_ms = (float(each) for each in times if isinstance(each, int | float) and 0 < each < 1e14)
                    ms = max(ms, next(known_ms, 0.0))
                    time, tokens = datetime.fromtimestamp(ms / 1000, UTC).isoformat(), finish.get("tokens")
                    prompt = "input cache/write cache/read"
                    call = call_of(f"reply {row}", time, info.get("modelID"), tokens, prompt, "cache/read")
                    tree.add(
                        row, rows[-1] if rows else None, _messages_of_step(step), record, call=call, opening=opening
                    )
                    rows.append(row)
    yield from tree.bodies(value_at(records[0].value, "info/id") or records[0].default_id)


def _steps(parts: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The parts of each step that said something."""
    steps: list[list[dict[str, Any]]] = [[]]
    for part in parts:
        if part.get("type") == "step-start":
            steps.append([])
        steps[-1].append(part)
    return [step for step in steps if any(each.get("type") in ("reasoning", "text", "tool") for each in step)]


def _messages_of_step(step: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reply, and the results of its calls."""
    calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for part in (each for each in step if each.get("type") == "tool"):
        call_id, name, state = part.get("callID"), part.get("tool"), object_of(part.get("state"))
        calls.append(function_call(call_id, name, state.get("input")))
        output = value_at(state, "output error")
        results.append(result(call_id, name, output if isinstance(output, str) else INTERRUPTED))
    return [reply("".join(_texts(step, "text")), "".join(_texts(step, "reasoning")), calls), *results]


def _texts(parts: Sequence[dict[str, Any]], kind: str) -> Iterator[str]:
    for part in parts:
        if part.get("type") == kind and not part.get("ignored") and isinstance(text := part.get("text"), str):
            yield text


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
            kept = _rows_between(parents, parent, rows.get(str(value.get("firstKeptEntryId"))))
            tree.compact(row, [summary, *(message for each in kept for message in tree.said[each])], record)
            continue
        left_out = Counter[str]()
        messages, said = _messages_of_pi(value, left_out), object_of(value.get("message"))
        time, usage = value.get("timestamp", ""), said.get("usage")
        call = call_of(f"reply {row}", time, said.get("model"), usage, "input cacheRead cacheWrite", "cacheRead")
        tree.add(row, parent, messages, record, call=call, left_out=left_out)
    yield from tree.bodies(records[0].value.get("id") or records[0].default_id)


def _rows_between(parents: Mapping[str, str | None], last: str | None, first: str | None) -> list[str]:
    """The rows from `first` to `last`, each below the one before; none if they are not joined."""
    found: dict[str, None] = {}
    while last is not None and last not in found:
        found[last] = None
        if last == first:
            return [*reversed(found)]
        last = parents.get(last)
    return []


def _messages_of_pi(row: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
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
