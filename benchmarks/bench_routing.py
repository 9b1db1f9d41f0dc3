"""Compare routers by cached tokens, TTFT and load balance.

Simulate four routers in front of 1 to 64 replicas, with the deployed cache and router code. The traces are the Mooncake
conversation trace and coding-agent sessions, with their arrival times. Two columns divide the hits: `hits / infinite`
by the hits of one cache without a limit, `hits / pooled` by the hits of one cache with the budgets of all replicas.
More tables, at 8 replicas: other speeds, other start times of the sessions, the prefix router without each of its
terms, and a shared tier.

A Mooncake replica prefills 8,000 tokens/s and generates 500 tokens/s: 8 slower replicas cannot serve this hour. A
coding-agent replica prefills 1,000 tokens/s and generates 50 tokens/s. A replica holds about 5 million tokens of
Mooncake, or 2.6 million tokens of the coding agents. The simulation reads no clock: results are the same on any
machine.

The traces are mooncake/conversation_trace.jsonl and claude-code-traces/traces/ in --traces FOLDER (default: shared/data
beside the repository). Without that folder, the benchmark uses a made-up trace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.record import arguments, publish, say
from benchmarks.harness.recorded_traces import BESIDE, TRACES, add_traces, traces_in
from runner.models import ModelBytes
from runner.routing import ROUTERS, prefix_router
from runner.simulate.grid import run_locally
from runner.simulate.replicas import ReplicaJob
from runner.simulate.rows import DiskPlan, ReplicaRow, Speeds
from runner.simulate.simulator import SimulationJob
from runner.text import GIB
from runner.traces.trace import Trace
from runner.traces.trace_reader import read_trace

COUNTS = (1, 2, 4, 8, 16, 64)
#: Replicas in the tables that vary something else.
MANY = 8
SEEDS = 5
#: 8 billion parameters, 32 layers of 8 heads of 128 in 16 bits.
MODEL = ModelBytes("8B", 128 << 10, 0, (), "float16")
#: The aims: share of the hits of a cache without limit, and 95th percentile of load divided by the mean.
LEAST_FOUND, MOST_LOAD = 0.9, 1.3

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Fleet:
    """The replicas of a trace. At 8,000 tokens/s, prefill is faster than reading over 10 Gbit/s."""

    blocks: int
    speeds: Speeds
    other_speeds: tuple[Speeds, ...]
    gbits_per_s: tuple[float, ...]

    def job(self, router: str, count: int = MANY, *, trace: int = 0) -> ReplicaJob:
        return ReplicaJob(SimulationJob(trace, "lru", self.blocks), router, count, self.speeds)


FLEETS = {
    "mooncake": Fleet(10_000, Speeds(8_000, 500), (Speeds(7_000, 400), Speeds(12_000, 800), Speeds(40_000, 2_000)), ()),
    "coding agents": Fleet(
        40_000, Speeds(1_000, 50), (Speeds(500, 25), Speeds(5_000, 100), Speeds(8_000, 500)), (1, 10)
    ),
}
MADE_UP = Fleet(1_000, Speeds(8_000, 500), (Speeds(4_000, 200),), (10,))


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=add_traces)
    traces = traces_in(options.traces, options.quick)
    counts = (1, 2, MANY) if options.quick else COUNTS
    processes = 1 if options.quick else min(2, os.cpu_count() or 1)
    found = list(_routers(traces, counts, processes))
    pooled = _pooled(traces, counts, processes)
    to_publish = partial(publish, folder=options.results, repeats=1)
    table = [_line(row, **{"hits / pooled": row.token_hit_ratio / pooled[row.trace, row.replicas]}) for row in found]
    about = conclusion(found)
    to_publish(
        "routing", "Routers in front of 1 to 64 replicas", table, conclusion=about, grid=[asdict(row) for row in found]
    )
    to_publish("routing-speeds", f"Slower and faster replicas, at {MANY} replicas", list(_by_speeds(traces)))
    to_publish(
        "routing-parts", f"The prefix router without each of its terms, at {MANY} replicas", list(_by_cost(traces))
    )
    sessions = list(_by_arrivals(options.traces, options.quick))
    if sessions:
        to_publish("routing-arrivals", f"Other start times of the sessions, at {MANY} replicas", sessions)
    to_publish("routing-shared", f"A shared tier behind {MANY} replicas, 128 KiB per token", list(_by_networks(traces)))


def conclusion(rows: Sequence[ReplicaRow]) -> str:
    said = []
    for row in rows:
        if row.replicas == MANY and row.router == "prefix":
            is_met = row.share_of_infinite >= LEAST_FOUND and row.load_p95 <= MOST_LOAD
            said.append(
                f"{row.trace}, {MANY} replicas: with the prefix router, they find {row.share_of_infinite:.1%} of the"
                f" tokens that one cache without limit finds, and the 95th percentile of load is {row.load_p95:.2f}"
                f" times the mean (aim {'reached' if is_met else 'missed'}: {LEAST_FOUND:.0%} and {MOST_LOAD:g})."
            )
    return " ".join(said)


def _fleet(trace: str) -> Fleet:
    return FLEETS.get(trace, MADE_UP)


def _routers(traces: Sequence[Trace], counts: Sequence[int], processes: int) -> Iterator[ReplicaRow]:
    jobs = [
        fleet.job(router, count, trace=index)
        for index, fleet in enumerate(_fleet(trace.name) for trace in traces)
        for count in counts
        for router in ROUTERS
    ]
    for row in run_locally(traces, jobs, processes):
        say(f"{row.trace}: {row.router} before {row.replicas}: {row.share_of_infinite:.3f} of infinite")
        yield row


def _pooled(traces: Sequence[Trace], counts: Sequence[int], processes: int) -> Mapping[tuple[str, int], float]:
    """Return the token hit ratio of one cache with `count` budgets, by (trace, count)."""
    jobs = [
        SimulationJob(index, "lru", count * _fleet(trace.name).blocks)
        for index, trace in enumerate(traces)
        for count in counts
    ]
    keys = [(traces[job.trace].name, count) for job, count in zip(jobs, [*counts] * len(traces), strict=True)]
    return dict(zip(keys, (row.token_hit_ratio for row in run_locally(traces, jobs, processes)), strict=True))


def _by_speeds(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        fleet = _fleet(trace.name)
        for speeds in (fleet.speeds, *fleet.other_speeds):
            for router in ("hash", "prefix"):
                row = replace(fleet.job(router), speeds=speeds).run(trace)
                yield _line(row, **{"prefill tokens/s": speeds[0], "decode tokens/s": speeds[1]})


def _by_cost(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    routers = {
        "all": prefix_router(),
        "without load balancing": prefix_router(evening_weight=0.0),
        "prefill weight 1": prefix_router(prefill_weight=1.0),
        "TTFT only": prefix_router(prefill_weight=1.0, evening_weight=0.0),
    }
    for trace in traces:
        for name, router in routers.items():  # A router keeps no state between traces.
            yield _line(_fleet(trace.name).job("prefix").run(trace, router=router), cost=name)


def _by_arrivals(folder: Path | None, quick: bool) -> Iterator[dict[str, Any]]:
    """Draw the start times of the coding-agent sessions from several seeds."""
    sessions = (folder or BESIDE) / TRACES["coding agents"]
    if quick or not sessions.exists():
        return
    for seed in range(SEEDS):
        trace = read_trace(sessions, name="coding agents", seed=seed)
        for router in ("hash", "prefix"):
            yield _line(_fleet(trace.name).job(router).run(trace), seed=seed)


def _by_networks(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        fleet = _fleet(trace.name)
        for router in ("random", "prefix"):
            job = fleet.job(router)
            for gbit_per_s in (0.0, *fleet.gbits_per_s) if fleet.gbits_per_s else ():
                tier = DiskPlan(1 << 60, gbit_per_s * 1e9 / 8, fleet.speeds.prefill_tokens_per_s, "close")
                each = replace(job.each, model=MODEL, disk=tier if gbit_per_s else None)
                row = replace(job, each=each).run(trace)
                shared = row.shared
                yield _line(
                    row,
                    **{
                        "Gbit/s": gbit_per_s or None,
                        "from store": None if shared is None else shared.token_hit_ratio,
                        "GiB read": None if shared is None else shared.read_bytes / GIB,
                        "GiB written": None if shared is None else shared.written_bytes / GIB,
                    },
                )


def _line(row: ReplicaRow, **more: Any) -> dict[str, Any]:
    return {
        "trace": row.trace,
        "router": row.router,
        "replicas": row.replicas,
        **more,
        "token hits": row.token_hit_ratio,
        "hits / infinite": row.share_of_infinite,
        "TTFT s p50": row.ttft_s_p50,
        "TTFT s p95": row.ttft_s_p95,
        "TTFT s p99": row.ttft_s_p99,
        "busy": row.busy,
        "load p95": row.load_p95,
        "load max": row.load_max,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
