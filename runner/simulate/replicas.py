"""Replicas: send the requests of a trace, when they arrive, through a router to several caches, each with a queue.

    arrival ──► Dispatcher.choose ──► queue ──► cache ──► reading + prefill ──► first token ──► decoding ──► end
                 ▲ what is stored there                    tokens left x s/token                 tokens x s/token
                 └───────────────────────────────────────────────────────────────────────────────────────┘

Router (`runner/routing`) and caches run the code of the server, with sizes in place of state. A replica serves one
request after the other, and tells the router at once what it has evicted. The replicas may share a tier: the code of
the server over a store of sizes. Each replica reads the tier at the speed of its own link; writing takes no time.

  RS1  Each request is served once, by one replica, in the order of arrival there.
  RS2  No decision depends on the future: the router knows neither the lengths nor the ends of replies.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from radixcache.sized_cache import stored_keys
from runner.routing import BLOCK_TOKENS, FIRST, Ask, Coefficients, Dispatcher, Router, RoutingRates, make_router
from runner.simulate.rows import ReplicaRow, Speeds, TierUse, infinite_token_ratio
from runner.simulate.simulator import Machine, OnProgress, Simulation, SimulationJob, row_fields, with_progress
from runner.traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """A router with a number of replicas. `each` is the cache of one replica; its disk is the tier that all share."""

    each: SimulationJob
    router: str
    replicas: int
    speeds: Speeds
    seed: int = 0

    @property
    def trace(self) -> int:
        return self.each.trace

    def run(self, trace: Trace, on_progress: OnProgress | None = None, router: Router | None = None) -> ReplicaRow:
        """Run the simulation. A `router` replaces that of the job; the row has the name of the job's router."""
        began = time.perf_counter()
        run = Replicas(trace, self, router)
        run.run(on_progress)
        waits_s = [run.served[index].first_s - each.time_ms / 1e3 for index, each in enumerate(trace.requests)]
        p50, p95, p99 = (float(each) for each in np.percentile(waits_s, (50, 95, 99)))
        busy_s = np.array([replica.busy_s for replica in run.replicas])
        whole_s = max(each.end_s for each in run.served.values()) - trace.requests[0].time_ms / 1e3
        infinite = infinite_token_ratio(trace)
        caches = [each.simulation for each in run.replicas]
        fields = row_fields(caches, self.each.policy, time.perf_counter() - began)
        return ReplicaRow(
            **fields,
            router=self.router,
            replicas=self.replicas,
            infinite_token_hit_ratio=infinite,
            share_of_infinite=fields["token_hit_ratio"] / infinite if infinite else 1.0,
            matched_tokens=run.matched_tokens,
            ttft_s_p50=p50,
            ttft_s_p95=p95,
            ttft_s_p99=p99,
            busy=float(busy_s.mean()) / whole_s if whole_s else 0.0,
            load_p95=float(np.percentile(busy_s, 95) / busy_s.mean()) if busy_s.any() else 1.0,
            load_max=float(busy_s.max() / busy_s.mean()) if busy_s.any() else 1.0,
            shared=run.shared_use(),
        )


@dataclass(slots=True)
class Served:
    """One request: the tokens that were prefilled, durations, and the times of the first and the last token."""

    left_tokens: int
    prefill_s: float
    decode_s: float
    first_s: float
    end_s: float


@dataclass(slots=True)
class SimulatedReplica:
    """A cache. `queue`: indices of its requests, the running one first; `coming`: digests of the waiting ones."""

    name: str
    simulation: Simulation
    queue: deque[int] = field(default_factory=deque)
    coming: Counter[int] = field(default_factory=Counter)
    busy_s: float = 0.0


class Replicas:
    """Runs a trace through a router. For each request, `served` has the times, and `went` the replica."""

    def __init__(self, trace: Trace, job: ReplicaJob, router: Router | None = None) -> None:
        self.trace, self._speeds, each = trace, job.speeds, job.each
        self.machine = None if each.disk is None else Machine(each.disk, trace.block_tokens)
        cache = (trace, each.policy, *each.budget(trace), self.machine)
        self.replicas = [SimulatedReplica(f"{index:04}", Simulation(*cache)) for index in range(job.replicas)]
        self._by_name = {replica.name: replica for replica in self.replicas}
        # Blocks of the trace per digest. A digest covers BLOCK_TOKENS, as on a server, or one longer block.
        self._stride = max(1, BLOCK_TOKENS // trace.block_tokens)
        # The router knows the speeds, but not the lengths of replies.
        first = Coefficients(1 / job.speeds.prefill_tokens_per_s, 1 / job.speeds.decode_tokens_per_s, FIRST[-1])
        self.dispatcher = Dispatcher(
            router or make_router(job.router, job.seed),
            self._by_name,
            rates=RoutingRates(first),
            block_tokens=self._stride * trace.block_tokens,
        )
        self.served: dict[int, Served] = {}
        self.went: list[str] = []
        self.matched_tokens = 0
        self._ends: list[tuple[float, int, str]] = []

    def run(self, on_progress: OnProgress | None = None) -> None:
        for index, request in with_progress(self.trace, on_progress):
            self._advance(request.time_ms / 1e3)
            self._arrive(index, request)
        self._advance(float("inf"))

    def ask(self, request: TraceRequest) -> Ask:
        """A request as the router sees it. A key of the trace stands for a whole prefix, so it is used as a digest."""
        whole = request.tokens // self.trace.block_tokens
        return Ask(request.keys[self._stride - 1 : whole : self._stride].tolist(), request.tokens, request.session)

    def _arrive(self, index: int, request: TraceRequest) -> None:
        now_s, ask = request.time_ms / 1e3, self.ask(request)
        for replica in self.replicas:
            self._report_losses(replica, request, ask)
        choice = self.dispatcher.choose(ask, now_s)
        self.dispatcher.send(index, choice, now_s)
        self.went.append(choice.replica)
        self.matched_tokens += choice.matched_tokens
        replica = self._by_name[choice.replica]
        replica.queue.append(index)
        replica.coming.update(ask.digests)
        if len(replica.queue) == 1:
            self._begin(replica, now_s)

    def _report_losses(self, replica: SimulatedReplica, request: TraceRequest, ask: Ask) -> None:
        """Tell the router which prefixes of this request the replica has evicted, except those of waiting requests."""
        expected = self.dispatcher.directory.matched_blocks(replica.name, ask.digests)
        if expected:
            stored = stored_keys(replica.simulation.cache, request.keys) // self._stride
            gone = [digest for digest in ask.digests[stored:expected] if digest not in replica.coming]
            self.dispatcher.tell(replica.name, removed=gone)

    def _advance(self, now_s: float) -> None:
        """End the requests that have ended by `now_s`, and begin the next request in each of their queues."""
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
        for digest in self.ask(request).digests:
            replica.coming[digest] -= 1
            if not replica.coming[digest]:
                del replica.coming[digest]
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

    def shared_use(self) -> TierUse | None:
        if self.machine is None:
            return None
        hit_tokens = sum(replica.simulation.disk_hit_tokens for replica in self.replicas)
        return TierUse(*self.machine.use(hit_tokens, self.trace.prompt_tokens))
