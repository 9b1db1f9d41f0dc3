"""simulate: one trace through one policy at one capacity, by the PrefixCache that a server would use.

A key of the tree stands for a block of the trace. Blocks of different history stay apart and a leaf loses its tail
block by block, so that a compressed edge behaves as a chain of nodes of one block each would. Ticks are the trace's
milliseconds, pushed on by one where requests arrive together.

    pure span models    the matched blocks are the hits; the rest is evaluated in one go
    models with points  checkpoints are taken as a session takes them; what lies behind the last one is prefilled again

Beside a disk it is the deployed tier that asks, reads and writes, and a store of sizes that answers.

Future: when each key of a trace is used next. What the offline policies know, and no server does.

Machine: a model and a disk of given speeds, in sizes, and the clock that both of them move on.

    prefill    tokens / (tokens/s) ──►  clock  ◄── bytes / (bytes/s)    reading

By that clock the deployed `Rates` measure the two, and the deployed cache decides what is read. Writing takes no time.

grow_tree: the tree that conversations make under a budget, by the cache that would serve them, without a model.

Requests come in the order of a replay and their recorded replies are fed behind them; a reply that was not recorded is
left out of the prompts that follow. Only state is replaced by its size, so what is shared, kept and evicted is what a
live cache of that budget shares, keeps and evicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import OFFLINE_POLICIES, Entry, EvictionPolicy, make_policy
from radixcache import PrefixCache, TreeView, render_chat
from radixcache.layers.sizes import SizedCache, SizedLayout, SizedModel
from radixcache.lock import uninterrupted
from radixcache.paging.tier import Disk
from radixcache.sessions.session import Session
from radixcache.sized_cache import last_key, sized_cache
from radixcache.stores.block import BLOCK_TOKENS, Identity
from radixcache.stores.sized_store import SizedStore
from runner.models.footprint import ModelBytes
from runner.script.schedule import ScheduledRequest
from runner.script.script import ScriptError, recorded_reply
from runner.simulate.rows import DiskPlan, DiskUse, SimulationRow
from runner.traces.trace import Trace, TraceRequest

Keys = NDArray[np.int64]


class Future:
    """The next use of every key, kept up as the requests go by.

    Args:
        requests: the whole trace.
        last_key_of: the last key on the edge that an entry stands for; None when there is none any more.
    """

    def __init__(self, requests: Sequence[TraceRequest], last_key_of: Callable[[Entry], int | None]) -> None:
        self._requests = requests
        self._last_key_of = last_key_of
        self._following = _following(requests)
        self._next: dict[int, float] = {}

    def arrive(self, index: int) -> None:
        """Request `index` is about to be served: from now on its keys wait for the next request that uses them."""
        self._next.update(zip(self._requests[index].keys.tolist(), self._following[index], strict=True))

    def next_use(self, entry: Entry) -> float:
        """Index of the request that uses the end of the entry's edge next; infinity for never."""
        key = self._last_key_of(entry)
        return math.inf if key is None else self._next.get(key, math.inf)


def _following(requests: Sequence[TraceRequest]) -> list[list[float]]:
    """For each key of each request the index of the next request that uses it; infinity for none."""
    last: dict[int, float] = {}
    following: list[list[float]] = []
    for index in range(len(requests) - 1, -1, -1):
        keys = requests[index].keys.tolist()
        following.append([last.get(key, math.inf) for key in keys])
        last.update(dict.fromkeys(keys, float(index)))
    following.reverse()
    return following


class Machine(SizedModel):
    """The model is called as any other.

    Args:
        block_tokens: tokens that a key stands for.

    Attributes:
        plan: as given.
        store: what is on the disk.
        disk: what a cache takes; several may, one at a time.
        now_s: the clock.
        read_s: how much of that was reading.
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


#: Step in which mlx-lm's KVCache grows, in tokens.
GROW_TOKENS = 256


@dataclass(frozen=True)
class GrownTree:
    """The tree, how many requests made it and what it lost, and a line for each request that was left out."""

    view: TreeView
    requests: int
    evictions: int
    skipped: tuple[str, ...]


def grow_tree(
    requests: Sequence[ScheduledRequest],
    tokenizer: Any,
    sizes: ModelBytes,
    *,
    budget_bytes: int,
    policy: str = "lru",
    skip_bad: bool = False,
) -> GrownTree:
    """Serve requests and describe the tree at the end.

    Raises:
        ScriptError: the template refuses a conversation and `skip_bad` is off.
    """
    layout = SizedLayout(sizes.token_bytes, sizes.state_bytes, sizes.windows, GROW_TOKENS)
    cache = sized_cache(layout, budget_bytes=budget_bytes, policy=policy)
    model, skipped = SizedModel(), []
    for request in requests:
        try:
            _serve(cache, model, tokenizer, request)
        except ScriptError as error:
            if not skip_bad:
                raise
            skipped.append(str(error))
    stats = cache.stats
    return GrownTree(cache.view(tokenizer=tokenizer), stats.requests, stats.evictions, tuple(skipped))


def _serve(cache: PrefixCache, model: SizedModel, tokenizer: Any, request: ScheduledRequest) -> None:
    try:
        tokens, marks = render_chat(tokenizer, request.messages, request.tools)
        reply = recorded_reply(tokenizer, request, tokens)
    except ValueError as error:
        raise ScriptError(f"{request.where}: {error}") from error
    with cache.begin(tokens, marks=marks, reserve=max(len(reply), 1)) as session:
        session.prefill(model)
        session.step(model, tokens[-1:])
        if len(reply):
            session.step(model, reply)


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
