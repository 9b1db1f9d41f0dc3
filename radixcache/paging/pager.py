"""Pager: moves a live path to another place in the tree, and stores evaluated sequences in the tree.

    leave      nodes after the common prefix stop being live; those that exist nowhere else are LEAVING
    room       evict until page-outs and larger buffers fit; a node that is evicted while LEAVING is never copied
    page out   copy the remaining LEAVING nodes out of the buffers
    rewind     move span layers back; point layers move back too, or are restored later from a checkpoint
    page in    copy the spans of the new path into the buffers, after the common prefix

Spans come from a node's snapshot, or piece by piece from the buffers of another slot in which the node is live.

A session's tokens become LIVE without a copy. From foreign caches, only what the tree lacks is copied. Groups copy the
tails of their rows themselves and call `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from radixcache.adapters.contract import Checkpoint, Range, Spans, Window, common, missing, tokens_in, union
from radixcache.errors import SessionClosedError, SnapshotError
from radixcache.layers.layout import NATIVE_ERRORS, LiveStateError
from radixcache.layers.sizes import AnyLayout
from radixcache.ledger import Booking
from radixcache.paging.budget import ByteBudget, Evictor
from radixcache.paging.resume import LivePath, PrefixRequest, ResumePlan, Slots, deepest_whole
from radixcache.tokens import Keys
from radixcache.tree.state_tree import StateNode, StateTree, Use, is_costly

A = ParamSpec("A")
R = TypeVar("R")

#: Copy at least this many window tokens at a time, unless they are about to be overwritten.
LEAST_TOKENS = 64
#: Tokens per copy from the buffers of one slot to the buffers of another slot.
CUT_TOKENS = 2048


class Pager:
    """Page-in and page-out for one cache."""

    def __init__(self, layout: AnyLayout, states: StateTree, evictor: Evictor, slots: Slots) -> None:
        self._layout, self._states, self._slots = layout, states, slots
        self._evictor, self._budget = evictor, evictor.budget

    def move(self, live: LivePath, plan: ResumePlan, capacity_tokens: int, prompt_tokens: int) -> None:
        """Move the live caches to `plan.resume` on the plan's path; reserve `capacity_tokens` if they fit."""
        layout, before, shared = self._layout, live.offset, min(plan.common, plan.resume)
        path = self.path_to(plan)
        incoming = [node for node in path if node.end > shared]
        has_changed = before != shared or len(incoming) > 0
        self._evictor.spared = incoming
        try:
            capacity = 0 if layout.is_empty(live.caches) else layout.span_capacity(live.caches)
            leaving = live.leave(shared)
            capacity_tokens = self._affordable(capacity, incoming, capacity_tokens, prompt_tokens)
            for node in leaving:
                self.allocating(live.page_out, node)
            if plan.is_live or not layout.has_points:
                layout.rewind(live.caches, before, shared)
            else:
                layout.rewind_spans(live.caches, shared)
            like = None
            if incoming and layout.token_bytes:
                like = self.allocating(self.spans_at, incoming[0], shared, shared + 1)
            # Buffers that are too large shrink only if the budget is exceeded.
            if (capacity or like is not None) and (capacity < capacity_tokens or self._budget.over_bytes()):
                self.allocating(layout.reserve, live.caches, capacity_tokens, like)
                has_changed = True
                if incoming:
                    live.measure()
            for node in incoming:
                self._page_in(live, node, is_last=node is incoming[-1])
        finally:
            self._evictor.spared = ()
        if layout.has_points and not plan.is_live:
            self.allocating(layout.restore_points, live.caches, plan.checkpoint, plan.resume, plan.windows)
            has_changed = True
        if has_changed:
            live.measure()

    def page_out_live(self, node: StateNode) -> None:
        """Page out a node that only live buffers hold. If no session uses these buffers, empty their whole slot."""
        source = self._slots.source(node)
        # Emptying a slot does not page out a node that another slot holds too, so copy such a node here.
        if source.is_open or node.payload.live_mask != 1 << source.slot:
            copied = self.allocating(self._layout.page_out, source.caches, node.start, node.end)
            self._states.set_spans(node, copied)
        else:
            self._evictor.empty_slot(source, self._budget.over_bytes)

    def retreat(self, live: LivePath, end: int) -> None:
        """Leave the live nodes after `end`: make room, and page out the nodes that exist nowhere else."""
        if end >= live.offset:
            return
        leaving = live.leave(end)
        self._evictor.make_room()
        for node in leaving:
            self.allocating(live.page_out, node)

    def fresh_at(self, nodes: list[StateNode], plan: ResumePlan) -> list[Any]:
        """Fresh caches at `plan.resume`, from the state of `nodes`."""
        caches = self._layout.fresh()
        if nodes and self._layout.token_bytes:
            self._layout.reserve(caches, plan.resume + 256, self.spans_at(nodes[0], 0, 1))
        for node in nodes:
            self._write(caches, node, min(node.end, plan.resume))
        if plan.resume and self._layout.has_points:
            self._layout.restore_points(caches, plan.checkpoint, plan.resume, plan.windows)
        return caches

    def grow(self, live: LivePath, need_tokens: int) -> None:
        """Grow buffers beyond `need_tokens`: by half if that evicts nothing, else by 256 tokens. Evaluate nothing.

        RequestTooLargeError: there is no memory for so many tokens.
        """
        self._budget.fits(self._layout.request_bytes(need_tokens), live.booking.live_bytes, "request").require()
        capacity = self._layout.span_capacity(live.caches)
        wanted = self._generous(capacity, need_tokens + 256)
        self._evictor.make_room((wanted - capacity) * self._layout.token_bytes)
        self._layout.reserve(live.caches, wanted, wait=False)
        live.measure()

    def after_forward(
        self, live: LivePath, caches: Sequence[Any], request: PrefixRequest, own: OwnState, wait: bool
    ) -> None:
        """After a forward pass: learn the sizes of the buffers, book their bytes and enforce the budget."""
        if not live.is_open:
            raise SessionClosedError("the cache was closed during the forward pass.")
        self._layout.learn(caches)
        self._fit_capacity(live, len(request.prompt), request.reserve, wait)
        live.measure(caches)
        self.thin(own)

    def _fit_capacity(self, live: LivePath, prompt_tokens: int, reserve_tokens: int, wait: bool) -> None:
        """After a forward pass: grow the buffers if prompt and reply do not fit."""
        live.measure()
        capacity = self._layout.span_capacity(live.caches)
        wanted = prompt_tokens + reserve_tokens
        if capacity >= wanted:
            return
        wanted = self._generous(capacity, wanted)
        if not self._evictor.make_room((wanted - capacity) * self._layout.token_bytes):
            wanted = max(prompt_tokens + 1, capacity)
        if wait:
            self.allocating(self._layout.reserve, live.caches, wanted)
        else:
            self._layout.reserve(live.caches, wanted, wait=False)
        live.measure()

    def allocating(self, make: Callable[A, R], *args: A.args, **options: A.kwargs) -> R:
        """Call `make`. If its allocation fails, evict half of what the cache holds and call `make` once more."""
        try:
            return make(*args, **options)
        except NATIVE_ERRORS:
            self._evictor.halve()
            self._layout.release()
            return make(*args, **options)

    # Going back

    def fall_back(self, live: LivePath, own: OwnState, limit: int) -> int:
        """Move live caches back to the deepest checkpoint up to `limit`, from the request or the tree."""
        target, checkpoint = self.reach(live.nodes(), own, limit, None)
        self.go_back(live, own, target, checkpoint)
        return target

    def reach(
        self, path: Sequence[StateNode], own: OwnState, limit: int, held: Mapping[Window, Sequence[Range]] | None
    ) -> tuple[int, Checkpoint | None]:
        """The deepest offset up to `limit` for which all state of point layers exists, and the checkpoint there.

        `held`: the tokens in the request's live windows; None: they may be wrong, so trust only a checkpoint.
        """
        layout, windows, grid_tokens = self._layout, self._states.windows, self._states.grid_tokens
        if held is not None and not layout.has_states:
            stored = [*windows.stored(path), *own.windows]
            return deepest_whole(layout, stored, limit, held, grid=grid_tokens), None
        found = [*own.checkpoints, *(node.payload.checkpoint for node in path if node.payload.checkpoint is not None)]
        near = (each for each in found if each.offset <= limit)
        whole = (each for each in near if not windows.lacking(path, each.offset, own.windows))
        checkpoint = max(whole, key=lambda each: each.offset, default=None)
        return (0 if checkpoint is None else checkpoint.offset), checkpoint

    def go_back(self, live: LivePath, own: OwnState, target: int, checkpoint: Checkpoint | None) -> None:
        """Move live caches back to `target`; the checkpoint, the tree or `own` has the state of point layers for it.

        Without a checkpoint, windows also take tokens from the live caches.
        """
        # Keep a reference to the windows: making room drops windows that no checkpoint in the tree needs.
        stored = [*self._states.windows.stored(live.nodes()), *own.windows]
        if checkpoint is None and target:
            held = self.capture_lacking(live.caches, live.nodes(), target, own.windows)
            stored += [] if held is None else [held]
        self.retreat(live, target)
        self._layout.rewind_spans(live.caches, target)
        self._layout.restore_points(live.caches, checkpoint, target, stored)
        own.cut(0, target)
        live.measure()
        self._evictor.enforce_budget()

    def empty(self, live: LivePath) -> None:
        """Leave a session's path, keep its correct nodes in the tree, and empty the session's caches in place."""
        nodes = live.nodes()
        try:
            self.retreat(live, 0)
        except NATIVE_ERRORS:
            self._slots.lose(live)
        live.empty()
        self._states.coalesce_all(nodes)

    def cut_off(self, node: StateNode, start: int) -> list[StateNode]:
        """Remove wrong state: the node from `start` on, and all nodes below. Return the path that is left."""
        if node.start < start:
            try:
                self._states.split(node, start)
            except NATIVE_ERRORS:
                self._layout.release()  # There is no memory even for the split, so remove the whole node.
        rest = [] if node.parent is None else node.parent.path()
        for path in self._slots.remove_branch(node, was_wrong=True):
            if not path.is_open:
                self._evictor.empty_slot(path, self._budget.over_bytes)
        return rest

    # Checkpoints and window tokens of a request

    def copy_windows(self, own: OwnState, caches: Sequence[Any], start: int, end: int, *, is_last: bool) -> None:
        """Copy the tokens [start, end), just evaluated, out of sliding windows, if the budget has room.

        A short run waits for more tokens, except with `is_last`. With recurrent layers nothing is copied: requests
        resume only at checkpoints, and these copy the window tokens that they need.
        """
        if self._layout.has_states:
            return
        start, windows = start if own.pending is None else own.pending, self._layout.windows
        if not is_last and end - start < min(LEAST_TOKENS, *(window.size - window.keep for window in windows)):
            own.pending = start
            return
        own.pending = None
        wanted = self._states.windows.new({window: [(start, end)] for window in windows}, own.windows)
        if (found := _capture_spare(self, caches, wanted)) is not None:
            own.add_windows(found, is_spare=True)

    def take_checkpoint(
        self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int, kind: str
    ) -> None:
        """Take a checkpoint where a request's caches stand. `path`: the nodes of the tree before its own state."""
        self.capture(own, path, caches, offset)
        own.add_checkpoint(self.allocating(self._layout.checkpoint, caches, offset, kind))
        self.thin(own)

    def capture(self, own: OwnState, path: Sequence[StateNode], caches: Sequence[Any], offset: int) -> None:
        """Copy the window tokens for `offset` that neither the path nor the request has yet."""
        found = self.capture_lacking(caches, path, offset, own.windows)
        if found is not None:
            own.add_windows(found)

    def thin(self, own: OwnState) -> None:
        """Bring checkpoints under their cap and the cache under its budget; drop the request's own state if needed.

        Own checkpoints that are not worth their bytes go before anything in the tree.
        """
        while self._budget.over_bytes() and own.give_up(only_costly=True):
            pass
        self._evictor.thin_checkpoints()
        fits = self._evictor.make_room()
        while not fits or self._states.account.checkpoint_bytes > self._evictor.checkpoint_budget_bytes:
            if not own.give_up():
                return
            fits = self._budget.over_bytes() == 0

    def checkpoint_live(self, live: LivePath, use: Use, kind: str = "end") -> None:
        """Take a checkpoint at the live offset if there is none. Call this before the caches move on."""
        tip = live.tip
        if tip is not None and self._layout.has_points and tip.payload.checkpoint is None:
            self.add_checkpoint(tip, live.caches, kind, use)

    def add_checkpoint(self, node: StateNode, caches: Sequence[Any], kind: str, use: Use) -> None:
        """Take a node's checkpoint from caches that stand at its end. Copy only window tokens that its path lacks."""
        windows = self.capture_lacking(caches, node.path(), node.end)
        checkpoint = self.allocating(self._layout.checkpoint, caches, node.end, kind)
        # Evict nothing from here on: window tokens that no checkpoint needs yet would go first.
        if windows is not None:
            self._states.windows.store(node, windows)
        if not self._states.windows.lacking(node.path(), node.end):  # Else the caches have lost some tokens.
            self._states.set_checkpoint(node, checkpoint, use)

    def capture_lacking(
        self, caches: Sequence[Any], path: Sequence[StateNode], offset: int, more: Sequence[Spans] = ()
    ) -> Spans | None:
        """Copy the window tokens for `offset` that neither `path` nor `more` has; None: none is missing."""
        lacking = self._states.windows.lacking(path, offset, more)
        if not lacking:
            return None
        start = min(low for ranges in lacking.values() for low, _ in ranges)
        windows = self.allocating(self._layout.capture, caches, start, offset, lacking)
        self._states.copied_window_bytes += windows.nbytes
        return windows

    # Storing

    def record_live(self, live: LivePath, keys: Keys, namespace: str, own: OwnState, use: Use) -> None:
        """Store `keys`, which the live caches hold, as a LIVE path of the tree, with the request's own state."""
        if len(keys) == 0:
            return
        tip = self._path_for(keys, namespace, use, live)
        live.advance(tip)
        self._layout.learn(live.caches)
        if self._layout.has_points:
            self._add(tip, own.windows, own.checkpoints, use)
            self.checkpoint_live(live, use)

    def record_foreign(self, caches: Sequence[Any], keys: Keys, namespace: str, use: Use) -> int:
        """Copy from foreign caches what the tree lacks. Return how many of the keys the tree holds afterwards.

        Raises:
            SnapshotError: the caches do not fit the tree or the keys; nothing was changed.
        """
        self._layout.compare(caches)
        self._layout.evaluate(caches)
        end = self._storable_end(caches, len(keys))
        if end == 0:
            return 0
        self._layout.learn(caches)
        match = self._states.match(keys[:end], namespace)
        try:
            with self._states.guarding(match.node):
                start, token_bytes = match.offset, self._layout.stored_token_bytes
                need = (end - start) * token_bytes
                if not self._evictor.make_room(need) and not self._layout.has_points:
                    # Span layers alone: store as much as fits.
                    end = max(start, end - -(-self._budget.over_bytes(need) // token_bytes))
                points = caches if self._layout.has_points else None
                spans = self.allocating(self._layout.page_out, caches, start, end) if end > start else None
                windows = _foreign_windows(self, caches, end, match.path)
                self.put(keys[:end], namespace, spans, points, use, windows)
        finally:
            self._evictor.tidy(match.node)
        return end

    def put(
        self,
        keys: Keys,
        namespace: str,
        spans: Spans | None,
        points: Sequence[Any] | None,
        use: Use,
        windows: Sequence[Spans] = (),
        checkpoints: Sequence[Checkpoint] = (),
    ) -> None:
        """Store state on the path of `keys`, whose end may be new.

        Args:
            spans: the spans of all tokens that the tree lacks; None: it lacks none.
            points: caches that stand at the end of `keys`, for a checkpoint there; None: take no checkpoint.
        """
        if len(keys) == 0:
            return
        held = self._states.match(keys, namespace).offset
        node = self._path_for(keys, namespace, use)
        if spans is not None:
            self._states.set_spans(node, spans)
            self._states.paged_out_bytes += spans.nbytes
        with self._states.guarding(node):
            self._add(node, windows, checkpoints, use)
            if points is not None and node.payload.checkpoint is None:
                self.add_checkpoint(node, points, "end", use)
        # Touch only older nodes: new nodes already count this use.
        self._states.touch([each for each in node.path() if each.end <= held], node, use)
        self._evictor.tidy(node)

    def _generous(self, capacity_tokens: int, need_tokens: int, other_bytes: int = 0) -> int:
        """The capacity to grow to: half more, so that all copies together are O(n); the least if that would evict."""
        wanted = max(capacity_tokens + capacity_tokens // 2, need_tokens)
        more_bytes = (wanted - capacity_tokens) * self._layout.token_bytes
        return need_tokens if self._budget.over_bytes(more_bytes + other_bytes) else wanted

    def _page_in(self, live: LivePath, node: StateNode, *, is_last: bool) -> None:
        self._states.paged_in_bytes += self._write(live.caches, node, node.end, is_last=is_last)
        live.advance(node)
        self._states.events.paged_in(node, node.start, node.end, self._layout.token_bytes)

    def _write(self, caches: Sequence[Any], node: StateNode, end: int, *, is_last: bool = True) -> int:
        """Append a node's spans up to `end` to the caches. Return the bytes copied. `is_last`: wait for the copy."""
        offset, copied_bytes = node.start, 0
        while offset < end and self._layout.token_bytes:
            spans = self.allocating(self.spans_at, node, offset, end)
            # A copy from another slot takes memory until it is written, so wait. Snapshots of the tree need no wait.
            wait = is_last or spans is not node.payload.spans
            copied_bytes += self.allocating(self._layout.page_in, caches, spans, min(spans.end, end), wait=wait)
            offset = spans.end
        return copied_bytes

    def spans_at(self, node: StateNode, start: int, end: int) -> Spans:
        """A node's snapshot, or a copy of the first part of [start, end) from a slot in which the node is live."""
        if node.payload is None:
            raise LiveStateError(f"the tokens [{node.start}, {node.end}) were lost while they were paged in.")
        if node.payload.spans is not None:
            return node.payload.spans
        source = self._slots.source(node)
        return self._layout.copy(source.caches, start, min(end, start // CUT_TOKENS * CUT_TOKENS + CUT_TOKENS))

    def path_to(self, plan: ResumePlan) -> list[StateNode]:
        """The nodes up to `plan.resume`; a node that crosses this offset is split."""
        path = plan.path
        return self.allocating(self._split_at, plan) if path and path[-1].end > plan.resume else path

    def _split_at(self, plan: ResumePlan) -> list[StateNode]:
        path = []
        for node in plan.path:
            if node.start < plan.resume < node.end:
                node = self._states.split(node, plan.resume)
            if node.end <= plan.resume:
                path.append(node)
        return path

    def _affordable(self, capacity: int, incoming: list[StateNode], capacity_tokens: int, prompt_tokens: int) -> int:
        """Make room for the live buffers. Return the capacity to reserve; if bytes are short, it excludes the reply.

        Snapshots of `incoming` become duplicates, which eviction drops first, so their bytes reduce the need.
        """
        droppable = 0
        for node in incoming:
            droppable += 0 if node.payload.spans is None else node.payload.spans.nbytes
        token_bytes = self._layout.token_bytes
        if capacity < capacity_tokens:
            capacity_tokens = self._generous(capacity, capacity_tokens, -droppable)
        if self._evictor.make_room((capacity_tokens - capacity) * token_bytes - droppable):
            return capacity_tokens
        self._evictor.make_room((prompt_tokens + 1 - capacity) * token_bytes - droppable)
        return prompt_tokens + 1

    def _path_for(self, keys: Keys, namespace: str, use: Use, live: LivePath | None = None) -> StateNode:
        """The node that ends where `keys` end, split or appended if needed. With `live`: on that path or below."""
        match = self._states.match(keys, namespace, None if live is None else live.tip)
        node = match.node
        if 0 < match.offset < node.end:
            node = self._states.split(node, match.offset)
        if match.offset < len(keys):
            if live is not None and match.path:
                live.advance(node)
            slot = None if live is None else live.slot
            node = self._states.add_leaf(node, keys[match.offset :], use, slot)
            token_bytes = self._layout.stored_token_bytes if live is None else self._layout.token_bytes
            self._states.events.stored(node, match.offset, token_bytes * (len(keys) - match.offset))
        return node

    def _add(self, tip: StateNode, windows: Sequence[Spans], checkpoints: Sequence[Checkpoint], use: Use) -> None:
        """Store a request's own state on the path to `tip`: windows first, then the checkpoints that need them.

        A checkpoint is dropped if the path has one at that offset, or lacks window tokens for it.
        """
        for spans in windows:
            self._states.windows.store(tip, spans)
        for checkpoint in checkpoints:
            node = next((each for each in tip.path() if each.start < checkpoint.offset <= each.end), None)
            if node is None or self._states.windows.lacking(node.path(), checkpoint.offset):
                continue
            if node.end != checkpoint.offset:
                node = self._states.split(node, checkpoint.offset)
            if node.payload.checkpoint is None:
                self._states.set_checkpoint(node, checkpoint, use)

    def _storable_end(self, caches: Sequence[Any], length: int) -> int:
        """How many of the first `length` tokens can be stored from foreign caches."""
        if self._layout.is_empty(caches):
            return 0
        offsets = self._layout.offsets(caches, trusted=True)
        if offsets is None:
            return length
        low, high = offsets
        has_points = self._layout.uses_points(caches)
        if low != high and has_points:
            raise SnapshotError(
                f"layers are at offsets {low} to {high}; wanted one offset, as some layers have point state."
            )
        if high > length and has_points and not self._layout.can_rewind(caches, high, length):
            raise SnapshotError(
                f"caches are at offset {high}, after the {length} tokens given, and cannot be cut back."
            )
        return min(low, length)


def _capture_spare(pager: Pager, caches: Sequence[Any], wanted: Mapping[Window, Sequence[Range]]) -> Spans | None:
    """Copy window tokens that perhaps no checkpoint needs; None: there are none, or the budget has no room."""
    need = sum(pager._layout.window_bytes(window) * tokens_in(ranges) for window, ranges in wanted.items())
    room = pager._evictor.checkpoint_budget_bytes - pager._states.account.checkpoint_bytes
    if not need or need > room or pager._budget.over_bytes(need):
        return None
    bounds = [each for ranges in wanted.values() for each in ranges]
    try:
        found = pager._layout.capture(caches, min(bounds)[0], max(high for _, high in bounds), wanted)
    except NATIVE_ERRORS:
        pager._layout.release()  # The copy was optional.
        return None
    pager._states.copied_window_bytes += found.nbytes
    return found


def _foreign_windows(pager: Pager, caches: Sequence[Any], end: int, path: Sequence[StateNode]) -> list[Spans]:
    """The tokens before `end` that foreign windows have and the path lacks. Beside recurrent layers: none."""
    if pager._layout.has_states:
        return []
    held = {window: common(its, [(0, end)]) for window, its in pager._layout.held(caches).items()}
    found = _capture_spare(pager, caches, pager._states.windows.new(held, pager._states.windows.stored(path)))
    return [] if found is None else [found]


class OwnState:
    """Checkpoints and window tokens that a request has taken and the tree does not have yet.

    Windows hold each token once: all that the checkpoints need and, while there is room, the whole prompt. Checkpoints
    and windows are sorted by offset, and their bytes are booked.

    Attributes:
        start: the tree has the state before this offset.
        pending: the first window token that is not copied yet, as the copy waits for more tokens; None: none waits.
    """

    def __init__(self, budget: ByteBudget, booking: Booking, prompt_tokens: int = 0) -> None:
        self._budget, self._layout = budget, budget.layout
        self._booking = booking
        self._booked_bytes = 0
        #: Whether there may be window tokens that no checkpoint needs.
        self._has_spare = False
        self.start, self.prompt_tokens = 0, prompt_tokens
        self.checkpoints: list[Checkpoint] = []
        self.windows: list[Spans] = []
        self.pending: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.checkpoints) + sum(each.nbytes for each in self.windows)

    def bytes_at(self, offset: int) -> int:
        """Bytes of the checkpoint at an offset, windows included; 0: there is none."""
        windows = self._layout.windows
        needed = sum(window.count(offset) * self._layout.stored_window_bytes(window) for window in windows)
        return sum(each.nbytes + needed for each in self.checkpoints if each.offset == offset)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)
        self._book()

    def add_windows(self, spans: Spans, *, is_spare: bool = False) -> None:
        """Add new window tokens. `is_spare`: perhaps no checkpoint needs them."""
        if spans.nbytes:
            self.windows.append(spans)
            self._has_spare |= is_spare
            self._book()

    def drop(self, gone: Callable[[Checkpoint], bool]) -> None:
        """Drop the checkpoints for which `gone` is true. Window tokens that only they needed become spare."""
        self.checkpoints = [each for each in self.checkpoints if not gone(each)]
        self._has_spare = bool(self.windows)
        self._book()

    def cut(self, start: int, end: int) -> None:
        """Drop the window tokens outside [start, end), and the checkpoints after `end`."""
        self.pending = None
        self._trim_to({window: [(start, end)] for window in self._layout.windows})
        self.drop(lambda each: each.offset > end)

    def give_up(self, *, only_costly: bool = False) -> bool:
        """Drop spare tokens, else an interval checkpoint (`only_costly`: only one not worth its bytes). False: none."""
        if not self._has_spare:
            gap, victim = _least_covering(self.start, self.checkpoints, self._last_to_fit())
            if victim is None:
                return False
            if only_costly and not is_costly(gap * self._layout.token_bytes, self.bytes_at(victim.offset)):
                return False
            self.drop(lambda each: each is victim)
        self.trim()
        return True

    def trim(self) -> None:
        """Drop the window tokens that no checkpoint needs."""
        self._has_spare = False
        self._trim_to(
            {
                window: union(sorted(needed for each in self.checkpoints for needed in window.needs(each.offset)))
                for window in self._layout.windows
            }
        )

    def clear(self) -> None:
        self.checkpoints, self.windows, self.pending = [], [], None
        self._book()

    def _last_to_fit(self) -> Checkpoint | None:
        """The last checkpoint up to which the path fits the budget; None if the whole prompt fits."""

        def fits(offset: int, checkpoint: Checkpoint) -> bool:
            # Point state counts twice: in the checkpoint and in the live caches.
            nbytes = offset * self._layout.token_bytes + 2 * self.bytes_at(checkpoint.offset)
            return self._budget.can_keep(nbytes)

        if not self.checkpoints or fits(self.prompt_tokens, self.checkpoints[-1]):
            return None
        return next((each for each in reversed(self.checkpoints) if fits(each.offset, each)), None)

    def _trim_to(self, wanted: Mapping[Window, Sequence[Range]]) -> None:
        for index, spans in enumerate(self.windows):
            if any(missing(self._layout.stored(spans, window), its) for window, its in wanted.items()):
                self.windows[index] = self._layout.within(spans, wanted)[0]
        self.windows = [each for each in self.windows if each.nbytes]
        self._book()

    def _book(self) -> None:
        nbytes = self.nbytes
        self._booking.book_checkpoint(nbytes - self._booked_bytes)
        self._booked_bytes = nbytes


def _least_covering(
    start: int, checkpoints: list[Checkpoint], spared: Checkpoint | None
) -> tuple[int, Checkpoint | None]:
    """The smallest gap between the neighbours of an interval checkpoint, and this one; not the newest or `spared`."""
    offsets = [start, *(c.offset for c in checkpoints)]
    given = ((i, c) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval" and c is not spared)
    gaps = [(offsets[i + 2] - offsets[i], i) for i, _ in given]
    gap, index = min(gaps, default=(0, -1))
    return gap, checkpoints[index] if gaps else None
