"""`radixcache explain`: what breaks the prefix of recorded conversations is found, named and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from runner.breaks import BreakReport, breaks_text, find_breaks, unwritten_parts, with_replies
from runner.models import ModelBytes
from runner.models.load import load_outline
from runner.script.conversation import Conversation
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import schedule
from runner.simulate.simulator import grow_tree
from runner.traces.trace_reader import read_trace
from tests.chat.part_templates import TEMPLATES
from tests.prompts import SYSTEM
from tests.script.logs import LOGS, ClaudeLog, call, thought, written
from tests.serve.parrot import TEMPLATES as PARROT_TEMPLATES

OUTLINE = load_outline("tiny")
QUESTIONS = ("Is it open today?", "Where do I return books?", "How much is a card?", "May I bring my dog?", "Who?")


def conversation(name: str, *contents: str, system: str = SYSTEM, **more: Any) -> Conversation:
    roles = ["user", "assistant"] * len(contents)
    talk = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return Conversation(name, name, ({"role": "system", "content": system}, *talk), **more)


def broken(conversations: list[Conversation], outline: Any = OUTLINE, **options: Any) -> BreakReport:
    from radixcache.layers.sizes import SizedLayout

    layout = options.pop("layout", SizedLayout(1))
    requests = schedule(with_replies(conversations))
    report, skipped = find_breaks(outline, layout, requests, **{"budget_bytes": 1 << 40, **options})
    assert skipped == 0
    assert report.prompt_tokens == report.resumed_tokens + report.new_tokens + report.lost_tokens
    assert report.lost_tokens == sum(each.lost_tokens for each in report.breaks)
    return report


# As Qwen3's: a last reply has thinking tags, even empty ones.
EMPTY_TAGS = (
    PARROT_TEMPLATES["qwen3"]
    .replace("if message.reasoning_content and", "if (message.reasoning_content or loop.last) and")
    .replace("{{ message.reasoning_content }}", "{{ message.reasoning_content or '' }}")
)


def test_empty_thinking_tags_that_the_template_writes_into_a_last_reply_lose_nothing(tmp_path: Path) -> None:
    outline = load_outline("tiny")
    outline.tokenizer._tokenizer.chat_template = EMPTY_TAGS
    growing = conversation("c", "Read a.txt.", "It says marmalade.", "And b.txt?", "Quicksand.", "Thanks.", system="")
    log = ClaudeLog()
    log.ask("Why does the test fail?")
    log.reply(call("c"))
    log.result("c", "marmalade")
    log.reply("Done: the parser takes both.")
    thinking = [*read_conversations(written(tmp_path, log.records)).conversations, growing]
    for talk in thinking:
        report = broken([replace(talk, arguments={"enable_thinking": True})], outline)
        assert (report.lost_tokens, report.resumed_tokens > 0) == (0, True)
    reasoned = [
        {**each, "reasoning_content": SYSTEM} if each["role"] == "assistant" else each for each in growing.messages
    ]
    talk = replace(growing, messages=tuple(reasoned), arguments={"enable_thinking": True})
    assert the_break(broken([talk], outline)) == ("the chat template", "part", 2)


def test_what_the_budget_evicts_is_told_from_what_diverges() -> None:
    # One conversation after another, twice: the first is gone when it is asked again.
    talks = [
        conversation(f"{turn}-{i}", f"{q} {q[::-1] * 9}", system=f"{i}")
        for turn in range(2)
        for i, q in enumerate(QUESTIONS)
    ]
    talks = [Conversation(t.conversation_id, "one user", t.messages) for t in talks]
    report = broken(talks, budget_bytes=600)
    assert {each.piece for each in report.breaks} == {"memory"}
    assert {str(each.reason) for each in report.breaks} == {"evicted"}
    assert broken(talks).lost_tokens == 0


def test_layers_without_a_checkpoint_are_told_from_what_diverges() -> None:
    from radixcache.layers.sizes import SizedLayout

    # A long question is asked again and differs in its last words only: recurrent layers cannot take it up in between.
    ends = ["and on which days of the week is that so?", "or may they be returned in the reading room?"]
    talks = [conversation(f"c{i}", f"{SYSTEM} {SYSTEM} {end}", system="Be kind.") for i, end in enumerate(ends)]
    assert broken(talks).lost_tokens == 0
    (lost,) = broken(talks, layout=SizedLayout(1, 100)).breaks
    assert (lost.piece, lost.reason, lost.role) == ("memory", "no_checkpoint", "user")
    assert lost.lost_tokens >= 2 * len(SYSTEM)


def test_where_no_replies_are_recorded_later_turns_do_not_break() -> None:
    talk = conversation("c", "Is it open?", replies_recorded=False)
    talk = Conversation("c", "c", (*talk.messages, {"role": "user", "content": "Until when?"}), replies_recorded=False)
    assert [m["role"] for m in with_replies([talk])[0].messages] == ["system", "user", "assistant", "user"]
    assert broken([talk]).lost_tokens == 0


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


TOOLS = [tool(name, f"{name} {SYSTEM}") for name in ("search", "lend", "fine")]
CHANGED = [tool("search", f"There are {count} books. {SYSTEM}") for count in (2671, 2672, 2673)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_in_another_order_and_a_number_in_a_tool_are_named_with_what_they_lose(name: str) -> None:
    outline = load_outline("tiny")
    outline.tokenizer._tokenizer.chat_template = TEMPLATES[name]
    for lists, part, words in (
        ([TOOLS, [TOOLS[2], *TOOLS[:2]], [TOOLS[1], TOOLS[2], TOOLS[0]]], "the list of tools", "another order"),
        ([[each, *TOOLS[1:]] for each in CHANGED], "tool `search`, its description", "it differs"),
    ):
        talks = [conversation(f"c{i}", QUESTIONS[i], tools=tuple(tools)) for i, tools in enumerate(lists)]
        report = broken(talks, outline)
        worst = report.breaks[0]
        assert (worst.piece, worst.role, worst.requests) == ("part", part, 2)
        # Behind the fork, all but the question is what an earlier request had.
        assert worst.lost_tokens >= 0.8 * (report.prompt_tokens - report.resumed_tokens) * 2 / 3
        text = breaks_text(report)
        assert f"{part}: " in text
        assert words in text
        assert worst.change is not None
        assert worst.change.hint in text


def test_a_history_that_is_cut_at_its_beginning_is_told_from_a_new_question() -> None:
    system, *talk = conversation("c", *[f"{text} {SYSTEM}" for text in (*QUESTIONS, "It is.")]).messages
    cut = [Conversation(f"c{start}", "c", (system, *talk[2 * start :])) for start in range(2)]
    (worst,) = broken(cut).breaks
    assert (worst.role, worst.piece, worst.messages) == ("user", "message", {1: 1})
    assert worst.lost_tokens >= len(SYSTEM)
    assert "user message 1: messages before it were removed" in breaks_text(broken(cut))


def test_a_long_edit_of_a_message_with_others_behind_it_loses_the_rest_of_the_message() -> None:
    begun = "Today is Monday, and 4 files are new. " * 4
    talks = [conversation(name, "Hello?", system=f"{text}{SYSTEM}") for name, text in (("a", ""), ("b", begun))]
    (worst,) = broken(talks).breaks
    assert (worst.role, worst.piece, worst.messages) == ("system", "message", {0: 1})
    assert worst.lost_tokens >= len(SYSTEM) - 40


def test_a_question_of_which_much_is_equal_loses_nothing() -> None:
    assert broken([conversation(name, f"{name * 100} {SYSTEM}") for name in "ab"]).lost_tokens == 0


def test_all_that_is_evaluated_again_behind_a_small_edit_is_lost_to_it_in_later_turns_too() -> None:
    talk = ("Why?", "I read it.", f"It says: {SYSTEM} {SYSTEM}", "I see.", "Mend it.")
    talks = [conversation(day, *talk, system=f"It is {day}. {SYSTEM}") for day in ("Monday", "Friday")]
    (worst,) = broken(talks).breaks
    assert (worst.role, worst.piece, worst.messages) == ("system", "message", {0: 3})
    assert worst.lost_tokens >= 3 * len(SYSTEM)
    assert worst.example is not None
    assert (worst.example.before_text or "").endswith("It is ")


# The command


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    found = [conversation(f"c{i}", q, system=f"Request {7919 * i}. {SYSTEM}") for i, q in enumerate(QUESTIONS)]
    records = [{"id": each.user, "user": each.user, "messages": each.messages} for each in found]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_prints_a_report_and_writes_its_figures(talks: Path, command: Any, tmp_path: Path) -> None:
    code, out, err = command("explain", talks, "--model", "tiny", "--json", tmp_path / "breaks.json")
    assert (code, err) == (0, "")
    assert out.startswith("5 requests, ")
    assert "system message 0" in out
    assert "hint, in" in out
    document = json.loads((tmp_path / "breaks.json").read_text())
    worst = document["breaks"][0]
    assert [worst[name] for name in ("role", "piece", "reason", "messages")] == [
        "system",
        "message",
        "diverged",
        {"0": 4},
    ]
    assert worst["lost_tokens"] >= 4 * len(SYSTEM)
    assert worst["example"]["before_text"].endswith("Request ")
    assert document["lost_tokens"] == sum(each["lost_tokens"] for each in document["breaks"])
    assert document["model"] == "tiny:llama"
    (span,) = document["hints"]
    assert (span["hint"]["values"] >= 3, span["lost_tokens"] >= 3 * len(SYSTEM)) == (True, True)


# Sessions of agents


def broken_log(folder: Path, *logs: Sequence[dict[str, Any]], outline: Any = OUTLINE) -> BreakReport:
    for index, records in enumerate(logs):
        written(folder, records, f"{index}.jsonl")
    return broken(list(read_conversations(folder).conversations), outline)


def session(name: str = "s", turns: int = 3, model: str = "opus") -> ClaudeLog:
    log = ClaudeLog(name)
    for question in QUESTIONS[:turns]:
        log.ask(f"{question} {SYSTEM}")
        log.reply(thought(f"They ask: {question}"), f"To {question} {SYSTEM}", model=model)
    return log


def the_break(report: BreakReport) -> tuple[str, str, int]:
    (found,) = report.breaks
    return found.role, found.piece, found.requests


def test_a_session_that_only_grows_loses_nothing_and_says_why_tokens_are_new(tmp_path: Path) -> None:
    report = broken_log(tmp_path, session().records)
    assert report.lost_tokens == 0
    assert {name: row.requests for name, row in report.openings.items()} == {"session": 1}
    text = breaks_text(report)
    assert "Nothing was lost" in text
    assert "first requests of sessions" in text
    assert "messages that were added" in text
    assert "hint" not in text


def test_what_another_model_had_evaluated_is_lost_to_the_next_one(tmp_path: Path) -> None:
    log = session()
    log.ask("And now?")
    log.reply("Now I answer.", model="haiku")
    report = broken_log(tmp_path, log.records)
    assert the_break(report) == ("the model", "part", 1)
    assert 6 * len(SYSTEM) <= report.lost_tokens <= 7 * len(SYSTEM)
    assert "the model: another model had evaluated it" in breaks_text(report)
    assert broken_log(tmp_path, session(turns=4).records).lost_tokens == 0


def test_traces_of_sessions_have_their_times_and_trees_and_traces_share_nothing_between_models(tmp_path: Path) -> None:
    log = session()
    log.ask("And now?")
    log.reply("Now I answer.", model="haiku")
    path = written(tmp_path, log.records, "0.jsonl")
    trace = read_trace(path, tokenizer=OUTLINE.tokenizer)
    *earlier, last = trace.requests
    calls = [call for each in read_conversations(path).conversations for call in each.calls if call]
    times = [datetime.fromisoformat(call.time) for call in calls]
    assert [each.time_ms for each in trace.requests] == [round(1e3 * (at - min(times)).total_seconds()) for at in times]
    assert (trace.is_timing_synthetic, trace.sessions_per_hour) == (False, None)
    assert trace.notes[-1].endswith("requests arrive at the times that the logs have for their replies.")
    known = {key for each in earlier for key in each.keys.tolist()}
    assert known.isdisjoint(last.keys.tolist())
    assert set(earlier[0].keys[:-1].tolist()) <= set(earlier[1].keys.tolist())
    requests = schedule(with_replies(list(read_conversations(path).conversations)))
    cache, _ = grow_tree(requests, OUTLINE.tokenizer, ModelBytes("llama", 1, 0, (), "float32"), budget_bytes=1 << 40)
    assert set(cache.view().namespaces) == {"opus", "haiku"}


def test_a_user_who_goes_back_and_a_subagent_lose_nothing_and_are_named(tmp_path: Path) -> None:
    log = session()
    log.ask(f"May I ask otherwise? {SYSTEM[::-1]}", after=log.records[2]["uuid"])
    log.reply("You may.")
    log.ask(f"Search for it. {SYSTEM.swapcase()}", after=None, isSidechain=True)
    log.reply("Found.", isSidechain=True)
    report = broken_log(tmp_path, log.records)
    assert report.lost_tokens == 0
    assert [str(name) for name in report.openings] == ["session", "edit", "subagent"]
    assert all(row.new_tokens >= len(SYSTEM) for row in report.openings.values())
    assert "the user went back and asked something else" in breaks_text(report)
    assert "first requests of subagents" in breaks_text(report)


def test_one_table_has_what_was_lost_and_what_is_new_and_all_evaluated_tokens(tmp_path: Path) -> None:
    log = session(turns=4)
    log.add("system", after=None, subtype="compact_boundary")
    log.ask(f"They asked about the library. {SYSTEM}", isCompactSummary=True)
    log.reply(f"I see. {SYSTEM}", model="haiku")
    log.ask("And now?")
    log.reply("Now I answer.", model="opus")
    report = broken_log(tmp_path, log.records)
    table = breaks_text(report).split("\n\n")[1].splitlines()
    assert table[0].split()[:2] == ["tokens", "of"]
    rows = [line for line in table[1:] if not line.startswith(" ")]
    tokens = {
        state: sum(int(row.split()[1].replace(",", "")) for row in rows if row.startswith(state))
        for state in ("lost", "new")
    }
    assert tokens == {"lost": report.lost_tokens, "new": report.new_tokens}
    (_, rest, *_) = [line for line in breaks_text(report, top=1).splitlines() if line.startswith("lost")]
    assert "more breaks; see --top" in rest


def test_reasoning_of_earlier_turns_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    outline = load_outline("tiny")
    outline.tokenizer._tokenizer.chat_template = PARROT_TEMPLATES["qwen3"]
    log = ClaudeLog()
    for index, question in enumerate(QUESTIONS[:3]):
        log.ask(question)
        log.reply(thought(SYSTEM), call(f"c{index}"))
        log.result(f"c{index}", SYSTEM)
        log.reply(thought(SYSTEM), "It is.")
    report = broken_log(tmp_path, log.records, outline=outline)
    assert the_break(report) == ("the chat template", "part", 2)
    assert "the chat template: it leaves out the reasoning of earlier turns" in breaks_text(report)
    assert unwritten_parts(outline.tokenizer, read_conversations(tmp_path).conversations) == []
    assert unwritten_parts(OUTLINE.tokenizer, read_conversations(tmp_path).conversations) == ["reasoning"]


def test_tools_that_the_template_never_writes_are_named() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"role": "user", "content": "Go"}
    conversations = [Conversation("a", "u", (asked,)), Conversation("b", "u", (asked,), (tool,))]
    outline = load_outline("tiny")
    outline.tokenizer._tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    assert unwritten_parts(outline.tokenizer, conversations) == ["tools"]
    assert unwritten_parts(outline.tokenizer, conversations[:1]) == []
    assert unwritten_parts(OUTLINE.tokenizer, conversations) == []


def test_what_the_provider_did_not_find_in_its_cache_is_counted(tmp_path: Path) -> None:
    log = session()
    replies = [each for each in log.records if each["type"] == "assistant"]
    for record, cached in zip(replies, (0, 0, 9000, 9000, 0, 0), strict=True):
        record["message"]["usage"] = {"input_tokens": 10_000 - cached, "cache_read_input_tokens": cached}
    report = broken_log(tmp_path, log.records)
    assert (report.reported_requests, report.reported_prompt_tokens, report.reported_cached_tokens) == (3, 30_000, 9000)
    assert (report.reported_missed_requests, report.reported_missed_tokens) == (1, 10_000)
    text = breaks_text(report)
    assert "30,000 prompt tokens in 3 requests, 30.0% cached. In 1 request, 10,000 tokens of the request before" in text


def test_the_commands_take_the_folders_of_agents(command: Any, tmp_path: Path) -> None:
    code, out, err = command("explain", LOGS, "--model", "tiny", "--json", tmp_path / "breaks.json")
    assert (code, err.count("\n")) == (0, 3)
    assert "the logs hold no tools" in err
    assert "left out of the prompts" in err
    assert "the chat template of tiny:llama leaves out reasoning; --model names another" in err
    assert out.startswith("20 requests, ")
    assert "the history: a summary took its place (compaction)" in out
    document = json.loads((tmp_path / "breaks.json").read_text())
    assert document["openings"]["subagent"]["requests"] == 1
    assert document["not_in_logs"] == ["tools", "the system prompt of 4 of 8 conversations"]
    code, out, err = command("tree", LOGS, "--model", "tiny", "--max-nodes", 5)
    assert (code, "20 requests read" in err, "the logs hold no tools" in err) == (0, True, True)
    code, out, err = command("advise", LOGS, "--model", "tiny")
    assert (code, "20" in out) == (0, True), err
    code, out, err = command(
        "replay", "--conversations", LOGS, "--model", "tiny", "--requests", 3, "--cache", "none,radix"
    )
    assert code == 0, err


def test_a_download_of_a_tokenizer_is_announced(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, talks: Path
) -> None:
    # The hub's client asks the environment once, when it is imported; offline it only looks into its cache.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code, _, err = command("explain", LOGS, "--model", "nobody/nothing")
    announced = "the tokenizer of nobody/nothing is not on this machine; it is downloaded now"
    assert (code, announced in err, err.index(announced) < err.index("cannot be loaded")) == (2, True, True)
    code, _, err = command("explain", talks, "--model", "tiny")
    assert (code, "downloaded" in err) == (0, False)
