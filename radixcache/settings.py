"""Settings: what a cache was asked for. Every argument of the public calls is checked here, once, and first.

What callers pass as tokens, keys, marks and namespaces is checked by tokens/ids.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A leaf of a pure span model loses its tail in steps of this many tokens.
TRIM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one cache, as PrefixCache and sized_cache describe them.

    Raises:
        ValueError: one is out of its range.
    """

    checkpoint_interval: int = 2048
    checkpoint_budget_bytes: int | None = None
    live_slots: int = 1
    verify: float = 0.0
    verify_seed: int = 0
    exact: bool = False
    step_size: int = 2048
    vocab_size: int | None = None
    on_event: Callable[..., object] | None = None
    clock: Callable[[], int] | None = None
    trim_tokens: int | None = None
    merges: bool = True

    def __post_init__(self) -> None:
        require_count("checkpoint_interval", self.checkpoint_interval, "tokens")
        require_count("step_size", self.step_size, "tokens")
        require_count("live_slots", self.live_slots, "slots")
        if self.checkpoint_budget_bytes is not None:
            require_count("checkpoint_budget_bytes", self.checkpoint_budget_bytes, "bytes")
        if self.trim_tokens is not None:
            require_count("trim_tokens", self.trim_tokens, "tokens")
        if isinstance(self.verify, bool) or not isinstance(self.verify, (int, float)) or not 0 <= self.verify <= 1:
            raise ValueError(f"verify is {self.verify!r}; wanted a share from 0 to 1.")
        for name, value in (("exact", self.exact), ("merges", self.merges)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False.")
        if not is_whole(self.verify_seed):
            raise ValueError(f"verify_seed is {self.verify_seed!r}; wanted a whole number.")

    @property
    def grid_tokens(self) -> int:
        """State is resumed at multiples of this many tokens only: 1, or in exact mode the chunk of prefill."""
        return self.step_size if self.exact else 1

    @property
    def trim_step_tokens(self) -> int:
        """`trim_tokens`, in exact mode rounded up to whole chunks."""
        return -(-(self.trim_tokens or TRIM_TOKENS) // self.grid_tokens) * self.grid_tokens


def require_caches(model: Any, caches: Any, kv_bits: Any, kv_group_size: Any) -> None:
    """Raise ValueError unless these say which caches there are, and how they are quantized."""
    if model is None and caches is None:
        raise ValueError("PrefixCache needs a model, or caches= with a callable that returns fresh mlx-lm caches.")
    if caches is not None and not callable(caches):
        raise ValueError(f"caches is a {type(caches).__name__}; wanted a callable that returns mlx-lm caches.")
    require_count("kv_group_size", kv_group_size, "elements")
    if kv_bits not in (None, 2, 3, 4, 5, 6, 8):
        raise ValueError(f"kv_bits is {kv_bits!r}; wanted None, 2, 3, 4, 5, 6 or 8.")


def require_use(reserve: Any, priority: Any, turn: Any, kind: Any) -> None:
    """Raise ValueError unless begin() can take these."""
    require_amount("reserve", reserve, " tokens")
    if turn is not None and (not is_whole(turn) or turn < 0):
        raise ValueError(f"turn is {turn!r}; wanted a whole number, 0 or more, or None.")
    if not is_whole(priority) or not isinstance(kind, str):
        raise ValueError(f"priority is {priority!r}, kind {kind!r}; wanted a whole number and a str.")


def require_group(capacity: Any, priority: Any, prompts: Any) -> None:
    """Raise ValueError unless begin_many() can take these."""
    require_count("capacity", capacity, "cells")
    if not is_whole(priority):
        raise ValueError(f"priority is {priority!r}; wanted a whole number.")
    if not hasattr(type(prompts), "__iter__"):
        raise ValueError(f"prompts is a {type(prompts).__name__}; wanted a list of prompts.")


def require_one(tokens: Any, name: Any) -> None:
    """Raise ValueError unless unpin() was given one of these."""
    if (tokens is None) == (name is None):
        raise ValueError("unpin() takes tokens or name=; wanted exactly one of them.")


def require_pin(name: Any, ttl_requests: Any) -> None:
    """Raise ValueError unless a pin can have this name and this time."""
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"name is {name!r}; wanted a str that is not empty.")
    if ttl_requests is not None:
        require_count("ttl_requests", ttl_requests, "requests")


def require_count(name: str, value: Any, unit: str) -> None:
    """Raise ValueError unless this is a whole number, 1 or more."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; wanted a whole number of {unit}, 1 or more.")


def require_amount(name: str, value: Any, unit: str = "") -> None:
    """Raise ValueError for less than nothing."""
    if value < 0:
        raise ValueError(f"{name} is {value}; wanted 0 or more{unit}.")


def is_whole(value: Any) -> bool:
    """Whether this is an int, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
