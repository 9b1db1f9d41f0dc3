"""A full copy of what a CellTable knows, to be compared before and after a call that must change nothing."""

from __future__ import annotations

from typing import Any

from radixcache.cells.table import CellTable


def state_of(table: CellTable) -> dict[str, Any]:
    """Every field by value, the stamp by identity: a plan made before is still good after."""
    state = dict(vars(table))
    for name in ("_positions", "_sets"):
        state[name] = state[name].tolist()
    state["_sequences"] = {name: (each.bit, each.cells.tolist(), each.end) for name, each in table._sequences.items()}
    return state
