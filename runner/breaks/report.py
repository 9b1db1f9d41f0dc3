"""The report of `radixcache explain`, as text for people and as a document for programs."""

from dataclasses import asdict
from typing import Any

from radixcache import Reason
from runner.breaks.prefix_breaks import OPENING, Break, BreakReport, VaryingSpan
from runner.files.excerpt import shortened
from runner.files.units import plural

#: Characters of text shown in front of a divergence, and behind it on either side.
BEFORE_CHARS = 48
AFTER_CHARS = 60
#: Messages named by their index, and varying spans shown.
NAMED_MESSAGES = 4
SHOWN_HINTS = 3

REASONS = {
    Reason.NEVER_STORED: "not stored as the prompt has it",
    Reason.EVICTED: "evicted before it was asked for again",
    Reason.NO_CHECKPOINT: "stored, but the model's layers have no checkpoint there",
    Reason.QUARANTINED: "quarantined",
    Reason.LIVE_ELSEWHERE: "stored, but only in the live buffers of another session",
    Reason.OFF_GRID: "stored, but not made on the prefill grid",
}


def breaks_text(report: BreakReport, *, top: int = 10) -> str:
    """What was resumed and what was lost; then each break with where, how often, why and the text around it."""
    total = max(1, report.prompt_tokens)
    lines = [
        f"{plural(report.requests, 'request')}, {report.prompt_tokens:,} prompt tokens: "
        f"{report.resumed_tokens / total:.1%} resumed, {report.new_tokens / total:.1%} new, "
        f"{report.lost_tokens / total:.1%} lost ({report.lost_tokens:,} tokens)."
    ]
    if not report.breaks:
        lines.append("Nothing was lost: what could be reused was.")
    else:
        lines += ["", f"{'tokens lost':>11}  {'of prompts':>10}  {'requests':>8}  where, and why"]
        for each in report.breaks[:top]:
            lines += _break_lines(each, total)
        if len(report.breaks) > top:
            rest = sum(each.lost_tokens for each in report.breaks[top:])
            lines.append(f"{rest:>11,}  {rest / total:>10.1%}  {'':>8}  {len(report.breaks) - top} more; see --top")
    for span in report.hints[:SHOWN_HINTS]:
        lines += ["", _hint_line(span)]
    return "\n".join(lines)


def breaks_document(report: BreakReport) -> dict[str, Any]:
    """Everything, for JSON."""
    return {**asdict(report), "new_tokens": report.new_tokens}


def _break_lines(each: Break, total: int) -> list[str]:
    head = f"{each.lost_tokens:>11,}  {each.lost_tokens / total:>10.1%}  {each.requests:>8,}"
    lines = [f"{head}  {_where(each)}: {_why(each)}"]
    gap, margin = each.example, " " * 35
    if gap is None:
        return lines
    lines.append(f"{margin}most in conversation {each.conversation_id}, turn {each.turn}, token {gap.start:,}:")
    if gap.reason == Reason.DIVERGED and gap.before_text is not None:
        before = gap.before_text[-BEFORE_CHARS:]
        lines += [
            f"{margin}  behind  {before!r}",
            f"{margin}  stored  {(gap.stored_text or '')[:AFTER_CHARS]!r}",
            f"{margin}  asked   {(gap.asked_text or '')[:AFTER_CHARS]!r}",
        ]
    else:
        lines.append(f"{margin}  {shortened(str(gap), 100)}")
    return lines


def _where(each: Break) -> str:
    if each.role == OPENING:
        return OPENING
    often = sorted(each.messages.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(str(index) for index, _ in often[:NAMED_MESSAGES])
    more = f" and {len(often) - NAMED_MESSAGES} more" if len(often) > NAMED_MESSAGES else ""
    plural = "s" if len(often) > 1 else ""
    beyond = " and on" if each.piece == "memory" else ""
    return f"{each.role} message{plural} {named}{more}{beyond}"


def _why(each: Break) -> str:
    if each.reason != Reason.DIVERGED:
        return REASONS[each.reason]
    if each.piece == "template":
        return "the messages are the same, the template writes them otherwise"
    return "it differs from the stored one, and what follows is the same"


def _hint_line(span: VaryingSpan) -> str:
    return f"hint, in {plural(span.requests, 'request')}, {span.lost_tokens:,} tokens lost: {span.hint}"
