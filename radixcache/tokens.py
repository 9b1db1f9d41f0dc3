"""Token ids, and the keys that the tree stores for them: argument checks, known tokens of a request, quarantine.

There is one int64 key for each int32 token id; the two are equal unless the caller gave keys. Never imports MLX. Not
thread-safe: callers hold the cache's lock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
Keys = NDArray[np.int64]

#: A larger key is no token id but a digest, such as that of an image.
LARGEST_ID = (1 << 31) - 1
#: Most quarantined prefixes of a cache, over all namespaces: about 300 bytes each.
CAPACITY = 4096


def checked_prompt(
    tokens: Any, keys: Any = None, marks: Sequence[int] = (), vocab_size: int | None = None
) -> tuple[TokenIds, Keys]:
    """Return the ids and keys of a prompt; without keys the ids are the keys.

    Raises:
        ValueError: as in `token_ids`; or keys are not one 64-bit integer for each token, in one dimension; or a mark is
            not an offset in the prompt.
    """
    ids = token_ids(tokens, vocab_size)
    own_keys = ids.astype(np.int64) if keys is None else _integers(keys, "keys").astype(np.int64)
    if len(own_keys) != len(ids):
        raise ValueError(f"keys has {len(own_keys)} entries; wanted {len(ids)}, one for each token.")
    if not isinstance(marks, Iterable):
        raise ValueError(f"marks is a {type(marks).__name__}; wanted offsets in the prompt.")
    for mark in marks:
        if isinstance(mark, bool) or not isinstance(mark, Integral):
            raise ValueError(f"mark {mark!r} is a {type(mark).__name__}; wanted an int.")
        if not 0 <= mark <= len(ids):
            raise ValueError(f"mark {mark} is outside the prompt of {len(ids)} tokens.")
    return ids, own_keys


def token_ids(tokens: Any, vocab_size: int | None = None, name: str = "tokens") -> TokenIds:
    """Return `tokens` (list, tuple, np.ndarray or mx.array of integers, one-dimensional) as int32.

    Raises:
        ValueError: empty, not one-dimensional, not integers, or an id outside [0, vocab_size).
    """
    array = _integers(tokens, name)
    ceiling = min(vocab_size or 1 << 31, 1 << 31)
    # As uint64, a negative id is a large one. find() is several times faster than any() on a short array.
    index = (array.astype(np.int64).view(np.uint64) >= ceiling).tobytes().find(1)
    if index >= 0:
        raise ValueError(f"{name}[{index}] is {int(array[index])}; wanted a token id in [0, {ceiling}).")
    return array.astype(np.int32)


def require_namespace(namespace: Any) -> None:
    """Raise ValueError unless this is a str without surrogates: digests and files contain its UTF-8."""
    if not isinstance(namespace, str):
        raise ValueError(f"namespace is a {type(namespace).__name__}; wanted a str.")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"namespace is {namespace!r}; wanted text without surrogates.") from error


def arguments_of(model: Any) -> Any:
    """A model's own arguments; mlx-lm's models have them as `args`, some as `config`. None: it has none."""
    return getattr(model, "args", None) or getattr(model, "config", None)


def vocabulary_size(model: Any) -> int | None:
    """Number of token ids that the model's own arguments state; None: they state none."""
    args = arguments_of(model)
    size = getattr(args, "vocab_size", None)
    if size is None:
        text = getattr(args, "text_config", None)
        size = text.get("vocab_size") if isinstance(text, dict) else getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _integers(values: Any, name: str) -> NDArray[Any]:
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} is a {type(values).__name__}; wanted token ids: encode the text first.")
    kinds = set(map(type, values)) if isinstance(values, (list, tuple)) else set()
    try:
        # NumPy would read a bool as 0 or 1, and a mix of signed and unsigned integers as floating point.
        is_mixed = len(kinds) > 1 and all(issubclass(kind, (int, np.integer)) for kind in kinds)
        array = np.asarray(values, dtype=object if bool in kinds else np.int64 if is_mixed else None)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not a sequence of integers: {error}.") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; wanted 1: a list or an array of integers.")
    if len(array) == 0:
        raise ValueError(f"{name} is empty; wanted at least 1.")
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and int(array.max()) >= 1 << 63):
        given = list(values) if isinstance(values, (list, tuple)) else array.tolist()
        odd = next((i for i, value in enumerate(given) if not _is_int64(value)), 0)
        raise ValueError(f"{name}[{odd}] is {given[odd]!r}; wanted an integer of at most 64 bits.")
    return array


def _is_int64(value: Any) -> bool:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and -(1 << 63) <= int(value) < 1 << 63


def common_length(left: NDArray[np.integer], right: NDArray[np.integer]) -> int:
    """Length of the common prefix of two arrays of keys, or of token ids."""
    length = len(left)
    if length != len(right):  # For a short edge, a slice takes as long as the rest.
        length = min(length, len(right))
        left, right = left[:length], right[:length]
    first = (left != right).tobytes().find(1)
    return length if first < 0 else first


def token_text(keys: Iterable[int], tokenizer: Any) -> str:
    """The text of a run of keys; keys that are no token ids, and ids unknown to the tokenizer, appear as numbers."""
    parts: list[str] = []
    for is_id, group in groupby(map(int, keys), lambda key: 0 <= key <= LARGEST_ID):
        run = list(group)
        if not is_id:
            parts += [f"[key {key & (1 << 64) - 1:016x}]" for key in run]
            continue
        try:
            parts.append(str(tokenizer.decode(run)))
        except (IndexError, KeyError, OverflowError, TypeError, ValueError):
            parts.append(f"[ids {' '.join(map(str, run))}]")
    return "".join(parts)


class KnownTokens:
    """The prompt of a request, and the tokens reported since, evaluated or not. Ids are below `vocab_size` or 2^31.

    Pending tokens are read on demand, in order, up to the first that is not a token id. Tokens after the first such
    token are counted but never known.

    Attributes:
        count: tokens of the prompt and all reported tokens, without removed tokens.
        read_ids, read_keys: ids and keys of the prompt, and of the reported tokens that were read already.
        indexed_tokens: how many of the known tokens the suffix index has.
    """

    def __init__(self, ids: TokenIds, keys: Keys, vocab_size: int | None) -> None:
        self.read_ids, self.read_keys = ids, keys
        self.count = len(ids)
        self.indexed_tokens = 0
        self._ceiling = vocab_size or 1 << 31
        self._pending: list[tuple[Any, int, int]] = []
        self._is_cut_short = False

    def report(self, tokens: Any, start: int, end: int) -> None:
        """Add the tokens [start, end) of a flattened array, which need not be evaluated."""
        self._pending.append((tokens, start, end))
        self.count += end - start

    def ids(self) -> TokenIds:
        """Ids of all known tokens. Waits for pending tokens."""
        if not self._pending:
            return self.read_ids
        found: list[TokenIds] = []
        for tokens, start, end in () if self._is_cut_short else self._pending:
            try:
                ids = np.asarray(tokens).reshape(-1)[start:end]
            except Exception:  # A sampled token that cannot be evaluated is not known, nor is any after it.
                self._is_cut_short = True
                break
            wrong = (ids < 0) | (ids >= self._ceiling)
            if wrong.any():
                ids, self._is_cut_short = ids[: int(wrong.argmax())], True
            found.append(ids.astype(np.int32))
            if self._is_cut_short:
                break
        self._pending.clear()
        if found:
            self.read_ids = np.concatenate([self.read_ids, *found])
            self.read_keys = np.concatenate([self.read_keys, *(ids.astype(np.int64) for ids in found)])
        return self.read_ids

    def keys(self) -> Keys:
        """Keys of all known tokens; a reported token's key is its id. Waits for pending tokens."""
        self.ids()
        return self.read_keys

    def common(self, keys: Keys, limit: int) -> int:
        """How many of the first `limit` known keys `keys` begins with. Waits only if all keys read so far agree."""
        length = common_length(self.read_keys[:limit], keys)
        if length == len(self.read_keys) < min(limit, len(keys)):
            return common_length(self.keys()[:limit], keys)
        return length

    def remove(self, start: int, end: int) -> None:
        """Remove the tokens [start, end); later tokens move up. Waits for pending tokens."""
        length = len(self.ids())
        self.read_ids = np.delete(self.read_ids, np.s_[start:end])
        self.read_keys = np.delete(self.read_keys, np.s_[start:end])
        self.count -= length - len(self.read_ids)
        self.indexed_tokens = min(self.indexed_tokens, start)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on. Does not wait for pending tokens."""
        left = length - len(self.read_ids)
        if left <= 0:
            self.read_ids, self.read_keys = self.read_ids[:length], self.read_keys[:length]
            self._is_cut_short = False
        kept = []
        for tokens, start, end in self._pending:
            if left > 0:
                kept.append((tokens, start, min(end, start + left)))
                left -= end - start
        self._pending = kept
        self.count = min(self.count, length)
        self.indexed_tokens = min(self.indexed_tokens, length)

    def forget_pending(self) -> None:
        self._pending.clear()
        self._is_cut_short = True


class Quarantine:
    """Prefixes of one cache whose stored state was found wrong, each with the offset from which on it is not used.

    An entry applies to all sequences that begin with its keys. It holds only a digest of the keys. Asserted by `check`:

      Q1  At most `capacity` entries; the oldest entry is removed first.
      Q2  0 <= start < length of an entry's keys.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        #: By namespace, length and digest of the keys: the offset from which on they are quarantined.
        self._entries: dict[tuple[str, int, bytes], int] = {}
        self._lengths: dict[str, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, keys: Keys, start: int, namespace: str) -> None:
        """Quarantine all sequences that begin with `keys`, from offset `start` < len(keys) on."""
        assert 0 <= start < len(keys), (start, len(keys))
        name = (namespace, len(keys), hashlib.blake2b(keys.tobytes(), digest_size=16).digest())
        if name in self._entries:
            self._entries[name] = min(start, self._entries[name])
            return
        self._entries[name] = start
        self._lengths.setdefault(namespace, Counter())[len(keys)] += 1
        if len(self._entries) > self._capacity:
            self._remove(next(iter(self._entries)))

    def offset(self, keys: Keys, namespace: str) -> int | None:
        """The offset from which on these keys are quarantined; None: they are not.

        O(1) for a namespace without entries, else O(length of the longest entry).
        """
        if namespace not in self._lengths:
            return None
        found = None
        blake, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(self._lengths[namespace]):
            if length > len(keys):
                break
            blake.update(keys[done:length].tobytes())
            done = length
            start = self._entries.get((namespace, length, blake.digest()))
            if start is not None:
                found = start if found is None else min(start, found)
        return found

    def limit(self, keys: Keys, namespace: str) -> int:
        offset = self.offset(keys, namespace)
        return len(keys) if offset is None else offset

    def clear(self, namespace: str | None = None) -> None:
        for name in [name for name in self._entries if namespace in (None, name[0])]:
            self._remove(name)

    def check(self) -> None:
        """Assert Q1 and Q2, and that `_lengths` counts the entries by length."""
        assert len(self._entries) <= self._capacity, (len(self._entries), self._capacity)
        counts: dict[str, Counter[int]] = {}
        for (namespace, length, _), start in self._entries.items():
            assert 0 <= start < length, (start, length)
            counts.setdefault(namespace, Counter())[length] += 1
        assert counts == self._lengths, (counts, self._lengths)

    def _remove(self, name: tuple[str, int, bytes]) -> None:
        del self._entries[name]
        namespace, length, _ = name
        self._lengths[namespace] -= Counter([length])  # Also removes a count of 0.
        if not self._lengths[namespace]:
            del self._lengths[namespace]
