"""Sessions of Claude Code: ~/.claude/projects/FOLDER/SESSION.jsonl.

A record has a `uuid` and a `parentUuid`: a tree. A reply is several records, one for each block, with one message id.
A compaction writes a boundary without a parent, and a summary. The boundary names the messages that it keeps. They are
not written again, and a later record goes on from the summary, or from the last kept record:

    u1, r1, u2, r2      before
    boundary, summary   keeps u2, r2: the request for u3 is [summary, u2, r2, u3], whether u3 hangs below summary or r2

So each kept record gets a copy behind the summary, and what comes later goes on from the copies. Invariants:

  CC1  The results of all calls of a reply stand behind the reply, in the order of the log.
  CC2  A call or a result is in a message once, however often its record was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.files import Record
from runner.script.agent_sessions import Known, LogNode, bodies, call_of
from runner.script.conversation import Opening, as_parts, dicts_in, object_of, value_at

CACHED = "cache_read_input_tokens"
SYNTHETIC = "<synthetic>"  # the model of replies that Claude Code wrote itself


def claude_code(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of a log as bodies of Anthropic's API, without the system prompt and the tools."""
    log = _Log(known, {uuid for each in records if isinstance(uuid := each.value.get("uuid"), str)})
    for record in records:
        log.add(record)
    user = str(records[0].value.get("sessionId") or records[0].default_id)
    yield from bodies(log.finished(), "messages", log.left_out, user=user, anthropic_version="")


class _Log:
    def __init__(self, known: Known, uuids: set[str]) -> None:
        self.left_out: Counter[str] = Counter()
        self._known, self._uuids = known, uuids
        self._nodes: dict[str, LogNode] = {}
        self._names: dict[str | None, str] = {}  # the node of a message, by the uuid of its record
        self._above: dict[str | None, str | None] = {}  # of every record with a uuid, attachments included
        self._answers: dict[str, str] = {}  # the node of the results of a reply, by the ids of the reply's calls
        self._replaced: dict[str, Any] = {}  # what the prompts had in place of long results, by the ids of calls
        # After a compaction: the copy of a record or of its copy, and back; the copy of a node; what stands last behind
        # a summary, and behind any.
        self._copies: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._node_copies: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        self._end: str | None = None
        self._last: str | None = None  # the last record of the main conversation
        self._placed: dict[str, str] = {}  # what a kept record that comes later hangs below

    def add(self, record: Record) -> None:
        value = record.value
        for each in dicts_in(value.get("replacements")):
            self._replaced[str(each.get("toolUseId"))] = each.get("replacement")
        uuid, kind, message = value.get("uuid"), value.get("type"), object_of(value.get("message"))
        if not isinstance(uuid, str) or uuid in self._above:
            return
        is_new = self._known.adds(uuid)
        cleared = value_at(value, "microcompactMetadata/compactedToolIds")
        if is_new and kind == "attachment":
            self.left_out[f"attachment {value_at(value, 'attachment/type') or ''}".strip()] += 1
        self.left_out["cleared tool result"] += len(cleared) if is_new and isinstance(cleared, list) else 0
        is_summary = bool(value.get("isCompactSummary"))
        self._above[uuid] = self._placed.get(uuid) or self._parent_of(value, is_summary)
        preserved = value_at(value, "compactMetadata/preservedMessages compactMetadata/preservedSegment")
        if isinstance(preserved, dict):
            self._keep(preserved, (preserved.get("tailUuid"), value.get("logicalParentUuid"), self._last))
        self._last = self._last if value.get("isSidechain") else uuid
        if kind not in ("user", "assistant") or not message or value.get("isApiErrorMessage"):
            return
        blocks = dicts_in(as_parts(message.get("content")))
        if kind == "assistant":
            name = f"reply {message.get('id') or uuid}"
            calls = (str(block.get("id")) for block in blocks if block.get("type") == "tool_use")
            self._answers |= dict.fromkeys(calls, f"results of {name}")
        else:
            results = (str(block.get("tool_use_id")) for block in blocks)
            name = next((self._answers[each] for each in results if each in self._answers), uuid)
        self._names[uuid] = name = self._latest(name)
        opening = Opening.SUBAGENT if value.get("isSidechain") else Opening.SESSION
        opening = Opening.COMPACTION if is_summary else opening
        turn = {"role": kind, "content": list[Any]()}
        new = LogNode(turn, record, self._above[uuid], kind == "assistant", opening, is_copy=not is_new)
        node = self._nodes.setdefault(name, new)
        node.turn["content"] += _new_blocks(node, blocks)
        model = str(value_at(node.record.value, "message/model") or "")
        if node.is_reply and model != SYNTHETIC and not name.startswith(_COPY):
            about = (node.record.value.get("timestamp", ""), model, message.get("usage"))
            node.call = call_of(name, *about, f"{CACHED} input_tokens cache_creation_input_tokens", CACHED)

    def finished(self) -> dict[str, LogNode]:
        """The nodes by their names, each with the node above it and with the results that the model saw."""
        for node in self._nodes.values():
            node.turn["content"] = [
                {**block, "content": self._replaced[call]}
                if (call := str(block.get("tool_use_id"))) in self._replaced
                else block
                for block in node.turn["content"]
            ]
            seen = set[str | None]()
            while node.above in self._above and node.above not in self._names and node.above not in seen:
                seen.add(node.above)
                node.above = self._above[node.above]
            node.above = self._names.get(node.above)
        return self._nodes

    def _parent_of(self, value: Mapping[str, Any], is_summary: bool) -> str | None:
        parent = value.get("parentUuid")
        if not isinstance(parent, str) or value.get("subtype") == "compact_boundary":
            return None
        if parent in self._behind or is_summary:  # a summary may stand behind the kept messages
            return self._behind.get(parent)
        if parent not in self._uuids and not value.get("isSidechain"):  # the record of a hook, which is in no log
            return self._end
        at: str | None = parent
        seen = set[str | None]()
        while at in self._above and at not in self._names and at not in self._copies and at not in seen:
            seen.add(at)
            at = self._above[at]
        return self._copies.get(at or "", parent)

    def _latest(self, name: str) -> str:
        """The last copy of a node, or the node."""
        while name in self._node_copies:
            name = self._node_copies[name]
        return name

    def _keep(self, preserved: Mapping[str, Any], tails: Iterable[Any]) -> None:
        """Put copies of what a compaction keeps behind its summary; the last one is the first of `tails` in the log."""
        anchor, kept = str(preserved.get("anchorUuid")), preserved.get("uuids")
        if not isinstance(kept, list):
            segments = (self._segment(preserved.get("headUuid"), tail) for tail in tails)
            kept = next(filter(None, segments), [])
        last, copies, node_copies = anchor, dict[str, str](), dict[str, str]()
        for uuid in (each for each in kept if isinstance(each, str) and each in self._uuids):
            stands = self._copies.get(uuid, uuid)
            if stands not in self._above:  # a copied session has the kept records behind the boundary
                self._placed[uuid], last = last, uuid
                continue
            copy = f"{_COPY}{uuid} behind {anchor}"
            copies[uuid] = copies[stands] = copy
            self._originals[copy] = uuid
            self._above[copy], last = last, copy
            if (name := self._names.get(stands)) is not None:
                name = self._latest(name)
                self._names[copy] = node_copies[name] = f"{_COPY}{name} behind {anchor}"
                moved = replace(self._nodes[name], above=self._above[copy], opening=Opening.COMPACTION)
                self._nodes.setdefault(self._names[copy], replace(moved, call=None, is_copy=True))
        self._copies |= copies
        self._node_copies |= node_copies
        self._end = last
        if last != anchor:
            self._behind[anchor] = last

    def _segment(self, head: Any, tail: Any) -> list[str]:
        """The records from `head` to `tail`, each of which stands above the next; none if they are not joined."""
        found: dict[str, None] = {}
        at = self._behind.get(str(tail)) or self._copies.get(str(tail), tail)
        while isinstance(at, str) and at in self._above and (uuid := self._originals.get(at, at)) not in found:
            found[uuid] = None
            if uuid == head:
                return [*reversed(found)]
            at = self._above[at]
        return []


_COPY = "copy of "


def _new_blocks(node: LogNode, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a record adds to a message: those of a record that is written again are in the message."""
    content = node.turn["content"]
    ids = {_id_of(each) for each in content}
    named = [*filter(None, map(_id_of, blocks))]
    if named and ids.issuperset(named):
        return []
    return [
        each
        for each in blocks
        if (call not in ids if (call := _id_of(each)) else not node.is_reply or each not in content)
    ]


def _id_of(block: Mapping[str, Any]) -> str:
    """The id of the call that a block is or answers; '': it is neither."""
    return str(block.get("id") or block.get("tool_use_id") or "")
