"""The errors that callers of radixcache may see; each message is one line: what was found, what was wanted."""

from __future__ import annotations

import traceback
from typing import NoReturn, TypeVar

E = TypeVar("E", bound=BaseException)


class RadixCacheError(Exception):
    """Base of the errors below."""


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

    def __init__(self, message: str = "the cache is closed; make another PrefixCache.") -> None:
        super().__init__(message)


class NoRoomError(RadixCacheError, ValueError):
    """A prefix cannot be stored beside the open sessions and the pins. It may fit later."""


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


class RequestTooLargeError(RadixCacheError):
    """The live state of a request needs more bytes than there are; the byte budget never refuses a request.

    Attributes:
        needed_bytes: what the request needs while it runs.
        available_bytes: what it may have: with `is_limit` max_request_bytes, else what the device can spare.
    """

    def __init__(self, needed_bytes: int, available_bytes: int, is_limit: bool = False) -> None:
        super().__init__(needed_bytes, available_bytes, is_limit)
        self.needed_bytes, self.available_bytes, self.is_limit = needed_bytes, available_bytes, is_limit

    def __str__(self) -> str:
        limit = "max_request_bytes is" if self.is_limit else "the device can spare"
        advice = "raise max_request_bytes" if self.is_limit else "close other requests"
        return (
            f"the request needs {self.needed_bytes} bytes while it runs; {limit} {self.available_bytes} bytes. "
            f"Shorten it, or {advice}."
        )


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


def without_frames(error: E) -> E:
    """Take the tracebacks out of an error that is kept, and out of its causes; notes on the errors have their text.

    A traceback holds frames, and these hold arrays and often the keeper of the error: memory that nobody counts, and
    that only Python's collector frees.
    """
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each.__traceback__ is not None:
            each.add_note("".join(["raised at\n", *traceback.format_tb(each.__traceback__)]))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__]
    return error


def describe(error: BaseException) -> str:
    """The repr of an exception, or its type if the repr raises."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__
