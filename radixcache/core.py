"""Core: the operations of requests on one cache: open, plan, commit, release, quarantine.

PrefixCache builds the parts of Core (`assemble`). Core does not know Session, Group or Row: its methods take a
PrefixRequest, a LivePath and checkpoints. Callers hold `lock`, except where a method says otherwise.

Invariants; `check` asserts them, and the invariants of the parts:

  C1  Between public calls every node's spans are LIVE or PAGED, none is LEAVING.
  C2  live + paged bytes <= budget after every public call, if dropping evictable state can achieve it.
  C3  In a model with point layers, a leaf is live, is kept or has a checkpoint. No request could resume on another.
  C4  The account's live bytes, booked checkpoint bytes and second bytes are the sums over the slots and open groups.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from radixcache.errors import CacheClosedError, RequestTooLargeError
from radixcache.layers.layout import Layout
from radixcache.ledger import Booking
from radixcache.paging.budget import Evictor
from radixcache.paging.pager import OwnState, Pager
from radixcache.paging.pins import Pins
from radixcache.paging.resume import (
    LivePath,
    PrefixRequest,
    Reason,
    ResumePlan,
    Slots,
    Tails,
    checkpoint_stops,
    floor,
    plan_resume,
)
from radixcache.paging.tier import Tier
from radixcache.settings import Settings
from radixcache.speculate.drafting import FED_TOKENS, LOOK_TOKENS, TreeSource
from radixcache.speculate.pace import DraftPace
from radixcache.speculate.suffix_index import TAIL_TOKENS, SuffixIndex
from radixcache.tokens import Keys, KnownTokens, Quarantine, TokenIds
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import NodeState, StateNode, StateTree, Use
from radixcache.verify import Check, Verifier

#: Tokens per pass of `learn`: the first pass compiles and allocates, the second is measured, the last is a decode step.
LEARNT_TOKENS = (16, 256, 1)


class Owner(Protocol):
    """What Core needs of a group."""

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """Store and share no state of `keys` from offset `start` on: it is wrong."""

    def abandon(self) -> None:
        """Give all state back and store nothing: the cache is about to close."""


class Lookup(NamedTuple):
    """What the cache has of a prompt, before any quarantined offset. `live`: the chosen slot; None: none was wanted."""

    match: Match[NodeState]
    live: LivePath | None
    plan: ResumePlan


class DraftIndex:
    """The tokens of earlier requests of one cache, from which replies are drafted.

    The suffix index is built from the tree when the first request asks for drafts. After that, it gets the tokens of
    every request, and all tokens that are inserted or read from a store.
    """

    def __init__(self, settings: Settings, states: StateTree, quarantine: Quarantine) -> None:
        self._settings, self._states, self._quarantine = settings, states, quarantine
        self.suffixes: SuffixIndex | None = None

    def source(self, namespace: str = "") -> TreeSource:
        """A source of drafts from the earlier requests of a namespace. Takes the lock itself."""
        lock = self._states.account.ledger.lock
        with lock:
            if self.suffixes is None:
                self.suffixes = SuffixIndex(self._settings.suffix_index_bytes, vocab_size=self._settings.vocab_size)
                for node in self._states.tree.nodes():
                    keys = node.last_keys(len(node.edge) + TAIL_TOKENS)
                    self.suffixes.add(keys, node.namespace, context=len(keys) - len(node.edge))
        return TreeSource(self.suffixes, namespace, lock)

    def has_more(self, known: KnownTokens, right_tokens: int | None) -> bool:
        """Whether a running request should add its new tokens now; its first `right_tokens` are correct, None: all."""
        right = known.count if right_tokens is None else min(right_tokens, known.count)
        return right - known.indexed_tokens >= FED_TOKENS and self.suffixes is not None

    def add(
        self, known: KnownTokens, keys: Keys, matched_tokens: int, namespace: str, *, is_growing: bool = False
    ) -> None:
        """Add a request's `keys` to the index, if there is one, except keys that were added before or matched.

        Quarantined keys are left out. With `is_growing`, one call adds at most `LOOK_TOKENS` keys.
        """
        if self.suffixes is not None:
            start = max(matched_tokens, known.indexed_tokens)
            end = min(len(keys), start + LOOK_TOKENS) if is_growing else len(keys)
            allowed = min(end, self._quarantine.limit(keys, namespace))
            self.suffixes.add(keys[:allowed], namespace, context=start)
            known.indexed_tokens = max(known.indexed_tokens, end)

    def stored(self, keys: Keys, namespace: str) -> int:
        """How many of these keys the tree has; 0 without an index. `add_stored` needs this number as `start`."""
        return 0 if self.suffixes is None else self._states.match(keys, namespace).offset

    def add_stored(self, keys: Keys, start: int, namespace: str) -> None:
        """Add the keys that the tree has got after `start` to the index, unless the index has them already."""
        end = self.stored(keys, namespace)
        if self.suffixes is not None and not self.suffixes.has(keys[max(0, start - TAIL_TOKENS) : end], namespace):
            self.suffixes.add(keys[:end], namespace, context=start)

    def clear(self, namespace: str | None) -> None:
        if self.suffixes is not None:
            self.suffixes.clear(namespace)

    def check(self) -> None:
        if self.suffixes is not None:
            self.suffixes.check()


class Core:
    """The operations of requests on one cache. `trace`: a TraceWriter or None; `owns_trace`: close it as well."""

    def __init__(
        self,
        settings: Settings,
        states: StateTree,
        slots: Slots,
        pins: Pins,
        quarantine: Quarantine,
        evictor: Evictor,
        pager: Pager,
        tier: Tier | None,
        trace: Any,
        owns_trace: bool,
    ) -> None:
        self.settings = settings
        self.layout, self.budget = states.layout, evictor.budget
        self.lock = states.account.ledger.lock
        self.states, self._account, self._ledger = states, states.account, states.account.ledger
        self.slots, self.pins, self.quarantine = slots, pins, quarantine
        self.evictor, self.pager, self.tier = evictor, pager, tier
        self._trace, self._owns_trace = trace, owns_trace
        self.verifier = Verifier(settings.verify, settings.verify_seed, self.lock, states.events)
        self._tails = Tails()
        self.draft_index = DraftIndex(settings, states, quarantine)
        self.draft_pace = DraftPace()
        #: The booking of each open group.
        self.bookings: list[tuple[Booking, weakref.ref[Owner]]] = []
        self._tick = 0
        self._is_closed = False
        self.counts: Counter[str] = Counter()
        self.short_reasons: Counter[str] = Counter()

    # Before a request

    def require_open(self) -> None:
        """Raise CacheClosedError if the cache was closed while a call waited for the lock or had released it."""
        if self._is_closed:
            raise CacheClosedError

    def next_use(self, priority: int = 0, turn: int | None = None, kind: str = "") -> Use:
        """Start the next tick and return the Use of the request to which this tick belongs."""
        self.require_open()
        clock = self.settings.clock
        if self.pins.next_end_s is not None:
            self.pins.end_expired()
        self._tick = max(self._tick + 1, 0 if clock is None else clock())
        self.states.events.tick = self._tick
        return Use(self._tick, priority, turn, kind)

    def reclaim_vanished(self) -> None:
        """Take back the state of sessions and groups that vanished without closing (interrupted finalizers)."""
        for path in self.slots.vanished_paths():
            self.slots.lose(path)
            self._release(path)
        for booking in [booking for booking, group in self.bookings if group() is None]:
            self.close_booking(booking)

    def require_slot(self, namespace: str) -> None:
        self.reclaim_vanished()
        self.slots.require_free(namespace)

    def open_booking(self, group: Owner) -> Booking:
        """Return a booking for a new group. The group will be told of wrong state, and before the cache closes."""
        self.require_open()
        booking = Booking(self._account)
        self.bookings.append((booking, weakref.ref(group)))
        return booking

    def close_booking(self, booking: Booking) -> None:
        booking.end()
        self.bookings = [each for each in self.bookings if each[0] is not booking]

    def groups(self) -> list[Owner]:
        return [group for _, reference in self.bookings if (group := reference()) is not None]

    def before_quarantine(self, keys: Keys, namespace: str) -> Keys:
        """The keys before the first quarantined offset."""
        start = self.quarantine.offset(keys, namespace)
        return keys if start is None else keys[:start]

    # Restoring

    def read_store(self, request: PrefixRequest) -> tuple[PrefixRequest, AbstractContextManager[None] | None]:
        """Add to the tree what the store has of a prompt. Call this before `lookup`.

        The lock is released while a store is asked or read, so repeat all earlier checks afterwards.

        Returns:
            The request, with a later tick if another request came meanwhile; and a context, or None without a store.
            Copy the state into live caches in this context: the copy is part of the measured reading time.
        """
        tier = self.tier
        if tier is None:
            return request, None

        def asked() -> tuple[Keys, Use]:
            nonlocal request
            use = request.use
            if use.tick != self._tick:
                request = request._replace(use=self.next_use(use.priority, use.turn, use.kind))
            return self.before_quarantine(request.keys, request.namespace)[: request.limit], request.use

        start = self.draft_index.stored(request.keys, request.namespace)
        is_read = tier.read(request.namespace, asked)
        self.require_open()
        if is_read:
            self.draft_index.add_stored(request.keys, start, request.namespace)
        asked()
        return request, tier.rates.timing_move() if is_read else nullcontext()

    def lookup(
        self,
        keys: Keys,
        namespace: str,
        limit: int,
        *,
        takes_slot: bool = False,
        evaluate: bool = True,
    ) -> Lookup:
        """Find what the tree has of a prompt, and plan where to resume it; at most `limit` tokens may be restored.

        Args:
            takes_slot: choose a live slot, and split the node in which the match ends. The rest of this node belongs to
                other prompts and is neither touched nor guarded. If False, nothing changes.
            evaluate: evaluate pending buffers that are to be read, to see whether they are intact.
        """
        keys = self.before_quarantine(keys, namespace)
        match = self.states.match(keys, namespace)
        if takes_slot and match.offset not in (0, match.node.end):
            match = self.pager.allocating(self._match_to_end, keys, namespace)
        path = match.path
        live = self.slots.choose(path, limit) if takes_slot else None
        hidden = self.slots.hidden_from(path, live, evaluate=evaluate)
        return Lookup(match, live, self.plan(match, keys, limit, live, hidden))

    def _match_to_end(self, keys: Keys, namespace: str) -> Match[NodeState]:
        """Match, and split a node in which the match ends. A retry matches again, as eviction has changed the tree."""
        match = self.states.match(keys, namespace)
        if match.offset in (0, match.node.end):
            return match
        upper = self.states.split(match.node, match.offset)
        return Match(upper, match.offset, [*match.path[:-1], upper])

    def is_resumable(self, keys: Keys, namespace: str) -> bool:
        """Whether a longer prompt would resume at the end of these keys. If so, this counts as a use of the keys.

        In exact mode, the end is the end of the last whole chunk.
        """
        match = self.states.match(self.before_quarantine(keys, namespace), namespace)
        plan = plan_resume(self.layout, match, len(keys), None, grid_tokens=self.states.grid_tokens)
        if plan.resume < floor(len(keys), self.states.grid_tokens):
            return False
        self.states.touch(plan.path, plan.source, self.next_use())
        return True

    def open(self, request: PrefixRequest, moving: AbstractContextManager[None] | None) -> tuple[LivePath, ResumePlan]:
        """Restore the longest usable prefix into the free slot that has most of it. Copy in the context `moving`."""
        use, length = request.use, len(request.prompt)
        match, live, plan = self.lookup(request.keys, request.namespace, request.limit, takes_slot=True)
        assert live is not None, plan
        try:
            self.budget.fits(self.layout.request_bytes(length), who="request").require()
        except RequestTooLargeError:
            self.evictor.tidy(match.node)
            raise
        live.open(match.node, use.tick)
        try:
            self.pager.checkpoint_live(live, use)
            if moving is None:
                self.pager.move(live, plan, length + request.reserve, length)
            else:
                with moving:
                    self.pager.move(live, plan, length + request.reserve, length)
            # The session may return to this offset, and other prompts may branch off here too.
            self.pager.checkpoint_live(live, use, "branch")
        except BaseException:
            self.slots.lose(live)
            self._release(live)
            raise
        guarded = [] if live.guarded is None else live.guarded.path()
        self.states.touch(guarded, live.tip if plan.source is None else plan.source, use)
        self.count_request(request, plan, "begin")
        return live, plan

    def draw_verifier(self) -> Verifier | None:
        """The verifier, if a request is drawn for verification; else None."""
        return self.verifier if self.settings.verify and self.verifier.is_drawn() else None

    def draw_check(self, request: PrefixRequest, live: LivePath, plan: ResumePlan) -> Check | None:
        """The check of a restored session, if the session is drawn for verification; else None."""
        if not plan.resume or self.draw_verifier() is None:
            return None
        assert isinstance(self.layout, Layout)  # simulated caches hold sizes only and are not verified
        return Check(self.verifier, self.layout, request.prompt, live.caches, plan.resume)

    def fetch(self, request: PrefixRequest) -> tuple[list[Any], TokenIds]:
        """Restore the longest usable prefix into fresh caches. Return the caches and the token ids left to evaluate."""
        request, _ = self.read_store(request)
        match, _, plan = self.lookup(request.keys, request.namespace, request.limit)
        nodes = [each for each in plan.path if each.start < plan.resume]
        with self.states.guarding(match.node):
            caches = self.pager.allocating(self.pager.fresh_at, nodes, plan)
        self.states.touch(nodes, plan.source, request.use)
        self.evictor.tidy(match.node)
        self.count_request(request, plan, "fetch")
        self.write_store(request.keys[: plan.resume], request, plan.resume)
        self.evictor.tidy_unpinned()
        self.write_trace(request)
        return caches, request.prompt[plan.resume :].copy()

    def count_request(self, request: PrefixRequest, plan: ResumePlan, by: str) -> None:
        """Count a restored request and emit its event; `by` is the public call that restored it."""
        self.counts["requests"] += 1
        self.counts["off_grid_tokens"] += plan.off_grid
        self.counts["hit_tokens"] += plan.resume
        self.counts["miss_tokens"] += len(request.prompt) - plan.resume
        if plan.reason is not None:
            self.short_reasons[plan.reason] += 1
        self.pins.requests += 1
        if self.pins.next_end is not None:
            self.pins.end_passed()
        if by == "fetch" and plan.resume:
            self.verifier.pass_over()
        detail = {"matched_tokens": plan.matched, "reason": plan.reason, "by": by}
        nbytes = plan.resume * self.layout.token_bytes
        self.states.events.asked(request.keys, request.namespace, plan.resume, nbytes, detail)

    def count_more_hits(self, tokens: int) -> None:
        """Count tokens of a request as hits that `count_request` counted as misses."""
        self.counts["hit_tokens"] += tokens
        self.counts["miss_tokens"] -= tokens

    # Serving

    def timing_prefill(self, start: int, end: int) -> AbstractContextManager[None]:
        """A context in which to prefill the tokens [start, end). With a store, it measures the time. Takes no lock."""
        return nullcontext() if self.tier is None else self.tier.rates.timing_prefill(start, end)

    def learn(self, model: Any) -> None:
        """Run passes of LEARNT_TOKENS dummy tokens; keep sizes and speeds, no state. Call it without the lock."""
        self.settings.require_model(model)
        caches, position = self.layout.fresh(), 0
        for count in LEARNT_TOKENS:
            ids = (mx.arange(count) % (self.settings.vocab_size or 1))[None]
            with self.timing_prefill(position, position + count):
                mx.eval(model(ids, cache=caches))
                self.layout.evaluate(caches)
            position += count
        with self.lock:
            self.layout.learn(caches)

    def book_second(self, booking: Booking, nbytes: int) -> bool:
        """Book `nbytes` in total for the state of a request's cold run. False: there is no room; book nothing."""
        with self.lock:
            growth = nbytes - booking.second_bytes
            fits = growth <= 0 or self.evictor.find_room(growth)
            booking.book_second(nbytes if fits else 0)
            return fits

    # Storing

    def commit(self, live: LivePath, request: PrefixRequest, keys: Keys, end: int, own: OwnState) -> None:
        """Store the first `end` keys, all evaluated, as a LIVE path of the tree, with the request's own state."""
        self.pager.retreat(live, end)
        self.pager.record_live(live, keys[:end], request.namespace, own, request.use)
        if self.settings.exact:
            tip = live.tip if live.tip is not None else self.states.tree.root(request.namespace)
            self._tails.add(tip, keys[end:])

    def end_session(self, live: LivePath, request: PrefixRequest, stored: Keys, used: int, output_tokens: int) -> None:
        """Free a slot whose session left the keys `stored` in the tree; the first `used` were there when it began."""
        self._release(live)
        # Write after the release: from here on, any thread may read the buffers.
        self.write_store(stored, request, used)
        if live.tip is not None:
            self.states.coalesce_path(live.tip)
        live.measure()
        self.evictor.enforce_budget()
        self.write_trace(request, output_tokens)

    def insert(self, request: PrefixRequest, caches: Sequence[Any], row: int | None = None) -> int:
        """Store from foreign caches, or a row of batch caches, what the tree lacks. Return how many tokens it then has.

        SnapshotError, ValueError: the caches do not fit, or the cache is exact; nothing was changed.
        """
        if self.settings.exact:
            raise ValueError("insert() into an exact cache, whose chunks of prefill must be known; use begin().")
        if row is not None:
            assert isinstance(self.layout, Layout)  # simulated caches have no rows
            caches = self.layout.row_of(caches, row)
        keys = self.before_quarantine(request.keys, request.namespace)
        if len(keys) < len(request.keys) and self.layout.has_points:
            self.layout.compare(caches)  # Point state cannot be cut back to the quarantined offset.
            end = len(keys)
        else:
            start = self.draft_index.stored(keys, request.namespace)
            end = self.pager.record_foreign(caches, keys, request.namespace, request.use)
            self.draft_index.add_stored(keys[:end], start, request.namespace)
        self.write_store(request.keys[:end], request, 0)
        self.evictor.enforce_budget()
        return self.states.match(request.keys[:end], request.namespace).offset

    def write_store(self, keys: Keys, request: PrefixRequest, used: int) -> None:
        """Write to the store what a request left in the tree. The first `used` keys were there when it began."""
        if self.tier is not None:
            self.tier.write(keys, request, used)

    def write_trace(self, request: PrefixRequest, output_tokens: int = 0) -> None:
        """Write a request to the trace. A write error is only a warning: it never fails a request."""
        trace, use = self._trace, request.use
        if trace is None:
            return
        about = {"turn": use.turn, "kind": use.kind, "priority": use.priority}
        try:
            trace.append(
                request.keys, time=self._tick, output_tokens=output_tokens, namespace=request.namespace, **about
            )
        except OSError as error:
            warnings.warn(f"{trace.path}: a request could not be recorded: {error}", RuntimeWarning, stacklevel=2)

    def expel(
        self, live: LivePath | None, keys: Keys, start: int | None, namespace: str, *, is_branch: bool = False
    ) -> int:
        """Quarantine all that begins with `keys`, from `start` on; remove it; empty `live`. Return the start.

            root ── a ── b ── c        the keys end on b, and start lies inside b: b is split there; its lower part and
                          └── d        all nodes below are removed, with their pins; live paths on them step back

        State before `start` stays, as other prompts share it. Idle slots that stand on wrong state are emptied too.
        Another open session keeps its caches, but its path, and what it will store, ends before the wrong state.

        Args:
            start: None: the offset where another session's check has quarantined the keys; if there is none, the start
                of the node on which they end. In exact mode, `start` is rounded down to a multiple of step_size.
            is_branch: move `start` to the beginning of the branch on which the keys end.
        """
        states, quarantine = self.states, self.quarantine
        match = states.match(keys, namespace)
        if is_branch and match.offset == len(keys):
            start = _branch(match.node).start
        if start is None:
            start = quarantine.offset(keys, namespace)
        if start is None:
            start = match.node.start if match.offset == len(keys) else 0
        start = floor(start, states.grid_tokens)
        quarantine.add(keys, start, namespace)
        self.draft_index.clear(namespace)  # The index does not know which replies came from wrong state: drop all.
        if self.tier is not None:
            self.tier.remove(keys, start, namespace)
        for group in self.groups():
            group.distrust(keys, start, namespace)
        guarded = [] if live is None or live.guarded is None else [live.guarded]
        if live is not None:
            live.guard(None)
        chain = match.node.path()
        if match.offset == len(keys):
            chain = self.pager.cut_off(match.node, start)
        if live is not None:
            self.pager.empty(live)
        for node in reversed(chain):
            if node.payload is None or node.end <= start or not node.is_leaf:
                break
            if node.payload.live or node.payload.is_kept:
                break
            states.remove(node, was_wrong=True)
        for left in guarded + chain[::-1]:
            if left.payload is not None:
                self.evictor.tidy(left)
        self.evictor.enforce_budget()
        return start

    # The cache as a whole

    def clear(self, namespace: str | None = None) -> None:
        """Drop all state that no open session uses, and the history of prompts, of one namespace; None: of all."""
        self.pins.clear(namespace)
        self.evictor.enforce_budget()
        self._tails.clear(namespace)
        self.draft_index.clear(namespace)
        with self.states.losing_silently():
            if namespace is None:
                self.evictor.shrink_to(0)
            else:
                self.evictor.drop_namespace(namespace)
        self.states.events.history.clear(namespace)
        self.layout.release()

    def flush(self, timeout_s: float | None = None, write_all: bool = False) -> bool:
        """Wait until the store has written everything, with `write_all` all of memory. False: timeout_s have passed."""
        if write_all and self.tier is not None:
            with self.lock:
                self.tier.write_all()
        return self.tier is None or self.tier.store.flush(timeout_s)

    def close(self) -> None:
        """Give back all state, including that of open sessions and groups, and the account. Takes the lock."""
        with self.lock:
            for group in self.groups():
                group.abandon()
            for path in self.slots.paths:
                if path.is_open:
                    self.slots.lose(path)
                    self._release(path)
            if self.tier is not None:
                self.tier.write_all()
            self.clear()
            self._is_closed = True
            self._ledger.close_account(self._account)
            if self._trace is not None and self._owns_trace:
                self._trace.close()

    def check(self) -> None:
        states, account, paths = self.states, self._account, self.slots.paths
        parts = (states, states.events.history, self._ledger, self.slots, self.pins, self.quarantine, self._tails)
        for part in (*parts, self.draft_index):
            part.check()
        assert states.leaving_bytes == 0, states.leaving_bytes
        for node in states.tree.nodes():
            state = node.payload
            assert state.live or state.spans is not None, node
            bare = node.is_leaf and state.checkpoint is None and not state.live and not state.is_kept
            assert not (bare and self.layout.has_points), node
            assert state.checkpoint is None or node.end % states.grid_tokens == 0, node
        bookings = [path.booking for path in paths] + [booking for booking, _ in self.bookings]
        booked = [sum(column) for column in zip(*(each.amounts for each in bookings), strict=True)]
        wanted = [account.live_bytes, account.booked_checkpoint_bytes, account.second_bytes]
        assert booked == wanted, (booked, wanted)
        is_idle = not self.bookings and not any(path.is_open for path in paths)
        if is_idle and not self.pins.nbytes and self._ledger.is_sole(account):
            assert self._ledger.over_bytes() == 0, self._ledger.total_bytes

    def plan(
        self, match: Match[NodeState], keys: Keys, limit: int, live: LivePath | None, hidden: int | None
    ) -> ResumePlan:
        plan = plan_resume(self.layout, match, limit, live, hidden, grid_tokens=self.states.grid_tokens)
        tail = self._tails.match_length(match, keys) if self.settings.exact else 0
        if not tail:
            return plan
        # An earlier request had evaluated more of the prompt, off the grid.
        off_grid = plan.off_grid + min(tail, limit - match.offset)
        reason = plan.reason or (Reason.OFF_GRID if off_grid else Reason.LAST_TOKEN)
        return plan._replace(matched=match.offset + tail, reason=reason, off_grid=off_grid)

    def _release(self, live: LivePath) -> None:
        """Free a slot, and join nodes that were split for its session but need not stay split."""
        node = live.release()
        if node is not None:
            self.evictor.tidy(node)


def _branch(node: StateNode) -> StateNode:
    """The topmost node from which the tree runs down to this one without a fork."""
    while node.parent is not None and not node.parent.is_root and len(node.parent.children) == 1:
        node = node.parent
    return node


def insert_offsets(core: Core, prompt: TokenIds, keys: Keys, namespace: str, marks: Sequence[int]) -> list[int]:
    """Offsets at which to insert the state of a prompt while somebody else prefills it. The lock is held."""
    if core.settings.exact or not core.layout.has_points:
        return []
    request = PrefixRequest(prompt, keys, namespace, Use(0), tuple(map(int, marks)))
    plan = core.lookup(request.keys, request.namespace, request.limit).plan
    found = {"matched": plan.matched, "resumed": plan.resume, "kept": core.budget.kept_tokens(len(request.prompt))}
    return list(checkpoint_stops(core.settings, request, plan.resume, request.limit, **found))
