"""KnownTokens: what is known of a request's tokens: its prompt, and what was reported since, evaluated or not.

    prompt | read            | pending
             ids and keys      arrays that need not be evaluated yet

What is reported is read only when somebody asks, in order, up to the first that is not a token id: from there on
nothing is ever known. It counts all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from radixcache.tokens.ids import TokenIds
from radixcache.tokens.keys import Keys, common_length


class KnownTokens:
    """The tokens of one request, made with those of its prompt. Ids are below `vocab_size`; None: below 2^31.

    Attributes:
        count: tokens of the prompt and all reported ones, less those removed.
        read_ids, read_keys: of the prompt, and of reported tokens that were read already; nothing is waited for.
    """

    def __init__(self, ids: TokenIds, keys: Keys, vocab_size: int | None) -> None:
        self.read_ids = ids
        self.read_keys = keys
        self.count = len(ids)
        self._ceiling = vocab_size or 1 << 31
        self._pending: list[tuple[Any, int, int]] = []
        self._is_cut_short = False

    def report(self, tokens: Any, start: int, end: int) -> None:
        """The tokens [start, end) of a flattened array, which need not be evaluated, follow what is known."""
        self._pending.append((tokens, start, end))
        self.count += end - start

    def ids(self) -> TokenIds:
        """Ids of all that is known; waits for what was reported."""
        self._read()
        return self.read_ids

    def keys(self) -> Keys:
        """Keys of all that is known; a reported token's is its id. Waits for what was reported."""
        self._read()
        return self.read_keys

    def common(self, keys: Keys, limit: int) -> int:
        """How far these keys go along with the first `limit` known ones; waits only where those that were read do."""
        length = common_length(self.read_keys[:limit], keys)
        if length == len(self.read_keys) < min(limit, len(keys)):
            return common_length(self.keys()[:limit], keys)
        return length

    def remove(self, start: int, end: int) -> None:
        """The tokens [start, end) are gone, and those behind them move up. Waits for what was reported."""
        length = len(self.ids())
        self.read_ids = np.delete(self.read_ids, np.s_[start:end])
        self.read_keys = np.delete(self.read_keys, np.s_[start:end])
        self.count -= length - len(self.read_ids)

    def forget_pending(self) -> None:
        """Let go of what was reported and not read."""
        self._pending.clear()
        self._is_cut_short = True

    def _read(self) -> None:
        found: list[TokenIds] = []
        for tokens, start, end in () if self._is_cut_short else self._pending:
            try:
                ids = np.asarray(tokens).reshape(-1)[start:end]
            except Exception:  # a sampled token that cannot be evaluated is not known, nor is any after it
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
