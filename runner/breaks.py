"""Breaks: where the prefix of recorded conversations stops being reusable, and the report of `radixcache explain`.

Each request is explained, then run through a cache that holds sizes instead of state. No forward pass is needed: what
a request can resume depends only on the tokens, the kinds of layers and the budget.

A token is *lost* if it must be evaluated although an earlier request had the same token. Before the token, the messages
are the same, or only a short span differs (a date, an id), or only another part of the prompt (the order of tools, an
argument of the template). All tokens that are evaluated after a compaction are lost, too. Other evaluated tokens are
*new*. Lost tokens are counted by the reason that `explain` gives, and by the part of the prompt where it breaks:

    message     the message differs from the stored one: a date in the system prompt, an edited question
    part        another part differs: the list of tools, a tool's description, an argument of the template; or an agent
                replaced the history, or switched to another model
    template    the messages are the same, but the template renders them differently: it leaves out earlier reasoning
    memory      the messages are the same, but the cache lacks a checkpoint or the tokens

Each model has a namespace of the cache: requests to different models share nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from radixcache import Explanation, Gap, Hint, PrefixCache, Reason
from radixcache.chat import RenderedChat, chat_tokens
from radixcache.chat_parts import Change, Chat, ChatLog
from radixcache.chat_template import ChatTemplate
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.observe.explain import AFTER_TOKENS, BEFORE_TOKENS
from radixcache.observe.hints import ANCHOR, MIN_BEHIND, MIN_BEHIND_SPANS, Parting, parting, ranges_in
from radixcache.sized_cache import sized_cache
from radixcache.tokens import token_text
from runner.models.load import ModelOutline
from runner.script.conversation import Conversation, Opening
from runner.script.schedule import ScheduledRequest, beginnings
from runner.script.script import AWAITED_REPLY, ScriptError, recorded_reply
from runner.text import plural, shortened

OPENING = "the opening of the reply"  # stands for the role, for text after the last message
BEFORE_CHARS, AFTER_CHARS = 48, 60  # characters shown before a divergence; after it, of each prompt
FOLLOWED_CHATS = 1024  # the requests of many conversations may alternate in a log
NAMED_MESSAGES, SHOWN_HINTS = 4, 3  # how many messages a line names by index; how many hints are shown
#: Reasons why a token is lost that is or was stored.
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
COMPACTED = Change(
    "the history",
    "a summary took its place (compaction)",
    "Compact seldom, and in one large step: all behind the system prompt is evaluated again.",
)
OTHER_MODEL = Change(
    "the model",
    "another model had evaluated it",
    "Stay with one model in a session: models share no state.",
)
NO_REASONING = Change(
    "the chat template",
    "it leaves out the reasoning of earlier turns",
    "Use an argument of the template that keeps reasoning, if it has one, or turn reasoning off.",
)
#: What to do about a break without a Change, by `Break.piece`.
PIECE_HINTS = {
    "message": "Put text that changes behind the text that does not.",
    "memory": "Use a larger budget; recurrent layers resume only at checkpoints.",
}
OPENINGS = {
    Opening.SESSION: "first requests of sessions",
    Opening.SUBAGENT: "first requests of subagents",
    Opening.EDIT: "the user went back and asked something else",
    Opening.MODEL: "another model went on",
    Opening.COMPACTION: "behind a compaction",
}
MIN_MISSED = 1024  # tokens; providers cache whole blocks, so fewer missed tokens are normal


@dataclass(eq=False)
class Break:
    """One kind of break, over all requests."""

    reason: Reason
    piece: str  # "message", "part", "template" or "memory"; see the top of this file
    role: str  # the role of the message, or the name of the part
    change: Change | None = None  # what differs, if the prompt after it is the same as before
    lost_tokens: int = 0
    cost: float = 0.0
    requests: int = 0
    messages: dict[int, int] = field(default_factory=dict)  # index of a message -> how many requests broke there
    example: Gap | None = None  # the gap with most lost tokens; the fields below say where it was
    conversation_id: str = ""
    turn: int = 0
    example_lost_tokens: int = 0


@dataclass
class VaryingSpan:
    """A span that varies between prompts: the hint with the most values, and what it cost over all requests."""

    hint: Hint
    requests: int = 0
    lost_tokens: int = 0


@dataclass
class OpeningRow:
    """Requests of agents that did not continue the request before, and how many of their tokens were new."""

    requests: int = 0
    new_tokens: int = 0


@dataclass
class BreakReport:
    """How many prompt tokens were resumed and lost, and why. `breaks` starts with the largest loss.

    Only logs of agents have `openings` and `reported_*`. The provider reported the figures in `reported_*`. A token is
    *missed* if the request before had it and the provider did not report it as cached.
    """

    requests: int = 0
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    lost_tokens: int = 0
    cost_unit: str = "tokens"
    breaks: list[Break] = field(default_factory=list)
    hints: list[VaryingSpan] = field(default_factory=list)
    openings: dict[Opening, OpeningRow] = field(default_factory=dict)
    reported_requests: int = 0
    reported_prompt_tokens: int = 0
    reported_cached_tokens: int = 0
    reported_missed_requests: int = 0
    reported_missed_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens that were evaluated and are not lost."""
        return self.prompt_tokens - self.resumed_tokens - self.lost_tokens


def with_replies(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Add short replies to conversations without recorded replies, because later prompts would break there."""
    reply = {"role": "assistant", "content": AWAITED_REPLY}

    def answered(conversation: Conversation) -> Conversation:
        pairs = ((message, reply) if message["role"] == "user" else (message,) for message in conversation.messages)
        messages = tuple(chain.from_iterable(pairs))
        return replace(conversation, messages=messages[:-1], replies_recorded=True)

    return [each if each.replies_recorded else answered(each) for each in conversations]


def unwritten_parts(tokenizer: Any, conversations: Sequence[Conversation]) -> list[str]:
    """The kinds of parts that the conversations have and the chat template never writes."""
    asked, plain = {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}
    tools = next((each.tools for each in conversations if each.tools), None)
    unwritten = ["tools"] if tools and _is_same_text(tokenizer, [asked], [asked], tools) else []
    for key, name in (("reasoning_content", "reasoning"), ("tool_calls", "tool calls")):
        messages = chain.from_iterable(each.messages for each in conversations)
        sample = next((message[key] for message in messages if message.get(key)), None)
        if sample and _is_same_text(tokenizer, [asked, {**plain, key: sample}], [asked, plain]):
            unwritten.append(name)
    return unwritten


def _is_same_text(tokenizer: Any, left: list[dict[str, Any]], right: list[dict[str, Any]], tools: Any = None) -> bool:
    """Whether the template renders both chats to the same tokens. Only the left chat has the tools."""
    try:
        return np.array_equal(chat_tokens(tokenizer, left, tools), chat_tokens(tokenizer, right))
    except ValueError:  # the template refuses one of them
        return False


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
    """Run the requests in order; return the report and how many were skipped. ScriptError: one cannot be rendered."""
    cache = sized_cache(layout, budget_bytes=budget_bytes, policy=policy, tokenizer=outline.tokenizer)
    search, skipped = _Search(outline.tokenizer, cache, has_marks=layout.has_points), 0
    for index, request in enumerate(requests):
        try:
            search.add(request)
        except ValueError as error:
            skipped += 1
            if not skip_bad or skipped == len(requests):
                raise ScriptError(f"{request.where}: {error}") from error
        if on_progress is not None:
            on_progress(index + 1)
    report = search.report
    report.breaks = sorted(search.breaks.values(), key=lambda each: -each.lost_tokens)
    report.hints.sort(key=lambda each: -each.lost_tokens)
    return report, skipped


class _Prompt:
    """A rendered request: its tokens, the keys of the tokens, and where each message ends."""

    def __init__(self, tokenizer: Any, request: ScheduledRequest) -> None:
        """ValueError: the template refuses the request."""
        self.request, self.model, self.messages = request, request.model, request.messages
        self.chat = Chat(request.messages, request.conversation.tools, request.conversation.arguments)
        is_reply = self.messages[-1]["role"] == "assistant"
        template = ChatTemplate(tokenizer, self.chat.tools, dict(self.chat.arguments))
        self.rendered = RenderedChat(template, self.messages, "message" if is_reply else "reply")
        self.tokens = self.rendered.tokens
        self.keys = self.tokens.astype(np.int64)
        self.count = len(self.messages)

    @cached_property
    def opening(self) -> int:
        """The end of the text before the first message; 0 if the first message is a system prompt."""
        return 0 if self.messages[0]["role"] == "system" else max(self.rendered.head_ends, default=0)

    def end(self, count: int) -> int:
        """The end of the first `count` messages. If it is not known, the nearest known end before it."""
        return next(filter(None, map(self.rendered.end, range(count, 0, -1))), 0)

    def lasting_end(self, count: int) -> int:
        """As `end`, but not after the offset where later turns change the tokens of the prompt."""
        return min(self.end(count), self._lasting)

    @cached_property
    def _lasting(self) -> int:
        is_asked = self.messages[-1]["role"] != "assistant"
        later = [{"role": "assistant", "content": "So."}] * is_asked + [{"role": "user", "content": "Why?"}]
        return self.rendered.shared_with([*self.messages, *later]) or len(self.tokens)

    def message_at(self, offset: int) -> int:
        """Index of the message at a token offset; the number of messages if the offset is after all of them."""
        return bisect_right(range(1, self.count + 1), offset, key=self.end)

    def goes_on(self, start: int, end: int) -> bool:
        """Whether the message goes on for ANCHOR tokens after a span. If not, the span is just another question."""
        border = self.opening if self.opening > start else self.end(min(self.message_at(start) + 1, self.count))
        return border - end >= ANCHOR


class _Search:
    def __init__(self, tokenizer: Any, cache: PrefixCache, *, has_marks: bool) -> None:
        self.report = BreakReport()
        self._tokenizer, self._cache, self._has_marks, self._model = tokenizer, cache, has_marks, SizedModel()
        self.breaks: dict[tuple[Any, ...], Break] = {}
        self._models: dict[bytes, set[str]] = {}  # digest of first messages -> the models that had them
        self._chats = ChatLog(FOLLOWED_CHATS)
        self._reported: dict[str, int] = {}  # the prompt tokens of the last request of each conversation

    def add(self, request: ScheduledRequest) -> None:
        """Explain a request, then serve it. ValueError: the template refuses it; then nothing was done."""
        prompt = _Prompt(self._tokenizer, request)
        tokens, reply = prompt.tokens, recorded_reply(self._tokenizer, request, prompt.tokens)
        explanation = self._cache.explain(tokens, prompt.model)
        new_tokens = self._count(prompt, explanation)
        self._note_hints(explanation, prompt)
        self._note_call(request, new_tokens)
        marks = prompt.rendered.marks() if self._has_marks else ()
        with self._cache.begin(tokens, namespace=prompt.model, marks=marks, reserve=0) as session:
            session.prefill(self._model)
            session.step(self._model, tokens[-1:])
            if len(reply):
                session.step(self._model, reply)
        replies = () if request.recorded_reply is None else (request.recorded_reply,)
        for digest in _digests(prompt.chat, (*prompt.messages, *replies)):
            self._models.setdefault(digest, set()).add(prompt.model)
        self._chats.add(prompt.keys, prompt.chat, prompt.model)

    def _count(self, prompt: _Prompt, explanation: Explanation) -> int:
        """Count what a request lost, by cause; return how many of its tokens are new."""
        report, fork = self.report, explanation.fork
        report.requests += 1
        report.prompt_tokens += explanation.prompt_tokens
        report.resumed_tokens += explanation.resumable_tokens
        report.cost_unit = explanation.cost_unit
        known_end, own_end = self._known_ends(prompt)
        again, other = self._realigned(prompt)
        ranges, change = self._ranges(prompt, fork)
        ranges += [(0, known_end), (again.end, again.end + again.behind)]
        broken: set[Break] = set()
        new_tokens = explanation.prompt_tokens - explanation.resumable_tokens
        for gap in explanation.gaps:
            # Tokens that are or were stored have been evaluated before, so the whole gap is lost.
            is_memory = gap.reason in MEMORY_REASONS
            lost = gap.tokens if is_memory else _covered(gap.start, gap.end, ranges)
            if gap.reason == Reason.LAST_TOKEN or lost == 0:
                continue
            new_tokens -= lost
            # Nothing after the fork can be resumed, so the fork is the cause of all gaps after it.
            is_behind = fork is not None and not is_memory and gap.start >= fork.start
            at = fork if fork is not None and is_behind else gap
            is_same = at.start < max(known_end, prompt.opening)
            if not is_memory and not is_same and again.end <= at.start < again.end + again.behind:
                at = self._parted(again, prompt.tokens, other)
            index, named = prompt.message_at(at.start), None
            if not is_memory and (is_behind or change is COMPACTED):
                named = change
            if not is_memory and named is None and own_end <= at.start < known_end:
                named = OTHER_MODEL
            elif not is_memory and named is None and is_same and self._leaves_out_reasoning(prompt, index):
                named = NO_REASONING
            index = index if named is None or named.message is None else named.message
            role = prompt.messages[index]["role"] if index < prompt.count else OPENING
            piece = "memory" if is_memory else "template" if is_same and named is None else "message"
            if named is not None and named.message is None:
                role, piece = named.part, "part"
            each = self._break_of(at.reason, piece, role, named if named and named.keeps_rest else None)
            each.lost_tokens += lost
            each.cost += gap.cost * lost / gap.tokens
            report.lost_tokens += lost
            if lost > each.example_lost_tokens:
                each.example, each.example_lost_tokens = at, lost
                each.conversation_id, each.turn = prompt.request.conversation.conversation_id, prompt.request.turn
            if each not in broken:
                broken.add(each)
                each.requests += 1
                each.messages[index] = each.messages.get(index, 0) + 1
        return new_tokens

    def _break_of(self, reason: Reason, piece: str, role: str, change: Change | None) -> Break:
        # The key has no index: messages that were moved in the same way make one break.
        key = (reason, piece, role, change and change.detail)
        return self.breaks.setdefault(key, Break(reason, piece, role, change))

    def _known_ends(self, prompt: _Prompt) -> tuple[int, int]:
        """The end of the first messages that earlier requests or their replies had: of any model; of the same model."""
        models = [*takewhile(bool, map(self._models.get, _digests(prompt.chat, prompt.messages)))]
        own = [*takewhile(lambda each: prompt.model in each, (each for each in models if each))]
        return prompt.lasting_end(len(models)), prompt.lasting_end(len(own))

    def _ranges(self, prompt: _Prompt, fork: Gap | None) -> tuple[list[tuple[int, int]], Change | None]:
        """Return the ranges after the fork that an earlier prompt has, too, and what changed at the fork."""
        keys, call = prompt.keys, prompt.request.call
        if call is not None and call.opening == Opening.COMPACTION:
            return [(0, len(keys))], COMPACTED
        if fork is None:
            return [], None
        nearest = self._chats.first_change(self._tokenizer, keys, prompt.chat, fork.start, prompt.model)
        if nearest is None:
            return [], None
        change, stored, _ = nearest
        known = ranges_in(keys, stored, fork.start)
        if not change.keeps_rest:
            # Only the rest of the changed message counts. A changed last message is a new question: nothing is lost.
            following = prompt.count if change.message is None else change.message + 1
            border = prompt.end(following) if following < prompt.count else 0
            known = [each for each in known if each[0] < border and each[1] - each[0] >= MIN_BEHIND]
        return known, change

    def _leaves_out_reasoning(self, prompt: _Prompt, index: int) -> bool:
        """Whether the template leaves out the reasoning of a message."""
        if index >= prompt.count or "reasoning_content" not in prompt.messages[index]:
            return False
        messages = [dict(each) for each in prompt.messages]
        del messages[index]["reasoning_content"]
        tokens = chat_tokens(self._tokenizer, messages, prompt.chat.tools, **prompt.chat.arguments)
        return np.array_equal(tokens, prompt.tokens)

    def _note_call(self, request: ScheduledRequest, new_tokens: int) -> None:
        """Count what the log of an agent says of a request."""
        call, report = request.call, self.report
        if call is None:
            return
        if call.opening is not None:
            row = report.openings.setdefault(call.opening, OpeningRow())
            row.requests += 1
            row.new_tokens += new_tokens
        if call.prompt_tokens is None:
            return
        report.reported_requests += 1
        report.reported_prompt_tokens += call.prompt_tokens
        report.reported_cached_tokens += call.cached_tokens
        before = 0 if call.opening else self._reported.get(request.conversation.conversation_id, 0)
        missed = min(before, call.prompt_tokens) - call.cached_tokens
        if missed >= MIN_MISSED:
            report.reported_missed_requests += 1
            report.reported_missed_tokens += missed
        self._reported[request.conversation.conversation_id] = call.prompt_tokens

    def _parted(self, span: Parting, tokens: Any, other: Any) -> Gap:
        """Return the span that differs between a prompt and an earlier prompt, with a few tokens of both."""
        start, end = span.start, span.start + AFTER_TOKENS
        ids = tokens[max(0, start - BEFORE_TOKENS) : start], other[start:end], tokens[start:end]
        before, stored, asked = (tuple(each.tolist()) for each in ids)
        texts = (token_text(each, self._tokenizer) for each in (before, stored, asked))
        return Gap(span.start, span.end, Reason.DIVERGED, 0.0, None, None, before, stored, asked, *texts)

    def _realigned(self, prompt: _Prompt) -> tuple[Parting, Any]:
        """Find the prompt that differs only by a short span and shares most tokens after it. Return span and prompt."""
        longest, nearest = Parting(0, 0, 0, 0), prompt.keys
        for other in self._chats.prompts(prompt.model):
            each = parting(prompt.keys, other)
            if each is None or each.behind < max(MIN_BEHIND, MIN_BEHIND_SPANS * (each.end - each.start)):
                continue
            if each.behind > longest.behind and prompt.goes_on(each.start, each.end):
                longest, nearest = each, other
        return longest, nearest

    def _note_hints(self, explanation: Explanation, prompt: _Prompt) -> None:
        evaluated = [(explanation.resumable_tokens, explanation.prompt_tokens)]
        for hint in explanation.hints:
            if not prompt.goes_on(hint.start, hint.end):
                continue
            spans = ((each, each.hint) for each in self.report.hints)
            known = next((each for each, old in spans if old.start <= hint.end and hint.start <= old.end), None)
            if known is None:
                known = VaryingSpan(hint)
                self.report.hints.append(known)
            elif hint.values >= known.hint.values:
                known.hint = hint
            known.requests += 1
            known.lost_tokens += _covered(hint.end, hint.end + hint.tokens, evaluated)


def _digests(chat: Chat, messages: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Digests of `messages[:1]`, `messages[:2]`, ... together with the tools and arguments of a chat."""
    return islice(beginnings(messages, json.dumps([chat.tools, chat.arguments]).encode()), 1, None)


def _covered(start: int, end: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Count the offsets of [start, end) that lie in at least one range."""
    count, reached = 0, start
    for low, high in sorted(ranges):
        low, high = max(low, reached), min(high, end)
        if high > low:
            count, reached = count + high - low, high
    return count


def breaks_text(report: BreakReport, *, top: int = 10) -> str:
    """Return the report as text: a table of lost and new tokens by cause, and where each break lost most."""
    total = max(1, report.prompt_tokens)
    lines = [
        f"{plural(report.requests, 'request')}, {report.prompt_tokens:,} prompt tokens: "
        f"{report.resumed_tokens / total:.1%} resumed, {report.new_tokens / total:.1%} new, "
        f"{report.lost_tokens / total:.1%} lost ({report.lost_tokens:,} tokens)."
    ]
    if report.reported_requests:
        lines.append(_reported_words(report))
    if not report.breaks:
        lines.append("Nothing was lost: everything that could be reused was reused.")
    lines += ["", f"{'':4}  {'tokens':>11}  {'of prompts':>10}  {'requests':>8}  cause, and what to change"]
    for state, tokens, requests, *words in (*_lost_rows(report, top), *_new_rows(report)):
        lines.append(f"{state:<4}  {tokens:>11,}  {tokens / total:>10.1%}  {requests or '':>8}  {words[0]}")
        lines += [f"{'':41}{hint}" for hint in words[1:]]
    for each in report.breaks[:top]:
        lines += _example_lines(each)
    for span in report.hints[:SHOWN_HINTS]:
        requests = plural(span.requests, "request")
        lines += ["", f"hint, in {requests}, {span.lost_tokens:,} tokens lost: {span.hint}"]
    return "\n".join(lines)


def _lost_rows(report: BreakReport, top: int) -> Iterator[tuple[Any, ...]]:
    for each in report.breaks[:top]:
        hint = PIECE_HINTS.get(each.piece) if each.change is None else each.change.hint
        yield "lost", each.lost_tokens, each.requests, f"{_where(each)}: {_why(each)}", *filter(None, [hint])
    if rest := report.breaks[top:]:
        yield "lost", sum(each.lost_tokens for each in rest), 0, f"{len(rest)} more breaks; see --top"


def _new_rows(report: BreakReport) -> list[tuple[Any, ...]]:
    """Return the rows of new tokens, by cause."""
    rows = [("new", row.new_tokens, row.requests, OPENINGS[name]) for name, row in report.openings.items()]
    added = report.new_tokens - sum(row[1] for row in rows), report.requests - sum(row[2] for row in rows)
    rows.append(("new", *added, "messages that were added" if rows else "messages that no request had before"))
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])


def _reported_words(report: BreakReport) -> str:
    """Return a sentence on the figures that the provider reported to an agent."""
    share = report.reported_cached_tokens / report.reported_prompt_tokens
    words = (
        f"Reported by the provider, with the parts that the logs do not hold: {report.reported_prompt_tokens:,} prompt "
        f"tokens in {plural(report.reported_requests, 'request')}, {share:.1%} cached."
    )
    if report.reported_missed_requests:
        words += (
            f" In {plural(report.reported_missed_requests, 'request')}, {report.reported_missed_tokens:,} tokens of "
            "the request before were not cached: state had expired, or a part that the logs do not hold had changed."
        )
    return words


def _example_lines(each: Break) -> list[str]:
    """Return the lines that show where a break lost most tokens."""
    gap = each.example
    assert gap is not None, each
    place = f"conversation {each.conversation_id}, turn {each.turn}, token {gap.start:,}"
    lines = ["", f"{_where(each)}, most in {place}:"]
    if gap.reason != Reason.DIVERGED or gap.before_text is None:
        return [*lines, f"  {shortened(str(gap), 100)}"]
    return [
        *lines,
        f"  after   {gap.before_text[-BEFORE_CHARS:]!r}",
        f"  stored  {(gap.stored_text or '')[:AFTER_CHARS]!r}",
        f"  asked   {(gap.asked_text or '')[:AFTER_CHARS]!r}",
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
