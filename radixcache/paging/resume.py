r"""Live paths, the plan where a request resumes, and the offsets at which its prefill takes checkpoints.

LivePath: the live caches of one slot, the path of the tree that they hold, and the session that uses them.

    root ── a ── b ── tip          a, b, tip are LIVE: the buffers hold [0, tip.end), without a copy
             \
              c (PAGED)            to move to c: rewind to a.end, page out what c would overwrite, page c in

Slots: all live paths of one cache.

    slot 0   root ── system ── user A        open: a session evaluates tokens after user A
    slot 1   root ── system ── user B        idle: the next request of user B continues here, without a copy

`system` is LIVE in both slots, so its bytes count twice. A request takes the free slot that has most of its path. The
rest comes from snapshots, or from another slot that is idle or whose session runs in the same thread.

Invariants, asserted by `check`; V2 and V3 while no session is open on the path:

  V1  Exactly the nodes from the root to `tip` are LIVE in this slot.
  V2  Every cache object in use stands at `tip.end`. Without a tip, the live caches are empty or stand at 0.
  V3  The booking holds the bytes of the buffers and no others; there is no tenant and no guard.
  P1  A node has one guard per slot whose guarded path contains it; inside a public call it may have more.

Only these classes change their fields. Buffers are rewound and overwritten in place. No reference to an array is kept,
because MLX copies a shared buffer on the next write.

`plan_resume` finds the deepest offset at which a request can resume. If all layers are span layers, this is the end of
the match. Other layers need their state at exactly this offset:

    live         the live caches share a prefix with the request and can be rewound to its end
    windows      any offset for which the path has all tokens that the windows read
    checkpoint   recurrent layers: a checkpoint at the end of a node on the path; windows must be complete there too

Exact mode resumes only on the grid: the multiples of `step_size`. A forward pass over other chunks adds the same
numbers in another order. So only state from whole chunks is bit for bit equal to the state of a cold run:

    0       2048      4096   4700  4711
    |--------|--------|------|---->          whole chunks, then a partial one, then decoded tokens
                      ^ grid end             stored and resumed up to here; the tail after it is dropped

`Tails` remembers the keys of dropped tails, so later requests can report the tokens that exact mode cost. Paths that
diverge inside a chunk may share a node: models are causal, so later tokens do not change the state of earlier ones.

Invariants:

  X1  In exact mode, every stored path was evaluated in whole chunks from offset 0 and stored up to the end of a chunk.
      Every checkpoint stands at a multiple of `step_size`.
  X2  Tails take at most MAX_TAIL_KEYS keys: shared prefixes count once, and each node counts NODE_KEYS more. The least
      recently added tail is dropped first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from radixcache.adapters.contract import Checkpoint, Range, Spans, Window, union
from radixcache.errors import CacheBusyError
from radixcache.layers.layout import NATIVE_ERRORS
from radixcache.layers.sizes import AnyLayout
from radixcache.ledger import Booking
from radixcache.paging.pins import Pins
from radixcache.settings import Settings
from radixcache.tokens import Keys, TokenIds
from radixcache.tree.radix_tree import Match, Node, RadixTree, below
from radixcache.tree.state_tree import NodeState, StateNode, StateTree, Use


class PathOwner(Protocol):
    """What a live path needs of its session."""

    thread: threading.Thread
    namespace: str
    use: Use
    prompt: TokenIds
    is_lost: bool
    position: int


class LivePath:
    """The live caches of one slot and the node at which they stand.

    Attributes:
        slot: index of the slot.
        caches: the mlx-lm caches, one per layer.
        tip: the node at whose end the caches stand; None: they stand at 0.
        booking: the bytes of buffers and session.
        is_open: a session uses the path, or is about to.
        guarded: the node whose path is guarded for that session.
        right_tokens: after wrong state was found, how many restored tokens of the session are correct; None: all.
        used: tick of the last request on this slot.
        seats: how many sessions were opened on this slot.
    """

    def __init__(self, layout: AnyLayout, states: StateTree, slot: int = 0) -> None:
        self._layout, self._states, self.slot = layout, states, slot
        self.caches: list[Any] = layout.fresh()
        self.tip: StateNode | None = None
        self.booking = Booking(states.account)
        self.is_open = False
        self.guarded: StateNode | None = None
        self.right_tokens: int | None = None
        self.used = self.seats = 0
        self._tenant: weakref.ref[PathOwner] | None = None

    # The session

    def open(self, node: StateNode, tick: int) -> None:
        self.guard(None if node.parent is None else node)
        self.is_open, self.used, self.right_tokens = True, tick, None
        self.seats += 1

    def seat(self, tenant: PathOwner) -> None:
        self._tenant = weakref.ref(tenant)

    def is_seat_of(self, number: int) -> bool:
        """Whether the session with this number still has the path; False if the path was taken back from it."""
        return self.is_open and self.seats == number

    def release(self) -> StateNode | None:
        """End the session and return the node that was guarded for the session."""
        node = self.guarded
        self.guard(None)
        self.booking.end_request()
        self._tenant = None
        self.is_open = False
        return node

    @property
    def tenant(self) -> PathOwner | None:
        """The session on this path; None: there is none, or the session vanished without closing."""
        return None if self._tenant is None else self._tenant()

    def is_readable(self, evaluate: bool = True) -> bool:
        """Whether the calling thread may read the buffers now. Without `evaluate`, pending state counts as intact."""
        if not self.is_open:
            return True
        tenant = self.tenant
        if tenant is None or tenant.is_lost or tenant.thread is not threading.current_thread():
            return False
        if evaluate:
            try:
                self._layout.evaluate(self.caches)
            except Exception:  # The pending forward pass failed, and the session's state with it.
                tenant.is_lost = True
        return not tenant.is_lost

    def guard(self, node: StateNode | None) -> None:
        """Move the session's guard to the path to `node`; with None, remove the guard."""
        before, self.guarded = self.guarded, node
        if node is not None:
            self._states.guard(node, 1)
        if before is not None:
            self._states.guard(before, -1)

    # The position in the tree

    @property
    def offset(self) -> int:
        return 0 if self.tip is None else self.tip.end

    def nodes(self) -> list[StateNode]:
        return [] if self.tip is None else self.tip.path()

    def common(self, path: list[StateNode], limit: int) -> int:
        """How many of the first `limit` tokens of `path` are live in this slot."""
        end, own = 0, 1 << self.slot
        for node in path:
            if not node.payload.live_mask & own:
                break
            end = node.end
        return min(end, limit)

    def measure(self, caches: Sequence[Any] = ()) -> None:
        """Book the bytes of the buffers, and of the session's `caches` that have replaced caches of this path."""
        nbytes = self._layout.live_nbytes(self.caches)
        if caches:
            ours = set(map(id, self.caches))
            if replaced := [cache for cache in caches if id(cache) not in ours]:
                nbytes += self._layout.live_nbytes(replaced)
        self.booking.book_live(nbytes)

    def leave(self, end: int) -> list[StateNode]:
        """Prepare to overwrite the buffers after `end`. Return the nodes to page out, which are LEAVING until then.

        A node that crosses `end` is split. Nodes on which no request can resume are removed.
        """
        left: list[StateNode] = []
        tip = self.tip
        while tip is not None and tip.end > end:
            left.append(tip)
            tip = None if tip.start == 0 else tip.parent
        left.reverse()
        for node in left:
            if node.start < end:
                tip = self._states.split(node, end)
            state = node.payload
            if state.spans is None and state.live_mask == 1 << self.slot:
                # Set the bytes before `set_live`, which tells the policy of the node.
                nbytes = self._layout.stored_token_bytes * (node.end - node.start)
                self._states.set_leaving(node, nbytes, self.caches)
            self._states.set_live(node, self.slot, False)
        self.tip = tip
        assert self.offset == end, (end, self.tip)
        for node in reversed(left):
            if self._states.is_useless(node):
                self._states.remove(node)
        return [node for node in left if (state := node.payload) and state.spans is None and not state.live_mask]

    def page_out(self, node: StateNode) -> None:
        """Copy a LEAVING node's spans out of the buffers, unless the node was evicted meanwhile."""
        if node.payload is None:
            return
        self._states.page_out(node, self._layout.page_out(self.caches, node.start, node.end))

    def hand_over(self, leaving: Sequence[StateNode]) -> None:
        """Page out the remaining `leaving` nodes and drop the live caches by layer: at most one layer is held twice."""
        nodes = [node for node in leaving if node.payload is not None]
        found = self._layout.take_out(self.caches, [(node.start, node.end) for node in nodes])
        self.forget()
        for node, spans in zip(nodes, found, strict=True):
            self._states.page_out(node, spans)

    def advance(self, node: StateNode) -> None:
        """Mark the path to `node` as LIVE: the buffers hold it, evaluated or paged in."""
        new, each = [], node
        while each.parent is not None and not each.payload.live_mask >> self.slot & 1:  # By V1 nodes above are live.
            new.append(each)
            each = each.parent
        for each in reversed(new):
            self._states.set_live(each, self.slot, True)
        self.tip = node

    def forget(self) -> None:
        """Drop the live caches without paging anything out."""
        for node in self.nodes():
            self._states.set_live(node, self.slot, False)
        self.tip = None
        self.caches = self._layout.fresh()
        self.measure()

    def cut_back(self, offset: int) -> None:
        """Remove all tokens of the path after `offset` from the tree, and rewind the caches to `offset`."""
        assert self.tip is not None, offset
        self._states.on_loss(self.tip)
        for node in reversed(self.tip.path()):
            if node.start >= offset:
                self._states.set_live(node, self.slot, False)
                self._states.set_leaving(node, 0)
                self.tip = node.parent if node.parent is not None and not node.parent.is_root else None
                self._states.remove(node)
            elif node.end > offset:
                self._states.truncate(node, offset)
        if offset == 0:
            self.forget()
        else:
            self._layout.rewind_spans(self.caches, offset)

    def step_back(self, gone: Sequence[StateNode], rest: StateNode | None) -> bool:
        """Move the path and its guard up to `rest`, before the nodes `gone` are removed. Return whether one was live.

        An open session keeps its caches, which then hold more tokens than the path.
        """
        went_on = False
        for node in gone:
            if self.guarded is node:
                self.guarded = rest
            if node.payload.live_mask >> self.slot & 1:
                self._states.set_live(node, self.slot, False)
                went_on = True
        if went_on:
            self.tip = rest
            self.right_tokens = self.offset
        return went_on

    def empty(self) -> None:
        """Empty the cache objects in place. All that the session evaluates from now on is correct."""
        self.right_tokens = None
        self._layout.empty(self.caches)
        self.measure()

    def shrink(self, capacity_tokens: int) -> None:
        """Reduce the capacity to `capacity_tokens`. If that is 0 and the path is empty, drop the buffers.

        The smaller buffer is allocated while the larger one exists. If the allocation fails, the larger one stays.
        """
        if self.tip is None and capacity_tokens == 0:
            self.forget()
            return
        try:
            self._layout.reserve(self.caches, capacity_tokens)
        except NATIVE_ERRORS:
            self._layout.release()
        self.measure()

    def check(self) -> None:
        """Assert V1 to V3."""
        live = {id(node) for node in self._states.tree.nodes() if node.payload.live_mask >> self.slot & 1}
        assert live == {id(node) for node in self.nodes()}, (self.slot, live, self.nodes())
        if self.is_open:
            return
        booking = self.booking
        assert self.guarded is None and self._tenant is None, (self.slot, self.guarded)
        assert booking.amounts[1:] == (0, 0), (self.slot, booking.amounts)
        offsets = self._layout.offsets(self.caches)
        assert offsets is None or offsets == (self.offset, self.offset), (offsets, self.offset)
        nbytes = self._layout.live_nbytes(self.caches)
        assert nbytes == booking.live_bytes, (self.slot, nbytes, booking.live_bytes)


class Slots:
    """The live paths of one cache."""

    def __init__(self, layout: AnyLayout, states: StateTree, pins: Pins, count: int) -> None:
        self._layout, self._states, self._pins = layout, states, pins
        self.paths = [LivePath(layout, states, slot) for slot in range(count)]

    def vanished_paths(self) -> list[LivePath]:
        """Open paths whose session vanished without closing, because its finalizer was interrupted."""
        return [path for path in self.paths if path.is_open and path.tenant is None]

    def require_free(self, namespace: str) -> None:
        """Raise CacheBusyError, which names the holders of the slots, if no slot is free."""
        if all(path.is_open for path in self.paths):
            holders = tuple(self._holder(path, namespace) for path in self.paths)
            slots = "the live slot is" if len(holders) == 1 else f"all {len(holders)} live slots are"
            raise CacheBusyError(
                f"{slots} taken: {'; '.join(holders)}. Close one first, or use fetch() and insert().", holders
            )

    def choose(self, path: list[StateNode], limit: int) -> LivePath:
        """The free slot with most of the first `limit` tokens of `path`. Ties: empty, then least recently used."""
        free = [live for live in self.paths if not live.is_open]
        if len(free) == 1:
            return free[0]
        return min(free, key=lambda live: (-live.common(path, limit), live.offset > 0, live.used, live.slot))

    def source(self, node: StateNode) -> LivePath:
        """A slot whose buffers hold the node and may be read. Call this only if `hidden_from` allows the node."""
        return next(path for path in self._holding(node) if path.is_readable())

    def hidden_from(self, path: list[StateNode], live: LivePath | None, *, evaluate: bool = True) -> int | None:
        """The start of the first node that cannot be read now, as only busy buffers hold it; None: all can be read.

        Args:
            live: the slot that the request will use; nodes that this slot holds need not be read.
            evaluate: as in `LivePath.is_readable`.
        """
        if not self._layout.token_bytes:
            return None  # No span layers: there is nothing to read but checkpoints.
        ours = 0 if live is None else 1 << live.slot
        for node in path:
            state = node.payload
            if state.spans is not None or state.live_mask & ours:
                continue
            if not any(each.is_readable(evaluate) for each in self._holding(node)):
                return node.start
        return None

    def spare_nbytes(self) -> int:
        """Bytes of all live buffers that the live state does not need."""
        return sum(self._layout.spare_nbytes(path.caches) for path in self.paths)

    def figures(self) -> list[tuple[bool, int, int]]:
        """For each slot: whether a session is open, the offset in tokens, and the bytes. Takes no lock."""
        return [(path.is_open, path.offset, path.booking.live_bytes) for path in self.paths]

    def lose(self, live: LivePath) -> None:
        """Drop the live caches of a slot, which cannot be trusted, and the nodes that only they held."""
        live.forget()
        for node in list(self._states.tree.nodes()):
            if node.payload is not None and node.payload.spans is None and not node.payload.live:
                self.remove_branch(node)

    def remove_branch(self, node: StateNode, was_wrong: bool = False) -> list[LivePath]:
        """Remove a node and all nodes below, even kept ones. Return the live paths that stood on them."""
        rest = None if node.parent is None or node.parent.is_root else node.parent
        gone = [node, *below(node)]
        stood = [path for path in self.paths if path.step_back(gone, rest)]
        for each in gone:
            self._pins.void(each)
        self._states.remove_subtree(node, was_wrong)
        return stood

    def check(self) -> None:
        """Assert P1 and the invariants of every path."""
        guards: dict[int, int] = {}
        for path in self.paths:
            path.check()
            for node in [] if path.guarded is None else path.guarded.path():
                guards[id(node)] = guards.get(id(node), 0) + 1
        found = {id(node): node.payload.guards for node in self._states.tree.nodes() if node.payload.guards}
        assert found == guards, (found, guards)

    def _holding(self, node: StateNode) -> list[LivePath]:
        return [path for path in self.paths if node.payload.live_mask >> path.slot & 1]

    def _holder(self, path: LivePath, namespace: str) -> str:
        tenant = path.tenant
        if tenant is None:
            return f"slot {path.slot} by a request that is being opened"
        who = f"slot {path.slot} by a request in thread {tenant.thread.name}"
        if tenant.namespace != namespace:
            return who  # Other namespaces must not see more.
        use = tenant.use
        kind = f" of kind {use.kind}" if use.kind else ""
        turn = "" if use.turn is None else f", turn {use.turn}"
        prompt, reply = len(tenant.prompt), tenant.position - len(tenant.prompt)
        at = (
            f"{tenant.position} of {prompt} prompt tokens"
            if reply <= 0
            else f"token {reply} after its {prompt} prompt tokens"
        )
        return f"{who}{kind}{turn}, request {use.tick}, at {at}"


#: The most keys of dropped tails to remember, in all paths together: 2 MiB.
MAX_TAIL_KEYS = 1 << 18
#: Overhead of a node of `Tails`, counted in keys: about 500 bytes.
NODE_KEYS = 64


class Reason(StrEnum):
    """Why tokens of a prompt must be evaluated."""

    NEVER_STORED = "never_stored"  # no prompt in the history began like this
    DIVERGED = "diverged"  # a stored path continues with other tokens
    EVICTED = "evicted"  # the tokens, or the checkpoint after them, were evicted
    QUARANTINED = "quarantined"  # found wrong and removed; not stored again until clear_quarantine()
    NO_CHECKPOINT = "no_checkpoint"  # stored; recurrent layers have no state in this range
    WINDOW_GAP = "window_gap"  # stored; but tokens that sliding windows read are missing
    LIVE_ELSEWHERE = "live_elsewhere"  # stored; only in buffers that a session of another thread uses
    OFF_GRID = "off_grid"  # stored; not on the prefill grid of exact mode
    LAST_TOKEN = "last_token"  # stored; evaluated again for its logits


#: Another name of Reason.
ShortReason = Reason


class PrefixRequest(NamedTuple):
    """A prompt, with what the cache needs to know about it.

    Attributes:
        keys: what the tree stores, one key per token.
        use: the request's tick, priority, turn and kind.
        marks: offsets worth a checkpoint.
        reserve: buffer capacity to allocate after the prompt, in tokens.
    """

    prompt: TokenIds
    keys: Keys
    namespace: str
    use: Use
    marks: Sequence[int] = ()
    reserve: int = 0

    @property
    def limit(self) -> int:
        """The most tokens that may be restored. At least one token must be evaluated."""
        return len(self.prompt) - 1


class ResumePlan(NamedTuple):
    """Where a request resumes.

    Attributes:
        matched: stored prefix of the request, in tokens.
        resume: the offset to resume at; at most the prompt length - 1.
        path: the nodes of the match, from the root down; the last one may match in part.
        common: tokens that the live path and the match share.
        checkpoint: the state of recurrent layers; None: it comes from the live caches, or there are no such layers.
        source: the node that ends at `resume` and has a checkpoint; None: there is none.
        reason: why resume < matched; None when they are equal.
        off_grid: in exact mode, how many restorable tokens are not restored, as they lie after the last grid multiple.
        is_live: whether the state of point layers comes from the live caches.
        windows: the window tokens on the path. The plan keeps them, because eviction may remove them from the tree.
    """

    matched: int
    resume: int
    path: list[StateNode]
    common: int
    checkpoint: Checkpoint | None
    source: StateNode | None
    reason: Reason | None
    off_grid: int = 0
    is_live: bool = False
    windows: Sequence[Spans] = ()


def plan_resume(
    layout: AnyLayout,
    match: Match[NodeState],
    limit: int,
    live: LivePath | None,
    hidden: int | None = None,
    *,
    grid_tokens: int = 1,
) -> ResumePlan:
    """Plan where a request resumes, of which at most `limit` tokens may be restored.

    `live`: the live path to use; None: fresh caches. `hidden`: spans from this offset on cannot be read; None: all can.
    """
    path = match.path
    limit = min(match.offset, limit)
    off_grid = limit % grid_tokens
    limit -= off_grid
    common = live.common(path, limit) if live is not None else 0
    resume, source, is_live = limit, None, False
    windows = [node.payload.windows for node in path if node.payload.windows is not None] if layout.windows else []
    if layout.has_points:
        resume, source = _deepest(layout, path, windows, limit, grid_tokens)
        rewound = floor(common, grid_tokens)
        if live is not None and rewound >= max(resume, 1) and layout.can_rewind(live.caches, live.offset, rewound):
            resume, source, is_live = rewound, None, True
    reason = None
    if resume < limit:
        reason = Reason.NO_CHECKPOINT if layout.has_states else Reason.WINDOW_GAP
    elif resume < match.offset:
        reason = Reason.OFF_GRID if off_grid else Reason.LAST_TOKEN
    if hidden is not None and resume > hidden:
        plan = plan_resume(layout, match, hidden, live, grid_tokens=grid_tokens)
        return plan._replace(reason=Reason.LIVE_ELSEWHERE)
    checkpoint = None if source is None else source.payload.checkpoint
    return ResumePlan(match.offset, resume, path, common, checkpoint, source, reason, off_grid, is_live, windows)


def _deepest(
    layout: AnyLayout, path: Sequence[StateNode], stored: Sequence[Spans], limit: int, grid: int
) -> tuple[int, StateNode | None]:
    """The deepest offset at which the tree has the state of all point layers, and the node with a checkpoint there."""
    if not layout.has_states:
        resume = deepest_whole(layout, stored, limit, grid=grid)
        return resume, next((n for n in path if n.end == resume and n.payload.checkpoint is not None), None)
    windows = _whole(layout, stored, {})
    for node in reversed(path):
        is_checkpoint = node.end <= limit and node.end % grid == 0 and node.payload.checkpoint is not None
        if is_checkpoint and all(any(low <= node.end <= high for low, high in its) for its in windows):
            return node.end, node
    return 0, None


def deepest_whole(
    layout: AnyLayout,
    stored: Sequence[Spans],
    limit: int,
    held: Mapping[Window, Sequence[Range]] | None = None,
    *,
    grid: int = 1,
) -> int:
    """The largest multiple of `grid`, up to `limit`, for which all tokens that windows read exist; 0: none.

    Args:
        stored, held: the window tokens that exist: in snapshots, in order of their tokens; and in live caches.
    """
    windows = _whole(layout, stored, held or {})
    offset = limit
    while offset > 0:
        offset -= offset % grid
        lower = min(
            (max((min(offset, high) for low, high in ranges if low <= offset), default=0) for ranges in windows),
            default=offset,
        )
        if lower == offset:
            return offset
        offset = lower
    return 0


def _whole(layout: AnyLayout, stored: Sequence[Spans], held: Mapping[Window, Sequence[Range]]) -> list[list[Range]]:
    """For each window, the sorted ranges (first, last) of offsets for which all tokens that it reads exist.

    Offset 0, at which a window reads nothing, is left out.
    """
    found = []
    for window in layout.windows:
        stored_ranges = (each for spans in stored for each in layout.stored(spans, window))
        ranges = union(sorted([*stored_ranges, *held.get(window, ())]))
        if window.keep and not (ranges and ranges[0][0] == 0 and ranges[0][1] >= window.keep):
            ranges = [each for each in ranges if each[0] == 0]
        firsts = [1 if low == 0 else low + window.size - window.keep for low, _ in ranges]
        found.append([(first, high) for first, (_, high) in zip(firsts, ranges, strict=True) if first <= high])
    return found


def stored_from(layout: AnyLayout, plan: ResumePlan, window: Window) -> int:
    """The start of the run of window tokens in the tree that ends, without a gap, where the plan resumes."""
    first = plan.resume
    for node in reversed(plan.path):
        for low, high in reversed([] if node.payload.windows is None else layout.stored(node.payload.windows, window)):
            if low < first <= high:
                first = low
    return first


def floor(offset: int, step_size: int) -> int:
    return offset - offset % step_size


def distant_marks(marks: Iterable[int], resumed: int, least_tokens: int) -> list[int]:
    """Drop the marks after `resumed` that are less than `least_tokens` after `resumed` or after another kept mark.

    The first and the last mark stay: other conversations diverge at the first, the next turn resumes at the last.
    """
    ordered = sorted(marks)
    kept: list[int] = []
    for mark in ordered:
        before = max([resumed, *kept[-1:]])
        if mark in (ordered[0], ordered[-1]) or mark <= resumed or mark - before >= least_tokens:
            kept.append(mark)
    return kept


def checkpoint_stops(
    settings: Settings,
    request: PrefixRequest,
    position: int,
    last: int,
    *,
    matched: int,
    resumed: int,
    kept: int = 0,
    least_tokens: int = 1,
) -> dict[int, str]:
    """Offsets in (position, last] at which prefill takes a checkpoint, and why: the reason that is kept longest.

    Marks closer than `least_tokens` are dropped. If the tree held more tokens (`matched`) than were `resumed`, other
    prompts may branch off at `matched` too. A few tokens after a mark, a checkpoint there would save less than its
    forward pass takes. The budget can keep `kept` tokens of the prompt; 0: all.
    """
    prompt_tokens = len(request.prompt)
    stops = dict.fromkeys(distant_marks(request.marks, resumed, least_tokens), "mark")
    interval, tail = settings.checkpoint_interval, prompt_tokens - settings.tail_tokens
    if not any(tail <= mark < prompt_tokens for mark in stops):  # Chat templates rewrite what follows the last message.
        stops[tail] = "tail"
    if matched - resumed >= (settings.tail_tokens if resumed in stops else 1):
        stops[min(matched, last)] = "branch"
    if 0 < kept <= last:
        stops[kept] = "branch"  # this reason is not thinned: the next turn resumes here
    for offset in range(interval, last + 1, interval):
        # A checkpoint close to another one saves almost nothing and costs the same.
        if all(abs(offset - other) >= interval // 8 for other in stops):
            stops[offset] = "interval"
    if settings.exact:
        return stops_on_grid(stops, settings.step_size, position, last)
    return {offset: kind for offset, kind in sorted(stops.items()) if position < offset <= last}


def stops_on_grid(stops: Mapping[int, str], step_size: int, position: int, last: int) -> dict[int, str]:
    """Round checkpoint stops down to multiples of `step_size`; add the last multiple. Return those in (position, last].

    If several stops fall on one multiple, the kind that is kept longest stays.
    """
    moved: dict[int, str] = {}
    for wanted in ("interval", "end", "tail", "mark", "branch"):
        moved.update((floor(offset, step_size), kind) for offset, kind in stops.items() if kind == wanted)
        if wanted == "end":
            moved[floor(last, step_size)] = "end"
    return {offset: kind for offset, kind in sorted(moved.items()) if position < offset <= last}


class Tails:
    """Keys that followed a stored path, and whose state was dropped because it is off the grid.

    `match_length` is O(prompt length) in NumPy, plus one look-up per branch, whatever the number of tails.
    """

    def __init__(self) -> None:
        self._tree: RadixTree[None] = RadixTree()  # One namespace per node that has tails.
        self._leaves: OrderedDict[int, Node[None]] = OrderedDict()  # By id(), least recently added first.

    def add(self, node: StateNode, tail: Keys) -> None:
        """Remember the keys that followed the end of `node`, which may be a root."""
        if len(tail) == 0 or len(tail) + NODE_KEYS > MAX_TAIL_KEYS:
            return
        tree = self._tree
        match = tree.match(tail, _place(node))
        leaf = match.node
        if match.offset < len(tail):
            if 0 < match.offset < leaf.end:
                leaf = tree.split(leaf, match.offset)
            if leaf.is_leaf and not leaf.is_root:
                tree.extend(leaf, tail[match.offset :])
            else:
                leaf = tree.append(leaf, tail[match.offset :])
        if leaf.is_leaf:
            self._leaves[id(leaf)] = leaf
            self._leaves.move_to_end(id(leaf))
        while tree.key_count + NODE_KEYS * tree.node_count > MAX_TAIL_KEYS:
            above = tree.remove(self._leaves.popitem(last=False)[1])
            if not above.is_root and len(above.children) == 1:
                tree.merge(above)

    def match_length(self, match: Match[NodeState], keys: Keys) -> int:
        """How many keys after the match an earlier request had evaluated and dropped."""
        if match.offset != match.node.end or match.offset == len(keys):
            return 0
        return self._tree.match(keys[match.offset :], _place(match.node)).offset

    def clear(self, namespace: str | None = None) -> None:
        """Forget the tails of one namespace (None: of all)."""
        for leaf in [each for each in self._leaves.values() if namespace in (None, _namespace_of(each.namespace))]:
            del self._leaves[id(leaf)]
            while leaf.is_leaf and not leaf.is_root:
                leaf = self._tree.remove(leaf)
            if not leaf.is_root and len(leaf.children) == 1:
                self._tree.merge(leaf)

    def check(self) -> None:
        """Assert X2, and that the order of tails lists exactly the leaves."""
        self._tree.check()
        assert self._tree.key_count + NODE_KEYS * self._tree.node_count <= MAX_TAIL_KEYS, self._tree.key_count
        leaves = {id(node) for node in self._tree.nodes() if node.is_leaf}
        assert leaves == set(self._leaves), (leaves, set(self._leaves))


def _place(node: StateNode) -> str:
    """A name for the end of a node. The offset is part of it: a leaf that loses its tail keeps its entry id."""
    entry_id = -1 if node.is_root else node.payload.entry.entry_id
    return f"{entry_id} {node.end} {node.namespace}"


def _namespace_of(place: str) -> str:
    return place.split(" ", 2)[2]
