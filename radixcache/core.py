"""Core: the parts of one cache, built once and complete, and what every request does with them.

    ledger, account    bytes                     pins        what a user keeps
    states, events     tree, state, what happens slots       the live paths
    evictor            makes room                pager       moves a live path, copies in and out
    recorder           stores                    quarantine  what was found wrong
    verifier           who is checked            tally       what was found, in numbers
    tier               disk, if there is one

It knows no Session, Group or Row: its methods take a Request, a LivePath, checkpoints. The lock is taken wherever
nothing else is said: `with core.lock`.

Invariants, asserted by `check`, besides those of its parts:

  C1  Between public calls every node's spans are LIVE or PAGED, none is LEAVING.
  C2  live + paged bytes <= budget after every public call, if dropping evictable state can achieve it.
  C3  A leaf without a checkpoint is live, kept, or the model has no point layers: nothing else could resume on it.
  C4  The account's live bytes are those of the slots and of the bookings, one per open group, and so are the
      checkpoints that requests have and the tree does not, and the second states.

Tally: how many requests there were, and how much of their prompts was there.

expel: takes state that was found wrong out of the tree, whoever stands on it.

root ── a ── b ── c        the keys end on b, start lies inside it: b is cut there, its lower part and all below
              └── d        go; pins on them are void; live paths that stand on them step back

GuardedPolicy: an eviction policy of somebody else's, whose mistakes do not cut the cache's bookkeeping in two.

The first hook that raises, or the first victim that may not go, is the last that is asked of it. The entries are filed
anew under LRU, the hook counts as done, and whoever called the cache hears of it when that call is over.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from policies import LRU, OFFLINE_POLICIES, POLICIES, CostModel, Entry, EvictionPolicy
from radixcache.errors import PolicyError, SessionClosedError, described
from radixcache.layers.layout import NATIVE_ERRORS, Layout
from radixcache.ledger import Ledger
from radixcache.paging.evictor import Evictor
from radixcache.paging.live_path import LivePath, Slots
from radixcache.paging.own_state import Booking, Owner, OwnState
from radixcache.paging.pager import Pager
from radixcache.paging.pins import Pins
from radixcache.paging.recorder import Recorder
from radixcache.paging.resume import Request, ResumePlan, ShortReason, Tails, floor, plan_resume, stored_from
from radixcache.paging.tier import Disk, Tier
from radixcache.settings import Settings
from radixcache.tokens import Keys, Quarantine
from radixcache.tree.entries import NodeState, StateNode
from radixcache.tree.history import Events
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import StateTree, Use
from radixcache.verify import Verifier


class RequestTally:
    """Counters of one cache; CacheStats says what they mean."""

    def __init__(self) -> None:
        self.requests = self.hit_tokens = self.miss_tokens = self.off_grid_tokens = 0
        self.short_reasons: dict[str, int] = {}

    def count(self, plan: ResumePlan, prompt_tokens: int) -> None:
        """A request was planned."""
        self.requests += 1
        self.hit_tokens += plan.resume
        self.miss_tokens += prompt_tokens - plan.resume
        self.off_grid_tokens += plan.off_grid
        if plan.reason is not None:
            self.short_reasons[plan.reason] = self.short_reasons.get(plan.reason, 0) + 1

    def found_more(self, tokens: int) -> None:
        """Of a prompt that was counted already so many tokens more need not be evaluated."""
        self.hit_tokens += tokens
        self.miss_tokens -= tokens


#: Classes that are tested here, and go unguarded.
OWN: tuple[object, ...] = (*POLICIES.values(), *OFFLINE_POLICIES.values())


class GuardedPolicy:
    """Forwards every hook to a policy until it fails, and to LRU from then on."""

    def __init__(self, policy: EvictionPolicy, on_failure: Callable[[PolicyError], object]) -> None:
        self._policy = policy
        self._on_failure = on_failure
        self._entries: dict[int, Entry] = {}
        self._evictable: set[int] = set()
        self.ranks_whole_edges = getattr(policy, "ranks_whole_edges", True)

    def inserted(self, entry: Entry) -> None:
        self._entries[entry.entry_id] = entry
        self._ask("inserted", entry)

    def touched(self, entry: Entry) -> None:
        self._ask("touched", entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._entries.update({each.entry_id: each for each in (upper, lower)})
        self._ask("split", upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._entries.pop(gone.entry_id, None)
        self._evictable.discard(gone.entry_id)
        self._ask("merged", gone, into)

    def evicted(self, entry: Entry) -> None:
        self._entries.pop(entry.entry_id, None)
        self._evictable.discard(entry.entry_id)
        self._ask("evicted", entry)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        (self._evictable.add if evictable else self._evictable.discard)(entry.entry_id)
        self._ask("evictable_changed", entry, evictable)

    def victim(self) -> Entry | None:
        entry: Any = self._ask("victim")
        if entry is None or (isinstance(entry, Entry) and entry.entry_id in self._evictable):
            return entry
        self._replace("victim", f"gave {entry!r}, which may not go")
        return self._policy.victim()

    def _ask(self, hook: str, *arguments: Any) -> Any:
        try:
            return getattr(self._policy, hook)(*arguments)
        except Exception as error:
            self._replace(hook, f"raised {described(error)}{_line_of(error)}", error)
        return self._policy.victim() if hook == "victim" else None

    def _replace(self, hook: str, what: str, cause: Exception | None = None) -> None:
        failure = PolicyError(type(self._policy).__name__, hook, what)
        failure.__cause__ = cause
        self._policy = LRU()
        self.ranks_whole_edges = True
        for entry in self._entries.values():
            self._policy.inserted(entry)
            self._policy.evictable_changed(entry, entry.entry_id in self._evictable)
        self._on_failure(failure)


def _line_of(error: BaseException) -> str:
    """The line that raised it."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return "" if step is None else f" ({step.tb_frame.f_code.co_filename}:{step.tb_lineno})"


#: Tokens of windows that are copied out at a time at least, where they are not about to be lost.
LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prompt finds.

    Attributes:
        match: what the tree holds of it, as far as it is not quarantined.
        live: the slot it is to go on in; None: in none.
        plan: where it resumes.
    """

    match: Match[NodeState]
    live: LivePath | None
    plan: ResumePlan


@dataclass(frozen=True, slots=True)
class Foresight:
    """What `begin` would find, and how far it would get if all buffers could be read.

    Attributes:
        windows: for each window how many layers have it, and from which token on it is stored up to where it resumes.
    """

    match: Match[NodeState]
    plan: ResumePlan
    readable: ResumePlan
    windows: tuple[tuple[int, int], ...]


#: Chooses a slot for a path, of which so many tokens count.
Choose = Callable[[list[StateNode], int], LivePath]


class Core:
    """One cache. Arguments are checked already; `trace` is a TraceWriter, closed with it if it is its own, or None."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        policy: EvictionPolicy,
        cost: CostModel,
        settings: Settings,
        trace: Any = None,
        *,
        owns_trace: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self.layout = layout
        self.settings = settings
        self._trace, self._owns_trace = trace, owns_trace
        self.ledger = ledger
        self.lock = ledger.lock
        self.account = ledger.open_account(self._give_back)
        self.events = Events(settings.on_event, self.lock)
        self.states = StateTree(
            layout,
            self._guarded(policy),
            self.account,
            cost,
            self.events,
            grid_tokens=settings.grid_tokens,
            merges=settings.merges,
        )
        self.pins = Pins(layout, self.states, ledger.budget_bytes)
        self.slots = Slots(layout, self.states, self.pins, settings.live_slots)
        cap = settings.checkpoint_budget_bytes or ledger.budget_bytes // 2
        self.evictor = Evictor(self.states, self.slots, cap, settings.trim_step_tokens)
        self.pager = Pager(layout, self.states, self.evictor, self.slots)
        self.recorder = Recorder(layout, self.states, self.evictor, self.pager)
        self.quarantine = Quarantine()
        self.verifier = Verifier(settings.verify, settings.verify_seed, self.lock, self.events)
        self.tails = Tails()
        self.tally = RequestTally()
        #: What joins it to a store; None: there is none.
        self.tier: Tier | None = None
        if disk is not None:
            self.tier = Tier(disk, layout, self.states, self.evictor, self.slots, self.recorder)
        #: What open groups have on the account, each with its group.
        self.bookings: list[tuple[Booking, weakref.ref[Owner]]] = []
        self._tick = 0

    # A request comes

    def next_use(self, priority: int = 0, turn: int | None = None, kind: str = "") -> Use:
        """Who uses state with the request that is coming; its tick is later than the one before."""
        clock = self.settings.clock
        self._tick = max(self._tick + 1, 0 if clock is None else clock())
        self.events.tick = self._tick
        return Use(self._tick, priority, turn, kind)

    def take_back(self) -> None:
        """Take back what sessions and groups have that vanished without closing, their finalizers interrupted."""
        for path in self.slots.vanished():
            self.slots.lose(path)
            self.release(path)
        for booking in [booking for booking, group in self.bookings if group() is None]:
            self.end_booking(booking)

    def end_booking(self, booking: Booking) -> None:
        """A group is over."""
        booking.end()
        self.bookings = [each for each in self.bookings if each[0] is not booking]

    def bring(self, request: Request) -> AbstractContextManager[None]:
        """Have the store add to the tree what it has of a prompt, before it is looked up.

        In what is returned that is copied into live caches: reading takes so long too.
        """
        tier = self.tier
        if tier is None:
            return nullcontext()
        keys = self.allowed(request.keys, request.namespace)[: request.limit]
        is_brought = tier.bring(keys, request.namespace, request.use)
        return tier.rates.timing_move() if is_brought else nullcontext()

    def keep(self, keys: Keys, request: Request, used: int) -> None:
        """A request left these keys in the tree, and had found the first `used` there: have the store keep them."""
        if self.tier is not None:
            self.tier.closed(keys, request, used)

    def allowed(self, keys: Keys, namespace: str) -> Keys:
        """The keys up to where they are quarantined."""
        return keys[: self.quarantine.limit(keys, namespace)]

    def lookup(
        self,
        keys: Keys,
        namespace: str,
        limit: int,
        choose: Choose | None = None,
        *,
        behind: int = 0,
        evaluate: bool = True,
    ) -> Lookup:
        """Find what the tree has of a prompt, and plan where a request resumes.

        Args:
            limit: the most tokens that may be restored.
            choose: the slot to go on in. The match is cut then from what lies behind it: that is not this request's,
                neither touched nor guarded with it. None: in no slot; nothing is changed.
            behind: what ends at or before this offset need not be read.
            evaluate: find out whether what is pending in buffers that are to be read succeeds.
        """
        allowed = self.allowed(keys, namespace)

        def matched() -> Match[NodeState]:
            match = self.states.match(allowed, namespace)
            if choose is None or match.offset in (0, match.node.end):
                return match
            return Match(self.states.split(match.node, match.offset), match.offset)

        # Matched anew where there is no room to cut at first: what is evicted for that may be on the path.
        match = self.pager.allocating(matched)
        path = match.path
        live = None if choose is None else choose(path, limit)
        needed = [node for node in path if node.end > behind] if behind else path
        hidden = self.slots.hidden(needed, live, evaluate=evaluate)
        return Lookup(match, live, self._plan(match, allowed, limit, live, hidden))

    def foresee(self, keys: Keys, limit: int, namespace: str) -> Foresight:
        """What a session would find, or `fetch` while no slot is free; changes nothing and evaluates nothing.

        Args:
            keys: of the prompt, up to where it is quarantined.
        """
        match = self.states.match(keys, namespace)
        gone = sum(1 << path.slot for path in self.slots.vanished())
        for node in match.path if gone else []:
            if node.payload.spans is None and not node.payload.live_mask & ~gone:
                # The next request gives up what is only in the buffers of a session that nobody closed.
                match = Match(node.parent or node, node.start)
                break
        is_free = not all(path.is_open for path in self.slots.paths)
        live = self.slots.choose(match.path, min(match.offset, limit)) if is_free else None
        hidden = self.slots.hidden(match.path, live, evaluate=False)
        plan = self._plan(match, keys, limit, live, hidden)
        readable = plan if hidden is None else self._plan(match, keys, limit, live, None)
        windows = self.layout.windows if plan.resume else ()
        stored = [(self.layout.layers_of(each), stored_from(self.layout, plan, each)) for each in windows]
        return Foresight(match, plan, readable, tuple(stored))

    def is_resumable(self, keys: Keys, namespace: str) -> bool:
        """Whether a request that goes on from these keys would resume at their end; it counts as a use if so.

        In exact mode their end is that of their last whole chunk.
        """
        match = self.states.match(self.allowed(keys, namespace), namespace)
        plan = plan_resume(self.layout, match, len(keys), None, grid_tokens=self.states.grid_tokens)
        if plan.resume < floor(len(keys), self.states.grid_tokens):
            return False
        self.states.touch(plan.path, plan.source, self.next_use())
        return True

    def counted(self, request: Request, plan: ResumePlan, by: str) -> None:
        """A request was restored: count it, and tell whoever listens."""
        self.tally.count(plan, len(request.prompt))
        self.pins.request_passed()
        if by != "begin":
            self.verifier.pass_over(plan.resume)
        detail = {"matched_tokens": plan.matched, "reason": plan.reason, "by": by}
        nbytes = plan.resume * self.layout.token_bytes
        self.events.asked(request.keys, request.namespace, plan.resume, nbytes, detail)

    # A request is served

    def fall_back(self, live: LivePath, own: OwnState, limit: int) -> int:
        """Return live caches to the deepest checkpoint at or below `limit`, the request's own or the tree's."""
        path = live.nodes()
        found = [each for each in own.checkpoints if each.offset <= limit]
        found += [node.payload.checkpoint for node in path if node.end <= limit and node.payload.checkpoint is not None]
        whole = (each for each in found if not self.states.windows.lacking(path, each.offset, own.windows))
        checkpoint = max(whole, key=lambda each: each.offset, default=None)
        target = 0 if checkpoint is None else checkpoint.offset
        if target < live.offset:
            self.pager.retreat(live, target)
        self.layout.rewind_spans(live.caches, target)
        live.restore_points(checkpoint, target, [*self.states.windows.stored(live.nodes()), *own.windows])
        own.cut(0, target)
        live.measure()
        self.keep_budget()
        return target

    def measured(self, live: LivePath, caches: Sequence[Any], request: Request, own: OwnState, wait: bool) -> None:
        """A forward pass may have changed the live buffers: learn from them, book them, keep the budget."""
        if not live.is_open:
            raise SessionClosedError("the cache was closed during the forward pass.")
        self.layout.learn(caches)
        ours = {id(cache) for cache in live.caches}
        replaced = [cache for cache in caches if id(cache) not in ours]
        self.pager.fit_capacity(live, len(request.prompt), request.reserve, wait)
        live.measure(replaced)
        self.thin(own)

    def keep_windows(self, own: OwnState, caches: Sequence[Any], start: int, end: int, *, is_last: bool) -> None:
        """Keep what windows have of the tokens [start, end) that were just evaluated, if there is room to spare.

        A few of them wait for others, so that not each token is a copy of its own, while the windows still have them.
        Beside recurrent layers nothing resumes but at checkpoints, which keep what they need themselves.

        Args:
            is_last: nothing follows soon that they could wait for.
        """
        if self.layout.has_states:
            return
        start, windows = start if own.pending is None else own.pending, self.layout.windows
        if not is_last and end - start < min(LEAST_TOKENS, *(window.size - window.keep for window in windows)):
            own.pending = start
            return
        own.pending = None
        need = sum(self.layout.window_bytes(window) for window in windows) * (end - start)
        room = self.evictor.checkpoint_budget_bytes - self.account.checkpoint_bytes
        if need and need <= room and not self.evictor.over_bytes(need):
            wanted = self.states.windows.new({window: [(start, end)] for window in windows}, own.windows)
            try:
                found = self.layout.capture(caches, start, end, wanted)
            except NATIVE_ERRORS:
                self.layout.release()  # it was only to spare
                return
            self.states.copied_window_bytes += found.nbytes
            own.add_windows(found, is_spare=True)

    def take_checkpoint(
        self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int, kind: str
    ) -> None:
        """Take a request's checkpoint where its caches stand; of windows only what is nowhere yet is copied.

        Args:
            path: of the tree, up to where the request's own state begins.
        """
        self.capture(own, path, caches, offset)
        own.add_checkpoint(self.pager.allocating(lambda: self.layout.checkpoint(caches, offset, kind)))
        self.thin(own)

    def capture(self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int) -> None:
        """Copy what windows need at an offset, and is neither on the path nor the request's own yet."""
        found = self.pager.captured(caches, path, offset, own.windows)
        if found is not None:
            own.add_windows(found)

    def thin(self, own: OwnState) -> None:
        """A request has grown, or took a checkpoint: for cap and budget what nothing needs goes, and its interval ones.

        Those that take more than they are worth go before anything that others have stored.
        """
        while self.evictor.over_bytes() and own.give_up(only_dear=True):
            pass
        self.evictor.thin_checkpoints()
        fits = self.evictor.make_room()
        while not fits or self.account.checkpoint_bytes > self.evictor.checkpoint_budget_bytes:
            if not own.give_up():
                return
            fits = self.evictor.over_bytes() == 0

    def book_second(self, live: LivePath, nbytes: int) -> bool:
        """Book the state of a cold run beside a session, in all; False: it does not fit, and nothing is booked."""
        growth = nbytes - live.booking.second_bytes
        fits = growth <= 0 or self.evictor.find_room(growth)
        live.booking.book_second(nbytes if fits else 0)
        return fits

    # A request is over

    def commit(self, live: LivePath, request: Request, keys: Keys, end: int, own: OwnState) -> None:
        """Make the first `end` of these keys, all evaluated, a path of the tree, LIVE, with what the request kept."""
        if end < live.offset:
            self.pager.retreat(live, end)
        self.recorder.record_live(live, keys[:end], request.namespace, own, request.use)
        if self.settings.exact:
            tip = live.tip if live.tip is not None else self.states.tree.root(request.namespace)
            self.tails.add(tip, keys[end:])

    def release(self, live: LivePath) -> None:
        """Free a slot, and join what was cut for its session in vain."""
        node = live.release()
        if node is not None:
            self.evictor.tidy(node)

    def keep_budget(self) -> None:
        """Keep the caps, and give up what nothing keeps any more."""
        self.tidy_unpinned()
        self.evictor.thin_checkpoints()
        self.evictor.make_room()

    def tidy_unpinned(self) -> None:
        """Join, or give up, what pins have kept till now."""
        for node in self.pins.take_unpinned():
            if node.payload is not None:
                self.evictor.tidy(node)

    def write_trace(self, request: Request, output_tokens: int = 0) -> None:
        """Write a request to the trace; a trace that cannot be written is no reason not to serve."""
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

    def clear(self) -> None:
        """Drop everything that no open session stands on, and what is remembered of prompts."""
        self.pins.clear()
        self.keep_budget()
        self.tails.clear()
        with self.states.losing_silently():
            self.evictor.shrink_to(0)
        self.events.history.clear()
        self.layout.release()

    def close(self) -> None:
        """Give all state back, that of open sessions and groups too, which lose it, and the account."""
        with self.lock:
            for _, group in list(self.bookings):
                owner = group()
                if owner is not None:
                    owner.abandon()
            for path in self.slots.paths:
                if path.is_open:
                    self.slots.lose(path)
                    self.release(path)
            if self.tier is not None:
                self.tier.keep_all()
            self.clear()
            self.ledger.close_account(self.account)
            if self._trace is not None and self._owns_trace:
                self._trace.close()

    def check(self) -> None:
        """Assert C1 to C4 and the invariants of all parts."""
        states, account = self.states, self.account
        for part in (states, self.events.history, self.ledger, self.slots, self.pins, self.quarantine, self.tails):
            part.check()
        assert states.leaving_bytes == 0, states.leaving_bytes
        for node in states.tree.nodes():
            state = node.payload
            assert state.live or state.spans is not None, node
            bare = node.is_leaf and state.checkpoint is None and not state.live and not state.is_kept
            assert not (bare and self.layout.has_points), node
            assert state.checkpoint is None or node.end % states.grid_tokens == 0, node
        bookings = [path.booking for path in self.slots.paths] + [booking for booking, _ in self.bookings]
        booked = [sum(column) for column in zip(*(each.amounts for each in bookings), strict=True)]
        wanted = [account.live_bytes, states.booked_checkpoint_bytes, account.second_bytes]
        assert booked == wanted, (booked, wanted)
        idle = not self.bookings and not any(path.is_open for path in self.slots.paths)
        if idle and not self.pins.nbytes and self.ledger.is_sole(account):
            assert self.ledger.over_bytes() == 0, self.ledger.total_bytes

    # Private

    def _plan(
        self, match: Match[NodeState], keys: Keys, limit: int, live: LivePath | None, hidden: int | None
    ) -> ResumePlan:
        plan = plan_resume(self.layout, match, limit, live, hidden, grid_tokens=self.states.grid_tokens)
        tail = self.tails.matched(match, keys) if self.settings.exact else 0
        if not tail:
            return plan
        # An earlier request had evaluated more of it, off the grid.
        off_grid = plan.off_grid + min(tail, limit - match.offset)
        reason = plan.reason or (ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN)
        return replace(plan, matched=match.offset + tail, reason=reason, off_grid=off_grid)

    def _guarded(self, policy: EvictionPolicy) -> EvictionPolicy:
        """A policy of the user's, whose errors come out of the call that met them, once the lock is free."""
        if any(type(policy) is each for each in OWN):
            return policy

        def on_failure(error: PolicyError) -> None:
            def fail() -> None:
                raise error

            self.lock.afterwards.append(fail)

        return GuardedPolicy(policy, on_failure)

    def _give_back(self, amount_bytes: int) -> int:
        """Another cache on the ledger wants bytes."""
        return self.evictor.shrink_to(max(0, self.account.total_bytes - amount_bytes))


def expel(core: Core, live: LivePath, keys: Keys, start: int | None, namespace: str, *, is_branch: bool = False) -> int:
    """Quarantine what begins with `keys` from offset `start` on, take it out of the tree, and empty `live`.

    What other prompts share with it stays. An idle slot that had any of it is emptied as well. Another open
    session keeps its caches, ahead of its path from then on; at its close only what was in front is stored.

    Args:
        start: None: where they are quarantined already, by a check of another session on the same path, or else
            where the node begins on which they end. In exact mode it moves to the multiple of step_size below.

        is_branch: it moves to where the branch begins of which the keys are a part.

    Returns:
        The start.
    """
    match = core.states.match(keys, namespace)
    if is_branch and match.offset == len(keys):
        start = _branch(match.node).start
    if start is None:
        start = core.quarantine.offset(keys, namespace)
    if start is None:
        start = match.node.start if match.offset == len(keys) else 0
    start = floor(start, core.states.grid_tokens)
    core.quarantine.add(keys, start, namespace)
    if core.tier is not None:
        core.tier.distrust(keys, start, namespace)
    for _, reference in core.bookings:
        owner = reference()
        if owner is not None:
            owner.distrust(keys, start, namespace)
    guarded = [] if live.guarded is None else [live.guarded]
    live.guard(None)
    chain = match.node.path()
    if match.offset == len(keys):
        chain = _cut_off(core, match.node, start)
    _empty(core, live)
    for node in reversed(chain):
        if node.payload is None or node.end <= start or not node.is_leaf:
            break
        if node.payload.live or node.payload.is_kept:
            break
        core.states.remove(node, was_wrong=True)
    for left in guarded + chain[::-1]:
        if left.payload is not None:
            core.evictor.tidy(left)
    core.keep_budget()
    return start


def _branch(node: StateNode) -> StateNode:
    """The first of the nodes up to this one behind which the tree does not fork."""
    while node.parent is not None and not node.parent.is_root and len(node.parent.children) == 1:
        node = node.parent
    return node


def _cut_off(core: Core, node: StateNode, start: int) -> list[StateNode]:
    """Remove a node from `start` on, and all below it; returns the path that is left."""
    if node.start < start:
        try:
            core.states.split(node, start)
        except NATIVE_ERRORS:
            core.layout.release()  # there is not even room to cut it: all of it goes
    rest = [] if node.parent is None else node.parent.path()
    for path in core.slots.remove_branch(node, was_wrong=True):
        if not path.is_open:
            core.evictor.empty_slot(path, core.evictor.over_bytes)
    return rest


def _empty(core: Core, live: LivePath) -> None:
    """Leave the path that a session stands on, keeping what is right of it, and empty its caches in place."""
    nodes = live.nodes()
    try:
        core.pager.retreat(live, 0)
    except NATIVE_ERRORS:
        core.slots.lose(live)
    live.empty()
    core.states.coalesce_all(nodes)
