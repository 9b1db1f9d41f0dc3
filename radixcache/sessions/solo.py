"""Solo: the methods of a Group that decoding calls, for one row at a time. The row is a Session.

For exact and quantized caches, layers that cannot be in a batch, embeddings in place of tokens, and stream_generate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from radixcache.errors import SessionClosedError, ShiftError, refuse_copy
from radixcache.layers.trials import BothModels
from radixcache.sessions.session import Session
from radixcache.tokens import Keys

#: Takes an offset of the prompt; returns embeddings (T, D) of all prompt tokens from there on.
Embed = Callable[[int], mx.array]


class Solo:
    """A group of at most one row; made by PrefixCache.alone().

    Args:
        begin: opens the session for `admit`, as PrefixCache.begin does; None: `admit` raises, and callers pass a row.
        layers: how many caches a session has.
        namespace, priority: as for PrefixCache.begin_many.
    """

    def __init__(
        self, begin: Callable[..., Session] | None = None, layers: int = 0, *, namespace: str = "", priority: int = 0
    ) -> None:
        self._begin, self._layers, self._namespace, self._priority = begin, layers, namespace, priority
        self._row: Session | None = None
        self._embed: Embed | None = None
        self._fed: Callable[..., Any] | None = None
        self._chunks: Iterator[int] | None = None
        self.is_closed = False

    __reduce_ex__ = refuse_copy

    @property
    def rows(self) -> list[Session]:
        """The open row, if there is one."""
        return [] if self._row is None or self._row.is_closed else [self._row]

    @property
    def is_lost(self) -> bool:
        """Whether the row's state was lost, because an evaluation failed."""
        return self._row is not None and self._row.is_lost

    @property
    def used_tokens(self) -> int:
        """Tokens that the row holds."""
        return sum(row.position for row in self.rows)

    @property
    def is_over_budget(self) -> bool:
        """False: the cache makes room for a session, and a single request may exceed the budget."""
        return False

    def has_bytes_for(self, ends: Mapping[Any, int], keys: Keys, end: int, namespace: str | None = None) -> bool:
        """Whether a new row fits: only if there is none."""
        return not ends

    def refusal_of(self, tokens: int) -> None:
        """None: `admit` itself raises if there is no memory."""

    def sharable_tokens(self, keys: Keys, namespace: str | None = None) -> int:
        """0: no row shares with another."""
        return 0

    def sharable_later(self, keys: Keys, row: Any, chunk_tokens: int) -> int:
        """0: no row shares with another."""
        return 0

    def admit(
        self,
        tokens: Any,
        keys: Any = None,
        marks: Sequence[int] = (),
        *,
        namespace: str | None = None,
        mark_tokens: int = 1,
        reserve: int = 256,
        embed: Embed | None = None,
    ) -> Session:
        """Begin a session on a prompt; arguments and errors as in PrefixCache.begin.

        Args:
            mark_tokens: as in Group.admit, but ignored.
            embed: returns the prompt's embeddings from an offset on. Where embeddings differ, `keys` must differ.
        """
        if self.is_closed or self._begin is None:
            raise SessionClosedError("the seat is closed; make another one.")
        namespace = self._namespace if namespace is None else namespace
        self._row = self._begin(tokens, keys, namespace, marks, reserve, self._priority)
        self._embed, self._fed, self._chunks = embed, None, None
        return self._row

    def _of(self, model: Any, row: Session) -> Any:
        """The model; if the row has embeddings, the model gets them beside the tokens of the prompt."""
        if self._embed is None:
            return model
        if self._fed is None:
            self._fed = feed_with(self._embed, row, model)
        return self._fed

    def prefill_many(
        self, model: Any, rows: Sequence[Session], tokens: int | None = None, *, leaves_last: bool = True
    ) -> Iterator[tuple[Session, mx.array]]:
        """Evaluate one chunk of `tokens` tokens of the prompt. The prompt's last token is left to `step`.

        Only a prompt of one token is evaluated here; then yields the row with logits (1, 1, V).
        """
        (row,) = rows
        if row.prompt_left > 1:
            if self._chunks is None:
                self._chunks = row.prefill_chunks(self._of(model, row), tokens)
                next(self._chunks)  # the start, which comes before the first chunk
            next(self._chunks, None)
        elif row.position == 0:
            yield row, self.step(model, rows, row.prompt[-1:])

    def step(self, model: Any, rows: Sequence[Session], tokens: Any) -> mx.array:
        """Evaluate the row's next token (1,), which need not be evaluated yet; logits (1, 1, V), not evaluated."""
        (row,) = rows
        logits = row.step(self._of(model, row), tokens)
        if self._embed is not None and not row.prompt_left:  # embeddings are large, and not needed after the prompt
            self._embed = self._fed = self._chunks = None
        return logits

    def drafts_together(self, model: Any) -> bool:
        """False: there is one row."""
        return False

    def check_drafts(
        self,
        model: Any,
        rows: Sequence[Session],
        tokens: Sequence[Sequence[int]],
        accept: Callable[[mx.array], list[int]],
    ) -> list[int]:
        """As `Group.check_drafts`. If `accept` raises, the tokens are taken back when the session closes."""
        (session,), (its,) = rows, tokens
        start, owed = session.position, [*map(int, session.owed)]
        text = [*owed, *its]
        logits = session.step(self._of(model, session), text, drafted=len(its) - 1)
        (count,) = accept(logits[:, len(owed) :])
        end = len(owed) + count
        _extend(session, its[1:count])
        session.rewind(start + end, least=start)
        _extend(session, text[session.known_tokens - start : end])
        return [count]

    def with_draft_model(self, model: Any, draft_model: Any) -> BothModels:
        """As `Group.with_draft_model`."""
        return BothModels(model, draft_model, self._layers)

    def draft(
        self, both: BothModels, rows: Sequence[Session], tokens: Sequence[int], count: int
    ) -> list[tuple[list[int], list[float]]]:
        """As `Group.draft`, but the draft model first reads all tokens that the row owes."""
        (session,) = rows
        given = mx.array([[*map(int, session.owed), *tokens]])
        with session.scratch(both.first) as caches:
            said, chances = both.drafted(given, count, lambda ids: both.draft_model(ids, cache=caches))
        return [*zip(said, chances, strict=True)]

    def remove(self, model: Any, row: Session, begin: int, end: int) -> None:
        """ShiftError: a session has no context shift."""
        raise ShiftError("a request that runs alone cannot drop the beginning of its context.")

    def close(self) -> None:
        """Store what the row has evaluated. No row can be admitted afterwards."""
        self.close_after(None)

    def close_after(self, error: BaseException | None) -> None:
        """As `close`, after an error. If an evaluation raised the error, nothing is stored."""
        self.is_closed = True
        for row in self.rows:
            row.__exit__(None if error is None else type(error), error, None)


def _extend(session: Session, tokens: Sequence[int]) -> None:
    if tokens:
        session.extend(tokens)


def feed_with(embed: Embed, session: Session, model: Any) -> Callable[..., Any]:
    """Wrap a model: it gets embeddings for the tokens of a session's prompt, and only tokens after the prompt.

    A cold run that verifies the session begins at offset 0, and so does a session that starts over.
    """
    first, rows = session.position, embed(session.position)
    others, others_position = None, 0

    def fed(tokens: mx.array, cache: list[Any]) -> Any:
        nonlocal first, rows, others, others_position
        count = tokens.shape[1]
        if cache is session.caches:
            position = session.position
        else:
            position = others_position if cache is others else 0
            others, others_position = cache, position + count
        if position >= len(session.prompt):
            return model(tokens, cache=cache)
        if position < first:
            first, rows = position, embed(position)
        return model(tokens, cache=cache, input_embeddings=rows[None, position - first : position - first + count])

    return fed
