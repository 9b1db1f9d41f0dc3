"""Core: what every request does with the parts of one cache: open, plan, commit, release, quarantine.

PrefixCache builds the parts (`assemble`); Core shares none. It knows no Session, Group or Row: its methods take a
PrefixRequest, a LivePath and checkpoints. Callers hold `lock`, except where a method says otherwise.

Invariants, asserted by `check` together with those of the parts:

  C1  Between public calls every node's spans are LIVE or PAGED, none is LEAVING.
  C2  live + paged bytes <= budget after every public call, if dropping evictable state can achieve it.
  C3  A leaf without a checkpoint is live, kept, or the model has no point layers: nothing else could resume on it.
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

from radixcache.adapters.contract import Checkpoint
from radixcache.errors import CacheClosedError, RequestTooLargeError, SessionClosedError
from radixcache.layers.layout import NATIVE_ERRORS, Layout
from radixcache.ledger import Booking
from radixcache.paging.evictor import Evictor
from radixcache.paging.live_path import LivePath, Slots
from radixcache.paging.pager import Pager
from radixcache.paging.pins import Pins
from radixcache.paging.resume import (
    OwnState,
    PrefixRequest,
    ResumePlan,
    ShortReason,
    Tails,
    deepest_whole,
    floor,
    plan_resume,
    stored_from,
)
from radixcache.paging.tier import Foreseen, Tier
from radixcache.settings import Settings
from radixcache.speculate.drafting import FED_TOKENS, LOOK_TOKENS, TreeSource
from radixcache.speculate.pace import DraftPace
from radixcache.speculate.suffix_index import TAIL_TOKENS, SuffixIndex
from radixcache.tokens import Keys, KnownTokens, Quarantine, TokenIds
from radixcache.tree.entries import NodeState, StateNode, Use
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import StateTree
from radixcache.verify import Check, Mismatch, Verifier

#: Windows are copied out at least this many tokens at a time, unless they are about to be lost.
LEAST_TOKENS = 64
#: Tokens of the passes of `learn`: the first one compiles and allocates, the second is measured, the last is a step.
LEARNT_TOKENS = (16, 256, 1)


class Owner(Protocol):
    """A group, as Core sees it."""

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """State of these keys is wrong from offset `start` on: store and share none of it."""

    def abandon(self) -> None:
        """The cache is about to close: give all state back and store nothing."""


class Lookup(NamedTuple):
    """What the cache has of a prompt that is not quarantined; `live`: the chosen slot, if one was asked for."""

    match: Match[NodeState]
    live: LivePath | None
    plan: ResumePlan


class Foresight(NamedTuple):
    """What `begin` would find, and how far it would get if all buffers could be read.

    Attributes:
        windows: for each window the number of layers that have it, and the token from which on it is stored, without a
            gap, up to where the request resumes.
        quarantined_from: offset from which on the keys are quarantined; None: they are not.
        in_store: what the store has of the prompt beyond memory; None: there is no store.
    """

    match: Match[NodeState]
    plan: ResumePlan
    readable: ResumePlan
    windows: tuple[tuple[int, int], ...]
    quarantined_from: int | None
    in_store: Foreseen | None


class Core:
    """What requests do with one cache; it closes the trace, a TraceWriter or None, if it owns it."""

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
        self._states, self._account, self._ledger = states, states.account, states.account.ledger
        self._slots, self._pins, self._quarantine = slots, pins, quarantine
        self._evictor, self._pager, self._tier = evictor, pager, tier
        self._trace, self._owns_trace = trace, owns_trace
        self._verifier = Verifier(settings.verify, settings.verify_seed, self.lock, states.events)
        self._tails = Tails()
        self._suffixes: SuffixIndex | None = None  # made when it is first asked for
        self.draft_pace = DraftPace()
        #: The booking of each open group.
        self._bookings: list[tuple[Booking, weakref.ref[Owner]]] = []
        self._tick = 0
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._short_reasons: Counter[str] = Counter()

    # Before a request

    def require_open(self) -> None:
        """Raise CacheClosedError if the cache was closed while a call waited for the lock, or had given it up."""
        if self._is_closed:
            raise CacheClosedError

    def next_use(self, priority: int = 0, turn: int | None = None, kind: str = "") -> Use:
        """Start a tick, later than the last one, and return the use of state by the request that comes with it."""
        self.require_open()
        clock = self.settings.clock
        self._pins.end_expired()
        self._tick = max(self._tick + 1, 0 if clock is None else clock())
        self._states.events.tick = self._tick
        return Use(self._tick, priority, turn, kind)

    def reclaim_vanished(self) -> None:
        """Take back the state of sessions and groups that vanished without closing (interrupted finalizers)."""
        for path in self._slots.vanished():
            self.lose(path)
            self._release(path)
        for booking in [booking for booking, group in self._bookings if group() is None]:
            self.close_booking(booking)

    def require_slot(self, namespace: str) -> None:
        self.reclaim_vanished()
        self._slots.require_free(namespace)

    def open_booking(self, group: Owner) -> Booking:
        """Return a booking for a new group, which is told of wrong state and of the cache's end."""
        self.require_open()
        booking = Booking(self._account)
        self._bookings.append((booking, weakref.ref(group)))
        return booking

    def close_booking(self, booking: Booking) -> None:
        booking.end()
        self._bookings = [each for each in self._bookings if each[0] is not booking]

    def groups(self) -> list[Owner]:
        return [group for _, reference in self._bookings if (group := reference()) is not None]

    def unquarantined(self, keys: Keys, namespace: str) -> Keys:
        """The keys up to where they are quarantined."""
        start = self._quarantine.offset(keys, namespace)
        return keys if start is None else keys[:start]

    # Restoring

    def read_store(self, request: PrefixRequest) -> tuple[PrefixRequest, AbstractContextManager[None] | None]:
        """Have the store add what it has of a prompt to the tree; call this before `lookup`.

        The lock is given up while a store is asked or read: what was checked before has to be checked again.

        Returns:
            The request, with a later tick if another request came meanwhile, and a context in which to copy what was
            read into live caches: the copy is part of the measured reading time. None: there is no store.
        """
        tier = self._tier
        if tier is None:
            return request, None

        def asked() -> tuple[Keys, Use]:
            nonlocal request
            use = request.use
            if use.tick != self._tick:
                request = request._replace(use=self.next_use(use.priority, use.turn, use.kind))
            return self.unquarantined(request.keys, request.namespace)[: request.limit], request.use

        start = self._said_from(request.keys, request.namespace)
        is_read = tier.read(request.namespace, asked)
        self.require_open()
        if is_read:
            self._say_stored(request.keys, start, request.namespace)
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
        """Find what the tree has of a prompt, and plan where a request resumes that may restore `limit` tokens.

        Args:
            takes_slot: choose a live slot, and split the tree where the match ends: the rest of that edge belongs to
                other prompts and is neither touched nor guarded. Else nothing is changed.
            evaluate: evaluate pending buffers that are to be read, to see whether they are intact.
        """
        keys = self.unquarantined(keys, namespace)
        match = self._states.match(keys, namespace)
        if takes_slot and match.offset not in (0, match.node.end):
            match = self._pager.allocating(self._match_to_end, keys, namespace)
        path = match.path
        live = self._slots.choose(path, limit) if takes_slot else None
        hidden = self._slots.hidden(path, live, evaluate=evaluate)
        return Lookup(match, live, self._plan(match, keys, limit, live, hidden))

    def _match_to_end(self, keys: Keys, namespace: str) -> Match[NodeState]:
        """Match, and split a node in which the match ends. A second try matches again: room was made."""
        match = self._states.match(keys, namespace)
        if match.offset in (0, match.node.end):
            return match
        upper = self._states.split(match.node, match.offset)
        return Match(upper, match.offset, [*match.path[:-1], upper])

    def foresee(self, keys: Keys, namespace: str) -> Foresight:
        """What a session on a prompt would find, or `fetch` if no slot is free; changes and evaluates nothing.

        Gives the lock up while a store is asked.
        """
        limit, states, in_store = len(keys) - 1, self._states, None
        if self._tier is not None:
            in_store = self._tier.foresee(self.unquarantined(keys, namespace)[:limit], namespace)
        quarantined_from = self._quarantine.offset(keys, namespace)
        keys = keys[:quarantined_from]
        match = states.match(keys, namespace)
        gone = sum(1 << path.slot for path in self._slots.vanished())
        for node in match.path if gone else []:
            if node.payload.spans is None and not node.payload.live_mask & ~gone:
                # The next request gives up what only the buffers of a vanished session hold.
                match = Match(node.parent or node, node.start, match.path[: match.path.index(node)])
                break
        has_slot = not all(path.is_open for path in self._slots.paths)
        live = self._slots.choose(match.path, min(match.offset, limit)) if has_slot else None
        hidden = self._slots.hidden(match.path, live, evaluate=False)
        plan = self._plan(match, keys, limit, live, hidden)
        readable = plan if hidden is None else self._plan(match, keys, limit, live, None)
        windows = self.layout.windows if plan.resume else ()
        stored = tuple((self.layout.layers_of(each), stored_from(self.layout, plan, each)) for each in windows)
        return Foresight(match, plan, readable, stored, quarantined_from, in_store)

    def is_resumable(self, keys: Keys, namespace: str) -> bool:
        """Whether a longer prompt would resume at the end of these keys; counts as a use of them if so.

        In exact mode it would resume at the end of their last whole chunk.
        """
        match = self._states.match(self.unquarantined(keys, namespace), namespace)
        plan = plan_resume(self.layout, match, len(keys), None, grid_tokens=self._states.grid_tokens)
        if plan.resume < floor(len(keys), self._states.grid_tokens):
            return False
        self._states.touch(plan.path, plan.source, self.next_use())
        return True

    def open(self, request: PrefixRequest, moving: AbstractContextManager[None] | None) -> tuple[LivePath, ResumePlan]:
        """Restore the longest usable prefix into the free slot that already has the most of it, in this context."""
        use, length = request.use, len(request.prompt)
        match, live, plan = self.lookup(request.keys, request.namespace, request.limit, takes_slot=True)
        assert live is not None, plan
        try:
            self.budget.fits(self.layout.request_bytes(length), who="request").require()
        except RequestTooLargeError:
            self._evictor.tidy(match.node)
            raise
        live.open(match.node, use.tick)
        try:
            self._pager.checkpoint_live(live, use)
            if moving is None:
                self._pager.move(live, plan, length + request.reserve, length)
            else:
                with moving:
                    self._pager.move(live, plan, length + request.reserve, length)
            # The session may come back to here, and other prompts may branch off here as it does.
            self._pager.checkpoint_live(live, use, "branch")
        except BaseException:
            self.lose(live)
            self._release(live)
            raise
        guarded = [] if live.guarded is None else live.guarded.path()
        self._states.touch(guarded, live.tip if plan.source is None else plan.source, use)
        self.count_request(request, plan, "begin")
        return live, plan

    def draw_check(self, request: PrefixRequest, live: LivePath, plan: ResumePlan) -> Check | None:
        """The check of a restored session, if it is drawn for verification."""
        if not plan.resume or not self._verifier.is_drawn():
            return None
        assert isinstance(self.layout, Layout)  # caches of sizes are not verified
        return Check(self._verifier, self.layout, request.prompt, live.caches, plan.resume)

    def draw_row(self) -> Verifier | None:
        """What checks a new row, if it is drawn for verification."""
        return self._verifier if self._verifier.is_drawn() else None

    def fetch(self, request: PrefixRequest) -> tuple[list[Any], TokenIds]:
        """Restore the longest usable prefix into fresh caches; returns them and the token ids left."""
        request, _ = self.read_store(request)
        match, _, plan = self.lookup(request.keys, request.namespace, request.limit)
        nodes = [each for each in plan.path if each.start < plan.resume]
        with self._states.guarded(match.node):
            caches = self._pager.allocating(self._pager.restored, nodes, plan)
        self._states.touch(nodes, plan.source, request.use)
        self._evictor.tidy(match.node)
        self.count_request(request, plan, "fetch")
        self.write_store(request.keys[: plan.resume], request, plan.resume)
        self.tidy_unpinned()
        self.write_trace(request)
        return caches, request.prompt[plan.resume :].copy()

    def count_request(self, request: PrefixRequest, plan: ResumePlan, by: str) -> None:
        """Count a restored request and emit its event; `by` is the public call that restored it."""
        counts = self._counts
        counts["requests"] += 1
        counts["off_grid_tokens"] += plan.off_grid
        counts["hit_tokens"] += plan.resume
        counts["miss_tokens"] += len(request.prompt) - plan.resume
        if plan.reason is not None:
            self._short_reasons[plan.reason] += 1
        self._pins.request_passed()
        if by == "fetch" and plan.resume:
            self._verifier.pass_over()
        detail = {"matched_tokens": plan.matched, "reason": plan.reason, "by": by}
        nbytes = plan.resume * self.layout.token_bytes
        self._states.events.asked(request.keys, request.namespace, plan.resume, nbytes, detail)

    def count_more_hits(self, tokens: int) -> None:
        """Count tokens of a request as hits that `count_request` counted as misses."""
        self._counts["hit_tokens"] += tokens
        self._counts["miss_tokens"] -= tokens

    # Serving

    def grow(self, live: LivePath, need_tokens: int) -> None:
        self.budget.fits(self.layout.request_bytes(need_tokens), live.booking.live_bytes, "request").require()
        self._pager.grow(live, need_tokens)

    def timing_prefill(self, start: int, end: int) -> AbstractContextManager[None]:
        """A context in which to prefill the tokens [start, end), measured if a store needs that; takes no lock."""
        return nullcontext() if self._tier is None else self._tier.rates.timing_prefill(start, end)

    def learn(self, model: Any) -> None:
        """Run passes of LEARNT_TOKENS over tokens that mean nothing; keep sizes and speeds, no state. Takes no lock."""
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

    def fall_back(self, live: LivePath, own: OwnState, limit: int) -> int:
        """Return live caches to the deepest checkpoint at or below `limit`, the request's own or the tree's."""
        checkpoint = self._last_checkpoint(live, own, limit)
        target = 0 if checkpoint is None else checkpoint.offset
        self.go_back(live, own, target, checkpoint)
        return target

    def reach(self, live: LivePath, own: OwnState, limit: int, *, is_intact: bool) -> tuple[int, Checkpoint | None]:
        """The deepest offset at or below `limit` for `go_back`, and its checkpoint; `is_intact`: windows are whole."""
        if is_intact and not self.layout.has_states:
            stored = [*self._states.windows.stored(live.nodes()), *own.windows]
            held, grid_tokens = self.layout.held(live.caches), self._states.grid_tokens
            return deepest_whole(self.layout, stored, limit, held, grid=grid_tokens), None
        checkpoint = self._last_checkpoint(live, own, limit)
        return (0 if checkpoint is None else checkpoint.offset), checkpoint

    def go_back(self, live: LivePath, own: OwnState, target: int, checkpoint: Checkpoint | None) -> None:
        """Move live caches back to an offset; all state of their point layers there is in the checkpoint or stored.

        Without a checkpoint, windows also take what the live caches hold.
        """
        # All that is needed is held before room is made, which drops windows that no checkpoint in the tree needs.
        stored = [*self._states.windows.stored(live.nodes()), *own.windows]
        if checkpoint is None and target:
            held = self._pager.captured(live.caches, live.nodes(), target, own.windows)
            stored += [] if held is None else [held]
        self.leave_beyond(live, target)
        self.layout.rewind_spans(live.caches, target)
        self.layout.restore_points(live.caches, checkpoint, target, stored)
        own.cut(0, target)
        live.measure()
        self.enforce_budget()

    def leave_beyond(self, live: LivePath, end: int) -> None:
        """Leave the nodes of a live path behind `end`, whose tokens are about to be overwritten."""
        if end < live.offset:
            self._pager.retreat(live, end)

    def _last_checkpoint(self, live: LivePath, own: OwnState, limit: int) -> Checkpoint | None:
        path, windows = live.nodes(), self._states.windows
        found = [each for each in own.checkpoints if each.offset <= limit]
        found += [node.payload.checkpoint for node in path if node.end <= limit and node.payload.checkpoint is not None]
        whole = (each for each in found if not windows.lacking(path, each.offset, own.windows))
        return max(whole, key=lambda each: each.offset, default=None)

    def after_forward(
        self, live: LivePath, caches: Sequence[Any], request: PrefixRequest, own: OwnState, wait: bool
    ) -> None:
        """Learn from the buffers that a forward pass may have changed, book them and enforce the budget."""
        if not live.is_open:
            raise SessionClosedError("the cache was closed during the forward pass.")
        self.layout.learn(caches)
        self._pager.fit_capacity(live, len(request.prompt), request.reserve, wait)
        self.measure(live, caches)
        self.thin(own)

    def measure(self, live: LivePath, caches: Sequence[Any]) -> None:
        """Book the bytes of live buffers, and of caches that a session has in their place."""
        ours = {id(cache) for cache in live.caches}
        live.measure([cache for cache in caches if id(cache) not in ours])

    def copy_windows(self, own: OwnState, caches: Sequence[Any], start: int, end: int, *, is_last: bool) -> None:
        """Copy the tokens [start, end), just evaluated, out of sliding windows, if there is room to spare.

        Unless it is the last call for now, few tokens wait for more. Beside recurrent layers nothing is copied:
        requests resume only at checkpoints there, which copy what they need.
        """
        if self.layout.has_states:
            return
        start, windows = start if own.pending is None else own.pending, self.layout.windows
        if not is_last and end - start < min(LEAST_TOKENS, *(window.size - window.keep for window in windows)):
            own.pending = start
            return
        own.pending = None
        need = sum(self.layout.window_bytes(window) for window in windows) * (end - start)
        room = self._evictor.checkpoint_budget_bytes - self._account.checkpoint_bytes
        if need and need <= room and not self.budget.over_bytes(need):
            wanted = self._states.windows.new({window: [(start, end)] for window in windows}, own.windows)
            try:
                found = self.layout.capture(caches, start, end, wanted)
            except NATIVE_ERRORS:
                self.layout.release()  # The copy was optional.
                return
            self._states.copied_window_bytes += found.nbytes
            own.add_windows(found, is_spare=True)

    def take_checkpoint(
        self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int, kind: str
    ) -> None:
        """Take a request's checkpoint where its caches stand; `path`: what the tree has in front of its own state."""
        self.capture(own, path, caches, offset)
        own.add_checkpoint(self._pager.allocating(self.layout.checkpoint, caches, offset, kind))
        self.thin(own)

    def capture(self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int) -> None:
        """Copy what windows need at an offset and neither the path nor the request has yet."""
        found = self._pager.captured(caches, path, offset, own.windows)
        if found is not None:
            own.add_windows(found)

    def thin(self, own: OwnState) -> None:
        """Bring checkpoints under their cap and the cache under its budget, at the cost of a request's own state.

        Own checkpoints that are not worth their bytes go before anything that the tree has stored.
        """
        while self.budget.over_bytes() and own.give_up(only_dear=True):
            pass
        self._evictor.thin_checkpoints()
        fits = self._evictor.make_room()
        while not fits or self._account.checkpoint_bytes > self._evictor.checkpoint_budget_bytes:
            if not own.give_up():
                return
            fits = self.budget.over_bytes() == 0

    def book_second(self, booking: Booking, nbytes: int) -> bool:
        """Book `nbytes` in all for the state of a cold run beside a request; False: no room, and nothing is booked."""
        with self.lock:
            growth = nbytes - booking.second_bytes
            fits = growth <= 0 or self._evictor.find_room(growth)
            booking.book_second(nbytes if fits else 0)
            return fits

    # Storing

    def commit(self, live: LivePath, request: PrefixRequest, keys: Keys, end: int, own: OwnState) -> None:
        """Make the first `end` of these keys, all evaluated, a LIVE path of the tree, with the request's own state."""
        self.leave_beyond(live, end)
        self._pager.record_live(live, keys[:end], request.namespace, own, request.use)
        if self.settings.exact:
            tip = live.tip if live.tip is not None else self._states.tree.root(request.namespace)
            self._tails.add(tip, keys[end:])

    def lose(self, live: LivePath) -> None:
        """Drop the state of a slot whose buffers cannot be trusted; paged copies stay."""
        self._slots.lose(live)

    def end_session(self, live: LivePath, request: PrefixRequest, stored: Keys, used: int, output_tokens: int) -> None:
        """Free a slot; its session left the `stored` keys in the tree, and had found the first `used` of them there."""
        self._release(live)
        # Not earlier: from here on the closing thread may read the buffers, whichever thread that is.
        self.write_store(stored, request, used)
        if live.tip is not None:
            self._states.coalesce_path(live.tip)
        live.measure()
        self.enforce_budget()
        self.write_trace(request, output_tokens)

    def insert(self, request: PrefixRequest, caches: Sequence[Any]) -> int:
        """Store what the tree lacks of foreign caches; returns how many of the tokens it has then.

        Raises:
            SnapshotError, ValueError: the caches do not fit, or the cache is exact; nothing was changed.
        """
        if self.settings.exact:
            raise ValueError(
                "insert() into an exact cache: it is not known whether these caches were prefilled in chunks of "
                f"{self.settings.step_size} tokens from offset 0. Use begin() and session.prefill(), or exact=False."
            )
        keys = self.unquarantined(request.keys, request.namespace)
        if len(keys) < len(request.keys) and self.layout.has_points:
            self.layout.compare(caches)  # Point state cannot be cut back to where the quarantine begins.
            end = len(keys)
        else:
            start = self._said_from(keys, request.namespace)
            end = self._pager.record_foreign(caches, keys, request.namespace, request.use)
            self._say_stored(keys[:end], start, request.namespace)
        self.write_store(request.keys[:end], request, 0)
        self.enforce_budget()
        return self._states.match(request.keys[:end], request.namespace).offset

    def tree_source(self, namespace: str = "") -> TreeSource:
        """What was said before in a namespace, as a source of drafts; takes the lock by itself.

        The first call makes the index, from what the tree holds. From then on it gets what comes beside that: what
        requests say, and what is inserted or read from stores.
        """
        with self.lock:
            if self._suffixes is None:
                self._suffixes = SuffixIndex(self.settings.suffix_index_bytes, vocab_size=self.settings.vocab_size)
                for node in self._states.tree.nodes():
                    keys = node.last_keys(len(node.edge) + TAIL_TOKENS)
                    self._suffixes.add(keys, node.namespace, context=len(keys) - len(node.edge))
        return TreeSource(self._suffixes, namespace, self.lock)

    def has_said_more(self, known: KnownTokens, right_tokens: int | None) -> bool:
        """Whether a request under way should say now what it knows, of which the first `right_tokens` are right."""
        right = known.count if right_tokens is None else min(right_tokens, known.count)
        return right - known.said_tokens >= FED_TOKENS and self._suffixes is not None

    def say(
        self, known: KnownTokens, keys: Keys, matched_tokens: int, namespace: str, *, is_growing: bool = False
    ) -> None:
        """Add the `keys` of a request to the suffix index, if there is one, less those that it had or matched.

        Quarantined ones are left out. While the request grows, one call adds at most `LOOK_TOKENS`.
        """
        if self._suffixes is not None:
            start = max(matched_tokens, known.said_tokens)
            end = min(len(keys), start + LOOK_TOKENS) if is_growing else len(keys)
            self._suffixes.add(self.unquarantined(keys, namespace)[:end], namespace, context=start)
            known.said_tokens = max(known.said_tokens, end)

    def _said_from(self, keys: Keys, namespace: str) -> int:
        """How many of these keys the tree has, if there is a suffix index."""
        return 0 if self._suffixes is None else self._states.match(keys, namespace).offset

    def _say_stored(self, keys: Keys, start: int, namespace: str) -> None:
        """Add to the suffix index what came into the tree behind `start`, unless it was said before."""
        end = self._said_from(keys, namespace)
        if self._suffixes is not None and not self._suffixes.has(keys[max(0, start - TAIL_TOKENS) : end], namespace):
            self._suffixes.add(keys[:end], namespace, context=start)

    def write_store(self, keys: Keys, request: PrefixRequest, used: int) -> None:
        """Write to the store what a request left in the tree; it had found the first `used` of these keys there."""
        if self._tier is not None:
            self._tier.write(keys, request, used)

    def enforce_budget(self, *, thins: bool = True) -> None:
        """Drop what pins no longer hold, and enforce the checkpoint cap (unless told not to) and the budget."""
        self.tidy_unpinned()
        if thins and self._account.checkpoint_bytes:
            self._evictor.thin_checkpoints()
        self._evictor.make_room()

    def tidy_unpinned(self) -> None:
        """End pins whose seconds are over, and join or drop nodes whose pins have ended."""
        self._pins.end_expired()
        for node in self._pins.take_unpinned():
            if node.payload is not None:
                self._evictor.tidy(node)

    def write_trace(self, request: PrefixRequest, output_tokens: int = 0) -> None:
        """Write a request to the trace; a trace that cannot be written warns and never fails a request."""
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
        """Quarantine what begins with `keys` from `start` on, remove it from the tree, empty `live`; returns the start.

            root ── a ── b ── c        the keys end on b, start lies inside it: b is cut there, its lower part and all
                          └── d        below go; pins on them are void; live paths that stand on them step back

        What other prompts share in front of `start` stays. Idle slots that stand on wrong state are emptied too.
        Another open session keeps its caches, ahead of its path from then on; its close stores only what was in front.

        Args:
            start: None: where the keys are quarantined already, after a check of another session on the same path; else
                the start of the node on which they end. In exact mode it moves down to a multiple of step_size.
            is_branch: move `start` to the beginning of the branch on which the keys end.
        """
        states, quarantine = self._states, self._quarantine
        match = states.match(keys, namespace)
        if is_branch and match.offset == len(keys):
            start = _branch(match.node).start
        if start is None:
            start = quarantine.offset(keys, namespace)
        if start is None:
            start = match.node.start if match.offset == len(keys) else 0
        start = floor(start, states.grid_tokens)
        quarantine.add(keys, start, namespace)
        if self._suffixes is not None:
            self._suffixes.clear(namespace)  # What wrong state has said is not told apart: it is rare.
        if self._tier is not None:
            self._tier.remove(keys, start, namespace)
        for group in self.groups():
            group.distrust(keys, start, namespace)
        guarded = [] if live is None or live.guarded is None else [live.guarded]
        if live is not None:
            live.guard(None)
        chain = match.node.path()
        if match.offset == len(keys):
            chain = self._cut_off(match.node, start)
        if live is not None:
            self._empty(live)
        for node in reversed(chain):
            if node.payload is None or node.end <= start or not node.is_leaf:
                break
            if node.payload.live or node.payload.is_kept:
                break
            states.remove(node, was_wrong=True)
        for left in guarded + chain[::-1]:
            if left.payload is not None:
                self._evictor.tidy(left)
        self.enforce_budget()
        return start

    # The cache as a whole

    def counters(self) -> dict[str, Any]:
        account, states, verifier, pinned_bytes = self._account, self._states, self._verifier, self._pins.nbytes
        suffixes = self._suffixes
        return {
            **states.tally.counts(),
            **self._counts,
            "short_reasons": dict(self._short_reasons),
            "evictions": self._evictor.evictions,
            "evicted_bytes": self._evictor.evicted_bytes,
            "copied_bytes": states.copied_bytes,
            "paged_in_bytes": states.paged_in_bytes,
            "paged_out_bytes": states.paged_out_bytes,
            "live_bytes": account.live_bytes,
            "paged_bytes": account.span_bytes + account.checkpoint_bytes,
            "checkpoint_bytes": account.checkpoint_bytes,
            "window_bytes": states.windows.nbytes,
            "duplicate_bytes": states.duplicate_bytes,
            "spare_bytes": self._slots.spare_nbytes(),
            "pinned_bytes": pinned_bytes,
            "nodes": states.tree.node_count,
            "tokens": states.tree.key_count,
            "budget_bytes": self._ledger.budget_bytes,
            "over_budget_bytes": self._ledger.over_bytes(),
            "held_bytes": {
                "sessions": sum(sum(path.booking.amounts) for path in self._slots.paths if path.is_open),
                "rows": sum(sum(booking.amounts) for booking, _ in self._bookings),
                "pins": pinned_bytes,
            },
            "peak_bytes": self._ledger.peak_bytes,
            "verified_requests": verifier.verified,
            "verify_skipped": verifier.skipped,
            "verify_mismatches": verifier.mismatch_count,
            "verify_largest_error": verifier.largest_error,
            "verify_bytes": account.second_bytes,
            "suffix_index_tokens": 0 if suffixes is None else suffixes.tokens,
            "suffix_index_bytes": 0 if suffixes is None else suffixes.nbytes,
            "quarantined": len(self._quarantine),
            "event_failures": states.events.failures,
            "dropped_events": states.events.dropped,
        }

    def slots(self) -> list[tuple[bool, int, int]]:
        """For each live slot whether a session is open on it, its offset in tokens, and its bytes; takes no lock."""
        return [(path.is_open, path.offset, path.booking.live_bytes) for path in self._slots.paths]

    def mismatches(self) -> tuple[Mismatch, ...]:
        return tuple(self._verifier.mismatches)

    def clear(self, namespace: str | None = None) -> None:
        """Drop what no open session uses, and the history of prompts: of all namespaces, or of one."""
        self._pins.clear(namespace)
        self.enforce_budget()
        self._tails.clear(namespace)
        if self._suffixes is not None:
            self._suffixes.clear(namespace)
        with self._states.losing_silently():
            if namespace is None:
                self._evictor.shrink_to(0)
            else:
                self._evictor.drop_namespace(namespace)
        self._states.events.history.clear(namespace)
        self.layout.release()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the store has written everything; False: not within this time. Takes no lock."""
        return self._tier is None or self._tier.store.flush(timeout_s)

    def close(self) -> None:
        """Give back all state, including that of open sessions and groups, and the account. Takes the lock."""
        with self.lock:
            for group in self.groups():
                group.abandon()
            for path in self._slots.paths:
                if path.is_open:
                    self.lose(path)
                    self._release(path)
            if self._tier is not None:
                self._tier.write_all()
            self.clear()
            self._is_closed = True
            self._ledger.close_account(self._account)
            if self._trace is not None and self._owns_trace:
                self._trace.close()

    def check(self) -> None:
        states, account, paths = self._states, self._account, self._slots.paths
        parts = (states, states.events.history, self._ledger, self._slots, self._pins, self._quarantine, self._tails)
        for part in parts if self._suffixes is None else (*parts, self._suffixes):
            part.check()
        assert states.leaving_bytes == 0, states.leaving_bytes
        for node in states.tree.nodes():
            state = node.payload
            assert state.live or state.spans is not None, node
            bare = node.is_leaf and state.checkpoint is None and not state.live and not state.is_kept
            assert not (bare and self.layout.has_points), node
            assert state.checkpoint is None or node.end % states.grid_tokens == 0, node
        bookings = [path.booking for path in paths] + [booking for booking, _ in self._bookings]
        booked = [sum(column) for column in zip(*(each.amounts for each in bookings), strict=True)]
        wanted = [account.live_bytes, account.booked_checkpoint_bytes, account.second_bytes]
        assert booked == wanted, (booked, wanted)
        is_idle = not self._bookings and not any(path.is_open for path in paths)
        if is_idle and not self._pins.nbytes and self._ledger.is_sole(account):
            assert self._ledger.over_bytes() == 0, self._ledger.total_bytes

    def _plan(
        self, match: Match[NodeState], keys: Keys, limit: int, live: LivePath | None, hidden: int | None
    ) -> ResumePlan:
        plan = plan_resume(self.layout, match, limit, live, hidden, grid_tokens=self._states.grid_tokens)
        tail = self._tails.matched(match, keys) if self.settings.exact else 0
        if not tail:
            return plan
        # An earlier request had evaluated more of the prompt, off the grid.
        off_grid = plan.off_grid + min(tail, limit - match.offset)
        reason = plan.reason or (ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN)
        return plan._replace(matched=match.offset + tail, reason=reason, off_grid=off_grid)

    def _release(self, live: LivePath) -> None:
        """Free a slot, and join nodes that were split for its session in vain."""
        node = live.release()
        if node is not None:
            self._evictor.tidy(node)

    def _cut_off(self, node: StateNode, start: int) -> list[StateNode]:
        """Remove a node from `start` on, and all below it; returns the path that is left."""
        if node.start < start:
            try:
                self._states.split(node, start)
            except NATIVE_ERRORS:
                self.layout.release()  # No memory even for the split: all of the node goes.
        rest = [] if node.parent is None else node.parent.path()
        for path in self._slots.remove_branch(node, was_wrong=True):
            if not path.is_open:
                self._evictor.empty_slot(path, self.budget.over_bytes)
        return rest

    def _empty(self, live: LivePath) -> None:
        """Leave the path that a session stands on, keeping what is right of it, and empty its caches in place."""
        nodes = live.nodes()
        try:
            self._pager.retreat(live, 0)
        except NATIVE_ERRORS:
            self.lose(live)
        live.empty()
        self._states.coalesce_all(nodes)


def _branch(node: StateNode) -> StateNode:
    """The topmost node from which the tree runs down to this one without a fork."""
    while node.parent is not None and not node.parent.is_root and len(node.parent.children) == 1:
        node = node.parent
    return node
