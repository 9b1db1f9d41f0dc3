"""Conversations as Turn sees them: the last user of entries, the size of a turn, the ends that continuations cut off.

Sizes are in units of the typical first turn, so keys may be tokens or blocks, and ticks may have any length.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry

#: Kind of request, turn, size.
Class = tuple[str, str, str]

#: Bounds of tiny, short and long first turns, and of a small growth, in units of the typical first turn.
TINY, SHORT, LONG, SMALL_GROWTH = 0.25, 1.6, 6.4, 0.45
#: Class of a request that is not settled.
UNSETTLED: Class = ("", "", "")
#: How many first turns are remembered.
FIRST_TURNS = 512


@dataclass(slots=True, eq=False)
class Request:
    """The last user of some entries: a request, or for a checkpoint its own last use.

    A request is settled when the next one comes: then its class is known, and whether it continues `previous`.

    Attributes:
        start, end: the request added [start, end).
        stored_end: how much of its path is still stored.
        holds: entries that no later request used, by id.
        passed: the entries that it found stored; empty once it is settled.
        previous: the last user of the deepest entry that it found, until it is settled.
        takes_up: it found half of what `previous` added.
        reaches_end: it found all that is still stored of what `previous` added.
        found_alone: no other request branched off where it left the stored path.
        is_trusted: the caller gave its turn, or the turn follows from one that the caller gave.
        is_claimed: it is the `previous` of a request that is not settled.
        is_spent: a later request continues it without its remaining entries.
    """

    tick: int
    start: int = 0
    end: int = 0
    stored_end: int = 0
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
    """Name a request's turn and size, in units of the typical first turn (a fading geometric mean)."""

    def __init__(self) -> None:
        self._log_sum = 0.0
        self._weight = 0.0
        self._found: deque[int] = deque()
        self._found_order: Any = SortedList()

    def classify(self, turn: int, start: int, end: int, continues: bool) -> tuple[str, str]:
        """(turn, size) of a request that found [0, start) of [0, end) stored."""
        if turn > 1:
            growth = "large" if end - start > self._typical * SMALL_GROWTH else "small"
            return str(turn) if turn <= 3 else "4-5" if turn <= 5 else "6+", growth if continues else "unknown"
        self._log_sum += math.log2(max(1, end)) - self._log_sum / 1024
        self._weight += 1.0 - self._weight / 1024
        usual = self._found_order[len(self._found_order) // 2] if self._found_order else start
        # A prefix that most recent first turns found stored is no branch.
        self._found.append(start)
        self._found_order.add(start)
        if len(self._found) > FIRST_TURNS:
            self._found_order.remove(self._found.popleft())
        if usual < start < end - 1:
            return "1", "branch"
        length = end / self._typical
        return "1", "huge" if length > LONG else "long" if length > SHORT else "short" if length > TINY else "tiny"

    @property
    def _typical(self) -> float:
        return 2.0 ** (self._log_sum / self._weight) if self._weight else 1.0


class Ends:
    """Tell whether the end of a prompt has no worth: continuations cut it off, and one eviction takes no more."""

    def __init__(self) -> None:
        self._cut_off_keys: float | None = None
        self._cut_keys: float | None = None

    @property
    def are_spent(self) -> bool:
        return bool(self._cut_off_keys and self._cut_keys and self._cut_keys < 1.5 * self._cut_off_keys)

    def cut_off(self, keys: int | None) -> None:
        """A continuation cut this many keys off its predecessor's end; None: the end was evicted before."""
        if keys is not None:
            self._cut_off_keys = _average(self._cut_off_keys, keys)

    def cut(self, keys: int) -> None:
        self._cut_keys = _average(self._cut_keys, keys)


def _average(old: float | None, new: float) -> float:
    """Exponential moving average over about 32 values."""
    return float(new) if old is None else old + (new - old) / 32.0
