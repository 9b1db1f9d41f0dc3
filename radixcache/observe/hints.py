"""Hints: a short span that differs in prompt after prompt while the tokens behind it are equal. Never imports MLX.

A date or a request id in a header parts two prompts, and the equal text behind it is prefilled again:

    mine     You are ... Today is [ 21 Nov ]. Answer in ...      start, end: of the span in mine
    other    You are ... Today is [ 1 Dec  ]. Answer in ...      behind: equal tokens behind it

Two prompts meet again at the first run of ANCHOR equal tokens. A hint needs several prompts that part there, each with
its own value, and equal text behind that is much longer than the span. Questions give no hint: only a few tokens of the
template follow them, or, with equal replies, some prompts end with the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.tokens import Keys, common_length
from radixcache.tree.radix_tree import RadixTree, below

#: Tokens of the longest span; a UUID takes 36 with a tokenizer of bytes.
MAX_SPAN = 48
#: Equal tokens in a row at which two prompts meet again.
ANCHOR = 32
#: Equal tokens in a row that count as the same text at another place.
BLOCK = 16
#: Fewest equal tokens behind the span, absolute and as a multiple of the span.
MIN_BEHIND, MIN_BEHIND_SPANS = 40, 4
#: Fewest different values of the span, with this prompt's own.
MIN_VALUES = 3

# Powers of an odd number and of its inverse: all arithmetic is modulo 2**64.
_ODD = 0x9E37_79B9_7F4A_7C15
_POWERS = np.array([pow(_ODD, i, 1 << 64) for i in range(MAX_SPAN + ANCHOR)], np.uint64)
_INVERSES = np.array([pow(_ODD, -i, 1 << 64) for i in range(MAX_SPAN + 1)], np.uint64)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two prompts part: mine[start:end] against other[start:other_end], then `behind` equal tokens."""

    start: int
    end: int
    other_end: int
    behind: int


@dataclass(frozen=True, slots=True)
class Hint:
    """A short span [start, end) of the prompt that differs in recent prompts.

    Attributes:
        values: how many different values the span has in recent prompts and this one.
        requests: how many recent prompts, this one included, are equal in front of the span.
        tokens: the most equal tokens after the span in a recent prompt; each value evaluates them again.
        cost: of these tokens, in cost_unit.
        asked, other: the tokens of the span in this prompt and in an earlier one.
        asked_text, other_text: the same decoded, if the PrefixCache has a tokenizer.
    """

    start: int
    end: int
    values: int
    requests: int
    tokens: int
    cost: float
    asked: tuple[int, ...]
    other: tuple[int, ...]
    asked_text: str | None = None
    other_text: str | None = None

    def __str__(self) -> str:
        where = f"tokens {self.start} to {self.end - 1} change"
        if self.end - self.start < 2:
            where = f"{'the text before ' if self.end == self.start else ''}token {self.start} changes"
        often = "every request" if self.values == self.requests else f"{self.values} of {self.requests} requests"
        shown = both_words(self.other_text, self.other, self.asked_text, self.asked)
        return (
            f"{where} in {often} ({shown}). All later tokens are recomputed, although {self.tokens:,} of them are the "
            "same. Move the text that changes behind the text that does not."
        )


def both_words(stored_text: str | None, stored: Sequence[int], asked_text: str | None, asked: Sequence[int]) -> str:
    """Stored tokens and those asked for; as text if both are decoded."""
    if stored_text is None or asked_text is None:
        return f"stored tokens {list(stored)}, asked {list(asked)}"
    return f"stored {stored_text!r}, asked {asked_text!r}"


def variations(mine: Keys, prompts: Iterable[Keys]) -> list[Hint]:
    """The spans of a prompt that vary among recent prompts, in order, without costs; `prompts` newest first."""
    others = [(keys, common_length(mine, keys)) for keys in prompts]
    others = [(keys, common) for keys, common in others if not common == len(keys) == len(mine)]
    partings = [(each, keys) for keys, common in others if (each := parting(mine, keys, common)) is not None]
    result = []
    for group in _overlapping(partings):
        start, end = min(each.start for each, _ in group), max(each.end for each, _ in group)
        values = [keys[start : each.other_end + end - each.end] for each, keys in group]
        count = len({mine[start:end].tobytes(), *(value.tobytes() for value in values)})
        requests = 1 + len(group) + sum(common >= end for _, common in others if common > start)
        behind = max(each.behind - (end - each.end) for each, _ in group)
        is_short = end - start <= MAX_SPAN and behind >= max(MIN_BEHIND, MIN_BEHIND_SPANS * (end - start))
        is_question = any(common >= start - ANCHOR and len(keys) < end + MIN_BEHIND for keys, common in others)
        if count >= MIN_VALUES and 2 * count >= requests and is_short and not is_question:
            asked, other = tuple(mine[start:end].tolist()), tuple(values[0].tolist())
            result.append(Hint(start, end, count, requests, behind, 0.0, asked, other))
    return result


def parting(mine: Keys, other: Keys, start: int | None = None) -> Parting | None:
    """The first span where two prompts differ, which starts at `start` if known; None: they do not meet again."""
    start = common_length(mine, other) if start is None else start
    width = MAX_SPAN + ANCHOR
    left, right = mine[start : start + width], other[start : start + width]
    if min(len(left), len(right)) < ANCHOR:
        return None
    rows, columns = (_anchors(left)[:, None] == _anchors(right)).nonzero()
    if not len(rows):
        return None
    nearest = int((rows + columns).argmin())
    end, other_end = start + int(rows[nearest]), start + int(columns[nearest])
    behind = common_length(mine[end:], other[other_end:])
    return Parting(start, end, other_end, behind) if behind >= ANCHOR else None


def _anchors(keys: Keys) -> NDArray[np.uint64]:
    """A hash of each keys[i : i + ANCHOR]: the sum of key * _ODD**place."""
    sums = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(keys.astype(np.uint64) * _POWERS[: len(keys)], out=sums[1:])
    hashes: NDArray[np.uint64] = (sums[ANCHOR:] - sums[:-ANCHOR]) * _INVERSES[: len(keys) - ANCHOR + 1]
    return hashes


def ranges_in(mine: Keys, other: Keys, start: int) -> list[tuple[int, int]]:
    """The ranges of mine[start:] whose runs of BLOCK keys occur anywhere in `other`, in any order."""
    known = _blocks(other)
    ranges: list[tuple[int, int]] = []
    for at in (start + np.isin(_blocks(mine[start:]), known).nonzero()[0]).tolist():
        if ranges and at <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], at + BLOCK
        else:
            ranges.append((at, at + BLOCK))
    return ranges


def _blocks(keys: Keys) -> NDArray[np.uint64]:
    """A hash of each keys[i : i + BLOCK]."""
    count = max(0, len(keys) - BLOCK + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(BLOCK):
        hashes += keys[place : place + count].astype(np.uint64) * _POWERS[place]
    return hashes


def _overlapping(partings: Sequence[tuple[Parting, Keys]]) -> list[list[tuple[Parting, Keys]]]:
    """Groups of partings whose spans overlap or touch, by start; each group in the order of `partings`."""
    reach = -1
    members: list[list[int]] = []
    for start, end, index in sorted((each.start, each.end, index) for index, (each, _) in enumerate(partings)):
        if start > reach:
            members.append([])
        members[-1].append(index)
        reach = max(reach, end)
    return [[partings[index] for index in sorted(group)] for group in members]


class Edge(NamedTuple):
    """An edge of the tree.

    Attributes:
        parent: index of the edge before it in the list; -1: it starts a sequence of `namespace`.
        keys: (T,) int64; the tree's own array, so do not change it.
    """

    namespace: str
    parent: int
    keys: Keys


def edges_of(lock: AbstractContextManager[Any], tree: RadixTree[Any]) -> list[Edge]:
    """All edges, parents before children. Takes the lock for O(edges) and copies no keys."""
    edges: list[Edge] = []
    with lock:
        for root in tree.roots():
            places = {id(root): -1}
            for node in below(root):
                places[id(node)] = len(edges)
                edges.append(Edge(root.namespace, places[id(node.parent)], node.edge))
    return edges
