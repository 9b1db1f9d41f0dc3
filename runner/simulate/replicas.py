"""Replicas: a trace, by its arrival times, through a router and several caches, each with a queue before it.

    arrival ──► Dispatcher.choose ──► queue ──► cache ──► reading + prefill ──► first token ──► decoding ──► end
                 ▲ what is stored there                    tokens left x s/token                 tokens x s/token
                 └───────────────────────────────────────────────────────────────────────────────────────┘

The caches are the deployed ones, in sizes, and so is what decides (`runner/routing`). A replica serves one request
after the other. What it has given up it tells the router at once; what the router thinks beyond that it may be wrong
about. Behind the replicas there may be one shared tier, as the deployed one over a store of sizes; each reads it as
fast as its own link, and writing takes no time.

  RS1  Each request is served once, by one replica, in the order in which they came there.
  RS2  Nothing is decided by what has not happened yet: neither lengths of replies nor ends are known to the router.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from radixcache.sized_cache import stored_keys
from runner.routing.dispatcher import BLOCK_TOKENS, Dispatcher
from runner.routing.routers import FIRST, Ask, Coefficients, Router, RoutingRates, make_router
from runner.simulate.rows import DiskPlan, ReplicaRow, SharedUse
from runner.simulate.simulator import (
    PROGRESS_REQUESTS,
    BlockSizes,
    Machine,
    OnProgress,
    Simulation,
    infinite_token_ratio,
)
from runner.traces.trace import Trace, TraceRequest


class Speeds(NamedTuple):
    """What a replica takes.

    Attributes:
        prefill_tokens_per_s, decode_tokens_per_s: of one request, which has the replica to itself.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Setup:
    """Replicas, and what is before and behind them.

    Attributes:
        router: a name in ROUTERS; `seed` is its own.
        policy, budget_bytes, sizes: of each replica's cache, as a Simulation takes them.
        speeds: of each replica.
        shared: the tier behind all of them; None: there is none.
    """

    router: str
    replicas: int
    policy: str
    budget_bytes: int
    sizes: BlockSizes
    speeds: Speeds
    shared: DiskPlan | None = None
    seed: int = 0

    def cache(self, trace: Trace, machine: Machine | None) -> Simulation:
        """One replica's cache."""
        return Simulation(trace, self.policy, self.budget_bytes, self.sizes, machine)

    def dispatcher(self, names: Iterable[str], block_tokens: int, router: Router | None) -> Dispatcher:
        """What decides; it knows the speeds, and nothing yet of how long replies are."""
        first = Coefficients(1 / self.speeds.prefill_tokens_per_s, 1 / self.speeds.decode_tokens_per_s, FIRST[-1])
        router = router or make_router(self.router, self.seed)
        return Dispatcher(router, names, rates=RoutingRates(first), block_tokens=block_tokens)


@dataclass(slots=True)
class Served:
    """What a request cost.

    Attributes:
        left_tokens: those that were prefilled.
        first_s, end_s: when its first token came, and its last.
    """

    left_tokens: int
    prefill_s: float
    decode_s: float
    first_s: float
    end_s: float


@dataclass(slots=True)
class SimulatedReplica:
    """A cache, and the requests that it has, by their numbers; the first one is being served.

    Attributes:
        coming: the digests of those that wait.
        busy_s: seconds of work so far.
    """

    name: str
    simulation: Simulation
    queue: deque[int] = field(default_factory=deque)
    coming: Counter[int] = field(default_factory=Counter)
    busy_s: float = 0.0

    def comes(self, ask: Ask) -> None:
        """A request waits no more."""
        self.coming.subtract(ask.digests)
        for digest in ask.digests:
            if not self.coming[digest]:
                del self.coming[digest]


class Replicas:
    """A trace on its way through a router.

    Args:
        trace: the requests.
        setup: what they go through.
        router: what decides instead of the setup's.

    Attributes:
        replicas: in the order of their names.
        served: by the request's number.
        went: the replica of each request, by the request's number.
    """

    def __init__(self, trace: Trace, setup: Setup, router: Router | None = None) -> None:
        self.trace, self._speeds = trace, setup.speeds
        self.machine = None if setup.shared is None else Machine(setup.shared, trace.block_tokens)
        self.replicas = [
            SimulatedReplica(f"{index:04}", setup.cache(trace, self.machine)) for index in range(setup.replicas)
        ]
        self._by_name = {replica.name: replica for replica in self.replicas}
        # Blocks of the trace to a digest: as long as the deployed ones, or a block where that is longer.
        self._stride = max(1, BLOCK_TOKENS // trace.block_tokens)
        self.dispatcher = setup.dispatcher(self._by_name, self._stride * trace.block_tokens, router)
        self.served: dict[int, Served] = {}
        self.went: list[str] = []
        self.matched_tokens = 0
        self._ends: list[tuple[float, int, str]] = []

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Serve all requests; `on_progress` is told from time to time how many came since it was last told."""
        for index, request in enumerate(self.trace.requests):
            self._until(request.time_ms / 1e3)
            self._arrive(index, request)
            if on_progress is not None and (index + 1) % PROGRESS_REQUESTS == 0:
                on_progress(PROGRESS_REQUESTS)
        self._until(float("inf"))
        if on_progress is not None:
            on_progress(len(self.trace.requests) % PROGRESS_REQUESTS)

    def ask(self, request: TraceRequest) -> Ask:
        """A request as the router sees it: a key of the trace stands for a whole prefix, as a digest does."""
        whole = request.tokens // self.trace.block_tokens
        return Ask(request.keys[self._stride - 1 : whole : self._stride].tolist(), request.tokens, request.session)

    def _arrive(self, index: int, request: TraceRequest) -> None:
        now_s, ask = request.time_ms / 1e3, self.ask(request)
        for replica in self.replicas:
            self._tell(replica, request, ask)
        choice = self.dispatcher.choose(ask, now_s)
        self.dispatcher.send(index, choice, now_s)
        self.went.append(choice.replica)
        self.matched_tokens += choice.matched_tokens
        replica = self._by_name[choice.replica]
        replica.queue.append(index)
        replica.coming.update(ask.digests)
        if len(replica.queue) == 1:
            self._begin(replica, now_s)

    def _tell(self, replica: SimulatedReplica, request: TraceRequest, ask: Ask) -> None:
        """Have a replica tell what it has lost of the prefixes of this request, but for what is on its way there."""
        thought = self.dispatcher.directory.matched_blocks(replica.name, ask.digests)
        if thought:
            stored = stored_keys(replica.simulation.cache, request.keys) // self._stride
            gone = [digest for digest in ask.digests[stored:thought] if digest not in replica.coming]
            self.dispatcher.tell(replica.name, removed=gone)

    def _until(self, now_s: float) -> None:
        """End what ends by now, and begin what comes after it."""
        while self._ends and self._ends[0][0] <= now_s:
            end_s, index, name = heapq.heappop(self._ends)
            served, replica = self.served[index], self._by_name[name]
            self.dispatcher.end(index, end_s, served.prefill_s + served.decode_s)
            self.dispatcher.rates.prefilled(served.left_tokens, served.prefill_s)
            self.dispatcher.rates.decoded(self.trace.requests[index].output_tokens, served.decode_s)
            replica.queue.popleft()
            if replica.queue:
                self._begin(replica, end_s)

    def _begin(self, replica: SimulatedReplica, now_s: float) -> None:
        index, simulation = replica.queue[0], replica.simulation
        request = self.trace.requests[index]
        replica.comes(self.ask(request))
        hit_tokens, read_s = simulation.hit_tokens, self._read_s
        simulation.serve(request)
        left = request.tokens - (simulation.hit_tokens - hit_tokens)
        prefill_s = left / self._speeds.prefill_tokens_per_s
        decode_s = request.output_tokens / self._speeds.decode_tokens_per_s
        first_s = now_s + (self._read_s - read_s) + prefill_s
        self.served[index] = Served(left, prefill_s, decode_s, first_s, first_s + decode_s)
        replica.busy_s += first_s + decode_s - now_s
        heapq.heappush(self._ends, (first_s + decode_s, index, replica.name))

    @property
    def _read_s(self) -> float:
        return 0.0 if self.machine is None else self.machine.read_s

    def shared_use(self) -> SharedUse | None:
        """What the shared tier did so far."""
        if self.machine is None:
            return None
        stats = self.machine.store.stats
        hit_tokens = sum(replica.simulation.disk_hit_tokens for replica in self.replicas)
        ratio = hit_tokens / self.trace.prompt_tokens
        return SharedUse(self.machine.plan, hit_tokens, ratio, stats.read_bytes, stats.written_bytes)


def simulate_replicas(
    trace: Trace, setup: Setup, on_progress: OnProgress | None = None, router: Router | None = None
) -> ReplicaRow:
    """Run one simulation. `router` decides instead of the setup's, under its name."""
    began = time.perf_counter()
    run = Replicas(trace, setup, router)
    run.run(on_progress)
    caches = [replica.simulation for replica in run.replicas]
    block_refs, block_hits = sum(each.block_refs for each in caches), sum(each.block_hits for each in caches)
    hit_tokens = sum(each.hit_tokens for each in caches)
    waits_s = [run.served[index].first_s - each.time_ms / 1e3 for index, each in enumerate(trace.requests)]
    p50, p95, p99 = (float(each) for each in np.percentile(waits_s, (50, 95, 99)))
    busy_s = np.array([replica.busy_s for replica in run.replicas])
    whole_s = max(each.end_s for each in run.served.values()) - trace.requests[0].time_ms / 1e3
    return ReplicaRow(
        trace=trace.name,
        router=setup.router,
        replicas=setup.replicas,
        policy=setup.policy,
        capacity_blocks=setup.budget_bytes // setup.sizes.span_bytes if setup.sizes.span_bytes else None,
        capacity_bytes=None if setup.sizes.is_counting else setup.budget_bytes,
        requests=len(trace.requests),
        block_refs=block_refs,
        block_hits=block_hits,
        block_hit_ratio=block_hits / block_refs,
        token_hit_ratio=hit_tokens / trace.prompt_tokens,
        infinite_token_hit_ratio=infinite_token_ratio(trace),
        matched_tokens=run.matched_tokens,
        prefill_tokens=trace.prompt_tokens - hit_tokens,
        evictions=sum(each.cache.stats.evictions for each in caches),
        ttft_s_p50=p50,
        ttft_s_p95=p95,
        ttft_s_p99=p99,
        busy=float(busy_s.mean()) / whole_s if whole_s else 0.0,
        load_p95=float(np.percentile(busy_s, 95) / busy_s.mean()) if busy_s.any() else 1.0,
        load_max=float(busy_s.max() / busy_s.mean()) if busy_s.any() else 1.0,
        seconds=time.perf_counter() - began,
        is_timing_synthetic=trace.is_timing_synthetic,
        shared=run.shared_use(),
    )
