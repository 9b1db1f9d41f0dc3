"""The decode loop: makes the next tokens of one or many replies, with samplers, processors, masks and drafts.

A caller owns the replies (`Decoding`) and their rows; `DecodeLoop` runs their passes. A round of a caller:

    propose    choose the draft tokens that the next pass checks; read pending tokens first if that may save time
    run        dispatch one pass: a step on tokens that nobody has read, or a check of the draft tokens
    take       the caller reads the tokens, oldest first, and returns whether the reply continues

The seat of the rows runs the passes: a Group, or a Solo on a Session. The draft model drafts for replies where it is
expected to gain more than drafts from earlier text. It decodes all these replies in one batch.

Not thread-safe. The clock is read only to measure passes for drafts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from numpy.typing import NDArray

from radixcache.errors import without_frames
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import MODEL, MOST_PROPOSED, NOTHING, DraftPace, Proposal
from radixcache.tokens import TokenIds

#: Passes between two releases of MLX's free buffers.
RELEASE_INTERVAL_PASSES = 256
#: Steps until the draft model is asked again, after there was no room for its state.
ROOMLESS_STEPS = 64

#: From log-probabilities (1, V) to a token (1,).
Sampler = Callable[[mx.array], mx.array]
#: As in mlx-lm: from the tokens so far (T,) and logits (1, V) to logits (1, V).
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
#: From the previous token (None: the reply begins) to a mask (V,) of the tokens that may be next; None: all may.
Guidance = Callable[[int | None], NDArray[np.bool_] | None]


class Predictions:
    """Pending results of a forward pass with logits (N, V): tokens (N,) and, if wanted, log-probabilities (N, V).

    `is_checked`: also find, for each row, whether all logits are numbers, and the log-probability of its token.
    """

    def __init__(self, tokens: mx.array, logits: mx.array, logprobs: mx.array | None, *, is_checked: bool) -> None:
        self.tokens, self.logprobs = tokens, logprobs
        self._found: list[tuple[int, bool, float | None]] | None = None
        self._pending = [tokens]
        if is_checked:
            self._pending.append(mx.max(logits, axis=-1))  # the largest is finite if all are numbers
        if is_checked and logprobs is not None:  # token -1 reads the last column
            self._pending.append(mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0])
        mx.async_eval(*self._pending, *([] if logprobs is None else [logprobs]))

    def read(self) -> list[tuple[int, bool, float | None]]:
        """Wait. Return for each row the token, whether a logit is not a number, and the log-probability if known."""
        if self._found is not None:
            return self._found
        lists: list[Any] = [array.tolist() for array in self._pending]
        unknown: Any = ([], [0.0] * len(lists[0]), [None] * len(lists[0]))
        columns = [*lists, *unknown[len(lists) :]]
        self._found = [(token, not math.isfinite(most), own) for token, most, own in zip(*columns, strict=True)]
        return self._found


class Sampled(NamedTuple):
    """The token that a pass gives for one of its rows; it may be pending."""

    of: Predictions
    row: int

    def read(self) -> tuple[int, bool, float | None]:
        """As `Predictions.read`, for this row."""
        return self.of.read()[self.row]

    @property
    def logprobs(self) -> mx.array | None:
        """Log-probabilities (V,); None: no row of the pass wanted them."""
        return None if self.of.logprobs is None else self.of.logprobs[self.row]


@dataclass(eq=False, kw_only=True)
class Decoding:
    """A reply in the loop.

    Attributes:
        tokens: the prompt; the first step evaluates its last token.
        sampler, processors, guidance: how tokens are chosen; without a sampler, the most likely token.
        has_logprobs: whether log-probabilities are wanted.
        drafting: the source of draft tokens; None: no drafts.
        draft_tokens: how many tokens a draft model proposes at a time; 0: there is no draft model.
        held_row: the reply's row in the seat; None while the reply waits.
        failure: what the sampler or the step raised; reported when the tokens before the error are read.
        before: the last token of the reply when it had to wait again; None: there is none.
        last: the latest prediction, which the next forward pass continues; None before the first.
        unread: predictions that nobody has read yet; two while a step runs.
    """

    tokens: TokenIds
    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    guidance: Guidance | None = None
    has_logprobs: bool = False
    drafting: Drafting | None = None
    draft_tokens: int = 0
    held_row: Any = None
    failure: Exception | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        self.last: Sampled | None = None
        self.unread: deque[Sampled] = deque()
        self._said: TokenBuffer | None = None  # prompt and reply, for the processors

    @property
    def row(self) -> Any:
        """The reply's row, a Row or a Session; only for a reply that has a row."""
        assert self.held_row is not None, self
        return self.held_row

    @property
    def is_decoding(self) -> bool:
        """Whether the first token of the reply was dispatched."""
        return self.last is not None

    @property
    def left(self) -> int:
        """How many more tokens the reply may have after the tokens that were read."""
        raise NotImplementedError

    @property
    def next_token(self) -> int:
        """The token that the next forward pass evaluates. Waits until this token is known."""
        return int(self.tokens[-1]) if self.last is None else self.last.read()[0]

    def most_drafted(self) -> int:
        """How many draft tokens the reply may get now. A pass gives one token more than it accepts drafts."""
        if self.drafting is None or not self.row.may_draft:
            return 0
        return max(0, min(self.left - len(self.unread) - 1, MOST_PROPOSED))

    def wait_again(self) -> None:
        """Leave the row. The reply continues later in another row, after the tokens that were read."""
        self.before = self.before if self.last is None else self.last.read()[0]
        self.held_row = self._said = self.last = None
        self.unread.clear()

    def mask(self, logits: mx.array) -> mx.array:
        """Set logits (1, V) of tokens that may not be next to -inf. Waits for the previous token only."""
        assert self.guidance is not None, self
        allowed = self.guidance(self.before if self.last is None else self.last.read()[0])
        return logits if allowed is None else mx.where(mx.array(allowed[: logits.shape[-1]]), logits, -mx.inf)

    def process(self, logits: mx.array) -> mx.array:
        """Apply the processors to logits (1, V)."""
        if self._said is None:
            self._said = TokenBuffer(self.tokens[:-1].tolist())
        said = self._said.update_and_fetch(next_tokens([self]))
        for processor in self.processors:
            logits = processor(said, logits)
        return logits


#: The proposal for each reply.
Drafts = dict[Any, Proposal]
#: Takes the reply's next unread token. True: the reply continues after this token.
Take = Callable[[Any], bool]


class PassTimes:
    """Measures passes for a DraftPace: a plain step from the end of one round to the end of the next, a check alone."""

    def __init__(self, pace: DraftPace) -> None:
        self.pace = pace
        self._ended_s, self._rows = 0.0, 0
        self._owing: tuple[int, float] | None = None  # width and seconds of a check after which rows owe tokens

    def end_round(self, rows: int, *, is_plain: bool) -> None:
        """Note the end of a round. `is_plain`: its only pass was a step of `rows` rows, dispatched ahead."""
        now_s = time.perf_counter()
        if is_plain and 0 < rows == self._rows:
            self.pace.note(1, now_s - self._ended_s, rows)
        self._ended_s, self._rows = now_s, rows

    def note_check(self, width: int, rows: int, elapsed_s: float, *, owes: bool) -> None:
        """Note the end of a check. `owes`: rows evaluate tokens again in the next pass, so add that time here."""
        if self._owing is not None:
            width, before_s = self._owing
            elapsed_s = before_s + max(0.0, elapsed_s - self.pace.seconds(1, rows))
        self._owing = (width, elapsed_s) if owes else None
        if not owes:
            self.pace.note(width, elapsed_s, rows)


class DecodeLoop:
    """Runs the passes of replies whose prompts are evaluated up to their last token.

    Args:
        model: runs all passes; with a draft model, both models as from `BothModels`.
        seat: holds the rows; a Group or a Solo.
        pace: decides how many draft tokens are worth checking.
        dtype: the type of the logits for sampling; None: the model's type.
        raises: raise errors of samplers and processors, and do not check whether logits are numbers. False: each error
            becomes the `failure` of its reply.
        always_asks: ask the draft model whenever no other draft is proposed.
    """

    def __init__(
        self,
        model: Any,
        seat: Any,
        pace: DraftPace,
        *,
        dtype: mx.Dtype | None = mx.float32,
        raises: bool = False,
        always_asks: bool = False,
    ) -> None:
        self.seat, self.times = seat, PassTimes(pace)
        self._model, self._dtype, self._raises, self._always_asks = model, dtype, raises, always_asks
        self._steps = 0
        self._asks_from = 0  # the first step in which the draft model is asked

    def propose(self, replies: Sequence[Decoding], read: Callable[[Sequence[Any]], Sequence[Any]]) -> Drafts:
        """Choose the draft tokens that the next pass checks for these replies.

        `read` reads pending tokens, and returns the replies that continue. It is called only if drafts may save time.
        """
        drafts, owed = self._worthwhile(replies), any(each.row.owed_tokens for each in replies)
        if (drafts or owed) and any(each.unread for each in replies):
            drafts = self._worthwhile(read(replies))
        return drafts

    def run(self, replies: Sequence[Decoding], drafts: Drafts, take: Take) -> None:
        """Dispatch one pass over the next token of each reply, in row order, and over the `drafts` after this token.

        `take` is called for each token that a check gives. The token of a step stays unread.
        """
        drafts = self._asked(replies, drafts)
        if drafts or any(each.row.owed_tokens for each in replies):
            self._check(replies, drafts, take)
        else:
            logits = self.seat.step(self._model, [each.row for each in replies], next_tokens(replies))
            self.choose(replies, logits)
        self._steps += 1
        if self._steps % RELEASE_INTERVAL_PASSES == 0:
            mx.clear_cache()

    def choose(self, replies: Sequence[Decoding], logits: mx.array) -> None:
        """Dispatch the choice of each reply's next token from logits (N, T, V)."""
        last = logits[:, -1] if self._dtype is None else logits[:, -1].astype(self._dtype)
        if processing := {row: each for row, each in enumerate(replies) if each.processors}:
            last = self._replace_rows(last, processing, lambda row, each: each.process(last[row : row + 1]))
        if guided := {row: each for row, each in enumerate(replies) if each.guidance and each.failure is None}:
            mx.async_eval(last)  # the forward pass runs while masks are made
            last = self._replace_rows(last, guided, lambda row, each: each.mask(last[row : row + 1]))
        # Log-probabilities take an exponential of each logit; the most likely token does not need them.
        is_scored = any(each.sampler is not None or each.has_logprobs for each in replies)
        logprobs: Any = log_probabilities(last) if is_scored else None
        # Rounded log-probabilities may be equal where logits differ; mlx-lm compares log-probabilities.
        tokens = greedy(logprobs if self._dtype is None and is_scored else last)
        if sampling := {row: each for row, each in enumerate(replies) if each.sampler and each.failure is None}:
            tokens = self._replace_rows(
                tokens, sampling, lambda row, each: sample(each.sampler, logprobs[row : row + 1])
            )
        predictions = Predictions(tokens, last, logprobs, is_checked=not self._raises)
        for row, reply in enumerate(replies):
            if reply.failure is None:
                reply.last = Sampled(predictions, row)
                reply.unread.append(reply.last)

    def _replace_rows(
        self, values: mx.array, replies: Mapping[int, Decoding], make: Callable[[int, Decoding], mx.array]
    ) -> mx.array:
        """Replace the rows of these replies by what `make` returns. An error of `make` fails only its reply."""
        own = {}
        for row, reply in replies.items():
            try:
                own[row] = make(row, reply)
            except Exception as error:
                if self._raises:
                    raise
                reply.failure = without_frames(error)
        return mx.concatenate([own.get(row, values[row : row + 1]) for row in range(len(values))]) if own else values

    def _accept(
        self,
        replies: Sequence[Decoding],
        drafts: Sequence[Sequence[int]],
        logits: mx.array,
        take: Take,
        said: dict[Decoding, list[int]],
    ) -> list[int]:
        """For each reply, choose the token after its next token and after each draft token, until a draft is wrong.

        Positions are processed in order, and none after a wrong draft. So samplers, processors and masks are called as
        often as without drafts, and draw as many random numbers. Adds the tokens that were taken to `said`.

        Args:
            logits: (N, T, V), after the next token and after each draft token.

        Returns:
            For each reply, how many of its tokens in the pass are right: the next token and the accepted drafts.
        """
        counts, going = [1] * len(replies), [*range(len(replies))]
        for at in range(logits.shape[1]):
            if not going:
                break
            self.choose([replies[row] for row in going], logits[mx.array(going), at : at + 1])
            before, going = going, []
            for row in before:
                reply = replies[row]
                if reply.failure is not None:
                    continue
                token, _, _ = reply.unread[0].read()
                goes_on = take(reply)
                if reply.failure is not None:
                    continue
                said[reply].append(token)
                is_right = token in drafts[row][at : at + 1]
                counts[row] += is_right
                going += [row] if is_right and goes_on else []
        return counts

    def _worthwhile(self, replies: Sequence[Decoding]) -> Drafts:
        """The proposals that are worth checking in one pass together. Those of the draft model are still guesses."""
        rows, pace, guesses = len(replies), self.times.pace, Drafts()
        proposals = Drafts()
        for each in replies:
            drafting = each.drafting
            if drafting is None or (not each.draft_tokens and drafting.rests()):
                continue
            if limit := each.most_drafted():
                proposals[each] = drafting.candidate(limit, rows)
                if each.draft_tokens and self._steps >= self._asks_from:
                    guesses[each] = pace.guess(min(limit, each.draft_tokens), rows)
        if not any(proposal.tokens for proposal in proposals.values()) and not guesses:
            return {}
        if rows > 1 and not self.seat.drafts_together(self._model):
            return {}
        seconds, count = pace.best([*proposals.values()], rows)
        if guesses:
            either = {
                each: max(its, guesses.get(each, NOTHING), key=Proposal.expected) for each, its in proposals.items()
            }
            if (found := pace.best([*either.values()], rows))[0] < seconds:
                proposals, count = either, found[1]
            elif self._always_asks and not count:
                proposals, count = guesses, MOST_PROPOSED
        return {each: proposal.first(count) for each, proposal in proposals.items() if count and proposal.tokens}

    def _asked(self, replies: Sequence[Decoding], drafts: Drafts) -> Drafts:
        """Replace guesses by tokens of the draft model. Return the drafts that are worth checking."""
        guessed = {each: len(proposal.tokens) for each, proposal in drafts.items() if proposal.source == MODEL}
        if not guessed:
            return drafts
        rows, pace, count = [each.row for each in replies], self.times.pace, max(guessed.values())
        began_s = time.perf_counter()
        said = self.seat.draft(self._model, rows, [each.next_token for each in replies], count)
        if not said:  # no room
            self._asks_from = self._steps + ROOMLESS_STEPS
            return {each: proposal for each, proposal in drafts.items() if each not in guessed}
        took_s, found = time.perf_counter() - began_s, dict(zip(replies, said, strict=True))
        for reply, most in guessed.items():
            tokens, probabilities = found[reply]
            drafts[reply] = pace.of_model(tokens[:most], probabilities)
        pace.note_drafted([drafts[each] for each in guessed], count, took_s, len(rows))
        if self._always_asks:
            return drafts
        counts = pace.length([*drafts.values()], len(rows))
        return {each: drafts[each].first(its) for each, its in zip(drafts, counts, strict=True) if its}

    def _check(self, replies: Sequence[Decoding], drafts: Drafts, take: Take) -> None:
        """Run one pass over the next token and the drafts of each reply, and take the tokens that it gives."""
        said: dict[Decoding, list[int]] = {each: [] for each in replies}

        rows, its = [each.row for each in replies], [drafts.get(each, NOTHING).tokens for each in replies]
        tokens = [[each.next_token, *draft] for each, draft in zip(replies, its, strict=True)]
        width = max(len(each) + row.owed_tokens for row, each in zip(rows, tokens, strict=True))
        began_s = time.perf_counter()
        counts = self.seat.check_drafts(
            self._model, rows, tokens, lambda logits: self._accept(replies, its, logits, take, said)
        )
        elapsed_s = time.perf_counter() - began_s
        self.times.note_check(width, len(rows), elapsed_s, owes=any(row.owed_tokens for row in rows))
        for reply, count in zip(replies, counts, strict=True):
            if reply.drafting is not None:
                proposal = drafts.get(reply, NOTHING)
                reply.drafting.choose(proposal, len(proposal.tokens))
                reply.drafting.advance(said[reply], count - 1)


def next_tokens(replies: Sequence[Decoding]) -> mx.array:
    """The tokens (N,) to evaluate next: each reply's last prediction, perhaps unread, or the prompt's last token."""
    last = [each.last for each in replies]
    of = None if last[0] is None else last[0].of
    if of is not None and [each and (each.of, each.row) for each in last] == [(of, at) for at in range(len(of.tokens))]:
        return of.tokens
    return mx.concatenate(
        [
            mx.array(reply.tokens[-1:]) if each is None else each.of.tokens[each.row : each.row + 1]
            for reply, each in zip(replies, last, strict=True)
        ]
    )


def log_probabilities(logits: mx.array) -> mx.array:
    """Return the pending log-probabilities (N, V) of logits (N, V), in their type."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def greedy(logits: mx.array) -> mx.array:
    """The most likely tokens (N,) of logits (N, V)."""
    return mx.argmax(logits, axis=-1)


def sample(sampler: Sampler | None, logprobs: mx.array) -> mx.array:
    """Sample a pending token (1,) from log-probabilities (1, V); without a sampler, the most likely. TypeError: no id.

    An id outside the vocabulary becomes -1: a forward pass can evaluate it, and the reply refuses it.
    """
    if sampler is None:
        return greedy(logprobs)
    chosen = sampler(logprobs)
    try:
        token = mx.array(chosen)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the sampler returned a {type(chosen).__name__}; wanted one token id.") from error
    if token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
        raise TypeError(f"the sampler returned {token.dtype} of shape {token.shape}; wanted one token id.")
    token = token.reshape(1).astype(mx.int32)
    found: mx.array = mx.where((token >= 0) & (token < logprobs.shape[-1]), token, -1)
    return found
