"""A run on a plain list of mlx-lm caches: what the pipeline drives when no radix cache is behind it.

The caches stand at one offset, which `evaluated_tokens()` spells out token by token: the restored beginning of the
prompt, the chunks that were prefilled, and whatever `step` was given, also when nobody has read it yet.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from runner.replies.pipeline import DEFAULT_STEP_SIZE, ProgressCallback


class PlainRun:
    """Caches that hold the first `cached_tokens` of a prompt, and the way forward from there."""

    def __init__(
        self,
        tokens: NDArray[np.int32],
        caches: list[Any],
        *,
        cached_tokens: int = 0,
        matched_tokens: int | None = None,
        reason: str | None = None,
        cuts: Sequence[int] = (),
        on_cut: Callable[["PlainRun", int], None] | None = None,
    ) -> None:
        """Wrap caches standing at `cached_tokens`.

        Args:
            tokens: the whole prompt.
            caches: one mlx-lm cache per layer, None where a layer has none.
            matched_tokens: default: `cached_tokens`.
            cuts: offsets, ascending, at which prefill stops to call `on_cut(run, offset)` with the state exactly there.
        """
        assert 0 <= cached_tokens < len(tokens), (cached_tokens, len(tokens))
        self.caches = caches
        self.cached_tokens = cached_tokens
        self.matched_tokens = cached_tokens if matched_tokens is None else matched_tokens
        self.reason = reason
        self.remaining = tokens[cached_tokens:]
        self._tokens = tokens
        self._offset = cached_tokens
        self._cuts = tuple(cuts)
        self._on_cut = on_cut
        self._stepped: list[mx.array] = []

    def prefill(
        self, model: Any, *, step_size: int = DEFAULT_STEP_SIZE, on_progress: ProgressCallback | None = None
    ) -> None:
        """Evaluate `remaining[:-1]` in chunks that end at the cuts and at least every `step_size` tokens."""
        end = len(self._tokens) - 1
        if on_progress is not None:
            on_progress(self._offset, len(self._tokens))
        while self._offset < end:
            chunk_end = min(self._offset + step_size, next(self._cuts_ahead(), end), end)
            model(mx.array(self._tokens[self._offset : chunk_end])[None], cache=self.caches)
            self._evaluate()
            self._offset = chunk_end
            if self._on_cut is not None and chunk_end in self._cuts:
                self._on_cut(self, chunk_end)
            if on_progress is not None:
                on_progress(self._offset, len(self._tokens))

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens; logits (1, T, V), pending."""
        array = mx.array(tokens).reshape(-1)
        logits: mx.array = model(array[None], cache=self.caches)
        self._stepped.append(array)
        return logits

    def finish(self) -> NDArray[np.int32]:
        """Evaluate what is pending and return the tokens the caches hold."""
        self._evaluate()
        stepped = [np.array(array, dtype=np.int32) for array in self._stepped]
        return np.concatenate([self._tokens[: self._offset], *stepped])

    def _cuts_ahead(self) -> Iterator[int]:
        return (cut for cut in self._cuts if cut > self._offset)

    def _evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches if cache is not None and not cache.empty()])


def layers_bytes(caches: Sequence[Any]) -> int:
    """Bytes of the arrays that a list of mlx-lm caches holds."""
    return sum(int(cache.nbytes) for cache in caches if cache is not None)
