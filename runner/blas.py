"""Load the system's OpenBLAS before MLX. This file never imports MLX.

MLX's CPU build for Linux contains the reference BLAS, whose float32 products are about 70 times slower than OpenBLAS's.
A library that is loaded globally before the first `import mlx.core` answers for both; afterwards it is too late. On
macOS MLX uses Metal and Accelerate, and nothing is loaded. `runner/__init__.py` calls `load_openblas` once; a second
call is harmless.
"""

import ctypes
import os
import sys
from importlib import metadata

LIBRARY = "libopenblas.so.0"
ADVICE = (
    f"{LIBRARY} not found: MLX multiplies float32 matrices with its slow reference BLAS. "
    "Install OpenBLAS (Debian and Ubuntu: apt-get install libopenblas0-pthread) and start again."
)
CUDA_PACKAGES = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


def load_openblas(library: str = LIBRARY) -> str | None:
    """Load `library` for all later ones; if that fails, return one line of advice.

    There is no advice if OpenBLAS would not help: not on Linux, MLX is loaded already, or MLX computes with CUDA.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        installed = {package.metadata["Name"] for package in metadata.distributions()}
        return ADVICE if installed.isdisjoint(CUDA_PACKAGES) else None
    return None


def blas_name() -> str:
    """The library that multiplies matrices on the CPU, with the version and the kernel that OpenBLAS states."""
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        loaded = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return "MLX's own, slow in float32"
    describe = loaded.openblas_get_config
    describe.restype = ctypes.c_char_p
    return str(describe().decode())


def blas_kernel() -> str:
    """The CPU for which OpenBLAS has chosen its kernels, such as "SkylakeX"; "": MLX does not use OpenBLAS."""
    try:
        chosen = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).openblas_get_corename
    except (OSError, AttributeError):
        return ""
    chosen.restype = ctypes.c_char_p
    return str(chosen().decode())
