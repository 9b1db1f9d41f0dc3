"""Compare the memory that conversations of many users take when they share a system prompt.

Every user has two turns after the same system prompt of SYSTEM_TOKENS tokens. A turn is a message of USER_TOKENS and a
reply of REPLY_TOKENS. The benchmark compares:

    least     every distinct token once; for layers that cannot be cut (windows, recurrent state), the state at the end
              of the system prompt and at the end of each conversation
    radix     a PrefixCache, including live buffers and their spare room
    mlx-lm    LRUPromptCache with the inserts of mlx-lm's server: at the end of the system prompt, of the message and of
              the reply

First table: no budget, one user after the other. MB is the growth of MLX's active memory (10^6 bytes; MLX keeps no free
buffers here). `reported` is the size that the cache reports. `index` is the Python memory on top: the tree or trie, and
the objects around the arrays (tracemalloc).

Second table: a budget, as a share of `least`. All users send the first turn, then all send the second. The hit tokens
are those of the second turns, as a share of all tokens evaluated before.

The models are small and random, with the cache classes of large models. A reply is two forward passes: all tokens but
the last, then the last. The caches then are as after decoding.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benchmarks.harness.random_models import VOCABULARY, random_model
from benchmarks.harness.record import arguments, publish, say
from runner.models.load import LoadedModel
from runner.models.tiny import tiny_tokenizer
from runner.replay import ReplayOptions
from runner.replay.caches import ComparedCache, open_cache
from runner.script.script import Prompt

UNLIMITED_BYTES = 1 << 40
KINDS = ("kv", "sliding", "hybrid", "mixed")
CACHES = ("radix", "mlx-lm")
SYSTEM_TOKENS = 2000
USER_TOKENS = 150
REPLY_TOKENS = 60
# The end of the prompt that opens the reply. It belongs to no message.
OPENING_TOKENS = 3
TURNS = 2
OWN_TOKENS = TURNS * (USER_TOKENS + REPLY_TOKENS)
USERS = (1, 2, 5, 10, 20, 50)
PRESSURE_USERS = 10
PRESSURE_SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    system_tokens: int
    users: tuple[int, ...]
    pressure_users: int
    shares: tuple[float, ...]


FULL = Sizes(SYSTEM_TOKENS, USERS, PRESSURE_USERS, PRESSURE_SHARES)
QUICK = Sizes(100, (1, 2), 2, (0.5,))


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    sizes = QUICK if options.quick else FULL
    mx.set_cache_limit(0)
    models = {kind: random_model(kind, small=True) for kind in KINDS}
    held = [row for kind, model in models.items() for row in _measure_held(kind, model, sizes)]
    title = f"Memory of users who share a system prompt of {sizes.system_tokens:,} tokens"
    publish("memory", title, held, folder=options.results, repeats=1, conclusion=held_conclusion(held))
    kept = [row for kind, model in models.items() for row in _measure_pressure(kind, model, sizes)]
    title = "Hit tokens of the second turn under a byte budget"
    publish(
        "memory-pressure",
        title,
        kept,
        folder=options.results,
        repeats=1,
        conclusion=pressure_conclusion(kept),
    )


def held_conclusion(rows: Sequence[dict[str, Any]]) -> str:
    users = max(row["users"] for row in rows)
    parts = [
        f"{row['mlx-lm MB'] / row['radix MB']:.1f} with {row['model']} ({row['mlx-lm MB']:,.0f} MB and "
        f"{row['radix MB']:,.0f} MB; the distinct tokens alone {row['least MB']:,.0f} MB)"
        for row in rows
        if row["users"] == users
    ]
    return f"Memory of {users} users in mlx-lm's cache, over that in radixcache: {', '.join(parts)}."


def pressure_conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the hits of both caches, and name the cases where mlx-lm has more."""
    more = sum(row["radix hit"] > row["mlx-lm hit"] for row in rows)
    fewer = [f"{row['model']} at {row['budget / least']:g}" for row in rows if row["radix hit"] < row["mlx-lm hit"]]
    ours, theirs, possible = (sum(row[key] for row in rows) for key in ("radix hit", "mlx-lm hit", "possible"))
    where = f" and fewer at: {'; '.join(fewer)}" if fewer else ""
    return (
        f"Of {possible:,} tokens, radixcache kept {ours / possible:.0%} and mlx-lm {theirs / possible:.0%}. radixcache "
        f"kept more in {more} of {len(rows)} rows{where}."
    )


# Without pressure ----------------------------------------------------------------------------------------------------


def _measure_held(kind: str, model: Any, sizes: Sizes) -> Iterator[dict[str, Any]]:
    conversations = _conversations(sizes.system_tokens, max(sizes.users))
    ours, theirs = (_held(name, model, conversations, sizes) for name in CACHES)
    token_bytes, point_bytes = _state_bytes(model, sizes.system_tokens)
    say(f"{kind}: held")
    for users, our, their in zip(sizes.users, ours, theirs, strict=True):
        tokens = sizes.system_tokens + users * OWN_TOKENS
        least_mb = (tokens * token_bytes + (users + 1) * point_bytes) / 1e6
        yield {
            "model": kind,
            "users": users,
            "distinct tokens": tokens,
            "least MB": least_mb,
            "radix MB": our.active_bytes / 1e6,
            "radix reported MB": our.reported_bytes / 1e6,
            "radix index MB": our.python_bytes / 1e6,
            "mlx-lm MB": their.active_bytes / 1e6,
            "mlx-lm reported MB": their.reported_bytes / 1e6,
            "mlx-lm index MB": their.python_bytes / 1e6,
            "mlx-lm / radix": their.active_bytes / our.active_bytes,
            "radix / least": our.active_bytes / 1e6 / least_mb,
        }


@dataclass(frozen=True)
class Held:
    """Bytes at one moment: in MLX, as reported by the cache, and in Python."""

    active_bytes: int
    reported_bytes: int
    python_bytes: int


def _held(name: str, model: Any, conversations: Sequence[list[int]], sizes: Sizes) -> list[Held]:
    """Return the bytes of a cache after each number of users in `sizes`."""
    gc.collect()
    active_bytes = mx.get_active_memory()
    tracemalloc.start()
    try:
        cache = _opened(name, model, UNLIMITED_BYTES)
        found = []
        for users, conversation in enumerate(conversations, start=1):
            for turn in range(TURNS):
                _ask(cache, model, conversation, turn, sizes.system_tokens)
            if users in sizes.users:
                gc.collect()
                python_bytes, reported_bytes = tracemalloc.get_traced_memory()[0], cache.live_bytes + cache.paged_bytes
                found.append(Held(mx.get_active_memory() - active_bytes, reported_bytes, python_bytes))
        return found
    finally:
        tracemalloc.stop()


def _state_bytes(model: Any, tokens: int) -> tuple[int, int]:
    """Return the bytes per token of layers that can be cut, and the bytes of all other state after `tokens`."""
    caches = make_prompt_cache(model)
    for count in (tokens - 1, 1):
        model(mx.zeros((1, count), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    spans = [cache for cache in caches if type(cache) is KVCache]
    points = [cache for cache in caches if type(cache) is not KVCache]
    return sum(cache.nbytes // cache.keys.shape[2] for cache in spans), sum(cache.nbytes for cache in points)


# Under pressure ------------------------------------------------------------------------------------------------------


def _measure_pressure(kind: str, model: Any, sizes: Sizes) -> Iterator[dict[str, Any]]:
    users = sizes.pressure_users
    conversations = _conversations(sizes.system_tokens, users)
    token_bytes, point_bytes = _state_bytes(model, sizes.system_tokens)
    least_bytes = (sizes.system_tokens + users * OWN_TOKENS) * token_bytes + (users + 1) * point_bytes
    possible = users * (sizes.system_tokens + USER_TOKENS + REPLY_TOKENS)
    for share in sizes.shares:
        say(f"{kind}: {share:g} of the least")
        hits = {}
        for name in CACHES:
            cache = _opened(name, model, int(least_bytes * share))
            for turn in range(TURNS):
                found = [_ask(cache, model, each, turn, sizes.system_tokens) for each in conversations]
            # Only the last turn counts.
            hits[name] = sum(found)
        yield {
            "model": kind,
            "users": users,
            "budget / least": share,
            "budget MB": least_bytes * share / 1e6,
            "radix hit": hits["radix"],
            "mlx-lm hit": hits["mlx-lm"],
            "possible": possible,
            "radix %": 100 * hits["radix"] / possible,
            "mlx-lm %": 100 * hits["mlx-lm"] / possible,
        }


# Requests ------------------------------------------------------------------------------------------------------------


def _conversations(system_tokens: int, users: int) -> list[list[int]]:
    """Return the tokens of each user's whole conversation."""
    random = np.random.default_rng(0)
    system = random.integers(1, VOCABULARY, system_tokens).tolist()
    return [system + random.integers(1, VOCABULARY, OWN_TOKENS).tolist() for _ in range(users)]


def _opened(name: str, model: Any, budget_bytes: int) -> ComparedCache:
    loaded = LoadedModel(model, tiny_tokenizer(), name, None, VOCABULARY)
    return open_cache(name, loaded, ReplayOptions(budget_bytes))


def _ask(cache: ComparedCache, model: Any, conversation: list[int], turn: int, system_tokens: int) -> int:
    """Run one turn of a conversation; return the cached tokens."""
    end = system_tokens + turn * (USER_TOKENS + REPLY_TOKENS) + USER_TOKENS
    marks = [system_tokens]
    for earlier in range(turn + 1):
        message_end = system_tokens + earlier * (USER_TOKENS + REPLY_TOKENS) + USER_TOKENS - OPENING_TOKENS
        marks += [message_end] if earlier == turn else [message_end, message_end + OPENING_TOKENS + REPLY_TOKENS]
    tokens = np.array(conversation[:end], dtype=np.int32)
    prompt = Prompt(tokens, tuple(marks), system_tokens, ends_with_user=True, reply_tokens=REPLY_TOKENS)
    reply = conversation[end : end + REPLY_TOKENS]
    with cache.begin(prompt) as run:
        run.prefill(model)
        for part in (conversation[end - 1 : end], reply[:-1], reply[-1:]):
            mx.eval(run.step(model, part))
        return int(run.cached_tokens)


if __name__ == "__main__":
    main()
