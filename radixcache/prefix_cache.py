"""PrefixCache: the cache layer that users import. What they may ask of it, under one lock; requests.py does the work.

Invariants, asserted by `check`, besides those of StateTree (S), Slots (P), LivePath (V), Ledger (L) and
GroupRequests (R):

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from policies import CostModel, Entry, EvictionPolicy, make_policy
from radixcache.budget.ledger import Ledger
from radixcache.budget.memory import default_budget_bytes, parameter_bytes
from radixcache.groups.group import Group
from radixcache.groups.group_requests import GroupRequests
from radixcache.layers.layout import Layout
from radixcache.layers.sizes import SizedLayout
from radixcache.locking.interrupts import uninterrupted
from radixcache.paging.evictor import TRIM_TOKENS
from radixcache.paging.grid import floor
from radixcache.paging.pins import NamedPin
from radixcache.paging.resume import plan_resume
from radixcache.sessions.draft import both_models
from radixcache.sessions.session import Session
from radixcache.tokens.ids import TokenIds, checked_prompt, require_namespace, vocabulary_size
from radixcache.tree.events import OnEvent
from radixcache.tree.radix_tree import Keys
from radixcache.tree.state_tree import state_of
from radixcache.verify.verifier import Mismatch
from radixcache.view.collect import collect
from radixcache.view.description import TreeView
from radixcache.view.formats import render_view
from radixcache.view.words import bytes_words
from radixcache.watch.explain import Explanation, explain, with_text
from radixcache.watch.line import render_node
from radixcache.watch.metrics import StatsSnapshot, snapshot
from radixcache.watch.stats import CacheStats
from radixcache.watch.trace import Clock, TraceWriter


class PrefixCache(GroupRequests):
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
            budget and others are evicted for it. What fetch() and begin_many() restore is drawn too, but cannot be
            compared: `stats.verify_skipped` counts it.
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
        for name, value in (("exact", exact), ("merges", merges)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False.")
        if isinstance(verify_seed, bool) or not isinstance(verify_seed, int):
            raise ValueError(f"verify_seed is {verify_seed!r}; wanted a whole number.")
        if verify and layout is not None:
            raise ValueError("verify needs the state of a model; a layout that holds sizes has none.")
        self.budget_source = "given"
        if budget_bytes is None:
            budget_bytes, self.budget_source = default_budget_bytes(model)
        if checkpoint_budget_bytes is not None:
            _require_count("checkpoint_budget_bytes", checkpoint_budget_bytes, "bytes")
        if trim_tokens is not None:
            _require_count("trim_tokens", trim_tokens, "tokens")
        layout = layout or Layout(caches or (lambda: make_prompt_cache(model)), kv_bits, kv_group_size)
        if exact:
            layout.grid_tokens = step_size
            trim_tokens = -(-(trim_tokens or TRIM_TOKENS) // step_size) * step_size
        super().__init__(
            layout,
            budget_bytes if isinstance(budget_bytes, Ledger) else Ledger(budget_bytes),
            chosen_policy,
            cost or _analytic_cost(model),
            live_slots=live_slots,
            checkpoint_interval=checkpoint_interval,
            checkpoint_budget_bytes=checkpoint_budget_bytes,
            trim_tokens=trim_tokens,
            merges=merges,
            exact=exact,
            step_size=step_size,
            vocab_size=None if model is None else vocabulary_size(model),
            trace=_trace_writer(trace, "requests" if clock is None else "ms"),
            clock=clock,
            on_event=on_event,
            verify=verify,
            verify_seed=verify_seed,
        )
        self._tokenizer = tokenizer

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
        prompt, prompt_keys = self._checked(tokens, keys, namespace, marks)
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
                self._abandon_groups()
                self._slots.require_free(namespace)
                use = self._next_use(priority, turn, kind)
                session = self._open(prompt, prompt_keys, namespace, use, marks, reserve)
        except BaseException:
            if session is not None:
                session.close()
            raise
        return session

    def begin_many(
        self, prompts: Sequence[Any] = (), *, capacity: int, namespace: str = "", priority: int = 0
    ) -> Group:
        """Open a group: many requests on one buffer of cells, in which every distinct prefix is held once.

            with cache.begin_many([first, second], capacity=8192) as group:
                for row in group.rows:
                    logits = group.prefill(model, row)
                logits = group.step(model, group.rows, tokens)      # (2, 1, V): both in one forward pass

        Each prompt is a row, restored as `Group.admit` says, and more may be admitted later. A group takes no live
        slot, and sessions may be open beside it. Its rows are not verified, those drawn for it count as skipped.

        Args:
            prompts: token ids of each prompt: list, tuple, np.ndarray or mx.array.
            capacity: cells, which is tokens of all rows together, a shared one counted once. Buffers grow up to it as
                they fill, count as live bytes of the budget, and are given back when the group closes.
            namespace, priority: as in `begin`, for all rows.

        Raises:
            ValueError: an argument out of its range; the cache is exact, quantized, or made for sizes alone.
            UnsupportedCacheError: a layer's state cannot be put into cells.
            CacheFullError, BudgetFullError: no room for what is to be restored.
        """
        _require_count("capacity", capacity, "cells")
        require_namespace(namespace)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority is {priority!r}; wanted a whole number.")
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts is a {type(prompts).__name__}; wanted a list of prompts.")
        self._require_cells()
        group = None
        try:
            with uninterrupted(), self.lock:
                self._abandon_groups()
                group = self._open_group(capacity, namespace, priority)
            for prompt in prompts:
                group.admit(prompt)
        except BaseException:
            if group is not None:
                group.close()
            raise
        return group

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
            hidden = self._slots.hidden(match.path, None)
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

        Only clear(), and the loss of the state itself to a failed forward pass or to verification that found it wrong,
        end a pin before its time. In exact mode it keeps whole chunks, the last one of exactly these tokens only if
        something longer has stored it.

        Args:
            name: what names() lists it by, within its namespace. A name that is taken changes over to these tokens,
                once they are stored beside the old ones.
            ttl_requests: the pin ends with so many more begin() and fetch() calls and rows of begin_many(); None: it
                stays.

        Raises:
            ValueError: the prefix is not stored whole, or is quarantined, or the pins, those of other caches on the
                ledger among them, would not fit the budget. What was pinned before stays, a pin of the same name too.
        """
        _require_pin(name, ttl_requests)
        _, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            kept = self._pinnable(prompt_keys, namespace)
            self._require_allowed(kept, namespace)
            self._pins.add(kept, namespace, name, ttl_requests, prompt_keys)
            self._keep_budget()
            return self._pins.nbytes

    def unpin(self, tokens: Any = None, namespace: str = "", *, name: str | None = None, keys: Any = None) -> None:
        """Take one pin() of exactly these tokens back (an unnamed one first), or the one of that name.

        Raises:
            ValueError: there is no such pin, or not exactly one of tokens and name was given.
        """
        if (tokens is None) == (name is None):
            raise ValueError("unpin() takes tokens or name=; wanted exactly one of them.")
        require_namespace(namespace)
        prompt_keys = None if name is not None else self._checked(tokens, keys, namespace)[1]
        with uninterrupted(), self.lock:
            if prompt_keys is not None:
                self._pins.remove(prompt_keys, namespace)
            elif name is not None:
                self._pins.remove_named(name, namespace)
            self._keep_budget()

    def names(self, namespace: str = "") -> dict[str, NamedPin]:
        """The named pins of one namespace, in the order they were made. ValueError: it is no str."""
        require_namespace(namespace)
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
            ValueError: an argument out of its range; the prefix is quarantined, or verification found it wrong just
                now; the pins would not fit the budget; or open sessions and pins leave no room for it. What was
                evaluated stays as an ordinary prefix.
            CacheBusyError: it has to be evaluated, and every live slot is taken.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace, marks)
        _require_pin(name, ttl_requests)
        length, pinned = len(prompt), name is not None or ttl_requests is not None
        pinned_keys = self._whole_chunks(prompt_keys, length)
        with uninterrupted(), self.lock:
            self._require_allowed(pinned_keys, namespace)
            if self._is_resumable(prompt_keys, namespace):
                if pinned:
                    self._pins.add(pinned_keys, namespace, name, ttl_requests, prompt_keys)
                return 0
            if pinned:
                # As far as it is known before anything is evaluated: not the checkpoints, nor a model's first tokens.
                self._pins.require_room(pinned_keys, namespace, name, 0, requests=1)
        # With any token behind it the prefix is prefilled to its very end, as the request it is meant for will need it.
        asked, asked_keys = np.append(prompt, prompt[-1]), np.append(prompt_keys, prompt_keys[-1])
        progress = None if on_progress is None else lambda done, _: on_progress(done, length)
        with self.begin(asked, asked_keys, namespace, [*marks, length], reserve=0, priority=priority) as session:
            if draft_model is not None:
                model = both_models(model, draft_model, len(session.caches))
            session.prefill(model, step_size, progress)
            with uninterrupted(), self.lock:
                self._require_allowed(pinned_keys, namespace)
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
                    self._pins.add(pinned_keys, namespace, name, ttl_requests, prompt_keys)
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
        _require_namespace_or_all(namespace)
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
        _require_namespace_or_all(namespace)
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
            second = sum(path.second_bytes for path in self._slots.paths)
            assert second == self._account.second_bytes, (second, self._account.second_bytes)
            super().check()
            idle = not self._bookings and not any(path.is_open for path in self._slots.paths)
            if idle and not self._pins.nbytes and self._ledger.is_sole(self._account):
                assert self._ledger.over_bytes() == 0, self._ledger.total_bytes
            self._pins.check()
            self._quarantine.check()
            self._tails.check()

    def dump(self, tokenizer: Any = None, namespace: str | None = None) -> str:
        """The tree as text, a line per node: span, tokens, bytes, residency, pins; with a tokenizer the edge's text.

        Args:
            tokenizer: by default the cache's own, if it was given one.
            namespace: only this one; None: all.
        """
        _require_namespace_or_all(namespace)
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
            ValueError: a format that is not known, max_nodes below 1, or a namespace that is no str.
        """
        return render_view(self.view(namespace=namespace, tokenizer=tokenizer), format, max_nodes)

    def view(self, *, namespace: str | None = None, tokenizer: Any = None) -> TreeView:
        """A plain description of the tree, of which `render` makes text and pictures. Nothing is drawn under the lock.

        Args:
            namespace: describe only this one, and nothing that would tell of others; None: all.
            tokenizer: decodes how edges begin and end; by default the cache's own.
        """
        _require_namespace_or_all(namespace)
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
        """Drop everything that no open session stands on, pins included, and what explain() remembers of prompts."""
        with uninterrupted(), self.lock:
            self._pins.clear()
            self._tails.clear()
            self._evictor.shrink_to(0)
            self._states.history.clear()
            self.layout.release()

    # Private: the rest

    def _checked(self, tokens: Any, keys: Any, namespace: Any, marks: Sequence[int] = ()) -> tuple[TokenIds, Keys]:
        """The ids and keys of a prompt. ValueError: they, its marks or the namespace are out of their range."""
        require_namespace(namespace)
        return checked_prompt(tokens, keys, marks, self.vocab_size)

    def _require_cells(self) -> None:
        """Raise ValueError where state cannot be put into cells whatever the layers."""
        if self.exact:
            raise ValueError(
                f"begin_many() on an exact cache: rows that decode together add up in another order than one alone, "
                f"and prefill goes in other chunks than {self.step_size} tokens. Use begin(), or exact=False."
            )
        if isinstance(self.layout, SizedLayout):
            raise ValueError("begin_many() needs the state of a model; a layout that holds sizes has none.")
        if self.layout.is_quantized:
            raise ValueError("begin_many() with kv_bits: quantized keys and values cannot be put into cells.")

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

    def _require_allowed(self, keys: Keys, namespace: str) -> None:
        """Raise ValueError where these keys cannot be kept because they are quarantined."""
        start = self._quarantine.limit(keys, namespace)
        if start < len(keys):
            stored = self._states.match(keys, namespace).offset
            raise ValueError(
                f"only {stored} of {len(keys)} tokens are stored; from offset {start} on they are quarantined: what "
                "was stored there was found wrong. clear_quarantine() lets it be stored again."
            )


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


def _require_pin(name: Any, ttl_requests: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"name is {name!r}; wanted a str that is not empty.")
    if ttl_requests is not None:
        _require_count("ttl_requests", ttl_requests, "requests")


def _require_namespace_or_all(namespace: Any) -> None:
    if namespace is not None:
        require_namespace(namespace)


def _require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; wanted a share from 0 to 1.")


def _require_count(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; wanted a whole number of {unit}, 1 or more.")
