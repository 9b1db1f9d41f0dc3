"""Row: one request of a Group: its prompt, what is known of what follows, and where its state is.

prompt          cached_tokens | remaining
state           [0, position), of which clean_tokens have the state that they would have alone
                in place: spans of nodes on the row's path; the rest in its columns of a batch
known           the prompt, and the tokens given to step(), which need not be evaluated yet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakMethod

import mlx.core as mx

from radixcache.adapters.contract import Spans
from radixcache.errors import refuse_copy
from radixcache.groups.batch import Batch
from radixcache.paging.resume import OwnState, PrefixRequest, ResumePlan, ShortReason
from radixcache.tokens import Keys, KnownTokens, TokenIds, common_length
from radixcache.tree.entries import StateNode


class Row:
    """A request of a Group; made by Group.admit().

    Attributes:
        id: never given twice in a group.
        prompt: int32 token ids of the whole prompt.
        cached_tokens: prompt tokens that were there already. The first prefill() of a row may find more of them.
        matched_tokens: prompt tokens that tree and rows held; more than cached_tokens when `reason` says why.
        reason: why less than the match was resumed, from ShortReason; None when all of it was.
        remaining: int32 token ids behind cached_tokens, never empty.
        is_closed: whether the row was closed; its state is gone then.
    """

    def __init__(
        self,
        row_id: int,
        request: PrefixRequest,
        vocab_size: int | None,
        close: WeakMethod[Callable[[Sequence[Row]], None]],
    ) -> None:
        self.id = row_id
        self.request = request
        self.prompt = request.prompt
        self.prompt_keys = request.keys
        self.matched_tokens = 0
        self.reason: ShortReason | None = None
        self.is_closed = False
        #: Whether nothing but admit() has been done to it.
        self.is_fresh = True
        #: Its state, but for what is in place, and its number in that batch.
        self.batch: Batch
        self.at = 0
        #: The path of the tree that it stands on and keeps there; None: nothing of it is in the tree.
        self.node: StateNode | None = None
        #: The tokens [start, end) that are read in place, on that path, in order.
        self.in_place: list[tuple[int, int]] = []
        #: Whether long spans are read in place; False as well before its first forward pass.
        self.in_segments = False
        #: What else is read in place, behind that: it was taken out of the tree.
        self.orphans: list[Spans] = []
        #: What it kept on the way, and the tree does not have yet.
        self.own: OwnState
        #: Where its prefill is cut for a checkpoint, with the reason.
        self.stops: dict[int, str] = {}
        #: How many of its tokens are right, where what is behind them was found wrong: a restored prefix, or logits
        #: that are not numbers. None: nothing was. See `distrust_from`.
        self.right_tokens: int | None = None
        #: Why its state cannot be had any more; None: it can.
        self.lost: str | None = None
        self._tainted: int | None = None
        self._known = KnownTokens(request.prompt, request.keys, vocab_size)
        self._prompt_end = len(request.prompt)
        # Of the group itself a row holds nothing: one that is let go of closes at once, without the garbage collector.
        self._close = close

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"at {self.position}"
        return f"<Row {self.id} {state}: prompt of {len(self.prompt)} tokens, {self.cached_tokens} cached>"

    __reduce_ex__ = refuse_copy

    @property
    def position(self) -> int:
        """Tokens that are evaluated or restored; once it is closed 0."""
        if self.is_closed:
            return 0
        columns, at = self.batch.columns, self.at
        return columns.lengths[at] + columns.in_place[at]

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not evaluated yet; once it is closed 0."""
        return 0 if self.is_closed else max(0, self._prompt_end - self.position)

    @property
    def known_tokens(self) -> int:
        """Prompt tokens plus those given to step(), less those removed."""
        return self._known.count

    @property
    def clean_tokens(self) -> int:
        """How many of its tokens, from the first on, have the state that they would have alone."""
        limits = (self.position, self._tainted, self.right_tokens)
        return min(limit for limit in limits if limit is not None)

    def close(self) -> None:
        """Store what the row evaluated and let go of its state. Closing twice is fine."""
        close = self._close()
        if not self.is_closed and close is not None:
            close([self])

    def distrust_from(self, offset: int) -> None:
        """What it holds from an offset on was found wrong: of that nothing is stored or shared."""
        self.right_tokens = offset if self.right_tokens is None else min(offset, self.right_tokens)

    # What the group asks

    @property
    def path_end(self) -> int:
        """How many of its tokens are on its path of the tree."""
        return 0 if self.node is None else self.node.end

    def path(self) -> list[StateNode]:
        """Its path of the tree, root side first."""
        return [] if self.node is None else self.node.path()

    def restored(self, plan: ResumePlan) -> None:
        """Before anything was evaluated for it, the row has come to stand where this plan says."""
        self.cached_tokens, self.matched_tokens, self.reason = plan.resume, plan.matched, plan.reason
        self.remaining = self.prompt[plan.resume :].copy()

    def reads(self) -> list[Spans]:
        """What it reads in place, in order. The lock is held."""
        path = [] if self.node is None else self.node.path()
        nodes = [node for node in path if any(start <= node.start < end for start, end in self.in_place)]
        return [node.payload.spans for node in nodes if node.payload.spans is not None] + self.orphans

    def next_ids(self, count: int) -> TokenIds:
        """The next tokens of the prompt."""
        position = self.position
        return self._known.read_ids[position : position + count]

    def report(self, tokens: mx.array, index: int) -> None:
        """The token at `index` of an array, which need not be evaluated, follows what is known."""
        self._known.report(tokens, index, index + 1)

    def known_keys(self) -> Keys:
        """Keys of all that is known, up to the first reported token that is not a token id. Waits for reported ones."""
        return self._known.keys()

    def clean_keys(self) -> Keys:
        """Keys of the clean tokens, as far as they are known."""
        return self.known_keys()[: self.clean_tokens]

    def common(self, keys: Keys) -> int:
        """How far these keys go along with the clean tokens; waits for reported ones only where the prompt does."""
        return self._known.common(keys, self.clean_tokens)

    def common_later(self, keys: Keys, chunk_tokens: int, has_states: bool) -> int:
        """How many tokens of a prompt with these keys the row can give at some moment of its prefill, in such chunks.

        With recurrent layers they end where a chunk does, or at a checkpoint that is still to be taken.
        """
        position, clean = self.position, self.clean_tokens
        prompt = self._known.read_keys
        common = common_length(prompt if clean == position else prompt[:clean], keys)
        if not has_states:
            return common
        ends = [at for at in self.stops if position < at <= common]
        if position <= common:
            ends.append(position + (common - position) // chunk_tokens * chunk_tokens)
        return max(ends, default=0)

    def cut(self, begin: int, end: int) -> None:
        """The tokens [begin, end), all evaluated, are gone."""
        self.is_fresh = False
        if end < self._known.count:
            self._tainted = begin if self._tainted is None else min(begin, self._tainted)
        elif self._tainted is not None and self._tainted >= begin:
            self._tainted = None
        self._known.remove(begin, end)
        self._prompt_end -= max(0, min(end, self._prompt_end) - begin)
        self.stops = {}
