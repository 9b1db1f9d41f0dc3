"""What does finding a prompt's longest stored prefix cost, beside mlx-lm's trie?

Conversations of the same length diverge after a shared beginning of a quarter of it. The trie is given the same
sequences, and searched for one that is stored nowhere but shares the beginning.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.record import median_ms, publish
from radixcache import RadixTree

#: Beyond this many stored tokens mlx-lm's trie is left out: it takes 224 bytes and more for each.
TRIE_TOKENS = 1_000_000


def main() -> None:
    rows = []
    for length, count in ((1_000, 10), (1_000, 1_000), (1_000, 10_000), (8_000, 10), (8_000, 100), (50_000, 10)):
        rows.append(_measure(length, count))
    publish("tree", "Longest stored prefix of a prompt that diverges: radix tree and mlx-lm's trie", rows)


def _measure(length: int, count: int) -> dict[str, Any]:
    sequences = _diverging(length, count + 1)
    prompt = sequences.pop()
    tree, tree_bytes = _traced(lambda: _fill_tree(sequences))
    match_ms, low, high = median_ms(lambda: tree.match(prompt))
    row: dict[str, Any] = {
        "prompt tokens": length,
        "conversations": count,
        "radix ms": match_ms,
        "radix ms min": low,
        "radix ms max": high,
        "radix bytes/token": tree_bytes / tree.key_count,
        "mlx-lm ms": None,
        "mlx-lm bytes/token": None,
    }
    if length * count <= TRIE_TOKENS:
        trie, trie_bytes = _traced(lambda: _fill_trie(sequences))
        tokens = prompt.tolist()
        row["mlx-lm ms"] = median_ms(lambda: trie.search("model", tokens), repeats=1 if length > 10_000 else 5)[0]
        row["mlx-lm bytes/token"] = trie_bytes / tree.key_count
    return row


def _diverging(length: int, count: int) -> list[Any]:
    random = np.random.default_rng(0)
    shared = random.integers(0, 50_000, length // 4)
    tails = random.integers(0, 50_000, (count, length - length // 4))
    return [np.concatenate([shared, tail]).astype(np.int64) for tail in tails]


def _fill_tree(sequences: list[Any]) -> RadixTree[None]:
    tree: RadixTree[None] = RadixTree()
    for sequence in sequences:
        match = tree.match(sequence)
        node = tree.root() if match.node.is_root else match.node
        if match.offset < node.end:
            node = tree.split(node, match.offset)
        if match.offset < len(sequence):
            tree.append(node, sequence[match.offset :])
    return tree


def _fill_trie(sequences: list[Any]) -> Any:
    from mlx_lm.models.cache import PromptTrie

    trie = PromptTrie()
    for sequence in sequences:
        trie.add("model", sequence.tolist(), object())
    return trie


def _traced(make: Callable[[], Any]) -> tuple[Any, int]:
    """What `make` returns, and the bytes that Python and NumPy hold for it."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, held


if __name__ == "__main__":
    main()
