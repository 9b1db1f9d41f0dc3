"""Breaks: where the prefix of recorded conversations stops being reusable, and the report of `radixcache explain`.

Each request is explained, then run through a cache of sizes, without a forward pass: what a request can resume depends
only on the tokens, the kinds of layers and the budget.

A token is *lost* if it must be evaluated although an earlier request had it at the same place behind the same messages,
or behind a short span that differs (a date, an id), or behind another part of the prompt that differs: tools in
another order, an argument of the template. Other evaluated tokens are new. Lost tokens are counted by the reason that
`explain` gives, and by the part of the prompt in which the prefix breaks:

    message     the message differs from the stored one: a date in the system prompt, an edited question
    part        another part differs: the list of tools, a tool's description, an argument of the template
    template    the messages are the same, but the template renders them differently: it leaves out earlier reasoning
    memory      the messages are the same, but the cache lacks a checkpoint or the tokens
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from radixcache import Explanation, Gap, Hint, PrefixCache, Reason
from radixcache.chat import message_ends
from radixcache.chat_parts import Change, Chat, ChatLog
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.observe.hints import ANCHOR, MIN_BEHIND, MIN_BEHIND_SPANS, parting, ranges_in
from radixcache.sized_cache import sized_cache
from runner.models.load import ModelOutline
from runner.script.conversation import Conversation
from runner.script.schedule import ScheduledRequest, beginnings
from runner.script.script import AWAITED_REPLY, RenderedRequest, Script
from runner.text import plural, shortened

OPENING = "the opening of the reply"  # role of the text behind the last message
BEFORE_CHARS, AFTER_CHARS = 48, 60  # characters of text shown before a divergence, and after it of either prompt
NAMED_MESSAGES, SHOWN_HINTS = 4, 3  # messages named by their index, and varying spans shown
#: Reasons for which a stored token is lost.
MEMORY_REASONS = {
    Reason.EVICTED: "evicted before a later request needed it",
    Reason.NO_CHECKPOINT: "stored, but the model's layers have no checkpoint there",
    Reason.QUARANTINED: "quarantined",
    Reason.LIVE_ELSEWHERE: "stored, but only in the live buffers of another session",
    Reason.OFF_GRID: "stored, but not prefilled in whole chunks",
}
REASONS = {
    Reason.NEVER_STORED: "not stored with this text",
    Reason.DIVERGED: "differs from the stored text, and the text after it is the same",
    **MEMORY_REASONS,
}


@dataclass(eq=False)
class Break:
    """One kind of break, over all requests."""

    reason: Reason
    piece: str  # "message", "part", "template" or "memory", see above
    role: str  # of the message; the name of another part
    change: Change | None = None  # what differs, if the piece is "part", or the message was moved
    lost_tokens: int = 0
    cost: float = 0.0
    requests: int = 0
    messages: dict[int, int] = field(default_factory=dict)  # by index: how many requests broke there first
    example: Gap | None = None  # the gap with most lost tokens; the fields below say where it was
    conversation_id: str = ""
    turn: int = 0
    example_lost_tokens: int = 0


@dataclass
class VaryingSpan:
    """The hint that most requests confirmed, and its cost over all requests."""

    hint: Hint
    requests: int = 0
    lost_tokens: int = 0


@dataclass
class BreakReport:
    """How many prompt tokens were resumed and lost, and why; the break with most lost tokens first."""

    requests: int = 0
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    lost_tokens: int = 0
    cost_unit: str = "tokens"
    breaks: list[Break] = field(default_factory=list)
    hints: list[VaryingSpan] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        """Evaluated, and not lost."""
        return self.prompt_tokens - self.resumed_tokens - self.lost_tokens


def with_replies(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Give conversations without recorded replies short ones: without them, later prompts would break there."""
    reply = {"role": "assistant", "content": AWAITED_REPLY}

    def answered(conversation: Conversation) -> Conversation:
        pairs = ((message, reply) if message["role"] == "user" else (message,) for message in conversation.messages)
        messages = tuple(chain.from_iterable(pairs))
        return replace(conversation, messages=messages[:-1], replies_recorded=True)

    return [each if each.replies_recorded else answered(each) for each in conversations]


def find_breaks(
    outline: ModelOutline,
    layout: SizedLayout,
    requests: Sequence[ScheduledRequest],
    *,
    budget_bytes: int,
    policy: str = "lru",
    skip_bad: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[BreakReport, int]:
    """Run the requests in order; returns the report and how many were skipped. ScriptError: one cannot be rendered."""
    script = Script(outline, requests, max_tokens=1, recorded=True, skip_bad=skip_bad)
    cache = sized_cache(layout, budget_bytes=budget_bytes, policy=policy, tokenizer=outline.tokenizer)
    search = _Search(outline.tokenizer, cache)
    for index, request in enumerate(script.requests):
        search.add(request, script[index])
        if on_progress is not None:
            on_progress(index + 1)
    report = search.report
    report.breaks = sorted(search.breaks.values(), key=lambda each: -each.lost_tokens)
    report.hints.sort(key=lambda each: -each.lost_tokens)
    return report, script.skipped_requests


class _Search:
    def __init__(self, tokenizer: Any, cache: PrefixCache) -> None:
        self.report = BreakReport()
        self._tokenizer, self._cache, self._model = tokenizer, cache, SizedModel()
        self.breaks: dict[tuple[Any, ...], Break] = {}
        self._seen: set[bytes] = set()
        self._chats = ChatLog()

    def add(self, request: ScheduledRequest, rendered: RenderedRequest) -> None:
        tokens = rendered.prompt.tokens
        found = self._cache.explain(tokens)
        self._count(request, tokens, found)
        with self._cache.begin(tokens, marks=rendered.prompt.marks, reserve=0) as session:
            session.prefill(self._model)
            session.step(self._model, tokens[-1:])
            if len(rendered.reply):
                session.step(self._model, rendered.reply)
        chat = _chat(request)
        reply = () if request.recorded_reply is None else (request.recorded_reply,)
        self._seen.update(_digests(chat, (*request.messages, *reply)))
        self._chats.add(tokens.astype(np.int64), chat)

    def _count(self, request: ScheduledRequest, tokens: Any, found: Explanation) -> None:
        report = self.report
        report.requests += 1
        report.prompt_tokens += found.prompt_tokens
        report.resumed_tokens += found.resumable_tokens
        report.cost_unit = found.cost_unit
        chat = _chat(request)
        _, opening, ends = message_ends(self._tokenizer, request.messages, request.tools, **request.arguments)
        # The first messages that an earlier request had, its reply included.
        known = sum(1 for _ in takewhile(self._seen.__contains__, _digests(chat, request.messages)))
        known_end = max(ends[:known], default=0)
        keys, change = tokens.astype(np.int64), None
        has_system = request.messages[0]["role"] == "system"
        borders = [0 if has_system else opening, *ends]
        ranges = [(0, known_end), self._realigned(keys, borders)]
        fork = found.fork
        if fork and (parted := self._chats.first_change(self._tokenizer, keys, chat, fork.start)):
            change, stored = parted
            ranges += ranges_in(keys, stored, fork.start) if change.keeps_rest else []
        broken: set[Break] = set()
        for gap in found.gaps:
            # State that is or was stored has been evaluated before, whatever message it is in.
            is_memory = gap.reason in MEMORY_REASONS
            lost = gap.tokens if is_memory else _covered(gap.start, gap.end, ranges)
            if gap.reason == Reason.LAST_TOKEN or lost == 0:
                continue
            named = change if gap is fork else None
            index = next((k for k, end in enumerate(ends) if end > gap.start), len(ends))
            index = index if named is None or named.message is None else named.message
            role = request.messages[index]["role"] if index < len(ends) else OPENING
            is_same = gap.start < known_end or (gap.start < opening and not has_system)
            piece = "memory" if is_memory else "template" if is_same and named is None else "message"
            if named is not None and named.message is None:
                role, piece = named.part, "part"
            each = self._note(request, gap, lost, role, piece, named if named and named.keeps_rest else None)
            if each not in broken:
                broken.add(each)
                each.requests += 1
                each.messages[index] = each.messages.get(index, 0) + 1
        self._note_hints(found, borders)

    def _realigned(self, keys: Any, borders: Sequence[int]) -> tuple[int, int]:
        """The longest range that follows a short span by which this prompt differs from an earlier one."""
        longest = (0, 0)
        for prompt in self._chats.prompts():
            each = parting(keys, prompt)
            if each is None or each.behind < max(MIN_BEHIND, MIN_BEHIND_SPANS * (each.end - each.start)):
                continue
            if each.behind > longest[1] - longest[0] and _goes_on(each.start, each.end, borders):
                longest = (each.end, each.end + each.behind)
        return longest

    def _note(
        self, request: ScheduledRequest, gap: Gap, lost: int, role: str, piece: str, change: Change | None
    ) -> Break:
        # Messages that were moved in one way make one break, whatever their indices.
        key = (gap.reason, piece, role, change and change.detail)
        each = self.breaks.setdefault(key, Break(gap.reason, piece, role, change))
        each.lost_tokens += lost
        each.cost += gap.cost * lost / gap.tokens
        self.report.lost_tokens += lost
        if lost > each.example_lost_tokens:
            each.example, each.example_lost_tokens = gap, lost
            each.conversation_id, each.turn = request.conversation_id, request.turn
        return each

    def _note_hints(self, found: Explanation, borders: Sequence[int]) -> None:
        for hint in found.hints:
            if not _goes_on(hint.start, hint.end, borders):
                continue
            lost = _covered(hint.end, hint.end + hint.tokens, [(found.resumable_tokens, found.prompt_tokens)])
            spans = ((each, each.hint) for each in self.report.hints)
            known = next((each for each, old in spans if old.start <= hint.end and hint.start <= old.end), None)
            if known is None:
                known = VaryingSpan(hint)
                self.report.hints.append(known)
            elif hint.values >= known.hint.values:
                known.hint = hint
            known.requests += 1
            known.lost_tokens += lost


def _chat(request: ScheduledRequest) -> Chat:
    return Chat(request.messages, request.tools, request.arguments)


def _digests(chat: Chat, messages: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Digests of `messages[:1]`, `messages[:2]`, ... together with the tools and arguments of a chat."""
    return islice(beginnings(messages, json.dumps([chat.tools, chat.arguments]).encode()), 1, None)


def _goes_on(start: int, end: int, borders: Sequence[int]) -> bool:
    """Whether the message in which a span begins goes on for a while behind it; a question that differs does not."""
    return next((border for border in borders if border > start), 0) - end >= ANCHOR


def _covered(start: int, end: int, ranges: Sequence[tuple[int, int]]) -> int:
    """How many of [start, end) lie in at least one range."""
    count, reached = 0, start
    for low, high in sorted(ranges):
        low, high = max(low, reached), min(high, end)
        if high > low:
            count, reached = count + high - low, high
    return count


def breaks_text(report: BreakReport, *, top: int = 10) -> str:
    """The report for people: tokens resumed and lost, then each break with its place, reason and text."""
    total = max(1, report.prompt_tokens)
    lines = [
        f"{plural(report.requests, 'request')}, {report.prompt_tokens:,} prompt tokens: "
        f"{report.resumed_tokens / total:.1%} resumed, {report.new_tokens / total:.1%} new, "
        f"{report.lost_tokens / total:.1%} lost ({report.lost_tokens:,} tokens)."
    ]
    if report.breaks:
        lines += ["", f"{'tokens lost':>11}  {'of prompts':>10}  {'requests':>8}  where, and why"]
    else:
        lines.append("Nothing was lost: everything that could be reused was reused.")
    for each in report.breaks[:top]:
        lines += _break_lines(each, total)
    if rest := report.breaks[top:]:
        lost = sum(each.lost_tokens for each in rest)
        lines.append(f"{lost:>11,}  {lost / total:>10.1%}  {'':>8}  {len(rest)} more breaks; see --top")
    for span in report.hints[:SHOWN_HINTS]:
        requests = plural(span.requests, "request")
        lines += ["", f"hint, in {requests}, {span.lost_tokens:,} tokens lost: {span.hint}"]
    return "\n".join(lines)


def _break_lines(each: Break, total: int) -> list[str]:
    head = f"{each.lost_tokens:>11,}  {each.lost_tokens / total:>10.1%}  {each.requests:>8,}"
    lines = [f"{head}  {_where(each)}: {_why(each)}"]
    if each.change is not None:
        lines.append(f"{' ' * 6}{each.change.hint}")
    gap, margin = each.example, " " * 6
    assert gap is not None, each
    lines.append(f"{margin}most in conversation {each.conversation_id}, turn {each.turn}, token {gap.start:,}:")
    if gap.reason != Reason.DIVERGED or gap.before_text is None:
        return [*lines, f"{margin}  {shortened(str(gap), 100)}"]
    return [
        *lines,
        f"{margin}  after   {gap.before_text[-BEFORE_CHARS:]!r}",
        f"{margin}  stored  {(gap.stored_text or '')[:AFTER_CHARS]!r}",
        f"{margin}  asked   {(gap.asked_text or '')[:AFTER_CHARS]!r}",
    ]


def _where(each: Break) -> str:
    if each.role == OPENING or each.piece == "part":
        return each.role
    often = sorted(each.messages.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(str(index) for index, _ in often[:NAMED_MESSAGES])
    more = f" and {len(often) - NAMED_MESSAGES} more" if len(often) > NAMED_MESSAGES else ""
    noun = "messages" if len(often) > 1 else "message"
    beyond = " and later" if each.piece == "memory" else ""
    return f"{each.role} {noun} {named}{more}{beyond}"


def _why(each: Break) -> str:
    if each.change is not None:
        return each.change.detail
    if each.piece == "template" and each.reason == Reason.DIVERGED:
        return "the messages are the same, but the template renders them differently"
    return REASONS[each.reason]
