"""What `radixcache simulate --replicas` takes beyond `radixcache simulate`: routers, speeds, a tier behind all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from runner.commands.usage import is_given, require
from runner.files.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from runner.commands.trace_options import TraceOptions
    from runner.simulate.disk import DiskPlan
    from runner.simulate.grid import Job, ReplicaJob
    from runner.simulate.replica_row import ReplicaRow
    from runner.simulate.replicas import Speeds
    from runner.traces.request import Trace

ROUTERS = "random,round-robin,hash,prefix"
#: A common network within a building; a model of 8 billion parameters on a laptop.
SHARED_GBIT_PER_S, DECODE_TOKENS_PER_S = 10.0, 40.0
MOST_REPLICAS = 1024
#: Options that say something of replicas, and of nothing else.
ALONE = {
    "router": "--router",
    "shared_gib": "--shared-gib",
    "shared_gbit_per_s": "--shared-gbit-per-s",
    "decode_tokens_per_s": "--decode-tokens-per-s",
}


@dataclass(frozen=True)
class ReplicaPlan:
    """What the options describe.

    Attributes:
        shared: the tier behind all replicas; None: there is none.
    """

    counts: list[int]
    routers: list[str]
    speeds: Speeds
    shared: DiskPlan | None
    seed: int

    def grid(self, jobs: Sequence[Job]) -> list[ReplicaJob]:
        """A job for each router before each number of replicas, for each of these."""
        from runner.simulate.grid import ReplicaJob

        return [
            ReplicaJob(each, router, count, self.speeds, self.seed)
            for each in jobs
            for count in self.counts
            for router in self.routers
        ]

    def shown(self, traces: Sequence[Trace], rows: Sequence[ReplicaRow]) -> list[Table | str]:
        """A table, and what has to be said beside it."""
        from runner.simulate.replica_table import replica_footnotes, replicas_table

        return [*([replicas_table(rows)] if rows else []), *replica_footnotes(traces, rows, self.speeds)]


def replica_plan(
    context: typer.Context,
    options: TraceOptions,
    replicas: str | None,
    router: str,
    shared_gib: float | None,
    shared_gbit_per_s: float,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
) -> ReplicaPlan | None:
    """The replicas that these options describe; None: none."""
    if replicas is None:
        for name, option in ALONE.items():
            require(not is_given(context, name), f"{option} is for replicas; say how many with --replicas.")
        return None
    for name, option in (("disk_gib", "--disk-gib"), ("plot_file", "--plot")):
        require(not is_given(context, name), f"{option} is for one cache; wanted it without --replicas.")
    from runner.simulate.disk import DiskPlan
    from runner.simulate.replicas import Speeds

    for option, value in (
        ("--shared-gib", shared_gib),
        ("--shared-gbit-per-s", shared_gbit_per_s),
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
        ("--decode-tokens-per-s", decode_tokens_per_s),
    ):
        require(value is None or 0 < value <= 1e15, f"{option} is {value}; wanted more than 0.")
    shared = None
    if shared_gib is not None:
        require(options.model_bytes is not None, "--shared-gib needs --model-config or --bytes-per-token.")
        read_bytes_per_s = shared_gbit_per_s * 1e9 / 8
        shared = DiskPlan(max(1, int(shared_gib * GIB)), read_bytes_per_s, prefill_tokens_per_s, "close")
    speeds = Speeds(prefill_tokens_per_s, decode_tokens_per_s)
    return ReplicaPlan(_counts(replicas), _routers(router), speeds, shared, options.seed)


def require_routable(policies: Sequence[str]) -> None:
    """Refuse policies that no server could have."""
    from policies import OFFLINE_POLICIES

    for name in policies:
        require(name not in OFFLINE_POLICIES, f"--policy: {name} knows the future of one cache; not with --replicas.")


def replica_document(traces: Sequence[Trace], rows: Sequence[ReplicaRow]) -> dict[str, Any]:
    """The same figures for programs."""
    from runner.simulate.replica_table import COUNTS

    return {
        "rows": [{**asdict(row), "share_of_infinite": row.share_of_infinite} for row in rows],
        "sources": [trace.source for trace in traces],
        "skipped": [len(trace.skipped) for trace in traces],
        "counts": COUNTS,
    }


def _counts(listed: str) -> list[int]:
    words = [word.strip() for word in listed.split(",")]
    for word in words:
        is_count = word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_REPLICAS
        require(is_count, f"--replicas has {word!r}; wanted whole numbers from 1 to {MOST_REPLICAS:,}.")
    return list(dict.fromkeys(map(int, words)))


def _routers(listed: str) -> list[str]:
    from runner.routing.routers import ROUTERS

    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    require(bool(names), "--router names no router.")
    for name in names:
        require(name in ROUTERS, f"--router: no router {name!r}; known: {', '.join(ROUTERS)}.")
    return names
