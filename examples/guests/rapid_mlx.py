"""Rapid-MLX on a PrefixCache: `python examples/guests/rapid_mlx.py serve MODEL --enable-prefix-cache ...`."""

import sys
from dataclasses import replace
from typing import Any

del sys.path[0]  # This file has the name of the package.

from rapid_mlx import memory_cache, scheduler  # noqa: E402
from rapid_mlx.dependency_repair import cli_entrypoint  # noqa: E402

from radixcache import DiskStore, PrefixCache, find_marks  # noqa: E402

WORTH_TOKENS = 64  # A shared prefix of so many tokens is worth a stop of the prefill, or a wait for another prefill.


class RadixMemoryCache(memory_cache.MemoryAwarePrefixCache):  # type: ignore[misc]
    def __init__(self, model: Any, config: Any, tokenizer: Any) -> None:
        super().__init__(model, replace(config, hybrid_reuse_max_entries=2))  # keeps prompts and replies
        self._model, self._tokenizer, self._folder = model, tokenizer, ""
        self._open()

    def _open(self, store: DiskStore | None = None) -> None:
        bits = self._config.kv_bits if self._config.kv_quantize else None
        self.cache = PrefixCache(self._model, budget_bytes=self._max_memory, stored_bits=bits, store=store)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        caches, rest = self.cache.fetch(tokens)
        offset = len(tokens) - len(rest)
        self._last_match_type = "prefix" if offset else "miss"
        self._stats.hits, self._stats.misses = self._stats.hits + (offset > 0), self._stats.misses + (offset == 0)
        return (caches, tokens[offset:]) if offset else (None, tokens)

    def store(self, tokens: list[int], cache: list[Any], *_: Any, **__: Any) -> bool:
        # Rapid-MLX has the state of recurrent layers at some offsets inside of a prompt.
        for end in {end for each in memory_cache.collect_checkpoints(cache) if each for end in each.positions}:
            if snapped := memory_cache._snap_hybrid_trim(cache, len(tokens), end):
                self.cache.insert(tokens[: snapped[1]], snapped[0])
        return self._noted(self.cache.insert(tokens, cache)) > 0  # the scheduler logs errors

    def shared_prefix_length(self, tokens: list[int]) -> int:
        """Where the scheduler should split the prefill, and store. Near the end of a prompt, it stores anyway."""
        offsets = self.cache.insert_offsets(tokens, marks=find_marks(self._tokenizer, tokens)[:1])
        return next((each for each in offsets[:-1] if each >= WORTH_TOKENS), 0)

    def _noted(self, result: int) -> int:  # The scheduler looks at entries and bytes when memory is short.
        stats, own = self.cache.stats, self._stats
        self._current_memory = own.current_memory_bytes = stats.paged_bytes
        own.entry_count, own.evictions, own.tokens_saved = stats.nodes, stats.evictions, stats.hit_tokens
        self._entries = dict.fromkeys(range(stats.nodes), memory_cache._CacheEntry((), [], 0))
        return result

    def _evict_lru(self) -> None:
        self._noted(self.cache.reclaim(self._current_memory * 9 // 10))

    def clear(self, **options: Any) -> None:
        super().clear(**options)
        self.cache.clear()

    def load_from_disk(self, cache_dir: str, **_: Any) -> int:
        if not self._folder:  # Requests read from this folder what they need.
            self._folder = cache_dir
            self._open(DiskStore(f"{cache_dir}/radixcache", budget_bytes=32 << 30))
        return 0

    def save_to_disk(self, cache_dir: str, **_: Any) -> bool:
        return cache_dir == self._folder and self.cache.flush(write_all=True)


def init(self: Any, *args: Any, **options: Any) -> None:
    own_init(self, *args, **options)
    if (own := self.memory_aware_cache) is not None:
        self.memory_aware_cache = RadixMemoryCache(self.model, own._config, self._actual_tokenizer)


own_init, scheduler.Scheduler.__init__ = scheduler.Scheduler.__init__, init
scheduler._SHARED_PREFIX_SNAPSHOT_MIN_TOKENS = WORTH_TOKENS
if __name__ == "__main__":
    sys.argv[2:2] = [f"--shared-prefix-wait-tokens={WORTH_TOKENS}"] * (sys.argv[1:2] == ["serve"])
    sys.exit(cli_entrypoint())
