"""Tiers: several stores as one, looked up in order, such as a disk and behind it a server that machines share.

    disk       |------|------|                     the longest chain that any of them has; each block of it is read
    Redis      |------|------|------|------|--|    from the first store that has it
    read        disk   disk   Redis  Redis

  M1  A link says which store its block is read from, and its checkpoint, if it ends with one.
  M2  A store that is down, full or stopped keeps nobody from writing to the others.

What came from one store is put to the others when a cache keeps it, at the moment at which each is written: whoever is
asked first so comes to have what was used here, and whoever is shared what was made here. Methods may be called from
any thread. Never imports MLX.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from radixcache.stores.block import Block, Identity, Kind
from radixcache.stores.index import Link, chain_end
from radixcache.stores.store import Store, StoreStats, WriteOn, total
from radixcache.tokens import Keys


class Tiers:
    """Stores, the first one asked first.

    Attributes:
        stores: as given.
        tiers: what they are called, numbered where several are called the same.
        write_on: the moment of the first; `moments` has the others.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.write_on: WriteOn = self.stores[0].write_on
        self.takes_cuts = False  # what one has in part another one may lack
        seen: Counter[str] = Counter()
        names = []
        for name in (name for store in self.stores for name in store.tiers):
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
        self.tiers = tuple(names)

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """The longest chain of any store, of equals the first one's; who is behind one that has all is not asked."""
        longest: list[Link] = []
        for store in self.stores:
            chain = store.match(identity, namespace, tokens, grid=grid, at_checkpoints=at_checkpoints)
            longest = max(longest, chain, key=chain_end)
            if chain_end(longest) == len(tokens):
                break
        return [link._replace(tier=self._source(link.key, _kinds(link))) for link in longest]

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        options = {"grid": grid, "at_checkpoints": at_checkpoints}
        return max((store.known(identity, namespace, tokens, **options) for store in self.stores), key=chain_end)  # type: ignore[arg-type]

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        return next(filter(None, (store.file_bytes(key, kind) for store in self.stores)), 0)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether no store that takes anything lacks it."""
        return all(store.holds(key, kind) or not store.accepts(0) for store in self.stores)

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        kinds: dict[bytes, list[Kind]] = {}
        for key, kind in wanted:
            kinds.setdefault(key, []).append(kind)
        for source, its in groupby(wanted, key=lambda place: self._source(place[0], kinds[place[0]])):
            yield from self.stores[source].read(list(its))

    def accepts(self, nbytes: int) -> bool:
        return any(store.accepts(nbytes) for store in self.stores)

    def put(self, block: Block) -> bool:
        """Have all that lack a block write it; whether any of them has it then, or is about to."""
        taken = [store.put(block) for store in self.stores]
        return any(taken) or any(store.holds(block.head.key, block.head.kind) for store in self.stores)

    def remove(self, keys: Iterable[bytes]) -> None:
        gone = list(keys)
        for store in self.stores:
            store.remove(gone)

    def flush(self, timeout_s: float | None = None) -> bool:
        return self._each("flush", timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        return self._each("close", timeout_s)

    @property
    def stats(self) -> StoreStats:
        """Of all of them, added up; why something was dropped or failed says where."""
        return total(dict(zip(self.tiers, (store.stats for store in self.stores), strict=True)))

    def check(self) -> None:
        for store in self.stores:
            store.check()

    def _source(self, key: bytes, kinds: Collection[Kind]) -> int:
        """The first store that all this can be read from; else one from which some can."""
        has = [sum(store.file_bytes(key, kind) > 0 for kind in kinds) for store in self.stores]
        return has.index(max(has))

    def _each(self, do: str, timeout_s: float | None) -> bool:
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        left_s = (None if ends_s is None else max(0.0, ends_s - time.monotonic()) for _ in self.stores)
        done = [getattr(store, do)(left) for store, left in zip(self.stores, left_s, strict=True)]
        return all(done)


def joined(store: Store | Sequence[Store]) -> Store:
    """One store of one or several. ValueError: there is none."""
    if not isinstance(store, Sequence):
        return store
    if not store:
        raise ValueError("store is an empty list; name a store, or leave it out.")
    return store[0] if len(store) == 1 else Tiers(store)


def moments(store: Store) -> dict[WriteOn, Store]:
    """What is written at each moment."""
    found: dict[WriteOn, list[Store]] = {}
    for each in store.stores if isinstance(store, Tiers) else [store]:
        found.setdefault(each.write_on, []).append(each)
    return {moment: joined(its) for moment, its in found.items()}


def _kinds(link: Link) -> list[Kind]:
    return ["block", "checkpoint"] if link.has_checkpoint else ["block"]
