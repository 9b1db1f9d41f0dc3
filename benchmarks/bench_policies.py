"""Compare eviction policies by hit rate at six capacities, and with the best possible policy.

The simulator runs every policy over the Mooncake conversation trace and coding-agent sessions. The simulator is the
deployed cache with sizes in place of arrays. Then the benchmark measures the simulator: block references per second,
the time of a request by the amount of stored state, and the miss-ratio curve in one pass.

The traces are mooncake/conversation_trace.jsonl and claude-code-traces/traces/ in --traces FOLDER (default: shared/data
beside the repository). Without that folder, the benchmark uses a made-up trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.harness.record import Spread, arguments, publish, say
from benchmarks.harness.recorded_traces import add_traces, traces_in
from policies import OFFLINE_POLICIES, POLICIES
from runner.simulate.curve import lru_curve
from runner.simulate.grid import run_locally
from runner.simulate.rows import SimulationRow, infinite_ratio, policy_notes
from runner.simulate.simulator import BlockSizes, Simulation, SimulationJob, simulate
from runner.traces.trace import Trace, TraceRequest

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
SPEED_BLOCKS = (10_000, 50_000)
STORED_NODES = (1_000, 10_000, 100_000, 300_000)
REPEATS = 5
PARTS = ("grid", "speed")


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add)
    traces = traces_in(options.traces, options.quick)
    if "grid" in options.parts:
        _publish_grid(traces, options)
    if "speed" in options.parts:
        speed = list(_speeds(traces[0], options.quick))
        publish("policies-speed", "Speed of the simulator", speed, folder=options.results, repeats=REPEATS)


def _add(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")


def _publish_grid(traces: Sequence[Trace], options: argparse.Namespace) -> None:
    capacities = (20, 100) if options.quick else CAPACITIES
    names = ["lru", "belady"] if options.quick else [*sorted(POLICIES), *sorted(OFFLINE_POLICIES)]
    began = time.perf_counter()
    jobs = [
        SimulationJob(index, name, blocks) for index in range(len(traces)) for name in names for blocks in capacities
    ]
    rows = []
    for row in run_locally(traces, jobs, processes=1 if options.quick else min(2, os.cpu_count() or 1)):
        rows.append(row)
        say(f"{row.trace}: {row.policy} at {row.capacity_blocks:,} blocks: {row.block_hit_ratio:.4f}")
    minutes = (time.perf_counter() - began) / 60
    table = _table(rows, capacities)
    infinite = {trace.name: infinite_ratio(trace) for trace in traces}
    title = "Block hit ratio of eviction policies"
    about = "\n".join([conclusion(rows, minutes), *policy_notes(traces, rows)])
    more = {"infinite_block_hit_ratio": infinite, "grid": [asdict(row) for row in rows]}
    publish("policies", title, table, folder=options.results, repeats=1, conclusion=about, **more)


def conclusion(rows: Sequence[SimulationRow], minutes: float) -> str:
    """Name the best online policy of each trace, at the capacity where LRU is farthest from the optimum."""
    said = []
    for trace in dict.fromkeys(row.trace for row in rows):
        found = {(row.policy, row.capacity_blocks): row.block_hit_ratio for row in rows if row.trace == trace}
        gaps = {blocks: found["belady", blocks] - found["lru", blocks] for name, blocks in found if name == "lru"}
        blocks = max(gaps, key=lambda each: gaps[each])
        online = {
            name: ratio for (name, each), ratio in found.items() if each == blocks and name not in OFFLINE_POLICIES
        }
        best = max(online, key=lambda name: online[name])
        said.append(
            f"{trace} at {blocks:,} blocks: lru {found['lru', blocks]:.4f}, best online policy {best} "
            f"{online[best]:.4f}, optimum {found['belady', blocks]:.4f}"
        )
    return f"{'; '.join(said)}. The grid took {minutes:.1f} minutes."


def _table(rows: Sequence[SimulationRow], capacities: Sequence[int]) -> list[dict[str, Any]]:
    found = {(row.trace, row.policy, row.capacity_blocks): row.block_hit_ratio for row in rows}
    return [
        {"trace": trace, "policy": policy}
        | {f"{blocks:,} blocks": f"{found[trace, policy, blocks]:.4f}" for blocks in capacities}
        for trace in dict.fromkeys(row.trace for row in rows)
        for policy in dict.fromkeys(row.policy for row in rows)
    ]


def _speeds(trace: Trace, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each measurement, with the spread over the repeats."""
    for blocks in (100,) if quick else SPEED_BLOCKS:
        rates = [row.block_refs / row.seconds for row in (simulate(trace, "lru", blocks) for _ in range(REPEATS))]
        yield _figure(f"{trace.name}, lru at {blocks:,} blocks", "block references/s", rates)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        lru_curve(trace)
        seconds.append(time.perf_counter() - began)
    yield _figure(f"{trace.name}, miss-ratio curve at all capacities", "s", seconds)
    for nodes in (50, 200) if quick else STORED_NODES:
        yield _figure(f"a request with {nodes:,} conversations stored", "us", _request_us(nodes))


def _request_us(nodes: int) -> list[float]:
    """Return the us per request of each repeat, in a cache full of conversations of 4 blocks."""
    request = iter(_conversation(index) for index in range(nodes + 200 * REPEATS))
    simulation = Simulation(Trace("made", 512, [_conversation(0)], True, ""), "lru", 4 * nodes, BlockSizes())
    for _ in range(nodes):
        simulation.serve(next(request))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(200):
            simulation.serve(next(request))
        found.append((time.perf_counter() - began) / 200 * 1e6)
    return found


def _conversation(index: int) -> TraceRequest:
    return TraceRequest(np.arange(4 * index, 4 * index + 4, dtype=np.int64), 2_048, 1, index)


def _figure(what: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    spread = Spread.of(values)
    return {"what": what, "unit": unit, "median": spread.median, "min": spread.least, "max": spread.most}


if __name__ == "__main__":
    main(sys.argv[1:])
