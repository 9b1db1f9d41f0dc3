"""The same requests give the same tree, byte for byte: again, in another process, under another hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import PrefixCache, stream_generate
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
#: Another process has the same requests of a model with both kinds of state.
KINDS = ["llama", "llama_sliding", "mamba2"]


def timeline(kind: str, policy: str, seed: int) -> str:
    """Everything a cache shows of itself along a run of requests of every sort, under a tight budget."""
    model: Any = tiny_model(kind)
    tokenizer = tiny_tokenizer()
    random = np.random.default_rng(seed)
    cache = PrefixCache(model, budget_bytes=450_000, policy=policy, checkpoint_interval=32)
    shown = []
    done: list[list[int]] = [[]]
    for request in range(16):
        base = done[random.integers(len(done))]
        prompt = base[: random.integers(len(base) + 1)] + random.integers(0, VOCABULARY_LENGTH, 40).tolist()
        namespace = f"tenant {random.integers(3)}"
        action = request % 6
        if action == 4:
            caches, remaining = cache.fetch(prompt, namespace=namespace)
            mx.eval(model(mx.array(remaining[None]), cache=caches))
            cache.insert(prompt, caches, namespace=namespace)
        elif action == 5:
            cache.reclaim(int(random.integers(200_000, 450_000)))
        else:
            mark = int(random.integers(len(prompt)))
            stream = stream_generate(
                model, tokenizer, prompt, max_tokens=4, cache=cache, namespace=namespace, marks=[mark]
            )
            prompt = prompt + [response.token for response in stream]
        done.append(prompt)
        shown += [cache.dump(), cache.dump(tokenizer), repr(sorted(_counters(cache).items()))]
    assert cache.stats.evictions > 0
    return "\n".join(shown)


def _counters(cache: PrefixCache) -> dict[str, Any]:
    return {name: dict(v) if isinstance(v, dict) else v for name, v in asdict(cache.stats).items()}


@pytest.mark.parametrize(("kind", "policy"), [*((kind, "lru") for kind in KINDS), (KINDS[0], "fifo")])
def test_the_same_requests_twice_give_the_same_dump(kind: str, policy: str) -> None:
    first = timeline(kind, policy, seed=1)
    assert timeline(kind, policy, seed=1) == first
    if (kind, policy) == (KINDS[0], "fifo"):
        # Other requests do not.
        assert timeline(kind, policy, seed=2) != first


@pytest.mark.parametrize("kind", ["llama", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_another_process_under_another_hash_seed_gives_the_same_dump(kind: str) -> None:
    here = hashlib.sha256(timeline(kind, "lru", seed=1).encode()).hexdigest()
    # This process has a seed of its own, drawn when it started.
    assert _in_a_process(kind, "4242") == here


def _in_a_process(kind: str, hash_seed: str) -> str:
    """The digest of the timeline as a fresh interpreter has it."""
    program = (
        "import hashlib, runner\n"
        "from tests.whole.test_determinism import timeline\n"
        f"print(hashlib.sha256(timeline({kind!r}, 'lru', seed=1).encode()).hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return finished.stdout.strip()
