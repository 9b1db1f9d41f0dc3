"""The conversations that `radixcache replay` uses when none are given.

Four applications, each with its own system prompt (two with a tool list, which the prompt also spells out, since some
chat templates leave tools away) and two users. Beside plain turns there are edited and regenerated ones, so that the
conversations part after the system prompt, inside and after the first user turn, in the middle, and at the last turn.
"""

from importlib.resources import as_file, files

from runner.script.conversations.conversation import Conversation
from runner.script.conversations.reader import read_conversations

_FILE_NAME = "builtin.jsonl"


def builtin_conversations() -> list[Conversation]:
    """Read the built-in conversations, in the order of their users."""
    with as_file(files(__package__) / _FILE_NAME) as path:
        return read_conversations(path).conversations
