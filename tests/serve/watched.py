"""What is watched, without a server: real caches, and queues that say what a test wants."""

from __future__ import annotations

from typing import Any

from radixcache import Explanation, Gap, PrefixCache, Reason
from radixcache.stores.block_store import StoreStats
from runner.serve.request import ModelNames, RequestRecord


def explained(*gaps: tuple[int, int, str]) -> Explanation:
    """What a prompt found that has these gaps."""
    start, end = (gaps[0][0], gaps[-1][1]) if gaps else (0, 1)
    return Explanation(end, start, start, tuple(Gap(low, high, Reason(why)) for low, high, why in gaps), (), "tokens")


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": "3f9a1c2e-0000", "names": ModelNames("small", None, None), "namespace": "", "prompt_tokens": 100,
        "cached_tokens": 60, "matched_tokens": 70, "reason": "no_checkpoint", "completion_tokens": 3, "queue_ms": 1.0,
        "ttft_ms": 40.0, "gaps_ms": (20.0, 30.0), "done_reason": "stop",
        "explanation": explained((60, 70, "no_checkpoint"), (70, 100, "diverged")),
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


class Watched:
    def __init__(self) -> None:
        self.waiting = self.running = 0
        self.held: list[tuple[ModelNames, PrefixCache]] = []
        self.stores: dict[str, StoreStats] = {}

    def add(self, names: ModelNames, model: Any, **arguments: Any) -> PrefixCache:
        cache = PrefixCache(model, budget_bytes=1 << 30, **arguments)
        self.held.append((names, cache))
        return cache

    def caches(self) -> list[tuple[ModelNames, PrefixCache]]:
        return list(self.held)

    def store_stats(self) -> dict[str, StoreStats]:
        return self.stores
