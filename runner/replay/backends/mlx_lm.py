"""mlx-lm's own LRUPromptCache, filled the way mlx-lm's server fills it.

The server cuts a chat prompt into segments and stores a copy of the whole cache at the end of each: the system prompt,
the user turn (everything but the prompt's last token), and after the reply. Caches that can be trimmed replace the
stored prefixes of themselves. A hit is a deep copy, cut back where that is possible. Models whose caches cannot be
batched take the server's other road, which stores only after the reply.

The budget is the server's too: before a request runs, what is stored may fill what its live cache leaves of the budget.
`LRUPromptCache` is given no limit of its own and is trimmed to the budget right after each insert instead, which is the
same rule applied at the same moment and lets the evictions be counted.

Source: mlx_lm/server.py and mlx_lm/models/cache.py, mlx-lm 0.32.2.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache

from runner.replay.backends.plain_run import PlainRun, layers_bytes
from runner.replay.backends.single import trim
from runner.script.script import Prompt

# The server keys its entries by model; there is one here.
MODEL_KEY = "model"
UNLIMITED_ENTRIES = 1 << 62
# How far from the prompt's end the server looks for the beginning of a thinking block.
THINKING_TAIL_TOKENS = 11


class LRUPrompts:
    """Whole caches per stored prefix, under a byte budget."""

    shown = None

    def __init__(self, model: Any, tokenizer: Any, *, budget_bytes: int) -> None:
        self.evictions = 0
        self._model = model
        self._tokenizer = tokenizer
        self._budget_bytes = budget_bytes
        self._stored = LRUPromptCache(max_size=UNLIMITED_ENTRIES)
        self._live: list[Any] = []
        layers = make_prompt_cache(model)
        # Some models have layers without a cache; LRUPromptCache knows only caches.
        self._cached_layers = [index for index, cache in enumerate(layers) if cache is not None]
        self._layer_count = len(layers)
        self.is_batchable = all(hasattr(layers[index], "merge") for index in self._cached_layers)

    @property
    def live_bytes(self) -> int:
        """Bytes of the running request's caches."""
        return layers_bytes(self._live)

    @property
    def paged_bytes(self) -> int:
        """Bytes of all stored entries."""
        return int(self._stored.nbytes)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        """Begin at the nearest stored prefix, on a copy of its caches."""
        tokens = prompt.tokens.tolist()
        self._live, cached_tokens = self.fetch(tokens)
        self.trim_to(self._budget_bytes - self.live_bytes)
        kinds = dict(self.segments(prompt)) if self.is_batchable else {}

        def store(run: PlainRun, offset: int) -> None:
            self.insert(tokens[:offset], [stored_copy(cache) for cache in run.caches], kinds[offset])

        run = PlainRun(prompt.tokens, self._live, cached_tokens=cached_tokens, cuts=sorted(kinds), on_cut=store)
        try:
            yield run
            held = run.finish().tolist()
            entry = [stored_copy(cache) for cache in self._live]
            # The live cache ends here, as a finished row leaves the server's batch; the entry takes its place.
            self._live = run.caches = []
            self.insert(held, entry, "assistant")
        finally:
            self._live = []

    def close(self) -> None:
        """Let go of every entry."""
        self._live = []
        self._stored = LRUPromptCache(max_size=UNLIMITED_ENTRIES)

    def fetch(self, tokens: list[int]) -> tuple[list[Any], int]:
        """Return caches to run on and how many of the tokens they hold: fewer than all."""
        found, rest = self._stored.fetch_nearest_cache(MODEL_KEY, tokens)
        if found is not None and not rest:
            # The prompt itself is stored. One token has to be evaluated: cut it off, or take the next shorter entry.
            if trim(found, 1):
                rest = tokens[-1:]
            else:
                found, rest = self._stored.fetch_nearest_cache(MODEL_KEY, tokens[:-1])
                rest = [*rest, tokens[-1]]
        if found is None:
            return make_prompt_cache(self._model), 0
        layers: list[Any] = [None] * self._layer_count
        for index, cache in zip(self._cached_layers, found, strict=True):
            layers[index] = cache
        return layers, len(tokens) - len(rest)

    def insert(self, tokens: list[int], layers: list[Any], kind: str) -> None:
        self._stored.insert_cache(MODEL_KEY, tokens, [layers[index] for index in self._cached_layers], cache_type=kind)
        self.trim_to(self._budget_bytes)

    def trim_to(self, limit_bytes: int) -> None:
        entries = len(self._stored)
        self._stored.trim_to(n_bytes=limit_bytes)
        self.evictions += entries - len(self._stored)

    def segments(self, prompt: Prompt) -> Iterator[tuple[int, str]]:
        """Yield the end and kind of each segment that is stored while the prompt is prefilled, in order."""
        last = len(prompt.tokens) - 1
        if not prompt.ends_with_user:
            yield last, "assistant"
            return
        system_end = prompt.system_end
        if 0 < system_end < last:
            yield system_end, "system"
        tail_start = self._thinking_start(prompt)
        if system_end < tail_start <= last:
            yield tail_start, "user"
            yield last, "assistant"
        elif system_end < last:
            yield last, "user"

    def _thinking_start(self, prompt: Prompt) -> int:
        """Where a thinking block opens at the prompt's end, else the prompt's length."""
        length = len(prompt.tokens)
        if not self._tokenizer.has_thinking:
            return length
        start = int(self._tokenizer.rfind_think_start(prompt.tokens.tolist(), start=length - THINKING_TAIL_TOKENS))
        return start if start >= 0 else length


def stored_copy(cache: Any) -> Any:
    """Copy a layer's cache for storing: without spare capacity where the server's own extraction leaves it out."""
    twin = copy.deepcopy(cache)
    if type(twin) is KVCache and not twin.empty():
        twin.keys = mx.contiguous(twin.keys[..., : twin.offset, :])
        twin.values = mx.contiguous(twin.values[..., : twin.offset, :])
        mx.eval(twin.keys, twin.values)
    return twin
