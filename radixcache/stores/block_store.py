"""BlockStore: lookup, write queue and counts of all stores. DiskStore, RedisStore and SizedStore are its backends.

    match ──► _look_up (backend) ──► index ──► links         put ──► queue ──► one thread: encode ──► _write (backend)

  W1  A block is written only if it is not stored yet and the block before it is stored. So a match can reach it.
  W2  Blocks are evicted only for a block that is then written, unless the disk fails.
  W3  The lock is held only for work in memory. For RedisStore, a "file" is a value in Redis.
  B1  The queue writes blocks in the order of `offer`, so the blocks before a block are written first.
  B2  At most `limit_bytes` of state wait, or one larger block. Further blocks are dropped; no caller waits.
  B3  A block that waits is not queued a second time.

Methods may be called from any thread. Never imports MLX.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any, Literal, Self, get_args

from radixcache.counters import Tally, counter, gauge
from radixcache.errors import refuse_copy
from radixcache.stores.block import KINDS, Block, Head, Identity, Kind, Place, root_key
from radixcache.stores.codec import encode
from radixcache.stores.index import Index, Link
from radixcache.tokens import Keys

logger = logging.getLogger(__name__)

#: What a cache writes: state that it evicts; state used a second time; all state of a request that closes.
WriteOn = Literal["eviction", "second_use", "close"]
WRITE_ON: tuple[WriteOn, ...] = get_args(WriteOn)
#: How many blocks are read at the same time.
READERS = 2


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and current values, as far as this process knows."""

    blocks: int = gauge("files", "Files of blocks.")
    checkpoints: int = gauge("files", "Files of checkpoints.")
    stored_bytes: int = gauge("bytes", "Bytes of all files.")
    budget_bytes: int = gauge("bytes", "Most bytes that the files may take.")
    waiting_bytes: int = gauge("bytes", "State in memory that waits to be written.")
    stopped: str = gauge("", "1 while the store writes nothing.")
    dropped: dict[str, int] = counter("blocks", "Blocks that were not written, by reason.", label="reason")
    read_files: int = counter("files", "Files that were read and found sound.")
    read_bytes: int = counter("bytes", "Bytes read.")
    read_seconds: float = counter("seconds", "Seconds spent reading, summed over readers.")
    written_files: int = counter("files", "Files that were written.")
    written_bytes: int = counter("bytes", "Bytes written.")
    evicted_files: int = counter("files", "Files removed to keep the budget.")
    evicted_bytes: int = counter("bytes", "Bytes removed to keep the budget.")
    damaged_files: int = counter("files", "Damaged files that were removed.")
    vanished_files: int = counter("files", "Files that were missing when they were read.")
    read_errors: int = counter("errors", "Files or folders that the system could not read.")
    failed_calls: dict[str, int] = counter("calls", "Failed calls to a server, by kind.", label="kind")


class WriteQueue:
    """Calls `write` for each block in one thread. Holds the state of a block until the block is written."""

    def __init__(self, write: Callable[[Block], None], limit_bytes: int) -> None:
        self._write, self._limit_bytes = write, limit_bytes
        self._thread = ThreadPoolExecutor(1, "radixcache-store")
        self._lock = threading.Lock()
        self._waiting: dict[Place, tuple[Future[None], int]] = {}
        self._is_closed = False
        self.waiting_bytes = 0

    def __contains__(self, place: Place) -> bool:
        return place in self._waiting

    def has_room(self, nbytes: int) -> bool:
        fits = not self._waiting or self.waiting_bytes + nbytes <= self._limit_bytes
        return fits and not self._is_closed

    def offer(self, block: Block) -> bool:
        """Take a block; False: there is no room, the block waits already, or the queue is closed."""
        place = block.head.place
        try:
            with self._lock:
                if place in self._waiting or not self.has_room(block.nbytes):
                    return False
                self._waiting[place] = self._thread.submit(self._write_next, block), block.nbytes
                self.waiting_bytes += block.nbytes
        except RuntimeError:  # the interpreter is about to exit and starts no thread: write here
            self._write(block)
        return True

    def flush(self, timeout_s: float | None) -> bool:
        with self._lock:
            writes = [write for write, _ in self._waiting.values()]
        return not wait(writes, timeout_s).not_done

    def close(self, timeout_s: float | None) -> bool:
        """Flush, drop the blocks that still wait and end the thread; False: the thread is still writing a block."""
        self._is_closed = True
        is_written = self.flush(timeout_s)
        with self._lock:
            for place, (write, _) in list(self._waiting.items()):
                if write.cancel():
                    self._forget(place)
        self._thread.shutdown(wait=is_written)
        return is_written

    def _write_next(self, block: Block) -> None:
        try:
            self._write(block)
        except Exception:  # a bug must not stop the blocks that follow
            logger.exception("a block could not be written")
        with self._lock:
            self._forget(block.head.place)

    def _forget(self, place: Place) -> None:
        _, nbytes = self._waiting.pop(place)
        self.waiting_bytes -= nbytes


def read_ahead(read: Callable[[Place], Block | None], wanted: Iterable[Place]) -> Iterator[Block | None]:
    """Call `read` for each place, up to `READERS` ahead of the caller, and yield the results in order."""
    ahead: deque[Future[Block | None]] = deque()
    with ThreadPoolExecutor(READERS, "radixcache-read") as pool:
        try:
            for place in wanted:
                if len(ahead) == READERS:
                    yield ahead.popleft().result()
                ahead.append(pool.submit(read, place))
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class BlockStore:
    """Lookup, writing, counts and secret of a store. A backend adds `read`, `accepts`, `_look_up`, `_write`, `_delete`.

    Attributes:
        write_on: when a cache writes; the cache acts on it.
        budget_bytes: the most that all files may take; 0: no limit.
    """

    tiers: tuple[str, ...] = ("disk",)
    takes_cuts = True
    #: The reason to count for a block that is dropped while `_stopped`.
    stopped_words = "writing has stopped"

    def __init__(
        self, write_on: WriteOn, secret: bytes | None = None, *, budget_bytes: int = 0, queue_bytes: int = 1
    ) -> None:
        """ValueError: write_on is unknown, or the secret does not have 16 to 64 bytes."""
        if write_on not in WRITE_ON:
            raise ValueError(f"write_on is {write_on!r}; wanted one of {', '.join(WRITE_ON)}.")
        if secret is not None and not 16 <= len(secret) <= blake2b.MAX_KEY_SIZE:
            raise ValueError(f"secret has {len(secret)} bytes; wanted 16 to {blake2b.MAX_KEY_SIZE}.")
        self.write_on: WriteOn = write_on
        self.budget_bytes = budget_bytes
        self._secret = secret
        self._tally = Tally()
        self._lock = threading.Lock()
        self._index = Index()
        self._queue = WriteQueue(self._write_or_count, queue_bytes)

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """The longest chain of stored blocks that these tokens (int64 keys) begin with; empty: none matches.

        Args:
            grid: only blocks with this `Head.grid`; 0: any.
            at_checkpoints: end the chain at a checkpoint, for models that resume only at checkpoints.
        """
        if not self._look_up(identity, namespace, tokens, grid):
            return []
        with self._lock:
            return self._index.match(root_key(identity, namespace), tokens, grid, at_checkpoints)

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, is_whole: bool = False
    ) -> list[Link]:
        """Like `match`, but include blocks that wait to be written, and do not look for blocks of other processes.

        `is_whole`: only blocks whose tokens all match.
        """
        with self._lock:
            return self._index.match(root_key(identity, namespace), tokens, grid, least_bytes=0, is_whole=is_whole)

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        """Bytes of a file; 0: it is not stored."""
        with self._lock:
            return self._index.file_bytes(key, kind)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether this block or checkpoint is stored or waits to be written."""
        return (key, kind) in self._queue or self.file_bytes(key, kind) > 0

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        """The blocks and checkpoints at these places, in order, each checked by `codec.decode`.

        None: the file is gone or damaged; `match` will not find it again.
        """
        raise NotImplementedError

    def accepts(self, nbytes: int) -> bool:
        """Whether `put` would accept a block with this many bytes of state now."""
        raise NotImplementedError

    def put(self, block: Block) -> bool:
        """Queue a block to be written; False: `holds` it already, or it is dropped, and `stats` counts why.

        Put the block before it first; else this block is not written. The buffers must not change.
        """
        if self.holds(*block.head.place):
            return False
        why_not = self.stopped_words if self._stopped else self._take(block)
        if why_not:
            self._tally.add_to("dropped", why_not)
        return not why_not

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks whose state was found wrong. The blocks that follow them can no longer be reached."""
        gone = list(keys)
        for key in gone:
            self._drop(key)
        self._delete(gone)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every block that was put is written or dropped; False: that takes longer than `timeout_s`."""
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush and stop writing; stored blocks can still be read. A second call does nothing."""
        return self._queue.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copy

    @property
    def stats(self) -> StoreStats:
        """Counters since the store was opened, and current values."""
        with self._lock:
            blocks, checkpoints = self._index.count("block"), self._index.count("checkpoint")
            held = (blocks, checkpoints, self._index.nbytes, self.budget_bytes)
        return StoreStats(*held, self._queue.waiting_bytes, self._stopped, **self._tally.counts())

    def check(self) -> None:
        """Assert D1 to D3 of the index."""
        with self._lock:
            self._index.check()

    @property
    def _stopped(self) -> str:
        """Why nothing is written now; empty: blocks are written."""
        return ""

    def _look_up(self, identity: Identity, namespace: str, tokens: Keys, grid: int) -> bool:
        """Update the index for a prompt; False: the answer is a miss."""
        return True

    def _write(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        """Write a file of these parts; returns "", or why it was not written. Runs in the writing thread."""
        raise NotImplementedError

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Delete the files of these blocks, which the index has dropped."""
        raise NotImplementedError

    def _take(self, block: Block) -> str:
        """Queue a block; returns "", or why it is dropped."""
        self._add(block.head, 0, 0)
        if self._queue.offer(block):
            return ""
        self._drop_unwritten(*block.head.place)
        return "the queue is full"

    def _write_or_count(self, block: Block) -> None:
        try:
            parts = encode(block, self._secret)
        except ValueError:
            why_not = "its head is too long"
        else:
            why_not = self._write(block.head, parts, sum(memoryview(part).nbytes for part in parts))
        finally:
            self._drop_unwritten(*block.head.place)
        if why_not:
            self._tally.add_to("dropped", why_not)

    def _add(self, head: Head, nbytes: int, used_ns: int) -> None:
        with self._lock:
            self._index.add(head, nbytes, used_ns)

    def _drop(self, key: bytes, *kinds: Kind) -> None:
        with self._lock:
            self._index.drop(key, *kinds)

    def _drop_unwritten(self, key: bytes, kind: Kind) -> None:
        with self._lock:
            if not self._index.file_bytes(key, kind):
                self._index.drop(key, kind)


class BudgetedStore(BlockStore):
    """Evicts the least recently used block first, but never before the blocks that follow it."""

    def touch(self, keys: Collection[bytes]) -> None:
        """Note a use of these blocks and of the blocks before them."""
        now_ns = time.time_ns()
        with self._lock:
            for key in keys:
                self._index.touch(key, now_ns)
        for key in keys:
            self._mark_used(key, now_ns)

    def _write(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        if self.file_bytes(*head.place):
            return "it is already stored"
        if not head.is_first and not self.file_bytes(head.before):
            return "the blocks before it are not stored"
        if nbytes > self.budget_bytes:
            return "it is larger than the budget"
        self.touch([head.before])
        if not self._make_room(nbytes, head.before):
            return "the blocks before it fill the budget"
        self._write_file(head, parts, nbytes)
        now_ns = time.time_ns()
        self._add(head, nbytes, now_ns)
        self._mark_used(head.key, now_ns)  # the clock of the file system may lag behind
        self._tally.add(written_files=1, written_bytes=nbytes)
        return ""

    def _make_room(self, nbytes: int, spared: bytes) -> bool:
        """Evict until `nbytes` more fit; False: only `spared` and the blocks before it are left."""
        while True:
            with self._lock:
                if self._index.nbytes + nbytes <= self.budget_bytes:
                    return True
                victim = self._index.oldest()
                if victim is None or victim in self._index.path(spared):
                    return False
                files = list(victim.file_bytes.items())
            used_ns = self._last_use_ns(victim.key)
            if used_ns > victim.used_ns:  # by another process
                with self._lock:
                    self._index.touch(victim.key, used_ns)
                continue
            for kind, freed_bytes in files:
                if self._delete_file(victim.key, kind):
                    self._tally.add(evicted_files=1, evicted_bytes=freed_bytes)
                self._drop(victim.key, kind)

    def _delete(self, keys: Sequence[bytes]) -> None:
        for key, kind in product(keys, KINDS):
            try:
                self._delete_file(key, kind)
            except OSError:
                self._tally.add(read_errors=1)

    def _write_file(self, head: Head, parts: Sequence[Any], nbytes: int) -> None:
        raise NotImplementedError

    def _delete_file(self, key: bytes, kind: Kind) -> bool:
        """False: another process has deleted the file."""
        raise NotImplementedError

    def _mark_used(self, key: bytes, now_ns: int) -> None:
        """Record a use where other processes see it."""

    def _last_use_ns(self, key: bytes) -> int:
        """The last use of a block by any process; 0: not known."""
        return 0
