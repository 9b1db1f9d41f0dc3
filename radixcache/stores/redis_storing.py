"""RedisStoring: what becomes of a block that is to be written to Redis. Only the writing thread runs it.

  Y1  A block is written only if it is not there, and only behind a block that is: all that is stored can be reached.
  Y2  Its landmarks are written behind it, and again where it is there: the server may have evicted them.

A block and its landmarks go in one call. One that the server refuses, or takes too long for, is dropped and counted.
"""

from __future__ import annotations

from radixcache.stores.block import KINDS, Block, Head
from radixcache.stores.codec import encoded
from radixcache.stores.keys import root_key
from radixcache.stores.redis_calls import Calls, Command
from radixcache.stores.redis_contents import RedisContents
from radixcache.stores.redis_names import Names, packed_way
from radixcache.stores.stats import Tally
from radixcache.tokens.keys import Keys

UNANSWERED = "the server does not answer"
UNREACHED = "what comes before it is not stored"


class RedisStoring:
    """Writes blocks to a server. `ttl_s`, `max_bytes` and `secret` as RedisStore has them."""

    def __init__(
        self,
        calls: Calls,
        names: Names,
        contents: RedisContents,
        tally: Tally,
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
