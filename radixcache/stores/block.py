"""Block: the state of up to 512 tokens, or the checkpoint after the last one, as named buffers. Never imports MLX.

The key of a block is a 128-bit BLAKE2b digest of its parent's key, its tokens, its `grid` and its `cut` (see `Head`).

    root_key(identity, namespace) ── block_key ── block_key ── ...
                                        └── block_key ── ...

Blocks with equal keys have equal identity, namespace and prefix. So a prefix is stored once, and keys do not depend on
the tree in memory. A person who guesses all tokens can compute the key and see that they are stored. Files hold the
tokens unencrypted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from radixcache.tokens import Keys, require_namespace

KEY_BYTES = 16
MAX_DIGEST_BYTES = 64
#: The most tokens of a block.
BLOCK_TOKENS = 512

#: "block": state that can be cut at any token; "checkpoint": state that is valid only at the last token of the block.
Kind = Literal["block", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Identifies one stored file, or one value in Redis.
Place = tuple[bytes, Kind]

#: For each dtype name of MLX: the name in safetensors, and bytes per element.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "uint16": ("U16", 2), "uint32": ("U32", 4), "uint64": ("U64", 8),
    "int8": ("I8", 1), "int16": ("I16", 2), "int32": ("I32", 4), "int64": ("I64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "complex64": ("C64", 8),
}  # fmt: skip

#: Dtype and shape of each named buffer.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


class Identity(NamedTuple):
    """The model that state belongs to. A request finds only state with an equal digest.

    Attributes:
        digest: of all that the state depends on except the tokens; at most `MAX_DIGEST_BYTES`.
        model, maker: names for people to read, of the model and of what made the state; no key depends on them.
    """

    digest: bytes
    model: str = ""
    maker: str = ""


def root_key(identity: Identity, namespace: str) -> bytes:
    """The parent key of the first block of a sequence."""
    inner = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"rc identity").digest()
    return blake2b(inner + namespace.encode(), digest_size=KEY_BYTES, person=b"rc root").digest()


def block_key(parent: bytes, tokens: Keys, grid: int, cut: int) -> bytes:
    content = parent + grid.to_bytes(8, "little") + tokens.astype("<i8", copy=False).tobytes()
    return blake2b(content, digest_size=KEY_BYTES, person=b"rc block" + cut.to_bytes(2, "little")).digest()


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array as raw bytes.

    Attributes:
        data: an object with the buffer protocol, C-contiguous and little-endian. It must not change.
        dtype, shape: a name of `DTYPES`; () for a single number.

    Raises:
        ValueError: the dtype is unknown, or the number of bytes is wrong.
    """

    data: Any
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; wanted one of {', '.join(DTYPES)}.")
        if self.nbytes != (wanted := shape_bytes(self.dtype, self.shape)):
            raise ValueError(f"{self.nbytes} bytes; {self.dtype} of shape {self.shape} takes {wanted}.")

    @cached_property
    def octets(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        return self.octets.nbytes


@dataclass(frozen=True, eq=False)
class Head:
    """The description of a stored file.

    Attributes:
        parent: key of the block before this one; `root_key(identity, namespace)` for the first block.
        start: offset of the first token.
        tokens: keys of the tokens, 1 to `BLOCK_TOKENS`, int64.
        grid: step size of the prefill that made the state, if prefill ran in multiples of the step size only; else 0.
        cut: this block follows so many tokens of its parent; 0: all. So a block can begin inside its parent.

    Raises:
        ValueError: a value is out of range.
    """

    kind: Kind
    identity: Identity
    namespace: str
    parent: bytes
    start: int
    tokens: Keys
    grid: int = 0
    cut: int = 0

    def __post_init__(self) -> None:
        require_namespace(self.namespace)
        if len(self.identity.digest) > MAX_DIGEST_BYTES or not all(isinstance(name, str) for name in self.identity[1:]):
            raise ValueError(f"identity is {self.identity}; wanted at most {MAX_DIGEST_BYTES} bytes, and two str.")
        sound = self.kind in KINDS and len(self.parent) == KEY_BYTES and 1 <= len(self.tokens) <= BLOCK_TOKENS
        sound = sound and 0 <= self.cut < BLOCK_TOKENS
        if not (sound and 0 <= self.start < 1 << 63 and 0 <= self.grid < 1 << 63):
            raise ValueError(
                f"a {self.kind!r} of {len(self.tokens)} tokens at {self.start}, grid {self.grid}, behind a key of "
                f"{len(self.parent)} bytes; wanted {' or '.join(KINDS)}, 1 to {BLOCK_TOKENS} tokens, {KEY_BYTES} bytes."
            )

    @cached_property
    def key(self) -> bytes:
        """The key of the block; its checkpoint has the same key."""
        return block_key(self.parent, self.tokens, self.grid, self.cut)

    @property
    def place(self) -> Place:
        return self.key, self.kind

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def before(self) -> bytes:
        """The key of the block that must be stored first, or the root key."""
        return self.parent if self.kind == "block" else self.key

    @property
    def is_first(self) -> bool:
        return self.before == root_key(self.identity, self.namespace)


@dataclass(frozen=True, eq=False)
class Block:
    """A head and its state: that of all span layers (kind "block"), or of all layers that need a checkpoint."""

    head: Head
    buffers: Mapping[str, Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of the state; the file takes a few KiB more."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype][1]
