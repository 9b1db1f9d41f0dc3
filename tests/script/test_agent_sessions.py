"""Logs of coding agents are read as the requests that the agents made.

`agent_logs` has what Claude Code 2.1 and Codex 0.169 wrote, shortened and with other names; the requests that they sent
to a server had these messages. The other logs are written here, record by record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.files import InputError
from runner.script.conversation import Conversation, Opening
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import ScheduledRequest, schedule

LOGS = Path(__file__).with_name("agent_logs")


class ClaudeLog:
    """A log of Claude Code in the making: each record goes on from the one before, or from `after`."""

    def __init__(self, session: str = "s") -> None:
        self.records: list[dict[str, Any]] = []
        self._session = session

    def add(self, kind: str, content: Any = None, after: str | None = "last", **fields: Any) -> str:
        number = len(self.records)
        parent = self.records[-1]["uuid"] if after == "last" and self.records else None if after == "last" else after
        record = {
            "type": kind, "uuid": f"{self._session}-{number}", "parentUuid": parent, "isSidechain": False,
            "sessionId": self._session, "timestamp": f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000Z",
        }  # fmt: skip
        if content is not None:
            record["message"] = {"role": kind, "content": content}
        self.records.append({**record, **fields})
        return str(record["uuid"])

    def ask(self, text: str, **fields: Any) -> str:
        return self.add("user", text, **fields)

    def reply(self, *blocks: dict[str, Any] | str, id: str = "", model: str = "opus", **fields: Any) -> str:
        """A reply as Claude Code writes it: each block is a record, with the id of the whole."""
        uuid, name = "", id or f"msg-{self._session}-{len(self.records)}"
        for block in blocks:
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


def openings(requests: Sequence[ScheduledRequest]) -> list[str | None]:
    return [None if each.call is None else each.call.opening for each in requests]


def test_every_reply_of_claude_code_is_a_request_with_the_conversation_up_to_there() -> None:
    result = read_conversations(LOGS / "claude-code")
    requests = schedule(result.conversations)
    assert [len(each.messages) for each in requests] == [1, 3, 5, 7, 9, 1, 3, 11, 5, 7, 1, 3]
    assert openings(requests) == [
        *("session", None, None, None, None), *("subagent", None), None, *("compaction", None), *("session", None),
    ]  # fmt: skip
    assert outline(requests[3]) == [
        "u:Have a look. Read", "a:(Read)", "t:1\t[[marmalade]]\n2\t", "a:It says marmalade.",
        "u:Have a look. Read", "a:(Read)", "t:1\t[[quicksand]]\n2\t",
    ]  # fmt: skip
    assert requests[3].messages[1]["reasoning_content"] == "I look at what is asked for."
    # Behind the summary come the messages that the compaction keeps.
    assert [line[:12] for line in outline(requests[8])] == [
        "u:This sessi", "a:There is n", "u:<local-com", "a:No respons", "u:Have a loo",
    ]  # fmt: skip
    first, second = (each.call for each in requests[:2])
    assert first is not None
    assert second is not None
    assert (first.model, first.prompt_tokens, first.cached_tokens) == ("claude-opus", 20192, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (88 + 20194, 20194)
    assert sum(each.left_out.get("attachment skill_listing", 0) for each in result.conversations) == 4
    assert result.skipped == []


def test_every_reply_of_codex_is_a_request_behind_its_instructions() -> None:
    requests = requests_of_log(LOGS / "codex")
    assert openings(requests) == [
        *("session", None, None, None), *("session", None), "compaction", "compaction",
    ]  # fmt: skip
    system, developer, *_ = requests[3].messages
    assert system["content"].startswith("You are a coding agent running in the Codex CLI")
    assert developer["role"] == "developer"
    assert [line[:16] for line in outline(requests[3])[2:]] == [
        "u:<environment_c", "u:Have a look. e", "a:(exec_command)", "t:Chunk ID: 2e9d", "a:It says marmal",
        "u:Have a look. e", "a:(exec_command)", "t:Chunk ID: e41b",
    ]  # fmt: skip
    said = [(each.call.prompt_tokens, each.call.cached_tokens) for each in requests if each.call is not None]
    assert said[:2] == [(6446, 6), (6576, 6448)]
    # A compaction is a request, too, of which the log has no prompt.
    texts = [message.get("content", "") for each in requests for message in each.messages]
    assert not any(text.startswith("<summary>") for text in texts)


def test_requests_of_logs_come_in_the_order_of_their_times() -> None:
    times = [each.call.time for each in requests_of_log(LOGS) if each.call is not None]
    assert times == sorted(times)
    assert len(times) == 12 + 8


def test_results_of_calls_that_ran_at_the_same_time_all_stand_behind_the_reply(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("Look.")
    one = log.reply(call("a"), id="m")
    two = log.reply(call("b"), id="m", after=one)
    log.result("a", "one", after=one)
    log.result("b", "two", after=two)
    log.reply("Both.")
    assert outline(requests_of_log(written(tmp_path, log.records))[1]) == [
        "u:Look.",
        "a:(Read)(Read)",
        "t:one",
        "t:two",
    ]


def test_a_user_who_goes_back_asks_behind_the_messages_that_stay(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    first = log.reply("First.")
    log.ask("Two.")
    log.reply("Second.")
    log.ask("Not two, but three.", after=first)
    log.reply("Third.")
    requests = requests_of_log(written(tmp_path, log.records))
    assert openings(requests) == ["session", None, "edit"]
    assert outline(requests[2]) == ["u:One.", "a:First.", "u:Not two, but three."]


def test_another_model_goes_on_with_the_same_messages(tmp_path: Path) -> None:
    log = ClaudeLog()
    for text, model in (("One.", "opus"), ("Two.", "haiku"), ("Three.", "haiku")):
        log.ask(text)
        log.reply(f"To {text}", model=model)
    requests = requests_of_log(written(tmp_path, log.records))
    assert openings(requests) == ["session", "model", None]
    assert [each.call.model for each in requests if each.call] == ["opus", "haiku", "haiku"]
    assert [len(each.messages) for each in requests] == [1, 3, 5]


def test_a_subagent_in_the_log_of_its_session_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("Look.")
    reply = log.reply(call("task"))
    log.ask("Search.", after=None, isSidechain=True)
    log.reply("Found.", isSidechain=True)
    log.result("task", "Found.", after=reply)
    log.reply("Done.")
    requests = requests_of_log(written(tmp_path, log.records))
    assert openings(requests) == ["session", "subagent", None]
    assert outline(requests[1]) == ["u:Search."]
    assert outline(requests[2]) == ["u:Look.", "a:(Read)", "t:Found."]


def test_errors_of_the_api_are_no_messages_and_replies_of_the_tool_are_no_requests(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("API Error: 529", model="<synthetic>", isApiErrorMessage=True)
    log.ask("Again.")
    log.reply("No response requested.", model="<synthetic>")
    log.ask("Two.")
    log.reply("Second.")
    (request,) = requests_of_log(written(tmp_path, log.records))
    assert outline(request) == ["u:One.\nAgain.", "a:No response requested.", "u:Two."]


def test_a_session_that_was_copied_into_another_file_is_asked_once(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("First.", id="m1")
    written(tmp_path, log.records, "a.jsonl")
    log.ask("Two.")
    log.reply("Second.", id="m2")
    written(tmp_path, log.records, "b.jsonl")
    requests = requests_of_log(tmp_path)
    assert [outline(each) for each in requests] == [["u:One."], ["u:One.", "a:First.", "u:Two."]]


def test_messages_that_a_compaction_keeps_stand_behind_the_summary(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("First.")
    head = log.ask("Two.")
    tail = log.reply("Second.")
    segment = {"headUuid": head, "tailUuid": tail, "anchorUuid": "s-5"}
    log.add("system", after=None, compactMetadata={"preservedSegment": segment})
    assert log.add("user", "Summary.", isCompactSummary=True) == "s-5"
    log.ask("Three.")
    log.reply("Third.")
    *_, last = requests_of_log(written(tmp_path, log.records))
    assert outline(last) == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]


def compacted(log: ClaudeLog, head: str, tail: str) -> str:
    """Write a boundary that keeps the records from `head` to `tail`, and a summary."""
    summary = f"{log.records[-1]['uuid']}-summary"
    segment = {"headUuid": head, "tailUuid": tail, "anchorUuid": summary}
    boundary = log.add("system", after=None, subtype="compact_boundary", compactMetadata={"preservedSegment": segment})
    log.add("user", "Summary.", after=boundary, isCompactSummary=True, uuid=summary)
    return summary


def twice_compacted(log: ClaudeLog, hook_after: str) -> None:
    """Two compactions without a question between them; the tail of the second is the record of a hook."""
    log.ask("One.")
    log.reply("First.")
    head = log.ask("Two.")
    tail = log.reply("Second.")
    summary = compacted(log, head, tail)
    hook = "no record"
    if hook_after != "nowhere":
        hook = log.add("attachment", after={"summary": summary, "tail": tail}[hook_after])
    compacted(log, head, hook)
    log.ask("Three.", after=hook)


@pytest.mark.parametrize("hook_after", ["summary", "tail", "nowhere"])
def test_the_tail_of_a_compaction_may_be_the_record_of_a_hook(hook_after: str, tmp_path: Path) -> None:
    log = ClaudeLog()
    twice_compacted(log, hook_after)
    log.reply("Third.")
    *_, last = requests_of_log(written(tmp_path, log.records))
    assert outline(last) == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]
    assert openings([last]) == ["compaction"]


def test_a_question_below_what_a_compaction_keeps_stands_behind_the_summary(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("First.")
    head = log.ask("Two.")
    log.reply(thought("hm"), call("c"))
    tail = log.result("c", "It is.")
    compacted(log, head, tail)
    reply = log.reply("Second.", after=tail)
    log.ask("Three.")
    log.reply("Third.")
    log.ask("Not three.", after=reply)
    log.reply("Fourth.")
    requests = requests_of_log(written(tmp_path, log.records))
    kept = ["u:Summary.\nTwo.", "a:(Read)", "t:It is."]
    assert [outline(each) for each in requests[1:]] == [
        ["u:One.", "a:First.", "u:Two."],
        kept,
        [*kept, "a:Second.", "u:Three."],
        [*kept, "a:Second.", "u:Not three."],
    ]
    assert openings(requests) == ["session", None, "compaction", None, "edit"]


def test_a_summary_may_stand_behind_the_messages_that_are_kept(tmp_path: Path) -> None:
    log = ClaudeLog()
    head = log.ask("One.")
    tail = log.reply("First.")
    log.ask("Two.")
    log.reply("Second.")
    segment = {"headUuid": head, "tailUuid": tail, "anchorUuid": "s-4"}
    assert (
        log.add("system", after=None, subtype="compact_boundary", compactMetadata={"preservedSegment": segment})
        == "s-4"
    )
    log.add("user", "Summary.", isCompactSummary=True)
    log.ask("Three.")
    log.reply("Third.")
    *_, last = requests_of_log(written(tmp_path, log.records))
    assert outline(last) == ["u:One.", "a:First.", "u:Summary.\nThree."]
    assert openings([last]) == ["compaction"]


def test_a_session_that_was_copied_from_its_last_compaction_on_is_read_as_the_whole(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("First.")
    head = log.ask("Two.")
    tail = log.reply("Second.")
    summary = compacted(log, head, tail)
    log.ask("Three.")
    log.reply("Third.")
    boundary = log.records.index(next(each for each in log.records if each["uuid"] == summary)) - 1
    kept = [{**each} for each in log.records[2:boundary]]
    kept[0]["parentUuid"] = summary
    later = [{**each} for each in log.records[boundary + 2 :]]
    later[0]["parentUuid"] = tail
    (request,) = requests_of_log(written(tmp_path, [*log.records[boundary : boundary + 2], *kept, *later]))[-1:]
    assert outline(request) == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]


def test_calls_and_results_whose_records_are_written_again_are_in_the_prompt_once(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("Look.")
    log.reply(thought("hm"), call("a"), call("b"), id="m")
    log.result("a", "one")
    log.result("b", "two")
    again = log.records[1:5]
    for record in again:
        log.records.append({**record, "uuid": f"again-{record['uuid']}", "parentUuid": log.records[-1]["uuid"]})
    log.reply("Both.")
    requests = requests_of_log(written(tmp_path, log.records))
    assert [outline(each) for each in requests] == [["u:Look."], ["u:Look.", "a:(Read)(Read)", "t:one", "t:two"]]
    assert requests[1].messages[1]["reasoning_content"] == "hm"


def test_what_copies_of_a_session_and_branches_leave_out_counts_once(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    log = ClaudeLog()
    log.add("user", [{"type": "text", "text": "Look."}, image])
    log.add("attachment", attachment={"type": "todo"})
    log.add("system", microcompactMetadata={"compactedToolIds": ["a", "b"]})
    reply = log.reply("I see.")
    log.ask("And?")
    log.reply("That is all.")
    log.ask("But?", after=reply)
    log.reply("Nothing else.")
    written(tmp_path, log.records, "a.jsonl")
    log.ask("Sure?")
    log.reply("I am.")
    written(tmp_path, [*log.records, *log.records], "b.jsonl")
    (note, _) = read_conversations(tmp_path).notes
    assert "2 cleared tool result, 1 image, 1 attachment todo." in note


def test_results_that_were_shortened_are_read_as_the_model_saw_them_and_cleared_ones_are_counted(
    tmp_path: Path,
) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply(call("c"))
    log.result("c", "A long result.")
    log.records.append({"type": "content-replacement", "sessionId": "s", "uuid": "r", "replacements": [
        {"kind": "tool-result", "toolUseId": "c", "replacement": "Too long."}, {"toolUseId": "d", "replacement": "No."},
    ]})  # fmt: skip
    log.reply("First.", after="s-2")
    log.add("system", microcompactMetadata={"compactedToolIds": ["c"]})
    log.ask("Two.")
    log.reply("Second.")
    path = written(tmp_path, log.records)
    *_, last = requests_of_log(path)
    assert outline(last) == ["u:One.", "a:(Read)", "t:Too long.", "a:First.", "u:Two."]
    assert read_conversations(path).conversations[0].left_out == {"cleared tool result": 1}


def test_a_session_of_codex_that_was_forked_is_asked_once_also_without_ids(tmp_path: Path) -> None:
    reasoning = ("response_item", {"type": "reasoning", "summary": [], "encrypted_content": "secret"})
    log = codex_log(item("user", "One."), reasoning, item("assistant", "First."))
    written(tmp_path, log, "a.jsonl")
    fork = codex_log(*((each["type"], each["payload"]) for each in log[1:]), item("user", "Two."), session="fork")
    more = codex_log(item("assistant", "Second."))[1:]
    written(tmp_path, [*fork, *more], "b.jsonl")
    found = sorted((outline(each)[1:] for each in requests_of_log(tmp_path)), key=len)
    assert found == [["u:One."], ["u:One.", "a:First.", "u:Two."]]


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


def test_an_old_log_of_codex_has_items_without_an_envelope(tmp_path: Path) -> None:
    new = codex_log(
        *(item("user", "One."), item("assistant", "First."), item("user", "Two.")),
        ("response_item", {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"}),
        ("response_item", {"type": "function_call_output", "call_id": "c", "output": "Done."}),
        item("assistant", "Second."),
    )
    head = {"id": "thread", "timestamp": "2025-06-01T00:00:00Z", "instructions": None}
    old = [head, {"record_type": "state"}, *(each["payload"] for each in new[1:])]
    requests = requests_of_log(written(tmp_path, old, "old.jsonl"))
    wanted = requests_of_log(written(tmp_path, new, "new.jsonl"))
    assert [outline(each) for each in requests] == [outline(each)[1:] for each in wanted]
    assert len(requests) == 3
    assert [each.call and each.call.time for each in requests] == [head["timestamp"]] * 3
    shifted = requests_of_log(written(tmp_path, [{"note": 1}, *old, head], "shifted.jsonl"))
    assert [outline(each) for each in shifted] == [outline(each) for each in requests]


def test_codex_goes_back_by_turns_and_changes_the_model(tmp_path: Path) -> None:
    log = codex_log(
        *(turn("gpt"), item("user", "One."), item("assistant", "First.")),
        *(turn("gpt"), item("user", "Two."), item("assistant", "Second.")), back(1),
        *(turn("gpt"), item("user", "Three."), item("assistant", "Third.")),
        *(turn("mini"), item("user", "Four."), item("assistant", "Fourth.")),
    )  # fmt: skip
    requests = requests_of_log(written(tmp_path, log))
    assert openings(requests) == ["session", None, "edit", "model"]
    assert outline(requests[2]) == ["s:Be kind.", "u:One.", "a:First.", "u:Three."]
    assert outline(requests[3])[4:] == ["a:Third.", "u:Four."]


def back(turns: int) -> tuple[str, dict[str, Any]]:
    return "event_msg", {"type": "thread_rolled_back", "num_turns": turns}


def test_a_rollback_of_codex_drops_questions_wherever_the_records_of_turns_stand(tmp_path: Path) -> None:
    place = item("user", "<environment_context>\n  <cwd>/home/ann</cwd>\n</environment_context>")
    log = codex_log(
        *(turn("gpt"), item("developer", "Rules."), place, item("user", "One."), turn("gpt")),
        *(item("assistant", "First."), turn("gpt")),
        *(item("user", "Two."), turn("gpt"), turn("gpt"), item("assistant", "Second."), turn("gpt")),
        *(turn("gpt"), item("developer", "A skill."), place, item("user", "Three."), item("assistant", "Third.")),
        *(turn("gpt"), back(1), item("user", "Four."), item("assistant", "Fourth.")),
        *(back(2), turn("gpt"), item("user", "Five."), item("assistant", "Fifth.")),
        *(back(9), item("user", "Six."), item("assistant", "Sixth.")),
    )  # fmt: skip
    found = [outline(each)[3:] for each in requests_of_log(written(tmp_path, log))]
    one, two = ["u:One."], ["a:First.", "u:Two."]
    assert found[1] == [*one, *two]
    assert found[2][:4] + found[2][-1:] == [*one, *two, "a:Second.", "u:Three."]
    assert found[3:] == [[*one, *two, "a:Second.", "u:Four."], [*one, "a:First.", "u:Five."], ["u:Six."]]


def test_a_rollback_of_codex_behind_a_compaction_goes_back_to_what_stood_before_the_question(tmp_path: Path) -> None:
    log = codex_log(
        *(item("user", "One."), item("assistant", "First."), item("user", "Two."), item("assistant", "Second.")),
        *(("compacted", {"message": "They asked."}), item("user", "Three."), item("assistant", "Third.")),
        *(back(1), item("user", "Four."), item("assistant", "Fourth.")),
        *(back(2), item("user", "Five."), item("assistant", "Fifth.")),
    )
    *_, fourth, fifth = requests_of_log(written(tmp_path, log))
    assert outline(fourth) == ["s:Be kind.", "u:They asked.", "u:Four."]
    assert outline(fifth) == ["s:Be kind.", "u:One.", "a:First.", "u:Five."]


@pytest.mark.parametrize("head", ["forked_from_id", "the older head"])
def test_the_history_that_a_fork_of_codex_copies_is_asked_once_without_ids(head: str, tmp_path: Path) -> None:
    searched = ("response_item", {"type": "web_search_call"})
    said = [item("user", "One."), searched, item("assistant", "First."), item("user", "Two."), item("assistant", "No.")]
    parent = codex_log(*said, session="parent")
    written(tmp_path, parent, "a.jsonl")
    # The same was said in a session of its own, and a fork says again what it has copied.
    written(tmp_path, codex_log(*said, session="other"), "b.jsonl")
    for name in ("c", "d"):
        fork = codex_log(*said, back(1), item("user", "Two."), item("assistant", "No."), session=name)
        if head == "forked_from_id":
            fork[0]["payload"][head] = "parent"
        else:
            fork.insert(1, parent[0])
        written(tmp_path, fork, f"{name}.jsonl")
    result = read_conversations(tmp_path)
    found = [outline(each)[1:] for each in schedule(result.conversations)]
    two = ["u:One.", "a:First.", "u:Two."]
    assert sorted(found, key=len) == [["u:One."]] * 2 + [two] * 4
    assert sum(each.left_out.get("web_search_call", 0) for each in result.conversations) == 2


@pytest.mark.parametrize("kind", ["tool_search_call", "ghost_snapshot", "local_shell_call"])
def test_items_of_codex_that_are_no_message_are_counted_and_shift_no_request(kind: str, tmp_path: Path) -> None:
    def tokens(count: int) -> tuple[str, dict[str, Any]]:
        return "event_msg", {"type": "token_count", "info": {"last_token_usage": {"input_tokens": count}}}

    log = codex_log(
        *(turn("gpt"), item("user", "One."), item("assistant", "First."), tokens(100)),
        *(item("user", "Two."), ("response_item", {"type": kind}), tokens(200)),
        *(item("assistant", "Second."), tokens(300)),
    )  # fmt: skip
    path = written(tmp_path, log)
    requests = requests_of_log(path)
    assert openings(requests) == ["session", None]
    assert [each.call and each.call.prompt_tokens for each in requests] == [100, 300]
    assert read_conversations(path).conversations[0].left_out == {kind: 1}


def test_replies_of_claude_code_without_an_id_are_not_joined(tmp_path: Path) -> None:
    log = ClaudeLog("s")
    for text in ("One.", "Two."):
        log.ask(text)
        log.reply(f"To {text}")
        log.records[-1]["message"]["id"] = None
    requests = requests_of_log(written(tmp_path, log.records))
    assert outline(requests[1]) == ["u:One.", "a:To One.", "u:Two."]


def test_an_old_compaction_of_codex_has_only_its_summary(tmp_path: Path) -> None:
    log = codex_log(
        *(turn("gpt"), item("user", "One."), item("assistant", "First.")),
        ("compacted", {"message": "They asked one."}), item("user", "Two."), item("assistant", "Second."),
    )  # fmt: skip
    requests = requests_of_log(written(tmp_path, log))
    assert openings(requests) == ["session", "compaction"]
    assert outline(requests[1]) == ["s:Be kind.", "u:They asked one.", "u:Two."]


def test_going_back_is_told_from_what_it_goes_back_to(tmp_path: Path) -> None:
    used = ("event_msg", {"type": "token_count", "info": {"last_token_usage": {"input_tokens": 9}}})
    log = codex_log(
        *(turn("gpt"), item("user", "One."), item("assistant", "First.")),
        ("compacted", {"message": "They asked one."}), used,
        *(turn("gpt"), item("user", "Two."), item("assistant", "Second.")), back(1),
        *(turn("gpt"), item("user", "Three."), item("assistant", "Third.")),
    )  # fmt: skip
    requests = requests_of_log(written(tmp_path, log, "codex.jsonl"))
    assert openings(requests) == ["session", "compaction", "edit"]
    # What stands behind a compaction is no figure of the request before it.
    assert [each.call.prompt_tokens for each in requests if each.call] == [None] * 3
    claude = ClaudeLog()
    claude.ask("One.")
    first = claude.reply("First.")
    claude.ask("Stop.")
    claude.reply("No response requested.", model="<synthetic>")
    claude.ask("Interrupted.", after=first)
    claude.ask("Two.", after=first)
    claude.reply("Second.")
    assert openings(requests_of_log(written(tmp_path / "c", claude.records))) == ["session", None]


def test_in_a_folder_of_sessions_what_cannot_be_read_is_skipped_and_counted(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("First.")
    path = written(tmp_path, log.records, "p/a.jsonl")
    path.write_text(path.read_text() + '{"type": "user", "uu')  # the agent is still writing
    (tmp_path / "p" / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    written(tmp_path, [{"some": "settings"}], "settings.json")
    result = read_conversations(tmp_path)
    assert [each.conversation_id for each in result.conversations] == ["a#0"]
    assert len(result.skipped) == 3
    assert "a.jsonl:3" in result.skipped[0]
    path.unlink()
    with pytest.raises(InputError, match=r"b\.jsonl"):
        read_conversations(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=3),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(("type", "text", "id")), each, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("isSidechain", "isCompactSummary", "compactMetadata", "timestamp", "attachment", "metadata")
KINDS = (
    "user", "assistant", "system", "attachment", "session_meta", "response_item", "compacted", "event_msg",
    "turn_context",
)  # fmt: skip
RECORD = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS), "sessionId": st.just("s")},
    optional={
        **dict.fromkeys(FIELDS, JSON),
        "uuid": st.sampled_from("abcd"),
        "parentUuid": st.sampled_from("abcd") | st.none(),
        "message": st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant")), "content": JSON})
        | st.fixed_dictionaries({"role": st.just("assistant"), "id": st.sampled_from("mn"), "content": st.just("hi")}),
        "payload": st.fixed_dictionaries(
            {"type": st.sampled_from(("message", "reasoning", "function_call", "token_count", "thread_rolled_back"))},
            optional={"role": st.sampled_from(("user", "assistant")), "content": JSON, "num_turns": JSON, "info": JSON},
        ),
    },
)


@given(st.lists(RECORD, min_size=1, max_size=8))
def test_any_records_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, records: list[Any]) -> None:
    found: list[Conversation] = []
    with suppress(InputError):
        found = read_conversations(written(tmp_path_factory.mktemp("logs"), records), skip_bad=True).conversations
    for each in found:
        assert each.calls
        assert each.messages[-1]["role"] == "assistant"
        assert each.calls[0].opening in (None, *Opening)


QUESTION = st.sampled_from(("ask", "call", "go back", "model"))


@given(st.lists(QUESTION, max_size=12))
def test_a_log_says_again_which_requests_were_made(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    log, model = ClaudeLog(), "opus"
    history: list[str] = []
    made: list[list[str]] = []
    ends: list[tuple[str, list[str]]] = []  # the record of each reply, and the history up to there
    for number, move in enumerate(["ask", *moves]):
        if move == "model":
            model = "haiku" if model == "opus" else "opus"
            continue
        after = "last"
        if move == "go back" and ends:
            after, history = ends[number % len(ends)]
        text = f"{number}"
        log.ask(text, after=after)
        history = [*history, f"u:{text}"]
        made.append(history)
        if move == "call":
            log.reply(thought("hm"), call(f"c{number}"), model=model)
            log.result(f"c{number}", text)
            history = [*history, "a:(Read)", f"t:{text}"]
            made.append(history)
        history = [*history, f"a:re {text}"]
        ends.append((log.reply(f"re {text}", model=model), history))
    assert [outline(each) for each in requests_of_log(written(tmp_path_factory.mktemp("logs"), log.records))] == made
