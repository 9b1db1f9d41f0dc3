"""Models, conversations, replay, simulator, server and command line around the cache.

Importing this package loads OpenBLAS for MLX (see `runner.blas`), so import it before MLX. `BLAS_ADVICE` is the line to
show to the user if that failed, else None.
"""

from runner.blas import load_openblas

BLAS_ADVICE = load_openblas()

__all__ = ["BLAS_ADVICE"]
