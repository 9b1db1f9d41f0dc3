"""Codec: the bytes of a stored block, a safetensors file. The first tensor is the tokens, the last one the checksum.

    8 bytes    length of the JSON
    JSON       {"__metadata__": {format, version, kind, key, parent, ...}, "tokens": ..., "state.NAME": ..., ...}
    tokens     int64
    state.*    raw bytes, larger elements first, then by name
    checksum   16 bytes over all before it: CRC-32, or keyed BLAKE2b

  K1  A block has one encoding: bytes that decode to a block are the bytes that `encode` makes of it.
  K2  Wrong bytes raise `Damaged` and nothing else. No size is trusted before it agrees with the size of the file.
  K3  The head can be read without the state, and is checked: its key must be the digest of its parent and tokens.
  K4  Only `decode` makes a block from stored bytes. It checks the checksum and the key.

A CRC-32 finds accidental damage only. A keyed checksum also proves that the writer had the secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest
from typing import Any
from zlib import crc32

import numpy as np

from radixcache.stores.block import BLOCK_TOKENS, DTYPES, Block, Buffer, Head, Identity, Place, Shapes, shape_bytes

FORMAT, VERSION = "radixcache-block", "1"
CHECKSUM_BYTES = 16
#: The most bytes of the JSON; a buffer takes about 100.
MAX_JSON_BYTES = 1 << 20

_START = b'{"__metadata__":'
_DTYPE_OF = {theirs: ours for ours, (theirs, _) in DTYPES.items()}
#: What may be raised while the JSON and numbers of a damaged file are read.
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class Damaged(Exception):  # noqa: N818  says what is wrong with a file, and never leaves the stores
    """These bytes are no block, or the wrong block."""


class Checksum:
    """CRC-32, or with a secret a keyed BLAKE2b, of the first `limit_bytes` of all parts that are added."""

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


def encode(block: Block, secret: bytes | None = None) -> list[Any]:
    """The parts of a file, in order; the state is not copied. ValueError: the JSON would be too long."""
    shapes = {name: (buffer.dtype, buffer.shape) for name, buffer in block.buffers.items()}
    state = [block.buffers[name].octets for name in _order(shapes)]
    parts = [_opening(block.head, shapes), block.head.tokens.astype("<i8").tobytes(), *state]
    return [*parts, _checksum(parts, secret)]


def head_bytes(data: memoryview) -> int:
    """How many bytes `decode_head` needs of a file that begins with `data`. Damaged: it is not a stored block."""
    json_bytes = int.from_bytes(data[:8], "little")
    if json_bytes > MAX_JSON_BYTES or data[8 : 8 + len(_START)] != _START:
        raise Damaged("it is not a stored block")
    return 8 + json_bytes + 8 * BLOCK_TOKENS


def decode_head(data: memoryview, file_bytes: int) -> tuple[Head, int]:
    """The head of a file with `file_bytes` that begins with `data`, and the offset of the state in the file.

    Damaged: `data` holds no head, or not all tokens.
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
            raise Damaged("some of its tokens are missing")
        head = Head(
            kind=about["kind"],
            identity=Identity(bytes.fromhex(about["identity"]), about["model"], about.get("maker", "")),
            namespace=about["namespace"],
            parent=bytes.fromhex(about["parent"]),
            start=int(about["start"]),
            tokens=np.frombuffer(data[first:end], "<i8").astype(np.int64),
            grid=int(about["grid"]),
            cut=int(about.get("cut", 0)),
        )
        if head.key != bytes.fromhex(about["key"]):
            raise Damaged("its key does not match its tokens")
    except _WRONG as error:
        raise Damaged(f"its head cannot be read: {error!r}"[:200]) from error
    return head, end


def decode(
    data: memoryview, secret: bytes | None = None, checksum: bytes | None = None, place: Place | None = None
) -> Block:
    """The block in the bytes of a whole file; its buffers are views of `data`. Damaged: the file is wrong.

    Args:
        checksum: of all bytes before the stored checksum, if the caller computed it while reading.
        place: the key and kind that the block must have; None: any.
    """
    head, end = decode_head(data, len(data))
    if not compare_digest(checksum or _checksum([data[:-CHECKSUM_BYTES]], secret), data[-CHECKSUM_BYTES:]):
        raise Damaged(f"its checksum is wrong{'' if secret is None else ', or it was made with another secret'}")
    if place is not None and head.place != place:
        raise Damaged("it has another block's name")
    first = end - head.tokens.nbytes
    try:
        tensors = json.loads(bytes(data[8:first]))
        shapes = {name[6:]: _shape(each) for name, each in tensors.items() if name.startswith("state.")}
        is_same = _opening(head, shapes) == data[:first]
    except _WRONG as error:
        raise Damaged(f"its tensors cannot be read: {error!r}"[:200]) from error
    if not is_same:
        raise Damaged("its head is not in the form that stores write")
    buffers = {}
    for name in _order(shapes):
        begin, end = end, end + shape_bytes(*shapes[name])
        buffers[name] = Buffer(data[begin:end], *shapes[name])
    return Block(head, buffers)


def _opening(head: Head, shapes: Shapes) -> bytes:
    """The length and the JSON: all bytes before the tokens."""
    tensors: dict[str, Any] = {}
    end = 0
    state = {f"state.{name}": shapes[name] for name in _order(shapes)}
    parts = {"tokens": ("int64", (len(head.tokens),)), **state, "checksum": ("uint8", (CHECKSUM_BYTES,))}
    for name, (dtype, shape) in parts.items():
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
    about |= {"cut": str(head.cut)} if head.cut else {}
    about |= {"maker": head.identity.maker} if head.identity.maker else {}
    text = json.dumps({"__metadata__": about, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"the head of a block takes {len(text)} bytes; wanted at most {MAX_JSON_BYTES}.")
    return len(text).to_bytes(8, "little") + text


def _order(shapes: Shapes) -> list[str]:
    """Names with the largest elements first, so that each buffer starts at a multiple of its element size."""
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
