"""PrefixCache: the class that users import. It checks each call, takes the lock and calls the parts of the cache.

Caches on the same ledger share one lock; forward passes run without it. A session belongs to one thread at a time, and
sessions on different slots may run in different threads. MLX does not promise that several threads may evaluate at
once: let them take turns in forward passes, begin and close. A clock is read only if there is a store, or a pin with
`ttl_s`. Only `verify` uses randomness.

`assemble` builds the parts of a cache. The layers hold arrays, or only sizes in a simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import psutil
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache

from policies import CostModel, EvictionPolicy, make_policy
from radixcache.chat_parts import Chat, ChatLog
from radixcache.core import Core, insert_offsets
from radixcache.errors import CacheClosedError, refuse_copy
from radixcache.groups.group import Group, open_group
from radixcache.groups.row import Room
from radixcache.layers.layout import Layout
from radixcache.layers.sizes import AnyLayout
from radixcache.layers.stored import state_identities
from radixcache.layers.trials import BothModels
from radixcache.ledger import FORKED, Ledger
from radixcache.observe.explain import About, Explanation, explanation_of, in_a_line, snapshot_of, stats_of, view_of
from radixcache.observe.hints import Edge, edges_of
from radixcache.observe.page import render_view
from radixcache.observe.stats import CacheStats, StatsSnapshot
from radixcache.observe.trace import Clock, TraceFile, TraceWriter, opened_trace
from radixcache.observe.tree_view import TreeView
from radixcache.paging.budget import ByteBudget, Evictor, guard_policy
from radixcache.paging.pager import Pager
from radixcache.paging.pins import NamedPin, Pins
from radixcache.paging.resume import PrefixRequest, Slots
from radixcache.paging.tier import Disk, Tier
from radixcache.sessions.session import Session, open_session, warm
from radixcache.sessions.solo import Solo
from radixcache.settings import (
    SUFFIX_INDEX_BYTES,
    Settings,
    require_about,
    require_caches,
    require_count,
    require_group,
    require_pin,
    require_use,
)
from radixcache.speculate.drafting import Drafting, drafting_of
from radixcache.stores.block import Identity
from radixcache.stores.block_store import BlockStore
from radixcache.stores.store import joined, moments
from radixcache.tokens import (
    Keys,
    Quarantine,
    TokenIds,
    arguments_of,
    checked_prompt,
    require_namespace,
    vocabulary_size,
)
from radixcache.tree.history import Events, OnEvent
from radixcache.tree.state_tree import StateNode, StateTree
from radixcache.verify import Mismatch


def assemble(
    layout: AnyLayout,
    budget_bytes: int | Ledger | None,
    policy: str | EvictionPolicy,
    cost: CostModel | None,
    settings: Settings,
    trace: TraceFile | None,
    tokenizer: Any,
    *,
    clock: Clock = "requests",
    disk: Disk | None = None,
) -> tuple[Core, About]:
    """Build a Core from the arguments of PrefixCache. The Core closes a trace that is given as a path."""
    source = "given"
    if budget_bytes is None:
        budget_bytes, source = default_budget_bytes(settings.model)
    ledger = budget_bytes if isinstance(budget_bytes, Ledger) else Ledger(budget_bytes)
    chosen = guard_policy(make_policy(policy), ledger.lock)
    cost = cost or analytic_cost(settings.model)
    writer = opened_trace(trace, clock)
    tier: Tier | None = None

    def on_loss(node: StateNode) -> None:
        if tier is not None:
            tier.write_evicted(node)

    account = ledger.open_account(lambda nbytes: evictor.shrink_to(max(0, account.total_bytes - nbytes)))
    events = Events(settings.on_event, ledger.lock, remembers=settings.remembers)
    lost = on_loss if disk is not None and "eviction" in moments(disk.store) else None
    grid_tokens, merges = settings.grid_tokens, settings.merges
    states = StateTree(layout, chosen, account, cost, events, grid_tokens=grid_tokens, merges=merges, on_loss=lost)
    quarantine = Quarantine()
    pins = Pins(settings, states, quarantine)
    slots = Slots(layout, states, pins, settings.live_slots)
    checkpoint_budget_bytes = settings.checkpoint_budget_bytes or ledger.budget_bytes // 2
    budget = ByteBudget(layout, states, slots, settings.max_request_bytes)
    evictor = Evictor(states, slots, pins, budget, checkpoint_budget_bytes, settings.trim_step_tokens)
    pager = Pager(layout, states, evictor, slots)
    if disk is not None:
        tier = Tier(disk, layout, states, evictor, slots, pager)
    owns_trace = not isinstance(trace, TraceWriter)
    core = Core(settings, states, slots, pins, quarantine, evictor, pager, tier, writer, owns_trace)
    about = About(policy if isinstance(policy, str) else type(policy).__name__, source, tokenizer, ChatLog())
    return core, about


class PrefixCache:
    """A prefix cache: a radix tree of token prefixes with the state of the model's layers, under a byte budget.

    The budget limits what is kept; it never refuses a request. A request whose live state is larger than the budget is
    served with device memory beyond it (`stats.over_budget_bytes`, `stats.held_bytes`). When the request closes, the
    longest part of its prefix that fits is kept. RequestTooLargeError: the device cannot hold the state, or it exceeds
    `max_request_bytes`. The check comes before the prompt is evaluated; in a cache's first request, after a chunk.

    Args:
        model: an mlx-lm model. Its caches come from mlx-lm's make_prompt_cache.
        caches: a callable that returns a fresh list of mlx-lm caches, instead of the model's own. Layers may be None.
        budget_bytes: how many bytes of live buffers and snapshots are kept. Default: a quarter of the free device
            memory. Caches on the same Ledger share its budget.
        max_request_bytes: most bytes that the live state of one request may take. Default: the free device memory.
        policy: the eviction policy: a name in policies.POLICIES, "my.module:Class", or an EvictionPolicy.
        cost: the prefill cost that the policy uses. Default: computed from the model's shape.
        checkpoint_interval: tokens between checkpoints during prefill.
        checkpoint_budget_bytes: most bytes of all checkpoints; above it, interval checkpoints are dropped first.
            Default: half the budget.
        suffix_index_bytes: most bytes of the index from which replies are drafted, beside the budget: 39 for a token.
        live_slots: how many sessions may be open at a time. Each slot has its own buffers.
        kv_bits: bits of quantized keys and values in full-attention layers, from offset 0 on. Default: not quantized.
        kv_group_size: elements per group of quantized keys and values.
        stored_bits: 8 or 4: bits of stored keys and values, in memory and in the store. Live state, recurrent state,
            layers with `kv_bits` and head sizes that are no multiple of 32 are never rounded. Not with `exact`.
        trace: a file or a TraceWriter that gets a record, with salted digests, of each request; for simulate.
        on_event: called with an Event for everything that happens to stored state, after the call that caused it.
        tokenizer: an object with `decode`. With it, explain(), dump() and render() show text beside token ids.
        verify: share, 0 to 1, of resumed sessions and of all rows that are also prefilled cold and compared. Wrong
            state is quarantined, and an answer that has not begun is served cold. fetch() is not checked.
        verify_seed: seed for the choice of these requests.
        exact: resume only if the answer equals the answer of a cold run bit for bit.
        step_size: tokens per chunk of prefill. An exact cache resumes only at multiples of `step_size`.
        store: where state is kept outside of memory: a DiskStore, a RedisStore, or several in the order of look-up.
            Caches may share stores. Stores stay open when the cache closes.
        store_if: called with a namespace; True: write the state of this namespace to the store. Default: write all.
        identity: the model's name in the store, if `caches` is given. Default: from its class, arguments and weights.
        seconds: the clock of pins with `ttl_s`, in seconds from any start. Default: time.monotonic.

    Raises:
        ValueError: an argument out of its range.
        UnsupportedCacheError: a layer's cache class has no adapter.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        caches: Callable[[], Sequence[Any]] | None = None,
        budget_bytes: int | Ledger | None = None,
        max_request_bytes: int | None = None,
        policy: str | EvictionPolicy = "lru",
        checkpoint_interval: int = 2048,
        checkpoint_budget_bytes: int | None = None,
        suffix_index_bytes: int = SUFFIX_INDEX_BYTES,
        live_slots: int = 1,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        stored_bits: int | None = None,
        cost: CostModel | None = None,
        trace: TraceFile | None = None,
        on_event: OnEvent | None = None,
        tokenizer: Any = None,
        verify: float = 0.0,
        verify_seed: int = 0,
        exact: bool = False,
        step_size: int = 2048,
        store: BlockStore | Sequence[BlockStore] | None = None,
        store_if: Callable[[str], bool] | None = None,
        identity: Identity | bytes | str | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        require_caches(model, caches, kv_bits, kv_group_size, stored_bits, exact)
        require_about(tokenizer, cost)
        sizes = (checkpoint_interval, checkpoint_budget_bytes, live_slots, verify, verify_seed, exact, step_size)
        more = {"seconds": seconds, "suffix_index_bytes": suffix_index_bytes, "model": model}
        settings = Settings(*sizes, vocabulary_size(model), on_event, max_request_bytes, **more)
        layout = Layout(caches or (lambda: make_prompt_cache(model)), kv_bits, kv_group_size, stored_bits)
        disk = None if store is None else disk_of(store, layout, model, identity, settings, takes=store_if)
        self._open: Core | None
        self._open, self._about = assemble(layout, budget_bytes, policy, cost, settings, trace, tokenizer, disk=disk)

    def __repr__(self) -> str:
        core = self._open
        if core is None or core.lock.is_foreign:
            return "<PrefixCache closed>"
        return f"<PrefixCache {in_a_line(core, self._about)}>"

    __reduce_ex__ = refuse_copy

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all state, also of open sessions and groups, and close the trace if it was given as a path.

        Waits until the store has written everything. Then other calls raise CacheClosedError or SessionClosedError.
        """
        core, self._open = self._open, None
        self._about.chats.clear()
        if core is not None and not core.lock.is_foreign:  # In a forked process, the parent process owns the state.
            core.close()
            core.flush()

    def flush(self, timeout_s: float | None = None, *, write_all: bool = False) -> bool:
        """Wait until the store has written everything, with `write_all` all of memory. False: timeout_s have passed."""
        return self._core.flush(timeout_s, write_all)

    def begin(
        self,
        tokens: Any,
        keys: Any = None,
        namespace: str = "",
        marks: Sequence[int] = (),
        reserve: int = 256,
        priority: int = 0,
        *,
        turn: int | None = None,
        kind: str = "",
        chat: Chat | None = None,
    ) -> Session:
        """Restore the longest usable prefix of `tokens` into the live caches and open a session on them.

        Args:
            tokens: token ids of the whole prompt: list, tuple, np.ndarray or mx.array.
            keys: int64, one per token: what the tree compares. Default: the token ids.
            namespace: nothing is shared between namespaces (LoRA adapters, tenants).
            marks: offsets worth a checkpoint, such as the end of the system prompt and of each message.
            reserve: buffer room for the reply, allocated at once, in tokens.
            priority: for the eviction policies `priority` and `ttl`.
            turn: number of the turn in its conversation, from 1, for the policies `turn` and `benefit`.
            kind: kind of the request, for the policies `turn`, `benefit` and `ttl`.
            chat: the chat from which the tokens were rendered. `explain` compares later chats with a copy of it.

        Raises:
            ValueError: tokens, keys, marks, reserve, turn or kind out of their range.
            CacheBusyError: every live slot is taken; the message names the sessions.
            RequestTooLargeError: the device cannot hold the state of the prompt, or max_request_bytes is less.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace, marks)
        room, use = require_count("reserve", reserve, "tokens", least=0), require_use(priority, turn, kind)
        session = open_session(self._core, prompt, prompt_keys, namespace, tuple(map(int, marks)), room, use)
        if chat is not None:
            self._about.chats.add_copy(prompt_keys, chat, namespace)
        return session

    def drafting(
        self,
        prompt: Any,
        namespace: str = "",
        *,
        speculate: Literal["tree", "prompt"] | None = "tree",
        prediction: Any = None,
        max_tokens: int | None = None,
    ) -> Drafting:
        """The source of draft tokens for a request; one forward pass checks several of them.

        Args:
            prompt: token ids of the whole prompt: list, tuple, np.ndarray or mx.array.
            namespace: the only namespace from which tokens are drafted.
            speculate: "tree": draft from earlier requests of the namespace and from the prompt; "prompt": from the
                prompt alone; None: only from the prediction.
            prediction: the expected token ids of the reply, given like `prompt`.
            max_tokens: most tokens of the reply; at most twice as many of `prediction` are used. None: no limit.

        Raises:
            ValueError: `speculate` is unknown; `max_tokens` is below 1; or drafts are asked of an exact cache.
        """
        core, tree_source = self._core, partial(self._core.draft_index.source, namespace)
        return drafting_of(prompt, tree_source, core.draft_pace, core.settings, speculate, prediction, max_tokens)

    def begin_many(
        self,
        prompts: Sequence[Any] = (),
        *,
        capacity: int,
        namespace: str = "",
        priority: int = 0,
        segment_bytes: int | None = None,
    ) -> Group:
        """Open a group: many requests that decode together and read shared prefixes in place, from the tree.

        Each prompt becomes a row, restored as in `Group.admit`; more may be admitted later. A group takes no live slot.

        Args:
            capacity: tokens of all rows together; shared tokens count once. State that rows hold outside the tree
                counts as live bytes of the budget.
            segment_bytes: spans of at least this many bytes per layer are read in place; None: the measured default.

        Raises:
            ValueError: an argument out of its range; the cache is exact, quantized, or simulated.
            UnsupportedCacheError: a layer's state cannot be in a batch of rows.
            CacheFullError: no room for the tokens to restore.
            RequestTooLargeError: no memory for a prompt, as in begin().
        """
        require_namespace(namespace)
        capacity, priority = require_group(capacity, priority, prompts)
        return open_group(Room(self._core, capacity), prompts, namespace, priority, segment_bytes, self._about.chats)

    def alone(self, *, namespace: str = "", priority: int = 0) -> Solo:
        """A seat for one request at a time, in a session. It has the methods of a Group that decoding calls.

        Use it where a group is impossible: exact or quantized caches, layers that cannot be in a batch, embeddings.
        """
        require_namespace(namespace)
        return Solo(self.begin, len(self._core.layout.fresh()), namespace=namespace, priority=priority)

    def fetch(self, tokens: Any, namespace: str = "", *, keys: Any = None) -> tuple[list[Any], TokenIds]:
        """Restore the longest usable prefix into fresh caches that the caller owns, outside of the budget.

        Returns the caches, at offset len(tokens) - len(remaining), and `remaining`: the int32 ids left to evaluate, at
        least one. On a miss, the caches are empty. In exact mode, prefill in multiples of `step_size`.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with self._core.lock:
            return self._core.fetch(PrefixRequest(prompt, prompt_keys, namespace, self._core.next_use()))

    def insert(
        self,
        tokens: Any,
        caches: Sequence[Any],
        namespace: str = "",
        priority: int = 0,
        *,
        keys: Any = None,
        row: int | None = None,
    ) -> int:
        """Store the state of foreign caches for `tokens`. Returns how many of the tokens the tree then holds.

        Copies only what the tree lacks. Tokens after a quarantined offset are not stored.

        Args:
            tokens: the tokens that the caches were made from, in order.
            caches: mlx-lm caches of the same classes, batch 1. If they hold more tokens, the rest is left out if
                possible; if fewer, tokens[:offset] is stored. Recurrent caches must be at the end of the tokens.
            row: the caches are those of a batch, such as BatchKVCache; the tokens are those of this row.

        Raises:
            SnapshotError, ValueError: the caches do not fit, nothing was changed; the cache is exact.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with self._core.lock:
            use = self._core.next_use(priority)
            return self._core.insert(PrefixRequest(prompt, prompt_keys, namespace, use), caches, row)

    def insert_offsets(
        self, tokens: Any, namespace: str = "", *, keys: Any = None, marks: Sequence[int] = ()
    ) -> list[int]:
        """Offsets at which to call insert() while you prefill the rest of a prompt after fetch(). Changes nothing.

        They are `marks`, where the prompt diverges from a stored one, each `checkpoint_interval`, and near its end.
        With full attention alone, prompts resume anywhere, and the list is empty.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace, marks)
        with self._core.lock:
            return insert_offsets(self._core, prompt, prompt_keys, namespace, marks)

    def pin(
        self,
        tokens: Any,
        namespace: str = "",
        *,
        name: str | None = None,
        ttl_requests: int | None = None,
        ttl_s: float | None = None,
        keys: Any = None,
    ) -> int:
        """Protect a stored prefix from eviction until unpin(). Returns the bytes that all pins keep.

        Each pin of a prefix needs its own unpin(). names() lists pins with a `name`. A name that is in use moves to
        these tokens. A pin ends after `ttl_requests` more requests or after `ttl_s` seconds. Only clear() and the loss
        of the state end it sooner. Exact mode keeps whole chunks; the last one only if a longer prompt has stored it.

        Raises:
            ValueError: the prefix is not stored whole or is quarantined, or all pins on the ledger would not fit.
        """
        _, prompt_keys = self._checked(tokens, keys, namespace)
        require_pin(name, ttl_requests, ttl_s)
        core, pins = self._core, self._core.pins
        with core.lock:
            core.evictor.tidy_unpinned()
            pins.add(prompt_keys, namespace, name, ttl_requests, ttl_s)
            core.evictor.enforce_budget()
            return pins.nbytes

    def unpin(self, tokens: Any = None, namespace: str = "", *, name: str | None = None, keys: Any = None) -> None:
        """End one pin of exactly these tokens (an unnamed pin first), or the pin with that name."""
        require_namespace(namespace)
        prompt_keys = None if tokens is None else self._checked(tokens, keys, namespace)[1]
        if (tokens is None) == (name is None):
            raise ValueError("unpin() takes tokens or name=; wanted exactly one of them.")
        with self._core.lock:
            if prompt_keys is not None:
                self._core.pins.remove(prompt_keys, namespace)
            elif name is not None:
                self._core.pins.remove_named(name, namespace)
            self._core.evictor.enforce_budget()

    def names(self, namespace: str = "") -> dict[str, NamedPin]:
        """The named pins of one namespace, in the order they were made."""
        require_namespace(namespace)
        with self._core.lock:
            self._core.evictor.tidy_unpinned()
            return self._core.pins.named(namespace)

    def warm(
        self,
        model: Any,
        tokens: Any,
        namespace: str = "",
        *,
        name: str | None = None,
        ttl_requests: int | None = None,
        ttl_s: float | None = None,
        marks: Sequence[int] = (),
        keys: Any = None,
        step_size: int | None = None,
        priority: int = 0,
        draft_model: Any = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Prefill a prefix ahead of use, so that longer prompts resume at its end with any kind of layers.

        With `name`, `ttl_requests` or `ttl_s` the prefix is pinned, as by pin(). Unless it is stored, it counts as a
        request. In exact mode, it ends with its last whole chunk. Returns the number of tokens evaluated.

        Raises:
            ValueError: the prefix is quarantined or was found wrong, or does not fit beside open sessions and pins.
            CacheBusyError: the prefix has to be evaluated, and every live slot is taken.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace, marks)
        require_pin(name, ttl_requests, ttl_s)
        run = model if draft_model is None else BothModels(model, draft_model, len(self._core.layout.fresh()))
        begin = partial(self.begin, namespace=namespace, marks=[*marks, len(prompt)], reserve=0, priority=priority)
        how = (name, ttl_requests, ttl_s), step_size, on_progress
        return warm(self._core, begin, run, prompt, prompt_keys, namespace, *how)

    def learn(self, model: Any, draft_model: Any = None) -> None:
        """Run a few passes, about 270 tokens in total, so that the first request is as fast as the next ones.

        The passes compile the model and allocate its buffers. The cache learns the bytes per token and, with a store,
        the prefill speed. No state is kept, and no request is counted. ValueError: it is not the model of the cache.
        """
        layers = len(self._core.layout.fresh())
        self._core.learn(model if draft_model is None else BothModels(model, draft_model, layers))

    def make_room(self, nbytes: int) -> bool:
        """Evict, in the same order as a request does, until `nbytes` more fit the budget; return whether they fit."""
        nbytes = require_count("nbytes", nbytes, "bytes", least=0)
        with self._core.lock:
            self._core.evictor.tidy_unpinned()
            return self._core.evictor.make_room(nbytes)

    def reclaim(self, target_bytes: int, namespace: str | None = None) -> int:
        """Evict until live and paged bytes are at most `target_bytes`, if possible; return the bytes freed.

        With a namespace, only its state, also in live buffers, is counted and evicted, least recently used first.
        """
        target_bytes = require_count("target_bytes", target_bytes, "bytes", least=0)
        require_namespace(namespace or "")
        with self._core.lock:
            self._core.evictor.tidy_unpinned()
            freed = self._core.evictor.shrink_to(target_bytes, namespace)
            self._core.layout.release()
            return freed

    def clear(self, namespace: str | None = None) -> None:
        """Drop state that no open session uses, pins, and the memory of explain(): of one namespace; None: of all."""
        require_namespace(namespace or "")
        self._about.chats.clear(namespace)
        with self._core.lock:
            self._core.clear(namespace)

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """The last mismatches that verification found, of all namespaces, oldest first."""
        with self._core.lock:
            return tuple(self._core.verifier.mismatches)

    def clear_quarantine(self, namespace: str | None = None) -> None:
        """Let quarantined prefixes of a namespace (None: of all) be stored and resumed again."""
        require_namespace(namespace or "")
        with self._core.lock:
            self._core.quarantine.clear(namespace)

    def explain(self, tokens: Any, namespace: str = "", *, keys: Any = None, chat: Chat | None = None) -> Explanation:
        """Say what begin() would restore of a prompt now, in this thread, and why not more. Changes nothing.

        While all live slots are taken, this describes fetch(). Other namespaces are not searched. With the `chat` from
        which the tokens were rendered, the result names the part that differs from the most similar of the last chats.
        ValueError: `chat` is given, and the cache has no tokenizer.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        return explanation_of(self._core, prompt, prompt_keys, namespace, self._about, chat)

    @property
    def stats(self) -> CacheStats:
        """The counts and bytes of the cache, as a frozen CacheStats."""
        with self._core.lock:
            return stats_of(self._core, self._about)

    def snapshot_stats(self, namespace: str | None = None) -> StatsSnapshot:
        """All metrics at one moment. With a namespace, only sums over the nodes and pins of this namespace."""
        require_namespace(namespace or "")
        return snapshot_of(self._core, namespace, self._about)

    def check(self) -> None:
        """Assert all invariants; AssertionError names the first that does not hold."""
        with self._core.lock:
            self._core.check()

    def dump(self, tokenizer: Any = None, namespace: str | None = None) -> str:
        """The whole tree as text, one line per node; with a tokenizer, each line shows the text of the edge."""
        return self.render(namespace=namespace, tokenizer=tokenizer, max_nodes=1 << 62)

    def render(
        self, format: str = "text", *, namespace: str | None = None, tokenizer: Any = None, max_nodes: int | None = None
    ) -> str:
        """The tree as "text", "svg" (a picture), "html" (a page with search) or "json"; of one namespace or of all.

        Args:
            tokenizer: shows how edges begin and end; by default the cache's own.
            max_nodes: the most nodes to show; each parent counts its hidden nodes. Default: 200; 50,000 for "html".
        """
        return render_view(self.view(namespace=namespace, tokenizer=tokenizer), format, max_nodes)

    def view(self, *, namespace: str | None = None, tokenizer: Any = None) -> TreeView:
        """A plain description of the tree, from which `render` makes text and pictures. Arguments as for `render`."""
        require_namespace(namespace or "")
        about = self._about if tokenizer is None else self._about._replace(tokenizer=tokenizer)
        return view_of(self._core, namespace, about)

    def edges(self) -> list[Edge]:
        """The stored prefixes: the edges of all trees, parents before children."""
        return edges_of(self._core.lock, self._core.states.tree)

    @property
    def _core(self) -> Core:
        if self._open is None:
            raise CacheClosedError
        if self._open.lock.is_foreign:
            raise CacheClosedError(FORKED)
        return self._open

    def _checked(self, tokens: Any, keys: Any, namespace: Any, marks: Sequence[int] = ()) -> tuple[TokenIds, Keys]:
        require_namespace(namespace)
        return checked_prompt(tokens, keys, marks, self._core.settings.vocab_size)


def disk_of(
    store: BlockStore | Sequence[BlockStore],
    layout: Layout,
    model: Any,
    identity: Identity | bytes | str | None,
    settings: Settings,
    takes: Callable[[str], bool] | None,
) -> Disk:
    """Join the stores into one Disk, with the names that this cache's state has in them."""
    leaves = [leaf for leaf, _ in layout.leaves(layout.fresh())]
    own, *finer = state_identities(leaves, model, identity, exact=settings.exact, stored_bits=layout.stored_bits)
    return Disk(joined(store), own, settings.step_size if settings.exact else 0, takes=takes, finer=finer)


def default_budget_bytes(model: Any) -> tuple[int, str]:
    """A quarter of the device memory that the model leaves free, in bytes, and a sentence on the source of this number.

    Source: MLX's recommended working set, less the model, if the device states one (Metal). Otherwise the available
    memory of the system, which already excludes the model.
    """
    working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not working_set:
        return max(1, int(psutil.virtual_memory().available) // 4), "a quarter of the available memory"
    spare = working_set - _parameter_bytes(model)
    return max(1, spare // 4), "a quarter of MLX's recommended working set beside the model"


def analytic_cost(model: Any) -> CostModel:
    """Prefill cost in FLOPs if the model states its size, else in tokens."""
    args = arguments_of(model)
    layers, width = getattr(args, "num_hidden_layers", None), getattr(args, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        return CostModel()
    # Assume float32: this only scales the unit, and policies compare costs only within one cache.
    return CostModel.analytic(parameters=max(1, _parameter_bytes(model) // 4), layers=layers, hidden_size=width)


def _parameter_bytes(model: Any) -> int:
    parameters = getattr(model, "parameters", None)
    if not callable(parameters):
        return 0
    return int(tree_reduce(lambda nbytes, array: nbytes + array.nbytes, parameters(), 0))


def chats_of(cache: PrefixCache) -> ChatLog:
    """The last chats that a cache was given. A server adds chats itself, as it names changes on another thread."""
    return cache._about.chats
