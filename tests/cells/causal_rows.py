"""Rows: a CausalCache with every sequence's tokens beside it, so that each logit can be held against plain mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from benchmarks.architectures.right_state import ROUNDING, WRONG_STATE
from benchmarks.architectures.temporal import largest_difference
from radixcache.cells.causal import CausalCache
from tests.groups.cold import shared_model
from tests.prompts import tokens as words

__all__ = ["ROUNDING", "WRONG_STATE", "Rows", "alone", "shared_model", "words"]


def alone(model: Any, tokens: list[int], step_size: int | None = None) -> NDArray[np.float32]:
    """Logits (T, V) of a sequence that has mlx-lm's own caches to itself.

    Args:
        step_size: tokens per forward pass; None: all in one.
    """
    caches, size = make_prompt_cache(model), step_size or len(tokens)
    parts = [model(mx.array([tokens[at : at + size]]), cache=caches)[0] for at in range(0, len(tokens), size)]
    return np.array(mx.concatenate(parts).astype(mx.float32))


class Rows:
    """Sequences in a CausalCache, and the logits that came out of it.

    Args:
        step_size: tokens per forward pass of a prompt, here and alone; None: as they come, and alone in one.
    """

    def __init__(self, model: Any, capacity: int, step_size: int | None = None) -> None:
        self.model = model
        self.causal = CausalCache(model, capacity=capacity)
        self.tokens: dict[int, list[int]] = {}
        self._error = 0.0
        self._found: dict[int, list[tuple[int, mx.array]]] = {}
        self.step_size = step_size

    @property
    def has_states(self) -> bool:
        """Whether some layer's state cannot be cut."""
        return bool(self.causal._states)

    @property
    def error(self) -> float:
        """How far any of the logits so far was from those of its sequence alone; infinite where one is not finite."""
        for sequence in self.tokens:
            self._compare(sequence)
        return self._error

    def join(self, sequence: int, tokens: list[int]) -> None:
        self.causal.add(sequence)
        self.tokens[sequence] = []
        self.prefill(sequence, tokens)

    def prefill(self, sequence: int, tokens: list[int]) -> None:
        size = self.step_size or len(tokens)
        for at in range(0, len(tokens), size):
            logits = self.causal.prefill(self.model, sequence, tokens[at : at + size])
            self.note(sequence, tokens[at : at + size], logits[0])

    def step(self, tokens: dict[int, int]) -> None:
        logits = self.causal.step(self.model, list(tokens), list(tokens.values()))
        for row, (sequence, token) in enumerate(tokens.items()):
            self.note(sequence, [token], logits[row])

    def share(self, source: int, target: int, length: int) -> None:
        self.causal.add(target)
        self.causal.copy_prefix(source, target, length)
        self.tokens[target] = self.tokens[source][:length]

    def leave(self, sequence: int) -> None:
        self._compare(sequence)
        self.causal.free(sequence)
        del self.tokens[sequence]

    def rewind(self, sequence: int, length: int) -> None:
        self._compare(sequence)
        end = len(self.tokens[sequence])
        self.causal.remove(self.model, sequence, end - length, end)
        del self.tokens[sequence][end - length :]

    def check(self) -> None:
        self.causal.check()
        assert {name: self.causal.length(name) for name in self.causal.sequences} == {
            name: len(tokens) for name, tokens in self.tokens.items()
        }

    def note(self, sequence: int, tokens: list[int], logits: mx.array) -> None:
        """A forward pass of a sequence's next tokens gave these logits, (T, V)."""
        self._found.setdefault(sequence, []).append((len(self.tokens[sequence]), logits))
        self.tokens[sequence] = [*self.tokens[sequence], *tokens]

    def _compare(self, sequence: int) -> None:
        found = self._found.pop(sequence, [])
        wanted = alone(self.model, self.tokens[sequence], self.step_size) if found else None
        for start, logits in found:
            expected = wanted[start : start + len(logits)]
            self._error = max(self._error, largest_difference(np.array(logits.astype(mx.float32)), expected))
