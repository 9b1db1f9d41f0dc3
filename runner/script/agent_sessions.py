"""Sessions of coding agents: from the messages of a log to the requests that the agent made.

The files `*_sessions.py` beside this one read the logs of one kind of agent each, and make a tree of `LogNode`s. Each
path of the tree that ends with a reply becomes a body of the provider's API. Where the agent does not go on from the
request before, the `Call` has the `Opening`:

    user, reply, user, reply | summary, kept messages, user, reply        compaction
                 user, reply | user', reply'                              the user went back and asked otherwise

Invariants:

  AS1  A reply with a message in front of it is one call. Text that the tool wrote in place of a reply is no call.
  AS2  A path ends with a reply. It has the calls that no earlier path has, and None for the other replies.
  AS3  Parts that are left out are counted once, also if their message is on several paths or copied to another file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.files import Record
from runner.script.conversation import Call, Opening, paths, value_at


@dataclass
class Known:
    """What earlier files have. Agents copy a session into a new file when they continue it.

    `rows` are names of messages; `older` has, for a forked session, the sessions that it continues.
    """

    rows: set[str] = field(default_factory=set)
    older: dict[str, set[str]] = field(default_factory=dict)

    def adds(self, row: str) -> bool:
        """Note a row. Returns whether it is new."""
        is_new = row not in self.rows
        self.rows.add(row)
        return is_new


@dataclass
class LogNode:
    """A message or an item of a log, and the name of the node above it. A reply may have a call.

    `opening`: why a conversation begins at this node, if one does. `is_copy`: an earlier file or node has it, too.
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


def call_of(reply_id: str, time: Any, model: Any, usage: Any = None, prompt: str = "", cached: str = "") -> Call:
    """The call of a reply. `prompt` names the counts in `usage` whose sum is the length of the prompt; 0: unknown."""
    prompt_tokens = sum(count_in(usage, name) for name in prompt.split())
    cached_tokens = count_in(usage, cached) if prompt_tokens else 0
    return Call(reply_id, str(time), str(model or ""), None, prompt_tokens or None, cached_tokens)


def count_in(value: Any, name: str) -> int:
    """A count at a path of keys; 0: there is none."""
    count = value_at(value, name)
    return count if isinstance(count, int) and count > 0 else 0
