"""simulate: one trace through one policy at one capacity, by the PrefixCache that a server would use.

A key of the tree stands for a block of the trace. Blocks of different history stay apart and a leaf loses its tail
block by block, so that a compressed edge behaves as a chain of nodes of one block each would. Ticks are the trace's
milliseconds, pushed on by one where requests arrive together.

    pure span models    the matched blocks are the hits; the rest is evaluated in one go
    models with points  checkpoints are taken as a session takes them; what lies behind the last one is prefilled again

Beside a disk it is the deployed tier that asks, reads and writes, and a store of sizes that answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies import OFFLINE_POLICIES, Entry, EvictionPolicy, make_policy
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.locking.interrupts import uninterrupted
from radixcache.sessions.session import Session
from radixcache.sized_cache import last_key, sized_cache
from runner.models.footprint import ModelBytes
from runner.simulate.disk import DiskPlan, DiskUse
from runner.simulate.future import Future
from runner.simulate.machine import Machine
from runner.simulate.row import SimulationRow
from runner.traces.request import Trace, TraceRequest

UNLIMITED_BYTES = 1 << 62
#: How many requests go by between two calls of a progress callback.
PROGRESS_REQUESTS = 500

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes per block of a trace; without a model a block is one byte and a capacity counts blocks.

    Attributes:
        span_bytes: bytes of a block over the layers that can be cut anywhere.
        checkpoint_bytes: bytes of point state that do not depend on the offset, shorter windows among them.
        windows: the sliding windows of a block or more, as (whole blocks, bytes per block); together they take what the
            model's do.
        is_counting: no model's bytes are known.
    """

    span_bytes: int = 1
    checkpoint_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    is_counting: bool = True

    @classmethod
    def of(cls, model: ModelBytes | None, block_tokens: int) -> BlockSizes:
        """The sizes of a model's blocks of so many tokens; without a model blocks are counted."""
        if model is None:
            return cls()
        whole = [(tokens // block_tokens, tokens * nbytes) for tokens, nbytes in model.windows]
        windows = tuple((blocks, nbytes // blocks) for blocks, nbytes in whole if blocks)
        # A window that is shorter than a block is full at every block's end.
        fixed_bytes = model.state_bytes + sum(nbytes for blocks, nbytes in whole if not blocks)
        return cls(model.token_bytes * block_tokens, fixed_bytes, windows, is_counting=False)

    def layout(self) -> SizedLayout:
        return SizedLayout(self.span_bytes, self.checkpoint_bytes, self.windows)


@dataclass(frozen=True, slots=True)
class Offline:
    """A policy that knows the future: what makes it from the function that tells when an entry is used next."""

    make: Callable[[Callable[[Entry], float]], EvictionPolicy]


class Simulation:
    """A trace on its way through one cache.

    Args:
        trace: the requests.
        policy: a name or an object; of the offline ones, what makes it from `next_use`.
        budget_bytes: the byte budget of the cache.
        sizes: bytes per block.
        disk: what there is beside memory, or the machine that it is in, with others; None: nothing.

    Raises:
        ValueError: a policy that bypasses the cache was given a disk, or sizes with checkpoints, which it has none to
            resume at.
    """

    def __init__(
        self,
        trace: Trace,
        policy: str | EvictionPolicy | Offline,
        budget_bytes: int,
        sizes: BlockSizes,
        disk: DiskPlan | Machine | None = None,
    ) -> None:
        self.trace = trace
        self._now_ms = 0
        self.machine = Machine(disk, trace.block_tokens) if isinstance(disk, DiskPlan) else disk
        self._model = self.machine or SizedModel()
        self._future: Future | None = None
        chosen = self._make(policy)
        self._bypass = getattr(chosen, "bypass", False)
        self.layout = sizes.layout()
        if self._bypass and self.layout.has_points:
            raise ValueError(f"{policy}: bypassing is defined without checkpoints alone; {sizes} has some.")
        if self._bypass and disk is not None:
            raise ValueError(f"{policy}: bypassing is defined for memory alone; there is a disk.")
        self._budget_bytes = budget_bytes
        self.cache = sized_cache(
            self.layout,
            budget_bytes=UNLIMITED_BYTES if self._bypass else budget_bytes,
            policy=chosen,
            clock=lambda: self._now_ms,
            checkpoint_interval=max(1, 2048 // trace.block_tokens),
            tail_tokens=max(1, 16 // trace.block_tokens),
            trim_tokens=1,
            merges=False,
            disk=None if self.machine is None else self.machine.disk,
        )
        self.block_refs = self.block_hits = self.hit_tokens = self.prompt_tokens = self.disk_hit_tokens = 0
        longest = max((len(request.keys) for request in trace.requests), default=0)
        self._ids: NDArray[np.int32] = np.zeros(longest + 1, dtype=np.int32)

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Serve all requests; `on_progress` is told from time to time how many were served since it was last told."""
        for index, request in enumerate(self.trace.requests):
            if self._future is not None:
                self._future.arrive(index)
            self.serve(request)
            if on_progress is not None and (index + 1) % PROGRESS_REQUESTS == 0:
                on_progress(PROGRESS_REQUESTS)
        if on_progress is not None:
            on_progress(len(self.trace.requests) % PROGRESS_REQUESTS)

    def serve(self, request: TraceRequest) -> None:
        """Look one prompt up, evaluate what is missing, and store it."""
        self._now_ms = request.time_ms
        count, brought = len(request.keys), self._brought_blocks()
        with uninterrupted():  # once, not in each of the calls
            if self._bypass:
                hits = self._serve_bypassing(request.keys)
            else:
                keys = request.keys if self.machine is None or self.layout.has_points else _with_one_more(request.keys)
                ids = self._ids[: len(keys)]
                with self.cache.begin(ids, keys, reserve=0, turn=request.turn, kind=request.kind) as session:
                    hits = self._evaluate(session, count)
        self.block_refs += count
        self.block_hits += hits
        hit_tokens = self._tokens(hits, request)
        self.hit_tokens += hit_tokens
        self.disk_hit_tokens += hit_tokens - self._tokens(hits - self._brought_blocks() + brought, request)
        self.prompt_tokens += request.tokens

    def disk_use(self) -> DiskUse | None:
        """What the disk did so far."""
        if self.machine is None:
            return None
        stats = self.machine.store.stats
        return DiskUse(
            self.machine.plan,
            self.disk_hit_tokens,
            self.disk_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            stats.read_bytes,
            stats.written_bytes,
            self.cache.stats.store_decisions,
        )

    def _tokens(self, blocks: int, request: TraceRequest) -> int:
        """Tokens of so many blocks that a prompt begins with."""
        return min(blocks * self.trace.block_tokens, request.tokens)

    def _brought_blocks(self) -> int:
        return 0 if self.machine is None else self.cache.stats.brought_tokens

    def _evaluate(self, session: Session, count: int) -> int:
        """Bring the session to the end of its prompt; returns the blocks that needed no prefill."""
        if self.layout.has_points:
            session.prefill(self._model)
            session.step(self._model, session.prompt[-1:])
            return session.cached_tokens
        # A live cache makes room for the whole prompt at `begin`; policies that age as things go depend on that order.
        self.cache.make_room((count - session.matched_tokens) * self.layout.token_bytes)
        if self.machine is not None:
            session.prefill(self._model)  # which is timed; it ends in front of the key that is one more
            return session.cached_tokens
        session.caches[0].advance(count - session.cached_tokens)
        # One block is evaluated anew for its logits even where all are stored; it is a hit all the same.
        return session.matched_tokens

    def _serve_bypassing(self, keys: NDArray[np.int64]) -> int:
        """Add the whole prompt without holding any of it, then make room among all there is."""
        asked = _with_one_more(keys)
        _, missing = self.cache.fetch(self._ids[: len(asked)], keys=asked)
        hits = len(asked) - len(missing)
        filled = self.layout.fresh()
        filled[0].advance(len(keys))
        self.cache.insert(self._ids[: len(keys)], filled, keys=keys)
        self.cache.reclaim(self._budget_bytes)
        return hits

    def _make(self, policy: str | EvictionPolicy | Offline) -> EvictionPolicy:
        if not isinstance(policy, Offline):
            return make_policy(policy)
        self._future = Future(self.trace.requests, lambda entry: last_key(self.cache, entry))
        return policy.make(self._future.next_use)


def simulate(
    trace: Trace,
    policy: str,
    budget_bytes: int,
    sizes: BlockSizes | None = None,
    on_progress: OnProgress | None = None,
    disk: DiskPlan | None = None,
) -> SimulationRow:
    """Run one simulation. `policy` is a name in POLICIES or OFFLINE_POLICIES, or "module:Class"."""
    sizes = sizes or BlockSizes()
    began = time.perf_counter()
    offline = OFFLINE_POLICIES.get(policy)
    simulation = Simulation(trace, policy if offline is None else Offline(offline), budget_bytes, sizes, disk)
    simulation.run(on_progress)
    seconds = time.perf_counter() - began
    refs, prompt_tokens = simulation.block_refs, simulation.prompt_tokens
    return SimulationRow(
        trace=trace.name,
        policy=policy,
        capacity_blocks=budget_bytes // sizes.span_bytes if sizes.span_bytes else None,
        capacity_bytes=None if sizes.is_counting else budget_bytes,
        requests=len(trace.requests),
        block_refs=refs,
        block_hits=simulation.block_hits,
        block_hit_ratio=simulation.block_hits / refs if refs else 0.0,
        token_hit_ratio=simulation.hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        prefill_tokens=prompt_tokens - simulation.hit_tokens,
        evictions=simulation.cache.stats.evictions,
        seconds=seconds,
        is_timing_synthetic=trace.is_timing_synthetic,
        has_checkpoints=simulation.layout.has_points,
        disk=simulation.disk_use(),
    )


def _with_one_more(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """A prompt with one more block, which is nowhere, so that the last one need not be evaluated anew."""
    return np.append(keys, -1)


def infinite_ratio(trace: Trace) -> float:
    """The block hit ratio of a cache without any limit: the share of blocks that were asked for before."""
    keys = np.concatenate([request.keys for request in trace.requests])
    return 1.0 - len(np.unique(keys)) / len(keys)


def infinite_token_ratio(trace: Trace) -> float:
    """The token hit ratio of a cache without any limit."""
    seen: set[int] = set()
    hit_tokens = 0
    for request in trace.requests:
        keys = request.keys.tolist()
        # Keys are of whole prefixes: those that were asked for before come first.
        hit_tokens += min(sum(key in seen for key in keys) * trace.block_tokens, request.tokens)
        seen.update(keys)
    return hit_tokens / trace.prompt_tokens if trace.requests else 0.0
