"""Compare a disk store with plain file copies and with prefill.

The files lie in a temporary folder, or below --folder. The benchmark measures the disk of that folder. Run it with
OPENBLAS_NUM_THREADS=1. All times are medians.

    disk            put: close a session and write all its state; plain write: write and sync the same files.
                    get: read from the store into the tree; plain read: read the same files into memory. The page cache
                    is cold where the system allows it; a column says which. begin: get, then the copy into live
                    caches. prefill: the same tokens, estimated from CHUNKS of the chunks of 512 tokens.
                    The state is random data with the model's shapes.
    disk-folder     Open a folder of many blocks, look up keys, and match prompts.
    disk-choices    Does the cache choose the faster way? `read / prefill`: the time to read 1,024 tokens, divided by
                    the time to prefill them, at several disk speeds. Requests have mixed lengths, are prefilled 512
                    tokens a pass, and are each followed by a short turn. The requests that measure each speed first
                    do not count. wrong: read, although this made the request more than 10 % longer. missed:
                    prefilled, although reading was that much faster.
    disk-requests   begin, prefill, the last token's logits and close, with a store and without. `ratio`: the time with
                    a store divided by the time without, for each pair. All writes finish before the next
                    measurement; `misses` runs four requests without that wait. At "eviction", memory has room for a few
                    prompts, and a miss makes the cache write other prompts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.random_models import random_model
from benchmarks.harness.record import REPEATS, Spread, arguments, elapsed_ms, in_turns, publish, say
from benchmarks.harness.stored_state import (
    IDENTITY,
    LARGE_BYTES,
    PAGE_CACHE,
    Filler,
    SlowStore,
    files_in,
    fill,
    forget,
    opened,
    write_chains,
)
from radixcache import DiskStore, PrefixCache
from radixcache.stores.block import BLOCK_TOKENS
from runner.models.tiny import tiny_model

AIM_READ, AIM_REQUEST, WRONG = 0.7, 1.02, 1.1
#: (model, tokens) of the copies.
KINDS, TINY = ("kv", "sliding", "conv"), ("llama",)
SIZES = (("kv", 512), ("kv", 2048), ("kv", 8192), ("kv", 32000), ("sliding", 8192), ("conv", 8192))
QUICK_SIZES = tuple((kind, 600) for kind in KINDS)
CHUNKS = 3
#: Bytes of state in each block of the folder.
STATE_BYTES = 32 << 10
#: Read time divided by prefill time, and prompt lengths in tokens.
SLOWNESS = (0.5, 0.8, 1.25, 2.5)
LENGTHS = (256, 512, 1024, 2048)
MISS_TOKENS, TURN_TOKENS, SHORT_TURN_TOKENS = 256, 64, 20
MISSES = 4


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add_folder)
    with tempfile.TemporaryDirectory(prefix="radixcache-disk-", dir=options.folder) as name:
        folders = (Path(name) / str(number) for number in count())
        copies = list(_copies(folders, options.quick))
        about_folder = list(_folder(next(folders), options.quick))
        choices = list(_choices(next(folders), options.quick))
        requests = list(_requests(folders, options.quick))
    where = {"folder": options.results, "repeats": None}
    publish("disk", f"Speed of a disk store, page cache {PAGE_CACHE}, MB/s", copies, **where)
    publish("disk-folder", "Open a folder of many blocks, and look up blocks", about_folder, **where)
    publish("disk-choices", "Does the cache read from the disk only if that is faster?", choices, **where)
    about = conclusion(copies, choices, requests)
    publish("disk-requests", "A request with a disk store and without", requests, conclusion=about, **where)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="a folder on the disk to measure (default: a temporary folder)",
    )


def conclusion(
    copies: Sequence[dict[str, Any]], choices: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]
) -> str:
    slow = min(copies, key=lambda row: row["get / plain"])
    read = sum(row["get / plain"] >= AIM_READ for row in copies)
    dear = max(requests, key=lambda row: row["ratio"])
    within = sum(row["ratio"] <= AIM_REQUEST for row in requests)
    wrong, missed, asked = (sum(row[name] for row in choices) for name in ("wrong", "missed", "requests"))
    return (
        f"Speed of get, relative to a plain read, page cache {slow['page cache']}: {read} of {len(copies)} rows are at "
        f"least {AIM_READ:g}; the lowest is {slow['get / plain']:.2f} ({slow['model']}, {slow['tokens']:,} tokens). "
        f"Of {asked} requests at disk speeds close to prefill, {wrong} read although reading took over {WRONG - 1:.0%} "
        f"longer, and {missed} prefilled although prefill did. Time of a request with a store, relative to one without:"
        f" {within} of {len(requests)} rows are within {AIM_REQUEST:g}; the highest is {dear['ratio']:.3f} "
        f"({dear['model']}, {dear['write on']}, {dear['request']})."
    )


def _tokens(random: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in random.integers(1, 200, length)]


# Copies --------------------------------------------------------------------------------------------------------------


def _copies(folders: Iterator[Path], quick: bool) -> Iterator[dict[str, Any]]:
    models: dict[str, Any] = {}
    for kind, length in QUICK_SIZES if quick else SIZES:
        say(f"{kind}: {length:,} tokens to and from disk")
        if kind not in models:
            models[kind] = random_model(kind, small=quick)
        copying = Copying(models[kind], next(folders), length)
        yield {"model": kind, "tokens": length, **copying.figures(2 if quick else REPEATS)}
        shutil.rmtree(copying.path)


class Copying:
    """Write the state of `length` tokens to disk and read it back."""

    def __init__(self, model: Any, path: Path, length: int) -> None:
        self.model, self.path, self.filler = model, path, Filler(model)
        self.tokens = _tokens(np.random.default_rng(length), length)
        path.mkdir()
        self._put(path / "stored")
        self.files = files_in(path / "stored")
        self.megabytes = sum(file.stat().st_size for file in self.files) / 1e6

    def figures(self, repeats: int) -> dict[str, Any]:
        puts = in_turns(self.put_ms, self.write_ms, repeats)
        gets = in_turns(self.get_ms, self.read_ms, repeats)
        ratio = Spread.of(plain / get for (get, _), plain in gets)
        begin_ms, prefill_ms = statistics.median(begin for (_, begin), _ in gets), self.prefill_ms()
        return {
            "MB": self.megabytes,
            "put": self._speed(put for put, _ in puts),
            "plain write": self._speed(plain for _, plain in puts),
            "put / plain": statistics.median(plain / put for put, plain in puts),
            "page cache": PAGE_CACHE,
            "get": self._speed(get for (get, _), _ in gets),
            "plain read": self._speed(plain for _, plain in gets),
            "get / plain": ratio.median,
            "min to max": ratio.range,
            "begin ms": begin_ms,
            "prefill ms": prefill_ms,
            "begin / prefill": begin_ms / prefill_ms,
        }

    def _speed(self, times_ms: Iterable[float]) -> float:
        return self.megabytes / statistics.median(times_ms) * 1e3

    def put_ms(self) -> float:
        path = self.path / "again"
        took_ms = self._put(path)
        shutil.rmtree(path)
        return took_ms

    def _put(self, path: Path) -> float:
        with opened(path) as store, PrefixCache(self.model, budget_bytes=LARGE_BYTES, store=store) as cache:
            session = fill(cache, self.filler, self.tokens)
            return elapsed_ms(lambda: (session.close(), cache.flush()))

    def write_ms(self) -> float:
        contents, path = [file.read_bytes() for file in self.files], self.path / "plain"
        path.mkdir()
        took_ms = elapsed_ms(lambda: [_write(path / str(index), each) for index, each in enumerate(contents)])
        shutil.rmtree(path)
        return took_ms

    def get_ms(self) -> tuple[float, float]:
        """Return the times of get and of the whole begin."""
        keys, prompt = np.array(self.tokens), [*self.tokens, 1]
        store = opened(self.path / "stored")
        with store, PrefixCache(self.model, budget_bytes=LARGE_BYTES, store=store) as cache:
            tier, use = cache._core.tier, cache._core.next_use()
            assert tier is not None
            forget(self.files)
            with cache._core.lock:
                get_ms = elapsed_ms(lambda: tier.read("", lambda: (keys, use)))
            began = time.perf_counter()
            with cache.begin(prompt) as session:
                rest_ms = (time.perf_counter() - began) * 1e3
                assert session.cached_tokens == len(keys), (session.cached_tokens, cache.stats.store_decisions)
        return get_ms, get_ms + rest_ms

    def read_ms(self) -> float:
        forget(self.files)
        return elapsed_ms(lambda: [file.read_bytes() for file in self.files])

    def prefill_ms(self) -> float:
        """Estimate the prefill time of all tokens from some chunks."""
        chunks = -(-len(self.tokens) // BLOCK_TOKENS)
        starts = sorted({int(index) * BLOCK_TOKENS for index in np.linspace(0, chunks - 1, CHUNKS)})
        with PrefixCache(self.model, budget_bytes=LARGE_BYTES) as cache:
            fill(cache, self.filler, self.tokens, marks=starts[1:]).close()
            per_token_ms = [self._chunk_ms(cache, start) for start in starts]
        return statistics.mean(per_token_ms) * len(self.tokens)

    def _chunk_ms(self, cache: PrefixCache, start: int) -> float:
        """Return the time per token of one chunk's forward pass."""
        caches, remaining = cache.fetch(self.tokens[: start + 1])
        assert len(remaining) == 1, (len(remaining), start)
        chunk = self.tokens[start : start + BLOCK_TOKENS]
        return elapsed_ms(lambda: mx.eval(self.model(mx.array(chunk)[None], cache=caches))) / len(chunk)


def _write(file: Path, content: bytes) -> int:
    with file.open("wb", buffering=0) as out:
        written = out.write(content)
        os.fsync(out.fileno())
    return written


# A folder ------------------------------------------------------------------------------------------------------------


def _folder(path: Path, quick: bool) -> Iterator[dict[str, Any]]:
    blocks, length, asked, repeats = (200, 10, 20, 2) if quick else (20_000, 100, 1_000, REPEATS)
    say(f"a folder of {blocks:,} blocks")
    chains = write_chains(path, blocks, length, STATE_BYTES)
    files, random = files_in(path), np.random.default_rng(0)

    def open_ms(page_cache: str) -> float:
        if page_cache == "cold":
            forget(files)
        return elapsed_ms(lambda: opened(path).close())

    found = {
        (f"open, page cache {each}", blocks): [open_ms(each) for _ in range(repeats)]
        for each in dict.fromkeys((PAGE_CACHE, "warm"))
    }
    with opened(path) as store:
        known = [key for _, its in chains for key in its]
        keys = [known[index] for index in random.integers(0, blocks, asked // 2)]
        keys += [random.bytes(16) for _ in keys]
        prompts = [tokens for tokens, _ in chains[: asked // length]]
        found["are keys there? half of them are", asked] = [
            elapsed_ms(lambda: list(map(store.holds, keys))) for _ in range(repeats)
        ]
        found[f"match prompts of {length} blocks, by the block", asked] = [
            elapsed_ms(lambda: [store.match(IDENTITY, "", each) for each in prompts]) for _ in range(repeats)
        ]
    for (what, number), times_ms in found.items():
        spread = Spread.of(times_ms)
        yield {
            "what": what,
            "number": number,
            "ms": spread.median,
            "min to max": spread.range,
            "us each": spread.median / number * 1e3,
        }


# Choices -------------------------------------------------------------------------------------------------------------


def _choices(path: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each disk speed: what the cache chose, and how long both ways take."""
    speeds, lengths, count, repeats = ((0.1, 10.0), (64, 300), 4, 1) if quick else (SLOWNESS, LENGTHS, 24, 3)
    model, random = random_model("kv", small=True), np.random.default_rng(0)
    prompts = {length: _tokens(random, length + 1) for length in lengths}
    with opened(path) as store, PrefixCache(model, budget_bytes=LARGE_BYTES, store=store) as cache:
        for prompt in prompts.values():
            _serve(cache, model, prompt)
        token_bytes = cache._core.layout.token_bytes
    for slowness in speeds:
        say(f"a disk from which reading takes {slowness:g} times prefill")
        # Nothing is written: all state that is used twice is in the store already.
        store = SlowStore(path, budget_bytes=LARGE_BYTES, write_on="second_use")
        with store:
            middle = prompts[lengths[len(lengths) // 2]]
            prefill_ms = min(_way_ms(model, middle, None) for _ in range(3))
            store.bytes_per_s = token_bytes * len(middle) / (prefill_ms / 1e3 * slowness)
            takes = {length: _reading_by_prefill(model, prompt, store, repeats) for length, prompt in prompts.items()}
            asked = [lengths[index] for index in random.integers(0, len(lengths), count)]
            found = list(zip(asked, _chosen(model, store, asked, prompts), strict=True))
        yield {
            "read / prefill": slowness,
            "measured": Spread.of(takes.values()).range,
            "requests": len(found),
            "were read": sum(is_read for _, is_read in found),
            "wrong": sum(is_read and takes[length] > WRONG for length, is_read in found),
            "missed": sum(not is_read and takes[length] < 1 / WRONG for length, is_read in found),
        }


def _reading_by_prefill(model: Any, prompt: Sequence[int], store: DiskStore, repeats: int) -> float:
    """Divide the shortest read time by the shortest prefill time: other load on the machine only adds time."""
    pairs = in_turns(lambda: _way_ms(model, prompt, store), lambda: _way_ms(model, prompt, None), repeats)
    return min(read_ms for read_ms, _ in pairs) / min(prefill_ms for _, prefill_ms in pairs)


def _way_ms(model: Any, prompt: Sequence[int], store: DiskStore | None) -> float:
    """Time a whole request to a new cache. With a store it reads, because it has no speeds to compare yet."""
    with PrefixCache(model, budget_bytes=LARGE_BYTES, store=store) as cache:
        took_ms = elapsed_ms(lambda: _serve(cache, model, prompt))
        assert (cache.stats.brought_tokens > 0) == (store is not None), cache.stats
    return took_ms


def _serve(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> int:
    """Answer a prompt with one token; return the number of cached tokens."""
    with cache.begin(prompt) as session:
        session.prefill(model, step_size=BLOCK_TOKENS)
        mx.eval(session.step(model, prompt[-1:]))
        return session.cached_tokens


def _chosen(model: Any, store: DiskStore, lengths: Sequence[int], prompts: Mapping[int, list[int]]) -> list[bool]:
    """Return for each prompt whether it was read, after both speeds have been measured."""
    random, found = np.random.default_rng(1), []
    with PrefixCache(model, budget_bytes=LARGE_BYTES, store=store) as cache:
        _serve(cache, model, _tokens(random, max(lengths)))
        for length in [lengths[0], *lengths]:
            cache.clear()
            before_tokens = cache.stats.brought_tokens
            _serve(cache, model, prompts[length])
            found.append(cache.stats.brought_tokens > before_tokens)
            _serve(cache, model, [*prompts[length], *_tokens(random, SHORT_TURN_TOKENS)])
    return found[1:]


# Requests ------------------------------------------------------------------------------------------------------------


def _requests(folders: Iterator[Path], quick: bool) -> Iterator[dict[str, Any]]:
    for name in TINY if quick else (*TINY, *KINDS):
        model = tiny_model(name) if name in TINY else random_model(name)
        for write_on in ("close", "eviction"):
            say(f"{name}: requests with a store that is written at {write_on}")
            with opened(next(folders), write_on=write_on) as store:
                for request, pairs in _request_pairs(model, store, quick):
                    ratio = Spread.of(ours / theirs for (ours, _), (theirs, _) in pairs)
                    yield {
                        "model": name,
                        "write on": write_on,
                        "request": request,
                        "repeats": len(pairs),
                        "ms": statistics.median(ours for (ours, _), _ in pairs),
                        "without ms": statistics.median(theirs for _, (theirs, _) in pairs),
                        "ratio": ratio.median,
                        "min to max": ratio.range,
                        "begin and close add ms": statistics.median(ours - theirs for (_, ours), (_, theirs) in pairs),
                    }


def _request_pairs(model: Any, store: DiskStore, quick: bool) -> Iterator[tuple[str, list[Any]]]:
    """Yield each kind of request with its pairs of `Side.run` results: with a store, without."""
    few, many = (2, 2) if quick else (5, 15)
    sides = []
    for each in (store, None):
        random = np.random.default_rng(0)
        side = Side(
            PrefixCache(model, budget_bytes=LARGE_BYTES, store=each), model, random, _tokens(random, MISS_TOKENS)
        )
        side.run([side.conversation])
        if store.write_on == "eviction":
            ledger = side.cache._core._ledger
            ledger.budget_bytes = 3 * ledger.total_bytes
        sides.append(side)

    def pairs(repeats: int, prompts: Callable[[Side], list[list[int]]]) -> list[Any]:
        ours, theirs = sides
        return in_turns(lambda: ours.run(prompts(ours)), lambda: theirs.run(prompts(theirs)), repeats)

    yield "turn", pairs(many, lambda side: [side.turn()])
    yield "hit", pairs(many, lambda side: [list(side.conversation)])
    yield "miss", pairs(few, lambda side: [side.miss()])
    yield "misses", pairs(few, lambda side: [side.miss() for _ in range(MISSES)])
    for side in sides:
        side.cache.close()


@dataclass(frozen=True)
class Side:
    """A cache and its requests. Sides with the same seed send the same requests."""

    cache: PrefixCache
    model: Any
    random: np.random.Generator
    conversation: list[int]

    def run(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """Run requests without a pause; return their ms, and the part in begin and close."""
        times = [_request_ms(self.cache, self.model, prompt) for prompt in prompts]
        self.cache.flush()
        return sum(whole for whole, _ in times), sum(part for _, part in times)

    def miss(self) -> list[int]:
        return _tokens(self.random, MISS_TOKENS)

    def turn(self) -> list[int]:
        self.conversation.extend(_tokens(self.random, TURN_TOKENS))
        return list(self.conversation)


def _request_ms(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> tuple[float, float]:
    began = time.perf_counter()
    session = cache.begin(prompt)
    begun = time.perf_counter()
    session.prefill(model)
    mx.eval(session.step(model, prompt[-1:]))
    last = time.perf_counter()
    session.close()
    closed = time.perf_counter()
    return (closed - began) * 1e3, (begun - began + closed - last) * 1e3


if __name__ == "__main__":
    main()
