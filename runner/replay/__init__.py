"""Replay: send the same requests through several caches, and record what each request cost."""

from dataclasses import dataclass
from typing import Literal

CACHE_NAMES = ("none", "single", "mlx-lm", "radix")  # the caches that a replay compares, by name
TOGETHER = ("radix", "mlx-lm")  # the caches that can serve several users at a time


@dataclass(frozen=True)
class ReplayOptions:
    budget_bytes: int
    policy: str = "lru"
    max_tokens: int = 8
    recorded: bool = False
    step_size: int = 2048
    exact: bool = False
    stored_bits: int | None = None
    speculate: Literal["tree", "prompt"] | None = None
    keep_view: bool = False
    disk: str | None = None
    disk_bytes: int = 0
