"""Store: where a cache keeps state outside of memory: a DiskStore, RedisStore or SizedStore, or Tiers of them.

No method raises for a fault of a disk, a server or a stored file: the answer is a miss, and `stats` counts it.

    disk       |------|------|                     Tiers: the longest chain that any store has; each block is read
    Redis      |------|------|------|------|--|    from the first store that has it
    read        disk   disk   Redis  Redis

  M1  A link names the store from which its block, and its checkpoint if it has one, are read.
  M2  A store that is down, full or stopped does not stop writes to other stores.

A block that was read from one store is put into the others when their `write_on` says so. Methods may be called from
any thread. Never imports MLX.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from radixcache.stores.block import KINDS, Block, Identity, Kind, Place
from radixcache.stores.block_store import BlockStore, WriteOn
from radixcache.stores.index import Link, chain_end
from radixcache.tokens import Keys


class Tiers:
    """Several stores as one. They are asked in this order.

    Attributes:
        tiers: names of the stores, numbered if several have the same name.
    """

    takes_cuts = False  # one store may lack the part of a block that another has

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self.stores = tuple(stores)
        names = [name for store in self.stores for name in store.tiers]
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        self.tiers: tuple[str, ...] = tuple(
            name if n == 1 else f"{name} {n}" for name, n in zip(names, counts, strict=True)
        )

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """The longest chain of any store; of equal ones, the first. Later stores are not asked if all tokens match."""
        longest: list[Link] = []
        for store in self.stores:
            chain = store.match(identity, namespace, tokens, grid=grid, at_checkpoints=at_checkpoints)
            longest = max(longest, chain, key=chain_end)
            if chain_end(longest) == len(tokens):
                break
        kinds = (KINDS if link.has_checkpoint else KINDS[:1] for link in longest)
        return [link._replace(tier=self._source(link.key, its)) for link, its in zip(longest, kinds, strict=True)]

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, is_whole: bool = False
    ) -> list[Link]:
        chains = (store.known(identity, namespace, tokens, grid=grid, is_whole=is_whole) for store in self.stores)
        return max(chains, key=chain_end)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether every store that accepts blocks has this one."""
        return all(store.holds(key, kind) or not store.accepts(0) for store in self.stores)

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        kinds: dict[bytes, list[Kind]] = {}
        for key, kind in wanted:
            kinds.setdefault(key, []).append(kind)
        for source, its in groupby(wanted, key=lambda place: self._source(place[0], kinds[place[0]])):
            yield from self.stores[source].read(list(its))

    def accepts(self, nbytes: int) -> bool:
        return any(store.accepts(nbytes) for store in self.stores)

    def put(self, block: Block) -> bool:
        """Have every store that lacks the block write it. True: some store has it, or will write it."""
        taken = [store.put(block) for store in self.stores]
        return any(taken) or any(store.holds(*block.head.place) for store in self.stores)

    def remove(self, keys: Iterable[bytes]) -> None:
        gone = list(keys)
        for store in self.stores:
            store.remove(gone)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Flush all stores; `timeout_s` is for all of them together."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        left_s = (None if ends_s is None else max(0.0, ends_s - time.monotonic()) for _ in self.stores)
        return all(store.flush(its) for store, its in zip(self.stores, left_s, strict=True))

    def _source(self, key: bytes, kinds: Collection[Kind]) -> int:
        """The index of the store that has most of these kinds; if several have, of the first."""
        has = [sum(store.file_bytes(key, kind) > 0 for kind in kinds) for store in self.stores]
        return has.index(max(has))


#: What a cache accepts as a store. `BlockStore` says what each method does.
Store = BlockStore | Tiers


def joined(store: BlockStore | Sequence[BlockStore]) -> Store:
    """A store, or several as one. ValueError: the list is empty."""
    if not isinstance(store, Sequence):
        return store
    if not store:
        raise ValueError("store is an empty list; name a store, or leave it out.")
    return store[0] if len(store) == 1 else Tiers(store)


def moments(store: Store) -> dict[WriteOn, Store]:
    """For each `write_on`, the stores that are written then, as one store."""
    found: dict[WriteOn, list[BlockStore]] = {}
    for each in store.stores if isinstance(store, Tiers) else [store]:
        found.setdefault(each.write_on, []).append(each)
    return {moment: joined(its) for moment, its in found.items()}
