"""What state is called in Redis, and how a prompt finds it there without its text being told.

    radixcache1:b:KEY   a hash: `block` and `checkpoint`, as a file on disk holds them; `way`, the lengths of all blocks
                        up to this one; `tokens`, those of this one
    radixcache1:m:MARK  a landmark: KEY of a block that begins before, at or less than 64 tokens behind a multiple of 64

    prompt       |····|····|····|····|····|··        a landmark every 64 tokens, each a digest of all before it
    blocks       |------------|-----|--------|       the deepest one that is there names a block, and its way all others

KEY is the block's key, MARK a digest of identity, namespace and all tokens before it; with a secret both are hashed
once more under it. So names and landmarks have no text in them: whoever can guess all tokens of a prefix can tell from
its name that it is there; with a secret nobody without it can. What a hash holds is in plain, as it is on disk. The
number is the codec's version: what another version has written is not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from radixcache.stores.block import BLOCK_TOKENS, Head
from radixcache.stores.codec import VERSION
from radixcache.stores.keys import KEY_BYTES, Identity, root_key
from radixcache.tokens.keys import Keys

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
