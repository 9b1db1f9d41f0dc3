"""SizedStore: a store for simulators, without files. Its blocks have sizes in place of state.

BudgetedStore decides what is found, written and evicted, as for DiskStore. `put` writes a block at once, and the budget
is the only limit. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from radixcache.stores.block import BLOCK_TOKENS, Block, Head, Kind, Place
from radixcache.stores.block_store import BudgetedStore, WriteOn

#: Bytes of a file besides the state, approximately: 8 for each token.
HEAD_BYTES = 8 * BLOCK_TOKENS


class SizedStore(BudgetedStore):
    """A store of sizes. `on_read` is called with the bytes of each block that is read."""

    def __init__(self, *, budget_bytes: int, write_on: WriteOn, on_read: Callable[[int], object]) -> None:
        super().__init__(write_on, budget_bytes=budget_bytes)
        self._on_read = on_read
        self._blocks: dict[Place, Block] = {}

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        self.touch(dict.fromkeys(key for key, _ in wanted))
        for place in wanted:
            nbytes = self.file_bytes(*place)
            self._on_read(nbytes)
            if nbytes:
                self._tally.add(read_files=1, read_bytes=nbytes)
            yield self._blocks.get(place)

    def accepts(self, nbytes: int) -> bool:
        return nbytes <= self.budget_bytes

    def check(self) -> None:
        super().check()
        held = sum(block.nbytes + HEAD_BYTES for block in self._blocks.values())
        assert held == self._index.nbytes <= self.budget_bytes, (held, self._index.nbytes, self.budget_bytes)

    def _take(self, block: Block) -> str:
        return self._write(block.head, [block], block.nbytes + HEAD_BYTES)

    def _write_file(self, head: Head, parts: Sequence[Any], nbytes: int) -> None:
        (self._blocks[head.place],) = parts

    def _delete_file(self, key: bytes, kind: Kind) -> bool:
        return self._blocks.pop((key, kind), None) is not None
