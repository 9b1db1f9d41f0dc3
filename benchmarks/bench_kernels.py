"""Count the kernels of cascade attention that a GPU would launch, per layer of a decode step.

Nothing is timed. The benchmark counts the operations of one layer's attention in MLX's graph. Views do not count,
because they launch nothing; the copies that MLX makes of some views do not count either. mlx-lm's attention is one
kernel on Metal and CUDA, and on a CPU the number in its row.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import arguments, publish
from radixcache.groups.attention import Readers, cascade

ROWS, HEADS, KEY_HEADS, WIDTH, OWN, SEGMENT = 16, 9, 3, 64, 100, 300
VIEWS = frozenset(
    ["Transpose", "Reshape", "Broadcast", "Slice", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "AsType"]
)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = [
        {"way": "mlx-lm's attention on a CPU", "kernels": _kernels(_stock())},
        {"way": "one row alone, one level", "kernels": _kernels(_cascade([None], rows=1))},
        *({"way": way, "kernels": _kernels(_cascade(readers))} for way, readers in _ways().items()),
    ]
    title = "Kernels of cascade attention per layer and decode step, for 16 rows if not stated"
    publish("kernels", title, rows, folder=options.results, repeats=1, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"{row['way']}: {row['kernels']}" for row in rows) + "."


def _ways() -> dict[str, list[tuple[int, ...] | None]]:
    """Return the rows that read each segment; None: all rows."""
    quarters: list[tuple[int, ...] | None] = [tuple(range(first, first + 4)) for first in range(0, ROWS, 4)]
    return {
        "nothing shared": [],
        "one level": [None],
        "two levels": [None, None],
        "four groups": quarters,
        "one level and four groups": [None, *quarters],
    }


def _cascade(readers: list[tuple[int, ...] | None], rows: int = ROWS) -> mx.array:
    queries, keys, values = _arrays(rows, OWN)
    segments = [_arrays(1, SEGMENT)[1:] for _ in readers]
    read = Readers(rows, readers)
    mx.eval([places for _, _, places in read.levels if places is not None])
    return cascade(queries, keys, values, read, segments, scale=WIDTH**-0.5)


def _stock() -> mx.array:
    queries, keys, values = _arrays(ROWS, SEGMENT + OWN)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=WIDTH**-0.5)


def _arrays(rows: int, columns: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return evaluated queries of one token, keys and values."""
    shapes = (HEADS, 1), (KEY_HEADS, columns), (KEY_HEADS, columns)
    made = [mx.zeros((rows, heads, tokens, WIDTH)) for heads, tokens in shapes]
    mx.eval(made)
    return made[0], made[1], made[2]


def _kernels(output: mx.array) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), output)
        operations = Counter(re.findall(r'label ?= ?"(\w+)"', file.read_text(encoding="utf-8")))
    return sum(count for name, count in operations.items() if name not in VIEWS)


if __name__ == "__main__":
    main()
