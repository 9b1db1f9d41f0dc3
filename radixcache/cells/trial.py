"""steps_together: whether a model takes rows at different positions in one forward pass, and cells in any order.

Most models of mlx-lm rotate each row by its own offset. Some reckon with the offset as a number, and would put every
row where the first one is, or fail; they run a row at a time. Some take the place of a key in what the cache returns
for its position; they cannot run on cells at all. A short trial against the model's own caches tells; see
layers/trials.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import mlx.core as mx

from radixcache.adapters.cache_list import leaves
from radixcache.errors import UnsupportedCacheError
from radixcache.layers.trials import allowed_error, error_of, once_per_model

#: Class and window of each of a model's caches.
Kinds = tuple[tuple[type, int | None], ...]
Prefills = tuple[tuple[int, tuple[int, ...]], ...]

#: Prefills in order (row, tokens), so that the cells of the rows are mixed; ids that every vocabulary has.
PREFILLS: Prefills = ((0, (5, 3, 7, 2)), (1, (2, 4, 3)), (0, (6, 1, 4)))
#: The same rows in other chunks.
RECHUNKED: Prefills = ((0, (5, 3, 7, 2, 6, 1, 4)), (1, (2, 4)), (1, (3,)))
#: Then a token for each row, twice.
STEPS = ((1, 6), (3, 5))
ROWS = (0, 1)
CELLS = 16
#: By the id of a model, which is no key itself: what was found for its caches.
_found: dict[int, dict[Kinds, bool]] = {}


class Sequences(Protocol):
    """What a trial needs of a CausalCache; its methods say what they do."""

    @property
    def state(self) -> list[mx.array]: ...
    def add(self, sequence: int) -> None: ...
    def prefill(self, model: Any, sequence: int, tokens: Any) -> mx.array: ...
    def step(self, model: Any, sequences: Sequence[int], tokens: Any) -> mx.array: ...


def kinds_of(caches: Sequence[Any]) -> Kinds:
    """What tells the caches of one model from those of another."""
    return tuple((type(leaf), getattr(leaf, "max_size", None)) for leaf in leaves(caches))


def verdict(model: Any, kinds: Kinds, trial: Callable[[], bool]) -> bool:
    """What a trial found for this model before, or finds now."""
    known: dict[Kinds, bool] = once_per_model(_found, model, dict)
    if kinds not in known:
        known[kinds] = trial()
    return known[kinds]


def steps_together(model: Any, own: Callable[[], Sequence[Any]], cells: Callable[[int], Sequences]) -> bool:
    """Whether two sequences of different lengths get, in one forward pass, the logits that each gets alone.

    `own` makes fresh mlx-lm caches for the model, `cells` an empty CausalCache with a number of cells.

    UnsupportedCacheError: they do not get them a row at a time either.
    """
    wanted = _alone(model, own, PREFILLS)
    rounding = error_of(_alone(model, own, RECHUNKED), wanted)
    # Whatever a model raises that was not made for this.
    with suppress(Exception):
        if _is_right(model, cells(CELLS), [ROWS], wanted, rounding):
            return True
    if not _is_right(model, cells(CELLS), [(row,) for row in ROWS], wanted, rounding):
        name = type(model).__module__.rpartition(".")[2]
        raise UnsupportedCacheError(f"{name} cannot run on cells: its logits depend on where in them a sequence is.")
    return False


def _alone(model: Any, own: Callable[[], Sequence[Any]], prefills: Prefills) -> mx.array:
    """Logits of all steps, (rows, steps, V), each row in caches of its own."""
    rows = []
    for row in ROWS:
        caches = own()
        for each, tokens in prefills:
            if each == row:
                model(mx.array([tokens]), cache=caches)
        rows.append(mx.concatenate([model(mx.array([[step[row]]]), cache=caches) for step in STEPS], axis=1))
    return mx.concatenate(rows)


def _is_right(model: Any, causal: Sequences, groups: list[tuple[int, ...]], wanted: mx.array, rounding: float) -> bool:
    """Whether rows that step in these groups get the logits wanted, but for rounding."""
    for row in ROWS:
        causal.add(row)
    for row, tokens in PREFILLS:
        causal.prefill(model, row, tokens)
    steps = [[causal.step(model, group, [step[row] for row in group]) for group in groups] for step in STEPS]
    error = error_of(mx.concatenate([mx.concatenate(rows) for rows in steps], axis=1), wanted)
    return error <= allowed_error(rounding, wanted.dtype, *(array.dtype for array in causal.state))
