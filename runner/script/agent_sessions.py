"""Sessions of coding agents: from the log that an agent's tool leaves to the requests that it made.

    Claude Code   ~/.claude/projects/FOLDER/SESSION.jsonl: records with `uuid` and `parentUuid`, a tree
    Codex         ~/.codex/sessions/YEAR/MONTH/DAY/rollout-*.jsonl: `session_meta`, then items of the Responses API; in
                  old ones the same without an envelope, and only the session has a time

A log becomes a tree of messages, and each path of the tree that ends with a reply a body of the provider's API. Where
the agent does not go on from the request before, the `Call` has the `Opening`:

    user, reply, user, reply | summary, user, reply        compaction
                 user, reply | user', reply'               the user went back and asked otherwise

Invariants:

  AS1  A reply with a message in front of it is one call; what the tool itself wrote in a reply's place is none.
  AS2  A path has the calls that no path before it has, and `None` in the place of others; it ends with a reply.
  AS3  The results of all calls of a reply stand behind the reply, in the order of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.files import Record
from runner.script.conversation import Call, Opening, as_parts, dicts_in, found_in, object_of, paths
from runner.script.response_items import ITEM_KINDS

OLD_META = {"id", "timestamp", "instructions", "git"}  # the keys of a session of Codex in 2025
SYNTHETIC = "<synthetic>"  # the model of replies that Claude Code wrote itself


@dataclass
class _Node:
    """A message or an item of a log, and the name of the one above it; of a reply also its call.

    `opening`: why a conversation begins here, if one does. `kept`: what a compaction puts behind this message.
    """

    turn: dict[str, Any]
    record: Record
    above: str | None
    is_reply: bool
    opening: Opening
    call: Call | None = None
    kept: Sequence[str] = ()


def _bodies(nodes: Mapping[str, _Node], turns: str, left_out: Counter[str], **about: Any) -> Iterator[Record]:
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
        shown = dict.fromkeys(each for name in path for each in (name, *nodes[name].kept))
        conversation_id = f"{first.default_id.rpartition('#')[0]}#{count}"
        body = {turns: [nodes[name].turn for name in shown], "calls": tuple(calls), **about}
        body |= {"id": conversation_id, "left_out": Counter() if count else left_out}
        yield first._replace(value=body)
        count += 1


def claude_code(records: Sequence[Record]) -> Iterator[Record]:
    """The requests of a log of Claude Code as bodies of Anthropic's API, without the system prompt and the tools."""
    nodes: dict[str, _Node] = {}
    above: dict[str | None, str | None] = {}  # of every record with a uuid, attachments included
    names: dict[str | None, str] = {}  # the node of a message, by the uuid of its record
    answers: dict[str, str] = {}  # the node of the results of a reply, by the ids of the reply's calls
    kept: dict[str, list[Any]] = {}
    replaced: dict[str, Any] = {}  # what the prompts had in place of long results, by the ids of calls
    left_out: Counter[str] = Counter()
    for record in records:
        value = record.value
        uuid, kind, message = value.get("uuid"), value.get("type"), object_of(value.get("message"))
        name, preserved = found_in(value, "compactMetadata/preservedMessages compactMetadata/preservedSegment")
        if isinstance(preserved, dict):
            uuids = preserved.get("uuids") or _segment(above, preserved.get("headUuid"), preserved.get("tailUuid"))
            kept[str(preserved.get("anchorUuid"))] = uuids if isinstance(uuids, list) else []
        for each in dicts_in(value.get("replacements")):
            replaced[str(each.get("toolUseId"))] = each.get("replacement")
        cleared = found_in(value, "microcompactMetadata/compactedToolIds")[1]
        left_out["cleared tool result"] += len(cleared) if isinstance(cleared, list) else 0
        if not isinstance(uuid, str) or uuid in above:
            continue
        is_summary, parent, name = bool(value.get("isCompactSummary")), value.get("parentUuid"), uuid
        above[uuid] = parent if isinstance(parent, str) and not is_summary else None
        if kind == "attachment":
            left_out[f"attachment {found_in(value, 'attachment/type')[1] or ''}".strip()] += 1
        if kind not in ("user", "assistant") or not message or value.get("isApiErrorMessage"):
            continue
        blocks = dicts_in(as_parts(message.get("content")))
        if kind == "assistant":  # each block of a reply is a record
            name = f"reply {message.get('id') or uuid}"
            answers |= {
                str(block.get("id")): f"results of {name}" for block in blocks if block.get("type") == "tool_use"
            }
        else:
            name = next((answers[id] for block in blocks if (id := str(block.get("tool_use_id"))) in answers), uuid)
        names[uuid] = name
        opening = Opening.SUBAGENT if value.get("isSidechain") else Opening.SESSION
        opening = Opening.COMPACTION if is_summary else opening
        new = _Node({"role": kind, "content": []}, record, above[uuid], kind == "assistant", opening)
        node = nodes.setdefault(name, new)
        node.turn["content"] += blocks
        model = str(found_in(node.record.value, "message/model")[1] or "")
        if node.is_reply and model != SYNTHETIC:
            names_of_counts = ("cache_read_input_tokens", "input_tokens", "cache_creation_input_tokens")
            cached, *others = (_count(message, f"usage/{each}") for each in names_of_counts)
            prompt = cached + sum(others)
            node.call = _call(name, node.record, model)._replace(prompt_tokens=prompt or None, cached_tokens=cached)
    for node in nodes.values():
        node.turn["content"] = [
            {**block, "content": replaced[id]} if (id := str(block.get("tool_use_id"))) in replaced else block
            for block in node.turn["content"]
        ]
        seen = set[str | None]()
        while node.above in above and node.above not in names and node.above not in seen:
            seen.add(node.above)
            node.above = above[node.above]
        node.above = names.get(node.above)
    for anchor in names.keys() & kept.keys():
        uuids = (uuid for uuid in kept[anchor or ""] if isinstance(uuid, str) and uuid in names)
        nodes[names[anchor]].kept = [names[uuid] for uuid in uuids]
    user = str(records[0].value.get("sessionId") or records[0].default_id)
    yield from _bodies(nodes, "messages", left_out, user=user)


def _segment(above: Mapping[str | None, str | None], head: Any, tail: Any) -> list[str]:
    """The messages from `head` to `tail`, each of which stands above the next."""
    found: dict[str, None] = {}
    while isinstance(tail, str) and tail in above and tail not in found and head not in found:
        found[tail] = None
        tail = above[tail]
    return [*reversed(found)]


def codex(records: Sequence[Record]) -> Iterator[Record]:
    """The requests of a log of Codex as bodies of the Responses API, without the tools."""
    heads = (each.value.get("payload") for each in records if each.value.get("type") == "session_meta")
    meta = object_of(next(heads, None))
    opening = Opening.SUBAGENT if isinstance(meta.get("source"), dict) else Opening.SESSION
    nodes: dict[str, _Node] = {}
    last: str | None = None
    starts: list[str | None] = [None]  # the last items that are there for good, and in front of each turn
    asked: _Node | None = None
    model = ""
    left_out: Counter[str] = Counter()
    for record in records:
        kind, payload = record.value.get("type"), object_of(record.value.get("payload"))
        event = payload.get("type") if kind == "event_msg" else None
        items: list[Any] = []
        if kind == "turn_context":
            model = str(payload.get("model", ""))
            starts.append(last)
        # What writes a summary is a request, too; but the log has no prompt of it.
        elif kind == "response_item" and not found_in(record.value, "metadata/compaction_output")[1]:
            items = [payload]
        elif kind == "compacted":
            summary = [{"type": "message", "role": "user", "content": str(payload.get("message", ""))}]
            items = replaced if isinstance(replaced := payload.get("replacement_history"), list) else summary
            last, opening, asked = None, Opening.COMPACTION, None
        elif event == "thread_rolled_back" and (turns := min(_count(payload, "num_turns"), len(starts))):
            last, opening, asked = starts[-turns], Opening.EDIT, None
            del starts[max(1, len(starts) - turns) :]
        elif event == "token_count" and asked is not None and asked.call and asked.call.prompt_tokens is None:
            prompt = _count(payload, "info/last_token_usage/input_tokens")
            cached = _count(payload, "info/last_token_usage/cached_input_tokens")
            asked.call = asked.call._replace(prompt_tokens=prompt or None, cached_tokens=cached if prompt else 0)
        for item in (item for item in items if isinstance(item, dict)):
            if (item_kind := str(item.get("type", "message"))) not in ITEM_KINDS:
                left_out[item_kind] += 1
                asked = None if _is_of_reply(item) else asked
                continue
            name, before = str(len(nodes)), nodes.get(last or "")
            node = nodes[name] = _Node(item, record, last, _is_of_reply(item), opening)
            if kind == "response_item" and node.is_reply and not (before and before.is_reply):
                asked = node
                ids = filter(None, map(item.get, ("id", "call_id", "encrypted_content")))
                node.call = _call(str(next(ids, record.where)), record, model)
            last = name
        if kind == "compacted":
            starts = [last]
    instructions = found_in(meta, "base_instructions/text")[1]
    about = {"instructions": instructions} if isinstance(instructions, str) and instructions else {}
    about["user"] = str(meta.get("id") or records[0].default_id)
    yield from _bodies(nodes, "input", left_out, **about)


def old_codex(records: Sequence[Record]) -> Iterator[Record]:
    """As `codex`, for a log of 2025: a record without a type is the session, and those with a type are items."""
    metas = (each.value for each in records if {"id", "timestamp"} <= each.value.keys() <= OLD_META)
    meta: dict[str, Any] = next(metas, {})
    head = records[0]._replace(value={"type": "session_meta", "payload": {"id": meta.get("id")}})
    about = {"type": "response_item", "timestamp": meta.get("timestamp")}
    wrapped = (each._replace(value={**about, "payload": each.value}) for each in records if "type" in each.value)
    yield from codex([head, *wrapped])


def _call(reply_id: str, record: Record, model: str) -> Call:
    return Call(reply_id, str(record.value.get("timestamp", "")), model)


def _is_of_reply(item: dict[str, Any]) -> bool:
    kind = str(item.get("type"))
    return item.get("role") == "assistant" if kind == "message" else kind == "reasoning" or kind.endswith("_call")


def _count(value: Any, name: str) -> int:
    count = found_in(value, name)[1]
    return count if isinstance(count, int) and count > 0 else 0
