"""Benchmarks: one file per question. Each prints a table and writes JSON under benchmarks/results/.

The package imports `runner`, which loads OpenBLAS where MLX needs it. This must come before MLX, and the sorted imports
of a benchmark have MLX first.
"""

import runner  # noqa: F401
