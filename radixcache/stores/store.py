"""Store: what a cache asks of wherever its state is kept: DiskStore, RedisStore, SizedStore, and Tiers of several.

No method raises for what a disk, a server or somebody's bytes do: that is a miss, and `stats` counts it.

StoreStats: what a store has and what it did; Tally, which counts that, called by several threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Literal, Protocol, get_args

from radixcache.stores.block import Block, Identity, Kind
from radixcache.stores.index import Link
from radixcache.tokens import Keys


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


class StoreTally:
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


#: When a cache writes: what it evicts; what was used a second time; all that a request leaves when it closes.
WriteOn = Literal["eviction", "second_use", "close"]
WRITE_ON: tuple[WriteOn, ...] = get_args(WriteOn)


class Store(Protocol):
    """Blocks of state by the keys of their chains.

    Attributes:
        tiers: what it is called, such as "disk"; of several stores each, by `Link.tier`.
        write_on: when a cache writes; it is the cache that acts on it.
        takes_cuts: whether a block may go on from inside of another one (`Head.cut`).
    """

    @property
    def tiers(self) -> tuple[str, ...]: ...

    @property
    def write_on(self) -> WriteOn: ...

    @property
    def takes_cuts(self) -> bool: ...

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """The longest chain of stored blocks that these tokens begin with, also of those that others have added."""

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """As `match`, of what this process knows already: nothing is waited for."""

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        """Bytes that reading this takes, as far as this process knows; 0: it cannot be read."""

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether this is stored, or about to be: whether putting it is in vain."""

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        """The state of these keys, in order; None: it is not there any more, or was found wrong."""

    def accepts(self, nbytes: int) -> bool:
        """Whether it makes sense to copy out so many bytes of state now, to `put` them."""

    def put(self, block: Block) -> bool:
        """Have a block written, some time; False: it is there, or it is dropped."""

    def remove(self, keys: Iterable[bytes]) -> None:
        """Give blocks up whose state was found wrong."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is written or dropped; False: not within this time."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush, and write nothing any more."""

    @property
    def stats(self) -> StoreStats:
        """Counts since it was opened, and what there is now."""

    def check(self) -> None:
        """Assert the invariants."""


def require_store_options(write_on: str, secret: bytes | None) -> None:
    """Raise ValueError unless there is such a moment to write, and a secret has 16 to 64 bytes."""
    if write_on not in WRITE_ON:
        raise ValueError(f"write_on is {write_on!r}; wanted one of {', '.join(WRITE_ON)}.")
    if secret is not None and not 16 <= len(secret) <= blake2b.MAX_KEY_SIZE:
        raise ValueError(f"secret has {len(secret)} bytes; wanted 16 to {blake2b.MAX_KEY_SIZE}.")
