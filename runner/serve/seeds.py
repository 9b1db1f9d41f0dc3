"""SeededSampler: draws of one request alone, though others draw in between."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from runner.replies.reply import Sampler

#: MLX's seeds are numbers below this.
SEEDS = 1 << 64


class SeededSampler:
    """Samples as `sampler` does after mx.random.seed(seed) in a process that serves nobody else.

    MLX has one random state per thread. Each call puts the request's own in its place, and then that of the others
    back, which waits for what was drawn before.

    Raises:
        ValueError: the seed is not in [0, 2**64).
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed is {seed}; wanted 0 to 2**64 - 1.")
        self._sampler, self._seed = sampler, seed

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (1, V) to a token (1,)."""
        others = _state()
        mx.random.seed(self._seed)
        try:
            return self._sampler(logprobs)
        finally:
            self._seed = _state()
            mx.random.seed(others)


def _state() -> int:
    """The seed that brings this thread's random state about."""
    key: Any = mx.random.state
    high, low = np.asarray(key[0]).tolist()
    return int(high) << 32 | int(low)
