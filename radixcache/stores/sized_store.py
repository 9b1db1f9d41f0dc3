"""SizedStore: a store without files, of blocks that have sizes in place of state, for simulators.

    put ──► room, as DiskStore makes it ──► index      match ──► index, as DiskStore has it ──► read: what was put

What is found, written and evicted is decided by DiskStore's own code. What is put is written at once, and there is no
limit but the budget. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from radixcache.stores.block import BLOCK_TOKENS, Block, Identity, Kind, root_key
from radixcache.stores.contents import Contents, DailyWrites, FileStoring
from radixcache.stores.files import Folder, file_name
from radixcache.stores.index import Link
from radixcache.stores.store import StoreStats, StoreTally, WriteOn
from radixcache.tokens import Keys

#: Of a file beside its state, about: its tokens, 8 bytes each.
HEAD_BYTES = 8 * BLOCK_TOKENS


class SizedStore:
    """Blocks of sizes. Arguments and methods are those of DiskStore, of which it has what a cache calls.

    Args:
        on_read: told of the bytes of each block that is read.
    """

    tiers = ("disk",)
    takes_cuts = True

    def __init__(self, *, budget_bytes: int, write_on: WriteOn, on_read: Callable[[int], object]) -> None:
        self.write_on: WriteOn = write_on
        self.budget_bytes = budget_bytes
        self._on_read = on_read
        self._tally = StoreTally()
        self._folder = _NoFolder()
        self._contents = Contents(self._folder, self._tally, None)
        self._storing = FileStoring(
            self._folder,
            self._contents,
            DailyWrites(self._folder.path, None),
            self._tally,
            budget_bytes=budget_bytes,
            min_free_bytes=0,
            secret=None,
        )

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        return self._contents.match(root_key(identity, namespace), tokens, grid, at_checkpoints)

    known = match  # nobody else adds anything

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        return self._contents.file_bytes(key, kind)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        return self.file_bytes(key, kind) > 0

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        self._contents.touch(dict.fromkeys(key for key, _ in wanted))
        for key, kind in wanted:
            nbytes = self._contents.file_bytes(key, kind)
            self._on_read(nbytes)
            self._tally.add(read_files=nbytes > 0, read_bytes=nbytes)
            yield self._folder.blocks.get(file_name(key, kind))

    def accepts(self, nbytes: int) -> bool:
        return nbytes <= self.budget_bytes

    def put(self, block: Block) -> bool:
        if self.holds(block.head.key, block.head.kind):
            return False
        why_not = self._storing.place(block.head, [block], block.nbytes + HEAD_BYTES)
        if why_not:
            self._tally.drop(why_not)
        return not why_not

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._contents.remove(key)

    def flush(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def stats(self) -> StoreStats:
        return self._tally.stats(**self._contents.now(), budget_bytes=self.budget_bytes, waiting_bytes=0, stopped="")

    def check(self) -> None:
        self._contents.check()
        held = sum(block.nbytes + HEAD_BYTES for block in self._folder.blocks.values())
        assert held == self._contents.now()["stored_bytes"] <= self.budget_bytes, (held, self.budget_bytes)


class _NoFolder(Folder):
    """What the files of a folder would hold, by their names."""

    def __init__(self) -> None:
        self.path = Path()
        self.blocks: dict[str, Block] = {}

    def changed(self) -> Iterator[str]:
        return iter(())

    def write(self, name: str, parts: Iterable[Any]) -> None:
        (self.blocks[name],) = parts

    def remove(self, name: str) -> bool:
        return self.blocks.pop(name, None) is not None

    def used_ns(self, name: str) -> int:
        return 0

    def use(self, name: str, now_ns: int) -> None: ...

    def free_bytes(self) -> int:
        return 1 << 63
