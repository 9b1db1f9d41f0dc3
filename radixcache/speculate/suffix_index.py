"""SuffixIndex: which tokens followed the same last tokens before, in all served text. Never imports MLX.

Tokens lie in a ring; the oldest are overwritten first. A position stands for the tokens before it, and for the token at
it, which followed them. For each suffix length there is a hash table:

    tokens   ... the  cat  sat | the  cat  ran ...        two runs
    head     hash("the cat") -> the last position after these tokens (ran)
    link     from a position to the previous position in the same bucket (sat)

`propose` walks the bucket of the longest known suffix. A hash is no proof: the tokens before each position are compared
with the tail, and the namespace of its run with the given one. The positions found vote on what follows.

Invariants, asserted by `check`:

  S1  The runs cover the positions from `end - capacity` (or 0) to `end`, in order; no run crosses the end of the ring.
  S2  A link leads to an older position or nowhere. A walk stops at a younger position, which overwrote an older one.
  S3  A namespace has a number as long as it has a run; the tokens of a cleared run are -1.
  S4  nbytes <= capacity * MOST_TOKEN_BYTES.

A position is found from the head of its bucket if its run has a whole suffix before it. The position must be neither
cut nor context. The newer positions on the way are overwritten later.

`propose` reads a bounded number of positions, whatever the size. `add` is vectorised, O(n log n). Not thread-safe: the
callers hold the cache's lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.speculate.pace import MOST_PROPOSED, NOTHING, Proposal

#: Suffix lengths that are looked for, longest first.
LENGTHS = (16, 8, 5, 3, 2)
#: Most last tokens that are looked up.
TAIL_TOKENS = LENGTHS[0]
#: Fewest tokens of a run: a shorter run could never be found.
LEAST_RUN = LENGTHS[-1] + 1
#: Bytes of the arrays per token, with one bucket per two tokens; bytes of a run; most bytes of both per token.
TOKEN_BYTES = 4 + 6 * len(LENGTHS)
RUN_BYTES = 12
MOST_TOKEN_BYTES = TOKEN_BYTES + RUN_BYTES // LEAST_RUN + 1
#: Most positions that vote, and most that are compared with the tail for one suffix length.
MOST_VOTES, MOST_STEPS = 8, 16
#: Steps of the number of matching tokens: all numbers in a step give the next token the same kind.
KNOWN = (2, 3, 4, 5, 6, 8, 11, 16, 20, 24)
#: A proposal ends where the chance that all of it is accepted falls below this.
LEAST_CHANCE = 0.1
#: Tokens that are indexed at a time: temporary arrays stay small.
BATCH_TOKENS = 1 << 16
#: `extend` indexes fewer tokens than this one by one, which is faster.
FEWEST_VECTORISED = 24

_MASK = (1 << 64) - 1
#: Base of the polynomial that hashes a suffix, and factor that spreads the hashes over the buckets (both odd).
_BASE, _SPREAD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_POWERS = [pow(_BASE, index + 1, 1 << 64) for index in range(TAIL_TOKENS)]
_IS_LENGTH = [index + 1 in LENGTHS for index in range(TAIL_TOKENS)]


class SuffixIndex:
    """Which tokens followed which, by namespace, in at most `limit_bytes` bytes (at least 64 tokens' worth).

    Attributes:
        capacity: tokens that fit; then the oldest are overwritten.
        nbytes: bytes of the index.
    """

    def __init__(self, limit_bytes: int, *, vocab_size: int | None = None) -> None:
        self.capacity = max(4 * TAIL_TOKENS, limit_bytes // MOST_TOKEN_BYTES)
        self._buckets = self.capacity // 2  # of each length
        self._ceiling = vocab_size or 1 << 31
        self._make()

    def _make(self) -> None:
        capacity = self.capacity
        self._ids = np.zeros(capacity, np.int32)
        #: Each bucket's last position in the ring, plus 1; 0: none. Zeroed memory takes no RAM until it is used.
        self._heads = [np.zeros(self._buckets, np.int32) for _ in LENGTHS]
        self._links = [np.zeros(capacity, np.int32) for _ in LENGTHS]
        # Reading a memoryview is several times as fast as reading a NumPy array.
        self._id_view = self._ids.data
        self._raw = self._id_view.cast("B")
        self._head_views = [each.data for each in self._heads]
        self._link_views = [each.data for each in self._links]
        #: Tokens ever added; a position `at` lies at `at % capacity` in the ring.
        self._end = 0
        self._starts, self._owners = array("q"), array("i")  # each run's first position and namespace number
        self._gone = 0  # how many of the first runs are wholly overwritten
        self._numbers: dict[str, int] = {}
        self._runs: Counter[int] = Counter()  # how many runs each number has
        self._next_number = 1

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return min(self._end, self.capacity)

    @property
    def nbytes(self) -> int:
        return self.capacity * TOKEN_BYTES + len(self._starts) * RUN_BYTES

    def add(self, tokens: Any, namespace: str = "", *, context: int = 0) -> None:
        """Add a run of token ids. The first `context` of them are indexed already; they are context for the others.

        Keys that are no ids, such as those of images, end a run: no suffix crosses them.
        """
        keys = np.asarray(tokens)[max(0, context - TAIL_TOKENS) :]
        context = min(context, TAIL_TOKENS)
        for start, end in self._stretches(keys):
            self._add_run(keys[start:end].astype(np.int32), namespace, max(0, context - start))

    def _stretches(self, keys: NDArray[Any]) -> list[tuple[int, int]]:
        """The ranges [start, end) of keys that are token ids: before, between and after the other keys."""
        others = np.flatnonzero((keys < 0) | (keys >= self._ceiling)).tolist()
        return list(zip([0, *(each + 1 for each in others)], [*others, len(keys)], strict=True))

    def _add_run(self, ids: NDArray[np.int32], namespace: str, context: int) -> None:
        while len(ids) >= LEAST_RUN and len(ids) > context:
            room = self.capacity - self._end % self.capacity
            if room <= context or room < LEAST_RUN:
                self._skip(room)
                continue
            piece = ids[: min(room, BATCH_TOKENS)]
            self._add(piece, context, self._number(namespace))
            if len(piece) == len(ids):
                return
            # The next piece begins with the end of this one, as context.
            ids, context = ids[max(0, len(piece) - TAIL_TOKENS) :], min(TAIL_TOKENS, len(piece))

    def extend(self, tokens: Sequence[int], namespace: str = "") -> None:
        """Extend the last run, if it is of this namespace, else begin a run. Few tokens are added in pure Python."""
        if not len(tokens):
            return
        view, capacity, number = self._id_view, self.capacity, self._number(namespace)
        is_ours = bool(self._owners) and self._owners[-1] == number
        start, end = self._span(len(self._starts) - 1) if is_ours else (self._end, self._end)
        last = [view[each % capacity] for each in range(end - min(TAIL_TOKENS, end - start), end)]
        if len(tokens) >= FEWEST_VECTORISED and last and 0 < end % capacity <= capacity - len(tokens):
            self._add(np.array([*last, *tokens], np.int32), len(last), number, goes_on=True)
            return
        for token in tokens:
            at = self._end % capacity
            if not last or not at:
                self._add(np.array([*last, token], np.int32), len(last), number)
            else:
                view[at] = token
                self._end += 1
                self._drop_old()
                for index, (length, each) in enumerate(zip(LENGTHS, _hashes_of(last, number), strict=True)):
                    if length <= len(last):
                        heads, bucket = self._head_views[index], each * self._buckets >> 32
                        self._link_views[index][at] = heads[bucket]
                        heads[bucket] = at + 1
            last = [*last[1 - TAIL_TOKENS :], token]

    def propose(self, tail: Sequence[int], limit: int, namespace: str = "") -> Proposal:
        """At most `limit` tokens that are expected after `tail`; NOTHING if its last tokens are unknown."""
        number, known = self._numbers.get(namespace), min(len(tail), TAIL_TOKENS)
        if number is None or limit < 1 or known < LENGTHS[-1]:
            return NOTHING
        # Mostly even the shortest suffix is unknown: try it first.
        last = tail[-LENGTHS[-1] :]
        followers, is_all = self._followers(-1, _hash_of(last, number), array("i", last).tobytes(), number, 1, most=1)
        if is_all and not followers:
            return NOTHING
        last = list(tail[-TAIL_TOKENS:])
        raw_tail = array("i", last).tobytes()
        for index, (length, each) in enumerate(zip(LENGTHS, _hashes_of(last, number), strict=True)):
            if length <= known:
                followers, _ = self._followers(index, each, raw_tail[-4 * length :], number, limit)
                if followers:
                    return _vote_on(followers, length)
        return NOTHING

    def has(self, tokens: Any, namespace: str = "") -> bool:
        """Whether the last token id with `TAIL_TOKENS` ids before it is indexed after the same ids."""
        keys, number = np.asarray(tokens), self._numbers.get(namespace)
        ends = [end for start, end in self._stretches(keys) if end - start > TAIL_TOKENS]
        if number is None or not ends:
            return False
        last = keys[ends[-1] - TAIL_TOKENS - 1 : ends[-1]].tolist()
        followers, _ = self._followers(0, _hash_of(last[:-1], number), array("i", last[:-1]).tobytes(), number, 1)
        return [last[-1]] in followers

    def clear(self, namespace: str | None = None) -> None:
        """Forget all, or the tokens of one namespace."""
        if namespace is None:
            self._make()
            return
        number = self._numbers.get(namespace)
        for index, owner in enumerate(self._owners):
            if owner == number:
                start, end = self._span(index)
                self._ids[start % self.capacity : (end - 1) % self.capacity + 1] = -1
                self._disown(index)

    def check(self) -> None:
        """Assert S1 to S4."""
        starts, oldest = list(self._starts), max(0, self._end - self.capacity)
        assert self.nbytes <= self.capacity * MOST_TOKEN_BYTES, (self.nbytes, self.capacity)
        assert starts == sorted(set(starts)) and len(starts) == len(self._owners), starts
        assert not starts or starts[self._gone] <= oldest, (starts[self._gone], oldest)
        assert sorted(self._numbers.values()) == sorted(n for n, count in self._runs.items() if count)
        assert Counter(owner for owner in self._owners if owner) == self._runs, (self._owners, self._runs)
        assert not any(self._owners[: self._gone]), self._gone
        for index, owner in enumerate(self._owners[self._gone :], start=self._gone):
            start, end = self._span(index)
            assert start < end and start // self.capacity == (end - 1) // self.capacity, (start, end)
            at = start % self.capacity
            ids = self._ids[at : at + end - start]
            assert owner or (ids == -1).all(), (start, end)
        for links in self._link_views:
            for slot in range(self.tokens):
                assert not links[slot] or self._age(links[slot] - 1) > self._age(slot) or self._end > self.capacity

    # Adding

    def _number(self, namespace: str) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = self._next_number
            self._next_number += 1
        return number

    def _skip(self, count: int) -> None:
        """Leave the end of the ring empty."""
        at = self._end % self.capacity
        self._ids[at : at + count] = -1
        self._append_run(count, 0)

    def _append_run(self, count: int, number: int) -> None:
        self._starts.append(self._end)
        self._owners.append(number)
        if number:
            self._runs[number] += 1
        self._end += count
        self._drop_old()

    def _drop_old(self) -> None:
        """Forget the runs that are wholly overwritten."""
        oldest = self._end - self.capacity
        while self._gone + 1 < len(self._starts) and self._starts[self._gone + 1] <= oldest:
            self._disown(self._gone)
            self._gone += 1
        if self._gone * 8 > len(self._starts):  # seldom, because the remaining runs must move up
            del self._starts[: self._gone], self._owners[: self._gone]
            self._gone = 0

    def _disown(self, index: int) -> None:
        number, self._owners[index] = self._owners[index], 0
        if number:
            self._runs[number] -= 1
            if not self._runs[number]:
                del self._runs[number]
                self._numbers = {name: each for name, each in self._numbers.items() if each != number}

    def _add(self, ids: NDArray[np.int32], context: int, number: int, *, goes_on: bool = False) -> None:
        """Add a run. Its first `context` tokens are indexed already; `goes_on`: they end the last run, which grows."""
        new, at = ids[context if goes_on else 0 :], self._end % self.capacity
        self._ids[at : at + len(new)] = new
        if goes_on:
            self._end += len(new)
            self._drop_old()
        else:
            self._append_run(len(new), number)
        at -= len(ids) - len(new)
        for index, (length, buckets) in enumerate(self._buckets_of(ids, number)):
            first = max(context, length)
            if first < len(ids):
                self._link(index, at + first, buckets[first - length : -1])

    def _buckets_of(self, ids: NDArray[np.int32], number: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """For each length, longest first, the bucket of each suffix: item i is of the suffix [i, i + length)."""
        sums: dict[int, NDArray[np.uint64]] = {}
        words = ids.astype(np.uint64) + np.uint64(1)
        total = np.zeros(len(ids), np.uint64)
        for back in range(min(TAIL_TOKENS, len(ids))):
            total = total[1:] if back else total
            total = total + words[: len(ids) - back] * np.uint64(_POWERS[back])
            if back + 1 in LENGTHS:
                sums[back + 1] = total
        for length in LENGTHS:
            if length in sums:
                mixed = (sums[length] + np.uint64(number * _SPREAD & _MASK)) * np.uint64(_SPREAD)
                yield length, ((mixed >> np.uint64(32)) * np.uint64(self._buckets) >> np.uint64(32)).astype(np.int64)
            else:
                yield length, np.zeros(0, np.int64)

    def _link(self, index: int, at: int, buckets: NDArray[np.int64]) -> None:
        """Put consecutive positions, the first at `at` in the ring, at the heads of their buckets."""
        heads, links = self._heads[index], self._links[index]
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        before = np.empty(len(order), np.int32)
        before[1:] = order[:-1] + (at + 1)
        before[is_first] = heads[ordered[is_first]]
        links[at + order] = before
        is_last = np.append(is_first[1:], True)
        heads[ordered[is_last]] = order[is_last] + (at + 1)

    # Looking up

    def _followers(
        self, index: int, bucket_hash: int, wanted: bytes, number: int, limit: int, most: int = MOST_VOTES
    ) -> tuple[list[list[int]], bool]:
        """The tokens from each of the latest `most` positions after `wanted` in this namespace, the latest first.

        Also returns whether these are all positions, because the walk came to the end of the bucket.
        """
        raw, view, links = self._raw, self._id_view, self._link_views[index]
        starts, owners = self._starts, self._owners
        capacity, nbytes = self.capacity, len(wanted)
        slot = self._head_views[index][bucket_hash * self._buckets >> 32]
        followers: list[list[int]] = []
        age = -1
        last = self._end - 1
        for _ in range(MOST_STEPS):
            slot -= 1
            older = (last - slot) % capacity
            if slot < 0 or older <= age:
                return followers, True
            age, end_byte = older, 4 * slot
            if end_byte >= nbytes and raw[end_byte - nbytes : end_byte] == wanted:
                position = last - age
                after = bisect_right(starts, position)  # the run after the position's own
                if owners[after - 1] == number:
                    left = (starts[after] if after < len(starts) else last + 1) - position
                    followers.append(view[slot : slot + (limit if limit < left else left)].tolist())
                    if len(followers) == most:
                        break
            slot = links[slot]
        return followers, False

    def _span(self, run: int) -> tuple[int, int]:
        """Where a run starts and ends, without what was overwritten."""
        end = self._starts[run + 1] if run + 1 < len(self._starts) else self._end
        return max(self._starts[run], self._end - self.capacity), end

    def _age(self, slot: int) -> int:
        return (self._end - 1 - slot) % self.capacity


def _hash_of(tail: Sequence[int], number: int) -> int:
    """The hash of all these tokens, as in `_hashes_of`."""
    total = number * _SPREAD
    for token, power in zip(reversed(tail), _POWERS, strict=False):
        total += (token + 1) * power
    return (total * _SPREAD & _MASK) >> 32


def _hashes_of(tail: list[int], number: int) -> list[int]:
    """For each of LENGTHS, a hash below 2**32 of that many last tokens, or of all tokens if there are fewer."""
    sums, total = [], number * _SPREAD
    for token, power, is_length in zip(reversed(tail), _POWERS, _IS_LENGTH, strict=False):
        total += (token + 1) * power
        if is_length:
            sums.append(total)
    sums += [total] * (len(LENGTHS) - len(sums))
    return [(each * _SPREAD & _MASK) >> 32 for each in reversed(sums)]


def _vote_on(followers: list[list[int]], suffix: int) -> Proposal:
    """Propose, token by token, what most followers that agree so far say. At a tie, the latest follower wins."""
    tokens: list[int] = []
    kinds: list[int] = []
    whole = 1.0  # the chance that all tokens so far are accepted, without the unanimous ones
    while followers and whole > LEAST_CHANCE:
        done, votes = len(tokens), len(followers)
        for column in islice(zip(*followers, strict=False), done, None):
            if column.count(column[0]) < votes:
                break
            tokens.append(column[0])
        kinds += _AGREED[votes][suffix + done : suffix + len(tokens)]
        # Here the votes differ, or the shortest follower ends.
        index = len(tokens)
        followers = [each for each in followers if len(each) > index]
        if len(followers) == votes:
            heads = [each[index] for each in followers]
            token = max(heads, key=heads.count)
            kind = _kind(heads.count(token), votes, suffix + index)
            tokens.append(token)
            kinds.append(kind)
            whole *= _CHANCES[kind]
            followers = [each for each in followers if each[index] == token]
    return Proposal(tuple(tokens), tuple([_CHANCES[kind] for kind in kinds]), "tree", suffix, tuple(kinds))


def _kind(count: int, votes: int, known: int) -> int:
    """The kind of a token that has `count` of `votes` votes, after `known` matching tokens."""
    return (bisect_right(KNOWN, known) * (MOST_VOTES + 1) + votes) * (MOST_VOTES + 1) + count


def _chance(kind: int) -> float:
    """The chance of a token of a kind, until it is measured.

    It counts one more vote, and gives more of that vote to this token after a long match. With a single vote, the
    chance is 0.4 after two matching tokens, and 0.8 after sixteen.
    """
    (step, votes), count = divmod(kind // (MOST_VOTES + 1), MOST_VOTES + 1), kind % (MOST_VOTES + 1)
    known = KNOWN[step - 1] if step else 0
    return (count + 1.5 * known / (known + 6) - 0.5) / (votes + 1)


_CHANCES = [min(0.95, max(0.01, _chance(kind))) for kind in range((len(KNOWN) + 1) * (MOST_VOTES + 1) ** 2)]
#: Kinds of tokens that have all votes, by the number of votes and by the number of matching tokens.
_AGREED = [
    [_kind(votes, votes, known) for known in range(TAIL_TOKENS + MOST_PROPOSED)] for votes in range(MOST_VOTES + 1)
]
