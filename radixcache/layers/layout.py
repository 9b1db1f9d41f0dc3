"""Layout: all layers of a model's live cache as one.

A model's cache is a list with an object per layer. A layer may have none (None), several (CacheList) or one that it
never uses. The leaves are the objects that hold state. Generators replace objects and models reassign arrays, so each
call walks the leaves. The layout stores only what does not change: shapes, bytes, and which leaves are in use.

    Shape         sizes, windows and kinds of state, of any model
    ModelShape    the same, learnt from the first forward passes of a model of mlx-lm
    Layout        adds operations on state as arrays; `SizedLayout` (sizes.py) has the same operations on sizes

Leaves of one class with equal windows and shapes are a stack: they always stand at the same offset, and one snapshot
with arrays (S, H, T, D) under the first leaf holds the state of all S.

Invariants:

  L1  All state that the layout hands out is evaluated, so that any thread may use it.
  L2  State of a failed evaluation is dropped: on some back ends an evaluation raises once, and later reads of the same
      arrays return wrong content without an error.
"""

from __future__ import annotations

import dis
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx
import psutil
from mlx_lm.models.cache import CacheList, KVCache

from radixcache.adapters.contract import NEVER, Adapter, Checkpoint, Range, Spans, Window, WindowSnapshot
from radixcache.adapters.point import untouched
from radixcache.adapters.registry import PROBED, adapter_for, leaves
from radixcache.adapters.span import KeysAndValues, SpanSnapshot, stored_nbytes
from radixcache.adapters.window import WindowAdapter, is_windowed
from radixcache.errors import RadixCacheError, SnapshotError
from radixcache.layers import stored
from radixcache.layers.stored import Buffers
from radixcache.tokens import token_ids

#: What MLX raises for a failed evaluation or allocation.
NATIVE_ERRORS = (RuntimeError, MemoryError)
#: Copies are evaluated together up to this many bytes. During the evaluation, these bytes are held twice.
TOGETHER_BYTES = 32 << 20

Leaf = tuple[Any, Adapter]


class LiveStateError(RadixCacheError):
    """A write into live buffers failed half way. Their content must not be used."""


class Shape:
    """Sizes and kinds of a model's state.

    Attributes:
        leaf_count: objects that hold state, in one live cache.
        token_bytes: bytes of a live token over all span leaves; 0 before a forward pass was seen.
        stored_token_bytes: the same in snapshots.
        state_bytes: bytes of the state of all recurrent layers.
        windows: the different windows of leaves in use.
        has_points: some leaf in use is a point leaf. has_states: one of these is no window.
    """

    leaf_count = token_bytes = stored_token_bytes = state_bytes = 0
    windows: tuple[Window, ...] = ()
    has_states = has_points = False

    def __init__(self) -> None:
        #: For each window: bytes of a token, live and in snapshots; how many leaves have the window; the first leaf.
        self._window_bytes: dict[Window, int] = {}
        self._stored_window_bytes: dict[Window, int] = {}
        self._layers_of: dict[Window, int] = {}
        self._first_leaf: dict[Window, int] = {}

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the live state of a request with `tokens` tokens; 0 before the first pass."""
        nbytes = tokens * self.token_bytes + self.state_bytes
        for window in self.windows:
            nbytes += window.count(tokens) * self.window_bytes(window)
        return nbytes

    def window_bytes(self, window: Window) -> int:
        """Bytes of a token in all leaves with this window; 0 before it is known."""
        return self._window_bytes.get(window, 0)

    def stored_window_bytes(self, window: Window) -> int:
        """As `window_bytes`, in snapshots."""
        return self._stored_window_bytes.get(window, 0)

    def layers_of(self, window: Window) -> int:
        """How many leaves in use have this window."""
        return self._layers_of.get(window, 0)

    @property
    def is_smaller_at_rest(self) -> bool:
        """Whether tokens take fewer bytes in the tree than in live buffers."""
        return self.stored_token_bytes < self.token_bytes

    def stored(self, spans: Spans, window: Window) -> list[Range]:
        """The ranges of tokens that `spans` hold for the leaves with this window, in order."""
        snapshot = spans.leaves[self._first_leaf[window]]
        return [] if snapshot is None else snapshot.ranges

    def with_more(self, spans: Spans, more: Spans) -> Spans:
        """Join two parts of the window state of one edge, which hold different tokens."""
        both = [
            ours if theirs is None else theirs if ours is None else ours.with_more(theirs.pieces)
            for ours, theirs in zip(spans.leaves, more.leaves, strict=True)
        ]
        return Spans(spans.start, spans.end, both, spans.nbytes + more.nbytes)


class ModelShape(Shape):
    """The shape of lists of mlx-lm cache objects that `factory` makes, with the same classes each time.

    Attributes:
        is_quantized: KVCache layers are quantized from offset 0, as `kv_bits` and `kv_group_size` say.
        stored_bits: bits of a value of spans and windows in snapshots; None: as in the live caches.
        shapes: of each leaf its adapter's `shapes`; None before the leaf was written.

    Raises:
        UnsupportedCacheError: a cache class has no adapter.
    """

    def __init__(
        self,
        factory: Callable[[], Sequence[Any]],
        kv_bits: int | None,
        kv_group_size: int,
        stored_bits: int | None = None,
    ) -> None:
        super().__init__()
        self._factory = factory
        self._kv_bits = kv_bits
        self._kv_group_size = kv_group_size
        self.is_quantized = kv_bits is not None
        self.stored_bits = stored_bits
        self._leaf_classes: list[type] = []
        self._leaf_adapters: list[Adapter] = []
        self._flat_classes: list[type] | None = None  # the classes if each cache is a leaf
        pairs = self.leaves(self.fresh())
        self.leaf_count = len(pairs)
        self._adapters = [adapter for _, adapter in pairs]
        self._windows = [adapter.window(cache) if is_windowed(adapter) else None for cache, adapter in pairs]
        self._stacks: list[Stack] = []
        self.shapes: list[tuple[Any, ...] | None] = [None] * len(pairs)
        # Leaves that a forward pass writes; None before one was seen. A model may leave some unused.
        self._in_use: list[bool] | None = None
        self._note_use([True] * len(pairs))

    def fresh(self) -> list[Any]:
        return [cache if self._kv_bits is None else self._quantized(cache) for cache in self._factory()]

    def leaves(self, caches: Sequence[Any]) -> list[Leaf]:
        """Each leaf with its adapter, in order."""
        classes = list(map(type, caches))
        if classes == self._flat_classes:  # nearly always
            return list(zip(caches, self._leaf_adapters, strict=True))
        flat = leaves(caches)
        leaf_classes = list(map(type, flat))
        if leaf_classes != self._leaf_classes:
            self._leaf_adapters = [adapter_for(cache, layer) for layer, cache in enumerate(flat)]
            self._leaf_classes = leaf_classes
            self._flat_classes = classes if leaf_classes == classes else None
        return list(zip(flat, self._leaf_adapters, strict=True))

    @property
    def is_known(self) -> bool:
        """Whether a complete forward pass was seen."""
        return self._in_use is not None

    def is_in_use(self, leaf: int) -> bool:
        return self._in_use is not None and self._in_use[leaf]

    def leaf_bytes(self, leaf: int) -> int:
        """Bytes of a token in a leaf with a time axis, else of the whole state; 0 before it is known."""
        shapes = self.shapes[leaf] or ()
        return sum(math.prod(shape) * dtype.size for *shape, dtype in shapes if isinstance(dtype, mx.Dtype))

    def stored_leaf_bytes(self, leaf: int) -> int:
        """Bytes of a token in a leaf's snapshots; 0 before it is known."""
        its = isinstance(self._adapters[leaf], KeysAndValues)
        return stored_nbytes(self.shapes[leaf] or (), self.stored_bits) if its else self.leaf_bytes(leaf)

    def learn(self, caches: Sequence[Any]) -> None:
        """Learn shapes, sizes and the leaves in use from a live cache after a forward pass."""
        if self._in_use is not None and all(self._in_use):
            return  # nothing is left to learn
        pairs = self.leaves(caches)
        written = [not adapter.is_empty(cache) for cache, adapter in pairs]
        if not any(written):
            return
        in_use = [now or known for now, known in zip(written, self._in_use or written, strict=True)]
        if in_use == self._in_use:
            return
        for index, (cache, adapter) in enumerate(pairs):
            if written[index] and self.shapes[index] is None:
                self.shapes[index] = adapter.shapes(cache)
        self._in_use = in_use
        self._note_use(in_use)
        if self.stored_bits and all(
            self.stored_leaf_bytes(leaf) == self.leaf_bytes(leaf) for leaf in range(len(pairs))
        ):
            why = "no layer has keys and values in floating point whose heads have a multiple of 32 elements"
            warnings.warn(f"stored_bits={self.stored_bits} changes nothing: {why}.", RuntimeWarning, stacklevel=2)

    def take_over(self, shapes: Sequence[Any]) -> None:
        """As `learn`, from the `shapes` of another layout of the same caches. Does nothing if this layout is known.

        The lock is held, as for `learn`.
        """
        if not self.is_known and len(shapes) == len(self.shapes):
            self.shapes = list(shapes)
            self._in_use = [its is not None for its in shapes]
            self._note_use(self._in_use)

    def _note_use(self, in_use: Sequence[bool]) -> None:
        """Derive sizes, the kinds of state and the stacks from the leaves in use. Older stacks stay as they are."""
        spans = [leaf for leaf, adapter in enumerate(self._adapters) if not adapter.is_point]
        self.token_bytes = sum(map(self.leaf_bytes, spans))
        self.stored_token_bytes = sum(map(self.stored_leaf_bytes, spans))
        # The first and last leaf in use without an offset; None: unknown yet.
        self._blind: tuple[int, ...] | None = None
        used = [(a, window) for a, window, its in zip(self._adapters, self._windows, in_use, strict=True) if its]
        self.has_states = any(adapter.is_point and window is None for adapter, window in used)
        self.windows = tuple(dict.fromkeys(window for _, window in used if window is not None))
        self.has_points = self.has_states or bool(self.windows)
        known = {leaf for stack in self._stacks for leaf in stack.leaves}
        alike: dict[Any, list[int]] = {}
        for leaf, (adapter, window) in enumerate(zip(self._adapters, self._windows, strict=True)):
            if window is not None and leaf not in known and self.is_in_use(leaf):
                alike.setdefault((window, adapter, self.shapes[leaf]), []).append(leaf)
        self._stacks += [Stack(window, adapter, tuple(found)) for (window, adapter, _), found in alike.items()]
        kinds = enumerate(zip(self._adapters, self._windows, strict=True))
        states = [leaf for leaf, (adapter, window) in kinds if adapter.is_point and window is None]
        self.state_bytes = sum(map(self.leaf_bytes, states))
        # The first stack of a window represents all stacks of this window.
        self._first_stack = {stack.window: stack for stack in reversed(self._stacks)}
        self._first_leaf = {window: stack.leaves[0] for window, stack in self._first_stack.items()}
        self._layers_of = {
            window: sum(len(stack.leaves) for stack in self._stacks if stack.window == window)
            for window in self._first_stack
        }
        self._window_bytes, self._stored_window_bytes = (
            {
                window: sum(nbytes(leaf) for leaf, its in enumerate(self._windows) if its == window)
                for window in self.windows
            }
            for nbytes in (self.leaf_bytes, self.stored_leaf_bytes)
        )

    def _quantized(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self._quantized(inner) for inner in cache.caches))
        if type(cache) is KVCache:
            return cache.to_quantized(group_size=self._kv_group_size, bits=self._kv_bits)
        return cache


class Layout(ModelShape):
    """The shape of a model, and its state as arrays: operations on live caches and on snapshots."""

    # The device

    def device_bytes(self) -> int:
        """Bytes that the device can still give to MLX.

        Source: MLX's recommended working set less its active memory, if the device states one (Metal); else the
        available memory of the system, and what MLX keeps of freed buffers.
        """
        working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
        if working_set:
            return max(0, working_set - mx.get_active_memory())
        return int(psutil.virtual_memory().available) + mx.get_cache_memory()

    # The live caches

    def offsets(self, caches: Sequence[Any], trusted: bool = False) -> tuple[int, int] | None:
        """Smallest and largest offset of the leaves in use; None: no leaf in use knows its offset.

        An empty leaf in use stands at 0. Before a pass was seen, `trusted` means that empty leaves are not in use.
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
        """Offset of the first leaf in use that knows it. All agree unless a forward pass failed."""
        known = (adapter.offset(cache) for cache, adapter in self.leaves(caches) if not adapter.is_empty(cache))
        return next((offset for offset in known if offset is not None), None)

    def is_empty(self, caches: Sequence[Any]) -> bool:
        return all(adapter.is_empty(cache) for cache, adapter in self.leaves(caches))

    def arrays(self, caches: Sequence[Any]) -> list[mx.array]:
        return [array for cache, adapter in self.leaves(caches) for array in adapter.buffers(cache)]

    def identities(self, caches: Sequence[Any]) -> list[list[mx.array]]:
        """The arrays of the first and last leaf in use without an offset. A forward pass replaces these arrays."""
        if self._blind == ():
            return []
        pairs = self.leaves(caches)
        if self._blind is None:
            in_use = self._in_use or [True] * len(pairs)
            blind = [i for i, (cache, adapter) in enumerate(pairs) if in_use[i] and adapter.offset(cache) is None]
            self._blind = (blind[0], blind[-1]) if blind else ()
        return [adapter.buffers(cache) for cache, adapter in (pairs[index] for index in self._blind)]

    def live_nbytes(self, caches: Sequence[Any]) -> int:
        return sum([array.nbytes for array in self.arrays(caches)])

    def spare_nbytes(self, caches: Sequence[Any]) -> int:
        return sum(adapter.spare_nbytes(cache) for cache, adapter in self.leaves(caches))

    def capacity(self, caches: Sequence[Any]) -> int:
        """Tokens that fit before some leaf allocates again; 0 for an empty live cache."""
        return min((a.capacity(cache) for cache, a in self.leaves(caches) if not a.is_empty(cache)), default=0)

    def span_capacity(self, caches: Sequence[Any]) -> int:
        """Tokens that the span buffers can hold; NEVER if none of them grows."""
        return min([adapter.capacity(cache) for cache, adapter in self._span_leaves(caches)], default=NEVER)

    def uses_points(self, caches: Sequence[Any]) -> bool:
        return any(adapter.is_point and not adapter.is_empty(cache) for cache, adapter in self.leaves(caches))

    def evaluate(self, caches: Sequence[Any]) -> None:
        mx.eval(self.arrays(caches))

    def own(self, caches: Sequence[Any], *, was_empty: bool = True, wait: bool = True) -> None:
        """Replace live arrays that may be views of activations by owned copies; `wait`: evaluate all.

        `was_empty`: these caches may have had their first forward pass since the last call.
        """
        if wait:
            self.evaluate(caches)
        copies: list[mx.array] = []
        copied_bytes = 0
        for cache, adapter in self.leaves(caches):
            if its := adapter.shrink(cache) if not was_empty and is_windowed(adapter) else adapter.own(cache):
                copies += its
                copied_bytes += sum([array.nbytes for array in its])
                if wait and copied_bytes > TOGETHER_BYTES:
                    mx.eval(copies)
                    copies, copied_bytes = [], 0
        if wait:
            mx.eval(copies)

    def hold(self, caches: Sequence[Any], tokens: int) -> list[Any]:
        """What `roll_back` needs to undo the next forward pass, of `tokens` tokens."""
        return [adapter.hold(cache, tokens) for cache, adapter in self.leaves(caches)]

    def roll_back(self, caches: Sequence[Any], held: list[Any]) -> bool:
        """Undo a failed forward pass in every layer. False: the state of some layer is lost."""
        pairs = zip(self.leaves(caches), held, strict=True)
        return sum(not adapter.roll_back(cache, h) for (cache, adapter), h in pairs) == 0

    @contextmanager
    def scratch(self, caches: Sequence[Any], first: int) -> Iterator[list[Any]]:
        """The caches from `first` on, for any number of passes. The block leaves them as they were."""
        pairs = self.leaves(caches)[len(leaves(caches[:first])) :]
        spans = [(adapter, cache, adapter.hold(cache, 1)) for cache, adapter in pairs if not adapter.is_point]
        with untouched([cache for cache, adapter in pairs if adapter.is_point]):
            try:
                yield list(caches[first:])
            finally:
                for adapter, cache, before in spans:
                    adapter.roll_back(cache, before)

    def can_rewind(self, caches: Sequence[Any], offset: int, target: int) -> bool:
        """Whether live state at `offset` can go back to `target` without a snapshot."""
        if target >= offset:
            return target == offset
        return all(a.is_empty(cache) or a.can_rewind(cache, target) for cache, a in self.leaves(caches))

    def rewind(self, caches: Sequence[Any], offset: int, target: int) -> None:
        """Move all leaves from `offset` back to `target`, if `can_rewind` is true."""
        if target < offset:
            for cache, adapter in self.leaves(caches):
                moved = adapter.is_empty(cache) or adapter.restore(cache, None, target)
                assert moved, (type(cache).__name__, offset, target)

    def rewind_spans(self, caches: Sequence[Any], target: int) -> None:
        for cache, adapter in self._span_leaves(caches):
            moved = adapter.restore(cache, None, target)
            assert moved, (type(cache).__name__, target)

    def reserve(
        self, caches: Sequence[Any], capacity_tokens: int, like: Spans | None = None, *, wait: bool = True
    ) -> None:
        """Set the capacity of the span buffers. Works leaf by leaf, so that at most one leaf is held twice.

        Empty leaves take their shapes from `like`. `wait`: evaluate each leaf, and shrink windows too.
        """
        for index, (cache, adapter) in enumerate(self.leaves(caches)):
            if wait or not adapter.is_point:
                shaped = None if like is None or adapter.is_point else like.leaves[index]
                adapter.reserve(cache, capacity_tokens, shaped, wait)

    def empty(self, caches: Sequence[Any]) -> None:
        self._empty_points(caches)
        for cache, adapter in self._span_leaves(caches):
            adapter.free(cache)

    def compare(self, caches: Sequence[Any]) -> None:
        """Raise SnapshotError if foreign caches differ from the tree's in class, batch, head shape or dtype."""
        fresh = self.leaves(self.fresh())
        pairs = self.leaves(caches)
        found, wanted = ([type(c).__name__ for c, _ in side] for side in (pairs, fresh))
        if found != wanted:
            raise SnapshotError(f"caches are {_counted(found)}; wanted {_counted(wanted)}.")
        for layer, ((cache, adapter), known) in enumerate(zip(pairs, self.shapes, strict=True)):
            if adapter.is_empty(cache):
                continue
            batch = {b.shape[0] for b in adapter.buffers(cache) if b.ndim > 1}
            if batch - {1}:
                raise SnapshotError(f"layer {layer} ({type(cache).__name__}) has batch {max(batch)}; wanted 1.")
            shapes = adapter.shapes(cache)
            both = zip(shapes, known or shapes, strict=False)
            if len(shapes) != len(known or shapes) or not all(_fit(*each) for each in both):
                raise SnapshotError(f"layer {layer} has shapes {shapes}; the tree holds {known}.")

    def row_of(self, caches: Sequence[Any], row: int) -> list[Any]:
        """One row of mlx-lm's batch caches, as caches of one sequence. Caches of one sequence stay as they are."""
        is_one = list(map(type, leaves(caches))) == [type(cache) for cache, _ in self.leaves(self.fresh())]
        if row == 0 and is_one and all(array.shape[0] == 1 for array in self.arrays(caches) if array.ndim > 1):
            return list(caches)
        if lacking := [type(cache).__name__ for cache in caches if cache is not None and not hasattr(cache, "extract")]:
            raise SnapshotError(f"caches have no rows, as {lacking[0]} has no extract(); wanted batch caches.")
        return [None if cache is None else cache.extract(row) for cache in caches]

    def release(self) -> None:
        """Give MLX's free buffers back to the system."""
        mx.clear_cache()

    # Spans

    def copy(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        """Copy the tokens [start, end) of all span leaves out of the live buffers, in the form of the buffers."""
        return _spans(self._snapshots(caches, start, end), start, end)

    def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        """As `copy`, in the form that the tree stores."""
        snapshots = self._snapshots(caches, start, end)
        return _spans(snapshots if self.stored_bits is None else [*map(self.at_rest, snapshots)], start, end)

    def _snapshots(self, caches: Sequence[Any], start: int, end: int) -> list[Any]:
        return [None if a.is_point else a.snapshot(c, start, end) for c, a in self.leaves(caches)]

    def take_out(self, caches: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> list[Spans]:
        """`page_out` each [start, end), and empty the span leaves, one leaf at a time."""
        rows: list[list[Any]] = [[] for _ in cuts]
        for cache, adapter in self.leaves(caches):
            found = [
                None if adapter.is_point else self.at_rest(adapter.snapshot(cache, start, end)) for start, end in cuts
            ]
            mx.eval([array for snapshot in found if snapshot is not None for array in snapshot.arrays()])
            for row, snapshot in zip(rows, found, strict=True):
                row.append(snapshot)
            if not adapter.is_point:
                adapter.free(cache)
        return [self.spans_of(row, start, end) for row, (start, end) in zip(rows, cuts, strict=True)]

    def spans_of(self, snapshots: list[Any], start: int, end: int) -> Spans:
        """Join the snapshots of [start, end), one per leaf or None, in the form that the tree stores, evaluated."""
        return _spans([*map(self.at_rest, snapshots)], start, end)

    def at_rest(self, snapshot: Any) -> Any:
        """A snapshot (or None) in the form that the tree stores, unevaluated. Point state has only one form."""
        is_cut = isinstance(snapshot, (SpanSnapshot, WindowSnapshot))  # called for each layer: faster than a union
        return snapshot.quantized(self.stored_bits) if is_cut else snapshot

    def at_rest_beside(self, snapshot: SpanSnapshot) -> SpanSnapshot:
        """A plain snapshot in the form that the tree stores, with its plain copy for rows that read in place."""
        stored = snapshot.quantized(self.stored_bits)
        return replace(stored, plain=snapshot) if stored.forms else stored

    def without_plain(self, spans: Spans) -> Spans:
        """Spans in the form that the tree stores, without the plain copy; the same object if there is no copy."""
        found = [each.without_plain() if isinstance(each, SpanSnapshot) else each for each in spans.leaves]
        return _spans(found, spans.start, spans.end) if any(map(is_not, found, spans.leaves)) else spans

    def is_plain(self, spans: Spans | None) -> bool:
        """Whether these are spans that were not quantized for the tree."""
        return spans is not None and not any(isinstance(each, SpanSnapshot) and each.forms for each in spans.leaves)

    def with_plain(self, spans: Spans) -> Spans:
        """Spans that can be read in place: quantized leaves get a plain copy. Evaluated leaf by leaf."""
        found = [each.with_plain() if isinstance(each, SpanSnapshot) else each for each in spans.leaves]
        for each in found:
            mx.eval([] if each is None else each.arrays())
        return _spans(found, spans.start, spans.end)

    def page_in(self, caches: Sequence[Any], spans: Spans, target: int, *, wait: bool = True) -> int:
        """Write the tokens up to `target` that span leaves lack into the live buffers. Returns the bytes written."""
        pairs = self.leaves(caches)
        written: list[mx.array] = []
        offsets = (a.offset(cache) for cache, a in pairs if not (a.is_point or a.is_empty(cache)))
        begin = max(spans.start, next(offsets, 0) or 0)  # all span leaves have one offset
        for (cache, adapter), snapshot in zip(pairs, spans.leaves, strict=True):
            if snapshot is not None:
                restored = adapter.restore(cache, snapshot, target)
                assert restored, (type(cache).__name__, spans.start, spans.end, target)
                written += adapter.buffers(cache) if wait else []
        _evaluate_written(written)
        return max(0, target - begin) * self.token_bytes

    def split(self, spans: Spans, at: int) -> tuple[Spans, Spans, int]:
        """Cut at offset `at`, inside the spans. Also returns the bytes copied."""
        pairs = zip(self._adapters, spans.leaves, strict=True)
        halves = [(None, None) if snapshot is None else adapter.split(snapshot, at) for adapter, snapshot in pairs]
        uppers, lowers = [upper for upper, _ in halves], [lower for _, lower in halves]
        copied = _new_nbytes([*uppers, *lowers], spans)
        return _spans(uppers, spans.start, at), _spans(lowers, at, spans.end), copied

    def merge(self, upper: Spans, lower: Spans) -> tuple[Spans, int]:
        """Join two spans that touch. Also returns the bytes copied."""
        sides = zip(self._adapters, upper.leaves, lower.leaves, strict=True)
        joined = [adapter.merge(up, low) for adapter, up, low in sides]
        spans = _spans(joined, upper.start, lower.end)
        return spans, _new_nbytes(joined, upper, lower)

    # Windows

    def held(self, caches: Sequence[Any]) -> dict[Window, list[Range]]:
        """The tokens in the live windows, in order."""
        pairs, held = self.leaves(caches), {}
        for window in self.windows:
            stack = self._first_stack[window]
            live = stack.caches(pairs)
            held[window] = stack.adapter.held(live[0]) if live else []
        return held

    def capture(self, caches: Sequence[Any], start: int, end: int, wanted: Mapping[Window, Sequence[Range]]) -> Spans:
        """Copy the wanted tokens of [start, end) that the live windows have."""
        pairs = self.leaves(caches)
        snapshots: list[WindowSnapshot | None] = [None] * len(pairs)
        for stack in self._stacks:
            if live := stack.caches(pairs):
                tokens = wanted.get(stack.window, ())
                snapshots[stack.leaves[0]] = stack.adapter.snapshot_stack(live, start, end, tokens)
        return self.spans_of(snapshots, start, end)

    def within(self, spans: Spans, wanted: Mapping[Window, Sequence[Range]]) -> tuple[Spans, int]:
        """Cut window state to the wanted tokens. Also returns the bytes copied."""
        cut: list[WindowSnapshot | None] = []
        new: list[mx.array] = []
        for leaf, window in zip(spans.leaves, self._windows, strict=True):
            found = None if leaf is None or window is None else leaf.within(wanted[window])
            if found is not None and any(map(is_not, found.pieces, leaf.pieces)):
                known = set(map(id, leaf.arrays()))
                new += [array for array in found.arrays() if id(array) not in known]
            cut.append(found)
        mx.eval(new)
        nbytes = sum(leaf.nbytes for leaf in cut if leaf is not None)
        return Spans(spans.start, spans.end, cut, nbytes), sum(array.nbytes for array in new)

    # Point state

    def checkpoint(self, caches: Sequence[Any], offset: int, kind: str) -> Checkpoint:
        """Copy the state of all point leaves except windows. They stand at `offset`."""
        pairs = zip(self.leaves(caches), self._windows, strict=True)
        snapshots = [a.snapshot(c, 0, offset) if a.is_point and window is None else None for (c, a), window in pairs]
        return self.checkpoint_of(snapshots, offset, kind)

    def checkpoint_of(self, snapshots: list[Any], offset: int, kind: str) -> Checkpoint:
        """Join the snapshots at `offset`, one per leaf or None, into one evaluated checkpoint."""
        return Checkpoint(offset, snapshots, _evaluated_nbytes(snapshots), kind)

    def restore_points(
        self, caches: Sequence[Any], checkpoint: Checkpoint | None, target: int, stored: Sequence[Spans] = ()
    ) -> None:
        """Move the point leaves to `target`: windows from `stored`, all others from the checkpoint.

        LiveStateError: state is missing, or a write into the caches failed.
        """
        if target == 0:
            self._empty_points(caches)
            return
        pairs = self.leaves(caches)
        restored: set[int] = set()
        for stack in self._stacks:
            found = stack.restore(pairs, stored, target)
            if not found and stack is self._first_stack.get(stack.window):  # other stacks may be in use since later
                raise _incomplete(pairs[stack.leaves[0]][0], target)
            restored.update(found)
        for index, (cache, adapter) in enumerate(pairs):
            snapshot = checkpoint.leaves[index] if checkpoint is not None and checkpoint.leaves else None
            if snapshot is not None:
                if not adapter.restore(cache, snapshot, target):
                    raise _incomplete(cache, target)
                restored.add(index)
            elif adapter.is_point and index not in restored and adapter is not PROBED and not adapter.is_empty(cache):
                adapter.free(cache)  # it was not in use when the checkpoint was taken
        _evaluate_written([array for index in restored for array in pairs[index][1].buffers(pairs[index][0])])

    # State in a store

    def block_buffers(self, spans: Sequence[Spans], windows: Sequence[Spans], start: int, end: int) -> Buffers:
        """Serialize the tokens [start, end) of these spans and windows. TypeError: a snapshot cannot be stored."""
        parts, more = (
            [replace(each, leaves=[*map(self.at_rest, each.leaves)]) for each in its] for its in (spans, windows)
        )
        return stored.block_buffers(parts, more, start, end, None if start else self.shapes)

    def point_buffers(self, checkpoint: Checkpoint) -> Buffers:
        """Serialize a checkpoint. TypeError: a snapshot cannot be stored."""
        return stored.point_buffers(checkpoint)

    def spans_in(self, buffers: Buffers, start: int, end: int) -> list[Any]:
        """The span leaves' snapshots of [start, end) in a block, not evaluated."""
        return stored.spans_in(buffers, start, end, self.leaf_count)

    def windows_in(self, buffers: Buffers, start: int, end: int) -> list[Any]:
        """The windows' snapshots of some tokens of [start, end) in a block, not evaluated."""
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


class Stack(NamedTuple):
    """Leaves, by index, that are stored as one."""

    window: Window
    adapter: WindowAdapter
    leaves: tuple[int, ...]

    def caches(self, pairs: Sequence[Leaf]) -> list[Any]:
        """The objects of these leaves; empty: some were never written."""
        found = [pairs[leaf][0] for leaf in self.leaves]
        return [] if any(map(self.adapter.is_empty, found)) else found

    def restore(self, pairs: Sequence[Leaf], stored: Sequence[Spans], target: int) -> tuple[int, ...]:
        """Move these leaves to `target` and return them. If none of their state is stored, return none.

        LiveStateError: some tokens that `target` needs are not stored; nothing was changed.
        """
        snapshots = [found for spans in stored if (found := spans.leaves[self.leaves[0]]) is not None]
        pieces = sorted((piece for each in snapshots for piece in each.pieces), key=lambda piece: piece.start)
        if not pieces:
            return ()
        caches = [pairs[leaf][0] for leaf in self.leaves]
        if not self.adapter.restore_stack(caches, WindowSnapshot(0, target, pieces), target):
            raise _incomplete(caches[0], target)
        return self.leaves


def _incomplete(cache: Any, target: int) -> LiveStateError:
    return LiveStateError(f"{type(cache).__name__}: the state at {target} is not complete.")


def is_evaluation_failure(error: BaseException | None) -> bool:
    """Whether an exception may come from a failed evaluation: a native error that no Python `raise` raised."""
    if not isinstance(error, NATIVE_ERRORS) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    operation = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[operation] not in ("RAISE_VARARGS", "RERAISE")


def one_each(tokens: Any, row_count: int, vocab_size: int | None) -> mx.array:
    """The next token of each row, (N,) or (N, 1), as an array (N, 1). ValueError: it has another shape or dtype."""
    ids = tokens if isinstance(tokens, mx.array) else mx.array(token_ids(tokens, vocab_size))
    if not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(f"tokens are of dtype {ids.dtype}; wanted integers.")
    if row_count == 0 or ids.shape not in ((row_count,), (row_count, 1)):
        raise ValueError(
            f"tokens of shape {ids.shape} for {row_count} rows; wanted at least one row, and one token for each."
        )
    return ids.reshape(row_count, 1)


def _fit(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    """Whether arrays may be of one model. One side may have no array yet. Arrays of token ids may differ in length."""
    if ours == theirs or ("none",) in (ours, theirs):
        return True
    return len(ours) == len(theirs) == 3 and ours[-1] == theirs[-1] and mx.issubdtype(ours[-1], mx.integer)


def _evaluate_written(arrays: list[mx.array]) -> None:
    """Evaluate live buffers after a write. LiveStateError: that failed."""
    try:
        mx.eval(arrays)
    except NATIVE_ERRORS as error:
        raise LiveStateError(f"restoring the live state failed: {error}") from error


def _spans(snapshots: list[Any], start: int, end: int) -> Spans:
    return Spans(start, end, snapshots, _evaluated_nbytes(snapshots))


def _evaluated_nbytes(snapshots: list[Any]) -> int:
    arrays = [array for s in snapshots if s is not None for array in s.arrays()]
    mx.eval(arrays)
    return sum([array.nbytes for array in arrays])


def _new_nbytes(snapshots: list[Any], *before: Spans) -> int:
    """Bytes of the arrays that are not in `before`."""
    known = {id(array) for spans in before for s in spans.leaves if s is not None for array in s.arrays()}
    return sum(array.nbytes for s in snapshots if s is not None for array in s.arrays() if id(array) not in known)


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"
