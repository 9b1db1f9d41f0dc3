"""ModelFit: which model a CausalCache holds the state of, and what that model can do on cells.

layers            its caches say which: those of keys and values become cells, the others stay beside them
takes_rows        whether one forward pass takes rows at different positions: a trial says, see trial.py
rotations         how keys in cells get to other positions: measured, see layers/shift.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from radixcache.cells.layers import CellLayer
from radixcache.cells.trial import Sequences, kinds_of, steps_together, verdict
from radixcache.errors import UnsupportedCacheError
from radixcache.layers.shift import Rotation, rotations
from radixcache.layers.trials import by_slot


class ModelFit:
    """One model at a time, or none that was seen yet; its layers never change.

    Attributes:
        fresh: returns fresh mlx-lm caches of the model, which need not be seen for it.
        model: the one that was accepted last: a model, or a callable, which passes for any; None: there was none.
        takes_rows: whether it takes rows at different positions in one forward pass; None: not tried yet.
    """

    def __init__(self, fresh: Callable[[], Sequence[Any]]) -> None:
        self.fresh = fresh
        self.model: Any = None
        self.takes_rows: bool | None = None
        self._kinds = kinds_of(fresh())
        self._rotations: list[Rotation | None] | None = None

    def layers(self, capacity: int) -> list[Any]:
        """What stands for each of the model's caches in a forward pass; an ArraysCache only marks the place.

        UnsupportedCacheError: a layer's state can be in no cells and is not a sequence's own either.
        """
        return [_layer(cache, capacity) for cache in self.fresh()]

    def is_known(self, model: Any) -> bool:
        """Whether this is the model, or passes for it: a callable that is no model, or a model that has it inside."""
        if model is self.model:
            return True
        if self.model is None:
            return False
        return not isinstance(model, nn.Module) or any(inner is self.model for inner in model.modules())

    def accept(self, model: Any, used_cells: int) -> bool:
        """Make this, which is not known, the model; returns whether it takes the place of another, buffers and all.

        UnsupportedCacheError: its attention goes by slots.
        ValueError: there is state of another model, or that one has other layers.
        """
        if reason := by_slot(model):
            raise UnsupportedCacheError(f"a model cannot run on cells: {reason}.")
        is_another = isinstance(self.model, nn.Module)
        if is_another:
            if used_cells:
                raise ValueError(f"{used_cells} cells hold state of another model; free their sequences first.")
            if kinds_of(make_prompt_cache(model)) != self._kinds:
                raise ValueError("another model, with other layers than this cache was made for; make one for it.")
            self.takes_rows, self._rotations = None, None
        self.model = model
        return is_another

    def steps_together(self, model: Any, cells: Callable[[int], Sequences]) -> bool:
        """`takes_rows`, which is tried first if need be; see trial.steps_together. The model is known."""
        if self.takes_rows is None:
            self.takes_rows = verdict(model, self._kinds, lambda: steps_together(model, self.fresh, cells))
        return self.takes_rows

    def rotations(self, model: Any) -> list[Rotation | None]:
        """How the keys of each layer are rotated; None: not at all. ShiftError: unknown; see layers/shift.py."""
        if self._rotations is None:
            self._rotations = rotations(model, self.fresh())
        return self._rotations


def _layer(cache: Any, capacity: int) -> Any:
    if cache is None or type(cache) is ArraysCache:
        return cache
    if type(cache) is CacheList:
        return CacheList(*(_layer(each, capacity) for each in cache.caches))
    if type(cache) is KVCache:
        return CellLayer(capacity)
    if type(cache) is RotatingKVCache and not cache.keep:
        return CellLayer(capacity, cache.max_size)
    kept = f" that keeps its first {cache.keep} tokens" if type(cache) is RotatingKVCache else ""
    raise UnsupportedCacheError(f"a layer's {type(cache).__name__}{kept} cannot be put into cells.")
