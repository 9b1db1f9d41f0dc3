"""Batch: rows that go through forward passes together, or one row by itself.

One row alone has the caches that a session would have: mlx-lm's own windows and recurrent states, and tails of one row
for keys and values. Rows that decode together have mlx-lm's batched windows, recurrent states with a row for each, and
tails of as many. `gathered` makes every batch out of others: rows join, leave and part by it. It copies tails and
states; what is read in place stays where it is. `take_in` lets rows join where there is room for them, and copies no
tails but theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from radixcache.adapters.registry import adapter_for, leaves, with_leaves
from radixcache.adapters.span import SpanSnapshot, owned
from radixcache.errors import UnsupportedCacheError
from radixcache.groups.attention import Pair
from radixcache.groups.tails import GROWTH_COLUMNS, Columns, Part, TailLayer, filled, joined


class LostStateError(RuntimeError):
    """A forward pass broke off behind what cannot be taken back."""


#: A batch and the number of one of its rows.
Place = tuple["Batch", int]
#: Of one leaf what its tokens have in the tails; None: nothing.
Copied = SpanSnapshot | None
#: What undoes a forward pass: lengths and end of the columns, and by leaf what else there is.
Held = tuple[list[int], int, list[Any]]


class Batch:
    """Caches of one row or several.

    Args:
        columns: of all its tails.
        caches: in the order and nesting that the model wants.
        rows: whose they are; None in the place of a row that has left: a hole.
    """

    def __init__(self, columns: Columns, caches: Sequence[Any], rows: Sequence[Any]) -> None:
        self.columns = columns
        self.caches = list(caches)
        self.rows = list(rows)
        self._idle_tokens = 0

    @classmethod
    def of_one(cls, caches: Sequence[Any], row: Any, in_place: int = 0) -> Batch:
        """One row without state but for so many tokens in place; tails take the place of mlx-lm's own.

        UnsupportedCacheError: a layer's state is nothing that mlx-lm's batches have.
        """
        columns = Columns([0], [in_place])
        indices = iter(range(len(leaves(caches))))
        return cls(columns, with_leaves(caches, lambda leaf: _own(leaf, columns, next(indices))), [row])

    @classmethod
    def gathered(cls, places: Sequence[Place], spare: int = 0, spare_rows: int = 0) -> Batch:
        """A batch of these rows, in this order, evaluated; batches that are left without a row are emptied on the way.

        Args:
            spare: columns that the tails have room for besides; one at least.
            spare_rows: rows that they have room for besides.
        """
        lengths = [batch.columns.lengths[at] for batch, at in places]
        in_place = [batch.columns.in_place[at] for batch, at in places]
        columns = Columns(lengths, in_place, max(lengths) + max(spare, 1), spare_rows)
        rows = [batch.rows[at] for batch, at in places]
        sources = list({id(batch): batch for batch, _ in places}.values())
        emptied = [each for each in sources if all(row is None or row in rows for row in each.rows)]
        runs = _runs(places)
        made = []
        for index, column in enumerate(zip(*(batch.leaves for batch in sources), strict=True)):
            of_batch = dict(zip(map(id, sources), column, strict=True))
            leaf = _joined([(of_batch[id(batch)], first, last) for batch, first, last in runs], columns, index)
            mx.eval(arrays_of(leaf))
            made.append(leaf)
            for batch in emptied:
                _empty(of_batch[id(batch)])
        replaced = iter(made)
        return cls(columns, with_leaves(sources[0].caches, lambda _: next(replaced)), rows)

    def take_over(self) -> None:
        """The rows are in this batch from now on, and have left the one that they were in."""
        for at, row in enumerate(self.rows):
            row.batch.rows[row.at] = None
            row.batch, row.at = self, at

    def take_in(self, rows: Sequence[Any]) -> bool:
        """Let rows of other batches join, in the place of holes or behind the last row, evaluated.

        False: there is no room for all of them, and nothing was done.
        """
        columns = self.columns
        holes = [at for at, row in enumerate(self.rows) if row is None]
        free = [*holes, *range(len(self.rows), columns.row_capacity)][: len(rows)]
        if len(free) < len(rows) or max(row.batch.columns.lengths[row.at] for row in rows) > columns.end:
            return False
        coming = {at: (row.batch, row.at) for at, row in zip(free, rows, strict=True)}
        runs = _runs([coming.get(at, (self, at)) for at in range(max(len(self.rows), free[-1] + 1))])
        leaves_of = {id(batch): batch.leaves for batch, _, _ in runs}
        made = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, TailLayer):
                for at, (batch, its) in coming.items():
                    leaf.take_row(at, leaves_of[id(batch)][index], its)
            else:
                leaf = _joined([(leaves_of[id(batch)][index], *its) for batch, *its in runs], columns, index)
            mx.eval(arrays_of(leaf))
            made.append(leaf)
        replaced = iter(made)
        self.caches = with_leaves(self.caches, lambda _: next(replaced))
        for at, row in zip(free, rows, strict=True):
            batch, its = row.batch, row.at
            own = slice(at, at + 1)
            columns.lengths[own], columns.in_place[own] = [batch.columns.lengths[its]], [batch.columns.in_place[its]]
            batch.rows[its], self.rows[own] = None, [row]
            row.batch, row.at = self, at
        self._idle_tokens = 0
        return True

    @property
    def open_rows(self) -> list[Any]:
        """The rows that have not left."""
        return [row for row in self.rows if row is not None]

    def goes_on(self, tokens: int) -> bool:
        """Whether the rows take so many tokens in this batch as it is.

        What is evaluated for holes comes to no more than one step of the batch since the last one joined, and tails do
        not grow where they have columns that nobody has anything in.
        """
        columns = self.columns
        self._idle_tokens += self.rows.count(None) * tokens
        is_full = columns.end + tokens >= columns.capacity and columns.end - columns.width >= GROWTH_COLUMNS
        return self._idle_tokens <= len(self.rows) and not is_full

    @property
    def leaves(self) -> list[Any]:
        """The caches that hold state, in order."""
        return leaves(self.caches)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for mx.eval."""
        return [array for leaf in self.leaves for array in arrays_of(leaf)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def forward(
        self, model: Any, ids: mx.array, parts: Sequence[Part] = (), *, ours: bool = False, is_prompt: bool = False
    ) -> mx.array:
        """Run the model on ids (R, T); logits (R, T, V), not evaluated.

        A model that raises leaves every row as it was.

        Args:
            parts: what rows read in place.
            ours: whether the model's attention may be cascade attention; it must be where there are any.
            is_prompt: the tokens are of prompts: the pass can be undone at the cost of a copy of what goes round.

        Raises:
            LostStateError: it does not; see `roll_back`.
        """
        held = self.hold(ids.shape[1], is_prompt=is_prompt)
        try:
            with self.columns.running(ids.shape[1], parts, ours):
                logits: mx.array = model(ids, cache=self.caches)
        except BaseException as error:
            self.roll_back(held, error)
            raise
        return logits

    def hold(self, tokens: int, *, is_prompt: bool = False) -> Held:
        """What `roll_back` needs to undo a forward pass of so many tokens."""
        columns = self.columns
        return columns.lengths, columns.end, [_held(leaf, tokens, is_prompt) for leaf in self.leaves]

    def roll_back(self, held: Held, error: BaseException) -> None:
        """Undo a forward pass, or what of it was done before it raised this. LostStateError: it cannot be undone."""
        self.columns.lengths, self.columns.end, states = held
        undone = [_rolled_back(leaf, each) for leaf, each in zip(self.leaves, states, strict=True)]
        if not all(undone):
            raise LostStateError(
                f"windows that had gone round were written when the model raised: {error!r}"
            ) from error

    # One row

    def refilled(self, columns: Columns, pieces: Callable[[int], Sequence[Pair]]) -> Batch:
        """The one row with other tails: for each leaf these keys and values side by side. Evaluated, leaf by leaf."""
        indices = iter(range(len(self.leaves)))

        def of(leaf: Any) -> Any:
            index = next(indices)
            if not isinstance(leaf, TailLayer):
                return leaf
            tail = filled(columns, index, pieces(index))
            mx.eval(tail.state)
            return tail

        return Batch(columns, with_leaves(self.caches, of), self.rows)

    # Any row

    def own_points(self) -> None:
        """Replace the arrays that may be views, or have room to spare, by copies, evaluated."""
        for leaf in self.leaves:
            if isinstance(leaf, BatchRotatingKVCache):
                more = leaf._idx - leaf.max_size  # columns of a pass of several tokens
                if more > 0:
                    leaf.keys, leaf.values = (owned(array[..., more:, :]) for array in (leaf.keys, leaf.values))
                    leaf.left_padding, leaf._idx = leaf.left_padding - more, leaf.max_size
                    mx.eval(arrays_of(leaf))
            elif not isinstance(leaf, TailLayer):
                mx.eval(adapter_for(leaf).own(leaf))
                adapter_for(leaf).reserve(leaf, 0)  # a row takes what was asked for it, and no more

    def specimen(self, caches: Sequence[Any]) -> list[Any]:
        """Fresh mlx-lm caches with a token of one row in every layer that it uses: to look at only."""
        for cache, leaf in zip(leaves(caches), self.leaves, strict=True):
            if isinstance(leaf, ArraysCache):
                cache.cache = [None if array is None else array[:1] for array in leaf.cache]
            elif leaf.keys is not None and leaf.values is not None:
                cache.keys, cache.values, cache.offset = leaf.keys[:1, :, :1, :], leaf.values[:1, :, :1, :], 1
                if isinstance(cache, RotatingKVCache):
                    cache._idx = 1
        return list(caches)

    def points(self, at: int, caches: Sequence[Any]) -> list[Any]:
        """Fresh mlx-lm caches, but with a row's state in the place of all that are no tails."""
        pairs = iter(self.leaves)

        def of(cache: Any) -> Any:
            leaf = next(pairs)
            if isinstance(leaf, TailLayer):
                return cache
            return leaf if len(self.rows) == 1 else _alone(leaf, at)

        return with_leaves(caches, of)

    def copied(
        self,
        at: int,
        bounds: Sequence[tuple[int, int]],
        *,
        copying: Callable[[Callable[[], Copied]], Copied] = lambda make: make(),
        emptying: bool = False,
    ) -> list[Copied]:
        """Copies of a row's tokens in its tails, by leaf, evaluated.

        Args:
            bounds: of the pieces, one behind the other, behind all that is in place.
            copying: runs a copy, and may run it again when its allocation fails.
            emptying: let go of each layer once it is copied, so that no more than one is held twice.
        """
        away = self.columns.in_place[at]

        def of(leaf: Any) -> Copied:
            if not bounds or leaf.empty():
                return None
            pieces = [leaf.copied_columns(at, low - away, high - away) for low, high in bounds]
            mx.eval(pieces)
            return SpanSnapshot(bounds[0][0], bounds[-1][1], [*pieces])

        found = []
        for leaf in self.leaves:
            is_tail = isinstance(leaf, TailLayer)
            found.append(copying(lambda leaf=leaf: of(leaf)) if is_tail else None)  # type: ignore[misc]
            if emptying and is_tail:
                _empty(leaf)
        return found

    def copied_points(
        self, at: int, offset: int, *, copying: Callable[[Callable[[], Any]], Any], emptying: bool = False
    ) -> list[Any]:
        """Copies of a row's state at `offset` in layers that are neither tails nor windows, by leaf, evaluated.

        Args:
            copying, emptying: as for `copied`; windows are let go of as well.
        """

        def of(leaf: Any) -> Any:
            alone = _alone(leaf, at)
            snapshot = adapter_for(alone).snapshot(alone, 0, offset)
            mx.eval([] if snapshot is None else snapshot.arrays())
            return snapshot

        found = []
        for leaf in self.leaves:
            found.append(copying(lambda leaf=leaf: of(leaf)) if isinstance(leaf, ArraysCache) else None)  # type: ignore[misc]
            if emptying and not isinstance(leaf, TailLayer):
                _empty(leaf)
        return found


def arrays_of(leaf: Any) -> list[mx.array]:
    """All arrays of a leaf."""
    if isinstance(leaf, ArraysCache):
        return [array for array in leaf.cache if array is not None]
    if leaf.keys is None:
        return []
    more = [leaf.offset, leaf.left_padding] if isinstance(leaf, BatchRotatingKVCache) else []
    return [leaf.keys, leaf.values, *more]


def _own(leaf: Any, columns: Columns, index: int) -> Any:
    kind = type(leaf)
    if kind is KVCache:
        return TailLayer(columns, index)
    if kind is ArraysCache or (kind is RotatingKVCache and not leaf.keep):
        return leaf
    kept = f" that keeps its first {leaf.keep} tokens" if kind is RotatingKVCache else ""
    raise UnsupportedCacheError(f"a layer's {kind.__name__}{kept} cannot be one row among others.")


def _runs(places: Sequence[Place]) -> list[tuple[Batch, int, int]]:
    """Rows that follow each other in one batch, as [first, last)."""
    runs: list[tuple[Batch, int, int]] = []
    for batch, at in places:
        if runs and runs[-1][0] is batch and runs[-1][2] == at:
            runs[-1] = batch, runs[-1][1], at + 1
        else:
            runs.append((batch, at, at + 1))
    return runs


def _joined(runs: Sequence[tuple[Any, int, int]], columns: Columns, index: int) -> Any:
    """Rows [first, last) of each leaf, all of one kind, as one."""
    if isinstance(runs[0][0], TailLayer):
        return joined(columns, index, runs)
    if isinstance(runs[0][0], ArraysCache):
        return _arrays([each.cache for each, _, _ in runs], [slice(first, last) for _, first, last in runs])
    alone = [_alone(each, at) for each, first, last in runs for at in range(first, last)]
    if len(alone) > 1:
        return RotatingKVCache.merge(alone)
    if alone[0] is runs[0][0]:  # its batch may be emptied: an object of its own
        alone[0] = copy.copy(alone[0])
    return alone[0]


def _alone(leaf: Any, at: int) -> Any:
    """One row's state of a leaf that is no tail, in a cache for one row."""
    if isinstance(leaf, ArraysCache):
        return _arrays([leaf.cache], [slice(at, at + 1)])
    if isinstance(leaf, RotatingKVCache):
        return leaf
    return RotatingKVCache(leaf.max_size) if leaf.keys is None else leaf.extract(at)


def _arrays(caches: Sequence[list[Any]], rows: Sequence[slice]) -> ArraysCache:
    """Rows of several lists of arrays as one cache; a slot that any of them has nothing in is empty."""
    found = ArraysCache(len(caches[0]))
    for index, slot in enumerate(zip(*caches, strict=True)):
        if all(array is not None for array in slot):
            parts = [array[its] for array, its in zip(slot, rows, strict=True)]
            found.cache[index] = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return found


def _empty(leaf: Any) -> None:
    if isinstance(leaf, ArraysCache):
        leaf.cache = [None] * len(leaf.cache)
    else:
        leaf.keys = leaf.values = None


def _held(leaf: Any, tokens: int, is_prompt: bool) -> Any:
    """What `_rolled_back` needs of a leaf that is no tail."""
    if isinstance(leaf, TailLayer):
        return None
    if isinstance(leaf, ArraysCache):
        return [None if array is None else mx.array(array) for array in leaf.cache]
    if isinstance(leaf, BatchRotatingKVCache):
        keys, values, *changing = leaf.state
        if tokens == 1 and keys is not None:  # which is written in place; several come into new arrays
            if is_prompt:
                keys, values = mx.array(keys), mx.array(values)
            elif leaf.rotated or leaf._offset >= leaf.max_size:  # not only behind the tokens that are held
                return None
        return keys, values, *(each + 0 for each in changing)
    return adapter_for(leaf).hold(leaf, tokens)


def _rolled_back(leaf: Any, held: Any) -> bool:
    if isinstance(leaf, TailLayer):
        return True
    if isinstance(leaf, ArraysCache):
        leaf.cache = held
        return True
    if isinstance(leaf, BatchRotatingKVCache):
        if held is not None:
            leaf.state = held
        return held is not None
    return adapter_for(leaf).roll_back(leaf, held)
