"""Turns JSON records into conversations. `FORMS` is the table of all known forms.

A record has the first form of the table whose keys it has. A row is data: where the turns are, which keys hold role,
text, id and user, and the names of the roles. Functions do the rest: `read` turns one record into records of other
forms, and `join` does so with all records of a file. For a new form, add a row; docs/generate.py lists the rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from radixcache.observe.trace import FORMAT
from runner.files import TOOL_FILES, InputError, Record, expect, read_json
from runner.script import anthropic_blocks, response_items
from runner.script.agent_sessions import Known
from runner.script.chat_sessions import gemini_cli, is_qwen_code, opencode, pi, qwen_code
from runner.script.claude_code_sessions import claude_code
from runner.script.codex_sessions import OLD_META, codex, old_codex
from runner.script.conversation import (
    ROLES,
    SYSTEM,
    Conversation,
    as_tool,
    checked_tools,
    dicts_in,
    first_finding,
    has_name,
    in_present_form,
    json_of,
    named_value,
    object_of,
    paths,
    reasoning_arguments,
    require_unicode,
    turn_start,
    value_at,
    with_text,
    without_billing,
)
from runner.text import printable, shortened, shown

_ROLES = {**dict(zip(ROLES, ROLES, strict=True)), "function": "tool"}
# Names of speakers in files of ShareGPT's form, in lower case. Each converter to this form has its own names.
_SPEAKERS = {
    **_ROLES,
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
_CALLERS = ("function_call", "tool_call")  # speakers whose text is a call as JSON
# Besides role and content, chat templates read only these keys of messages. Others are dropped, such as refusal.
_MESSAGE_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
#: Keys that this reader reads in the body of an API besides the keys of the API.
_BESIDE = ("calls", "first_turn", "id", "is_request", "metadata", "model", "user")
Read = Callable[[Record], Iterable[dict[str, Any]]]
#: Public traces with lengths and no text, each with the keys or columns that identify it.
_LENGTHS_ALONE = {
    "BurstGPT's table": {"Timestamp", "Request tokens", "Response tokens"},
    "a table of Azure's LLM inference traces": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "rows of lengths, as GuideLLM and AIPerf have them": {"input_length", "output_length"},
}


@dataclass(frozen=True)
class Form:
    """A form of conversations: a row of `FORMS`.

    A value is named by its key, or by a path of keys such as `message/author`. A field may have several names for one
    value, separated by blanks: the first name that the record has counts.

    Attributes:
        about: what a record is, for the docs.
        keys: the keys that a record must have; `a|b` means one of them. Without `read` and `join`, the only key has the
            list of turns; if turns have a `parent`, it has an object that maps names to turns.
        tells: a further condition on the record.
        role, content, parent: names of values of a turn. With `has_bare_turns`, a turn may be the user's text alone.
        callee: names the value of a reply that is the name of the called tool; the value "all" means no call.
        roles: maps each name of a role, in lower case, to a role.
        id, user: names of values of a record, or a pattern with such names; `{file}` is the name of the file.
        has_tools_beside: a file named in `TOOL_FILES`, near the record's file, has the tools.
        is_body: a record may be the body of one request of a log.
        read: turns one record into records of other forms.
        join: turns all records of a file into records of other forms, each with its place in the file. A file has this
            form if one of its first records has the keys.
    """

    name: str
    about: str
    keys: str
    role: str = "role"
    content: str = "content"
    parent: str = ""
    callee: str = ""
    roles: Mapping[str, str] = field(default_factory=lambda: _ROLES)
    id: str = "id"
    user: str = "user"
    has_bare_turns: bool = False
    has_tools_beside: bool = False
    is_body: bool = False
    tells: Callable[[dict[str, Any]], bool] = lambda record: True
    read: Read | None = None
    join: Callable[[Sequence[Record], Known], Iterable[Record]] | None = None

    def has(self, record: Any) -> bool:
        keys = (key.split("|") for key in self.keys.split())
        return isinstance(record, dict) and not any(map(record.keys().isdisjoint, keys)) and self.tells(record)


def is_message(value: Any) -> bool:
    """Whether a value looks like a chat message rather than like a conversation."""
    return isinstance(value, dict) and "role" in value and joining_form([value]) is None


def conversations_in(value: Any) -> list[Any]:
    """Return the conversations in one JSON value. A file of InterCode is one object with many, by number."""
    if isinstance(value, dict) and value and all(isinstance(v, dict) and "turn_history" in v for v in value.values()):
        return list(value.values())
    return [value]


def form_of(value: Any) -> Form | None:
    return next((form for form in FORMS if form.has(value)), None)


def joining_form(values: Iterable[Any]) -> Form | None:
    """Return the first form of `values` that joins several records into a conversation; None: there is no such form."""
    return next((form for form in map(form_of, values) if form and form.join), None)


def parse_record(record: Record) -> Iterator[Conversation]:
    """Yield the conversations of one record. InputError: the record is wrong, or its form is not known."""
    if isinstance(record.value, list):
        record = record._replace(value={"messages": record.value})
    form = form_of(record.value)
    if form is None:
        raise _unknown(record)
    if form.join is not None:
        raise InputError(f"{record.where}: is of {form.name}, in a file of another form; wanted one form per file.")
    if form.read is None:
        yield from _conversations(record, form)
    else:
        for each in form.read(record):
            yield from parse_record(record._replace(value=each))


def lengths_alone(keys: Iterable[str]) -> str:
    """Name the public trace without text that has these keys or columns; '': there is none."""
    found = {key.strip('"') for key in keys}
    return next((name for name, needed in _LENGTHS_ALONE.items() if needed <= found), "")


def checked_messages(values: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Return messages in OpenAI's form, with the keys that templates read. InputError: the first wrong message."""
    expect(isinstance(values, list), f"{where}: messages is", values, "a list of messages")
    read = [_message(value, Form("", "", "messages"), f"{where}: message {at}") for at, value in enumerate(values)]
    lacking = next((at for at, (_, left_out) in enumerate(read) if left_out), None)
    expect(lacking is None, f"{where}: message", lacking, "text alone")
    return tuple(message for message, _ in read if message is not None)


def _unknown(record: Record) -> InputError:
    value, where = record.value, record.where
    known = "; ".join(f"{form.name} ({form.keys.replace(' ', ', ').replace('|', ' or ')})" for form in FORMS)
    found = f"found {shown(value)}; wanted a conversation: a list of messages or an object of a known form"
    if isinstance(value, dict):
        found = f"no known form of conversation (keys: {shortened(', '.join(value), 80) or 'none'})"
        if value.get("format") == FORMAT or "hash_ids" in value or {"block_size", "requests"} <= value.keys():
            wanted = "Use it with radixcache simulate or advise."
            return InputError(f"{where}: is a trace of block hashes, not conversations. {wanted}")
        if what := lengths_alone(value):
            return InputError(f"{where}: is {what}: lengths without text; wanted conversations.")
    return InputError(f"{where}: {found}. Known forms and their keys: {known}.")


def _conversations(record: Record, form: Form) -> Iterator[Conversation]:
    """Yield the conversation of a record. A tree has one conversation for each path that has new messages.

    The conversations of a tree share message objects.
    """
    value, where = record.value, record.where
    turns = value[form.keys]
    kind, wanted = (dict, "the messages of a tree by their names") if form.parent else (list, "a list of messages")
    expect(isinstance(turns, kind), f"{where}: {form.keys} is", turns, wanted)
    named: dict[str, Any] = turns if form.parent else {str(at): turn for at, turn in enumerate(turns)}
    read = {name: _message(turn, form, f"{where}: message {at}") for at, (name, turn) in enumerate(named.items())}
    messages = {name: message for name, (message, _) in read.items() if message is not None}
    given = [*messages.values()]
    tools = _tau_tools(given, record.path) if form.has_tools_beside else _tools_value(value, where)
    first_turn = value.get("first_turn", 0)
    expect(type(first_turn) is int, f"{where}: first_turn is", first_turn, "a whole number")
    arguments = value.get("chat_template_kwargs")
    expect(isinstance(arguments, dict | None), f"{where}: chat_template_kwargs is", arguments, "an object")
    require_unicode(arguments, f"{where}: chat_template_kwargs")
    own = sorted({"messages", "tokenizer", "tools"}.intersection(arguments or ()))
    expect(not own, f"{where}: chat_template_kwargs has", own, "other variables of the template")
    # A body of an API whose last turn awaits a reply.
    awaits_reply = bool(given) and given[-1]["role"] != "assistant"
    is_request = form.is_body and ("is_request" in value or ("model" in value and awaits_reply))
    base = _name(record, form.id) or record.default_id
    whole = Conversation(
        conversation_id=base,
        # All requests of a log get the same user, so that they keep their order.
        user=printable(record.path.stem) if is_request else _name(record, form.user) or base,
        messages=(),
        tools=checked_tools(tools, where),
        source=f"{printable(record.path.name)}:{record.line}",
        replies_recorded=not (form.has_bare_turns and all(isinstance(turn, str) for turn in turns)),
        calls=calls if isinstance(calls := value.get("calls"), tuple) else (),  # only our readers make tuples
        arguments={**reasoning_arguments(value), **(arguments or {})},
        is_request=is_request,
    )
    system = value.get("system")
    require_unicode(system, f"{where}: system")
    has_system = isinstance(system, str) and system and (not given or given[0]["role"] != "system")
    beginning = [{"role": "system", "content": system}] if has_system else []
    parents = {name: value_at(turn, form.parent) for name, turn in named.items()} if form.parent else {}
    count = 0
    for path, shared in paths(parents, where) if form.parent else [([*named], 0)]:
        chain = [messages[name] for name in path if name in messages]
        known = sum(name in messages for name in path[:shared])
        if known == len(chain) and (known or form.parent):
            continue
        chain = [*beginning, *chain]
        start = turn_start(chain, 0 if known else first_turn, where)
        yield replace(
            whole,
            conversation_id=f"{base}/{count}" if count else base,
            messages=tuple(chain),
            asked_messages=max(start, len(beginning) + known - 1),
            left_out=dict(sum((read[name][1] for name in path[shared:]), _left_out(value))),
        )
        count += 1


def _left_out(record: dict[str, Any]) -> Counter[str]:
    """Count what a reader left out of a record, and parts beside the messages, which the server leaves out, too."""
    left_out, documents = record.get("left_out"), record.get("documents")
    counted = Counter(left_out) if isinstance(left_out, Counter) else Counter[str]()  # only readers make counters
    counted.update(f"{key} beside messages" for key in ("choices", "output", "response") if record.get(key))
    return counted + Counter({"document beside messages": len(documents) if isinstance(documents, list) else 0})


def _message(turn: Any, form: Form, where: str) -> tuple[dict[str, Any] | None, Counter[str]]:
    """Return a turn as a message in OpenAI's form, with the keys that templates read; and counts of parts without text.

    The message is None for an empty turn of a tree, and for a system turn with only a billing line.
    """
    left_out: Counter[str] = Counter()
    names = form.role.split()[0], form.content.split()[0]
    if form.has_bare_turns and isinstance(turn, str):
        turn = dict(zip(names, ("user", turn), strict=True))
    expect(isinstance(turn, dict), f"{where} is", turn, f"an object with {' and '.join(names)}")
    turn = in_present_form(turn)
    (role_name, speaker), (content_name, content) = named_value(turn, form.role), named_value(turn, form.content)
    if form.parent and speaker is None and content is None:
        return None, left_out
    named = speaker.lower() if isinstance(speaker, str) else ""
    role = form.roles.get(named)
    keys = f"{where} has no {role_name} (keys: {shortened(', '.join(map(str, turn)), 80) or 'none'}); wanted"
    if role is None and speaker is None:
        raise InputError(f"{keys} one of {', '.join(form.roles)}.")
    expect(role is not None, f"{where} has {role_name}", speaker, f"one of {', '.join(form.roles)}")
    if role in SYSTEM and content and not (content := without_billing(content)):
        return None, left_out
    is_object = bool(form.parent) and isinstance(content, dict)
    if isinstance(content, list) or is_object:
        parts = content if isinstance(content, list) else [content]
        shown = with_text(parts, lambda part: part.get("type") == "text" or isinstance(part.get("text"), str), left_out)
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in shown]
        for index, text in enumerate(texts):
            expect(
                isinstance(text, str), f"{where}: content part {index} is", shown[index], "a part with a type and text"
            )
        content = "".join(texts)
    if form.parent and not content and (role != "user" or is_object or not left_out):
        return None, left_out
    if isinstance(turn.get("audio"), dict):
        left_out["audio"] += 1
        content = content or ""
    if isinstance(images := turn.get("images"), list):
        left_out["image"] += len(images)
    message = {"role": role, "content": content, **{key: turn.get(key) for key in _MESSAGE_KEYS}}
    for key in filter(turn.get, ("reasoning", "thinking")):
        if not isinstance(turn[key], str):
            left_out[key] += 1
        elif not message["reasoning_content"]:
            message["reasoning_content"] = turn[key]
    call, callee = None, value_at(turn, form.callee) if form.callee else None
    if named in _CALLERS and has_name(said := object_of(content)):
        call = {"name": said["name"], "arguments": said.get("arguments", {})}
    elif role == "assistant" and isinstance(callee, str) and callee != "all":
        call = {"name": callee, "arguments": {"input": content}}
    if call:
        message |= {"content": None, "tool_calls": [as_tool(call)]}
    calls = [] if message["tool_calls"] is None else message["tool_calls"]
    expect(isinstance(calls, list), f"{where} has tool_calls", calls, "a list of calls")
    for index, each in enumerate(calls):
        function: Any = each.get("function") if isinstance(each, dict) else None
        is_call = has_name(function) and isinstance(function.get("arguments", ""), (str, dict))
        wanted = "a function with a name, and arguments as JSON text or an object"
        expect(is_call, f"{where}: tool call {index} is", each, wanted)
    message = {key: value for key, value in message.items() if value is not None and value != []}
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        name = content_name if key == "content" else key
        expect(isinstance(message.get(key, ""), str), f"{where} has {name}", message.get(key), "text")
    if "content" not in message and not (role == "assistant" and calls):
        raise InputError(f"{where} (role {role}) has no content; wanted text.")
    require_unicode(message, where)
    return message, left_out


def _name(record: Record, patterns: str) -> str:
    """Return an id or a user as text, even if the record has a number; '': there is none."""
    known = {**record.value, "file": printable(record.path.stem)}
    for pattern in patterns.split():
        pattern = pattern if "{" in pattern else f"{{{pattern}}}"
        parts = {key: value_at(known, key) for key in re.findall(r"{(.+?)}", pattern)}
        # Another program writes the values at deeper paths. If such a value is no name, it is ignored.
        if any(part is None or ("/" in key and not _is_name(part)) for key, part in parts.items()):
            continue
        for key, part in parts.items():
            expect(_is_name(part), f"{record.where}: {key} is", part, "text that is not empty")
            require_unicode(str(part), f"{record.where}: {key}")
        return pattern.format_map(parts)
    return ""


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""


def _tools_value(record: dict[str, Any], where: str) -> Any:
    """Return the tool list. ShareGPT files have it as JSON text, older bodies of OpenAI's API as `functions`."""
    tools, functions = (
        json_of(None if record.get(name) == "" else record.get(name)) for name in ("tools", "functions")
    )
    if tools is not None or functions is None:
        return tools
    expect(isinstance(functions, list), f"{where}: functions is", functions, "a list of function definitions")
    return [*map(as_tool, functions)]


# Functions for `read`, `join` and `tells`


def _read_api(chat_of_log: Callable[[dict[str, Any]], dict[str, Any]], turns: str) -> Read:
    def read(record: Record) -> Iterator[dict[str, Any]]:
        given = {name: value for name, value in record.value.items() if value is not None}
        try:
            chat = {**chat_of_log(given), **{key: given[key] for key in _BESIDE if key in given}}
            left_out = chat["left_out"] + _left_out(given)
            if (counted := given.get("counted")) and isinstance(counted, tuple):  # only our readers make tuples
                left_out -= chat_of_log({turns: [*counted]})["left_out"]
            yield {**chat, "left_out": left_out}
        except ValidationError as error:
            field, message = first_finding(error.errors())
            raise InputError(f"{record.where}: {field}: {message}.") from None

    return read


def _is_response(record: dict[str, Any]) -> bool:
    return isinstance(record["input"], list) or not {"instructions", "model"}.isdisjoint(record)


def _read_logged(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the body of a batch, a stored completion or a log of a proxy, with the reply as its last turn.

    Further replies are counted as left out, and so is a response without a reply.
    """
    value, where = record.value, record.where
    given = value_at(value, "body/body request/body params/body body request params")
    body = object_of(given)
    expect(bool(body), f"{where}: the body is", given, "that of an API")
    url = str(value_at(value, "request/url url"))
    expect(not url.endswith(("/embeddings", "/moderations")), f"{where}: url is", url, "a chat")
    named = {key: value[key] for key in ("id", "custom_id", "user") if isinstance(value.get(key), str)}
    name = named.pop("custom_id", None)
    given = value_at(value, "response/body response result/message result error")
    response = object_of(given)
    choices, output, content = map(response.get, ("choices", "output", "content"))
    items, messages = response_items.as_items(body.get("input")), body.get("messages")
    left_out: Counter[str] = Counter()
    reply = {"role": "assistant", "content": content} if content else None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reply = choices[0].get("message")
        left_out += Counter({"further choice": len(choices) - 1})
    replied: dict[str, Any] = {}
    if isinstance(output, list) and isinstance(items, list):
        replied = {"input": [*items, *output]}
    elif isinstance(reply, dict) and isinstance(messages, list):
        replied = {"messages": [*messages, reply], "left_out": left_out}
    elif given:
        replied = {"left_out": Counter({"response": 1})}
    yield {"id": name, **named, "is_request": True, **body, **replied}


def _is_langfuse(record: dict[str, Any]) -> bool:
    return "observations" in record or not {"traceId", "trace_id"}.isdisjoint(record)


def _read_langfuse(record: Record) -> Iterator[dict[str, Any]]:
    value = record.value
    observations = value.get("observations")
    for each in dicts_in(observations) if isinstance(observations, list) else [value]:
        if each.get("type", "GENERATION") != "GENERATION":
            continue
        asked, said = json_of(each.get("input")), json_of(each.get("output"))
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        body: Any = {"messages": asked} if isinstance(asked, list) else asked
        is_body = isinstance(body, dict) and not {"input", "messages"}.isdisjoint(body)
        wanted = "messages, or a body of an API"
        expect(is_body, f"{record.where}: an observation of Langfuse has input", asked, wanted)
        said = said[0] if isinstance(said, list) and said else said
        reply = {"role": "assistant", "content": said} if isinstance(said, str) else said
        response = {"response": {"choices": [{"message": reply}]}} if isinstance(reply, dict) else {}
        user = value_at({**value, **each}, "sessionId session_id userId user_id traceId trace_id")
        yield {"id": each.get("id"), "user": user, "body": {"model": each.get("model"), **body}, **response}


def _read_helicone(record: Record) -> Iterator[dict[str, Any]]:
    value = record.value
    if not object_of(value["request_body"]):
        raise InputError(f"{record.where}: Helicone has no request_body; wanted an export with --include-body.")
    about = {"id": value.get("request_id"), "user": value.get("request_user_id")}
    yield {**about, "body": value["request_body"], "response": value.get("response_body")}


def _read_preferred(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the conversation with the preferred reply. The other reply is counted as left out."""
    asked, said = object_of(record.value["input"]), record.value["preferred_output"]
    messages = asked.get("messages")
    are_lists = isinstance(messages, list) and isinstance(said, list)
    expect(are_lists, f"{record.where}: input is", asked, "an object with messages, beside a list preferred_output")
    left_out = Counter({"further choice": int(bool(record.value.get("non_preferred_output")))})
    yield {**asked, "messages": [*(messages or ()), *said], "left_out": left_out}


def _is_webui(record: dict[str, Any]) -> bool:
    return isinstance(record["chat"], dict)


def _read_webui(record: Record) -> Iterator[dict[str, Any]]:
    chat, about = record.value["chat"], {"id": record.value.get("id"), "user": record.value.get("user_id")}
    nodes = value_at(chat, "history/messages")
    if not isinstance(nodes, dict):
        yield {**about, "messages": chat.get("messages")}
        return
    mapping = {}
    for name, node in nodes.items():
        given = object_of(node)
        images = [each for each in dicts_in(given.get("files")) if each.get("type") == "image"]
        turn = {"role": given.get("role"), "text": given.get("content"), "images": images}
        mapping[name] = {**turn, "parent": given.get("parentId")}
    yield {**about, "mapping": mapping}


def _tau_tools(messages: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]] | None:
    """Find the tool list in the trajectories' folder or one folder up: by the file's name, else by the called tools."""
    folders = (path.parent, path.parent.parent)
    found = [folder / name for folder in folders for name in TOOL_FILES if (folder / name).is_file()]
    named = [tools for tools in found if tools.name.split("_")[0] in path.name]
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for candidate in named or found:
        tools = _read_tools(candidate, candidate.stat().st_mtime_ns)
        if named or called <= {tool.get("function", tool)["name"] for tool in tools or ()}:
            return list(tools or ()) or None
    return None


@lru_cache(maxsize=len(TOOL_FILES))  # all trajectories of a file need the same list
def _read_tools(path: Path, modified_ns: int) -> tuple[dict[str, Any], ...] | None:
    return checked_tools(read_json(path, "a list of tools", InputError), f"{path}:1")


def _read_intercode(record: Record) -> Iterator[dict[str, Any]]:
    history = object_of(record.value["turn_history"])
    actions: Any = history.get("actions")
    observations: Any = history.get("observations")
    are_lists = isinstance(actions, list) and isinstance(observations, list) and len(observations) <= len(actions)
    expect(are_lists, f"{record.where}: turn_history is", history, "lists of actions and observations")
    messages = [{"role": "user", "content": record.value.get("query")}]
    # The observation after the last action has no reply, so it is left out.
    for action, observation in zip_longest(map(_as_text, actions), map(_as_text, observations[: len(actions) - 1])):
        messages.append({"role": "assistant", "content": action})
        messages += [{"role": "user", "content": observation}] * (observation is not None)
    task_id = record.value.get("task_id")
    yield {"id": None if task_id is None else f"{printable(record.path.stem)}/{task_id}", "messages": messages}


def _as_text(value: Any) -> str:
    """Return an action or an observation as text. An observation may be rows of a table."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_oasst_tree(record: Record) -> Iterator[dict[str, Any]]:
    waiting: list[tuple[str | None, Any]] = [(None, record.value["prompt"])]
    nodes: dict[str, Any] = {}
    while waiting:
        parent, turn = waiting.pop()
        name, replies = str(len(nodes)), object_of(turn).get("replies")
        nodes[name] = {**object_of(turn), "parent": parent}
        waiting += [(name, reply) for reply in reversed(replies if isinstance(replies, list) else [])]
    yield {"id": record.value["message_tree_id"], "mapping": nodes}


def _join_oasst_rows(records: Sequence[Record], _: Known) -> Iterator[Record]:
    trees: dict[str, list[Record]] = {}
    for record in records:
        if form_of(record.value) is None:
            yield record
        else:
            trees.setdefault(str(record.value.get("message_tree_id")), []).append(record)
    for rows in trees.values():
        values = [row.value for row in rows]
        nodes = {str(each.get("message_id")): {**each, "parent": each.get("parent_id")} for each in values}
        yield rows[0]._replace(value={"id": values[0].get("message_tree_id"), "mapping": nodes})


_ANTHROPIC = "a body with `system`, or with blocks or tools that only this API has"
_CHAT = "a body, or a line of a file for fine-tuning; `tools` or `functions` may stand beside the messages"
_CLAUDE_CODE = "a session in `~/.claude/projects`"
_CODEX = "a session in `~/.codex/sessions`; the first record has the type `session_meta`"
_OLD_CODEX = "an old session; items of the Responses API follow the first record"
_GEMINI = "a session in `~/.gemini/tmp`, whole or a message a line"
_HELICONE = "its `request_body` and `response_body` (`--include-body`)"
_LANGFUSE = "an observation, or a trace with its `observations`; those of other types than `GENERATION` are ignored"
_LOGGED = "a body of an API above, or its JSON text, with its `response`; a batch may have its outputs in another file"
_OPENCODE = "a document of `opencode export`"
_PI = "a session in `~/.pi/agent/sessions`; the first record has the type `session`"
_PREFERRED = "`input` with messages, and the `preferred_output`"
_QWEN = "a session in `~/.qwen/projects`"
_SPOKEN = "turns with `from` and `value`, or `role` and `content`; `system` and `tools` may stand beside them"
_TAU = "the tools come from `airline_tools.json` or `retail_tools.json` beside the file"
_WEBUI = "`chat` has a tree of messages; each of its paths is a conversation"
_TREE = "a message with `replies`; each path of the tree is a conversation"
_TURNS = "turns with `speaker` and `utterance`; or the user's texts alone"
_anthropic = _read_api(anthropic_blocks.chat_of_log, "messages")
_responses = _read_api(response_items.chat_of_log, "input")
_CHATTED: Any = {"user": "user metadata/user_id", "roles": _SPEAKERS}
_SPEECH: Any = {"role": "role from user", "content": "content value text", "roles": _SPEAKERS}
_ROW = {**_SPEECH, "id": "conversation_id id", "user": "hashed_ip user"}
_NODES: Any = {
    "role": "message/author/role role",
    "content": "message/content/parts message/content/text message/content text",
    "roles": _SPEAKERS,
    "id": "conversation_id id",
    "parent": "parent",
    "callee": "message/recipient",
}
_UTTERED: Any = {"role": "speaker", "content": "utterance", "roles": {"user": "user", "system": "assistant"}}
_TASK = "{file}/{task_id}.{trial} {file}/{task_id}.0"

FORMS: tuple[Form, ...] = (
    Form("Gemini CLI", _GEMINI, "sessionId projectHash", join=gemini_cli),
    Form("opencode", _OPENCODE, "info messages", join=opencode),
    Form("Langfuse", _LANGFUSE, "input|observations", tells=_is_langfuse, read=_read_langfuse),
    Form("Helicone", _HELICONE, "request_body", read=_read_helicone),
    Form("OpenAI's preference files", _PREFERRED, "input preferred_output", read=_read_preferred),
    Form("Anthropic's Messages API", _ANTHROPIC, "messages", tells=anthropic_blocks.is_anthropic, read=_anthropic),
    Form("OpenAI's chat API", _CHAT, "messages", content="content refusal", is_body=True, **_CHATTED),
    Form("OpenAI's Responses API", "a body; `input` is text or items", "input", tells=_is_response, read=_responses),
    Form("batches of APIs, stored completions, logs of proxies", _LOGGED, "body|params|request", read=_read_logged),
    Form("ShareGPT", _SPOKEN, "conversations", **_SPEECH),
    Form("LMSYS-Chat-1M, WildChat", "turns with `role` and `content`", "conversation", **_ROW),
    Form("ChatGPT's export", "a tree; each of its paths is a conversation", "mapping", **_NODES),
    Form("Open WebUI's export", _WEBUI, "chat", tells=_is_webui, read=_read_webui),
    Form("OpenAssistant's trees", _TREE, "message_tree_id prompt", read=_read_oasst_tree),
    Form("OpenAssistant's rows", "a message of a tree", "message_id role text", join=_join_oasst_rows),
    Form("tau-bench", _TAU, "traj", id=_TASK, user="info/task/user_id", has_tools_beside=True),
    Form("SGD, mt-bench", _TURNS, "turns", id="id dialogue_id question_id", has_bare_turns=True, **_UTTERED),
    Form("SWE-agent", "a `.traj` file", "history", id="{file}"),
    Form("InterCode", "`actions` and `observations`", "turn_history", read=_read_intercode),
    Form("qwen-code", _QWEN, "type sessionId uuid", tells=is_qwen_code, join=qwen_code),
    Form("Claude Code", _CLAUDE_CODE, "type sessionId|leafUuid|messageId", join=claude_code),
    Form("pi", _PI, "type id timestamp", tells=lambda record: record["type"] == "session", join=pi),
    Form("Codex", _CODEX, "type payload", tells=lambda record: record["type"] == "session_meta", join=codex),
    Form("Codex of 2025", _OLD_CODEX, "id timestamp", tells=lambda record: record.keys() <= OLD_META, join=old_codex),
)
