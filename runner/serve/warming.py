"""What is prefilled and pinned at start: a file of system prompts and conversations.

    "You are a helpful assistant."                                             a system prompt
    {"name": "support", "system": "You answer customers ...", "tools": [...]}
    {"name": "onboarding", "messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]}

A .jsonl file has one of these a line; any other is JSON, one of them or a list. `name` is that of the pin (by default
"warm-1" and so on), `namespace` the one whose requests find it: a key's name with --namespace-by key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from radixcache.chat.render import message_ends
from runner.files.json_file import read_json
from runner.script.conversations.conversation import checked_messages, checked_tools
from runner.serve.options import ServeOptions

WANTED = "system prompts or conversations: text, or objects with system or messages"


class WarmFileError(ValueError):
    """A file of what to warm cannot be used: where, and what was wanted."""


@dataclass(frozen=True)
class WarmEntry:
    """One prefix to be kept; `where` it was read from."""

    name: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    namespace: str
    where: str

    def tokens(self, tokenizer: Any, options: ServeOptions) -> NDArray[Any]:
        """What every conversation that begins like this begins with.

        Raises:
            WarmFileError: the model's chat template does not take it, or makes of it nothing that lasts.
        """
        is_open = self.messages[-1]["role"] in ("system", "developer")  # templates want something behind it
        messages = [*self.messages, *([{"role": "user", "content": "Hello"}] if is_open else [])]
        try:
            tokens, opening, ends = message_ends(tokenizer, messages, self.tools, **options.chat_template_args)
        except (ValueError, RecursionError) as error:
            raise WarmFileError(f"{self.where}: {error}") from error
        end = max(opening, *ends[: len(self.messages)])
        if end == 0:
            raise WarmFileError(f"{self.where}: the model's chat template makes of it nothing that others begin with.")
        return tokens[:end]


def read_warm_file(path: Path) -> list[WarmEntry]:
    """Read the file.

    Raises:
        ValueError: it cannot be read, or is not as the head of this file says.
    """
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            values = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise WarmFileError(f"{path}: cannot be read ({error}); wanted a line for each of {WANTED}.") from error
    else:
        found = read_json(path, WANTED, WarmFileError)
        values = found if isinstance(found, list) else [found]
    return [_entry(value, number, f"{path}: entry {number}") for number, value in enumerate(values, start=1)]


def _entry(value: Any, number: int, where: str) -> WarmEntry:
    if isinstance(value, str):
        value = {"system": value}
    if not isinstance(value, dict) or ("system" in value) == ("messages" in value):
        raise WarmFileError(f"{where} is {value!r:.80}; wanted {WANTED}.")
    name, namespace = value.get("name", f"warm-{number}"), value.get("namespace", "")
    if not isinstance(name, str) or not name or not isinstance(namespace, str):
        raise WarmFileError(f"{where}: name {name!r:.80}, namespace {namespace!r:.80}; wanted text.")
    system = [{"role": "system", "content": value.get("system")}]
    messages = checked_messages(value.get("messages", system), where)
    if not messages:
        raise WarmFileError(f"{where} has no messages; wanted at least one.")
    return WarmEntry(name, messages, checked_tools(value.get("tools"), where), namespace, where)
