"""Sessions of opencode, as `opencode export` writes them: one document, with messages in their order.

A message has `info` and `parts`. A reply of the log has several steps, each of which is a request. A question with a
part `compaction` asks for a summary, which takes the place of the history; the messages from `tail_start_id` on stay
behind the summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from runner.files import Record
from runner.script.agent_sessions import Known, Tree, call_of, function_call, reply, result
from runner.script.conversation import Opening, dicts_in, found_in, object_of

SUMMARY_ASKED = "What did we do so far?"  # what stands in front of a summary
INTERRUPTED = "[Tool execution was interrupted]"


def opencode(records: Sequence[Record], known: Known) -> Iterator[Record]:
    """The requests of exported sessions as bodies of the chat API, without the system prompt and the tools."""
    tree = Tree(known)
    for record in records:
        is_child = found_in(record.value, "info/parentID")[1] is not None
        opening = Opening.SUBAGENT if is_child else Opening.SESSION
        rows: list[str] = []
        starts: dict[str, int] = {}  # where the rows of each message begin
        compaction: Mapping[str, Any] | None = None
        ms = 0.0  # a step without a time has that of the step before
        for message in dicts_in(record.value.get("messages")):
            info, parts = object_of(message.get("info")), dicts_in(message.get("parts"))
            name, parent = str(info.get("id") or f"{record.where} {len(rows)}"), rows[-1] if rows else None
            starts[name] = len(rows)
            asked = [each for each in parts if each.get("type") == "compaction"]
            if info.get("role") == "user" and asked:
                compaction = asked[0]
            elif info.get("role") == "user":
                left_out = Counter(str(each.get("type")) for each in parts if _is_media(each))
                said = [{"role": "user", "content": "".join(_texts(parts, "text"))}]
                tree.add(name, parent, said, record, opening=opening, left_out=left_out)
                rows.append(name)
            elif info.get("summary") is True and compaction is not None:
                # What writes a summary is a request, too; but the log has no prompt of it.
                tail = rows[starts.get(str(compaction.get("tail_start_id")), len(rows)) :]
                summary = [{"role": "user", "content": SUMMARY_ASKED}, reply("".join(_texts(parts, "text")))]
                tree.compact(name, [*summary, *(each for row in tail for each in tree.said[row])], record)
                compaction, rows = None, [*rows, name]
            elif not info.get("error"):
                for at, step in enumerate(_steps(parts)):
                    row = f"{name} {at}"
                    finish = next((each for each in step if each.get("type") == "step-finish"), {})
                    ms = max(ms, _ms([found_in(each, "time state/time")[1] for each in (*step, info)]))
                    time, tokens = datetime.fromtimestamp(ms / 1000, UTC).isoformat(), finish.get("tokens")
                    prompt = "input cache/write cache/read"
                    call = call_of(f"reply {row}", time, info.get("modelID"), tokens, prompt, "cache/read")
                    tree.add(row, rows[-1] if rows else None, _messages(step), record, call=call, opening=opening)
                    rows.append(row)
    yield from tree.bodies(found_in(records[0].value, "info/id")[1] or records[0].default_id)


def _steps(parts: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The parts of each step that said something."""
    steps: list[list[dict[str, Any]]] = [[]]
    for part in parts:
        if part.get("type") == "step-start":
            steps.append([])
        steps[-1].append(part)
    return [step for step in steps if any(each.get("type") in ("reasoning", "text", "tool") for each in step)]


def _messages(step: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reply, and the results of its calls."""
    calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for part in (each for each in step if each.get("type") == "tool"):
        call_id, name, state = part.get("callID"), part.get("tool"), object_of(part.get("state"))
        calls.append(function_call(call_id, name, state.get("input")))
        output = found_in(state, "output error")[1]
        results.append(result(call_id, name, output if isinstance(output, str) else INTERRUPTED))
    return [reply("".join(_texts(step, "text")), "".join(_texts(step, "reasoning")), calls), *results]


def _texts(parts: Sequence[dict[str, Any]], kind: str) -> Iterator[str]:
    for part in parts:
        if part.get("type") == kind and not part.get("ignored") and isinstance(text := part.get("text"), str):
            yield text


def _is_media(part: Mapping[str, Any]) -> bool:
    """Whether a part has no text; the texts of other files are parts of their own."""
    return part.get("type") == "file" and str(part.get("mime")).startswith(("image/", "application/pdf"))


def _ms(times: Sequence[Any]) -> float:
    """The first time that is there, in Unix milliseconds; 0: there is none."""
    found = (found_in(each, "start created")[1] for each in times)
    return next((float(each) for each in found if isinstance(each, int | float) and 0 < each < 1e14), 0.0)
