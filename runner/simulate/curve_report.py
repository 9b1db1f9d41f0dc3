"""A curve of LRU hit ratios as a table, as JSON and as a picture. This file never imports MLX."""

from typing import Any

import numpy as np
from rich.table import Table

from runner.files.picture import new_figure, picture_bytes
from runner.files.units import GIB
from runner.simulate.mrc import Curve
from runner.traces.request import Trace

#: JSON and pictures hold at most so many points of a curve, even on a logarithmic axis.
MOST_POINTS = 400
FIGURE_INCHES = (10.0, 6.0)
COUNTS = (
    "Block hit ratio: blocks found in the cache over all blocks of all prompts. Token hit ratio: their tokens over all"
    " prompt tokens. LRU on whole blocks; what a running request uses is never evicted."
)


def capacities_of(curve: Curve) -> list[int]:
    """Round capacities, 1, 2 and 5 times the powers of ten, up to the first one that no more than all blocks fill."""
    capacities = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            capacities.append(factor * power)
            if factor * power >= curve.unique_blocks:
                return capacities
        power *= 10


def points_of(curve: Curve) -> list[int]:
    """Capacities for JSON and pictures: at most `MOST_POINTS`, with the knee and the round ones among them."""
    steps = curve.capacity_blocks
    if len(steps) > MOST_POINTS:
        wanted = np.geomspace(max(1, steps[0]), steps[-1], MOST_POINTS)
        steps = steps[np.unique(np.minimum(np.searchsorted(steps, wanted), len(steps) - 1))]
    special = [curve.knee_blocks(), curve.capacity_for(0.9), curve.capacity_for(0.99), *capacities_of(curve)]
    return sorted({int(step) for step in steps} | {capacity for capacity in special if capacity > 0})


def curve_rows(curve: Curve, capacities: list[int], block_bytes: int | None) -> list[dict[str, Any]]:
    """A row per capacity; `capacity_bytes` is None where the size of a block is not known."""
    return [
        {
            "capacity_blocks": capacity,
            "capacity_bytes": None if block_bytes is None else capacity * block_bytes,
            "block_hit_ratio": curve.block_hit_ratio_at(capacity),
            "token_hit_ratio": curve.token_hit_ratio_at(capacity),
            "block_error": curve.block_error_at(capacity),
        }
        for capacity in capacities
    ]


def curve_table(curve: Curve, trace: Trace, block_bytes: int | None) -> Table:
    """The round capacities, those where the ratio begins to rise and those where it is within reach of its end."""
    table = Table()
    headers = ["capacity\nblocks", "capacity\ntokens"]
    headers += [] if block_bytes is None else ["capacity\nGiB"]
    headers += ["block hit\nratio", "token hit\nratio"]
    headers += [] if curve.block_error is None else ["standard\nerror"]
    for header in headers:
        table.add_column(header, justify="right")
    least = int(curve.capacity_blocks[0]) if len(curve.capacity_blocks) else 1
    for row in curve_rows(curve, [c for c in capacities_of(curve) if c >= least], block_bytes):
        capacity = row["capacity_blocks"]
        cells = [f"{capacity:,}", f"{capacity * trace.block_tokens:,}"]
        cells += [] if block_bytes is None else [f"{row['capacity_bytes'] / GIB:,.2f}"]
        cells += [f"{row['block_hit_ratio']:.4f}", f"{row['token_hit_ratio']:.4f}"]
        cells += [] if curve.block_error is None else [_error_cell(row["block_error"])]
        table.add_row(*cells)
    return table


def curve_document(curve: Curve, trace: Trace, block_bytes: int | None, **about: Any) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "trace": trace.name,
        "policy": "lru",
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "block_refs": curve.block_refs,
        "unique_blocks": curve.unique_blocks,
        "prompt_tokens": curve.prompt_tokens,
        "is_timing_synthetic": trace.is_timing_synthetic,
        "skipped": len(trace.skipped),
        "sample_rate": curve.sample_rate,
        "infinite_block_hit_ratio": curve.infinite_block_hit_ratio,
        "infinite_token_hit_ratio": curve.infinite_token_hit_ratio,
        "knee_blocks": curve.knee_blocks(),
        "counts": COUNTS,
        "rows": [
            {**row, "block_error": None if row["block_error"] != row["block_error"] else row["block_error"]}
            for row in curve_rows(curve, points_of(curve), block_bytes)
        ],
        **about,
    }


def curve_picture(
    curve: Curve, trace: Trace, block_bytes: int | None, *, marks: dict[str, int], file_format: str
) -> bytes:
    """The curve over capacity, its error where it was sampled, and marked capacities; PNG, SVG or PDF."""
    figure = new_figure(*FIGURE_INCHES)
    axes = figure.subplots()
    unit_blocks, unit = (1.0, "blocks") if block_bytes is None else (GIB / block_bytes, "GiB")
    capacities = points_of(curve)
    positions = [capacity / unit_blocks for capacity in capacities]
    ratios = np.array([curve.block_hit_ratio_at(capacity) for capacity in capacities])
    axes.step(positions, ratios, where="post", color="#D55E00", label="LRU")
    if curve.block_error is not None:
        errors = np.array([curve.block_error_at(capacity) for capacity in capacities], dtype=float)
        axes.fill_between(
            positions, ratios - errors, ratios + errors, step="post", color="#D55E00", alpha=0.2, label="standard error"
        )
    axes.axhline(curve.infinite_block_hit_ratio, color="black", linestyle=":", linewidth=1.2, label="infinite cache")
    for (name, capacity), color in zip(marks.items(), ("#0072B2", "#009E73", "#CC79A7", "#56B4E9"), strict=False):
        axes.axvline(capacity / unit_blocks, color=color, linestyle="--", linewidth=1, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, max(0.01, 1.08 * curve.infinite_block_hit_ratio))
    axes.set_xlabel(f"capacity, {unit} of {trace.block_tokens} tokens" if unit == "blocks" else "capacity, GiB")
    axes.set_ylabel("block hit ratio: blocks found / blocks asked for")
    synthetic = ", synthetic arrivals" if trace.is_timing_synthetic else ""
    axes.set_title(f"{trace.name}: {len(trace.requests):,} requests{synthetic}", parse_math=False)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left")
    return picture_bytes(figure, file_format)


def _error_cell(error: float) -> str:
    return f"{error:.4f}" if error == error else "unknown"
