"""RedisContents: what of a Redis server this process knows, asked anew for each prompt.

    1  landmarks of the prompt, and the sizes of what is known of it    most often all there is to ask
    2  ways of the blocks that the deepest landmarks name
    3  sizes of the blocks on these ways

  L1  What is known of the chain that a prompt was found to follow is what the server said in the last `look_up`.
  L2  Whole blocks are told by the prompt's own tokens, the last one by tokens that its key proves.
  L3  At most `KNOWN_BLOCKS` blocks are known; what was used longest ago goes first, and never before what follows it.
  L4  What is used is kept from expiring, its landmarks too: at most a quarter of the time has passed that it may lie.

Methods may be called from any thread; none holds the lock while it asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from radixcache.stores.block import KINDS, Head, Kind
from radixcache.stores.index import Index, Link
from radixcache.stores.keys import Identity, root_key
from radixcache.stores.redis_calls import Calls, Command, Replies
from radixcache.stores.redis_names import Names, heads_of, lengths_of, tokens_of
from radixcache.stores.stats import Tally
from radixcache.tokens.keys import Keys

#: Blocks that a process knows of; each takes 2 KiB.
KNOWN_BLOCKS = 1 << 14
#: Blocks named by landmarks whose ways are asked for: the deepest ones may have been evicted.
CANDIDATES = 4


class Prompt(NamedTuple):
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

    def __init__(self, calls: Calls, names: Names, tally: Tally, ttl_s: float | None, max_bytes: int) -> None:
        self._calls, self._names, self._tally = calls, names, tally
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._lock = threading.Lock()
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    def look_up(self, prompt: Prompt) -> bool:
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

    def _known_heads(self, prompt: Prompt) -> list[Head]:
        with self._lock:
            chain = self._index.match(prompt.root, prompt.tokens, prompt.grid)
            path = self._index.path(chain[-1].key) if chain else []
        return prompt.heads([len(each.tokens) for each in path], path[-1].tokens.astype(np.int64)) if path else []

    def _follow(self, prompt: Prompt, marks: Sequence[bytes], places: Sequence[bytes]) -> bool:
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

    def _heads_at(self, prompt: Prompt, place: bytes, way: object, tokens: object) -> list[Head]:
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
