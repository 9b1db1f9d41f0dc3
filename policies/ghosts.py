"""Ghosts: digests of recently evicted keys.

A ghost is a run of keys that were evicted together: the digest of the prefix up to its end, and its length. A new edge
meets a ghost if it contains all of these keys. Digests are computed only at the ends of ghosts. O(1) amortised; `meet`
is O(keys of the edge) or O(ends of ghosts), whichever is less.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from policies.entry import Entry


class Ghosts:
    """A queue of ghosts, the oldest first. `tokens` is the number of their keys."""

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
        """Forget the ghost with this digest; return its number of keys, 0 if there is none."""
        tokens, _ = self._lengths.pop((state, digest), (0, end))
        if tokens:
            self._forget(tokens, end)
        return tokens

    def meet(self, entry: Entry) -> list[tuple[int, bytes]]:
        """Ends and digests, ascending, of the ghosts that a new entry contains."""
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
        """Forget the oldest ghosts beyond this many keys."""
        while self.tokens > max(0, tokens):
            _, (length, end) = self._lengths.popitem(last=False)
            self._forget(length, end)

    def _forget(self, tokens: int, end: int) -> None:
        self.tokens -= tokens
        self._ends[end] -= 1
        if not self._ends[end]:
            del self._ends[end]
