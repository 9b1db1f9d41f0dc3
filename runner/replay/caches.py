"""Caches: the caches that a replay compares. `OneAtATime` runs all of them with the same loop, `engine.generation`.

Source of LRUPrompts: mlx_lm/server.py and mlx_lm/models/cache.py, mlx-lm 0.32.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, LRUPromptCache, can_trim_prompt_cache, make_prompt_cache
from numpy.typing import NDArray

from radixcache import DiskStore, PrefixCache, Session
from radixcache.adapters.registry import leaves
from radixcache.speculate.drafting import Drafting
from radixcache.tokens import common_length
from runner.engine.generation import DEFAULT_STEP_SIZE, LiveRun, ProgressCallback
from runner.models.load import LoadedModel
from runner.replay import ReplayOptions
from runner.script.script import Prompt

MODEL_KEY = "model"  # the server's entries have a model as key; a replay has one model
UNLIMITED_ENTRIES = 1 << 62
THINKING_TAIL_TOKENS = 11  # how far from the prompt's end the server looks for the start of a thinking block


class ComparedCache:
    """One cache under comparison, by default without a tree or a store. Bytes include spare capacity."""

    shown: PrefixCache | None = None  # the cache whose tree can be shown
    evictions: int = 0  # entries that the byte budget has evicted so far

    def __init__(self, model: Any) -> None:
        self._model = model
        self._live: list[Any] = []  # the caches of the running request, one per layer

    @property
    def live_bytes(self) -> int:
        """Bytes of the caches that a forward pass reads and writes."""
        return layers_bytes(self._live)

    @property
    def paged_bytes(self) -> int:
        """Bytes of state that is stored outside of the live caches, with checkpoints."""
        return 0

    def begin(self, prompt: Prompt) -> AbstractContextManager[LiveRun]:
        """Give a run at the deepest offset that can be restored. On exit, store the state that the run evaluated."""
        raise NotImplementedError

    def drafting(self, prompt: Prompt) -> Drafting | None:
        """The drafts of the reply; None: one forward pass for each token."""
        return None

    def close(self) -> None:
        self._live = []


def open_cache(name: str, loaded: LoadedModel, options: ReplayOptions) -> ComparedCache:
    """Make the empty cache of a name in CACHE_NAMES. StoreError: `options.disk` cannot be used."""
    if name == "mlx-lm":
        return LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=options.budget_bytes)
    if name == "radix":
        return RadixPrefixes(loaded.model, options)
    return {"none": NoCache, "single": SinglePrefix}[name](loaded.model)


def layers_bytes(caches: Sequence[Any]) -> int:
    return sum(int(cache.nbytes) for cache in caches if cache is not None)


@dataclass(eq=False)
class PlainRun:
    """A `LiveRun` on a plain list of mlx-lm caches, one (or None) for each layer, all at the same offset.

    The caches have the first `cached_tokens` of the prompt `tokens`. At each offset of `cuts`, in ascending order,
    prefill calls `on_cut(run, offset)`.
    """

    tokens: NDArray[np.int32]
    caches: list[Any]
    cached_tokens: int = 0
    matched_tokens: int = 0
    reason: str | None = None
    cuts: Sequence[int] = ()
    on_cut: Callable[[PlainRun, int], None] | None = None
    owed_tokens = 0  # nothing is drafted

    def __post_init__(self) -> None:
        assert 0 <= self.cached_tokens < len(self.tokens), (self.cached_tokens, len(self.tokens))
        self.remaining = self.tokens[self.cached_tokens :]
        self._offset = self.cached_tokens
        self._stepped: list[mx.array] = []

    def prefill(
        self, model: Any, *, step_size: int = DEFAULT_STEP_SIZE, on_progress: ProgressCallback | None = None
    ) -> None:
        """Evaluate `remaining[:-1]` in chunks that end at the cuts and at least every `step_size` tokens."""
        report = on_progress or (lambda offset, length: None)
        end = len(self.tokens) - 1
        report(self._offset, end + 1)
        while self._offset < end:
            next_cut = next((cut for cut in self.cuts if cut > self._offset), end)
            chunk_end = min(self._offset + step_size, next_cut, end)
            model(mx.array(self.tokens[self._offset : chunk_end])[None], cache=self.caches)
            self._evaluate()
            self._offset = chunk_end
            if self.on_cut is not None and chunk_end in self.cuts:
                self.on_cut(self, chunk_end)
            report(self._offset, end + 1)

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens; return logits (1, T, V), not yet evaluated."""
        array = mx.array(tokens).reshape(-1)
        logits: mx.array = model(array[None], cache=self.caches)
        self._stepped.append(array)
        return logits

    def finish(self) -> NDArray[np.int32]:
        """Evaluate what is pending and return the tokens that the caches hold."""
        self._evaluate()
        stepped = [np.array(array, dtype=np.int32) for array in self._stepped]
        return np.concatenate([self.tokens[: self._offset], *stepped])

    def _evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches if cache is not None and not cache.empty()])


class RadixPrefixes(ComparedCache):
    """A PrefixCache, and the store behind it if there is one."""

    def __init__(self, model: Any, options: ReplayOptions) -> None:
        disk, disk_bytes = options.disk, options.disk_bytes
        self._store = None if disk is None else DiskStore(disk, budget_bytes=disk_bytes, write_on="close")
        self._speculate = options.speculate
        self.shown: PrefixCache = PrefixCache(
            model,
            budget_bytes=options.budget_bytes,
            policy=options.policy,
            exact=options.exact,
            stored_bits=options.stored_bits,
            step_size=options.step_size if options.exact else DEFAULT_STEP_SIZE,
            store=self._store,
        )

    @property
    def live_bytes(self) -> int:
        return self.shown.stats.live_bytes

    @property
    def paged_bytes(self) -> int:
        return self.shown.stats.paged_bytes

    @property
    def evictions(self) -> int:  # type: ignore[override]
        return self.shown.stats.evictions

    def begin(self, prompt: Prompt) -> Session:
        return self.shown.begin(prompt.tokens, marks=prompt.marks, reserve=prompt.reply_tokens)

    def drafting(self, prompt: Prompt) -> Drafting | None:
        return None if self._speculate is None else self.shown.drafting(prompt.tokens, speculate=self._speculate)

    def close(self) -> None:
        """Write state to the store, then release all arrays."""
        self.shown.close()
        if self._store is not None:
            self._store.close()


class NoCache(ComparedCache):
    """Fresh caches for each request, dropped at its end: the reference for times and answers."""

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        self._live = make_prompt_cache(self._model)
        try:
            yield PlainRun(prompt.tokens, self._live)
        finally:
            self.close()


class SinglePrefix(ComparedCache):
    """The caches of the last request: the next one starts from the common prefix.

    Invariant: outside a run the caches hold exactly `_tokens`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        matched = common_length(self._tokens, prompt.tokens)
        # The last prompt token is always evaluated: the reply starts from its logits.
        target = min(matched, len(prompt.tokens) - 1)
        held, self._tokens = self._tokens, np.empty(0, np.int32)
        if target == 0 or not trim(self._live, len(held) - target):
            self._live = []  # free the old buffers before new ones are made
            self._live = make_prompt_cache(self._model)
            target = 0
        reason = None if target or not matched else "a layer cannot be trimmed back to the common prefix"
        run = PlainRun(prompt.tokens, self._live, target, matched, reason)
        try:
            yield run
            self._tokens = run.finish()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._tokens = np.empty(0, np.int32)


class LRUPrompts(ComparedCache):
    """mlx-lm's LRUPromptCache under a byte budget, filled as mlx-lm's server fills it.

    The server stores a copy of all caches after each segment of a chat prompt: the system prompt, the user's turn
    (without the prompt's last token) and the reply. If the caches cannot be batched, it stores only after the reply.
    If caches can be trimmed, an entry replaces stored entries of its prefixes. A hit is a deep copy, trimmed if that is
    possible. After each insert, as in the server, entries are evicted until they fit the budget minus the live caches.
    """

    def __init__(self, model: Any, tokenizer: Any, *, budget_bytes: int) -> None:
        super().__init__(model)
        self.evictions = 0
        self._tokenizer = tokenizer
        self._budget_bytes = budget_bytes
        self._stored = LRUPromptCache(max_size=UNLIMITED_ENTRIES)
        layers = make_prompt_cache(model)
        # LRUPromptCache does not accept layers without a cache.
        self._cached_layers = [index for index, cache in enumerate(layers) if cache is not None]
        self._layer_count = len(layers)
        self.is_batchable = all(hasattr(layers[index], "merge") for index in self._cached_layers)

    @property
    def paged_bytes(self) -> int:
        return int(self._stored.nbytes)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        tokens = prompt.tokens.tolist()
        self._live, cached_tokens = self.fetch(tokens)
        self.trim_to(self._budget_bytes - self.live_bytes)
        kinds = dict(self.segments(prompt)) if self.is_batchable else {}

        def store(run: PlainRun, offset: int) -> None:
            self.insert(tokens[:offset], [stored_copy(cache) for cache in run.caches], kinds[offset])

        run = PlainRun(prompt.tokens, self._live, cached_tokens, cached_tokens, cuts=sorted(kinds), on_cut=store)
        try:
            yield run
            held = run.finish().tolist()
            entry = [stored_copy(cache) for cache in self._live]
            # The live caches end here, as a finished row leaves the server's batch; the entry takes their place.
            self._live = run.caches = []
            self.insert(held, entry, "assistant")
        finally:
            self._live = []

    def close(self) -> None:
        super().close()
        self._stored = LRUPromptCache(max_size=UNLIMITED_ENTRIES)

    def fetch(self, tokens: list[int]) -> tuple[list[Any], int]:
        """Return caches to run on, and how many of the tokens they hold, at most all but one."""
        found, rest = self._stored.fetch_nearest_cache(MODEL_KEY, tokens)
        if found is not None and not rest:
            # One token must be evaluated: cut it off, or take the next shorter entry.
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
        """Yield, in order, the end and kind of each segment that is stored while the prompt is prefilled."""
        last, system_end, thinking_start = len(prompt.tokens) - 1, prompt.system_end, -1
        if not prompt.ends_with_user:
            yield last, "assistant"
            return
        if 0 < system_end < last:
            yield system_end, "system"
        if self._tokenizer.has_thinking:
            tail_start = len(prompt.tokens) - THINKING_TAIL_TOKENS
            thinking_start = int(self._tokenizer.rfind_think_start(prompt.tokens.tolist(), start=tail_start))
        if system_end < thinking_start <= last:
            yield thinking_start, "user"
            yield last, "assistant"
        elif system_end < last:
            yield last, "user"


def stored_copy(cache: Any) -> Any:
    """Copy a layer's cache for storing, without spare capacity if mlx-lm's server stores it without."""
    twin = copy.deepcopy(cache)
    if type(twin) is KVCache and not twin.empty():
        twin.keys = mx.contiguous(twin.keys[..., : twin.offset, :])
        twin.values = mx.contiguous(twin.values[..., : twin.offset, :])
        mx.eval(twin.keys, twin.values)
    return twin


def trim(caches: list[Any], tokens: int) -> bool:
    """Cut the last `tokens` off every layer. False: a layer cannot be trimmed; do not use the caches."""
    if tokens == 0:
        return True
    used = [leaf for leaf in leaves(caches) if not leaf.empty()]
    # Check how much was cut: a chunked cache says that it can be trimmed, but does not trim beyond its first token.
    return can_trim_prompt_cache(used) and all(leaf.trim(tokens) == tokens for leaf in used)
