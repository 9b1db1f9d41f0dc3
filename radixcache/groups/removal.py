"""Removal: tokens out of the middle of a row, with those behind them moved up (context shift), or off its end.

    in place    tails                              in place    tails
    a a a a a a b b b b b b c c c   ->             a a a a     a a  b b  c c c
                                                   whole       a copy of what is left; keys behind the gap rotated

What is in front of the gap stays in place as far as whole nodes of the path are. Windows can be shifted while the gap
is in front of them, and cut while they have lost nothing; recurrent state cannot forget.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from radixcache.adapters.registry import adapter_for
from radixcache.errors import ShiftError
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import Columns, TailLayer
from radixcache.layers.layout import Layout
from radixcache.layers.shift import Rotation, rotations

#: Keys and values of the tokens [start, start + T).
Piece = tuple[int, Pair]


class Removal:
    """Takes the tokens [begin, end), begin < end, out of a row; the lock is held."""

    def __init__(self, room: Room, layout: Layout, row: Row, begin: int, end: int) -> None:
        self._room = room
        self._layout = layout
        self._row = row
        self._begin, self._end = begin, end
        self._is_rewind = end == row.position

    def run(self, model: Any) -> None:
        """Do it.

        Raises:
            ShiftError: it cannot be done; nothing was changed.
            BudgetFullError: no room for the copies.
        """
        row, begin, end = self._row, self._begin, self._end
        if len(row.batch.rows) > 1:
            Batch.gathered([(row.batch, row.at)]).take_over()
        self._require_points()
        rotating = [None] * len(row.batch.leaves) if self._is_rewind else self._rotations(model)
        with nullcontext() if row.node is None else self._room.states.guarded(row.node):
            kept = [(low, high) for low, high in self._reads() if high <= begin]
            away = sum(high - low for low, high in kept)
            length = row.position - (end - begin) - away
            columns, before = Columns([length], [away]), row.batch
            held, token_bytes = before.nbytes, self._layout.token_bytes
            bare = held - before.columns.capacity * token_bytes
            columns.capacity = (
                length
                + 1
                + self._room.ask(lambda more: bare + (length + 1 + more) * token_bytes, row.prompt_left, held)
            )
            pieces = [self._pieces(leaf, index, kept) for index, leaf in enumerate(before.leaves)]
            moved = [self._moved(its, rotating[index]) for index, its in enumerate(pieces)]
            points = [self._point(leaf, rotating[index]) for index, leaf in enumerate(before.leaves)]
            mx.eval(moved, [arrays for arrays in points if arrays is not None])
            row.batch = before.refilled(columns, lambda leaf: moved[leaf])
        for leaf, arrays in zip(row.batch.leaves, points, strict=True):
            if arrays == []:
                adapter_for(leaf).free(leaf)
            elif arrays is not None:
                adapter_for(leaf).place(leaf, arrays, leaf.offset - (end - begin), arrays[0].shape[2])  # type: ignore[attr-defined]
        row.in_place = [(low, high) for low, high in row.in_place if low < begin]
        row.orphans = [spans for spans in row.orphans if spans.end <= begin]
        self._step_back()

    def _require_points(self) -> None:
        row, begin, end = self._row, self._begin, self._end
        for leaf in row.batch.leaves:
            if isinstance(leaf, ArraysCache) and not leaf.empty():
                raise ShiftError(
                    "layers of recurrent state cannot forget tokens; a model that has some cannot be shifted."
                )
            has_gone_round = isinstance(leaf, RotatingKVCache) and leaf.keys is not None and leaf.offset > leaf.max_size
            if has_gone_round and (self._is_rewind or end > leaf.offset - leaf.max_size):
                raise ShiftError(
                    f"row {row.id} stands at {leaf.offset} with windows of {leaf.max_size} tokens; what would come into"
                    f" them without [{begin}, {end}) is not there any more."
                )

    def _rotations(self, model: Any) -> list[Rotation | None]:
        caches = self._layout.fresh()
        found = rotations(model, caches)
        return [rotation for cache, rotation in zip(caches, found, strict=True) if cache is not None]

    def _reads(self) -> list[tuple[int, int]]:
        return [(spans.start, spans.end) for spans in self._row.reads()]

    def _pieces(self, leaf: Any, index: int, kept: list[tuple[int, int]]) -> list[Piece]:
        """One layer's keys and values of all tokens that are not kept in place, in order."""
        row = self._row
        if not isinstance(leaf, TailLayer) or (leaf.empty() and not row.reads()):
            return []
        found: list[Piece] = []
        column = position = 0
        for spans in row.reads():
            if spans.start > position:
                found.append((position, leaf.columns_of(0, column, column + spans.start - position)))
                column += spans.start - position
            if (spans.start, spans.end) not in kept and spans.leaves[index] is not None:
                found += [(first, pair) for first, _, pair in spans.leaves[index].parts(spans.start, spans.end)]
            position = spans.end
        if position < row.position:
            found.append((position, leaf.columns_of(0, column, column + row.position - position)))
        return found

    def _moved(self, pieces: list[Piece], rotation: Rotation | None) -> list[Pair]:
        """What is left of them; keys behind the gap are rotated to where they come to stand."""
        found: list[Pair] = []
        for start, (keys, values) in pieces:
            length = keys.shape[2]
            before = slice(0, max(0, min(length, self._begin - start)))
            behind = slice(max(0, min(length, self._end - start)), length)
            if before.stop:
                found.append((keys[..., before, :], values[..., before, :]))
            if behind.start < length:
                found.append((self._rotated(keys[..., behind, :], rotation), values[..., behind, :]))
        return found

    def _point(self, leaf: Any, rotation: Rotation | None) -> list[mx.array] | None:
        """What a window holds afterwards, in order of position; None: it is none, or holds nothing."""
        if not isinstance(leaf, RotatingKVCache) or leaf.keys is None:
            return None
        keys, values = adapter_for(leaf).state(leaf)  # type: ignore[attr-defined]
        first = leaf.offset - keys.shape[2]
        pairs = self._moved([(first, (keys, values))], rotation)
        return [mx.concatenate([pair[name] for pair in pairs], axis=2) for name in (0, 1)] if pairs else []

    def _rotated(self, keys: mx.array, rotation: Rotation | None) -> mx.array:
        return keys if rotation is None else rotation.shift(keys, self._begin - self._end)

    def _step_back(self) -> None:
        """The row stands on what of its path is whole in front of the gap."""
        row, states = self._row, self._room.states
        node = before = row.node
        while node is not None and node.end > self._begin:
            node = None if node.parent is None or node.parent.is_root else node.parent
        if node is not before and before is not None:
            if node is not None:
                states.read(node, 1)
            row.node = node
            states.read(before, -1)
            self._room.evictor.tidy(before)
