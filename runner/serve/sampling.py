"""How a request is sampled: mlx-lm's samplers and logits processors, and seeds among many that draw."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from runner.parallel.request import LogitsProcessor
from runner.replies.reply import Sampler
from runner.serve import border
from runner.serve.asked import Asked
from runner.serve.errors import ApiError

#: MLX's seeds are numbers below this.
SEEDS = 1 << 64


def sampler_of(asked: Asked, tokenizer: Any, vocabulary_length: int) -> Sampler | None:
    """mlx-lm's sampler; None: the likeliest token.

    Raises:
        ApiError: what mlx-lm's sampler would raise at each token.
        ValueError: the seed is out of its range.
    """
    sampling, length = asked.sampling, vocabulary_length
    if sampling.temperature == 0:
        return None
    if sampling.top_k >= length:
        raise ApiError(400, f"top_k is {sampling.top_k}; wanted less than the {length} tokens there are.")
    if sampling.xtc_probability > 0 and not 0 <= sampling.xtc_threshold <= 0.5:
        raise ApiError(400, f"xtc_threshold is {sampling.xtc_threshold}; wanted 0 to 0.5.")
    sampler: Sampler = border.make_sampler(SimpleNamespace(sampling=sampling), tokenizer)
    return sampler if asked.seed is None else SeededSampler(sampler, asked.seed)


def processors_of(asked: Asked, vocabulary_length: int) -> Sequence[LogitsProcessor]:
    """mlx-lm's logits processors.

    Raises:
        ApiError: a bias for what is no token.
        ValueError: a penalty that mlx-lm refuses.
    """
    for token in asked.penalties.logit_bias or ():
        if not 0 <= token < vocabulary_length:
            raise ApiError(400, f"logit_bias names token {token}; wanted 0 to {vocabulary_length - 1}.")
    processors: Sequence[LogitsProcessor] = border.make_logits_processors(SimpleNamespace(logits=asked.penalties))
    return processors


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
