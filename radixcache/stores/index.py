"""Index: the blocks that a store has or will write, which block follows which, and the order of use. Opens no files.

    root key ──► block [0, 512) ──► block [512, 1024) ──► block [1024, 1300)
            │         └──► block [400, 512) ──► ...        after 400 tokens of its parent: its `cut`
            └──► block [0, 300) ──► ...                    siblings may begin with the same tokens

An entry is found by the key of its parent, its cut and its first token. The index holds all tokens of a block (2 KiB),
so a match can end inside a block.

  D1  In the order of use, a block comes before its parent. So no block follows the least recently used block.
  D2  `nbytes` is the sum of the sizes of all files.
  D3  Each entry has a file or waits to be written. `_below` holds each entry once, and nothing else.

`match` is O(tokens), with O(1) NumPy calls for each sibling that begins with the same token. `add` and `touch` are
O(blocks before the block). Not thread-safe: the store holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.stores.block import KINDS, Head, Kind
from radixcache.tokens import Keys, common_length


class Link(NamedTuple):
    """One block of a chain that matches a prompt.

    Attributes:
        start, end: the tokens of the prompt that match the block.
        block_end: where the block ends; after `end` if the match ends, or the next link begins, inside the block.
        block_bytes, checkpoint_bytes: sizes of the files; 0: there is no such file.
        tier: index of the store that the block is read from.
    """

    key: bytes
    start: int
    end: int
    block_end: int
    block_bytes: int
    checkpoint_bytes: int
    tier: int = 0

    @property
    def is_whole(self) -> bool:
        return self.end == self.block_end

    @property
    def has_checkpoint(self) -> bool:
        """Whether the match reaches the end of the block, and a checkpoint is stored there."""
        return self.is_whole and self.checkpoint_bytes > 0


def chain_end(chain: Sequence[Link]) -> int:
    return chain[-1].end if chain else 0


@dataclass(slots=True, eq=False)
class IndexEntry:
    """A block. `file_bytes` has the size of the file of each kind; 0: the file waits to be written."""

    key: bytes
    parent: bytes
    tokens: NDArray[np.int32] | Keys
    grid: int
    cut: int
    used_ns: int
    file_bytes: dict[Kind, int] = field(default_factory=dict)


class Index:
    """The blocks of a store. A file that does not exist, or waits to be written, has 0 bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        #: By key, the least recently used first.
        self._entries: OrderedDict[bytes, IndexEntry] = OrderedDict()
        self._below: dict[_Place, dict[bytes, IndexEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def file_bytes(self, key: bytes, kind: Kind) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.file_bytes.get(kind, 0)

    def count(self, kind: Kind) -> int:
        return sum(entry.file_bytes.get(kind, 0) > 0 for entry in self._entries.values())

    def add(self, head: Head, nbytes: int, used_ns: int) -> None:
        """Note a file and its last use. `nbytes` is 0: the file waits to be written."""
        nbytes = nbytes or self.file_bytes(head.key, head.kind)
        entry = self._entries.get(head.key)
        if entry is None:
            small = np.iinfo(np.int32)
            is_narrow = bool(((head.tokens >= small.min) & (head.tokens <= small.max)).all())
            tokens = head.tokens.astype(np.int32) if is_narrow else head.tokens.copy()
            entry = self._entries[head.key] = IndexEntry(head.key, head.parent, tokens, head.grid, head.cut, used_ns)
            self._below.setdefault(_place(entry), {})[head.key] = entry
        self.nbytes += nbytes - entry.file_bytes.get(head.kind, 0)
        entry.file_bytes[head.kind] = nbytes
        self.touch(head.key, used_ns)

    def drop(self, key: bytes, *kinds: Kind) -> None:
        """Forget the files of a block, of these kinds; no kind given: all. A file that is not there is no error."""
        entry = self._entries.get(key)
        if entry is None:
            return
        self.nbytes -= sum(entry.file_bytes.pop(kind, 0) for kind in kinds or KINDS)
        if not entry.file_bytes:
            del self._entries[key]
            del self._below[_place(entry)][key]
            if not self._below[_place(entry)]:
                del self._below[_place(entry)]

    def touch(self, key: bytes, used_ns: int) -> None:
        """Note a use of a block and of all blocks before it."""
        entries = self._entries
        entry = entries.get(key)
        while entry is not None:
            if entry.used_ns < used_ns:
                entry.used_ns = used_ns
            entries.move_to_end(entry.key)
            entry = entries.get(entry.parent)

    def used_ns(self, key: bytes) -> int:
        """When a block was used last; 0: not known."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.used_ns

    def path(self, key: bytes) -> list[IndexEntry]:
        """The known blocks up to this one, in order."""
        path = []
        while (entry := self._entries.get(key)) is not None:
            path.append(entry)
            key = entry.parent
        return path[::-1]

    def oldest(self) -> IndexEntry | None:
        return next(iter(self._entries.values()), None)

    def match(
        self,
        root: bytes,
        tokens: Keys,
        grid: int = 0,
        at_checkpoints: bool = False,
        *,
        least_bytes: int = 1,
        is_whole: bool = False,
    ) -> list[Link]:
        """The longest chain below `root` that these tokens begin with.

        Args:
            grid: only blocks of this grid; 0: any.
            at_checkpoints: end the chain at a checkpoint.
            least_bytes: 1: only stored blocks; 0: also blocks that wait to be written.
            is_whole: only blocks whose tokens all match.
        """
        found: tuple[int, _Chain | None] = (0, None)
        open_ends: list[tuple[bytes, int, int, _Chain | None]] = [(root, 0, 0, None)]
        while open_ends:
            parent, cut, start, before = open_ends.pop()
            siblings = self._below.get((parent, cut, int(tokens[start]))) if start < len(tokens) else None
            for entry in siblings.values() if siblings else ():
                if entry.file_bytes.get("block", -1) < least_bytes or grid not in (0, entry.grid):
                    continue
                end = start + common_length(entry.tokens, tokens[start : start + len(entry.tokens)])
                at_end = end == start + len(entry.tokens)
                if is_whole and not at_end:
                    continue
                chain = before, entry, start, end
                open_ends.append((entry.key, 0 if at_end else end - start, end, chain))
                if end > found[0] and (not at_checkpoints or (at_end and entry.file_bytes.get("checkpoint"))):
                    found = end, chain
        links, last = [], found[1]
        while last is not None:
            last, entry, start, end = last
            sizes, block_end = entry.file_bytes, start + len(entry.tokens)
            links.append(Link(entry.key, start, end, block_end, sizes["block"], sizes.get("checkpoint", 0)))
        return links[::-1]

    def check(self) -> None:
        """Assert D1 to D3."""
        place = {key: number for number, key in enumerate(self._entries)}
        for key, entry in self._entries.items():
            assert place[key] < place.get(entry.parent, len(place)), (key.hex(), entry.parent.hex())
            assert entry.file_bytes and self._below[_place(entry)][key] is entry, key.hex()
        assert self.nbytes == sum(sum(entry.file_bytes.values()) for entry in self._entries.values())
        assert sum(map(len, self._below.values())) == len(self._entries) and all(self._below.values())


#: The chain before, the next block, and the start and end of its match.
_Chain = tuple["_Chain | None", IndexEntry, int, int]
#: Key of the parent, cut, and first token.
_Place = tuple[bytes, int, int]


def _place(entry: IndexEntry) -> _Place:
    return entry.parent, entry.cut, int(entry.tokens[0])
