"""The bytes of a stored block: a safetensors file whose first tensor are its tokens and whose last is a checksum.

    8 bytes    length of the JSON
    JSON       {"__metadata__": {format, version, kind, key, parent, ...}, "tokens": ..., "state.NAME": ..., ...}
    tokens     int64
    state.*    raw bytes, larger elements first, then by name
    checksum   16 bytes over all that is before: CRC-32, or keyed BLAKE2b

  K1  A block has one encoding: what decodes is, encoded again, the same bytes.
  K2  What is wrong raises `Damaged` and nothing else. No size is believed before it adds up to that of the file.
  K3  The head is read without the state, and proves itself: its key is the digest of its parent and its tokens.

Whoever can write into the folder can make a CRC-32 right: it finds accidents. Only with a secret a file proves that it
was written by somebody who has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest
from typing import Any
from zlib import crc32

import numpy as np

from radixcache.stores.block import BLOCK_TOKENS, DTYPES, Block, Buffer, Head, Identity, Shapes, shape_bytes

FORMAT, VERSION = "radixcache-block", "1"
CHECKSUM_BYTES = 16
#: Bytes of the JSON at most; some 100 a buffer.
MAX_JSON_BYTES = 1 << 20

_START = b'{"__metadata__":'
_DTYPE_OF = {theirs: ours for ours, (theirs, _) in DTYPES.items()}
#: What looking into JSON and numbers that somebody else wrote may raise.
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class Damaged(Exception):  # noqa: N818  says what is wrong with a file, and never leaves the stores
    """These bytes are no block, or not the block that they should be."""


class Checksum:
    """Of parts that come one after the other, up to `limit_bytes`: CRC-32, or keyed BLAKE2b where there is a secret."""

    def __init__(self, secret: bytes | None, limit_bytes: int | None = None) -> None:
        self._left_bytes = limit_bytes
        self._crc = 0
        self._digest = None
        if secret is not None:
            self._digest = blake2b(digest_size=CHECKSUM_BYTES, key=secret, person=b"rc checksum")

    def add(self, part: Any) -> None:
        if self._left_bytes is not None:
            part = part[: self._left_bytes]
            self._left_bytes -= len(part)
        if self._digest is None:
            self._crc = crc32(part, self._crc)
        else:
            self._digest.update(part)

    @property
    def value(self) -> bytes:
        return self._crc.to_bytes(CHECKSUM_BYTES, "little") if self._digest is None else self._digest.digest()


def encoded(block: Block, secret: bytes | None = None) -> list[Any]:
    """The parts of a block's file, in order; its state is not copied. ValueError: the JSON would be too long."""
    shapes = {name: (buffer.dtype, buffer.shape) for name, buffer in block.buffers.items()}
    state = [block.buffers[name].octets for name in _order(shapes)]
    parts = [_opening(block.head, shapes), block.head.tokens.astype("<i8").tobytes(), *state]
    return [*parts, _checksum(parts, secret)]


def head_bytes(data: memoryview) -> int:
    """Bytes at the beginning of a file that are enough to decode its head. Damaged: this is no such beginning."""
    json_bytes = int.from_bytes(data[:8], "little")
    if json_bytes > MAX_JSON_BYTES or data[8 : 8 + len(_START)] != _START:
        raise Damaged("it is no stored block")
    return 8 + json_bytes + 8 * BLOCK_TOKENS


def decoded_head(data: memoryview, file_bytes: int) -> tuple[Head, int]:
    """The head of a file that begins with `data` and has this many bytes, and how many of them come before the state.

    Damaged: it is none, or `data` ends before its tokens do.
    """
    first = head_bytes(data) - 8 * BLOCK_TOKENS
    try:
        about, _ = json.JSONDecoder().raw_decode(str(data[8:first], "utf-8"), len(_START))
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise Damaged(f"it is {about['format']!r} version {about['version']!r}, not {FORMAT!r} version {VERSION!r}")
        if first + int(about["data_bytes"]) != file_bytes:
            raise Damaged(f"it has {file_bytes} bytes, and should have {first + int(about['data_bytes'])}")
        end = first + 8 * int(about["tokens"])
        if not first < end <= len(data):
            raise Damaged("its tokens are not all there")
        head = Head(
            kind=about["kind"],
            identity=Identity(bytes.fromhex(about["identity"]), about["model"]),
            namespace=about["namespace"],
            parent=bytes.fromhex(about["parent"]),
            start=int(about["start"]),
            tokens=np.frombuffer(data[first:end], "<i8").astype(np.int64),
            grid=int(about["grid"]),
            cut=int(about.get("cut", 0)),
        )
        if head.key != bytes.fromhex(about["key"]):
            raise Damaged("its key is not that of its tokens")
    except _WRONG as error:
        raise Damaged(f"its head cannot be read: {error!r}"[:200]) from error
    return head, end


def decoded(data: memoryview, secret: bytes | None = None, checksum: bytes | None = None) -> Block:
    """The block that a whole file holds; its buffers are views of `data`. Damaged: it is not as it was written.

    Args:
        checksum: of all before the one that it ends with, where that was found as it was read.
    """
    head, end = decoded_head(data, len(data))
    if not compare_digest(checksum or _checksum([data[:-CHECKSUM_BYTES]], secret), data[-CHECKSUM_BYTES:]):
        raise Damaged(
            "its checksum is wrong" if secret is None else "its checksum is wrong, or made with other secrets"
        )
    first = end - head.tokens.nbytes
    try:
        tensors = json.loads(bytes(data[8:first]))
        shapes = {name[6:]: _shape(each) for name, each in tensors.items() if name.startswith("state.")}
        is_same = _opening(head, shapes) == data[:first]
    except _WRONG as error:
        raise Damaged(f"its tensors cannot be read: {error!r}"[:200]) from error
    if not is_same:
        raise Damaged("its head is not written as heads are")
    buffers = {}
    for name in _order(shapes):
        dtype, shape = shapes[name]
        begin, end = end, end + shape_bytes(dtype, shape)
        buffers[name] = Buffer(data[begin:end], dtype, shape)
    return Block(head, buffers)


def _opening(head: Head, shapes: Shapes) -> bytes:
    """All that comes before the tokens."""
    tensors: dict[str, Any] = {}
    end = 0
    tokens = ("tokens", "int64", (len(head.tokens),))
    checksum = ("checksum", "uint8", (CHECKSUM_BYTES,))
    for name, dtype, shape in [tokens, *((f"state.{name}", *shapes[name]) for name in _order(shapes)), checksum]:
        begin, end = end, end + shape_bytes(dtype, shape)
        tensors[name] = {"dtype": DTYPES[dtype][0], "shape": shape, "data_offsets": [begin, end]}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "kind": head.kind,
        "model": head.identity.model,
        "identity": head.identity.digest.hex(),
        "namespace": head.namespace,
        "key": head.key.hex(),
        "parent": head.parent.hex(),
        "start": str(head.start),
        "tokens": str(len(head.tokens)),
        "grid": str(head.grid),
        "data_bytes": str(end),
    }
    if head.cut:
        about["cut"] = str(head.cut)
    text = json.dumps({"__metadata__": about, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"the head of a block takes {len(text)} bytes; wanted at most {MAX_JSON_BYTES}.")
    return len(text).to_bytes(8, "little") + text


def _order(shapes: Shapes) -> list[str]:
    """Larger elements first, so that each begins at a multiple of its size."""
    return sorted(shapes, key=lambda name: (-DTYPES[shapes[name][0]][1], name))


def _shape(tensor: Any) -> tuple[str, tuple[int, ...]]:
    shape = tuple(tensor["shape"])
    if len(shape) > 16 or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"shape {shape}")
    return _DTYPE_OF[tensor["dtype"]], shape


def _checksum(parts: Iterable[Any], secret: bytes | None) -> bytes:
    checksum = Checksum(secret)
    for part in parts:
        checksum.add(part)
    return checksum.value
