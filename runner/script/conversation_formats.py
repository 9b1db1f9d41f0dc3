"""From JSON records to conversations. `FORMS` is the table of all forms that are known.

A record is of the first form whose keys it has. A row is data: where the turns are, which keys hold role, text, id and
user, and what the roles are called. What no row can say is a function: `read` makes records of other forms from one
record, and `join` from all records of a file. For a new form add a row; the page of docs/ is made from the table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from radixcache.observe.trace import FORMAT
from runner.files import read_json
from runner.script import anthropic_blocks, response_items
from runner.script.agent_sessions import claude_code, codex
from runner.script.conversation import (
    ROLES,
    Conversation,
    ConversationError,
    Origin,
    Record,
    checked_arguments,
    checked_conversation,
    checked_messages,
    checked_tools,
    expect,
    first_finding,
    require_unicode,
    with_text,
)
from runner.text import printable, shortened, shown

_ROLES = {**dict(zip(ROLES, ROLES, strict=True)), "function": "tool"}
# Speakers, as the many converters to ShareGPT's form name them; in any case.
_SPEAKERS = {
    **_ROLES,
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
# Keys of turns and records: of ShareGPT, of rows of public data, of SGD.
_SPEECH: Any = {"role": ("role", "from"), "content": ("content", "value", "text"), "roles": _SPEAKERS}
_ROW = {**_SPEECH, "id": ("conversation_id", "conversation_hash", "id"), "user": ("hashed_ip", "user")}
_SGD: Any = {
    "role": ("speaker",),
    "content": ("utterance",),
    "roles": {"user": "user", "system": "assistant"},
    "id": ("id", "dialogue_id"),
}
_CALLERS = ("function_call", "tool_call")  # speakers whose text is a call as JSON
#: Keys of a body of an API that this reader knows beside those of the API.
_BESIDE = ("calls", "first_turn", "id", "is_request", "model", "user")
Read = Callable[[dict[str, Any], Origin], Iterable[dict[str, Any]]]
MOST_REPEATS = 100  # times that the messages of a tree may stand on its paths, at most
TOOL_FILES = ("airline_tools.json", "retail_tools.json")  # tool lists beside trajectories


@dataclass(frozen=True)
class Form:
    """A form of conversations: a row of `FORMS`. Of several keys for one thing, the first that is there counts.

    Attributes:
        keys: what a record must have, with blanks between; `tells` is a further condition.
        about: what a record is, for people.
        turns: the key of the list of turns.
        role, content: keys of a turn.
        roles: the role that each name of a role means; names are in lower case.
        id, user: keys of a record.
        is_body: a record may be the body of one request of a log.
        read: makes records of other forms from one record.
        join: makes records of other forms from all records of a file, and says where each of them begins. A file is of
            this form if one of its first records has the keys.
    """

    name: str
    about: str
    keys: str
    turns: str = "messages"
    role: tuple[str, ...] = ("role",)
    content: tuple[str, ...] = ("content",)
    roles: Mapping[str, str] = field(default_factory=lambda: _ROLES)
    id: tuple[str, ...] = ("id",)
    user: tuple[str, ...] = ("user",)
    is_body: bool = False
    tells: Callable[[dict[str, Any]], bool] = lambda record: True
    read: Read | None = None
    join: Callable[[Sequence[Record]], Iterable[Record]] | None = None

    def has(self, record: Any) -> bool:
        return isinstance(record, dict) and record.keys() >= {*self.keys.split()} and self.tells(record)


def is_message(value: Any) -> bool:
    """Whether a value looks like a chat message rather than like a conversation."""
    return isinstance(value, dict) and "role" in value and joining_form([value]) is None


def expanded(value: Any) -> list[Any]:
    """The conversations in one JSON value: InterCode has many in one object, by number."""
    if isinstance(value, dict) and value and all(isinstance(v, dict) and "turn_history" in v for v in value.values()):
        return list(value.values())
    return [value]


def joining_form(values: Iterable[Any]) -> Form | None:
    """The form whose conversations are several records of a file, if one of the first records says so."""
    return next((form for value in values for form in FORMS if form.join and form.has(value)), None)


def parse_record(value: Any, origin: Origin) -> Iterator[Conversation]:
    """Yield the conversations of one record. ConversationError: the record is wrong, or its form is not known."""
    record = {"messages": value} if isinstance(value, list) else value
    form = next((form for form in FORMS if form.has(record)), None)
    if form is None:
        raise _unknown(record, origin)
    if form.read is None:
        yield checked_conversation(_conversation(record, form, origin), origin.where)
    else:
        for each in form.read(record, origin):
            yield from parse_record(each, origin)


def _unknown(record: Any, origin: Origin) -> ConversationError:
    known = "; ".join(f"{form.name} ({form.keys.replace(' ', ', ')})" for form in FORMS)
    found = f"found {shown(record)}; wanted a conversation: a list of messages or an object of a known form"
    if isinstance(record, dict):
        found = f"no known form of conversation (keys: {shortened(', '.join(record), 80) or 'none'})"
        if record.get("format") == FORMAT or "hash_ids" in record or {"block_size", "requests"} <= record.keys():
            wanted = "Use it with radixcache simulate, mrc or advise."
            return ConversationError(f"{origin.where}: is a trace of block hashes, not conversations. {wanted}")
    return ConversationError(f"{origin.where}: {found}. Known forms and their keys: {known}.")


def _conversation(record: dict[str, Any], form: Form, origin: Origin) -> Conversation:
    """The conversation of a record, from its turns and the fields beside them."""
    turns, left_out = record[form.turns], _left_out(record)
    expect(isinstance(turns, list), f"{origin.where}: {form.turns} is", turns, "a list of messages")
    messages = [_message(turn, form, f"{origin.where}: message {at}", left_out) for at, turn in enumerate(turns)]
    if isinstance(system := record.get("system"), str) and system and (not turns or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    conversation_id = _name(record, form.id, origin) or origin.default_id
    # A body of an API whose last turn awaits a reply.
    awaits_reply = bool(messages) and messages[-1]["role"] != "assistant"
    is_request = form.is_body and ("is_request" in record or ("model" in record and awaits_reply))
    first_turn = record.get("first_turn", 0)
    is_number = isinstance(first_turn, int) and not isinstance(first_turn, bool)
    expect(is_number, f"{origin.where}: first_turn is", first_turn, "a whole number")
    return Conversation(
        conversation_id=conversation_id,
        # The requests of one log keep their order.
        user=_name(record, form.user, origin) or (printable(origin.path.stem) if is_request else conversation_id),
        messages=checked_messages(messages, origin.where),
        tools=checked_tools(_tools_value(record, origin), origin.where),
        first_turn=first_turn,
        source=origin.source,
        replies_recorded=record.get("replies_recorded", True) is not False,
        calls=calls if isinstance(calls := record.get("calls"), tuple) else (),  # JSON has no tuples
        arguments={**_reasoning(record), **checked_arguments(record.get("chat_template_kwargs"), origin.where)},
        left_out=dict(left_out),
        is_request=is_request,
    )


def _reasoning(record: dict[str, Any]) -> dict[str, Any]:
    effort, thinking = record.get("reasoning_effort"), record.get("thinking")
    if isinstance(thinking, dict):
        thinking = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    said = (each if isinstance(each, bool) else None for each in (record.get("enable_thinking"), thinking))
    return anthropic_blocks.reasoning_arguments(effort if isinstance(effort, str) else None, *said)


def _left_out(record: dict[str, Any]) -> Counter[str]:
    """What a reader has left out of a record."""
    left_out = record.get("left_out")
    return Counter(left_out) if isinstance(left_out, Counter) else Counter()  # JSON has no counters


def _message(turn: Any, form: Form, where: str, left_out: Counter[str]) -> dict[str, Any]:
    expect(isinstance(turn, dict), f"{where} is", turn, f"an object with {form.role[0]} and {form.content[0]}")
    role_key, content_key = (
        next((key for key in keys if turn.get(key) is not None), keys[0]) for keys in (form.role, form.content)
    )
    speaker = turn[role_key].lower() if isinstance(turn.get(role_key), str) else None
    expect(speaker in form.roles, f"{where} has {role_key}", turn.get(role_key), f"one of {', '.join(form.roles)}")
    content = turn.get(content_key)
    if isinstance(content, list):
        content = _text_of(content, where, left_out)
    message = {**(turn if role_key == "role" else {}), "role": form.roles[speaker or ""], "content": content}
    left_out.update(key for key in ("audio",) if isinstance(message.get(key), dict))
    call = message.pop("function_call", None) or (_call_of(content) if speaker in _CALLERS else None)
    if call:
        if speaker in _CALLERS:
            message["content"] = None
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def _text_of(parts: list[Any], where: str, left_out: Counter[str]) -> str:
    """The texts of a message's parts; the other parts are counted by type."""
    texts = with_text(parts, lambda part: part["type"] == "text" or isinstance(_text_in(part), str), left_out)
    for index, part in enumerate(texts):
        is_text = isinstance(part, dict) and isinstance(_text_in(part), str)
        expect(is_text, f"{where}: content part {index} is", part, "a part with a type and text")
    return "".join(map(_text_in, texts))


def _text_in(part: dict[str, Any]) -> Any:
    return part.get("refusal" if part.get("type") == "refusal" else "text")


def _call_of(value: Any) -> dict[str, Any] | None:
    """A tool call from its JSON text; None: it is written in another way and stays text."""
    try:
        call = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {"name": call["name"], "arguments": call.get("arguments", {})}


def _name(record: dict[str, Any], keys: Iterable[str], origin: Origin) -> str:
    """An id or a user as text, which may be a number in the record; '': there is none."""
    key = next((key for key in keys if record.get(key) is not None), None)
    if key is None:
        return ""
    value = record[key]
    is_name = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
    expect(is_name, f"{origin.where}: {key} is", value, "text that is not empty")
    require_unicode(str(value), f"{origin.where}: {key}")
    return str(value)


def _tools_value(record: dict[str, Any], origin: Origin) -> Any:
    """The tool list, which ShareGPT files have as JSON text, and older bodies of OpenAI's API as `functions`."""
    value = record.get("tools")
    if value is None and isinstance(functions := record.get("functions"), list):
        return [{"type": "function", "function": function} for function in functions]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"{origin.where}: tools is not JSON ({error}); wanted a list of tools.") from error


# What no row can say


def _read_api(chat_of_log: Callable[[dict[str, Any]], dict[str, Any]]) -> Read:
    def read(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
        try:
            chat = {**chat_of_log(record), **{key: record[key] for key in _BESIDE if key in record}}
            yield {**chat, "left_out": chat["left_out"] + _left_out(record)}
        except ValidationError as error:
            field, message = first_finding(error.errors())
            raise ConversationError(f"{origin.where}: {field}: {message}.") from None

    return read


def _is_response(record: dict[str, Any]) -> bool:
    return isinstance(record["input"], list) or not {"instructions", "model"}.isdisjoint(record)


def _read_logged(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    """A body and its response, as batches, stored completions and proxies keep them."""
    logged = next(record[key] for key in ("body", "request", "params") if key in record)
    request = _object_of(logged)
    body, url = _object_of(request.get("body")) or request, str(request.get("url", record.get("url", "")))
    expect(bool(body), f"{origin.where}: the body is", logged, "that of an API")
    expect(not url.endswith(("/embeddings", "/moderations")), f"{origin.where}: url is", url, "a chat")
    given = {key: record[key] for key in ("id", "custom_id", "user") if isinstance(record.get(key), str)}
    name = given.pop("custom_id", None)
    yield {"id": name, **given, "is_request": True, **_with_reply(body, _object_of(record.get("response")))}


def _object_of(value: Any) -> dict[str, Any]:
    """An object, or the object in a JSON text; empty for all else."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_reply(body: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """A body whose last turn is the reply. Counted as left out: further replies, and a response without one."""
    response = _object_of(response.get("body")) or response
    choices, output, content = map(response.get, ("choices", "output", "content"))
    items = response_items.as_items(body.get("input"))
    if isinstance(output, list) and isinstance(items, list):
        return {**body, "input": [*items, *output]}
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reply, further = choices[0].get("message"), len(choices) - 1
    else:
        reply, further = {"role": "assistant", "content": content} if content else None, 0
    if not isinstance(reply, dict) or not isinstance(body.get("messages"), list):
        return {**body, "left_out": Counter({"response": 1})} if response else body
    return {**body, "messages": [*body["messages"], reply], "left_out": +Counter({"further choice": further})}


def _read_tau_bench(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    messages = checked_messages(record["traj"], origin.where)
    info = record.get("info")
    task = info.get("task") if isinstance(info, dict) else None
    user = task.get("user_id") if isinstance(task, dict) else None
    task_id, trial = record.get("task_id"), record.get("trial", 0)
    yield {
        "id": None if task_id is None else f"{origin.path.stem}/{task_id}.{trial}",
        "user": user if isinstance(user, str) and user else None,
        "messages": record["traj"],
        "tools": _tau_tools(messages, origin.path),
    }


def _tau_tools(messages: tuple[dict[str, Any], ...], path: Path) -> list[dict[str, Any]] | None:
    """The tool list beside the trajectories, or one folder up: by the file's name, else by the calls."""
    folders = (path.parent, path.parent.parent)
    found = [folder / name for folder in folders for name in TOOL_FILES if (folder / name).is_file()]
    named = [tools for tools in found if tools.name.split("_")[0] in path.name]
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for candidate in named or found:
        tools = _read_tools(candidate, candidate.stat().st_mtime_ns)
        if named or called <= {tool.get("function", tool)["name"] for tool in tools or ()}:
            return list(tools or ()) or None
    return None


@lru_cache(maxsize=len(TOOL_FILES))  # every trajectory of a file asks for its list
def _read_tools(path: Path, modified_ns: int) -> tuple[dict[str, Any], ...] | None:
    return checked_tools(read_json(path, "a list of tools", ConversationError), str(path))


def _read_mt_bench(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    turns = record["turns"]
    is_texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
    expect(is_texts, f"{origin.where}: turns is", turns, "a list of the user's texts")
    messages = [{"role": "user", "content": turn} for turn in turns]
    yield {"id": record.get("question_id"), **record, "messages": messages, "replies_recorded": False}


def _read_intercode(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
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
    yield {"id": None if task_id is None else f"{printable(origin.path.stem)}/{task_id}", "messages": messages}


def _as_text(value: Any) -> str:
    """An observation of an environment, which may be rows of a table."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_chatgpt(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    mapping = record["mapping"]
    expect(isinstance(mapping, dict), f"{origin.where}: mapping is", mapping, "an object")
    nodes = {name: (_object_of(node).get("parent"), _chatgpt_turn(node)) for name, node in mapping.items()}
    for path in _paths(nodes, origin.where, record.get("conversation_id") or record.get("id") or origin.default_id):
        turns = path["conversations"]
        left_out = Counter(turn["left_out"] for turn in turns if "left_out" in turn)
        yield {**path, "conversations": [turn for turn in turns if "left_out" not in turn], "left_out": left_out}


def _chatgpt_turn(node: Any) -> dict[str, Any] | None:
    """The message of a node of ChatGPT's export; None: it is a root, or empty."""
    message = _object_of(_object_of(node).get("message"))
    content, role = _object_of(message.get("content")), _object_of(message.get("author")).get("role")
    parts, kind = content.get("parts"), content.get("content_type")
    if kind in ("reasoning_recap", "thoughts"):
        return {"role": role, "left_out": kind}
    shown = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {**_object_of(part), "type": str(_object_of(part).get("content_type", kind))}
        for part in (parts if isinstance(parts, list) else [content.get("text")] * bool(content))
    ]
    text = "".join(str(part.get("text", "")) for part in shown)
    if not text and all(part["type"] == "text" for part in shown):
        return None
    tool = message.get("recipient")
    if role == "assistant" and isinstance(tool, str) and tool != "all":
        return {"role": role, "tool_calls": [{"function": {"name": tool, "arguments": {"input": text}}}]}
    return {"role": role, "content": shown}


def _read_oasst_tree(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    waiting: list[tuple[str | None, Any]] = [(None, record["prompt"])]
    nodes: dict[str, tuple[Any, Any]] = {}
    while waiting:
        parent, turn = waiting.pop()
        name, replies = str(len(nodes)), _object_of(turn).get("replies")
        nodes[name] = (parent, turn)
        waiting += [(name, reply) for reply in reversed(replies if isinstance(replies, list) else [])]
    return _paths(nodes, origin.where, record["message_tree_id"])


def _join_oasst_rows(records: Sequence[Record]) -> Iterator[Record]:
    rows = {str(record.value.get("message_id")): record for record in records}
    nodes = {name: (row.value.get("parent_id"), row.value) for name, row in rows.items()}
    for path in _paths(nodes, records[0].origin.where):
        yield Record(path, rows[path["user"]].origin)


def _paths(nodes: Mapping[str, tuple[Any, Any]], where: str, user: Any = None) -> Iterator[dict[str, Any]]:
    """A conversation for each path of a tree from a root to a leaf, of a user or of its root. Nodes: parents and turns.

    A path asks only what no path before it has asked.
    """
    children: dict[Any, list[str]] = {}
    for name, (parent, _) in nodes.items():
        is_known = parent is None or (isinstance(parent, str) and parent in nodes)
        expect(is_known, f"{where}: the parent of {shortened(name, 40)} is", parent, "a message of the tree")
        children.setdefault(parent, []).append(name)
    waiting = [(name, 0) for name in reversed(children.get(None, []))]
    path: list[str] = []
    shared = found = total = count = 0  # messages of the last path, of the tree, of all paths; paths of the root
    while waiting:
        name, depth = waiting.pop()
        path[depth:] = [name]
        shared, found, count = min(shared, depth), found + 1, count if depth else 0
        waiting += [(child, depth + 1) for child in reversed(children.get(name, ()))]
        if name in children:
            continue
        total += len(path)
        expect(total <= MOST_REPEATS * len(nodes), f"{where}: messages on all paths are", total, "a smaller tree")
        turns, before = ([turn for each in part if (turn := nodes[each][1])] for part in (path, path[:shared]))
        if not before or len(before) < len(turns):
            roles = [str(_object_of(turn).get("role")).lower() for turn in turns[: len(before) + 1]]
            first_turn = max(sum(role in ("prompter", "user") for role in roles) - 1, 0) if before else 0
            base = str(user or path[0])
            name = f"{base}/{count}" if count else base
            yield {"id": name, "user": base, "conversations": turns, "first_turn": first_turn}
            count += 1
        shared = len(path)
    expect(found == len(nodes), f"{where}: messages in circles are", len(nodes) - found, "none")


def _read_swe_agent(record: dict[str, Any], origin: Origin) -> Iterator[dict[str, Any]]:
    yield {"id": printable(origin.path.stem), "messages": record["history"]}


def _has_utterances(record: dict[str, Any]) -> bool:
    turns = record["turns"]
    return isinstance(turns, list) and any(isinstance(turn, dict) and "speaker" in turn for turn in turns)


def _is_claude_code(record: dict[str, Any]) -> bool:
    return not {"sessionId", "leafUuid", "messageId"}.isdisjoint(record)


_ANTHROPIC = "a body with `system`, or with blocks or tools that only this API has"
_CHAT = "a body, or a line of a file for fine-tuning; `tools` or `functions` may stand beside the messages"
_CLAUDE_CODE = "a session in `~/.claude/projects`; records have `sessionId`, `leafUuid` or `messageId`"
_CODEX = "a session in `~/.codex/sessions`; the first record has the type `session_meta`"
_LOGGED = "a body of an API above, which may be JSON text; `response` may have its reply"
_SPOKEN = "turns with `from` and `value`, or `role` and `content`; `system` and `tools` may stand beside them"
_TAU = "the tools come from `airline_tools.json` or `retail_tools.json` beside the file"
_TREE = "a message with `replies`; each path of the tree is a conversation"
_anthropic, _responses = _read_api(anthropic_blocks.chat_of_log), _read_api(response_items.chat_of_log)

FORMS: tuple[Form, ...] = (
    Form("Anthropic's Messages API", _ANTHROPIC, "messages", tells=anthropic_blocks.is_anthropic, read=_anthropic),
    Form("OpenAI's chat API", _CHAT, "messages", content=("content", "refusal"), is_body=True),
    Form("OpenAI's Responses API", "a body; `input` is text or items", "input", tells=_is_response, read=_responses),
    Form("batches and stored completions of OpenAI", _LOGGED, "body", read=_read_logged),
    Form("batches of Anthropic", _LOGGED, "custom_id params", read=_read_logged),
    Form("logs of proxies", _LOGGED, "request", read=_read_logged),
    Form("ShareGPT", _SPOKEN, "conversations", "conversations", **_SPEECH),
    Form("LMSYS-Chat-1M, WildChat", "turns with `role` and `content`", "conversation", "conversation", **_ROW),
    Form("ChatGPT's export", "a tree; each of its paths is a conversation", "mapping", read=_read_chatgpt),
    Form("OpenAssistant's trees", _TREE, "message_tree_id prompt", read=_read_oasst_tree),
    Form("OpenAssistant's rows", "a message of a tree", "message_id role text", join=_join_oasst_rows),
    Form("tau-bench", _TAU, "traj", read=_read_tau_bench),
    Form("SGD", "turns with `speaker` and `utterance`", "turns", "turns", **_SGD, tells=_has_utterances),
    Form("mt-bench", "a list of the user's texts", "turns", read=_read_mt_bench),
    Form("SWE-agent", "a `.traj` file", "history", read=_read_swe_agent),
    Form("InterCode", "`actions` and `observations`", "turn_history", read=_read_intercode),
    Form("Claude Code", _CLAUDE_CODE, "type", tells=_is_claude_code, join=claude_code),
    Form("Codex", _CODEX, "type payload", tells=lambda record: record["type"] == "session_meta", join=codex),
)
