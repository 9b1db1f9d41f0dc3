"""Logs of coding agents are read as the requests that the agents made.

The requests that Claude Code and Codex sent to a server had the messages of the logs in `agent_logs`. The other logs
are written here, record by record; test_agent_histories.py has histories of any moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.files import InputError
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import schedule
from tests.script.logs import (
    LOGS,
    ClaudeLog,
    back,
    call,
    codex_log,
    compacted,
    item,
    openings,
    outline,
    outlines,
    requests_of_log,
    thought,
    turn,
    written,
)


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


def test_results_of_calls_that_ran_at_the_same_time_all_stand_behind_the_reply(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("Look.")
    one = log.reply(call("a"), id="m")
    two = log.reply(call("b"), id="m", after=one)
    log.result("a", "one", after=one)
    log.result("b", "two", after=two)
    log.reply("Both.")
    assert outlines(tmp_path, log.records)[1] == ["u:Look.", "a:(Read)(Read)", "t:one", "t:two"]


def test_errors_of_the_api_are_no_messages_and_replies_of_the_tool_are_no_requests(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("One.")
    log.reply("API Error: 529", model="<synthetic>", isApiErrorMessage=True)
    log.ask("Again.")
    log.reply("No response requested.", model="<synthetic>")
    log.talk("Two.", "Second.")
    assert outlines(tmp_path, log.records) == [["u:One.\nAgain.", "a:No response requested.", "u:Two."]]


def test_a_session_that_was_copied_into_another_file_is_asked_once(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.talk("One.", "First.")
    written(tmp_path, log.records, "a.jsonl")
    log.talk("Two.", "Second.")
    assert outlines(tmp_path, log.records, "b.jsonl") == [["u:One."], ["u:One.", "a:First.", "u:Two."]]


def test_messages_that_a_compaction_keeps_stand_behind_the_summary(tmp_path: Path) -> None:
    log = ClaudeLog()
    *_, head, tail = log.talk("One.", "First.", "Two.", "Second.")
    segment = {"headUuid": head, "tailUuid": tail, "anchorUuid": "s-5"}
    log.add("system", after=None, compactMetadata={"preservedSegment": segment})
    assert log.add("user", "Summary.", isCompactSummary=True) == "s-5"
    log.talk("Three.", "Third.")
    assert outlines(tmp_path, log.records)[-1] == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]


@pytest.mark.parametrize("hook_after", ["summary", "tail", "nowhere"])
def test_the_tail_of_a_compaction_may_be_the_record_of_a_hook(hook_after: str, tmp_path: Path) -> None:
    """Two compactions without a question between them; the tail of the second is the record of a hook."""
    log = ClaudeLog()
    *_, head, tail = log.talk("One.", "First.", "Two.", "Second.")
    summary = compacted(log, head, tail)
    hook = "no record"
    if hook_after != "nowhere":
        hook = log.add("attachment", after={"summary": summary, "tail": tail}[hook_after])
    compacted(log, head, hook)
    log.ask("Three.", after=hook)
    log.reply("Third.")
    *_, last = requests_of_log(written(tmp_path, log.records))
    assert outline(last) == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]
    assert openings([last]) == ["compaction"]


def test_a_question_below_what_a_compaction_keeps_stands_behind_the_summary(tmp_path: Path) -> None:
    log = ClaudeLog()
    *_, head = log.talk("One.", "First.", "Two.")
    log.reply(thought("hm"), call("c"))
    tail = log.result("c", "It is.")
    compacted(log, head, tail)
    reply = log.reply("Second.", after=tail)
    log.talk("Three.", "Third.")
    log.ask("Not three.", after=reply)
    log.reply("Fourth.")
    requests = requests_of_log(written(tmp_path, log.records))
    kept = ["u:Summary.\nTwo.", "a:(Read)", "t:It is."]
    ends = [[], ["a:Second.", "u:Three."], ["a:Second.", "u:Not three."]]
    assert [outline(each) for each in requests[2:]] == [[*kept, *end] for end in ends]
    assert openings(requests) == ["session", None, "compaction", None, "edit"]


def test_a_summary_may_stand_behind_the_messages_that_are_kept(tmp_path: Path) -> None:
    log = ClaudeLog()
    head, tail, *_ = log.talk("One.", "First.", "Two.", "Second.")
    about = {"preservedSegment": {"headUuid": head, "tailUuid": tail, "anchorUuid": "s-4"}}
    assert log.add("system", after=None, subtype="compact_boundary", compactMetadata=about) == "s-4"
    log.add("user", "Summary.", isCompactSummary=True)
    log.talk("Three.", "Third.")
    assert outlines(tmp_path, log.records)[-1] == ["u:One.", "a:First.", "u:Summary.\nThree."]


def test_a_session_that_was_copied_from_its_last_compaction_on_is_read_as_the_whole(tmp_path: Path) -> None:
    log = ClaudeLog()
    *_, head, tail = log.talk("One.", "First.", "Two.", "Second.")
    summary = compacted(log, head, tail)
    log.talk("Three.", "Third.")
    before, (boundary, *later) = log.records[2:4], log.records[4:]
    kept = [{**before[0], "parentUuid": summary}, before[1]]
    later[1] = {**later[1], "parentUuid": tail}
    copied = [boundary, later[0], *kept, *later[1:]]
    assert outlines(tmp_path, copied)[-1] == ["u:Summary.\nTwo.", "a:Second.", "u:Three."]


def test_a_text_beside_a_result_is_in_the_prompt_once_if_its_record_is_written_again(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.ask("Look.")
    log.reply(call("a"), id="m")
    result = {"type": "tool_result", "tool_use_id": "a", "content": "one"}
    log.add("user", [result, {"type": "text", "text": "Mind the gap."}])
    last = log.records[-1]
    log.records.append({**last, "uuid": "again", "parentUuid": last["uuid"]})
    log.reply("I do.")
    assert outlines(tmp_path, log.records)[-1] == ["u:Look.", "a:(Read)", "t:one", "u:Mind the gap."]


def test_what_copies_of_a_session_and_branches_leave_out_counts_once(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    log = ClaudeLog()
    log.add("user", [{"type": "text", "text": "Look."}, image])
    log.add("attachment", attachment={"type": "todo"})
    log.add("system", microcompactMetadata={"compactedToolIds": ["a", "b"]})
    reply = log.reply("I see.")
    log.talk("And?", "That is all.")
    log.ask("But?", after=reply)
    log.reply("Nothing else.")
    written(tmp_path, log.records, "a.jsonl")
    log.talk("Sure?", "I am.")
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
    log.talk("Two.", "Second.")
    assert outlines(tmp_path, log.records)[-1] == ["u:One.", "a:(Read)", "t:Too long.", "a:First.", "u:Two."]
    assert read_conversations(tmp_path).conversations[0].left_out == {"cleared tool result": 1}


def test_replies_of_claude_code_without_an_id_are_not_joined(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.talk("One.", "To one.", "Two.", "To two.")
    for record in log.records:
        record["message"]["id"] = None
    assert outlines(tmp_path, log.records)[-1] == ["u:One.", "a:To one.", "u:Two."]


def test_a_session_of_codex_that_was_forked_is_asked_once_also_without_ids(tmp_path: Path) -> None:
    reasoning = ("response_item", {"type": "reasoning", "summary": [], "encrypted_content": "secret"})
    said = [item("user", "One."), reasoning, item("assistant", "First.")]
    written(tmp_path, codex_log(*said), "a.jsonl")
    fork = codex_log(*said, item("user", "Two."), item("assistant", "Second."), session="fork")
    found = sorted(outlines(tmp_path, fork, "b.jsonl"), key=len)
    assert [each[1:] for each in found] == [["u:One."], ["u:One.", "a:First.", "u:Two."]]


def test_a_session_of_codex_in_two_files_is_asked_once_and_ids_of_calls_are_of_one_session(tmp_path: Path) -> None:
    function = ("response_item", {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "shell:0"})
    output = ("response_item", {"type": "function_call_output", "call_id": "shell:0", "output": "Done."})
    said = [item("user", "One."), item("assistant", "First."), item("user", "Two."), function, output]
    more = [item("assistant", "Second.")]
    written(tmp_path, codex_log(*said, session="s"), "a.jsonl")
    written(tmp_path, codex_log(*said, *more, session="s"), "b.jsonl")
    written(tmp_path, codex_log(item("user", "Go."), function, output, session="other"), "c.jsonl")
    found = [each[1:] for each in outlines(tmp_path)]
    two = ["u:One.", "a:First.", "u:Two."]
    assert sorted(found, key=len) == [["u:One."], ["u:Go."], two, [*two, "a:(shell)", "t:Done."]]


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
    found = [each[3:] for each in outlines(tmp_path, log)]
    one, two = ["u:One."], ["a:First.", "u:Two."]
    assert found[1] == [*one, *two]
    assert found[2][:4] + found[2][-1:] == [*one, *two, "a:Second.", "u:Three."]
    assert found[3:] == [[*one, *two, "a:Second.", "u:Four."], [*one, "a:First.", "u:Five."], ["u:Six."]]


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


def test_going_back_and_another_model_are_told_from_what_the_agent_goes_on_from(tmp_path: Path) -> None:
    used = ("event_msg", {"type": "token_count", "info": {"last_token_usage": {"input_tokens": 9}}})
    log = codex_log(
        *(turn("gpt"), item("user", "One."), item("assistant", "First.")),
        ("compacted", {"message": "They asked one."}), used,
        *(turn("gpt"), item("user", "Two."), item("assistant", "Second.")), back(1),
        *(turn("gpt"), item("user", "Three."), item("assistant", "Third.")),
        *(turn("mini"), item("user", "Four."), item("assistant", "Fourth.")),
    )  # fmt: skip
    requests = requests_of_log(written(tmp_path, log, "codex.jsonl"))
    assert openings(requests) == ["session", "compaction", "edit", "model"]
    # What stands behind a compaction is no figure of the request before it.
    assert [each.call.prompt_tokens for each in requests if each.call] == [None] * 4
    claude = ClaudeLog()
    _, first, _ = claude.talk("One.", "First.", "Stop.")
    claude.reply("No response requested.", model="<synthetic>")
    claude.ask("Interrupted.", after=first)
    claude.ask("Two.", after=first)
    claude.reply("Second.")
    assert openings(requests_of_log(written(tmp_path / "c", claude.records))) == ["session", None]


def test_in_a_folder_of_sessions_what_cannot_be_read_is_skipped_and_counted(tmp_path: Path) -> None:
    log = ClaudeLog()
    log.talk("One.", "First.")
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
