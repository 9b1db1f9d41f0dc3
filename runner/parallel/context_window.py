"""Which tokens of a conversation go when it is longer than the context. Plain arithmetic on offsets; never imports MLX.

    system | message | message | message | question | opening | reply ...
    stays    go first, whole, the oldest first        stays     stays

The beginning stays: the system prompt, or a few tokens where there is none, since models lean on the first ones
whatever they say (attention sinks; Xiao et al. 2023, Efficient Streaming Language Models). So do the opening of the
reply and the reply. The last message goes, token by token, only where all others are gone, as does what has no marks.

How much goes is a multiple of a share of the context, rounded up to the end of a message. A conversation that grows
turn by turn is therefore cut at one place for several turns, and what is stored of one turn is found by the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that stay at the beginning of a prompt without marks.
SINK_TOKENS = 4
# Tokens behind the last mark that stay at most: the opening of the reply.
OPENING_TOKENS = 16
# A quarter: what is left is most of the conversation, and a shift comes once in many replies.
FREE_SHARE = 0.25


class ContextError(ValueError):
    """A conversation cannot be cut to fit the context; the message has the numbers."""


@dataclass(frozen=True)
class Outline:
    """A prompt, as far as it matters what may go. Offsets are those of the whole prompt, before anything went.

    Attributes:
        length: tokens of the prompt.
        keep: so many tokens stay at its beginning.
        ends: where the messages behind them end, rising; the last one is the end of the question.
    """

    length: int
    keep: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, length: int, marks: Sequence[int], keep: int | None = None) -> "Outline":
        """Take the first mark for the end of the system prompt, unless `keep` says what stays.

        Raises:
            ValueError: `keep` is not in 0 to `length`.
        """
        inner = sorted(mark for mark in marks if mark > 0)
        if keep is None:
            keep = inner[0] if inner else min(SINK_TOKENS, length)
        elif not 0 <= keep <= length:
            raise ValueError(f"keep is {keep} tokens; wanted 0 to {length}, the length of the prompt.")
        return cls(length, keep, tuple(mark for mark in inner if mark > keep))

    @property
    def limit(self) -> int:
        """From here on nothing goes."""
        opening = min(OPENING_TOKENS, self.length - self.ends[-1]) if self.ends else 0
        return max(self.keep, self.length - max(opening, 1))


@dataclass(frozen=True)
class ContextWindow:
    """At most `tokens` tokens of a conversation at a time; what goes at once is a multiple of `free_share` of them.

    Raises:
        ValueError: fewer than 2 tokens, or a share that is not above 0 and at most 1.
    """

    tokens: int
    free_share: float = FREE_SHARE

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a context of {self.tokens} tokens; wanted at least 2.")
        if not 0 < self.free_share <= 1:
            raise ValueError(f"free_share is {self.free_share}; wanted more than 0 and at most 1.")

    @property
    def quantum(self) -> int:
        """What goes at once is a multiple of this."""
        return max(1, int(self.tokens * self.free_share))

    def excess(self, outline: Outline, length: int, room: int, dropped: int = 0) -> int:
        """How many tokens behind the first `outline.keep` have to go, so that `room` more find place.

        Args:
            length: tokens there are now, those of the reply among them.
            dropped: how many of the prompt are gone already.

        Raises:
            ContextError: what must stay leaves no such room.
        """
        if length + room <= self.tokens:
            return 0
        # Counted from the beginning of the conversation, so that the next turns are cut at the same place.
        least = dropped + length + room - self.tokens
        aim = -(-least // self.quantum) * self.quantum
        ends = [end - outline.keep for end in outline.ends[:-1] if end - outline.keep >= least]
        most = outline.limit - outline.keep
        if ends:
            return next((end for end in ends if end >= aim), ends[-1]) - dropped
        if most < least:
            raise ContextError(
                f"{length} tokens and {room} more do not fit {self.tokens}: the first {outline.keep} and the last "
                f"{length - (outline.limit - dropped)} stay, and the {most - dropped} between them are too few to go."
            )
        return min(aim, most) - dropped
