"""DiskStore: blocks of state in a folder, under a byte budget, which no accident turns into a wrong answer.

    put ──► queue ──► one thread: encode, make room, write         match ──► index ──► read ──► check ──► block

  S1  What is read was written so: it has its checksum, its key is the digest of all tokens up to it, of the namespace
      and of the identity. Whatever else lies in the folder is a miss; it is set aside, counted and logged once.
  S2  The files of blocks take at most `budget_bytes`, and a block of each writing process more. What was used longest
      ago goes first, and never before what follows it. What is in the quarantine comes on top.
  S3  Nothing waits for a disk but `read` (and `match` for the heads that other processes have added).
  S4  A disk that is full or fails stops the writing, which is said once, and nothing else. No call raises for a disk.

Several processes may use one folder. All of its methods may be called from any thread. Never imports MLX.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from radixcache.errors import refuse_copy
from radixcache.stores.block import Block, Identity, Kind, root_key
from radixcache.stores.contents import STOPPED, Contents, DailyWrites, FileStoring
from radixcache.stores.files import Folder
from radixcache.stores.index import Link
from radixcache.stores.store import StoreStats, StoreTally, require_store_options
from radixcache.stores.store import WriteOn as WriteOn
from radixcache.stores.writer import Writer
from radixcache.tokens import Keys

#: Files that are read at a time, and so many ahead of the one that is asked for.
READERS = 2


class DiskStore(AbstractContextManager["DiskStore"]):
    """Blocks in a folder.

    Attributes:
        write_on: as given. The cache that uses the store acts on it.
        budget_bytes: as given.
    """

    tiers = ("disk",)
    takes_cuts = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget_bytes: int,
        write_budget_bytes_per_day: int | None = None,
        write_on: WriteOn = "eviction",
        secret: bytes | None = None,
        min_free_bytes: int = 1 << 30,
        queue_bytes: int = 256 << 20,
    ) -> None:
        """Open a folder, make it where there is none, and find out what is in it without reading any state.

        Args:
            budget_bytes: of all files of blocks.
            write_budget_bytes_per_day: written at most on a day (UTC), by all processes that have a limit; None: any.
            write_on: what a cache writes.
            secret: 16 to 64 bytes. With it nothing is read that was not written with it; without it a checksum finds
                accidents alone. What is written is in plain either way.
            min_free_bytes: left free on the disk.
            queue_bytes: of state that waits to be written, in memory.

        Raises:
            ValueError: an argument is out of range.
            StoreError: the folder cannot be made or read, holds something else, or was made with another secret.
        """
        if min(budget_bytes, min_free_bytes + 1, queue_bytes, write_budget_bytes_per_day or 1) < 1:
            raise ValueError("budgets of a DiskStore are in bytes, and 1 or more.")
        require_store_options(write_on, secret)
        self.write_on: WriteOn = write_on
        self.budget_bytes = budget_bytes
        self._tally = StoreTally()
        folder = Folder(path, secret, make=True)
        self._contents = Contents(folder, self._tally, secret)
        self._daily = DailyWrites(folder.path, write_budget_bytes_per_day)
        self._storing = FileStoring(
            folder,
            self._contents,
            self._daily,
            self._tally,
            budget_bytes=budget_bytes,
            min_free_bytes=min_free_bytes,
            secret=secret,
        )
        self._writer = Writer(self._storing.store, queue_bytes)
        self._refresh()
        self._storing.keep_budget()

    # What is there

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """The longest chain of stored blocks that these tokens (int64 keys) begin with; empty: there is none.

        Args:
            grid: only blocks of prefills of this step size that were cut nowhere else; 0: any.
            at_checkpoints: the longest chain up to a checkpoint, for models that resume nowhere else.
        """
        self._refresh()
        return self.known(identity, namespace, tokens, grid=grid, at_checkpoints=at_checkpoints)

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """As `match`, without a look at what other processes have added."""
        return self._contents.match(root_key(identity, namespace), tokens, grid, at_checkpoints)

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        """Bytes of a file; 0: it is not there."""
        return self._contents.file_bytes(key, kind)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether this is stored, or about to be."""
        return (key, kind) in self._writer or self.file_bytes(key, kind) > 0

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks were used, wherever their state was taken from: they are evicted later."""
        self._contents.touch(keys)

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        """The state of these keys, in order, each read and checked while the ones before it are used.

        None stands for what is not there any more or was found damaged; then it is no longer matched either. At most
        `READERS` blocks are in memory beside those that the caller keeps.
        """
        self.touch(dict.fromkeys(key for key, _ in wanted))
        ahead: deque[Future[Block | None]] = deque()
        with ThreadPoolExecutor(READERS, "radixcache-read") as pool:
            try:
                for key, kind in wanted:
                    if len(ahead) == READERS:
                        yield ahead.popleft().result()
                    ahead.append(pool.submit(self._contents.read, key, kind))
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    # Writing

    def accepts(self, nbytes: int) -> bool:
        """Whether it makes sense to copy out so many bytes of state now, to `put` them."""
        fits = nbytes <= min(self.budget_bytes, self._daily.left_bytes())
        return fits and not self._storing.stopped and self._writer.has_room(nbytes)

    def put(self, block: Block) -> bool:
        """Have a block written, some time; False: it is there, or it is dropped, and `stats` says why.

        The block before it has to be stored or put first: what nothing leads to is not written. Its buffers are held
        until it is written, and must not change.
        """
        if self.holds(block.head.key, block.head.kind):
            return False
        why_not = STOPPED if self._storing.stopped else ""
        if not why_not and not self._writer.offer(block):
            why_not = "the queue is full"
        if why_not:
            self._tally.drop(why_not)
        return not why_not

    def remove(self, keys: Iterable[bytes]) -> None:
        """Give blocks up whose state was found wrong, and with them what follows them: nothing leads there any more."""
        for key in keys:
            try:
                self._contents.remove(key)
            except OSError:
                self._tally.add(read_errors=1)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is written or dropped; False: not within this time."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush, and write nothing any more; what is stored can still be read. Doing it twice does nothing."""
        return self._writer.close(timeout_s)

    def __exit__(self, *_: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copy

    @property
    def stats(self) -> StoreStats:
        """Counts since the store was opened, and what there is now."""
        now = self._contents.now()
        waiting_bytes, stopped = self._writer.waiting_bytes, self._storing.stopped
        return self._tally.stats(**now, budget_bytes=self.budget_bytes, waiting_bytes=waiting_bytes, stopped=stopped)

    def check(self) -> None:
        """Assert the invariants of what is known of the folder."""
        self._contents.check()

    def _refresh(self) -> None:
        try:
            self._contents.refresh()
        except OSError:
            self._tally.add(read_errors=1)
