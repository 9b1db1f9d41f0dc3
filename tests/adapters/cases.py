"""The table that the adapter suites run over: real mlx-lm caches, driven so that their arrays spell out tokens.

A `Kind` is a cache class with one way to feed it: `feed` is one forward pass, as a model would do it. Attention layers
get keys that hold the token's id in binary and values that hold its position; recurrent layers keep a digest of all
tokens so far. So `spelled` reads the tokens back, and `expected` says from plain ids what must be there.

A `Case` is a kind in a situation: the lengths of the forward passes that led to it. `can_cut`, `can_restore` and
`undoes_one` come from the contract, and what the buffers of a window hold from how mlx-lm cuts them; the adapters are
asked for none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    _BaseCache,
)
from numpy.typing import NDArray

from benchmarks.architectures.temporal import LayerCache
from radixcache import register_adapter
from radixcache.adapters.span import SpanAdapter
from radixcache.adapters.window import ChunkedKVAdapter

HEADS = 2
BITS = 32
WINDOW_LENGTH = 16
CHUNK_LENGTH = 16
GROUP_LENGTH = 4
CONVOLUTION_LENGTH = 3
DIGEST_LENGTH = 8
#: Tokens of a forward pass whose view is compared; the others see less of the same.
LOOKED_AT = 42
PRIME = 65_521

#: Forward passes that follow a situation; single tokens, batches, and batches longer than any window.
CONTINUATIONS = ((1,), (5,), (2, 1, 7, 1), (1, 40, 1, 1, 3), tuple([1] * 20))


def token_ids(count: int, seed: int = 0) -> list[int]:
    """`count` token ids; the same seed gives the same beginning for every count."""
    return _drawn_ids(seed)[:count]


@functools.cache
def _drawn_ids(seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 50_000, 4096).tolist()
    return drawn


# Attention layers


def attention_rows(ids: Sequence[int], start: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys (1, H, T, 32) that hold the ids in binary, values (1, H, T, 64) that hold positions and their complement.

    Both are slices of one array, as they are in a model that computes queries, keys and values in one product.
    """
    positions = np.arange(start, start + len(ids))
    heads = np.arange(HEADS)[:, None]
    keys, values = (_binary(2 * np.asarray(n)[None, :] + heads) for n in (ids, positions))
    fused = mx.array(np.concatenate([keys, values, 1 - values, np.zeros_like(keys)], axis=-1)[None]).astype(dtype)
    mx.eval(fused)
    return fused[..., :BITS], fused[..., BITS : 3 * BITS]


def spelled_rows(keys: mx.array, values: mx.array) -> NDArray[np.int64]:
    """Position and id of each row, (T, 2); all heads must tell the same."""
    rows = [a.astype(mx.float32) for a in (keys, values)]
    mx.eval(rows)
    key_bits, value_bits = (np.array(a)[0] > 0.5 for a in rows)
    assert np.array_equal(value_bits[..., :BITS], ~value_bits[..., BITS:]), "the halves of a value differ"
    numbers = [_numbers(bits[..., :BITS]) for bits in (value_bits, key_bits)]
    for head in range(HEADS):
        assert all(np.array_equal(n[head] - head, n[0]) for n in numbers), f"head {head} tells other tokens than head 0"
    return np.stack([n[0] // 2 for n in numbers], axis=-1)


def feed_attention(
    cache: Any, ids: Sequence[int], dtype: mx.Dtype = mx.float32, window_size: int | None = None
) -> list[Any]:
    """One forward pass; returns what each of its last tokens may attend to, as [position, id] in order of position.

    Long views come as bytes, which compare faster.
    """
    start, mask = cache.offset, None
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    else:
        mask = cache.make_mask(len(ids), return_array=True, window_size=window_size)
    keys, values = cache.update_and_fetch(*attention_rows(ids, start, dtype))
    rows = spelled_rows(_plain(cache, keys), _plain(cache, values))
    order = rows[:, 0].argsort(kind="stable")
    rows = rows[order]
    last = range(len(ids))[-LOOKED_AT:]
    if mask is None:
        views = [rows[rows[:, 0] <= start + index] for index in last]
    else:
        views = [rows[seen] for seen in np.array(mask).reshape(len(ids), -1)[last.start :, order]]
    return [view.tolist() if len(view) <= 64 else view.tobytes() for view in views]


def temporal_buffers(cache: Any) -> list[mx.array]:
    """What an attention layer holds, without spare room, oldest token first; a window cut to its length."""
    if cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        return [b[..., : cache.offset, :] for b in (*cache.keys, *cache.values)]
    if isinstance(cache, RotatingKVCache):
        return [_window(cache, b) for b in (cache.keys, cache.values)]
    filled = cache.offset - getattr(cache, "start_position", 0)
    first = max(0, filled - cache.chunk_size) if isinstance(cache, ChunkedKVCache) else 0
    return [b[..., first:filled, :] for b in (cache.keys, cache.values)]


def spelled_attention(cache: Any) -> list[tuple[int, int]]:
    """(position, id) of what an attention layer holds, oldest first."""
    buffers = temporal_buffers(cache)
    if not buffers or buffers[0].shape[2] == 0:
        return []
    half = len(buffers) // 2
    keys, values = buffers[:half], buffers[half:]
    plain = (_plain(cache, side if half > 1 else side[0]) for side in (keys, values))
    return [(position, token) for position, token in spelled_rows(*plain).tolist()]


def spelled_pieces(snapshot: Any) -> list[tuple[int, int]]:
    """(position, id) of every token in a snapshot of a window; each piece must have those that it says it has."""
    found: list[tuple[int, int]] = []
    for piece in snapshot.pieces:
        parts = piece.parts(piece.start, piece.end)
        rows = [row for _, _, pair in parts for row in spelled_rows(*pair).tolist()]
        assert [position for position, _ in rows] == list(range(piece.start, piece.end)), (piece.start, piece.end)
        found += [(position, token) for position, token in rows]
    return found


def all_tokens(ids: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """What a layer that forgets nothing holds."""
    return list(enumerate(ids))


def window_of(keep: int) -> Expected:
    """What is left of a window before the next forward pass: the first `keep` tokens and the newest."""

    def expected(ids: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        rows = list(enumerate(ids))
        return rows if len(rows) <= WINDOW_LENGTH else rows[:keep] + rows[len(rows) - WINDOW_LENGTH + keep :]

    return expected


def rotating_positions(lengths: Sequence[int], size: int, keep: int, held: Sequence[int] = ()) -> list[int]:
    """The tokens in the buffers of a RotatingKVCache that has `held`, after forward passes of `lengths`, in order.

    Every forward pass drops the oldest first, until one less than its size is left: in a full ring a single token takes
    the place of the oldest.
    """
    for length in lengths:
        surplus = max(0, len(held) - (size - 1))
        held = [*held[:keep], *held[keep + surplus :], *_next_positions(held, length)]
    return list(held)


def chunked_positions(lengths: Sequence[int], size: int, held: Sequence[int] = ()) -> list[int]:
    """The same of a ChunkedKVCache, which drops the oldest until its size is left."""
    for length in lengths:
        held = [*held[-size:], *_next_positions(held, length)]
    return list(held)


# Recurrent layers, and one that is neither


def digests(ids: Sequence[int], before: Sequence[int] = (0,) * DIGEST_LENGTH) -> NDArray[np.int32]:
    """Digest of all tokens up to each, (T, DIGEST_LENGTH): every earlier token changes every later digest."""
    rows = np.empty((len(ids), DIGEST_LENGTH), np.int64)
    row = np.asarray(before, np.int64)
    salt = np.arange(3, 3 + DIGEST_LENGTH)
    for index, token in enumerate(ids):
        row = (row * 31 + (token + 1) * salt) % PRIME
        rows[index] = row
    return rows.astype(np.int32)


def feed_arrays(cache: Any, ids: Sequence[int], break_off: bool = False) -> list[Any]:
    """A recurrent layer: slot 0 the last inputs of a convolution, slot 1 the digest; both views of activations."""
    mask = cache.make_mask(len(ids))
    tail = mx.zeros((1, CONVOLUTION_LENGTH, BITS)) if cache[0] is None else cache[0]
    inputs = mx.concatenate([tail, mx.array(_binary(np.asarray(ids))[None], mx.float32)], axis=1)
    mx.eval(inputs)
    cache[0] = inputs[:, -CONVOLUTION_LENGTH:]
    if break_off:
        return []
    before = (0,) * DIGEST_LENGTH if cache[1] is None else np.array(cache[1])[0].tolist()
    activations = mx.array(digests(ids, before)[None])
    mx.eval(activations)
    cache[1] = activations[:, -1]
    cache.advance(len(ids))
    return [_numbers(np.array(inputs)[0] > 0.5).tolist(), None if mask is None else np.array(mask).tolist()]


def spelled_arrays(cache: Any) -> Any:
    """The ids in the convolution, the digest, and what of the padding is left."""
    if cache[0] is None:
        return None
    padding = [None if a is None else a.tolist() for a in (cache.left_padding, cache.lengths)]
    return _numbers(np.array(cache[0])[0] > 0.5).tolist(), np.array(cache[1])[0].tolist(), padding


def recurrent(padding: Sequence[int] = (), lengths: Sequence[int] = ()) -> Expected:
    """What a recurrent layer holds, with what `advance` leaves of the padding and the lengths."""

    def expected(ids: Sequence[int], chunks: Sequence[int]) -> Any:
        if not ids:
            return None
        left = [[n - len(ids) for n in given] or None for given in (padding, lengths)]
        tail = ([0] * CONVOLUTION_LENGTH + list(ids))[-CONVOLUTION_LENGTH:]
        return tail, digests(ids)[-1].tolist(), left

    return expected


def padded_arrays_cache() -> Any:
    """An ArraysCache as batched generation leaves it: with padding and lengths, which `advance` changes in place."""
    cache = ArraysCache(2, left_padding=[3])
    cache.prepare(lengths=[4000])
    return cache


def feed_layer(cache: Any, ids: Sequence[int], break_off: bool = False) -> list[Any]:
    """deepseek_v41's layer: a window, latents of closed groups with index keys, and the rows of the open group."""
    fresh = mx.array(_binary(np.asarray(ids))[None], mx.float32)
    window = cache.update_window(fresh)
    if break_off:
        return []
    pending = fresh if cache.pending_kv is None else mx.concatenate([cache.pending_kv, fresh], axis=1)
    full = pending.shape[1] // GROUP_LENGTH * GROUP_LENGTH
    cache.pending_kv, cache.pending_gate = pending[:, full:], 1 - pending[:, full:]
    if full:
        closed = (pending[:, :full] + 0).reshape(1, -1, GROUP_LENGTH * BITS)
        old = cache.compress_kv
        cache.compress_kv = closed if old is None else mx.concatenate([old, closed], axis=1)
        cache.index_k = cache.compress_kv[..., ::-1] * 2
    mx.eval([a for a in vars(cache).values() if isinstance(a, mx.array)])
    return [_numbers(np.array(window)[0] > 0.5).tolist(), spelled_layer(cache)]


def spelled_layer(cache: Any) -> Any:
    """Ids in the window, in the closed groups (and from their index keys), and in the open group (and its gate)."""
    if cache.offset == 0:
        return None
    window, pending, gate = (_ids(a) for a in (cache.window, cache.pending_kv, 1 - cache.pending_gate))
    groups: list[list[int]] = [[], []]
    if cache.compress_kv is not None:
        groups = [_ids(a.reshape(1, -1, BITS)) for a in (cache.compress_kv, cache.index_k[..., ::-1] / 2)]
    return cache.offset, window, groups, pending, gate


def layer_tokens(ids: Sequence[int], lengths: Sequence[int]) -> Any:
    """What deepseek_v41's layer holds."""
    if not ids:
        return None
    full = len(ids) // GROUP_LENGTH * GROUP_LENGTH
    ids = list(ids)
    return len(ids), ids[-WINDOW_LENGTH:], [ids[:full], ids[:full]], ids[full:], ids[full:]


class DigestCache(_BaseCache):  # type: ignore[misc]
    """A class that no adapter is registered for, with a `state` of its own that holds everything. Writes in place."""

    def __init__(self) -> None:
        self.digest: mx.array | None = None
        self.offset = 0

    def update(self, ids: Sequence[int], break_off: bool = False) -> list[int]:
        if self.digest is None:
            self.digest = mx.zeros((1, DIGEST_LENGTH), mx.int32)
        before = [int(n) for n in np.array(self.digest)[0]]
        self.digest[0] = mx.array(digests(ids, before)[-1])
        if not break_off:
            self.offset += len(ids)
        return before

    @property
    def state(self) -> tuple[mx.array | None, int]:
        return self.digest, self.offset

    @state.setter
    def state(self, value: tuple[mx.array | None, int]) -> None:
        self.digest, self.offset = value


def spelled_digest(cache: Any) -> Any:
    return None if cache.digest is None else (cache.offset, np.array(cache.digest)[0].tolist())


# The table

Expected = Callable[[Sequence[int], Sequence[int]], Any]


@dataclass(frozen=True)
class Kind:
    """A cache class and one way to feed it."""

    name: str
    make: Callable[[], Any]
    feed: Callable[..., Any]  # one forward pass of these ids; returns what the layer saw, to be compared
    spelled: Callable[[Any], Any]  # the tokens in the cache
    expected: Expected  # the same from ids and the lengths of forward passes
    break_off: Callable[..., Any]  # a forward pass that raises before this layer is done
    is_point: bool = True
    held: Callable[[Sequence[int]], list[int]] | None = None  # of a window: the positions in its buffers

    @property
    def is_window(self) -> bool:
        return self.held is not None

    def fed(self, ids: Sequence[int], lengths: Sequence[int]) -> Any:
        """A cache that has seen `ids` in forward passes of `lengths`; it may share arrays until they are written."""
        return deepcopy(_fed(self, tuple(ids), tuple(lengths)))


@functools.cache
def _fed(kind: Kind, ids: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
    return feed_all(kind, kind.make(), ids, lengths)


def feed_all(kind: Kind, cache: Any, ids: Sequence[int], lengths: Sequence[int]) -> Any:
    """Run forward passes of `lengths` over the beginning of `ids`; returns the cache."""
    start = 0
    for length in lengths:
        kind.feed(cache, ids[start : start + length])
        start += length
    return cache


def _attention(
    name: str, make: Callable[[], Any], expected: Expected, dtype: mx.Dtype = mx.float32, **more: Any
) -> Kind:
    def feed(cache: Any, ids: Sequence[int]) -> Any:
        return feed_attention(cache, ids, dtype)

    return Kind(name, make, feed, spelled_attention, expected, break_off=feed, **more)


def _part(feed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cache, ids: feed(cache, ids, break_off=True)


KV = _attention("KVCache", KVCache, all_tokens, is_point=False)
KV_BFLOAT16 = _attention("KVCache-bfloat16", KVCache, all_tokens, mx.bfloat16, is_point=False)
CONCATENATE = _attention("ConcatenateKVCache", ConcatenateKVCache, all_tokens, is_point=False)
QUANTIZED_8 = _attention("QuantizedKVCache-8", lambda: QuantizedKVCache(32, 8), all_tokens, is_point=False)
ROTATING_0, ROTATING_4 = (
    _attention(
        f"RotatingKVCache-keep-{keep}",
        functools.partial(RotatingKVCache, WINDOW_LENGTH, keep=keep),
        window_of(keep),
        held=functools.partial(rotating_positions, size=WINDOW_LENGTH, keep=keep),
    )
    for keep in (0, 4)
)
CHUNKED = _attention(
    "ChunkedKVCache",
    lambda: ChunkedKVCache(CHUNK_LENGTH),
    window_of(0),
    held=functools.partial(chunked_positions, size=CHUNK_LENGTH),
)
ARRAYS = Kind("ArraysCache", lambda: ArraysCache(2), feed_arrays, spelled_arrays, recurrent(), _part(feed_arrays))
PADDED_ARRAYS = Kind(
    "ArraysCache-padded", padded_arrays_cache, feed_arrays, spelled_arrays, recurrent([3], [4000]), _part(feed_arrays)
)
LAYER = Kind(
    "LayerCache", lambda: LayerCache(WINDOW_LENGTH), feed_layer, spelled_layer, layer_tokens, _part(feed_layer)
)
DIGEST = Kind(
    "probed-DigestCache",
    DigestCache,
    lambda cache, ids: cache.update(ids),
    spelled_digest,
    lambda ids, lengths: (len(ids), digests(ids)[-1].tolist()) if ids else None,
    _part(lambda cache, ids, break_off: cache.update(ids, break_off)),
)


class KeptInEight(SpanAdapter):
    """SpanAdapter whose snapshots are quantized, as a tree with stored_bits has them."""

    def snapshot(self, cache: Any, start: int, end: int) -> Any:
        snapshot = super().snapshot(cache, start, end)
        return None if snapshot is None else snapshot.quantized(8)


class KeptInFour(ChunkedKVAdapter):
    """The same of a window."""

    def snapshot(self, cache: Any, start: int, end: int) -> Any:
        snapshot = super().snapshot(cache, start, end)
        return None if snapshot is None else snapshot.quantized(4)


class KVCacheInEight(KVCache):  # type: ignore[misc]
    """A class of its own, for its own adapter."""


class ChunkedKVCacheInFour(ChunkedKVCache):  # type: ignore[misc]
    """A class of its own, for its own adapter."""


register_adapter(KVCacheInEight, KeptInEight())
register_adapter(ChunkedKVCacheInFour, KeptInFour())
KV_IN_8 = _attention("KVCache-stored-in-8", KVCacheInEight, all_tokens, mx.bfloat16, is_point=False)
CHUNKED_IN_4 = _attention(
    "ChunkedKVCache-stored-in-4",
    lambda: ChunkedKVCacheInFour(CHUNK_LENGTH),
    window_of(0),
    held=functools.partial(chunked_positions, size=CHUNK_LENGTH),
)
SPAN_KINDS = (KV, KV_BFLOAT16, KV_IN_8, CONCATENATE, QUANTIZED_8)
KINDS = (*SPAN_KINDS, ROTATING_0, ROTATING_4, CHUNKED, CHUNKED_IN_4, ARRAYS, PADDED_ARRAYS, LAYER, DIGEST)


@dataclass(frozen=True)
class Case:
    """A kind after forward passes of `lengths`."""

    kind: Kind
    situation: str
    lengths: tuple[int, ...]
    can_cut: bool  # the live state can be rewound to any smaller offset
    undoes_one: bool = True  # roll_back works after a single-token forward pass; after a longer one it always does

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @property
    def ids(self) -> list[int]:
        return token_ids(self.length)

    @property
    def rest(self) -> list[int]:
        """Ids that follow, enough for every continuation."""
        return token_ids(self.length + 100)[self.length :]

    def cache(self) -> Any:
        return self.kind.fed(self.ids, self.lengths)

    def held(self) -> list[int]:
        """Positions of the tokens in the buffers of a window."""
        assert self.kind.held is not None
        return self.kind.held(self.lengths)

    def can_restore(self, target: int) -> bool:
        """Whether a snapshot of all that the cache holds has the state at an offset up to the end."""
        if self.kind.is_window:
            return {position for position, _ in self.kind.expected(self.ids[:target], [target])} <= set(self.held())
        return not self.kind.is_point or target == self.length

    def cut_targets(self) -> list[int]:
        """Offsets below the end, around every edge where something changes inside."""
        edges = {0, 1, 3, WINDOW_LENGTH, 256, 1024, self.length // 2, self.length}
        return sorted({t for e in edges for t in (e - 1, e, e + 1) if 0 <= t < self.length})

    def __str__(self) -> str:
        return f"{self.kind.name}-{self.situation}"


def _span_cases(kind: Kind) -> list[Case]:
    return [
        Case(kind, "one-token", (1,), True),
        Case(kind, "within-a-segment", (300, 1, 1), True),
        Case(kind, "exactly-full", (256,), True),
        Case(kind, "across-segments", (700, 1, 599), True),
    ]


def _rotating_cases(kind: Kind) -> list[Case]:
    ones = (1,)
    return [
        Case(kind, "unwrapped-batch", (10,), True),
        Case(kind, "unwrapped-mixed", (5, 1, 1, 3, 1), True),
        Case(kind, "just-full-singles", ones * 16, True, undoes_one=False),
        Case(kind, "wrapped-singles", ones * 23, False, undoes_one=False),
        Case(kind, "wrapped-one-batch-too-long", (40,), False),
        Case(kind, "wrapped-mixed", (10, 1, 12, 1, 1, 5, 1, 1, 1), False, undoes_one=False),
        Case(kind, "wrapped-batch-after-singles", (*ones * 20, 7), False),
    ]


CASES = [
    *(case for kind in (KV, KV_IN_8, CONCATENATE, QUANTIZED_8) for case in _span_cases(kind)),
    Case(KV_BFLOAT16, "across-segments", (700, 1, 599), True),
    *(case for kind in (ROTATING_0, ROTATING_4) for case in _rotating_cases(kind)),
    Case(CHUNKED, "untrimmed-batch", (10,), True),
    Case(CHUNKED, "untrimmed-exactly-full", (256,), True),
    Case(CHUNKED, "untrimmed-too-long", (40,), True),
    Case(CHUNKED, "trimmed-by-a-token", (40, 1), False),
    Case(CHUNKED, "trimmed-by-batches", (12, 9, 20), False),
    Case(CHUNKED_IN_4, "untrimmed-too-long", (40,), True),
    Case(CHUNKED_IN_4, "trimmed-by-batches", (12, 9, 20), False),
    *(Case(k, "batch", (30,), False) for k in (ARRAYS, PADDED_ARRAYS, LAYER, DIGEST)),
    *(Case(k, "mixed", (6, 1, 12, 1, 1), False) for k in (ARRAYS, PADDED_ARRAYS, LAYER, DIGEST)),
]
SPAN_CASES = [case for case in CASES if not case.kind.is_point]
WINDOW_CASES = [case for case in CASES if case.kind.is_window]
POINT_CASES = [case for case in CASES if case.kind.is_point and not case.kind.is_window]


# Comparing


def picture(thing: Any) -> Any:
    """Everything an object holds, bit for bit: to show that nothing changed, or that two are the same."""
    if isinstance(thing, mx.array):
        raw = thing.view(mx.uint16) if thing.dtype == mx.bfloat16 else thing
        return thing.shape, str(thing.dtype), np.array(raw).tobytes()
    if isinstance(thing, list | tuple):
        return [picture(item) for item in thing]
    if thing is None or isinstance(thing, int | float | str):
        return thing
    if isinstance(thing, dict):
        return {name: picture(value) for name, value in thing.items()}
    names = [field.name for field in fields(thing)] if is_dataclass(thing) else list(vars(thing))
    return {name: picture(getattr(thing, name)) for name in names}


def state_bits(kind: Kind, cache: Any) -> Any:
    """What a cache holds, bit for bit, whatever its spare room and its order in the buffer."""
    return picture(temporal_buffers(cache) if kind.spelled is spelled_attention else cache)


def _next_positions(held: Sequence[int], count: int) -> range:
    start = held[-1] + 1 if held else 0
    return range(start, start + count)


def _binary(numbers: NDArray[Any]) -> NDArray[np.float32]:
    octets = np.ascontiguousarray(numbers, "<u4")[..., None].view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").astype(np.float32)


def _numbers(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")[..., 0].astype(np.int64)


def _ids(array: mx.array) -> list[int]:
    return [int(n) for n in _numbers(np.array(array)[0] > 0.5)]


def _plain(cache: Any, state: Any) -> mx.array:
    if isinstance(cache, QuantizedKVCache):
        packed, scales, biases = state
        return mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)
    assert isinstance(state, mx.array)
    return state


def _window(cache: Any, buffer: mx.array) -> mx.array:
    ordered: mx.array = cache._temporal_order(buffer)
    surplus = ordered.shape[2] - cache.max_size
    if surplus <= 0:
        return ordered
    return mx.concatenate([ordered[..., : cache.keep, :], ordered[..., cache.keep + surplus :, :]], axis=2)
