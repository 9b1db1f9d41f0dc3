"""The caches that replay compares, by name. This file imports MLX no sooner than a cache is opened.

Each backend answers the same call: `begin(prompt)` gives a run standing at the deepest offset the cache could restore,
and leaving its block stores what the request evaluated. All else (chunks, decode, timing) is the pipeline's.

What replay asks of a cache: begin a run for a prompt, and say what is held.

mlx-lm's own LRUPromptCache, filled the way mlx-lm's server fills it.

The server cuts a chat prompt into segments and stores a copy of the whole cache at the end of each: the system prompt,
the user turn (everything but the prompt's last token), and after the reply. Caches that can be trimmed replace the
stored prefixes of themselves. A hit is a deep copy, cut back where that is possible. Models whose caches cannot be
batched take the server's other road, which stores only after the reply.

The budget is the server's too: before a request runs, what is stored may fill what its live cache leaves of the budget.
`LRUPromptCache` is given no limit of its own and is trimmed to the budget right after each insert instead, which is the
same rule applied at the same moment and lets the evictions be counted.

Source: mlx_lm/server.py and mlx_lm/models/cache.py, mlx-lm 0.32.2.

No cache: every request prefills its whole prompt. The yardstick, for time and for answers.

A run on a plain list of mlx-lm caches: what the pipeline drives when no radix cache is behind it.

The caches stand at one offset, which `evaluated_tokens()` spells out token by token: the restored beginning of the
prompt, the chunks that were prefilled, and whatever `step` was given, also when nobody has read it yet.

The cache this project is about. A Session already is a run, so there is nothing to add but the names.

The one-entry prefix match: the last request's live cache is kept, and the next one starts from what they share.

This is what a single-user runner does. The cache is trimmed back to the common prefix; where a layer cannot be trimmed
(recurrent state, a sliding window that has wrapped) and the new prompt does not simply continue, it is freed.

Invariant: outside a run, the caches hold exactly `_tokens`, or there are none of either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, LRUPromptCache, can_trim_prompt_cache, make_prompt_cache
from numpy.typing import NDArray

from radixcache import DiskStore, PrefixCache, Session
from radixcache.tokens import common_length
from runner.engine.replies import DEFAULT_STEP_SIZE, LiveRun, ProgressCallback
from runner.replay import CACHE_NAMES
from runner.script.script import Prompt


class Backend(Protocol):
    """One cache under comparison. Bytes are those of the arrays held, spare capacity included."""

    @property
    def shown(self) -> PrefixCache | None:
        """The cache whose tree can be shown; None where there is no tree."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the live caches, those a forward pass reads and writes."""

    @property
    def paged_bytes(self) -> int:
        """Bytes of everything stored beside the live caches."""

    @property
    def evictions(self) -> int:
        """How many stored entries the budget has cost so far."""

    def begin(self, prompt: Prompt) -> AbstractContextManager[LiveRun]:
        """Restore what is known of the prompt. Leaving the block stores what the run evaluated."""

    def close(self) -> None:
        """Let go of every array."""


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
        on_cut: Callable[[PlainRun, int], None] | None = None,
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


class RadixPrefixes:
    """A PrefixCache under the byte budget; an exact one where a chunk size is given.

    StoreError: the folder of the store cannot be used.
    """

    def __init__(
        self,
        model: Any,
        *,
        budget_bytes: int,
        policy: str,
        exact_step_size: int | None = None,
        disk: str | None = None,
        disk_bytes: int = 0,
    ) -> None:
        self._store = None if disk is None else DiskStore(disk, budget_bytes=disk_bytes, write_on="close")
        self.shown = PrefixCache(
            model,
            budget_bytes=budget_bytes,
            policy=policy,
            exact=exact_step_size is not None,
            step_size=exact_step_size or DEFAULT_STEP_SIZE,
            store=self._store,
        )

    @property
    def live_bytes(self) -> int:
        """Bytes of the live buffers, spare capacity included."""
        return self.shown.stats.live_bytes

    @property
    def paged_bytes(self) -> int:
        """Bytes of the snapshots, checkpoints among them."""
        return self.shown.stats.paged_bytes

    @property
    def evictions(self) -> int:
        """How many times the policy gave something up."""
        return self.shown.stats.evictions

    def begin(self, prompt: Prompt) -> Session:
        """Open a session with room for the reply."""
        return self.shown.begin(prompt.tokens, marks=prompt.marks, reserve=prompt.reply_tokens)

    def close(self) -> None:
        """Let go of the tree and the live buffers, once what is to be stored is written."""
        self.shown.close()
        if self._store is not None:
            self._store.close()


class NoCache:
    """Fresh caches for each request, dropped at its end."""

    shown = None
    evictions = 0
    paged_bytes = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: list[Any] = []

    @property
    def live_bytes(self) -> int:
        """Bytes of the running request's caches."""
        return layers_bytes(self._caches)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        """Begin at offset 0."""
        self._caches = make_prompt_cache(self._model)
        try:
            yield PlainRun(prompt.tokens, self._caches)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the running request's caches."""
        self._caches = []


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


if TYPE_CHECKING:
    from runner.models.load import LoadedModel


def open_backend(
    name: str,
    loaded: LoadedModel,
    *,
    budget_bytes: int,
    policy: str,
    exact_step_size: int | None = None,
    disk: str | None = None,
    disk_bytes: int = 0,
) -> Backend:
    """Make an empty cache of that name. `none` and `single` hold one request at a time and have no use for a budget.

    Args:
        exact_step_size: make the radix cache an exact one, on the grid of chunks of that many tokens.
        disk, disk_bytes: have the radix cache keep what it stores in this folder too, and so many bytes of it.

    Raises:
        ValueError: the name is not in CACHE_NAMES.
        StoreError: the folder cannot be used.
    """
    # Imported here: the command line wants the names without waiting for MLX.
    if name == "none":
        return NoCache(loaded.model)
    if name == "single":
        return SinglePrefix(loaded.model)
    if name == "mlx-lm":
        return LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=budget_bytes)
    if name == "radix":
        return RadixPrefixes(
            loaded.model,
            budget_bytes=budget_bytes,
            policy=policy,
            exact_step_size=exact_step_size,
            disk=disk,
            disk_bytes=disk_bytes,
        )
    raise ValueError(f"cache {name!r} is not known. Known: {', '.join(CACHE_NAMES)}.")
