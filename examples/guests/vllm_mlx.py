"""Run vllm-mlx with a PrefixCache in place of its own prefix cache. The command line stays as it is:

    python examples/guests/vllm_mlx.py serve MODEL --continuous-batching --enable-prefix-cache --cache-memory-mb 4096

Prompts with the same beginning are evaluated once, also if they come at the same time, with sliding windows and
recurrent layers too. The options for the cache's memory, its quantization, --max-kv-size and --ssd-cache-dir keep their
meaning. Made for vllm-mlx 0.6.0. Models with images, and --use-paged-cache, keep the guest's own caches.
"""

import sys
from typing import Any

sys.path.pop(0)  # Remove this folder: this file has the name of the guest's package.

from mlx_lm.models.cache import make_prompt_cache
from vllm_mlx import cli, engine_core, scheduler
from vllm_mlx.memory_cache import MemoryAwarePrefixCache

from radixcache import DiskStore, PrefixCache
from radixcache.mlx_server import RadixBatchGenerator


class Cache(MemoryAwarePrefixCache):
    """Holds the PrefixCache of the generator. The scheduler finds nothing here: it only clears it and counts."""

    def __init__(self, model: Any, config: Any, **options: Any) -> None:
        super().__init__(model, config)
        bits = config.kv_bits if config.kv_quantize else None
        self.prefixes = PrefixCache(model, budget_bytes=self._max_memory, stored_bits=bits, **options)

    def fetch(self, tokens: list[int]) -> tuple[None, list[int]]:
        return None, tokens

    def store(self, *_: Any, **__: Any) -> bool:
        return True

    def clear(self) -> None:
        self.prefixes.clear()

    def get_stats(self) -> dict[str, Any]:
        stats = self.prefixes.stats
        self._stats.tokens_saved, self._stats.evictions = stats.hit_tokens, stats.evictions
        self._stats.entry_count, self._stats.current_memory_bytes = stats.nodes, stats.paged_bytes
        return super().get_stats()


class Scheduler(scheduler.Scheduler):
    """The guest's scheduler, with a generator that looks prompts up and stores state."""

    def __init__(self, model: Any, tokenizer: Any, config: Any = None) -> None:
        super().__init__(model, tokenizer, config)
        if self.memory_aware_cache is not None:
            own, bound = self.config, self._bounded_kv_size()
            disk_bytes = int(own.ssd_cache_max_gb * 2**30)
            disk = own.ssd_cache_dir and DiskStore(own.ssd_cache_dir, budget_bytes=disk_bytes, write_on="close")
            fresh = bound and (lambda: self._bound_cache_layers(make_prompt_cache(model), bound))
            self.memory_aware_cache = Cache(model, self.memory_aware_cache._config, store=disk, caches=fresh)

    def _create_batch_generator(self, sampling_params: Any) -> Any:
        generator = super()._create_batch_generator(sampling_params)
        generator.prefixes = getattr(self.memory_aware_cache, "prefixes", None)
        return generator

    def _schedule_waiting(self) -> list[Any]:
        started = super()._schedule_waiting()
        for request in started:
            self.batch_generator.marks[request.batch_uid] = [request.prefix_boundary]
        return started

    def _store_prompt_only_cache(self, request: Any, response: Any) -> None:
        """Copy nothing: the generator has stored the prompt."""

    def ensure_ssd_tier(self) -> None:
        """Do nothing: the PrefixCache has a DiskStore."""


if __name__ == "__main__":
    scheduler.BatchGenerator, engine_core.Scheduler = RadixBatchGenerator, Scheduler
    cli.main()
