"""Whose turn it is: which request is admitted next, and whose prompt the next chunk of prefill goes to.

    waiting     in order of arrival; the first that may come in does
    prefilling  one chunk between two decode steps, to one of them
    decoding    all of them in every decode step

Prefill. Chunks go in turn to the request that came first and to the one with the least left to evaluate. First come,
first served alone would let one long document hold up everybody's first token; a chunk for each in turn would bring
those who came together their first tokens together, at the very end. Half of all chunks for the first come, a request
is through after at most twice the chunks of its own prompt and of those before it, however many shorter ones follow.

Admission. Nobody is overtaken for want of room: what does not fit waits, and those behind it too, so a large request
comes in as soon as enough of the running ones are through. One exception: a request that begins like a prompt which is
being prefilled right now, further than anything that it could share already, waits until that part is evaluated, and
then takes no room for it and no time. Those behind it that have nothing to wait for go on meanwhile.

This file never imports MLX, and knows no clock: the same calls give the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

# Tokens of a chunk. A second or less of a small model on slow cores, a few hundredths on a GPU: what holds up those
# who are being served.
PARALLEL_STEP_SIZE = 1024


class Prefilling(Protocol):
    """What is asked of a request that is being prefilled."""

    @property
    def number(self) -> int:
        """Order of arrival."""

    @property
    def remaining_tokens(self) -> int:
        """Tokens left to prefill."""


Prefiller = TypeVar("Prefiller", bound=Prefilling)
Candidate = TypeVar("Candidate")


class ChunkTurns:
    """Hands out chunks of prefill."""

    def __init__(self) -> None:
        self._first_comes_next = True

    def choose(self, prefilling: Sequence[Prefiller]) -> Prefiller:
        """Whose chunk is next; there is at least one."""
        first = min(prefilling, key=lambda each: each.number)
        shortest = min(prefilling, key=lambda each: (each.remaining_tokens, each.number))
        chosen = first if self._first_comes_next else shortest
        self._first_comes_next = chosen is not first
        return chosen


def admissible(
    waiting: Iterable[Candidate], fits: Callable[[Candidate], bool], gains: Callable[[Candidate], bool]
) -> Candidate | None:
    """The request that comes in next, of those that wait in order of arrival; None: nobody may.

    Args:
        fits: whether there is room for it.
        gains: whether it would share more if it waited.
    """
    for candidate in waiting:
        if not gains(candidate):
            return candidate if fits(candidate) else None
    return None
