"""Sessions of Codex: ~/.codex/sessions/YEAR/MONTH/DAY/rollout-*.jsonl.

A log has `session_meta`, then items of the Responses API in the order of the history, and events. Old logs have items
without an envelope, and only the session has a time. Invariants:

  CX1  A rollback of N turns goes back to what stood before the last N questions of the user. Records of turns are no
       questions, and neither is what Codex tells the model about folders, rules and skills.
  CX2  The log of a fork begins with a copy of the history. A reply of the copy is no call, with an id or without.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from runner.files import Record
from runner.script.agent_sessions import Known, LogNode, bodies, call_of, count_in
from runner.script.conversation import Opening, as_parts, dicts_in, object_of, value_at
from runner.script.response_items import ITEM_KINDS

OLD_META = {"id", "timestamp", "instructions", "git"}  # the keys of a session of Codex in 2025
#: Beginnings of messages with the role of the user that Codex writes itself.
CONTEXT = (
    "<environment_context>", "<user_instructions>", "# agents.md instructions", "<skill", "<user_shell_command>",
    "<turn_aborted>", "<subagent_notification>", "<hook_prompt",
)  # fmt: skip


def codex(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of a log as bodies of the Responses API, without the tools."""
    log = _Log(records, known)
    for record in records:
        log.add(record)
    instructions = value_at(log.meta, "base_instructions/text")
    about = {"instructions": instructions} if isinstance(instructions, str) and instructions else {}
    about["user"] = str(log.meta.get("id") or records[0].default_id)
    yield from bodies(log.nodes, "input", log.left_out, **about)


def old_codex(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """As `codex`, for a log of 2025: a record without a type is the session, and those with a type are items."""
    metas = (each.value for each in records if {"id", "timestamp"} <= each.value.keys() <= OLD_META)
    meta: dict[str, Any] = next(metas, {})
    head = records[0]._replace(value={"type": "session_meta", "payload": {"id": meta.get("id")}})
    about = {"type": "response_item", "timestamp": meta.get("timestamp")}
    wrapped = (each._replace(value={**about, "payload": each.value}) for each in records if "type" in each.value)
    yield from codex([head, *wrapped], known)


class _Log:
    def __init__(self, records: Sequence[Record], known: Known) -> None:
        metas = [object_of(each.value.get("payload")) for each in records if each.value.get("type") == "session_meta"]
        self.meta = next(iter(metas), {})
        self.nodes: dict[str, LogNode] = {}
        self.left_out: Counter[str] = Counter()
        self._known = known
        self._opening = Opening.SUBAGENT if isinstance(self.meta.get("source"), dict) else Opening.SESSION
        self._end = _End(None, b"")
        self._questions: list[_End] = []  # what stood before each question that still stands
        self._asked: LogNode | None = None  # the reply that the next figures are of
        self._model = ""
        self._times: Counter[bytes] = Counter()  # how often each history was there
        self._session = str(self.meta.get("id") or records[0].where)
        # The head of a fork names the session before; or heads of older sessions follow.
        older = {str(id) for each in metas for key in ("id", "forked_from_id") if (id := each.get(key))}
        self._older = known.older[self._session] = older.union(*(known.older.get(each, ()) for each in older))

    def add(self, record: Record) -> None:
        kind, payload = record.value.get("type"), object_of(record.value.get("payload"))
        event = payload.get("type") if kind == "event_msg" else None
        if kind == "turn_context":
            self._model = str(payload.get("model", ""))
        # What writes a summary is a request, too; but the log has no prompt of it.
        elif kind == "response_item" and not value_at(record.value, "metadata/compaction_output"):
            self._append(payload, record, is_said=True)
        elif kind == "compacted":
            summary = [{"type": "message", "role": "user", "content": str(payload.get("message", ""))}]
            replaced = payload.get("replacement_history")
            self._end, self._opening, self._asked = self._end._replace(name=None), Opening.COMPACTION, None
            for item in dicts_in(replaced) if isinstance(replaced, list) else summary:
                self._append(item, record, is_said=False)
        elif event == "thread_rolled_back" and self._questions and (turns := count_in(payload, "num_turns")):
            self._end, self._opening, self._asked = self._questions[-turns:][0], Opening.EDIT, None
            del self._questions[-turns:]
        elif event == "token_count" and self._asked and self._asked.call and not self._asked.call.prompt_tokens:
            usage, call = value_at(payload, "info/last_token_usage"), self._asked.call
            figures = (usage, "input_tokens", "cached_input_tokens")
            self._asked.call = call_of(call.reply_id, call.time, call.model, *figures)

    def _append(self, item: dict[str, Any], record: Record, *, is_said: bool) -> None:
        """Add an item to the history; one that a compaction repeats is not said."""
        above, digest = self._end
        digest = hashlib.blake2b(digest + json.dumps(item, sort_keys=True).encode(), digest_size=16).digest()
        self._times[digest] += 1
        row = f"{digest.hex()} {self._times[digest]}"
        is_copy = any(f"{session} {row}" in self._known.rows for session in self._older)
        self._known.rows.add(f"{self._session} {row}")
        kind, before = str(item.get("type", "message")), self.nodes.get(above or "")
        is_reply = item.get("role") == "assistant" if item.get("type") == "message" else kind.endswith("_call")
        is_reply = is_reply or kind == "reasoning"
        if kind not in ITEM_KINDS:
            self.left_out[kind] += not is_copy
            self._asked = None if is_reply else self._asked
            return
        name = str(len(self.nodes))
        node = self.nodes[name] = LogNode(item, record, above, is_reply, self._opening, is_copy=is_copy or not is_said)
        if is_said and is_reply and not (before and before.is_reply):
            self._asked = node
            # Ids of calls are of one session only.
            place = f"{item['call_id']} {row}" if "call_id" in item else f"{record.where} {name}"
            reply_id = item.get("id") or item.get("encrypted_content") or place
            time = record.value.get("timestamp", "")
            node.call = None if is_copy else call_of(str(reply_id), time, self._model)
        if is_said and item.get("role") == "user" and not _is_context(item):
            self._questions.append(self._before_context())
        self._end = _End(name, digest)

    def _before_context(self) -> _End:
        """The end of the history without what Codex has told the model in front of the next question."""
        at = self._end
        while self._questions and at.name is not None and _is_context((node := self.nodes[at.name]).turn):
            at = _End(node.above, at.digest)
        return at


class _End(NamedTuple):
    """The last item of a history, and a digest of all."""

    name: str | None
    digest: bytes


def _is_context(item: dict[str, Any]) -> bool:
    """Whether Codex itself wrote a message that is no reply."""
    if item.get("role") == "developer":
        return True
    texts = [str(part.get("text", "")) for part in dicts_in(as_parts(item.get("content")))]
    return item.get("role") == "user" and any(text.lstrip().lower().startswith(CONTEXT) for text in texts)
