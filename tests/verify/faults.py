"""Faults in stored state, and what tests of verify ask of a cache that has one.

A fault is planted in a snapshot of the tree, in the live buffers of an idle slot, or in the code that writes and reads
snapshots. With verify=0 each of them changes the answer, so the fault matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray

from radixcache import PrefixCache, Session
from radixcache.adapters.span import SpanAdapter, SpanSnapshot
from radixcache.adapters.window import RotatingKVAdapter
from radixcache.verify import Part
from runner.models.tiny import VOCABULARY_LENGTH
from tests import inside
from tests.groups.cold import shared_model

STEP_SIZE = 16
#: What a planted fault must come to in the logits, relative to the largest.
MATTERS = 1e-3

_random = np.random.default_rng(5)
SYSTEM, TAIL_A, TAIL_B, TURN, OTHER = (
    _random.integers(0, VOCABULARY_LENGTH, length).tolist() for length in (40, 30, 30, 12, 50)
)
PROMPT_A, PROMPT_B = [*SYSTEM, *TAIL_A], [*SYSTEM, *TAIL_B]


def answer(session: Session, model: Any, reply: int = 3) -> list[NDArray[Any]]:
    """Prefill, and step through a reply that does not depend on the logits; all of these."""
    session.prefill(model, step_size=STEP_SIZE)
    logits = [session.step(model, session.prompt[-1:])]
    logits += [session.step(model, [token]) for token in range(reply)]
    return [np.array(each) for each in logits]


def serve(cache: PrefixCache, model: Any, prompt: list[int], **more: Any) -> list[NDArray[Any]]:
    with cache.begin(prompt, **more) as session:
        found = answer(session, model)
    cache.check()
    return found


#: By the id of a shared model, and tokens.
_cold: dict[tuple[int, tuple[int, ...]], list[NDArray[Any]]] = {}


def cold(model: Any, prompt: list[int]) -> list[NDArray[Any]]:
    key = id(model), tuple(prompt)
    if key not in _cold:
        _cold[key] = serve(PrefixCache(model), model, prompt)
    return _cold[key]


def same_bits(left: list[NDArray[Any]], right: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def far_apart(left: list[NDArray[Any]], right: list[NDArray[Any]]) -> bool:
    error = max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
    return not error < MATTERS * max(float(np.abs(b).max()) for b in right)


def spoilt(array: mx.array, index: Any = ...) -> mx.array:
    """The same array with one byte turned over: sign and exponent of the largest number under `index`."""
    values = np.array(array)
    part = values[index].copy()
    place = np.unravel_index(np.abs(part).argmax(), part.shape)
    part.view(np.uint8).reshape(*part.shape, 4)[(*place, 3)] ^= 0x82
    values[index] = part
    return mx.array(values)


def wrong_span(part: int) -> Callable[[PrefixCache], None]:
    """A wrong byte in a key (0) or a value (1) of the last layer with spans, in a snapshot at token 20."""

    def plant(cache: PrefixCache) -> None:
        node = next(n for n in inside.nodes(cache) if n.start <= 20 < n.end and n.payload.spans is not None)
        snapshot = [leaf for leaf in node.payload.spans.leaves if leaf is not None][-1]
        arrays = list(snapshot.segments[0])
        arrays[part] = spoilt(arrays[part], (0, slice(None), 20 - node.start))
        snapshot.segments[0] = tuple(arrays)

    return plant


def wrong_recurrent_state(cache: PrefixCache) -> None:
    """A wrong byte in the recurrent state behind the reply to PROMPT_A."""
    for node in inside.nodes(cache):
        checkpoint = node.payload.checkpoint
        if checkpoint is not None and checkpoint.offset == len(PROMPT_A) + 3:
            snapshot = [leaf for leaf in checkpoint.leaves if leaf is not None and isinstance(leaf.state, tuple)][-1]
            snapshot.state[0][-1] = spoilt(snapshot.state[0][-1])


def swapped_spans(cache: PrefixCache) -> None:
    """The ends of two conversations of the same length have each other's snapshots."""
    first, second = (n for n in inside.nodes(cache) if n.start == len(SYSTEM))
    one, two = first.payload.spans, second.payload.spans
    one.leaves, two.leaves = two.leaves, one.leaves


def swapped_checkpoints(cache: PrefixCache) -> None:
    """The ends of two conversations of the same length have each other's checkpoints."""
    ends = [n for n in inside.nodes(cache) if n.end in (len(PROMPT_A), len(PROMPT_A) + 3) and n.payload.checkpoint]
    for end in {node.end for node in ends}:
        first, second = (n.payload.checkpoint for n in ends if n.end == end)
        first.leaves, second.leaves = second.leaves, first.leaves


def swapped_windows(cache: PrefixCache) -> None:
    """Two conversations of the same length have each other's windows behind what they share."""
    found = {}
    for node in inside.nodes(cache):
        other = found.setdefault((node.start, node.end), node)
        if other is not node:
            other.payload.windows, node.payload.windows = node.payload.windows, other.payload.windows


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Snapshots are taken one token too late."""
    right = SpanAdapter.snapshot

    def wrong(self: Any, live: Any, start: int, end: int) -> SpanSnapshot | None:
        if start == 0:
            return right(self, live, start, end)
        found = right(self, live, start - 1, end - 1)
        return None if found is None else SpanSnapshot(start, end, found.segments)

    patch.setattr(SpanAdapter, "snapshot", wrong)


def wrong_offset(patch: pytest.MonkeyPatch) -> None:
    """A rotating cache is restored with an offset that is one token short."""
    right = RotatingKVAdapter.restore_stack

    def wrong(self: Any, caches: Any, snapshot: Any, target: int) -> bool:
        done = right(self, caches, snapshot, target)
        for cache in caches if done and target else ():
            cache.offset -= 1
        return done

    patch.setattr(RotatingKVAdapter, "restore_stack", wrong)


FAULTS = {
    "a byte of a key": ("llama", wrong_span(0), None, {Part.ROWS}),
    "a byte of a value": ("llama", wrong_span(1), None, {Part.ROWS}),
    "a byte of a recurrent state in a hybrid model": ("nemotron_h", wrong_recurrent_state, None, {Part.POINT}),
    "the offset of a rotating cache": ("llama_sliding", lambda cache: None, wrong_offset, {Part.OFFSET}),
    "swapped snapshots": ("llama", swapped_spans, None, {Part.ROWS}),
    "swapped checkpoints": ("mamba", swapped_checkpoints, None, {Part.POINT}),
    "swapped windows": ("llama_sliding", swapped_windows, None, {Part.WINDOW}),
    "a span stored one token off": ("llama", lambda cache: None, off_by_one, {Part.ROWS}),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind, plant, patch, parts = FAULTS[request.param]
    model = shared_model(kind)
    expected = cold(model, [*PROMPT_A, 0, 1, 2, *TURN])

    def make(**more: Any) -> PrefixCache:
        monkeypatch.undo()
        cache = PrefixCache(model, **more)
        serve(cache, model, PROMPT_A, marks=[len(SYSTEM)])
        with monkeypatch.context() as patched:
            if patch is off_by_one:
                patch(patched)
            serve(cache, model, PROMPT_B, marks=[len(SYSTEM)])
            serve(cache, model, OTHER)
        plant(cache)
        if patch is wrong_offset:
            patch(monkeypatch)
        return cache

    return model, make, parts, expected


def spoil_live(cache: PrefixCache, slot: int, row: int, layer: int = -1) -> None:
    """A wrong byte in a row of the live buffers of a slot."""
    leaf = [each for each in inside.paths(cache)[slot].caches if isinstance(each, KVCache)][layer]
    leaf.keys = spoilt(leaf.keys, (0, slice(None), row))
    mx.eval(leaf.keys)


class Hidden:
    """A model with something wrong beside its caches: the logits of what was restored are off.

    It notes the tokens of each pass, and the bytes of second states that a cache holds then.
    """

    def __init__(self, model: Any, cache: PrefixCache | None = None) -> None:
        self.model, self.cache = model, cache
        self.held: list[int] = []
        self.wrong: Callable[[Any], bool] = lambda cache: False
        self.passes: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.passes.append(int(tokens.shape[1]))
        if self.cache is not None:
            self.held.append(self.cache.stats.verify_bytes)
        wrong = self.wrong(cache)
        logits: mx.array = self.model(tokens, cache=cache)
        return logits + mx.arange(logits.shape[-1]) if wrong else logits
