"""Row: one request of a Group: its prompt, what is known of what follows, and how much of it its cells hold.

prompt          cached_tokens | remaining
cells           [0, position), of which clean_tokens have the state that they would have alone
known           the prompt, and the tokens given to step(), which need not be evaluated yet
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from radixcache.resume import ResumePlan, ShortReason
from radixcache.snapshots import Checkpoint
from radixcache.state_tree import Use
from radixcache.stops import checkpoint_stops
from radixcache.tokens import TokenIds
from radixcache.tree import Keys, common_length

if TYPE_CHECKING:
    from radixcache.group import Group


class Row:
    """A request of a Group; made by Group.admit().

    Attributes:
        id: the row's sequence in `group.causal`; never given twice in a group.
        prompt: int32 token ids of the whole prompt.
        cached_tokens: prompt tokens that were there already: restored, or shared with another row. The first prefill()
            of a row may find more of them.
        matched_tokens: prompt tokens that tree and rows held; more than cached_tokens when `reason` says why.
        reason: why less than the match was resumed, from ShortReason; None when all of it was.
        remaining: int32 token ids behind cached_tokens, never empty.
        is_closed: whether the row was closed; its cells are free then.
    """

    def __init__(
        self,
        group: Group,
        row_id: int,
        prompt: TokenIds,
        keys: Keys,
        use: Use,
        marks: Sequence[int],
        plan: ResumePlan,
        points_from: int,
    ) -> None:
        self.id = row_id
        self.prompt = prompt
        self.prompt_keys = keys
        self.use = use
        self.cached_tokens = plan.resume
        self.matched_tokens = plan.matched
        self.reason: ShortReason | None = plan.reason
        self.remaining = prompt[plan.resume :].copy()
        self.is_closed = False
        #: Whether nothing but admit() has been done to it.
        self.is_fresh = True
        #: Checkpoints taken on the way, which the tree does not have yet.
        self.checkpoints: list[Checkpoint] = []
        #: The offset at which a window was restored: cells of the windows that end before it hold nothing.
        self.points_from = points_from
        #: How many of the tokens it was admitted on are right, where others were found wrong since; None: nothing was.
        self.right_tokens: int | None = None
        # Of the group itself a row holds nothing: one that is let go of closes at once, without the garbage collector.
        self._group = weakref.ref(group)
        self._causal = group.causal
        self._vocab_size = group.cache.vocab_size
        self._ids = prompt
        self._keys = keys
        self._prompt_end = len(prompt)
        self._reported: list[tuple[mx.array, int]] = []
        self._is_cut_short = False
        limit, interval = len(prompt) - 1, group.cache.checkpoint_interval
        stops = checkpoint_stops(len(prompt), marks, plan.matched, plan.resume, interval, limit)
        #: Where its prefill is cut for a checkpoint, with the reason.
        self.stops = {at: kind for at, kind in sorted(stops.items()) if plan.resume < at <= limit}

    @property
    def position(self) -> int:
        """Tokens in its cells: evaluated, restored or shared; once it is closed 0."""
        return 0 if self.is_closed else self._causal.length(self.id)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not evaluated yet; once it is closed 0."""
        return 0 if self.is_closed else max(0, self._prompt_end - self.position)

    @property
    def known_tokens(self) -> int:
        """Prompt tokens plus those given to step(), less those removed."""
        return len(self._ids) + len(self._reported)

    def close(self) -> None:
        """Store what the row evaluated and free its cells. Closing twice is fine."""
        group = self._group()
        if not self.is_closed and group is not None:
            group.close_rows([self])

    # What the group asks

    def share_up_to(self, offset: int, points_from: int) -> None:
        """Before anything was evaluated for it, the row has come to stand at `offset` of its prompt."""
        self.cached_tokens, self.points_from = offset, points_from
        self.matched_tokens = max(self.matched_tokens, offset)
        self.remaining = self.prompt[offset:].copy()
        if offset == self.matched_tokens:
            self.reason = None

    def next_ids(self, count: int) -> TokenIds:
        """The next tokens of the prompt."""
        position = self.position
        return self._ids[position : position + count]

    def report(self, tokens: mx.array, index: int) -> None:
        """The token at `index` of an array, which need not be evaluated, follows what is known."""
        self._reported.append((tokens, index))

    def known_keys(self) -> Keys:
        """Keys of all that is known, up to the first reported token that is not a token id. Waits for reported ones."""
        ceiling = self._vocab_size or 1 << 31
        ids: list[int] = []
        for array, index in self._reported if not self._is_cut_short else ():
            try:
                token = int(np.asarray(array).reshape(-1)[index])
            except Exception:  # a sampled token that cannot be evaluated is not known, nor is any after it
                token = -1
            if not 0 <= token < ceiling:
                self._is_cut_short = True
                break
            ids.append(token)
        if ids:
            self._ids = np.concatenate([self._ids, np.array(ids, dtype=np.int32)])
            self._keys = np.concatenate([self._keys, np.array(ids, dtype=np.int64)])
            del self._reported[: len(ids)]
        return self._keys

    @property
    def clean_tokens(self) -> int:
        """How many tokens in its cells, from the first on, have the state that they would have alone."""
        clean = self._causal.clean_tokens(self.id)
        return clean if self.right_tokens is None else min(clean, self.right_tokens)

    def clean_keys(self) -> Keys:
        """Keys of the clean tokens, as far as they are known."""
        return self.known_keys()[: self.clean_tokens]

    def common(self, keys: Keys) -> int:
        """How far these keys go along with the clean tokens; waits for reported ones only where the prompt does."""
        clean = self.clean_tokens
        length = common_length(self._keys[:clean], keys)
        if length == len(self._keys) < min(clean, len(keys)):
            return common_length(self.known_keys()[:clean], keys)
        return length

    def cut(self, begin: int, end: int) -> None:
        """The tokens [begin, end), all evaluated, are gone."""
        self.is_fresh = False
        self.known_keys()
        self._ids = np.delete(self._ids, np.s_[begin:end])
        self._keys = np.delete(self._keys, np.s_[begin:end])
        self._prompt_end -= max(0, min(end, self._prompt_end) - begin)
        self.stops = {}
