"""steps_together: whether a model takes rows at different positions in one forward pass, and cells in any order.

Most models of mlx-lm rotate each row by its own offset. Some reckon with the offset as a number, and would put every
row where the first one is, or fail; they run a row at a time. Some take the place of a key in what the cache returns
for its position; they cannot run on cells at all. A short trial tells. Its answer hardly depends on the weights: wrong
positions change the logits of random ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from radixcache.errors import UnsupportedCacheError
from radixcache.tolerances import TOLERANCES

if TYPE_CHECKING:
    from radixcache.cells.causal import CausalCache

#: Prefills in order (row, tokens), so that the cells of the rows are mixed; ids that every vocabulary has.
PREFILLS = ((0, (5, 3, 7, 2)), (1, (2, 4, 3)), (0, (6, 1, 4)))
#: Then a token for each row, twice.
STEPS = ((1, 6), (3, 5))
ROWS = (0, 1)
CELLS = 16


def steps_together(model: Any, fresh: Callable[[int], CausalCache]) -> bool:
    """Whether two sequences of different lengths get, in one forward pass, the logits that each gets alone.

    Args:
        fresh: makes an empty cache for this model with a number of cells.

    Raises:
        UnsupportedCacheError: they do not get them a row at a time either.
    """
    wanted = mx.concatenate([_run(model, fresh(CELLS), [row], together=False) for row in ROWS])
    try:
        if _is_close(_run(model, fresh(CELLS), ROWS, together=True), wanted):
            return True
    except Exception:  # whatever a model raises that was not made for this
        mx.clear_cache()
    if not _is_close(_run(model, fresh(CELLS), ROWS, together=False), wanted):
        name = type(model).__module__.rpartition(".")[2]
        raise UnsupportedCacheError(f"{name} cannot run on cells: its logits depend on where in them a sequence is.")
    return False


def _run(model: Any, causal: CausalCache, rows: Sequence[int], together: bool) -> mx.array:
    """Logits of all steps, (rows, steps, V)."""
    for row in rows:
        causal.add(row)
    for row, tokens in PREFILLS:
        if row in rows:
            causal.prefill(model, row, tokens)
    steps = []
    groups = [list(rows)] if together else [[row] for row in rows]
    for step in STEPS:
        steps.append(mx.concatenate([causal.step(model, group, [step[row] for row in group]) for group in groups]))
    logits = mx.concatenate(steps, axis=1)
    mx.eval(logits)
    return logits


def _is_close(found: mx.array, wanted: mx.array) -> bool:
    """Whether the largest difference, relative to the largest value, is one of rounding."""
    tolerance = TOLERANCES.get(wanted.dtype, TOLERANCES[mx.float32])
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    error = mx.max(mx.abs(found - wanted)) / mx.maximum(mx.max(mx.abs(wanted)), 1e-9)
    return float(error) <= tolerance
