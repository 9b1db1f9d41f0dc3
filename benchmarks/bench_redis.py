"""Compare a Redis store with plain SET and GET of the same bytes, and compute the effect of a network link.

The server runs on the same machine behind a Unix socket, so no network is measured. All times are medians.

    redis             put: write all blocks; get: read, check and make buffers; plain: SET and GET of the same bytes
                      with the same client, one value after the other
    redis-keys        1,000 keys in one round trip, by the store and by plain STRLEN; a prompt of 200 blocks
    redis-break-even  computed: tokens/s over a link, by bytes of state per token, at most the best `get` above. If
                      prefill is slower, fetching is faster.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

import numpy as np
from redis import Redis

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import REPEATS, Spread, arguments, elapsed_ms, in_turns, publish, say
from benchmarks.harness.redis_process import Server
from radixcache import RedisStore
from radixcache.stores.block import BLOCK_TOKENS, Block, Buffer, Head, Identity, root_key
from radixcache.stores.codec import encode

MIB = 1 << 20
MODEL = Identity(b"bench")
#: (MiB per block, blocks).
SIZES, QUICK_SIZES = ((1, 128), (8, 32), (64, 8)), ((0.1, 4),)
KEYS, PROMPT_BLOCKS, STATE_BYTES = 1_000, 200, 64
#: 2 (keys and values) x layers x kv heads x head size x bytes per element.
TOKEN_BYTES = {
    "Qwen3-0.6B, bfloat16": 2 * 28 * 8 * 128 * 2,
    "Llama-3.1-8B, bfloat16": 2 * 32 * 8 * 128 * 2,
    "Llama-3.3-70B, bfloat16": 2 * 80 * 8 * 128 * 2,
}
LINKS_GBIT = (1, 10)


def main(given: Sequence[str] | None = None) -> None:
    options, program = arguments(__doc__, given), shutil.which("redis-server")
    if program is None:
        sys.exit("There is no redis-server here: apt-get install redis-server.")
    repeats, server = 2 if options.quick else REPEATS, Server(program)
    try:
        copies = [Copying(server.url, *size).figures(repeats) for size in (QUICK_SIZES if options.quick else SIZES)]
        keys = list(_keys(server.url, repeats))
    finally:
        server.end()
    even = list(_break_even(max(row["get MiB/s"] for row in copies)))
    where = {"folder": options.results, "repeats": repeats}
    publish("redis", "Speed of a Redis store, compared with plain SET and GET", copies, **where)
    publish("redis-keys", "Time of look-ups in Redis", keys, **where)
    publish(
        "redis-break-even",
        "Prefill speed up to which a network link is faster",
        even,
        conclusion=conclusion(copies, even),
        **where,
    )


def conclusion(copies: Sequence[dict[str, Any]], even: Sequence[dict[str, Any]]) -> str:
    slow = min(copies, key=lambda row: row["get / GET"])
    told = [f"{row['tokens/s']:,.0f} tokens/s at {row['link Gbit/s']} Gbit/s ({row['state']})" for row in even]
    return (
        f"Speed of get, relative to a plain GET: at least {slow['get / GET']:.2f} (blocks of {slow['block MiB']:g} "
        f"MiB). Fetching is faster than prefill up to these prefill speeds: {', '.join(told)}."
    )


def _blocks(count: int, nbytes: int) -> Iterator[Block]:
    """Yield a chain of blocks with random state."""
    random, parent = np.random.default_rng(nbytes), root_key(MODEL, "")
    for start in range(0, count * BLOCK_TOKENS, BLOCK_TOKENS):
        head = Head("block", MODEL, "", parent, start, random.integers(0, 1 << 16, BLOCK_TOKENS))
        yield Block(head, {"state": Buffer(random.bytes(nbytes), "uint8", (nbytes,))})
        parent = head.key


def _opened(url: str) -> RedisStore:
    return RedisStore(url, ttl_s=600, timeout_s=60, queue_bytes=1 << 40)


class Copying:
    """Write blocks to a server and read them back."""

    def __init__(self, url: str, block_mib: float, count: int) -> None:
        say(f"{count} blocks of {block_mib} MiB")
        self._blocks = list(_blocks(count, int(block_mib * MIB)))
        self._keys = [block.head.key for block in self._blocks]
        self._values = {f"bench:{index}": b"".join(encode(block)) for index, block in enumerate(self._blocks)}
        self._mib = sum(map(len, self._values.values())) / MIB
        self._about = {"block MiB": block_mib, "blocks": count}
        self._store, self._plain = _opened(url), Redis.from_url(url)

    def figures(self, repeats: int) -> dict[str, Any]:
        plain, values = self._plain, self._values
        puts = in_turns(self._put_ms, self._set_ms, repeats)
        gets = in_turns(self._read_ms, lambda: elapsed_ms(lambda: list(map(plain.get, values))), repeats)
        self._store.remove(self._keys)
        plain.delete(*values)
        row: dict[str, Any] = dict(self._about)
        for name, theirs, pairs in (("put", "SET", puts), ("get", "GET", gets)):
            row[f"{name} MiB/s"] = self._mib / Spread.of(ours for ours, _ in pairs).median * 1e3
            row[f"{theirs} MiB/s"] = self._mib / Spread.of(its for _, its in pairs).median * 1e3
            spread = Spread.of(its / ours for ours, its in pairs)
            row |= {f"{name} / {theirs}": spread.median, f"{name} / {theirs}, min to max": spread.range}
        return row

    def _put_ms(self) -> float:
        self._store.remove(self._keys)
        return elapsed_ms(lambda: (all(map(self._store.put, self._blocks)), self._store.flush()))

    def _set_ms(self) -> float:
        self._plain.delete(*self._values)
        return elapsed_ms(lambda: list(starmap(self._plain.set, self._values.items())))

    def _read_ms(self) -> float:
        return elapsed_ms(lambda: [len(each.buffers) for each in self._store.read([(k, "block") for k in self._keys])])  # type: ignore[union-attr]


def _keys(url: str, repeats: int) -> Iterator[dict[str, Any]]:
    plain, blocks = Redis.from_url(url).pipeline(transaction=False), list(_blocks(PROMPT_BLOCKS, STATE_BYTES))
    prompt, names = np.concatenate([block.head.tokens for block in blocks]), [f"bench:{key}" for key in range(KEYS)]
    with _opened(url) as known:
        assert all(map(known.put, blocks))
        known.flush()
        asked: dict[tuple[str, int], Callable[[], object]] = {
            ("keys as a store asks", KEYS): lambda: known._calls.ask([("HSTRLEN", name, "block") for name in names]),
            ("keys by plain STRLEN", KEYS): lambda: [plain.strlen(name) for name in names] and plain.execute(),
            ("a prompt of blocks, nothing known", PROMPT_BLOCKS): lambda: _opened(url).match(MODEL, "", prompt)[199],
            ("a prompt of blocks, all known", PROMPT_BLOCKS): lambda: known.match(MODEL, "", prompt)[199],
        }
        for (what, number), run in asked.items():
            run()
            spread = Spread.of(elapsed_ms(run) for _ in range(repeats))
            yield {"what": what, "number": number, "ms": spread.median, "min to max": spread.range}
        known.remove([block.head.key for block in blocks])


def _break_even(get_mib_per_s: float) -> Iterator[dict[str, Any]]:
    for state, token_bytes in TOKEN_BYTES.items():
        for gbit in LINKS_GBIT:
            bytes_per_s = min(gbit * 1e9 / 8, get_mib_per_s * MIB)
            about = {"state": state, "KiB/token": token_bytes / 1024, "link Gbit/s": gbit, "MiB/s": bytes_per_s / MIB}
            yield {**about, "tokens/s": bytes_per_s / token_bytes, "s for 8,192": 8192 * token_bytes / bytes_per_s}


if __name__ == "__main__":
    main()
