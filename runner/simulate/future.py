"""Future: when each key of a trace is used next. What the offline policies know, and no server does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from policies import Entry
from runner.traces.request import TraceRequest

Keys = NDArray[np.int64]


class Future:
    """The next use of every key, kept up as the requests go by.

    Args:
        requests: the whole trace.
        last_key_of: the last key on the edge that an entry stands for; None when there is none any more.
    """

    def __init__(self, requests: Sequence[TraceRequest], last_key_of: Callable[[Entry], int | None]) -> None:
        self._requests = requests
        self._last_key_of = last_key_of
        self._following = _following(requests)
        self._next: dict[int, float] = {}

    def arrive(self, index: int) -> None:
        """Request `index` is about to be served: from now on its keys wait for the next request that uses them."""
        self._next.update(zip(self._requests[index].keys.tolist(), self._following[index], strict=True))

    def next_use(self, entry: Entry) -> float:
        """Index of the request that uses the end of the entry's edge next; infinity for never."""
        key = self._last_key_of(entry)
        return math.inf if key is None else self._next.get(key, math.inf)


def _following(requests: Sequence[TraceRequest]) -> list[list[float]]:
    """For each key of each request the index of the next request that uses it; infinity for none."""
    last: dict[int, float] = {}
    following: list[list[float]] = []
    for index in range(len(requests) - 1, -1, -1):
        keys = requests[index].keys.tolist()
        following.append([last.get(key, math.inf) for key in keys])
        last.update(dict.fromkeys(keys, float(index)))
    following.reverse()
    return following
