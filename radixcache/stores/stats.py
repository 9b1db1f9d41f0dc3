"""StoreStats: what a store has and what it did; Tally, which counts that, called by several threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class StoreStats:
    """Counts since a store was opened, and what there is now.

    Attributes:
        blocks, checkpoints: files of either kind, as far as this process knows.
        stored_bytes, budget_bytes: of these files, and at most.
        waiting_bytes: of state in memory that waits to be written.
        read_files, read_bytes, read_seconds: that were read and found right; seconds of several readers are added up.
        written_files, written_bytes, evicted_files, evicted_bytes: by this process.
        damaged_files: found to be no block, or not as it was written, and set aside.
        vanished_files: gone when they were to be read: another process evicted them.
        read_errors: files or folders that the system could not read.
        dropped: blocks that were put and not written, by the reason.
        stopped: why nothing is written any more, or now; empty: it is.
        failed_calls: of a server, by what went wrong.
    """

    blocks: int
    checkpoints: int
    stored_bytes: int
    budget_bytes: int
    waiting_bytes: int
    stopped: str
    dropped: dict[str, int] = field(default_factory=dict)
    read_files: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_files: int = 0
    written_bytes: int = 0
    evicted_files: int = 0
    evicted_bytes: int = 0
    damaged_files: int = 0
    vanished_files: int = 0
    read_errors: int = 0
    failed_calls: dict[str, int] = field(default_factory=dict)


def total(parts: Mapping[str, StoreStats]) -> StoreStats:
    """Of several stores, added up; words say which store they are about."""
    found: dict[str, object] = {}
    for each in fields(StoreStats):
        values = [(name, getattr(stats, each.name)) for name, stats in parts.items()]
        if each.name in ("dropped", "failed_calls"):
            found[each.name] = {f"{name}: {why}": count for name, its in values for why, count in its.items()}
        elif each.name == "stopped":
            found[each.name] = "; ".join(f"{name}: {why}" for name, why in values if why)
        else:
            found[each.name] = sum(value for _, value in values)
    return StoreStats(**found)  # type: ignore[arg-type]


class Tally:
    """Counts by the names of the fields above, and what was dropped by its reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def drop(self, why: str) -> None:
        with self._lock:
            self._dropped[why] += 1

    def fail(self, kind: str) -> None:
        with self._lock:
            self._failed[kind] += 1

    def stats(self, **now: object) -> StoreStats:
        """The counts, with what there is now."""
        with self._lock:
            found = {**self._counts, "dropped": dict(self._dropped), "failed_calls": dict(self._failed)}
            return StoreStats(**now, **found)  # type: ignore[arg-type]
