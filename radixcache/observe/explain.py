"""explain: why a request reuses no more of a prompt, range by range. Also the views and metrics of a Core.

    0            resumable      matched                          prompt_tokens
    |  restored  |  stored, but  |  not in the tree: evicted,     |
    |            |  cannot be    |  diverged from a stored path,  |
    |            |  resumed      |  quarantined, or new           |

The gaps cover [resumable, prompt_tokens) without overlap, each with one reason. `foresee` plans as `begin` does and
changes nothing. The history tells what the tree has lost. `view_of` reads the tree, `snapshot_of` all metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from radixcache.chat_parts import Change, Chat, ChatLog
from radixcache.core import Core
from radixcache.observe.hints import Hint, both_words, variations
from radixcache.observe.stats import CacheStats, StatsSnapshot, metrics_of_cache, snapshot
from radixcache.observe.tree_view import TreeView, collect
from radixcache.observe.words import bytes_words, tokens_words
from radixcache.paging.resume import Reason, ResumePlan, stored_from
from radixcache.paging.tier import Foreseen
from radixcache.tokens import Keys, TokenIds, token_text
from radixcache.tree.history import History
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import NodeState, StateNode

#: Tokens shown before a divergence; and after it, of the stored path and of the prompt.
BEFORE_TOKENS, AFTER_TOKENS = 24, 16


class Foresight(NamedTuple):
    """What `begin` would find. `readable` is the plan if the buffers of all sessions could be read.

    Attributes:
        windows: for each size of sliding windows: the number of layers, and the first token from which the window is
            stored, without a gap, up to where the request resumes.
        quarantined_from: offset from which on the keys are quarantined; None: they are not.
        in_store: what the store has of the prompt beyond memory; None: there is no store.
    """

    match: Match[NodeState]
    plan: ResumePlan
    readable: ResumePlan
    windows: tuple[tuple[int, int], ...]
    quarantined_from: int | None
    in_store: Foreseen | None


@dataclass(frozen=True, slots=True)
class Gap:
    """The tokens [start, end) of a prompt that must be evaluated, and why.

    Attributes:
        cost: cost of evaluating the tokens, in the cost_unit of the explanation.
        tick: logical time of the eviction, or of the removal after verify found wrong state; else None.
        checkpoint: offset of the evicted checkpoint; None: the tokens were evicted.
        before, stored, asked: a few tokens before a divergence; after it, those of the stored path and of the prompt.
        before_text, stored_text, asked_text: the same tokens as text, if the PrefixCache has a tokenizer.
    """

    start: int
    end: int
    reason: Reason
    cost: float = 0.0
    tick: int | None = None
    checkpoint: int | None = None
    before: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    before_text: str | None = None
    stored_text: str | None = None
    asked_text: str | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start:,}, {self.end:,})  {tokens_words(self.tokens)}  {_in_words(self)}"


#: Where state is, by the name of the store.
_WHERE = {"disk": "on disk", "redis": "in Redis"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request for a prompt would reuse, and why it would not reuse more. `str()` gives a report of a few lines.

    Attributes:
        matched_tokens, resumable_tokens: as matched_tokens and cached_tokens of a Session.
        gaps: the ranges to evaluate; together they are [resumable_tokens, prompt_tokens).
        hints: spans that vary from prompt to prompt, while the text after them is the same.
        windows: for each size of sliding windows: the number of layers, and the first stored token of the window at
            resumable_tokens. Empty if nothing is resumed.
        cost_unit: of all costs: "tokens", "flops" or "seconds".
        disk_tokens: length of the prefix in stores, if it is longer than resumable_tokens; else 0.
        read_tokens: how many of disk_tokens `begin` would read; reading the rest is expected to be slower than prefill.
        tiers: for each store, in the order of reading: its name, and the length of the prefix that it has.
        path: ends of the tree's nodes with the matched tokens; the last node may end after the match.
        change: the part of the chat that differs from an earlier chat at the fork; None: not known, or no chat given.
    """

    prompt_tokens: int
    matched_tokens: int
    resumable_tokens: int
    gaps: tuple[Gap, ...]
    hints: tuple[Hint, ...]
    cost_unit: str
    windows: tuple[tuple[int, int], ...] = ()
    disk_tokens: int = 0
    read_tokens: int = 0
    tiers: tuple[tuple[str, int], ...] = ()
    path: tuple[int, ...] = ()
    change: Change | None = None

    @property
    def fork(self) -> Gap | None:
        """The gap where the prompt diverges from a stored path; None: it does not."""
        return next((gap for gap in self.gaps if gap.reason == Reason.DIVERGED), None)

    @property
    def is_read(self) -> bool:
        """Whether `begin` would read from stores."""
        return self.read_tokens > 0

    @property
    def cost(self) -> float:
        """Cost of evaluating all gaps, in cost_unit."""
        return sum(gap.cost for gap in self.gaps)

    @property
    def _reading(self) -> str:
        if self.read_tokens == self.disk_tokens:
            return "begin() reads the missing tokens, if the budget has room"
        slower = "slower to read than to prefill"
        return f"begin() reads up to {self.read_tokens:,}; the rest is {slower}" if self.is_read else slower

    def __str__(self) -> str:
        share = self.resumable_tokens / self.prompt_tokens
        resumed = f"{self.resumable_tokens:,} of {self.prompt_tokens:,} tokens resumed ({share:.1%})"
        lines = [
            f"{resumed}, {self.matched_tokens:,} matched; prefilling the rest costs {self.cost:,.4g} {self.cost_unit}."
        ]
        for layers, start in self.windows:
            whose = "1 layer" if layers == 1 else f"{layers} layers"
            lines.append(f"  resumes at {self.resumable_tokens:,}: the window of {whose} is stored from {start:,} on")
        if self.disk_tokens:
            where = ", ".join(f"{_WHERE.get(tier, f'in {tier}')} up to {end:,}" for tier, end in self.tiers)
            lines.append(f"  stored {where}: {self._reading}")
        lines += [f"  {gap}" for gap in _joined(self.gaps)]
        if self.change is not None:
            lines.append(f"  changed: {self.change}. {self.change.hint}")
        return "\n".join([*lines, *(f"  hint: {hint}" for hint in self.hints)])


class About(NamedTuple):
    """A cache's policy by name, the source of its budget, its tokenizer, and the last chats that it was given."""

    policy: str
    budget_source: str
    tokenizer: Any
    chats: ChatLog


def stats_of(core: Core, about: About) -> CacheStats:
    """Return the counts and bytes of a cache. The caller holds the lock."""
    states, verifier, pinned_bytes, suffixes = core.states, core.verifier, core.pins.nbytes, core.draft_index.suffixes
    account, ledger = states.account, states.account.ledger
    counts: dict[str, Any] = {**states.tally.counts(), **core.counts}
    return CacheStats(
        **counts,
        budget_source=about.budget_source,
        short_reasons=dict(core.short_reasons),
        evictions=core.evictor.evictions,
        evicted_bytes=core.evictor.evicted_bytes,
        copied_bytes=states.copied_bytes,
        paged_in_bytes=states.paged_in_bytes,
        paged_out_bytes=states.paged_out_bytes,
        live_bytes=account.live_bytes,
        paged_bytes=account.span_bytes + account.checkpoint_bytes,
        checkpoint_bytes=account.checkpoint_bytes,
        window_bytes=states.windows.nbytes,
        duplicate_bytes=states.duplicate_bytes,
        spare_bytes=core.slots.spare_nbytes(),
        pinned_bytes=pinned_bytes,
        nodes=states.tree.node_count,
        tokens=states.tree.key_count,
        budget_bytes=ledger.budget_bytes,
        over_budget_bytes=ledger.over_bytes(),
        held_bytes={
            "sessions": sum(sum(path.booking.amounts) for path in core.slots.paths if path.is_open),
            "rows": sum(sum(booking.amounts) for booking, _ in core.bookings),
            "pins": pinned_bytes,
        },
        peak_bytes=ledger.peak_bytes,
        verified_requests=verifier.verified,
        verify_skipped=verifier.skipped,
        verify_mismatches=verifier.mismatch_count,
        verify_largest_error=verifier.largest_error,
        verify_bytes=account.second_bytes,
        suffix_index_tokens=0 if suffixes is None else suffixes.tokens,
        suffix_index_bytes=0 if suffixes is None else suffixes.nbytes,
        quarantined=len(core.quarantine),
        event_failures=states.events.failures,
        dropped_events=states.events.dropped,
    )


def in_a_line(core: Core, about: About) -> str:
    """Describe a cache in a few words; takes no lock."""
    states = core.states
    ledger, slots = states.account.ledger, core.slots.figures()
    taken = sum(is_open for is_open, _, _ in slots)
    held = f"{bytes_words(states.account.total_bytes)} of {bytes_words(ledger.budget_bytes)}"
    return f"{about.policy}: {states.tree.node_count} nodes, {held}, {taken} of {len(slots)} live slots taken"


def view_of(core: Core, namespace: str | None, about: About) -> TreeView:
    """Return a view of one namespace, or of all namespaces (None)."""
    budget_bytes = core.states.account.ledger.budget_bytes
    facts = ("policy", about.policy), ("budget", bytes_words(budget_bytes) if budget_bytes < 1 << 60 else "no limit")
    view = collect(core.states, core.pins, namespace, core.settings.live_slots, about.tokenizer)
    return replace(view, about=facts) if namespace is None else view


def snapshot_of(core: Core, namespace: str | None, about: About) -> StatsSnapshot:
    """Return all metrics. For one namespace, return only the counts of its nodes and pins."""
    states, pins = core.states, core.pins
    seen: dict[str, Any] = {}

    def meanwhile() -> None:
        seen.update(pins=pins.count(namespace), named_pins=pins.count(namespace, named=True))
        if namespace is None:
            stats = stats_of(core, about)
            ledger_bytes, namespaces = states.account.ledger.total_bytes, len(states.tree.roots())
            seen.update(of_cache=metrics_of_cache(stats, core.slots.figures(), about.policy, ledger_bytes, namespaces))

    view = collect(states, pins, namespace, core.settings.live_slots, None, meanwhile)
    return snapshot(view.nodes, **seen)


def explanation_of(
    core: Core, prompt: TokenIds, keys: Keys, namespace: str, about: About, chat: Chat | None = None
) -> Explanation:
    """Explain what a request for a prompt would reuse; changes nothing. For a chat, name the part that differs, too."""
    if chat is not None and about.tokenizer is None:
        raise ValueError("explain got a chat, but the cache has no tokenizer; pass tokenizer= to PrefixCache.")
    states, length = core.states, len(keys)
    with core.lock:
        history, cost, foresight = states.events.history, states.cost, foresee(core, keys, namespace)
        causes = [*_causes(foresight, history, prompt, keys, namespace)]
        hints = variations(keys, history.prompts(namespace))
        path = tuple(node.end for node in foresight.match.node.path())
    plan, store = foresight.plan, foresight.in_store or Foreseen()

    def text(ids: Sequence[int]) -> str | None:
        return None if about.tokenizer is None else token_text(ids, about.tokenizer)

    def finished_hint(hint: Hint) -> Hint:
        asked, cost_ = _ids(prompt[hint.start : hint.end]), cost.cost(hint.end, hint.end + hint.tokens)
        return replace(hint, cost=cost_, asked=asked, asked_text=text(asked), other_text=text(hint.other))

    gaps, start = list[Gap](), plan.resume
    for end, reason, facts in causes:
        if start < end:
            texts: dict[str, Any] = {
                f"{name}_text": text(ids) for name, ids in facts.items() if reason is Reason.DIVERGED
            }
            gaps.append(Gap(start, end, reason, cost.cost(start, end), **facts, **texts))
            start = end
    explanation = Explanation(
        prompt_tokens=length,
        matched_tokens=plan.matched,
        resumable_tokens=plan.resume,
        gaps=tuple(gaps),
        hints=tuple(map(finished_hint, hints)),
        cost_unit=cost.unit,
        windows=foresight.windows,
        disk_tokens=store.tokens,
        read_tokens=store.read_tokens,
        tiers=store.tiers,
        path=path,
    )
    if chat is None or explanation.fork is None:
        return explanation
    nearest = about.chats.first_change(about.tokenizer, keys, chat, explanation.fork.start, namespace)
    return explanation if nearest is None else replace(explanation, change=nearest[0])


def _causes(
    foresight: Foresight, history: History, prompt: TokenIds, keys: Keys, namespace: str
) -> Iterator[tuple[int, Reason, dict[str, Any]]]:
    """Yield in order: the end of a gap, its reason, more fields of the Gap. A gap begins where the one before ends."""
    plan, readable, length = foresight.plan, foresight.readable, len(keys)
    matched, cut = plan.matched, foresight.quarantined_from
    # Stored, but cannot be resumed. In exact mode a plan may match more than the tree.
    yield readable.resume, Reason.LIVE_ELSEWHERE, {}
    stored_end = min(matched, length - 1)
    if readable.reason in (Reason.NO_CHECKPOINT, Reason.WINDOW_GAP):
        lost = history.lost_checkpoint(keys, namespace, readable.resume, matched)
        if lost is not None and lost.end <= stored_end:
            yield lost.end, Reason.EVICTED, {"tick": lost.tick, "checkpoint": lost.end}
    if readable.reason is not None:
        yield stored_end - readable.off_grid, readable.reason, {}
    yield stored_end, Reason.OFF_GRID, {}
    yield matched, Reason.LAST_TOKEN, {}
    # Not stored.
    end = length if cut is None else max(matched, min(length, cut))
    known = matched
    for part in history.lost_tokens(keys, namespace, matched) if matched < length else ():
        known = min(part.end, end)
        yield known, Reason.QUARANTINED if part.was_wrong else Reason.EVICTED, {"tick": part.tick}
    if known < end and known == foresight.match.offset and (stored := _stored_behind(foresight.match)):
        before, asked = prompt[max(0, known - BEFORE_TOKENS) : known], prompt[known : known + AFTER_TOKENS]
        yield end, Reason.DIVERGED, {"before": _ids(before), "stored": stored, "asked": _ids(asked)}
    yield end, Reason.NEVER_STORED, {}
    yield length, Reason.QUARANTINED, {}


def foresee(core: Core, keys: Keys, namespace: str) -> Foresight:
    """Return what `begin` would find for a prompt, or `fetch` if no slot is free. Changes and evaluates nothing.

    Releases the lock while it asks a store.
    """
    limit, states, in_store = len(keys) - 1, core.states, None
    if core.tier is not None:
        in_store = core.tier.foresee(core.before_quarantine(keys, namespace)[:limit], namespace)
    quarantined_from = core.quarantine.offset(keys, namespace)
    keys = keys[:quarantined_from]
    match = states.match(keys, namespace)
    gone = sum(1 << path.slot for path in core.slots.vanished_paths())
    for node in match.path if gone else []:
        if node.payload.spans is None and not node.payload.live_mask & ~gone:
            # Only the live buffers of a vanished session hold this state. The next request drops it.
            match = Match(node.parent or node, node.start, match.path[: match.path.index(node)])
            break
    has_slot = not all(path.is_open for path in core.slots.paths)
    live = core.slots.choose(match.path, min(match.offset, limit)) if has_slot else None
    hidden = core.slots.hidden_from(match.path, live, evaluate=False)
    plan = core.plan(match, keys, limit, live, hidden)
    readable = plan if hidden is None else core.plan(match, keys, limit, live, None)
    windows = core.layout.windows if plan.resume else ()
    stored = tuple((core.layout.layers_of(each), stored_from(core.layout, plan, each)) for each in windows)
    return Foresight(match, plan, readable, stored, quarantined_from, in_store)


def _stored_behind(match: Match[Any]) -> tuple[int, ...]:
    """Return keys of the stored path after a match, along the newest children; empty: the path ends there."""
    node: StateNode = match.node
    at = match.offset - node.start
    shown = node.edge[at : at + AFTER_TOKENS].tolist()
    while len(shown) < AFTER_TOKENS and node.children:
        node = next(reversed(node.children.values()))
        shown += node.edge[:AFTER_TOKENS].tolist()
    return tuple(shown[:AFTER_TOKENS])


def _ids(ids: Any) -> tuple[int, ...]:
    return tuple(ids.tolist())


_WORDS = {
    Reason.NEVER_STORED: "never stored",
    Reason.DIVERGED: "diverged at {gap.start:,} from a stored path",
    Reason.EVICTED: "evicted at tick {gap.tick}",
    Reason.QUARANTINED: "quarantined: verify found wrong state here",
    Reason.NO_CHECKPOINT: "stored, but no checkpoint between {gap.start:,} and {gap.end:,}",
    Reason.WINDOW_GAP: "stored, but no offset between {gap.start:,} and {gap.end:,} has a whole window",
    Reason.LIVE_ELSEWHERE: "stored, but only in the live buffers of another thread's session",
    Reason.OFF_GRID: "stored, but not prefilled in whole chunks of step_size tokens",
    Reason.LAST_TOKEN: "stored, but evaluated again for its logits",
}


def _in_words(gap: Gap) -> str:
    if gap.checkpoint is not None:
        return f"the checkpoint at {gap.checkpoint:,} was evicted at tick {gap.tick}"
    if gap.reason is Reason.QUARANTINED and gap.tick is not None:
        return f"found wrong by verify and removed at tick {gap.tick}"
    words = _WORDS[gap.reason].format(gap=gap)
    if gap.reason is Reason.DIVERGED:
        behind = "" if gap.before_text is None else f", after {gap.before_text!r}"
        words += f"{behind}: {both_words(gap.stored_text, gap.stored, gap.asked_text, gap.asked)}"
    return words


def _joined(gaps: Sequence[Gap]) -> Iterator[str]:
    """Yield a line for each gap. Neighbours that were evicted in several steps share one line."""
    for is_evicted, group in groupby(gaps, lambda gap: gap.reason == Reason.EVICTED and gap.checkpoint is None):
        run = list(group)
        if not is_evicted or len(run) == 1:
            yield from map(str, run)
            continue
        start, end, ticks = run[0].start, run[-1].end, sorted({each.tick or 0 for each in run})
        when = f"ticks {ticks[0]} to {ticks[-1]}" if len(ticks) > 1 else f"tick {ticks[0]}"
        yield f"[{start:,}, {end:,})  {end - start:,} tokens  evicted at {when}"
