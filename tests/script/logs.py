"""Logs of coding agents in the making, for tests; and what was read from them, in a few letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from runner.script.conversation_reader import read_conversations
from runner.script.schedule import ScheduledRequest, schedule

#: What Claude Code 2.1 and Codex 0.169 wrote, shortened and with other names.
LOGS = Path(__file__).with_name("agent_logs")


class Log:
    """A log in the making: each record goes on from the one before, or from `after`."""

    about: ClassVar[dict[str, Any]]  # what every record has beside that

    def __init__(self, session: str = "s", records: Sequence[dict[str, Any]] = ()) -> None:
        self.records = [{**each, "sessionId": session} for each in records]
        self._session = session

    def add(self, kind: str, said: Any = None, after: str | None = "last", **fields: Any) -> str:
        number, last = len(self.records), self.records[-1]["uuid"] if self.records else None
        record = {
            "type": kind, "uuid": f"{self._session}-{number}", "parentUuid": last if after == "last" else after,
            "sessionId": self._session, "timestamp": f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000Z",
        }  # fmt: skip
        message = {} if said is None else {"message": self._message(kind, said)}
        self.records.append({**record, **self.about, **message, **fields})
        return str(record["uuid"])

    def _message(self, kind: str, said: Any) -> dict[str, Any]:
        raise NotImplementedError

    def ask(self, text: str, **fields: Any) -> str:
        raise NotImplementedError

    def reply(self, *said: Any, **fields: Any) -> str:
        raise NotImplementedError

    def talk(self, *texts: str) -> list[str]:
        """Questions and replies in turn; the names of their records."""
        return [(self.reply if at % 2 else self.ask)(text) for at, text in enumerate(texts)]


class ClaudeLog(Log):
    about: ClassVar = {"isSidechain": False}

    def _message(self, kind: str, said: Any) -> dict[str, Any]:
        return {"role": kind, "content": said}

    def ask(self, text: str, **fields: Any) -> str:
        return self.add("user", text, **fields)

    def reply(self, *said: Any, id: str = "", model: str = "opus", **fields: Any) -> str:
        """A reply as Claude Code writes it: each block is a record, with the id of the whole."""
        uuid, name = "", id or f"msg-{self._session}-{len(self.records)}"
        for block in said:
            content = {"type": "text", "text": block} if isinstance(block, str) else block
            uuid = self.add("assistant", [content], **fields)
            usage = {"input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 70}
            self.records[-1]["message"] |= {"id": name, "model": model, "usage": usage}
            fields = {}
        return uuid

    def result(self, call: str, text: str, **fields: Any) -> str:
        return self.add("user", [{"type": "tool_result", "tool_use_id": call, "content": text}], **fields)


def call(id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "Read", "input": {"file": id}}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def compacted(log: ClaudeLog, head: str, tail: str) -> str:
    """Write a boundary that keeps the records from `head` to `tail`, and a summary."""
    summary = f"{log.records[-1]['uuid']}-summary"
    segment = {"headUuid": head, "tailUuid": tail, "anchorUuid": summary}
    boundary = log.add("system", after=None, subtype="compact_boundary", compactMetadata={"preservedSegment": segment})
    log.add("user", "Summary.", after=boundary, isCompactSummary=True, uuid=summary)
    return summary


class QwenLog(Log):
    about: ClassVar = {"cwd": "/home/ann", "version": "0.5.0"}

    def _message(self, kind: str, said: Any) -> dict[str, Any]:
        return {"role": "model" if kind == "assistant" else "user", "parts": said}

    def ask(self, text: str, **fields: Any) -> str:
        return self.add("user", [{"text": text}], **fields)

    def reply(self, *said: Any, model: str = "qwen3", **fields: Any) -> str:
        used = {"promptTokenCount": 100, "cachedContentTokenCount": 70}
        parts = [{"text": part} if isinstance(part, str) else part for part in said]
        return self.add("assistant", parts, model=model, usageMetadata=used, **fields)

    def result(self, call: str, text: str, **fields: Any) -> str:
        response = {"id": call, "name": "read_file", "response": {"output": text}}
        return self.add("tool_result", [{"functionResponse": response}], **fields)


def function_call(id: str) -> dict[str, Any]:
    return {"functionCall": {"id": id, "name": "read_file", "args": {"file": id}}}


def codex_log(*payloads: tuple[str, dict[str, Any]], session: str = "thread") -> list[dict[str, Any]]:
    meta = ("session_meta", {"id": session, "base_instructions": {"text": "Be kind."}})
    return [
        {"timestamp": f"2026-01-01T00:00:{at:02d}.000Z", "type": kind, "payload": payload}
        for at, (kind, payload) in enumerate((meta, *payloads))
    ]


def item(role: str, text: str) -> tuple[str, dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    return "response_item", {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def turn(model: str) -> tuple[str, dict[str, Any]]:
    return "turn_context", {"model": model}


def back(turns: int) -> tuple[str, dict[str, Any]]:
    return "event_msg", {"type": "thread_rolled_back", "num_turns": turns}


def pi_said(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    reply = {"model": "qwen", "usage": {"input": 20, "cacheRead": 70, "cacheWrite": 10}, "stopReason": "stop"}
    return {"message": {"role": role, "content": blocks, **(reply if role == "assistant" else {}), **more}}


def open_said(id: str, role: str, *parts: Any, **info: Any) -> dict[str, Any]:
    shown = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    about: ClassVar = {
        "id": id,
        "role": role,
        "time": {"created": 1_760_000_000_000 + 1000 * int(id)},
        "modelID": "qwen",
    }
    return {"info": {**about, **info}, "parts": shown}


def written(folder: Path, records: Sequence[Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def requests_of_log(*paths: Path) -> list[ScheduledRequest]:
    return schedule(read_conversations(*paths).conversations)


def outline(request: ScheduledRequest) -> list[str]:
    """Each message in a few letters."""
    found = []
    for message in request.messages:
        calls = "".join(f"({each['function']['name']})" for each in message.get("tool_calls", ()))
        found.append(f"{message['role'][0]}:{message.get('content', '')[:24]}{calls}")
    return found


def outlines(folder: Path, records: Sequence[Any] = (), name: str = "log.jsonl") -> list[list[str]]:
    """The requests of a folder with this log, too."""
    if records:
        written(folder, records, name)
    return [outline(each) for each in requests_of_log(folder)]


def openings(requests: Sequence[ScheduledRequest]) -> list[str | None]:
    return [None if each.call is None else each.call.opening for each in requests]
