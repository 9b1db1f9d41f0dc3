"""Disk: a store, or several, and what a cache's state is called there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from radixcache.stores.index import Link
from radixcache.stores.keys import Identity
from radixcache.stores.store import Store
from radixcache.tokens.keys import Keys


class Disk(NamedTuple):
    """Where a cache's state goes.

    Attributes:
        grid: an exact cache's step size, by which its blocks are marked, and others never taken; 0: any are.
        clock: seconds, by which prefill and reading are timed.
        block_tokens: of a block at most; None: as many as a segment of the tree has.
    """

    store: Store
    identity: Identity
    grid: int = 0
    clock: Callable[[], float] = time.perf_counter
    block_tokens: int | None = None

    def match(self, keys: Keys, namespace: str, *, at_checkpoints: bool = False) -> list[Link]:
        """As `Store.match`, of this cache's state."""
        return self.store.match(self.identity, namespace, keys, grid=self.grid, at_checkpoints=at_checkpoints)

    def known(self, keys: Keys, namespace: str) -> list[Link]:
        """As `Store.known`, of this cache's state."""
        return self.store.known(self.identity, namespace, keys, grid=self.grid)
