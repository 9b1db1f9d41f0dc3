"""Sessions of coding agents: from the log that an agent's tool leaves to the requests that it made.

    Claude Code   ~/.claude/projects/FOLDER/SESSION.jsonl: records with `uuid` and `parentUuid`, a tree
    Codex         ~/.codex/sessions/YEAR/MONTH/DAY/rollout-*.jsonl: `session_meta`, then items of the Responses API

A log becomes conversations in the form of the provider's API. In one conversation each request goes on from the request
before. Where the agent does otherwise, a new conversation begins, and its first `Call` has the `Opening`:

    user, reply, user, reply | summary, user, reply        compaction
                 user, reply | user', reply'               the user went back and asked otherwise

Invariants:

  AS1  A reply with a message in front of it is one call; what the tool itself wrote in a reply's place is none.
  AS2  The calls of a conversation belong to its last replies, and a conversation ends with a reply.
  AS3  The results of all calls of a reply stand behind the reply, in the order of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.script.conversation import Call, Opening, Origin, Record

SYNTHETIC = "<synthetic>"  # the model of replies that Claude Code wrote itself


@dataclass
class _Stretch:
    """A conversation in the making. `last`: the end of its last reply."""

    first: Record
    opening: Opening | None
    model: str
    last: Any = None
    calls: list[Call] = field(default_factory=list)

    def add(self, reply_id: str, record: Record, prompt_tokens: int | None = None, cached_tokens: int = 0) -> None:
        """Add the call that has this reply, which begins with the record."""
        opening, time = None if self.calls else self.opening, str(record.value.get("timestamp", ""))
        self.calls.append(Call(reply_id, time, self.model, opening, prompt_tokens, cached_tokens))


# Claude Code


@dataclass
class _Node:
    """A message: a reply, whose blocks are records of their own, the results of its calls, or a user's message."""

    role: str
    above: str | None  # uuid of the record in front of it
    records: list[Record] = field(default_factory=list)

    @property
    def model(self) -> str:
        return str(_object(self.records[0].value["message"]).get("model", ""))

    @property
    def turn(self) -> dict[str, Any]:
        blocks = [block for record in self.records for block in _blocks(record.value["message"])]
        return {"role": self.role, "content": blocks}


class _Tree:
    """The messages of a log of Claude Code, by the uuids of their records."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.nodes: dict[str, _Node] = {}
        self.left_out: Counter[str] = Counter()
        self._above: dict[str, Any] = {}  # of every record with a uuid, attachments included
        self._node_ids: dict[str, str] = {}
        self._kept: dict[str, list[Any]] = {}  # uuids of messages that a compaction puts behind its summary
        replies: dict[str, str] = {}  # the node of a reply, by the ids of its calls
        for record in records:
            value = record.value
            uuid, message = value.get("uuid"), _object(value.get("message"))
            kept = _object(_object(value.get("compactMetadata")).get("preservedMessages"))
            if isinstance(kept.get("uuids"), list):
                self._kept[str(kept.get("anchorUuid"))] = kept["uuids"]
            if not isinstance(uuid, str) or uuid in self._above:
                continue
            self._above[uuid] = None if value.get("isCompactSummary") else value.get("parentUuid")
            if value.get("type") == "attachment":
                self.left_out[f"attachment {_object(value.get('attachment')).get('type', '')}".strip()] += 1
            if value.get("type") not in ("user", "assistant") or not message or value.get("isApiErrorMessage"):
                continue
            blocks, role = _blocks(message), str(value["type"])
            node_id = uuid
            if role == "assistant":
                node_id = f"reply {message.get('id', uuid)}"
                replies |= {str(block.get("id")): node_id for block in blocks if block.get("type") == "tool_use"}
            elif answered := [reply for block in blocks if (reply := replies.get(str(block.get("tool_use_id"))))]:
                node_id = f"results of {answered[0]}"
            self._node_ids[uuid] = node_id
            self.nodes.setdefault(node_id, _Node(role, self._above[uuid])).records.append(record)

    def above(self, node: _Node) -> Iterator[tuple[str, _Node]]:
        """The messages in front of one, the nearest first."""
        uuid, seen = node.above, set[str]()
        while isinstance(uuid, str) and uuid in self._above and uuid not in seen:
            seen.add(uuid)
            node_id = self._node_ids.get(uuid)
            if node_id is None:
                uuid = self._above[uuid]
            else:
                yield node_id, self.nodes[node_id]
                uuid = self.nodes[node_id].above

    def turns(self, node: _Node) -> list[dict[str, Any]]:
        """The messages up to and with one, in order, each once."""
        path: dict[int, _Node] = {}
        for each in reversed([node, *(each for _, each in self.above(node))]):
            path.setdefault(id(each), each)
            for uuid in [uuid for record in each.records for uuid in self._kept.get(record.value["uuid"], ())]:
                if isinstance(uuid, str) and uuid in self._node_ids:
                    kept = self.nodes[self._node_ids[uuid]]
                    path.setdefault(id(kept), kept)
        return [each.turn for each in path.values()]


def claude_code(records: Sequence[Record]) -> Iterator[Record]:
    """The requests of a log of Claude Code as bodies of Anthropic's API, without the system prompt and the tools."""
    tree = _Tree(records)
    stretches: list[_Stretch] = []
    ending: dict[str, _Stretch] = {}  # by the node of the last reply
    asked: dict[str, str] = {}  # the model of every reply that a model wrote
    followed: set[str] = set()
    for node_id, node in tree.nodes.items():
        if node.role != "assistant" or node.model == SYNTHETIC:
            continue
        above = list(tree.above(node))
        if not above or above[0][1].role == "assistant":
            continue
        before = next((other for other, each in above if each.role == "assistant"), "")
        before_asked = next((other for other, _ in above if other in asked), "")
        stretch = ending.pop(before, None)
        if stretch is None or stretch.model != node.model:
            opening: Opening | None = _opening(above[-1][1].records[0].value)
            if before_asked:
                opening = Opening.EDIT if before_asked in followed else None
                opening = Opening.MODEL if asked[before_asked] != node.model else opening
            stretch = _Stretch(node.records[0], opening, node.model)
            stretches.append(stretch)
        usage = _object(_object(node.records[-1].value["message"]).get("usage"))
        cached = _count(usage.get("cache_read_input_tokens"))
        prompt = cached + _count(usage.get("input_tokens")) + _count(usage.get("cache_creation_input_tokens"))
        stretch.add(node_id, node.records[0], prompt or None, cached)
        stretch.last, ending[node_id], asked[node_id] = node, stretch, node.model
        followed.add(before_asked)
    for index, stretch in enumerate(stretches):
        value, origin = stretch.first
        left_out = Counter() if index else tree.left_out
        body = {"messages": tree.turns(stretch.last), "calls": tuple(stretch.calls), "left_out": left_out}
        user = str(value.get("sessionId") or origin.default_id)
        yield Record({"id": _id(origin, index), "user": user, **body}, origin)


def _opening(root: dict[str, Any]) -> Opening:
    """Why a conversation begins with this record."""
    if root.get("isCompactSummary"):
        return Opening.COMPACTION
    return Opening.SUBAGENT if root.get("isSidechain") else Opening.SESSION


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        return [block for block in content if isinstance(block, dict)]
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


# Codex


class _Thread:
    """The items of a log of Codex up to now, and the conversation in the making."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._model = ""
        self._items: list[dict[str, Any]] = []
        self._turn_starts = [0]  # the ends of items that are there for good, and in front of each turn
        self._stretch: _Stretch | None = None
        self._opening: Opening | None = Opening.SUBAGENT if isinstance(meta.get("source"), dict) else Opening.SESSION
        self._is_in_reply = False
        self.finished: list[tuple[_Stretch, list[dict[str, Any]]]] = []

    def add(self, record: Record) -> None:
        kind, payload = record.value.get("type"), _object(record.value.get("payload"))
        event = payload.get("type") if kind == "event_msg" else None
        if kind == "turn_context":
            self._model = str(payload.get("model", ""))
            self._turn_starts.append(len(self._items))
        # What writes a summary is a request, too; but the log has no prompt of it.
        elif kind == "response_item" and not _object(record.value.get("metadata")).get("compaction_output"):
            self._add_item(record, payload)
        elif kind == "compacted":
            self._begin(_replaced(payload), Opening.COMPACTION)
            self._turn_starts = [len(self._items)]
        elif event == "thread_rolled_back":
            turns = min(_count(payload.get("num_turns")), len(self._turn_starts))
            self._begin(self._items[: self._turn_starts[-turns]] if turns else self._items, Opening.EDIT)
            del self._turn_starts[max(1, len(self._turn_starts) - turns) :]
        elif event == "token_count":
            self._add_usage(_object(_object(payload.get("info")).get("last_token_usage")))

    def finish(self) -> None:
        if self._stretch is not None:
            self.finished.append((self._stretch, self._items[: self._stretch.last]))
        self._stretch, self._is_in_reply = None, False

    def _begin(self, items: list[dict[str, Any]], opening: Opening) -> None:
        self.finish()
        self._items, self._opening = items, opening

    def _add_item(self, record: Record, item: dict[str, Any]) -> None:
        begins = _is_of_reply(item) and not self._is_in_reply and bool(self._items)
        if begins and self._stretch is not None and self._stretch.model != self._model:
            self._begin(self._items, Opening.MODEL)
        if begins and self._stretch is None:
            self._stretch, self._opening = _Stretch(record, self._opening, self._model), None
        if begins and self._stretch is not None:
            self._stretch.add(str(item.get("id") or item.get("call_id") or record.origin.where), record)
        self._items.append(item)
        self._is_in_reply = _is_of_reply(item)
        if self._is_in_reply and self._stretch is not None:
            self._stretch.last = len(self._items)

    def _add_usage(self, usage: dict[str, Any]) -> None:
        prompt_tokens = _count(usage.get("input_tokens"))
        if self._stretch is not None and prompt_tokens and self._stretch.calls[-1].prompt_tokens is None:
            cached_tokens = _count(usage.get("cached_input_tokens"))
            call = self._stretch.calls[-1]._replace(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
            self._stretch.calls[-1] = call


def codex(records: Sequence[Record]) -> Iterator[Record]:
    """The requests of a log of Codex as bodies of the Responses API, without the tools."""
    heads = (each.value for each in records if each.value.get("type") == "session_meta")
    meta = _object(next(heads, {}).get("payload"))
    thread = _Thread(meta)
    for record in records:
        thread.add(record)
    thread.finish()
    about = {"user": str(meta.get("id") or records[0].origin.default_id)}
    instructions = _object(meta.get("base_instructions")).get("text")
    if isinstance(instructions, str) and instructions:
        about["instructions"] = instructions
    for index, (stretch, items) in enumerate(thread.finished):
        origin, body = stretch.first.origin, {"input": items, "calls": tuple(stretch.calls)}
        yield Record({"id": _id(origin, index), **about, "model": stretch.model, **body}, origin)


def _replaced(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a compaction; older logs have only its summary."""
    items = payload.get("replacement_history")
    if isinstance(items, list):
        return [item for item in items if isinstance(item, dict)]
    return [{"type": "message", "role": "user", "content": str(payload.get("message", ""))}]


def _is_of_reply(item: dict[str, Any]) -> bool:
    kind = str(item.get("type"))
    return item.get("role") == "assistant" if kind == "message" else kind == "reasoning" or kind.endswith("_call")


def _id(origin: Origin, index: int) -> str:
    """The name of a conversation: its file's, and its number in the file."""
    return f"{origin.default_id.rpartition('#')[0]}#{index}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
