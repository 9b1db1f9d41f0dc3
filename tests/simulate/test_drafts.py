"""What drafting saves, counted on recorded replies without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.models.tiny import tiny_tokenizer
from runner.script.conversation_reader import read_conversations
from runner.simulate import drafts
from runner.simulate.drafts import DraftCount, leaves_calls_out, recorded_turns

Command = Callable[..., tuple[int, str, str]]
PROMPT, OTHER = np.arange(100, 140, dtype=np.int32), np.arange(200, 240, dtype=np.int32)
REPLY = list(range(300, 360))


def test_a_reply_that_another_request_got_takes_few_passes_from_the_tree_and_all_of_them_from_the_prompt() -> None:
    rows = {}
    for speculate in ("tree", "prompt"):
        count = DraftCount(speculate)
        count.add(PROMPT, REPLY)
        assert (count.row.passes, count.row.proposed) == (len(REPLY) - 1, 0)
        count.add(OTHER, REPLY)
        rows[speculate] = count.row
    assert rows["prompt"].passes == 2 * (len(REPLY) - 1)
    tree = rows["tree"]
    assert tree.passes < 1.3 * len(REPLY)
    assert tree.tokens == 2 * (len(REPLY) - 1)
    # A pass yields one token more than it accepts, but for one that accepts the end of a reply.
    assert tree.passes + tree.accepted - tree.tokens in (0, 1)
    assert tree.speedup == pytest.approx(tree.tokens / (tree.passes + 0.15 * tree.proposed))


def test_costly_tokens_are_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "TOKEN_COST", 1.0)
    count = DraftCount("tree")
    count.add(PROMPT, REPLY)
    count.add(OTHER, REPLY)
    assert (count.row.proposed, count.row.speedup) == (0, 1.0)


def call(name: str) -> dict[str, Any]:
    arguments = '{"place": "a very long and particular place"}'
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Two users whose agent calls the same tool."""
    messages = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call("look_up_the_weather")]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps({"id": name, "messages": messages}) + "\n" for name in ("ann", "bob")))
    return path


def test_calls_that_the_template_leaves_out_are_counted_as_text_of_the_reply(agents: Path) -> None:
    tokenizer = tiny_tokenizer()
    conversations = read_conversations(agents).conversations
    assert all(leaves_calls_out(each, tokenizer) for each in conversations)
    texts = [tokenizer.decode(reply) for _, _, reply in recorded_turns(conversations, tokenizer)]
    assert len(texts) == 4
    assert '"name": "look_up_the_weather"' in texts[0]
    assert "It is sunny." in texts[1]


def test_arguments_of_a_call_that_are_not_json_are_shown_as_they_are(agents: Path) -> None:
    agents.write_text(agents.read_text().replace('place\\": ', "place: "))
    _, _, reply = next(recorded_turns(read_conversations(agents).conversations, tiny_tokenizer()))
    assert "{place: " in tiny_tokenizer().decode(reply).replace('\\"', "")


def test_what_a_template_writes_behind_the_end_of_a_reply_is_not_counted(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    (end, *_) = tokenizer.eos_token_ids
    monkeypatch.setattr(drafts, "recorded_reply", lambda *_: np.array([5, 6, end, 7], np.int32))
    conversations = read_conversations(agents).conversations
    assert {tuple(reply) for _, _, reply in recorded_turns(conversations, tokenizer)} == {(5, 6, end)}


def test_simulate_says_what_drafting_saves(command: Command, agents: Path, tmp_path: Path) -> None:
    status, out, _ = command("simulate", agents, "--speculate", "--model", "tiny", "--json", tmp_path / "rows.json")
    assert status == 0
    assert "tokens" in out
    (tree, prompt) = json.loads((tmp_path / "rows.json").read_text())["drafting"]
    assert (tree["speculate"], prompt["speculate"]) == ("tree", "prompt")
    assert tree["tokens_per_pass"] > 1.5 > prompt["tokens_per_pass"]
    both = ("--capacity-blocks", 100, "--policy", "lru", "--json", tmp_path / "both.json")
    assert command("simulate", agents, "--speculate", "--model", "tiny", *both)[0] == 0
    document = json.loads((tmp_path / "both.json").read_text())
    assert document["drafting"][0]["passes"] == tree["passes"]
    assert len(document["rows"]) == 1


def test_what_cannot_be_counted_is_one_line(command: Command, agents: Path, tmp_path: Path) -> None:
    assert "--speculate needs --model" in command("simulate", agents, "--speculate")[2]
    silent = tmp_path / "silent.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    silent.write_text(json.dumps([{"messages": messages}]))
    status, _, err = command("simulate", silent, "--speculate", "--model", "tiny")
    assert (status, "no conversation has a recorded reply of two tokens or more" in err) == (2, True)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 900, "output_length": 80, "hash_ids": [1, 2]}\n')
    status, _, err = command("simulate", trace, "--speculate", "--model", "tiny")
    assert status == 2
    assert "trace.jsonl" in err
