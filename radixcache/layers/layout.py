"""Layout: all layers of a model as one, of arrays, or of sizes, with which a simulator drives the same cache.

ArrayLayout: all layers of a model's live cache as one, cut into the leaves that adapters work on.

A model's cache is a list with an object per layer; a layer may have none (None), hold several (CacheList), or never
use the one it has. The layout walks the leaves at every call and keeps none: generators replace objects and models
reassign arrays. It keeps what does not change: how many bytes a token takes, and whether any point layer is in use.

Everything it hands out is evaluated, so any thread may use it.

Stack: layers with equal windows, which always stand alike, and whose state is stored as one.

Their snapshot has arrays (S, H, T, D) for S layers, under the first of them: as many fewer to take out, cut and keep.

Failures that come out of MLX while it evaluates, and what they leave behind.

On some back ends an evaluation raises once, and then takes whatever its buffers hold for the result: reading them
again raises nothing. So state that was part of a failed evaluation is given up, whatever a second look says. An
exception that Python code raised with a `raise` statement says nothing of the kind, whatever its type.

one_each: the next tokens of rows that step together.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import (
    NEVER,
    Adapter,
    Checkpoint,
    Range,
    Spans,
    Window,
    Windowed,
    WindowSnapshot,
    is_windowed,
)
from radixcache.adapters.registry import PROBED, adapter_for, leaves
from radixcache.errors import RadixCacheError, SnapshotError
from radixcache.layers import stored
from radixcache.layers.sizes import SizedLayout
from radixcache.layers.stored import Buffers
from radixcache.tokens import token_ids

#: What MLX raises for a failed evaluation or allocation.
NATIVE_ERRORS = (RuntimeError, MemoryError)


class LiveStateError(RadixCacheError):
    """Writing into the live buffers failed half way; what they hold is not to be used."""


def is_evaluation_failure(error: BaseException | None) -> bool:
    """Whether an exception may have come out of an evaluation: a native error that no `raise` statement raised."""
    if not isinstance(error, NATIVE_ERRORS) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    operation = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[operation] not in ("RAISE_VARARGS", "RERAISE")


def one_each(tokens: Any, row_count: int, vocab_size: int | None) -> mx.array:
    """Tokens (N,) or (N, 1) of so many rows as an array (N, 1); ValueError: other shapes, or no integers."""
    ids = tokens if isinstance(tokens, mx.array) else mx.array(token_ids(tokens, vocab_size))
    if not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(f"tokens are of dtype {ids.dtype}; wanted integers.")
    if row_count == 0 or ids.shape not in ((row_count,), (row_count, 1)):
        raise ValueError(f"tokens of shape {ids.shape} for {row_count} rows; wanted one each, and at least one.")
    return ids.reshape(row_count, 1)


Leaf = tuple[Any, Adapter]


@dataclass(frozen=True, slots=True)
class Stack:
    """Indices of leaves of one class, with one window, and of the same shapes."""

    window: Window
    adapter: Windowed
    leaves: tuple[int, ...]

    def caches(self, pairs: Sequence[Leaf]) -> list[Any]:
        """Its layers' objects, of all; empty when some were never written."""
        found = [pairs[leaf][0] for leaf in self.leaves]
        return [] if any(map(self.adapter.is_empty, found)) else found

    def held(self, pairs: Sequence[Leaf]) -> list[Range]:
        """What the live layers have, in order."""
        caches = self.caches(pairs)
        return self.adapter.held(caches[0]) if caches else []

    def stored(self, spans: Spans) -> list[Range]:
        """What these spans have of it, in order."""
        snapshot = spans.leaves[self.leaves[0]]
        return [] if snapshot is None else snapshot.ranges

    def restore(self, pairs: Sequence[Leaf], stored: Sequence[Spans], target: int) -> tuple[int, ...]:
        """Make its layers stand at `target`; returns them, or none where nothing of it is stored.

        Raises:
            LiveStateError: not all that they need is stored; nothing was changed.
        """
        snapshots = [found for spans in stored if (found := spans.leaves[self.leaves[0]]) is not None]
        pieces = sorted((piece for each in snapshots for piece in each.pieces), key=lambda piece: piece.start)
        if not pieces:
            return ()
        caches = [pairs[leaf][0] for leaf in self.leaves]
        if not self.adapter.restore_stack(caches, WindowSnapshot(0, target, pieces), target):
            raise LiveStateError(f"{type(caches[0]).__name__}: the state at {target} is not all there.")
        return self.leaves


#: Arrays are evaluated together up to this many bytes: so much may be held twice while they are copied.
TOGETHER_BYTES = 32 << 20


class ArrayLayout:
    """Operations on a whole live cache: a list of mlx-lm cache objects made by `factory`.

    Args:
        factory: returns a fresh list of mlx-lm caches, the same classes every time; layers may be None.
        kv_bits, kv_group_size: quantize KVCache layers from offset 0; None leaves them as they are.

    Raises:
        UnsupportedCacheError: a cache class has no adapter.
    """

    def __init__(self, factory: Callable[[], Sequence[Any]], kv_bits: int | None, kv_group_size: int) -> None:
        self._factory = factory
        self._kv_bits = kv_bits
        self._kv_group_size = kv_group_size
        self._leaf_classes: list[type] = []
        self._leaf_adapters: list[Adapter] = []
        # The classes, where each cache is a leaf.
        self._flat_classes: list[type] | None = None
        pairs = self.leaves(self.fresh())
        self._adapters = [adapter for _, adapter in pairs]
        self._windows = [adapter.window(cache) if is_windowed(adapter) else None for cache, adapter in pairs]
        self._stacks: list[Stack] = []
        self._note_kinds([True] * len(pairs))
        self.token_bytes = 0
        self._shapes: list[tuple[Any, ...] | None] = [None] * len(pairs)
        # Leaves that a forward pass writes; None until one has been seen through. A model may leave some unused.
        self._in_use: list[bool] | None = None
        # First and last leaf in use without an offset; None: to be worked out.
        self._blind: tuple[int, ...] | None = None

    def fresh(self) -> list[Any]:
        """A new, empty live cache."""
        return [cache if self._kv_bits is None else self._quantized(cache) for cache in self._factory()]

    def leaves(self, caches: Sequence[Any]) -> list[Leaf]:
        """Each leaf with its adapter, in order."""
        classes = list(map(type, caches))
        if classes == self._flat_classes:  # nearly always: no layer without a cache, and none with several
            return list(zip(caches, self._leaf_adapters, strict=True))
        flat = leaves(caches)
        leaf_classes = list(map(type, flat))
        if leaf_classes != self._leaf_classes:
            self._leaf_adapters = [adapter_for(cache, layer) for layer, cache in enumerate(flat)]
            self._leaf_classes = leaf_classes
            self._flat_classes = classes if leaf_classes == classes else None
        return list(zip(flat, self._leaf_adapters, strict=True))

    def offsets(self, caches: Sequence[Any], trusted: bool = False) -> tuple[int, int] | None:
        """Smallest and largest offset over the leaves in use; None when no leaf in use knows its offset.

        A leaf that is empty while others are not stands at 0, unless it is known to be unused, or `trusted` says so
        before any forward pass was seen through: the caches are whole.
        """
        pairs = self.leaves(caches)
        empty = [adapter.is_empty(cache) for cache, adapter in pairs]
        if all(empty):
            return None
        missing = [not trusted] * len(pairs) if self._in_use is None else self._in_use
        offsets = [
            (0 if absent else None) if is_empty else adapter.offset(cache)
            for (cache, adapter), is_empty, absent in zip(pairs, empty, missing, strict=True)
        ]
        known = [offset for offset in offsets if offset is not None]
        return (min(known), max(known)) if known else None

    def first_offset(self, caches: Sequence[Any]) -> int | None:
        """Offset of the first leaf in use that knows it: all the same unless a forward pass broke off."""
        known = (adapter.offset(cache) for cache, adapter in self.leaves(caches) if not adapter.is_empty(cache))
        return next((offset for offset in known if offset is not None), None)

    def is_empty(self, caches: Sequence[Any]) -> bool:
        return all(adapter.is_empty(cache) for cache, adapter in self.leaves(caches))

    def arrays(self, caches: Sequence[Any]) -> list[mx.array]:
        return [array for cache, adapter in self.leaves(caches) for array in adapter.buffers(cache)]

    def identities(self, caches: Sequence[Any]) -> list[list[mx.array]]:
        """The array objects of the first and the last leaf in use that have no offset; empty when there is none.

        New objects show that a forward pass ran unseen.
        """
        if self._blind == ():
            return []
        pairs = self.leaves(caches)
        if self._blind is None:
            in_use = self._in_use or [True] * len(pairs)
            blind = [i for i, (cache, adapter) in enumerate(pairs) if in_use[i] and adapter.offset(cache) is None]
            self._blind = (blind[0], blind[-1]) if blind else ()
        return [adapter.buffers(cache) for cache, adapter in (pairs[index] for index in self._blind)]

    def live_nbytes(self, caches: Sequence[Any]) -> int:
        """Bytes of all live buffers, spare capacity included."""
        return sum(array.nbytes for array in self.arrays(caches))

    def spare_nbytes(self, caches: Sequence[Any]) -> int:
        return sum(adapter.spare_nbytes(cache) for cache, adapter in self.leaves(caches))

    def capacity(self, caches: Sequence[Any]) -> int:
        """Tokens that fit before some leaf allocates again; 0 for an empty live cache."""
        return min((a.capacity(cache) for cache, a in self.leaves(caches) if not a.is_empty(cache)), default=0)

    def span_capacity(self, caches: Sequence[Any]) -> int:
        """Tokens that the span buffers hold; NEVER when there are none that grow."""
        return min((adapter.capacity(cache) for cache, adapter in self._span_leaves(caches)), default=NEVER)

    def learn(self, caches: Sequence[Any]) -> None:
        """Note what a live cache that a forward pass has been through shows of the model."""
        pairs = self.leaves(caches)
        written = [not adapter.is_empty(cache) for cache, adapter in pairs]
        if not any(written):
            return
        before = self._in_use or [False] * len(pairs)
        in_use = [now or known for now, known in zip(written, before, strict=True)]
        for index, (cache, adapter) in enumerate(pairs):
            if written[index] and self._shapes[index] is None:
                self._shapes[index] = adapter.shapes(cache)
        if in_use != self._in_use:
            self._note_use(in_use)
        spans = self._span_leaves(caches)
        self.token_bytes = sum(b.nbytes // b.shape[2] for cache, adapter in spans for b in adapter.buffers(cache))

    def take_over(self, shapes: Sequence[Any]) -> None:
        """Know what a layout of the same caches had learnt when its `shapes` were these; not where something is."""
        if not self.is_known and len(shapes) == len(self._shapes):
            self._shapes = list(shapes)
            self._note_use([its is not None for its in shapes])
            spans = [leaf for leaf, adapter in enumerate(self._adapters) if not adapter.is_point]
            self.token_bytes = sum(map(self.leaf_bytes, spans))

    @property
    def shapes(self) -> list[Any]:
        """Of each leaf what its adapter's `shapes` said once it was written; None where it never was."""
        return self._shapes

    def _note_use(self, in_use: list[bool]) -> None:
        self._in_use, self._blind = in_use, None
        self._note_kinds(in_use)
        self._note_stacks()

    def _note_kinds(self, in_use: Sequence[bool]) -> None:
        used = [(a, window) for a, window, its in zip(self._adapters, self._windows, in_use, strict=True) if its]
        #: Whether some layer in use has state that is valid at one offset only.
        self.has_states = any(adapter.is_point and window is None for adapter, window in used)
        #: The different windows of layers in use.
        self.windows = tuple(dict.fromkeys(window for _, window in used if window is not None))
        #: Whether either is so.
        self.has_points = self.has_states or bool(self.windows)

    def _note_stacks(self) -> None:
        """Stack the windows of layers that were not in use before: what is stored stays as it is."""
        known = {leaf for stack in self._stacks for leaf in stack.leaves}
        alike: dict[Any, list[int]] = {}
        for leaf, (adapter, window) in enumerate(zip(self._adapters, self._windows, strict=True)):
            if window is not None and leaf not in known and self.is_in_use(leaf):
                alike.setdefault((window, adapter, self._shapes[leaf]), []).append(leaf)
        self._stacks += [Stack(window, adapter, tuple(found)) for (window, adapter, _), found in alike.items()]
        self._window_bytes = {
            window: sum(self.leaf_bytes(leaf) for leaf, its in enumerate(self._windows) if its == window)
            for window in self.windows
        }

    @property
    def leaf_count(self) -> int:
        return len(self._adapters)

    @property
    def is_quantized(self) -> bool:
        """Whether KVCache layers are quantized from offset 0."""
        return self._kv_bits is not None

    def leaf_bytes(self, leaf: int) -> int:
        """Bytes of a token in a leaf with a time axis, of the state in one without; 0 until a pass showed it."""
        return sum(math.prod(shape) * dtype.size for *shape, dtype in self._shapes[leaf] or ())

    def uses_points(self, caches: Sequence[Any]) -> bool:
        """Whether some point layer of these caches holds state."""
        return any(adapter.is_point and not adapter.is_empty(cache) for cache, adapter in self.leaves(caches))

    @property
    def is_known(self) -> bool:
        """Whether some forward pass was seen through, and has shown what state takes."""
        return self._in_use is not None

    def is_in_use(self, leaf: int) -> bool:
        """Whether some forward pass that was seen through wrote this leaf."""
        return self._in_use is not None and self._in_use[leaf]

    def evaluate(self, caches: Sequence[Any]) -> None:
        """Evaluate every live array; raises what MLX raises when one of them cannot be."""
        mx.eval(self.arrays(caches))

    def own(self, caches: Sequence[Any], *, was_empty: bool = True) -> None:
        """Evaluate the live arrays and replace those that may be views of activations by owned copies.

        Args:
            was_empty: whether their first forward pass may have come since they were last owned.
        """
        self.evaluate(caches)
        copies: list[mx.array] = []
        for cache, adapter in self.leaves(caches):
            copies += _own(cache, adapter, was_empty)
            if sum(array.nbytes for array in copies) > TOGETHER_BYTES:
                mx.eval(copies)
                copies = []
        mx.eval(copies)

    def own_lazily(self, caches: Sequence[Any], *, was_empty: bool = True) -> None:
        """As `own`, without waiting for anything."""
        for cache, adapter in self.leaves(caches):
            _own(cache, adapter, was_empty)

    def hold(self, caches: Sequence[Any], tokens: int) -> list[Any]:
        """What `roll_back` needs to undo a forward pass of so many tokens that is about to start."""
        return [adapter.hold(cache, tokens) for cache, adapter in self.leaves(caches)]

    def roll_back(self, caches: Sequence[Any], held: list[Any]) -> bool:
        """Undo a forward pass that broke off; False when some layer's state cannot be had back."""
        pairs = zip(self.leaves(caches), held, strict=True)
        # Every layer is rolled back, also after one that could not be.
        return sum(not adapter.roll_back(cache, h) for (cache, adapter), h in pairs) == 0

    def can_rewind(self, caches: Sequence[Any], offset: int, target: int) -> bool:
        """Whether the live state, which stands at `offset`, can be moved back to `target` without a snapshot."""
        if target >= offset:
            return target == offset
        return all(a.is_empty(cache) or a.can_rewind(cache, target) for cache, a in self.leaves(caches))

    def rewind(self, caches: Sequence[Any], offset: int, target: int) -> None:
        """Move all leaves from `offset` back to `target`; `can_rewind` said that it works."""
        if target < offset:
            for cache, adapter in self.leaves(caches):
                moved = adapter.is_empty(cache) or adapter.restore(cache, None, target)
                assert moved, (type(cache).__name__, offset, target)

    def rewind_spans(self, caches: Sequence[Any], target: int) -> None:
        """Move the span leaves back to `target` and leave the point leaves where they are."""
        for cache, adapter in self._span_leaves(caches):
            moved = adapter.restore(cache, None, target)
            assert moved, (type(cache).__name__, target)

    def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        """Copy the tokens [start, end) of all span layers out of the live buffers."""
        snapshots = [None if a.is_point else a.snapshot(c, start, end) for c, a in self.leaves(caches)]
        return self.spans_of(snapshots, start, end)

    def take_out(self, caches: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> list[Spans]:
        """`page_out` of each [start, end), and empty the span layers on the way, one at a time."""
        rows: list[list[Any]] = [[] for _ in cuts]
        for cache, adapter in self.leaves(caches):
            found = [None if adapter.is_point else adapter.snapshot(cache, start, end) for start, end in cuts]
            mx.eval([array for snapshot in found if snapshot is not None for array in snapshot.arrays()])
            for row, snapshot in zip(rows, found, strict=True):
                row.append(snapshot)
            if not adapter.is_point:
                adapter.free(cache)
        return [self.spans_of(row, start, end) for row, (start, end) in zip(rows, cuts, strict=True)]

    def spans_of(self, snapshots: list[Any], start: int, end: int) -> Spans:
        """The span leaves' snapshots of [start, end) as one, evaluated; None for every other leaf."""
        return Spans(start, end, snapshots, _evaluated_nbytes(snapshots))

    def page_in(self, caches: Sequence[Any], spans: Spans, target: int, *, wait: bool = True) -> int:
        """Write what the span layers lack up to `target` into the live buffers; returns the bytes written.

        Without `wait` more is to follow, which waits for this as well.
        """
        begin = max(spans.start, self.span_offset(caches))
        written: list[mx.array] = []
        for (cache, adapter), snapshot in zip(self.leaves(caches), spans.leaves, strict=True):
            if snapshot is not None:
                restored = adapter.restore(cache, snapshot, target)
                assert restored, (type(cache).__name__, spans.start, spans.end, target)
                written += adapter.buffers(cache) if wait else []
        _evaluate_written(written)
        return spans.nbytes * (target - begin) // (spans.end - spans.start) if target > begin else 0

    def span_offset(self, caches: Sequence[Any]) -> int:
        """Where the span layers stand; 0 when there are none in use."""
        return min((adapter.offset(cache) or 0 for cache, adapter in self._span_leaves(caches)), default=0)

    def split(self, spans: Spans, at: int) -> tuple[Spans, Spans, int]:
        """Cut at offset `at`, strictly inside; also returns the bytes that had to be copied."""
        pairs = zip(self._adapters, spans.leaves, strict=True)
        halves = [(None, None) if snapshot is None else adapter.split(snapshot, at) for adapter, snapshot in pairs]
        uppers, lowers = [upper for upper, _ in halves], [lower for _, lower in halves]
        copied = _new_nbytes([*uppers, *lowers], spans)
        return self.spans_of(uppers, spans.start, at), self.spans_of(lowers, at, spans.end), copied

    def merge(self, upper: Spans, lower: Spans) -> tuple[Spans, int]:
        """Join two spans that touch; also returns the bytes that had to be copied."""
        sides = zip(self._adapters, upper.leaves, lower.leaves, strict=True)
        joined = [adapter.merge(up, low) for adapter, up, low in sides]
        spans = self.spans_of(joined, upper.start, lower.end)
        return spans, _new_nbytes(joined, upper, lower)

    # Windows

    def window_bytes(self, window: Window) -> int:
        """Bytes of a token in all layers with this window; 0 until a pass showed it."""
        return self._window_bytes.get(window, 0)

    def layers_of(self, window: Window) -> int:
        """How many layers in use have this window."""
        return sum(len(stack.leaves) for stack in self._stacks if stack.window == window)

    def stored(self, spans: Spans, window: Window) -> list[Range]:
        """Of which tokens state of the layers with this window is there, in order."""
        return self._first(window).stored(spans)

    def held(self, caches: Sequence[Any]) -> dict[Window, list[Range]]:
        """What the live windows have, in order."""
        pairs = self.leaves(caches)
        return {window: self._first(window).held(pairs) for window in self.windows}

    def _first(self, window: Window) -> Stack:
        """The stack that speaks for all with this window."""
        return next(stack for stack in self._stacks if stack.window == window)

    def capture(self, caches: Sequence[Any], start: int, end: int, wanted: Mapping[Window, Sequence[Range]]) -> Spans:
        """Copy what the live windows have of the tokens wanted, all in [start, end)."""
        pairs = self.leaves(caches)
        snapshots: list[WindowSnapshot | None] = [None] * len(pairs)
        for stack in self._stacks:
            if found := stack.caches(pairs):
                its = stack.adapter.snapshot_stack(found, start, end, wanted.get(stack.window, ()))
                snapshots[stack.leaves[0]] = its
        return self.spans_of(snapshots, start, end)

    def within(self, spans: Spans, kept: Mapping[Window, Sequence[Range]]) -> tuple[Spans, int]:
        """Of state of windows what lies in these tokens; also returns the bytes that had to be copied."""
        cut: list[WindowSnapshot | None] = []
        new: list[mx.array] = []
        for leaf, window in zip(spans.leaves, self._windows, strict=True):
            found = None if leaf is None or window is None else leaf.within(kept[window])
            if found is not None and any(map(is_not, found.pieces, leaf.pieces)):
                known = set(map(id, leaf.arrays()))
                new += [array for array in found.arrays() if id(array) not in known]
            cut.append(found)
        mx.eval(new)
        nbytes = sum(leaf.nbytes for leaf in cut if leaf is not None)
        return Spans(spans.start, spans.end, cut, nbytes), sum(array.nbytes for array in new)

    def with_more(self, spans: Spans, more: Spans) -> Spans:
        """State of windows as well of tokens that it was not of."""
        both = [
            ours if theirs is None else theirs if ours is None else ours.with_more(theirs.pieces)
            for ours, theirs in zip(spans.leaves, more.leaves, strict=True)
        ]
        return Spans(spans.start, spans.end, both, spans.nbytes + more.nbytes)

    # Point state

    def checkpoint(self, caches: Sequence[Any], offset: int, kind: str) -> Checkpoint:
        """Copy the state of all point layers but windows, which stand at `offset`."""
        pairs = zip(self.leaves(caches), self._windows, strict=True)
        snapshots = [a.snapshot(c, 0, offset) if a.is_point and window is None else None for (c, a), window in pairs]
        return self.checkpoint_of(snapshots, offset, kind)

    def checkpoint_of(self, snapshots: list[Any], offset: int, kind: str) -> Checkpoint:
        """Those layers' snapshots at `offset` as one, evaluated; None for every other leaf."""
        return Checkpoint(offset, snapshots, _evaluated_nbytes(snapshots), kind)

    def restore_points(
        self, caches: Sequence[Any], checkpoint: Checkpoint | None, target: int, stored: Sequence[Spans] = ()
    ) -> None:
        """Put the point layers to `target`.

        Args:
            checkpoint: of those that are no windows; None: there are none in use, or the target is 0.
            stored: state of windows, with all that they need there.

        Raises:
            LiveStateError: it has not, or MLX failed while the caches were written.
        """
        if target == 0:
            self._empty_points(caches)
            return
        pairs = self.leaves(caches)
        restored: set[int] = set()
        for stack in self._stacks:
            restored.update(stack.restore(pairs, stored, target))
        for index, (cache, adapter) in enumerate(pairs):
            snapshot = checkpoint.leaves[index] if checkpoint is not None and checkpoint.leaves else None
            if snapshot is not None:
                if not adapter.restore(cache, snapshot, target):
                    raise LiveStateError(f"{type(cache).__name__}: the state at {target} is not all there.")
                restored.add(index)
            elif adapter.is_point and index not in restored and adapter is not PROBED and not adapter.is_empty(cache):
                adapter.free(cache)  # it was not in use when the state was stored
        _evaluate_written([array for index in restored for array in pairs[index][1].buffers(pairs[index][0])])

    def empty(self, caches: Sequence[Any]) -> None:
        """Let go of all state, in the cache objects themselves."""
        self._empty_points(caches)
        for cache, adapter in self._span_leaves(caches):
            adapter.free(cache)

    def reserve(self, caches: Sequence[Any], capacity_tokens: int, like: Spans | None = None) -> None:
        """Set the capacity of the span buffers, one leaf at a time so that at most one is held twice."""
        for index, (cache, adapter) in enumerate(self.leaves(caches)):
            adapter.reserve(cache, capacity_tokens, None if like is None or adapter.is_point else like.leaves[index])

    def grow(self, caches: Sequence[Any], capacity_tokens: int) -> None:
        """Set the capacity of the span buffers without waiting for anything."""
        for cache, adapter in self.leaves(caches):
            if not adapter.is_point:
                adapter.reserve(cache, capacity_tokens, wait=False)

    def compare(self, caches: Sequence[Any]) -> None:
        """Check foreign caches against what the tree's state looks like.

        SnapshotError: other classes, a batch larger than 1, other head shapes or dtypes.
        """
        fresh = self.leaves(self.fresh())
        pairs = self.leaves(caches)
        found, wanted = ([type(c).__name__ for c, _ in side] for side in (pairs, fresh))
        if found != wanted:
            raise SnapshotError(f"caches are {_counted(found)}; wanted {_counted(wanted)}.")
        for layer, ((cache, adapter), known) in enumerate(zip(pairs, self._shapes, strict=True)):
            if adapter.is_empty(cache):
                continue
            batch = {b.shape[0] for b in adapter.buffers(cache) if b.ndim > 1}
            if batch - {1}:
                raise SnapshotError(f"layer {layer} ({type(cache).__name__}) has batch {max(batch)}; wanted 1.")
            if known is not None and not _fit(adapter.shapes(cache), known):
                raise SnapshotError(f"layer {layer} has shapes {adapter.shapes(cache)}; the tree holds {known}.")

    def release(self) -> None:
        """Give MLX's free buffers back to the system."""
        mx.clear_cache()

    # State in a store

    def block_buffers(self, spans: Sequence[Spans], windows: Sequence[Spans], start: int, end: int) -> Buffers:
        """The state of the tokens [start, end), which these have. TypeError: it is of a kind that cannot be stored."""
        arrays = stored.span_arrays(spans, start, end)
        for its in windows:
            arrays |= stored.window_arrays(its, start, end)
        shapes = {} if start else {"shapes": stored.shapes_buffer(self.shapes)}
        return {**stored.buffers_of(arrays), **shapes}

    def point_buffers(self, checkpoint: Checkpoint) -> Buffers:
        """The state of a checkpoint. TypeError: as above."""
        return stored.point_buffers(checkpoint)

    def spans_in(self, buffers: Buffers, start: int, end: int) -> list[Any]:
        """The span leaves' snapshots of [start, end), not evaluated, out of a block's buffers; it is learnt from."""
        if "shapes" in buffers:
            self.take_over(stored.shapes_in(buffers["shapes"]))
        return stored.spans_in(buffers, start, end, self.leaf_count)

    def windows_in(self, buffers: Buffers, start: int, end: int) -> list[Any]:
        """The same of what is there of layers with windows."""
        return stored.windows_in(buffers, start, end, self.leaf_count)

    def points_in(self, buffers: Buffers, end: int) -> list[Any]:
        """The snapshots of a stored checkpoint at offset `end`, not evaluated."""
        return stored.points_in(buffers, end, self.leaf_count)

    def _span_leaves(self, caches: Sequence[Any]) -> list[Leaf]:
        return [(cache, a) for cache, a in self.leaves(caches) if not a.is_point and not a.is_empty(cache)]

    def _empty_points(self, caches: Sequence[Any]) -> None:
        for index, (cache, adapter) in enumerate(self.leaves(caches)):
            if adapter is PROBED and not adapter.is_empty(cache):
                cache.__dict__ = dict(vars(self.leaves(self.fresh())[index][0]))
            elif adapter.is_point and not adapter.is_empty(cache):
                adapter.free(cache)

    def _quantized(self, cache: Any) -> Any:
        from mlx_lm.models.cache import CacheList, KVCache

        if type(cache) is CacheList:
            return CacheList(*(self._quantized(inner) for inner in cache.caches))
        if type(cache) is KVCache:
            return cache.to_quantized(group_size=self._kv_group_size, bits=self._kv_bits)
        return cache


def _own(cache: Any, adapter: Adapter, was_empty: bool) -> list[mx.array]:
    return adapter.shrink(cache) if not was_empty and is_windowed(adapter) else adapter.own(cache)


def _fit(found: tuple[Any, ...], known: tuple[Any, ...]) -> bool:
    """Whether shapes are equal, but for arrays that one side does not have yet."""
    pairs = list(zip(found, known, strict=False))
    return len(found) == len(known) and all(a == b or ("none",) in (a, b) for a, b in pairs)


def _evaluate_written(arrays: list[mx.array]) -> None:
    """Evaluate live buffers that were just written to; they cannot be written again if that fails."""
    try:
        mx.eval(arrays)
    except NATIVE_ERRORS as error:
        raise LiveStateError(f"restoring the live state failed: {error}") from error


def _evaluated_nbytes(snapshots: list[Any]) -> int:
    arrays = [array for s in snapshots if s is not None for array in s.arrays()]
    mx.eval(arrays)
    return sum(array.nbytes for array in arrays)


def _new_nbytes(snapshots: list[Any], *before: Spans) -> int:
    """Bytes of the arrays that were not there before."""
    known = {id(array) for spans in before for s in spans.leaves if s is not None for array in s.arrays()}
    return sum(array.nbytes for s in snapshots if s is not None for array in s.arrays() if id(array) not in known)


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"


Layout = ArrayLayout | SizedLayout
