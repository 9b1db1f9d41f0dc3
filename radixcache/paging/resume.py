"""Where one request resumes, where its prefill stops for checkpoints, and what it takes on its way.

`plan_resume` finds the deepest offset at which a request can take up stored state. With span layers alone that is the
match itself. Other layers need their state at exactly one offset:

    live         the live caches stand on the request's path and can be rewound to where the paths part
    windows      any offset in front of which the path has all that the window reads there
    checkpoint   recurrent layers: a checkpoint at a node's end on the path, where windows have to be whole as well

Exact mode resumes only on the grid, the multiples of `step_size` from offset 0. A forward pass over other chunks adds
the same numbers in another order, so only state made by prefill in whole chunks is bit for bit that of a cold run:

    0       2048      4096   4700  4711
    |--------|--------|------|---->          whole chunks, then a partial one, then decoded tokens
                      ^ grid end             stored and resumed up to here; the tail behind it is dropped

`Tails` remembers the keys of dropped tails, so that a request that goes on there is told what exactness cost it. Paths
that part inside a chunk may share a node because models are causal: later tokens of a chunk do not change earlier ones.

Invariants:

  X1  In exact mode every stored path was evaluated in whole chunks from offset 0, and ends where one ended when it was
      stored; every checkpoint stands at a multiple of `step_size`.
  X2  Tails take at most MAX_TAIL_KEYS keys, shared beginnings counted once and each node as NODE_KEYS more; the tail
      added longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from radixcache.adapters.contract import Checkpoint, Range, Spans, Window, missing, union
from radixcache.layers.layout import AnyLayout
from radixcache.ledger import Booking
from radixcache.paging.live_path import LivePath
from radixcache.settings import Settings
from radixcache.tokens import Keys, TokenIds
from radixcache.tree.entries import NodeState, StateNode, Use, is_dear
from radixcache.tree.radix_tree import Match, Node, RadixTree

#: Keys of dropped tails that are remembered, over all paths: 2 MiB.
MAX_TAIL_KEYS = 1 << 18
#: What a node of theirs takes besides its keys, in keys: about 500 bytes.
NODE_KEYS = 64


class ShortReason(StrEnum):
    """Why a request resumed short of its match."""

    LAST_TOKEN = "last_token"  # all of the prompt is stored; one token must be evaluated to get logits
    NO_CHECKPOINT = "no_checkpoint"  # recurrent layers have no state between the resume offset and the match
    WINDOW_GAP = "window_gap"  # some of what sliding windows would read at the match is not stored
    LIVE_ELSEWHERE = "live_elsewhere"  # only in the live buffers of a session that another thread has open
    OFF_GRID = "off_grid"  # exact mode: what is known lies behind the last whole chunk, or ends inside one


class PrefixRequest(NamedTuple):
    """A prompt and what goes with it.

    Attributes:
        keys: one per token: what the tree goes by.
        use: who asks, and when.
        marks: offsets worth a checkpoint.
        reserve: tokens of room beyond the prompt.
    """

    prompt: TokenIds
    keys: Keys
    namespace: str
    use: Use
    marks: Sequence[int] = ()
    reserve: int = 0

    @property
    def limit(self) -> int:
        """The most tokens that may be restored: at least one is evaluated."""
        return len(self.prompt) - 1


class ResumePlan(NamedTuple):
    """Where a request resumes.

    Attributes:
        matched: stored prefix of the request, in tokens.
        resume: offset it resumes at; at most one token less than the request has.
        path: nodes of the match, root side first; the last may be matched in part.
        common: tokens that the live path and the match share.
        checkpoint: where recurrent layers' state comes from; None: from the live caches, or there are none.
        source: the node at whose end there is a checkpoint, if there is one where the request resumes.
        reason: why resume < matched; None when they are equal.
        off_grid: in exact mode, how many tokens of the match that might be restored lie behind its last grid multiple.
        is_live: whether the state of point layers comes from the live caches.
        windows: the state of windows on the path. The plan holds it, since making room may take it out of the tree.
    """

    matched: int
    resume: int
    path: list[StateNode]
    common: int
    checkpoint: Checkpoint | None
    source: StateNode | None
    reason: ShortReason | None
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
    """Plan for a request of which at most `limit` tokens may be restored, on a live path or (None) on fresh caches.

    Spans from offset `hidden` on cannot be read now (None: all can).
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
        reason = ShortReason.NO_CHECKPOINT if layout.has_states else ShortReason.WINDOW_GAP
    elif resume < match.offset:
        reason = ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN
    if hidden is not None and resume > hidden:
        plan = plan_resume(layout, match, hidden, live, grid_tokens=grid_tokens)
        return plan._replace(reason=ShortReason.LIVE_ELSEWHERE)
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
    """The deepest multiple of `grid` at or below `limit` at which all that windows read is there; 0: none.

    Args:
        stored, held: what is there, as state in order of its tokens, and in live caches.
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
    """For each window the ranges of offsets, first to last, at which all that it reads is there, in order.

    Offset 0, at which it reads nothing, is not among them.
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
    """The token from which on the tree has, without a gap, what a window reads in front of where a plan resumes."""
    first = plan.resume
    for node in reversed(plan.path):
        for low, high in reversed([] if node.payload.windows is None else layout.stored(node.payload.windows, window)):
            if low < first <= high:
                first = low
    return first


def floor(offset: int, step_size: int) -> int:
    return offset - offset % step_size


def distant_marks(marks: Iterable[int], resumed: int, least_tokens: int) -> list[int]:
    """The marks without those behind `resumed` that are less than `least_tokens` behind it, or behind another mark.

    The first and the last stay: other conversations part at the first, and the next turn resumes at the last.
    """
    ordered = sorted(marks)
    kept: list[int] = []
    for mark in ordered:
        before = max([resumed, *kept[-1:]])
        if mark in (ordered[0], ordered[-1]) or mark <= resumed or mark - before >= least_tokens:
            kept.append(mark)
    return kept


def checkpoint_stops(
    settings: Settings, prompt_tokens: int, marks: Iterable[int], matched: int, resumed: int, last: int, kept: int = 0
) -> dict[int, str]:
    """Offsets up to `last` at which to take a checkpoint in prefill, with the reason: of several the most lasting one.

    The tree held `matched` tokens; if more than were `resumed`, other prompts may branch off there as well. A few
    tokens behind a mark, such a checkpoint would save less than its forward pass takes. The budget can keep `kept`
    tokens of the prompt; 0: all.
    """
    stops = dict.fromkeys(marks, "mark")
    interval, tail = settings.checkpoint_interval, prompt_tokens - settings.tail_tokens
    if not any(tail <= mark < prompt_tokens for mark in stops):  # A template rewrites what is behind the last message.
        stops[tail] = "tail"
    if matched - resumed >= (settings.tail_tokens if resumed in stops else 1):
        stops[min(matched, last)] = "branch"
    if 0 < kept <= last:
        stops[kept] = "branch"  # not thinned: the next turn resumes there
    for offset in range(interval, last + 1, interval):
        # Close to another one it would save next to nothing and cost as much.
        if all(abs(offset - other) >= interval // 8 for other in stops):
            stops[offset] = "interval"
    return stops


def stops_on_grid(stops: Mapping[int, str], step_size: int, position: int, last: int) -> dict[int, str]:
    """Move checkpoint stops to the multiples at or below them, in (position, last], and add the last multiple there.

    Of several that fall on one multiple the most lasting kind stays.
    """
    moved: dict[int, str] = {}
    for wanted in ("interval", "end", "tail", "mark", "branch"):
        moved.update((floor(offset, step_size), kind) for offset, kind in stops.items() if kind == wanted)
        if wanted == "end":
            moved[floor(last, step_size)] = "end"
    return {offset: kind for offset, kind in sorted(moved.items()) if position < offset <= last}


class Tails:
    """Keys that followed a stored path, and whose state was dropped because it is off the grid.

    `matched` is O(length of the prompt) in NumPy and one look-up per branch, however many tails a node has.
    """

    def __init__(self) -> None:
        self._tree: RadixTree[None] = RadixTree()  # A namespace for each node that tails follow.
        self._leaves: OrderedDict[int, Node[None]] = OrderedDict()  # By id(), the one added longest ago first.

    def add(self, node: StateNode, tail: Keys) -> None:
        """Remember what followed the end of `node`, a root or not."""
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

    def matched(self, match: Match[NodeState], keys: Keys) -> int:
        """How many of the keys behind a match an earlier request had evaluated."""
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
        """Assert X2, and that every leaf has its place in the order."""
        self._tree.check()
        assert self._tree.key_count + NODE_KEYS * self._tree.node_count <= MAX_TAIL_KEYS, self._tree.key_count
        leaves = {id(node) for node in self._tree.nodes() if node.is_leaf}
        assert leaves == set(self._leaves), (leaves, set(self._leaves))


def _place(node: StateNode) -> str:
    """A name for the end of a node, as long as it is there: a leaf that loses its tail keeps its entry's number."""
    entry_id = -1 if node.is_root else node.payload.entry.entry_id
    return f"{entry_id} {node.end} {node.namespace}"


def _namespace_of(place: str) -> str:
    return place.split(" ", 2)[2]


class OwnState:
    """Checkpoints, and tokens copied out of windows, that a request has taken and the tree does not have yet.

    Windows hold what the checkpoints need, each token once, and as long as there is room all tokens of the prompt. Both
    are in order of their offsets, and booked.

    Attributes:
        start: the tree has what is in front of this offset.
        pending: the token from which on copies out of windows wait for more tokens; None: none wait.
    """

    def __init__(self, layout: AnyLayout, booking: Booking, prompt_tokens: int = 0) -> None:
        self._layout = layout
        self._booking = booking
        self._booked_bytes = 0
        #: Whether there may be tokens that no checkpoint needs.
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
        """Add new tokens of windows; `is_spare`: perhaps no checkpoint needs them."""
        if spans.nbytes:
            self.windows.append(spans)
            self._has_spare |= is_spare
            self._book()

    def drop(self, gone: Callable[[Checkpoint], bool]) -> None:
        """Drop some checkpoints; tokens of windows that only they needed become spare."""
        self.checkpoints = [each for each in self.checkpoints if not gone(each)]
        self._has_spare = bool(self.windows)
        self._book()

    def cut(self, start: int, end: int) -> None:
        """Drop the tokens outside [start, end), and the checkpoints behind `end`."""
        self.pending = None
        self._trim_to({window: [(start, end)] for window in self._layout.windows})
        self.drop(lambda each: each.offset > end)

    def give_up(self, *, only_dear: bool = False) -> bool:
        """Drop spare tokens, else an interval checkpoint (`only_dear`: not worth its bytes); False: there is none."""
        if not self._has_spare:
            gap, victim = _least_covering(self.start, self.checkpoints, self._last_to_fit())
            if victim is None:
                return False
            if only_dear and not is_dear(gap * self._layout.token_bytes, self.bytes_at(victim.offset)):
                return False
            self.drop(lambda each: each is victim)
        self.trim()
        return True

    def trim(self) -> None:
        """Drop the tokens that no checkpoint needs."""
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
        """The last checkpoint up to which the path fits the budget, if the whole prompt does not fit."""

        def fits(offset: int, checkpoint: Checkpoint) -> bool:
            # Twice the point state: it is live, too.
            nbytes = offset * self._layout.token_bytes + 2 * self.bytes_at(checkpoint.offset)
            return nbytes <= self._booking.budget_bytes

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
    """The interval checkpoint whose neighbours are closest together, and how close; never the newest or `spared`."""
    offsets = [start, *(c.offset for c in checkpoints)]
    given = ((i, c) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval" and c is not spared)
    gaps = [(offsets[i + 2] - offsets[i], i) for i, _ in given]
    gap, index = min(gaps, default=(0, -1))
    return gap, checkpoints[index] if gaps else None
