"""RedisContents: what of a Redis server this process knows, asked anew for each prompt.

    1  landmarks of the prompt, and the sizes of what is known of it    most often all there is to ask
    2  ways of the blocks that the deepest landmarks name
    3  sizes of the blocks on these ways

  L1  What is known of the chain that a prompt was found to follow is what the server said in the last `look_up`.
  L2  Whole blocks are told by the prompt's own tokens, the last one by tokens that its key proves.
  L3  At most `KNOWN_BLOCKS` blocks are known; what was used longest ago goes first, and never before what follows it.
  L4  What is used is kept from expiring, its landmarks too: at most a quarter of the time has passed that it may lie.

Methods may be called from any thread; none holds the lock while it asks.

What state is called in Redis, and how a prompt finds it there without its text being told.

    radixcache1:b:KEY   a hash: `block` and `checkpoint`, as a file on disk holds them; `way`, the lengths of all blocks
                        up to this one; `tokens`, those of this one
    radixcache1:m:MARK  a landmark: KEY of a block that begins before, at or less than 64 tokens behind a multiple of 64

    prompt       |····|····|····|····|····|··        a landmark every 64 tokens, each a digest of all before it
    blocks       |------------|-----|--------|       the deepest one that is there names a block, and its way all others

KEY is the block's key, MARK a digest of identity, namespace and all tokens before it; with a secret both are hashed
once more under it. So names and landmarks have no text in them: whoever can guess all tokens of a prefix can tell from
its name that it is there; with a secret nobody without it can. What a hash holds is in plain, as it is on disk. The
number is the codec's version: what another version has written is not met.

RedisStoring: what becomes of a block that is to be written to Redis. Only the writing thread runs it.

  Y1  A block is written only if it is not there, and only behind a block that is: all that is stored can be reached.
  Y2  Its landmarks are written behind it, and again where it is there: the server may have evicted them.

A block and its landmarks go in one call. One that the server refuses, or takes too long for, is dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from radixcache.stores.block import BLOCK_TOKENS, KEY_BYTES, KINDS, Block, Head, Identity, Kind, root_key
from radixcache.stores.codec import VERSION, encoded
from radixcache.stores.index import Index, Link
from radixcache.stores.redis_calls import Calls, Command, Replies
from radixcache.stores.store import StoreTally
from radixcache.tokens import Keys

PREFIX = f"radixcache{VERSION}:".encode()
#: Tokens from one landmark to the next.
MARK_TOKENS = 64


class Names:
    """The names of one store's state."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def of_block(self, key: bytes) -> bytes:
        return PREFIX + b"b:" + self._hidden(key)

    def is_of_block(self, name: bytes | None) -> bool:
        """Whether what a landmark says could be a block's name: nobody else's keys are asked for."""
        return name is not None and len(name) == len(PREFIX) + 2 + 2 * KEY_BYTES and name.startswith(PREFIX + b"b:")

    def of_marks(self, root: bytes, tokens: Keys, grid: int) -> list[bytes]:
        """Of the landmarks in front of these tokens, at 0, 64, 128 and so on."""
        data = tokens.astype("<i8", copy=False).tobytes()
        mark = _digest(root + grid.to_bytes(8, "little"))
        names = []
        for at in range(0, len(data), 8 * MARK_TOKENS):
            names.append(PREFIX + b"m:" + self._hidden(mark))
            mark = _digest(mark + data[at : at + 8 * MARK_TOKENS])
        return names

    def marks_of(self, head: Head, marks: Sequence[bytes]) -> Sequence[bytes]:
        """Those of a prompt's landmarks that name one of its blocks."""
        return marks[head.start // MARK_TOKENS : -(-head.end // MARK_TOKENS)]

    def _hidden(self, digest: bytes) -> bytes:
        if self._secret is not None:
            digest = blake2b(digest, digest_size=KEY_BYTES, key=self._secret, person=b"rc redis name").digest()
        return digest.hex().encode()


def packed_way(lengths: list[int]) -> bytes:
    """Lengths of blocks, 2 bytes each."""
    return np.array(lengths, dtype="<u2").tobytes()


def lengths_of(way: object) -> list[int]:
    """The lengths that `packed_way` has packed; none: it was something else."""
    if not isinstance(way, bytes) or len(way) % 2:
        return []
    lengths: list[int] = np.frombuffer(way, "<u2").tolist()
    return lengths if all(1 <= length <= BLOCK_TOKENS for length in lengths) else []


def tokens_of(data: object) -> Keys:
    """The tokens of a block; none: it was something else."""
    if not isinstance(data, bytes) or len(data) % 8 or len(data) > 8 * BLOCK_TOKENS:
        return np.empty(0, np.int64)
    return np.frombuffer(data, "<i8").astype(np.int64)


def heads_of(identity: Identity, namespace: str, grid: int, tokens: Keys, lengths: list[int], last: Keys) -> list[Head]:
    """The blocks of a way, as far as a prompt goes along it whole, and then the last one.

    Args:
        tokens: of the prompt.
        last: what the last block of the way says that its tokens are: its key proves it, or is another one.
    """
    heads, parent, start = list[Head](), root_key(identity, namespace), 0
    for count, length in enumerate(lengths, 1):
        its = last if count == len(lengths) else tokens[start : start + length]
        if len(its) != length:
            break
        heads.append(Head("block", identity, namespace, parent, start, its, grid))
        parent, start = heads[-1].key, heads[-1].end
    return heads


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=KEY_BYTES, person=b"rc landmark").digest()


#: Blocks that a process knows of; each takes 2 KiB.
KNOWN_BLOCKS = 1 << 14
#: Blocks named by landmarks whose ways are asked for: the deepest ones may have been evicted.
CANDIDATES = 4


class StoredPrompt(NamedTuple):
    """What is looked up."""

    identity: Identity
    namespace: str
    tokens: Keys
    grid: int

    @property
    def root(self) -> bytes:
        return root_key(self.identity, self.namespace)

    def heads(self, lengths: list[int], last: Keys) -> list[Head]:
        """The blocks of a way; see `heads_of`."""
        return heads_of(self.identity, self.namespace, self.grid, self.tokens, lengths, last)


class RedisContents:
    """The blocks of one server. `ttl_s` and `max_bytes` as RedisStore has them."""

    def __init__(self, calls: Calls, names: Names, tally: StoreTally, ttl_s: float | None, max_bytes: int) -> None:
        self._calls, self._names, self._tally = calls, names, tally
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._lock = threading.Lock()
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    def look_up(self, prompt: StoredPrompt) -> bool:
        """Have the server say what it has of a prompt; False: it does not answer."""
        marks = self._names.of_marks(prompt.root, prompt.tokens, prompt.grid)
        known = self._known_heads(prompt)
        replies = self._calls.ask([("MGET", *marks), *self._about(known, marks)])
        if replies is None:
            return False
        self._note(known, replies[1:])
        mine = {self._names.of_block(head.key) for head in known}
        places = list(dict.fromkeys(each for each in reversed(replies[0] or []) if self._names.is_of_block(each)))
        if not places or places[0] in mine:
            return True  # nothing is deeper than what is known
        return self._follow(prompt, marks, [each for each in places if each not in mine][:CANDIDATES])

    def match(self, root: bytes, tokens: Keys, grid: int, at_checkpoints: bool) -> list[Link]:
        """The longest chain of what is known."""
        with self._lock:
            return self._index.match(root, tokens, grid, at_checkpoints)

    def file_bytes(self, key: bytes, kind: Kind) -> int:
        """Bytes of a value; 0: it is not known."""
        with self._lock:
            return self._index.file_bytes(key, kind)

    def way(self, head: Head) -> tuple[list[int], Keys] | None:
        """Lengths of all blocks up to this one, and their tokens; None: not all that is before it is known."""
        with self._lock:
            path = self._index.path(head.parent)
        parts = [*(entry.tokens for entry in path), head.tokens]
        tokens = np.concatenate(parts).astype(np.int64)
        return (list(map(len, parts)), tokens) if len(tokens) == head.end else None

    def add(self, head: Head, nbytes: int) -> None:
        """A value is there."""
        with self._lock:
            self._index.add(head, nbytes, time.time_ns())
            while len(self._index) > KNOWN_BLOCKS and (oldest := self._index.oldest()) is not None:
                self._drop(oldest.key, *KINDS)

    def drop(self, key: bytes, *kinds: Kind) -> None:
        """Values are not there, or wrong."""
        with self._lock:
            self._drop(key, *kinds)

    def now(self) -> dict[str, int]:
        """Numbers and bytes of what is known, by their names in StoreStats."""
        with self._lock:
            blocks, checkpoints = self._index.count("block"), self._index.count("checkpoint")
            return {"blocks": blocks, "checkpoints": checkpoints, "stored_bytes": self._index.nbytes}

    def check(self) -> None:
        with self._lock:
            self._index.check()
            assert len(self._index) <= KNOWN_BLOCKS, len(self._index)

    def _known_heads(self, prompt: StoredPrompt) -> list[Head]:
        with self._lock:
            chain = self._index.match(prompt.root, prompt.tokens, prompt.grid)
            path = self._index.path(chain[-1].key) if chain else []
        return prompt.heads([len(each.tokens) for each in path], path[-1].tokens.astype(np.int64)) if path else []

    def _follow(self, prompt: StoredPrompt, marks: Sequence[bytes], places: Sequence[bytes]) -> bool:
        """Ask for the ways of these blocks, and then about all that is on them."""
        replies = self._calls.ask([("HMGET", place, "way", "tokens") for place in places])
        if replies is None:
            return False
        found: dict[bytes, Head] = {}  # by their names
        for place, reply in zip(places, replies, strict=True):
            if place not in found:  # else it is on the way of a deeper one
                heads = self._heads_at(prompt, place, *(reply or (None, None)))
                found.update((self._names.of_block(head.key), head) for head in heads)
        heads = list(found.values())
        sizes = self._calls.ask(self._about(heads, marks)) if heads else []
        if sizes is None:
            return False
        self._note(heads, sizes)
        return True

    def _heads_at(self, prompt: StoredPrompt, place: bytes, way: object, tokens: object) -> list[Head]:
        lengths = lengths_of(way)
        heads = prompt.heads(lengths, tokens_of(tokens))
        if heads and len(heads) == len(lengths):
            last = heads[-1]
            rest = prompt.tokens[last.start :]
            if self._names.of_block(last.key) != place or not len(rest) or last.tokens[0] != rest[0]:
                heads.pop()  # it goes on from something else, or with something else, than this prompt
        return heads

    def _about(self, heads: Sequence[Head], marks: Sequence[bytes]) -> list[Command]:
        """Ask for the sizes of blocks; and have those that were last used long ago stay, with their landmarks."""
        sizes: list[Command] = []
        used: list[Command] = []
        for head in heads:
            name = self._names.of_block(head.key)
            sizes += [("HSTRLEN", name, kind) for kind in KINDS]
            if self._ttl_s is not None and self._is_due(head.key, self._ttl_s):
                names = [name, *self._names.marks_of(head, marks)]
                used += [("EXPIRE", each, int(self._ttl_s)) for each in names]
        return [*sizes, *used]

    def _is_due(self, key: bytes, ttl_s: float) -> bool:
        with self._lock:
            return time.time_ns() - self._index.used_ns(key) > ttl_s / 4 * 1e9

    def _note(self, heads: Sequence[Head], replies: Replies) -> None:
        """Take over what the server has said of blocks, in the order of their chains."""
        sizes = list(zip(replies[0::2], replies[1::2], strict=False))
        for head, (block_bytes, checkpoint_bytes) in reversed(list(zip(heads, sizes, strict=False))):
            self._note_value(head, "block", block_bytes)
            self._note_value(head, "checkpoint", checkpoint_bytes if block_bytes else 0)
        if heads:
            is_renewed = len(replies) > len(KINDS) * len(heads)
            with self._lock:
                self._index.touch(heads[-1].key, time.time_ns() if is_renewed else 0)

    def _note_value(self, head: Head, kind: Kind, nbytes: int | None) -> None:
        if nbytes and nbytes > self._max_bytes:
            self._tally.fail("too large")
        if not nbytes or nbytes > self._max_bytes:
            self.drop(head.key, kind)
        elif nbytes != self.file_bytes(head.key, kind):
            self.add(head if kind == head.kind else replace(head, kind=kind), nbytes)

    def _drop(self, key: bytes, *kinds: Kind) -> None:
        for kind in kinds:
            self._index.drop(key, kind)


UNANSWERED = "the server does not answer"
UNREACHED = "what comes before it is not stored"


class RedisStoring:
    """Writes blocks to a server. `ttl_s`, `max_bytes` and `secret` as RedisStore has them."""

    def __init__(
        self,
        calls: Calls,
        names: Names,
        contents: RedisContents,
        tally: StoreTally,
        ttl_s: int | None,
        max_bytes: int,
        secret: bytes | None,
    ) -> None:
        self._calls, self._names, self._contents, self._tally = calls, names, contents, tally
        self._ttl_s, self._max_bytes, self._secret = ttl_s, max_bytes, secret

    def store(self, block: Block) -> None:
        """Write a block, or count why not."""
        why_not = self._written_or_why_not(block)
        if why_not:
            self._tally.drop(why_not)

    def _written_or_why_not(self, block: Block) -> str:
        try:
            value = b"".join(encoded(block, self._secret))
        except ValueError:
            return "its head is too long"
        if len(value) > self._max_bytes:
            return "it is larger than max_value_mib"
        return self._place(block.head, value)

    def _place(self, head: Head, value: bytes) -> str:
        before, way = head.parent if head.kind == "block" else head.key, self._contents.way(head)
        is_first = before == root_key(head.identity, head.namespace)
        if way is None or not (is_first or self._contents.file_bytes(before, "block")):
            return UNREACHED
        asked = [(head.key, head.kind), (before, "block")]
        there = self._calls.ask([("HSTRLEN", self._names.of_block(key), kind) for key, kind in asked])
        if there is None:
            return UNANSWERED
        if not is_first and not there[1]:
            self._contents.drop(before, *KINDS)
            return UNREACHED
        commands = [*([] if there[0] else [self._writing(head, value, way[0])]), *self._pointing(head, way[1])]
        replies = self._calls.ask(commands, 0 if there[0] else len(value))
        if replies is None:
            return UNANSWERED
        if not there[0] and replies[0] is None:
            return "the server refuses it"
        self._contents.add(head, there[0] or len(value))
        if there[0]:
            return "it is there"
        self._tally.add(written_files=1, written_bytes=len(value))
        return ""

    def _writing(self, head: Head, value: bytes, way: list[int]) -> Command:
        name, tokens = self._names.of_block(head.key), head.tokens.astype("<i8").tobytes()
        return ("HSET", name, head.kind, value, "way", packed_way(way), "tokens", tokens)

    def _pointing(self, head: Head, tokens: Keys) -> list[Command]:
        """Have the landmarks of a block name it, and keep it for as long as it may lie."""
        name, root = self._names.of_block(head.key), root_key(head.identity, head.namespace)
        marks = self._names.marks_of(head, self._names.of_marks(root, tokens, head.grid))
        if self._ttl_s is None:
            return [("SET", mark, name) for mark in marks]
        return [*(("SET", mark, name, "EX", self._ttl_s) for mark in marks), ("EXPIRE", name, self._ttl_s)]
