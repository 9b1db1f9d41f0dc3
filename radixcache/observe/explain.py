"""explain: why a prompt is not reused further, token range by token range, in words and in numbers.

    0            resumable      matched                          prompt_tokens
    |  restored  |  stored, but  |  not in the tree: evicted,     |
    |            |  not to be    |  parted from a stored path,    |
    |            |  resumed      |  quarantined, or new           |

The gaps tile [resumable, prompt_tokens), each with one reason. What `begin` would do is worked out by its own code
(resume.plan_resume); only what does not show in the tree comes from the history.

What can be read off a Core at one moment: its counters, its tree, its metrics, and what a prompt would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

from policies import CostModel
from radixcache.core import Core, Foresight
from radixcache.observe.hints import variations
from radixcache.observe.stats import CacheStats, Metric, SlotState, StatsSnapshot, metrics_of_cache, snapshot
from radixcache.observe.tree_view import TreeView, collect
from radixcache.observe.words import bytes_words
from radixcache.paging.pins import Pins
from radixcache.paging.resume import ShortReason
from radixcache.tokens import Keys, TokenIds, token_text
from radixcache.tree.entries import StateNode
from radixcache.tree.history import History, Loss
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import StateTree

#: Tokens shown in front of a divergence, and behind it on either side.
BEFORE_TOKENS = 24
AFTER_TOKENS = 16


class Reason(StrEnum):
    """Why tokens of a prompt have to be evaluated. Those of ShortReason have the same values here."""

    NEVER_STORED = "never_stored"  # nothing that begins like this was ever stored, or it is long forgotten
    DIVERGED = "diverged"  # a stored path goes on otherwise from here
    EVICTED = "evicted"  # stored once, given up since: the tokens, or the checkpoint that would have led there
    QUARANTINED = "quarantined"  # found wrong: taken out, and not stored again until clear_quarantine()
    NO_CHECKPOINT = ShortReason.NO_CHECKPOINT.value  # stored; recurrent layers have no state in this range
    WINDOW_GAP = ShortReason.WINDOW_GAP.value  # stored; but not all of what sliding windows would read
    LIVE_ELSEWHERE = ShortReason.LIVE_ELSEWHERE.value  # stored; only in buffers that another thread's session is using
    OFF_GRID = "off_grid"  # stored; not made on the prefill grid, as exact mode wants it
    LAST_TOKEN = ShortReason.LAST_TOKEN.value  # stored; evaluated again for its logits


@dataclass(frozen=True, slots=True)
class Gap:
    """The tokens [start, end) of a prompt that have to be evaluated, and why.

    Attributes:
        cost: of evaluating them, in the explanation's cost_unit.
        tick: evicted: when; quarantined: when it was taken out, once it may be stored again; else None.
        checkpoint: evicted: offset of the checkpoint that is gone; None where it was the tokens themselves.
        before, stored, asked: diverged: a few tokens in front of `start`, then of the stored path, and of the prompt.
        before_text, stored_text, asked_text: the same decoded, where the PrefixCache has a tokenizer; else None.
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
        return f"[{self.start:,}, {self.end:,})  {self.tokens:,} tokens  {_in_words(self)}"


@dataclass(frozen=True, slots=True)
class Hint:
    """A short span [start, end) of the prompt that differs in one recent prompt after the other.

    Attributes:
        values: different values among the recent prompts, this prompt's included.
        requests: recent prompts that are equal in front of the span, this one included.
        tokens, cost: equal tokens behind the span, evaluated anew for each value; what that costs, in cost_unit.
        asked, other: the span's tokens in this prompt and in an earlier one.
        asked_text, other_text: the same decoded, where the PrefixCache has a tokenizer; else None.
    """

    start: int
    end: int
    values: int
    requests: int
    tokens: int
    cost: float
    asked: tuple[int, ...]
    other: tuple[int, ...]
    asked_text: str | None = None
    other_text: str | None = None

    def __str__(self) -> str:
        where = f"tokens {self.start} to {self.end - 1} change"
        if self.end - self.start < 2:
            where = f"{'what stands before ' if self.end == self.start else ''}token {self.start} changes"
        often = "every request" if self.values == self.requests else f"{self.values} of {self.requests} requests"
        shown = _both(self.other_text, self.other, self.asked_text, self.asked)
        return (
            f"{where} in {often} ({shown}); everything behind is recomputed, though {self.tokens:,} tokens of it are "
            "the same. What changes belongs behind what does not."
        )


#: Where state is, by what a store is called.
_WHERE = {"disk": "on disk", "redis": "in Redis"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request for a prompt would find, and why not more. `str()` is a report of a few lines.

    Attributes:
        matched_tokens, resumable_tokens: as a Session's matched_tokens and cached_tokens.
        gaps: the rest, [resumable_tokens, prompt_tokens), in pieces with a reason each.
        hints: spans that vary from prompt to prompt with the same text behind them.
        windows: for each size of sliding windows how many layers have it, and from which token on it is stored up to
            where the request resumes; none where it resumes at 0.
        cost_unit: of all costs: "tokens", "flops" or "seconds".
        disk_tokens: how many of its tokens stores have, if more than can be resumed; 0: no more, or there is no store.
        read_tokens: up to where `begin` would read them; the rest is expected to be slower to read than to prefill.
        tiers: up to where each store has it, in the order in which they would be read.
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

    @property
    def is_read(self) -> bool:
        """Whether `begin` would read any of what stores have."""
        return self.read_tokens > 0

    @property
    def cost(self) -> float:
        """Of evaluating all gaps, in cost_unit."""
        return sum(gap.cost for gap in self.gaps)

    @property
    def _reading(self) -> str:
        if self.read_tokens == self.disk_tokens:
            return "begin() reads what is missing, if there is room"
        slower = "slower to read than to prefill"
        return f"begin() reads up to {self.read_tokens:,}; the rest is {slower}" if self.is_read else slower

    def __str__(self) -> str:
        share = self.resumable_tokens / self.prompt_tokens
        lines = [
            f"{self.resumable_tokens:,} of {self.prompt_tokens:,} tokens resumed ({share:.1%}), "
            f"{self.matched_tokens:,} matched; the rest costs {self.cost:,.4g} {self.cost_unit}."
        ]
        for layers, start in self.windows:
            whose = "1 layer" if layers == 1 else f"{layers} layers"
            lines.append(f"  resumes at {self.resumable_tokens:,}: the window of {whose} is stored from {start:,} on")
        if self.disk_tokens:
            where = ", ".join(f"{_WHERE.get(tier, f'in {tier}')} up to {end:,}" for tier, end in self.tiers)
            lines.append(f"  stored {where}: {self._reading}")
        return "\n".join([*lines, *(f"  {gap}" for gap in _joined(self.gaps)), *(f"  hint: {h}" for h in self.hints)])


def explain(
    tokens: TokenIds,
    keys: Keys,
    namespace: str,
    foresight: Foresight,
    history: History,
    cost: CostModel,
) -> Explanation:
    """Explain one prompt; changes nothing. `with_text` adds what needs a tokenizer.

    Args:
        tokens, keys: the prompt's ids, for showing, and what the tree goes by.
        foresight: of the same prompt and moment.
    """
    plan, length = foresight.plan, len(keys)
    checkpoint = None
    if foresight.readable.reason in (ShortReason.NO_CHECKPOINT, ShortReason.WINDOW_GAP):
        checkpoint = history.evicted_checkpoint(keys, namespace, foresight.readable.resume, plan.matched)
    evicted = history.evicted_tokens(keys, namespace, plan.matched) if plan.matched < length else []
    stored = _stored_gaps(foresight, checkpoint, length)
    missing = _missing_gaps(foresight.match, plan.matched, tokens, evicted, foresight.quarantined_from)
    gaps = tuple(replace(gap, cost=cost.cost(gap.start, gap.end)) for gap in (*stored, *missing))
    hints = []
    for each in variations(keys, history.prompts(namespace)):
        start, end, behind = each.start, each.end, each.behind
        shown = _shown(tokens[start:end]), _shown(each.other)
        hints.append(Hint(start, end, each.values, each.requests, behind, cost.cost(end, end + behind), *shown))
    found = Explanation(length, plan.matched, plan.resume, gaps, tuple(hints), cost.unit, foresight.windows)
    store = foresight.in_store
    if store is None:
        return found
    return replace(found, disk_tokens=store.tokens, read_tokens=store.read_tokens, tiers=store.tiers)


def with_text(explanation: Explanation, tokenizer: Any) -> Explanation:
    """The explanation with the tokens that it shows decoded; without a tokenizer as it is."""
    if tokenizer is None:
        return explanation

    def text(ids: Sequence[int]) -> str:
        return token_text(ids, tokenizer)

    def told(gap: Gap) -> Gap:
        if gap.reason != Reason.DIVERGED:
            return gap
        return replace(gap, before_text=text(gap.before), stored_text=text(gap.stored), asked_text=text(gap.asked))

    hints = [replace(hint, asked_text=text(hint.asked), other_text=text(hint.other)) for hint in explanation.hints]
    return replace(explanation, gaps=tuple(map(told, explanation.gaps)), hints=tuple(hints))


def _stored_gaps(foresight: Foresight, lost: Loss | None, length: int) -> Iterator[Gap]:
    """What the tree holds and the request cannot resume: [resume, matched)."""
    plan, readable = foresight.plan, foresight.readable
    start, end = plan.resume, min(plan.matched, length - 1)
    if readable.resume > start:
        yield Gap(start, readable.resume, Reason.LIVE_ELSEWHERE)
        start = readable.resume
    if lost is not None and start < lost.end <= end:
        yield Gap(start, lost.end, Reason.EVICTED, tick=lost.tick, checkpoint=lost.end)
        start = lost.end
    grid_end = max(start, end - readable.off_grid)
    if start < grid_end:
        assert readable.reason is not None, (readable.resume, readable.matched)
        yield Gap(start, grid_end, Reason(readable.reason.value))
    if grid_end < end:
        yield Gap(grid_end, end, Reason.OFF_GRID)
    if plan.matched == length:
        yield Gap(length - 1, length, Reason.LAST_TOKEN)


def _missing_gaps(
    match: Match[Any], matched: int, tokens: TokenIds, evicted: Sequence[Loss], quarantined_from: int | None
) -> Iterator[Gap]:
    """What the tree does not hold: [matched, length), where in exact mode a match may go on behind the tree's."""
    start, length = matched, len(tokens)
    end = length if quarantined_from is None else max(start, min(length, quarantined_from))
    for part in evicted:
        if start < end:
            reason = Reason.QUARANTINED if part.was_wrong else Reason.EVICTED
            yield Gap(start, min(part.end, end), reason, tick=part.tick)
            start = min(part.end, end)
    if start < end:
        path = _other_way(match) if start == match.offset else ()
        if not path:
            yield Gap(start, end, Reason.NEVER_STORED)
        else:
            before, asked = tokens[max(0, start - BEFORE_TOKENS) : start], tokens[start : start + AFTER_TOKENS]
            yield Gap(start, end, Reason.DIVERGED, before=_shown(before), stored=path, asked=_shown(asked))
        start = end
    if start < length:
        yield Gap(start, length, Reason.QUARANTINED)


def _other_way(match: Match[Any]) -> tuple[int, ...]:
    """Keys of a stored path behind a match, along the child made last; none where no path goes on."""
    node: StateNode = match.node
    edge = node.edge[match.offset - node.start :]
    shown: list[int] = []
    while len(shown) < AFTER_TOKENS:
        shown += edge[: AFTER_TOKENS - len(shown)].tolist()
        if not node.children:
            break
        node = next(reversed(node.children.values()))
        edge = node.edge
    return tuple(shown)


def _shown(ids: Any) -> tuple[int, ...]:
    return tuple(ids.tolist())


_WORDS = {
    Reason.NEVER_STORED: "never stored",
    Reason.DIVERGED: "diverged at {gap.start:,} from a stored path",
    Reason.EVICTED: "evicted at tick {gap.tick}",
    Reason.QUARANTINED: "quarantined: found wrong, and not stored again",
    Reason.NO_CHECKPOINT: "stored, but no checkpoint between {gap.start:,} and {gap.end:,}",
    Reason.WINDOW_GAP: "stored, but not the whole window at any offset between {gap.start:,} and {gap.end:,}",
    Reason.LIVE_ELSEWHERE: "stored, but only in the live buffers of another thread's session",
    Reason.OFF_GRID: "stored, but not made on the prefill grid",
    Reason.LAST_TOKEN: "stored; the last token is evaluated for its logits",
}


def _in_words(gap: Gap) -> str:
    if gap.checkpoint is not None:
        return f"the checkpoint at {gap.checkpoint:,} was evicted at tick {gap.tick}"
    if gap.reason is Reason.QUARANTINED and gap.tick is not None:
        return f"found wrong and taken out at tick {gap.tick}"
    words = _WORDS[gap.reason].format(gap=gap)
    if gap.reason is Reason.DIVERGED:
        behind = "" if gap.before_text is None else f" behind {gap.before_text!r}"
        words += f"{behind}: {_both(gap.stored_text, gap.stored, gap.asked_text, gap.asked)}"
    return words


def _both(stored_text: str | None, stored: Sequence[int], asked_text: str | None, asked: Sequence[int]) -> str:
    if stored_text is None or asked_text is None:
        return f"stored tokens {list(stored)}, asked {list(asked)}"
    return f"stored {stored_text!r}, asked {asked_text!r}"


def _joined(gaps: Sequence[Gap]) -> Iterator[str]:
    """A line for each gap; neighbours that were evicted in several steps share one."""
    for is_evicted, group in groupby(gaps, lambda gap: gap.reason == Reason.EVICTED and gap.checkpoint is None):
        run = list(group)
        if not is_evicted or len(run) == 1:
            yield from map(str, run)
            continue
        start, end, ticks = run[0].start, run[-1].end, sorted({each.tick or 0 for each in run})
        when = f"ticks {ticks[0]} to {ticks[-1]}" if len(ticks) > 1 else f"tick {ticks[0]}"
        yield f"[{start:,}, {end:,})  {end - start:,} tokens  evicted at {when}"


class About(NamedTuple):
    """What is told of a cache: its policy's name, where its budget came from, and what decodes its tokens."""

    policy: str
    budget_source: str
    tokenizer: Any


def in_a_line(core: Core, states: StateTree, about: About) -> str:
    """A cache in a few words; takes no lock."""
    ledger, slots = states.account.ledger, core.slots()
    taken = sum(is_open for is_open, _, _ in slots)
    held = f"{bytes_words(states.account.total_bytes)} of {bytes_words(ledger.budget_bytes)}"
    return f"{about.policy}: {states.tree.node_count} nodes, {held}, {taken} of {len(slots)} live slots taken"


def view_of(
    states: StateTree,
    pins: Pins,
    slot_count: int,
    namespace: str | None,
    about: About,
    tokenizer: Any = None,
    meanwhile: Callable[[], object] = dict,
) -> TreeView:
    """A description of the tree; None: of all namespaces. `meanwhile` is called under the lock too."""
    ledger, layout = states.account.ledger, states.layout
    budget = bytes_words(ledger.budget_bytes) if ledger.budget_bytes < 1 << 60 else "no limit"
    return collect(
        ledger.lock,
        lambda: states.tree.roots(namespace),
        token_bytes=layout.token_bytes,
        windows_of=lambda spans: layout.stored(spans, max(layout.windows)),
        pin_names=pins.names_at,
        tokenizer=tokenizer or about.tokenizer,
        about=[("policy", about.policy), ("budget", budget)] if namespace is None else [],
        slot_count=slot_count,
        meanwhile=meanwhile,
    )


def snapshot_of(core: Core, states: StateTree, pins: Pins, namespace: str | None, about: About) -> StatsSnapshot:
    """All metrics; of one namespace only the counts of its nodes and pins."""
    of_cache: list[Metric] = []
    counts: list[int] = []

    def meanwhile() -> None:
        counts.extend((pins.count(namespace), pins.count(namespace, named=True)))
        if namespace is None:
            stats = CacheStats(budget_source=about.budget_source, **core.counters())
            slots = [SlotState(*slot) for slot in core.slots()]
            total_bytes, namespaces = states.account.ledger.total_bytes, len(states.tree.roots())
            of_cache.extend(metrics_of_cache(stats, slots, about.policy, total_bytes, namespaces))

    count = core.settings.live_slots
    view = view_of(states, pins, count, namespace, about._replace(tokenizer=None), meanwhile=meanwhile)
    return snapshot(of_cache, view, *counts)


def explanation_of(
    core: Core, states: StateTree, prompt: TokenIds, keys: Keys, namespace: str, about: About
) -> Explanation:
    """What a request for a prompt would find, and why not more."""
    with core.lock:
        found = explain(prompt, keys, namespace, core.foresee(keys, namespace), states.events.history, states.cost)
    return with_text(found, about.tokenizer)
