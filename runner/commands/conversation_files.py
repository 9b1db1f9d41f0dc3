"""The conversations that a command was given, or the built-in ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.commands.usage import UsageError, say

if TYPE_CHECKING:
    from runner.conversations import Conversation


def read_chosen(paths: Sequence[Path] | None, skip_bad: bool) -> "Sequence[Conversation]":
    """Read the files, and say on stderr what of them was left out; without any the built-in conversations."""
    from runner.builtin import builtin_conversations
    from runner.conversations import ConversationError, read_conversations

    if not paths:
        return builtin_conversations()
    try:
        result = read_conversations(*paths, skip_bad=skip_bad)
    except ConversationError as error:
        raise UsageError(str(error)) from error
    if result.skipped:
        say(f"note: {len(result.skipped)} records skipped, the first: {result.skipped[0]}")
    return result.conversations
