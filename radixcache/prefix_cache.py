"""PrefixCache: the cache layer that users import. Joins tree, adapters, ledger and policy, and holds the lock.

A request is begun, runs on the live caches, and is closed:

    begin    match -> plan where to resume -> leave the old path (page out) -> make room -> page in -> Session
    close    settle what was evaluated -> new nodes and checkpoints in the tree, LIVE -> keep the budget

Invariants, asserted by `check`, besides those of StateTree (S), LivePath (V) and Ledger (L):

  C1  Between public calls every node's spans are LIVE or PAGED, none is LEAVING.
  C2  live + paged bytes <= budget after every public call, if dropping evictable state can achieve it.
  C3  A leaf without a checkpoint is live, held, or the model has no point layers: nothing else could resume on it.

All public methods take one lock, which caches on the same ledger share. Forward passes run outside of it.
Nothing here reads a clock or draws a random number: the same requests give the same tree.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from policies import CostModel, EvictionPolicy, make_policy
from radixcache.errors import CacheBusyError, SnapshotError
from radixcache.evictor import Evictor
from radixcache.interrupts import uninterrupted
from radixcache.layout import Layout
from radixcache.ledger import Ledger
from radixcache.live_path import LivePath
from radixcache.memory import default_budget_bytes, parameter_bytes
from radixcache.render import render_node
from radixcache.resume import ResumePlan, ShortReason, plan_resume
from radixcache.session import Session
from radixcache.snapshots import Checkpoint, Spans
from radixcache.state_tree import StateNode, StateTree, Use, state_of
from radixcache.stats import CacheStats
from radixcache.tokens import TokenIds, edge_keys, token_ids, vocabulary_size
from radixcache.tree import Keys, Match, below

R = TypeVar("R")


class PrefixCache:
    """A radix tree of layer snapshots with one live path, under a byte budget.

    Args:
        model: an mlx-lm model; its caches come from mlx-lm's make_prompt_cache.
        caches: instead of a model's own, a callable that returns a fresh list of mlx-lm caches (layers may be None).
        budget_bytes: live buffers plus paged snapshots; None takes a quarter of what the device can spare. A Ledger
            shares its budget with other caches.
        policy: a name in policies.POLICIES or an EvictionPolicy.
        checkpoint_interval: tokens between checkpoints of point state during prefill.
        checkpoint_budget_bytes: cap on checkpoints, beyond which interval ones are thinned; half the budget by default.
        live_slots: paths that are live at a time; 1.
        kv_bits, kv_group_size: keep full-attention layers quantized, from offset 0.
        cost: prefill cost in the policy's eyes; analytic by default.

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
    ) -> None:
        if model is None and caches is None:
            raise ValueError("PrefixCache needs a model, or caches= with a callable that returns fresh mlx-lm caches.")
        if caches is not None and not callable(caches):
            raise ValueError(f"caches is a {type(caches).__name__}; wanted a callable that returns fresh mlx-lm caches.")
        _require_count("checkpoint_interval", checkpoint_interval, "tokens")
        _require_count("kv_group_size", kv_group_size, "elements")
        if live_slots != 1:
            raise ValueError(f"live_slots is {live_slots!r}; only 1 is supported.")
        if kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"kv_bits is {kv_bits!r}; wanted None, 2, 3, 4, 5, 6 or 8.")
        chosen_policy = make_policy(policy)
        self.budget_source = "given"
        if budget_bytes is None:
            budget_bytes, self.budget_source = default_budget_bytes(model)
        self._ledger = budget_bytes if isinstance(budget_bytes, Ledger) else Ledger(budget_bytes)
        if checkpoint_budget_bytes is not None:
            _require_count("checkpoint_budget_bytes", checkpoint_budget_bytes, "bytes")
        self.layout = Layout(caches or (lambda: make_prompt_cache(model)), kv_bits, kv_group_size)
        self.lock = self._ledger.lock
        self.vocab_size = None if model is None else vocabulary_size(model)
        self.checkpoint_interval = checkpoint_interval
        self._account = self._ledger.open_account(self._give_back)
        self._states = StateTree(self.layout, chosen_policy, self._account, cost or _analytic_cost(model))
        cap = checkpoint_budget_bytes if checkpoint_budget_bytes is not None else self._ledger.budget_bytes // 2
        self._evictor = Evictor(self._states, cap)
        self._live = LivePath(self.layout, self._states)
        self._evictor.idle = [self._live]
        self._session: weakref.ref[Session] | None = None
        self._session_thread = 0
        self._pins: dict[tuple[str, bytes], _Pin] = {}
        self._tick = 0
        self._requests = self._hit_tokens = self._miss_tokens = 0
        self._paged_in_bytes = self._paged_out_bytes = 0
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
            priority, turn, kind: passed on to the eviction policy.

        Raises:
            ValueError: tokens, keys, marks or reserve out of their range.
            CacheBusyError: another session is open.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        for mark in marks:
            if not 0 <= mark <= len(prompt):
                raise ValueError(f"mark {mark} is outside the prompt of {len(prompt)} tokens.")
        if reserve < 0:
            raise ValueError(f"reserve is {reserve}; wanted 0 or more tokens.")
        session = None
        try:
            with uninterrupted(), self.lock:
                self._require_idle()
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
            never empty. On a miss the caches are empty. Their bytes are the caller's, not the budget's.

        Raises:
            ValueError: tokens or keys out of their range.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            use = self._next_use()
            match = self._states.match(prompt_keys, namespace)
            plan = self._readable(plan_resume(self.layout, match, len(prompt) - 1, None))
            caches = self.layout.fresh()
            nodes = [node for node in plan.path if node.start < plan.resume]
            spans = [self._spans_of(node) for node in nodes]
            if spans:
                self._allocating(lambda: self.layout.reserve(caches, plan.resume + 256, spans[0]))
            for each in spans:
                self.layout.page_in(caches, each, min(each.end, plan.resume))
            if plan.checkpoint is not None:
                self.layout.restore_points(caches, plan.checkpoint, plan.resume)
            self._states.touch(nodes, plan.source, use)
            self._count(plan, len(prompt))
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
            Tokens of the sequence that the tree holds afterwards.

        Raises:
            SnapshotError: the caches do not fit; nothing was changed.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            self.layout.compare(caches)
            self.layout.evaluate(caches)
            end = self._insertable(caches, len(prompt))
            use = self._next_use(priority)
            if end:
                self._store(caches, prompt_keys[:end], namespace, use)
            self._keep_budget()
            return min(end, self._states.match(prompt_keys[:end], namespace).offset) if end else 0

    # Pins, memory

    def pin(self, tokens: Any, namespace: str = "", *, keys: Any = None) -> int:
        """Keep a stored prefix whatever the pressure, until unpin(); pins count. Returns the bytes all pins keep.

        Raises:
            ValueError: the prefix is not stored whole, or the pins would not fit the budget.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            match = self._states.match(prompt_keys, namespace)
            if match.offset < len(prompt):
                raise ValueError(f"only {match.offset} of {len(prompt)} tokens are stored; prefill them before pinning.")
            name = (namespace, prompt_keys.tobytes())
            if name in self._pins:
                self._pins[name].count += 1
            else:
                self._refuse_large_pin(match.node, match.offset)
                node = match.node if match.node.end == match.offset else self._states.split(match.node, match.offset)
                self._pins[name] = _Pin(self._pin_nodes(node))
                for each in self._pins[name].nodes:
                    self._states.pin(each, 1)
            self._keep_budget()
            return self._pinned_bytes()

    def unpin(self, tokens: Any, namespace: str = "", *, keys: Any = None) -> None:
        """Take one pin() of exactly these tokens back.

        Raises:
            ValueError: they are not pinned.
        """
        prompt, prompt_keys = self._checked(tokens, keys, namespace)
        with uninterrupted(), self.lock:
            name = (namespace, prompt_keys.tobytes())
            if name not in self._pins:
                raise ValueError(f"these {len(prompt)} tokens are not pinned in namespace {namespace!r}.")
            self._pins[name].count -= 1
            if self._pins[name].count == 0:
                for each in self._pins.pop(name).nodes:
                    self._states.pin(each, -1)
                    self._coalesce([each])
            self._keep_budget()

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

    # Looking

    @property
    def stats(self) -> CacheStats:
        """What the cache has done and holds, as a frozen CacheStats."""
        with self.lock:
            return CacheStats(
                requests=self._requests,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                short_reasons=dict(self._short_reasons),
                evictions=self._evictor.evictions,
                evicted_bytes=self._evictor.evicted_bytes,
                copied_bytes=self._paged_in_bytes + self._paged_out_bytes + self._states.copied_bytes,
                paged_in_bytes=self._paged_in_bytes,
                paged_out_bytes=self._paged_out_bytes,
                live_bytes=self._account.live_bytes,
                paged_bytes=self._account.paged_bytes,
                checkpoint_bytes=self._account.checkpoint_bytes,
                duplicate_bytes=self._states.duplicate_bytes,
                spare_bytes=self.layout.spare_nbytes(self._live.caches),
                pinned_bytes=self._pinned_bytes(),
                nodes=self._states.tree.node_count,
                tokens=self._states.tree.key_count,
                budget_bytes=self._ledger.budget_bytes,
                budget_source=self.budget_source,
                peak_bytes=self._ledger.peak_bytes,
            )

    def check(self) -> None:
        """Assert all invariants; AssertionError names the first that does not hold."""
        with self.lock:
            self._states.check()
            self._ledger.check()
            session = self._open_session()
            assert self._states.leaving_bytes == 0, self._states.leaving_bytes
            for node in self._states.tree.nodes():
                state = state_of(node)
                assert state.live or state.spans is not None, node
                bare = node.is_leaf and state.checkpoint is None and not state.live and not state.held
                assert not (bare and self.layout.has_points), node
                assert state.guards == 0 or session is not None, (node, state.guards)
            if session is None:
                self._live.check()
                assert self._states.session_checkpoint_bytes == 0, self._states.session_checkpoint_bytes
            pinned = {id(node) for pin in self._pins.values() for node in pin.nodes}
            assert pinned == {id(n) for n in self._states.tree.nodes() if state_of(n).pins}, "pins"

    def dump(self, tokenizer: Any = None) -> str:
        """The tree as text, a line per node: span, tokens, bytes, residency, pins; with a tokenizer the edge's text."""
        with self.lock:
            return self._states.dump(lambda node: render_node(node, self.layout.token_bytes, tokenizer))

    def clear(self) -> None:
        """Drop everything that no open session stands on, pins included."""
        with uninterrupted(), self.lock:
            for pin in self._pins.values():
                for node in pin.nodes:
                    self._states.pin(node, -1)
            self._pins.clear()
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
            self._drop_session_checkpoints(session)
            self._release(session)
            self._session = None
            self._evictor.idle = [live]
            self._coalesce(live.nodes())
            live.measure()
            self._keep_budget()

    def retreat(self, session: Session, limit: int) -> int:
        """Return a session's live caches to the deepest checkpoint at or below `limit`; returns its offset."""
        with self.lock:
            live = session.live
            found = [(c.offset, c) for c in session.checkpoints if c.offset <= limit]
            found += [(n.end, c) for n in live.nodes() if n.end <= limit and (c := state_of(n).checkpoint) is not None]
            target, checkpoint = max(found, key=lambda pair: pair[0], default=(0, None))
            if target < live.offset:
                self._page_out(live, self._leave(live, target))
            self.layout.rewind_spans(live.caches, target)
            live.restore_points(checkpoint, target)
            live.measure()
            self._keep_budget()
            return target

    def session_checkpoint(self, session: Session, checkpoint: Checkpoint) -> None:
        """Book a checkpoint that a session took; over the cap or the budget the session's interval ones thin out."""
        self._states.hold_checkpoint(checkpoint.nbytes)
        self._evictor.thin_checkpoints()
        fits = self._evictor.make_room()
        cap = self._evictor.checkpoint_budget_bytes
        while not fits or self._account.checkpoint_bytes > cap:
            victim = _least_covering(session.checkpoints)
            if victim is None:
                return
            session.checkpoints.remove(victim)
            self._states.hold_checkpoint(-victim.nbytes)
            fits = self._evictor.over_bytes() == 0

    def grow(self, session: Session, need_tokens: int) -> None:
        """Make room for more than `need_tokens`: half as much again if the budget has it, else one step."""
        capacity = self.layout.span_capacity(session.caches)
        wanted = max(capacity + capacity // 2, need_tokens + 256)
        if not self._evictor.make_room((wanted - capacity) * self.layout.token_bytes):
            wanted = need_tokens + 256
        self.layout.grow(session.caches, wanted)
        session.live.measure()

    def measured(self, session: Session, wait: bool) -> None:
        """A forward pass may have changed the live buffers: learn from them, book them, keep the budget."""
        self.layout.learn(session.caches)
        wanted = len(session.prompt) + session.reserve_tokens
        missing = wanted - self.layout.span_capacity(session.caches)
        if missing > 0:
            session.live.measure()
            if not self._evictor.make_room(missing * self.layout.token_bytes):
                wanted = max(len(session.prompt) + 1, wanted - missing)
            if wait:
                self._allocating(lambda: self.layout.reserve(session.caches, wanted))
            else:
                self.layout.grow(session.caches, wanted)
        ours = {id(cache) for cache in session.live.caches}
        session.live.measure([cache for cache in session.caches if id(cache) not in ours])
        self._evictor.make_room()

    # Private: opening

    def _open(
        self, prompt: TokenIds, keys: Keys, namespace: str, use: Use, marks: Sequence[int], reserve: int
    ) -> Session:
        live = self._live
        match = self._states.match(keys, namespace)
        if 0 < match.offset < match.node.end:
            # What lies behind the match is not this request's: neither touched nor guarded with it.
            match = Match(self._states.split(match.node, match.offset), match.offset)
        plan = plan_resume(self.layout, match, len(prompt) - 1, live)
        guarded = None if match.node.is_root else match.node
        self._keep_live_checkpoint(live, use)
        if guarded is not None:
            self._states.guard(guarded, 1)
        self._evictor.idle = []
        try:
            self._move(live, plan, len(prompt) + reserve, len(prompt))
        except BaseException:
            if guarded is not None:
                self._states.guard(guarded, -1)
            self._lose(live)
            self._evictor.idle = [live]
            raise
        path = [] if guarded is None else guarded.path()
        self._states.touch(path, self._resumed_from(plan, live), use)
        self._count(plan, len(prompt))
        session = Session(self, live, plan, prompt, keys, namespace, use, marks, reserve, guarded)
        self._session = weakref.ref(session)
        self._session_thread = threading.get_ident()
        self._evictor.make_room()
        return session

    def _move(self, live: LivePath, plan: ResumePlan, capacity_tokens: int, prompt_tokens: int) -> None:
        """Take the live caches from the path they stand on to `plan.resume` on another."""
        keep = min(plan.common, plan.resume)
        via_live = self.layout.has_points and plan.checkpoint is None and plan.resume > 0
        incoming = self._split_at(plan, keep)
        before = live.offset
        leaving = self._leave(live, keep)
        capacity_tokens = self._affordable(live, incoming, capacity_tokens, prompt_tokens)
        self._page_out(live, leaving)
        if via_live or not self.layout.has_points:
            self.layout.rewind(live.caches, before, keep)
        else:
            self.layout.rewind_spans(live.caches, keep)
        like = state_of(incoming[0]).spans if incoming else None
        if not self.layout.is_empty(live.caches) or like is not None:
            self._allocating(lambda: live.reserve(capacity_tokens, like, exactly=self._evictor.over_bytes() > 0))
        for node in incoming:
            self._paged_in_bytes += self._allocating(lambda node=node: live.page_in(node))  # type: ignore[misc]
        if self.layout.has_points and not via_live:
            self._allocating(lambda: live.restore_points(plan.checkpoint, plan.resume))
        live.measure()

    def _split_at(self, plan: ResumePlan, keep: int) -> list[StateNode]:
        """Cut the path at the resume offset; returns its nodes between `keep` and there, to be paged in."""
        incoming = []
        for node in plan.path:
            if node.start < plan.resume < node.end:
                node = self._states.split(node, plan.resume)
            if keep < node.end <= plan.resume:
                incoming.append(node)
        return incoming

    def _affordable(
        self, live: LivePath, incoming: list[StateNode], capacity_tokens: int, prompt_tokens: int
    ) -> int:
        """Make room for the live buffers; returns the capacity to reserve, without the reply's room if need be.

        Snapshots that are about to be live become duplicates, the first thing to go: they do not count as needed.
        """
        droppable = sum(spans.nbytes for node in incoming if (spans := state_of(node).spans) is not None)
        capacity = 0 if self.layout.is_empty(live.caches) else self.layout.span_capacity(live.caches)
        token_bytes = self.layout.token_bytes
        if self._evictor.make_room((capacity_tokens - capacity) * token_bytes - droppable):
            return capacity_tokens
        self._evictor.make_room((prompt_tokens + 1 - capacity) * token_bytes - droppable)
        return prompt_tokens + 1

    def _leave(self, live: LivePath, keep: int) -> list[StateNode]:
        """Declare the live nodes beyond `keep` not live; returns those to page out. Useless ones are dropped."""
        left = live.leave_from(keep)
        for node in reversed(left):
            state = state_of(node)
            if self.layout.has_points and node.is_leaf and state.checkpoint is None and not state.held:
                self._states.remove(node)
        return [node for node in left if node.payload is not None and node.payload.spans is None]

    def _page_out(self, live: LivePath, leaving: list[StateNode]) -> None:
        """Copy out what was not evicted in the meantime."""
        self._evictor.make_room()
        for node in leaving:
            self._paged_out_bytes += self._allocating(lambda node=node: self._page_out_one(live, node))  # type: ignore[misc]

    def _page_out_one(self, live: LivePath, node: StateNode) -> int:
        return live.page_out(node) if node.payload is not None else 0

    def _keep_live_checkpoint(self, live: LivePath, use: Use) -> None:
        """Point state at the live offset cannot be made again once the live caches have moved on."""
        tip = live.tip
        if tip is not None and self.layout.has_points and state_of(tip).checkpoint is None:
            checkpoint = self._allocating(lambda: self.layout.checkpoint(live.caches, tip.end, "end"))
            self._states.set_checkpoint(tip, checkpoint, use)

    def _resumed_from(self, plan: ResumePlan, live: LivePath) -> StateNode | None:
        return plan.source if plan.source is not None else live.tip

    # Private: closing

    def _commit(self, session: Session, end: int) -> None:
        """Make the first `end` evaluated tokens a path of the tree, with the session's checkpoints, all LIVE."""
        live = session.live
        if end < live.offset:
            self._page_out(live, self._leave(live, end))
        self._release(session)
        if end == 0:
            return
        ids = session.known_ids()
        keys = np.concatenate([session.prompt_keys, ids[len(session.prompt) :].astype(np.int64)])[:end]
        tip = self._path_for(keys, session.namespace, session.use)
        live.advance(tip)
        self.layout.learn(live.caches)
        for checkpoint in session.checkpoints:
            if checkpoint.offset <= end:
                self._attach(tip, checkpoint, session.use)
        self._keep_live_checkpoint(live, session.use)

    def _path_for(self, keys: Keys, namespace: str, use: Use) -> StateNode:
        """The node that ends where `keys` end, made by splitting and appending as needed."""
        match = self._states.match(keys, namespace)
        node = match.node
        if 0 < match.offset < node.end:
            node = self._states.split(node, match.offset)
        if match.offset < len(keys):
            node = self._states.add_leaf(node, keys[match.offset :], use)
        return node

    def _attach(self, tip: StateNode, checkpoint: Checkpoint, use: Use) -> None:
        """Give the tree a session's checkpoint, unless it has one at that offset."""
        for node in tip.path():
            if node.start < checkpoint.offset <= node.end:
                if node.end != checkpoint.offset:
                    node = self._states.split(node, checkpoint.offset)
                if state_of(node).checkpoint is None:
                    self._states.set_checkpoint(node, checkpoint, use)
                return

    def _drop_session_checkpoints(self, session: Session) -> None:
        self._states.hold_checkpoint(-self._states.session_checkpoint_bytes)
        session.checkpoints.clear()

    def _release(self, session: Session) -> None:
        """Let go of the path that the session was begun on, and join what was cut for it in vain."""
        node, session.guarded = session.guarded, None
        if node is not None:
            self._states.guard(node, -1)
            self._coalesce(node.path())

    def _coalesce(self, nodes: list[StateNode]) -> None:
        """Join each of these nodes with its only child where nothing keeps them apart."""
        for node in nodes:
            if node.payload is not None:
                self._states.coalesce(node)

    def _lose(self, live: LivePath) -> None:
        """The live buffers cannot be trusted: what was only there goes, what was paged stays."""
        live.forget()
        session = self._open_session()
        for node in list(self._states.tree.nodes()):
            if node.payload is None or node.payload.spans is not None:
                continue
            for gone in (node, *below(node)):
                self._unregister_pin(gone)
                if session is not None and session.guarded is gone:
                    session.guarded = None if node.parent is None or node.parent.is_root else node.parent
            self._states.remove_subtree(node)

    # Private: insert

    def _insertable(self, caches: Sequence[Any], length: int) -> int:
        """How many of `length` tokens foreign caches can be stored for.

        Raises:
            SnapshotError: point state beyond the tokens, or at unequal offsets.
        """
        if self.layout.is_empty(caches):
            return 0
        offsets = self.layout.offsets(caches)
        if offsets is None:
            return length
        low, high = offsets
        has_points = self.layout.uses_points(caches)
        if low != high and has_points:
            raise SnapshotError(f"layers stand at offsets {low} to {high}; point state needs one offset for all.")
        if high > length and has_points and not self.layout.can_rewind(caches, high, length):
            raise SnapshotError(f"caches stand at {high}, beyond the {length} tokens given, and cannot be cut back.")
        return min(low, length)

    def _store(self, caches: Sequence[Any], keys: Keys, namespace: str, use: Use) -> None:
        """Copy what the tree lacks of foreign caches that stand at or beyond len(keys)."""
        self.layout.learn(caches)
        match = self._states.match(keys, namespace)
        guarded = None if match.node.is_root else match.node
        if guarded is not None:
            self._states.guard(guarded, 1)
        try:
            end = self._storable(match.offset, len(keys))
            start = match.offset
            checkpoint = self._foreign_checkpoint(caches, end) if self.layout.has_points else None
            spans = self._allocating(lambda: self.layout.page_out(caches, start, end)) if end > start else None
        finally:
            if guarded is not None:
                self._states.guard(guarded, -1)
        node = self._path_for(keys[:end], namespace, use)
        if spans is not None:
            self._states.set_spans(node, spans)
            self._paged_out_bytes += spans.nbytes
        if checkpoint is not None and state_of(node).checkpoint is None:
            self._states.set_checkpoint(node, checkpoint, use)
        self._states.touch(node.path(), node, use)
        self._coalesce(node.path())

    def _storable(self, start: int, end: int) -> int:
        """Make room for the tokens [start, end); where they do not fit, how far they do for span layers alone."""
        need = (end - start) * self.layout.token_bytes
        if self._evictor.make_room(need) or self.layout.has_points:
            return end
        return max(start, end - -(-self._evictor.over_bytes(need) // self.layout.token_bytes))

    def _foreign_checkpoint(self, caches: Sequence[Any], end: int) -> Checkpoint:
        checkpoint = self._allocating(lambda: self.layout.checkpoint(caches, end, "end"))
        offsets = self.layout.offsets(caches)
        if offsets is not None and offsets[1] > end:
            own = self.layout.fresh()
            self.layout.restore_points(own, checkpoint, end)
            checkpoint = self.layout.checkpoint(own, end, "end")
        return checkpoint

    # Private: fetch

    def _readable(self, plan: ResumePlan) -> ResumePlan:
        """Shorten a plan whose spans are only in the live buffers of a session that another thread has open."""
        if self._open_session() is None or self._session_thread == threading.get_ident():
            return plan
        hidden = [n.start for n in plan.path if n.start < plan.resume and state_of(n).spans is None]
        if not hidden:
            return plan
        resume, checkpoint, source = hidden[0], None, None
        if self.layout.has_points:
            shown = [n for n in plan.path if n.end <= resume and state_of(n).checkpoint is not None]
            source = shown[-1] if shown else None
            resume = source.end if source is not None else 0
            checkpoint = None if source is None else state_of(source).checkpoint
        return ResumePlan(
            plan.matched, resume, plan.path, plan.common, checkpoint, source, ShortReason.LIVE_ELSEWHERE
        )

    def _spans_of(self, node: StateNode) -> Spans:
        spans = state_of(node).spans
        if spans is not None:
            return spans
        return self._allocating(lambda: self.layout.page_out(self._live.caches, node.start, node.end))

    # Private: pins

    def _pin_nodes(self, node: StateNode) -> list[StateNode]:
        """The pinned node, and the nearest checkpoint above if it has none itself."""
        nodes = [node]
        if self.layout.has_points and state_of(node).checkpoint is None:
            holders = [each for each in node.path()[:-1] if state_of(each).checkpoint is not None]
            nodes += holders[-1:]
        return nodes

    def _refuse_large_pin(self, node: StateNode, end: int) -> None:
        wanted = self._pinned_bytes() + sum(self._pin_cost(each, end) for each in node.path() if not self._is_kept(each))
        if wanted > self._ledger.budget_bytes:
            raise ValueError(f"pins would keep {wanted} bytes; the budget is {self._ledger.budget_bytes} bytes.")

    def _pin_cost(self, node: StateNode, end: int) -> int:
        checkpoint = state_of(node).checkpoint if node.end <= end else None
        tokens = min(node.end, end) - node.start
        return tokens * self.layout.token_bytes + (0 if checkpoint is None else checkpoint.nbytes)

    def _is_kept(self, node: StateNode) -> bool:
        return any(each is node for pin in self._pins.values() for pinned in pin.nodes for each in pinned.path())

    def _pinned_bytes(self) -> int:
        kept = {id(each): each for pin in self._pins.values() for node in pin.nodes for each in node.path()}
        return sum(self._pin_cost(node, node.end) for node in kept.values())

    def _unregister_pin(self, node: StateNode) -> None:
        """A pinned node's state was lost with the live buffers: its pins are void."""
        for name in [name for name, pin in self._pins.items() if any(each is node for each in pin.nodes)]:
            for each in self._pins.pop(name).nodes:
                self._states.pin(each, -1)

    # Private: the rest

    def _checked(self, tokens: Any, keys: Any, namespace: Any) -> tuple[TokenIds, Keys]:
        ids = token_ids(tokens, self.vocab_size)
        if not isinstance(namespace, str):
            raise ValueError(f"namespace is a {type(namespace).__name__}; wanted a str.")
        return ids, ids.astype(np.int64) if keys is None else edge_keys(keys, len(ids))

    def _next_use(self, priority: int = 0, turn: int | None = None, kind: str = "") -> Use:
        self._tick += 1
        return Use(self._tick, priority, turn, kind)

    def _open_session(self) -> Session | None:
        return None if self._session is None else self._session()

    def _require_idle(self) -> None:
        session = self._open_session()
        if session is not None and not session.is_closed:
            held = f"a session of {len(session.prompt)} prompt tokens, at {session.position}"
            raise CacheBusyError(f"the live slot is taken by {held}; close it first, or use fetch() and insert().")

    def _count(self, plan: ResumePlan, length: int) -> None:
        self._requests += 1
        self._hit_tokens += plan.resume
        self._miss_tokens += length - plan.resume
        if plan.reason is not None:
            self._short_reasons[plan.reason] = self._short_reasons.get(plan.reason, 0) + 1

    def _keep_budget(self) -> None:
        self._evictor.thin_checkpoints()
        self._evictor.make_room()

    def _give_back(self, amount_bytes: int) -> int:
        """Another cache on the ledger wants bytes."""
        return self._evictor.shrink_to(max(0, self._account.total_bytes - amount_bytes))

    def _allocating(self, make: Callable[[], R]) -> R:
        """Run a copy of ours; when its allocation fails, give back half of what is held and try once more."""
        try:
            return make()
        except (MemoryError, RuntimeError):
            self._evictor.shrink_to(self._account.total_bytes // 2)
            self.layout.release()
            return make()


@dataclass(slots=True)
class _Pin:
    """Nodes that pin() of one sequence holds, and how many times it was called."""

    nodes: list[StateNode]
    count: int = 1


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
    gaps = [
        (offsets[i + 2] - offsets[i], i) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval"
    ]
    return checkpoints[min(gaps)[1]] if gaps else None


def _require_count(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; wanted a whole number of {unit}, 1 or more.")
