"""What CausalCache.check() finds, each rule broken on its own, and what dump() says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from radixcache.cells.causal import CausalCache
from tests import inside
from tests.cells.causal_rows import Rows, shared_model, words


def busy(kind: str) -> Rows:
    """Sequences 1 and 2, which have made a step together, and 3, which has not."""
    rows = Rows(shared_model(kind), capacity=40)
    rows.join(1, words(1, 5))
    rows.join(2, words(2, 7))
    rows.join(3, words(3, 4))
    rows.step({1: 1, 2: 2})
    return rows


def cut_buffer(causal: CausalCache, name: str) -> None:
    """Leave the first layer a buffer that ends before the last cell in use."""
    layer: Any = inside.cell_layers(causal)[0]
    setattr(layer, name, getattr(layer, name)[..., : causal.table.used - 1, :])


BREAKS: dict[str, tuple[str, Callable[[CausalCache], object]]] = {
    "K1: a sequence without state": ("lfm2", lambda c: inside.row_states(c).free(3)),
    "K2: keys end before the last cell": ("llama", lambda c: cut_buffer(c, "keys")),
    "K2: values end before the last cell": ("llama", lambda c: cut_buffer(c, "values")),
    "K2: more cells than the table": (
        "llama",
        lambda c: setattr(inside.cell_layers(c)[0], "keys", mx.zeros((1, 1, 41, 1))),
    ),
    "K3: nobody is tainted": ("llama", lambda c: inside.taint(c, 9, 0)),
    "K3: from before the start": ("llama", lambda c: inside.taint(c, 1, -1)),
    "K3: from the end": ("llama", lambda c: inside.taint(c, 1, c.length(1))),
    "CS1: nobody is joined": ("lfm2", lambda c: inside.joined_rows(c, 1, 9)),
    "CS1: one is joined twice": ("lfm2", lambda c: inside.joined_rows(c, 1, 1)),
    "CS1: a row that nobody has": ("lfm2", lambda c: inside.joined_rows(c, 1)),
    "CS2: a state is held twice": ("lfm2", lambda c: inside.give_second_state(c, 2, mx.zeros((1,)))),
}


@pytest.mark.parametrize("case", BREAKS)
def test_check_finds_each_rule_broken(case: str) -> None:
    kind, broken = BREAKS[case]
    causal = busy(kind).causal
    causal.check()
    broken(causal)

    with pytest.raises(AssertionError):
        causal.check()


def test_dump_says_what_cells_take_and_who_is_tainted() -> None:
    rows = busy("llama")
    rows.causal.remove(rows.model, 2, 2, 4)
    lines = rows.causal.dump().splitlines()

    assert lines[0] == f"{rows.causal.nbytes:,} bytes, {rows.causal.nbytes // 40:,} of them per cell"
    assert lines[1:-1] == rows.causal.table.dump().splitlines()
    assert lines[-1] == "  sequence 2 is tainted from 2"
