"""From a JSON record to a conversation: OpenAI messages, ShareGPT, and the records of benchmarks and agents.

These are tau-bench's trajectories, mt-bench's questions, dialogues of SGD, SWE-agent's .traj and InterCode's logs.
The key that has the turns says which format a record is in. For a new one add a function and a line in `_FORMATS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from radixcache.observe.trace import FORMAT
from runner.files import read_json
from runner.script.conversation import (
    Conversation,
    ConversationError,
    checked_arguments,
    checked_conversation,
    checked_messages,
    checked_tools,
    expect,
    require_unicode,
)
from runner.text import printable, shortened, shown

# ShareGPT's speakers, as its many converters name them.
_SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_SGD_ROLES: dict[Any, str] = {"USER": "user", "SYSTEM": "assistant"}
TOOL_FILES = ("airline_tools.json", "retail_tools.json")  # tool lists beside trajectories


@dataclass(frozen=True)
class Origin:
    path: Path
    line: int
    default_id: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def source(self) -> str:
        return f"{printable(self.path.name)}:{self.line}"


def is_message(value: Any) -> bool:
    """Whether a value looks like a chat message rather than like a conversation."""
    return isinstance(value, dict) and "role" in value


def expanded(value: Any) -> list[Any]:
    """The conversations in one JSON value: InterCode has many in one object, by number."""
    if isinstance(value, dict) and value and all(isinstance(v, dict) and "turn_history" in v for v in value.values()):
        return list(value.values())
    return [value]


def parse_record(value: Any, origin: Origin) -> Conversation:
    """Turn one record into a conversation. ConversationError: the record is wrong, or its format is not known."""
    if isinstance(value, list):
        value = {"messages": value}
    wanted = f"a list of messages or an object with {', '.join(_FORMATS)}"
    if not isinstance(value, dict):
        raise ConversationError(f"{origin.where}: found {shown(value)}; wanted a conversation: {wanted}.")
    for key, parse in _FORMATS.items():
        if key in value:
            return checked_conversation(parse(value, origin), origin.where)
    if value.get("format") == FORMAT or "hash_ids" in value or {"block_size", "requests"} <= value.keys():
        raise ConversationError(
            f"{origin.where}: is a trace of block hashes, not conversations. Use it with radixcache simulate, mrc or "
            "advise."
        )
    keys = shortened(", ".join(value), 80) or "none"
    raise ConversationError(f"{origin.where}: no known kind of conversation (keys: {keys}); wanted {wanted}.")


def _parse_sharegpt(record: dict[str, Any], origin: Origin) -> Conversation:
    turns = record["conversations"]
    expect(isinstance(turns, list), f"{origin.where}: conversations is", turns, "a list of turns")
    messages = [_sharegpt_message(turn, f"{origin.where}: turn {index}") for index, turn in enumerate(turns)]
    if isinstance(record.get("system"), str) and record["system"] and (not turns or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _conversation(record, origin, messages)


def _sharegpt_message(turn: Any, where: str) -> dict[str, Any]:
    if is_message(turn):
        return dict(turn)
    is_turn = isinstance(turn, dict) and "from" in turn and "value" in turn
    expect(is_turn, f"{where} is", turn, "an object with from and value")
    speaker, value = turn["from"], turn["value"]
    is_known = isinstance(speaker, str) and speaker in _SHAREGPT_ROLES
    expect(is_known, f"{where} is from", speaker, f"one of {', '.join(_SHAREGPT_ROLES)}")
    expect(isinstance(value, str), f"{where} has value", value, "text")
    call = _sharegpt_call(value) if speaker == "function_call" else None
    return {"role": "assistant", "tool_calls": [call]} if call else {"role": _SHAREGPT_ROLES[speaker], "content": value}


def _sharegpt_call(value: str) -> dict[str, Any] | None:
    """A tool call from its JSON text; None: it is written in another way and stays text."""
    try:
        call = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _parse_tau_bench(record: dict[str, Any], origin: Origin) -> Conversation:
    messages = checked_messages(record["traj"], origin.where)
    info = record.get("info")
    task = info.get("task") if isinstance(info, dict) else None
    user = task.get("user_id") if isinstance(task, dict) else None
    task_id, trial = record.get("task_id"), record.get("trial", 0)
    tau_id = origin.default_id if task_id is None else f"{origin.path.stem}/{task_id}.{trial}"
    return Conversation(
        conversation_id=tau_id,
        user=user if isinstance(user, str) and user else tau_id,
        messages=messages,
        tools=_tau_tools(messages, origin.path),
        source=origin.source,
    )


def _tau_tools(messages: tuple[dict[str, Any], ...], path: Path) -> tuple[dict[str, Any], ...] | None:
    """The tool list beside the trajectories, or one folder up: by the file's name, else by the calls."""
    folders = (path.parent, path.parent.parent)
    found = [folder / name for folder in folders for name in TOOL_FILES if (folder / name).is_file()]
    named = [tools for tools in found if tools.name.split("_")[0] in path.name]
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for candidate in named or found:
        tools = _read_tools(candidate, candidate.stat().st_mtime_ns)
        if named or called <= {tool.get("function", tool)["name"] for tool in tools or ()}:
            return tools
    return None


@lru_cache(maxsize=len(TOOL_FILES))  # every trajectory of a file asks for its list
def _read_tools(path: Path, modified_ns: int) -> tuple[dict[str, Any], ...] | None:
    return checked_tools(read_json(path, "a list of tools", ConversationError), str(path))


def _parse_turns(record: dict[str, Any], origin: Origin) -> Conversation:
    """A question of mt-bench, of which only the user's texts are known, or a dialogue of SGD."""
    turns = record["turns"]
    if isinstance(turns, list) and any(isinstance(turn, dict) and "speaker" in turn for turn in turns):
        return _parse_sgd(record, origin)
    is_texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
    expect(is_texts, f"{origin.where}: turns is", turns, "a list of the user's texts")
    messages = [{"role": "user", "content": turn} for turn in turns]
    return _conversation({"id": record.get("question_id"), **record}, origin, messages, replies_recorded=False)


def _parse_sgd(record: dict[str, Any], origin: Origin) -> Conversation:
    messages = []
    for index, turn in enumerate(record["turns"]):
        known: dict[str, Any] = turn if isinstance(turn, dict) else {}
        speaker, utterance = known.get("speaker"), known.get("utterance")
        is_turn = speaker in _SGD_ROLES and isinstance(utterance, str)
        expect(is_turn, f"{origin.where}: turn {index} is", turn, "a speaker, USER or SYSTEM, and an utterance")
        messages.append({"role": _SGD_ROLES[speaker], "content": utterance})
    return _conversation({"id": record.get("dialogue_id"), **record}, origin, messages)


def _parse_swe_agent(record: dict[str, Any], origin: Origin) -> Conversation:
    history = record["history"]
    expect(isinstance(history, list), f"{origin.where}: history is", history, "a list of messages")
    return _conversation({"id": printable(origin.path.stem)}, origin, history)


def _parse_intercode(record: dict[str, Any], origin: Origin) -> Conversation:
    history = record["turn_history"] if isinstance(record["turn_history"], dict) else {}
    actions: Any = history.get("actions")
    observations: Any = history.get("observations")
    are_lists = isinstance(actions, list) and isinstance(observations, list) and len(observations) <= len(actions)
    expect(are_lists, f"{origin.where}: turn_history is", history, "lists of actions and observations")
    messages = [{"role": "user", "content": record.get("query")}]
    for index, action in enumerate(actions):
        messages.append({"role": "assistant", "content": _as_text(action)})
        # Nothing answered the observation after the last action.
        if index < min(len(observations), len(actions) - 1):
            messages.append({"role": "user", "content": _as_text(observations[index])})
    task_id = record.get("task_id")
    name = None if task_id is None else f"{printable(origin.path.stem)}/{task_id}"
    return _conversation({"id": name}, origin, messages)


def _as_text(value: Any) -> str:
    """An observation of an environment, which may be rows of a table."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(
    record: dict[str, Any], origin: Origin, messages: Any, *, replies_recorded: bool = True
) -> Conversation:
    """A conversation from messages and the fields beside them: id, user, tools, chat_template_kwargs, first_turn."""
    checked = checked_messages(messages, origin.where)
    conversation_id = _name(record, "id", origin) or origin.default_id
    first_turn = record.get("first_turn", 0)
    is_number = isinstance(first_turn, int) and not isinstance(first_turn, bool)
    expect(is_number, f"{origin.where}: first_turn is", first_turn, "a whole number")
    return Conversation(
        conversation_id=conversation_id,
        user=_name(record, "user", origin) or conversation_id,
        messages=checked,
        tools=checked_tools(_tools_value(record, origin), origin.where),
        first_turn=first_turn,
        source=origin.source,
        replies_recorded=replies_recorded,
        arguments=checked_arguments(record.get("chat_template_kwargs"), origin.where),
    )


def _name(record: dict[str, Any], key: str, origin: Origin) -> str:
    """An id or a user as text, which may be a number in the record; '': there is none."""
    value = record.get(key)
    if value is None:
        return ""
    is_name = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
    expect(is_name, f"{origin.where}: {key} is", value, "text that is not empty")
    require_unicode(str(value), f"{origin.where}: {key}")
    return str(value)


def _tools_value(record: dict[str, Any], origin: Origin) -> Any:
    """The tool list, which ShareGPT files have as JSON text."""
    value = record.get("tools")
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"{origin.where}: tools is not JSON ({error}); wanted a list of tools.") from error


_FORMATS: dict[str, Callable[[dict[str, Any], Origin], Conversation]] = {
    "messages": lambda record, origin: _conversation(record, origin, record["messages"]),
    "conversations": _parse_sharegpt,
    "traj": _parse_tau_bench,
    "turns": _parse_turns,
    "history": _parse_swe_agent,
    "turn_history": _parse_intercode,
}
