"""Disk: a store, and what a cache's state is called there."""

from __future__ import annotations

from typing import NamedTuple

from radixcache.stores.disk_store import DiskStore
from radixcache.stores.index import Link
from radixcache.stores.keys import Identity
from radixcache.tokens.keys import Keys


class Disk(NamedTuple):
    """Where a cache's state goes.

    Attributes:
        grid: an exact cache's step size, by which its blocks are marked, and others never taken; 0: any are.
    """

    store: DiskStore
    identity: Identity
    grid: int = 0

    def match(self, keys: Keys, namespace: str, *, at_checkpoints: bool = False) -> list[Link]:
        """As `DiskStore.match`, of this cache's state."""
        return self.store.match(self.identity, namespace, keys, grid=self.grid, at_checkpoints=at_checkpoints)
