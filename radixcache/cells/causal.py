"""CausalCache: a live cache for many sequences, which hold their tokens' keys and values in one buffer of cells.

    causal = CausalCache(model, capacity=4096)
    causal.add(1)
    logits = causal.prefill(model, 1, system + question)        # (1, T, V), in chunks of the caller's choice
    causal.add(2)
    causal.copy_prefix(1, 2, len(system))                       # shared: no cell is taken, nothing is copied
    causal.prefill(model, 2, other_question)
    logits = causal.step(model, [1, 2], [token, other_token])   # (2, 1, V): both in one forward pass

Full attention and sliding windows live in cells. Recurrent and linear-attention layers have a state per sequence.

A short trial finds out how a model runs; see layers/trials.py. Most models rotate each row by its own offset. Some use
the offset of the first row for all, or fail: they run a row at a time. Some use the index of a key in the buffer as its
position: they cannot run on cells.

Invariants, asserted by `check`, besides those of CellTable and RowStates:

  K1  The layers without cells have a state for every sequence of the table, and for no other.
  K2  No layer's buffer has more cells than the table. Each buffer reaches as far as any cell in use.
  K3  A sequence is tainted from the first position that a removal from its middle moved, while it has that position.

A call that raises leaves every sequence as it was; an evaluation that fails later loses all buffers. Keys or values
that overflow make NaN of the rest of their own sequence only. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from radixcache.adapters.point import copied
from radixcache.adapters.registry import leaves, with_leaves
from radixcache.cells.cell_layers import CellLayer, CellPass, Held, RowStates
from radixcache.cells.table import CellPlan, CellTable, Shift
from radixcache.errors import CacheFullError, ShiftError, UnsupportedCacheError
from radixcache.layers.layout import one_each
from radixcache.layers.shift import Rotation, rotations
from radixcache.layers.trials import allowed_error, by_slot, error_of, logits_alone, once_per_model
from radixcache.ledger import uninterrupted
from radixcache.tokens import token_ids, vocabulary_size

#: Class and window of each of a model's caches.
Kinds = tuple[tuple[type, int | None], ...]

#: A trial prefills (row, tokens) in this order, so that the cells of both rows are mixed. Then a token for each row,
#: twice. Every vocabulary has these ids.
PREFILLS = ((0, (5, 3, 7, 2)), (1, (2, 4, 3)), (0, (6, 1, 4)))
PROMPTS = ((5, 3, 7, 2, 6, 1, 4), (2, 4, 3))
STEPS = ((1, 6), (3, 5))
ROWS = (0, 1)
CELLS = 16
#: By the id of a model: for its caches, whether it takes rows at different positions.
_found: dict[int, dict[Kinds, bool]] = {}


class CausalCache:
    """Cells for `capacity` tokens, shared by sequences with ids of the caller's choice.

    Args:
        model: an mlx-lm model; its caches say which layers there are.
        capacity: tokens of all sequences together, a shared one counted once. Buffers grow up to it as they fill.
        caches: instead of a model's own, a callable that returns a fresh list of mlx-lm caches.

    Raises:
        UnsupportedCacheError: a layer is quantized, chunked, of an unknown class, or a window that keeps its first
            tokens; or the model's attention depends on cache slots (without a model, the first forward pass raises).
    """

    def __init__(self, model: Any = None, *, capacity: int, caches: Callable[[], Sequence[Any]] | None = None) -> None:
        if model is None and caches is None:
            raise ValueError("CausalCache needs a model, or caches= with a callable that returns fresh mlx-lm caches.")
        self._table = CellTable(capacity)
        self._fresh = caches or (lambda: make_prompt_cache(model))
        self._kinds = _kinds_of(self._fresh())
        self._model: Any = None
        self._takes_rows: bool | None = None
        self._rotations: list[Rotation | None] | None = None
        if model is not None:
            self._require_model(model)
        self._layers = with_leaves(self._fresh(), lambda leaf: _layer(leaf, capacity))
        self._cells = [leaf for leaf in leaves(self._layers) if isinstance(leaf, CellLayer)]
        self._states = RowStates([len(leaf.cache) for leaf in leaves(self._layers) if isinstance(leaf, ArraysCache)])
        self._tainted: dict[int, int] = {}

    @property
    def table(self) -> CellTable:
        """Which cell holds which token. Read it only; this class changes it."""
        return self._table

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids, in the order they were added."""
        return self._table.sequences

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and of the sequences' own states, a shared one counted once."""
        states = {id(array): array.nbytes for array in self._states.arrays()}
        return sum(each.nbytes for each in self._cells) + sum(states.values())

    @property
    def token_bytes(self) -> int:
        """Bytes that a cell takes in all layers; 0 before the first forward pass."""
        return sum(each.token_bytes for each in self._cells)

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for mx.eval."""
        return [buffer for each in self._cells for buffer in each.state] + self._states.arrays()

    def length(self, sequence: int) -> int:
        """Tokens of a sequence. ValueError: no such sequence."""
        return self._table.end(sequence)

    def clean_tokens(self, sequence: int) -> int:
        """How many tokens, from the first on, have the state of a cold run: all, until a shift."""
        return min(self.length(sequence), self._tainted.get(sequence, self.length(sequence)))

    def add(self, sequence: int) -> None:
        """Make a sequence without tokens. ValueError: the id exists."""
        with uninterrupted():
            self._table.add(sequence)
            self._states.add(sequence)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let `target`, which has no tokens yet, share the first `length` tokens of `source`. Nothing is copied.

        ValueError: as `CellTable.copy_prefix`, or `source` is longer and has layers whose state cannot be cut.
        """
        if self._states and length != self._table.end(source):
            held = f"sequence {source} has {self._table.end(source)} tokens, and layers whose state cannot be cut back"
            raise ValueError(f"{held} to {length}; copy the prefix when the sequence has just that length.")
        with uninterrupted():
            self._table.copy_prefix(source, target, length)
            if self._tainted.get(source, length) < length:
                self._tainted[target] = self._tainted[source]
            self._states.copy(source, target)

    def free(self, sequence: int) -> int:
        """Remove a sequence; return how many cells that frees. ValueError: no such sequence."""
        with uninterrupted():
            freed = self._table.free(sequence)
            self._states.free(sequence)
            self._tainted.pop(sequence, None)
        return freed

    def prefill(self, model: Any, sequence: int, tokens: Any) -> mx.array:
        """Run the next tokens of one sequence through the model: ids (T,), T >= 1, a prompt or a chunk of it.

        Returns logits (1, T, V), not evaluated. Evaluate `state` with them; else the graph behind it stays in memory.

        ValueError: no such sequence, no tokens or wrong ids, more than capacity, or state of another model is here.
        CacheFullError: fewer than T cells are free.
        """
        ids = mx.array(token_ids(tokens, vocabulary_size(model)))
        return self._forward(model, [(sequence, ids.size)], ids[None], compacting=True)

    def step(self, model: Any, sequences: Sequence[int], tokens: Any) -> mx.array:
        """Run one more token of each of N >= 1 sequences through the model, in one forward pass if it can.

        Returns logits (N, 1, V), not evaluated.

        Args:
            tokens: ids (N,). An mx.array may be unevaluated and (N, 1); the model's vocabulary is not checked then.

        Raises:
            ValueError: as `prefill`, or a sequence is there twice or has no tokens yet.
            CacheFullError: fewer than N cells are free.
        """
        ids = one_each(tokens, len(sequences), vocabulary_size(model))
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences {list(sequences)}: one of them is listed twice.")
        for each in sequences:
            if self._table.end(each) == 0:
                raise ValueError(f"sequence {each} has no tokens yet; prefill() it first.")
        if len(sequences) == 1 or (self.steps_together(model) and self._states.can_join(tuple(sequences))):
            return self._forward(model, [(each, 1) for each in sequences], ids)
        return self._one_by_one(model, sequences, ids)

    def steps_together(self, model: Any) -> bool:
        """Whether sequences at different positions get the same in one forward pass as alone; tried once per model.

        UnsupportedCacheError: they do not even one at a time, once their cells are mixed.
        """
        self._require_model(model)
        if self._takes_rows is None:
            known: dict[Kinds, bool] = once_per_model(_found, model, dict)
            if self._kinds not in known:
                known[self._kinds] = self._try_rows(model)
            self._takes_rows = known[self._kinds]
        return self._takes_rows

    def remove(self, model: Any, sequence: int, begin: int, end: int) -> None:
        """Take positions [begin, end) out of a sequence; later tokens move up to close the gap.

        At the end this is a rewind. Else keys after the gap are rotated to their new positions, shared ones in copies,
        and the sequence is tainted from `begin` on: its state differs from a cold run of the same tokens.

        ValueError: no such sequence, or the range is not in it.
        ShiftError: the model's keys cannot be rotated, or it has layers that cannot forget.
        CacheFullError: fewer cells are free than have to be copied.
        """
        moves_rest = begin < end < self._table.end(sequence)
        if self._states and begin < end:
            raise ShiftError("recurrent layers cannot forget tokens, so this model cannot be shifted.")
        plan = self._table.plan_remove(sequence, begin, end)
        if moves_rest:
            for layer in self._cells:
                layer.move(plan.moves)
            self._rotate(model, plan.shifts)
        self._table.apply(plan)
        if moves_rest:
            self._tainted[sequence] = min(begin, self._tainted.get(sequence, begin))
        elif self._tainted.get(sequence, 0) >= self._table.end(sequence):
            self._tainted.pop(sequence, None)

    def defragment(self, room: int | None = None) -> CellPlan:
        """Bring free cells together: `room` in a row, or (None) all at the end. Raises as `table.plan_defragment`."""
        plan = self._table.plan_defragment(room)
        for layer in self._cells:
            layer.move(plan.moves)
        self._table.apply(plan)
        return plan

    def check(self) -> None:
        """Assert K1 to K3, and the invariants of the table and of the layers without cells."""
        self._table.check()
        self._states.check()
        assert self._states.sequences == self._table.sequences, (self._states.sequences, self._table.sequences)
        assert set(self._tainted) <= set(self._table.sequences), (self._tainted, self._table.sequences)
        for sequence, tainted in self._tainted.items():
            assert 0 <= tainted < self.length(sequence), (sequence, tainted, self.length(sequence))
        used = max((int(self._table.cells(each).max(initial=-1)) for each in self.sequences), default=-1)
        for index, layer in enumerate(self._cells):
            for buffer in layer.state:
                assert used < buffer.shape[2] <= self._table.capacity, (index, used, buffer.shape)

    def dump(self) -> str:
        """The cache as text: a line of bytes, those of the table, and one per sequence that is tainted."""
        lines = [f"{self.nbytes:,} bytes, {self.token_bytes:,} of them per cell", self._table.dump()]
        lines += [f"  sequence {name} is tainted from {begin}" for name, begin in self._tainted.items()]
        return "\n".join(lines)

    def _require_model(self, model: Any) -> None:
        """Make this the model, unless it wraps the present one, or is a callable that is no model.

        UnsupportedCacheError: its attention goes by slots. ValueError: other layers, or state of another model.
        """
        known = self._model
        if model is known:
            return
        inner = model.modules() if isinstance(model, nn.Module) else [known]
        if known is not None and any(each is known for each in inner):
            return
        if reason := by_slot(model):
            raise UnsupportedCacheError(f"a model cannot run on cells: {reason}.")
        if isinstance(known, nn.Module):
            if self._table.used:
                raise ValueError(f"{self._table.used} cells hold state of another model; free their sequences first.")
            if _kinds_of(make_prompt_cache(model)) != self._kinds:
                raise ValueError("the model has other layers than the model of this cache; make another CausalCache.")
            self._takes_rows = self._rotations = None
            for layer in self._cells:
                layer.keys = layer.values = None
        self._model = model

    def _try_rows(self, model: Any) -> bool:
        """Whether two sequences of different lengths get the same logits in one forward pass as alone."""
        wanted, rechunked = (logits_alone(model, self._fresh, PROMPTS, STEPS, last) for last in (2, 1))
        rounding = error_of(rechunked, wanted)
        with suppress(Exception):  # a model that was not made for this may raise anything
            if self._is_right(model, [ROWS], wanted, rounding):
                return True
        if not self._is_right(model, [(row,) for row in ROWS], wanted, rounding):
            name = type(model).__module__.rpartition(".")[2]
            raise UnsupportedCacheError(f"{name} cannot run on cells: its logits depend on which cells it uses.")
        return False

    def _is_right(self, model: Any, groups: list[tuple[int, ...]], wanted: mx.array, rounding: float) -> bool:
        """Whether rows that step in these groups get the wanted logits, except for rounding."""
        trial = CausalCache(self._model, capacity=CELLS, caches=self._fresh)
        trial._takes_rows = True
        for row in ROWS:
            trial.add(row)
        for row, tokens in PREFILLS:
            trial.prefill(model, row, tokens)
        steps = [[trial.step(model, group, [step[row] for row in group]) for group in groups] for step in STEPS]
        error = error_of(mx.concatenate([mx.concatenate(rows) for rows in steps], axis=1), wanted)
        return error <= allowed_error(rounding, wanted.dtype, *(array.dtype for array in trial.state))

    def _forward(self, model: Any, rows: list[tuple[int, int]], ids: mx.array, compacting: bool = False) -> mx.array:
        """Run the model on rows (sequence, tokens); `compacting`: copy its states, most of them views of the pass."""
        self._require_model(model)
        if len(self.sequences) > 1 or self._tainted:
            self.steps_together(model)
        sequences = tuple(sequence for sequence, _ in rows)
        ends = [self._table.end(each) for each in sequences]
        held = self._states.hold(sequences) if self._states else []
        try:
            with uninterrupted():
                self._make_room(sum(tokens for _, tokens in rows))
                current = CellPass(self._table, self._table.append(rows))
            for layer in self._cells:
                layer.enter(current)
            logits: mx.array = model(ids, cache=self._caches_for(sequences))
            if compacting:
                for cache in self._states.take(sequences):
                    cache.cache = copied(cache.cache)
        except BaseException:
            self._undo(sequences, ends, held)
            raise
        finally:
            for layer in self._cells:
                layer.enter(None)
        return logits

    def _one_by_one(self, model: Any, sequences: Sequence[int], ids: mx.array) -> mx.array:
        self._make_room(len(sequences))
        self._table.find(len(sequences))
        ends = [self._table.end(each) for each in sequences]
        held = [state for each in sequences for state in self._states.hold((each,))]
        logits: list[mx.array] = []
        try:
            for index, each in enumerate(sequences):
                # A row that does not wait for the one before finds the buffers in use, and copies them to write.
                row = mx.depends(ids[index : index + 1], logits[-1:])
                logits.append(self._forward(model, [(each, 1)], row))
        except BaseException:
            self._undo(sequences, ends, held)
            raise
        return mx.concatenate(logits)

    def _undo(self, sequences: Sequence[int], ends: Sequence[int], held: Held) -> None:
        with uninterrupted():
            for cache, arrays in held:
                cache.cache = arrays
            for each, end in zip(sequences, ends, strict=True):
                if self._table.end(each) > end:
                    self._table.remove(each, end, self._table.end(each))

    def _caches_for(self, sequences: tuple[int, ...]) -> list[Any]:
        if not self._states:
            return self._layers
        states = iter(self._states.take(sequences))
        return with_leaves(self._layers, lambda layer: next(states) if type(layer) is ArraysCache else layer)

    def _make_room(self, wanted: int) -> None:
        """Defragment if there are so many free cells, but not in a row."""
        try:
            self._table.find(wanted)
        except CacheFullError as error:
            if wanted <= error.free:
                self.defragment(wanted)

    def _rotate(self, model: Any, shifts: Sequence[Shift]) -> None:
        self._require_model(model)
        if self._rotations is None:
            self._rotations = rotations(model, self._fresh())
        pairs = zip(self._layers, self._rotations, strict=True)
        rotating = [(layer, rotation) for layer, rotation in pairs if rotation is not None]
        runs = [slice(start, start + length) for start, length, _ in shifts]
        moved = [
            [rotation.shift(layer.keys[..., run, :], shift.delta) for run, shift in zip(runs, shifts, strict=True)]
            for layer, rotation in rotating
        ]
        mx.eval(moved)
        for (layer, _), keys in zip(rotating, moved, strict=True):
            for run, new in zip(runs, keys, strict=True):
                layer.keys[..., run, :] = new
        mx.eval([layer.state for layer in self._cells])


def _kinds_of(caches: Sequence[Any]) -> Kinds:
    return tuple((type(leaf), getattr(leaf, "max_size", None)) for leaf in leaves(caches))


def _layer(leaf: Any, capacity: int) -> Any:
    """What replaces a cache of the model in a forward pass; an ArraysCache only marks the place."""
    kind = type(leaf)
    if kind is ArraysCache:
        return leaf
    if kind is KVCache or (kind is RotatingKVCache and not leaf.keep):
        return CellLayer(capacity, getattr(leaf, "max_size", None))
    detail = f" that keeps its first {leaf.keep} tokens" if kind is RotatingKVCache else ""
    raise UnsupportedCacheError(f"a layer's {kind.__name__}{detail} cannot be put into cells.")
