"""Compare decode speed of many users: the radix tree against mlx-lm's batch generator.

All prompts are prefilled. The users decode greedily. The two sides take turns of a few steps:

    tree      runner.engine on a PrefixCache: reads a shared prefix once per step
    mlx-lm    BatchGenerator: a batch of caches, one for each user, padded to the longest

Both sides detokenize the output with the same detokenizer, as a server does.

A load shares levels of tokens. A level is (groups, tokens): the users of each group share so many tokens.

    (1, 2000)              all users share 2,000 tokens
    (1, 1000) (4, 1000)    all users share 1,000 tokens, and each quarter of them the next 1,000
    (8, 300)               16 users: pairs share 300 tokens, perhaps too few for a segment

In a ragged load, a user has 0.5 to 1.5 times the given number of own tokens.

    decode / mlx-lm   tokens/s of the tree divided by mlx-lm's tokens/s: median and range over the pairs of turns
    radix MB          memory of the tree and its live state; mlx-lm MB: memory of mlx-lm's caches
    join ms           a user joins with one uncached token: time to the first token, including a step of all users
    leave ms          a user leaves: time of the next two steps of the other users (the first may be running already)
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import Spread, arguments, publish, say
from radixcache import PrefixCache
from runner.engine.generator import ParallelGenerator
from runner.models.load import load_model

BUDGET_BYTES = 16 << 30
CHUNK_TOKENS = 512
#: Steps per turn, and turns per side.
STEPS, TURNS = 6, 5

Levels = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Load:
    """Users of a model: shared levels of tokens, then `own` tokens for each user."""

    model: str
    levels: Levels
    own: int
    users: tuple[int, ...]
    ragged: bool = False
    #: (users, least tokens/s divided by mlx-lm's tokens/s).
    aims: tuple[tuple[int, float], ...] = ()

    @property
    def text(self) -> str:
        return " + ".join(f"{groups} x {tokens}" for groups, tokens in self.levels) or "nothing"


FULL = (
    Load("tiny", ((1, 2000),), 100, (1, 4, 8, 16, 32), aims=((8, 2.2), (16, 2.8), (32, 3.5))),
    Load("tiny", ((1, 8000),), 100, (8, 16, 32)),
    Load("tiny", (), 2100, (1, 4, 8, 16)),
    Load("tiny", ((1, 1000), (4, 1000)), 100, (16,)),
    Load("tiny", ((1, 700), (4, 700), (8, 700)), 100, (16,)),
    Load("tiny", ((4, 2000),), 100, (16,)),
    Load("tiny", ((8, 300),), 30, (16,)),
    Load("tiny", ((8, 64),), 30, (16,)),
    Load("tiny", ((1, 2000),), 200, (16,), ragged=True),
    Load("demo", ((1, 300),), 30, (1, 4, 8, 16, 32), aims=((8, 1.03), (16, 1.08), (32, 1.15))),
    Load("demo", (), 330, (1, 4, 8, 16), aims=((1, 1.0), (4, 1.0), (8, 1.0), (16, 1.0))),
    Load("demo", ((8, 300),), 30, (16,)),
)
#: About 20 minutes and 14 GB: mlx-lm's prefill of thousands of tokens takes minutes on two slow cores.
LONG = (
    Load("shape", ((1, 2000),), 100, (8, 16), aims=((8, 1.6), (16, 1.9))),
    Load("shape", ((1, 8000),), 100, (8, 16), aims=((8, 2.3), (16, 2.7))),
)
QUICK = (Load("tiny", ((1, 300),), 10, (3,)),)
#: The least ratio for any load.
AIM = 0.95


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add)
    loads = QUICK if options.quick else LONG if options.long else FULL
    rows = [row for load in loads for row in measure(load)]
    prefixes = " with long prefixes" if options.long else ""
    title = f"Decode speed of many users{prefixes}: radixcache and mlx-lm's batches"
    publish(
        "decode-long" if options.long else "decode",
        title,
        rows,
        folder=options.results,
        repeats=TURNS,
        conclusion=conclusion(rows),
    )


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--long", action="store_true", help="run 2,000 and 8,000 tokens on a model of SmolLM2's shape instead"
    )


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    missed = [row for row in rows if row["decode / mlx-lm"] < row["aim"]]
    shown = missed or [min(rows, key=lambda row: float(row["decode / mlx-lm"] / row["aim"]))]
    parts = [
        f"{r['model']}, {r['shared']} shared, {r['users']} users: {r['decode / mlx-lm']:.2f} (aim {r['aim']})"
        for r in shown
    ]
    found = f"{len(rows) - len(missed)} of {len(rows)} rows reach their aim"
    return f"{found}. {'Missed' if missed else 'Closest to the aim'}: {'; '.join(parts)}."


def measure(load: Load) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of users."""
    model, tokenizer = model_of(load.model)
    for users in load.users:
        say(f"{load.model}, {load.text}, {users} users")
        prompts = prompts_of(load, users + 1)
        tree, batches = FromTheTree(model, tokenizer, prompts), InBatches(model, tokenizer, prompts)
        pairs = []
        for turn in range(TURNS + 1):
            seconds = [side.steps(STEPS) for side in (tree, batches)]
            if turn:  # the first warms up
                pairs.append(seconds)
        ratio = Spread.of(theirs / ours for ours, theirs in pairs)
        held = tree.held_bytes(), batches.held_bytes()
        joined, left = [[side.join(), side.leave()] for side in (tree, batches)]
        yield {
            "model": load.model,
            "shared": load.text,
            "own": f"{load.own}{' ragged' if load.ragged else ''}",
            "users": users,
            "decode / mlx-lm": ratio.median,
            "min to max": ratio.range,
            "aim": dict(load.aims).get(users, AIM),
            "step ms": statistics.median(ours for ours, _ in pairs) / STEPS * 1e3,
            "radix MB": held[0] / 1e6,
            "mlx-lm MB": held[1] / 1e6,
            "join ms": joined[0] * 1e3,
            "mlx-lm join ms": left[0] * 1e3,
            "leave ms": joined[1] * 1e3,
            "mlx-lm leave ms": left[1] * 1e3,
        }
        tree.close()
        batches.close()


class FromTheTree:
    """A ParallelGenerator with all users but the last."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[list[int]]) -> None:
        self._cache = PrefixCache(model, budget_bytes=BUDGET_BYTES)
        self._prompts = prompts
        capacity = sum(map(len, prompts)) + len(prompts) * 4096
        self._generator = ParallelGenerator(
            self._cache, model, tokenizer, capacity=capacity, max_rows=len(prompts), step_size=CHUNK_TOKENS
        )
        # The prompt of the last user is cached except for its last token, as in mlx-lm's caches.
        self._generator.submit(prompts[-1], max_tokens=1, stop_tokens=())
        for _ in self._generator:
            pass
        self._tickets = [self._submit(prompt) for prompt in prompts[:-1]]
        self._pieces = iter(self._generator)
        waiting = set(self._tickets)
        while waiting:
            waiting.discard(next(self._pieces)[0])

    def steps(self, count: int) -> float:
        """Return the seconds of `count` steps of all users."""
        return _timed(lambda: [next(self._pieces) for _ in range(count * len(self._tickets))])

    def held_bytes(self) -> int:
        return int(self._cache.stats.live_bytes + self._cache.stats.paged_bytes)

    def join(self) -> float:
        """Return the seconds until a new user has a token."""

        def run() -> None:
            ticket = self._submit(self._prompts[-1])
            self._tickets.append(ticket)
            while next(self._pieces)[0] is not ticket:
                pass

        return _timed(run)

    def leave(self) -> float:
        """Return the seconds from a user's leave until every other user has two more tokens."""

        def run() -> None:
            self._tickets.pop(0).cancel()
            for _ in range(2):
                waiting = set(self._tickets)
                while waiting:
                    waiting.discard(next(self._pieces)[0])

        self.steps(2)
        return _timed(run)

    def close(self) -> None:
        self._generator.close()
        self._cache.close()

    def _submit(self, prompt: list[int]) -> Any:
        return self._generator.submit(prompt, max_tokens=4096, stop_tokens=(), reserve=1)


class InBatches:
    """A BatchGenerator with the same users and prefilled caches."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[list[int]]) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._texts: dict[int, Any] = {}
        self._generator = BatchGenerator(
            model, max_tokens=4096, prefill_step_size=CHUNK_TOKENS, completion_batch_size=len(prompts)
        )
        self._known: dict[tuple[int, ...], list[Any]] = {}
        self._prompts = prompts
        caches = [self._cache_of(prompt) for prompt in prompts]
        self._last = caches[-1]
        self._users = self._generator.insert([prompt[-1:] for prompt in prompts[:-1]], caches=caches[:-1])
        self._known.clear()
        waiting = set(self._users)
        while waiting:
            waiting -= self._step()

    def steps(self, count: int) -> float:
        return _timed(lambda: [self._step() for _ in range(count)])

    def held_bytes(self) -> int:
        return int(self._generator.prompt_cache_nbytes)

    def join(self) -> float:
        def run() -> None:
            (user,) = self._generator.insert([self._prompts[-1][-1:]], caches=[self._last])
            self._users.append(user)
            while user not in self._step():
                pass

        return _timed(run)

    def leave(self) -> float:
        def run() -> None:
            self._generator.remove([self._users.pop(0)])
            for _ in range(2):
                self._step()

        self.steps(2)
        return _timed(run)

    def close(self) -> None:
        self._generator.close()

    def _step(self) -> set[int]:
        """Generate and detokenize a token for each user; return the users."""
        users = set()
        for response in self._generator.next_generated():
            if response.uid not in self._texts:
                self._texts[response.uid] = self._tokenizer.detokenizer
            self._texts[response.uid].add_token(response.token)
            _ = self._texts[response.uid].last_segment
            users.add(response.uid)
        return users

    def _cache_of(self, prompt: list[int]) -> list[Any]:
        """Return caches of all tokens but the last. Prefill a shared prefix once and copy it."""
        caches: list[Any] = make_prompt_cache(self._model)
        done = 0
        for known, theirs in self._known.items():
            pairs = enumerate(zip(known, prompt, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), len(known))
            if same > done:
                done = min(same, len(prompt) - 1)
                for cache, other in zip(caches, theirs, strict=True):
                    keys, values = other.keys_and_values()
                    cache.keys, cache.values = mx.contiguous(keys[..., :done, :]), mx.contiguous(values[..., :done, :])
                    cache.offset = done
        while done < len(prompt) - 1:
            chunk = prompt[done : min(done + CHUNK_TOKENS, len(prompt) - 1)]
            self._model(mx.array([chunk]), cache=caches)
            done += len(chunk)
            mx.eval([cache.keys_and_values() for cache in caches])
        self._known[tuple(prompt[:-1])] = caches
        return caches


def model_of(name: str) -> tuple[Any, Any]:
    """Return a model and a tokenizer. "shape" is SmolLM2's shape with random weights and a small vocabulary."""
    if name != "shape":
        loaded = load_model(name)
        return loaded.model, loaded.tokenizer
    arguments_of = llama.ModelArgs(
        model_type="llama",
        hidden_size=576,
        num_hidden_layers=30,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        vocab_size=256,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    model = llama.Model(arguments_of)
    mx.eval(model.parameters())
    return model, load_model("tiny").tokenizer


def prompts_of(load: Load, users: int) -> list[list[int]]:
    """Return a prompt for each user, of ids that every vocabulary has."""
    random = np.random.default_rng(users)
    shared = [[random.integers(16, 250, tokens).tolist() for _ in range(groups)] for groups, tokens in load.levels]
    prompts = []
    for user in range(users):
        prompt = [token for groups in shared for token in groups[user * len(groups) // users]]
        own = int(load.own * random.uniform(0.5, 1.5)) if load.ragged else load.own
        prompts.append(prompt + random.integers(16, 250, own).tolist())
    return prompts


def _timed(run: Any) -> float:
    gc.collect()
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
