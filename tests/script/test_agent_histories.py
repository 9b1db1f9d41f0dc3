"""The prompt of each request is what the agent sent, whatever was done in a session.

An `Agent` holds a plain list of what the model sees, and notes a copy of the list for each request. Beside that, it
writes the log of its kind of agent. Questions, calls, compactions, going back, forks, subagents and rows that are
written again come in any order. What is read from the logs must be the noted lists. The logs of other agents are read
by the same functions as those of pi; test_chat_sessions.py has an example of each.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.script.chat_sessions import COMPACTED
from tests.script.any_json import changed, read_or_refused
from tests.script.logs import ClaudeLog, call, codex_log, item, pi_said, requests_of_log, thought, turn, written

Line = tuple[str, str]  # what a message says, and the row that has it


class Agent:
    """`view`: what the model sees. `made`: the view of each request. Moves have a number, which chooses."""

    def __init__(self) -> None:
        self.view: list[Line] = []
        self.made: list[list[str]] = []
        self.files: dict[str, list[Any]] = {}
        self._count = 0

    def text(self) -> str:
        self._count += 1
        return f"{self._count}."

    def asked(self) -> None:
        self.made.append([line for line, _ in self.view])

    def ask(self, number: int) -> None:
        self.say("u", self.text(), number)
        self.asked()
        for _ in range(number % 3):
            self.call([self.text() for _ in range(1 + number // 3 % 2)], number)
            self.asked()
        self.say("a", self.text(), number)

    def starts(self) -> list[int]:
        """Where questions stand."""
        return [at for at, (line, _) in enumerate(self.view) if line.startswith("u:")]

    def kept(self, number: int) -> list[Line]:
        """What a compaction keeps: the last questions and all behind them, or nothing."""
        starts = [*self.starts(), len(self.view)]
        return self.view[starts[-1 - number % len(starts)] :]

    def cut(self, number: int) -> list[Line]:
        """What stands in front of a question, which is not the first."""
        starts = self.starts()[1:]
        return self.view[: starts[number % len(starts)]] if starts else self.view

    def say(self, role: str, text: str, number: int) -> None:
        raise NotImplementedError

    def call(self, names: list[str], number: int) -> None:
        raise NotImplementedError


class ClaudeCode(Agent):
    def __init__(self) -> None:
        super().__init__()
        self._log = ClaudeLog("s0")
        self.files["s0"] = self._log.records
        self._parent: str | None = None

    def say(self, role: str, text: str, number: int) -> None:
        write = self._log.ask if role == "u" else self._log.reply
        self._parent = write(text, after=self._parent)
        self.view.append((f"{role}:{text}", self._parent))

    def fork(self, number: int) -> None:
        session = f"s{len(self.files)}"
        self._log = ClaudeLog(session, self._log.records)
        self.files[session] = self._log.records

    def call(self, names: list[str], number: int) -> None:
        rows: list[str] = []
        for name in names:
            self._parent = self._log.reply(*[thought(name)] * (number % 2), call(name), id=names[0], after=self._parent)
            rows.append(self._parent)
        self.view.append(("a:" + "(Read)" * len(names), rows[-1]))
        for name, row in zip(names, rows, strict=True):
            self._parent = self._log.result(name, name, after=row if number % 2 else self._parent)
            self.view.append((f"t:{name}", self._parent))

    def compact(self, number: int) -> None:
        kept, text = self.kept(number), self.text()
        tail = kept[-1][1] if kept else self._parent
        if number % 2:
            tail = self._log.add("attachment", after=self._parent)
        summary = f"summary {text}"
        preserved: dict[str, Any] = {"preservedMessages": {"anchorUuid": summary, "uuids": [row for _, row in kept]}}
        if kept and number % 3:
            segment = {"headUuid": kept[0][1], "tailUuid": tail, "anchorUuid": summary}
            preserved = {"preservedSegment": segment}
        boundary = self._log.add("system", after=None, subtype="compact_boundary", compactMetadata=preserved)
        self._log.add("user", text, after=boundary, isCompactSummary=True, uuid=summary)
        if number % 4 < 2 or not kept:
            tail = self._log.add("attachment", after=summary) if number % 5 else summary
        self._parent, self.view = tail, [(f"u:{text}", summary), *kept]

    def go_back(self, number: int) -> None:
        view = self.cut(number)
        # A row below a summary stands behind the kept messages.
        if len(view) < len(self.view) and not view[-1][1].startswith("summary"):
            self.view, self._parent = view, view[-1][1]

    def again(self, number: int) -> None:
        record = self._log.records[number % len(self._log.records)]
        blocks = record.get("message", {}).get("content")
        if number % 2 and isinstance(blocks, list) and blocks[0]["type"].startswith("tool"):
            record = {**record, "uuid": f"again {len(self._log.records)}"}
        self._log.records.append(record)

    def side(self, number: int) -> None:
        text = self.text()
        self._log.ask(text, after=None, isSidechain=True)
        self._log.reply(self.text(), isSidechain=True)
        self.made.append([f"u:{text}"])

    @staticmethod
    def sent(lines: list[str]) -> list[str]:
        """Successive turns of the user are one."""
        found: list[str] = []
        for line in lines:
            if line.startswith("u:") and found and found[-1].startswith("u:"):
                found[-1] += f"\n{line[2:]}"
            else:
                found.append(line)
        return found


class Codex(Agent):
    def __init__(self) -> None:
        super().__init__()
        self._session, self._log = "s0", list[tuple[str, dict[str, Any]]]()
        self._before: list[list[Line]] = []
        self._forks: dict[str, str | None] = {"s0": None}
        self._logs = {"s0": self._log}

    def say(self, role: str, text: str, number: int) -> None:
        self._log += [turn("gpt")] * (number % 3)
        if role == "u":
            before = self.view
            if number % 2:
                self._add("developer", "d", f"Rules {text}")
                self._add("user", "u", f"<environment_context>{text}</environment_context>")
            self._before.append(before if self._before else self.view)
        self._add("user" if role == "u" else "assistant", role, text)
        self._log += [turn("gpt")] * (number % 2)

    def _add(self, role: str, letter: str, text: str) -> None:
        self._log.append(item(role, text))
        self.view = [*self.view, (f"{letter}:{text}", "")]

    def call(self, names: list[str], number: int) -> None:
        for name in names:
            function = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": f"{name}{number}"}
            self._log.append(("response_item", function))
        for name in names:
            output = {"type": "function_call_output", "call_id": f"{name}{number}", "output": name}
            self._log.append(("response_item", output))
        self.view = [*self.view, ("a:" + "(shell)" * len(names), ""), *((f"t:{name}", "") for name in names)]

    def compact(self, number: int) -> None:
        questions = [self.view[at] for at in self.starts()][-1 - number % 3 :]
        text = self.text()
        history = [item("user", line[2:])[1] for line, _ in questions] + [item("user", text)[1]]
        payload: dict[str, Any] = {"message": text, "replacement_history": history}
        if number % 2:
            payload, questions = {"message": text}, []
        self._log.append(("compacted", payload))
        self.view = [*questions, (f"u:{text}", "")]

    def go_back(self, number: int) -> None:
        turns = 1 + number % 4
        self._log.append(("event_msg", {"type": "thread_rolled_back", "num_turns": turns}))
        if self._before:
            self.view = self._before[-turns:][0]
            del self._before[-turns:]

    def fork(self, number: int) -> None:
        older, self._session = self._session, f"s{len(self._logs)}"
        self._log = [*self._log]
        self._forks[self._session], self._logs[self._session] = older, self._log

    def side(self, number: int) -> None:
        text = self.text()
        name = f"side{text}"
        self._logs[name], self._forks[name] = [item("user", text), item("assistant", self.text())], None
        self.made.append([f"u:{text}"])

    def write(self) -> None:
        for name, log in self._logs.items():
            records = codex_log(*log, session=name)
            if (older := self._forks[name]) is not None:
                records[0]["payload"]["forked_from_id"] = older
            self.files[name] = records

    @staticmethod
    def sent(lines: list[str]) -> list[str]:
        return ["s:Be kind.", *lines]


class Pi(Agent):
    def __init__(self) -> None:
        super().__init__()
        self._open("s0", [])
        self._parent: str | None = None

    def _open(self, name: str, rows: list[dict[str, Any]]) -> None:
        head = {"type": "session", "version": 3, "id": name, "timestamp": "2026-01-01", "cwd": "/home/ann"}
        self._rows = self.files[name] = [head, *rows]

    def _row(self, **row: Any) -> str:
        name = f"row {self.text()}"
        about = {"type": "message", "id": name, "parentId": self._parent, "timestamp": "2026-01-01"}
        self._rows.append({**about, **row})
        self._parent = name
        return name

    def say(self, role: str, text: str, number: int) -> None:
        row = self._row(**pi_said("user" if role == "u" else "assistant", text))
        self.view.append((f"{role}:{text}", row))
        if number % 2:
            self._row(type="thinking_level_change", thinkingLevel="high")

    def call(self, names: list[str], number: int) -> None:
        blocks = [{"type": "toolCall", "id": name, "name": "ls", "arguments": {}} for name in names]
        self.view.append(("a:" + "(ls)" * len(names), self._row(**pi_said("assistant", *blocks))))
        for name in names:
            row = self._row(**pi_said("toolResult", name, toolCallId=name, toolName="ls"))
            self.view.append((f"t:{name}", row))

    def compact(self, number: int) -> None:
        kept, text = self.kept(number), self.text()
        if any(not row for _, row in kept):  # it keeps no summary
            return
        first = kept[0][1] if kept else "none"
        self._row(type="compaction", summary=text, firstKeptEntryId=first)
        self.view = [(f"u:{COMPACTED}{text}\n</summary>", ""), *kept]

    def go_back(self, number: int) -> None:
        view = self.cut(number)
        # Behind a compaction, a kept row stands in front of it.
        if len(view) < len(self.view) and view[0][1]:
            self.view, self._parent = view, view[-1][1]

    def fork(self, number: int) -> None:
        self._open(f"s{len(self.files)}", self._rows[1:])

    def again(self, number: int) -> None:
        self._rows.append(self._rows[number % len(self._rows)])


AGENTS = {each.__name__: each for each in (ClaudeCode, Codex, Pi)}
MOVES = ("ask", "compact", "go_back", "fork", "again", "side")
HISTORIES = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 59)), max_size=12)


def worked(name: str, moves: list[tuple[str, int]]) -> Agent:
    """An agent that has done these moves, as far as its kind has them, and its logs."""
    agent = AGENTS[name]()
    for move, number in [("ask", 0), *moves, ("ask", 1)]:
        if does := getattr(agent, move, None):
            does(number)
    if isinstance(agent, Codex):
        agent.write()
    return agent


def said(message: dict[str, Any]) -> str:
    calls = "".join(f"({each['function']['name']})" for each in message.get("tool_calls", ()))
    return f"{message['role'][0]}:{message.get('content', '')}{calls}"


@pytest.mark.parametrize("name", AGENTS)
@settings(max_examples=60, deadline=None)
@given(HISTORIES)
def test_the_prompt_of_each_request_is_what_the_agent_sent(
    tmp_path_factory: pytest.TempPathFactory, name: str, moves: list[tuple[str, int]]
) -> None:
    agent, folder = worked(name, moves), tmp_path_factory.mktemp("logs")
    for at, (file, records) in enumerate(agent.files.items()):
        written(folder, records, f"{at:03d}-{file}.jsonl")
    found = [[said(each) for each in request.messages] for request in requests_of_log(folder)]
    sent = agent.sent if isinstance(agent, ClaudeCode | Codex) else list
    assert sorted(found) == sorted(sent(lines) for lines in agent.made)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(AGENTS)), HISTORIES, st.data())
def test_a_log_with_one_wrong_place_is_read_or_refused(
    name: str, moves: list[tuple[str, int]], data: st.DataObject
) -> None:
    records = next(iter(worked(name, moves).files.values()))
    at = data.draw(st.integers(0, len(records) - 1))
    records = [*records[:at], changed(records[at], data), *records[at + 1 :]]
    read_or_refused("\n".join(map(json.dumps, records)))
