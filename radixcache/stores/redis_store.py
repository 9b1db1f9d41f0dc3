"""RedisStore: blocks of state in a Redis or Valkey server, shared by all that ask it, which no accident makes wrong.

    put ──► queue ──► one thread: encode, write        match ──► look-ups ──► index ──► read ──► check ──► block

Keys, codec and checks are those on disk: what a file holds there is the value here. What is found is told by the tokens
of whoever asks, so state of another model, dtype, format or namespace is never met.

  V1  What is read was written so, as S1 of DiskStore says. All else is a miss, and is counted.
  V2  A request waits for at most three look-ups of `timeout_s`, and for reading `timeout_s` and a second for each
      16 MiB that it wants. A server that does not answer is left alone, and costs the requests after it nothing.
  V3  Nothing waits for writing. What the server evicts, or lets expire, is noticed when it is looked up or read.

All of its methods may be called from any thread. Never imports MLX.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from radixcache.errors import refuse_copy
from radixcache.stores.block import KINDS, Block, Identity, Kind, root_key
from radixcache.stores.codec import Damaged, decoded
from radixcache.stores.index import Link
from radixcache.stores.redis_calls import Call, Calls, Replies
from radixcache.stores.redis_contents import UNANSWERED, Names, RedisContents, RedisStoring, StoredPrompt
from radixcache.stores.store import StoreStats, StoreTally, WriteOn, require_store_options
from radixcache.stores.writer import Writer
from radixcache.tokens import Keys

#: Read in one round trip, or a single value that is larger; and how many of those are on their way.
BATCH_BYTES = 8 << 20
BATCHES = 2

#: Key and kind of a value.
Place = tuple[bytes, Kind]
Found = list[Block | Damaged | None]


class RedisStore(AbstractContextManager["RedisStore"]):
    """Blocks in a Redis or Valkey server; one server, not a cluster of them.

    Attributes:
        write_on: as given. The cache that uses the store acts on it.
    """

    tiers = ("redis",)

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = 7 * 86400.0,
        max_value_mib: float = 256,
        write_on: WriteOn = "close",
        secret: bytes | None = None,
        queue_bytes: int = 256 << 20,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect nowhere yet: a server that is down, or comes later, is no error.

        Args:
            url: redis://, rediss:// (TLS) or unix://, with user and password, as redis-py has it. It is shown nowhere.
            ttl_s: seconds after which what nobody used goes; None: nothing does unless the server evicts it.
            max_value_mib: of a block or a checkpoint; what is larger is neither written nor read.
            write_on: what a cache writes.
            secret: 16 to 64 bytes. With it nothing is found or read that was not written with it, and nobody without it
                can guess what a name stands for. What is stored is in plain either way.
            queue_bytes: of state that waits to be written, in memory.
            timeout_s: what a call may take, besides a second for each 16 MiB; the URL's `socket_timeout` goes before.
            clock: seconds, for the pauses in which a server that failed is left alone.

        Raises:
            ValueError: an argument is out of range, or the URL is none.
            StoreError: the package `redis` is not installed.
        """
        require_store_options(write_on, secret)
        if min(max_value_mib, timeout_s, queue_bytes) <= 0 or (ttl_s is not None and ttl_s < 1):
            raise ValueError(
                f"max_value_mib={max_value_mib}, timeout_s={timeout_s}, queue_bytes={queue_bytes}, ttl_s={ttl_s} of a "
                "RedisStore; wanted more than 0, and a ttl_s of 1 or more seconds, or None."
            )
        self.write_on: WriteOn = write_on
        self.takes_cuts = False  # a prompt is told of blocks by its own tokens, and of the rest of one it has none
        self._max_bytes, self._secret = int(max_value_mib * (1 << 20)), secret
        whole_s = None if ttl_s is None else int(ttl_s)
        self._tally = StoreTally()
        self._calls = Calls(url, timeout_s, clock, self._tally)
        self._names = Names(secret)
        self._contents = RedisContents(self._calls, self._names, self._tally, whole_s, self._max_bytes)
        storing = RedisStoring(self._calls, self._names, self._contents, self._tally, whole_s, self._max_bytes, secret)
        self._writer = Writer(storing.store, queue_bytes)

    def __repr__(self) -> str:
        return f"<RedisStore: {len(self._contents)} blocks known{', left alone' if self._calls.is_down else ''}>"

    # What is there

    def match(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """As `DiskStore.match`, of blocks of this grid alone; it ends where the server has evicted one in between.

        Where several blocks part within the same 64 tokens, it is the one that was written last that is found.
        """
        is_asked = len(tokens) > 0 and self._calls.is_up()
        if not is_asked or not self._contents.look_up(StoredPrompt(identity, namespace, tokens, grid)):
            return []
        return self.known(identity, namespace, tokens, grid=grid, at_checkpoints=at_checkpoints)

    def known(
        self, identity: Identity, namespace: str, tokens: Keys, *, grid: int = 0, at_checkpoints: bool = False
    ) -> list[Link]:
        """As `match`, without asking the server."""
        return self._contents.match(root_key(identity, namespace), tokens, grid, at_checkpoints)

    def file_bytes(self, key: bytes, kind: Kind = "block") -> int:
        """Bytes of a value; 0: none is known."""
        return self._contents.file_bytes(key, kind)

    def holds(self, key: bytes, kind: Kind = "block") -> bool:
        """Whether this is known to be stored, or about to be."""
        return (key, kind) in self._writer or self.file_bytes(key, kind) > 0

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        """The state of these keys, in order, as `DiskStore.read`; one batch comes while the one before it is used."""
        sizes = [self.file_bytes(*place) for place in wanted]
        ends_s = time.monotonic() + self._calls.limit_s(sum(sizes))
        ahead = deque[tuple[Sequence[Place], Call[Found] | None]]()
        try:
            for batch, expected in _batches(wanted, sizes):
                asked = [("HGET", self._names.of_block(key), kind) for key, kind in batch]
                ahead.append((batch, self._calls.begin(asked, partial(self._checked, batch, expected), ends_s)))
                if len(ahead) == BATCHES:
                    yield from self._taken(*ahead.popleft())
            while ahead:
                yield from self._taken(*ahead.popleft())
        finally:
            for _, call in ahead:
                if call is not None:
                    call.give_up()

    # Writing

    def accepts(self, nbytes: int) -> bool:
        """Whether it makes sense to copy out so many bytes of state now, to `put` them."""
        return nbytes <= self._max_bytes and not self._calls.is_down and self._writer.has_room(nbytes)

    def put(self, block: Block) -> bool:
        """Have a block written, some time; False: it is there, or it is dropped, and `stats` says why.

        As `DiskStore.put`; what comes before it has to be known to this process.
        """
        if self.holds(block.head.key, block.head.kind):
            return False
        why_not = UNANSWERED if self._calls.is_down else ""
        if not why_not and not self._writer.offer(block):
            why_not = "the queue is full"
        if why_not:
            self._tally.drop(why_not)
        return not why_not

    def remove(self, keys: Iterable[bytes]) -> None:
        """Give blocks up whose state was found wrong, for all that share the server."""
        gone = list(keys)
        for key in gone:
            self._contents.drop(key, *KINDS)
        if gone:
            self._calls.ask([("DEL", *map(self._names.of_block, gone))])

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is written or dropped; False: not within this time."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush, and write nothing any more; what is stored can still be read. Doing it twice does nothing."""
        is_written = self._writer.close(timeout_s)
        self._calls.close()
        return is_written

    def __exit__(self, *_: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copy

    @property
    def stats(self) -> StoreStats:
        """Counts since the store was opened, and what is known of the server; its budget is not, and shows as 0."""
        stopped = UNANSWERED if self._calls.is_down else ""
        now = self._contents.now()
        return self._tally.stats(**now, budget_bytes=0, waiting_bytes=self._writer.waiting_bytes, stopped=stopped)

    def check(self) -> None:
        """Assert the invariants of what is known of the server."""
        self._contents.check()

    # Reading

    def _checked(self, batch: Sequence[Place], expected: Sequence[int], replies: Replies) -> Found:
        """The blocks that values hold, or what is wrong with them; in the thread that has read them."""
        return [self._block(*each) for each in zip(batch, expected, replies, strict=True)]

    def _block(self, place: Place, nbytes: int, value: bytes | None) -> Block | Damaged | None:
        if value is None or not nbytes:
            return None
        try:
            if len(value) != nbytes:
                raise Damaged(f"it has {len(value)} bytes, and should have {nbytes}")
            block = decoded(memoryview(value), self._secret)
            if (block.head.key, block.head.kind) != place:
                raise Damaged("it has another block's name")
        except Damaged as wrong:
            return wrong
        return block

    def _taken(self, batch: Sequence[Place], call: Call[Found] | None) -> Iterator[Block | None]:
        """What a batch has come to. What is wrong is removed, so that somebody writes it again."""
        began = time.monotonic()
        found = None if call is None else call.result()
        self._tally.add(read_seconds=time.monotonic() - began)
        for place, block in zip(batch, [None] * len(batch) if found is None else found, strict=True):
            if isinstance(block, Block):
                self._tally.add(read_files=1, read_bytes=self.file_bytes(*place))
                yield block
                continue
            if found is not None:
                self._tally.add(**{"vanished_files" if block is None else "damaged_files": 1})
                self._contents.drop(*place)
            if block is not None:
                self._calls.ask([("HDEL", self._names.of_block(place[0]), place[1])])
            yield None


def _batches(wanted: Sequence[Place], sizes: Sequence[int]) -> Iterator[tuple[list[Place], list[int]]]:
    """What is read in one round trip each, with its sizes."""
    batch, expected = list[Place](), list[int]()
    for place, nbytes in zip(wanted, sizes, strict=True):
        if batch and sum(expected) + nbytes > BATCH_BYTES:
            yield batch, expected
            batch, expected = [], []
        batch.append(place)
        expected.append(nbytes)
    if batch:
        yield batch, expected
