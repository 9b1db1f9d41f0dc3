"""Block: the state of a run of tokens, or a checkpoint at its end, as named buffers of bytes. Never imports MLX.

Keys of stored blocks: a chain of 128-bit BLAKE2b digests from a model and a namespace down to a block's last token.

    root_key(identity, namespace) ── block_key ── block_key ── ...        each over the key before it and its tokens
                                        └── block_key ── ...              and over where inside of it it begins

Equal keys mean equal identity, namespace and whole prefix. So equal beginnings are stored once, and nothing that
happens to a tree in memory changes what a stored block is called. A key tells whoever can guess the tokens that they
are there: the files hold them in plain anyway.
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


#: "block": state that can be cut at any token; "checkpoint": state that is valid at the block's last token alone.
Kind = Literal["block", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Tokens of a block at most.
BLOCK_TOKENS = 512

#: MLX's names of dtypes, those of safetensors, and bytes of an element.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}

#: Dtype and shape of each named buffer.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array as raw bytes.

    Attributes:
        data: whatever gives its bytes: C-contiguous, in the machine's (little-endian) order, not changed any more.
        dtype, shape: a name out of `DTYPES`; () for a single number.

    Raises:
        ValueError: the dtype is unknown, or the bytes are not those of such an array.
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
        """The bytes, in place."""
        return np.frombuffer(self.data, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        return self.octets.nbytes


@dataclass(frozen=True, eq=False)
class Head:
    """What a file says of itself, beside its state.

    Attributes:
        kind: what the state is.
        identity, namespace: what it belongs to.
        parent: key of the block before it; `root_key(identity, namespace)` for the first one.
        start: offset of its first token.
        tokens: keys of its tokens, 1 to `BLOCK_TOKENS` of them, int64.
        grid: step size of the prefill that made it, where that was cut nowhere but at its multiples; 0: it was not.
        cut: how many tokens of the block before it come before it; 0: all.

    Raises:
        ValueError: one of them is none of these.
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
        """The block's own key: a checkpoint has that of the block that it stands at the end of."""
        return block_key(self.parent, self.tokens, self.grid, self.cut)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class Block:
    """A head and its state: of all span layers, or, in a checkpoint, of the layers that it is for."""

    head: Head
    buffers: Mapping[str, Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of the state; the file takes a few KiB more."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype][1]
