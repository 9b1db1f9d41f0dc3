"""Requests: how a PrefixCache opens a request, what the session then asks of it, and how it is closed.

    opening   match -> plan where to resume -> leave the old path (page out) -> make room -> page in -> Session
    closing   settle what was evaluated -> new nodes and checkpoints in the tree, LIVE -> keep the budget

The lock is held wherever nothing else is said. PrefixCache is what users see of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies import CostModel, EvictionPolicy
from radixcache.adapters.snapshots import Checkpoint
from radixcache.budget.ledger import Ledger
from radixcache.layers.layout import Layout
from radixcache.paging.evictor import Evictor
from radixcache.paging.expulsion import Expulsion
from radixcache.paging.grid import Tails, floor
from radixcache.paging.live_path import LivePath
from radixcache.paging.pager import Pager
from radixcache.paging.pins import Pins
from radixcache.paging.recorder import Recorder
from radixcache.paging.resume import ResumePlan, ShortReason, plan_resume
from radixcache.paging.slots import Slots
from radixcache.sessions.session import Session
from radixcache.tokens.ids import TokenIds
from radixcache.tokens.quarantine import Quarantine
from radixcache.tree.events import RESUMED, Events, OnEvent
from radixcache.tree.radix_tree import Keys, Match, below
from radixcache.tree.state_tree import NodeState, StateNode, StateTree, Use, state_of
from radixcache.verify.verifier import Verifier
from radixcache.watch.explain import Foresight
from radixcache.watch.trace import TraceWriter


class Requests:
    """Base of PrefixCache: the parts of one cache, and requests on them. Arguments are checked already."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        policy: EvictionPolicy,
        cost: CostModel,
        *,
        live_slots: int,
        checkpoint_interval: int,
        checkpoint_budget_bytes: int | None,
        trim_tokens: int | None,
        merges: bool,
        exact: bool,
        step_size: int,
        vocab_size: int | None,
        trace: TraceWriter | None,
        clock: Callable[[], int] | None,
        on_event: OnEvent | None,
        verify: float,
        verify_seed: int,
    ) -> None:
        self.layout = layout
        self.lock = ledger.lock
        self.exact, self.step_size = exact, step_size
        self.vocab_size = vocab_size
        self.checkpoint_interval = checkpoint_interval
        self._ledger = ledger
        self._account = ledger.open_account(self._give_back)
        self._states = StateTree(layout, policy, self._account, cost, merges)
        cap = ledger.budget_bytes // 2 if checkpoint_budget_bytes is None else checkpoint_budget_bytes
        self._evictor = Evictor(self._states, cap, trim_tokens)
        self._slots = Slots(layout, self._states, live_slots)
        self._evictor.paths = self._slots.paths
        self._evictor.lose = self._lose
        self._pager = Pager(layout, self._states, self._evictor, self._slots)
        self._recorder = Recorder(layout, self._states, self._evictor, self._pager)
        self._pins = Pins(layout, self._states, self._evictor, ledger.budget_bytes)
        self._events = self._states.events = Events(on_event, self.lock)
        self._quarantine = Quarantine()
        self._expulsion = Expulsion(layout, self._states, self._evictor, self._pager, self._slots, self._pins)
        self._verifier = Verifier(layout, verify, verify_seed, self.lock, self._events)
        self._tails = Tails()
        self._tick = 0
        self._clock = clock
        self._trace = trace
        self._requests = self._hit_tokens = self._miss_tokens = self._off_grid_tokens = 0
        self._short_reasons: dict[str, int] = {}

    # What a session asks of the cache

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
        self._thin(session.checkpoints, session.live.hold_checkpoint)

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
        fits = growth <= 0 or (self._evictor.could_fit(growth) and self._evictor.make_room(growth))
        live.hold_second(nbytes if fits else 0)
        return fits

    def quarantine(self, session: Session, length: int, start: int | None) -> int:
        """Take what begins with `length` tokens of a session's prompt out, from `start` on, and empty its live caches.

        Without a start it is where they are quarantined already, by a check of another session on the same path, or
        else where the node begins on which they end. In exact mode it moves to the multiple of step_size below, since
        nothing resumes behind that. Returns the start.
        """
        keys, live = session.prompt_keys[:length], session.live
        if start is None:
            start = self._quarantine.offset(keys, session.namespace)
        if start is None:
            start = self._expulsion.start_of(keys, session.namespace)
        start = floor(start, self.layout.grid_tokens)
        self._quarantine.add(keys, start, session.namespace)
        live.hold_checkpoint(-live.checkpoint_bytes)
        session.checkpoints.clear()
        self._expulsion.expel(live, keys, start, session.namespace)
        self._keep_budget()
        return start

    def storable_tokens(self, session: Session) -> int:
        """How many of the tokens that a session knows may be stored: all in front of what was found wrong."""
        keys, right = session.known_keys(), session.live.right_tokens
        count = len(keys) if right is None else min(right, len(keys))
        return min(count, self._quarantine.limit(keys, session.namespace))

    def _thin(self, checkpoints: list[Checkpoint], hold: Callable[[int], None]) -> None:
        """A request took a checkpoint: keep cap and budget, at the cost of its interval ones in the end.

        Args:
            checkpoints: all that the request holds.
            hold: books a change of their bytes.
        """
        self._evictor.thin_checkpoints()
        fits = self._evictor.make_room()
        cap = self._evictor.checkpoint_budget_bytes
        while not fits or self._account.checkpoint_bytes > cap:
            victim = _least_covering(checkpoints)
            if victim is None:
                return
            checkpoints.remove(victim)
            hold(-victim.nbytes)
            fits = self._evictor.over_bytes() == 0

    # Opening

    def _open(
        self, prompt: TokenIds, keys: Keys, namespace: str, use: Use, marks: Sequence[int], reserve: int
    ) -> Session:
        allowed = self._allowed(keys, namespace)
        match = self._pager.allocating(lambda: self._cut_match(allowed, namespace))
        path = match.path
        live = self._slots.choose(path, len(prompt) - 1)
        plan = plan_resume(self.layout, match, len(prompt) - 1, live, self._slots.hidden(path, live))
        plan = self._with_tail(plan, match, allowed, len(prompt) - 1)
        live.hold(match.node if path else None)
        live.is_open, live.used, live.right_tokens = True, use.tick, None
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
        for node in match.path if gone else []:
            state = state_of(node)
            if state.spans is None and not state.live_mask & ~gone:
                # `begin` gives up what is only in the buffers of a session that nobody closed.
                match = Match(node.parent or node, node.start)
                break
        path = match.path
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

    # Closing

    def _commit(self, session: Session, end: int) -> None:
        """Make the first `end` tokens of a session, all evaluated and known, a path of the tree."""
        live = session.live
        if end < live.offset:
            self._pager.retreat(live, end)
        keys = session.known_keys()
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

    def _allowed(self, keys: Keys, namespace: str) -> Keys:
        """The keys up to where they are quarantined."""
        return keys[: self._quarantine.limit(keys, namespace)]

    # Counting and recording

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
        if by != "begin":
            self._verifier.pass_over(plan.resume)
        if self._events.is_on:
            nbytes = plan.resume * self.layout.token_bytes
            detail = {"prompt_tokens": len(keys), "matched_tokens": plan.matched, "reason": plan.reason, "by": by}
            self._events.emit(RESUMED, namespace, 0, plan.resume, nbytes, detail)

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


def _least_covering(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The interval checkpoint whose neighbours are closest together; the newest is never chosen."""
    offsets = [0, *(c.offset for c in checkpoints)]
    gaps = [(offsets[i + 2] - offsets[i], i) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval"]
    return checkpoints[min(gaps)[1]] if gaps else None
