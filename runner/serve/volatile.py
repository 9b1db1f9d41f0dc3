"""Volatile parts of agents' system prompts, moved behind the tools, so that the tools keep their prefix.

A server does not rewrite prompts unasked: this is off by default. `radixcache launch` knows its agent, and gives it an
address with `PREFIX` in front of the routes, whose requests have the parts moved. `--move-volatile` does it for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from runner.script.conversation import SYSTEM

PREFIX = "/move-volatile"
#: Whether the HTTP request at hand came by an address with the prefix.
MOVES: ContextVar[bool] = ContextVar("moves", default=False)
#: Parts of agents' system texts that change with the folder, the day or the model: how the first and the last line of
#: each begin. Without a last line, the part goes to the end of the text. All are as the agents were seen to send them.
_VOLATILE = (
    ("# Memory", "Before saving, check for an existing file"),  # Claude Code, with the folder
    ("Here is useful information about the environment you are running in:", "</env>"),  # Claude Code 2.0, Continue
    ("Here is some useful information about the environment you are running in:", "</env>"),  # opencode
    ("Environment you are running in:", "</env>"),  # Cline
    ("You are powered by the model ", "You are powered by the model "),  # Claude Code 2.0, opencode
    ("Assistant knowledge cutoff is ", "Assistant knowledge cutoff is "),  # Claude Code 2.0, with the model
    ("gitStatus: This is the git status at the start of the conversation.", ""),  # Claude Code 2.0
    ("As you answer the user's questions, you can use the following context:", "</context>"),  # Continue
    ('<context name="gitStatus">', "</context>"),  # Continue
    ("Git snapshot at conversation start.", ""),  # qwen-code
    ("# auto memory", ""),  # qwen-code, with the folder
    ("Current date: ", "Current working directory: "),  # pi
)


def behind_tools(
    messages: list[dict[str, Any]], marked_texts: Sequence[tuple[int, int]] = ()
) -> tuple[list[dict[str, Any]], Sequence[tuple[int, int]]]:
    """Move volatile parts of the leading system turns into a system turn behind them, and the marks along.

    Many templates put the tools between the first system turn and the next turn, so the tools keep their prefix. The
    texts stay system texts, whole and in order. If a template takes only one system turn, they end that one (turns.py).
    """
    count = next((index for index, each in enumerate(messages) if each["role"] not in SYSTEM), len(messages))
    kept, moved, marks = messages[:count], [], [*marked_texts]
    for index, message in enumerate(kept):
        content = message.get("content") or ""
        if not isinstance(content, str) and all(isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)  # as prompts have them
        if isinstance(content, str) and (spans := _volatile_spans(content)):
            ends = [0, *(end for _, end in spans)]
            starts = [*(start for start, _ in spans), len(content)]
            rest = "".join(content[end:start] for end, start in zip(ends, starts, strict=True))
            if rest.strip():
                kept[index] = {**message, "content": rest}
                moved += [content[start:end].strip("\n") for start, end in spans]
                marks = [(at, _shifted(end, spans) if at == index else end) for at, end in marks]
    if not moved:
        return messages, marked_texts
    turn = {"role": kept[-1]["role"], "content": "\n\n".join(moved)}
    return [*kept, turn, *messages[count:]], [(at + (at >= count), end) for at, end in marks]


def _volatile_spans(text: str) -> list[tuple[int, int]]:
    """Where the volatile parts of a text start and end, in order: whole lines, with the line break behind them.

    Blank lines behind a part go with it if others stand before it, so the rest does not tell how many parts there were.
    """
    lines, parts = f"\n{text}", []  # each line has a line break before it, and each offset is one more
    for first, last in _VOLATILE:
        start = lines.find(f"\n{first}")
        at = lines.find(f"\n{last}", start) if last else len(lines)
        if start >= 0 and at >= 0:
            end = lines.find("\n", at + 1)
            parts.append((start, end if end >= 0 else len(text)))
    spans: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if spans and start <= spans[-1][1]:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        if text.endswith("\n\n", 0, start):
            end = len(text) - len(text[end:].lstrip("\n"))
        spans.append((start, end))
    return spans


def _shifted(offset: int, spans: Sequence[tuple[int, int]]) -> int:
    """An offset in a text after these spans were cut out."""
    return offset - sum(max(0, min(offset, end) - start) for start, end in spans)
