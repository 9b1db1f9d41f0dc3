"""Block: the state of up to 512 tokens, or a checkpoint at its end, as named buffers of bytes. Never imports MLX.

The key of a block is a 128-bit BLAKE2b digest over the key before it, its tokens, and where it begins there.

    root_key(identity, namespace) ── block_key ── block_key ── ...
                                        └── block_key ── ...

Equal keys mean equal identity, namespace and whole prefix. So equal prefixes are stored once, and no change of the tree
in memory changes a stored key. Whoever guesses the tokens can tell from a key that they are stored. Files hold them in
plain text.
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
#: Tokens of a block at most.
BLOCK_TOKENS = 512

#: "block": state that can be cut at any token; "checkpoint": state that is valid only at the last token of the block.
Kind = Literal["block", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: What names one stored file or value.
Place = tuple[bytes, Kind]

#: By MLX's name of a dtype: its name in safetensors, and the bytes of an element.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "uint16": ("U16", 2), "uint32": ("U32", 4), "uint64": ("U64", 8),
    "int8": ("I8", 1), "int16": ("I16", 2), "int32": ("I32", 4), "int64": ("I64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "complex64": ("C64", 8),
}  # fmt: skip

#: Dtype and shape of each named buffer.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


class Identity(NamedTuple):
    """What state belongs to: states of different digests never meet.

    Attributes:
        digest: of all that a state depends on besides its tokens, at most `MAX_DIGEST_BYTES`.
        model: a name for people; nothing depends on it.
    """

    digest: bytes
    model: str = ""


def root_key(identity: Identity, namespace: str) -> bytes:
    """The key that the first block of a sequence follows."""
    inner = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"rc identity").digest()
    return blake2b(inner + namespace.encode(), digest_size=KEY_BYTES, person=b"rc root").digest()


def block_key(parent: bytes, tokens: Keys, grid: int, cut: int) -> bytes:
    content = parent + grid.to_bytes(8, "little") + tokens.astype("<i8", copy=False).tobytes()
    return blake2b(content, digest_size=KEY_BYTES, person=b"rc block" + cut.to_bytes(2, "little")).digest()


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array as raw bytes.

    Attributes:
        data: anything with the buffer protocol: C-contiguous, little-endian, never changed again.
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
        parent: key of the block before it; `root_key(identity, namespace)` for the first block.
        start: offset of its first token.
        tokens: keys of its tokens, 1 to `BLOCK_TOKENS`, int64.
        grid: step size of the prefill that made it, if that was cut only at multiples of it; else 0.
        cut: how many tokens of the parent come before it; 0: all. So a block can continue from inside its parent.

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
        if len(self.identity.digest) > MAX_DIGEST_BYTES or not isinstance(self.identity.model, str):
            raise ValueError(f"identity is {self.identity}; wanted at most {MAX_DIGEST_BYTES} bytes, and a str.")
        sound = self.kind in KINDS and len(self.parent) == KEY_BYTES and 1 <= len(self.tokens) <= BLOCK_TOKENS
        sound = sound and 0 <= self.cut < BLOCK_TOKENS
        if not (sound and 0 <= self.start < 1 << 63 and 0 <= self.grid < 1 << 63):
            raise ValueError(
                f"a {self.kind!r} of {len(self.tokens)} tokens at {self.start}, grid {self.grid}, behind a key of "
                f"{len(self.parent)} bytes; wanted {' or '.join(KINDS)}, 1 to {BLOCK_TOKENS} tokens, {KEY_BYTES} bytes."
            )

    @cached_property
    def key(self) -> bytes:
        """A checkpoint has the key of the block that it ends."""
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
    """A head and its state: of all span layers, or of the layers that need a checkpoint."""

    head: Head
    buffers: Mapping[str, Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of the state; the file takes a few KiB more."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype][1]
