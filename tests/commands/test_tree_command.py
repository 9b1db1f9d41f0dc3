"""`radixcache tree` and `replay --tree`: what they show, write and refuse."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from radixcache.observe.tree_view import TreeView, read_view
from runner.commands import outputs

Command = Callable[..., tuple[int, str, str]]

TALKS = [
    ["You answer in one word.", "Which river runs through Rome?", "Tiber.", "And through Paris?", "Seine."],
    ["You answer in one word.", "Which river runs through Vienna?", "Danube.", "And through Paris?", "Seine."],
    ["You tell stories.", "Tell me one of a fox."],
]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Three users, two of whom share a system prompt and part in their first question."""
    path = tmp_path / "talks.jsonl"
    lines = []
    for number, (system, *turns) in enumerate(TALKS):
        roles = ("user", "assistant") * len(turns)
        messages = [{"role": "system", "content": system}]
        messages += [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        lines.append(json.dumps({"id": str(number), "user": str(number), "messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


def outline(view: TreeView) -> list[tuple[int, int, int, str | None]]:
    return [(node.parent, node.start, node.end, node.text) for node in view.nodes]


@pytest.mark.parametrize("kind", ["nemotron_h", "llama_sliding"])
def test_the_tree_is_the_one_that_a_replay_makes(command: Command, talks: Path, tmp_path: Path, kind: str) -> None:
    grown, served = tmp_path / "grown.json", tmp_path / "served.json"
    model = ("--model", f"tiny:{kind}")
    code, out, _ = command("tree", talks, *model, "--out", grown)
    assert (code, out) == (0, "")
    code, out, _ = command(
        "replay", "--conversations", talks, *model, "--recorded", "--cache", "radix", "--tree", served
    )
    assert code == 0
    ours, theirs = read_view(grown.read_bytes()), read_view(served.read_bytes())
    assert outline(ours) == outline(theirs)
    assert len(ours.nodes) >= 5
    assert [node.checkpoint for node in ours.nodes] == [node.checkpoint for node in theirs.nodes]
    assert [(n.span_bytes, n.residency) for n in ours.nodes] == [(n.span_bytes, n.residency) for n in theirs.nodes]


def test_a_branch_of_divergent_requests_is_shown(command: Command, talks: Path) -> None:
    code, out, err = command("tree", talks, "--model", "tiny")
    assert (code, err) == (0, "5 requests read; without --budget-mib nothing was evicted.\n")
    assert re.search(r'├─ .*"You answer in one word\.|├─ .*"answer in one word\.', out)
    assert '"Rome?' in out
    assert '"Vienna?' in out


def test_a_disk_that_is_full_is_an_error_and_nothing_says_that_the_file_was_written(
    command: Command, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outputs, "write_atomically", is_full)
    path = tmp_path / "tree.txt"
    code, out, err = command("tree", talks, "--model", "tiny", "--out", path)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {path}: cannot be written (No space left on device).",
        "5 requests read; without --budget-mib nothing was evicted.",
    ]


@pytest.mark.parametrize(("ending", "begins"), [("txt", "9 nodes"), ("svg", "<svg "), ("html", "<!doctype html>")])
def test_the_ending_names_the_format(command: Command, talks: Path, tmp_path: Path, ending: str, begins: str) -> None:
    saved, direct, again = tmp_path / "tree.json", tmp_path / f"direct.{ending}", tmp_path / f"again.{ending.upper()}"
    assert command("tree", talks, "--model", "tiny", "--out", saved)[0] == 0
    assert command("tree", talks, "--model", "tiny", "--out", direct)[0] == 0
    assert command("tree", saved, "--out", again) == (0, "", f"Written to {again}.\n")
    content = direct.read_text(encoding="utf-8")
    assert content.startswith(begins) or ending == "txt"
    assert content == again.read_text(encoding="utf-8")
    if ending == "svg":
        ElementTree.fromstring(content)


def test_every_format_can_be_printed(command: Command, talks: Path) -> None:
    for format_name in ("text", "svg", "html", "json"):
        code, out, _ = command("tree", talks, "--model", "tiny", "--format", format_name, "--max-nodes", 1)
        assert (code, "more node" in out or format_name == "json") == (0, True)


def test_budget_schedule_and_sizes_are_those_that_were_given(command: Command, talks: Path) -> None:
    def tree(*more: object) -> TreeView:
        return read_view(command("tree", talks, "--model", "tiny", "--format", "json", *more)[1])

    everything = tree().tokens
    for fewer in (("--budget-mib", 0.6), ("--requests", 1), ("--users", 1)):
        assert 0 < tree(*fewer).tokens < everything
    assert all(node.span_bytes == 7 * node.tokens for node in tree("--bytes-per-token", 7).nodes)
    nodes = tree("--bytes-per-token", 7, "--bytes-per-checkpoint", 5).nodes
    assert {(bool(node.checkpoint), node.checkpoint_bytes) for node in nodes} == {(True, 5)}


@pytest.mark.parametrize(
    "before", [("tree",), ("explain",), ("advise",), ("replay", "--cache", "radix", "--conversations")]
)
def test_each_command_says_what_of_a_log_no_template_has_text_for(
    before: tuple[str, ...], command: Command, tmp_path: Path
) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    content = [image, {"type": "text", "text": "What is it? " * 20}]
    body = {"model": "m", "max_tokens": 1, "system": "Be brief.", "messages": [{"role": "user", "content": content}]}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(body) + "\n")
    code, _, err = command(*before, path, "--model", "tiny")
    assert code == 0, err
    assert "note: left out of the prompts, as they are no text of a message: 1 image.\n" in err


def test_a_damaged_saved_tree_is_one_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"format": "radixcache-tree", "version": 9}')
    code, out, err = command("tree", path, "--model", "tiny")
    assert (code, out, err) == (2, "", f"error: {path}: a saved tree of version 9; wanted version 1.\n")
