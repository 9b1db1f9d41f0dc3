"""Write state into a store without forward passes, and measure disks.

Also: a disk store with a set speed, files dropped from the page cache, and folders of many small blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from radixcache import DiskStore, PrefixCache
from radixcache.stores.block import BLOCK_TOKENS, Block, Buffer, Head, Identity, Kind, root_key
from radixcache.stores.codec import encode
from radixcache.stores.files import file_name
from radixcache.tokens import Keys

#: State of the page cache at a read: cold if the system can drop files from it.
PAGE_CACHE = "cold" if hasattr(os, "posix_fadvise") else "warm"
IDENTITY = Identity(b"a folder of many blocks")
LARGE_BYTES = 1 << 40


class Filler:
    """Callable as the model: writes random state of the model's shapes into the caches."""

    def __init__(self, model: Any) -> None:
        self._caches = make_prompt_cache(model)
        model(mx.zeros((1, 2), mx.int32), cache=self._caches)
        self._noise: dict[tuple[int, ...], mx.array] = {}

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        for theirs, ours in zip(cache, self._caches, strict=True):
            if isinstance(theirs, ArraysCache):
                for index, state in enumerate(ours.cache):
                    theirs[index] = self._drawn(state.shape) + 0.0
            else:
                theirs.update_and_fetch(*(self._rows(each, tokens.shape[1]) for each in (ours.keys, ours.values)))
        return mx.zeros((1, tokens.shape[1], 1))

    def _rows(self, buffer: mx.array, length: int) -> mx.array:
        return self._drawn((*buffer.shape[:2], length, buffer.shape[3]))

    def _drawn(self, shape: tuple[int, ...]) -> mx.array:
        if shape not in self._noise:
            self._noise[shape] = mx.random.normal(shape)
            mx.eval(self._noise[shape])
        return self._noise[shape]


class SlowStore(DiskStore):
    """A disk store with a limited read speed.

    Attributes:
        bytes_per_s: of state; 0: no limit.
    """

    bytes_per_s = 0.0

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        for block in super().read(wanted):
            if self.bytes_per_s and block is not None:
                time.sleep(block.nbytes / self.bytes_per_s)
            yield block


def opened(path: Path, kind: type[DiskStore] = DiskStore, write_on: Any = "close") -> Any:
    return kind(path, budget_bytes=LARGE_BYTES, write_on=write_on, min_free_bytes=0, queue_bytes=LARGE_BYTES)


def fill(cache: PrefixCache, filler: Filler, tokens: Sequence[int], marks: Sequence[int] = ()) -> Any:
    """Return a session at the end of these tokens; closing the session stores them."""
    session = cache.begin(tokens, marks=marks)
    session.prefill(filler, step_size=BLOCK_TOKENS)
    session.step(filler, tokens[-1:])
    mx.eval([each.state for each in session.caches])
    return session


def files_in(path: Path) -> list[Path]:
    return sorted(path.glob("??/*"))


def forget(files: Sequence[Path]) -> None:
    """Drop written files from the page cache, if the system supports this."""
    if PAGE_CACHE == "warm":
        return
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def write_chains(path: Path, count: int, length: int, state_bytes: int) -> list[tuple[Keys, list[bytes]]]:
    """Write `count` blocks in chains of `length`; return the tokens and keys of each chain."""
    opened(path).close()
    random = np.random.default_rng(0)
    state = {"state": Buffer(random.bytes(state_bytes), "uint8", (state_bytes,))}
    chains = []
    for _ in range(count // length):
        tokens, keys = random.integers(1, 1 << 17, length * BLOCK_TOKENS), [root_key(IDENTITY, "")]
        for start in range(0, len(tokens), BLOCK_TOKENS):
            head = Head("block", IDENTITY, "", keys[-1], start, tokens[start : start + BLOCK_TOKENS])
            file = path / file_name(head.key, "block")
            file.parent.mkdir(exist_ok=True)
            with file.open("wb") as out:
                out.writelines(encode(Block(head, state)))
            keys.append(head.key)
        chains.append((tokens, keys[1:]))
    os.sync()
    return chains
