"""Models, conversations, replay and the command line around the cache layer.

Importing this package loads OpenBLAS where MLX needs it (see `runner.blas`), so it comes before any import of MLX.
`BLAS_ADVICE` is the one line to show to a person when that was not possible, else None.
"""

from runner.blas import load_openblas

BLAS_ADVICE = load_openblas()

__all__ = ["BLAS_ADVICE"]
