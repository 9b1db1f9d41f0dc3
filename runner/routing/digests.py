"""Digests of a prompt at its block borders: what a replica says it stores, and what is looked up. Never imports MLX.

    root(model, namespace) ── digest of [0, 256) ── digest of [0, 512) ── ...    each over the one before and 256 tokens

Equal digests mean equal model, namespace and whole prefix, but for accidents: with 64 bits two of N prefixes meet with
a chance of N² / 2^65, and then a request goes to a place where its prefix is not. Namespaces share no digest. Tokens
behind the last whole block have none. One pass over the prompt, about 5 us a block.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

#: Tokens from one border to the next.
BLOCK_TOKENS = 256
DIGEST_BYTES = 8


def root_digest(model: str, namespace: str = "", secret: bytes = b"") -> int:
    """The digest that the first block of a prompt follows.

    Args:
        model: what state is told apart by besides its tokens: a name, or an identity in hex.
        secret: up to 64 bytes without which nobody can tell by a digest whether a guessed prompt was asked.
    """
    inner = blake2b(model.encode(), digest_size=DIGEST_BYTES, key=secret, person=b"rc route model").digest()
    return _number(blake2b(inner + namespace.encode(), digest_size=DIGEST_BYTES, key=secret, person=b"rc route root"))


def chain_digests(tokens: NDArray[np.integer], root: int, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """The digest at each block border of a prompt, from the first on.

    Args:
        tokens: (T,) ids or keys, whole numbers.
        root: of the model and the namespace; or the digest that `tokens` follow, which is at a border.

    Returns:
        T // block_tokens digests, each of 64 bits.

    Raises:
        ValueError: `block_tokens` is below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; wanted at least 1.")
    step = 8 * block_tokens
    content = memoryview(tokens[: len(tokens) // block_tokens * block_tokens].astype("<i8").tobytes())
    digests = []
    for start in range(0, len(content), step):
        block = blake2b(root.to_bytes(DIGEST_BYTES, "little"), digest_size=DIGEST_BYTES, person=b"rc route block")
        block.update(content[start : start + step])
        root = _number(block)
        digests.append(root)
    return digests


def _number(content: blake2b) -> int:
    return int.from_bytes(content.digest(), "little")
