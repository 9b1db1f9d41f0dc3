"""What decodes is what was encoded, bit by bit, and everything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from radixcache.stores import codec
from radixcache.stores.block import BLOCK_TOKENS, DTYPES, KINDS, Block, Buffer, Head, Identity, shape_bytes
from radixcache.stores.codec import Damaged, decode, encode
from tests.stores.made import chain, content

SECRET = b"0123456789abcdef"


def _bytes(block: Block, secret: bytes | None = None) -> bytes:
    return b"".join(map(bytes, encode(block, secret)))


def _signed(data: bytes) -> bytes:
    """With its checksum made right, as whoever can write into the folder can."""
    return data[:-16] + codec._checksum([data[:-16]], None)


def _is_refused(data: bytes, secret: bytes | None = None) -> bool:
    try:
        decode(memoryview(data), secret)
    except Damaged:
        return True
    return False


HEADS = st.builds(
    Head,
    kind=st.sampled_from(KINDS),
    identity=st.builds(Identity, st.binary(max_size=64), st.text(max_size=9)),
    namespace=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    parent=st.binary(min_size=16, max_size=16),
    start=st.integers(0, (1 << 63) - 1),
    tokens=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=5).map(
        lambda ids: np.array(ids, "i8")
    ),
    grid=st.integers(0, (1 << 63) - 1),
    cut=st.integers(0, BLOCK_TOKENS - 1),
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    buffers = {}
    for name in draw(st.lists(st.text(max_size=5), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
        nbytes = shape_bytes(dtype, shape)
        buffers[name] = Buffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, shape)
    return Block(draw(HEADS), buffers)


@given(blocks(), st.sampled_from([None, SECRET]))
@settings(max_examples=50)
def test_every_block_comes_back_as_it_was(block: Block, secret: bytes | None) -> None:
    data = _bytes(block, secret)
    found = decode(memoryview(data), secret)
    assert content(found) == content(block)
    assert (repr(found.head), found.head.key) == (repr(block.head), block.head.key)
    assert _bytes(found, secret) == data


def test_a_stored_file_is_one_of_safetensors(tmp_path: Path) -> None:
    block = chain([7, 8, 9])[0]
    path = tmp_path / "block.safetensors"
    path.write_bytes(_bytes(block))
    arrays = mx.load(str(path))
    assert arrays["tokens"].tolist() == [7, 8, 9]
    assert arrays["state.0.keys"].dtype == mx.bfloat16
    assert bytes(memoryview(arrays["state.0.keys"].view(mx.uint8))) == content(block)["0.keys"][2]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_file_that_is_flipped_cut_or_grown_anywhere_is_refused(secret: bytes | None) -> None:
    data = _bytes(chain([1, 2, 3])[0], secret)
    flipped = (data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data)))
    assert all(_is_refused(each, secret) for each in flipped)
    assert all(_is_refused(data[:length], secret) for length in range(len(data)))
    assert _is_refused(data + b"\0", secret)
    assert _is_refused(_signed(data + bytes(8)), secret)
    # What was written without the secret, or with another one, is refused too.
    assert not _is_refused(data, secret)
    assert all(_is_refused(data, other) for other in {None, SECRET, SECRET[::-1]} - {secret})


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: b"\x40" + bytes(7) + codec._START + rest))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    assert _is_refused(data)


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["1", "I64", "00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=50)
def test_a_head_that_was_tampered_with_and_signed_decodes_to_itself_or_not_at_all(data: st.DataObject) -> None:
    whole = _bytes(chain([1, 2, 3])[0])
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    at = data.draw(st.sampled_from([fields["__metadata__"], fields, fields["tokens"], fields["state.0.keys"]]))
    at[data.draw(st.sampled_from(sorted(at)))] = data.draw(VALUES)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    forged = _signed(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    try:
        found = decode(memoryview(forged))
    except Damaged:
        return
    assert _bytes(found) == forged


def test_a_lie_about_gigabytes_is_refused_before_anything_is_made_room_for() -> None:
    block = chain([1, 2, 3])[0]
    data = _bytes(block)
    for theirs, ours in ((b'"tokens":"3"', b'"tokens":"9999999999"'), (b'"shape":[3]', b'"shape":[99999999999]')):
        assert theirs in data
        assert _is_refused(_signed(data.replace(theirs, ours)))
    assert _is_refused((1 << 40).to_bytes(8, "little") + data[8:])
    with pytest.raises(Damaged, match="version '2'"):
        decode(memoryview(_signed(data.replace(b'"version":"1"', b'"version":"2"'))))


def test_what_no_file_can_hold_is_a_value_error() -> None:
    head = chain([1, 2, 3])[0].head
    for wrong in (
        lambda: Buffer(bytes(5), "float32", (2,)),
        lambda: Buffer(bytes(8), "float8", (8,)),
        lambda: replace(head, tokens=np.empty(0, np.int64)),
        lambda: replace(head, tokens=np.zeros(513, np.int64)),
        lambda: replace(head, parent=b"short"),
        lambda: replace(head, namespace="\ud800"),
        lambda: replace(head, identity=Identity(bytes(65))),
        lambda: encode(Block(replace(head, namespace="n" * (1 << 20)), {})),
    ):
        with pytest.raises(ValueError, match=r"wanted|takes"):
            wrong()
