"""Sessions of coding agents: from the messages of a log to the requests that the agent made.

The files `*_sessions.py` beside this one read the logs of one kind of agent each, and make a tree of `LogNode`s. Each
path of the tree that ends with a reply becomes a body of the provider's API. Where the agent does not go on from the
request before, the `Call` has the `Opening`:

    user, reply, user, reply | summary, kept messages, user, reply        compaction
                 user, reply | user', reply'                              the user went back and asked otherwise

Invariants:

  AS1  A reply with a message in front of it is one call; what the tool itself wrote in a reply's place is none.
  AS2  A path has the calls that no path before it has, and `None` in the place of others; it ends with a reply.
  AS3  What a path left out is counted once: not again for messages of earlier paths, or of copies in other files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.files import Record
from runner.script.conversation import Call, Opening, as_tool, found_in, object_of, paths


@dataclass
class Known:
    """What the files before have: agents copy a session that goes on into a new file.

    `rows` are names of messages; `older` has the sessions that a forked one goes on from.
    """

    rows: set[str] = field(default_factory=set)
    older: dict[str, set[str]] = field(default_factory=dict)

    def adds(self, row: str) -> bool:
        """Note a row; whether it is new."""
        is_new = row not in self.rows
        self.rows.add(row)
        return is_new


@dataclass
class LogNode:
    """A message or an item of a log, and the name of the one above it; of a reply also its call.

    `opening`: why a conversation begins here, if one does. `is_copy`: it stands elsewhere, too.
    """

    turn: dict[str, Any]
    record: Record
    above: str | None
    is_reply: bool
    opening: Opening
    call: Call | None = None
    is_copy: bool = False


def bodies(nodes: Mapping[str, LogNode], turns: str, left_out: Counter[str], **about: Any) -> Iterator[Record]:
    """A body for each path of a log that has calls; `turns` is the key of its turns."""
    asking = {name for name, node in nodes.items() if not (node.is_reply or node.turn.get("role") == "developer")}
    replies = {name for name, node in nodes.items() if node.is_reply and node.above in asking}
    useful: set[str | None] = {None}
    asked = set[str | None]()  # the messages of replies that a model wrote
    for name, node in nodes.items():
        if node.is_reply and (node.call is not None or node.above in asked):
            asked.add(name)
            above: str | None = name
            while above not in useful:
                useful.add(above)
                above = nodes[above or ""].above
    where = next((node.record.where for node in nodes.values()), "")
    count = 0
    for path, shared in paths({name: node.above for name, node in nodes.items() if name in useful}, where):
        calls: list[Call | None] = []
        before, first = None, None
        for at, name in ((at, name) for at, name in enumerate(path) if name in replies):
            call = nodes[name].call
            if call is not None and at >= shared:
                opening = Opening.EDIT if shared and not first else None if before else nodes[path[0]].opening
                opening = Opening.MODEL if before is not None and before.model != call.model else opening
                call, first = call._replace(opening=opening), first or nodes[name].record
            calls.append(call if at >= shared else None)
            before = call or before
        if first is None:
            continue
        conversation_id = f"{first.default_id.rpartition('#')[0]}#{count}"
        body = {turns: [nodes[name].turn for name in path], "calls": tuple(calls), **about}
        body["counted"] = tuple(nodes[name].turn for at, name in enumerate(path) if at < shared or nodes[name].is_copy)
        body |= {"id": conversation_id, "left_out": Counter() if count else left_out}
        yield first._replace(value=body)
        count += 1


class Tree:
    """The nodes of a log whose rows become chat messages. A row goes on from another one, its parent."""

    def __init__(self, known: Known) -> None:
        self.said: dict[str, Sequence[dict[str, Any]]] = {}  # by row
        self._known = known
        self._nodes: dict[str, LogNode] = {}
        self._left_out: Counter[str] = Counter()
        self._ends: dict[str | None, str | None] = {}  # by row: the last message that a row below sees

    def add(
        self,
        row: str,
        parent: str | None,
        messages: Sequence[dict[str, Any]],
        record: Record,
        *,
        call: Call | None = None,
        opening: Opening = Opening.SESSION,
        left_out: Mapping[str, int] | None = None,
        is_copy: bool = False,
    ) -> None:
        """Add what a row says behind its parent. With a call, its first reply is one."""
        is_copy = is_copy or not self._known.adds(row)
        if not is_copy:
            self._left_out.update(left_out or {})
        self.said[row], above = messages, self._ends.get(parent)
        for at, message in enumerate(messages):
            name, is_reply = f"{row}/{at}", message["role"] == "assistant"
            self._nodes[name] = LogNode(message, record, above, is_reply, opening, call if is_reply else None, is_copy)
            above, call = name, None if is_reply else call
        self._ends[row] = above

    def compact(self, row: str, messages: Sequence[dict[str, Any]], record: Record) -> None:
        """Let the rows below this one see these messages in place of the history."""
        self.add(row, None, messages, record, opening=Opening.COMPACTION, is_copy=True)
        self.said[row] = ()

    def bodies(self, user: Any) -> Iterator[Record]:
        """The requests of the log as bodies of the chat API, without the system prompt and the tools."""
        return bodies(self._nodes, "messages", self._left_out, user=str(user))


def reply(content: str, reasoning: str = "", calls: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """A message of the assistant."""
    said = {"reasoning_content": reasoning or None, "tool_calls": [*calls] or None}
    return {"role": "assistant", "content": content, **{key: value for key, value in said.items() if value}}


def function_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": str(call_id), **as_tool({"name": str(name), "arguments": object_of(arguments)})}


def result(call_id: Any, name: Any, content: str) -> dict[str, Any]:
    """A message with the result of a call."""
    return {"role": "tool", "tool_call_id": str(call_id), "name": str(name), "content": content}


def call_of(reply_id: str, time: Any, model: Any, usage: Any = None, prompt: str = "", cached: str = "") -> Call:
    """The call of a reply. `prompt` names the counts in `usage` whose sum is the length of the prompt; 0: unknown."""
    prompt_tokens = sum(count_in(usage, name) for name in prompt.split())
    cached_tokens = count_in(usage, cached) if prompt_tokens else 0
    return Call(reply_id, str(time), str(model or ""), None, prompt_tokens or None, cached_tokens)


def count_in(value: Any, name: str) -> int:
    """A count at a path of keys; 0: there is none."""
    count = found_in(value, name)[1]
    return count if isinstance(count, int) and count > 0 else 0
