"""Errors that callers of radixcache may see, each one a line that says what was found and what was wanted."""

from __future__ import annotations


class RadixCacheError(Exception):
    """Base of the errors below."""


class BudgetFullError(RadixCacheError):
    """The byte budget cannot hold what a call needs, all that is evictable gone. Nothing but that has changed.

    Attributes:
        budget_bytes, held_bytes: the budget; what open sessions, groups and pins hold of it.
        wanted_bytes: what was asked for on top.
    """

    def __init__(self, budget_bytes: int, held_bytes: int, wanted_bytes: int) -> None:
        super().__init__(budget_bytes, held_bytes, wanted_bytes)
        self.budget_bytes, self.held_bytes, self.wanted_bytes = budget_bytes, held_bytes, wanted_bytes

    def __str__(self) -> str:
        return (
            f"{self.wanted_bytes} more bytes do not fit the budget of {self.budget_bytes}: open sessions, groups and "
            f"pins hold {self.held_bytes}. Close a row, give a smaller capacity, or a larger budget_bytes."
        )


class CacheBusyError(RadixCacheError):
    """Every live slot is taken by an open session.

    Attributes:
        holders: a description of the session on each slot, in the order of the slots.
    """

    def __init__(self, message: str, holders: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.holders = holders


class CacheFullError(RadixCacheError):
    """No room for more tokens in a buffer of cells. Nothing has changed; the caller decides what goes.

    Attributes:
        capacity, used, free: cells in the buffer; those that hold a token, and none. From `wanted` free ones up,
            defragmentation makes room.
        largest_free_run, wanted: the most free cells in a row; cells that were asked for.
    """

    def __init__(self, capacity: int, used: int, largest_free_run: int, wanted: int) -> None:
        super().__init__(capacity, used, largest_free_run, wanted)
        self.capacity, self.used, self.free = capacity, used, capacity - used
        self.largest_free_run, self.wanted = largest_free_run, wanted

    def __str__(self) -> str:
        what = "Defragment." if self.wanted <= self.free else "Free a sequence or remove a range."
        return (
            f"no room for {self.wanted} tokens: {self.used} of {self.capacity} cells used, {self.free} free, "
            f"{self.largest_free_run} of them in a row. {what}"
        )


class SessionClosedError(RadixCacheError):
    """The session was closed, or its live state was lost to an earlier failure."""


class ShiftError(RadixCacheError, TypeError):
    """The keys of a layer, or of a RoPE, cannot be rotated to other positions; says which, and why."""


class SnapshotError(RadixCacheError, ValueError):
    """Snapshots or caches do not fit together: spans do not touch, shapes, dtypes or offsets differ."""


class UnsupportedCacheError(RadixCacheError, TypeError):
    """A layer's cache class has no adapter, or did not survive the round trip that an unknown class must pass."""


def described(error: BaseException) -> str:
    """An exception of somebody else's in words, also where it cannot describe itself."""
    try:
        return repr(error)
    except Exception:  # its own, while it is being told of
        return type(error).__name__
