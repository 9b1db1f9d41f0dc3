"""Keys: what the tree goes by, one for each token. Never imports MLX."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


def common_length(left: NDArray[np.integer], right: NDArray[np.integer]) -> int:
    """Length of the common prefix of two arrays of keys, or of token ids."""
    length = min(len(left), len(right))
    first = (left[:length] != right[:length]).tobytes().find(1)
    return length if first < 0 else first
