"""Ghosts: what was evicted not long ago, remembered by the digests of its prefixes. No state, only the memory of it.

A ghost is a run of keys that went in one piece: the digest of the prefix that ends with it, and how many keys it had.
A new edge meets a ghost when it spells all of it. Digests are worked out only at offsets where some ghost ends.

All O(1), amortised, but `meet`: O(keys of the edge) or O(ends of ghosts), whichever is less, and the digests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from policies.entry import Entry


class Ghosts:
    """A queue of ghosts, the oldest goes first. `tokens` is the number of keys they stand for."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lengths: OrderedDict[tuple[str, bytes], tuple[int, int]] = OrderedDict()
        self._ends: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, entry: Entry, tokens: int) -> None:
        """Remember the last `tokens` keys of an entry that is about to go."""
        digest = entry.digest
        self.take(entry.state, entry.end, digest)
        self._lengths[entry.state, digest] = (tokens, entry.end)
        self._ends[entry.end] += 1
        self.tokens += tokens

    def take(self, state: str, end: int, digest: bytes) -> int:
        """Forget the ghost with this digest; returns how many keys it stood for, 0 when there was none."""
        tokens, _ = self._lengths.pop((state, digest), (0, end))
        if tokens:
            self._forget(tokens, end)
        return tokens

    def meet(self, entry: Entry) -> list[tuple[int, bytes]]:
        """The ends of the ghosts that a new entry spells, and their digests, ascending. Forgets nothing."""
        first = entry.start + 1 if entry.state == "span" else entry.end
        if len(self._ends) < entry.end - first:
            ends = sorted(end for end in self._ends if first <= end <= entry.end)
        else:
            ends = [end for end in range(first, entry.end + 1) if end in self._ends]
        if not ends:
            return []
        digests = [entry.digest] if ends == [entry.end] else entry.digests(ends)
        pairs = zip(ends, digests, strict=True)
        return [(end, digest) for end, digest in pairs if (entry.state, digest) in self._lengths]

    def trim(self, tokens: float) -> None:
        """Forget the oldest until at most this many keys are remembered."""
        while self.tokens > max(0, tokens):
            _, (length, end) = self._lengths.popitem(last=False)
            self._forget(length, end)

    def _forget(self, tokens: int, end: int) -> None:
        self.tokens -= tokens
        self._ends[end] -= 1
        if not self._ends[end]:
            del self._ends[end]
