"""Compare the radix tree with mlx-lm's trie: find, add and split prompts.

Both store the same sequences. The sequences have three shapes, each grown to several node counts:

    part      LONG conversations as long as the prompt share a quarter of it; short prompts branch off after the
              system prompt
    chain     one conversation in which each turn is a node; short replies branch off at the first joints
    short     prompts of 2 * SHORT_TOKENS with the first half in common; the long prompt begins with such a prompt

Columns, in ms per call:

    read      check a list of Python integers and make an int64 array: once per request, not in the other columns
    match     find the longest stored prefix of the next turn of a stored conversation; spread is the slowest call
              minus the quickest, in percent of the median
    branch    the same for a prompt that branches off where the stored prompts diverge
    insert    match a conversation that branches off there, and append the rest
    split     cut the longest edge in the middle
    trie      search, search and add in mlx-lm's PromptTrie; the trie has an entry per token, so it never splits

A trie column is None where the trie would take more than TRIE_BYTES or TRIE_STEPS. After the branch, the trie follows
every stored sequence and copies the token list at each level. "trie branch" is therefore None above TRIE_BRANCH_TOKENS.
A call of more than a second runs once, other calls REPEATS times; "trie runs" is the count for the search.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import REPEATS, arguments, publish
from radixcache import RadixTree
from radixcache.tokens import Keys, token_ids
from radixcache.tree.radix_tree import Node

VOCABULARY = 50_000
LONG = 4
SYSTEM_TOKENS = 64
SHORT_TOKENS = 16
TURN_TOKENS = 128
JOINTS = 7
# Length of the next turn.
NEW_TOKENS = 32

TRIE_BYTES = 1 << 30
TRIE_TOKEN_BYTES = 260
# Tokens to look up while the trie is filled.
TRIE_STEPS = 20_000_000
TRIE_BRANCH_TOKENS = 40_000

AIM_TOKENS = 50_000
AIM_MS = 2.0


@dataclass(frozen=True)
class Shape:
    """An endless iterator of sequences to store, and the prompts to look up."""

    name: str
    sequences: Iterator[Keys]
    following: list[Keys]
    branching: Keys
    # Stored tokens below the point where the prompt branches off.
    branching_below: int


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    quick = options.quick
    lengths, counts = ((1_000, 8_000), (10, 100)) if quick else ((1_000, 8_000, 50_000, 128_000), (10, 1_000, 100_000))
    rows = [_measure(part, length, count) for length in lengths for count in counts]
    rows += [_measure(chain, length, count) for length in lengths for count in counts if count * TURN_TOKENS >= length]
    rows += [_measure(short, lengths[0], count) for count in counts]
    title = "Radix tree and mlx-lm's trie, ms per call"
    publish("tree", title, rows, folder=options.results, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    parts = [row for row in rows if row["shape"] == "part"]
    length = min({row["prompt tokens"] for row in parts}, key=lambda tokens: abs(tokens - AIM_TOKENS))
    few, *_, many = [row for row in parts if row["prompt tokens"] == length]
    slowest = max(row["match ms"] for row in rows if row["prompt tokens"] == length)
    trie = [row["trie bytes per token"] for row in rows if row["trie bytes per token"] is not None]
    ours = [row["bytes per token"] for row in rows]
    speedups = [row["trie match ms"] / row["match ms"] for row in rows if row["trie match ms"] is not None]
    return (
        f"Finding the next turn of a prompt of {length:,} tokens takes {many['match ms']:.3f} ms among "
        f"{many['nodes']:,} nodes. That is {many['match ms'] / few['match ms']:.2f} times as long as among "
        f"{few['nodes']:,} nodes. The slowest shape takes {slowest:.3f} ms "
        f"({'under' if slowest < AIM_MS else 'NOT under'} {AIM_MS:g} ms). Reading the prompt from a list takes another "
        f"{many['read ms']:.2f} ms. The trie of mlx-lm takes {min(speedups):.1f} to {max(speedups):.0f} times as long "
        f"on the same prompts. The index takes {min(ours):.1f} to {max(ours):.1f} bytes per token, the trie "
        f"{min(trie):.0f} to {max(trie):.0f}."
    )


# Shapes --------------------------------------------------------------------------------------------------------------


def part(length: int) -> Shape:
    random = np.random.default_rng(0)
    shared = _draw(random, length // 4)
    stored = [np.concatenate([shared, _draw(random, length - len(shared) - NEW_TOKENS)]) for _ in range(LONG)]

    def sequences() -> Iterator[Keys]:
        yield from stored
        while True:
            yield np.concatenate([shared[:SYSTEM_TOKENS], _draw(random, SHORT_TOKENS)])

    following = [np.concatenate([each, _draw(random, NEW_TOKENS)]) for each in stored]
    branching = np.concatenate([shared, _unseen(stored, len(shared)), _draw(random, length - len(shared) - 1)])
    return Shape("part", sequences(), following, branching, length - len(shared))


def chain(length: int) -> Shape:
    random = np.random.default_rng(0)
    whole = _draw(random, length - NEW_TOKENS)
    ends = [*range(TURN_TOKENS, len(whole), TURN_TOKENS), len(whole)]

    def sequences() -> Iterator[Keys]:
        yield from (whole[:end] for end in ends)
        while True:
            yield np.concatenate([whole[: ends[int(random.integers(JOINTS))]], _draw(random, SHORT_TOKENS)])

    following = [np.concatenate([whole, _draw(random, NEW_TOKENS)])]
    middle = ends[len(ends) // 2]
    branching = np.concatenate([whole[:middle], _unseen([whole], middle), _draw(random, length - middle - 1)])
    return Shape("chain", sequences(), following, branching, len(whole) - middle)


def short(length: int) -> Shape:
    random = np.random.default_rng(0)
    shared = _draw(random, SHORT_TOKENS)
    first = [np.concatenate([shared, _draw(random, SHORT_TOKENS)]) for _ in range(LONG)]

    def sequences() -> Iterator[Keys]:
        yield from first
        while True:
            yield np.concatenate([shared, _draw(random, SHORT_TOKENS)])

    following = [np.concatenate([each, _draw(random, length - len(each))]) for each in first]
    branching = np.concatenate([shared, _unseen(first, len(shared)), _draw(random, length - len(shared) - 1)])
    return Shape("short", sequences(), following, branching, SHORT_TOKENS)


def _draw(random: np.random.Generator, count: int) -> Keys:
    return random.integers(0, VOCABULARY, count)


def _unseen(stored: list[Keys], at: int) -> Keys:
    """Return a key that no stored sequence has at this offset: random keys are below VOCABULARY."""
    assert all(int(each[at]) < VOCABULARY for each in stored)
    return np.array([VOCABULARY], dtype=np.int64)


# Measuring -----------------------------------------------------------------------------------------------------------


def _measure(make: Callable[[int], Shape], length: int, count: int) -> dict[str, Any]:
    shape = make(length)
    tree: RadixTree[None] = RadixTree()
    stored, tree_bytes = _traced(lambda: _grow(tree, shape.sequences, count))
    tokens = shape.following[0].tolist()
    longest = max(tree.nodes(), key=lambda node: len(node.edge))
    match_ms, least_ms, most_ms = _timed(lambda: [tree.match(prompt) for prompt in shape.following])
    prompts = len(shape.following)
    return {
        "shape": shape.name,
        "prompt tokens": length,
        "nodes": tree.node_count,
        "read ms": _timed(lambda: token_ids(tokens).astype(np.int64))[0],
        "match ms": match_ms / prompts,
        "spread %": 100 * (most_ms - least_ms) / match_ms,
        "branch ms": _timed(lambda: tree.match(shape.branching))[0],
        "insert ms": _timed(lambda: _insert(tree, shape.branching), tree.remove)[0],
        "split ms": _timed(lambda: tree.split(longest, (longest.start + longest.end) // 2), tree.merge)[0],
        "bytes per token": tree_bytes / tree.key_count,
        **_measure_trie(make(length), stored, tree.key_count),
    }


def _measure_trie(shape: Shape, stored: tuple[int, int], keys: int) -> dict[str, Any]:
    """Measure mlx-lm's trie on the same sequences, within the limits above."""
    from mlx_lm.models.cache import PromptTrie

    row: dict[str, Any] = dict.fromkeys(
        ("trie match ms", "trie branch ms", "trie insert ms", "trie bytes per token", "trie runs")
    )
    count, steps = stored
    if keys * TRIE_TOKEN_BYTES > TRIE_BYTES or steps > TRIE_STEPS:
        return row
    trie = PromptTrie()

    def fill() -> None:
        for sequence in itertools.islice(shape.sequences, count):
            trie.add("model", sequence.tolist(), True)

    _, trie_bytes = _traced(fill)
    following, branching = [prompt.tolist() for prompt in shape.following], shape.branching.tolist()
    match_ms, _, _, runs = _timed_slow(lambda: [trie.search("model", prompt) for prompt in following])
    row |= {"trie match ms": match_ms / len(following), "trie runs": runs, "trie bytes per token": trie_bytes / keys}
    if shape.branching_below <= TRIE_BRANCH_TOKENS:
        row["trie branch ms"] = _timed_slow(lambda: trie.search("model", branching))[0]
    row["trie insert ms"] = _timed(lambda: trie.add("model", branching, True), lambda _: trie.pop("model", branching))[
        0
    ]
    return row


def _grow(tree: RadixTree[None], sequences: Iterator[Keys], count: int) -> tuple[int, int]:
    """Store sequences until the tree has `count` nodes; return the numbers of sequences and of tokens."""
    stored = steps = 0
    while tree.node_count < count:
        sequence = next(sequences)
        _insert(tree, sequence)
        stored, steps = stored + 1, steps + len(sequence)
    return stored, steps


def _insert(tree: RadixTree[None], sequence: Keys) -> Node[None]:
    match = tree.match(sequence)
    node = match.node
    if match.offset < node.end:
        node = tree.split(node, match.offset)
    return tree.append(node, sequence[match.offset :]) if match.offset < len(sequence) else node


def _timed(
    run: Callable[[], Any], undo: Callable[[Any], Any] | None = None, repeats: int = REPEATS
) -> tuple[float, float, float]:
    """Return median, minimum and maximum time of `run` in ms; `undo(result)` is not timed."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        result = run()
        times.append((time.perf_counter() - began) * 1e3)
        if undo is not None:
            undo(result)
    # The first call warms up and does not count.
    return statistics.median(times[1:]), min(times[1:]), max(times[1:])


def _timed_slow(run: Callable[[], Any]) -> tuple[float, float, float, int]:
    """As `_timed`, plus the number of calls: one if the first call takes more than a second."""
    began = time.perf_counter()
    run()
    took_ms = (time.perf_counter() - began) * 1e3
    return (took_ms, took_ms, took_ms, 1) if took_ms > 1e3 else (*_timed(run), REPEATS)


def _traced(make: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `make`, and the bytes that Python and NumPy hold for it."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
