"""Load the system's OpenBLAS before MLX is loaded. This file never imports MLX.

MLX's CPU build for Linux brings the reference BLAS, whose float32 products are about 70 times slower than OpenBLAS's. A
library that is loaded globally first answers for both, so loading OpenBLAS before the first `import mlx.core` is all it
takes; afterwards it is too late. On macOS MLX uses Metal and Accelerate, and there is nothing to do.

`runner/__init__.py` calls `load_openblas` once, so that whatever imports anything of `runner` has it. Loading twice is
harmless. Not thread-safe; the import lock holds it.
"""

import ctypes
import sys
from importlib import metadata

LIBRARY = "libopenblas.so.0"
ADVICE = (
    f"{LIBRARY} not found: MLX multiplies float32 matrices with its slow reference BLAS. "
    "Install OpenBLAS (Debian and Ubuntu: apt-get install libopenblas0-pthread) and start again."
)
CUDA_DISTRIBUTIONS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


def load_openblas(library: str = LIBRARY) -> str | None:
    """Load `library` for every later one to use; return one line of advice when that failed, else None.

    Advice is only given where OpenBLAS would help: on Linux, with MLX not loaded yet and no CUDA build of it installed.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None if has_cuda_build() else ADVICE
    return None


def has_cuda_build() -> bool:
    """Tell whether a CUDA build of MLX is installed, without loading it."""
    return any(_is_installed(name) for name in CUDA_DISTRIBUTIONS)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
