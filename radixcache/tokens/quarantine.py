"""Quarantine: prefixes whose stored state was found wrong, and from where on they are not stored or resumed.

An entry stands for all sequences that begin with `keys`: of them nothing is kept or taken up beyond offset `start`. It
holds a digest of the keys and not the keys, so it tells nothing about them, and costs the same whatever their length.

Invariants, asserted by `check`:

  Q1  At most `capacity` entries; the one added longest ago goes first.
  Q2  0 <= start < length of an entry's keys.

`limit` is O(1) for a namespace without entries, else O(length of the longest entry). Never imports MLX. Not
thread-safe: PrefixCache holds the lock.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from radixcache.tokens.keys import Keys

#: Entries that are kept, over all namespaces: about 300 bytes each.
CAPACITY = 4096


class Quarantine:
    """The quarantined prefixes of one cache."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        # By namespace, length and digest of the keys: the offset from which on they are quarantined.
        self._entries: dict[tuple[str, int, bytes], int] = {}
        self._lengths: dict[str, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, keys: Keys, start: int, namespace: str) -> None:
        """Quarantine what begins with `keys` (at least one), from offset `start` < len(keys) on."""
        assert 0 <= start < len(keys), (start, len(keys))
        name = (namespace, len(keys), _digest(keys))
        if name in self._entries:
            self._entries[name] = min(start, self._entries[name])
            return
        self._entries[name] = start
        self._lengths.setdefault(namespace, Counter())[len(keys)] += 1
        if len(self._entries) > self._capacity:
            self._remove(next(iter(self._entries)))

    def offset(self, keys: Keys, namespace: str) -> int | None:
        """The offset from which on these keys are quarantined; None when they are not."""
        found = None
        blake, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(self._lengths.get(namespace, ())):
            if length > len(keys):
                break
            blake.update(keys[done:length].tobytes())
            done = length
            start = self._entries.get((namespace, length, blake.digest()))
            if start is not None:
                found = start if found is None else min(start, found)
        return found

    def limit(self, keys: Keys, namespace: str) -> int:
        """How many of these keys may be stored or resumed: all, or as far as they are not quarantined."""
        offset = self.offset(keys, namespace)
        return len(keys) if offset is None else offset

    def clear(self, namespace: str | None = None) -> None:
        """Forget the entries of a namespace; None: all."""
        for name in [name for name in self._entries if namespace in (None, name[0])]:
            self._remove(name)

    def check(self) -> None:
        """Assert Q1 and Q2, and that the lengths are those of the entries."""
        assert len(self._entries) <= self._capacity, (len(self._entries), self._capacity)
        counts: dict[str, Counter[int]] = {}
        for (namespace, length, _), start in self._entries.items():
            assert 0 <= start < length, (start, length)
            counts.setdefault(namespace, Counter())[length] += 1
        assert counts == self._lengths, (counts, self._lengths)

    def _remove(self, name: tuple[str, int, bytes]) -> None:
        del self._entries[name]
        namespace, length, _ = name
        counts = self._lengths[namespace]
        counts[length] -= 1
        if not counts[length]:
            del counts[length]
        if not counts:
            del self._lengths[namespace]


def _digest(keys: Keys) -> bytes:
    return hashlib.blake2b(keys.tobytes(), digest_size=16).digest()
