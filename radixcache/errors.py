"""Errors that callers of radixcache may see, each one a line that says what was found and what was wanted."""

from __future__ import annotations


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


class SessionClosedError(RadixCacheError):
    """The session was closed, or its live state was lost to an earlier failure."""


class SnapshotError(RadixCacheError, ValueError):
    """Snapshots or caches do not fit together: spans do not touch, shapes, dtypes or offsets differ."""


class UnsupportedCacheError(RadixCacheError, TypeError):
    """A layer's cache class has no adapter, or did not survive the round trip that an unknown class must pass."""
