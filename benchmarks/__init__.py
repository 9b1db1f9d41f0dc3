"""Benchmarks: one file per question. Each prints a table and writes JSON under benchmarks/results/.

Importing it imports `runner`, which loads OpenBLAS where MLX needs it: here, since a benchmark's own imports are sorted
and MLX comes before `runner` in them.
"""

import runner  # noqa: F401
