"""Settings of a cache, and checks of the arguments of public calls; checks return NumPy's whole numbers as Python's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Each slot is a bit of every node's mask.
MOST_LIVE_SLOTS = 4096
#: Pins may last so many seconds, some 30,000 years.
NEVER_S = 1e12
#: The suffix index of a cache takes at most so many bytes by default: 1.7 million tokens.
SUFFIX_INDEX_BYTES = 64 << 20
#: Bits of keys and values in snapshots, the fewest first; None: those of the live ones.
STORED_BITS: tuple[int | None, ...] = (4, 8, None)
#: A leaf of a pure span model loses its tail in steps of this many tokens.
TRIM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one cache, described in PrefixCache and sized_cache. ValueError: one is out of its range."""

    checkpoint_interval: int = 2048
    checkpoint_budget_bytes: int | None = None
    live_slots: int = 1
    verify: float = 0.0
    verify_seed: int = 0
    exact: bool = False
    step_size: int = 2048
    vocab_size: int | None = None
    on_event: Callable[..., object] | None = None
    max_request_bytes: int | None = None
    clock: Callable[[], int] | None = None
    seconds: Callable[[], float] = time.monotonic
    trim_tokens: int | None = None
    merges: bool = True
    remembers: bool = True
    suffix_index_bytes: int = SUFFIX_INDEX_BYTES
    #: Chat templates rewrite the end of a prompt; a checkpoint this many tokens before it survives that.
    tail_tokens: int = 16
    model: Any = None

    def __post_init__(self) -> None:
        units = dict.fromkeys(("checkpoint_interval", "tail_tokens", "step_size"), "tokens") | {"live_slots": "slots"}
        units["suffix_index_bytes"] = "bytes"
        optional = {"checkpoint_budget_bytes": "bytes", "max_request_bytes": "bytes", "trim_tokens": "tokens"}
        for name, unit in {**units, **optional}.items():
            value = getattr(self, name)
            if value is not None or name in units:
                object.__setattr__(self, name, require_count(name, value, unit))
        if self.live_slots > MOST_LIVE_SLOTS:
            raise ValueError(f"live_slots is {self.live_slots}; wanted at most {MOST_LIVE_SLOTS}.")
        if isinstance(self.verify, bool) or not isinstance(self.verify, (int, float)) or not 0 <= self.verify <= 1:
            raise ValueError(f"verify is {self.verify!r}; wanted a share from 0 to 1.")
        for name, value in (("exact", self.exact), ("merges", self.merges), ("remembers", self.remembers)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False.")
        if not is_whole(self.verify_seed):
            raise ValueError(f"verify_seed is {self.verify_seed!r}; wanted a whole number.")
        object.__setattr__(self, "verify_seed", int(self.verify_seed))
        for name, value in (("clock", self.clock), ("on_event", self.on_event), ("seconds", self.seconds)):
            if value is not None and not callable(value):
                raise ValueError(f"{name} is {value!r}; wanted a function, or None.")

    def require_model(self, model: Any) -> None:
        """Raise ValueError for what is no model, or has other arguments than the cache's."""
        if not callable(model):
            raise ValueError(f"model is {model!r}; wanted the mlx-lm model, called as model(tokens, cache=...).")
        own, given = getattr(self.model, "args", None), getattr(model, "args", None)
        if model is not self.model and own is not None and given is not None and own != given:
            kinds = [getattr(each, "model_type", type(each).__module__.rpartition(".")[2]) for each in (given, own)]
            raise ValueError(
                "the model is a {} model; the cache was made for a {} model, with other layers or sizes.".format(*kinds)
            )

    @property
    def grid_tokens(self) -> int:
        """Requests resume only at multiples of so many tokens: 1, or in exact mode the chunk of prefill."""
        return self.step_size if self.exact else 1

    @property
    def trim_step_tokens(self) -> int:
        """`trim_tokens`, in exact mode rounded up to whole chunks."""
        return -(-(self.trim_tokens or TRIM_TOKENS) // self.grid_tokens) * self.grid_tokens


def require_caches(model: Any, caches: Any, kv_bits: Any, kv_group_size: Any, stored_bits: Any, exact: Any) -> None:
    """Raise ValueError unless these name the caches of a model and their quantization, live and stored."""
    if caches is None and not (hasattr(model, "layers") or hasattr(model, "make_cache")):
        found = "" if model is None else f"; model is {model!r:.80}"
        raise ValueError(
            f"PrefixCache needs an mlx-lm model, or caches= with a callable that returns fresh mlx-lm caches{found}."
        )
    if caches is not None and not callable(caches):
        raise ValueError(f"caches is a {type(caches).__name__}; wanted a callable that returns mlx-lm caches.")
    require_count("kv_group_size", kv_group_size, "elements")
    if kv_bits not in (None, 2, 3, 4, 5, 6, 8):
        raise ValueError(f"kv_bits is {kv_bits!r}; wanted None, 2, 3, 4, 5, 6 or 8.")
    if not (stored_bits is None or is_whole(stored_bits)) or stored_bits not in STORED_BITS:
        raise ValueError(f"stored_bits is {stored_bits!r}; wanted None, 4 or 8.")
    if stored_bits is not None and exact:
        raise ValueError(
            f"stored_bits={stored_bits} rounds stored state, so exact=True is impossible; omit one of them."
        )


def require_about(tokenizer: Any, cost: Any) -> None:
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer is {tokenizer!r:.80}; wanted an object with decode(), or None.")
    if cost is not None and not callable(getattr(cost, "cost", None)):
        raise ValueError(f"cost is {cost!r:.80}; wanted a CostModel, or None.")


def require_use(priority: Any, turn: Any, kind: Any) -> tuple[int, int | None, str]:
    if turn is not None and (not is_whole(turn) or turn < 0):
        raise ValueError(f"turn is {turn!r}; wanted a whole number, 0 or more, or None.")
    if not is_whole(priority) or not isinstance(kind, str):
        raise ValueError(f"priority is {priority!r}, kind {kind!r}; wanted a whole number and a str.")
    return int(priority), None if turn is None else int(turn), kind


def require_group(capacity: Any, priority: Any, prompts: Any) -> tuple[int, int]:
    """Raise ValueError unless begin_many() can take these; returns capacity and priority."""
    if not hasattr(type(prompts), "__iter__"):
        raise ValueError(f"prompts is a {type(prompts).__name__}; wanted a list of prompts.")
    return require_count("capacity", capacity, "tokens"), require_use(priority, None, "")[0]


def require_pin(name: Any, ttl_requests: Any, ttl_s: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"name is {name!r}; wanted a str that is not empty.")
    if ttl_requests is not None:
        require_count("ttl_requests", ttl_requests, "requests")
    is_number = isinstance(ttl_s, (int, float)) and not isinstance(ttl_s, bool)
    if ttl_s is not None and not (is_number and 0 < ttl_s < NEVER_S):
        raise ValueError(f"ttl_s is {ttl_s!r}; wanted a number of seconds above 0.")


def require_count(name: str, value: Any, unit: str, least: int = 1) -> int:
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} is {value!r}; wanted a whole number of {unit}, {least} or more.")
    return int(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
