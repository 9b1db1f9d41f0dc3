"""Advice on a trace: the most that a prefix cache can save, the budgets for it, and the best policy.

`Advice` needs only the LRU curve. `best_policy` compares the results of simulations. Shares are shares of prompt
tokens.

  AD1  An unknown figure is None, and the text names what it needs: a model for bytes, a speed for seconds.

For long traces, policies are compared on samples: some conversations, chosen by hash. The cache is smaller in the same
ratio. The difference between two policies is nearly the same on a sample and on the whole trace. Several samples give
its standard error. A cache for a few prompts behaves unlike a large one, so `parts_of` keeps samples large enough.
This file never imports MLX.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from radixcache.paging.rates import SURE
from radixcache.stores.sized_store import HEAD_BYTES
from runner.simulate.curve import CURVE_COUNTS, Curve, curve_rows
from runner.simulate.rows import DiskPlan, SimulationRow
from runner.text import GIB, MIB, Column, cells, figures_table, plural
from runner.traces.trace import Trace, TurnInference

#: The number of samples, block references per sample, and the fewest prompts that fit in the cache of a sample.
SAMPLES, SAMPLE_REFS, LEAST_PROMPTS = 3, 25_000, 8
#: With at most this many block references, all policies run on the whole trace.
WHOLE_REFS = 200_000
#: The table has budgets that save these shares of what an infinite cache saves.
SHARES, SHARE_NAME, BUDGETS = (0.9, 0.99), "{:.0%} of savings", "LRU budget for"
#: Policies that know the future: bounds, not advice.
BOUNDS = ("belady", "belady-bypass")
#: A policy whose result depends on its seed: it is not recommended.
BY_CHANCE = "random"
#: How many policies the note on samples lists.
NAMED = 4
#: The default size of a disk, as a multiple of the budget.
DISK_FACTOR = 10
#: A smaller gain over LRU does not count.
LEVEL = 0.0005


@dataclass(frozen=True, slots=True)
class Estimate:
    """How many more prompt tokens than LRU a policy finds, as a share: mean over samples, and its standard error."""

    policy: str
    gain: float
    error: float


def parts_of(trace: Trace, capacity_blocks: int) -> int:
    """How many parts to divide the conversations of a trace into, for samples at a capacity."""
    prompt_blocks = trace.block_refs / len(trace.requests)
    most = int(capacity_blocks / (LEAST_PROMPTS * prompt_blocks))
    return max(1, min(most, trace.block_refs // SAMPLE_REFS))


def samples_of(trace: Trace, parts: int, *, seed: int = 0) -> list[Trace]:
    """SAMPLES samples: the first SAMPLE_REFS references of each part; with fewer parts, also the next of a part."""
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
    """Estimates from rows over samples, with rows of LRU: the best policy first, LRU first among equal ones."""
    lru = {row.trace: row.token_hit_ratio for row in rows if row.policy == "lru"}
    gains: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        gains[row.policy].append(row.token_hit_ratio - lru[row.trace])
    found = [
        Estimate(policy, fmean(each), stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan"))
        for policy, each in gains.items()
    ]
    return sorted(found, key=lambda each: (-each.gain, each.policy != "lru"))


def distinct(estimates: Sequence[Estimate]) -> list[Estimate]:
    return list({f"{each.gain:.6f}": each for each in reversed(estimates)}.values())[::-1]


def best_two(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The two best of LRU and the policies that beat it by more than their standard error."""
    return [each for each in distinct(estimates) if each.policy == "lru" or each.gain > each.error][:2]


def sample_note(estimates: Sequence[Estimate], samples: Sequence[Trace], whole: Trace) -> str:
    share = fmean(sample.block_refs for sample in samples) / whole.block_refs
    listed = ", ".join(
        f"{each.policy} {100 * each.gain:+.1f} ± {100 * each.error:.1f}" for each in estimates[:NAMED] if each.gain
    )
    return (
        f"Policies were compared on {len(samples)} samples of conversations, {share:.1%} of the trace each. Percentage "
        f"points over lru, ± standard error: {listed or 'none'}. The two best of lru and the policies ahead by more "
        "than their error then ran on the whole trace. --full runs every policy, and the optimum."
    )


@dataclass(frozen=True, slots=True)
class DiskAdvice:
    """What a disk saves with LRU over a whole trace.

    `alone` and `token_hit_ratio` are the shares of prompt tokens without prefill, without and with the disk. For an
    estimate, from the curve of a model without checkpoints, `token_hit_ratio` is an upper bound: memory and disk save
    at most what one LRU cache of both sizes saves. `written_bytes` is a lower bound: blocks are written when evicted.
    """

    plan: DiskPlan
    alone: float
    token_hit_ratio: float
    written_bytes: int
    is_estimate: bool

    @property
    def note(self) -> str:
        plan, most, more = self.plan, "up to " if self.is_estimate else "", " or more" if self.is_estimate else ""
        return (
            f"With a disk of {plan.budget_bytes / GIB:,.2f} GiB, lru saves {most}{self.token_hit_ratio:.1%} of prefill"
            f" instead of {self.alone:.1%}, and writes {self.written_bytes / GIB:,.2f} GiB{more} to the disk. This"
            f" assumes a disk that reads {plan.read_bytes_per_s / MIB:,.0f} MiB/s and a model that prefills"
            f" {plan.prefill_tokens_per_s:,.0f} tokens/s."
        )


def estimated_disk(
    curve: Curve, plan: DiskPlan, capacity_blocks: int, block_tokens: int, block_bytes: int
) -> DiskAdvice:
    """Bounds for a disk in addition to memory of `capacity_blocks`. A disk that is too slow is not read."""
    file_bytes = block_bytes + HEAD_BYTES
    is_read = file_bytes / plan.read_bytes_per_s <= SURE * block_tokens / plan.prefill_tokens_per_s
    together = capacity_blocks + plan.budget_bytes // file_bytes
    missed = round((1 - curve.block_hit_ratio_at(together)) * curve.block_refs)
    alone = curve.token_hit_ratio_at(capacity_blocks)
    found = curve.token_hit_ratio_at(together) if is_read else alone
    return DiskAdvice(plan, alone, found, max(0, missed - capacity_blocks) * file_bytes, is_estimate=True)


@dataclass(frozen=True)
class Budget:
    """A capacity with a name, and what LRU saves with it over the trace."""

    name: str
    capacity_blocks: int
    capacity_bytes: int | None
    block_hit_ratio: float
    token_hit_ratio: float
    saved_s: float | None
    saved_s_per_gib: float | None


@dataclass(frozen=True)
class BestPolicy:
    """The best online policy at one capacity, its gain over LRU, and the best policy that knows the future."""

    policy: str
    capacity_blocks: int
    token_hit_ratio: float
    gain: float
    bound: tuple[str, float] | None


@dataclass(frozen=True)
class Advice:
    """Figures about a trace under LRU. The user's budget is in bytes, if `token_bytes` is known, or in blocks.

    The curve does not count `checkpoint_bytes`: the windows and the recurrent state of a checkpoint.
    """

    trace: Trace
    curve: Curve
    token_bytes: int | None = None
    checkpoint_bytes: int = 0
    budget_bytes: float | None = None
    budget_blocks: int | None = None
    prefill_tokens_per_s: float | None = None

    @property
    def block_bytes(self) -> int | None:
        return self.token_bytes * self.trace.block_tokens if self.token_bytes else None

    @cached_property
    def budgets(self) -> list[Budget]:
        """The budgets that have a name, ascending in capacity."""
        named = [("the knee", self.curve.knee_blocks())]
        named += [(SHARE_NAME.format(share), self.curve.capacity_for(share)) for share in SHARES]
        named += [("everything", self.curve.capacity_for(1.0))]
        return sorted((self._budget(name, blocks) for name, blocks in named), key=lambda each: each.capacity_blocks)

    @cached_property
    def own(self) -> Budget | None:
        """The user's budget."""
        blocks = self.budget_blocks
        if self.budget_bytes is not None:
            assert self.block_bytes is not None, "a budget in bytes needs token_bytes"
            blocks = int(self.budget_bytes // self.block_bytes)
        return None if blocks is None else self._budget("your budget", blocks)

    @property
    def all_budgets(self) -> list[Budget]:
        return [*self.budgets, *([self.own] if self.own else [])]

    @property
    def prefill_s(self) -> float | None:
        return None if self.prefill_tokens_per_s is None else self.curve.prompt_tokens / self.prefill_tokens_per_s

    @property
    def disk_bytes(self) -> int | None:
        """The default disk: `DISK_FACTOR` times the user's budget, at most room for all; None: no bytes are known."""
        if self.own is None or self.own.capacity_bytes is None or self.block_bytes is None:
            return None
        everything = self.curve.capacity_for(1.0) * (self.block_bytes + HEAD_BYTES)
        return min(DISK_FACTOR * self.own.capacity_bytes, everything)

    def _budget(self, name: str, capacity_blocks: int) -> Budget:
        curve, ratio = self.curve, self.curve.token_hit_ratio_at(capacity_blocks)
        nbytes = None if self.block_bytes is None else capacity_blocks * self.block_bytes
        saved_s = None if self.prefill_tokens_per_s is None else ratio * curve.prompt_tokens / self.prefill_tokens_per_s
        rate = None if saved_s is None or not nbytes else saved_s / (nbytes / GIB)
        return Budget(name, capacity_blocks, nbytes, curve.block_hit_ratio_at(capacity_blocks), ratio, saved_s, rate)


def best_policy(token_hit_ratios: Mapping[str, float], capacity_blocks: int) -> BestPolicy:
    """The best online policy at a capacity: LRU unless another policy is ahead by LEVEL."""
    online = {
        policy: ratio for policy, ratio in token_hit_ratios.items() if policy not in BOUNDS and policy != BY_CHANCE
    }
    policy = max(online, key=online.__getitem__)
    if online["lru"] > online[policy] - LEVEL:
        policy = "lru"
    bounds = [(name, token_hit_ratios[name]) for name in BOUNDS if name in token_hit_ratios]
    bound = max(bounds, key=lambda each: each[1], default=None)
    return BestPolicy(policy, capacity_blocks, online[policy], online[policy] - online["lru"], bound)


def lru_report(advice: Advice) -> tuple[str, Table, str]:
    """What a cache can save, the budgets with LRU, and an empty line."""
    return "\n".join([*_savable(advice), ""]), figures_table(_budget_cells(advice), names=(BUDGETS,)), ""


def policy_text(advice: Advice, best: BestPolicy | None = None, notes: Sequence[str] = ()) -> str:
    return "\n".join([*_remarks(advice, best, notes), "", paste_line(advice, best)])


def paste_line(advice: Advice, best: BestPolicy | None = None) -> str:
    policy = "lru" if best is None else best.policy
    budget = advice.own or next(each for each in advice.budgets if each.name == SHARE_NAME.format(SHARES[0]))
    if budget.capacity_bytes is not None:
        size = f"budget_bytes={max(1, budget.capacity_bytes):_}, "
    else:
        size = f"budget_bytes={budget.capacity_blocks * advice.trace.block_tokens:_} * bytes_per_token, "
    return f'PrefixCache(model, {size if budget.capacity_blocks else ""}policy="{policy}")'


def advice_document(
    advice: Advice,
    best: BestPolicy | None = None,
    estimates: Sequence[Estimate] = (),
    with_disk: DiskAdvice | None = None,
    *,
    interrupted: bool = False,
) -> dict[str, Any]:
    curve, trace = advice.curve, advice.trace
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "block_bytes": advice.block_bytes,
        "checkpoint_bytes": advice.checkpoint_bytes,
        "prompt_tokens": curve.prompt_tokens,
        "is_timing_synthetic": trace.is_timing_synthetic,
        "savable_token_ratio": curve.infinite_token_hit_ratio,
        "savable_block_ratio": curve.infinite_block_hit_ratio,
        "prefill_s": advice.prefill_s,
        "budgets": [asdict(budget) for budget in advice.all_budgets],
        "block_refs": curve.block_refs,
        "unique_blocks": curve.unique_blocks,
        "curve": curve_rows(curve),
        "best_policy": None if best is None else asdict(best),
        "samples": [asdict(each) for each in estimates],
        "with_disk": None if with_disk is None else asdict(with_disk),
        "sessions_per_hour": trace.sessions_per_hour,
        "paste": paste_line(advice, best),
        "interrupted": interrupted,
    }


def _savable(advice: Advice) -> list[str]:
    curve, trace = advice.curve, advice.trace
    lines = [
        f"{trace.name}: {plural(len(trace.requests), 'request')}, {curve.prompt_tokens:,} prompt tokens"
        f"{', synthetic arrivals' if trace.is_timing_synthetic else ''}.",
        f"A prefix cache can save at most {curve.infinite_token_hit_ratio:.1%} of prefill, in whole blocks of"
        f" {trace.block_tokens} tokens. The other tokens are new.",
    ]
    if trace.sessions_per_hour is not None:
        lines.append(
            f"The data has no arrival times; {trace.sessions_per_hour:g} sessions per hour are assumed. With another "
            "--sessions-per-hour, more or fewer sessions compete for the cache, and the budgets change."
        )
    if advice.prefill_s is not None:
        most_s = curve.infinite_token_hit_ratio * advice.prefill_s
        lines.append(
            f"At {advice.prefill_tokens_per_s:,.0f} tokens/s prefill takes {_duration(advice.prefill_s)} without a"
            f" cache and at least {_duration(advice.prefill_s - most_s)} with one."
        )
    return lines


def _budget_cells(advice: Advice) -> list[list[str]]:
    """The columns that are known, with a figure per budget."""
    columns = [
        Column(BUDGETS, "name"),
        Column("blocks", "capacity_blocks", ","),
        Column("tokens", lambda budget: budget.capacity_blocks * advice.trace.block_tokens, ","),
        Column("GiB", "capacity_bytes", ",.2f", GIB, is_optional=True),
        Column("prefill saved", "token_hit_ratio", ".1%"),
        Column("seconds saved", "saved_s", ",.0f", is_optional=True),
    ]
    if advice.prefill_tokens_per_s is not None and advice.block_bytes is not None:
        columns.append(Column("s saved per GiB", "saved_s_per_gib", ",.1f"))
    return cells(columns, advice.all_budgets)


def _remarks(advice: Advice, best: BestPolicy | None, notes: Sequence[str]) -> list[str]:
    remarks = list(notes)
    if best is not None:
        remarks.append(_best_sentence(best))
    elif not notes:
        remarks.append("These figures are for LRU. Give --budget-gib or --capacity-blocks to compare policies.")
    if advice.block_bytes is None:
        remarks.append("Capacities are in tokens; with --model-config or --bytes-per-token also in GiB.")
    if advice.checkpoint_bytes:
        remarks.append(
            f"The model resumes only at checkpoints of {advice.checkpoint_bytes:,} bytes each. These budgets leave"
            " checkpoints out; radixcache simulate counts them."
        )
    return [*remarks, CURVE_COUNTS]


def _best_sentence(best: BestPolicy) -> str:
    sentence = (
        f"Best policy at {best.capacity_blocks:,} blocks: {best.policy}, {best.token_hit_ratio:.1%} of prefill saved"
    )
    if best.policy != "lru":
        sentence += f", {100 * best.gain:.1f} points more than lru"
    if best.bound is not None:
        name, ratio = best.bound
        sentence += f"; {name}, which knows the future, reaches {ratio:.1%}"
    return sentence + "."


def _duration(value_s: float) -> str:
    return f"{value_s:,.0f} s" if value_s < 7200 else f"{value_s / 3600:,.1f} h"
