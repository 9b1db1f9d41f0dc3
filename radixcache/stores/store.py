"""Store: what a cache asks of wherever its state is kept: DiskStore, RedisStore, SizedStore, and Tiers of several.

No method raises for what a disk, a server or somebody's bytes do: that is a miss, and `stats` counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Literal, Protocol, get_args

from radixcache.stores.block import Block, Kind
from radixcache.stores.index import Link
from radixcache.stores.keys import Identity
from radixcache.stores.stats import StoreStats
from radixcache.tokens.keys import Keys

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
