"""What the tests of paging share: a system prompt, what a cache holds, models with windows of any size, a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from radixcache import PrefixCache
from tests.prompts import tokens
from tests.walks.spelling import SpellingModel

LLAMA_TOKEN_BYTES = 3 * 2 * 2 * 64 * 4
SYSTEM = tokens(0, 40)
PROMPT = [*SYSTEM, *tokens(1, 30)]


def held_bytes(cache: PrefixCache) -> int:
    return cache.stats.live_bytes + cache.stats.paged_bytes


class WindowModel(SpellingModel):
    """Layers made by these functions, the last of them with a window."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        super().__init__(["layer"] * len(makers))
        self.makers = makers

    def make_cache(self) -> list[Any]:
        return [make() for make in self.makers]


def rotating(size: int, keep: int = 0) -> WindowModel:
    return WindowModel(KVCache, lambda: RotatingKVCache(size, keep))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
