"""Conversations as a policy sees them: who used entries last, how large a turn is, what continuations leave behind.

Nothing here knows what a key is worth in tokens or a tick in seconds: sizes are compared with the typical first turn.
All O(log n) or better.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry

#: Kind, turn and size of a request.
Class = tuple[str, str, str]

#: Bounds of tiny, short and long first turns, and of a small growth, in units of the typical first turn.
TINY, SHORT, LONG, SMALL_GROWTH = 0.25, 1.6, 6.4, 0.45
#: Class of a request while it is not known what it adds.
UNSETTLED: Class = ("", "", "")
#: First turns that are remembered to tell what all share from what only some do.
FIRST_TURNS = 512


@dataclass(slots=True, eq=False)
class Request:
    """Who used entries last: a request, or for a checkpoint its own last use.

    Attributes:
        start, end: what it added is [start, end); equal if it added nothing.
        kept_end: how much of its path is left.
        holds: entries that nobody used since, by id. passed: those that it found stored, until it is settled.
        previous: who used the deepest entry before, until it is settled whether this one `continues` it.
        takes_up, reaches_end: whether it found half of what `previous` added, or all that was left of it.
        found_alone: whether nobody else had branched off where it left what it found.
        is_trusted: its turn is the caller's word, or follows from it.
        is_claimed: it is the `previous` of a request that is not settled.
        is_spent: it was continued: what it still holds was left behind.
    """

    tick: int
    start: int = 0
    end: int = 0
    kept_end: int = 0
    turn: int = 1
    given_turn: int | None = None
    kind: str = ""
    class_key: Class = UNSETTLED
    holds: dict[int, Entry] = field(default_factory=dict)
    passed: list[Entry] = field(default_factory=list)
    previous: Request | None = None
    takes_up: bool = False
    reaches_end: bool = False
    found_alone: bool = False
    continues: bool = False
    has_added: bool = False
    is_trusted: bool = False
    is_claimed: bool = False
    is_watched: bool = False
    is_spent: bool = False


class Sizes:
    """Names a request's turn and size, in units of the typical first turn (a fading geometric mean)."""

    def __init__(self) -> None:
        self._log_sum = 0.0
        self._weight = 0.0
        self._found: deque[int] = deque()
        self._found_order: Any = SortedList()

    def classify(self, turn: int, start: int, end: int, continues: bool) -> tuple[str, str]:
        """(turn, size) of a request that found [0, start) of [0, end) stored."""
        if turn > 1:
            name = str(turn) if turn <= 3 else "4-5" if turn <= 5 else "6+"
            return (
                name,
                "unknown" if not continues else "large" if end - start > self._typical * SMALL_GROWTH else "small",
            )
        self._log_sum += math.log2(max(1, end)) - self._log_sum / 1024
        self._weight += 1.0 - self._weight / 1024
        usual = self._found_order[len(self._found_order) // 2] if self._found_order else start
        self._note_found(start)
        if usual < start < end - 1:
            return "1", "branch"
        length = end / self._typical
        return "1", "huge" if length > LONG else "long" if length > SHORT else "short" if length > TINY else "tiny"

    @property
    def _typical(self) -> float:
        return 2.0 ** (self._log_sum / self._weight) if self._weight else 1.0

    def _note_found(self, start: int) -> None:
        """Remember how much the last first turns found stored: what all share is no branch."""
        self._found.append(start)
        self._found_order.add(start)
        if len(self._found) > FIRST_TURNS:
            self._found_order.remove(self._found.popleft())


class Ends:
    """Whether the very end of a prompt is worth nothing: continuations cut it off, and trimming takes no more."""

    def __init__(self) -> None:
        self._cut_off_keys: float | None = None
        self._cut_keys: float | None = None

    @property
    def are_spent(self) -> bool:
        return bool(self._cut_off_keys and self._cut_keys and self._cut_keys < 1.5 * self._cut_off_keys)

    def cut_off(self, keys: int | None) -> None:
        """A continuation left this many keys of its predecessor's end behind; None: the end was trimmed before."""
        if keys is not None:
            self._cut_off_keys = _average(self._cut_off_keys, keys)

    def cut(self, keys: int) -> None:
        """An eviction took this many keys at once."""
        self._cut_keys = _average(self._cut_keys, keys)


def _average(old: float | None, new: float) -> float:
    """A fading average over about 32 values."""
    return float(new) if old is None else old + (new - old) / 32.0
