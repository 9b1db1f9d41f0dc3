"""The one-entry prefix match: the last request's live cache is kept, and the next one starts from what they share.

This is what a single-user runner does. The cache is trimmed back to the common prefix; where a layer cannot be trimmed
(recurrent state, a sliding window that has wrapped) and the new prompt does not simply continue, it is freed.

Invariant: outside a run, the caches hold exactly `_tokens`, or there are none of either.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from numpy.typing import NDArray

from radixcache.tokens.keys import common_length
from runner.replay.backends.plain_run import PlainRun, layers_bytes
from runner.script.script import Prompt


class SinglePrefix:
    """One live cache and the tokens it holds."""

    shown = None
    evictions = 0
    paged_bytes = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: list[Any] = []
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def live_bytes(self) -> int:
        """Bytes of the one cache."""
        return layers_bytes(self._caches)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        """Begin at the prefix shared with the last request, or at 0 when the cache cannot be brought there."""
        matched = common_length(self._tokens, prompt.tokens)
        # At least one token is evaluated: its logits are what the reply starts from.
        target = min(matched, len(prompt.tokens) - 1)
        trimmed_tokens = len(self._tokens) - target
        caches = self._caches
        # Until the run is over nobody can say what the caches hold.
        self._tokens = np.empty(0, np.int32)
        if target == 0 or not trim(caches, trimmed_tokens):
            # The old buffers go before the new ones come.
            self._caches = caches = []
            self._caches = caches = make_prompt_cache(self._model)
            target = 0
        reason = None if target or not matched else "a layer cannot be trimmed back to the common prefix"
        run = PlainRun(prompt.tokens, caches, cached_tokens=target, matched_tokens=matched, reason=reason)
        try:
            yield run
            self._tokens = run.finish()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the cache."""
        self._caches = []
        self._tokens = np.empty(0, np.int32)


def trim(caches: list[Any], tokens: int) -> bool:
    """Cut the last `tokens` off every layer. False when one cannot: the caches are of no use then."""
    if tokens == 0:
        return True
    used = [leaf for cache in caches for leaf in _leaves(cache) if not leaf.empty()]
    # `trim` answers with what it really cut: a chunked cache calls itself trimmable and stops at its front.
    return can_trim_prompt_cache(used) and all(leaf.trim(tokens) == tokens for leaf in used)


def _leaves(cache: Any) -> list[Any]:
    """The caches inside a layer's cache: none, itself, or the parts of a CacheList."""
    if cache is None:
        return []
    parts = getattr(cache, "caches", None)
    return [cache] if parts is None else [leaf for part in parts for leaf in _leaves(part)]
