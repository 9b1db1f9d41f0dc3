"""Sessions of qwen-code, Gemini CLI, pi and opencode are read as the requests that the agents made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.script.conversation_reader import read_conversations
from runner.script.schedule import schedule
from tests.script.logs import (
    QwenLog,
    function_call,
    open_said,
    openings,
    outline,
    outlines,
    pi_said,
    requests_of_log,
    written,
)


def test_every_reply_of_qwen_code_is_a_request_with_its_texts_calls_and_figures(tmp_path: Path) -> None:
    log = QwenLog()
    log.add("user", [{"text": "Look."}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}])
    log.reply({"text": "I look.", "thought": True}, "A moment.", function_call("a"))
    log.result("a", "one")
    first = log.reply("It is.")
    log.ask("And?")
    log.reply("No more.", model="qwen3-small")
    log.add("system", subtype="rewind", after=first, systemPayload={"truncatedCount": 2})
    log.talk("But?", "Nothing.")
    log.ask("Search.", after=None, isSidechain=True)
    log.reply("Found.", isSidechain=True)
    path = written(tmp_path, log.records)
    requests = requests_of_log(path)
    assert outline(requests[4]) == ["u:Search."]
    assert outline(requests[3]) == ["u:Look.", "a:A moment.(read_file)", "t:one", "a:It is.", "u:But?"]
    assert openings(requests) == ["session", None, "model", "edit", "subagent"]
    reply, call = requests[1].messages[1], requests[1].call
    assert reply["reasoning_content"] == "I look."
    assert reply["tool_calls"][0]["function"] == {"name": "read_file", "arguments": {"file": "a"}}
    assert call is not None
    assert (call.model, call.prompt_tokens, call.cached_tokens) == ("qwen3", 100, 70)
    assert read_conversations(path).notes[0].endswith("1 inlineData.")


def test_a_compression_of_qwen_code_takes_the_place_of_the_history(tmp_path: Path) -> None:
    log = QwenLog()
    log.talk("One.", "First.")
    kept = [{"role": "user", "parts": [{"text": "Summary."}]}, {"role": "model", "parts": [{"text": "Got it."}]}]
    log.add("system", subtype="chat_compression", systemPayload={"info": {}, "compressedHistory": kept})
    log.talk("Two.", "Second.")
    requests = requests_of_log(written(tmp_path, log.records))
    assert outline(requests[1]) == ["u:Summary.", "a:Got it.", "u:Two."]
    assert openings(requests) == ["session", "compaction"]


def test_rows_of_qwen_code_in_pieces_written_twice_or_copied_into_a_branch_are_there_once(tmp_path: Path) -> None:
    log = QwenLog()
    log.add("user", [{"text": "Look."}, {"inlineData": {}}])
    log.reply("A moment.")
    log.records.append({**log.records[-1], "message": {"role": "model", "parts": [function_call("a")]}})
    log.result("a", "one", after="s-1")
    log.records.append(log.records[-1])
    log.reply("First.")
    written(tmp_path, log.records, "a.jsonl")
    branch = QwenLog("t", log.records)
    branch.talk("Two.", "Second.")
    looked = ["u:Look.", "a:A moment.(read_file)", "t:one"]
    found = outlines(tmp_path, branch.records, "b.jsonl")
    assert found == [["u:Look."], looked, [*looked, "a:First.", "u:Two."]]
    assert read_conversations(tmp_path).notes[0].endswith("1 inlineData.")


def test_what_a_folder_of_qwen_code_has_beside_its_sessions_is_counted(tmp_path: Path) -> None:
    log, unanswered = QwenLog(), QwenLog("t")
    log.talk("One.", "First.")
    unanswered.ask("Two.")
    written(tmp_path, log.records, "projects/home/chats/s.jsonl")
    written(tmp_path, unanswered.records, "projects/home/chats/t.jsonl")
    row = {"sessionId": "s", "messageId": 0, "type": "user", "message": "One.", "timestamp": "2026-01-01"}
    (tmp_path / "logs.json").write_text(json.dumps([row, row]))
    result = read_conversations(tmp_path)
    assert [outline(each) for each in schedule(result.conversations)] == [["u:One."]]
    logs, session = sorted(result.skipped)
    assert "logs.json:1: no reply of a model in 2 records of Claude Code; wanted a session." in logs
    assert "t.jsonl:1: no reply of a model in 1 record of qwen-code; wanted a session." in session


def test_every_reply_of_gemini_cli_is_a_request_in_both_of_its_forms(tmp_path: Path) -> None:
    def row(id: str, kind: str, content: Any, **more: Any) -> dict[str, Any]:
        return {"id": id, "timestamp": f"2026-01-01T00:00:0{id}.000Z", "type": kind, "content": content, **more}

    response = {"functionResponse": {"id": "c", "name": "read_file", "response": {"output": "one"}}}
    calls = [{"id": "c", "name": "read_file", "args": {"file": "c"}, "status": "success", "result": [response]}]
    head = {"sessionId": "s", "projectHash": "p", "startTime": "2026-01-01T00:00:00.000Z"}
    said = [
        row("1", "user", [{"text": "Look."}]),
        row("2", "info", "An update is there."),
        row("3", "gemini", "", model="gemini", tokens={"input": 100, "cached": 70}, toolCalls=calls),
        row("4", "gemini", "It is.", model="gemini"),
        row("5", "user", "/about"),
        row("6", "user", "And?"),
        row("7", "gemini", "No more.", model="gemini"),
    ]
    whole = written(tmp_path, [], "session-1.json")
    whole.write_text(json.dumps({**head, "messages": said}, indent=2))
    begun = {**said[2], "toolCalls": [{**calls[0], "result": None, "status": "executing"}]}
    lines = [head, said[0], {"$set": {"lastUpdated": "2026"}}, begun, *said[1:]]
    back = [{"$rewindTo": "6"}, row("8", "user", "But?"), row("9", "gemini", "Nothing.", model="gemini")]
    expected = ["u:Look.", "a:(read_file)", "t:one", "a:It is."]
    for path, ends in ((whole, ["u:And?"]), (written(tmp_path, [*lines, *back], "2.jsonl"), ["u:And?", "u:But?"])):
        requests = requests_of_log(path)
        assert [outline(each) for each in requests[2:]] == [[*expected, end] for end in ends]
        assert [outline(each) for each in requests[:2]] == [["u:Look."], expected[:3]]
        assert requests[0].call is not None
        assert (requests[0].call.prompt_tokens, requests[0].call.cached_tokens) == (100, 70)
    compressed = [row("a", "user", "Summary."), row("b", "gemini", "Got it.")]
    lines += [{"$set": {"messages": compressed}}, *back[1:]]
    *_, last = requests_of_log(written(tmp_path, lines, "3.jsonl"))
    assert outline(last) == ["u:Summary.", "a:Got it.", "u:But?"]
    assert openings([last]) == ["compaction"]


def pi_log(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of pi: each goes on from the one before, unless it says otherwise."""
    found = [{"type": "session", "version": 3, "id": "s", "timestamp": "2026-01-01T00:00:00.000Z", "cwd": "/home/ann"}]
    for at, row in enumerate(rows):
        parent = found[-1]["id"] if at else None
        about = {"id": f"r{at}", "parentId": parent, "timestamp": f"2026-01-01T00:01:{at:02d}.000Z"}
        found.append({"type": "message", **about, **row})
    return found


def test_every_reply_of_pi_is_a_request_behind_compactions_and_branches(tmp_path: Path) -> None:
    tool_call = {"type": "toolCall", "id": "c", "name": "read", "arguments": {"path": "a"}}
    log = pi_log(
        pi_said("user", "Look.", {"type": "image", "data": "AAAA", "mimeType": "image/png"}),
        pi_said("assistant", {"type": "thinking", "thinking": "I look."}, "A moment.", tool_call),
        pi_said("toolResult", "one", "two", toolCallId="c", toolName="read"),
        pi_said("assistant", "It is."),
        pi_said("user", "And?"),
        pi_said("assistant", "Overloaded", stopReason="error"),
        pi_said("assistant", "No more."),
        {"type": "compaction", "summary": "They looked.", "firstKeptEntryId": "r4", "tokensBefore": 9},
        pi_said("user", "Then?"),
        pi_said("assistant", "Done."),
        {"type": "branch_summary", "summary": "A branch.", "fromId": "r9", "parentId": "r3"},
        {"type": "message", "message": {"role": "bashExecution", "command": "ls", "output": "a"}},
        pi_said("user", "So?"),
        pi_said("assistant", "So."),
    )
    path = written(tmp_path, log, "a.jsonl")
    requests = requests_of_log(path)
    looked = ["u:Look.", "a:A moment.(read)", "t:one\ntwo"]
    summary, branch = "u:The conversation history", "u:The following is a summa"
    assert [outline(each) for each in requests] == [
        ["u:Look."],
        looked,
        [*looked, "a:It is.", "u:And?"],
        [summary, "u:And?", "a:No more.", "u:Then?"],
        [*looked, "a:It is.", branch, "u:Ran `ls`\n```\na\n```", "u:So?"],
    ]
    assert openings(requests) == ["session", None, None, "compaction", "edit"]
    reply, call = requests[1].messages[1], requests[1].call
    assert reply["reasoning_content"] == "I look."
    assert call is not None
    assert (call.model, call.prompt_tokens, call.cached_tokens) == ("qwen", 100, 70)
    assert read_conversations(path).notes[0].endswith("1 image.")


def test_every_step_of_a_session_that_opencode_exports_is_a_request(tmp_path: Path) -> None:
    state = {"status": "completed", "input": {"path": "a"}, "output": "one", "time": {"start": 1_760_000_002_500}}
    used = {"type": "step-finish", "tokens": {"input": 20, "cache": {"read": 70, "write": 10}}}
    session = {
        "info": {"id": "s", "title": "Look"},
        "messages": [
            open_said("1", "user", "Look.", {"type": "file", "mime": "image/png", "url": "data:"}),
            open_said(
                "2", "assistant",
                *({"type": "step-start"}, {"type": "reasoning", "text": "I look."}, "A moment."),
                *({"type": "tool", "tool": "read", "callID": "c", "state": state}, used),
                *({"type": "step-start"}, "It is.", {"type": "patch", "files": []}, used),
            ),
            open_said("3", "user", "And?"),
            open_said("4", "assistant", "Aborted", error={"name": "MessageAbortedError"}),
            open_said("5", "assistant", {"type": "step-start"}, "No more."),
            open_said("6", "user", {"type": "compaction", "auto": True, "tail_start_id": "3"}),
            open_said("7", "assistant", "They looked.", summary=True),
            open_said("8", "user", "Then?"),
            open_said("9", "assistant", {"type": "step-start"}, "Done."),
        ],
    }  # fmt: skip
    path = written(tmp_path, [], "ses.json")
    path.write_text(json.dumps(session, indent=2))
    requests = requests_of_log(path)
    looked = ["u:Look.", "a:A moment.(read)", "t:one"]
    assert [outline(each) for each in requests] == [
        ["u:Look."],
        looked,
        [*looked, "a:It is.", "u:And?"],
        ["u:What did we do so far?", "a:They looked.", "u:And?", "a:No more.", "u:Then?"],
    ]
    assert openings(requests) == ["session", None, None, "compaction"]
    call = requests[0].call
    assert call is not None
    assert (call.model, call.prompt_tokens, call.cached_tokens) == ("qwen", 100, 70)
    assert requests[0].messages[0] == {"role": "user", "content": "Look."}
    times = [each.call.time for each in requests if each.call]
    assert times == sorted(times)
    assert times[0] == "2025-10-09T08:53:22.500000+00:00"
    assert read_conversations(path).notes[0].endswith("1 file.")
