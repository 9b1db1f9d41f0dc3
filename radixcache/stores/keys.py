"""Keys of stored blocks: a chain of 128-bit BLAKE2b digests from a model and a namespace down to a block's last token.

    root_key(identity, namespace) ── block_key ── block_key ── ...        each over the key before it and its tokens
                                        └── block_key ── ...              and over where inside of it it begins

Equal keys mean equal identity, namespace and whole prefix. So equal beginnings are stored once, and nothing that
happens to a tree in memory changes what a stored block is called. A key tells whoever can guess the tokens that they
are there: the files hold them in plain anyway.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from radixcache.tokens.keys import Keys

KEY_BYTES = 16
MAX_DIGEST_BYTES = 64


class Identity(NamedTuple):
    """What state belongs to: states of unequal digests never meet.

    Attributes:
        digest: of all that a state depends on but its tokens, at most `MAX_DIGEST_BYTES`.
        model: a name for people, on which nothing depends.
    """

    digest: bytes
    model: str = ""


def root_key(identity: Identity, namespace: str) -> bytes:
    """The key that the first block of a sequence follows."""
    inner = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"rc identity").digest()
    return blake2b(inner + namespace.encode(), digest_size=KEY_BYTES, person=b"rc root").digest()


def block_key(parent: bytes, tokens: Keys, grid: int, cut: int) -> bytes:
    """The key of a block behind another one. Blocks that differ in `grid` (see `Head`) are kept side by side.

    Args:
        cut: how many tokens of the other one come before it; 0: all.
    """
    content = parent + grid.to_bytes(8, "little") + tokens.astype("<i8", copy=False).tobytes()
    return blake2b(content, digest_size=KEY_BYTES, person=b"rc block" + cut.to_bytes(2, "little")).digest()
