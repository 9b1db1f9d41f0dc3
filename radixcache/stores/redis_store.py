"""RedisStore: blocks of state in a Redis or Valkey server that several machines share. No fault makes an answer wrong.

    put ──► queue ──► one thread: encode, write        match ──► look-ups ──► index ──► read ──► check ──► block

    radixcache1:b:KEY   a hash: `block` and `checkpoint`, as in the files of DiskStore; `way`, the lengths of all blocks
                        of the chain up to this one; `tokens`, the tokens of this block
    radixcache1:m:MARK  a landmark, one for each 64 tokens: the name of a block that has some of these tokens

    prompt       |····|····|····|····|····|··        MARK is a digest of all tokens before the landmark
    blocks       |------------|-----|--------|       the last landmark that is stored names a block, with its `way`

A lookup asks the server for the landmarks of the prompt. Then it asks for the `way` of the last blocks that the index
lacks, and for the sizes of all blocks on these ways. Their keys are computed from the tokens of the prompt.

KEY is the key of the block. MARK also covers identity, namespace and grid. With a secret, both are hashed with it.
A person who guesses all tokens of a prefix can see that it is stored; with a secret, only a person who has the secret.
Values are not encrypted. The 1 in "radixcache1" is the version of the codec.

  V1  Values are checked as in S1 of DiskStore. A value that fails is a miss, and is counted.
  V2  A request waits at most 3 * `timeout_s` for a lookup, and `timeout_s` plus 1 s for each 16 MiB for reading.
      After a failure the server is not asked for a time, so later requests do not wait. No caller waits for writing.
  V3  For a prompt, the index holds what the server said in the last lookup. It has at most `KNOWN_BLOCKS`.
  V4  Keys are computed from the prompt, and the last block's from its `tokens`. If its name differs, it is not used.
  V5  A used block and its landmarks are renewed when a quarter of `ttl_s` has passed, so they do not expire.
  V6  Landmarks are written with their block, and again if it is stored already: the server may have evicted them.

Methods may be called from any thread. They do not hold the lock while they wait for the server. Never imports MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from radixcache.stores.block import BLOCK_TOKENS, KEY_BYTES, KINDS, Block, Head, Identity, Kind, Place, root_key
from radixcache.stores.block_store import BlockStore, WriteOn, read_ahead
from radixcache.stores.codec import VERSION, Damaged, decode
from radixcache.stores.redis_calls import Calls, Command, Replies
from radixcache.tokens import Keys

PREFIX = f"radixcache{VERSION}:".encode()
#: Tokens from one landmark to the next.
MARK_TOKENS = 64
#: The most blocks in the index; each takes 2 KiB.
KNOWN_BLOCKS = 1 << 14
#: How many blocks a lookup asks about: the server may have evicted the last one.
CANDIDATES = 4

UNANSWERED = "the server does not answer"
UNREACHED = "the blocks before it are not stored"


class RedisStore(BlockStore):
    """Blocks in one Redis or Valkey server, not a cluster."""

    tiers = ("redis",)
    takes_cuts = False  # the key after a cut block needs the whole block, and the prompt lacks its end
    stopped_words = UNANSWERED

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
        """Make a store without connecting: a server that is down, or starts later, is no error.

        Args:
            url: redis://, rediss:// (TLS) or unix://, with user and password, as redis-py has it. It is never shown.
            ttl_s: seconds after which unused state expires; None: only the server evicts.
            max_value_mib: the largest block or checkpoint that is written or read.
            write_on: what a cache writes.
            secret: 16 to 64 bytes. With a secret, only values written with it are found or read, and others cannot
                guess what a name stands for. The values are never encrypted.
            queue_bytes: the most state in memory that waits to be written.
            timeout_s: limit of a call, plus a second for each 16 MiB; a `socket_timeout` in the URL replaces it.
            clock: seconds, for the pauses after a failure of the server.

        Raises:
            ValueError: an argument is out of range, or the URL is wrong.
            StoreError: the package `redis` is not installed.
        """
        super().__init__(write_on, secret, queue_bytes=queue_bytes)
        if min(max_value_mib, timeout_s, queue_bytes) <= 0 or (ttl_s is not None and ttl_s < 1):
            raise ValueError(
                f"max_value_mib={max_value_mib}, timeout_s={timeout_s}, queue_bytes={queue_bytes}, ttl_s={ttl_s} of a "
                "RedisStore; wanted more than 0, and a ttl_s of 1 or more seconds, or None."
            )
        self._max_bytes = int(max_value_mib * (1 << 20))
        self._ttl_s = None if ttl_s is None else int(ttl_s)
        self._calls = Calls(url, timeout_s, clock, self._tally)
        self._names = Names(secret)

    def __repr__(self) -> str:
        return f"<RedisStore: {len(self._index)} blocks known{', not asked' if self._calls.is_down else ''}>"

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        ends_s = time.monotonic() + self._calls.limit_s(sum(self.file_bytes(*place) for place in wanted))
        yield from read_ahead(partial(self._read_one, ends_s), wanted)

    def accepts(self, nbytes: int) -> bool:
        return nbytes <= self._max_bytes and not self._calls.is_down and self._queue.has_room(nbytes)

    def close(self, timeout_s: float | None = None) -> bool:
        is_written = super().close(timeout_s)
        self._calls.close()
        return is_written

    def check(self) -> None:
        super().check()
        with self._lock:
            assert len(self._index) <= KNOWN_BLOCKS, len(self._index)

    @property
    def _stopped(self) -> str:
        return UNANSWERED if self._calls.is_down else ""

    def _look_up(self, identity: Identity, namespace: str, tokens: Keys, grid: int) -> bool:
        """As in BlockStore. If blocks diverge within one landmark's 64 tokens, only the block written last is found."""
        if not len(tokens):
            return False
        prompt = StoredPrompt(identity, namespace, tokens, grid)
        marks = self._names.of_marks(prompt.root, tokens, grid)
        known = self._known_heads(prompt)
        replies = self._calls.ask([("MGET", *marks), *self._asking_for_sizes(known, marks)])
        if replies is None:
            return False
        self._note_sizes(known, replies[1:])
        names = list(dict.fromkeys(each for each in reversed(replies[0] or []) if self._names.is_of_block(each)))
        mine = {self._names.of_block(head.key) for head in known}
        if not names or names[0] in mine:
            return True  # the server has nothing deeper
        unknown = [name for name in names if name not in mine][:CANDIDATES]
        ways = self._calls.ask([("HMGET", name, "way", "tokens") for name in unknown])
        if ways is None:
            return False
        found: dict[bytes, Head] = {}
        for name, reply in zip(unknown, ways, strict=True):
            if name not in found:  # else it is on the way of a deeper block
                heads = self._heads_at(prompt, name, *(reply or (None, None)))
                found.update((self._names.of_block(head.key), head) for head in heads)
        heads = list(found.values())
        sizes = self._calls.ask(self._asking_for_sizes(heads, marks)) if heads else []
        if sizes is None:
            return False
        self._note_sizes(heads, sizes)
        return True

    def _known_heads(self, prompt: StoredPrompt) -> list[Head]:
        with self._lock:
            chain = self._index.match(prompt.root, prompt.tokens, prompt.grid)
            path = self._index.path(chain[-1].key) if chain else []
        return prompt.heads([len(each.tokens) for each in path], path[-1].tokens.astype(np.int64)) if path else []

    def _heads_at(self, prompt: StoredPrompt, name: bytes, way: object, tokens: object) -> list[Head]:
        lengths = lengths_of(way)
        heads = prompt.heads(lengths, tokens_of(tokens))
        if heads and len(heads) == len(lengths):
            last = heads[-1]
            rest = prompt.tokens[last.start :]
            if self._names.of_block(last.key) != name or not len(rest) or last.tokens[0] != rest[0]:
                heads.pop()  # the block follows another prefix, or has no token of the prompt
        return heads

    def _asking_for_sizes(self, heads: Sequence[Head], marks: Sequence[bytes]) -> list[Command]:
        """Commands that ask for the sizes of blocks, and that renew blocks and landmarks if it is time."""
        sizes: list[Command] = []
        renewals: list[Command] = []
        for head in heads:
            name = self._names.of_block(head.key)
            sizes += [("HSTRLEN", name, kind) for kind in KINDS]
            if self._ttl_s is not None and self._is_due(head.key, self._ttl_s):
                names = [name, *self._names.marks_of(head, marks)]
                renewals += [("EXPIRE", each, self._ttl_s) for each in names]
        return [*sizes, *renewals]

    def _is_due(self, key: bytes, ttl_s: float) -> bool:
        with self._lock:
            return time.time_ns() - self._index.used_ns(key) > ttl_s / 4 * 1e9

    def _note_sizes(self, heads: Sequence[Head], replies: Replies) -> None:
        """Put the sizes that the server gave into the index; `heads` are in the order of their chain."""
        sizes = zip(replies[0::2], replies[1::2], strict=False)
        for head, (block_bytes, checkpoint_bytes) in reversed(list(zip(heads, sizes, strict=False))):
            self._note_size(head, "block", block_bytes or 0)
            self._note_size(head, "checkpoint", (block_bytes and checkpoint_bytes) or 0)
        if heads:
            is_renewed = len(replies) > len(KINDS) * len(heads)
            with self._lock:
                self._index.touch(heads[-1].key, time.time_ns() if is_renewed else 0)

    def _note_size(self, head: Head, kind: Kind, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            self._tally.add_to("failed_calls", "too large")
        if not 0 < nbytes <= self._max_bytes:
            self._drop(head.key, kind)
        elif nbytes != self.file_bytes(head.key, kind):
            self._add(head if kind == head.kind else replace(head, kind=kind), nbytes, time.time_ns())

    def _read_one(self, ends_s: float, place: Place) -> Block | None:
        """The block in a value; None: the value is gone or wrong. A wrong value is deleted, so that it is rewritten."""
        key, kind = place
        if not self.file_bytes(key, kind):
            return None
        began = time.monotonic()
        replies = self._calls.ask([("HGET", self._names.of_block(key), kind)], ends_s=ends_s)
        self._tally.add(read_seconds=time.monotonic() - began)
        if replies is None:
            return None
        try:
            block = None if replies[0] is None else decode(memoryview(replies[0]), self._secret, place=place)
        except Damaged:
            self._tally.add(damaged_files=1)
            self._calls.ask([("HDEL", self._names.of_block(key), kind)])
        else:
            if block is not None:
                self._tally.add(read_files=1, read_bytes=len(replies[0]))
                return block
            self._tally.add(vanished_files=1)
        self._drop(key, kind)
        return None

    def _write(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        if nbytes > self._max_bytes:
            return "it is larger than max_value_mib"
        way = self._way(head)
        if way is None or not (head.is_first or self.file_bytes(head.before)):
            return UNREACHED
        asked: list[Place] = [head.place, (head.before, "block")]
        stored = self._calls.ask([("HSTRLEN", self._names.of_block(key), kind) for key, kind in asked])
        if stored is None:
            return UNANSWERED
        if not head.is_first and not stored[1]:
            self._drop(head.before)
            return UNREACHED
        commands = self._setting_marks(head, np.concatenate(way).astype(np.int64))
        if not stored[0]:
            lengths = np.array([*map(len, way)], dtype="<u2").tobytes()
            fields = {head.kind: b"".join(parts), "way": lengths, "tokens": way[-1].astype("<i8").tobytes()}
            commands.insert(0, ("HSET", self._names.of_block(head.key), *(x for pair in fields.items() for x in pair)))
        replies = self._calls.ask(commands, 0 if stored[0] else nbytes)
        if replies is None:
            return UNANSWERED
        if not stored[0] and replies[0] is None:
            return "the server refuses it"
        self._add(head, stored[0] or nbytes, time.time_ns())
        if stored[0]:
            return "it is already stored"
        self._tally.add(written_files=1, written_bytes=nbytes)
        return ""

    def _way(self, head: Head) -> list[Any] | None:
        """The tokens of each block of the chain up to this one; None: a block before this one is not known."""
        with self._lock:
            path = self._index.path(head.parent)
        way = [*(entry.tokens for entry in path), head.tokens]
        return way if sum(map(len, way)) == head.end else None

    def _setting_marks(self, head: Head, tokens: Keys) -> list[Command]:
        """Commands that set the landmarks of a block and renew the block."""
        name, root = self._names.of_block(head.key), root_key(head.identity, head.namespace)
        marks = self._names.marks_of(head, self._names.of_marks(root, tokens, head.grid))
        if self._ttl_s is None:
            return [("SET", mark, name) for mark in marks]
        return [*(("SET", mark, name, "EX", self._ttl_s) for mark in marks), ("EXPIRE", name, self._ttl_s)]

    def _delete(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._calls.ask([("DEL", *map(self._names.of_block, keys))])

    def _add(self, head: Head, nbytes: int, used_ns: int) -> None:
        with self._lock:
            self._index.add(head, nbytes, used_ns)
            while len(self._index) > KNOWN_BLOCKS and (oldest := self._index.oldest()) is not None:
                self._index.drop(oldest.key)


class Names:
    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def of_block(self, key: bytes) -> bytes:
        return PREFIX + b"b:" + self._hidden(key)

    def is_of_block(self, name: bytes | None) -> bool:
        """Whether the value of a landmark is the name of a block."""
        return name is not None and len(name) == len(PREFIX) + 2 + 2 * KEY_BYTES and name.startswith(PREFIX + b"b:")

    def of_marks(self, root: bytes, tokens: Keys, grid: int) -> list[bytes]:
        """Names of the landmarks of these tokens, at the offsets 0, 64, 128 and so on."""
        data = tokens.astype("<i8", copy=False).tobytes()
        mark = _digest(root + grid.to_bytes(8, "little"))
        names = []
        for at in range(0, len(data), 8 * MARK_TOKENS):
            names.append(PREFIX + b"m:" + self._hidden(mark))
            mark = _digest(mark + data[at : at + 8 * MARK_TOKENS])
        return names

    def marks_of(self, head: Head, marks: Sequence[bytes]) -> Sequence[bytes]:
        """The landmarks of a prompt that name this block."""
        return marks[head.start // MARK_TOKENS : -(-head.end // MARK_TOKENS)]

    def _hidden(self, digest: bytes) -> bytes:
        if self._secret is not None:
            digest = blake2b(digest, digest_size=KEY_BYTES, key=self._secret, person=b"rc redis name").digest()
        return digest.hex().encode()


class StoredPrompt(NamedTuple):
    identity: Identity
    namespace: str
    tokens: Keys
    grid: int

    @property
    def root(self) -> bytes:
        return root_key(self.identity, self.namespace)

    def heads(self, lengths: Sequence[int], last: Keys) -> list[Head]:
        """The blocks with these lengths, as far as the prompt has tokens. `last`: the tokens of the last block."""
        heads, parent, start = list[Head](), self.root, 0
        for count, length in enumerate(lengths, 1):
            its = last if count == len(lengths) else self.tokens[start : start + length]
            if len(its) != length:
                break
            heads.append(Head("block", self.identity, self.namespace, parent, start, its, self.grid))
            parent, start = heads[-1].key, heads[-1].end
        return heads


def lengths_of(way: object) -> list[int]:
    """The lengths of the blocks of a way, 2 bytes each; empty: these bytes are something else."""
    if not isinstance(way, bytes) or len(way) % 2:
        return []
    lengths: list[int] = np.frombuffer(way, "<u2").tolist()
    return lengths if all(1 <= length <= BLOCK_TOKENS for length in lengths) else []


def tokens_of(data: object) -> Keys:
    """The tokens of a block; empty: these bytes are something else."""
    if not isinstance(data, bytes) or len(data) % 8 or len(data) > 8 * BLOCK_TOKENS:
        return np.empty(0, np.int64)
    return np.frombuffer(data, "<i8").astype(np.int64)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=KEY_BYTES, person=b"rc landmark").digest()
