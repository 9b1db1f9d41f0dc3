"""PrefixCache: the cache layer that users import. Joins tree, adapters, ledger and policy, and holds the lock.

A request is begun, runs on the live caches, and is closed:

    begin    match -> plan where to resume -> leave the old path (page out) -> make room -> page in -> Session
    close    settle what was evaluated -> new nodes and checkpoints in the tree, LIVE -> keep the budget

Invariants, asserted by `check`, besides those of StateTree (S), Slots (P), LivePath (V) and Ledger (L):

  C1  Between public calls every node's spans are LIVE or PAGED, none is LEAVING.
  C2  live + paged bytes <= budget after every public call, if dropping evictable state can achieve it.
  C3  A leaf without a checkpoint is live, held, or the model has no point layers: nothing else could resume on it.

All public methods take one lock, which caches on the same ledger share. Forward passes run outside of it. A session
belongs to one thread at a time; sessions on different slots may run in different threads. That several threads may
evaluate at once MLX does not promise: a server whose threads do lets them take turns, forward passes, begin and close.
Nothing here reads a clock, and only `verify` draws, from a generator of its own with a seed: the same requests give the
same tree.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from policies import CostModel, Entry, EvictionPolicy, make_policy
from radixcache.draft import both_models
from radixcache.events import RESUMED, Events, OnEvent
from radixcache.evictor import TRIM_TOKENS, Evictor
from radixcache.explain import Explanation, Foresight, explain, with_text
from radixcache.expulsion import Expulsion
from radixcache.grid import Tails, floor
from radixcache.interrupts import uninterrupted
from radixcache.layout import Layout
from radixcache.ledger import Ledger
from radixcache.live_path import LivePath
from radixcache.memory import default_budget_bytes, parameter_bytes
from radixcache.monitor import StatsSnapshot, snapshot
from radixcache.pager import Pager
from radixcache.pins import NamedPin, Pins
from radixcache.quarantine import Quarantine
from radixcache.recorder import Recorder
from radixcache.render import render_node
from radixcache.resume import ResumePlan, ShortReason, plan_resume
from radixcache.session import Session
from radixcache.slots import Slots
from radixcache.snapshots import Checkpoint
from radixcache.state_tree import NodeState, StateNode, StateTree, Use, state_of
from radixcache.stats import CacheStats
from radixcache.tokens import TokenIds, edge_keys, token_ids, vocabulary_size
from radixcache.trace import Clock, TraceWriter
from radixcache.tree import Keys, Match, below
from radixcache.verifier import Mismatch, Verifier
from radixcache.view import TreeView, collect, render_view
from radixcache.view.words import bytes_words


class PrefixCache:
    """A radix tree of layer snapshots with one live path or several, under a byte budget.

    Args:
        model: an mlx-lm model; its caches come from mlx-lm's make_prompt_cache.
        caches: instead of a model's own, a callable that returns a fresh list of mlx-lm caches (layers may be None).
        budget_bytes: live buffers plus paged snapshots; None takes a quarter of what the device can spare. A Ledger
            shares its budget with other caches.
        policy: a name in policies.POLICIES or an EvictionPolicy.
        checkpoint_interval: tokens between checkpoints of point state during prefill.
        checkpoint_budget_bytes: cap on checkpoints, beyond which interval ones are thinned; half the budget by default.
        live_slots: paths that may be live at a time, and so sessions that may be open; each has buffers of its own.
        kv_bits, kv_group_size: keep full-attention layers quantized, from offset 0.
        cost: prefill cost in the policy's eyes; analytic by default.
        trace: file in which every request is recorded by salted digests of its prefix, for `radixcache simulate`; or a
            TraceWriter with a salt, a block length or plain ids of its own. It is written when a session closes.
        clock: where ticks come from, such as a trace's milliseconds; by default they count requests. A tick is later
            than the one before in any case.
        on_event: called with an Event for all that happens to stored state, once the call that caused it is over; it
            may call the cache. What it raises is counted and warned of once, and goes no further.
        tokenizer: anything with `decode`, so that explain(), dump() and render() show text beside token ids.
        layout: what stands for the layers instead of a model's caches: a SizedLayout holds sizes and no arrays.
        trim_tokens: step in which a leaf of a pure span model loses its tail.
        merges: join a node with its only child where nothing keeps them apart. Without it keys of different history
            stay apart, as policies are defined on blocks.
        verify: share of the resumed requests, 0 to 1, that are prefilled cold beside the restored state before their
            first forward pass, to compare every layer and the logits of the prompt's last token. Wrong state is
            quarantined and the request served as if nothing had been stored. The second state counts against the
            budget and others are evicted for it.
        verify_seed: which requests are drawn.
        exact: resume only where a warm answer is bit for bit the cold one of the same cache: on state made by prefill
            in whole chunks of step_size tokens from offset 0.
        step_size: tokens per forward pass of prefill; in exact mode no other is taken.

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
        policy: str | EvictionPolicy = "lru",
        checkpoint_interval: int = 2048,
        checkpoint_budget_bytes: int | None = None,
        live_slots: int = 1,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        cost: CostModel | None = None,
        trace: str | os.PathLike[str] | TraceWriter | None = None,
        clock: Callable[[], int] | None = None,
        on_event: OnEvent | None = None,
        tokenizer: Any = None,
        layout: Layout | None = None,
        trim_tokens: int | None = None,
        merges: bool = True,
        verify: float = 0.0,
        verify_seed: int = 0,
        exact: bool = False,
        step_size: int = 2048,
    ) -> None:
        if model is None and caches is None and layout is None:
            raise ValueError("PrefixCache needs a model, or caches= with a callable that returns fresh mlx-lm caches.")
        if caches is not None and not callable(caches):
            raise ValueError(f"caches is a {type(caches).__name__}; wanted a callable that returns mlx-lm caches.")
        _require_count("checkpoint_interval", checkpoint_interval, "tokens")
        _require_count("kv_group_size", kv_group_size, "elements")
        _require_count("step_size", step_size, "tokens")
        _require_count("live_slots", live_slots, "slots")
        if kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"kv_bits is {kv_bits!r}; wanted None, 2, 3, 4, 5, 6 or 8.")
        chosen_policy = make_policy(policy)
        self._policy_name = policy if isinstance(policy, str) else type(policy).__name__
        _require_share("verify", verify)
        if isinstance(verify_seed, bool) or not isinstance(verify_seed, int):
            raise ValueError(f"verify_seed is {verify_seed!r}; wanted a whole number.")
        if verify and layout is not None:
            raise ValueError("verify needs the state of a model; a layout that holds sizes has none.")
        self.budget_source = "given"
        if budget_bytes is None:
            budget_bytes, self.budget_source = default_budget_bytes(model)
        self._ledger = budget_bytes if isinstance(budget_bytes, Ledger) else Ledger(budget_bytes)
        if checkpoint_budget_bytes is not None:
            _require_count("checkpoint_budget_bytes", checkpoint_budget_bytes, "bytes")
        self.layout = layout or Layout(caches or (lambda: make_prompt_cache(model)), kv_bits, kv_group_size)
        self.exact, self.step_size = exact, step_size
        if exact:
            self.layout.grid_tokens = step_size
        self.lock = self._ledger.lock
        self.vocab_size = None if model is None else vocabulary_size(model)
        self.checkpoint_interval = checkpoint_interval
        self._account = self._ledger.open_account(self._give_back)
        self._states = StateTree(self.layout, chosen_policy, self._account, cost or _analytic_cost(model), merges)
        cap = checkpoint_budget_bytes if checkpoint_budget_bytes is not None else self._ledger.budget_bytes // 2
        if trim_tokens is not None:
            _require_count("trim_tokens", trim_tokens, "tokens")
        if exact:
            trim_tokens = -(-(trim_tokens or TRIM_TOKENS) // step_size) * step_size
        self._evictor = Evictor(self._states, cap, trim_tokens)
        self._tails = Tails()
        self._slots = Slots(self.layout, self._states, live_slots)
        self._evictor.paths = self._slots.paths
        self._evictor.lose = self._lose
        self._pager = Pager(self.layout, self._states, self._evictor, self._slots)
        self._recorder = Recorder(self.layout, self._states, self._evictor, self._pager)
        self._pins = Pins(self.layout, self._states, self._evictor, self._ledger.budget_bytes)
        self._events = self._states.events = Events(on_event, self.lock)
        self._tokenizer = tokenizer
        self._quarantine = Quarantine()
        self._expulsion = Expulsion(self.layout, self._states, self._evictor, self._pager, self._slots, self._pins)
        self._verifier = Verifier(self.layout, verify, verify_seed, self.lock, self._events)
        self._tick = 0
        self._clock = clock
        self._trace = _trace_writer(trace, "requests" if clock is None else "ms")
        self._requests = self._hit_tokens = self._miss_tokens = self._off_grid_tokens = 0
        self._short_reasons: dict[str, int] = {}

    # Requests

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
    ) -> Session:
        """Restore the longest usable prefix of `tokens` into the live caches and open a session on them.

        Args:
            tokens: token ids of the whole prompt: list, tuple, np.ndarray or mx.array.
            keys: int64, one per token: what the tree goes by where a position stands for more than its token id.
            namespace: nothing is shared across namespaces (model adapter, tenant, salt).
            marks: offsets worth a checkpoint, such as the end of the system prompt and of each message.
            reserve: tokens of room to allocate beyond the prompt, for the reply.
            priority, turn, kind: passed on to the eviction policy; turns count from 1.

        Raises:
            ValueError: tokens, keys, marks, reserve, turn or kind out of their range.
            CacheBusyError: every live slot is taken by an open session; it says by which.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        for mark in marks:
            if not 0 <= mark <= len(prompt):
                raise ValueError(f"mark {mark} is outside the prompt of {len(prompt)} tokens.")
        if reserve < 0:
            raise ValueError(f"reserve is {reserve}; wanted 0 or more tokens.")
        if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or turn < 0):
            raise ValueError(f"turn is {turn!r}; wanted a whole number, 0 or more, or None.")
        if isinstance(priority, bool) or not isinstance(priority, int) or not isinstance(kind, str):
            raise ValueError(f"priority is {priority!r}, kind {kind!r}; wanted a whole number and a str.")
        session = None
        try:
            with uninterrupted(), self.lock:
                for path in self._slots.vanished():
                    self._abandon(path)
                self._slots.require_free(namespace)
                use = self._next_use(priority, turn, kind)
                session = self._open(prompt, prompt_keys, namespace, use, marks, reserve)
        except BaseException:
            if session is not None:
                session.close()
            raise
        return session

    def fetch(self, tokens: Any, namespace: str = "", *, keys: Any = None) -> tuple[list[Any], TokenIds]:
        """Restore the longest usable prefix into fresh caches that the caller owns.

        Returns:
            (caches, remaining): caches at offset len(tokens) - len(remaining), and the int32 ids left to evaluate,
            never empty. On a miss the caches are empty. Their bytes are the caller's, not the budget's. In exact mode
            they stand at a multiple of step_size; go on in whole chunks from there, or it is in vain.

        Raises:
            ValueError: tokens or keys out of their range.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            use = self._next_use()
            allowed = self._allowed(prompt_keys, namespace)
            match = self._states.match(allowed, namespace)
            hidden = self._slots.hidden(match.node.path(), None)
            plan = plan_resume(self.layout, match, len(prompt) - 1, None, hidden)
            plan = self._with_tail(plan, match, allowed, len(prompt) - 1)
            nodes = [node for node in plan.path if node.start < plan.resume]
            if not match.node.is_root:
                self._states.guard(match.node, 1)
            try:
                caches = self._pager.allocating(lambda: self._pager.restored(nodes, plan))
            finally:
                if not match.node.is_root:
                    self._states.guard(match.node, -1)
            self._states.touch(nodes, plan.source, use)
            self._evictor.let_go(match.node)
            self._count(plan, len(prompt))
            self._note_request(prompt_keys, namespace, plan, "fetch")
            self._record(prompt_keys, 0, namespace, use)
            return caches, prompt[plan.resume :].copy()

    def insert(
        self, tokens: Any, caches: Sequence[Any], namespace: str = "", priority: int = 0, *, keys: Any = None
    ) -> int:
        """Store the state of foreign caches for `tokens`; copies only what the tree does not hold yet.

        Args:
            tokens: the tokens that the caches were made from, in order.
            caches: mlx-lm caches of the same classes, batch 1. Offsets beyond the tokens are cut where that is
                possible; short of them, tokens[:offset] is stored. Recurrent caches without an offset are taken to
                stand at the last token.

        Returns:
            Tokens of the sequence that the tree holds afterwards; none beyond where it is quarantined.

        Raises:
            SnapshotError: the caches do not fit; nothing was changed.
            ValueError: the cache is exact.
        """
        if self.exact:
            raise ValueError(
                f"insert() into an exact cache: nobody knows whether these caches were prefilled in whole chunks of "
                f"{self.step_size} tokens from offset 0. Use begin() and session.prefill(), or exact=False."
            )
        _, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            allowed = self._allowed(prompt_keys, namespace)
            if len(allowed) < len(prompt_keys) and self.layout.has_points:
                self.layout.compare(caches)  # point state cannot be cut back to where the quarantine begins
                end = len(allowed)
            else:
                end = self._recorder.record_foreign(caches, allowed, namespace, self._next_use(priority))
            self._keep_budget()
            return self._states.match(prompt_keys[:end], namespace).offset

    # Pins, memory

    def pin(
        self,
        tokens: Any,
        namespace: str = "",
        *,
        name: str | None = None,
        ttl_requests: int | None = None,
        keys: Any = None,
    ) -> int:
        """Keep a stored prefix whatever the pressure, until unpin(); pins count. Returns the bytes all pins keep.

        Only clear(), and the loss of the state itself to a failed forward pass, end a pin before its time. In exact
        mode it keeps whole chunks, the last one of exactly these tokens only if something longer has stored it.

        Args:
            name: what names() lists it by, within its namespace. A name that is taken changes over to these tokens,
                once they are stored beside the old ones.
            ttl_requests: the pin ends with so many more begin() and fetch() calls; None: it stays.

        Raises:
            ValueError: the prefix is not stored whole, or the pins, those of other caches on the ledger among them,
                would not fit the budget. What was pinned before stays, a pin of the same name too.
        """
        _require_pin(name, ttl_requests)
        _, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            self._pins.add(self._pinnable(prompt_keys, namespace), namespace, name, ttl_requests)
            self._keep_budget()
            return self._pins.nbytes

    def unpin(self, tokens: Any = None, namespace: str = "", *, name: str | None = None, keys: Any = None) -> None:
        """Take one pin() of exactly these tokens back (an unnamed one first), or the one of that name.

        Raises:
            ValueError: there is no such pin, or not exactly one of tokens and name was given.
        """
        if (tokens is None) == (name is None):
            raise ValueError("unpin() takes tokens or name=; wanted exactly one of them.")
        prompt_keys = None if name is not None else self._checked(tokens, keys, namespace)[1]
        with uninterrupted(), self.lock:
            if prompt_keys is not None:
                self._pins.remove(self._pinned(prompt_keys, namespace), namespace)
            elif name is not None:
                self._pins.remove_named(name, namespace)
            self._keep_budget()

    def names(self, namespace: str = "") -> dict[str, NamedPin]:
        """The named pins of one namespace, in the order they were made."""
        with self.lock:
            return self._pins.named(namespace)

    def warm(
        self,
        model: Any,
        tokens: Any,
        namespace: str = "",
        *,
        name: str | None = None,
        ttl_requests: int | None = None,
        marks: Sequence[int] = (),
        keys: Any = None,
        step_size: int | None = None,
        priority: int = 0,
        draft_model: Any = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Prefill a prefix ahead of use: a prompt that goes on from it will resume at its end, whatever the layers.

        In exact mode that is the end of its last whole chunk.

        With `name` or `ttl_requests` it is pinned as well, as pin() does. What is there already is not computed again
        and takes no live slot; else this is a request like any other, in stats and traces too.

        Args:
            tokens: the prefix, a system prompt rendered without what follows it, say.
            marks: offsets within it worth a checkpoint of their own.
            draft_model: for speculative decoding, as in stream_generate.

        Returns:
            Tokens evaluated; 0 when the prefix was there.

        Raises:
            ValueError: an argument out of its range; the pins would not fit the budget; or open sessions and pins
                leave no room for it. What was evaluated stays as an ordinary prefix.
            CacheBusyError: it has to be evaluated, and every live slot is taken.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        _require_pin(name, ttl_requests)
        length, pinned = len(prompt), name is not None or ttl_requests is not None
        for mark in marks:
            if not 0 <= mark <= length:
                raise ValueError(f"mark {mark} is outside the prefix of {length} tokens.")
        pinned_keys = self._whole_chunks(prompt_keys, length)
        with uninterrupted(), self.lock:
            if self._is_resumable(prompt_keys, namespace):
                if pinned:
                    self._pins.add(pinned_keys, namespace, name, ttl_requests)
                return 0
        # With any token behind it the prefix is prefilled to its very end, as the request it is meant for will need it.
        asked, asked_keys = np.append(prompt, prompt[-1]), np.append(prompt_keys, prompt_keys[-1])
        progress = None if on_progress is None else lambda done, _: on_progress(done, length)
        with self.begin(asked, asked_keys, namespace, [*marks, length], reserve=0, priority=priority) as session:
            if draft_model is not None:
                model = both_models(model, draft_model, len(session.caches))
            session.prefill(model, step_size, progress)
            with uninterrupted(), self.lock:
                for checkpoint in [c for c in session.checkpoints if c.kind == "tail"]:
                    session.checkpoints.remove(checkpoint)  # nothing rewrites the end of this prompt
                    session.live.hold_checkpoint(-checkpoint.nbytes)
                if pinned:
                    point_bytes = sum(c.nbytes for c in session.checkpoints if c.offset == len(pinned_keys))
                    self._pins.require_room(pinned_keys, namespace, name, point_bytes)
                session.close()
                if not self._is_resumable(prompt_keys, namespace):
                    stored = self._states.match(prompt_keys, namespace).offset
                    raise ValueError(
                        f"{stored} of {length} tokens could be kept: open sessions and pins leave no room under"
                        f" the budget of {self._ledger.budget_bytes} bytes."
                    )
                if pinned:
                    self._pins.add(pinned_keys, namespace, name, ttl_requests)
        return length - session.cached_tokens

    def make_room(self, nbytes: int) -> bool:
        """Evict until so many bytes more fit the budget, as a request does before it evaluates; whether they do now."""
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; wanted 0 or more.")
        with uninterrupted(), self.lock:
            return self._evictor.make_room(nbytes)

    def reclaim(self, target_bytes: int) -> int:
        """Give memory back now, until live + paged bytes are at most `target_bytes`; returns the bytes freed.

        Open sessions and pins keep theirs.
        """
        if target_bytes < 0:
            raise ValueError(f"target_bytes is {target_bytes}; wanted 0 or more.")
        with uninterrupted(), self.lock:
            freed = self._evictor.shrink_to(target_bytes)
            self.layout.release()
            return freed

    # Quarantine

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """The last mismatches that verification found, of all namespaces, oldest first."""
        with self.lock:
            return tuple(self._verifier.mismatches)

    def clear_quarantine(self, namespace: str | None = None) -> None:
        """Let quarantined prefixes of a namespace (None: of all) be stored and resumed again."""
        with uninterrupted(), self.lock:
            self._quarantine.clear(namespace)

    # Looking

    def explain(self, tokens: Any, namespace: str = "", *, keys: Any = None) -> Explanation:
        """What begin() would restore of a prompt now, in this thread, and why not more; changes nothing.

        While all live slots are taken it says what fetch() would find. It looks only into its namespace.

        Raises:
            ValueError: tokens or keys out of their range.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with self.lock:
            quarantined_from = self._quarantine.offset(prompt_keys, namespace)
            seen = self._foresee(prompt_keys[:quarantined_from], len(prompt) - 1, namespace)
            history, cost = self._states.history, self._states.cost
            found = explain(prompt, prompt_keys, namespace, seen, history, cost, quarantined_from)
        return found if self._tokenizer is None else with_text(found, self._tokenizer)

    @property
    def stats(self) -> CacheStats:
        """What the cache has done and holds, as a frozen CacheStats."""
        with self.lock:
            return CacheStats(
                requests=self._requests,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                off_grid_tokens=self._off_grid_tokens,
                short_reasons=dict(self._short_reasons),
                evictions=self._evictor.evictions,
                evicted_bytes=self._evictor.evicted_bytes,
                copied_bytes=self._states.copied_bytes,
                paged_in_bytes=self._states.paged_in_bytes,
                paged_out_bytes=self._states.paged_out_bytes,
                live_bytes=self._account.live_bytes,
                paged_bytes=self._account.paged_bytes,
                checkpoint_bytes=self._account.checkpoint_bytes,
                duplicate_bytes=self._states.duplicate_bytes,
                spare_bytes=self._slots.spare_nbytes(),
                pinned_bytes=self._pins.nbytes,
                nodes=self._states.tree.node_count,
                tokens=self._states.tree.key_count,
                budget_bytes=self._ledger.budget_bytes,
                budget_source=self.budget_source,
                peak_bytes=self._ledger.peak_bytes,
                event_failures=self._events.failures,
                dropped_events=self._events.dropped,
                verified_requests=self._verifier.verified,
                verify_skipped=self._verifier.skipped,
                verify_mismatches=self._verifier.mismatch_count,
                verify_largest_error=self._verifier.largest_error,
                verify_bytes=self._account.second_bytes,
                quarantined=len(self._quarantine),
            )

    def snapshot_stats(self, namespace: str | None = None) -> StatsSnapshot:
        """Everything a metrics endpoint needs, at one moment: stats, tree, pins and slots, with names, kinds and units.

        `as_dict()` is for JSON, `exposition()` Prometheus' text. It goes through the tree: O(nodes), under the lock.

        Args:
            namespace: only what the nodes and pins of this one come to, and nothing that others have a part in;
                None: all, without the names of namespaces.
        """
        with self.lock:
            tree = self._states.tree
            return snapshot(
                self.stats if namespace is None else None,
                tree.roots(namespace),
                tree.nodes(namespace),
                self._slots.paths,
                token_bytes=self.layout.token_bytes,
                shared_bytes=self._ledger.total_bytes,
                pins=self._pins.count(namespace),
                named_pins=self._pins.count(namespace, named=True),
                policy=self._policy_name,
            )

    def check(self) -> None:
        """Assert all invariants; AssertionError names the first that does not hold."""
        with self.lock:
            self._states.check()
            self._states.history.check()
            self._ledger.check()
            self._slots.check()
            assert self._states.leaving_bytes == 0, self._states.leaving_bytes
            for node in self._states.tree.nodes():
                state = state_of(node)
                assert state.live or state.spans is not None, node
                bare = node.is_leaf and state.checkpoint is None and not state.live and not state.held
                assert not (bare and self.layout.has_points), node
                assert state.checkpoint is None or node.end % self.layout.grid_tokens == 0, node
            held = sum(path.checkpoint_bytes for path in self._slots.paths)
            assert held == self._states.session_checkpoint_bytes, (held, self._states.session_checkpoint_bytes)
            second = sum(path.second_bytes for path in self._slots.paths)
            assert second == self._account.second_bytes, (second, self._account.second_bytes)
            live = sum(path.nbytes for path in self._slots.paths)
            assert live == self._account.live_bytes, (live, self._account.live_bytes)
            idle = not any(path.is_open for path in self._slots.paths)
            if idle and not self._pins.nbytes and self._ledger.is_sole(self._account):
                assert self._ledger.over_bytes() == 0, self._ledger.total_bytes
            self._pins.check()
            self._quarantine.check()

    def dump(self, tokenizer: Any = None, namespace: str | None = None) -> str:
        """The tree as text, a line per node: span, tokens, bytes, residency, pins; with a tokenizer the edge's text.

        Args:
            tokenizer: by default the cache's own, if it was given one.
            namespace: only this one; None: all.
        """
        shown, slots = tokenizer or self._tokenizer, len(self._slots.paths)
        with self.lock:
            return self._states.dump(lambda node: render_node(node, self.layout.token_bytes, shown, slots), namespace)

    def render(
        self,
        format: str = "text",
        *,
        namespace: str | None = None,
        tokenizer: Any = None,
        max_nodes: int | None = None,
    ) -> str:
        """The tree to look at: "text", "svg" (a picture), "html" (a page that expands and can be searched) or "json".

        Args:
            namespace: show only this one, and nothing that would tell of others; None: all.
            tokenizer: shows how edges begin and end; by default the cache's own, if it was given one.
            max_nodes: nodes shown; the others are counted where they hang. By default 200, on a page 50,000.

        Raises:
            ValueError: a format that is not known, or max_nodes below 1.
        """
        return render_view(self.view(namespace=namespace, tokenizer=tokenizer), format, max_nodes)

    def view(self, *, namespace: str | None = None, tokenizer: Any = None) -> TreeView:
        """A plain description of the tree, of which `render` makes text and pictures. Nothing is drawn under the lock.

        Args:
            namespace: describe only this one, and nothing that would tell of others; None: all.
            tokenizer: decodes how edges begin and end; by default the cache's own.
        """
        about = [("policy", self._policy_name), ("budget", bytes_words(self._ledger.budget_bytes))]
        return collect(
            self.lock,
            lambda: self._states.tree.roots(namespace),
            token_bytes=self.layout.token_bytes,
            pin_names=self._pins.names_at,
            tokenizer=tokenizer or self._tokenizer,
            about=about if namespace is None else [],
            slot_count=len(self._slots.paths),
        )

    def last_key(self, entry: Entry) -> int | None:
        """The last key on the edge that a policy's entry stands for; None when the entry is gone."""
        return self._states.last_key(entry)

    def clear(self) -> None:
        """Drop everything that no open session stands on, pins included."""
        with uninterrupted(), self.lock:
            self._pins.clear()
            self._tails.clear()
            self._evictor.shrink_to(0)
            self.layout.release()

    # What a session asks of the cache; the lock is held

    def finish(self, session: Session) -> None:
        """Close a session: store what it evaluated, free the slot."""
        live = session.live
        try:
            end = session.settle()
            if session.is_lost:
                self._lose(live)
            else:
                self._commit(session, end)
        except BaseException:
            self._lose(live)
            raise
        finally:
            live.hold_checkpoint(-live.checkpoint_bytes)
            live.hold_second(0)
            session.checkpoints.clear()
            self._release(live)
            self._slots.free(live)
            self._states.coalesce_all(live.nodes())
            live.measure()
            self._keep_budget()
            self._record(
                session.prompt_keys, session.known_tokens - len(session.prompt), session.namespace, session.use
            )

    def retreat(self, session: Session, limit: int) -> int:
        """Return a session's live caches to the deepest checkpoint at or below `limit`; returns its offset."""
        with self.lock:
            live = session.live
            found = [(c.offset, c) for c in session.checkpoints if c.offset <= limit]
            found += [(n.end, c) for n in live.nodes() if n.end <= limit and (c := state_of(n).checkpoint) is not None]
            target, checkpoint = max(found, key=lambda pair: pair[0], default=(0, None))
            if target < live.offset:
                self._pager.retreat(live, target)
            self.layout.rewind_spans(live.caches, target)
            live.restore_points(checkpoint, target)
            live.measure()
            self._keep_budget()
            return target

    def session_checkpoint(self, session: Session, checkpoint: Checkpoint) -> None:
        """Book a checkpoint that a session took; over the cap or the budget the session's interval ones thin out."""
        session.live.hold_checkpoint(checkpoint.nbytes)
        self._evictor.thin_checkpoints()
        fits = self._evictor.make_room()
        cap = self._evictor.checkpoint_budget_bytes
        while not fits or self._account.checkpoint_bytes > cap:
            victim = _least_covering(session.checkpoints)
            if victim is None:
                return
            session.checkpoints.remove(victim)
            session.live.hold_checkpoint(-victim.nbytes)
            fits = self._evictor.over_bytes() == 0

    def take_checkpoint(self, session: Session, offset: int, kind: str) -> Checkpoint:
        """Copy the point state of a session that stands at `offset`."""
        return self._pager.allocating(lambda: self.layout.checkpoint(session.caches, offset, kind))

    def grow(self, session: Session, need_tokens: int) -> None:
        """The session is about to evaluate more than its buffers hold."""
        self._pager.grow(session.live, need_tokens)

    def measured(self, session: Session, wait: bool) -> None:
        """A forward pass may have changed the live buffers: learn from them, book them, keep the budget."""
        self.layout.learn(session.caches)
        self._pager.settle_capacity(session.live, len(session.prompt), session.reserve_tokens, wait)
        ours = {id(cache) for cache in session.live.caches}
        session.live.measure([cache for cache in session.caches if id(cache) not in ours])
        self._evictor.make_room()

    def hold_second_state(self, live: LivePath, nbytes: int) -> bool:
        """Book the state of a cold run beside a session, in all; False: it does not fit, and nothing is booked."""
        growth = nbytes - live.second_bytes
        # Nothing is evicted for what cannot fit.
        is_possible = growth <= 0 or self._evictor.fixed_bytes() + growth <= self._ledger.budget_bytes
        fits = is_possible and (growth <= 0 or self._evictor.make_room(growth))
        live.hold_second(nbytes if fits else 0)
        return fits

    def quarantine(self, session: Session, length: int, start: int | None) -> int:
        """Take what begins with `length` tokens of a session's prompt out, from `start` on, and empty its live caches.

        Without a start it is where the node begins on which those tokens end. Returns the start.
        """
        keys, live = session.prompt_keys[:length], session.live
        if start is None:
            start = self._expulsion.start_of(keys, session.namespace)
        self._quarantine.add(keys, start, session.namespace)
        live.hold_checkpoint(-live.checkpoint_bytes)
        session.checkpoints.clear()
        self._expulsion.expel(live, keys, start, session.namespace)
        self._keep_budget()
        return start

    def storable_tokens(self, session: Session) -> int:
        """How many of the tokens that a session knows may be stored: all that are not quarantined."""
        ids = session.known_ids()
        if not len(self._quarantine):
            return len(ids)
        keys = np.concatenate([session.prompt_keys, ids[len(session.prompt) :].astype(np.int64)])
        return self._quarantine.limit(keys, session.namespace)

    # Private: opening

    def _open(
        self, prompt: TokenIds, keys: Keys, namespace: str, use: Use, marks: Sequence[int], reserve: int
    ) -> Session:
        allowed = self._allowed(keys, namespace)
        match = self._pager.allocating(lambda: self._cut_match(allowed, namespace))
        path = match.node.path()
        live = self._slots.choose(path, len(prompt) - 1)
        plan = plan_resume(self.layout, match, len(prompt) - 1, live, self._slots.hidden(path, live))
        plan = self._with_tail(plan, match, allowed, len(prompt) - 1)
        live.hold(match.node if path else None)
        live.is_open, live.used = True, use.tick
        try:
            self._pager.keep_point_state(live, use)
            self._pager.move(live, plan, len(prompt) + reserve, len(prompt))
            if self.exact:
                # Where the session comes back to if it makes no whole chunk.
                self._pager.keep_point_state(live, use)
        except BaseException:
            self._lose(live)
            self._release(live)
            self._slots.free(live)
            raise
        self._states.touch([] if live.guarded is None else live.guarded.path(), self._resumed_from(plan, live), use)
        self._count(plan, len(prompt))
        self._note_request(keys, namespace, plan, "begin")
        session = Session(self, live, plan, prompt, keys, namespace, use, marks, reserve)
        session.verify_with(self._verifier.draw(session))
        self._slots.seat(live, session)
        self._evictor.make_room()
        return session

    def _cut_match(self, keys: Keys, namespace: str) -> Match[NodeState]:
        """The match, cut from what lies behind it: that is not this request's, neither touched nor guarded with it."""
        match = self._states.match(keys, namespace)
        if 0 < match.offset < match.node.end:
            return Match(self._states.split(match.node, match.offset), match.offset)
        return match

    def _foresee(self, keys: Keys, limit: int, namespace: str) -> Foresight:
        """What `_open` would plan, or `fetch` while no slot is free; changes nothing.

        Args:
            keys: of the prompt, up to where it is quarantined.
            limit: the most tokens that may be restored.
        """
        match = self._states.match(keys, namespace)
        vanished = self._slots.vanished()
        gone = sum(1 << path.slot for path in vanished)
        for node in match.node.path() if gone else []:
            state = state_of(node)
            if state.spans is None and not state.live_mask & ~gone:
                # `begin` gives up what is only in the buffers of a session that nobody closed.
                match = Match(node.parent or node, node.start)
                break
        path = match.node.path()
        is_free = not all(each.is_open for each in self._slots.paths)
        live = self._slots.choose(path, min(match.offset, limit)) if is_free else None
        hidden = self._slots.hidden(path, live, evaluate=False)
        plan = readable = plan_resume(self.layout, match, limit, live, hidden)
        if hidden is not None:
            readable = plan_resume(self.layout, match, limit, live)
        plan, readable = (self._with_tail(each, match, keys, limit) for each in (plan, readable))
        return Foresight(match, plan, readable)

    def _resumed_from(self, plan: ResumePlan, live: LivePath) -> StateNode | None:
        return plan.source if plan.source is not None else live.tip

    def _with_tail(self, plan: ResumePlan, match: Match[NodeState], keys: Keys, limit: int) -> ResumePlan:
        """The plan, counting as matched what an earlier request had evaluated off the grid behind the match."""
        tail = self._tails.matched(match, keys) if self.exact else 0
        if not tail:
            return plan
        off_grid = plan.off_grid + min(tail, limit - match.offset)
        reason = plan.reason or (ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN)
        return replace(plan, matched=match.offset + tail, reason=reason, off_grid=off_grid)

    # Private: closing

    def _commit(self, session: Session, end: int) -> None:
        """Make the first `end` tokens of a session, all evaluated and known, a path of the tree."""
        live = session.live
        if end < live.offset:
            self._pager.retreat(live, end)
        ids = session.known_ids()
        keys = np.concatenate([session.prompt_keys, ids[len(session.prompt) :].astype(np.int64)])
        self._recorder.record_live(live, keys[:end], session.namespace, session.checkpoints, session.use)
        if self.exact:
            tip = live.tip if live.tip is not None else self._states.tree.root(session.namespace)
            self._tails.add(tip, keys[end : session.evaluated_tokens])

    def _release(self, live: LivePath) -> None:
        """Let go of the path that a session was begun on, and join what was cut for it in vain."""
        node = live.guarded
        live.hold(None)
        if node is not None:
            self._evictor.let_go(node)

    def _lose(self, live: LivePath) -> None:
        """The live buffers cannot be trusted: what was only there goes, what was paged stays."""
        live.forget()
        for node in list(self._states.tree.nodes()):
            if node.payload is None or node.payload.spans is not None or node.payload.live:
                continue
            rest = None if node.parent is None or node.parent.is_root else node.parent
            for gone in (node, *below(node)):
                self._pins.void(gone)
                for path in self._slots.paths:
                    if path.guarded is gone:
                        path.guarded = rest
            self._states.remove_subtree(node)

    # Private: the rest

    def _checked(self, tokens: Any, keys: Any, namespace: Any) -> tuple[TokenIds, Keys]:
        ids = token_ids(tokens, self.vocab_size)
        if not isinstance(namespace, str):
            raise ValueError(f"namespace is a {type(namespace).__name__}; wanted a str.")
        return ids, ids.astype(np.int64) if keys is None else edge_keys(keys, len(ids))

    def _is_resumable(self, keys: Keys, namespace: str) -> bool:
        """Whether a request that goes on from these keys would resume at their end; it counts as a use if so.

        In exact mode their end is that of their last whole chunk.
        """
        match = self._states.match(self._allowed(keys, namespace), namespace)
        plan = plan_resume(self.layout, match, len(keys), None)
        if plan.resume < floor(len(keys), self.layout.grid_tokens):
            return False
        self._states.touch(plan.path, plan.source, self._next_use())
        return True

    def _allowed(self, keys: Keys, namespace: str) -> Keys:
        """The keys up to where they are quarantined."""
        return keys[: self._quarantine.limit(keys, namespace)]

    def _whole_chunks(self, keys: Keys, length: int) -> Keys:
        """The first `length` keys, in exact mode without what lies behind the last whole chunk of them."""
        end = floor(length, self.layout.grid_tokens)
        if end == 0:
            raise ValueError(f"{len(keys)} tokens: no whole chunk of {self.step_size} to keep.")
        return keys[:end]

    def _pinnable(self, keys: Keys, namespace: str) -> Keys:
        """What a pin keeps: a prefill of exactly these tokens stores only the chunks in front of the last of them."""
        whole = self._whole_chunks(keys, len(keys))
        if not self.exact or self._states.match(whole, namespace).offset == len(whole):
            return whole
        return self._whole_chunks(keys, len(keys) - 1)

    def _pinned(self, keys: Keys, namespace: str) -> Keys:
        """What a pin on these tokens keeps."""
        whole = self._whole_chunks(keys, len(keys))
        if not self.exact or self._pins.holds(whole, namespace):
            return whole
        return self._whole_chunks(keys, len(keys) - 1)

    def _next_use(self, priority: int = 0, turn: int | None = None, kind: str = "") -> Use:
        self._tick = max(self._tick + 1, 0 if self._clock is None else self._clock())
        self._events.tick = self._tick
        return Use(self._tick, priority, turn, kind)

    def _abandon(self, live: LivePath) -> None:
        """A session vanished without closing, its finalizer interrupted: free the slot, keep what was paged."""
        self._lose(live)
        live.hold_checkpoint(-live.checkpoint_bytes)
        live.hold_second(0)
        self._release(live)
        self._slots.free(live)

    def _count(self, plan: ResumePlan, length: int) -> None:
        self._requests += 1
        self._pins.request_passed()
        self._hit_tokens += plan.resume
        self._miss_tokens += length - plan.resume
        self._off_grid_tokens += plan.off_grid
        if plan.reason is not None:
            self._short_reasons[plan.reason] = self._short_reasons.get(plan.reason, 0) + 1

    def _note_request(self, keys: Keys, namespace: str, plan: ResumePlan, by: str) -> None:
        self._states.history.asked(namespace, keys)
        if self._events.is_on:
            self._events.emit(
                RESUMED,
                namespace,
                0,
                plan.resume,
                plan.resume * self.layout.token_bytes,
                prompt_tokens=len(keys),
                matched_tokens=plan.matched,
                reason=plan.reason,
                by=by,
            )

    def _record(self, keys: Keys, output_tokens: int, namespace: str, use: Use) -> None:
        """Write a request to the trace; a trace that cannot be written is no reason not to serve."""
        if self._trace is None:
            return
        about = {"turn": use.turn, "kind": use.kind, "priority": use.priority}
        try:
            self._trace.append(keys, time=self._tick, output_tokens=output_tokens, namespace=namespace, **about)  # type: ignore[arg-type]
        except OSError as error:
            warnings.warn(f"{self._trace.path}: a request could not be recorded: {error}", RuntimeWarning, stacklevel=2)

    def _keep_budget(self) -> None:
        self._evictor.thin_checkpoints()
        self._evictor.make_room()

    def _give_back(self, amount_bytes: int) -> int:
        """Another cache on the ledger wants bytes."""
        return self._evictor.shrink_to(max(0, self._account.total_bytes - amount_bytes))


def _trace_writer(trace: str | os.PathLike[str] | TraceWriter | None, clock: Clock) -> TraceWriter | None:
    return trace if trace is None or isinstance(trace, TraceWriter) else TraceWriter(trace, clock=clock)


def _analytic_cost(model: Any) -> CostModel:
    """FLOPs, when the model says how large it is; else tokens."""
    args = getattr(model, "args", None)
    layers, width = getattr(args, "num_hidden_layers", None), getattr(args, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        return CostModel()
    # Float32 or not changes only the unit's scale, and policies compare costs within one cache.
    return CostModel.analytic(parameters=max(1, parameter_bytes(model) // 4), layers=layers, hidden_size=width)


def _least_covering(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The interval checkpoint whose neighbours are closest together; the newest is never chosen."""
    offsets = [0, *(c.offset for c in checkpoints)]
    gaps = [(offsets[i + 2] - offsets[i], i) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval"]
    return checkpoints[min(gaps)[1]] if gaps else None


def _require_pin(name: Any, ttl_requests: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"name is {name!r}; wanted a str that is not empty.")
    if ttl_requests is not None:
        _require_count("ttl_requests", ttl_requests, "requests")


def _require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; wanted a share from 0 to 1.")


def _require_count(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; wanted a whole number of {unit}, 1 or more.")
