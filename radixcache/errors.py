"""The errors that callers of radixcache may see; each message is one line: what was found, what was wanted."""

from __future__ import annotations

from typing import NoReturn


class RadixCacheError(Exception):
    """Base of the errors below."""


class BudgetFullError(RadixCacheError):
    """The byte budget cannot hold what a call needs. State may have been evicted; nothing else has changed.

    Attributes:
        budget_bytes, held_bytes: the budget; what open sessions, groups and pins hold of it.
        wanted_bytes: what the call needs in addition.
    """

    def __init__(self, budget_bytes: int, held_bytes: int, wanted_bytes: int) -> None:
        super().__init__(budget_bytes, held_bytes, wanted_bytes)
        self.budget_bytes, self.held_bytes, self.wanted_bytes = budget_bytes, held_bytes, wanted_bytes

    def __str__(self) -> str:
        return (
            f"{self.wanted_bytes} more bytes do not fit the budget of {self.budget_bytes} bytes: open sessions, groups "
            f"and pins hold {self.held_bytes} bytes. Close one of them, give a smaller capacity, or raise budget_bytes."
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
    """No room for more tokens in a group or a buffer of cells. Nothing has changed; the caller decides what goes.

    Attributes:
        capacity, used, free: tokens. If `free` >= `wanted`, defragmentation makes room.
        largest_free_run: the most free cells in a row; None in a group.
        wanted: tokens that were to be added.
    """

    def __init__(self, capacity: int, used: int, largest_free_run: int | None, wanted: int) -> None:
        super().__init__(capacity, used, largest_free_run, wanted)
        self.capacity, self.used, self.free = capacity, used, capacity - used
        self.largest_free_run, self.wanted = largest_free_run, wanted

    def __str__(self) -> str:
        if self.largest_free_run is None:
            return f"no room for {self.wanted} tokens: the rows hold {self.used} of {self.capacity}. Close a row."
        what = "Defragment." if self.wanted <= self.free else "Free a sequence or remove a range."
        return (
            f"no room for {self.wanted} tokens: {self.used} of {self.capacity} cells used, {self.free} free, "
            f"{self.largest_free_run} of them in a row. {what}"
        )


class CacheClosedError(RadixCacheError):
    """The cache was closed."""


class PolicyError(RadixCacheError):
    """An eviction policy failed. The call has still done its work; the cache evicts by LRU from then on.

    Attributes:
        policy, hook: names of the policy's class and of its method.
        reason: what it did.
    """

    def __init__(self, policy: str, hook: str, reason: str) -> None:
        super().__init__(policy, hook, reason)
        self.policy, self.hook, self.reason = policy, hook, reason

    def __str__(self) -> str:
        return f"policy {self.policy}: {self.hook}() {self.reason}. The cache evicts by LRU from now on."


class SessionClosedError(RadixCacheError):
    """The session or its cache was closed, or its live state was lost to an earlier failure."""


class ShiftError(RadixCacheError, TypeError):
    """The keys of a layer, or of a RoPE, cannot be rotated to other positions."""


class SnapshotError(RadixCacheError, ValueError):
    """Snapshots or caches do not fit together: spans do not touch, shapes, dtypes or offsets differ."""


class StoreError(RadixCacheError):
    """A folder cannot be used as a store on disk."""


class UnsupportedCacheError(RadixCacheError, TypeError):
    """A layer's cache class has no adapter, or did not survive the round trip that an unknown class must pass."""


def refuse_copy(self: object, _: object = None) -> NoReturn:
    """`__reduce_ex__` of objects that own state: copy, deepcopy and pickle raise TypeError."""
    raise TypeError(f"a {type(self).__name__} cannot be copied or pickled, because it owns state.")


def described(error: BaseException) -> str:
    """The repr of an exception, or its type if the repr raises."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__
