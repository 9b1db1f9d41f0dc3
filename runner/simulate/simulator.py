"""Simulator: run a trace, or grow a tree from conversations, with the server's PrefixCache, and sizes for layer state.

A key of the tree stands for a block of the trace. Eviction cuts a leaf block by block, and blocks with different
histories are not joined. So an edge behaves like a chain of nodes of one block each. Ticks are the milliseconds of the
trace; requests that arrive at the same time get successive ticks.

    pure span models    the matched blocks are the hits; the rest is evaluated at once
    models with points  checkpoints are taken as in a session; a request prefills from the last one it can use

With a disk, see `Machine`. The same trace and arguments give the same figures. Not thread-safe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import OFFLINE_POLICIES, Entry, EvictionPolicy, make_policy
from radixcache import PrefixCache, render_chat
from radixcache.chat import chat_tokens
from radixcache.layers.sizes import SizedCache, SizedLayout, SizedModel
from radixcache.ledger import Ledger
from radixcache.paging.tier import Disk
from radixcache.sized_cache import last_key, serve_spans, sized_cache
from radixcache.stores.block import BLOCK_TOKENS, Identity
from radixcache.stores.sized_store import SizedStore
from runner.models import ModelBytes
from runner.script.schedule import ScheduledRequest
from runner.script.script import ScriptError, recorded_reply
from runner.simulate.rows import DiskPlan, DiskUse, SimulationRow
from runner.traces.trace import Trace, TraceRequest

Keys = NDArray[np.int64]
OnProgress = Callable[[int], None]

UNLIMITED_BYTES = 1 << 62
#: Requests between two calls of a progress callback.
PROGRESS_REQUESTS = 500
#: Requests that are served under one lock; signals are handled between two locks.
LOCKED_REQUESTS = 50
#: Tokens by which the buffers of mlx-lm's KVCache grow.
GROW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes per block of a trace. Without a model a block has one byte, so a budget is a number of blocks.

    Attributes:
        span_bytes: of the layers that can be cut at any token.
        checkpoint_bytes: of a checkpoint, without windows.
        windows: sliding windows of at least a block, as (whole blocks, bytes per block).
        is_counting: whether there is no model.
        stored_span_bytes: as `span_bytes`, for a block that is not live; None: the same.
    """

    span_bytes: int = 1
    checkpoint_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    is_counting: bool = True
    stored_span_bytes: int | None = None

    @classmethod
    def of(cls, model: ModelBytes | None, block_tokens: int) -> BlockSizes:
        """The sizes of a model's blocks. The windows together take the bytes of the model's windows."""
        if model is None:
            return cls()
        whole = [(tokens // block_tokens, tokens * nbytes) for tokens, nbytes in model.windows]
        windows = tuple((blocks, nbytes // blocks) for blocks, nbytes in whole if blocks)
        # A window shorter than a block is full at every block's end.
        fixed_bytes = model.state_bytes + sum(nbytes for blocks, nbytes in whole if not blocks)
        stored = None if model.stored_token_bytes is None else model.stored_token_bytes * block_tokens
        return cls(model.token_bytes * block_tokens, fixed_bytes, windows, False, stored)

    def layout(self) -> SizedLayout:
        return SizedLayout(self.span_bytes, self.checkpoint_bytes, self.windows, 0, self.stored_span_bytes)


class Future:
    """When each key of a trace is used next; no server knows that. `last_key_of` gives None for a removed entry."""

    def __init__(self, requests: Sequence[TraceRequest], last_key_of: Callable[[Entry], int | None]) -> None:
        self._requests = requests
        self._last_key_of = last_key_of
        self._following: list[list[float]] = []
        self._next: dict[int, float] = {}
        last: dict[int, float] = {}
        for index, request in reversed(list(enumerate(requests))):
            keys = request.keys.tolist()
            self._following.append([last.get(key, math.inf) for key in keys])
            last.update(dict.fromkeys(keys, float(index)))
        self._following.reverse()

    def arrive(self, index: int) -> None:
        """Request `index` arrives: the next use of its keys is now in a later request."""
        self._next.update(zip(self._requests[index].keys.tolist(), self._following[index], strict=True))

    def next_use(self, entry: Entry) -> float:
        """Index of the next request that uses the last key of the entry; infinity: none does."""
        key = self._last_key_of(entry)
        return math.inf if key is None else self._next.get(key, math.inf)


class Machine(SizedModel):
    """A simulated model and disk of given speeds, with one clock and sizes for state. Writing takes no time.

        prefill    tokens / (tokens/s) ──►  clock  ◄── bytes / (bytes/s)    reading

    The server's `Rates` measure both speeds by this clock, and the server's cache decides what to read. Several caches
    may use `disk`, one at a time. A key stands for `block_tokens`.
    """

    def __init__(self, plan: DiskPlan, block_tokens: int) -> None:
        self.plan = plan
        self._block_tokens = block_tokens
        self.now_s = self.read_s = 0.0
        self.store = SizedStore(budget_bytes=plan.budget_bytes, write_on=plan.write_on, on_read=self._read)
        self.disk = Disk(
            self.store,
            Identity(b"simulated"),
            clock=lambda: self.now_s,
            block_tokens=max(1, BLOCK_TOKENS // block_tokens),
        )

    def __call__(self, keys: Any, cache: Sequence[SizedCache]) -> None:
        super().__call__(keys, cache)
        self.now_s += int(keys.shape[-1]) * self._block_tokens / self.plan.prefill_tokens_per_s

    def _read(self, nbytes: int) -> None:
        seconds = nbytes / self.plan.read_bytes_per_s
        self.now_s += seconds
        self.read_s += seconds

    def use(self, hit_tokens: int, prompt_tokens: int) -> tuple[DiskPlan, int, float, int, int]:
        """The fields of a TierUse, given the tokens that caches found on the disk."""
        stats = self.store.stats
        ratio = hit_tokens / prompt_tokens if prompt_tokens else 0.0
        return self.plan, hit_tokens, ratio, stats.read_bytes, stats.written_bytes


def with_progress(trace: Trace, on_progress: OnProgress | None) -> Iterator[tuple[int, TraceRequest]]:
    """Number the requests; every PROGRESS_REQUESTS, tell `on_progress` how many were served since its last call."""
    for index, request in enumerate(trace.requests):
        yield index, request
        if on_progress is not None and (index + 1) % PROGRESS_REQUESTS == 0:
            on_progress(PROGRESS_REQUESTS)
    if on_progress is not None:
        on_progress(len(trace.requests) % PROGRESS_REQUESTS)


class Simulation:
    """Runs a trace through one cache. `disk`: a disk for this cache, or a machine that several caches share.

    An offline policy is given by its name. ValueError: the policy bypasses the cache, with a disk or checkpoints.
    """

    def __init__(
        self,
        trace: Trace,
        policy: str | EvictionPolicy,
        budget_bytes: int,
        sizes: BlockSizes,
        disk: DiskPlan | Machine | None = None,
    ) -> None:
        self.trace, self.sizes, self.budget_bytes = trace, sizes, budget_bytes
        self._now_ms = 0
        self.machine = Machine(disk, trace.block_tokens) if isinstance(disk, DiskPlan) else disk
        self._model = self.machine or SizedModel()
        self._future: Future | None = None
        if isinstance(policy, str) and policy in OFFLINE_POLICIES:
            self._future = Future(trace.requests, lambda entry: last_key(self.cache, entry))
            chosen = OFFLINE_POLICIES[policy](self._future.next_use)
        else:
            chosen = make_policy(policy)
        self._bypass = getattr(chosen, "bypass", False)
        self.layout = sizes.layout()
        if self._bypass and self.layout.has_points:
            raise ValueError(f"{policy}: bypassing works only without checkpoints; {sizes} has some.")
        if self._bypass and disk is not None:
            raise ValueError(f"{policy}: bypassing works only without a disk.")
        ledger = Ledger(UNLIMITED_BYTES if self._bypass else budget_bytes)
        self._lock = ledger.lock
        self.cache = sized_cache(
            self.layout,
            budget_bytes=ledger,
            policy=chosen,
            clock=lambda: self._now_ms,
            checkpoint_interval=max(1, 2048 // trace.block_tokens),
            tail_tokens=max(1, 16 // trace.block_tokens),
            trim_tokens=1,
            merges=False,
            remembers=False,
            disk=None if self.machine is None else self.machine.disk,
        )
        self.block_refs = self.block_hits = self.hit_tokens = self.prompt_tokens = self.disk_hit_tokens = 0
        longest = max((len(request.keys) for request in trace.requests), default=0)
        self._ids: NDArray[np.int32] = np.zeros(longest + 1, dtype=np.int32)

    def run(self, on_progress: OnProgress | None = None) -> None:
        requests = with_progress(self.trace, on_progress)
        while batch := list(islice(requests, LOCKED_REQUESTS)):
            with self._lock:  # once, instead of in each call
                for index, request in batch:
                    if self._future is not None:
                        self._future.arrive(index)
                    self.serve(request)

    def serve(self, request: TraceRequest) -> None:
        self._now_ms = request.time_ms
        count = len(request.keys)
        brought = 0 if self.machine is None else self.cache.stats.brought_tokens
        if self._bypass:
            hits = self._serve_bypassing(request.keys)
        elif self.machine is None and not self.layout.has_points:
            # If all blocks of a prompt are stored, the last is evaluated again for logits. It counts as a hit.
            hits = serve_spans(self.cache, self._ids[:count], request.keys, request.turn, request.kind)
        else:
            hits = self._serve_session(request)
        self.block_refs += count
        self.block_hits += hits
        hit_tokens = self._tokens(hits, request)
        self.hit_tokens += hit_tokens
        if self.machine is not None:
            brought = self.cache.stats.brought_tokens - brought
            self.disk_hit_tokens += hit_tokens - self._tokens(hits - brought, request)
        self.prompt_tokens += request.tokens

    def disk_use(self) -> DiskUse | None:
        if self.machine is None:
            return None
        use = self.machine.use(self.disk_hit_tokens, self.prompt_tokens)
        return DiskUse(*use, self.cache.stats.store_decisions)

    def _tokens(self, blocks: int, request: TraceRequest) -> int:
        return min(blocks * self.trace.block_tokens, request.tokens)

    def _serve_session(self, request: TraceRequest) -> int:
        """Serve a prompt in a session of a model; returns the number of blocks that needed no prefill."""
        keys = request.keys if self.layout.has_points else _with_one_more(request.keys)
        begun = self.cache.begin(self._ids[: len(keys)], keys, reserve=0, turn=request.turn, kind=request.kind)
        with begun as session:
            if not self.layout.has_points:  # As in serve_spans.
                self.cache.make_room((len(request.keys) - session.matched_tokens) * self.layout.token_bytes)
            session.prefill(self._model)  # moves the clock; ends before the last key
            if self.layout.has_points:
                session.step(self._model, session.prompt[-1:])
            return session.cached_tokens

    def _serve_bypassing(self, keys: Keys) -> int:
        asked = _with_one_more(keys)
        _, missing = self.cache.fetch(self._ids[: len(asked)], keys=asked)
        filled = self.layout.fresh()
        filled[0].advance(len(keys))
        self.cache.insert(self._ids[: len(keys)], filled, keys=keys)
        self.cache.reclaim(self.budget_bytes)
        return len(asked) - len(missing)


def _with_one_more(keys: Keys) -> Keys:
    """Add a block that is not stored. It is evaluated, so that no stored block is."""
    return np.append(keys, -1)


def row_fields(caches: Sequence[Simulation], policy: str, seconds: float) -> dict[str, Any]:
    first, trace = caches[0], caches[0].trace
    block_refs, block_hits = sum(each.block_refs for each in caches), sum(each.block_hits for each in caches)
    prompt_tokens, hit_tokens = trace.prompt_tokens, sum(each.hit_tokens for each in caches)
    return {
        "trace": trace.name,
        "policy": policy,
        "capacity_blocks": first.budget_bytes // first.sizes.span_bytes if first.sizes.span_bytes else None,
        "capacity_bytes": None if first.sizes.is_counting else first.budget_bytes,
        "requests": len(trace.requests),
        "block_refs": block_refs,
        "block_hits": block_hits,
        "block_hit_ratio": block_hits / block_refs if block_refs else 0.0,
        "token_hit_ratio": hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        "prefill_tokens": prompt_tokens - hit_tokens,
        "evictions": sum(each.cache.stats.evictions for each in caches),
        "seconds": seconds,
        "is_timing_synthetic": trace.is_timing_synthetic,
    }


def simulate(
    trace: Trace,
    policy: str,
    budget_bytes: int,
    sizes: BlockSizes | None = None,
    on_progress: OnProgress | None = None,
    disk: DiskPlan | None = None,
) -> SimulationRow:
    """Run one simulation. `policy` is a name in POLICIES or OFFLINE_POLICIES, or "module:Class"."""
    began = time.perf_counter()
    simulation = Simulation(trace, policy, budget_bytes, sizes or BlockSizes(), disk)
    simulation.run(on_progress)
    fields = row_fields([simulation], policy, time.perf_counter() - began)
    return SimulationRow(**fields, has_checkpoints=simulation.layout.has_points, disk=simulation.disk_use())


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """A policy at a capacity in blocks of span state, or in bytes; without a model, blocks are counted."""

    trace: int
    policy: str
    capacity_blocks: int | None = None
    budget_bytes: int | None = None
    model: ModelBytes | None = None
    disk: DiskPlan | None = None

    def run(self, trace: Trace, on_progress: OnProgress | None = None) -> SimulationRow:
        return simulate(trace, self.policy, *self.budget(trace), on_progress, self.disk)

    def budget(self, trace: Trace) -> tuple[int, BlockSizes]:
        sizes = BlockSizes.of(self.model, trace.block_tokens)
        if self.capacity_blocks is not None:
            return self.capacity_blocks * sizes.span_bytes, sizes
        assert self.budget_bytes is not None, self
        return self.budget_bytes, sizes


def grow_tree(
    requests: Sequence[ScheduledRequest],
    tokenizer: Any,
    sizes: ModelBytes,
    *,
    budget_bytes: int,
    policy: str = "lru",
    skip_bad: bool = False,
    on_progress: OnProgress | None = None,
) -> tuple[PrefixCache, list[str]]:
    """Serve conversations with recorded replies, in sizes. Return the cache, and a line for each request left out.

    ScriptError: the template refuses a conversation and `skip_bad` is off.
    """
    layout = SizedLayout(sizes.token_bytes, sizes.state_bytes, sizes.windows, GROW_TOKENS)
    cache = sized_cache(layout, budget_bytes=budget_bytes, policy=policy)
    model, skipped = SizedModel(), []
    for index, request in enumerate(requests):
        if on_progress is not None:
            on_progress(index)
        try:
            tokens, marks = _render(tokenizer, request, with_marks=layout.has_points)
            reply = recorded_reply(tokenizer, request, tokens)
        except ValueError as error:
            skipped.append(f"{request.where}: {error}")
            if not skip_bad:
                raise ScriptError(skipped[-1]) from error
            continue
        with cache.begin(tokens, namespace=request.model, marks=marks, reserve=max(len(reply), 1)) as session:
            session.prefill(model)
            session.step(model, tokens[-1:])
            if len(reply):
                session.step(model, reply)
    return cache, skipped


def _render(tokenizer: Any, request: ScheduledRequest, *, with_marks: bool) -> tuple[Any, tuple[int, ...]]:
    """Tokens, and marks if some layers resume only at checkpoints."""
    tools, arguments = request.conversation.tools, request.conversation.arguments
    if with_marks:
        return render_chat(tokenizer, request.messages, tools, **arguments)
    return chat_tokens(tokenizer, request.messages, tools, **arguments), ()
