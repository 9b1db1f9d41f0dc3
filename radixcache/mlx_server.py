"""RadixPromptCache: takes the place of mlx-lm's LRUPromptCache in servers; a PrefixCache per model on one budget.

mlx_lm.server takes it after two lines:

    import mlx_lm.server, radixcache.mlx_server
    mlx_lm.server.LRUPromptCache = radixcache.mlx_server.RadixPromptCache

A beginning that several prompts share is held once. A prompt finds its longest usable beginning even where it differs
from what is stored, with sliding windows and recurrent layers too. `len` and `max_size` count leaves of trees.
Thread-safe.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import Entry, OrderedPolicy
from radixcache.adapters.registry import adapter_for, leaves
from radixcache.core import Core
from radixcache.ledger import Ledger
from radixcache.prefix_cache import PrefixCache
from radixcache.tree.state_tree import StateNode

#: mlx-lm's types of caches, and the priority that the state of each has.
PRIORITIES = {"assistant": 0, "user": 1, "system": 2}
LAST = PRIORITIES["system"]  # the type that goes last
#: For each step of priority, state counts as used so many calls later. A larger number finds less: system prompts that
#: begin with the time of day would fill the budget.
HEAD_START_CALLS = 10


class RadixPromptCache:
    """Takes the place of mlx-lm's LRUPromptCache.

    Args:
        max_size: the most sequences held. They go by type, as in mlx-lm: an assistant's while there are at least as
            many as of users, a user's while there are at least as many as system prompts. Of one type, those used
            longest ago go first.
        max_bytes: the most bytes held, of all models together; unlimited by default, as in mlx-lm.

    Raises:
        ValueError: max_bytes is not a positive whole number.
    """

    def __init__(self, max_size: int = 10, max_bytes: int = 1 << 63) -> None:
        self.max_size, self.max_bytes = max_size, max_bytes
        self._ledger = Ledger(max_bytes)
        # The model used last is at the end. A model may have caches of several classes: --kv-bits quantizes long ones.
        self._models: dict[Any, dict[tuple[type, ...], PrefixCache]] = {}

    def __len__(self) -> int:
        return sum(each["n_sequences"] for each in self.stats_by_type().values())

    @property
    def nbytes(self) -> int:
        return self._ledger.total_bytes

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """Return caches with the longest usable beginning of `tokens`, and the tokens left to evaluate, at least one.

        The caller owns the caches, which are outside of the budget. (None, tokens): nothing usable is stored.

        Args:
            model: any hashable that tells models apart.
            tokens: token ids; negative ones stand for an image, as in mlx_lm.server.
        """
        keys = np.array(tokens, np.int64)  # An image's token id is 0; its keys tell it from other images.
        end = len(keys)
        with self._ledger.lock:
            caches = self._used(model).values()
            while caches and end > 0:
                found = (cache.fetch(np.maximum(keys[:end], 0), keys=keys[:end]) for cache in caches)
                restored, rest = min(found, key=lambda each: len(each[1]))
                offset = end - len(rest)
                start = _image_start(keys, offset)
                if start == offset > 0:
                    return restored, tokens[offset:]
                end = start + 1 if start < offset else 0  # A part of an image cannot be embedded.
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Store the state that `prompt_cache` has of `tokens` and the tree lacks; copies it.

        A draft model's caches may follow the model's: then as much is stored as both have.

        Args:
            prompt_cache: mlx-lm caches, batch 1; recurrent ones must be at the end of `tokens`.

        Raises:
            KeyError: cache_type is not in PRIORITIES.
            UnsupportedCacheError: a class of cache that has no adapter, or cannot be emptied.
            SnapshotError: the caches do not fit the tokens, or what is stored; nothing was changed.
        """
        priority, classes = PRIORITIES[cache_type], tuple(map(type, leaves(prompt_cache)))
        keys = np.array(tokens, np.int64)
        if len(keys) == 0:
            return
        with self._ledger.lock:
            caches = self._used(model)
            if classes not in caches:
                empty = copy.deepcopy(list(prompt_cache))  # The arrays share their buffers with the originals.
                for layer, cache in enumerate(leaves(empty)):
                    adapter_for(cache, layer).free(cache)
                fresh = partial(copy.deepcopy, empty)
                caches[classes] = PrefixCache(caches=fresh, budget_bytes=self._ledger, policy=_HeadStart())
            caches[classes].insert(np.maximum(keys, 0), prompt_cache, priority=priority, keys=keys)
            self.trim_to(n_sequences=self.max_size)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict until at most `n_sequences` and `n_bytes` are left: sequences by type, then least recently used models.

        O(nodes), and O(log(sequences)) for each that goes.
        """
        with self._ledger.lock:
            if n_sequences is not None:
                self._trim_sequences(max(0, n_sequences))
            if n_bytes is not None:
                for core in self._cores():
                    held_bytes = core.states.account.total_bytes
                    core.evictor.shrink_to(max(0, held_bytes - self.nbytes + max(0, n_bytes)))

    def _trim_sequences(self, most: int) -> None:
        # Of each type, in the order of use: models first, as each counts its own calls.
        stored: list[list[tuple[int, int, int, Core, StateNode]]] = [[] for _ in PRIORITIES]

        def add(model: int, core: Core, node: StateNode) -> None:
            entry = node.payload.entry
            heappush(stored[entry.priority], (model, entry.last_used, entry.entry_id, core, node))

        for model, core in enumerate(self._cores()):
            for node in core.states.tree.nodes():
                if node.is_leaf:
                    add(model, core, node)
        while sum(map(len, stored)) > most:
            pairs = enumerate(pairwise(stored))
            rank = next((each for each, (ours, more) in pairs if len(ours) >= max(1, len(more))), LAST)
            model, _, _, core, node = heappop(stored[rank])
            node = core.states.remove(node)
            # So do the nodes above that lead to no other leaf. A system prompt stays as a sequence of its own.
            while node.is_leaf and not node.is_root:
                is_kept = rank < LAST == node.payload.entry.priority
                if is_kept and not core.states.is_useless(node):
                    break
                node = core.states.remove(node)
            core.evictor.tidy(node)
            if node.payload is not None and node.is_leaf:
                add(model, core, node)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes of each type; state of several types counts for the last of them in PRIORITIES."""
        found = {cache_type: {"n_sequences": 0, "n_bytes": 0} for cache_type in PRIORITIES}
        by_priority = list(found.values())
        with self._ledger.lock:
            for core in self._cores():
                for node in core.states.tree.nodes():
                    entry = node.payload.entry
                    by_priority[entry.priority]["n_sequences"] += node.is_leaf
                    by_priority[entry.priority]["n_bytes"] += entry.weight_bytes
        return found

    def check(self) -> None:
        """Assert the limits, that the bytes of all types are nbytes, and the invariants of all trees and the ledger."""
        with self._ledger.lock:
            assert self.nbytes <= self.max_bytes, (self.nbytes, self.max_bytes)
            assert len(self) <= self.max_size, (len(self), self.max_size)
            assert sum(each["n_bytes"] for each in self.stats_by_type().values()) == self.nbytes, self.stats_by_type()
            for core in self._cores():
                core.check()

    def _used(self, model: Any) -> dict[tuple[type, ...], PrefixCache]:
        """The caches of a model; marks the model as used last."""
        self._models[model] = caches = self._models.pop(model, {})
        return caches

    def _cores(self) -> Iterator[Core]:
        return (cache._core for caches in self._models.values() for cache in caches.values())


class _HeadStart(OrderedPolicy):
    """Least recently used first, with a head start for higher priorities; the deepest first on ties."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        return (entry.last_used + HEAD_START_CALLS * entry.priority, -entry.end)


def _image_start(keys: NDArray[np.int64], offset: int) -> int:
    """Where the image begins that an offset is inside of; the offset itself if it is in none."""
    start = offset
    while 0 < start < len(keys) and keys[start - 1] == keys[offset] < 0:
        start -= 1
    return start
