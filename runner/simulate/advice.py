"""Advice on a trace: what a prefix cache can save at all, how many bytes that takes, and which policy to take.

Computed from the LRU curve alone (`advice_of`); with rows of a simulation policies are compared too (`best_policy`).
Shares are of prompt tokens, since those are what prefill is paid for.

  AD1  A figure that cannot be known is None, and the text says what it lacks: no bytes without a model, no seconds
      without a speed.

DiskAdvice: what a disk besides would bring LRU, from a simulation with one, or from the curve of a long trace.

Memory and disk together hold no more than an LRU cache of their size would, and each block that is found in neither is
written once it has left memory. So the curve bounds what is found and what is written, for models without checkpoints:
what is on disk may be in memory as well, and a prompt may find no room in memory.

Samples of a trace: some of its conversations, drawn by hash, for a cache that is smaller in the same ratio.

Policies differ by less between a sample and the whole than from one another, so samples tell which of them are worth a
run over all of a long trace; several samples tell how far to trust that. A cache that holds only a few prompts is no
small version of one that holds many: parts are as large as it takes, and a sample is the beginning of one.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from radixcache.paging.rates import SURE
from radixcache.stores.sized_store import HEAD_BYTES
from runner.simulate.curve import COUNTS, Curve
from runner.simulate.rows import DiskPlan, SimulationRow
from runner.text import GIB, MIB, plural
from runner.traces.trace import Trace
from runner.traces.trace_reader import TurnInference


@dataclass(frozen=True, slots=True)
class DiskAdvice:
    """What comes of a disk over a whole trace.

    Attributes:
        plan: the disk.
        alone, token_hit_ratio: prompt tokens that need no prefill without it and with it, as shares.
        written_bytes: what is written to it.
        is_estimate: they are bounds, by the curve: no more is found, no less is written. Else it was simulated.
    """

    plan: DiskPlan
    alone: float
    token_hit_ratio: float
    written_bytes: int
    is_estimate: bool

    @classmethod
    def simulated(cls, row: SimulationRow, alone: float) -> DiskAdvice:
        """What a simulation with a disk came to, and without one the token hit ratio."""
        assert row.disk is not None, row
        return cls(row.disk.plan, alone, row.token_hit_ratio, row.disk.written_bytes, is_estimate=False)

    @classmethod
    def estimated(
        cls, curve: Curve, plan: DiskPlan, capacity_blocks: int, block_tokens: int, block_bytes: int
    ) -> DiskAdvice:
        """What a disk beside memory for so many blocks comes to at best; where it is too slow it is not read."""
        file_bytes = block_bytes + HEAD_BYTES
        is_read = file_bytes / plan.read_bytes_per_s <= SURE * block_tokens / plan.prefill_tokens_per_s
        together = capacity_blocks + plan.budget_bytes // file_bytes
        missed = round((1 - curve.block_hit_ratio_at(together)) * curve.block_refs)
        return cls(
            plan,
            curve.token_hit_ratio_at(capacity_blocks),
            curve.token_hit_ratio_at(together if is_read else capacity_blocks),
            max(0, missed - capacity_blocks) * file_bytes,
            is_estimate=True,
        )

    @property
    def note(self) -> str:
        """That in a sentence."""
        plan, most, more = self.plan, "up to " if self.is_estimate else "", " or more" if self.is_estimate else ""
        return (
            f"With a disk of {plan.budget_bytes / GIB:,.2f} GiB besides, lru saves {most}{self.token_hit_ratio:.1%} of"
            f" prefill instead of {self.alone:.1%}, and writes {self.written_bytes / GIB:,.2f} GiB{more} to it, if"
            f" that reads {plan.read_bytes_per_s / MIB:,.0f} MiB/s and the model prefills"
            f" {plan.prefill_tokens_per_s:,.0f} tokens/s."
        )


#: How many samples there are, block references of each, and how many prompts at least its cache has room for.
SAMPLES, SAMPLE_REFS, LEAST_PROMPTS = 3, 25_000, 8
#: Up to so many block references every policy is simulated on the whole trace.
WHOLE_REFS = 200_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much more of prompt tokens a policy finds than LRU, as a share, over samples, and the standard error of that.

    The samples differ by far more than the policies on each of them, so differences are what is averaged.
    """

    policy: str
    gain: float
    error: float


def parts_of(trace: Trace, capacity_blocks: int) -> int:
    """Into how many parts a trace is cut for samples at a capacity."""
    prompt_blocks = trace.block_refs / len(trace.requests)
    most = int(capacity_blocks / (LEAST_PROMPTS * prompt_blocks))
    return max(1, min(most, trace.block_refs // SAMPLE_REFS))


def samples_of(trace: Trace, parts: int, *, seed: int = 0) -> list[Trace]:
    """The beginnings of SAMPLES of so many parts of a trace; of fewer parts also what comes behind those beginnings."""
    inference = TurnInference(trace.block_tokens)
    drawn: dict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(trace.requests):
        name = request.session or str(inference.place(request)[0])
        digest = hashlib.blake2b(f"{seed} {name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        drawn[int.from_bytes(digest, "big") % parts].append(index)
    samples = []
    for number in range(SAMPLES):
        window, part = divmod(number, parts)
        indices = drawn[part]
        ends = accumulate(len(trace.requests[index].keys) for index in indices)
        chosen = [index for index, end in zip(indices, ends, strict=True) if (end - 1) // SAMPLE_REFS == window]
        if chosen:
            requests = [trace.requests[index] for index in chosen]
            samples.append(replace(trace, name=f"{trace.name} {number + 1}", requests=requests))
    return samples


def estimates_of(rows: Sequence[SimulationRow]) -> list[Estimate]:
    """What rows over samples come to, LRU's among them, the best policy first; LRU before those that do as well."""
    lru = {row.trace: row.token_hit_ratio for row in rows if row.policy == "lru"}
    gains: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        gains[row.policy].append(row.token_hit_ratio - lru[row.trace])
    found = [
        Estimate(policy, fmean(each), stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan"))
        for policy, each in gains.items()
    ]
    return sorted(found, key=lambda each: (-each.gain, each.policy != "lru"))


def apart(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Of policies that come to the same the first."""
    return list({f"{each.gain:.6f}": each for each in reversed(estimates)}.values())[::-1]


def best_two(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The two best that are worth a run: LRU, and those that are ahead of it by more than their standard error."""
    return [each for each in apart(estimates) if each.policy == "lru" or each.gain > each.error][:2]


#: Shares of what an infinite cache saves at which a budget is named.
SHARES = (0.9, 0.99)
#: Policies that look into the future: bounds, not advice.
BOUNDS = ("belady", "belady-bypass")
#: How many policies are named of those that were compared on samples.
NAMED = 4
#: How many times the budget a disk is that was not named.
DISK_FACTOR = 10
#: Ratios closer than this are called level.
LEVEL = 0.0005


@dataclass(frozen=True)
class Budget:
    """A capacity and what LRU saves with it.

    Attributes:
        name: what the capacity stands for.
        saved_s: seconds of prefill saved over the trace; None where the speed is not known.
    """

    name: str
    capacity_blocks: int
    capacity_bytes: int | None
    block_hit_ratio: float
    token_hit_ratio: float
    saved_s: float | None

    @property
    def saved_s_per_gib(self) -> float | None:
        """Seconds saved over the trace per GiB of budget."""
        if self.saved_s is None or not self.capacity_bytes:
            return None
        return self.saved_s / (self.capacity_bytes / GIB)


@dataclass(frozen=True)
class BestPolicy:
    """The best online policy of a simulation at one capacity.

    Attributes:
        gain: its token hit ratio less LRU's; None where LRU was not simulated.
        bound: token hit ratio of the offline optimum, and which; None where it was not simulated.
    """

    policy: str
    capacity_blocks: int
    token_hit_ratio: float
    gain: float | None
    bound: tuple[str, float] | None


@dataclass(frozen=True)
class Advice:
    """What there is to say of a trace. `budgets` are ascending in capacity, `own` is the user's."""

    trace: Trace
    curve: Curve
    block_bytes: int | None
    budgets: tuple[Budget, ...]
    own: Budget | None
    checkpoint_bytes: int
    prefill_tokens_per_s: float | None

    @property
    def prefill_s(self) -> float | None:
        """Seconds of prefill over the trace without a cache."""
        return None if self.prefill_tokens_per_s is None else self.curve.prompt_tokens / self.prefill_tokens_per_s

    @property
    def disk_bytes(self) -> int | None:
        """A disk for the user's budget: some times as large, or room for everything; None where it has no bytes."""
        if self.own is None or self.own.capacity_bytes is None or self.block_bytes is None:
            return None
        return min(
            DISK_FACTOR * self.own.capacity_bytes, self.curve.capacity_for(1.0) * (self.block_bytes + HEAD_BYTES)
        )


def advice_of(
    trace: Trace,
    curve: Curve,
    *,
    token_bytes: int | None = None,
    checkpoint_bytes: int = 0,
    budget_bytes: float | None = None,
    budget_blocks: int | None = None,
    prefill_tokens_per_s: float | None = None,
) -> Advice:
    """Work out the advice.

    Args:
        token_bytes: bytes of cache per token; None or 0 where blocks have no size.
        checkpoint_bytes: bytes of windows and recurrent state per checkpoint, which the curve does not count.
        budget_bytes, budget_blocks: the user's budget, at most one of them; bytes need `token_bytes`.
        prefill_tokens_per_s: how fast the model prefills.
    """
    block_bytes = token_bytes * trace.block_tokens if token_bytes else None
    if budget_bytes is not None:
        if block_bytes is None:
            raise ValueError("a budget in bytes needs the bytes of a token.")
        budget_blocks = int(budget_bytes // block_bytes)

    def budget(name: str, capacity_blocks: int) -> Budget:
        token_ratio = curve.token_hit_ratio_at(capacity_blocks)
        return Budget(
            name,
            capacity_blocks,
            None if block_bytes is None else capacity_blocks * block_bytes,
            curve.block_hit_ratio_at(capacity_blocks),
            token_ratio,
            None if prefill_tokens_per_s is None else token_ratio * curve.prompt_tokens / prefill_tokens_per_s,
        )

    named = [("the knee", curve.knee_blocks())]
    named += [(_name_of(share), curve.capacity_for(share)) for share in SHARES]
    named += [("everything", curve.capacity_for(1.0))]
    budgets = sorted((budget(name, blocks) for name, blocks in named), key=lambda each: each.capacity_blocks)
    own = None if budget_blocks is None else budget("the given budget", budget_blocks)
    return Advice(trace, curve, block_bytes, tuple(budgets), own, checkpoint_bytes, prefill_tokens_per_s)


def _name_of(share: float) -> str:
    return f"{share:.0%} of all that can be saved"


def best_policy(
    rows: Sequence[Mapping[str, Any]], *, trace: str | None = None, capacity_blocks: int | None = None
) -> BestPolicy | None:
    """The best online policy among a simulation's rows at one capacity; None where no row fits.

    Args:
        rows: with trace, policy, capacity_blocks and token_hit_ratio, as `radixcache simulate --json` writes them.
        trace: only rows of this trace; None for all, which must then be of one.
        capacity_blocks: the user's budget; the largest simulated capacity within it counts, or the smallest at all.
    """
    rows = [row for row in rows if trace in (None, row["trace"]) and row["token_hit_ratio"] is not None]
    capacities = sorted({row["capacity_blocks"] for row in rows if row["capacity_blocks"] is not None})
    if not capacities:
        return None
    within = [capacity for capacity in capacities if capacity_blocks is None or capacity <= capacity_blocks]
    capacity = within[-1] if within else capacities[0]
    ratios = {row["policy"]: float(row["token_hit_ratio"]) for row in rows if row["capacity_blocks"] == capacity}
    online = {policy: ratio for policy, ratio in ratios.items() if policy not in BOUNDS}
    if not online:
        return None
    # LRU wins a tie: what is no better than the default is no reason to leave it.
    policy = max(online, key=lambda name: (round(online[name], 6), name == "lru"))
    gain = online[policy] - online["lru"] if "lru" in online else None
    bound = max(((name, ratios[name]) for name in BOUNDS if name in ratios), key=lambda each: each[1], default=None)
    return BestPolicy(policy, capacity, online[policy], gain, bound)


def lru_text(advice: Advice) -> str:
    """What LRU saves, which is known before any policy was simulated."""
    return "\n".join([*_what_can_be_saved(advice), "", *_budget_lines(advice), ""])


def policy_text(advice: Advice, best: BestPolicy | None = None, notes: Sequence[str] = ()) -> str:
    """What policies make of it, and a line to paste. `notes` say how they were compared, or why not."""
    return "\n".join([*_remarks(advice, best, notes), "", paste_line(advice, best)])


def paste_line(advice: Advice, best: BestPolicy | None = None) -> str:
    """The cache that is advised, in Python: the given budget, or room for most of what can be saved."""
    policy = "lru" if best is None else best.policy
    budget = advice.own or next(each for each in advice.budgets if each.name == _name_of(SHARES[0]))
    if budget.capacity_bytes is not None:
        size = f"budget_bytes={max(1, budget.capacity_bytes):_}, "
    else:
        size = f"budget_bytes={budget.capacity_blocks * advice.trace.block_tokens:_} * bytes_per_token, "
    return f'PrefixCache(model, {size if budget.capacity_blocks else ""}policy="{policy}")'


def sample_note(estimates: Sequence[Estimate], samples: Sequence[Trace], whole: Trace) -> str:
    """How policies were compared, and how far that can be trusted."""
    share = fmean(sample.block_refs for sample in samples) / whole.block_refs
    listed = ", ".join(
        f"{each.policy} {100 * each.gain:+.1f} ± {100 * each.error:.1f}" for each in estimates[:NAMED] if each.gain
    )
    return (
        f"Compared on {len(samples)} samples of {share:.1%} of the trace, by conversation; points more than lru, and "
        f"their standard error: {listed or 'none'}. The two best, lru among them where fewer are ahead by more than "
        "that error, then ran on all of it; --full runs every policy, and the optimum."
    )


def advice_document(
    advice: Advice,
    best: BestPolicy | None = None,
    estimates: Sequence[Estimate] = (),
    with_disk: DiskAdvice | None = None,
    *,
    interrupted: bool = False,
) -> dict[str, Any]:
    """The same figures for programs."""
    curve = advice.curve
    every = [*advice.budgets, *([advice.own] if advice.own else [])]
    return {
        "trace": advice.trace.name,
        "requests": len(advice.trace.requests),
        "block_tokens": advice.trace.block_tokens,
        "block_bytes": advice.block_bytes,
        "checkpoint_bytes": advice.checkpoint_bytes,
        "prompt_tokens": curve.prompt_tokens,
        "is_timing_synthetic": advice.trace.is_timing_synthetic,
        "sample_rate": curve.sample_rate,
        "savable_token_ratio": curve.infinite_token_hit_ratio,
        "savable_block_ratio": curve.infinite_block_hit_ratio,
        "prefill_s": advice.prefill_s,
        "budgets": [{**vars(budget), "saved_s_per_gib": budget.saved_s_per_gib} for budget in every],
        "best_policy": None if best is None else vars(best),
        "samples": [asdict(each) for each in estimates],
        "with_disk": None if with_disk is None else asdict(with_disk),
        "sessions_per_hour": advice.trace.sessions_per_hour,
        "paste": paste_line(advice, best),
        "interrupted": interrupted,
    }


def advice_html(
    advice: Advice,
    picture_svg: bytes,
    best: BestPolicy | None = None,
    notes: Sequence[str] = (),
    more: Sequence[bytes] = (),
) -> str:
    """The advice as a page of its own: no script, nothing fetched.

    Args:
        picture_svg: the curve.
        notes: as for `policy_text`.
        more: further pictures, PNG, to show below it.
    """
    header, *rows = _budget_cells(advice)
    table = "".join(
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
        for tag, cells in [("th", header), *(("td", row) for row in rows)]
    )
    paragraphs = "".join(
        f"<p>{html.escape(line)}</p>" for line in [*_what_can_be_saved(advice), *_remarks(advice, best, notes)]
    )
    paragraphs += f"<pre>{html.escape(paste_line(advice, best))}</pre>"
    # Behind the XML prolog, which has no place inside a page.
    svg = picture_svg[picture_svg.index(b"<svg") :].decode()
    pictures = "".join(
        f'<p><img alt="" src="data:image/png;base64,{base64.b64encode(image).decode()}"></p>' for image in more
    )
    title = html.escape(f"Prefix cache for {advice.trace.name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1><table>{table}</table>{paragraphs}{svg}{pictures}</body></html>\n"
    )


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{border:1px solid #bbb;padding:.3rem .7rem;text-align:right}"
    "th:first-child,td:first-child{text-align:left}svg,img{max-width:100%;height:auto}"
)


def _what_can_be_saved(advice: Advice) -> list[str]:
    curve, trace = advice.curve, advice.trace
    lines = [
        f"{trace.name}: {plural(len(trace.requests), 'request')}, {curve.prompt_tokens:,} prompt tokens"
        f"{', synthetic arrivals' if trace.is_timing_synthetic else ''}.",
        f"At most {curve.infinite_token_hit_ratio:.1%} of prefill can be saved by reusing prefixes, in whole blocks of"
        f" {trace.block_tokens} tokens; the rest is seen for the first time.",
    ]
    if trace.sessions_per_hour is not None:
        lines.append(
            f"When sessions begin is not in the data: {trace.sessions_per_hour:g} an hour is assumed, and with it how "
            "many compete for the cache. --sessions-per-hour changes that, and the budgets with it."
        )
    if advice.prefill_s is not None:
        most_s = curve.infinite_token_hit_ratio * advice.prefill_s
        lines.append(
            f"At {advice.prefill_tokens_per_s:,.0f} tokens/s prefill takes {_duration(advice.prefill_s)} without a"
            f" cache and at least {_duration(advice.prefill_s - most_s)} with one."
        )
    return lines


def _budget_lines(advice: Advice) -> list[str]:
    cells = _budget_cells(advice)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]))
    return lines


def _budget_cells(advice: Advice) -> list[list[str]]:
    """A header and a row per budget, with the columns that are known."""
    every = [*advice.budgets, *([advice.own] if advice.own else [])]
    header = ["LRU with room for", "blocks", "tokens"]
    header += [] if advice.block_bytes is None else ["GiB"]
    header += ["prefill saved"]
    header += [] if advice.prefill_tokens_per_s is None else ["seconds saved"]
    has_rate = advice.prefill_tokens_per_s is not None and advice.block_bytes is not None
    header += ["s per GiB"] if has_rate else []
    rows = [header]
    for budget in every:
        tokens = budget.capacity_blocks * advice.trace.block_tokens
        row = [budget.name, f"{budget.capacity_blocks:,}", f"{tokens:,}"]
        row += [] if budget.capacity_bytes is None else [f"{budget.capacity_bytes / GIB:,.2f}"]
        row += [f"{budget.token_hit_ratio:.1%}"]
        row += [] if budget.saved_s is None else [f"{budget.saved_s:,.0f}"]
        rate = budget.saved_s_per_gib
        row += ["-" if rate is None else f"{rate:,.1f}"] if has_rate else []
        rows.append(row)
    return rows


def _remarks(advice: Advice, best: BestPolicy | None, notes: Sequence[str]) -> list[str]:
    remarks = list(notes)
    if best is not None:
        remarks.append(_best_sentence(best))
    elif not notes:
        remarks.append("These are LRU's figures; radixcache simulate compares policies at a budget.")
    if advice.block_bytes is None:
        remarks.append("Capacities are in tokens: --model-config or --bytes-per-token turns them into GiB.")
    if advice.checkpoint_bytes:
        remarks.append(
            f"The model also keeps checkpoints of {advice.checkpoint_bytes:,} bytes, which are not in these budgets,"
            " and resumes only at them; radixcache simulate counts both."
        )
    if advice.curve.sample_rate < 1:
        error = advice.curve.block_error_at(advice.curve.knee_blocks())
        spread = f"{error:.4f}" if error is not None and error == error else "unknown"
        remarks.append(
            f"Estimated from {advice.curve.sample_rate:.1%} of the blocks; the standard error of the block hit ratio at"
            f" the knee is {spread}."
        )
    return [*remarks, COUNTS]


def _best_sentence(best: BestPolicy) -> str:
    sentence = (
        f"Best policy at {best.capacity_blocks:,} blocks: {best.policy}, {best.token_hit_ratio:.1%} of prefill saved"
    )
    if best.gain is not None and best.policy != "lru":
        is_level = best.gain < LEVEL
        sentence += ", level with lru" if is_level else f", {100 * best.gain:.1f} points more than lru"
    if best.bound is not None:
        name, ratio = best.bound
        sentence += f"; {name}, which knows the future, reaches {ratio:.1%}"
    return sentence + "."


def _duration(value_s: float) -> str:
    return f"{value_s:,.0f} s" if value_s < 7200 else f"{value_s / 3600:,.1f} h"
