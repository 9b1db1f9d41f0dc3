"""Blocks whose state follows from their key, so that a test sees whose state it got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.stores import disk_store, files
from radixcache.stores.block import Block, Buffer, Head, Identity, root_key, shape_bytes
from radixcache.stores.disk_store import DiskStore
from radixcache.stores.files import file_name
from radixcache.stores.index import Link

MODEL = Identity(b"digest of a model", "tiny")
GIB = 1 << 30
#: The modules that call the system.
CALLERS = (files, disk_store)


def stated(head: Head) -> Block:
    """The block with this head."""
    shapes = {"0.keys": ("bfloat16", (1, 2, len(head.tokens), 3)), "0.scale": ("float32", (len(head.tokens),))}
    if head.kind == "checkpoint":
        shapes = {"1.state": ("float16", (1, 5)), "1.offset": ("int64", ())}
    drawn = np.random.default_rng([*head.key, len(head.kind)])
    return Block(head, {name: Buffer(drawn.bytes(shape_bytes(*each)), *each) for name, each in shapes.items()})


def chain(
    tokens: Sequence[int], step: int = 4, namespace: str = "", grid: int = 0, identity: Identity = MODEL
) -> list[Block]:
    """The blocks of a sequence, `step` tokens each."""
    blocks, parent = list[Block](), root_key(identity, namespace)
    for start in range(0, len(tokens), step):
        ids = np.array(tokens[start : start + step], dtype=np.int64)
        blocks.append(stated(Head("block", identity, namespace, parent, start, ids, grid)))
        parent = blocks[-1].head.key
    return blocks


def checkpoint(block: Block) -> Block:
    """The checkpoint at the end of a block."""
    return stated(replace(block.head, kind="checkpoint"))


def is_right(block: Block) -> bool:
    """Whether a block has the state that is its own."""
    return content(block) == content(stated(block.head))


def content(block: Block) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (each.dtype, each.shape, each.octets.tobytes()) for name, each in block.buffers.items()}


def put_all(store: DiskStore, blocks: Iterable[Block]) -> None:
    """Put blocks one by one, each written before the next."""
    for block in blocks:
        store.put(block)
        assert store.flush(60)


def matched(store: DiskStore, tokens: Sequence[int], namespace: str = "", **options: Any) -> list[Link]:
    return store.match(MODEL, namespace, np.array(tokens, dtype=np.int64), **options)


def resumed(store: DiskStore, tokens: Sequence[int]) -> int:
    """Tokens of these that the store has and gives back right; it may give less, and never something else."""
    end = 0
    links = matched(store, tokens)
    for link, block in zip(links, store.read([(link.key, "block") for link in links]), strict=True):
        if block is None:
            break
        assert block.head.key == link.key
        assert block.head.tokens[: link.end - link.start].tolist() == list(tokens[link.start : link.end])
        assert is_right(block)
        end = link.end
    return end


def opened(path: Path, budget_bytes: int = GIB, **options: Any) -> DiskStore:
    return DiskStore(path, budget_bytes=budget_bytes, min_free_bytes=0, **options)


def stored(path: Path, *blocks: Block, **options: Any) -> None:
    with opened(path, **options) as store:
        put_all(store, blocks)


def file_of(path: Path, block: Block) -> Path:
    return path / file_name(block.head.key, block.head.kind)
